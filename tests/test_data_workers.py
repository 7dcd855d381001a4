"""Data workers, however they are started: a signal to the whole group loses no batch.

And no worker is left behind.
"""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import warm
from containers import ROOT

from sagemaker_lightning.contract.shutdown import SIGNALS
from sagemaker_lightning.data.worker_signals import end_with_the_loader, held_back

SOURCE = """
import time
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.1)
        return index
"""
PROGRAM = """
import signal
import sys
from torch.utils.data import DataLoader
from sagemaker_lightning.data.deterministic import exact
from numbers_of_mine import Numbers

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
    loader, _ = exact(
        DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context=sys.argv[1]), 7, "train"
    )
    loader.exactly.begin(0, 0, 0)
    print("begins", flush=True)
    print([batch.tolist() for batch in loader if not print("a batch", flush=True)], flush=True)
"""
CASES = [
    pytest.param(method, text, marks=() if always_run else pytest.mark.soak)
    for method, text, always_run in [
        ("fork", "begins", False),
        ("fork", "a batch", False),
        ("spawn", "begins", False),
        ("spawn", "a batch", False),
        ("forkserver", "begins", False),
        ("forkserver", "a batch", True),
    ]
]
HANG_SECONDS = 120


class Loading:
    """A process that goes through a loader with two workers."""

    def __init__(self, folder: Path, method: str) -> None:
        (folder / "numbers_of_mine.py").write_text(SOURCE)
        (folder / "program.py").write_text(PROGRAM)
        self.log = folder / "log"
        self.method = method
        with self.log.open("w") as log:
            environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
            self.process = warm.start(
                ["python", folder / "program.py", method], folder, environment, log.fileno()
            )

    @property
    def output(self) -> str:
        """The output of the process so far."""
        return self.log.read_text()

    def below(self) -> list[psutil.Process]:
        """Return the processes that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def until(self, text: str) -> None:
        """Wait until the output has `text`, and there is a worker."""
        deadline = time.monotonic() + HANG_SECONDS
        while text not in self.output or not any(
            "resource_tracker" not in process.cmdline()[-1] for process in self.below()
        ):
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "text"), CASES)
def test_a_signal_to_the_group_costs_no_batch(tmp_path: Path, method, text):
    loading = Loading(tmp_path, method)
    loading.until(text)
    for process in [*loading.below(), loading.process]:
        process.send_signal(signal.SIGTERM)
    assert loading.process.wait(HANG_SECONDS) == 0, loading.output
    assert (
        "heard" in loading.output
        and "[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]" in loading.output
    )


@pytest.mark.slow
@pytest.mark.parametrize(("method", "text"), CASES)
def test_no_worker_outlives_its_loader(tmp_path: Path, method, text):
    loading = Loading(tmp_path, method)
    loading.until(text)
    below = loading.below()
    loading.process.kill()
    _, alive = psutil.wait_procs(below, HANG_SECONDS)
    for process in alive:
        process.kill()
    assert below and not alive


# In one process -----------------------------------------------------------------------------------


def blocked() -> set[signal.Signals]:
    """Return the signals that this thread holds back."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.fixture
def one_blocked():
    """Have this thread hold back one signal, which is no stop of a job."""
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    yield {signal.SIGUSR2, *mask_before}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


@pytest.mark.parametrize(
    ("workers", "method", "tracked"),
    [(0, "spawn", False), (1, "fork", False), (1, "spawn", True), (1, None, False)],
)
def test_workers_start_with_stops_held_back(monkeypatch, one_blocked, workers, method, tracked):
    """Python's tracker of resources unblocks signals as it starts, so it starts before."""
    when_tracked = []
    monkeypatch.setattr(resource_tracker, "ensure_running", lambda: when_tracked.append(blocked()))
    context = multiprocessing.get_context(method) if method else None
    monkeypatch.setattr(
        multiprocessing, "get_start_method", lambda allow_none: None if allow_none else "spawn"
    )
    with held_back(SimpleNamespace(num_workers=workers, multiprocessing_context=context)):
        assert blocked() == one_blocked | ({*SIGNALS} if workers else set())
    assert blocked() == one_blocked
    assert when_tracked == ([one_blocked] if tracked else [])


def wait_as_worker(monkeypatch, senders: list[int | None], alive: list[bool]) -> tuple:
    """Let a worker wait for signals of `senders`, while its loader's process is `alive`.

    Returns its exit status, how many of the two it has not looked at, and whether its thread keeps
    the process.
    """
    ended = threading.Event()
    seen = []

    def receive(signals, seconds):
        assert signals == SIGNALS and seconds < 60
        sender = senders.pop(0)
        return None if sender is None else SimpleNamespace(si_pid=sender)

    def end(status: int) -> None:
        seen.extend([status, threading.current_thread().daemon])
        ended.set()

    loader = SimpleNamespace(pid=7, is_alive=lambda: alive.pop(0))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: loader)
    monkeypatch.setattr(signal, "sigtimedwait", receive)
    monkeypatch.setattr(os, "_exit", end)
    end_with_the_loader()
    assert {*SIGNALS} <= blocked()
    assert ended.wait(30)
    return *seen, len(senders), len(alive)


def test_a_worker_ends_when_its_loaders_process_says_so_or_is_gone(monkeypatch, one_blocked):
    """A signal that somebody sends to the whole group ends none."""
    assert wait_as_worker(monkeypatch, [None, 5, 7, 9], [True] * 5) == (0, True, 1, 2)
    assert wait_as_worker(monkeypatch, [None, 5, 7], [True, True, False]) == (0, True, 1, 0)
