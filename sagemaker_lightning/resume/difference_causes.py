"""Likely causes why a resumed run differs from the interrupted one.

They are searched for in the user's objects.
"""

import re
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import Callback, LightningDataModule, Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from sagemaker_lightning.compat.lightning_loaders import flattened
from sagemaker_lightning.compat.lightning_trainer import was_compiled
from sagemaker_lightning.contract.job_summary import masked
from sagemaker_lightning.data.deterministic import divided, has_state
from sagemaker_lightning.resume.user_state import user_objects
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.encoding import NotPlain, encode

MAX_CAUSES = 3  # causes that are named
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
    "torch.utils.tensorboard",
)


class DifferenceKind(StrEnum):
    """What differs between a step and the interrupted run's; messages have the value."""

    LENGTH = "length"
    """The number of batches of an epoch."""
    BATCH = "batch"
    RATE = "learning rate"
    LOSS = "loss"


def describe_machine(trainer: Trainer) -> str:
    """Return what the last bits of a run depend on besides its settings.

    The text is for `describe_changes`. It has the versions of torch and Lightning, the threads, the
    device and the processor.
    """
    device = trainer.strategy.root_device
    properties = {
        "torch": torch.__version__,
        "Lightning": pl.__version__,
        "threads": torch.get_num_threads(),
    }
    properties["device"] = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    )
    properties["processor"] = _processor()
    return "; ".join(
        f"{name}={str(value).replace(';', ',')[:80]}" for name, value in properties.items()
    )


def describe_changes(flags: list[tuple[str, str, str]], before: str, now: str) -> list[str]:
    """Return a phrase for each flag and machine property that has changed.

    Args:
        flags: The changed flags, each with its value before and now.
        before: What `describe_machine` returned in the interrupted run.
        now: What `describe_machine` returned in this run.
    """
    properties_before, properties_now = (
        dict(entry.partition("=")[::2] for entry in text.split("; ")) for text in (before, now)
    )
    changes = [
        *flags,
        *(
            (name, properties_before[name], value)
            for name, value in properties_now.items()
            if properties_before.get(name, value) != value
        ),
    ]
    return [
        f"{name}, which was {masked(name, before_value)} and is {masked(name, now_value)}"
        for name, before_value, now_value in changes
    ]


def likely_causes(trainer: Trainer, kinds: Collection[DifferenceKind], changes: list[str]) -> str:
    """Return the likely causes of a difference, as a text.

    Args:
        trainer: Lightning's trainer.
        kinds: The kinds of difference.
        changes: What `describe_changes` returned.
    """
    causes = [*changes]
    if DifferenceKind.LENGTH in kinds or DifferenceKind.BATCH in kinds:
        causes += dict.fromkeys(_causes_in_data(trainer))
        other = (
            "something in the data that no seed decides: time, another library's generator, "
            "files that changed"
        )
    elif DifferenceKind.RATE in kinds:
        names = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
        causes += dict.fromkeys(f"{name}, whose arguments or state are others" for name in names)
        causes += (f"what {name} sets, which is another value" for name in _rate_setters(trainer))
        other = "what sets the learning rate, which is another value"
    else:
        causes += dict.fromkeys(_causes_in_model(trainer))
        other = "state that no checkpoint holds, or a kernel that is not deterministic"
    return ", or ".join(causes[:MAX_CAUSES] or [other])


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
            yield f"loader {number}, a {_class_name(type(loader))}, {reason}"
        if workers and dataset is not None and not object_graph.is_library_class(type(dataset)):
            yield f"what {_class_name(type(dataset))} keeps in its {workers} data worker(s)"
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"):
        for owner in (trainer.lightning_module, trainer.datamodule):
            if owner is not None and is_overridden(hook, owner):
                yield f"what {_class_name(type(owner))}.{hook} draws"


def _rate_setters(trainer: Trainer) -> Iterator[str]:
    """Yield the names of the user's functions that mention the optimizers' parameter groups."""
    for owner in (trainer.lightning_module, *trainer.callbacks):
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
        yield f"state that no checkpoint holds, as in {', '.join(unsaved[:MAX_CAUSES])}"
    if not model.automatic_optimization:
        yield f"gradients that {_class_name(type(model))} accumulates by itself"
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
    """Yield where there are objects that no checkpoint can hold."""
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
        if not isinstance(value, CONTAINERS) and not _is_plain(value):
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
        encode(value)
    except NotPlain:
        return False
    return True


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )


def _class_name(class_: type) -> str:
    return f"{class_.__module__}.{class_.__qualname__}"
