"""Likely causes why a resumed run differs from the interrupted one.

They are searched for in the user's objects, for what a resumed run says (check/explanation.py).
"""

import re
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningDataModule, Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from sagemaker_lightning.compat.lightning_loaders import flattened
from sagemaker_lightning.compat.lightning_trainer import (
    callbacks_of,
    data_module_of,
    was_compiled,
)
from sagemaker_lightning.contract.errors import with_article
from sagemaker_lightning.data.deterministic import divided
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.resume.check import explanation
from sagemaker_lightning.resume.check.explanation import DifferenceKind
from sagemaker_lightning.resume.parts.roots import user_objects
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.kinds.base import NotSaved
from sagemaker_lightning.state.graph.nodes import LIBRARYS, kind_of

MAX_UNSAVED = 3  # objects that are named
RANDOM_CLASS_NAME = re.compile(r"rng|random|generator", re.IGNORECASE)
"""The name of a class that draws random numbers, of whatever library."""
KNOWN_CLASSES = (
    object_graph.Added,
    Tensor,
    nn.Module,
    Callback,
    LightningDataModule,
    Trainer,
    Dataset,
    DataLoader,
    Sampler,
    *object_graph.GENERATORS,
    torch.optim.Optimizer,
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
)
"""Classes whose objects are saved, or hold nothing that can change."""
CONTAINERS = (dict, list, tuple, deque)
HARMLESS = (
    "logging",
    "threading",
    "_thread",
    "pathlib",
    "re",
    "functools",
    "weakref",
    "pytorch_lightning",
    "lightning",
    "sagemaker_lightning",
    "torch.utils.tensorboard",
)


def register() -> None:
    """Add the search to what a resumed run says from now on."""
    explanation.search_by(causes_of)


def causes_of(trainer: Trainer, kind: DifferenceKind) -> Iterator[str]:
    """Yield the likely causes of a difference.

    Args:
        trainer: Lightning's trainer.
        kind: BATCH, RATE or LOSS.
    """
    if kind is DifferenceKind.BATCH:
        yield from dict.fromkeys(_causes_in_data(trainer))
    elif kind is DifferenceKind.RATE:
        names = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
        yield from (f"{name}, whose arguments or state are others" for name in dict.fromkeys(names))
        yield from (f"what {name} sets, which is another value" for name in _rate_setters(trainer))
    else:
        yield from dict.fromkeys(_causes_in_model(trainer))


def _causes_in_data(trainer: Trainer) -> Iterator[str]:
    """Yield causes in the data loaders and in hooks that change a batch."""
    for number, loader in enumerate(flattened(trainer.train_dataloader)):
        names = ("sampler", "batch_sampler", "dataset", "collate_fn", "worker_init_fn")
        objects = (
            {name: getattr(loader, name, None) for name in names}
            if isinstance(loader, DataLoader)
            else {"": loader}
        )
        yield from (f"a generator of random numbers in {name}" for name in _generators(objects))
        dataset = getattr(loader, "dataset", None)
        workers = getattr(loader, "num_workers", 0)
        if isinstance(dataset, IterableDataset):
            name = _class_name(type(dataset))
            yield f"{name}, an IterableDataset, which has to draw the same samples again"
        elif divided(loader) is None:
            reason = (
                "what its state_dict says"
                if has_state(loader)
                else "which has to give the same batches again"
            )
            yield f"loader {number}, {with_article(_class_name(type(loader)))}, {reason}"
        keepers = list(_own_classes(loader, "dataset", "collate_fn")) if workers else []
        if keepers:
            yield f"what {' or '.join(keepers)} keeps in its {workers} data worker(s)"
        ours = divided(loader)  # has the user's sampler; it may have no length
        order = loader if ours is None else ours
        yield from (f"what training changes in {name}" for name in _own_classes(order, "sampler"))
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"):
        for owner in (trainer.lightning_module, data_module_of(trainer)):
            if owner is not None and is_overridden(hook, owner):
                yield f"what {_class_name(type(owner))}.{hook} draws"


def _own_classes(loader: Any, *names: str) -> Iterator[str]:
    """Yield the user's classes of which objects are in some attributes of a loader."""
    for object_ in (getattr(loader, name, None) for name in names):
        is_code = isinstance(object_, object_graph.CODE)
        if object_ is not None and not is_code and not object_graph.is_library_class(type(object_)):
            yield _class_name(type(object_))


def _rate_setters(trainer: Trainer) -> Iterator[str]:
    """Yield the names of the user's functions that mention the optimizers' parameter groups."""
    for owner in (trainer.lightning_module, *callbacks_of(trainer)):
        for class_ in type(owner).__mro__:
            for name, member in (
                {} if object_graph.is_library_class(class_) else vars(class_).items()
            ):
                if "param_groups" in getattr(getattr(member, "__code__", None), "co_names", ()):
                    yield f"{_class_name(class_)}.{name}"


def _causes_in_model(trainer: Trainer) -> Iterator[str]:
    """Yield causes in the model and in the kernels it runs."""
    model = trainer.lightning_module
    unsaved = list(_unsaved(trainer))
    if unsaved:
        yield f"state that no checkpoint holds, as in {', '.join(unsaved[:MAX_UNSAVED])}"
    if any(
        type(module).__name__ == "OptimizedModule" for module in model.modules()
    ) or was_compiled(model):
        yield "a compiled kernel that is another one in another process"
    if (
        trainer.strategy.root_device.type != "cpu"
        and not torch.are_deterministic_algorithms_enabled()
    ):
        yield "a kernel that is not deterministic (--trainer.deterministic=true)"


def _generators(start: Mapping[str, Any]) -> Iterator[str]:
    """Yield where there are objects that draw random numbers."""
    objects = dict(object_graph.walk(start))
    for path, value in objects.items():
        if isinstance(value, object_graph.GENERATORS) or (
            RANDOM_CLASS_NAME.search(type(value).__name__) and not isinstance(value, KNOWN_CLASSES)
        ):
            yield _owner_and_attribute(objects, path)


def _unsaved(trainer: Trainer) -> Iterator[str]:
    """Yield where there are objects that cannot be saved."""
    objects = dict(object_graph.walk(user_objects(trainer), code=False))
    for path, value in objects.items():
        value_class = type(value)
        if (
            isinstance(value, KNOWN_CLASSES)
            or not object_graph.is_library_class(value_class)
            or value_class.__module__.startswith(HARMLESS)
            or has_state(value)
        ):
            continue
        if kind_of(value) is LIBRARYS and not _is_plain(value):
            yield f"{_owner_and_attribute(objects, path)} (a {_class_name(value_class)})"


def _owner_and_attribute(objects: Mapping[str, Any], path: str) -> str:
    """Return where the object at a path is: a class or a module, and an attribute.

    Args:
        objects: All objects by path.
        path: The path of the object.
    """
    while True:
        path, _, name = path.rpartition(".")
        owner = object_graph.owner_of(objects.get(path))
        if owner is None:
            return path or name
        if isinstance(owner, types.FunctionType):
            return f"{owner.__module__}.{name}"
        if not isinstance(owner, CONTAINERS):
            return f"{_class_name(owner if isinstance(owner, type) else type(owner))}.{name}"


def _is_plain(value: Any) -> bool:
    try:
        values.encode(value)
    except NotSaved:
        return False
    return True


def _class_name(class_: type) -> str:
    return f"{class_.__module__}.{class_.__qualname__}"
