"""The process's generators of `random` and numpy, and the seeds of new ones.

On an upgrade of numpy: see `randbits` in numpy/random/bit_generator.pyx, which SeedSequence calls,
and `mt19937_state` in numpy/random/src/mt19937/mt19937.h; of Python: Lib/random.py, and
`RandomObject` in Modules/_randommodule.c.
"""

import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_FUNCTIONS: tuple[Any, Any] = random.random, np.random.random
PROCESS_GENERATORS = _FUNCTIONS[0].__self__, _FUNCTIONS[1].__self__
"""The Random and the RandomState whose methods are the functions of the two modules."""

MERSENNE_TWISTER_WORDS = 624
"""Words of 4 bytes of the states of `random` and of numpy's MT19937. Beside them is which one comes
next: before them in `random`, after them in numpy."""
FIRST_FIELD = object.__basicsize__
"""Where the fields of a Python object begin in memory."""


def seed_python(number: int) -> None:
    """Do what `random.seed(number)` does, in half the time: of its class's code, what is in C."""
    generator = PROCESS_GENERATORS[0]
    base: Any = random.Random.__base__
    base.seed(generator, number)
    generator.gauss_next = None


def process_marks() -> tuple[Any, ...]:
    """Return what tells whether the process's generators have drawn or were seeded since.

    Which word comes next changes with each draw, and all words change when they have been used up:
    so a few of them will do. It takes 4 us, where `random.getstate` and `np.random.get_state` take
    60. The normal number that numpy's RandomState holds back is not part of it: right after a seed,
    there is none.
    """
    python = PROCESS_GENERATORS[0]
    numpys = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
    marks: tuple[Any, ...] = (
        _memory(id(python) + FIRST_FIELD).raw
        if sys.implementation.name == "cpython"
        else python.getstate(),
        python.gauss_next,
        _memory(numpys).raw,
        _memory(numpys + 4 * MERSENNE_TWISTER_WORDS).raw,
        torch.default_generator.get_state().numpy().tobytes(),
    )
    if torch.cuda.is_initialized():
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        marks += (generator.get_state().numpy().tobytes(),)
    return marks


@functools.lru_cache(maxsize=16)
def _memory(address: int) -> "ctypes.Array[ctypes.c_char]":
    """Return the four words in memory at an address, as they are when they are read."""
    return (ctypes.c_char * 16).from_address(address)


def replace_entropy(bits: Callable[[int], int]) -> None:
    """Seed every generator made without a seed with `bits(number of bits)`, for good.

    numpy calls `randbits` for the operating system's entropy, for every generator it makes.
    random.SystemRandom stays as it is.
    """
    entropy: Any = np.random.bit_generator
    entropy.randbits = bits
    original_seed = getattr(random.Random.seed, "__wrapped__", random.Random.seed)

    @functools.wraps(original_seed)
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        original_seed(self, bits(128) if a is None else a, version)

    random.Random.seed = seed  # type: ignore[method-assign]  # replaced on purpose
    random.seed = PROCESS_GENERATORS[0].seed


@contextmanager
def entropy_replaced(bits: Callable[[int], int]) -> Iterator[None]:
    """Do what `replace_entropy` does until the block ends."""
    entropy: Any = np.random.bit_generator
    python: Any = random.Random
    before = entropy.randbits, python.seed, random.seed
    replace_entropy(bits)
    try:
        yield
    finally:
        entropy.randbits, python.seed, random.seed = before
