"""The buffers that differ between the ranks, or that no state dict has.

DDP makes buffers (batch norm's statistics) equal on all ranks at the start of a forward pass only,
and validation uses each rank's own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from sagemaker_lightning.resume.parts.copies import copy_to_cpu, has_values
from sagemaker_lightning.resume.parts.part import Moment, Part, named_values
from sagemaker_lightning.resume.parts.roots import user_objects
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.object_state import digest


class RankBuffers(Part):
    """The model's buffers that Lightning does not save for this rank, and modules beside it."""

    key = "rank_buffers"
    what = (
        "buffers that differ between the ranks or that no state dict has, and modules kept beside "
        "the model"
    )
    moments = (Moment.HOOKS, Moment.TRAINING)
    of_same_rank = True

    def save(self, point: Any, state: Mapping[str, Any] | None) -> dict[str, Tensor]:
        """Return the buffers, on the CPU, by name."""
        buffers = dict(_buffers_by_name(self.trainer))
        digests = self.run.agreement.gather(
            {name: digest(buffer) for name, buffer in buffers.items()}
        )
        alike = {
            name
            for name, digest in digests[0].items()
            if all(other.get(name) == digest for other in digests)
        }
        weights = state["state_dict"] if state else self.trainer.lightning_module.state_dict()
        saved_by_lightning = {f"model.{name}" for name in weights}
        return copy_to_cpu(
            {
                name: buffer
                for name, buffer in buffers.items()
                if name not in alike or name not in saved_by_lightning
            }
        )

    @torch.no_grad()
    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the buffers that are there in the same shape."""
        for name, buffer in _buffers_by_name(self.trainer):
            value = saved.get(name)
            if value is not None and value.shape == buffer.shape:
                buffer.copy_(value)

    def digest(self, saved: Any, others: Any) -> dict[str, Any]:
        """Return each buffer."""
        return named_values("buffers", saved)


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
