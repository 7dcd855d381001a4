"""Learning rate schedules over the steps of a run."""

import warnings
from typing import Any

from pytorch_lightning import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from sagemaker_lightning.contract.errors import UserError


class Triangle(LambdaLR):
    """Linear warm-up to a peak, then linear decay, over the steps of the whole run.

    torch's OneCycleLR needs the number of steps before there is a data set. The command line gives
    it to this schedule (`--lr_scheduler=Triangle`). In a `configure_optimizers` of your own, call
    `set_steps`, and have Lightning step it after each batch:

        schedule = Triangle(optimizer)
        schedule.set_steps(int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    Args:
        optimizer: Its learning rate is the peak.
        warmup: Share of the steps that lead up to the peak, 0 to 1.
        start: Share of the peak that the first step has.
        end: Share of the peak that the step after the last one would have.

    Raises:
        UserError: `warmup` is not 0 to 1. From `step`: nobody has called `set_steps`.
    """

    def __init__(
        self, optimizer: Optimizer, warmup: float = 0.2, start: float = 0.0, end: float = 0.0
    ) -> None:
        if not 0 <= warmup <= 1:
            raise UserError(
                f"--lr_scheduler.warmup: found {warmup}, expected 0 to 1: a share of the steps"
            )
        self.warmup = warmup
        self.start = start
        self.end = end
        # Number of steps of the whole run; None until the trainer knows it.
        self.steps: int | None = None
        super().__init__(optimizer, lambda step: self.factor(step))

    def factor(self, step: int) -> float:
        """Return the share of the peak that a step has; the first step is 0.

        UserError if the number of steps is not known. Only the first step does not need it: torch
        asks for it when the schedule is made.
        """
        if step == 0:
            return self.start if self.warmup else 1.0
        if self.steps is None:
            raise UserError(
                "Triangle: found no number of steps, which --lr_scheduler=Triangle would give it; "
                "in a configure_optimizers of your own, call "
                "set_steps(int(self.trainer.estimated_stepping_batches))"
            )
        if step < self.warmup * self.steps:
            return self.start + (1 - self.start) * step / (self.warmup * self.steps)
        decay_steps = (1 - self.warmup) * self.steps
        return self.end + (1 - self.end) * max(
            0.0, (self.steps - step) / decay_steps if decay_steps else 0.0
        )

    def set_steps(self, steps: int) -> None:
        """Set the number of steps of the run."""
        self.steps = steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without the number of steps.

        A resumed run may have another number of steps.
        """
        state = super().state_dict()
        del state["steps"]
        return state


def configured(
    trainer: Trainer, optimizer: Optimizer, scheduler: LambdaLR | OneCycleLR | CyclicLR
) -> dict[str, Any]:
    """Return Lightning's configuration to step a scheduler after each batch.

    Raises UserError if the run has no end, or more steps than the scheduler.
    """
    if isinstance(scheduler, Triangle):
        steps = trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise UserError(
                "--lr_scheduler=Triangle: the run has no end; expected one with "
                "--trainer.max_epochs or max_steps"
            )
        scheduler.set_steps(int(steps))
    if isinstance(
        scheduler, OneCycleLR
    ) and scheduler.total_steps < trainer.estimated_stepping_batches < float("inf"):
        raise UserError(
            f"--lr_scheduler: OneCycleLR has {scheduler.total_steps} steps, and the run "
            f"{trainer.estimated_stepping_batches}; set --lr_scheduler.total_steps to as many "
            "or more"
        )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def step_once(scheduler: LRScheduler | ReduceLROnPlateau) -> None:
    """Take a scheduler's first step, without a warning that its optimizer took none."""
    if isinstance(scheduler, Triangle):
        return  # its settings are checked when it is made, and no trainer has given it its steps
    with warnings.catch_warnings(action="ignore"):
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(0.0)
        else:
            scheduler.step()


PER_STEP = (Triangle, OneCycleLR, CyclicLR)
"""Schedulers that are stepped after each batch, and not after each epoch.

Torch's documentation says so of OneCycleLR and CyclicLR.
"""
