"""The process's generators of `random` and numpy, and the seeds of new ones.

On an upgrade of numpy: see `randbits` in numpy/random/bit_generator.pyx, which SeedSequence calls;
of Python: Lib/random.py.
"""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

PROCESS_GENERATORS = random.random.__self__, np.random.random.__self__
"""The Random and the RandomState whose methods are the functions of the two modules."""


def replace_entropy(bits: Callable[[int], int]) -> None:
    """Seed every generator made without a seed with `bits(number of bits)`, for good.

    numpy calls `randbits` for the operating system's entropy, for every generator it makes.
    random.SystemRandom stays as it is.
    """
    np.random.bit_generator.randbits = bits
    original_seed = getattr(random.Random.seed, "__wrapped__", random.Random.seed)

    @functools.wraps(original_seed)
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        original_seed(self, bits(128) if a is None else a, version)

    random.Random.seed = seed
    random.seed = PROCESS_GENERATORS[0].seed


@contextmanager
def entropy_replaced(bits: Callable[[int], int]) -> Iterator[None]:
    """Do what `replace_entropy` does until the block ends."""
    before = np.random.bit_generator.randbits, random.Random.seed, random.seed
    replace_entropy(bits)
    try:
        yield
    finally:
        np.random.bit_generator.randbits, random.Random.seed, random.seed = before
