"""Scalars that JSON lacks, how a record has them, and what tells scalars apart."""

from collections.abc import Callable
from typing import Any


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(float(real), float(imaginary))


OF_SCALARS: dict[str, Callable[..., Any]] = {
    "bytes": lambda text: text.encode("latin-1"),
    "complex": _complex,
    "int": lambda text: int(text, 16),
}
"""How a scalar that JSON lacks is made of what is written."""


def scalar(value: Any) -> Any:
    """Return a scalar of what is written of it."""
    if type(value) is list and value and value[0] in OF_SCALARS:
        return OF_SCALARS[value[0]](*value[1:])
    return value


def text(value: Any) -> str:
    """Return a text that tells a value apart from others: `repr`, for numbers of any length.

    Python refuses to write whole numbers of more than 4,300 digits (CVE-2020-10735).
    """
    try:
        return repr(value)
    except ValueError:
        return repr(_with_hex(value))


def _with_hex(value: Any) -> Any:
    if type(value) is int:
        return hex(value)
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_with_hex, value)]
    return list(map(_with_hex, value.items())) if type(value) is dict else value
