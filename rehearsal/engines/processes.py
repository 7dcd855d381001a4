"""A job's hosts as processes of this machine, where no Docker engine answers: each in a PID namespace, whose
first process is the image's entrypoint.sh, as in a container; several hosts each in a network namespace, too."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rehearsal.api.errors import invalid
from rehearsal.engines import bridge
from rehearsal.jobs.layout import Layout
from rehearsal.jobs.logs import lines

ROOT = Path(__file__).resolve().parents[2]
# What `unshare --fork --kill-child --mount-proc` does, which in Debian 12 has status 1 for a first process that SIGKILL
# ended. The shell outside waits, and says nothing of a signal in the job's log.
WAIT = 'exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); exit $?'
INSIDE = ["setpriv", "--pdeathsig=KILL", "sh", "-c", 'mount -t proc proc /proc && exec "$@"', "sh"]
# As the first process of the namespace: the job's names are put in place, FastFile channels made read-only; then it
# becomes the command.
PREPARE = """
[[ -z $1 ]] || mount --bind "$1" /etc/hosts || exit 1
shift
while [[ $1 != -- ]]; do mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 1; shift; done
shift
exec "$@"
"""
# What follows it: the program gets the job's variables, and nothing before it does. They come by the standard input, as
# others can read a command line.
LAUNCH = """
import json, os, sys
variables = json.load(sys.stdin.buffer)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execve(sys.argv[1], sys.argv[1:], variables)
"""


class Processes:
    """What stands in for an engine; `python` is the environment that the application needs: .venv's."""

    name = "processes"

    def __init__(self, python: Path, owner: str, note_process: Callable[[int], None]) -> None:
        self.python, self.note_process = python, note_process
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self.unshare = ["unshare", "--pid", "--mount", *user, "sh", "-c", WAIT, "sh", *INSIDE]
        if not python.exists():
            raise ValueError(f"--engine=processes: {python} is not there; make env makes it")
        if (
            not shutil.which("unshare")
            or subprocess.run([*self.unshare, "true"], capture_output=True).returncode
        ):
            raise ValueError(
                "--engine=processes: found no PID namespaces (unshare), which only Linux has"
            )
        self.net = bridge.Bridge(owner) if bridge.possible() else None
        self.bridge = self.net and self.net.address

    def image(self, uri: str) -> str:
        """Return the image: there is none, the application of this checkout runs."""
        return uri

    def network(self, job: str, instances: int, isolated: bool) -> "Network":
        """Return what holds the processes of a job."""
        return Network(self, instances)

    def refuse(self, instances: int, request: dict) -> list[str]:
        """Raise Refused for a job that needs containers; return what is different without them."""
        without = "No Docker engine answers, so the rehearsal runs jobs as processes"
        if instances > 1 and self.net is None:
            raise invalid(
                f"{without}: found {instances} instances, allowed is 1 for who is not root or has "
                "no iproute2"
            )
        algorithm = request["AlgorithmSpecification"]
        asked = request | {
            name: algorithm.get(name) for name in ("ContainerEntrypoint", "ContainerArguments")
        }
        for name in ("ContainerEntrypoint", "ContainerArguments", "EnableNetworkIsolation"):
            if asked.get(name):
                raise invalid(f"{without}: {name} needs containers")
        found = [
            "no Docker engine: the application of this checkout runs, not "
            f"{algorithm['TrainingImage']}"
        ]
        return found + (
            ["the hosts reach each other and this endpoint, nothing else"] if instances > 1 else []
        )


class Network:
    """The hosts of a job: one in this machine's own network, or several on the bridge."""

    def __init__(self, engine: Processes, instances: int) -> None:
        self.engine, self.several = engine, instances > 1
        self.interface = "eth0" if self.several else "lo"
        self.processes: list[Process] = []
        self.spaces: list[str] = []

    def start(
        self, host, number, image, command, layout: Layout, read_only: list, variables: dict
    ) -> "Process":
        """Start a host."""
        enter, names = (
            self._join(host, layout.folder.parent / "hosts") if self.several else ([], "")
        )
        bound = [str(layout.channel(name)) for name in read_only]
        told = {
            "PATH": f"{self.engine.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SAGEMAKER_BASE_DIR": str(layout.folder),
            "SAGEMAKER_PROGRAM": os.environ.get("SAGEMAKER_PROGRAM", "app/train_multi_node.py"),
            "SAGEMAKER_TRAINING_MODULE": "sagemaker_lightning.launch.toolkit_hook:main",
            "HOME": os.environ.get("HOME", "/"),
        }
        # -p: the entry point's own shell takes no file of commands from its environment (BASH_ENV), nor functions.
        program = [
            "--",
            sys.executable,
            "-I",
            "-S",
            "-c",
            LAUNCH,
            "/bin/bash",
            "-p",
            ROOT / "entrypoint.sh",
            "train",
        ]
        line = [
            *enter,
            *self.engine.unshare,
            "bash",
            "-c",
            PREPARE,
            "bash",
            names,
            *bound,
            *program,
        ]
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(told | variables).encode())
            given.seek(0)
            outer = subprocess.Popen(
                line,
                env={"PATH": os.environ["PATH"]},
                cwd=layout.folder,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        self.engine.note_process(outer.pid)
        self.processes.append(Process(outer))
        return self.processes[-1]

    def _join(self, host: str, names: Path) -> tuple[list[str], str]:
        """Put a host on the bridge; return what enters its namespace, and the file with all hosts' names."""
        space, address = self.engine.net.host()
        self.spaces.append(space)
        with names.open("a") as file:
            file.write("" if file.tell() else f"127.0.0.1 localhost {socket.gethostname()}\n")
            file.write(f"{address} {host}\n")
        return ["nsenter", f"--net=/run/netns/{space}"], str(names)

    def close(self) -> None:
        """End what is left of it."""
        for process in self.processes:
            process.remove()
        while self.spaces:
            bridge.ip("netns", "delete", self.spaces.pop())


class Process:
    """A running host."""

    def __init__(self, outer: subprocess.Popen) -> None:
        self.outer = outer

    def lines(self) -> Iterator[str]:
        """Yield what it prints, line by line, until it ends."""
        return lines(iter(lambda: self.outer.stdout.read1(2**16), b""))

    def wait(self) -> int:
        """Return its exit status when it has ended: as a shell has it, 128 and the number of a signal that ended it."""
        status = self.outer.wait()
        return status if status >= 0 else 128 - status

    def signal(self, name: str) -> None:
        """Send SIGTERM or SIGKILL to the first process of the namespace; nothing, if it has ended."""
        if (first := self._first()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, getattr(signal, name))

    def remove(self) -> None:
        """Leave nothing of it: with the first process, the kernel ends all others of the namespace."""
        self.outer.kill()
        self.outer.wait()

    def _first(self) -> int | None:
        """Return the namespace's first process: the only child of the shell that waits for it."""
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")
        while self.outer.poll() is None:
            try:
                if found := children.read_text().split():
                    return int(found[0])
            except OSError:
                return None
            time.sleep(0.01)
        return None
