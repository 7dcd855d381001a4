"""What an error of jsonargparse (4.53) says, read from its message.

The parser says in prose alone what is wrong: a message has up to forty lines, of which the last
part says it, with the repr of its own objects. `read` gives what is in it as data, of which cli/
makes our one line. names.WORDING lists the words that we look for.

On an upgrade: see `raise_union_unexpected_value` and `raise_unexpected_value` in _typehints.py, the
errors of `_check_config` in _core.py, and `_ActionPrintConfig` in _actions.py.
"""

import re
import traceback
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType

from jsonargparse import ArgumentParser


@dataclass(frozen=True)
class Mistake:
    """What the parser says is wrong; a subclass says what kind of mistake it is."""

    flag: str
    """The flag, with its dashes; "--" if the message has none."""
    text: str
    """The message in one line, with the flag in the parser's words replaced by `flag`."""
    is_lacking: bool
    """Whether the mistake is that something is not given."""


@dataclass(frozen=True)
class UnknownFlag(Mistake):
    """The parser has no such flag."""


@dataclass(frozen=True)
class LackingFlag(Mistake):
    """A flag is needed, and not given."""


@dataclass(frozen=True)
class NoSettings(Mistake):
    """A group got something else than its settings."""

    found: str
    """What was given."""


@dataclass(frozen=True)
class WrongValue(Mistake):
    """The value is of none of the types that a flag takes."""

    found: str
    """What was given."""
    allowed: tuple[str, ...]
    """The types, each as a word or two, such as `int` or `tuple with 2 elements`."""


@dataclass(frozen=True)
class WrongClass(Mistake):
    """The value names no class that a flag takes."""

    found: str
    """What was given."""
    bases: tuple[str, ...]
    """The import paths of the classes whose subclasses a flag takes."""


@dataclass(frozen=True)
class SettingOfNoClass(Mistake):
    """A setting is given, and no class that could have it."""

    setting: str
    """The name of the setting, without the flag."""
    bases: tuple[str, ...]
    """The import paths of the classes whose subclasses a flag takes."""


@dataclass(frozen=True)
class UnknownSetting(Mistake):
    """The class that was given, or the default one, has no such setting."""

    setting: str
    """The name of the setting, without the flag."""
    owner: str
    """The import path of the class."""
    bases: tuple[str, ...]
    """The import paths of the classes whose subclasses a flag takes."""


@dataclass(frozen=True)
class LackingSettings(Mistake):
    """A class needs settings that are not given."""

    owner: str
    """The import path of the class."""
    settings: tuple[str, ...]
    """Their names, without the flag."""


def read(error: Exception) -> Mistake:
    """Return what an error of the parser says; a plain Mistake if it says nothing we know."""
    text = str(error).replace("<class 'NoneType'>", "null")
    keys = re.findall(r'Parser key "([^"]+)"', text)
    flag = "--" + ".".join(
        key for key, after in pairwise([*keys, ""]) if not f"{after}.".startswith(f"{key}.")
    )
    in_one_line = " ".join(
        re.sub(r'^Parser key "([^"]+)":?', r"--\1:", text.removeprefix("argument ")).split()
    )
    common = flag, in_one_line, "arguments are required" in text
    owner = (re.findall(r"given class_path '([^']+)'", text) or [""])[-1]
    types = (re.findall(r"Subtypes: \[(.*)", text) or [""])[0]
    bases = tuple(re.findall(r"(?:<class '|list\[(?!typing))(\w+(?:\.\w+)+)", types))
    if option := re.search(r"(?:class_path '([^']+)':\s+)?Option '([^']+)' is not accepted", text):
        if option[1]:
            return UnknownSetting(*common, option[2], option[1], bases)
        return UnknownFlag(f"--{option[2]}", *common[1:])
    if option := re.search(r"Group '([^']+)' does not accept option '([^']+)'", text):
        return UnknownFlag(f"--{option[1]}.{option[2]}", *common[1:])
    # A second word belongs to the flag only if the flag was typed with a blank: `--trainer
    # max_epochs=5`.
    if unknown := re.search(r"unrecognized arguments: ([^\s=]+(?: [^-=\s][^\s=]*(?==))?)", text):
        return UnknownFlag(unknown[1], *common[1:])
    if required := re.search(
        r"class_path '([^']+)':\s+the following arguments are required: (.+)", text
    ):
        return LackingSettings(*common, required[1], tuple(required[2].split(", ")))
    # What follows the innermost key is about the setting that is wrong.
    about_setting = text.rpartition('Parser key "')[2]
    found = (
        re.findall(r"(?:Given value|Got value): (?!NestedArg|Namespace)(.*)", about_setting)
        or re.findall(r"value: NestedArg\(.*val='?(.*?)'?\)", about_setting)
        or [""]
    )[0].strip()
    if bases and (not owner or f"class_path '{owner}'" in about_setting):
        setting = re.search(r"Given value: NestedArg\(key='(?!class_path|init_args)(\w+)'", text)
        if setting and not owner:
            return SettingOfNoClass(*common, setting[1], bases)
        name = re.search(r"Import path (\S+) does not correspond", text) or re.search(
            r"Given value: .*(?:'class_path': |key='class_path', val=)'([^']*)'", text
        )
        return WrongClass(*common, name[1] if name else found, bases)
    if group := re.search(r"""Unable to load config ['"](.*)['"]""", about_setting):
        return NoSettings(*common, group[1])
    if missing := re.fullmatch(r"the following arguments are required: (?:--)?(.+)", text):
        return LackingFlag(f"--{missing[1]}", *common[1:])
    expected = (
        r"Expected (?:an? )?(?:<class '(\w+)'>|typing\.Literal\[(.*)\]|(tuple with \d+ elements))"
    )
    if allowed := dict.fromkeys(
        name for names in re.findall(expected, text) for name in names if name
    ):
        nullable = ["null"] if re.search("Expected (a )?null", text) and not owner else []
        return WrongValue(*common, found, (*allowed, *nullable))
    return Mistake(*common)


def unwrapped(error: Exception) -> tuple[Exception, list[tuple[FrameType, int]]]:
    """Return what the parser has raised as one of its own errors, or the error itself.

    Also return the frames that it came through, with their lines; outermost first.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    while _raised_by_the_parser(frames):
        cause = error.__cause__ or error.__context__
        if not isinstance(cause, Exception):
            break
        error = cause
        frames += traceback.walk_tb(error.__traceback__)
    return error, frames


def _raised_by_the_parser(frames: list[tuple[FrameType, int]]) -> bool:
    name: str = frames[-1][0].f_globals.get("__name__", "")
    return name.partition(".")[0] == "jsonargparse"


def print_no_config(parser: ArgumentParser) -> None:
    """Forget that --print_config was given.

    Else the next parsing without a mistake would print the settings and exit.
    """
    vars(parser).pop("print_config", None)
