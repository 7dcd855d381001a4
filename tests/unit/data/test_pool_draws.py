"""What draws in a pool of threads is found out, and what only reads there is not."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sagemaker_lightning.data import pool_draws
from sagemaker_lightning.data.deterministic import make_deterministic, make_resumable
from sagemaker_lightning.data.loaders.kinds import resumable
from sagemaker_lightning.data.pool_draws import METHODS, PoolDraws

DRAWS = {
    "random": lambda _: random.random(),
    "numpy": lambda _: np.random.rand(),
    "torch": lambda _: torch.rand(()).item(),
}
SAID = "draws random numbers in a pool of threads"


def read(number):
    return float(number)


GIVES = {
    "submit": lambda pool, draw: pool.submit(draw, 1).result(),
    "executor's map": lambda pool, draw: list(pool.map(draw, range(3))),
    "apply": lambda pool, draw: pool.apply(draw, (1,)),
    "map": lambda pool, draw: pool.map(draw, range(3)),
    "starmap": lambda pool, draw: pool.starmap(draw, [(1,)]),
    "imap": lambda pool, draw: list(pool.imap(draw, range(3))),
}


@pytest.mark.parametrize("how", GIVES)
@pytest.mark.parametrize("draw", [*DRAWS, "read"])
def test_functions_that_a_pool_gets_are_looked_at(how, draw):
    class_ = ThreadPoolExecutor if how in ("submit", "executor's map") else ThreadPool
    draws = PoolDraws()
    with class_(1) as pool:
        with draws.watching():
            random.random()  # in this thread
            GIVES[how](pool, DRAWS.get(draw, read))
        assert draws.found is (draw in DRAWS)
        draws.found = False
        GIVES[how](pool, DRAWS.get(draw, read))
        assert not draws.found
    assert not any(name in vars(ThreadPool) for class_, name in METHODS if class_ is ThreadPool)


def test_tasks_that_last_an_epoch_are_waited_for_once(monkeypatch):
    waits = []
    monkeypatch.setattr(
        pool_draws, "wait", lambda given, seconds: waits.append(seconds) or wait(given, 0)
    )
    epoch_ends = threading.Event()
    draws = PoolDraws()
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):  # epochs
            with draws.watching():
                pool.submit(epoch_ends.wait)
        epoch_ends.set()
    assert waits == [pool_draws.SECONDS, 0]


def test_pools_of_other_threads_are_left_alone():
    draws = PoolDraws()
    with ThreadPoolExecutor(1) as pool, draws.watching():
        other = threading.Thread(target=lambda: pool.submit(random.random).result())
        other.start()
        other.join()
    assert not draws.found


class Viewed(Dataset):
    """Draws two views of each sample in a pool."""

    def __init__(self, draw):
        self.pool = ThreadPoolExecutor(2)
        self.draw = draw

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return sum(self.pool.map(self.draw, [index, index]))


class Streamed(IterableDataset):
    """Draws its samples in a pool."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(self.draw, range(8))


class Drawing:
    """A loader that draws its batches in a pool."""

    def __init__(self, draw):
        self.pool = ThreadPoolExecutor(1)
        self.draw = draw

    def __len__(self):
        return 4

    def __iter__(self):
        for number in range(4):
            yield torch.tensor(self.pool.submit(self.draw, number).result())


@pytest.mark.parametrize("draw", [*DRAWS, "read"])
def test_a_dataset_that_draws_in_a_pool_is_named_once(capsys, draw):
    loader = make_deterministic(DataLoader(Viewed(DRAWS.get(draw, read)), 4), seed=1)
    for epoch in range(2):
        loader.begin_epoch(epoch)
        list(loader)
    assert capsys.readouterr().out.count(f"Viewed {SAID}") == (draw in DRAWS)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("draw", [DRAWS["random"], read])
def test_a_stream_that_draws_in_a_pool_is_named_once(capfd, draw, workers):
    loader, _ = make_resumable(DataLoader(Streamed(draw), 4, num_workers=workers), 1)
    for _ in range(2):
        list(loader)
    assert capfd.readouterr().out.count(f"Streamed {SAID}") == (draw is not read)


@pytest.mark.parametrize("draw", [DRAWS["numpy"], read])
def test_a_loader_that_draws_in_a_pool_is_left_to_lightning(draw):
    loader = resumable(Drawing(draw), (1,), "")
    loader.prepare(0, None, must_prove=True)
    loader.go_to(0)
    assert len(list(loader.iterator)) == 4
    assert ("draws in a thread of its own" in loader.why) is (draw is not read)
