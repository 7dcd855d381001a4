"""A stop that was asked for: from the first step on, SIGTERM and SIGINT are a wish, and resume/callback.py fulfils it.

What is here must work while the main thread hangs in a collective, where Python runs no signal handler: the signal's
number comes through a pipe (signal.set_wakeup_fd, written in C) to a thread that waits for nothing else.
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

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds from the signal to the end of a process that gets to no batch's end, as where another rank hangs, or twice as
# long as its last batch took; and of one that is writing its checkpoint. The launchers kill after 100, the toolkit's
# hook after 110, SageMaker after 120.
WAIT, WAIT_FOR_WRITING = 25.0, 90.0
NAME = re.compile(r"step-(\d{9,})\.ckpt")
"""The name of a checkpoint to resume from, with the number of optimizer steps that are in it."""


def leave_at_once() -> None:
    """Have SIGTERM and SIGINT end this process: as a container's first, it would not hear of them while it imports."""

    def leave(number: int, frame) -> None:
        os.write(2, f"{signal.Signals(number).name}: nothing is being trained\n".encode())
        os._exit(status(number))

    for number in SIGNALS:
        signal.signal(number, leave)


class Interrupted(SystemExit):
    """Training stopped as it was told to, with a checkpoint of the step that it had reached."""


def status(number: int) -> int:
    """Return the exit status of a process that signal `number` has stopped, as a shell gives it."""
    return 128 + number


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in `folder` by its name, 0 if there is none; nothing is read."""
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return max((int(match[1]) for name in names if (match := NAME.fullmatch(name))), default=0)


def words(step: int, how: str) -> str:
    """Return the line by which a stop is told from a failure; the whole project looks for its beginning."""
    return f"interrupted, resume from step {step}: {how}"


class Stop:
    """While it is entered, SIGTERM and SIGINT end this process: at once before and after training, else by agreement.

    Args:
        folder: Where checkpoints are, for the step that is named.
        tell: Called with the line that says from where to resume, before this process ends.
    """

    def __init__(self, folder: Path, tell: Callable[..., None]) -> None:
        self.folder, self.tell = folder, tell
        self.number: int | None = None  # the first signal that came
        self.training = self.writing = False
        self.ended, self.took = (
            0.0,
            0.0,
        )  # when the last batch came to its end, and the seconds since the one before
        self.pid = os.getpid()

    def __enter__(self) -> "Stop":
        reading, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        self.wakeup = signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        self.handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self.hear()
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, args=(reading,), daemon=True, name="stop").start()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup)
        self.pid = 0  # its children have nothing to forget, and its thread nothing to do
        os.close(self.pipe)

    def hear(self) -> None:
        """Hear signals, and nobody else: Lightning takes SIGTERM as each of its stages begins, to end this process."""
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)

    def batch_ended(self) -> None:
        """Note how long a batch took."""
        now = time.monotonic()
        self.took, self.ended = now - self.ended if self.ended else 0.0, now

    def _forget(self) -> None:
        """In a child, such as a data worker: it shares the pipe, and its signals are not ours."""
        if self.pid == os.getppid():
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)

    def _watch(self, pipe: int) -> None:
        while not self.number:
            read = os.read(pipe, 1)
            if not read:
                os.close(pipe)
                return
            self.number = read[0] if read[0] in SIGNALS else None
        if not self.training:
            self.leave("it came while nothing was being trained")
        wait = min(max(WAIT, 2 * self.took), WAIT_FOR_WRITING)
        for seconds, waits in ((wait, False), (WAIT_FOR_WRITING - wait, True)):
            if waits is self.writing or not waits:
                time.sleep(seconds)
        if self.pid:
            faulthandler.dump_traceback()
            self.leave(
                f"no batch came to its end within {wait:.0f} s, so there is no newer checkpoint"
            )

    def leave(self, why: str) -> None:
        """End this process now."""
        self.tell(words(newest_step(self.folder), f"{signal.Signals(self.number).name}; {why}"))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status(self.number))
