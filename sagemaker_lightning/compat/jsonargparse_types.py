"""How jsonargparse (4.53) tries the types of a flag, and where it makes objects.

On an upgrade: see `sort_subtypes_for_union` in _typehints.py, and `ArgumentParser.instantiate` in
_core.py. `instantiate` loops over components; its local variable `component` is the one that is
being made.
"""

import functools
import inspect
from collections.abc import Iterable
from types import FrameType
from typing import Any

from jsonargparse import ArgumentParser, _typehints


def keep_whole_numbers() -> None:
    """Make jsonargparse try int before float in a union: 1 stays 1, 1.0 stays 1.0.

    It tries a union's types in their order and takes any int for a float. Lightning declares
    limit_train_batches as `float | int`: 1 became 1.0, which means all batches. The order that a
    source file gives is not reliable either: typing caches unions, and treats two that differ only
    in their order as the same.
    """
    if not hasattr(_typehints.sort_subtypes_for_union, "__wrapped__"):
        sort: Any = _typehints.sort_subtypes_for_union

        @functools.wraps(sort)
        def sort_with_int_first(*args: Any, **kwargs: Any) -> list[Any]:
            return int_before_float(list(sort(*args, **kwargs)))

        _typehints.sort_subtypes_for_union = sort_with_int_first


def int_before_float(types: list[Any]) -> list[Any]:
    """Return a union's types with int directly before float, all else unchanged."""
    if int in types and float in types and types.index(float) < types.index(int):
        types.remove(int)
        types.insert(types.index(float), int)
    return types


def components(frames: Iterable[FrameType]) -> list[Any]:
    """Return what parsers were making, outermost first, from the frames of an error.

    Each has a `dest`. The error itself does not say which flag's class refused its settings.
    """
    instantiate_code = inspect.unwrap(ArgumentParser.instantiate).__code__
    return [frame.f_locals.get("component") for frame in frames if frame.f_code is instantiate_code]
