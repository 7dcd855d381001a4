"""Removes everything that a run of the tests leaves behind, however the run ended.

    python tests/support/sweeper.py RUN IMAGE    tests/conftest.py starts it, and holds its input

It waits for the run's last line, or for the end of its input, and then sweeps. The first line of
the input is the run's folder; a run that comes to its end says so in a second line.

A killed run tears no fixture down. The run's processes have its number in their environment, or are
below a process that has it. Its containers and networks have the number as their label, or a mount
from the run's folder. For a rehearsal (rehearsal) whose folder is in the run's folder, it ends what
the next rehearsal would end. It also removes the mounts in the run's folder. It needs only the
standard library.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

RUN_VARIABLE = "SAGEMAKER_LIGHTNING_TEST_RUN"
DONE_LINE = "done"
ROOT = Path(__file__).resolve().parents[2]
END_ORPHANS = """
import docker
from sagemaker_rehearsal.owner import Owner
try:
    client = docker.from_env()
except docker.errors.DockerException:
    client = None
owner = Owner()
owner.end_orphans(client)
owner.close(client)
"""


def labels() -> list[str]:
    """Return the docker client's flags that label what this run makes; [] outside a run."""
    run = os.environ.get(RUN_VARIABLE)
    return [f"--label={RUN_VARIABLE}={run}"] if run else []


def processes(run: str) -> list[int]:
    """Return the run's processes, and those below them, without this one.

    The run's processes have its number in their environment.
    """
    members = set()
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            number = int(folder.name)
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(number)
            if f"{RUN_VARIABLE}={run}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                members.add(number)
    members.discard(os.getpid())
    ordered = list(members)
    for number in ordered:  # the list grows meanwhile
        ordered += [child for child in children.get(number, []) if child not in members]
        members.update(children.get(number, []))
    return ordered


def end_processes(run: str) -> None:
    """Kill all processes that are left of a run."""
    for _ in range(20):  # a process may have started another one just before it was killed
        if not (remaining := processes(run)):
            break
        for number in remaining:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def remove_containers(run: str, image: str, folder: str) -> None:
    """Remove the containers and networks of a run.

    Containers of `image` that mount something below `folder` count, too.
    """
    docker = os.environ.get("DOCKER", "docker")

    def ask(*words: str) -> list[str]:
        with suppress(OSError):
            return subprocess.run(
                [docker, *words], capture_output=True, text=True, timeout=120
            ).stdout.split()
        return []

    label = f"--filter=label={RUN_VARIABLE}={run}"
    sources = "--format={{range .Mounts}}{{.Source}} {{end}}"
    of_image = ask("ps", "--all", "--quiet", f"--filter=ancestor={image}")
    containers = {
        container
        for container in of_image
        if any(path.startswith(folder) for path in ask("inspect", sources, container))
    }
    containers |= {*ask("ps", "--all", "--quiet", label)}
    networks = {
        name
        for container in containers
        for name in ask(
            "inspect",
            "--format={{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}",
            container,
        )
    }
    if containers:
        ask("rm", "--force", "--volumes", *containers)
    for name in {*networks, *ask("network", "ls", "--quiet", label)} - {"bridge", "host", "none"}:
        ask("network", "rm", name)


def end_rehearsals(folder: Path) -> None:
    """End what killed rehearsals in a folder have left behind.

    That is containers, processes, their networks, and folders.
    """
    for path in folder.rglob("sagemaker-lightning-rehearsal"):
        python = ROOT / ".venvs/rehearsal/bin/python"
        variables = os.environ | {"XDG_CACHE_HOME": str(path.parent)}
        with suppress(OSError):
            subprocess.run(
                [python, "-c", END_ORPHANS],
                cwd=ROOT,
                env=variables,
                capture_output=True,
                timeout=120,
            )


def unmount(folder: str) -> None:
    """Unmount everything below a folder, the last mount first."""
    targets = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for target in reversed([target for target in targets if target.startswith(f"{folder}/")]):
        with suppress(OSError):
            subprocess.run(["umount", "--lazy", target], capture_output=True, timeout=120)


if __name__ == "__main__":
    # They come from the terminal, or are sent to the group, that ends the run.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = sys.stdin.readline().strip()
    # Do not read to the end: a forked data worker may hold the pipe, too.
    ended = sys.stdin.readline().strip() == DONE_LINE
    end_processes(sys.argv[1])
    if folder and not ended:
        remove_containers(*sys.argv[1:], folder)
        end_rehearsals(Path(folder))
        unmount(folder)
