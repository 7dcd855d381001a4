"""Flags as they are given: words, files of them and recipes, groups as one JSON object."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from sagemaker_lightning.cli.suggestions import find_class, first_line, shown
from sagemaker_lightning.contract.errors import UserError

NOT_A_SETTING = re.compile(r"--?h(elp)?|--.+\.help|--print_config")
BARE = re.compile(r"\.(?:init_args|class_path)(?=\.|$)")


def recipes(args: list[str], known: Mapping[str, str]) -> list[str]:
    """Return `args` with the path of a recipe for each `--config` that is the name of a `known` one."""
    paths = []
    for before, word in zip(["", *args], args, strict=False):
        name = (
            word
            if before == "--config"
            else word.removeprefix("--config=")
            if "--config=" in word
            else ""
        )
        paths.append(
            word.removesuffix(name) + known.get(name, name) if name and not is_file(name) else word
        )
    return paths


def given(args: list[str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield (flag, its words, where it is from) of each setting; those of a file, and of a group as JSON, are many."""
    for flag, words in _words(args):
        yield from _of_one_flag(flag, words)


def flat(config: Mapping[str, object], prefix: str = "--") -> Iterator[tuple[str, object]]:
    """Yield (flag, value) of each setting in a configuration as the parser dumps it; null for a group not given."""
    for name, value in config.items():
        key = prefix if name == "init_args" else f"{prefix}{name}."
        if isinstance(value, dict) and value:
            yield from flat(value, key)
        else:
            yield key.removesuffix(".").removesuffix(".class_path"), value


def settings(path: str) -> list[str]:
    """Return the names of a class's parameters, those of its parents included where it hands on what it is given."""
    names: dict[str, None] = {}
    for each in find_class(path).__mro__:
        parameters = list(inspect.signature(each.__init__).parameters.values())[1:]
        names |= dict.fromkeys(
            one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        )
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return list(names)


def _words(args: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag, without init_args and class_path, and the words that give it."""
    words: list[str] = []
    for word in [*args, "-"]:
        begins = word.startswith("-") and not re.match(r"-[\d.]", word)
        if words and (begins or len(words) == 2 or "=" in words[0]):
            yield BARE.sub("", words[0].partition("=")[0].removesuffix("+")), words
            words = []
        words.append(word)


def _of_one_flag(flag: str, words: list[str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield (flag, words, where it is from) of each setting: those of a file and of a group as JSON are many."""
    text = words[1] if len(words) == 2 else words[0].partition("=")[2]
    groups, source = {}, ""
    try:
        if flag == "--config":
            groups, source = settings_in(text), f" (in {text})"
        elif "." not in flag and text.startswith("{"):
            values = yaml.safe_load(text)
            groups = {flag.removeprefix("--"): values} if values else {}
    except (ValueError, yaml.YAMLError):  # the parser has something against it, too
        pass
    if not groups and not NOT_A_SETTING.fullmatch(flag):
        yield flag, words, ""
    for group, values in groups.items():
        values = {"": values} if not isinstance(values, dict) else values
        if values.keys() <= {"class_path", "init_args"}:
            values = {"": values.get("class_path")} | (values.get("init_args") or {})
        for name, value in values.items():
            flag = f"--{group}.{name}".removesuffix(".")
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            if name or value is not None:
                yield flag, [f"{flag}={text}"], source


def settings_in(name: str) -> dict:
    """Return the settings in a file of flags; UserError says what is wrong with it."""
    try:
        settings = yaml.safe_load(Path(name).read_text())
        json.dumps(settings, default=str)  # ValueError for what contains itself
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = first_line(error).replace('in "<unicode string>", ', "")
        raise UserError(
            f"--config: {shown(name)} cannot be read ({why}); allowed is YAML"
        ) from None
    if not isinstance(settings, dict):
        raise UserError(
            f"--config: {shown(name)} has no flags; allowed is YAML such as trainer: {{max_epochs: "
            f"5}}"
        )
    return settings


def is_file(name: str) -> bool:
    """Return whether there is a file of this name; False also for what can be no file's name."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False
