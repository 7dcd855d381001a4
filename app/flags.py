"""What the parser has against a flag, in one line a person can act on: flag, what was found, what is allowed."""

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from jsonargparse import ArgumentError, ArgumentParser

RENAMED = {"cifar10-94": "fast", "cifar10-96": "accurate"}
"""Recipes by the names that they had: these claimed accuracies that nobody has measured."""


def explain(error: ArgumentError, parser: ArgumentParser) -> str:
    """Return the line for jsonargparse's (4.53) message of up to forty lines, whose last part is the heart of it."""
    text = str(error).replace("<class 'NoneType'>", "null")
    flag = "--" + ".".join(re.findall(r'Parser key "([^"]+)"', text))
    owner = (re.findall(r"given class_path '([^']+)'", text) or [""])[-1]
    if option := re.search(r"Option '([^']+)' is not accepted", text):
        return _unknown_setting(flag, option[1], owner, text)
    # A second word counts only if the name has a blank in it: `--trainer max_epochs=5`.
    if unknown := re.search(r"unrecognized arguments: ([^\s=]+(?: [^-=\s][^\s=]*(?==))?)", text):
        known = ["--" + key.replace(".init_args", "") for key in parser.get_defaults().keys()]  # noqa: SIM118
        return f"{unknown[1]}: is no flag here{_like(unknown[1], known)}; see --help"
    if required := re.search(r"class_path '([^']+)':\s+the following arguments are required: (.+)", text):
        return f"{flag}: {required[1].rpartition('.')[2]} needs {required[2]}; give {flag}.{required[2].split(', ')[0]}"
    given = (re.findall(r"(?:Given|Got) value: (?!NestedArg|Namespace)(.*)", text) or [""])[-1].strip()
    base = re.search(r"Subtypes: \[<class '(\w+\.[\w.]+)'>, null\]", text)
    if base and (not owner or owner == given):
        reason = re.search(r"Errors:\n +- (?:Problem with .*:\n +)?(?!Expected a dot)(.*)", text)
        kind = f"subclass of {base[1].rpartition('.')[2]}"
        return (
            f"{flag}: found {given!r}{f' ({reason[1]})' if reason else ''}, allowed is the name or import path of a "
            f"{kind}{_like(given, _subclass_names(base[1]))}"
        )
    if allowed := re.findall(r"Expected an? (?:<class '(\w+)'>|typing\.Literal\[(.*)\])", text):
        kinds = dict.fromkeys(kind or literal for kind, literal in allowed)
        nullable = ["null"] if "Expected a null" in text and not owner else []
        return f"{flag}: found {given!r}, allowed is {' or '.join([*kinds, *nullable])}"
    return " ".join(re.sub(r'^Parser key "([^"]+)"', r"--\1", text.removeprefix("argument ")).split())


def recipes(args: list[str]) -> list[str]:
    """Return `args` with the path of a recipe for each `--config` that is a recipe's name."""
    known = {path.stem: str(path) for path in sorted(Path(__file__).with_name("recipes").glob("*.yaml"))}
    found = []
    for before, word in zip(["", *args], args, strict=False):
        given = word.removeprefix("--config=") if word.startswith("--config=") else word if before == "--config" else ""
        if given and not Path(given).is_file():
            if given not in known:
                now = f", which is called {RENAMED[given]} now" if given in RENAMED else ""
                raise ValueError(f"--config: found {given!r}{now}; allowed is a file, or one of {', '.join(known)}")
            word = word.removesuffix(given) + known[given]
        found.append(word)
    return found


def flat(config: Mapping[str, object], prefix: str = "--") -> Iterator[tuple[str, object]]:
    """Yield (flag, value) of each setting in a configuration as the parser dumps it; null for a group not given."""
    for name, value in config.items():
        key = prefix if name == "init_args" else f"{prefix}{name}."
        if isinstance(value, dict) and value:
            yield from flat(value, key)
        else:
            yield key.removesuffix(".").removesuffix(".class_path"), value


def _unknown_setting(flag: str, option: str, owner: str, text: str) -> str:
    """Return the line for a setting that class `owner`, given or default, does not have."""
    name = owner.rpartition(".")[2]
    if f"class '{owner}'" in text or name in ("Optimizer", "LRScheduler"):  # the base class: none was chosen
        return f"{flag}.{option}: belongs to a class that is not given; give {flag}=NAME as well"
    return f"{flag}.{option}: {name} has no such setting{_like(option, settings(owner), f'{flag}.')}; see --help"


def settings(path: str) -> list[str]:
    """Return the names of a class's parameters, those of its parents included where it hands on what it is given."""
    module, _, name = path.rpartition(".")
    found = []
    for each in getattr(import_module(module), name).__mro__:
        parameters = inspect.signature(each.__init__).parameters
        found += parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


def _subclass_names(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    found, left = set(), [getattr(import_module(module), name)]
    while left:
        children = left.pop().__subclasses__()
        found.update(child.__name__ for child in children)
        left += children
    return sorted(found)


def _like(word: str, words: list[str], prefix: str = "") -> str:
    """Return what among `words` may have been meant."""
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
