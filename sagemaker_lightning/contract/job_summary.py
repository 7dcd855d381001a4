"""Describes a job in the log before it starts: hosts, devices, data, settings.

It shows no secrets.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.hyperparameters import is_own

# The most files of a channel that we count. A channel that is streamed from S3 may have millions.
MAX_COUNTED_FILES = 100_000
MASK = "******"
HIDDEN_VARIABLES = "SAGEMAKER_LIGHTNING_HIDDEN_VARIABLES"
"""The variable of a job that names, with commas, those whose values are shown nowhere."""
SECRET_NAME = re.compile(
    r"secret|password|passwd|token|credential|api[-_.]?key|(private|access)[-_.]?key", re.IGNORECASE
)
# AWS key id, AWS secret key, a PEM block, tokens of GitHub, Hugging Face, OpenAI and Slack, a JWT,
# user:password or a token in a URL.
SECRET_VALUE = re.compile(
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|(?<![\w/+])[\w/+]{40}(?![\w/+=])|-----BEGIN"
    r"|\b(gh[pousr]_|github_pat_|hf_|sk-|xox[bpas]-)\w{10}|\beyJ[\w-]{10}|://[^/\s@]+@"
)


def hidden_variables(environment: Mapping[str, str] | None) -> set[str]:
    """Return the names of a job's environment variables whose values are shown nowhere."""
    named = (environment or {}).get(HIDDEN_VARIABLES, "").split(",")
    return set(named).intersection(environment or {})


def masked(name: str, value: object) -> str:
    """Return a hyperparameter's value as text, or MASK if it may be a secret.

    Its name or the value itself may look like that of a secret.
    """
    return MASK if SECRET_NAME.search(name) or SECRET_VALUE.search(str(value)) else str(value)


def lines(
    environment: SageMakerEnvironment, program: str, hyperparameters: Mapping[str, object]
) -> Iterator[str]:
    """Yield the lines of the summary.

    They name hosts, devices, channels with files and bytes, the program, and hyperparameters.

    Args:
        environment: Describes the job and this host.
        program: The program and its launcher, in words.
        hyperparameters: The job's hyperparameters; those for the toolkit are left out.
    """
    hosts = (
        f"{host} (this one)" if host == environment.current_host else host
        for host in environment.hosts
    )
    yield f"hosts: {', '.join(hosts)}"
    yield f"devices: {environment.num_gpus} GPUs, {os.cpu_count()} CPUs"
    for name, folder in environment.channels.items():
        yield f"channel {name}: {folder}, {_count_files(folder)}"
    if not environment.channels:
        yield "channels: none"
    yield f"program: {program}"
    for name in filter(is_own, sorted(hyperparameters)):
        yield f"hyperparameter {name}: {masked(name, hyperparameters[name])}"


def _count_files(folder: Path) -> str:
    """Return the number of files below `folder` and their bytes, in words."""
    files = 0
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if files == MAX_COUNTED_FILES:
                return f"more than {MAX_COUNTED_FILES} files"
            files += 1
            # A Path for each file takes ten times as long.
            size += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH116, PTH118
    return f"{files} files, {size} bytes"
