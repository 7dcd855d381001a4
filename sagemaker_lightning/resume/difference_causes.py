"""Why a run that goes on may do something else than before: what is found in the user's objects, in words."""

import re
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import Callback, LightningDataModule, Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from sagemaker_lightning.compat.lightning_loaders import flat
from sagemaker_lightning.compat.lightning_trainer import was_compiled
from sagemaker_lightning.contract.job_summary import masked
from sagemaker_lightning.data.deterministic import divided, has_state
from sagemaker_lightning.resume.user_state import roots
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.encoding import NotPlain, encoded

MANY = 3  # causes that are told
DRAWS = re.compile(r"rng|random|generator", re.IGNORECASE)
"""The name of a class that draws random numbers, of whatever library."""
KNOWN = (Tensor, nn.Module, Callback, LightningDataModule, Trainer, Dataset, DataLoader, Sampler,
         *object_graph.GENERATORS, torch.optim.Optimizer, type, types.FunctionType, types.MethodType,
         types.BuiltinFunctionType, types.ModuleType)  # fmt: skip
"""What is saved, or holds nothing that is."""
CONTAINERS = (dict, list, tuple, deque)
HARMLESS = ("logging", "threading", "_thread", "pathlib", "re", "functools", "weakref", "pytorch_lightning",
            "torch.utils.tensorboard")  # fmt: skip


def machine(trainer: Trainer) -> str:
    """Return what a run's last bits depend on besides itself, in words that `likely` compares."""
    device = trainer.strategy.root_device
    found = {"torch": torch.__version__, "Lightning": pl.__version__, "threads": torch.get_num_threads()}
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found["processor"] = _processor()
    return "; ".join(f"{name}={str(value).replace(';', ',')[:80]}" for name, value in found.items())


def changed(flags: list[tuple[str, str, str]], before: str, now: str) -> list[str]:
    """Return what has changed: flags, each with its value before and now, and of what `machine` said before and now."""
    old, new = (dict(one.partition("=")[::2] for one in text.split("; ")) for text in (before, now))
    both = [*flags, *((name, old[name], value) for name, value in new.items() if old.get(name, value) != value)]
    return [f"{name}, which was {masked(name, was)} and is {masked(name, is_)}" for name, was, is_ in both]


def likely(trainer: Trainer, kinds: tuple[str, ...], changes: list[str]) -> str:
    """Return the likely cause of a difference of `kinds`: "length", "batch", "learning rate" or "loss".

    `changes` is what `changed` returned.
    """
    found = [*changes]
    if "length" in kinds or "batch" in kinds:
        found += dict.fromkeys(_of_data(trainer))
        other = "something in the data that no seed decides: time, another library's generator, files that changed"
    elif "learning rate" in kinds:
        names = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
        other = (
            f"the state of {' or '.join(dict.fromkeys(names)) or 'what sets the learning rate'}, which is another one"
        )
    else:
        found += dict.fromkeys(_of_model(trainer))
        other = "state that no checkpoint holds, or a kernel that is not deterministic"
    return ", or ".join(found[:MANY] or [other])


def _of_data(trainer: Trainer) -> Iterator[str]:
    for number, loader in enumerate(flat(trainer.train_dataloader)):
        names = ("sampler", "batch_sampler", "dataset", "collate_fn", "worker_init_fn")
        held = {name: getattr(loader, name, None) for name in names} if isinstance(loader, DataLoader) else {"": loader}
        yield from (f"a generator of random numbers in {name}" for name in _generators(held))
        dataset, workers = getattr(loader, "dataset", None), getattr(loader, "num_workers", 0)
        if isinstance(dataset, IterableDataset):
            yield f"{_name(type(dataset))}, an IterableDataset, which has to draw the same samples again"
        elif divided(loader) is None:
            how = "what its state_dict says" if has_state(loader) else "which has to give the same batches again"
            yield f"loader {number}, a {_name(type(loader))}, {how}"
        if workers and dataset is not None and not object_graph.library(type(dataset)):
            yield f"what {_name(type(dataset))} keeps in its {workers} data worker(s)"
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"):
        for owner in (trainer.lightning_module, trainer.datamodule):
            if owner is not None and is_overridden(hook, owner):
                yield f"what {_name(type(owner))}.{hook} draws"


def _of_model(trainer: Trainer) -> Iterator[str]:
    model = trainer.lightning_module
    unsaved = list(_unsaved(trainer))
    if unsaved:
        yield f"state that no checkpoint holds, as in {', '.join(unsaved[:MANY])}"
    if not model.automatic_optimization:
        yield f"gradients that {_name(type(model))} accumulates by itself"
    if any(type(one).__name__ == "OptimizedModule" for one in model.modules()) or was_compiled(model):
        yield "a compiled kernel that is another one in another process"
    if trainer.strategy.root_device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        yield "a kernel that is not deterministic (--trainer.deterministic=true)"


def _generators(held: Mapping[str, Any]) -> Iterator[str]:
    """Yield where objects are that draw random numbers."""
    found = dict(object_graph.walk(held))
    for path, one in found.items():
        if isinstance(one, object_graph.GENERATORS) or (
            DRAWS.search(type(one).__name__) and not isinstance(one, KNOWN)
        ):
            yield _where(found, path)


def _unsaved(trainer: Trainer) -> Iterator[str]:
    """Yield where objects are that no checkpoint can hold."""
    found = dict(object_graph.walk(roots(trainer), code=False))
    for path, one in found.items():
        kind = type(one)
        if (
            isinstance(one, KNOWN)
            or not object_graph.library(kind)
            or kind.__module__.startswith(HARMLESS)
            or has_state(one)
        ):
            continue
        if not isinstance(one, CONTAINERS) and not _is_plain(one):
            yield f"{_where(found, path)} (a {_name(kind)})"


def _where(found: Mapping[str, Any], path: str) -> str:
    """Return the class, or module, and the attribute in which the object at a path is."""
    while True:
        path, _, name = path.rpartition(".")
        owner = found.get(path)
        if owner is None:
            return path or name
        if isinstance(owner, types.FunctionType):
            return f"{owner.__module__}.{name}"
        if not isinstance(owner, CONTAINERS):
            return f"{_name(owner if isinstance(owner, type) else type(owner))}.{name}"


def _is_plain(value: Any) -> bool:
    try:
        encoded(value)
    except NotPlain:
        return False
    return True


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
