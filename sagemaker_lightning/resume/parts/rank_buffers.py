"""The buffers that differ between the ranks, and all tensors that no state dict has.

DDP makes buffers (batch norm's statistics) equal on all ranks at the start of a forward pass only,
and validation uses each rank's own. A model may leave frozen weights out of its state dict to save
space; those of them that training changes are here.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.compat.torch_modules import changes_state_dict
from sagemaker_lightning.resume.parts.copies import copy_to_cpu, has_values
from sagemaker_lightning.resume.parts.part import Moment, Part, named_values
from sagemaker_lightning.resume.parts.roots import user_objects
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.digests import digest
from sagemaker_lightning.state.graph import fingerprints

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run


class RankBuffers(Part):
    """The model's buffers that Lightning does not save for this rank, and modules beside it."""

    key = "rank_buffers"
    what = (
        "buffers that differ between the ranks or that no state dict has, weights that training "
        "changes and no state dict has, and modules kept beside the model"
    )
    moments = (Moment.HOOKS, Moment.TRAINING)
    of_same_rank = True

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.at_start: dict[str, bytes] = {}
        """Fingerprints of the weights at the start, by name, if the state dict may lack some.

        Each checkpoint compares those that it lacks: a copy of each would undo what leaving them
        out saves.
        """

    def mark_start(self) -> None:
        """Note what the weights are that the model may leave out of its state dict."""
        model = self.trainer.lightning_module
        if changes_state_dict(model):
            self.at_start = {
                name: fingerprints.of_tensor(parameter)
                for name, parameter in model.named_parameters()
                if has_values(parameter)
            }

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Tensor]:
        """Return the buffers, and weights that are left out, on the CPU, by name."""
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
            | {
                f"model.{name}": parameter.detach()
                for name, parameter in self.trainer.lightning_module.named_parameters()
                if name in self.at_start
                and f"model.{name}" not in saved_by_lightning
                and self.at_start[name] != fingerprints.of_tensor(parameter)
            }
        )

    @torch.no_grad()
    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the buffers that are there; one may have got another shape while training."""
        weights = self.trainer.lightning_module.named_parameters()
        changed = [(f"model.{name}", value) for name, value in weights if name in self.at_start]
        for name, buffer in (*_buffers_by_name(self.trainer), *changed):
            value = saved.get(name)
            if value is not None and value.shape == buffer.shape:
                buffer.copy_(value)
            elif value is not None:
                buffer.data = value.to(buffer)

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each buffer."""
        return named_values("buffers", saved)


def _buffers_by_name(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's buffers, and tensors of modules kept beside it, by name.

    An example of the latter is an average of the weights. Modules that Lightning's own callbacks
    keep have only their buffers yielded: the callbacks save the rest.
    """
    model = trainer.lightning_module
    yield from (
        (f"model.{name}", buffer) for name, buffer in model.named_buffers() if has_values(buffer)
    )
    seen_ids = {id(module) for module in model.modules()}
    for callback in callbacks_of(trainer):
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
                if has_values(tensor) and not tensor.is_meta:
                    yield f"{path}.{name}", tensor
