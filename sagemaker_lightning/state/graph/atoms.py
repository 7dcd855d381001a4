"""Values without an identity of their own: numbers, text, patterns, dates, dtypes, paths, enums."""

import datetime as dt
import enum
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from sagemaker_lightning.state.graph import scalars
from sagemaker_lightning.state.graph.kinds.base import NotSaved, class_name, known_class, refusal
from sagemaker_lightning.state.graph.kinds.memory import (
    dtype_of,
    dtype_text,
    is_readable,
    torch_dtype,
)
from sagemaker_lightning.state.object_graph import is_library_class

SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))
"""Classes whose values a record has as they are."""


def _zone(zone: dt.tzinfo | None) -> float | None:
    """Return a time zone's seconds from UTC."""
    if zone is None:
        return None
    if type(zone) is not dt.timezone:
        raise NotSaved(class_name(type(zone)))
    return zone.utcoffset(None).total_seconds()


def _of_zone(seconds: Any) -> dt.tzinfo | None:
    return None if seconds is None else dt.timezone(dt.timedelta(seconds=seconds))


def _numbers(value: range | slice) -> list[Any]:
    numbers = [value.start, value.stop, value.step]
    if not {int, type(None)}.issuperset(map(type, numbers)):
        raise NotSaved(class_name(type(value)))
    return numbers


def _of_numbers(make: type[range] | type[slice], numbers: Any) -> Any:
    if not {int, type(None)}.issuperset(map(type, numbers)):
        raise refusal(make.__name__)
    return make(*numbers)


def _text_of_fraction(value: Fraction) -> str:
    """Return a fraction's text, with whole numbers of any length."""
    return f"{value.numerator:#x}/{value.denominator:#x}"


def _fraction(text: str) -> Fraction:
    """Return the fraction of a text; an exponent would make it of any size."""
    numerator, _, denominator = text.partition("/")
    return Fraction(int(numerator, 0), int(denominator or "1", 0))


def _scalar(value: Any, dtype: np.dtype) -> np.generic:
    """Return a scalar of numpy. Its value has the type of the scalar, and not a length, say."""
    types = {"S": (bytes,), "U": (str,)}.get(dtype.kind, (bool, int, float, complex))
    if dtype.kind not in "biufcSU" or not isinstance(value, types):
        raise refusal("scalar")
    scalar: np.generic = dtype.type(value)
    return scalar


def _text_of(pattern: re.Pattern[Any]) -> list[Any]:
    """Return a pattern's text, and its flags but for the one by which compiling prints."""
    if not isinstance(pattern.pattern, str):
        raise NotSaved(class_name(type(pattern)))
    return [pattern.pattern, pattern.flags & ~re.DEBUG]


def _pattern(text: Any, flags: Any) -> re.Pattern[str]:
    """Return the pattern of a text and flags; compiling it prints nothing."""
    if type(text) is not str or type(flags) is not int or flags & re.DEBUG:
        raise refusal("pattern")
    return re.compile(text, flags)


# By class: what is written, and how the value is made of it.
ATOMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    torch.dtype: (lambda value: str(value).removeprefix("torch."), torch_dtype),
    torch.device: (str, torch.device),
    torch.Size: (list, torch.Size),
    range: (_numbers, lambda numbers: _of_numbers(range, numbers)),
    slice: (_numbers, lambda numbers: _of_numbers(slice, numbers)),
    Decimal: (str, Decimal),
    Fraction: (_text_of_fraction, lambda text: _fraction(text)),
    uuid.UUID: (str, uuid.UUID),
    dt.date: (dt.date.toordinal, dt.date.fromordinal),
    dt.timedelta: (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda numbers: dt.timedelta(*numbers),
    ),
    dt.timezone: (_zone, _of_zone),
    dt.datetime: (
        lambda value: [value.replace(tzinfo=None).isoformat(), _zone(value.tzinfo), value.fold],
        lambda parts: dt.datetime.fromisoformat(parts[0]).replace(
            tzinfo=_of_zone(parts[1]), fold=parts[2]
        ),
    ),
    dt.time: (
        lambda value: [value.replace(tzinfo=None).isoformat(), _zone(value.tzinfo), value.fold],
        lambda parts: dt.time.fromisoformat(parts[0]).replace(
            tzinfo=_of_zone(parts[1]), fold=parts[2]
        ),
    ),
    re.Pattern: (_text_of, lambda parts: _pattern(*parts)),
    type(Path()): (str, Path),
    type(NotImplemented): (repr, lambda _: NotImplemented),
    type(...): (repr, lambda _: ...),
}
OF_NAMES = {class_name(class_): make for class_, (_, make) in ATOMS.items()}


def is_atom(class_: type) -> bool:
    """Return whether objects of a class have no identity of their own."""
    return (
        class_ in SCALARS
        or class_ in ATOMS
        or issubclass(class_, (enum.Enum, np.generic, np.dtype, PurePath))
    )


TUPLE_OF_SCALARS = "()"
"""The kind of a tuple of scalars."""


def is_id(reference: Any) -> bool:
    """Return whether a reference is a number that is the `id` of an object."""
    return type(reference) is list and reference[:1] == ["id"]


def encode(value: Any) -> list[Any]:
    """Return an atom that is not a scalar as a list of its kind and plain values.

    Raises:
        NotSaved: A record cannot hold it.
    """
    class_ = type(value)
    if class_ is tuple:
        return [TUPLE_OF_SCALARS, *value]
    if class_ in ATOMS:
        return [class_name(class_), ATOMS[class_][0](value)]
    if isinstance(value, enum.Flag):
        return ["flag", class_name(class_), value.value]
    if isinstance(value, enum.Enum):
        return ["enum", class_name(class_), value._name_]  # a class may have a `name` of its own
    if isinstance(value, np.dtype) and is_readable(value):
        return ["numpy.dtype", dtype_text(value)]
    if isinstance(value, np.generic):
        if value.dtype.kind in "biufcSU" and type(value.item()) in SCALARS:
            return ["scalar", value.dtype.str, value.item()]
        if is_readable(value.dtype):
            return ["item", dtype_text(value.dtype), value.tobytes()]
    raise NotSaved(class_name(class_))


def library_enum(name: Any) -> type | None:
    """Return the enum of a library that is imported, by its name; None if there is none."""
    module, _, own_name = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    class_ = vars(sys.modules[module]).get(own_name) if module in sys.modules else None
    if not (isinstance(class_, enum.EnumMeta) and is_library_class(class_)):
        return None
    return class_ if class_name(class_) == name else None


def decode(note: list[Any], classes: Mapping[str, type]) -> Any:
    """Return the value that `encode` was given.

    Args:
        note: What `encode` returned.
        classes: The classes that the program has, by name.
    """
    kind, *details = note
    if kind in scalars.OF_SCALARS:
        return scalars.scalar(note)
    details = [scalars.scalar(detail) for detail in details]
    if kind == TUPLE_OF_SCALARS:
        if not SCALARS.issuperset(map(type, details)):
            raise refusal(kind)
        return tuple(details)
    if kind in ("enum", "flag"):
        class_ = library_enum(details[0]) or known_class(classes, details[0])
        if isinstance(class_, enum.EnumMeta):
            if kind == "flag" and issubclass(class_, enum.Flag) and type(details[1]) is int:
                return class_(details[1])
            if kind == "enum" and details[1] in class_.__members__:
                return class_[details[1]]
        raise refusal(note)
    if kind == "scalar":
        return _scalar(details[1], np.dtype(details[0]))
    if kind == "item":
        return np.frombuffer(details[1], dtype=dtype_of(details[0])).copy()[0]
    if kind == "numpy.dtype":
        return dtype_of(details[0])
    if kind not in OF_NAMES or len(details) != 1:
        raise refusal(kind)
    return OF_NAMES[kind](*details)
