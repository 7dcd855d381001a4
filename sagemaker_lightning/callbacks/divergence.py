"""A loss that is NaN or infinite ends the job, with the step and what to try, before a checkpoint is spoilt by it.

A metric of a validation that is NaN or infinite ends nothing, as the weights may be good: it is warned about.
"""

import math
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, distributed, nn

from sagemaker_lightning.contract.errors import UserError

EVERY = 50  # losses that are kept on a GPU before they are read, all at once


class Divergence(Callback):
    """Fails the job when the loss is NaN or infinite: from there on, nothing is learned any more.

    Training does not wait for a GPU: losses stay there, and every 50 of them are copied while it goes on. Before a
    checkpoint is written, which waits for the GPU anyway, all losses and the weights are looked at. A batch that
    `training_step` skips by None and a step that a GradScaler skips for its gradients are no divergence.

    Of each metric that is NaN or infinite after a validation, one line warns: resume/best_model.py chooses no model by
    it.

    Args:
        fail: Whether a loss that is NaN or infinite ends the job.
    """

    def __init__(self, fail: bool = True) -> None:
        self.fail = fail
        self.step = 0  # that is being computed
        self.losses: list[tuple[int, Tensor]] = []  # not read yet, with the step of each
        self.copied: tuple[list[int], Tensor, torch.cuda.Event] | None = (
            None  # on their way from a GPU
        )
        self.last: tuple[int, float] | None = None  # step and value of the last finite loss
        self.first: tuple[int, float] | None = (
            None  # step and value of the first loss that is not finite
        )
        self.warned: set[str] = set()  # metrics

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Take note of the step."""
        self.step = trainer.global_step + 1

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Take note of a loss of manual optimization, which training_step need not return."""
        if self.fail and not pl_module.automatic_optimization:
            loss = loss.detach()
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            # It has multiplied the loss. What it makes of 1 is its factor; get_scale() would wait for the GPU.
            self.losses.append(
                (self.step, loss if scaler is None else loss / scaler.scale(torch.ones_like(loss)))
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take note of the loss; look at those that need not be waited for."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.fail and isinstance(loss, Tensor):
            self.losses.append((self.step, loss.detach()))
        if self.found() and trainer.world_size == 1:
            self.check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of metrics that are not finite."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        values = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name not in self.warned
        }
        if wrong := {name: value for name, value in values.items() if not math.isfinite(value)}:
            self.warned |= wrong.keys()
            print(
                f"warning: {', '.join(f'{name}={value}' for name, value in wrong.items())} in the validation of epoch "
                f"{trainer.current_epoch + 1}, step {trainer.global_step}; no model becomes the best one by such a "
                "value; look for NaN in the validation data and for what divides by zero; this is said once a metric",
                flush=True,
            )

    def found(self) -> bool:
        """Return whether a loss that is not finite is known; wait for no GPU."""
        if self.copied and self.copied[-1].query():
            self._receive()
        if (
            self.losses
            and not self.copied
            and (self.losses[-1][1].is_cpu or len(self.losses) >= EVERY)
        ):
            self._send()
        return self.first is not None

    def check(self, trainer: Trainer) -> None:
        """Raise UserError if the loss or the weights of any rank are not finite; all ranks call this at once."""
        if not self.fail:
            return
        while self.copied or self.losses:
            if not self.copied:
                self._send()
            if self.copied:
                self.copied[-1].synchronize()
                self._receive()
        problems = [self._problem(trainer)]
        if trainer.world_size > 1:
            problems = [None] * trainer.world_size
            distributed.all_gather_object(problems, self._problem(trainer))
        if problems := [problem for problem in problems if problem]:
            raise UserError(min(problems)[1])

    def _send(self) -> None:
        """Begin to copy the losses from a GPU; read those of another device."""
        steps = [step for step, _ in self.losses]
        values = torch.stack([loss.float().mean() for _, loss in self.losses])
        self.losses = []
        if values.is_cuda:
            event = torch.cuda.Event()
            values = values.to("cpu", non_blocking=True)  # into memory that torch pins for that
            event.record()
            self.copied = steps, values, event
        else:
            self._read(steps, values)

    def _receive(self) -> None:
        steps, values, _ = self.copied
        self.copied = None
        self._read(steps, values)

    def _read(self, steps: list[int], values: Tensor) -> None:
        for step, value in zip(steps, values.tolist(), strict=True):
            if self.first:
                return
            if math.isfinite(value):
                self.last = step, value
            else:
                self.first = step, value

    def _problem(self, trainer: Trainer) -> tuple[int, str] | None:
        """Return the step at which this rank's loss or weights are not finite, and what to say; None if they are."""
        module = trainer.lightning_module
        if self.first:
            step = self.first[0]
            what = f"the loss is {self.first[1]} at step {self.first[0]}"
        else:
            if _are_finite(module):
                return None
            step = trainer.global_step
            what = f"weights are NaN or infinite after step {trainer.global_step}"
        last = "there was no finite loss before"
        if self.last:
            times = (
                trainer.accumulate_grad_batches if module.automatic_optimization else 1
            )  # Lightning divides by it
            last = f"the last finite loss was {self.last[1] * times:.4g}, at step {self.last[0]}"
        half = str(trainer.precision).startswith("16")
        return step, (
            f"{what}; {last}; try a lower learning rate, --trainer.gradient_clip_val=1, "
            f"{'--trainer.precision=bf16-mixed, ' if half else ''}or look for NaN in the data; no checkpoint has been "
            "written since; --divergence.fail=false trains on"
        )


def _are_finite(module: nn.Module) -> bool:
    """Return whether all trained weights are finite; their least and greatest say so in a tenth of isfinite's time."""
    weights = [
        weight.detach() for weight in module.parameters() if weight.requires_grad and weight.numel()
    ]
    bounds = [
        bound.float()
        for weight in weights
        if weight.is_floating_point()
        for bound in weight.aminmax()
    ]
    return not bounds or bool(torch.stack(bounds).isfinite().all())


def of(trainer: Trainer) -> Divergence:
    """Return the trainer's callback of this kind; one that lets everything pass, if it has none."""
    return next(
        (one for one in trainer.callbacks if isinstance(one, Divergence)), Divergence(fail=False)
    )
