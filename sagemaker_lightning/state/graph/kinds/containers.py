"""Containers: lists, dicts, sets, deques, tuples and partial functions."""

import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import getattr_static
from typing import Any

from sagemaker_lightning.compat.torch_modules import METADATA
from sagemaker_lightning.compat.torch_unpickler import parts_of_tuple
from sagemaker_lightning.state.caches import kept
from sagemaker_lightning.state.graph.kinds.base import Kind, class_name, known_class, refusal

GENERATED = "<string>"
"""The file of code that Python has made of a text, as dataclasses do."""
LEAST_ADDRESS = 1 << 32
"""No object of a 64-bit process is at a lower address, as Linux lays out its memory."""
MAX_ALIKE = 1 << 10
"""Keys of a dict, or elements of a set, that have one hash, at most."""
NAMING = (str, bytes, int, float, complex, bool, type(None))
"""Classes of keys whose text names an element of a dict."""


def pairs(parts: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a dict, whose parts are both in turn."""
    return zip(parts[::2], parts[1::2], strict=True)


def in_turn(items: dict[Any, Any]) -> list[Any]:
    """Return the keys and values of a dict in turn; the code of a user's class does not run."""
    class_ = OrderedDict if isinstance(items, OrderedDict) else dict
    parts: list[Any] = [None] * (2 * dict.__len__(items))
    parts[::2] = class_.keys(items)
    parts[1::2] = class_.values(items)
    return parts


def may_be_address(value: Any) -> bool:
    """Return whether a value may be the `id` of an object, which is another one in each process."""
    return type(value) is int and value > LEAST_ADDRESS


def step_of_dict(parts: list[Any], index: int) -> str:
    """Return the name of a key or a value of a dict, whose parts are keys and values in turn."""
    key = parts[index - index % 2]
    is_named = (type(key) in NAMING and not may_be_address(key)) or (
        type(key) is tuple
        and all(type(element) in NAMING and not may_be_address(element) for element in key)
    )
    name = f"[{key!r}]" if is_named else f"[#{index // 2}]"
    return name if index % 2 else f"{name}.key"


def check_hashes(keys: Collection[Any]) -> None:
    """Refuse very many keys with one hash, of which Python compares each with all others.

    Raises:
        UserError: There are.
    """
    if len(keys) > MAX_ALIKE and max(Counter(map(hash, keys)).values()) > MAX_ALIKE:
        raise refusal("keys")


def hashed_of(value: Any) -> Sequence[Any]:
    """Return what Python hashes of a value each time: the parts of a tuple or of a dataclass."""
    names = _hashed_fields(type(value))
    return [getattr(value, name, None) for name in names] if names else parts_of_tuple(value)


@kept
def _hashed_fields(class_: type) -> tuple[str, ...]:
    """Return the fields that a dataclass hashes by code that Python has made; () of another."""
    code = getattr(class_.__hash__, "__code__", None)
    if not is_dataclass(class_) or code is None or code.co_filename != GENERATED:
        return ()
    return tuple(
        each.name for each in fields(class_) if (each.compare if each.hash is None else each.hash)
    )


def hashed_in(kind: Kind, parts: list[Any]) -> list[Any]:
    """Return which parts of an object of a kind Python hashes."""
    if isinstance(kind, DictKind):
        return parts[::2]
    return parts if isinstance(kind, SetKind) else []


class ListKind(Kind):
    """A list."""

    name = "list"

    def take(self, value: list[Any]) -> tuple[Any, list[Any]]:
        """Return the elements."""
        return None, list.__getitem__(value, slice(None))

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> list[Any]:
        """Return an empty list."""
        return []

    def fill(self, value: list[Any], note: Any, parts: list[Any], content: Any) -> None:
        """Replace the elements."""
        list.__setitem__(value, slice(None), parts)


class DequeKind(Kind):
    """A deque; its note is its length at most."""

    name = "deque"

    def take(self, value: deque[Any]) -> tuple[Any, list[Any]]:
        """Return the elements."""
        return value.maxlen, [*deque.__iter__(value)]

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> deque[Any]:
        """Return an empty deque of that length."""
        return deque(maxlen=note)

    def fill(self, value: deque[Any], note: Any, parts: list[Any], content: Any) -> None:
        """Replace the elements."""
        deque.clear(value)
        deque.extend(value, parts)


class DictKind(Kind):
    """A dict of one of Python's classes without parameters."""

    def __init__(self, class_: type[dict[Any, Any]]) -> None:
        self.class_ = class_
        self.name = class_.__name__

    def take(self, value: dict[Any, Any]) -> tuple[Any, list[Any]]:
        """Return keys and values in turn."""
        return None, in_turn(value)

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return the key's text."""
        return step_of_dict(parts, index)

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> dict[Any, Any]:
        """Return an empty dict."""
        return self.class_()

    def fill(self, value: dict[Any, Any], note: Any, parts: list[Any], content: Any) -> None:
        """Replace the items, in their order."""
        check_hashes(parts[::2])
        dict.clear(value)
        for key, element in pairs(parts):
            dict.__setitem__(value, key, element)


class OrderedDictKind(DictKind):
    """An OrderedDict; that of a state dict has its modules' versions as an attribute."""

    def __init__(self) -> None:
        super().__init__(OrderedDict)

    def take(self, value: dict[Any, Any]) -> tuple[Any, list[Any]]:
        """Return the versions, then keys and values in turn."""
        metadata = vars(value).get(METADATA)
        return None, [metadata, None, *in_turn(value)]

    def fill(self, value: dict[Any, Any], note: Any, parts: list[Any], content: Any) -> None:
        """Replace the items, in their order."""
        metadata, _, *items = parts
        check_hashes(items[::2])
        OrderedDict.clear(value)
        for key, element in pairs(items):
            OrderedDict.__setitem__(value, key, element)
        if isinstance(metadata, dict):
            vars(value)[METADATA] = metadata


class DefaultDictKind(DictKind):
    """A defaultdict; its factory is its first part."""

    def __init__(self) -> None:
        super().__init__(defaultdict)

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the factory, then keys and values in turn."""
        return None, [value.default_factory, None, *in_turn(value)]

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Set the factory, and replace the items, in their order."""
        factory, _, *items = parts
        if factory is not None and not callable(factory):
            raise refusal(self.name)
        super().fill(value, note, items, content)
        value.default_factory = factory


NUMBERS = int, float, bool


def has_order(parts: Iterable[Any]) -> bool:
    """Return whether a set of these elements has the same order in each process.

    That of numbers, and of tuples of them, depends on what was added and removed before; that of
    text, and of objects, on hashes which each process has of its own.
    """
    return all(type(part) in NUMBERS or (type(part) is tuple and has_order(part)) for part in parts)


def loses_order(value: set[Any] | frozenset[Any], parts: list[Any]) -> bool:
    """Return whether a set that is filled again has another order, or may get one.

    The order of numbers depends on the size of the set's table, too, which Python keeps when
    elements are removed.

    Args:
        value: The set.
        parts: Its elements in their order.
    """
    if not has_order(parts):
        return False
    rebuilt = type(value)(parts)
    return list(rebuilt) != parts or sys.getsizeof(rebuilt) != sys.getsizeof(value)


class SetKind(Kind):
    """A set."""

    name = "set"

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the elements in their order; text, which has none, in that of the text."""
        class_ = set if isinstance(value, set) else frozenset
        parts = [*class_.__iter__(value)]
        if {str, bytes}.issuperset(map(type, parts)):
            parts.sort(key=repr)
        return None, parts

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return the text of an element that has one in each process."""
        return f"{{{parts[index]!r}}}" if type(parts[index]) in NAMING else f"{{#{index}}}"

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> Any:
        """Return an empty set."""
        return set()

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Replace the elements."""
        check_hashes(parts)
        set.clear(value)
        set.update(value, parts)


class FrozenSetKind(SetKind):
    """A frozenset."""

    name = "frozenset"
    fills = False

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> frozenset[Any]:
        """Return the set."""
        check_hashes(parts)
        return frozenset(parts)


class TupleKind(Kind):
    """A tuple, also a named one; its note is the name of its class, "" for a plain one.

    One of a user's class may have attributes: they follow the elements, and their names are noted.
    """

    name = "tuple"
    fills = False

    def take(self, value: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """Return the elements."""
        if type(value) is tuple:
            return "", list(value)
        variables = getattr(value, "__dict__", {})
        name = class_name(type(value))
        return [name, *variables] if variables else name, [*value, *variables.values()]

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> tuple[Any, ...]:
        """Return the tuple; the code of its class does not run."""
        if note == "":
            return tuple(parts)
        name, *names = [note] if type(note) is str else note
        class_ = known_class(classes, name)
        size = len(parts) - len(names)
        is_whole = len(getattr(class_, "_fields", parts[:size])) == size
        if not issubclass(class_, tuple) or not is_whole or size < 0:
            raise refusal(note)
        made = tuple.__new__(class_, parts[:size])
        for own_name, value in zip(names, parts[size:], strict=True):
            if type(own_name) is not str or own_name.startswith("__"):
                raise refusal(note)
            # A property of that name, as of results of scipy's, reads it and stays.
            of_class = getattr_static(class_, own_name, None)
            is_code = callable(of_class) or hasattr(type(of_class), "__get__")
            if is_code and not isinstance(of_class, property):
                raise refusal(note)
            vars(made)[own_name] = value
        return made


class PartialKind(Kind):
    """A partial function: the function, its arguments, keywords and attributes."""

    name = "partial"
    steps = ".func", ".args", ".keywords", ".__dict__"

    def take(self, value: functools.partial[Any]) -> tuple[Any, list[Any]]:
        """Return the function, the arguments, the keywords and the attributes."""
        return None, [value.func, value.args, value.keywords, vars(value)]

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return the name of the attribute."""
        return self.steps[index]

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> functools.partial[Any]:
        """Return a partial function, to be filled."""
        return functools.partial(dict)

    def fill(
        self, value: functools.partial[Any], note: Any, parts: list[Any], content: Any
    ) -> None:
        """Set function, arguments and keywords."""
        func, args, keywords, attributes = parts
        # These are the objects that it has already, if it is of the start.
        if (value.func, value.args) != (func, args) or value.keywords is not keywords:
            state = func, args, keywords, attributes
            functools.partial.__setstate__(value, state)  # type: ignore[attr-defined]  # no stub


CONTAINERS: dict[type, Kind] = {
    list: ListKind(),
    deque: DequeKind(),
    dict: DictKind(dict),
    Counter: DictKind(Counter),
    OrderedDict: OrderedDictKind(),
    defaultdict: DefaultDictKind(),
    set: SetKind(),
    frozenset: FrozenSetKind(),
    tuple: TupleKind(),
    functools.partial: PartialKind(),
}
