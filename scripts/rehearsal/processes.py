"""A job's one host as processes of this machine, where no Docker engine answers: in a PID namespace, whose
first process is the image's entrypoint.sh, as in a container."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import invalid
from .layout import Layout

ROOT = Path(__file__).resolve().parents[2]
# As the first process of the namespace: FastFile channels are made read-only, then it becomes the command.
READ_ONLY = """
while [[ $1 != -- ]]; do mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 1; shift; done
shift
exec "$@"
"""


class Processes:
    """What stands in for an engine; `python` is the environment that the application needs: .venv's."""

    name = "processes"
    interface = "lo"
    bridge = None

    def __init__(self, python: Path, note_process: Callable[[int], None]) -> None:
        self.python, self.note_process = python, note_process
        self.unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if os.geteuid() != 0:
            self.unshare += ["--user", "--map-root-user"]
        if not python.exists():
            raise ValueError(f"--engine=processes: {python} is not there; make env makes it")
        if not shutil.which("unshare") or subprocess.run([*self.unshare, "true"], capture_output=True).returncode:
            raise ValueError("--engine=processes: found no PID namespaces (unshare), which only Linux has")

    def image(self, uri: str) -> str:
        """Return the image: there is none, the application of this checkout runs."""
        return uri

    def network(self, job: str, isolated: bool) -> "Alone":
        """Return what holds the processes of a job."""
        return Alone(self)

    def refuse(self, instances: int, request: dict) -> None:
        """Raise Refused for a job that needs containers."""
        if instances > 1:
            raise invalid(
                f"No Docker engine answers, so the rehearsal runs jobs as processes: found {instances} instances, "
                "allowed is 1"
            )
        algorithm = request["AlgorithmSpecification"]
        asked = request | {name: algorithm.get(name) for name in ("ContainerEntrypoint", "ContainerArguments")}
        for name in ("ContainerEntrypoint", "ContainerArguments", "EnableNetworkIsolation"):
            if asked.get(name):
                raise invalid(f"No Docker engine answers: {name} needs containers")


class Alone:
    """The one host of a job."""

    def __init__(self, engine: Processes) -> None:
        self.engine, self.process = engine, None

    def start(self, host, number, image, command, layout: Layout, read_only: list, variables: dict) -> "Process":
        """Start it."""
        bound = [str(layout.channel(name)) for name in read_only]
        program = os.environ.get("SAGEMAKER_PROGRAM", "app/train_multi_node.py")
        told = {
            "PATH": f"{self.engine.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SAGEMAKER_BASE_DIR": str(layout.folder),
            "SAGEMAKER_PROGRAM": program,
            "SAGEMAKER_TRAINING_MODULE": "app.toolkit:main",
            "HOME": os.environ.get("HOME", "/"),
        }
        line = [*self.engine.unshare, "bash", "-c", READ_ONLY, "bash", *bound, "--", ROOT / "entrypoint.sh", "train"]
        self.process = Process(
            subprocess.Popen(
                line,
                env=told | variables,
                cwd=layout.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        self.engine.note_process(self.process.outer.pid)
        return self.process

    def close(self) -> None:
        """End what is left of it."""
        if self.process:
            self.process.remove()


class Process:
    """A running host."""

    def __init__(self, outer: subprocess.Popen) -> None:
        self.outer = outer

    def lines(self) -> Iterator[str]:
        """Yield what it prints, line by line, until it ends."""
        for line in self.outer.stdout:
            yield line.decode(errors="replace").rstrip("\r\n")

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
        """Return the namespace's first process: the only child of `unshare`, from its first moments on."""
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")
        while self.outer.poll() is None:
            try:
                if found := children.read_text().split():
                    return int(found[0])
            except OSError:
                return None
            time.sleep(0.01)
        return None
