"""Values that hooks at the start of training compute from the weights or the optimizers.

Examples are the weights that a penalty holds the model to, and the learning rate that a schedule
lowers. In a resumed run, these hooks see the checkpoint's weights and rates. So a checkpoint has
what they have computed first.
"""

import dataclasses
import time
import types
from collections import deque
from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from pytorch_lightning import Trainer
from torch import Tensor

from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.graph.nodes import OBJECT, key_of, kind_of
from sagemaker_lightning.state.graph.state import GraphState

HOOKS = "on_fit_start", "on_train_start"
MAKING_HOOKS = "configure_optimizers", *HOOKS
"""Hooks that may make parts of the model, which their program makes again when it is resumed."""
CALLBACKS = "callbacks."
"""How the names of callbacks begin."""
CLOCKS = time.time, time.monotonic, time.perf_counter, time.process_time
NUMBERS = int, float, complex, np.number, np.bool_, Tensor, np.ndarray, type(None)
CONTAINERS = dict, list, tuple, set, frozenset, deque
MAX_WRAPPERS = 100  # one may wrap itself
MIN_ELEMENTS = 1 << 20
"""Elements that a value may have; as many as the weights have are good, too.

A larger one is data that a hook has loaded.
"""


def is_of_library(function: Callable[..., Any]) -> bool:
    """Return whether a function or a method is a library's."""
    is_function = isinstance(function, (types.FunctionType, types.MethodType))
    return is_function and object_graph.is_library_class(function)


def objects_of_hooks(trainer: Trainer) -> dict[str, Any]:
    """Return the model and the callbacks, by the names that all state goes by.

    Args:
        trainer: Lightning's trainer.
    """
    return {"model": trainer.lightning_module} | {
        f"{CALLBACKS}{position} {type(callback).__name__}": callback
        for position, callback in enumerate(callbacks_of(trainer))
    }


class StartHooks:
    """Finds what the hooks compute that run between the call and `computed`.

    Args:
        trainer: Lightning's trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.state = GraphState(partial(objects_of_hooks, trainer))
        self.are_users = not all(
            is_of_library(getattr(owner, name))
            for owner in objects_of_hooks(trainer).values()
            for name in HOOKS
        )
        if self.are_users:
            self.state.mark()
        self.began = [clock() for clock in CLOCKS]

    def computed(self) -> dict[tuple[int, str], Any]:
        """Return which values were computed since, by what their object is known and attribute.

        Text and whole numbers do not follow from weights, and may rightly be others in another
        run, such as a folder or a number of steps. So may a time. But a number that is the step or
        the epoch is where the training began.
        """
        if not self.are_users:
            return {}
        weights = sum(each.numel() for each in self.trainer.lightning_module.parameters())
        allowed = max(MIN_ELEMENTS, weights)
        counters = self.trainer.global_step, self.trainer.current_epoch
        return {
            key: value
            for key, value in self.state.changes().items()
            if (type(value) is int and value in counters) or self._are_numbers(value, allowed)
        }

    def _are_numbers(self, value: Any, allowed: int) -> bool:
        """Return whether a value is made of numbers that may follow from weights or rates.

        Args:
            value: A plain value.
            allowed: Elements that it may have.
        """
        leaves = list(_leaves(value, self.state.begin().nodes))
        return (
            all(isinstance(leaf, NUMBERS) for leaf in leaves)
            and any(map(self._may_follow_from_weights, leaves))
            and sum(map(_size, leaves)) <= allowed
        )

    def _may_follow_from_weights(self, value: Any) -> bool:
        """Return whether a value is an array or a number with a fraction, and no time."""
        if isinstance(value, (float, np.floating)):
            clocks = zip(self.began, CLOCKS, strict=True)
            return not any(began <= value <= clock() for began, clock in clocks)
        return isinstance(value, (Tensor, complex)) or (
            isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
        )


def _leaves(value: Any, before: Container[int]) -> Iterator[Any]:
    """Yield what a value holds, without containers; of a long one, its first elements.

    A container may be within itself.

    Args:
        value: The value.
        before: By what objects are known that there were before the hooks. Others of a user's
            classes are taken apart, as dataclasses are.
    """
    waiting = [value]
    seen = set()
    while waiting:
        value = waiting.pop()
        is_new = kind_of(value) is OBJECT and key_of(value) not in before
        is_users = is_new and not object_graph.is_library_class(type(value))
        if is_users or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            value = object_graph.attributes(value)
        is_of_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
        if not is_of_objects and not isinstance(value, CONTAINERS):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            elements = value.values() if isinstance(value, dict) else value
            elements = value.flat if is_of_objects else elements
            waiting += islice(elements, object_graph.MAX_ELEMENTS)


def _size(value: Any) -> int:
    """Return the number of elements of a leaf."""
    return value.numel() if isinstance(value, Tensor) else np.size(value)


def names_in_start_hooks(trainer: Trainer) -> set[str]:
    """Return the names of model parts that hooks before training may create.

    They are all names that the user's MAKING_HOOKS mention, or the functions that they call.
    """
    owners = [
        owner
        for owner in (trainer.lightning_module, *callbacks_of(trainer))
        if not object_graph.is_library_class(type(owner))
    ]
    return set().union(
        *(names_in_hook(type(owner), name) for owner in owners for name in MAKING_HOOKS)
    )


def names_in_hook(class_: type, hook: str) -> set[str]:
    """Return the names that a class's hook mentions, or its own functions that the hook calls.

    Args:
        class_: The class.
        hook: The name of the hook.
    """
    names: set[str] = set()
    functions: list[Any] = [getattr(class_, hook, None)]  # a callback has no configure_optimizers
    while functions:
        function = _unwrapped(functions.pop())
        if not isinstance(function, types.FunctionType) or is_of_library(function):
            continue
        new_names = object_graph.names_in_code(function.__code__) - names
        names |= new_names
        functions += [getattr(class_, name, function.__globals__.get(name)) for name in new_names]
    return names


def _unwrapped(function: Any) -> Any:
    """Return the function that functools.wraps has wrapped, perhaps several times.

    inspect.unwrap asks any object for an attribute, and a user's may raise anything then.
    """
    for _ in range(MAX_WRAPPERS):
        function = object_graph.namespace(function).get("__wrapped__", function)
    return function
