"""How torch reads a file with `weights_only=True`, bounded by the file's size.

It makes bytes of text by `codecs.encode`, of any encoding: by "hex", a file of 600 bytes makes
hundreds of megabytes, and one of 800 bytes all that a machine has. Pickle itself writes bytes by
"latin1" alone (`save_bytes` in pickle.py, protocol 2). And `bytearray` makes as many bytes as a
number in the file says; pickle gives it bytes or their text.

It puts keys into dicts and sets, of which Python compares those with one hash with each other.
Whole numbers have one hash if they differ by a multiple of 2**61 - 1: with 16,000 such keys, a file
of 200 kB takes 1.4 seconds, and four times as long with each doubling.

On an upgrade: see torch/_weights_only_unpickler.py: whether the result of `_get_allowed_globals` is
still one dict, which of the functions in it return more than they get or hash what they get, and
whether `Unpickler.load` calls `pop_mark` and `_check_set_item_target` before it sets items.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from pickle import UnpicklingError
from typing import Any

from torch import _weights_only_unpickler

ENCODE = "_codecs.encode"
MAX_ALIKE = 1 << 10
"""Keys of a dict, or elements of a set, that have one hash, at most."""


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


class _Unpickler(_weights_only_unpickler.Unpickler):
    """torch's reader, which counts the keys of each large dict that have one hash."""

    def load(self) -> Any:
        """Return what the file has."""
        self.popped: list[Any] = []
        self.large: dict[int, tuple[dict[Any, Any], Counter[Any]]] = {}
        """Each dict of many keys, by its id, and how often it has a hash."""
        return super().load()  # type: ignore[no-untyped-call]

    def pop_mark(self) -> list[Any]:
        """Return the newest values: what is set next, keys and values in turn."""
        self.popped = super().pop_mark()  # type: ignore[no-untyped-call]
        return self.popped

    def _check_set_item_target(self, opcode: str) -> None:
        super()._check_set_item_target(opcode)
        target = self.stack[-1]
        # A single key is not to be seen before it is set.
        newest = [next(reversed(target))] if target else []
        keys = self.popped[::2] if opcode == "SETITEMS" else newest
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
