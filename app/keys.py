"""The indices that a DataLoader asks its dataset for: they seed, sample by sample, as they are gone through.

So the dataset stays what it is, and a data worker needs no state: what a sample draws is a function of (seed, epoch,
position), from the generators of the process and from those that the dataset holds.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from app import generators
from app.workers import end_with_the_loader


def number_of(*key: object) -> int:
    """Return the number that `key` stands for."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(*key: object) -> int:
    """Seed the generators of random, numpy and torch, on the CPU and the GPU, with the whole of `key`: 15 us."""
    number = number_of(*key)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 0.4 ms where there is no GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
    return number


class Found:
    """The generators that samples are drawn with, besides those of the process: what the user's objects hold.

    Some are made when the first sample is drawn, so the first batches look for them again, and few of the later ones.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots, self.batches, self.generators = roots, 0, {}

    def look(self) -> None:
        """Look for generators, if it is time."""
        if self.batches < 4 or self.batches % 64 == 0:
            self.generators = generators.find(self.roots)
        self.batches += 1


_of_worker: Found | None = None
"""In a data worker, the generators of its dataset."""


class Keys(list):
    """The indices of a batch. Whoever goes through them draws each sample with a seed of its own.

    Args:
        indices: What the dataset is asked for.
        seed: Decides all, with the place of each sample.
        places: The position of each sample in the epoch.
        found: Generators, in the process that draws.
    """

    def __init__(self, indices: Sequence, seed: tuple, places: Sequence, found: Found | None = None) -> None:
        super().__init__(indices)
        self.seed, self.places, self.found = seed, places, found
        if found:
            found.look()
            self._seed(places[0])  # for a dataset that fetches a whole batch at once

    def __iter__(self) -> Iterator:
        for place, index in zip(self.places, super().__iter__(), strict=True):
            if self.found:
                self._seed(place)
            yield index

    def __reduce__(self) -> tuple:
        return _arrive, (list(super().__iter__()), self.seed, self.places, True)

    def _seed(self, place: object) -> None:
        generators.reseed(self.found.generators, seed_all("sample", *self.seed, place))


class Key:
    """What a DataLoader without batches asks its dataset for; it seeds where it arrives."""

    def __init__(self, index: Any, seed: tuple, place: int) -> None:
        self.index, self.seed, self.place = index, seed, place

    def __reduce__(self) -> tuple:
        return _arrive, ([self.index], self.seed, [self.place], False)


def _arrive(indices: list, seed: tuple, places: list, whole: bool) -> Any:
    """Return the keys of a batch in the worker that draws it."""
    keys = Keys(indices, seed, places, _of_worker or Found({}))
    return keys if whole else indices[0]


def start_worker(also: Callable[[int], None] | None, collate: Callable, worker: int) -> None:
    """Begin a data worker."""
    global _of_worker
    end_with_the_loader()
    if also:
        also(worker)
    _of_worker = Found({"dataset": torch.utils.data.get_worker_info().dataset, "collate_fn": collate, "init": also})
