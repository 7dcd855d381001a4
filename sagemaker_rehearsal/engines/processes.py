"""Runs a job's hosts as processes of this machine, where no Docker engine answers.

Each host is a PID namespace, whose first process is the image's entrypoint.sh, as in a container.
If there are several hosts, each has a network namespace, too.
"""

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
from importlib.resources import files
from pathlib import Path

from sagemaker_rehearsal.aws.errors import invalid
from sagemaker_rehearsal.engines import bridge
from sagemaker_rehearsal.jobs.layout import Layout
from sagemaker_rehearsal.jobs.logs import lines

ENTRYPOINT = Path(str(files("sagemaker_lightning.launch") / "entrypoint.sh"))
# The program of a job that names none. Only a checkout has it, beside this package.
PROGRAM = "app/train_multi_node.py"
ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (ROOT / PROGRAM).is_file()
# Does what `unshare --fork --kill-child --mount-proc` does. In Debian 12, that has status 1 if
# SIGKILL ended the first process. The outer shell waits, and writes nothing about a signal to the
# job's log.
WAIT = 'exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); exit $?'
# Whoever is started so ends with the one that has started it: a killed rehearsal leaves no host. It
# comes after unshare, as a change of credentials takes it back.
WITH_PARENT = ["setpriv", "--pdeathsig=KILL"]
INSIDE = [*WITH_PARENT, "sh", "-c", 'mount -t proc proc /proc && exec "$@"', "sh"]
# Runs as the first process of the namespace. It puts the file with the hosts' names in place and
# makes FastFile channels read-only; then it becomes the command.
PREPARE = """
[[ -z $1 ]] || mount --bind "$1" /etc/hosts || exit 1
shift
while [[ $1 != -- ]]; do
    mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 1
    shift
done
shift
exec "$@"
"""
# Runs after that. It gives the program the job's variables, and no other program gets them. They
# come by the standard input, because others can read a command line.
LAUNCH = """
import json, os, sys
variables = json.load(sys.stdin.buffer)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execve(sys.argv[1], sys.argv[1:], variables)
"""


def job_python() -> Path:
    """Return the Python of the jobs: that of REHEARSAL_PYTHON, the checkout's, or this one."""
    default = ROOT / ".venv/bin/python" if IS_CHECKOUT else sys.executable
    return Path(os.environ.get("REHEARSAL_PYTHON", default))


class Processes:
    """Stands in for an engine; `python` has what jobs run with."""

    name = "processes"

    def __init__(self, python: Path, owner: str, note_process: Callable[[int], None]) -> None:
        self.python = python
        self.note_process = note_process
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        outside = [*WITH_PARENT, "sh", "-c", WAIT, "sh"]
        self.unshare = ["unshare", "--pid", "--mount", *user, *outside, *INSIDE]
        if not python.exists():
            maker = "make env makes it" if IS_CHECKOUT else "REHEARSAL_PYTHON names another"
            raise ValueError(f"--engine=processes: {python} is not there; {maker}")
        for name in () if IS_CHECKOUT else ("sagemaker_lightning", "sagemaker_training"):
            found = [python, "-c", f"import importlib.util as i; i.find_spec({name!r}) or exit(1)"]
            if subprocess.run(found, cwd="/", capture_output=True).returncode:
                raise ValueError(
                    f"--engine=processes: {python}, which runs the jobs, has no {name}; install "
                    "this package with the extra `toolkit` there, and torch and Lightning, or name "
                    "another Python by REHEARSAL_PYTHON"
                )
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
        """Return `uri`: there is no image."""
        return uri

    def network(self, job: str, instances: int, isolated: bool) -> "Network":
        """Return an object that holds the processes of a job."""
        return Network(self, instances)

    def refuse(self, instances: int, request: dict) -> list[str]:
        """Return notes on what differs without containers; Refused if the job needs them."""
        explanation = "The rehearsal runs jobs as processes, without Docker"
        if instances > 1 and self.net is None:
            raise invalid(
                f"{explanation}: found {instances} instances, expected 1: more than one needs "
                "root and iproute2"
            )
        algorithm = request["AlgorithmSpecification"]
        needs = request | {
            name: algorithm.get(name) for name in ("ContainerEntrypoint", "ContainerArguments")
        }
        for name in ("ContainerEntrypoint", "ContainerArguments", "EnableNetworkIsolation"):
            if needs.get(name):
                raise invalid(f"{explanation}: {name} needs containers")
        if not (IS_CHECKOUT or os.environ.get("SAGEMAKER_PROGRAM") or _names_program(request)):
            raise invalid(
                f"{explanation}, and only a checkout of sagemaker-lightning has an application: "
                "found no program of the job's own; give the hyperparameters sagemaker_program and "
                "sagemaker_submit_directory"
            )
        program = "the application of this checkout" if IS_CHECKOUT else "the job's own program"
        notes = [f"jobs run as processes: {program} runs, not {algorithm['TrainingImage']}"]
        return notes + (
            ["the hosts reach each other and this endpoint, nothing else"] if instances > 1 else []
        )


def _names_program(request: dict) -> bool:
    """Return whether a job names the program that it runs."""
    hyperparameters = request.get("HyperParameters") or {}
    variables = request.get("Environment") or {}
    return "sagemaker_program" in hyperparameters or "SAGEMAKER_PROGRAM" in variables


class Network:
    """The hosts of a job: one in this machine's own network, or several on the bridge."""

    def __init__(self, engine: Processes, instances: int) -> None:
        self.engine = engine
        self.several = instances > 1
        self.interface = "eth0" if self.several else "lo"
        self.processes: list[Process] = []
        self.spaces: list[str] = []

    def start(
        self, host, number, image, command, layout: Layout, read_only: list, variables: dict
    ) -> "Process":
        """Start a host, with the parameters of containers.Network.start.

        `number`, `image` and `command` are ignored.
        """
        enter, hosts_file = (
            self._join_bridge(host, layout.folder.parent / "hosts") if self.several else ([], "")
        )
        read_only_folders = [str(layout.channel(name)) for name in read_only]
        host_variables = {
            "PATH": f"{self.engine.python.parent}:{os.environ['PATH']}",
            "SAGEMAKER_BASE_DIR": str(layout.folder),
            "SAGEMAKER_TRAINING_MODULE": "sagemaker_lightning.launch.toolkit_hook:main",
            "HOME": os.environ.get("HOME", "/"),
        }
        if program := os.environ.get("SAGEMAKER_PROGRAM", PROGRAM if IS_CHECKOUT else ""):
            host_variables["SAGEMAKER_PROGRAM"] = program
        # Elsewhere, the Python of the jobs has the package itself: this folder's other packages
        # would take the place of its own.
        if IS_CHECKOUT:
            host_variables["PYTHONPATH"] = str(ROOT)
        # -p: the entry point's own shell takes no commands file (BASH_ENV) and no functions from
        # its environment.
        start = [
            "--",
            sys.executable,
            "-I",
            "-S",
            "-c",
            LAUNCH,
            "/bin/bash",
            "-p",
            ENTRYPOINT,
            "train",
        ]
        command_line = [
            *enter,
            *self.engine.unshare,
            "bash",
            "-c",
            PREPARE,
            "bash",
            hosts_file,
            *read_only_folders,
            *start,
        ]
        with tempfile.TemporaryFile() as variables_file:
            variables_file.write(json.dumps(host_variables | variables).encode())
            variables_file.seek(0)
            outer = subprocess.Popen(
                command_line,
                env={"PATH": os.environ["PATH"]},
                cwd=layout.folder,
                stdin=variables_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        self.engine.note_process(outer.pid)
        self.processes.append(Process(outer))
        return self.processes[-1]

    def _join_bridge(self, host: str, hosts_file: Path) -> tuple[list[str], str]:
        """Put a host on the bridge.

        Returns the command that enters its namespace, and the file with the names of all hosts.
        """
        space, address = self.engine.net.host()
        self.spaces.append(space)
        with hosts_file.open("a") as file:
            file.write("" if file.tell() else f"127.0.0.1 localhost {socket.gethostname()}\n")
            file.write(f"{address} {host}\n")
        return ["nsenter", f"--net=/run/netns/{space}"], str(hosts_file)

    def close(self) -> None:
        """End the processes that are left, and remove the namespaces."""
        for process in self.processes:
            process.remove()
        while self.spaces:
            bridge.ip("netns", "delete", self.spaces.pop())


class Process:
    """A host's processes."""

    def __init__(self, outer: subprocess.Popen) -> None:
        self.outer = outer

    def lines(self) -> Iterator[str]:
        """Yield the output line by line, until the host ends."""
        return lines(iter(lambda: self.outer.stdout.read1(2**16), b""))

    def wait(self) -> int:
        """Wait for the host's end; return its exit status.

        As in a shell, it is 128 plus the number of a signal that ended the host.
        """
        status = self.outer.wait()
        return status if status >= 0 else 128 - status

    def signal(self, name: str) -> None:
        """Send SIGTERM or SIGKILL to the namespace's first process, if it still runs."""
        if (first := self.first_process()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, getattr(signal, name))

    def remove(self) -> None:
        """Kill the host.

        When the first process of the namespace ends, the kernel ends all others.
        """
        self.outer.kill()
        self.outer.wait()

    def first_process(self) -> int | None:
        """Return the namespace's first process: the only child of the waiting shell.

        None if the host has ended.
        """
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")
        while self.outer.poll() is None:
            try:
                if pids := children.read_text().split():
                    return int(pids[0])
            except OSError:
                return None
            time.sleep(0.01)
        return None
