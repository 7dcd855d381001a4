"""The numbers that the code gives its model and callbacks: dropout, weights of losses, patience.

A resumed run has some of them from its checkpoint and others from the code. If the code has
changed, the run is neither the one before nor a new one. The numbers are recorded before anything
is loaded or trained, and compared with those of the checkpoint's run.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)
from torch import nn

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.resume.same_run.optimizer_arguments import as_texts, labelled
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.graph.atoms import SCALARS

SHOWS = ProgressBar, ModelSummary, LearningRateMonitor, DeviceStatsMonitor, Timer
"""Callbacks that change no result."""
OURS = "sagemaker_lightning."
MAY_DIFFER = re.compile("workers|prefetch|pin_memory|persistent|verbose|log_|time|clock|pid$|rank")
"""Names of numbers that change no result, or are others each time."""
MAX_NUMBER = 1e9  # a larger one may be a time or a process
MAX_LENGTH = 64  # elements of a list that is compared; a longer one holds data
_used: WeakSet[nn.Module | Callback] = WeakSet()
"""Models and callbacks that this process has trained with: it may have changed their numbers."""


def note_used(trainer: Trainer) -> None:
    """Note that the trainer's model and callbacks are trained with from now on."""
    _used.update((trainer.lightning_module, *callbacks_of(trainer)))


def describe(trainer: Trainer) -> dict[str, str] | None:
    """Return the numbers of the model and the callbacks, in lists and dicts too, as text by name.

    None if this process has trained the model before.
    """
    if trainer.lightning_module in _used:
        return None
    writers = loggers.config_writers(trainer)
    callbacks = [
        callback
        for callback in callbacks_of(trainer)
        if not isinstance(callback, SHOWS)
        and callback not in writers
        and not type(callback).__module__.startswith(OURS)
        and callback not in _used
    ]
    roots = {"model": trainer.lightning_module} | labelled(callbacks, "callback")
    numbers: dict[str, str] = {}
    for path, owner in object_graph.walk(roots, code=False):
        is_library = object_graph.is_library_class(type(owner))
        if isinstance(owner, type) or (is_library and not isinstance(owner, (nn.Module, Callback))):
            continue
        is_own = isinstance(owner, (nn.Module, Callback)) or object_graph.is_own_module(
            type(owner).__module__
        )
        if not is_own and "._" in path:
            continue  # what another package counts for itself
        # All attributes of a library's callback are compared, also those that its library handles.
        is_whole = is_library and isinstance(owner, Callback)
        values = vars(owner) if is_whole else object_graph.attributes(owner)
        numbers |= as_texts(
            {
                name: value
                for name, value in values.items()
                if _is_compared(name, value) and (is_own or name[0] != "_")
            },
            path,
        )
    return numbers


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a phrase for each number that differs; one that only one run has is not compared.

    Args:
        before: What `describe` returned in the checkpoint's run.
        now: What it returned in this run.
    """
    return [
        f"{name} was {before[name]}, is {value}"
        for name, value in now.items()
        if before.get(name, value) != value
    ]


def _is_compared(name: str, value: Any) -> bool:
    """Return whether a value is a number that may change results, or a few of them."""
    elements = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict) and not SCALARS.issuperset(map(type, value)):
        return False  # the text of an object may have its address
    return not _may_differ(name) and (
        _is_number(value)
        or (
            isinstance(value, (list, tuple, dict))
            and 0 < len(value) <= MAX_LENGTH
            and all(map(_is_number, elements))
        )
    )


@functools.lru_cache(maxsize=1 << 12)
def _may_differ(name: str) -> bool:
    return MAY_DIFFER.search(name) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and not abs(value) >= MAX_NUMBER
