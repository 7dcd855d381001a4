"""Runs the program for the toolkit: signals go on to it, the end of its stderr is kept, and nothing outlives it.

The toolkit itself registers no signal handler (aws/sagemaker-training-toolkit issues 125 and 173): as PID 1 it ignores
SIGTERM, behind an init it dies of it, and either way the program never hears that it is to stop.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

STOPPING = (signal.SIGTERM, signal.SIGINT)
KEPT = 64 * 2**10  # bytes of stderr: a traceback of each of a few ranks
# Seconds that a program has once it was told to stop. SageMaker kills everything after 120 (API reference,
# StopTrainingJob); what is left is for saying so.
STOP_SECONDS = 110.0
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
REST_SECONDS = 5.0  # for what a program leaves behind that was not told to stop


class Stopped(BaseException):
    """The job was told to stop before its program was started; no Exception: the toolkit would take it for pip's."""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    status: int
    """Exit status; -N if signal N killed it."""
    asked: int | None
    """The signal that told it to stop, if one did."""
    stderr: str
    """The last of what it wrote there."""


class Supervisor:
    """While it is entered, SIGTERM and SIGINT are for the program; before there is one, they raise Stopped."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.starting, self.child, self.grace, self.killers = False, None, None, []

    def __enter__(self) -> "Supervisor":
        self.previous = {number: signal.signal(number, self._hand_on) for number in STOPPING}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # entrypoint.sh has held them back
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def run(
        self, command: list[str], cwd: Path, variables: Mapping[str, str] | None = None
    ) -> Ended:
        """Run `command` in a process group of its own and return when all that it started has ended."""
        self.starting = True
        adopt_orphans()
        self.others = {child.pid for child in psutil.Process().children()}
        self.child = subprocess.Popen(
            command, cwd=cwd, env=variables, stderr=subprocess.PIPE, start_new_session=True
        )
        kept = bytearray()
        reader = threading.Thread(
            target=_copy, args=(self.child.stderr.fileno(), kept), daemon=True
        )
        reader.start()
        if self.asked:  # it came while there was no one to tell yet
            self._stop(self.asked, STOP_SECONDS)
        elif self.grace is not None:
            self.end(self.grace)
        status = self.child.wait()
        if not self.killers and self._left():
            self._stop(signal.SIGTERM, REST_SECONDS)
        while self._left():  # a shell dies at once; what it had started may be saving
            time.sleep(0.1)
        for timer in self.killers:
            timer.cancel()
        reader.join(timeout=2)
        return Ended(status, self.asked, bytes(kept).decode(errors="replace"))

    def end(self, grace: float) -> None:
        """End the program: SIGTERM, and SIGKILL to what is left of it after `grace` seconds. From any thread."""
        self.grace = grace
        if self.child:
            # What was told to stop may be saving: it is not told again.
            self._stop(None if self.asked else signal.SIGTERM, grace)

    def _hand_on(self, number: int, frame) -> None:
        self.asked = number
        if self.child:
            self._stop(number, STOP_SECONDS)
        elif not self.starting:
            raise Stopped(f"{signal.Signals(number).name} came before the program was started")

    def _stop(self, number: int | None, grace: float) -> None:
        timer = threading.Timer(grace, self._kill)
        timer.daemon = True
        self.killers.append(timer)
        timer.start()
        with suppress(ProcessLookupError):
            if number:
                os.killpg(self.child.pid, number)

    def _kill(self) -> None:
        for process in self._left():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _left(self) -> list[psutil.Process]:
        return living(self.child.pid, self.others)


def adopt_orphans() -> None:
    """Have processes below this one become its children when their parents end: in a container, and behind an init."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def living(program: int, others: Container[int]) -> list[psutil.Process]:
    """Return the living processes that a program started, in whatever group, itself included.

    `program` is the PID of this process's child, `others` are those of its children that have nothing to do with it.
    """
    ours = [child for child in psutil.Process().children() if child.pid not in others]
    left = []
    for process in [*ours, *(below for child in ours for below in _below(child))]:
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
            elif (
                process.pid != program and process.ppid() == os.getpid()
            ):  # an orphan that is ours to bury
                os.waitpid(process.pid, os.WNOHANG)
    return left


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _copy(source: int, kept: bytearray) -> None:
    """Copy from file descriptor `source` to stderr until its end, and keep the last of it in `kept`."""
    while chunk := os.read(source, 2**16):
        with suppress(OSError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()
        kept += chunk
        del kept[:-KEPT]
