"""Scales the learning rates with the number of ranks."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from sagemaker_lightning.compat.model_parallel import data_ranks
from sagemaker_lightning.compat.torch_modules import LAST_RATES_ATTRIBUTE, inner_schedulers
from sagemaker_lightning.contract.errors import UserError

# Every learning rate that an optimizer's group or a scheduler of torch.optim keeps, CyclicLR and
# SWALR included.
GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
SCHEDULER_ATTRIBUTES = (
    "base_lrs",
    LAST_RATES_ATTRIBUTE,
    "max_lrs",
    "min_lrs",
    "default_min_lr",
    "eta_min",
)
RULES = {"none": lambda ranks: 1.0, "linear": float, "sqrt": math.sqrt}
"""What multiplies the learning rates, by the rule's name and the number of ranks."""


class LearningRateScaling(Callback):
    """Multiplies all learning rates by a function of the number of ranks.

        trainer = Trainer(devices=4, strategy="ddp", callbacks=[LearningRateScaling("sqrt")])

    N ranks with the batch size of one rank train on batches that are N times as large, which often
    need a higher learning rate. The callback scales the rates of all optimizers, and those that the
    schedulers of torch.optim keep, when training starts. A checkpoint contains the factor: a
    resumed run scales for its own number of ranks, and never twice.

    ExactResume and RankConsistency have it: their argument `lr_scaling`.

    Args:
        rule: "linear" (the number of ranks), "sqrt" (its square root) or "none" (1).

    Raises:
        UserError: There is no such rule.
    """

    state_key = "sagemaker_lightning.lr_scaling"  # its name in checkpoints, for ever

    def __init__(self, rule: str = "linear") -> None:
        if rule not in RULES:
            raise UserError(
                f"LearningRateScaling(rule=...): found {rule!r}, expected one of {', '.join(RULES)}"
            )
        self.rule = rule
        self.factor = 1.0
        """What the optimizers' learning rates contain."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the factor: the optimizers are made again."""
        if stage == "fit":
            self.factor = 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the factor that the checkpoint's learning rates contain."""
        return {"factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore that factor; Lightning restores the optimizers afterwards."""
        self.factor = state_dict["factor"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scale the learning rates."""
        factor = RULES[self.rule](data_ranks(trainer))
        # If they are equal, the rates come from a checkpoint, and stay the same to the last bit.
        if factor != self.factor:
            scale_rates(trainer, factor / self.factor)
            self.factor = factor


def scale_rates(trainer: Trainer, factor: float) -> None:
    """Multiply every learning rate of the trainer by `factor`.

    These are the rates that optimizers and schedulers keep, nested schedulers included.
    """
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group.update({key: group[key] * factor for key in GROUP_KEYS if key in group})
    for scheduler in _schedulers(config.scheduler for config in trainer.lr_scheduler_configs):
        for name, value in vars(scheduler).items():
            if name in SCHEDULER_ATTRIBUTES and value is not None:
                scaled = (
                    [rate * factor for rate in value] if isinstance(value, list) else value * factor
                )
                setattr(scheduler, name, scaled)


def _schedulers(schedulers: Iterable[object]) -> Iterator[object]:
    """Yield schedulers, and the schedulers within them.

    SequentialLR and ChainedScheduler are made of others.
    """
    for scheduler in schedulers:
        yield scheduler
        yield from _schedulers(inner_schedulers(scheduler))
