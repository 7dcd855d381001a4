"""Checks hyperparameters with the application's own parser, before the job starts.

A wrong hyperparameter fails here, and not minutes into the job.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from sagemaker_lightning.contract.hyperparameters import flags
from sagemaker_lightning.launcher.services import Request

# The launchers pass their flags on to this program unchanged. The image has it, and a checkout,
# beside this package.
PROGRAM = "app/train.py"
ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (ROOT / PROGRAM).is_file()
LAUNCHERS = {"app/train_multi_node.py", "app/train_torchrun.py"}
# Seconds for a start of the program, which may have to wait until the image is pulled.
START_SECONDS = 300


def check(request: Request, where: str) -> list[str]:
    """Check a request's hyperparameters; return a line if that was not possible.

    Args:
        request: The request of CreateTrainingJob.
        where: Whose parser checks: "local" is this checkout's, "image" the image's; "no": nobody's.

    Raises ValueError with what the parser refuses.
    """
    hyperparameters = request.get("HyperParameters", {})
    environment = request.get("Environment", {})
    own_program = hyperparameters.get("sagemaker_program") or environment.get("SAGEMAKER_PROGRAM")
    if where == "no":
        return ["the hyperparameters, as --check-hyperparameters=no says"]
    if own_program and own_program not in LAUNCHERS:
        return [f"the hyperparameters: they are for a program of the job's own, {own_program}"]
    variables = channel_variables(request)
    if where == "image":
        return ask(
            in_image(request["AlgorithmSpecification"]["TrainingImage"], variables),
            hyperparameters,
            {},
        )
    if not IS_CHECKOUT:
        return [
            f"the hyperparameters: their parser, {PROGRAM}, is in a checkout of "
            "sagemaker-lightning, and not in this package; --check-hyperparameters=image asks the "
            "image"
        ]
    python = local_python()
    if not python:
        return [
            f"the hyperparameters: {sys.executable} lacks the application's packages; `make env` "
            "installs them, and --check-hyperparameters=image asks the image"
        ]
    return ask([python, str(ROOT / PROGRAM)], hyperparameters, variables)


def local_python() -> str | None:
    """Return a Python with the application's packages: this one, .venv's, or None."""
    if find_spec("pytorch_lightning") and find_spec("jsonargparse"):
        return sys.executable
    python = ROOT / ".venv/bin/python"
    return str(python) if (ROOT / ".venv/ready").exists() else None


def in_image(image: str, variables: dict[str, str]) -> list[str]:
    """Return the command that starts the program in the image.

    The container has no network, and no files besides the image's.
    """
    options = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    return [
        os.environ.get("DOCKER", "docker"),
        "run",
        "--rm",
        "--network=none",
        *options,
        image,
        "python",
        PROGRAM,
    ]


def ask(
    command: list[str], hyperparameters: dict[str, str], variables: dict[str, str]
) -> list[str]:
    """Run the program as far as its parser; return a line if it cannot be started.

    Args:
        command: The program.
        hyperparameters: What it gets as flags.
        variables: Additional environment variables.

    Raises ValueError if the program refuses a hyperparameter.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            process = subprocess.run(
                [*command, *flags(hyperparameters), "--print_config"],
                cwd=folder,
                env=environment | {"PYTHONPATH": str(ROOT)} | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=START_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return [f"the hyperparameters: {error}"]
    if process.returncode == 0:
        return []
    lines = (process.stderr.strip() or f"exit status {process.returncode}").splitlines()
    last = lines[-1]
    # The application's own error line: sagemaker_lightning/contract/failures.py.
    if last.startswith("error: "):
        raise ValueError(
            f"the application refuses a hyperparameter: {last.removeprefix('error: ')}"
        )
    # Docker's error line comes first; after it comes only where to find help.
    dockers = [line for line in lines if line.startswith("docker: ")]
    return [f"the hyperparameters: {(dockers or [last])[0]}"]


def channel_variables(request: Request) -> dict[str, str]:
    """Return the toolkit's variables for the channels, which decide --data's default."""
    names = [channel["ChannelName"] for channel in request.get("InputDataConfig", [])]
    folders = {f"SM_CHANNEL_{name.upper()}": f"/opt/ml/input/data/{name}" for name in names}
    return {"SM_CHANNELS": json.dumps(names)} | folders if names else {}
