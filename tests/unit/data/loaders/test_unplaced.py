"""data/loaders/unplaced.py: each batch is drawn with a seed of its own."""

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import streams
from loader_epochs import (
    Numbers,
    Shared,
    begin,
    train,
)
from torch.utils.data import DataLoader

from sagemaker_lightning.compat.random_generators import entropy_replaced
from sagemaker_lightning.data.seeded_indices import seed_all, unseeded


def test_what_begins_an_epoch_leaves_generators_alone_that_a_loader_saves():
    keeping, shared = streams.Keeping(), Shared(2)
    keeping.rng, shared.rng = random.Random(1), random.Random(2)
    combined, _ = begin(lambda: [keeping, shared])
    combined.epoch_begins(3)
    assert keeping.rng.random() == random.Random(1).random()
    assert shared.rng.random() == random.Random(2).random()


def test_equal_streams_side_by_side_draw_apart():
    make = lambda: [DataLoader(Numbers(8), 4), DataLoader(Numbers(8), 4)]  # noqa: E731
    for _, _, batch in train(make):
        first, second = re.findall(r"tensor\((.*?)\)", batch)
        assert first != second


def test_what_is_made_without_a_seed_follows_from_what_is_drawn():
    def made() -> list[float]:
        seed_all("sample", 1)
        makers = (
            np.random.default_rng,
            random.Random,
            np.random.RandomState,
            np.random.default_rng,
        )
        return [float(make().random()) for make in makers]

    with entropy_replaced(unseeded.bits):
        numbers = made()
        assert numbers == made() and len(set(numbers)) == 4
        for size in (1, 8, 63, 128, 1000):  # all of its bits are drawn
            drawn = [unseeded.bits(size) for _ in range(40)]
            assert max(drawn).bit_length() == size and any(bits & 1 for bits in drawn)
        assert random.SystemRandom().random() != random.SystemRandom().random()
        unseeded.end()
        assert np.random.default_rng().random() != np.random.default_rng().random()


def test_only_the_thread_that_trains_draws_what_follows():
    seed_all("sample", 1)
    expected = [unseeded.bits(64) for _ in range(2)]
    others = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            seed_all("sample", 1)
            first = unseeded.bits(64)
            others.append(pool.submit(unseeded.bits, 64).result())
            assert [first, unseeded.bits(64)] == expected
    assert len({*others, *expected}) == 4


def test_a_process_forked_from_the_one_that_trains_draws_something_else():
    seed_all("sample", 1)
    expected = unseeded.bits(64)
    seed_all("sample", 1)
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, str(unseeded.bits(64)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert int(pipe.read()) != expected
