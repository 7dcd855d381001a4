"""What the parser has against flags, in one line a person can act on: flag, what was found, what is allowed."""

import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning_fabric.utilities.exceptions import MisconfigurationException

from sagemaker_lightning.cli import flags
from sagemaker_lightning.cli.application import Application
from sagemaker_lightning.cli.suggestions import (
    REPLACED,
    choice,
    closest,
    find_class,
    listed,
    shortened,
    shown,
    why_not,
)
from sagemaker_lightning.compat import jsonargparse_types
from sagemaker_lightning.contract.errors import UserError

REFUSED = (ArgumentError, OSError, ValueError, OverflowError, RecursionError)
"""What the parser raises."""

REFUSED_BY_CLASSES = (
    ValueError, TypeError, ArithmeticError, LookupError, AssertionError, RuntimeError, MisconfigurationException,
)  # fmt: skip
"""What classes raise that are made with settings which cannot be."""

MISCONFIGURED = (MisconfigurationException,)
"""What Lightning raises, at whatever time, for whoever chose the settings."""

# Whose checks are for whoever chose the settings: where an error comes out of nobody else's code, a line is enough.
LIBRARIES = {
    "jsonargparse",
    "lightning_fabric",
    "pytorch_lightning",
    "torch",
    *sys.stdlib_module_names,
}
# What of this package may be between a flag and such a check. The rest of it is anybody's code, as a model is.
CALLERS = {
    "sagemaker_lightning.resume.best_model",
    "sagemaker_lightning.cli.lightning_cli",
    "sagemaker_lightning.resume.fit_loops",
    "sagemaker_lightning.cli.lr_schedules",
}
# the beginning of the names of those that stand for Lightning
COMPAT = "sagemaker_lightning.compat."

# values of Lightning below 1.8
OLD_ACCELERATORS = ("ddp", "ddp2", "ddp_cpu", "ddp_spawn", "dp", "horovod")
# of what is too long to list
REFERENCE = {"trainer": "https://lightning.ai/docs/pytorch/stable/common/trainer.html"}
ROOM = 800  # characters of the line: SageMaker shows 1,024, and host and rank are added


def explain_all(
    parser: ArgumentParser, args: list[str], application: Application | None = None
) -> str:
    """Return one line that names everything wrong in `args`; "" if nothing is.

    The parser stops at the first mistake. So each flag is parsed by itself, with those that choose its class.
    """
    # else the first parsing that is well would print the settings and leave
    vars(parser).pop("print_config", None)
    given = list(flags.given(args))
    wrong: dict[str, str] = {}
    for flag, words, source in sorted(given, key=lambda setting: setting[0].count(".")):
        if any(_covers(other, flag) for other in wrong if other != flag):  # its class is not known
            continue
        above = [
            word
            for other, others, _ in given
            if other != flag and _covers(other, flag)
            for word in others
        ]
        if said := _wrong_file(flag, words, application or Application()) or _said(
            parser, [*above, *words]
        ):
            wrong.setdefault(
                flag,
                f"{said if said.startswith(('-', f'{flag}: ')) else f'{flag}: {said}'}{source}",
            )
    rest = [
        word
        for flag, words, _ in given
        if not any(_covers(other, flag) for other in wrong)
        for word in words
    ]
    said = _said(parser, rest, whole=True)
    if said and not any(_covers(said.partition(":")[0], flag) for flag in wrong):
        wrong["rest"] = said
    return _joined(list(wrong.values()))


def explain(error: ArgumentError, parser: ArgumentParser) -> str:
    """Return the line for jsonargparse's (4.53) message of up to forty lines, whose last part is the heart of it."""
    text = str(error).replace("<class 'NoneType'>", "null")
    keys = re.findall(r'Parser key "([^"]+)"', text)
    flag = "--" + ".".join(key for key, after in pairwise([*keys, ""]) if not _covers(key, after))
    owner = (re.findall(r"given class_path '([^']+)'", text) or [""])[-1]
    types = (re.findall(r"Subtypes: \[(.*)", text) or [""])[0]
    bases = re.findall(r"(?:<class '|list\[(?!typing))(\w+(?:\.\w+)+)", types)
    if option := re.search(r"(?:class_path '([^']+)':\s+)?Option '([^']+)' is not accepted", text):
        return (
            _unknown_setting(flag, option[2], option[1], bases)
            if option[1]
            else _unknown_flag(option[2], parser)
        )
    if option := re.search(r"Group '([^']+)' does not accept option '([^']+)'", text):
        return _unknown_flag(f"--{option[1]}.{option[2]}", parser)
    # A second word counts only if the name has a blank in it: `--trainer max_epochs=5`.
    if unknown := re.search(r"unrecognized arguments: ([^\s=]+(?: [^-=\s][^\s=]*(?==))?)", text):
        return _unknown_flag(unknown[1], parser)
    if required := re.search(
        r"class_path '([^']+)':\s+the following arguments are required: (.+)", text
    ):
        return (
            f"{flag}: {required[1].rpartition('.')[2]} needs {required[2]}; give "
            f"{flag}.{required[2].split(', ')[0]}"
        )
    plain = re.findall(r"(?:Given|Got) value: (?!NestedArg|Namespace)(.*)", text)
    given = (plain or re.findall(r"value: NestedArg\(.*val='?(.*?)'?\)", text) or [""])[-1].strip()
    if chosen := re.search(
        r"Given value: .*(?:'class_path': |key='class_path', val=)'([^']*)'", text
    ):
        given = chosen[1]
    if bases and (not owner or owner == given):
        return f"{flag}: found {shown(given)}{why_not(given)}, allowed {choice(given, bases)}"
    if group := re.search(r"""Unable to load config ['"](.*)['"]""", text):
        return f"{flag}: found {shown(group[1])}, allowed are its settings: {flag}.NAME=VALUE"
    if missing := re.fullmatch(r"the following arguments are required: (?:--)?(.+)", text):
        return f"--{missing[1]}: is needed, and not given"
    expected = (
        r"Expected (?:an? )?(?:<class '(\w+)'>|typing\.Literal\[(.*)\]|(tuple with \d+ elements))"
    )
    if allowed := dict.fromkeys(
        name for names in re.findall(expected, text) for name in names if name
    ):
        nullable = ["null"] if re.search("Expected (a )?null", text) and not owner else []
        return f"{flag}: found {shown(given)}, allowed is {' or '.join([*allowed, *nullable])}"
    return " ".join(
        re.sub(r'^Parser key "([^"]+)":?', r"--\1:", text.removeprefix("argument ")).split()
    )


@contextmanager
def naming(
    flag: str, settings: Mapping[str, object], kinds: tuple[type, ...] = REFUSED_BY_CLASSES
) -> Iterator[None]:
    """Raise what a library has against `settings` as UserError in one line that names their flag.

    What comes out of a user's code stays as it is, as its traceback tells more; so does what this application raises.
    Where not all is about these settings, `kinds` are the errors that are for whoever chose settings, these or others.
    """
    try:
        yield
    except kinds as error:
        # without this one, and the one that entered it
        frames = list(traceback.walk_tb(error.__traceback__))[2:]
        found = named(flag, settings, error, frames, kinds)
        if found is error:
            raise
        raise found from None


def of_a_component(error: Exception, config: Namespace) -> Exception:
    """Return the same for an error at the parser's making of objects, which it may have raised as one of its own."""
    frames = list(traceback.walk_tb(error.__traceback__))
    while _raised_by_the_parser(frames) and (cause := error.__cause__ or error.__context__):
        error = cause
        frames += traceback.walk_tb(error.__traceback__)
    components = jsonargparse_types.components(frame for frame, _ in frames)
    if not components or not isinstance(error, REFUSED_BY_CLASSES):
        return error
    path = ".".join(flags.BARE.sub("", component.dest) for component in components)
    chosen = config.get(components[0].dest) if len(components) == 1 else None
    return named(f"--{path}", vars(chosen) if isinstance(chosen, Namespace) else {}, error, frames)


def _raised_by_the_parser(frames: list[tuple]) -> bool:
    return frames[-1][0].f_globals.get("__name__", "").partition(".")[0] == "jsonargparse"


def named(
    flag: str,
    settings: Mapping[str, object],
    error: Exception,
    frames: list[tuple],
    kinds: tuple[type, ...] = REFUSED_BY_CLASSES,
) -> Exception:
    """Return `error`, which came through `frames`, as UserError that names the flag; itself if there is more to it."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    between = [name in CALLERS or name.startswith(COMPAT) for name in names]
    foreign = {name.partition(".")[0] for name, own in zip(names, between, strict=True) if not own}
    if isinstance(error, UserError) or not names or between[-1] or not foreign <= LIBRARIES:
        return error
    said = " ".join(str(error).split())
    if not isinstance(error, (ValueError, MisconfigurationException)) or not said:
        said = f"{type(error).__name__}: {said}".rstrip(": ")
    given = dict(settings.get("init_args") or settings)
    for pattern in (r"\b{}\s*=", r"`{}`", r"\b{}\b"):
        if (
            len(
                meant := [
                    name for name in given if re.search(pattern.format(re.escape(name)), said)
                ]
            )
            == 1
        ):
            return UserError(
                f"{flag}.{meant[0]}: found {given[meant[0]]!r}, which cannot be: "
                f"{shortened(said, 600)}"
            )
    if kinds is not REFUSED_BY_CLASSES:
        return UserError(said)
    values = [
        f"{name}={value}" for name, value in given.items() if isinstance(value, (int, float, str))
    ]
    having = f"; found {listed(values, 200)}" if values else ""
    return UserError(f"{flag}: {shortened(said, 500)}{having}")


def unwanted(config: Namespace) -> str:
    """Return the line for a value that the parser takes and nobody else does; "" if there is none."""
    device = config.get("trainer.accelerator")
    if device in OLD_ACCELERATORS:
        allowed = "allowed is the kind of device, e.g. gpu or auto"
        return f"--trainer.accelerator: found {device!r}, {allowed}; use --trainer.strategy=ddp"
    for name, value in config.items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            flag = flags.BARE.sub("", name)
            return (
                f"--{flag}: found {shortened(str(value), 60)}, allowed are whole numbers of 64 bits"
            )
    seed = config.get("seed_everything")
    # numpy's; it is drawn with before anything else is looked at
    if isinstance(seed, int) and not 0 <= seed < 2**32:
        return f"--seed_everything: found {seed}, allowed is 0 to {2**32 - 1}, true or false"
    for group, chosen in vars(config).items():
        values = (
            chosen.get("init_args")
            if isinstance(chosen, Namespace) and chosen.get("class_path")
            else None
        )
        for name, value in vars(values or Namespace()).items():
            if value is None and not _may_be_null(chosen.class_path, name):
                return (
                    f"--{group}.{name}: found null, which it cannot be; leave it out for its "
                    "default"
                )
    return ""


def _may_be_null(path: str, name: str) -> bool:
    """Return whether a class's parameter has null as its default, or among its types; also if it has no type."""
    for each in find_class(path).__mro__:
        if parameter := inspect.signature(each.__init__).parameters.get(name):
            try:
                kind = get_type_hints(each.__init__).get(name, Any)
            except Exception:  # a name that the class's module has not
                return True
            return (
                parameter.default in (None, parameter.empty)
                or kind is Any
                or type(None) in get_args(kind)
            )
    return True


def _wrong_file(flag: str, words: list[str], application: Application) -> str:
    """Return the line for a --config that is no file of flags."""
    name = words[-1].removeprefix("--config=")
    if flag != "--config" or len(words) == 1 and words[0] == flag:
        return ""
    if not flags.is_file(name):
        known, renamed = ", ".join(application.recipe_files), application.renamed_recipes
        now = f"is called {renamed[name]} now" if name in renamed else f"is no file in {Path.cwd()}"
        allowed = f"a file, or one of {known}" if known else "a file"
        return f"--config: found {shown(name)}, which {now}; allowed is {allowed}"
    try:
        flags.settings_in(name)
    except UserError as error:
        return str(error)
    return ""


def _said(parser: ArgumentParser, args: list[str], whole: bool = False) -> str:
    """Return what the parser has against `args`; that something is missing counts only if they are the `whole`."""
    try:
        found = parser.parse_args(args)
    except REFUSED as error:
        return (
            "" if "arguments are required" in str(error) and not whole else explain(error, parser)
        )
    return unwanted(found)


def _covers(flag: str, other: str) -> bool:
    return other == flag or other.startswith(f"{flag}.")


def _joined(lines: list[str]) -> str:
    """Return several lines as one: flags of which the same is to be said together, and what is too long by its name."""
    flags_of: dict[str, list[str]] = {}
    for line in dict.fromkeys(lines):
        flag, _, said = line.partition(": ")
        flags_of.setdefault(said, []).append(flag)
    text, left = "", []
    for said, names in flags_of.items():
        are = "are no flags" if len(names) > 1 else "is no flag"
        part = f"{listed(names, 200)}: {said.replace('is no flag', are)}"
        if text and len(text) + len(part) > ROOM - 100:
            left += names
        else:
            text += f"{'; also ' if text else ''}{shortened(part, ROOM - 100)}"
    text += f"; also wrong: {listed(left, 80)}" if left else ""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _unknown_flag(flag: str, parser: ArgumentParser) -> str:
    """Return the line for a flag that there is not: what replaced it, what may have been meant, or what there is."""
    keys = [key for key in parser.get_defaults().keys() if not key.startswith("__")]  # noqa: SIM118
    known = ["--" + flags.BARE.sub("", key) for key in keys]
    group, _, name = flag.lstrip("-").replace("-", "_").replace(" ", ".").rpartition(".")
    if name in REPLACED:
        return f"{flag}: is no flag here; {REPLACED[name]}"
    same = [one for one in known if one.rpartition(".")[2].lstrip("-") == name]
    names = [one.removeprefix(f"--{group}.") for one in known if one.startswith(f"--{group}.")]
    like = same or [f"--{group}.{one}" for one in closest(name, names)] or closest(flag, known, 0.8)
    if like:
        return f"{flag}: is no flag here; did you mean {' or '.join(like)}?"
    if names:
        more = f"; see {REFERENCE[group]}" if group in REFERENCE else ""
        return f"{flag}: is no flag here; --{group} has {listed(names, 250)}{more}"
    single = [one for one in known if "." not in one]
    groups = dict.fromkeys(one.partition(".")[0] for one in known if "." in one)
    rest = f"; in groups: {', '.join(groups)}" if groups else ""
    return (
        f"{flag}: is no flag here; flags are "
        f"{', '.join(one for one in single if one not in groups)}{rest}"
    )


def _unknown_setting(flag: str, option: str, owner: str, bases: list[str]) -> str:
    """Return the line for a setting that class `owner`, given or default, does not have."""
    kind, name = find_class(owner), owner.rpartition(".")[2]
    if option == "class_path":
        return f"{flag}: found class_path beside settings; put these into init_args"
    if kind in [find_class(base) for base in bases]:  # none was chosen
        return f"{flag}.{option}: belongs to a class that is not given; give {flag}=NAME as well"
    names = flags.settings(owner)
    advice = REPLACED.get(option) or (
        f"did you mean {flag}.{like[0]}?"
        if (like := closest(option, names))
        else f"it has {listed(names, 250) or 'none'}"
    )
    return f"{flag}.{option}: {name} has no such setting; {advice}"
