"""Generators of random numbers that a user's objects hold: found, seeded, saved and restored."""

import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sagemaker_lightning.compat.random_generators import OF_THE_PROCESS
from sagemaker_lightning.state.object_graph import GENERATORS, walk


def find(roots: Mapping[str, Any], skip: tuple = ()) -> dict[str, Any]:
    """Return the generators that are reached from `roots`, by their paths."""
    return {path: one for path, one in walk(roots, skip) if isinstance(one, GENERATORS) and not _global(one)}


def _global(generator: Any) -> bool:
    """Return whether it is one of those that belong to the process, which `seed_all` deals with."""
    return any(generator is one for one in (torch.default_generator, *OF_THE_PROCESS))


def reseed(found: Mapping[str, Any], number: int) -> None:
    """Seed generators: each with another seed, which `number` and its path decide."""
    for path, generator in found.items():
        seed = number ^ zlib.crc32(path.encode())
        if isinstance(generator, random.Random):
            generator.seed(seed)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(seed & 0xFFFFFFFF)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        else:
            generator.bit_generator.state = type(generator.bit_generator)(seed).state


def state_of(generator: Any) -> Any:
    """Return the state of a generator as `encoded` can hold it."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.bit_generator.state


def restore(generator: Any, state: Any) -> None:
    """Give a generator its state back."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (np.random.RandomState, torch.Generator)):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
