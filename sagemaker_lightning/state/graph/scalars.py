"""Scalars that JSON lacks, and how a record has them."""

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
