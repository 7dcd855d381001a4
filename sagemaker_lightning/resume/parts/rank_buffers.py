"""The buffers that differ between the ranks, and all tensors that no state dict has.

DDP makes buffers (batch norm's statistics) equal on all ranks at the start of a forward pass only,
and validation uses each rank's own. A model may leave frozen weights out of its state dict to save
space; those of them that training changes are here.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from sagemaker_lightning.compat import dtensors
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.compat.torch_modules import (
    changes_state_dict,
    has_users_state_dict,
    named_buffers,
    named_parameters,
    plain_name,
)
from sagemaker_lightning.resume.parts.copies import copy_to_cpu, has_values
from sagemaker_lightning.resume.parts.part import Moment, Part, named_values
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.digests import digest
from sagemaker_lightning.state.graph import fingerprints

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run


BESIDE = "beside the model: "
"""How the names begin of tensors of modules beside the model.

Such a module may have been the model's at the start, and have its path from then, while the model
has another one by the same name.
"""


class RankBuffers(Part):
    """The model's buffers that Lightning does not save for this rank, and modules beside it."""

    key = "rank_buffers"
    what = (
        "buffers that differ between the ranks or that no state dict has, weights that training "
        "changes and no state dict has, and modules kept beside the model"
    )
    moments = (Moment.HOOKS, Moment.TRAINING)

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.at_start: dict[str, bytes] = {}
        """Fingerprints of the weights at the start, by name, if the state dict may lack some.

        Each checkpoint compares those that it lacks: a copy of each would undo what leaving them
        out saves.
        """
        self.own_names: dict[str, str] = {}
        """The model's names of tensors, by the state dict's names for them, if they may differ."""

    def mark_start(self) -> None:
        """Note what the weights are that the model may leave out of its state dict."""
        model = self.trainer.lightning_module
        if changes_state_dict(model):
            # A user's code is asked for the state dict as often as in plain Lightning.
            if not has_users_state_dict(model):
                self.own_names = _names_by_saved_name(model)
            self.at_start = {
                name: fingerprints.of_tensor(parameter)
                for name, parameter in named_parameters(model)
                if has_values(parameter)
            }

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Tensor]:
        """Return the buffers, and weights that are left out, on the CPU, by name."""
        gather = self.run.agreement.gather
        buffers = dict(self._buffers_by_name())
        digests = gather({name: digest(buffer) for name, buffer in buffers.items()})
        alike = {
            name
            for name, digest in digests[0].items()
            if all(other.get(name) == digest for other in digests)
        }
        model = self.trainer.lightning_module
        weights = state["state_dict"] if state else model.state_dict()
        saved_by_lightning = {
            f"model.{self.own_names.get(name, plain_name(name))}" for name in weights
        }
        left_out = {
            f"model.{name}": parameter.detach()
            for name, parameter in named_parameters(model)
            if name in self.at_start and f"model.{name}" not in saved_by_lightning
        }
        # Training may have changed some ranks' parts alone of a weight that is shared out.
        changed = {
            name
            for name, parameter in left_out.items()
            if self.at_start[name.removeprefix("model.")] != fingerprints.of_tensor(parameter)
        }
        changed = set().union(*gather(changed)) if self.at_start else changed
        return copy_to_cpu(
            {
                name: buffer
                for name, buffer in buffers.items()
                if name not in alike or name not in saved_by_lightning
            }
            | {name: left_out[name] for name in changed & left_out.keys()}
        )

    @torch.no_grad()
    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the buffers that are there; one may have got another shape while training."""
        weights = named_parameters(self.trainer.lightning_module)
        changed = [(f"model.{name}", value) for name, value in weights if name in self.at_start]
        for name, buffer in (*self._buffers_by_name(), *changed):
            value = dtensors.placed_like(saved.get(name), buffer)
            if value is not None and value.shape == buffer.shape:
                buffer.copy_(value)
            elif value is not None:
                buffer.data = value.to(buffer)
            # A checkpoint that had it has it from now on, also if Lightning had loaded it before.
            own_name = name.removeprefix("model.")
            if value is not None and own_name in self.at_start:
                self.at_start[own_name] = b""

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each buffer."""
        return named_values("buffers", saved)

    def _buffers_by_name(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's buffers, and tensors of modules kept beside it, by name.

        An example of the latter is an average of the weights. Modules that Lightning's own
        callbacks keep have only their buffers yielded: the callbacks save the rest.
        """
        model = self.trainer.lightning_module
        yield from (
            (f"model.{name}", buffer) for name, buffer in named_buffers(model) if has_values(buffer)
        )
        seen_ids = {id(module) for module in model.modules()}
        for callback in callbacks_of(self.trainer):
            for name, module in vars(callback).items():
                if object_graph.is_library_class(type(callback)) and isinstance(module, nn.Module):
                    seen_ids |= {id(submodule) for submodule in module.modules()}
                    for part, buffer in named_buffers(module):
                        yield f"{type(callback).__name__}.{name}.{part}", buffer
        for path, module in self.run.reached(nn.Module):
            if not isinstance(module, Metric) and id(module) not in seen_ids:
                seen_ids |= {id(submodule) for submodule in module.modules()}
                for name, tensor in (*named_parameters(module), *named_buffers(module)):
                    if has_values(tensor) and not tensor.is_meta:
                        yield f"{BESIDE}{path}.{name}", tensor


def _names_by_saved_name(model: nn.Module) -> dict[str, str]:
    """Return the names of a model's tensors, by those that they have in its state dict.

    Hooks may give them others there, as those of activation checkpointing do.
    """
    tensors = [*named_parameters(model), *named_buffers(model)]
    names = {_memory(tensor): name for name, tensor in tensors}
    places = {name: _memory(value) for name, value in model.state_dict().items()}
    return {name: names[place] for name, place in places.items() if place and place in names}


def _memory(value: Any) -> tuple[Any, ...]:
    """Return where the values of a tensor are, of which a state dict has another object; or ()."""
    is_there = isinstance(value, Tensor) and has_values(value)
    part = dtensors.local_part(value) if is_there else None
    if part is None or part.layout != torch.strided or part.is_meta or not part.numel():
        return ()
    return part.data_ptr(), part.dtype, part.shape, part.stride()
