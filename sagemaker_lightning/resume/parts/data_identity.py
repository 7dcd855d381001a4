"""What tells the data, and the model's modules, from others: it is compared, and not restored."""

from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightning_fabric.utilities.data import sized_len
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sagemaker_lightning.compat.lightning_loaders import flattened
from sagemaker_lightning.compat.lightning_trainer import epochs_of_data
from sagemaker_lightning.compat.torch_modules import (
    hooks_by_module,
    named_modules,
    step_hooks,
)
from sagemaker_lightning.contract.errors import with_article
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.parts.part import Part
from sagemaker_lightning.resume.parts.roots import TRAINING, VALIDATION, user_objects
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import module_variables
from sagemaker_lightning.state.object_graph import is_library_class

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run

CODE_ROOTS = "model", "callbacks.", "optimizers.", "schedulers."
"""How the paths begin of what the code makes itself."""
LOADER_ATTRIBUTES = "batch_size", "drop_last", "sampler"
"""What decides a loader's batches."""
LENGTH, NUMBERS = "length ", "numbers "
"""How the names begin of what is compared of the data; then comes the path."""
CLASS_AND_HOOKS, HOOKS = "class and hooks ", "hooks "
"""The same, of the model's modules and of optimizers."""


class DataIdentity(Part):
    """What tells the training and validation data from others."""

    key = "data_identity"
    what = "lengths and numbers of the data"
    when = "never: it is compared"
    why_differs = "data that were read or drawn again, and are others"

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the lengths, and the numbers that the data hold, by name.

        These are lengths, and the numbers that the datasets hold, or the model and the callbacks in
        arrays, also of their containers and objects, such as directions drawn once: of those that
        the program has made and nothing has changed since. A text may rightly be another one, such
        as a folder.
        """
        # If loaders are made again while training, a resumed run makes the training data as of the
        # interrupted run's epoch, but the validation data as of its own first one.
        reloads = epochs_of_data(self.trainer)
        stages = (TRAINING,) if reloads else (TRAINING, VALIDATION)
        datasets = {
            path: object_
            for path, object_ in user_objects(self.trainer).items()
            # Asking a stream for its length may change it, as of litdata's.
            if path.startswith(stages) and not isinstance(object_, IterableDataset)
        }
        lengths: dict[str, Any] = {
            f"{LENGTH}{path}": sized_len(dataset)
            for path, dataset in datasets.items()
            if isinstance(dataset, Dataset)
        }
        objects = self.run.part(UserObjects)  # what has changed is saved itself
        # Lists in the code are compared with other numbers of the code.
        alone = TRAINING if reloads else ""
        found = objects.graph.numbers(objects.changed, but=CODE_ROOTS, alone=alone)
        # What is compared with may have another name now, such as that of a variable.
        numbers = {
            f"{NUMBERS}{path}": mark
            for path, mark in found.items()
            if point is None or path.startswith((*stages, *CODE_ROOTS))
        }
        return lengths | numbers | self._batches(stages)

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each value; not the model's arrays, if this program may have changed them.

        A program that trains on may do so on other data, from the end of what it trained before.
        """
        if self.run.same_run.has_trained_before:
            if self.resumed.saved_at is ResumePoint.EPOCH:
                return {}
            own = tuple(f"{NUMBERS}{root}" for root in CODE_ROOTS)
            saved = {name: value for name, value in saved.items() if not name.startswith(own)}
        return dict(saved)

    def differing(self, before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
        """Return the names of what is missing or different now.

        Data that two loaders share have the name of the one that was made first.

        Args:
            before: The digests of what was saved, by name.
            now: The digests of what there is.
        """
        numbers = {digest for name, digest in now.items() if name.startswith(NUMBERS)}
        return [
            name
            for name in super().differing(before, now)
            if name in now or not name.startswith(NUMBERS) or before[name] not in numbers
        ]

    def shown(self, name: str) -> str:
        """Return how a message names what is compared by a name."""
        what, _, path = name.partition(" ")
        return f"the numbers in {path}" if name.startswith(NUMBERS) else f"the {what} of {path}"

    def is_of_validation(self, name: str) -> bool:
        """Return whether what is compared by a name is of the validation's data."""
        return name.partition(" ")[2].startswith(VALIDATION)

    def _batches(self, stages: tuple[str, ...]) -> dict[str, str]:
        """Return what decides the batches of the DataLoaders of some stages, by name."""
        loaders = {
            TRAINING: flattened(self.trainer.train_dataloader),
            VALIDATION: flattened(self.trainer.val_dataloaders),
        }
        return {
            f"{name} {stage}{number}": (
                type(value).__qualname__ if name == "sampler" else str(value)
            )
            for stage in stages
            for number, loader in enumerate(loaders[stage])
            if isinstance(loader, DataLoader)
            for name in LOADER_ATTRIBUTES
            if (value := getattr(loader, name, None)) is not None
        }


class Structure(Part):
    """The class of each of the model's modules, and how many hooks modules and optimizers have.

    A module that was replaced while training, or that has got a hook, is in no checkpoint, and
    neither is a hook of an optimizer.
    """

    key = "structure"
    what = "the classes and numbers of hooks of modules"
    when = "never: it is compared"
    why_differs = "a module or a hook that training has changed, and that no checkpoint holds"

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.hooks: dict[str, list[Any]] = {}
        """The user's own hooks that each module and optimizer had before the first batch, and those
        that were reported since."""
        self.classes: WeakKeyDictionary[nn.Module, type] = WeakKeyDictionary()
        """The classes that the modules had after it: lazy ones get theirs there."""

    def first_epoch_begins(self) -> None:
        """Note the hooks that modules have with each start of the program."""
        self.hooks = _own_hooks(self._hooks())

    def first_batch_ended(self) -> None:
        """Note the classes that modules have with each start of the program."""
        self.classes.update(
            (module, type(module)) for _, module in named_modules(self.trainer.lightning_module)
        )

    def _hooks(self) -> dict[str, list[Any]]:
        """Return the hooks of each module and optimizer, by its path."""
        return {
            f"model.{name}".removesuffix("."): hooks
            for name, hooks in hooks_by_module(self.trainer.lightning_module).items()
        } | {
            f"optimizers.{position}": step_hooks(optimizer)
            for position, optimizer in enumerate(self.trainer.optimizers)
        }

    def _report_hooks(self, hooks: Mapping[str, list[Any]]) -> None:
        """Print, once for each, which have got a hook while training."""
        for name, own in _own_hooks(hooks).items():
            known = self.hooks.setdefault(name, own)
            new = [hook for hook in own if not any(_is_same_hook(hook, each) for each in known)]
            has_more = len(own) > len(known)
            if (new or has_more) and self.trainer.is_global_zero:
                log.warning(
                    f"{name} got a hook while training, and hooks cannot be saved: after "
                    "an interruption this run is not exact unless the program registers it again; "
                    "do so in on_train_start(), which each start calls"
                )
            self.hooks[name] = own if has_more else known + new

    def _report_classes(self) -> None:
        """Print, once for each, which modules have got another class, as by a parametrization.

        Between two classes of the program's own, the objects of users' code change back.
        """
        for name, module in named_modules(self.trainer.lightning_module):
            class_, before = type(module), self.classes.get(module, type(module))
            is_librarys = is_library_class(class_) or is_library_class(before)
            if class_ is not before and is_librarys and self.trainer.is_global_zero:
                log.warning(
                    f"model.{name} has become {with_article(class_.__name__)} while training, "
                    "which cannot be saved: after an interruption this run is not exact, or "
                    "cannot continue; do so in __init__() or configure_model()"
                )
            self.classes[module] = class_

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, str]:
        """Return the classes and numbers, by name; say, once, which ones are new."""
        hooks = self._hooks()
        if point:
            self._report_hooks(hooks)
            self._report_classes()
        classes = {
            f"model.{name}".removesuffix("."): type(module).__name__
            for name, module in named_modules(self.trainer.lightning_module)
        }
        return {
            # A lazy module gets its final class with the first batch.
            f"{CLASS_AND_HOOKS}{name}": f"{class_.removeprefix('Lazy')} {len(hooks[name])}"
            for name, class_ in classes.items()
        } | {
            f"{HOOKS}{name}": str(len(of_optimizer))
            for name, of_optimizer in hooks.items()
            if name not in classes
        }

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each class and number."""
        return dict(saved)

    def shown(self, name: str) -> str:
        """Return how a message names what is compared by a name."""
        if name.startswith(CLASS_AND_HOOKS):
            return f"the class or the hooks of {name.removeprefix(CLASS_AND_HOOKS)}"
        return f"the hooks of {name.removeprefix(HOOKS)}"


def _own_hooks(hooks: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the hooks that are functions or objects of the user's own, by the owner's path."""
    return {name: [*filter(module_variables.is_own, each)] for name, each in hooks.items()}


def _is_same_hook(hook: Any, other: Any) -> bool:
    """Return whether two hooks are one: a method is another object each time it is asked for.

    A function that the same line has made again does the same, such as a lambda in a hook that
    each epoch calls.
    """
    if isinstance(hook, FunctionType) and isinstance(other, FunctionType):
        return hook.__code__ is other.__code__
    is_method = isinstance(hook, MethodType) and isinstance(other, MethodType)
    return hook is other or (is_method and hook == other)
