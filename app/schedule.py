"""Learning rates over the steps of a run."""

import warnings

from pytorch_lightning import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from app.errors import UserError


class Triangle(LambdaLR):
    """Up in a straight line, and down to nothing in another, over the steps of the whole run.

    torch's OneCycleLR wants to know the number of steps before there is a data set; this one is told by the trainer.

    Args:
        optimizer: Its learning rate is the peak.
        warmup: Share of the steps that lead up to the peak, 0 to 1.
        start: Share of the peak that the first step has.
        end: Share of the peak that the step after the last one would have.
    """

    def __init__(self, optimizer: Optimizer, warmup: float = 0.2, start: float = 0.0, end: float = 0.0) -> None:
        if not 0 <= warmup <= 1:
            raise UserError(f"--lr_scheduler.warmup: found {warmup}, allowed is 0 to 1: a share of the steps")
        self.warmup, self.start, self.end = warmup, start, end
        self.steps: int | None = None  # of the whole run
        super().__init__(optimizer, lambda step: self.factor(step))

    def factor(self, step: int) -> float:
        """Return the share of the peak that a step has; the first step is 0."""
        if self.steps is None or step < self.warmup * self.steps:
            whole = self.warmup * (self.steps or 0)
            return self.start + (1 - self.start) * step / whole if whole else self.start if self.warmup else 1.0
        rest = (1 - self.warmup) * self.steps
        return self.end + (1 - self.end) * max(0.0, (self.steps - step) / rest if rest else 0.0)

    def state_dict(self) -> dict:
        """Return what a checkpoint keeps: not the number of steps, which a run that goes on may have another of."""
        state = super().state_dict()
        del state["steps"]
        return state


def configured(trainer: Trainer, optimizer: Optimizer, scheduler: LambdaLR | OneCycleLR | CyclicLR) -> dict:
    """Return what Lightning wants of a model, for a scheduler that is to be stepped after each batch."""
    if isinstance(scheduler, Triangle):
        steps = trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise UserError(
                "--lr_scheduler=Triangle: the run has no end; allowed is one with --trainer.max_epochs or max_steps"
            )
        scheduler.steps = int(steps)
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < trainer.estimated_stepping_batches < float("inf"):
        raise UserError(
            f"--lr_scheduler: OneCycleLR has {scheduler.total_steps} steps, and the run "
            f"{trainer.estimated_stepping_batches}; allowed is --lr_scheduler.total_steps of as many or more"
        )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def step_once(scheduler: LRScheduler | ReduceLROnPlateau) -> None:
    """Take a scheduler's first step; its optimizer has taken none, which is no news."""
    with warnings.catch_warnings(action="ignore"):
        scheduler.step(*([0.0] if isinstance(scheduler, ReduceLROnPlateau) else []))


PER_STEP = (Triangle, OneCycleLR, CyclicLR)
"""What is stepped after each batch and not after each epoch; of the latter two, torch's documentation says so."""


def rates(trainer: Trainer) -> list[float]:
    """Return the learning rate of each group of parameters, of all optimizers."""
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return [float(group["lr"]) for group in groups if "lr" in group]
