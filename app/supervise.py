"""Runs the program for the toolkit: signals go on to it, the end of what it wrote to stderr is kept.

The toolkit itself registers no signal handler (aws/sagemaker-training-toolkit issues 125 and 173): as PID 1 it ignores
SIGTERM, behind an init it dies of it, and either way the program never hears that it is to stop.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STOPPING = (signal.SIGTERM, signal.SIGINT)
KEPT = 64 * 2**10  # bytes of stderr: a traceback of each of a few ranks


class Stopped(Exception):
    """The job was told to stop before its program was started."""


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
        self.starting, self.child = False, None

    def __enter__(self) -> "Supervisor":
        self.previous = {number: signal.signal(number, self._hand_on) for number in STOPPING}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def run(self, command: list[str], cwd: Path) -> Ended:
        """Run `command` in a process group of its own and return when it has ended."""
        self.starting = True
        self.child = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, start_new_session=True)
        if self.asked:  # it came while there was no one to tell yet
            self._tell(self.asked)
        kept = bytearray()
        reader = threading.Thread(target=_copy, args=(self.child.stderr.fileno(), kept), daemon=True)
        reader.start()
        status = self.child.wait()
        while self.asked and self._somebody_is_left():  # a shell dies at once; what it had started may be saving
            time.sleep(0.1)
        reader.join(timeout=2)  # a process that outlives the program keeps the pipe open
        return Ended(status, self.asked, bytes(kept).decode(errors="replace"))

    def _hand_on(self, number: int, frame) -> None:
        self.asked = number
        if self.child:
            self._tell(number)
        elif not self.starting:
            raise Stopped(f"{signal.Signals(number).name} came before the program was started")

    def _tell(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    def _somebody_is_left(self) -> bool:
        with suppress(ChildProcessError):  # as PID 1, orphans are ours, and a dead one counts until it is waited for
            while os.waitpid(-self.child.pid, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(self.child.pid, 0)
        except ProcessLookupError:
            return False
        return True


def _copy(source: int, kept: bytearray) -> None:
    """Copy from file descriptor `source` to stderr until its end, and keep the last of it in `kept`."""
    while chunk := os.read(source, 2**16):
        with suppress(OSError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()
        kept += chunk
        del kept[:-KEPT]
