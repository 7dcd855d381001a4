"""Stops on request: how a process ends when it gets SIGTERM or SIGINT.

From the first step on, a signal only requests a stop: resume/callback.py stops the training at the
next batch boundary.

The code here must work while the main thread hangs in a collective, when Python runs no signal
handler. So the signal's number comes through a pipe (signal.set_wakeup_fd, written in C) to a
thread that waits for nothing else.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sagemaker_lightning.contract import deadlines

SIGNALS = (signal.SIGTERM, signal.SIGINT)
WAIT = deadlines.BATCH_ENDS
WAIT_FOR_WRITING = deadlines.CHECKPOINT_IS_WRITTEN
NAME = re.compile(r"step-(\d{9,})\.ckpt")
"""The name of a checkpoint to resume from."""


def leave_at_once() -> None:
    """Let SIGTERM and SIGINT end this process at once.

    Its exit status is then the one that a shell gives. Without this, the first process of a
    container would not react to them while it imports.
    """

    def leave(number: int, frame) -> None:
        os.write(2, f"{signal.Signals(number).name}: nothing is being trained\n".encode())
        os._exit(status(number))

    for number in SIGNALS:
        signal.signal(number, leave)


class Interrupted(SystemExit):
    """Training stopped on request, with a checkpoint of the step that it had reached."""


def status(number: int) -> int:
    """Return the exit status of a process that signal `number` stopped.

    It is the one that a shell gives: 128 + `number`.
    """
    return 128 + number


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in `folder`; 0 if there is none.

    It looks at the names of the files only and reads none of them.
    """
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return max((int(match[1]) for name in names if (match := NAME.fullmatch(name))), default=0)


def words(step: int, how: str) -> str:
    """Return the line that tells a stop from a failure.

    The whole project recognizes a stop by the beginning of this line.

    Args:
        step: The step to resume from.
        how: What stopped the run.
    """
    return f"interrupted, resume from step {step}: {how}"


class Stop:
    """While it is entered, SIGTERM and SIGINT end this process in an orderly way.

    Before and after training they end it at once. During training all ranks agree on the batch
    after which they stop.

    Args:
        folder: Where the checkpoints are, to name the step to resume from.
        tell: Called, before this process ends, with the line that says from where to resume.

    Attributes:
        number: The first signal that came; None before.
        training: Whether training has begun and not ended; set by resume/callback.py.
        writing: Whether the last checkpoint is being written; set by resume/callback.py.
    """

    def __init__(self, folder: Path, tell: Callable[..., None]) -> None:
        self.folder = folder
        self.tell = tell
        self.number: int | None = None
        self.training = False
        self.writing = False
        self.ended = 0.0  # time.monotonic() when the last batch ended
        self.took = 0.0  # seconds between the ends of the last two batches
        self.pid = os.getpid()

    def __enter__(self) -> "Stop":
        reading_end, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        self.wakeup = signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        self.handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self.hear()
        os.register_at_fork(after_in_child=self._reset_signals_of_child)
        threading.Thread(target=self._watch, args=(reading_end,), daemon=True, name="stop").start()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup)
        self.pid = 0  # from now on, neither a child nor the thread has anything to do
        os.close(self.pipe)

    def hear(self) -> None:
        """Install our signal handlers again, in place of Lightning's.

        Lightning installs one for SIGTERM at the start of each of its stages, to end this process.
        """
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)

    def batch_ended(self) -> None:
        """Note that a batch has ended, and how long it took."""
        now = time.monotonic()
        self.took = now - self.ended if self.ended else 0.0
        self.ended = now

    def _reset_signals_of_child(self) -> None:
        """Give a forked child, such as a data worker, the default handlers.

        It shares the pipe, and its signals are not for this process.
        """
        if self.pid == os.getppid():
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)

    def _watch(self, pipe: int) -> None:
        """Wait for a signal; end this process if the training does not do so in time."""
        while not self.number:
            data = os.read(pipe, 1)
            if not data:
                os.close(pipe)
                return
            self.number = data[0] if data[0] in SIGNALS else None
        if not self.training:
            self.leave("it came while nothing was being trained")
        wait = min(max(WAIT, 2 * self.took), WAIT_FOR_WRITING)
        # First the time for a batch to end; then, if a checkpoint is being written, the rest of
        # the time for that.
        for seconds, only_if_writing in ((wait, False), (WAIT_FOR_WRITING - wait, True)):
            if only_if_writing is self.writing or not only_if_writing:
                time.sleep(seconds)
        if self.pid:
            faulthandler.dump_traceback()
            self.leave(
                f"no batch came to its end within {wait:.0f} s, so there is no newer checkpoint"
            )

    def leave(self, why: str) -> None:
        """End this process now, after it has told `why` and from which step to resume."""
        self.tell(words(newest_step(self.folder), f"{signal.Signals(self.number).name}; {why}"))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status(self.number))
