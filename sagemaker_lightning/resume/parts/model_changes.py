"""Changes to model and trainer that must be repeated before a state is restored.

Examples are buffers that came to be while training, the result of a search, and what a hook has
created.
"""

import inspect
import itertools
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import StochasticWeightAveraging
from pytorch_lightning.utilities.parsing import (
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
)
from torch import Tensor, nn
from torch.nn.utils import prune

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.torch_modules import buffers, load_hooks, parameters
from sagemaker_lightning.resume.parts import start_hooks
from sagemaker_lightning.resume.parts.epoch_state import has_values
from sagemaker_lightning.resume.parts.user_state import user_objects
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.encoding import decode, encode

RESULT_ATTRIBUTES = "lr", "learning_rate"  # attributes in which a search stores its result


def resize_buffers(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give the model buffers of the saved shapes, so that their values can be loaded.

    Buffers may have been added, or changed their shape, while the model was trained.

    Args:
        model: The model; it is changed in place.
        state: The saved state dict of the model.
    """
    present = model.state_dict()
    for name, value in state.items():
        path, _, last = name.rpartition(".")
        current = present.get(name)
        if not isinstance(value, Tensor) or (
            current is not None and (not has_values(current) or current.shape == value.shape)
        ):
            continue
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            continue
        if last in buffers(owner):
            buffers(owner)[last] = value.to(getattr(current, "device", "cpu"), copy=True)
        elif (parameter := parameters(owner).get(last)) is not None:
            parameter.data = value.to(parameter.device, copy=True)
        elif current is None and not hasattr(owner, last):
            owner.register_buffer(last, value.clone())


def other_weights(trainer: Trainer, state: Mapping[str, Any]) -> list[str]:
    """Return what a saved state dict has that the model has not got, and the other way round.

    If the user's code loads states itself, it may do so with others: then nothing is returned.

    Args:
        trainer: Lightning's trainer.
        state: The saved state dict of the model.
    """
    model = trainer.lightning_module
    loads_itself = not model.strict_loading or not all(
        start_hooks.is_of_library(function)
        for function in (
            *(
                getattr(type(module), name)
                for module in model.modules()
                for name in ("load_state_dict", "_load_from_state_dict")
            ),
            *(type(owner).on_load_checkpoint for owner in (model, *trainer.callbacks)),
        )
    )
    if loads_itself or any(map(load_hooks, model.modules())):
        return []
    present = model.state_dict().keys()
    return [
        f"weights {name}, which the model has not got" for name in state if name not in present
    ] + [f"no weights {name}, which the model has" for name in present if name not in state]


def names_in_start_hooks(trainer: Trainer) -> set[str]:
    """Return the names of model parts that hooks before training may create.

    They are all names that the user's on_fit_start and on_train_start mention, or the functions
    that they call.
    """
    owners = [
        owner
        for owner in (trainer.lightning_module, *trainer.callbacks)
        if not object_graph.is_library_class(type(owner))
    ]
    return set().union(
        *(_names_in_hook(type(owner), name) for owner in owners for name in start_hooks.HOOKS)
    )


def _names_in_hook(class_: type, hook: str) -> set[str]:
    """Return the names that a class's hook mentions, or its own functions that the hook calls.

    Args:
        class_: The class.
        hook: The name of the hook.
    """
    names: set[str] = set()
    functions = [getattr(class_, hook)]
    while functions:
        function = inspect.unwrap(functions.pop())
        if not isinstance(function, types.FunctionType) or start_hooks.is_of_library(function):
            continue
        new_names = object_graph.names_in_code(function.__code__) - names
        names |= new_names
        functions += [getattr(class_, name, function.__globals__.get(name)) for name in new_names]
    return names


def take_later_weights(state: dict[str, Any], model: nn.Module, names: set[str]) -> dict[str, Any]:
    """Remove from a state dict what the model does not have yet, and return it.

    These are the parts `names`, which hooks create, and what torch.nn.utils.prune makes of a
    weight. `prune_again` prunes the weights again once the optimizers have their parameters.

    Args:
        state: The saved state dict of the model; it is changed in place.
        model: The model that is going to load the state.
        names: The names of the parts.
    """
    present = model.state_dict()
    taken = {}
    for mask in _mask_names(state):
        if (weight := mask.removesuffix("_mask")) in present:
            taken[mask] = state.pop(mask)
            taken[f"{weight}_orig"] = state[weight] = state.pop(f"{weight}_orig")
    later = [name for name in state if name not in present and name.partition(".")[0] in names]
    return taken | {name: state.pop(name) for name in later}


def prune_again(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Prune the weights for which `state` has masks.

    Args:
        model: The model; it is changed in place.
        state: A state dict with masks, as torch.nn.utils.prune names them.
    """
    present = model.state_dict()
    for name in _mask_names(state):
        if name not in present:
            path, _, last = name.removesuffix("_mask").rpartition(".")
            owner = model.get_submodule(path)
            prune.custom_from_mask(owner, last, state[name].to(getattr(owner, last).device))


def _mask_names(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the masks of pruned weights."""
    return [
        name
        for name in state
        if name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in state
    ]


def shared_original_weights(trainer: Trainer) -> list[tuple[int, int]]:
    """Return which weights kept by ModelPruning are the trained ones themselves.

    ModelPruning keeps the first weights and resets the model to them. Lightning 2.6 does not copy
    them if both are on one device, so that training changes them, too.

    Returns:
        (number of the callback, number of the layer) of each.
    """
    return [
        key
        for key, trained, original in _kept_weights(trainer)
        if original.data_ptr() == trained.data_ptr()
    ]


def share_original_weights(trainer: Trainer, shared: Collection[tuple[int, int]]) -> None:
    """Let weights kept by ModelPruning be the trained ones themselves.

    Args:
        trainer: Lightning's trainer.
        shared: What `shared_original_weights` returned in the interrupted run.
    """
    for key, trained, original in _kept_weights(trainer):
        if key in shared:
            original.data = trained.data


def _kept_weights(trainer: Trainer) -> Iterator[tuple[tuple[int, int], Tensor, Tensor]]:
    """Yield the weights that ModelPruning keeps: key, trained weight and original weight."""
    for number, callback in enumerate(trainer.callbacks):
        for layer_number, layer, original, name in lightning_callbacks.original_weights(callback):
            trained = getattr(layer, f"{name}_orig", None)
            if isinstance(trained, Tensor):
                yield (number, layer_number), trained, getattr(original, name)


def search_results(trainer: Trainer) -> dict[str, Any]:
    """Return the results of searches before training, by attribute of the model.

    The values are encoded (state/encoding.py).
    """
    return {
        name: encode(lightning_getattr(trainer.lightning_module, name))
        for name in _searched_names(trainer)
    }


def _searched_names(trainer: Trainer) -> list[str]:
    """Return the names of the model's attributes in which searches store their results."""
    names = []
    for callback in trainer.callbacks:
        if lightning_callbacks.is_search(callback):
            attribute = lightning_callbacks.searched_attribute(callback)
            candidates = [attribute] if attribute else RESULT_ATTRIBUTES
            present = (name for name in candidates if _has(trainer, name))
            names += list(itertools.islice(present, 1))
    return names


def _has(trainer: Trainer, name: str) -> bool:
    return lightning_hasattr(trainer.lightning_module, name)


def apply_search_results(trainer: Trainer, results: Mapping[str, Any]) -> None:
    """Set the results of the searches, and keep the callbacks from searching again.

    Args:
        trainer: Lightning's trainer.
        results: What `search_results` returned.
    """
    for callback in trainer.callbacks:
        if lightning_callbacks.is_search(callback):
            callback.on_fit_start = lambda *_: None
    for name in results.keys() & set(_searched_names(trainer)):
        result = decode(results[name])
        if isinstance(result, (int, float)):
            lightning_setattr(trainer.lightning_module, name, result)


def search_again(trainer: Trainer) -> None:
    """Let the callbacks search again in another training, if `settle_searches` has kept them."""
    for callback in trainer.callbacks:
        if lightning_callbacks.is_search(callback):
            vars(callback).pop("on_fit_start", None)


def run_creating_hooks(trainer: Trainer, missing_attributes: list[tuple[str, str]]) -> None:
    """Run the hooks on_train_epoch_start that create what is missing.

    Args:
        trainer: Lightning's trainer.
        missing_attributes: Each is (path of its object, name of the attribute).
    """
    owners = user_objects(trainer)
    for name, owner in owners.items():
        if not isinstance(owner, (Callback, LightningModule)):
            continue
        missing = {attribute for path, attribute in missing_attributes if path == name}
        if missing & _names_in_hook(type(owner), "on_train_epoch_start"):
            if isinstance(owner, Callback):
                owner.on_train_epoch_start(trainer, trainer.lightning_module)
            else:
                owner.on_train_epoch_start()


def limits(trainer: Trainer) -> list[int]:
    """Return the limits of training, which a callback may change.

    They are epochs and steps; -1 for no limit.
    """
    epochs = trainer.fit_loop.max_epochs
    return [-1 if epochs is None else epochs, trainer.fit_loop.epoch_loop.max_steps]


def add_to_limits(trainer: Trainer, added: Sequence[int]) -> None:
    """Change the limits of training as a callback had done.

    Args:
        trainer: Lightning's trainer.
        added: Epochs and steps to add; negative ones shorten the training.
    """
    loop = trainer.fit_loop
    if added[0]:
        loop.max_epochs += added[0]
    if added[1]:
        loop.epoch_loop.max_steps += added[1]


def parameter_groups(trainer: Trainer) -> list[list[list[str]]]:
    """Return the names of the parameters in each optimizer's parameter groups.

    The list has an entry for each optimizer, with a list for each group; "" stands for a parameter
    that the model does not have.
    """
    names = {id(parameter): name for name, parameter in trainer.lightning_module.named_parameters()}
    return [
        [
            [names.get(id(member), "") for member in group["params"]]
            for group in optimizer.param_groups
        ]
        for optimizer in trainer.optimizers
    ]


def restore_parameter_groups(trainer: Trainer, saved: list[list[list[str]]]) -> None:
    """Give the optimizers the parameter groups that hooks had made while training.

    A hook may have added groups, or made the optimizers anew with the weights that it has unfrozen.
    The groups' state can be loaded afterwards.

    Args:
        trainer: Lightning's trainer.
        saved: What `parameter_groups` returned.
    """
    parameters = dict(trainer.lightning_module.named_parameters())
    for optimizer, saved_groups in zip(trainer.optimizers, saved, strict=False):
        for number, names in enumerate(saved_groups):
            if not parameters.keys() >= set(names):
                continue
            members = [parameters[name] for name in names]
            if number >= len(optimizer.param_groups):
                optimizer.add_param_group({"params": members})
            else:
                optimizer.param_groups[number]["params"][:] = members  # LBFGS keeps this list


def continue_averaging(
    trainer: Trainer, saved_groups: list[list[dict]], point: ResumePoint
) -> None:
    """Let StochasticWeightAveraging continue.

    It creates its schedule in on_train_epoch_start, at an epoch in which it averages. That does not
    run when a run resumes within an epoch, and there is none to come when all of them are done. A
    new schedule sets learning rates, so the saved ones are restored.

    Args:
        trainer: Lightning's trainer.
        saved_groups: The saved values of each optimizer's parameter groups.
        point: When the checkpoint was saved.
    """
    for callback in trainer.callbacks:
        if not isinstance(callback, StochasticWeightAveraging):
            continue
        model = trainer.lightning_module
        lightning_callbacks.set_accumulation(callback, trainer.accumulate_grad_batches)
        if not lightning_callbacks.resumes_averaging(callback):
            continue
        epoch = trainer.current_epoch
        progress = trainer.fit_loop.epoch_progress.current
        progress.completed = min(epoch, callback.swa_end)
        with lightning_callbacks.weights_averaged_in(callback, trainer.current_epoch):
            callback.on_train_epoch_start(trainer, model)
        progress.completed = epoch
        restore_group_values(trainer, saved_groups)
        # This epoch only gathers the statistics of batch norm.
        if point is not ResumePoint.EPOCH and epoch == callback.swa_end + 1:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            callback.on_train_epoch_start(trainer, model)
            model.load_state_dict(weights)


def restore_group_values(trainer: Trainer, saved_groups: list[list[dict]]) -> None:
    """Restore learning rates and other values of the optimizers' parameter groups.

    Args:
        trainer: Lightning's trainer.
        saved_groups: The saved values of each optimizer's parameter groups.
    """
    for optimizer, saved in zip(trainer.optimizers, saved_groups, strict=False):
        for group, values in zip(optimizer.param_groups, saved, strict=False):
            group.update(values)
