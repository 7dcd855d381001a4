"""How torch reads a file with `weights_only=True`, bounded by the file's size.

It makes bytes of text by `codecs.encode`, of any encoding: by "hex", a file of 600 bytes makes
hundreds of megabytes, and one of 800 bytes all that a machine has. Pickle itself writes bytes by
"latin1" alone (`save_bytes` in pickle.py, protocol 2). And `bytearray` makes as many bytes as a
number in the file says; pickle gives it bytes or their text. By six bytes of a file, each of these
functions is called once more with what it has got before: a megabyte of text becomes gigabytes.

It puts keys into dicts and sets, of which Python compares those with one hash with each other.
Whole numbers have one hash if they differ by a multiple of 2**61 - 1: with 16,000 such keys, a file
of 200 kB takes 1.4 seconds, and four times as long with each doubling. Python hashes the parts of a
tuple again at each place: a file of 1 kB has a key with 2**60 parts, as each tuple has the one
before twice. A key of 200,000 tuples within each other ends the process.

It calls what others have allowed, too (`torch.serialization.add_safe_globals`). DTensors bring
their mesh, which waits for other processes when it is made. What torch.save writes of plain values
calls few functions, and a checkpoint of ours has no others.

So each instruction is looked at before it is done.

On an upgrade: see torch/_weights_only_unpickler.py: whether the result of `_get_allowed_globals` is
still one dict, which of the functions in it return more than they get, which instructions hash or
call, and how often `Unpickler.load` calls `read` for each instruction (`ARGUMENTS`).
"""

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import _utils, _weights_only_unpickler, serialization

ENCODE = "_codecs.encode"
MAX_ALIKE = 1 << 10
"""Keys of a dict, or elements of a set, that have one hash, at most."""


PARTS_PER_BYTE = 1 << 6
SPARE_PARTS = 1 << 18
"""Parts of tuples that are hashed, at most: for each byte that is read, and besides."""
MAX_NESTED = 1 << 12
"""How often a key may be within another tuple; Python's stack has room for 20 times as many."""
SPARE_BYTES = 1 << 16
"""What may be made by calls besides what the bytes that are read allow."""
ARGUMENTS = dict.fromkeys(
    (
        *(pickle.PROTO, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT),
        *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.BINFLOAT),
    ),
    1,
) | dict.fromkeys((pickle.BINUNICODE, pickle.SHORT_BINSTRING, pickle.LONG1), 2)
"""How often torch's reader reads on after an instruction, before the next one."""
CALLS = pickle.REDUCE, pickle.NEWOBJ

_is_plain: ContextVar[bool] = ContextVar("is_plain", default=False)


def parts_of_tuple(value: Any) -> Sequence[Any]:
    """Return the parts of a tuple, each of which Python hashes with it; none of another value."""
    return value if issubclass(type(value), tuple) else ()


class HashedParts:
    """Counts what Python goes through when it hashes keys.

    Args:
        size: The bytes in which the keys came.
        parts_of: Returns what is hashed of a key, each time that the key is.
    """

    def __init__(
        self, size: int, parts_of: Callable[[Any], Sequence[Any]] = parts_of_tuple
    ) -> None:
        self.left = PARTS_PER_BYTE * size + SPARE_PARTS
        self.parts_of = parts_of

    def are_too_many(self, keys: Iterable[Any]) -> bool:
        """Return whether keys, with those before, are too much to hash; they are counted."""
        stack = [(parts, 0) for key in keys if (parts := self.parts_of(key))]
        while stack:
            values, depth = stack.pop()
            self.left -= len(values)
            if self.left < 0 or depth > MAX_NESTED:
                return True
            stack += [(parts, depth + 1) for each in values if (parts := self.parts_of(each))]
        return False


@contextmanager
def plain_values() -> Iterator[None]:
    """Read nothing but what torch.save writes of plain values while the block lasts."""
    token = _is_plain.set(True)
    try:
        yield
    finally:
        _is_plain.reset(token)


def bound() -> None:
    """Let no file that is read with `weights_only=True` take more bytes or time than its size."""
    allowed = _weights_only_unpickler._get_allowed_globals()
    allowed[ENCODE] = _to_bytes
    allowed["builtins.bytearray"] = _to_bytearray
    allowed["builtins.set"] = _to_set
    allowed["collections.Counter"] = _to_counter
    allowed["collections.OrderedDict"] = _to_ordered_dict
    _weights_only_unpickler.Unpickler = _Unpickler  # type: ignore[misc]  # replaced on purpose


def _to_bytes(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise UnpicklingError("bytes in it are not as pickle writes them")
    return text.encode("latin1")


def _to_bytearray(content: Any = b"", encoding: Any = None) -> bytearray:
    if isinstance(content, bytes) and encoding is None:
        return bytearray(content)
    if isinstance(content, str) and encoding == "latin-1":  # as pickle writes it
        return bytearray(content, encoding)
    raise UnpicklingError("a bytearray in it is not as pickle writes it")


def _to_set(elements: list[Any]) -> set[Any]:
    if not isinstance(elements, list):
        raise UnpicklingError("a set in it is not as pickle writes it")
    _count(Counter(), elements)
    return set(elements)


def _to_counter(counts: dict[Any, Any]) -> Counter[Any]:
    if not isinstance(counts, dict):
        raise UnpicklingError("a Counter in it is not as pickle writes it")
    return Counter(counts)


def _to_ordered_dict(pairs: Iterable[Any] = ()) -> OrderedDict[Any, Any]:  # Python 2 wrote pairs
    entries = [(key, value) for key, value in pairs]
    _count(Counter(), [key for key, _ in entries])
    return OrderedDict(entries)


OF_PLAIN_VALUES = (
    _to_bytes,
    _to_bytearray,
    _to_set,
    _to_counter,
    _to_ordered_dict,
    complex,
    torch.Size,
    torch.device,
    serialization._get_layout,
    _utils._rebuild_tensor_v2,
    _utils._rebuild_tensor_v3,
    _utils._rebuild_parameter,
    _utils._rebuild_parameter_with_state,
    _utils._rebuild_qtensor,
    _utils._rebuild_sparse_tensor,
)
"""What a file of plain values calls."""


class _Unpickler(_weights_only_unpickler.Unpickler):
    """torch's reader, which looks at each instruction before it is done."""

    def __init__(self, file: BinaryIO, *, encoding: str = "bytes") -> None:
        super().__init__(file, encoding=encoding)
        position = file.tell()
        size = file.seek(0, 2) - position
        file.seek(position)
        self.read_file = file.read
        self.read = self.read_next
        self.arguments = 0
        """How often torch's reader reads on, before the next instruction."""
        self.is_plain = _is_plain.get()
        self.hashed = HashedParts(size)
        self.bytes_left = 2 * size + SPARE_BYTES
        self.large: dict[int, tuple[dict[Any, Any], Counter[Any]]] = {}
        """Each dict of many keys, by its id, and how often it has a hash."""

    def read_next(self, count: int) -> bytes:
        """Return the next bytes: an instruction, or what belongs to one."""
        read = self.read_file(count)
        if self.arguments:
            self.arguments -= 1
            return read
        self.arguments = ARGUMENTS.get(read, 0)
        if read == pickle.SETITEM:
            self.check_keys([self.stack[-2]], self.stack[-3])
        elif read == pickle.SETITEMS:
            self.check_keys(self.stack[::2], self.metastack[-1][-1])
        elif read == pickle.BUILD:
            if type(self.stack[-2]) is OrderedDict and type(self.stack[-1]) is not dict:
                raise UnpicklingError("attributes in it are not as pickle writes them")
            self.check_arguments([self.stack[-1]])
        elif read in CALLS:
            function, arguments = self.stack[-2:]
            if self.is_plain and not any(function is each for each in OF_PLAIN_VALUES):
                name = getattr(function, "__qualname__", type(function).__name__)
                raise UnpicklingError(f"it calls {name}; expected plain values only")
            if type(arguments) is not tuple:
                raise UnpicklingError("a call in it is not as pickle writes it")
            self.check_arguments(arguments)
        return read

    def check_arguments(self, arguments: Iterable[Any]) -> None:
        """Count what a call may make of what it gets, and what it may hash."""
        for each in arguments:
            if isinstance(each, (str, bytes, bytearray, list, tuple, set, dict)):
                self.bytes_left -= len(each)
            if isinstance(each, list) and self.hashed.are_too_many(each):
                raise UnpicklingError("it would hash too much data for its size")
        if self.bytes_left < 0:
            raise UnpicklingError("it would expand far beyond its size")

    def check_keys(self, keys: list[Any], target: Any) -> None:
        """Count what a dict gets as keys."""
        if self.hashed.are_too_many(keys):
            raise UnpicklingError("it would hash too much data for its size")
        if not isinstance(target, dict):  # which torch refuses
            return
        if id(target) not in self.large:
            if len(target) + len(keys) <= MAX_ALIKE:
                return
            self.large[id(target)] = target, Counter(map(hash, target))
        _count(self.large[id(target)][1], keys)


def _count(hashes: Counter[Any], keys: Iterable[Any]) -> None:
    """Count the hashes of keys; UnpicklingError if one has come too often."""
    new = list(map(hash, keys))
    hashes.update(new)
    if any(hashes[each] > MAX_ALIKE for each in new):
        raise UnpicklingError("very many keys in it have one hash")
