"""Objects with a state of their own and no attributes: generators, counters, shared numbers."""

import ctypes
import io
import itertools
import multiprocessing.sharedctypes
import random
import threading
import warnings
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sagemaker_lightning.compat.torch_data import ITERATOR_CLASS
from sagemaker_lightning.state import generators
from sagemaker_lightning.state.graph import fingerprints
from sagemaker_lightning.state.graph.kinds.base import Kind, NotSaved, kind_text, refusal
from sagemaker_lightning.state.object_graph import (
    added_to,
    attributes,
    has_namespace,
    has_place_for,
    is_library_class,
)

ENGINES = "PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"
"""The engines of numpy's generators."""
MAX_DEPTH = 8


def to_record(value: Any) -> Any:
    """Return a generator's state in numbers, text, tensors, lists and dicts with text keys."""
    if isinstance(value, tuple):
        return {"tuple": [to_record(element) for element in value]}
    if isinstance(value, dict):
        return {"dict": {key: to_record(element) for key, element in value.items()}}
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(value.astype(np.int64)), "dtype": value.dtype.str}
    if isinstance(value, np.generic):
        return value.item()
    return value.clone() if isinstance(value, Tensor) else value


def of_record(value: Any, depth: int = 0) -> Any:
    """Return the state that `to_record` was given."""
    if not isinstance(value, dict) or depth > MAX_DEPTH:
        return value
    if "tuple" in value:
        return tuple(of_record(element, depth + 1) for element in value["tuple"])
    if "array" in value:
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in "iu":  # text of any length
            raise refusal("generator")
        return value["array"].numpy().astype(dtype)
    return {key: of_record(element, depth + 1) for key, element in value["dict"].items()}


class WithAttributes(Kind):
    """A kind of objects that have a state, and attributes if they are of a user's class.

    The note has the names of these.
    """

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the names and values of the attributes that a user's class has added."""
        if is_library_class(type(value)) or not has_namespace(value):
            return None, []
        added = attributes(added_to(value))
        return list(added), list(added.values())

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return the name of an attribute."""
        return f".{note[index]}"

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Set the attributes."""
        if not isinstance(note, list) or not has_namespace(value):
            return
        owner = added_to(value)
        for name in attributes(owner).keys() - note:
            del vars(value)[name]
        for name, part in zip(note, parts, strict=True):
            if has_place_for(owner, name, part):
                vars(value)[name] = part


class GeneratorKind(WithAttributes):
    """A generator of random numbers; those of the process are seeded elsewhere."""

    name = "generator"

    def mark(self, value: Any) -> bytes:
        """Return a hash of the state."""
        if generators.is_global(value):
            return b""
        state = generators.state_of(value)
        if isinstance(state, Tensor):
            return fingerprints.of_tensor(state)
        return fingerprints.of_bytes(repr(_readable(state)).encode())

    def content(self, value: Any) -> Any:
        """Return the state."""
        return to_record(generators.state_of(value))

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return the class of the generator; of one of numpy's, its engine, and its seed."""
        if type(value) is np.random.Generator:
            name = type(value.bit_generator).__name__
            if name in ENGINES:
                return [name, *generators.seed_of(value)]
        if type(value) in (random.Random, np.random.RandomState):
            return type(value).__name__
        if type(value) is torch.Generator and value.device.type == "cpu":
            return "torch"
        raise NotSaved(kind_text(value))

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> Any:
        """Return a generator of that class."""
        if type(note) is list:
            engine, *seed = note
            if engine not in ENGINES:
                raise refusal(self.name)
            return np.random.Generator(getattr(np.random, engine)(generators.seed_sequence(*seed)))
        made = {
            "Random": random.Random,
            "RandomState": np.random.RandomState,
            "torch": torch.Generator,
        }
        return made[note]()

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Set the state, and the attributes."""
        if content is not None:  # a part has it, which knows when it is restored
            generators.restore(value, of_record(content))
        super().fill(value, note, parts, content)


def _readable(state: Any) -> Any:
    """Return a state with the numbers of its arrays, of which a long array's text has but a few."""
    if isinstance(state, dict):
        return {key: _readable(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


BUFFERS = (
    bytearray,
    array,
    multiprocessing.sharedctypes.SynchronizedBase,
    ctypes._SimpleCData,  # noqa: SLF001 (the base of all numbers has no public name)
    ctypes.Array,
)
"""The classes of a BytesKind."""


class BytesKind(WithAttributes):
    """An object whose content is bytes that are written in place: a bytearray, a shared number."""

    name = "bytes"

    def mark(self, value: Any) -> bytes:
        """Return a hash of the bytes."""
        return fingerprints.of_bytes(bytes(memory_of(value)))

    def content(self, value: Any) -> Any:
        """Return the bytes."""
        return bytes(memory_of(value))

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return the kind of the object."""
        if type(value) is bytearray:
            return "bytearray"
        if type(value) is array:
            return value.typecode
        raise NotSaved(kind_text(value))

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> Any:
        """Return such an object with its content."""
        if not isinstance(content, bytes):
            raise refusal(self.name)
        return bytearray(content) if note == "bytearray" else array(note, content)

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Replace the bytes, and set the attributes."""
        if not isinstance(content, bytes):
            raise refusal(self.name)
        super().fill(value, note, parts, content)
        if isinstance(value, bytearray):
            value[:] = content
        elif isinstance(value, array):
            value[:] = array(value.typecode, content)
        else:
            memory_of(value)[:] = content  # of the same length, or it is refused


def memory_of(value: Any) -> memoryview:
    """Return the memory of an object that is a buffer, or that shares one between processes."""
    if isinstance(value, multiprocessing.sharedctypes.SynchronizedBase):
        value = value.get_obj()
    return memoryview(value).cast("B")


TEXT = "utf-8", "surrogatepass"
"""The encoding of any text."""
MAX_STREAM = 1 << 26
"""Characters or bytes, at most, before the position of a stream: code writes on from there."""


class StreamKind(Kind):
    """A file in memory: its content is all of it, and its note where code reads and writes on."""

    name = "stream"

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the position; None of one that is closed."""
        return [None if value.closed else value.tell()], []

    def mark(self, value: Any) -> bytes:
        """Return a hash of all of it."""
        return b"" if value.closed else fingerprints.of_bytes(self.content(value))

    def content(self, value: Any) -> Any:
        """Return all of it as bytes."""
        if value.closed:
            raise NotSaved(f"closed {kind_text(value)}")
        whole, *_ = _state_of(value)
        return whole.encode(*TEXT) if isinstance(whole, str) else whole

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return which class it is, how it ends lines, and the position."""
        if value.closed:
            raise NotSaved(f"closed {kind_text(value)}")
        newline = _state_of(value)[1] if type(value) is io.StringIO else None
        return [type(value).__name__, newline, *note]

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> Any:
        """Return an empty one."""
        name, newline, _ = note
        return io.StringIO(newline=newline) if name == "StringIO" else io.BytesIO()

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Replace all of it, unless it stays as it is, and go to the position."""
        position = note[-1]
        if type(position) is not int or not 0 <= position <= MAX_STREAM:
            raise refusal(self.name)
        if content is None:
            value.seek(position)
            return
        if not isinstance(content, bytes):
            raise refusal(self.name)
        # How it ends lines stays as it is.
        state: tuple[Any, ...] = (content,)
        if type(value) is io.StringIO:
            state = content.decode(*TEXT), _state_of(value)[1]
        value.__setstate__((*state, position, None))


class ReadFileKind(Kind):
    """A file that is open to be read alone: its content is the place where code reads on.

    Python does not tell the place in a text file whose lines a loop takes: it is left to the loop.
    """

    name = "file"

    def mark(self, value: Any) -> bytes:
        """Return the place, or as much of it as is known."""
        place = self.place(value)
        return f"in {value.buffer.tell()}".encode() if place is None else place.encode()

    def content(self, value: Any) -> Any:
        """Return the place."""
        if (place := self.place(value)) is None:
            raise NotSaved(kind_text(value))
        return place

    @staticmethod
    def place(value: Any) -> str | None:
        """Return the place as text, as it may be a large number.

        It is "" if the file is closed, and None within a loop that takes lines.
        """
        try:
            return "" if value.closed else str(value.tell())
        except OSError:
            return None

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Raise NotSaved: a checkpoint opens no file."""
        raise NotSaved(kind_text(value))

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Go to the place, or close the file."""
        if content == "":
            value.close()
        elif content is not None and self.place(value) is not None:
            value.seek(int(content))


def is_read(value: Any) -> bool:
    """Return whether a value is a file that code reads, and does not write."""
    if not isinstance(value, io.IOBase) or isinstance(value, fingerprints.STREAMS):
        return False
    try:
        if value.closed:
            mode = str(getattr(value, "mode", ""))
            return mode.startswith("r") and "+" not in mode
        return value.seekable() and value.readable() and not value.writable()
    except (OSError, ValueError):  # such as a text file that has given its buffer away
        return False


def _state_of(stream: Any) -> tuple[Any, ...]:
    """Return all of a stream, of one of text how it ends lines, and the position."""
    state: tuple[Any, ...] = stream.__getstate__()
    return state


class FlagKind(Kind):
    """An Event of threads or processes: its note is whether it is set."""

    name = "flag"

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return whether it is set."""
        return value.is_set(), []

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return whether it is set, of one that threads share."""
        if type(value) is not threading.Event:
            raise NotSaved(kind_text(value))
        return note

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> Any:
        """Return an Event."""
        return threading.Event()

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Set it, or clear it."""
        if note is True:
            value.set()
        else:
            value.clear()


class CountKind(Kind):
    """An itertools.count, which no code sets back: another one takes its place."""

    name = "count"
    fills = False

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the next number and the step."""
        _, numbers = value.__reduce__()
        start, step = (*numbers, 1)[:2]
        return [start, step], []

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return the numbers."""
        if not {int, float}.issuperset(map(type, note)):
            raise NotSaved(kind_text(value))
        return note

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Any:
        """Return a count from there."""
        start, step = note
        if type(start) not in (int, float) or type(step) not in (int, float):
            raise refusal(self.name)
        return itertools.count(start, step)


class SeedKind(Kind):
    """A seed of numpy's, which counts its children: another one takes its place."""

    name = "seed"
    fills = False

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the numbers of which it was made, and how many children it has."""
        return [*generators.arguments_of(value), value.n_children_spawned], []

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Any:
        """Return a seed with as many children."""
        if len(note) != 4:
            raise refusal(self.name)
        return generators.seed_sequence(*note)


class IteratorKind(Kind):
    """An iterator over a sequence: its part is the sequence, and its note the position.

    That of a range has the range's numbers in its note, too. No code sets all of them back: another
    one takes its place.
    """

    name = "iterator"
    fills = False

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the number of elements that it has yielded, None for all, and the sequence.

        At its end, no iterator has a sequence: all ended ones are alike.
        """
        place = place_in_sequence(value)
        assert place is not None  # nodes.kind_of has asked
        sequence, position = place
        if type(sequence) is range:
            return [position, sequence.start, sequence.stop, sequence.step], []
        return [position], [() if position is None else sequence]

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return nothing: what it yields has the name of the attribute."""
        return "()"

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return the position."""
        if type(note[0]) is int and note[0] > MAX_POSITION:
            raise NotSaved(kind_text(value))
        return note

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Any:
        """Return an iterator that has yielded as many."""
        position, *numbers = note
        if numbers:
            if [type(number) for number in numbers] != [int] * 3 or not numbers[2]:
                raise refusal(self.name)
            parts = [range(*numbers)]
        (sequence,) = parts
        if position is None:
            next(ended := iter(()), None)
            return ended
        if type(sequence) not in SEQUENCES or type(position) is not int:
            raise refusal(self.name)
        if not 0 <= position <= MAX_POSITION:
            raise refusal(self.name)
        # A list gets its elements later, and no iterator goes beyond the end.
        lacks = range(position + 1 - len(sequence)) if type(sequence) is list else ()
        if lacks:
            sequence.extend(lacks)
        iterator: Any = self.begin(sequence)
        iterator.__setstate__(position)
        if lacks:
            del sequence[-len(lacks) :]
        return iterator

    def begin(self, sequence: Any) -> Any:
        """Return an iterator at its beginning."""
        return iter(sequence)


class ReversedKind(IteratorKind):
    """An iterator over a sequence from its end: its note is the index of what comes next."""

    name = "reversed"

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the index, None at the end, and the sequence."""
        _, (sequence,), *position = value.__reduce__()
        is_over = not position or position[0] < 0
        return ([None], [()]) if is_over else ([*position], [sequence])

    def begin(self, sequence: Any) -> Any:
        """Return an iterator at the end."""
        return reversed(sequence)


class JoinedKind(Kind):
    """An `enumerate` or a `zip`: its parts are iterators, of which each has a position."""

    name = "joined"
    fills = False

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the next number of an `enumerate`, or whether a `zip` is strict; the iterators."""
        _, parts, *strict = value.__reduce__()
        if isinstance(value, zip):
            return ["zip", bool(strict)], [*parts]
        return ["enumerate", parts[1]], [parts[0]]

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return nothing: what it yields has the name of the attribute."""
        return "()"

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return the note."""
        return note

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Any:
        """Return one that is as far; no code of the program runs."""
        name, state = note
        if not all(type(part) in POSITIONED for part in parts):
            raise refusal(self.name)
        if name == "zip":
            return zip(*parts, strict=state is True)
        if name != "enumerate" or type(state) is not int or len(parts) != 1:
            raise refusal(self.name)
        return enumerate(parts[0], state)


class CycleKind(IteratorKind):
    """An itertools.cycle: from its second round on, its part is a list of what it yields.

    In the first round over what is not a sequence, its parts are an iterator, which has a position,
    and a list of what it has yielded.
    """

    name = "cycle"

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the position in the round, and what the round yields."""
        if (place := place_in_cycle(value)) is None:
            parts = first_round(value)
            assert parts is not None  # as above
            return ["first"], [*parts]
        sequence, position = place
        return [position], [sequence]

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Any:
        """Return a cycle that is as far."""
        if note == ["first"]:
            iterator, yielded = parts
            if type(iterator) not in POSITIONED or type(yielded) is not list:
                raise refusal(self.name)
            return _cycle(iterator, yielded, is_first=True)
        iterator = super().build(note, parts, classes)
        ((position,), (sequence,)) = note, parts
        if position is None:
            return itertools.cycle(iterator)
        if type(sequence) is not list:  # a range may be longer than the memory
            cycle = itertools.cycle(self.begin(sequence))
            next(itertools.islice(cycle, position, position), None)
            return cycle
        return _cycle(iterator, sequence, is_first=False)


def _cycle(iterator: Any, yielded: list[Any], is_first: bool) -> "itertools.cycle[Any]":
    cycle = itertools.cycle(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        cycle.__setstate__((yielded, not is_first))  # type: ignore[attr-defined]  # no stub has it
    return cycle


MAX_POSITION = 1 << 20
"""Elements, at most, that an iterator has yielded of a sequence: a forged one takes no more."""
SEQUENCES = list, tuple, str, range, np.ndarray
OF_EACH_CLASS: tuple[Iterable[Any], ...] = [], (), "", "\xe4", range(1), np.zeros(1)
ITERATORS = frozenset(type(iter(each)) for each in OF_EACH_CLASS)
"""The classes of iterators over such sequences; that of arrays may also be another object's."""


RANGE_ITERATOR = type(iter(range(1)))
REVERSED: tuple[type[Any], ...] = reversed, type(reversed([]))
JOINED: tuple[type[Any], ...] = enumerate, zip
POSITIONED = ITERATORS | {itertools.count, itertools.cycle, *REVERSED, *JOINED, ITERATOR_CLASS}
"""The classes of iterators of which a record may have the position."""


def is_over_sequence(iterator: Any) -> bool:
    """Return whether an iterator of `reversed` is over one of Python's sequences, or an array."""
    _, (sequence,), *_ = iterator.__reduce__()
    return type(sequence) in SEQUENCES


def place_in_sequence(iterator: Any) -> tuple[Any, int | None] | None:
    """Return over which sequence an iterator goes, and where it is; None if that is not known.

    One that has come to its end knows its sequence no more: it is nowhere in an empty one. From
    Python 3.12 on, one over a range knows the rest of it alone, without a position.
    """
    if type(iterator) not in ITERATORS:
        return None
    _, (sequence,), *position = iterator.__reduce__()
    if type(sequence) not in SEQUENCES:
        return None
    return sequence, min(position[0] or 0, len(sequence)) if position else None


def place_in_cycle(cycle: "itertools.cycle[Any]") -> tuple[Any, int | None] | None:
    """Return what a cycle yields in a round, and where it is; None if that is not known.

    Python tells it up to 3.13 (https://docs.python.org/3/whatsnew/3.14.html, itertools). For a
    range in its first round, Python may know the rest alone.
    """
    parts = _parts_of_cycle(cycle)
    if parts is None or (type(parts[0]) is RANGE_ITERATOR and not parts[2]):
        return None
    return place_in_sequence(parts[0])


def first_round(cycle: "itertools.cycle[Any]") -> tuple[Any, list[Any]] | None:
    """Return the iterator of a cycle in its first round, and what it has yielded; None later."""
    parts = _parts_of_cycle(cycle)
    return parts[:2] if parts and not parts[2] else None


def _parts_of_cycle(cycle: "itertools.cycle[Any]") -> tuple[Any, list[Any], bool] | None:
    """Return a cycle's iterator, what it has yielded, and whether its first round is over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            _, (iterator,), (yielded, is_over) = cast(tuple[Any, ...], cycle.__reduce__())
        except (TypeError, ValueError):
            return None
    return iterator, yielded, bool(is_over)
