"""Random generators in a user's objects: find, seed, save and restore them."""

import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sagemaker_lightning.compat.random_generators import PROCESS_GENERATORS
from sagemaker_lightning.state.object_graph import GENERATORS, walk

PLACES = {"MT19937": 624, "Philox": 4}
"""How many numbers an engine of numpy's makes at a time, if its state says which is the next."""

SPAWNED = "n_children_spawned"
"""In a state, how many generators were spawned from a generator of numpy's, if there are some."""
MIN_POOL = 4
"""Numbers that a SeedSequence mixes at least, and if nothing else is said."""
MAX_SEED = 1 << 10
"""Numbers, at most, of a seed."""


def find(roots: Mapping[str, Any], skip: tuple[type, ...] = ()) -> dict[str, Any]:
    """Return the generators that are reached from `roots`, by their paths.

    Those of the operating system's random numbers have no state and are left out.

    Args:
        roots: The objects to start from, by name.
        skip: Classes whose objects are not entered.
    """
    return {
        path: generator
        for path, generator in walk(roots, skip)
        if isinstance(generator, GENERATORS)
        and not isinstance(generator, random.SystemRandom)
        and not is_global(generator)
    }


def is_global(generator: Any) -> bool:
    """Return whether a generator belongs to the process; `seed_all` seeds those."""
    return any(
        generator is global_generator
        for global_generator in (torch.default_generator, *PROCESS_GENERATORS)
    )


def reseed(found: Mapping[str, Any], number: int) -> None:
    """Seed generators, each with a seed of its own.

    Args:
        found: The generators by their paths.
        number: Decides the seeds, together with the paths.
    """
    for path, generator in found.items():
        seed = number ^ zlib.crc32(path.encode())
        if isinstance(generator, random.Random):
            generator.seed(seed)
        elif isinstance(generator, np.random.RandomState):
            engine = generator.get_state(legacy=False)["bit_generator"]
            if engine == "MT19937":
                generator.seed(seed & 0xFFFFFFFF)
            else:  # numpy seeds no other one
                generator.set_state(getattr(np.random, engine)(seed).state)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        else:
            engine = engine_of(generator)
            engine.state = type(engine)(seed).state


def state_of(generator: Any) -> Any:
    """Return a generator's state in a form that `encoded` accepts."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    engine = engine_of(generator)
    spawned = getattr(engine.seed_seq, SPAWNED, 0)
    return {**engine.state} | ({SPAWNED: spawned} if spawned else {})


def engine_of(generator: Any) -> Any:
    """Return the engine of a generator of numpy's; an engine itself."""
    is_engine = isinstance(generator, np.random.BitGenerator)
    return generator if is_engine else generator.bit_generator


def seed_of(generator: np.random.Generator) -> list[Any]:
    """Return of which seed a generator's engine was made, from which it spawns others.

    They are the arguments of `seed_sequence`; none if the engine has another kind of seed.
    """
    seed = generator.bit_generator.seed_seq
    return arguments_of(seed) if type(seed) is np.random.SeedSequence else []


def arguments_of(seed: np.random.SeedSequence) -> list[Any]:
    """Return the arguments of `seed_sequence` for a seed that has spawned none."""
    entropy: Any = seed.entropy
    numbers = [entropy] if isinstance(entropy, (int, np.integer)) else entropy
    return [[int(each) for each in numbers], [int(each) for each in seed.spawn_key], seed.pool_size]


def seed_sequence(
    numbers: Any = None, spawn_key: Any = (), pool_size: Any = MIN_POOL, spawned: Any = 0
) -> np.random.SeedSequence:
    """Return the seed that `arguments_of` has described; any seed for no arguments.

    Args:
        numbers: The numbers of which it was made.
        spawn_key: Which child of which parent it is.
        pool_size: How many numbers it mixes.
        spawned: How many children it has.

    Raises:
        ValueError: It is not such a description.
    """
    for each in (numbers or [], spawn_key):
        if len(each) > MAX_SEED or not all(type(number) is int and number >= 0 for number in each):
            raise ValueError("no seed of a generator of numpy's")
    is_pool = type(pool_size) is int and MIN_POOL <= pool_size <= MAX_SEED
    if not is_pool or type(spawned) is not int or not 0 <= spawned < 1 << 32:
        raise ValueError("no seed of a generator of numpy's")
    return np.random.SeedSequence(
        numbers, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned
    )


def restore(generator: Any, state: Any) -> None:
    """Restore a generator's state, as `state_of` returned it.

    Raises:
        ValueError, TypeError, ...: It is not a state of such a generator.
    """
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif not isinstance(state, Mapping) or not _has_place(state):
        # numpy reads the next number wherever a state says, beyond the engine's memory, too.
        raise ValueError("no state of a generator of numpy's")
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(dict(state))
    else:
        engine = engine_of(generator)
        engine.state = state
        _count_as_spawned(engine.seed_seq, state.get(SPAWNED, 0))


def _count_as_spawned(seed: Any, number: Any) -> None:
    """Let a seed count so many children, if it has fewer; to spawn a million takes seconds."""
    if type(number) is not int or not 0 <= number < 1 << 32:
        raise ValueError(f"{number} generators to spawn")
    if type(seed) is not np.random.SeedSequence or number <= seed.n_children_spawned:
        return
    other = np.random.SeedSequence(
        seed.entropy,
        spawn_key=seed.spawn_key,
        pool_size=seed.pool_size,
        n_children_spawned=number,
    )
    reduced: Any = other.__reduce__()  # how pickle takes it: the state is last, or last but in it
    seed.__setstate__(reduced[2] if len(reduced) > 2 else reduced[1][-1])  # type: ignore[attr-defined]


def _has_place(state: Mapping[str, Any]) -> bool:
    """Return whether the next number of an engine of numpy's is one of those that it has."""
    engine = state["bit_generator"]
    if engine not in PLACES:
        return True
    place = state["buffer_pos"] if engine == "Philox" else state["state"]["pos"]
    return bool(0 <= place <= PLACES[engine])
