"""Compares settings that must be the same everywhere."""

from collections.abc import Mapping


def differences(
    first: Mapping[str, str], second: Mapping[str, str], missing: str
) -> list[tuple[str, str, str]]:
    """Return name, first and second value of each setting that differs.

    Args:
        first: Settings by name.
        second: Settings by name.
        missing: Stands for the value of a setting that only one of them has.
    """
    return [
        (name, first.get(name, missing), second.get(name, missing))
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]
