"""What an epoch has gathered so far and a Lightning checkpoint leaves out: metrics, and the buffers of each rank.

Epoch-level metrics of training are sums over the batches that were seen; DDP keeps buffers (batch norm's statistics)
alike at the start of a forward pass only, and validation uses each rank's own.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import Trainer
from torch import Tensor, nn
from torchmetrics import Metric, MetricTracker

from app import graph
from app.compat import lightning_loops, lightning_metrics, metrics
from app.held import Held, roots
from app.plain import decoded, encoded
from app.state import digest


def copied(data: Any) -> Any:
    """Return `data` with every tensor in it copied to the CPU."""
    return apply_to_collection(data, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))


def of_rank(trainer: Trainer, gather: Callable[[Any], list], held: Held, loaders: bool = True) -> dict[str, Any]:
    """Return what only this rank knows: buffers that differ between the ranks, or that no state dict has; the states of
    torchmetrics; the sums of what was logged; what the user's objects hold, with what the `loaders` say. All ranks call
    it; `gather` gives each what all say."""
    buffers = dict(_buffers(trainer))
    told = gather({name: digest(buffer) for name, buffer in buffers.items()})
    alike = {name for name, digest in told[0].items() if all(other.get(name) == digest for other in told)}
    kept = {f"model.{name}" for name in trainer.lightning_module.state_dict()}
    buffers = {name: buffer for name, buffer in buffers.items() if name not in alike or name not in kept}
    measured = dict(_of_kinds(trainer, Metric, MetricTracker))
    counted = {name: metrics.state_of(one) for name, one in measured.items() if isinstance(one, Metric)}
    steps = {name: len(one) for name, one in measured.items() if isinstance(one, MetricTracker)}
    results = lightning_metrics.gathered(trainer)
    tensors = copied({"buffers": buffers, "metrics": counted, "results": results})
    return tensors | {"held": held.told(loaders), "tracked": steps}


def gradients(trainer: Trainer, gather: Callable[[Any], list]) -> dict[str, Tensor] | None:
    """Return the gradients that the next step is to add to, by parameter; None where they are the first rank's."""
    model = trainer.lightning_module
    if model.automatic_optimization and not lightning_loops.accumulates(trainer):
        return None if trainer.global_rank else {}
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    found = copied(found)
    told = gather(digest(found))
    return None if trainer.global_rank and told[trainer.global_rank] == told[0] else found


def of_job(trainer: Trainer) -> dict[str, Any]:
    """Return the newest value of each metric, by where Lightning shows it."""
    return {name: encoded(values) for name, values in lightning_metrics.shown(trainer).items()}


def restore_job(trainer: Trainer, shown: Mapping[str, Any]) -> None:
    """Give Lightning the newest value of each metric back."""
    lightning_metrics.show(trainer, {name: decoded(values) for name, values in shown.items()})


@torch.no_grad()
def restore_rank(trainer: Trainer, known: Mapping[str, Any], mid_epoch: bool) -> None:
    """Give this rank back what it knew; the sums of an epoch only in the middle of it."""
    for name, buffer in _buffers(trainer):
        if (saved := known["buffers"].get(name)) is not None and saved.shape == buffer.shape:
            buffer.copy_(saved)
    device = trainer.strategy.root_device
    for path, tracker in _of_kinds(trainer, MetricTracker):
        size = known.get("tracked", {}).get(path, len(tracker))
        while len(tracker) < size:
            tracker.increment()
        for name, _ in list(tracker.named_children())[size:]:  # what a hook that begins training has added
            delattr(tracker, name)
    for name, metric in _of_kinds(trainer, Metric):
        if saved := known["metrics"].get(name):
            metrics.restore(metric, saved, metric.device)  # a callback's may be on the CPU
    if mid_epoch:
        lightning_metrics.go_on_gathering(trainer, known["results"], device)


def restore_gradients(trainer: Trainer, ranks: list[Mapping[str, Any]]) -> None:
    """Give the parameters the gradients of this rank; with other ranks than before, the mean, as DDP's sum will be."""
    saved = [ranks[0]["gradients"] if rank["gradients"] is None else rank["gradients"] for rank in ranks]
    if len(ranks) == trainer.world_size:
        own = saved[trainer.global_rank]
    else:
        own = {name: sum(one[name] for one in saved if name in one) / len(ranks) for one in saved for name in one}
    for name, parameter in trainer.lightning_module.named_parameters():
        parameter.grad = own[name].to(parameter.device) if name in own else None


def _buffers(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the model, and what modules have that are kept beside it, such as an average of its weights.

    Of those that Lightning's own callbacks keep, their buffers only: the callbacks save the rest.
    """
    model = trainer.lightning_module
    yield from ((f"model.{name}", buffer) for name, buffer in model.named_buffers() if has_values(buffer))
    seen = {id(module) for module in model.modules()}
    for callback in trainer.callbacks:
        for name, module in vars(callback).items():
            if graph.library(type(callback)) and isinstance(module, nn.Module):
                seen |= {id(one) for one in module.modules()}
                for part, buffer in module.named_buffers():
                    yield f"{type(callback).__name__}.{name}.{part}", buffer
    for path, module in graph.walk(roots(trainer), code=False):
        if isinstance(module, nn.Module) and not isinstance(module, Metric) and id(module) not in seen:
            seen |= {id(one) for one in module.modules()}
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if has_values(tensor):
                    yield f"{path}.{name}", tensor


def has_values(tensor: Tensor) -> bool:
    return not isinstance(tensor, nn.parameter.UninitializedTensorMixin)


def _of_kinds(trainer: Trainer, *kinds: type) -> Iterator[tuple[str, Any]]:
    """Yield the path and the object of everything of these classes that model, data and callbacks hold."""
    return ((path, one) for path, one in graph.walk(roots(trainer), code=False) if isinstance(one, kinds))
