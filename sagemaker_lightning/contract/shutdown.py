"""Stops on request: how a process ends when it gets SIGTERM, SIGINT or SIGHUP.

While it trains, a signal only requests a stop: resume/callback.py stops the training at the next
batch boundary.

The code here must work while the main thread hangs in a collective, when Python runs no signal
handler. So the signal's number comes through a pipe (signal.set_wakeup_fd, written in C) to a
thread that waits for nothing else.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Self

from sagemaker_lightning.contract import deadlines
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome, outlook_by_names
from sagemaker_lightning.contract.process_stat import (
    PARENT,
    has_signal,
    process_stat,
    process_status,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that stop a training. SIGHUP comes when the terminal is closed."""
BATCH_WAIT_SECONDS = deadlines.BATCH_ENDS
WRITING_WAIT_SECONDS = deadlines.CHECKPOINT_IS_WRITTEN
WATCH_NAME = b"stop-on-signal"
"""The name, for the kernel, of a Stop's thread: by it, other processes know that there is one."""
PR_SET_NAME = 15  # prctl(2)


def handled_signals() -> list[signal.Signals]:
    """Return those of SIGNALS that are handled: `nohup` starts a program that ignores SIGHUP."""
    return [
        number
        for number in SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


def leave_at_once() -> None:
    """Let each of SIGNALS end this process at once.

    Its exit status is then the one that a shell gives. Without this, the first process of a
    container would not react to them while it imports.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        with suppress(OSError):  # nobody reads it
            os.write(2, f"{signal.Signals(number).name}: nothing is being trained\n".encode())
        os._exit(status(number))

    for number in handled_signals():
        signal.signal(number, leave)


class Interrupted(SystemExit):
    """Training stopped on request, with a checkpoint of the step that it had reached."""


def status(number: int) -> int:
    """Return the exit status of a process that signal `number` stopped.

    It is the one that a shell gives: 128 + `number`.
    """
    return 128 + number


def interruption_message(step: int, how: str) -> str:
    """Return the line that tells a stop from a failure.

    The whole project recognizes a stop by the beginning of this line.

    Args:
        step: The step to resume from.
        how: What stopped the run.
    """
    return f"interrupted, resume from step {step}: {how}"


def interruption_by_names(home: CheckpointHome, how: str) -> str:
    """Return that line for a stop at which nobody knows more than the names in the folder.

    Args:
        home: The folder of the checkpoints.
        how: What stopped the run.
    """
    outlook = outlook_by_names(home)
    return interruption_message(
        outlook.step, how if outlook.is_newest else f"{how}; {outlook.said}"
    )


def loses_sigterm(pid: int = 1) -> str:
    """Return the name of the process if it loses SIGTERM; "" if it may hear it or is not there.

    SageMaker signals the first process of the container alone. The kernel drops a signal that this
    process neither handles nor blocks (pid_namespaces(7)): it does not end of it, and has nothing
    to pass on.

    Args:
        pid: The process; 1 is the first one of this container.
    """
    fields = process_status(pid)
    hears = any(has_signal(fields.get(mask, "0"), signal.SIGTERM) for mask in ("SigCgt", "SigBlk"))
    return "" if hears else fields.get("Name", "")


def ancestor_has_stop() -> bool:
    """Return whether a Stop is entered in a process from which this one descends.

    Return False for one that this process may not look at.
    """
    pid = os.getppid()
    with suppress(OSError):  # it is gone, or another user's
        while pid:
            for file in Path(f"/proc/{pid}/task").glob("*/comm"):
                with suppress(OSError):  # this thread has just ended
                    if file.read_bytes().strip() == WATCH_NAME:
                        return True
            fields = process_stat(pid)
            pid = int(fields[PARENT]) if fields else 0
    return False


class Phase(Enum):
    """What a process does, which decides what a signal means."""

    IDLE = auto()
    """Nothing is being trained: a signal loses nothing."""
    TRAINING = auto()
    """A signal requests a stop at the end of the batch."""
    SAVING = auto()
    """The last checkpoint is being written."""


class Stop:
    """While it is entered, SIGTERM, SIGINT and SIGHUP end this process in an orderly way.

    Before and after training they end it at once. During training all ranks agree on the batch
    after which they stop. Once one of them has come, further ones change nothing, also when it is
    left: the process is about to end. It has to be entered and left in the main thread.

    Args:
        home: Where the checkpoints are, to name the step to resume from.
        tell: Called, before this process ends, with the line that says from where to resume.
    """

    def __init__(self, home: CheckpointHome, tell: Callable[..., None]) -> None:
        self.home = home
        self.tell = tell
        self.signal_number: int | None = None
        """The first signal that came; None before."""
        self.phase = Phase.IDLE
        self.batch_ended_at = 0.0  # time.monotonic() when the last batch ended
        self.batch_seconds = 0.0  # seconds between the ends of the last two batches
        self.pid = 0  # of the process in which it is entered
        self.left = threading.Event()
        self.is_watched = threading.Event()

    def __enter__(self) -> Self:
        self.pid = os.getpid()
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        self.previous_wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        self.previous_handlers = {number: signal.getsignal(number) for number in handled_signals()}
        self.install_handlers()
        _entered.append(self)
        self.thread = threading.Thread(
            target=self._watch, args=(self.pipe[0],), daemon=True, name="stop"
        )
        self.thread.start()
        self.is_watched.wait()  # from now on, children find it
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous_handlers.items():
            if signal.getsignal(number) != self._handle:
                continue  # whoever has installed another one since takes care of it
            if self._process_ends():
                signal.signal(number, signal.SIG_IGN)  # also while Python itself ends
            else:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        others = signal.set_wakeup_fd(self.previous_wakeup)
        if others not in (self.pipe[1], -1):
            signal.set_wakeup_fd(others)
        _entered.remove(self)
        self.pid = 0  # from now on, neither a child nor the thread has anything to do
        self.left.set()
        # Closing the pipe would not wake the thread: data workers have copies of it.
        with suppress(BlockingIOError):  # it is full: the thread wakes anyway
            os.write(self.pipe[1], b"\0")
        self.thread.join()
        for end in self.pipe:
            os.close(end)

    def install_handlers(self) -> None:
        """Install our signal handlers again, in place of Lightning's.

        Lightning installs one for SIGTERM at the start of each of its stages, to end this process.
        """
        for number in self.previous_handlers:
            signal.signal(number, self._handle)

    def name_checkpoints_in(self, home: CheckpointHome) -> None:
        """From now on, name the newest checkpoint of another folder."""
        self.home = home

    def begin(self) -> None:
        """Take signals for requests to stop at the end of a batch."""
        self.phase = Phase.TRAINING

    def save_last(self) -> None:
        """Give the checkpoint that is written now more time: nothing comes after it."""
        self.phase = Phase.SAVING

    def end(self) -> None:
        """Let signals end this process again: the training is over."""
        self.phase = Phase.IDLE

    def batch_ended(self) -> None:
        """Note that a batch has ended, and how long it took."""
        now = time.monotonic()
        self.batch_seconds = now - self.batch_ended_at if self.batch_ended_at else 0.0
        self.batch_ended_at = now

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal; the thread learns of it, even if the main thread hangs."""
        # The thread may come later than the end of a batch, or an error.
        self.signal_number = self.signal_number or number

    def _may_end_process(self) -> bool:
        """Return whether this process may be ended if no batch comes to its end."""
        return True

    def _process_ends(self) -> bool:
        """Return whether this process is about to end, and no signal may cut that short."""
        return self.signal_number is not None

    def _watch(self, pipe: int) -> None:
        """Wait for a signal; end this process if the training does not do so in time."""
        ctypes.CDLL(None).prctl(PR_SET_NAME, WATCH_NAME)
        self.is_watched.set()
        while not (self.signal_number and self._may_end_process()):
            data = os.read(pipe, 1)
            if self.left.is_set():
                return
            if self.previous_wakeup != -1:
                with suppress(OSError):  # somebody else waits for signals, too, such as asyncio
                    os.write(self.previous_wakeup, data)
            if data[0] in SIGNALS:
                self.signal_number = data[0]
        if self.phase is Phase.IDLE:
            self.end_process("it came while nothing was being trained")
        wait = min(max(BATCH_WAIT_SECONDS, 2 * self.batch_seconds), WRITING_WAIT_SECONDS)
        # First the time for a batch to end; then, if a checkpoint is being written, the rest of
        # the time for that.
        why = f"no batch ended within {wait:.0f} s"
        if not self.left.wait(wait) and self.phase is Phase.SAVING:
            self.left.wait(WRITING_WAIT_SECONDS - wait)
            why = f"the checkpoint was not written within {WRITING_WAIT_SECONDS:.0f} s"
        if self.pid:
            faulthandler.dump_traceback()
            self.end_process(f"{why}, so there is no newer checkpoint")

    def end_process(self, why: str) -> None:
        """End this process now, after it has said `why` and from which step to resume."""
        number = signal.Signals(self.signal_number or signal.SIGTERM)
        try:
            self.tell(interruption_by_names(self.home, f"{number.name}; {why}"))
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        # Nobody reads the output any more, or it is closed: the signal ends this process, too.
        finally:
            os._exit(status(number))


class TrainingStop(Stop):
    """A Stop for the time of a training in somebody else's program.

    The program may be a notebook's kernel, or run tests. So it is entered when the training begins
    and left when it is over, and then handlers, wakeup descriptor and threads are as before. The
    first Ctrl-C requests a stop, and never ends the process; the next one goes to the handler that
    was there.
    """

    def __enter__(self) -> Self:
        self.interrupts = 0  # how often Ctrl-C was pressed
        self.begin()
        return super().__enter__()

    def _may_end_process(self) -> bool:
        return self.signal_number != signal.SIGINT

    def _process_ends(self) -> bool:
        return False  # whoever catches the SystemExit continues

    def _handle(self, number: int, frame: FrameType | None) -> None:
        super()._handle(number, frame)
        if number != signal.SIGINT:
            return
        self.interrupts += 1
        if self.interrupts == 1:
            # Not by print: this may run within another print.
            os.write(2, b"stopping at the end of this batch; Ctrl-C again stops at once\n")
        elif callable(handler := self.previous_handlers[signal.Signals(number)]):
            handler(number, frame)


_entered: list[Stop] = []
"""The Stops that are entered."""


def stops_training() -> bool:
    """Return whether SIGTERM, if it came now, would stop a training of this process."""
    stop = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return isinstance(stop, Stop) and stop.pid == os.getpid() and stop.phase is not Phase.IDLE


def _reset_signals_of_child() -> None:
    """Give a forked child, such as a data worker, the default handlers.

    It shares the pipe, and its signals are not for this process.
    """
    if any(stop.pid == os.getppid() for stop in _entered):
        signal.set_wakeup_fd(-1)
        for number in handled_signals():
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_signals_of_child)
