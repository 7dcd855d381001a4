"""Reads a file of the launcher's flags: TOML, whose keys are the flags without their dashes."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HYPERPARAMETERS = "hyperparameters"
"""The key of the table of hyperparameters; tables in it are the parts before a dot."""

# Flags that may be repeated, and have no KEY= at their beginning: those of the command line replace
# all of the file's. Any other replaces the file's of the same KEY alone.
WITHOUT_KEYS = {"subnet", "security_group", "instance_preference"}


def read(path: str, flags: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that a file stands for.

    Args:
        path: The file.
        flags: For each flag, without its dashes, what it is where nobody gives it: a list if it may
            be repeated, a boolean if it has no value.

    Raises ValueError if the file cannot be read, has a key that is not a flag, or a value that the
    flag does not take.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    # RecursionError: it is nested too deeply.
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--defaults: {path} cannot be read: {error}") from None
    words: list[str] = []
    for name, value in content.items():
        where = f"--defaults: {name} in {path}"
        if name == HYPERPARAMETERS:
            words += _hyperparameters(where, value)
        elif name not in flags:
            closest = difflib.get_close_matches(name, flags, n=1)
            hint = f", such as {closest[0]}" if closest else ""
            raise ValueError(
                f"--defaults: found {name!r} in {path}, expected {HYPERPARAMETERS} or a flag of "
                f"--help without its dashes{hint}"
            )
        elif isinstance(flags[name], bool):
            if not isinstance(value, bool):
                raise ValueError(f"{where}: found {value!r}, expected true or false")
            words += [f"--{name}"] * value
        else:
            words += [f"--{name}={text}" for text in _texts(where, value, flags[name])]
    return words


def over(name: str, listed: list[str], given: list[str]) -> list[str]:
    """Return a repeated flag's values: those that are given, and those of the file beside them.

    Args:
        name: The flag, with _ in place of dashes.
        listed: Its values in the file.
        given: Its values on the command line.
    """
    if name in WITHOUT_KEYS:
        return given or listed
    keys = {text.partition("=")[0] for text in given}
    return [text for text in listed if text.partition("=")[0] not in keys] + given


def _texts(where: str, value: Any, otherwise: Any) -> list[str]:
    """Return the texts that a flag gets, one for each time that it is given."""
    if not isinstance(otherwise, list):
        return [_text(where, value)]
    if isinstance(value, dict):
        return [f"{key}={_text(where, each)}" for key, each in value.items()]
    if not isinstance(value, list):
        raise ValueError(f"{where}: found {value!r}, expected a list, or a table of KEY = VALUE")
    return [_text(where, each) for each in value]


def _text(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{where}: found {value!r}, expected text or a number")
    return str(value)


def _hyperparameters(where: str, table: Any, before: str = "") -> Iterator[str]:
    """Yield KEY=VALUE for each value of a table, and of the tables in it."""
    if not isinstance(table, dict):
        raise ValueError(f"{where}: found {table!r}, expected a table of KEY = VALUE")
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _hyperparameters(where, value, f"{before}{key}.")
        elif isinstance(value, bool):
            yield f"{before}{key}={str(value).lower()}"
        else:
            yield f"{before}{key}={_text(where, value)}"
