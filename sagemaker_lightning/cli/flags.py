"""Splits a command line into its flags and settings.

Settings may stand in words, in files and recipes (--config), and in JSON objects for whole groups.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sagemaker_lightning.cli.suggestions import first_line, shown
from sagemaker_lightning.contract.errors import UserError

NOT_A_SETTING = re.compile(r"--?h(elp)?|--.+\.help|--print_config")
BARE = re.compile(r"\.(?:init_args|class_path)(?=\.|$)")


class Setting(NamedTuple):
    """One setting of a command line, or of a file or a JSON object in it."""

    flag: str
    """With dashes, without init_args and class_path."""
    words: list[str]
    """The words that give it."""
    source: str
    """" (in FILE)", or "" for the command line."""

    @property
    def value(self) -> str:
        """What is given, as text; "" if nothing is."""
        return self.words[1] if len(self.words) == 2 else self.words[0].partition("=")[2]


def recipes(args: list[str], known: Mapping[str, str]) -> list[str]:
    """Return `args` with the path of each recipe in place of its name.

    `known` has the path of each recipe by its name. If --config names a file, it stays as it is.
    """
    paths = []
    for previous_word, word in zip(["", *args], args, strict=False):
        name = (
            word
            if previous_word == "--config"
            else word.removeprefix("--config=")
            if "--config=" in word
            else ""
        )
        paths.append(
            word.removesuffix(name) + known.get(name, name) if name and not is_file(name) else word
        )
    return paths


def given(args: list[str]) -> Iterator[Setting]:
    """Yield each setting; a file and a JSON object for a group have many."""
    for flag, words in _split_words(args):
        yield from _settings_of_flag(flag, words)


def flat(config: Mapping[str, object], prefix: str = "--") -> Iterator[tuple[str, object]]:
    """Yield (flag, value) for each setting of a dumped configuration.

    A group that is not given has the value None.
    """
    for name, value in config.items():
        key = prefix if name == "init_args" else f"{prefix}{name}."
        if isinstance(value, dict) and value:
            yield from flat(value, key)
        else:
            yield key.removesuffix(".").removesuffix(".class_path"), value


def settings(kind: type) -> list[str]:
    """Return the names of a class's parameters.

    The parameters of its parents are included, as long as `**kwargs` pass them on.
    """
    names: dict[str, None] = {}
    for each in kind.__mro__:
        init = each.__init__  # type: ignore[misc]  # of a class, which has it
        parameters = list(inspect.signature(init).parameters.values())[1:]
        names |= dict.fromkeys(
            parameter.name
            for parameter in parameters
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        )
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return list(names)


def _split_words(args: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag, without init_args and class_path, with the words that give it."""
    words: list[str] = []
    for word in [*args, "-"]:
        is_flag = word.startswith("-") and not re.match(r"-[\d.]", word)
        if words and (is_flag or len(words) == 2 or "=" in words[0]):
            yield BARE.sub("", words[0].partition("=")[0].removesuffix("+")), words
            words = []
        words.append(word)


def _settings_of_flag(flag: str, words: list[str]) -> Iterator[Setting]:
    """Yield each setting of one flag; see `given`."""
    text = Setting(flag, words, "").value
    groups = {}
    source = ""
    try:
        if flag == "--config":
            groups = settings_in(text)
            source = f" (in {text})"
        elif "." not in flag and text.startswith("{"):
            values = yaml.safe_load(text)
            groups = {flag.removeprefix("--"): values} if values else {}
    # The parser reports the same.
    except (ValueError, yaml.YAMLError):
        pass
    if not groups and not NOT_A_SETTING.fullmatch(flag):
        yield Setting(flag, words, "")
    for group, values in groups.items():
        values = {"": values} if not isinstance(values, dict) else values
        if values.keys() <= {"class_path", "init_args"}:
            values = {"": values.get("class_path")} | (values.get("init_args") or {})
        for name, value in values.items():
            flag = f"--{group}.{name}".removesuffix(".")
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            if name or value is not None:
                yield Setting(flag, [f"{flag}={text}"], source)


def settings_in(name: str) -> dict[str, Any]:
    """Return the settings in a file of flags; UserError if it is not a YAML mapping."""
    try:
        settings = yaml.safe_load(Path(name).read_text())
        # ValueError for a value that contains itself
        json.dumps(settings, default=str)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = first_line(error).replace('in "<unicode string>", ', "")
        raise UserError(
            f"--config: {shown(name)} cannot be read ({reason}); expected YAML"
        ) from None
    if not isinstance(settings, dict):
        raise UserError(
            f"--config: {shown(name)} has no flags; expected YAML such as trainer: {{max_epochs: "
            f"5}}"
        )
    return settings


def is_file(name: str) -> bool:
    """Return whether a file of this name exists; False also for an impossible name."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False
