"""The user's objects that may have state: where the search for it begins."""

import functools
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
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
    for find in FINDERS:
        objects |= find(trainer)
    # Loaders that save themselves, but not what their code has.
    saving = {name: each for name, each in _loaders(trainer) if has_state(each)}
    return objects | module_variables.held_variables(_mentioned(trainer, objects | saving))


def _given_parts(trainer: Trainer) -> dict[str, Any]:
    """Return marks of the objects that ExactResume was given as parts."""
    return parts_of(trainer).marks()


def _of_callbacks(trainer: Trainer) -> dict[str, Any]:
    """Return the callbacks, and metrics of Lightning's own, whose other attributes are its own."""
    owners = start_hooks.objects_of_hooks(trainer)
    return owners | {
        f"{name}.{attribute}": value
        for name, owner in owners.items()
        if name.startswith(start_hooks.CALLBACKS)
        for attribute, value in object_graph.namespace(owner).items()
        if object_graph.is_of(type(value), Metric)
    }


def _of_optimizers(trainer: Trainer) -> dict[str, Any]:
    """Return the optimizers, or what a user has added to them.

    state_dict() has the state of a library's optimizer. It lacks the plain attributes of a class of
    the user's, and what a user has added.
    """
    return {
        f"optimizers.{position}": (
            added_to(optimizer) if object_graph.is_library_class(type(optimizer)) else optimizer
        )
        for position, optimizer in enumerate(trainer.optimizers)
    }


def _of_plugins(trainer: Trainer) -> dict[str, Any]:
    """Return what a user's own strategy and plugins have, beside what Lightning gives them."""
    plugins = {
        "strategy": trainer.strategy,
        "precision": getattr(trainer.strategy, "precision_plugin", None),
        "checkpoint_io": getattr(trainer.strategy, "checkpoint_io", None),
        "profiler": getattr(trainer, "profiler", None),
    }
    return {
        name: added_to(plugin)
        for name, plugin in plugins.items()
        if not object_graph.is_library_class(type(plugin))
    }


def _of_loggers(trainer: Trainer) -> dict[str, Any]:
    """Return loggers that keep what they log in memory; those of libraries write files."""
    return {
        f"loggers.{position} {type(object_).__name__}": object_
        for position, object_ in enumerate(trainer.loggers)
        if not object_graph.is_library_class(type(object_))
    }


def _of_schedulers(trainer: Trainer) -> dict[str, Any]:
    """Return schedulers of a user's own, and the functions by which they compute.

    state_dict() of a class of the user's may lack some of its attributes.
    """
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return {
        f"schedulers.{position}": scheduler
        for position, scheduler in enumerate(schedulers)
        if not object_graph.is_library_class(type(scheduler))
    } | {
        f"schedulers.{position}.{name}": value
        for position, scheduler in enumerate(schedulers)
        for name, value in functions_of(scheduler).items()
    }


def _of_module_hooks(trainer: Trainer) -> dict[str, Any]:
    """Return the user's hooks of modules and optimizers."""
    found = hooks_by_module(trainer.lightning_module) if trainer.lightning_module else {}
    hooked = [(f"model.{name}", hooks) for name, hooks in found.items()]
    hooked += [
        (f"optimizers.{position}", step_hooks(optimizer))
        for position, optimizer in enumerate(trainer.optimizers)
    ]
    hooked.append(("all modules", hooks_of_all_modules()))
    return {
        f"hooks.{name}.{position}": hook
        for name, hooks_of_owner in hooked
        for position, hook in enumerate(hooks_of_owner)
        if module_variables.is_own(hook)
    }


def _of_communication(trainer: Trainer) -> dict[str, Any]:
    """Return how ranks average their models, and DDP's hooks with what they keep."""
    averager = averager_variables(trainer.strategy)
    objects: dict[str, Any] = {"strategy.averager": averager} if averager else {}
    of_strategy = communication_hooks(getattr(trainer.strategy, "model", None))
    for position, (hook, state) in enumerate(of_strategy):
        objects |= {f"hooks.ddp.{position}": hook} if module_variables.is_own(hook) else {}
        if not isinstance(state, (ProcessGroup, type(None))):
            objects[f"hooks.ddp.{position}.state"] = state
    return objects


def _loaders(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the loaders of training and validation, each with its name."""
    stages = (TRAINING, trainer.train_dataloader), (VALIDATION, trainer.val_dataloaders)
    for stage, loaders in stages:
        for number, loader in enumerate(flattened(loaders)):
            yield f"{stage}{number}", loader


def _of_loaders(trainer: Trainer) -> dict[str, Any]:
    """Return the loaders' parts; of those that save themselves, what they do not save."""
    objects: dict[str, Any] = {}
    for name, loader in _loaders(trainer):
        if has_state(loader):
            parts = members_beside(loader)
            if name.startswith(VALIDATION):  # nobody asks for its state
                nodes = {} if isinstance(loader, DataLoader) else users_members(loader)
                parts = data_of(loader, True) | dict(nodes)
        else:
            found = {part: getattr(loader, part, None) for part in PARTS}
            parts = {
                part: each
                for part, each in found.items()
                if part not in SAMPLERS or not has_state(each)
            }
            if isinstance(loader, DataLoader):
                parts[LOADER] = added_to(loader, but=("collate_fn",))
            elif not object_graph.is_library_class(type(loader)):
                parts[LOADER] = loader
        objects |= {f"{name}.{part}": each for part, each in parts.items()}
    return objects


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


FINDERS = (
    _given_parts,
    _of_callbacks,
    _of_optimizers,
    _of_plugins,
    _of_loggers,
    _of_schedulers,
    _of_module_hooks,
    _of_communication,
    _of_loaders,
    _additions,
)
"""What finds the objects; of two names of one object, a checkpoint has that found first."""


def objects_of_module(trainer: Trainer) -> dict[str, Any]:
    """Return the objects that the module has, by name."""
    return dict(object_graph.walk({"model": trainer.lightning_module}, code=False))
