"""The indices that a DataLoader asks its dataset for: they seed, sample by sample, as they are gone through.

So the dataset stays what it is, and a data worker needs no state: what a sample draws is a function of (seed, epoch,
position), from the generators of the process and from those that the dataset holds.
"""

import hashlib
import itertools
import os
import random
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sagemaker_lightning.state import generators
from sagemaker_lightning.state.object_graph import walk

FEW = 64  # objects whose attributes are looked at for each batch


def number_of(*key: object) -> int:
    """Return the number that `key` stands for."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Unseeded:
    """What generators are seeded with that are made without a seed, as by `np.random.default_rng()`.

    In a thread that draws for training, the last `seed_all` decides it, and how many were made since: the entropy of
    the operating system would be another one in a run that goes on. Other threads get that.
    """

    thread = number = count = 0

    def begin(self, number: int) -> None:
        """Count from here on, in this thread."""
        self.thread = threading.get_ident()
        self.number = number
        self.count = 0

    def bits(self, size: int) -> int:
        """Return a number of `size` bits."""
        if self.thread != threading.get_ident():
            return secrets.randbits(size)
        self.count += 1
        digest = hashlib.shake_128(f"{self.number} {self.count}".encode()).digest(-(-size // 8))
        return int.from_bytes(digest, "little") >> -size % 8

    def end(self) -> None:
        """Leave all to the operating system: in a child, which is no data worker until it begins as one."""
        self.thread = 0


unseeded = _Unseeded()
os.register_at_fork(after_in_child=unseeded.end)


def seed_all(*key: object) -> int:
    """Seed the generators of random, numpy and torch, on the CPU and the GPU, with the whole of `key`: 15 us."""
    number = number_of(*key)
    unseeded.begin(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(
        number
    )  # torch.manual_seed takes 0.4 ms where there is no GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
    return number


class Found:
    """The generators that samples are drawn with, besides those of the process: what the user's objects hold."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = roots
        self.batches = 0
        self._look()

    def _look(self) -> None:
        self.generators = generators.find(self.roots)
        first = itertools.islice(walk(self.roots, code=False), FEW)
        self.holders = [one for _, one in first if hasattr(one, "__dict__")]
        self.types = self._types()

    def _types(self) -> list[list[type]]:
        return [list(map(type, vars(one).values())) for one in self.holders]

    def more(self) -> bool:
        """Return whether there are new ones, now that a batch was drawn.

        It is looked for them after the first batches and few of the later ones, and where an attribute has come to be.
        """
        self.batches += 1
        if self.batches > 4 and self.batches % 64 and self._types() == self.types:
            return False
        known = self.generators.keys()
        self._look()
        return not self.generators.keys() <= known


class Keys(list):
    """The indices of a batch. Whoever goes through them draws each sample with a seed of its own.

    Args:
        indices: What the dataset is asked for.
        seed: Decides all, with the place of each sample.
        places: The position of each sample in the epoch.
    """

    found: Found | None = None
    """Generators, in the process that draws."""

    def __init__(self, indices: Sequence, seed: tuple, places: Sequence) -> None:
        super().__init__(indices)
        self.seed = seed
        self.places = places

    def begin(self, found: Found) -> "Keys":
        """Seed what is drawn before one goes through them, as by a dataset that fetches a whole batch at once."""
        self.found = found
        self._seed(self.places[0])
        return self

    def __iter__(self) -> Iterator:
        for place, index in zip(self.places, super().__iter__(), strict=True):
            if self.found:
                self._seed(place)
            yield index

    def __reduce__(self) -> tuple:
        return Keys, (list(super().__iter__()), self.seed, self.places)

    def _seed(self, place: object) -> None:
        generators.reseed(self.found.generators, seed_all("sample", *self.seed, place))


class Key:
    """What a DataLoader without batches asks its dataset for: an index."""

    def __init__(self, index: Any, seed: tuple, place: object) -> None:
        self.index = index
        self.seed = seed
        self.place = place

    def begin(self, found: Found) -> Any:
        """Seed the sample's draws, and return the index."""
        return Keys([self.index], self.seed, [self.place]).begin(found)[0]
