"""Optimizers, and schedulers of learning rates, that are made while training."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import optim
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from sagemaker_lightning.state.graph.kinds.base import (
    NotSaved,
    class_name,
    kind_text,
    known_class,
    refusal,
)
from sagemaker_lightning.state.graph.kinds.objects import ObjectKind
from sagemaker_lightning.state.object_graph import attributes, namespace

OPTIMIZERS = Optimizer, LRScheduler
STEP = "step"
CLASSES_OF_TORCH: dict[str, type] = {
    class_name(class_): class_
    for module in (optim, lr_scheduler, swa_utils)
    for class_ in vars(module).values()
    if isinstance(class_, type) and issubclass(class_, OPTIMIZERS)
}
"""The classes of torch's of which a record may have objects, by name."""


class OptimizerKind(ObjectKind):
    """An optimizer or a scheduler that the program does not make again at its start.

    All that it holds is content, as torch keeps it: groups of parameters, which are known by
    identity, and their states. Other parts of a checkpoint have these of one of the start.
    """

    name = "optimizer"

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the names and values of the attributes."""
        members = {
            name: member
            for name, member in namespace(value).items()
            if name != STEP or not _is_wrapper(value, member)
        }
        return list(members), list(members.values())

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return the class and the names of the attributes."""
        has_slots = not attributes(value).keys() <= namespace(value).keys()
        if has_slots or not all(_is_settable(type(value), name) for name in note):
            raise NotSaved(kind_text(value))
        return {"class": class_name(type(value)), "names": note}

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> Any:
        """Return an object without groups and states; the code of its class does not run."""
        class_ = known_class(classes, note["class"])
        if not issubclass(class_, OPTIMIZERS):
            raise refusal(note["class"])
        made = object.__new__(class_)
        if isinstance(made, Optimizer):
            Optimizer.__setstate__(made, {"defaults": {}})  # as torch does for a copy
        return made

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Set the attributes."""
        for name, part in zip(note["names"], parts, strict=False):
            if type(name) is not str or not _is_settable(type(value), name):
                raise refusal(self.name)
            vars(value)[name] = part


def _is_wrapper(owner: Any, function: Any) -> bool:
    """Return whether a function is what a scheduler puts around an optimizer's step."""
    own = inspect.getattr_static(type(owner), STEP, None)
    return isinstance(owner, Optimizer) and getattr(function, "__wrapped__", None) is own


def _is_settable(class_: type, name: str) -> bool:
    """Return whether an attribute is not one of Python's, and not in the place of a method."""
    is_pythons = name.startswith("__")
    return not is_pythons and not callable(inspect.getattr_static(class_, name, None))
