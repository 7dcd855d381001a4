"""Ends the job if the loss is NaN or infinite, before a checkpoint contains it.

The error names the step and what to try. A validation metric that is NaN or infinite ends nothing,
as the weights may be good: it causes a warning.
"""

import math
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from sagemaker_lightning.compat.dtensors import local_part
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.gather import gather

LOSSES_PER_READ = 50  # number of losses kept on a GPU before they are read, all at once


class Divergence(Callback):
    """Fails the job when the loss is NaN or infinite: nothing is learned after that.

    Training does not wait for a GPU: losses stay there, and every 50 of them are copied while
    training runs. Before a checkpoint is written, which waits for the GPU anyway, all losses and
    the weights are checked. A batch for which `training_step` returns None is not a divergence, and
    neither is a step that a GradScaler skips because of its gradients.

    One line warns of each metric that is NaN or infinite after a validation;
    resume/files/best_model.py chooses no model by such a value.

    Args:
        fail: Whether a loss that is NaN or infinite ends the job.
    """

    def __init__(self, fail: bool = True) -> None:
        self.fail = fail
        self.current_step = 0  # the step that is being computed
        self.losses: list[tuple[int, Tensor]] = []  # not read yet, with the step of each
        # Losses on their way from a GPU: steps, values, the event of the copy.
        self.being_copied: tuple[list[int], Tensor, torch.cuda.Event] | None = None
        # Step and value of the last finite loss, and of the first that is not finite.
        self.last_finite: tuple[int, float] | None = None
        self.first_not_finite: tuple[int, float] | None = None
        self.warned: set[str] = set()  # metrics

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the number of the step."""
        self.current_step = trainer.global_step + 1

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Record a loss of manual optimization.

        In manual optimization, training_step need not return the loss.
        """
        if self.fail and not pl_module.automatic_optimization:
            loss = loss.detach()
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            # The scaler has multiplied the loss. Scaling 1 gives its factor; get_scale() would wait
            # for the GPU.
            self.losses.append(
                (
                    self.current_step,
                    loss if scaler is None else loss / scaler.scale(torch.ones_like(loss)),
                )
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss; check the losses that are there without waiting."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.fail and isinstance(loss, Tensor):
            self.losses.append((self.current_step, loss.detach()))
        if self.poll() and trainer.world_size == 1:
            self.check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of metrics that are NaN or infinite."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        values = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name not in self.warned
        }
        if not_finite := {
            name: value for name, value in values.items() if not math.isfinite(value)
        }:
            self.warned |= not_finite.keys()
            log.warning(
                f"{', '.join(f'{name}={value}' for name, value in not_finite.items())} in "
                f"the validation of epoch {trainer.current_epoch + 1}, step {trainer.global_step}; "
                "no model becomes the best one by such a value; look for NaN in the validation "
                "data and for what divides by zero; this warning comes once for each metric"
            )

    def poll(self) -> bool:
        """Read the losses that a GPU has finished; return whether one of them is not finite.

        It does not wait for a GPU.
        """
        if self.being_copied and self.being_copied[-1].query():
            self._finish_copy()
        if (
            self.losses
            and not self.being_copied
            and (self.losses[-1][1].is_cpu or len(self.losses) >= LOSSES_PER_READ)
        ):
            self._start_copy()
        return self.first_not_finite is not None

    def check(self, trainer: Trainer) -> None:
        """Raise UserError if a rank's loss or weights are not finite.

        All ranks call this at the same time.
        """
        if not self.fail:
            return
        while self.being_copied or self.losses:
            if not self.being_copied:
                self._start_copy()
            if self.being_copied:
                self.being_copied[-1].synchronize()
                self._finish_copy()
        if problems := [problem for problem in gather(self._problem(trainer)) if problem]:
            raise UserError(min(problems)[1])

    def _start_copy(self) -> None:
        """Start copying the losses from a GPU; read those of another device."""
        steps = [step for step, _ in self.losses]
        values = torch.stack([loss.float().mean() for _, loss in self.losses])
        self.losses = []
        if values.is_cuda:
            event = torch.cuda.Event()
            values = values.to("cpu", non_blocking=True)  # torch pins the memory for it
            event.record()
            self.being_copied = steps, values, event
        else:
            self._read(steps, values)

    def _finish_copy(self) -> None:
        assert self.being_copied is not None
        steps, values, _ = self.being_copied
        self.being_copied = None
        self._read(steps, values)

    def _read(self, steps: list[int], values: Tensor) -> None:
        for step, value in zip(steps, values.tolist(), strict=True):
            if self.first_not_finite:
                return
            if math.isfinite(value):
                self.last_finite = step, value
            else:
                self.first_not_finite = step, value

    def _problem(self, trainer: Trainer) -> tuple[int, str] | None:
        """Return the step at which loss or weights are not finite, and a message.

        It is None if they are finite.
        """
        module = trainer.lightning_module
        if self.first_not_finite:
            step, loss = self.first_not_finite
            finding = f"the loss is {loss} at step {step}"
        else:
            if _are_finite(module):
                return None
            step = trainer.global_step
            finding = f"weights are NaN or infinite after step {trainer.global_step}"
        last = "there was no finite loss before"
        if self.last_finite:
            # Lightning divides the loss by it.
            factor = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            last_step, loss = self.last_finite
            last = f"the last finite loss was {loss * factor:.4g}, at step {last_step}"
        half = str(trainer.precision).startswith("16")
        return step, (
            f"{finding}; {last}; try a lower learning rate, --trainer.gradient_clip_val=1, "
            f"{'--trainer.precision=bf16-mixed, ' if half else ''}or look for NaN in the data; no "
            "checkpoint has been written since; --divergence.fail=false continues"
        )


def _are_finite(module: nn.Module) -> bool:
    """Return whether all trained weights that this rank has are finite.

    Their least and greatest values tell it in a tenth of the time of isfinite.
    """
    weights = [
        local_part(weight.detach()) for weight in module.parameters() if weight.requires_grad
    ]
    bounds = [
        bound.float()
        for weight in weights
        if weight.is_floating_point() and weight.numel()
        for bound in weight.aminmax()
    ]
    return not bounds or bool(torch.stack(bounds).isfinite().all())


def divergence_of(trainer: Trainer) -> Divergence:
    """Return the trainer's Divergence callback; if it has none, one that never fails."""
    return next(
        (callback for callback in callbacks_of(trainer) if isinstance(callback, Divergence)),
        Divergence(fail=False),
    )
