"""Signals and the children of a process that trains: a signal to all of them loses no batch.

torchrun, SageMaker's toolkit and a terminal signal whole groups of processes. If a data worker, a
Manager or a Pool ended first, the last batch would be lost. So each child that multiprocessing
starts from a process that imports this module, whoever's code starts it, keeps a signal until the
training has ended, unless its parent sends the signal. And it ends when its parent is gone.

Standard library only: what a child imports for it costs nothing.
"""

import functools
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any, cast

from sagemaker_lightning.contract.shutdown import SIGNALS, ancestor_has_stop

CHECK_SECONDS = 1.0  # seconds that a child may outlive its parent
WAKE = signal.SIGRTMAX  # a signal that nobody else uses


class _Child:
    """This process, a child of multiprocessing: a thread of it receives its signals."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.parent = cast(BaseProcess, multiprocessing.parent_process())
        # A server may have forked it. Without one, this is quicker than to ask for the parent's end
        # of a pipe: the children that were forked later have it, too.
        self.is_direct = os.getppid() == self.parent.pid
        self.is_worker = False
        """Whether it is a data worker of one of our loaders: those end with the loader alone."""

    def receive_signals(self) -> None:
        """Receive signals until the parent is gone, and then end this process."""
        kept = None  # the signal that waits for the end of the training
        while os.getppid() == self.parent.pid if self.is_direct else self.parent.is_alive():
            info = signal.sigtimedwait(SIGNALS, CHECK_SECONDS)
            if info and info.si_pid == self.parent.pid:
                self._act_on(info.si_signo)
            elif info:
                kept = info.si_signo
            if kept and not self.is_worker and not ancestor_has_stop():
                self._act_on(kept)
                kept = None
        os._exit(0)

    def _act_on(self, number: int) -> None:
        """Let a signal do what it does without us."""
        if self.is_worker:
            os._exit(0)  # torch takes another status for a crash
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.kill(self.pid, number)  # it comes to this thread, which alone does not block it
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        # Python runs a handler in the main thread, which may wait for something else.
        signal.pthread_kill(cast(int, threading.main_thread().ident), WAKE)


_child: _Child | None = None
"""This process, or that from which it was forked, if it keeps its signals."""
_thread = threading.local()
"""Whether this thread starts a child by multiprocessing."""


def end_with_the_loader() -> None:
    """End this data worker when its loader's process signals it or is gone, not before."""
    child = _child if _child and _child.pid == os.getpid() else keep_signals()
    child.is_worker = True


def keep_signals() -> _Child:
    """Have a thread of this process, a child of multiprocessing, receive its signals."""
    global _child
    _child = _Child()
    _thread.starts_child = False  # it was forked while this was true
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.signal(WAKE, lambda *_: None)
    threading.Thread(target=_child.receive_signals, daemon=True, name="signals").start()
    start = _unblocking(subprocess.Popen.__init__)
    subprocess.Popen.__init__ = start  # type: ignore[method-assign]  # replaced on purpose
    return _child


class _Keeping:
    """What a child of multiprocessing runs: first it begins to keep its signals.

    Args:
        run: The method or function that it would run.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run

    def __call__(self) -> None:
        keep_signals()
        self.run()


def _keeping(start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    """Return a function that starts children as `start` does, and has them keep their signals."""

    @functools.wraps(start)
    def start_keeping(process: BaseProcess) -> None:
        if not _is_forked(process):
            resource_tracker.ensure_running()  # its start unblocks signals, so it goes first
        own_attributes = dict(vars(process))
        process.run = _Keeping(process.run)  # type: ignore[method-assign]  # of this one
        # A child that is not forked takes seconds to begin: until then they are blocked.
        mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        _thread.starts_child = True
        try:
            start(process)
        finally:
            _thread.starts_child = False
            del process.run
            if "run" in own_attributes:
                process.run = own_attributes["run"]  # type: ignore[method-assign]  # as before
            signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)

    return start_keeping


def _is_forked(process: BaseProcess) -> bool:
    """Return whether a child, which is to be started, will be forked from this process."""
    if isinstance(process, multiprocessing.Process):
        return multiprocessing.get_start_method() == "fork"
    return isinstance(process, ForkProcess)


def _unblocking(start: Callable[..., None]) -> Callable[..., None]:
    """Return a function that starts a program as `start` does, with no signal blocked.

    A program inherits what is blocked: SIGTERM would not end one that this child starts.
    """

    @functools.wraps(start)
    def start_unblocking(*args: Any, **options: Any) -> None:
        mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            start(*args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)

    return start_unblocking


def _unblock_in_child() -> None:
    """Leave a child that is forked without multiprocessing to itself.

    Another one keeps them blocked until it receives them: a signal that comes before would be lost.
    """
    if _child and not getattr(_thread, "starts_child", False):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


_start = _keeping(BaseProcess.start)
BaseProcess.start = _start  # type: ignore[assignment, method-assign]  # replaced on purpose
os.register_at_fork(after_in_child=_unblock_in_child)
