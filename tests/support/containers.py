"""A Docker engine for the tests: the image, and containers that are removed by id.

`python3 tests/support/containers.py` builds the image. CI does so while it makes the Python
environment.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import sweeper

ROOT = Path(__file__).resolve().parents[2]
DOCKER = os.environ.get("DOCKER", "docker")
IMAGE_TAG = os.environ.get("SAGEMAKER_LIGHTNING_TEST_IMAGE_TAG", "sagemaker-lightning-test")
STAND_INS = (ROOT / "tests/image/base.sh", ROOT / "tests/image/miniconda_stand_in.sh")
# Checkouts with other stand-ins do not take each other's base.
BASE_TAG = (
    "sagemaker-lightning-base:"
    + (hashlib.sha256(b"".join(path.read_bytes() for path in STAND_INS)).hexdigest()[:12])
)


def docker(*arguments: str, timeout: float = 600, **options) -> subprocess.CompletedProcess:
    """Run the docker client and return it with both its streams in `stdout`.

    Containers and networks that it makes have the label of the run of the tests.
    """
    command_words = (
        1 if arguments[0] == "run" else 2 if arguments[:2] == ("network", "create") else 0
    )
    command = [
        DOCKER,
        *arguments[:command_words],
        *(sweeper.labels() if command_words else []),
        *arguments[command_words:],
    ]
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        **options,
    )


@functools.cache
def no_engine() -> str | None:
    """Return None if a Docker engine answers, else the reason."""
    if not shutil.which(DOCKER):
        return f"there is no {DOCKER} command"
    info = docker("info")
    return None if info.returncode == 0 else info.stdout.strip().splitlines()[-1]


def build_variables() -> dict[str, str]:
    """Return the variables for scripts/build_image.sh: the stand-ins, if we can make them.

    With debootstrap, stand-ins for the base image and Miniconda come in through the Dockerfile's
    own build arguments: tests/image/base.sh. Without debootstrap there are no stand-ins, and the
    build needs a registry and a conda host.
    """
    if not shutil.which("debootstrap") or os.environ.get("BASE_IMAGE"):
        return {}
    script = str(ROOT / "tests/image/base.sh")
    subprocess.run([script, BASE_TAG], check=True)
    printed = subprocess.check_output(
        ["bash", "-c", f'eval "$({script} --print-args {BASE_TAG})" && env -0'], text=True
    )
    build_environment = dict(line.split("=", 1) for line in printed.split("\0") if line)
    return {
        key: value
        for key, value in build_environment.items()
        if os.environ.get(key) != value and key not in ("_", "SHLVL")
    }


def copy_checkout(folder: Path) -> None:
    """Copy the files that git tracks, in their present state."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def build(
    tag: str, source: Path = ROOT, *flags: str, **variables: str
) -> subprocess.CompletedProcess:
    """Build the image as `make build` does, with flags of `docker build`."""
    return subprocess.run(
        ["make", "-C", str(source), "build", f"IMAGE={tag}", f"FLAGS={' '.join(flags)}"],
        env=os.environ | {"DOCKER": DOCKER} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )


if __name__ == "__main__":
    done = build(IMAGE_TAG, **build_variables())
    sys.exit(done.stdout[-3000:] if done.returncode else 0)
