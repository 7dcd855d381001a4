"""The gradients that are left for the next optimizer step."""

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sagemaker_lightning.compat import dtensors, lightning_loops
from sagemaker_lightning.compat.lightning_callbacks import leaves_gradients
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.compat.torch_modules import named_parameters
from sagemaker_lightning.resume.parts.copies import copy_to_cpu
from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.parts.roots import functions_that_mention, names_in_code
from sagemaker_lightning.resume.parts.start_hooks import is_of_library
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state.digests import digest

AFTER_BACKWARD = {
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
}
"""The hooks that run when the gradients of the step before are gone."""
OTHERS = "other: "
"""How the name of a gradient begins that is of no parameter of the model; its path follows."""


class Gradients(Part):
    """The gradients that are used after a step.

    Either Lightning does not remove them before the next step, or code reads them before it does:
    they are there until the next training step has returned. Those of the user's other tensors are
    there until the user removes them.
    """

    key = "gradients"
    what = "gradients that are left for the next optimizer step, or for code that reads them before"
    moments = (Moment.HOOKS, Moment.TRAINING)

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> dict[str, Tensor] | None:
        """Return the gradients by parameter; None if they are equal to those of rank 0."""
        trainer = self.trainer
        parameters = _with_lasting_gradients(trainer)
        of_others = copy_to_cpu(
            {
                f"{OTHERS}{path}": tensor.grad
                for path, tensor in self._others()
                if tensor.grad is not None
            }
        )
        if not parameters:
            return of_others or (None if trainer.global_rank else {})
        gradients = {
            name: parameter.grad
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
        model = trainer.lightning_module
        # What is added to parts of sums has other bits than what is added to sums.
        if model.automatic_optimization and not lightning_loops.gradients_accumulate(trainer):
            gradients = {name: dtensors.reduced(each) for name, each in gradients.items()}
        gradients_by_name = copy_to_cpu(gradients) | of_others
        digests = self.run.agreement.gather(digest(gradients_by_name))
        is_shared_out = any(isinstance(each, DTensor) for each in gradients_by_name.values())
        is_as_rank_0 = trainer.global_rank and digests[trainer.global_rank] == digests[0]
        is_as_rank_0 = is_as_rank_0 and not is_shared_out
        return None if is_as_rank_0 else gradients_by_name

    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the gradients of this rank.

        With another number of ranks than before, each gets the mean, as DDP's sum will be.
        """
        trainer = self.trainer
        of_ranks = self.resumed.of_all_ranks(self.key)
        if self.resumed.same_ranks:
            own = self.resumed.of(self)
            gradients_by_name = of_ranks[0] if own is None else own
        else:
            all_saved = [of_ranks[0] if each is None else each for each in of_ranks]
            # The ranks had the parts of one mean where weights were shared out.
            gradients_by_name = dict(of_ranks[0])
            gradients_by_name |= {
                name: sum(each[name] for each in all_saved if name in each) / len(all_saved)
                for rank_gradients in all_saved
                for name in rank_gradients
                if not name.startswith(OTHERS)
                and all(isinstance(each.get(name, torch.empty(0)), Tensor) for each in all_saved)
            }
        for name, parameter in named_parameters(trainer.lightning_module):
            gradient = gradients_by_name.get(name)
            if gradient is not None and gradient.shape != parameter.shape:
                continue  # the weight gets its later shape after the hooks that begin training
            parameter.grad = (
                None
                if gradient is None
                else dtensors.placed_like(gradient, parameter).to(parameter.device)
            )
        for path, tensor in self._others():
            gradient = gradients_by_name.get(f"{OTHERS}{path}")
            if gradient is None or gradient.shape == tensor.shape:
                tensor.grad = None if gradient is None else gradient.to(tensor.device)

    def _others(self) -> list[tuple[str, Tensor]]:
        """Return path and tensor of all that may have a gradient besides the model's weights."""
        weights = {id(each) for _, each in named_parameters(self.trainer.lightning_module)}
        return [
            (path, tensor)
            for path, tensor in self.run.reached(Tensor)
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in weights
        ]

    def present(self) -> None:
        """Return nothing: they are not compared, and all ranks would have to agree."""


def _with_lasting_gradients(trainer: Trainer) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are used after a step.

    They are equal on all ranks, and known without a look at the gradients.
    """
    model = trainer.lightning_module
    parameters = dict(named_parameters(model))
    owners: list[LightningModule | Callback] = [model, *callbacks_of(trainer)]
    are_gone = (
        model.automatic_optimization
        # Once switched off, the module's own steps use what Lightning's last one has left.
        and "automatic_optimization" not in names_in_code(trainer)
        and not lightning_loops.gradients_accumulate(trainer)
        and is_of_library(type(model).optimizer_zero_grad)
        # These may not remove them, but set them to zero. An optimizer still moves such a weight.
        and all(is_of_library(type(optimizer).zero_grad) for optimizer in trainer.optimizers)
        and all(is_of_library(owner.on_before_zero_grad) for owner in owners)
        and not any(leaves_gradients(each, trainer.current_epoch) for each in callbacks_of(trainer))
    ) and all(each.__name__ in AFTER_BACKWARD for each in functions_that_mention(trainer, "grad"))
    if not are_gone:
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
