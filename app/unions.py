"""Numbers of flags that may be whole or not: 1 stays the whole number 1, and 1.0 stays the fraction 1.0."""

from typing import Any

from jsonargparse import _typehints


def keep_whole_numbers() -> None:
    """Have jsonargparse (4.53) try int before float in every union; called once or more in a process.

    It tries a union's types in their order and takes any int for a float: of `float | int`, which is how Lightning
    declares limit_train_batches, 1 became 1.0, which means all batches. The order that a source file gives is not
    reliable either: typing caches unions, and takes two that differ in their order only for the same.
    """
    if _typehints.sort_subtypes_for_union.__module__ != __name__:
        sort = _typehints.sort_subtypes_for_union

        def sort_with_int_first(*args: Any, **kwargs: Any) -> list:
            return int_before_float(list(sort(*args, **kwargs)))

        _typehints.sort_subtypes_for_union = sort_with_int_first


def int_before_float(types: list) -> list:
    """Return the types of a union in the order to try them in: int directly before float, all else as it was."""
    if int in types and float in types and types.index(float) < types.index(int):
        types.remove(int)
        types.insert(types.index(float), int)
    return types
