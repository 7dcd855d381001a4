"""The hyperparameters against the application's own parser: a wrong one should fail here, not minutes into the job."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from sagemaker_lightning.contract.hyperparameters import flags

ROOT = Path(__file__).resolve().parent.parent

# The launchers hand their flags on to this program as they are.
PROGRAM, LAUNCHERS = "app/train.py", {"app/train_multi_node.py", "app/train_torchrun.py"}
SECONDS = 300  # for a start of the program; pulling the image may come before


def check(request: dict, where: str) -> list[str]:
    """Ask the parser `where` (local, image, no); ValueError says what it refuses, a line why it was not asked."""
    hyperparameters = request.get("HyperParameters", {})
    environment = request.get("Environment", {})
    own = hyperparameters.get("sagemaker_program") or environment.get("SAGEMAKER_PROGRAM")
    if where == "no":
        return ["the hyperparameters, as --check-hyperparameters=no says"]
    if own and own not in LAUNCHERS:
        return [f"the hyperparameters: they are for a program of the job's own, {own}"]
    variables = channel_variables(request)
    if where == "image":
        return ask(
            in_image(request["AlgorithmSpecification"]["TrainingImage"], variables),
            hyperparameters,
            {},
        )
    python = local_python()
    if not python:
        return [
            f"the hyperparameters: {sys.executable} lacks the application's packages; `make env` "
            "installs them, and --check-hyperparameters=image asks the image"
        ]
    return ask([python, str(ROOT / PROGRAM)], hyperparameters, variables)


def local_python() -> str | None:
    """Return a Python that has the application's packages: this one, or the one of .venv; None if there is none."""
    if find_spec("pytorch_lightning") and find_spec("jsonargparse"):
        return sys.executable
    python = ROOT / ".venv/bin/python"
    return str(python) if (ROOT / ".venv/ready").exists() else None


def in_image(image: str, variables: dict[str, str]) -> list[str]:
    """Return the command that starts the program in the image, without a network and with no other files."""
    given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    return [
        os.environ.get("DOCKER", "docker"),
        "run",
        "--rm",
        "--network=none",
        *given,
        image,
        "python",
        PROGRAM,
    ]


def ask(
    command: list[str], hyperparameters: dict[str, str], variables: dict[str, str]
) -> list[str]:
    """Run the program as far as its parser; ValueError if it refuses, a line if it could not be started."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*command, *flags(hyperparameters), "--print_config"],
                cwd=folder,
                env=environment | {"PYTHONPATH": str(ROOT)} | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return [f"the hyperparameters: {error}"]
    if done.returncode == 0:
        return []
    lines = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()
    last = lines[-1]
    # the application's own line: sagemaker_lightning/contract/failures.py
    if last.startswith("error: "):
        raise ValueError(
            f"the application refuses a hyperparameter: {last.removeprefix('error: ')}"
        )
    # after it comes only where to find help
    dockers = [line for line in lines if line.startswith("docker: ")]
    return [f"the hyperparameters: {(dockers or [last])[0]}"]


def channel_variables(request: dict) -> dict[str, str]:
    """Return what the toolkit says of the channels: the default of --data depends on it."""
    names = [channel["ChannelName"] for channel in request.get("InputDataConfig", [])]
    folders = {f"SM_CHANNEL_{name.upper()}": f"/opt/ml/input/data/{name}" for name in names}
    return {"SM_CHANNELS": json.dumps(names)} | folders if names else {}
