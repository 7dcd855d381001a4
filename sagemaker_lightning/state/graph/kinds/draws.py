"""The order in which a DataLoader that user code iterates over draws its samples.

An iterator of a DataLoader has attributes and one thing more: a Python generator, which goes over
the indices that a sampler gives. What is done is known by how it began: torch's samplers draw an
order from a generator of random numbers. `watching` notes its state before the first index, and
counts. Another one takes its place that draws the same order and goes over what is done.
"""

import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from sagemaker_lightning.compat.torch_data import watching_draws
from sagemaker_lightning.compat.torch_modules import version_of
from sagemaker_lightning.state.graph.kinds.base import Kind, NotSaved, kind_text, refusal

SAMPLERS = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
"""The samplers of which an order follows from their attributes and a generator's state."""
PLAIN = int, float, str, bool, tuple
MAX_DRAWN = 1 << 24
"""Indices, at most, that a generator has given: a forged record takes no more time."""


class Begun:
    """How a generator over indices has begun, and how far it is.

    Args:
        sampler: What it goes over.
        states: The states of the generators of random numbers that it draws from, before its first
            index: of torch's for the process, and of the sampler's own; None if it has none.
        count: How many it has given.
    """

    def __init__(self, sampler: Any, states: list[Tensor | None], count: int = 0) -> None:
        self.sampler = sampler
        self.states = states
        self.count = count
        self.attributes: list[Any] | None = None

    def note_attributes(self) -> None:
        """Keep what the order depends on, to know whether it still is what it was."""
        self.attributes = _attributes(self.sampler)

    def still_tells(self) -> bool:
        """Return whether the sampler is as it was when the order was drawn."""
        now = _attributes(self.sampler)
        return self.attributes is None or (
            len(now) == len(self.attributes) and all(map(_is_alike, now, self.attributes))
        )


def _is_alike(value: Any, before: Any) -> bool:
    is_plain = type(value) in PLAIN and type(before) in PLAIN
    return value is before or (is_plain and value == before)


_begun: weakref.WeakKeyDictionary[Iterator[Any], Begun] = weakref.WeakKeyDictionary()


def watching() -> AbstractContextManager[None]:
    """Note, in the block, how each iteration over a DataLoader begins, and how far it is."""
    return watching_draws(_draw)


def _draw(indices: Any, sampler: Any, draw: Callable[[], Any]) -> Any:
    if type(indices) is not types.GeneratorType:
        return draw()
    known = _begun.get(indices)
    if known is None and _is_new(indices) and _is_of_torch(sampler):
        known = _begun[indices] = Begun(sampler, [None, None])
    if known is not None and not known.count:
        known.states = _states(sampler)
        known.note_attributes()
    drawn = draw()
    if known is not None:
        known.count += 1
    return drawn


def _is_of_torch(sampler: Any) -> bool:
    """Return whether the order of a sampler is known by how it began."""
    return type(_innermost(sampler)) in SAMPLERS


def how_begun(indices: Any) -> Begun | None:
    """Return how a generator over indices has begun; None if that is not known, or not any more."""
    if type(indices) is not types.GeneratorType:
        return None
    if (known := _begun.get(indices)) is not None:
        return known if known.still_tells() else None
    sampler = inspect.getgeneratorlocals(indices).get("self") if _is_new(indices) else None
    return Begun(sampler, [None, None]) if _is_of_torch(sampler) else None


def _is_new(indices: Any) -> bool:
    return inspect.getgeneratorstate(indices) == inspect.GEN_CREATED


def _innermost(sampler: Any) -> Any:
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def _own_generator(sampler: Any) -> torch.Generator | None:
    generator = getattr(_innermost(sampler), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _states(sampler: Any) -> list[Tensor | None]:
    own = _own_generator(sampler)
    return [torch.get_rng_state(), None if own is None else own.get_state()]


def _attributes(sampler: Any) -> list[Any]:
    """Return what the order of a sampler depends on: objects by identity, tensors by version."""
    values: list[Any] = []
    for each in dict.fromkeys((sampler, _innermost(sampler))):
        for name, value in vars(each).items():
            is_sequence = isinstance(value, (list, range)) and name != "data_source"
            values += [name, tuple(value) if is_sequence else value]
            values += [version_of(value)] if isinstance(value, Tensor) else []
            values += [len(value)] if hasattr(value, "__len__") else []
    return values


@contextmanager
def _with_states(sampler: Any, states: list[Tensor | None]) -> Iterator[None]:
    """Set generators of random numbers, in the block, to the states that they had."""
    generators = torch.default_generator, _own_generator(sampler)
    now = _states(sampler)
    try:
        _set_states(generators, states)
        yield
    finally:
        _set_states(generators, now)


def _set_states(
    generators: tuple[torch.Generator | None, ...], states: list[Tensor | None]
) -> None:
    for generator, state in zip(generators, states, strict=True):
        if generator is not None and state is not None:
            generator.set_state(state)


def _continued(begun: Begun) -> Iterator[Any]:
    """Draw the order again when first asked, go over what was done, and give the rest."""
    if not begun.count:
        yield from begun.sampler
        return
    begun.note_attributes()
    with _with_states(begun.sampler, begun.states):
        indices = iter(begun.sampler)
        for _ in range(begun.count):
            next(indices, None)
    yield from indices


class DrawsKind(Kind):
    """A generator over a sampler's indices: its part is the sampler, its note how it began."""

    name = "draws"
    fills = False

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the generators' states as text, and how many were given; the sampler."""
        known = how_begun(value)
        assert known is not None  # nodes.kind_of has asked
        texts = [None if state is None else state.numpy().tobytes().hex() for state in known.states]
        return [*texts, known.count], [known.sampler]

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return the note."""
        if note[-1] > MAX_DRAWN:
            raise NotSaved(kind_text(value))
        return note

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Any:
        """Return one that draws the order again when it is first asked."""
        if type(note) is not list or len(note) != 3 or len(parts) != 1:
            raise refusal(self.name)
        *texts, count = note
        (sampler,) = parts
        if type(count) is not int or not 0 <= count <= MAX_DRAWN:
            raise refusal(self.name)
        states = [None if text is None else _state_of(text) for text in texts]
        known = Begun(sampler, states, count)
        indices = _continued(known)
        _begun[indices] = known
        return indices


def _state_of(text: Any) -> Tensor:
    if type(text) is not str:
        raise refusal(DrawsKind.name)
    state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
    torch.Generator().set_state(state)  # which refuses what is not a state
    return state
