"""The user's objects that may have state: where the search for it begins."""

import functools
import types
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pytorch_lightning import Trainer
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from sagemaker_lightning.compat import lightning_loops
from sagemaker_lightning.compat.lightning_loaders import flattened
from sagemaker_lightning.compat.lightning_trainer import (
    averager_variables,
    callbacks_of,
    data_module_of,
)
from sagemaker_lightning.compat.torch_modules import (
    communication_hooks,
    hooks_by_module,
    hooks_of_all_modules,
    inner_schedulers,
    named_buffers,
    named_parameters,
    step_hooks,
)
from sagemaker_lightning.data.deterministic import data_of, members_beside
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.resume.parts import start_hooks
from sagemaker_lightning.resume.parts.given_parts import parts_of
from sagemaker_lightning.state import module_variables, object_graph, replaced_code
from sagemaker_lightning.state.object_graph import added_to, users_members

SAMPLERS = "sampler", "batch_sampler"
PARTS = "dataset", "collate_fn", *SAMPLERS
"""Parts of a DataLoader that may have state."""
LOADER = "loader"
"""Name of a loader, of which a user may have made the class, or have added something to it."""
TRAINING = "train."
VALIDATION = "val."
"""How the names of what the loaders have begin, by stage."""
FUNCTIONS = types.FunctionType, types.MethodType, functools.partial


def prefix_of_replaced(trainer: Trainer) -> str:
    """Return how the names begin of what new training data replace; "" if they replace nothing."""
    return "" if lightning_loops.loaders_are_given(trainer) else TRAINING


@object_graph.once_at_one_moment
def user_objects(trainer: Trainer) -> dict[str, Any]:
    """Return the user's objects that may have state, by name.

    Args:
        trainer: Lightning's trainer.
    """
    objects: dict[str, Any] = {
        "model": trainer.lightning_module,
        "datamodule": data_module_of(trainer),
    }
    objects |= parts_of(trainer).marks()
    objects |= (owners := start_hooks.objects_of_hooks(trainer))
    # Those of Lightning's own callbacks, too, whose other attributes are Lightning's matter.
    objects |= {
        f"{name}.{attribute}": value
        for name, owner in owners.items()
        if name.startswith(start_hooks.CALLBACKS)
        for attribute, value in object_graph.namespace(owner).items()
        if object_graph.is_of(type(value), Metric)
    }
    # state_dict() has the state of a library's optimizer. It lacks the plain attributes of a class
    # of the user's, and what a user has added.
    objects |= {
        f"optimizers.{position}": (
            added_to(optimizer) if object_graph.is_library_class(type(optimizer)) else optimizer
        )
        for position, optimizer in enumerate(trainer.optimizers)
    }
    plugins = {
        "strategy": trainer.strategy,
        "precision": getattr(trainer.strategy, "precision_plugin", None),
        "checkpoint_io": getattr(trainer.strategy, "checkpoint_io", None),
        "profiler": getattr(trainer, "profiler", None),
    }
    objects |= {
        name: added_to(plugin)
        for name, plugin in plugins.items()
        if not object_graph.is_library_class(type(plugin))
    }
    # Those that keep what they log in memory; libraries' loggers write files.
    objects |= {
        f"loggers.{position} {type(object_).__name__}": object_
        for position, object_ in enumerate(trainer.loggers)
        if not object_graph.is_library_class(type(object_))
    }
    found = hooks_by_module(trainer.lightning_module) if trainer.lightning_module else {}
    hooked = [(f"model.{name}", hooks) for name, hooks in found.items()]
    hooked += [
        (f"optimizers.{position}", step_hooks(optimizer))
        for position, optimizer in enumerate(trainer.optimizers)
    ]
    hooked.append(("all modules", hooks_of_all_modules()))
    # state_dict() of a class of the user's may lack some of its attributes.
    objects |= {
        f"schedulers.{position}": config.scheduler
        for position, config in enumerate(trainer.lr_scheduler_configs)
        if not object_graph.is_library_class(type(config.scheduler))
    }
    objects |= {
        f"schedulers.{position}.{name}": value
        for position, config in enumerate(trainer.lr_scheduler_configs)
        for name, value in functions_of(config.scheduler).items()
    }
    objects |= {
        f"hooks.{name}.{position}": hook
        for name, hooks_of_owner in hooked
        for position, hook in enumerate(hooks_of_owner)
        if module_variables.is_own(hook)
    }
    if averager := averager_variables(trainer.strategy):
        objects["strategy.averager"] = averager
    of_strategy = communication_hooks(getattr(trainer.strategy, "model", None))
    for position, (hook, state) in enumerate(of_strategy):
        objects |= {f"hooks.ddp.{position}": hook} if module_variables.is_own(hook) else {}
        if not isinstance(state, (ProcessGroup, type(None))):
            objects[f"hooks.ddp.{position}.state"] = state
    saving: dict[str, Any] = {}  # loaders that save themselves, but not what their code has
    for stage, loaders in (("train", trainer.train_dataloader), ("val", trainer.val_dataloaders)):
        for number, loader in enumerate(flattened(loaders)):
            if has_state(loader):
                saving[f"{stage}.{number}"] = loader
                beside = members_beside(loader)
                if stage == "val":  # nobody asks for its state
                    nodes = {} if isinstance(loader, DataLoader) else users_members(loader)
                    beside = data_of(loader, True) | dict(nodes)
                objects |= {f"{stage}.{number}.{name}": each for name, each in beside.items()}
            else:
                parts = {name: getattr(loader, name, None) for name in PARTS}
                if isinstance(loader, DataLoader):
                    parts[LOADER] = added_to(loader, but=("collate_fn",))
                elif not object_graph.is_library_class(type(loader)):
                    parts[LOADER] = loader
                objects |= {
                    f"{stage}.{number}.{name}": part
                    for name, part in parts.items()
                    if name not in SAMPLERS or not has_state(part)
                }
    objects |= _additions(trainer)
    return objects | module_variables.held_variables(_mentioned(trainer, objects | saving))


_newest: tuple[tuple[Any, ...], list[Any], module_variables.Mentioned] | None = None
"""By what `_mentioned` knows what it was called with last, the owners, and what it has returned."""
_names: tuple[module_variables.Mentioned | None, Collection[str]] = None, ()
"""What `names_in_code` has searched last, and the names that it has found there."""


def _mentioned(trainer: Trainer, objects: dict[str, Any]) -> module_variables.Mentioned:
    """Return which variables the code of the user's objects mentions.

    It is asked for again when there are other objects, not when these have got others: to search
    all functions takes as long as the rest of a checkpoint of a small model.
    """
    global _newest
    owners = trainer.lightning_module, *callbacks_of(trainer)
    key = *map(id, owners), *objects
    if _newest is None or _newest[0] != key or any(each() is None for each in _newest[1]):
        references = [weakref.ref(each) for each in owners if each is not None]
        _newest = key, references, module_variables.mentioned_variables(objects)
    return _newest[2]


def places_of_code(trainer: Trainer) -> Mapping[str, replaced_code.Place]:
    """Return where code is that the user's code reaches, by name.

    Args:
        trainer: Lightning's trainer.
    """
    user_objects(trainer)  # which asks for what the code mentions
    return _newest[2].of_code if _newest else {}


def names_in_code(trainer: Trainer) -> Collection[str]:
    """Return the names that the user's functions mention, but for those that make an object.

    A function of torch.distributed is named as there, too.

    Args:
        trainer: Lightning's trainer.
    """
    global _names
    user_objects(trainer)  # as above
    if _newest and _names[0] is not _newest[2]:
        found: set[str] = set()
        for function, names in _newest[2].names.items():
            if function.__name__ != "__init__":
                found |= names
                found |= _names_in_distributed(map(function.__globals__.get, names))
        _names = _newest[2], found
    return _names[1] if _newest else ()


def _names_in_distributed(values: Iterable[Any]) -> set[str]:
    """Return the names of those values that are functions of torch.distributed."""
    functions = (each for each in values if isinstance(each, types.FunctionType))
    return {
        each.__name__
        for each in functions
        if (each.__module__ or "").startswith("torch.distributed")
    }


def functions_that_mention(trainer: Trainer, name: str) -> list[types.FunctionType]:
    """Return the user's functions whose code mentions a name, but for methods of optimizers.

    Args:
        trainer: Lightning's trainer.
        name: The name, such as that of an attribute.
    """
    user_objects(trainer)  # as above
    if not _newest:
        return []
    mentioned = _newest[2]
    # torch puts wrappers of the same names around some methods of these classes.
    optimizers = {each.__qualname__ for each in mentioned.classes if issubclass(each, Optimizer)}
    return [
        function
        for function, names in mentioned.names.items()
        if name in names and function.__qualname__.rpartition(".")[0] not in optimizers
    ]


def functions_of(scheduler: Any) -> dict[str, Any]:
    """Return the functions that a scheduler is made with, which no `state_dict` has, by name."""
    found = {}
    for number, inner in enumerate([scheduler, *inner_schedulers(scheduler)]):
        for name, value in object_graph.namespace(inner).items():
            members = value if isinstance(value, list) else [value]
            if any(isinstance(member, FUNCTIONS) for member in members):
                found[f"{number}.{name}"] = value
    return found


def _additions(trainer: Trainer) -> dict[str, Any]:
    """Return what may have been added to objects of Lightning's and torch's, by name."""
    # Training may add callbacks, or take some out.
    objects: dict[str, Any] = {"trainer": added_to(trainer, but=("callbacks",))}
    own = lightning_loops.own_attributes()
    objects |= {
        f"trainer.{name}": object_graph.Added(loop, own[name])
        for name, loop in lightning_loops.loops(trainer).items()
    }
    if (model := trainer.lightning_module) is None:
        return objects
    wrappers = model.optimizers() if trainer.optimizers else []
    # It has groups and states of its own once a program has loaded some into it.
    objects |= {
        f"lightning_optimizers.{position}": added_to(wrapper, but=("param_groups", "state"))
        for position, wrapper in enumerate(wrappers if isinstance(wrappers, list) else [wrappers])
    }
    objects |= {
        f"parameters.{name}": added_to(parameter) for name, parameter in named_parameters(model)
    }
    objects |= {
        f"buffers.{name}": added_to(each) for name, each in named_buffers(model) if vars(each)
    }
    return objects


def objects_of_module(trainer: Trainer) -> dict[str, Any]:
    """Return the objects that the module has, by name."""
    return dict(object_graph.walk({"model": trainer.lightning_module}, code=False))
