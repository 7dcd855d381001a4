"""Saves what Lightning does not: metrics, buffers and gradients within an epoch.

Epoch-level metrics of training are sums over the batches that were seen. DDP makes buffers (batch
norm's statistics) equal on all ranks at the start of a forward pass only, and validation uses each
rank's own.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import Trainer
from torch import Tensor, nn
from torchmetrics import Metric, MetricTracker

from sagemaker_lightning.compat import lightning_loops, lightning_metrics, metrics
from sagemaker_lightning.resume.parts.given_parts import parts_of
from sagemaker_lightning.resume.parts.start_hooks import is_of_library
from sagemaker_lightning.resume.parts.user_state import UserState, user_objects
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.encoding import decode, encode
from sagemaker_lightning.state.object_state import digest


def copy_to_cpu(data: Any) -> Any:
    """Return `data` with every tensor in it copied to the CPU."""
    return apply_to_collection(data, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))


def rank_state(
    trainer: Trainer,
    gather: Callable[[Any], list],
    user_state: UserState,
    point: ResumePoint | None = None,
    saved_weights: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return what only this rank knows; all ranks call it.

    It consists of the buffers that differ between the ranks or that no state dict has, the states
    of torchmetrics, the sums of what was logged, the state of the user's objects, and their parts.

    Args:
        trainer: Lightning's trainer.
        gather: Returns the values of all ranks, by rank.
        user_state: The state of the user's objects.
        point: When it is called; None to leave out the state of the data loaders.
        saved_weights: The names in the checkpoint's state dict; None to ask the module for them.
    """
    buffers = dict(_buffers_by_name(trainer))
    digests_by_rank = gather({name: digest(buffer) for name, buffer in buffers.items()})
    alike = {
        name
        for name, digest in digests_by_rank[0].items()
        if all(other.get(name) == digest for other in digests_by_rank)
    }
    if saved_weights is None:
        saved_weights = trainer.lightning_module.state_dict()
    saved_by_lightning = {f"model.{name}" for name in saved_weights}
    buffers = {
        name: buffer
        for name, buffer in buffers.items()
        if name not in alike or name not in saved_by_lightning
    }
    measured = dict(_of_kinds(trainer, Metric, MetricTracker))
    metric_states = {
        name: metrics.state_of(value)
        for name, value in measured.items()
        if isinstance(value, Metric)
    }
    results = lightning_metrics.epoch_sums(trainer)
    objects = {
        "held": user_state.encode_changes(point),
        "parts": parts_of(trainer).states(),
        "tracked": {
            path: len(value) for path, value in measured.items() if isinstance(value, MetricTracker)
        },
    }
    return copy_to_cpu({"buffers": buffers, "metrics": metric_states, "results": results}) | objects


def gradients(trainer: Trainer, gather: Callable[[Any], list]) -> dict[str, Tensor] | None:
    """Return the gradients that are left for the next optimizer step, by parameter.

    All ranks call it.

    Returns:
        None if they are equal to those of rank 0.
    """
    parameters = _with_lasting_gradients(trainer)
    if not parameters:
        return None if trainer.global_rank else {}
    gradients_by_name = {
        name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None
    }
    gradients_by_name = copy_to_cpu(gradients_by_name)
    digests = gather(digest(gradients_by_name))
    return (
        None
        if trainer.global_rank and digests[trainer.global_rank] == digests[0]
        else gradients_by_name
    )


def _with_lasting_gradients(trainer: Trainer) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients Lightning does not remove before the next step.

    They are equal on all ranks, and known without a look at the gradients.
    """
    model = trainer.lightning_module
    parameters = dict(model.named_parameters())
    owners = (model, *trainer.callbacks)
    is_removed_by_lightning = (
        model.automatic_optimization
        and not lightning_loops.gradients_accumulate(trainer)
        and is_of_library(type(model).optimizer_zero_grad)
        # These may not remove them, but set them to zero. An optimizer still moves such a weight.
        and all(is_of_library(type(optimizer).zero_grad) for optimizer in trainer.optimizers)
        and all(is_of_library(owner.on_before_zero_grad) for owner in owners)
    )
    if not is_removed_by_lightning:
        return parameters
    removed_ids = {
        id(parameter)
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.requires_grad and id(parameter) not in removed_ids
    }


def newest_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return the newest value of each metric, by where Lightning shows it."""
    return {
        name: encode(values) for name, values in lightning_metrics.newest_values(trainer).items()
    }


def restore_newest_metrics(trainer: Trainer, shown: Mapping[str, Any]) -> None:
    """Restore the newest value of each metric, as `newest_metrics` returned it."""
    lightning_metrics.set_newest_values(
        trainer, {name: decode(values) for name, values in shown.items()}
    )


@torch.no_grad()
def restore_rank_state(trainer: Trainer, saved_state: Mapping[str, Any], mid_epoch: bool) -> None:
    """Restore what `rank_state` returned, except for the user's objects.

    Args:
        trainer: Lightning's trainer.
        saved_state: What `rank_state` returned.
        mid_epoch: Whether training resumes within an epoch. Only then the sums of the epoch are
            restored.
    """
    for name, buffer in _buffers_by_name(trainer):
        if (saved := saved_state["buffers"].get(name)) is not None and saved.shape == buffer.shape:
            buffer.copy_(saved)
    device = trainer.strategy.root_device
    for path, tracker in _of_kinds(trainer, MetricTracker):
        # Each step that it tracks has metrics of its own, whose states are saved.
        size = min(saved_state["tracked"].get(path, len(tracker)), len(saved_state["metrics"]))
        while len(tracker) < size:
            tracker.increment()
        # Added by a hook at the start of training.
        for name, _ in list(tracker.named_children())[size:]:
            delattr(tracker, name)
    for name, metric in _of_kinds(trainer, Metric):
        if saved := saved_state["metrics"].get(name):
            metrics.restore(metric, saved, metric.device)  # a callback's metric may be on the CPU
    if mid_epoch:
        lightning_metrics.restore_epoch_sums(trainer, saved_state["results"], device)


def restore_gradients(trainer: Trainer, ranks: list[Mapping[str, Any]]) -> None:
    """Restore the gradients of this rank.

    With another number of ranks than before, each gets the mean, as DDP's sum will be.

    Args:
        trainer: Lightning's trainer.
        ranks: The saved states of all ranks.
    """
    saved = [
        ranks[0]["gradients"] if rank["gradients"] is None else rank["gradients"] for rank in ranks
    ]
    if len(ranks) == trainer.world_size:
        gradients_by_name = saved[trainer.global_rank]
    else:
        gradients_by_name = {
            name: sum(rank_gradients[name] for rank_gradients in saved if name in rank_gradients)
            / len(ranks)
            for rank_gradients in saved
            for name in rank_gradients
        }
    for name, parameter in trainer.lightning_module.named_parameters():
        parameter.grad = (
            gradients_by_name[name].to(parameter.device) if name in gradients_by_name else None
        )


def _buffers_by_name(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's buffers, and tensors of modules kept beside it, by name.

    An example of the latter is an average of the weights. Of modules that Lightning's own callbacks
    keep, only the buffers are yielded: the callbacks save the rest.
    """
    model = trainer.lightning_module
    yield from (
        (f"model.{name}", buffer) for name, buffer in model.named_buffers() if has_values(buffer)
    )
    seen_ids = {id(module) for module in model.modules()}
    for callback in trainer.callbacks:
        for name, module in vars(callback).items():
            if object_graph.is_library_class(type(callback)) and isinstance(module, nn.Module):
                seen_ids |= {id(submodule) for submodule in module.modules()}
                for part, buffer in module.named_buffers():
                    yield f"{type(callback).__name__}.{name}.{part}", buffer
    for path, module in object_graph.walk(user_objects(trainer), code=False):
        if (
            isinstance(module, nn.Module)
            and not isinstance(module, Metric)
            and id(module) not in seen_ids
        ):
            seen_ids |= {id(submodule) for submodule in module.modules()}
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if has_values(tensor):
                    yield f"{path}.{name}", tensor


def has_values(tensor: Tensor) -> bool:
    """Return whether a parameter or buffer is initialized; a lazy module's is not."""
    return not isinstance(tensor, nn.parameter.UninitializedTensorMixin)


def _of_kinds(trainer: Trainer, *kinds: type) -> Iterator[tuple[str, Any]]:
    """Yield all instances of these classes that the user's objects hold, with their paths."""
    return (
        (path, value)
        for path, value in object_graph.walk(user_objects(trainer), code=False)
        if isinstance(value, kinds)
    )
