"""The process's generators of `random` and numpy, and what new ones are seeded with.

On an upgrade of numpy: see `randbits` in numpy/random/bit_generator.pyx, which SeedSequence calls;
of Python: Lib/random.py.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

OF_THE_PROCESS = random.random.__self__, np.random.random.__self__
"""The Random and the RandomState whose methods the modules' functions are."""


def without_entropy(bits: Callable[[int], int]) -> None:
    """Have what is made without a seed be seeded with `bits(number of bits)`; for good.

    numpy asks the operating system by that name, for whatever it makes; random.SystemRandom stays
    what it is.
    """
    np.random.bit_generator.randbits = bits
    plain = getattr(random.Random.seed, "__wrapped__", random.Random.seed)

    @functools.wraps(plain)
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        plain(self, bits(128) if a is None else a, version)

    random.Random.seed = seed
    random.seed = OF_THE_PROCESS[0].seed
