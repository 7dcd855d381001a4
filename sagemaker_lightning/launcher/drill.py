"""Drills a job here, by sagemaker_lightning.drill, before it costs anything."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sagemaker_lightning.launcher import hyperparameter_check, job_request
from sagemaker_lightning.launcher.hyperparameter_check import IS_CHECKOUT, ROOT
from sagemaker_lightning.launcher.services import Request

DRILL_COMMAND = ("-m", "sagemaker_lightning.drill", "--", "train")
# Docker's default of 64 MiB is too small for data workers.
SHARED_MEMORY_FLAG = "--shm-size=2g"
GPU_FLAGS = ("--gpus=all",) if Path("/dev/nvidiactl").exists() else ()


def run(request: Request, where: str, data: Mapping[str, str]) -> None:
    """Drill the job of a request on this machine.

    Args:
        request: The request of CreateTrainingJob.
        where: "image" to drill in the job's image; else in this checkout.
        data: By the channel's name, the folder on this machine that stands for the channel.

    Raises ValueError if the job is not exact, or cannot be drilled.
    """
    channels = {channel["ChannelName"]: channel for channel in request.get("InputDataConfig", [])}
    for name, channel in channels.items():
        if name not in data or not Path(data[name]).is_dir():
            raise ValueError(
                f"--drill-data: found {data.get(name, 'none')} for the channel {name}, which is at "
                f"{job_request.address(channel)}; give {name}=FOLDER, a folder with some of it on "
                "this machine"
            )
    if unknown := sorted(data.keys() - channels.keys()):
        raise ValueError(
            f"--drill-data: found {unknown[0]}, expected the channels: "
            f"{', '.join(channels) or 'none'}"
        )
    with tempfile.TemporaryDirectory() as base:
        config = Path(base, "input/config/hyperparameters.json")
        config.parent.mkdir(parents=True)
        config.write_text(json.dumps(request.get("HyperParameters", {})))
        variables = request.get("Environment", {})
        if where == "image":
            image = request["AlgorithmSpecification"]["TrainingImage"]
            variables_file = Path(base, "variables")
            variables_file.write_text(_env_file_text(variables))
            command = in_image(image, config.parent, data, variables_file)
            environment = dict(os.environ)
        else:
            command, environment = here(Path(base), data, variables)
        print(f"drilling on one host: {' '.join(command)}", file=sys.stderr, flush=True)
        try:
            status = subprocess.run(
                command, cwd=base, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr
            ).returncode
        except OSError as error:
            raise ValueError(f"--drill: {error}") from None
    if status:
        raise ValueError(
            "--drill: the job is not exact, or cannot be drilled, as said above; nothing was "
            "started"
        )


def _env_file_text(variables: Mapping[str, str]) -> str:
    """Return the text of an --env-file of Docker's; ValueError if a value is several lines."""
    for name, value in variables.items():
        if "\n" in value or "\r" in value:
            raise ValueError(
                f"--drill: found a line break in the variable {name}, which docker run cannot be "
                "given in a file; leave the variable out, or drill in this checkout"
            )
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def in_image(image: str, config: Path, data: Mapping[str, str], variables_file: Path) -> list[str]:
    """Return the command that drills in the image.

    Args:
        image: Its address.
        config: The folder with hyperparameters.json, mounted at /opt/ml/input/config.
        data: The folder of each channel, mounted below /opt/ml/input/data.
        variables_file: Has the job's own environment variables, as NAME=VALUE lines. They may be
            secret, and others can read a command line.
    """
    mounts = {str(config): "/opt/ml/input/config"} | {
        data[name]: f"/opt/ml/input/data/{name}" for name in data
    }
    options = [
        word for source, target in mounts.items() for word in ("--volume", f"{source}:{target}:ro")
    ]
    return [
        os.environ.get("DOCKER", "docker"),
        "run",
        "--rm",
        SHARED_MEMORY_FLAG,
        *GPU_FLAGS,
        *options,
        f"--env-file={variables_file}",
        image,
        "python",
        *DRILL_COMMAND,
    ]


def here(
    base: Path, data: Mapping[str, str], variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that drills this checkout's application, and its environment.

    Args:
        base: The folder that stands for /opt/ml; links to the channels' folders are made in it.
        data: The folder of each channel.
        variables: The job's own environment variables.

    Raises ValueError if no Python has the application's packages.
    """
    if not IS_CHECKOUT:
        raise ValueError(
            "--drill: the application to drill is in a checkout of sagemaker-lightning, and not in "
            "this package; --check-hyperparameters=image drills in the image"
        )
    python = hyperparameter_check.local_python()
    if not python:
        raise ValueError(
            f"--drill: {sys.executable} lacks the application's packages; `make env` installs "
            "them, and --check-hyperparameters=image drills in the image"
        )
    for name, folder in data.items():
        link = base / "input/data" / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(folder)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")]))
    variables_of_job = {
        "PYTHONPATH": path,
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_lightning.launch.toolkit_hook:main",
    }
    return [python, *DRILL_COMMAND], inherited | {
        "SAGEMAKER_PROGRAM": "app/train_multi_node.py"
    } | variables_of_job | dict(variables)
