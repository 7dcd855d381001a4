"""Data workers and signals: a worker ends when its loader's process says so or is gone, and not before.

torchrun and SageMaker signal whole groups of processes; a worker that goes first takes the last batch with it.
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

INTERVAL = 1.0  # seconds for which a worker may outlive its loader's process


@contextmanager
def held_back(loader: DataLoader) -> Iterator[None]:
    """Have the workers that are started meanwhile begin with SIGTERM and SIGINT blocked.

    Where they are not forked from this process, it takes them seconds to come to `end_with_the_loader`. This process
    hears of a signal meanwhile by another thread, or afterwards.
    """
    if not loader.num_workers:
        yield
        return
    context = loader.multiprocessing_context or multiprocessing
    if (context.get_start_method(allow_none=True) or "fork") != "fork":
        resource_tracker.ensure_running()  # starting it lets the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_the_loader() -> None:
    """Have this worker ended by a signal only if it comes from the loader's process, and when that is gone.

    torch's own watchdog looks at the parent, which is another process where a server forks the workers, and may be gone
    before the worker has begun.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    loader = multiprocessing.parent_process()

    def wait() -> None:
        while loader.is_alive():
            told = signal.sigtimedwait(SIGNALS, INTERVAL)
            if told and told.si_pid == loader.pid:
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="ends with the loader").start()
