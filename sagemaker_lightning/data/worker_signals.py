"""Data workers and signals: a worker ends only with its loader's process.

It ends when that process tells it to, or is gone. torchrun and SageMaker signal whole groups of
processes. If a worker ended first, the last batch would be lost.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from torch.utils.data import DataLoader

from sagemaker_lightning.contract.shutdown import SIGNALS

CHECK_SECONDS = 1.0  # seconds that a worker may outlive its loader's process


@contextmanager
def held_back(loader: DataLoader) -> Iterator[None]:
    """Block SIGNALS in the workers that are started in this context.

    Workers that are not forked from this process take seconds to reach `end_with_the_loader`, which
    decides about signals. In the meantime this process receives a signal in another thread, or
    after the context.
    """
    if not loader.num_workers:
        yield
        return
    context = loader.multiprocessing_context or multiprocessing
    if (context.get_start_method(allow_none=True) or "fork") != "fork":
        resource_tracker.ensure_running()  # its start unblocks signals, so it goes first
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


def end_with_the_loader() -> None:
    """End this worker when its loader's process signals it or is gone, not before.

    torch's own watchdog watches the parent process. Where a server forks the workers, that is
    another process, and it may be gone before the worker has begun.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    loader = multiprocessing.parent_process()

    def wait() -> None:
        while loader.is_alive():
            signal_info = signal.sigtimedwait(SIGNALS, CHECK_SECONDS)
            if signal_info and signal_info.si_pid == loader.pid:
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="ends with the loader").start()
