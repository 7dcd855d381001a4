"""Leaves nothing of a run of the tests, however it ended: waits for its last line, or for the end of its input, and
sweeps.

    python tests/sweeper.py RUN IMAGE       started by tests/conftest.py, which holds the other end of the pipe

A run that is killed tears no fixture down. What it started has its number in the environment (processes), or is of its
image and has folders of its own mounted (containers); networks of theirs go, too. The run's folder is the first line of
the standard input; a run that comes to its end says so there. Standard library only.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

VARIABLE = "SAGEMAKER_LIGHTNING_TEST_RUN"
DONE = "done"


def processes(run: str) -> list[int]:
    """Return the processes that have the run's number in their environment, this one left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{VARIABLE}={run}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [number for number in found if number != os.getpid()]


def end_processes(run: str) -> None:
    """Kill all that is left of a run's processes."""
    for _ in range(20):  # what is killed may just have started something
        if not (left := processes(run)):
            break
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def remove_containers(image: str, folder: str) -> None:
    """Remove an image's containers that have something below `folder` mounted, and the networks that they are on."""
    docker = os.environ.get("DOCKER", "docker")

    def ask(*line: str) -> list[str]:
        with suppress(OSError):
            return subprocess.run([docker, *line], capture_output=True, text=True, timeout=120).stdout.split()
        return []

    of_image = ask("ps", "--all", "--quiet", f"--filter=ancestor={image}")
    sources = "--format={{range .Mounts}}{{.Source}} {{end}}"
    containers = [one for one in of_image if any(path.startswith(folder) for path in ask("inspect", sources, one))]
    networks = {
        name
        for one in containers
        for name in ask("inspect", "--format={{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}", one)
    }
    if containers:
        ask("rm", "--force", "--volumes", *containers)
    for name in networks - {"bridge", "host", "none"}:
        ask("network", "rm", name)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of the terminal, or the group, that ends the run
        signal.signal(number, signal.SIG_IGN)
    folder = sys.stdin.readline().strip()
    ended = sys.stdin.readline().strip() == DONE  # not to its end: a forked data worker may hold the pipe, too
    end_processes(sys.argv[1])
    if folder and not ended:
        remove_containers(sys.argv[2], folder)
