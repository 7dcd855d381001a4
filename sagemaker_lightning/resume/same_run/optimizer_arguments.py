"""The arguments that the code gives its optimizers and learning-rate schedulers.

A checkpoint has the state of both, and Lightning loads it over what the code has just made. So an
argument that was changed in the code would have no effect, and nothing would say so. What
`configure_optimizers` makes is recorded before anything is loaded or trained, and compared with
what it made in the checkpoint's run.
"""

import functools
import hashlib
import inspect
import math
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pytorch_lightning import Trainer
from torch import Tensor, nn

from sagemaker_lightning.callbacks.lr_scaling import GROUP_KEYS, SCHEDULER_ATTRIBUTES
from sagemaker_lightning.compat.torch_modules import (
    INNER_SCHEDULERS,
    inner_schedulers,
    named_parameters,
)
from sagemaker_lightning.resume.files.entries import OptimizerArguments
from sagemaker_lightning.state.digests import digest
from sagemaker_lightning.state.object_graph import (
    MAX_ELEMENTS,
    closure,
    is_leaf,
    is_library_class,
    is_own_code,
    names_in_code,
    namespace,
)

KERNEL_ARGUMENTS = {"foreach", "fused", "capturable", "differentiable"}
"""Arguments of an optimizer that choose a kernel, as the machine may need it."""
CONFIG_NAMES = "interval", "frequency", "monitor", "reduce_on_plateau"
"""What `configure_optimizers` tells Lightning about a scheduler."""
MAX_DEPTH = 4  # of lists within lists, and of functions within functions
MAX_CHARACTERS = 60  # of a value; a longer one is cut off, and has a hash


def describe(trainer: Trainer) -> OptimizerArguments:
    """Return what `configure_optimizers` has made, in plain values.

    Call it before anything is trained. If a training has used an optimizer or
    scheduler before, such as one made in `__init__`, it has only the optimizer's defaults.
    """
    optimizers = labelled(trainer.optimizers, "optimizer")
    configs = trainer.lr_scheduler_configs
    schedulers = labelled([config.scheduler for config in configs], "scheduler")
    names = {id(weight): name for name, weight in named_parameters(trainer.lightning_module)}
    arguments: dict[str, str] = {}
    schedule: dict[str, str] = {}
    functions: dict[str, str] = {}
    for owner, optimizer in optimizers.items():
        defaults = getattr(optimizer, "defaults", {})
        arguments |= as_texts(defaults, owner)
        groups = [] if getattr(optimizer, "state", None) else optimizer.param_groups
        if groups:
            arguments[f"number of parameter groups of {owner}"] = str(len(groups))
        for number, group in enumerate(groups):
            part = f"parameter group {number} of {owner}" if len(groups) > 1 else owner
            members = [names.get(id(member), "") for member in group["params"]]
            arguments[f"order of the parameters of {part}"] = _shortened(str(members))
            # A scheduler sets "lr" when it is made; this is what the code has set.
            first = {"lr": group["initial_lr"]} if "initial_lr" in group else {}
            given = {name: group[name] for name in defaults if name in group}
            arguments |= as_texts(given | first, part)
            rest = {name: value for name, value in group.items() if name not in defaults}
            rest.pop("params")
            schedule |= as_texts(rest, part)
    for (owner, scheduler), config in zip(schedulers.items(), configs, strict=True):
        arguments |= as_texts({name: getattr(config, name) for name in CONFIG_NAMES}, owner, True)
        if getattr(scheduler, "last_epoch", 0) <= 0:
            for part, each in _nested(owner, scheduler):
                attributes = {
                    name: value for name, value in vars(each).items() if name != INNER_SCHEDULERS
                }
                schedule |= as_texts(attributes, part, is_library_class(type(each)))
                for name, function, values in _functions_in(
                    part, _own_methods(type(each)) | attributes
                ):
                    schedule |= as_texts(values, name)
                    if isinstance(function, types.FunctionType) and is_own_code(function):
                        functions[name] = _code_hash(function)
    return {
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers.values()],
        "schedulers": [type(scheduler).__name__ for scheduler in schedulers.values()],
        "arguments": arguments,
        "schedule": schedule,
        "functions": functions,
        "python": sys.hexversion >> 16,
    }


def other_classes(before: OptimizerArguments, now: OptimizerArguments) -> list[str]:
    """Return a phrase if the optimizers, or the schedulers, are of other classes.

    Args:
        before: What `describe` returned in the checkpoint's run.
        now: What it returned in this run.
    """
    classes = {
        "optimizer": (before["optimizers"], now["optimizers"]),
        "scheduler": (before["schedulers"], now["schedulers"]),
    }
    return [
        f"the {kind} was {', '.join(earlier) or 'none'}, is {', '.join(present) or 'none'}"
        for kind, (earlier, present) in classes.items()
        if earlier != present
    ]


def differences(
    before: OptimizerArguments, now: OptimizerArguments, other_rates: bool = False
) -> tuple[list[str], list[str]]:
    """Return a phrase for each argument that differs: of the optimizers, and of the schedules.

    What one argument decides several times, such as a learning rate, is named once. What only one
    of the two runs has is not compared: another version of torch may keep more.

    Args:
        before: What `describe` returned in the checkpoint's run.
        now: What it returned in this run.
        other_rates: Whether learning rates may differ.
    """
    kinds = {
        "arguments": (before["arguments"], now["arguments"]),
        "schedule": (before["schedule"], now["schedule"]),
    }
    if before["python"] == now["python"]:
        kinds["functions"] = before["functions"], now["functions"]
    changed = [
        (kind, name, (earlier.get(name, value), value))
        for kind, (earlier, present) in kinds.items()
        for name, value in present.items()
        if earlier.get(name, value) != value
        and not (other_rates and name.split(" of ")[0] in (*GROUP_KEYS, *SCHEDULER_ATTRIBUTES))
    ]
    named: set[tuple[str, str]] = set()
    arguments: list[str] = []
    schedule: list[str] = []
    # What a scheduler derives from its arguments has private names.
    for kind, name, values in sorted(changed, key=lambda change: change[1][0] == "_"):
        if values not in named:
            phrases = arguments if kind == "arguments" else schedule
            phrases.append(
                f"the code of {name} has changed"
                if kind == "functions"
                else f"{name} was {values[0]}, is {values[1]}"
            )
        named.add(values)
    return arguments, schedule


def labelled(objects: Sequence[Any], kind: str) -> dict[str, Any]:
    """Return objects by their classes' names, with numbers where a name is there twice."""
    names = [type(each).__name__ for each in objects]
    return {
        name if names.count(name) == 1 else f"{kind} {number} ({name})": each
        for number, (name, each) in enumerate(zip(names, objects, strict=True))
    }


def _nested(owner: str, scheduler: Any) -> Iterator[tuple[str, Any]]:
    """Yield a scheduler and those that it is made of, with a name for each."""
    yield owner, scheduler
    for part, inner in labelled(inner_schedulers(scheduler), "part").items():
        yield from _nested(f"{part} in {owner}", inner)


def as_texts(values: Mapping[str, Any], owner: str, strings: bool = False) -> dict[str, str]:
    """Return the plain ones of some values as text, by name.

    Args:
        values: The values by name.
        owner: Whose values they are.
        strings: Whether strings count: those of a user's own class may be anything.
    """
    texts = {
        name: _as_text(value, strings)
        for name, value in values.items()
        if name not in KERNEL_ARGUMENTS
    }
    return {f"{name} of {owner}": _shortened(text) for name, text in texts.items() if text}


def _as_text(value: Any, strings: bool, depth: int = MAX_DEPTH) -> str:
    """Return a value as text; "" if it is not plain. A list of one element is that element."""
    if isinstance(value, (Tensor, np.ndarray)) and math.prod(value.shape) > MAX_ELEMENTS:
        return digest(value).hex()
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float)):
        return str(value)
    if isinstance(value, str):
        return value if strings else ""
    if isinstance(value, Mapping):
        texts = {str(key): _as_text(member, strings, depth - 1) for key, member in value.items()}
        items = ", ".join(f"{key}: {text}" for key, text in texts.items())
        return f"({items})" if depth and all(texts.values()) else ""
    if not isinstance(value, (list, tuple, deque)) or not depth:
        return ""
    elements = [_as_text(element, strings, depth - 1) for element in value]
    if not all(elements):
        return ""
    return elements[0] if len(elements) == 1 else f"({', '.join(elements)})"


def _shortened(text: str) -> str:
    """Return a text of at most some dozen characters that is as unique as the text."""
    if len(text) <= MAX_CHARACTERS:
        return text
    hash_ = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[: MAX_CHARACTERS - 20]}... ({hash_})"


def _functions_in(
    owner: str, values: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the functions among some values, and those that these use.

    Args:
        owner: Whose values they are.
        values: Functions, lists of them, and anything else, by name.

    Yields:
        A name, the function, or what else can be called, and the values that it uses.
    """
    seen: set[int] = set()
    waiting = deque((f"{name} of {owner}", value, MAX_DEPTH) for name, value in values.items())
    while waiting:
        name, value, depth = waiting.popleft()
        if isinstance(value, types.MethodType):
            value = value.__func__
        if id(value) in seen or not depth:
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple)):
            waiting += [
                (f"{name}[{index}]" if len(value) > 1 else name, element, depth - 1)
                for index, element in enumerate(value)
                if not is_leaf(type(element))
            ]
        elif (used := _values_used_by(value)) is not None:
            yield name, value, used
            waiting += [(f"{part} of {name}", each, depth - 1) for part, each in used.items()]


def _values_used_by(value: Any) -> Mapping[str, Any] | None:
    """Return the values by which a function decides what it returns; None if it is not a function.

    These are the arguments of a partial; what a function has closed over; the defaults of a user's
    function, and the globals that it reads; the methods and attributes of a user's object that can
    be called.
    """
    if isinstance(value, functools.partial):
        arguments = {f"argument {number}": each for number, each in enumerate(value.args)}
        return {"function": value.func, **arguments, **value.keywords}
    if isinstance(value, types.FunctionType):
        if not is_own_code(value):
            return closure(value)
        names = sorted(names_in_code(value.__code__) & value.__globals__.keys())
        parameters = inspect.signature(value, follow_wrapped=False).parameters.values()
        return {
            **{name: value.__globals__[name] for name in names},
            **closure(value),
            **{each.name: each.default for each in parameters if each.default is not each.empty},
        }
    # A model that can be called has numbers that the training may change.
    if not callable(value) or isinstance(value, (type, nn.Module)) or is_library_class(type(value)):
        return None
    return {**_own_methods(type(value)), **namespace(value)}


def _own_methods(class_: type) -> dict[str, Any]:
    """Return the methods of a class that the user has written, by name."""
    return {
        name: member
        for base in reversed(class_.__mro__)
        for name, member in vars(base).items()
        if isinstance(member, types.FunctionType) and is_own_code(member)
    }


def _code_hash(function: types.FunctionType) -> str:
    """Return a hash of a function's code, which comments, layout and local names do not change.

    Python has the code also where it does not have the function's own source: of one of several
    lambdas in a line, or in a notebook.
    """
    hash_ = hashlib.blake2b(digest_size=8)
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        constants = [
            _in_order(each)
            for each in code.co_consts
            if not isinstance(each, types.CodeType) and each != function.__doc__
        ]
        content = code.co_code, constants, code.co_names, code.co_freevars, code.co_argcount
        hash_.update(repr(content).encode())
    return hash_.hexdigest()


def _in_order(constant: Any) -> Any:
    """Return a constant; the elements of a set, which has another order each time, sorted."""
    if isinstance(constant, tuple):
        return tuple(map(_in_order, constant))
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
