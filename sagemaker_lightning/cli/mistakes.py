"""Turns the parser's errors into one line: flag, what was found, what is allowed."""

import errno
import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import FrameType
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
    subclasses,
    why_not,
)
from sagemaker_lightning.compat import jsonargparse_errors, jsonargparse_types
from sagemaker_lightning.contract.errors import UserError, printable

REFUSED = (ArgumentError, OSError, ValueError, OverflowError, RecursionError)
"""Exceptions that the parser raises for wrong flags."""

REFUSED_BY_CLASSES = (
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AssertionError,
    RuntimeError,
    MisconfigurationException,
)
"""Exceptions that classes raise when they are made with impossible settings."""

MISCONFIGURED = (MisconfigurationException,)
"""Exceptions that Lightning raises, at any time, for whoever chose the settings."""

# Libraries whose checks are for whoever chose the settings. If all code that an error came through
# is theirs, a line without the traceback is enough.
LIBRARIES = {
    "jsonargparse",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torch",
    *sys.stdlib_module_names,
}
# Modules of this package that may stand between a flag and such a check. Any other module of this
# package counts as a user's code, as a model does.
CALLERS = {
    "sagemaker_lightning.resume.files.best_model",
    "sagemaker_lightning.cli.lightning_cli",
    "sagemaker_lightning.resume.moments",
    "sagemaker_lightning.cli.lr_schedules",
}
# Modules whose names begin like this stand for Lightning.
COMPAT = "sagemaker_lightning.compat."

# Values of --trainer.accelerator in Lightning below 1.8.
OLD_ACCELERATORS = ("ddp", "ddp2", "ddp_cpu", "ddp_spawn", "dp", "horovod")
# Where to read about a group of flags that is too long to list.
REFERENCE_PAGES = {"trainer": "https://lightning.ai/docs/pytorch/stable/common/trainer.html"}
# Characters of the line: SageMaker shows 1,024, and the host and the rank are added.
MAX_CHARACTERS = 800
# Mistakes that are explained: there is room for fewer, and each may take a tenth of a second.
MAX_EXPLAINED = 30
# Settings that are parsed in the search for them, counted each time: half a millisecond each.
MAX_PARSED = 10_000


def explain_all(
    parser: ArgumentParser, args: list[str], application: Application | None = None
) -> str:
    """Return one line that names everything wrong in `args`; "" if nothing is.

    The parser stops at the first mistake. So this function leaves out the flags that are wrong, and
    parses the others again, until nothing is wrong. It looks no further after MAX_EXPLAINED
    mistakes or MAX_PARSED settings, and says so.
    """
    jsonargparse_errors.print_no_config(parser)
    known = KnownFlags(parser)
    settings = list(flags.given(args))
    lines: dict[str, str] = {}
    unexplained: dict[str, None] = {}
    rest: list[flags.Setting] = []
    for setting in settings:
        flag = setting.flag
        if line := _explain_wrong_file(flag, setting.words, application or Application()):
            lines.setdefault(flag, line)
        elif known.has(flag):
            rest.append(setting)
        elif flag not in lines and len(lines) < MAX_EXPLAINED:
            lines[flag] = f"{known.explain(flag)}{setting.source}"
        elif flag not in lines:
            unexplained[flag] = None
    parsed = 0
    for _ in range(MAX_EXPLAINED):
        line, wrong, is_lacking = _first_mistake(parser, rest)
        flag = _flag_of(line)
        # A class may lack just what was left out because it is wrong.
        if line and not (is_lacking and any(_covers(flag, other) for other in lines)):
            # Below a wrong flag, the class of a setting is not known.
            lines = {other: text for other, text in lines.items() if not _covers(flag, other)}
            lines[flag] = f"{line}{wrong[0].source if wrong else ''}"
        if not wrong:
            return _join_lines(_in_order(lines, settings), unexplained)
        parsed += len(rest)
        wrong_flags = {setting.flag for setting in wrong}
        rest = [setting for setting in rest if setting.flag not in wrong_flags]
        if parsed > MAX_PARSED:
            break
    return _join_lines(_in_order(lines, settings), unexplained, "; there may be more")


def explain(error: Exception, parser: ArgumentParser) -> str:
    """Return one line for an error of the parser."""
    return _line(jsonargparse_errors.read(error), parser)


def _line(mistake: jsonargparse_errors.Mistake, parser: ArgumentParser) -> str:
    """Return the line for what the parser says is wrong."""
    flag = mistake.flag
    match mistake:
        case jsonargparse_errors.UnknownFlag():
            return KnownFlags(parser).explain(flag)
        case jsonargparse_errors.LackingFlag():
            return f"{flag}: is needed, and not given"
        case jsonargparse_errors.NoSettings(found=found):
            return _no_settings(flag, found)
        case jsonargparse_errors.WrongValue(found=found, allowed=allowed):
            return f"{flag}: found {shown(found)}, expected {' or '.join(allowed)}"
        case jsonargparse_errors.WrongClass(found=found, bases=bases):
            return f"{flag}: found {shown(found)}{why_not(found)}, expected {choice(found, bases)}"
        case jsonargparse_errors.SettingOfNoClass(setting=setting, bases=bases):
            return _explain_lacking_class(flag, setting, bases)
        case jsonargparse_errors.UnknownSetting(setting=setting, owner=owner, bases=bases):
            return _explain_unknown_setting(flag, setting, owner, bases)
        case jsonargparse_errors.LackingSettings(owner=owner, settings=settings):
            return (
                f"{flag}: {owner.rpartition('.')[2]} needs {', '.join(settings)}; give "
                f"{flag}.{settings[0]}"
            )
        case _:
            return mistake.text


@contextmanager
def naming(
    flag: str,
    settings: Mapping[str, object],
    kinds: tuple[type[Exception], ...] = REFUSED_BY_CLASSES,
) -> Iterator[None]:
    """Raise a library's error about `settings` as UserError that names their flag.

    Args:
        flag: The flag.
        settings: The settings that the flag chose, by name.
        kinds: The exceptions to convert. Anything but the default is for code that does more than
            use these settings: then the exceptions must be meant for whoever chose settings,
            these or others.

    Errors that come from a user's code stay as they are, because their traceback says more; so do
    this package's own errors.
    """
    try:
        yield
    except kinds as error:
        # Without the frames of this function and of the `with` statement that entered it.
        frames = list(traceback.walk_tb(error.__traceback__))[2:]
        raised = named(flag, settings, error, frames, kinds)
        if raised is error:
            raise
        raise raised from None


@contextmanager
def found_in_training(given: Mapping[str, object]) -> Iterator[None]:
    """Raise what only a training finds wrong with flags as UserError that names the flag.

    Args:
        given: The value of each flag.
    """
    try:
        yield
    except RuntimeError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        # Such as that of EarlyStopping for a metric that is not logged.
        if not frame.f_globals.get("__name__", "").startswith("pytorch_lightning.callbacks."):
            raise
        raise UserError(f"--trainer.callbacks: {shortened(str(error), 700)}") from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        for flag, value in given.items():
            for part in str(value).split("/"):
                if len(part) > 200 and part in str(error.filename):
                    raise UserError(
                        f"{flag}: found {shown(str(value))}, in which a name of {len(part)} "
                        "characters is too long for a file; give a shorter one"
                    ) from None
        raise


def of_a_component(error: Exception, config: Namespace) -> Exception:
    """Convert an error that came while the parser made objects; see `naming`.

    The parser may have raised the error as one of its own; then its cause is converted. Returns the
    error itself if it is not about a flag's settings.
    """
    error, frames = jsonargparse_errors.unwrapped(error)
    components = jsonargparse_types.components(frame for frame, _ in frames)
    if not components or not isinstance(error, REFUSED_BY_CLASSES):
        return error
    path = ".".join(flags.BARE.sub("", component.dest) for component in components)
    chosen = config.get(components[0].dest) if len(components) == 1 else None
    return named(f"--{path}", vars(chosen) if isinstance(chosen, Namespace) else {}, error, frames)


def named(
    flag: str,
    settings: Mapping[str, Any],
    error: Exception,
    frames: list[tuple[FrameType, int]],
    kinds: tuple[type[Exception], ...] = REFUSED_BY_CLASSES,
) -> Exception:
    """Return `error` as UserError that names the flag, or the error itself.

    Args:
        flag: The flag.
        settings: The settings that the flag chose, by name.
        error: A library's error.
        frames: The frames that the error came through, with their lines.
        kinds: See `naming`.

    The error itself is returned if it came through a user's code, or is a UserError already.
    """
    names = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    is_caller = [name in CALLERS or name.startswith(COMPAT) for name in names]
    other_packages = {
        name.partition(".")[0] for name, own in zip(names, is_caller, strict=True) if not own
    }
    if (
        isinstance(error, UserError)
        or not names
        or is_caller[-1]
        or not other_packages <= LIBRARIES
    ):
        return error
    message = " ".join(str(error).split())
    if not isinstance(error, (ValueError, MisconfigurationException)) or not message:
        message = f"{type(error).__name__}: {message}".rstrip(": ")
    arguments = dict(settings.get("init_args") or settings)
    for pattern in (r"\b{}\s*=", r"`{}`", r"\b{}\b"):
        if (
            len(
                named_arguments := [
                    name
                    for name in arguments
                    if re.search(pattern.format(re.escape(name)), message)
                ]
            )
            == 1
        ):
            return UserError(
                f"{flag}.{named_arguments[0]}: found {arguments[named_arguments[0]]!r}, which "
                f"cannot be: {shortened(message, 600)}"
            )
    if kinds is not REFUSED_BY_CLASSES:
        return UserError(message)
    values = [
        f"{name}={value}"
        for name, value in arguments.items()
        if isinstance(value, (int, float, str))
    ]
    values_found = f"; found {listed(values, 200)}" if values else ""
    return UserError(f"{flag}: {shortened(message, 500)}{values_found}")


def unwanted(config: Namespace) -> str:
    """Return the line for a value that only the parser accepts; "" if there is none."""
    device = config.get("trainer.accelerator")
    if device in OLD_ACCELERATORS:
        allowed = "expected the kind of device, e.g. gpu or auto"
        return f"--trainer.accelerator: found {device!r}, {allowed}; use --trainer.strategy=ddp"
    for name, value in config.items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            flag = flags.BARE.sub("", name)
            return f"--{flag}: found {shortened(str(value), 60)}, expected whole numbers of 64 bits"
    seed = config.get("seed_everything")
    # NumPy's limit. It must be checked first: the seed is used before anything else is checked.
    if isinstance(seed, int) and not 0 <= seed < 2**32:
        return f"--seed_everything: found {seed}, expected 0 to {2**32 - 1}, true or false"
    for group, component in vars(config).items():
        values = (
            component.get("init_args")
            if isinstance(component, Namespace) and component.get("class_path")
            else None
        )
        for name, value in vars(values or Namespace()).items():
            if value is None and not _may_be_null(component.class_path, name):
                return (
                    f"--{group}.{name}: found null, expected a value; leave it out for its default"
                )
    return ""


def _no_settings(flag: str, found: str) -> str:
    return f"{flag}: found {shown(found)}, expected its settings: {flag}.NAME=VALUE"


def lacking_settings(config: Namespace, parser: ArgumentParser) -> str:
    """Return the line for a value in the place of a group's settings; "" if there is none.

    The parser accepts any value there, of a file of flags. A group is of the trainer's settings, or
    of those of a callback that the program adds.
    """
    for group in ("trainer", *getattr(parser, "callback_keys", ())):
        if not isinstance(found := config.get(group), Namespace):
            return _no_settings(f"--{group}", str(found))
    return ""


def _may_be_null(path: str, name: str) -> bool:
    """Return whether null is allowed for a class's parameter.

    It is if null is the default or among the types, or if the parameter has no type.
    """
    for base in find_class(path).__mro__:
        init = base.__init__  # type: ignore[misc]  # of a class, which has it
        if parameter := inspect.signature(init).parameters.get(name):
            try:
                hint = get_type_hints(init).get(name, Any)
            # A name in the annotation does not exist in the class's module.
            except Exception:
                return True
            return (
                parameter.default in (None, parameter.empty)
                or hint is Any
                or type(None) in get_args(hint)
            )
    return True


def _explain_wrong_file(flag: str, words: list[str], application: Application) -> str:
    """Return the line for a --config that is not a file of flags; "" if it is one."""
    name = words[-1].removeprefix("--config=")
    if flag != "--config" or len(words) == 1 and words[0] == flag:
        return ""
    if not flags.is_file(name):
        known = ", ".join(application.recipe_files)
        allowed = f"a file, or one of {known}" if known else "a file"
        return (
            f"--config: found {shown(name)}, which is not a file in {Path.cwd()}; "
            f"expected {allowed}"
        )
    try:
        flags.settings_in(name)
    except UserError as error:
        return str(error)
    return ""


def _first_mistake(
    parser: ArgumentParser, settings: list[flags.Setting]
) -> tuple[str, list[flags.Setting], bool]:
    """Return the line for the parser's first mistake in settings; "" if there is none.

    Also return the settings that it is about, all of their flags, and whether it is about something
    that is missing.
    """
    line, is_lacking = _parser_message(parser, settings)
    flag = _flag_of(line)
    wrong = [setting for setting in settings if _covers(flag, setting.flag)]
    if not wrong:
        above = [setting for setting in settings if _covers(setting.flag, flag)]
        innermost = max((setting.flag for setting in above), key=len, default="")
        wrong = [setting for setting in above if setting.flag == innermost]
    if line and not wrong and not is_lacking and (refused := _first_refused(parser, settings)):
        wrong = [setting for setting in settings if setting.flag == refused.flag]
        line = line if line.startswith("-") else f"{refused.flag}: {line}"
    return line, wrong, is_lacking


def _first_refused(parser: ArgumentParser, settings: list[flags.Setting]) -> flags.Setting | None:
    """Return the first setting with which the parser refuses those up to it.

    Return None if the parser refuses even no settings. This is for errors that name no flag.
    """
    right, refused = -1, len(settings)
    while refused - right > 1:
        middle = (right + refused) // 2
        line, is_lacking = _parser_message(parser, settings[:middle])
        if line and not is_lacking:
            refused = middle
        else:
            right = middle
    return settings[refused - 1] if refused else None


def _parser_message(parser: ArgumentParser, settings: list[flags.Setting]) -> tuple[str, bool]:
    """Return the line for a parser's error about settings; "" if there is none.

    Also return whether the error is that something is missing.
    """
    try:
        config = parser.parse_args([word for setting in settings for word in setting.words])
    except REFUSED as error:
        mistake = jsonargparse_errors.read(error)
        return _line(mistake, parser), mistake.is_lacking
    return unwanted(config) or lacking_settings(config, parser), False


def _flag_of(line: str) -> str:
    return line.partition(": ")[0]


def _covers(flag: str, other: str) -> bool:
    return other == flag or other.startswith(f"{flag}.")


def _in_order(lines: Mapping[str, str], settings: list[flags.Setting]) -> list[str]:
    """Return the lines by the order of their flags: those of whole groups, then their settings."""
    places = {setting.flag: number for number, setting in reversed([*enumerate(settings)])}
    return [
        lines[flag]
        for flag in sorted(lines, key=lambda flag: (flag.count("."), places.get(flag, len(places))))
    ]


def _join_lines(lines: list[str], unexplained: Iterable[str] = (), end: str = "") -> str:
    """Join several lines to one of at most MAX_CHARACTERS characters.

    Flags with the same message are listed together. What does not fit is listed by its flag only.

    Args:
        lines: What is wrong, each with its flag.
        unexplained: More flags that are wrong.
        end: What the line ends with.
    """
    flags_of: dict[str, list[str]] = {}
    for line in dict.fromkeys(lines):
        flag, _, message = line.partition(": ")
        flags_of.setdefault(message, []).append(flag)
    text = ""
    left_out = []
    for message, names in flags_of.items():
        no_flags = "are not flags" if len(names) > 1 else "is not a flag"
        part = f"{listed(names, 200)}: {message.replace('is not a flag', no_flags)}"
        if text and len(text) + len(part) > MAX_CHARACTERS - 100:
            left_out += names
        else:
            text += f"{'; also ' if text else ''}{shortened(part, MAX_CHARACTERS - 100)}"
    left_out += unexplained
    text += f"; also wrong: {listed(left_out, 80)}" if left_out else ""
    return printable(text + end)


class KnownFlags:
    """The flags of a parser, and what is meant by one that it does not have."""

    def __init__(self, parser: ArgumentParser) -> None:
        names = parser.get_defaults().keys()
        flags_of_names = ["--" + flags.BARE.sub("", name) for name in names if name[:2] != "__"]
        self.flags = dict.fromkeys(flags_of_names)
        self.flags_and_groups = {
            above for flag in self.flags for above in accumulate(flag.split("."), "{}.{}".format)
        }

    def has(self, flag: str) -> bool:
        """Return whether the parser may take a flag, also as a setting of a class.

        False is certain.
        """
        if flag.startswith("-") and not flag.startswith("--"):
            return True
        above = list(accumulate(flags.BARE.sub("", flag).split("."), "{}.{}".format))
        return above[-1] in self.flags_and_groups or any(each in self.flags for each in above)

    def explain(self, flag: str) -> str:
        """Return the line for an unknown flag: its replacement, similar or all flags."""
        if not flag.strip("-"):
            what = flag or "an empty argument"
            return f"{what}: is not a flag here; leave it out, or look at the variable that gave it"
        group, _, name = flag.lstrip("-").replace("-", "_").replace(" ", ".").rpartition(".")
        if name in REPLACED:
            return f"{flag}: is not a flag here; {REPLACED[name]}"
        same_name = [key for key in self.flags if key.rpartition(".")[2].lstrip("-") == name]
        names = [
            key.removeprefix(f"--{group}.") for key in self.flags if key.startswith(f"--{group}.")
        ]
        matches = (
            same_name
            or [f"--{group}.{key}" for key in closest(name, names)]
            or closest(flag, [*self.flags], 0.8)
        )
        if matches:
            return f"{flag}: is not a flag here; did you mean {' or '.join(matches)}?"
        if names:
            more = f"; see {REFERENCE_PAGES[group]}" if group in REFERENCE_PAGES else ""
            return f"{flag}: is not a flag here; --{group} has {listed(names, 250)}{more}"
        single = [key for key in self.flags if "." not in key]
        groups = dict.fromkeys(key.partition(".")[0] for key in self.flags if "." in key)
        rest = f"; in groups: {', '.join(groups)}" if groups else ""
        return (
            f"{flag}: is not a flag here; flags are "
            f"{', '.join(key for key in single if key not in groups)}{rest}"
        )


def _explain_unknown_setting(flag: str, option: str, owner: str, bases: Sequence[str]) -> str:
    """Return the line for a setting that the class `owner` does not have.

    The class may be given or the default.
    """
    owner_class = find_class(owner)
    name = owner.rpartition(".")[2]
    if option == "class_path":
        return f"{flag}: found class_path beside settings; put these into init_args"
    # No class was chosen.
    if owner_class in [find_class(base) for base in bases]:
        return _explain_lacking_class(flag, option, bases)
    names = flags.settings(owner_class)
    advice = REPLACED.get(option) or (
        f"did you mean {flag}.{matches[0]}?"
        if (matches := closest(option, names))
        else f"it has {listed(names, 250) or 'none'}"
    )
    return f"{flag}.{option}: {name} has no such setting; {advice}"


def _explain_lacking_class(flag: str, option: str, bases: Sequence[str]) -> str:
    """Return the line for a setting of no class, and the setting that may be meant."""
    names = {name for base in bases for kind in subclasses(base) for name in flags.settings(kind)}
    if option not in names and (matches := closest(option, sorted(names))):
        kinds = " or ".join(dict.fromkeys(base.rpartition(".")[2] for base in bases))
        return (
            f"{flag}.{option}: no {kinds} has such a setting; did you mean {flag}.{matches[0]}? "
            f"give {flag}=NAME as well"
        )
    return f"{flag}.{option}: belongs to a class that is not given; give {flag}=NAME as well"
