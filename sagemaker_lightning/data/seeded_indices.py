"""The indices that a DataLoader asks its dataset for: iterating over them seeds.

Each sample is seeded as its index is taken. So the dataset stays as it is, and a data worker needs
no state: what a sample draws is a function of (seed, epoch, position). This holds for the process's
generators and for those that the dataset holds. Where samples draw nothing, they need no seeds:
`Draws` finds that out.
"""

import functools
import hashlib
import itertools
import os
import random
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pytorch_lightning.utilities.seed import isolate_rng

from sagemaker_lightning.compat.random_generators import process_marks, seed_python
from sagemaker_lightning.state import generators
from sagemaker_lightning.state.object_graph import has_namespace, walk

MAX_OBJECTS = 64  # number of objects whose attributes are looked at for each batch


def number_of(*key: object) -> int:
    """Return a number from 0 to 2**63 - 1 that is a hash of `key`."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Unseeded:
    """The seeds of generators made without one, as by `np.random.default_rng()`.

    In a thread that draws for training, such a seed depends on the last `seed_all` and on the
    number of generators made since. The operating system's entropy would differ in a resumed run.
    Other threads get that entropy.
    """

    thread = number = count = 0

    def begin(self, number: int) -> None:
        """Count from 0, and decide the seeds by `number`, in this thread."""
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
        """Use the operating system's entropy again.

        This is for a child process, which is not a data worker until it starts as one.
        """
        self.thread = 0


unseeded = _Unseeded()
os.register_at_fork(after_in_child=unseeded.end)


@contextmanager
def draws_undone() -> Iterator[None]:
    """Leave the generators of random, numpy and torch as they are, whatever is drawn meanwhile."""
    count = unseeded.count
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):
        yield
    unseeded.count = count


def seed_all(*key: object) -> int:
    """Seed random, numpy and torch, on CPU and GPU, with a hash of `key`.

    Returns the number that is the seed.
    """
    number = number_of(*key)
    seed_by(number)
    return number


def seed_by(number: int) -> None:
    """Seed random, numpy and torch, on CPU and GPU.

    It takes 10 us, and several times that where other code ran before: it is done for each sample.
    """
    unseeded.begin(number)
    seed_python(number)
    np.random.seed(number & 0xFFFFFFFF)
    # torch.manual_seed takes 0.4 ms where there is no GPU.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


class UserGenerators:
    """The generators that the user's objects hold, besides those of the process.

    They are not looked for before `find`.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = roots
        self.batches = 0
        self.generators: dict[str, Any] = {}

    def find(self) -> None:
        """Find the generators that there are now."""
        self.generators = generators.find(self.roots)
        few = itertools.islice(walk(self.roots, code=False), MAX_OBJECTS)
        self.holders = [holder for _, holder in few if has_namespace(holder)]
        self.types = self._attribute_types()

    def _attribute_types(self) -> list[list[type]]:
        return [list(map(type, vars(holder).values())) for holder in self.holders]

    def more(self) -> bool:
        """Return whether drawing a batch has made new generators.

        The objects are searched after the first batches, after every 64th, and when an attribute's
        type has changed or an attribute was added.
        """
        self.batches += 1
        if self.batches > 4 and self.batches % 64 and self._attribute_types() == self.types:
            return False
        known = self.generators.keys()
        self.find()
        return not self.generators.keys() <= known


SEED_READERS = (
    (torch, "initial_seed"),
    (torch.random, "initial_seed"),
    (torch, "get_rng_state"),
    (torch.random, "get_rng_state"),  # fork_rng calls it
    (np.random, "get_state"),
    (random, "getstate"),
)
"""Functions that tell a seed, or a state, by which one may draw without a trace."""


class Draws:
    """Finds out whether samples depend on the seeds of the process's generators.

    They do if anything is drawn after `begin`, or if somebody asks for a seed or a state, as for a
    generator of a sample's own. Samples are made within `with` this object.
    """

    def __init__(self) -> None:
        self.found = False
        self.states: tuple[Any, ...] | None = None
        self.places = [(vars(owner), name) for owner, name in SEED_READERS]
        self.readers = [
            functools.partial(self._note_and_call, variables[name])
            for variables, name in self.places
        ]
        self.replaced: list[Any] = []

    def _note_and_call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.found = True
        return function(*arguments, **options)

    def __enter__(self) -> None:
        self.found = False
        self.replaced = [variables[name] for variables, name in self.places]
        self._set(self.readers)

    def __exit__(self, *error: object) -> None:
        self._set(self.replaced)

    def _set(self, functions: list[Any]) -> None:
        for (variables, name), function in zip(self.places, functions, strict=True):
            variables[name] = function

    def begin(self) -> None:
        """Note the generators' states, from which samples draw next if they draw."""
        self.states = unseeded.count, process_marks()

    def look(self) -> bool:
        """Return whether samples have depended on a seed since this object was entered."""
        if not self.found and self.states is not None:
            self.found = (unseeded.count, process_marks()) != self.states
        return self.found


class SeededIndices(list[Any]):
    """The indices of a batch; iterating over them seeds each sample's draws.

    Args:
        indices: What the dataset is asked for.
        seed: Decides all draws, with the place of each sample.
        places: The position of each sample in the epoch.
    """

    user_generators: UserGenerators | None = None
    """The generators to seed; set in the process that draws."""
    draws: Draws | None = None
    """What looks whether samples draw; None if nobody asks."""
    numbers: Sequence[int] = ()
    """The seed of each sample; set in the process that draws."""

    def __init__(
        self, indices: Sequence[Any], seed: tuple[Any, ...], places: Sequence[Any]
    ) -> None:
        super().__init__(indices)
        self.seed = seed
        self.places = places

    def begin(self, user_generators: UserGenerators, draws: Draws | None = None) -> "SeededIndices":
        """Seed what is drawn before the first index is taken; return the keys.

        A dataset that fetches a whole batch at once draws then.
        """
        self.user_generators = user_generators
        self.draws = draws
        self.numbers = [number_of("sample", *self.seed, place) for place in self.places]
        self._seed(self.numbers[0])
        return self

    def seed_as_after_last(self) -> None:
        """Leave the generators as they are after samples that depend on none were made by keys."""
        seed_all("sample", *self.seed, self.places[-1])

    def __iter__(self) -> Iterator[Any]:
        if not self.user_generators:
            yield from super().__iter__()
            return
        for number, index in zip(self.numbers, super().__iter__(), strict=True):
            self._seed(number)
            yield index

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededIndices, (list(super().__iter__()), self.seed, self.places)

    def _seed(self, number: int) -> None:
        if self.draws:
            self.draws.look()
        assert self.user_generators is not None  # `begin` has set them
        seed_by(number)
        generators.reseed(self.user_generators.generators, number)
        if self.draws:
            self.draws.begin()


class SeededIndex:
    """An index that a DataLoader without batches asks its dataset for, with its seed."""

    def __init__(self, index: Any, seed: tuple[Any, ...], place: object) -> None:
        self.index = index
        self.seed = seed
        self.place = place

    def begin(self, user_generators: UserGenerators) -> Any:
        """Seed the sample's draws, and return the index."""
        return SeededIndices([self.index], self.seed, [self.place]).begin(user_generators)[0]
