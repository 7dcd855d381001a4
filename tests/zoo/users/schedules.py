"""Schedules of the learning rate: each of torch's classes, and others'."""

import math

import numpy as np
import torch
from basics import Classifier
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

MADE = {
    "step": lambda o: StepLR(o, 7),
    "multistep": lambda o: MultiStepLR(o, [5, 11]),
    "constant": lambda o: ConstantLR(o, 0.3, 9),
    "linear": lambda o: LinearLR(o, 0.1, total_iters=12),
    "exponential": lambda o: ExponentialLR(o, 0.95),
    "polynomial": lambda o: PolynomialLR(o, 30, 2.0),
    "cosine": lambda o: CosineAnnealingLR(o, 13),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 4, 2),
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: MultiplicativeLR(o, lambda step: 0.97),
    "cyclic": lambda o: CyclicLR(o, 0.001, 0.1, step_size_up=4, mode="triangular2"),
    "cyclic-scaled": lambda o: CyclicLR(o, 0.001, 0.1, step_size_up=3, scale_fn=lambda x: 0.9**x),
    "onecycle": lambda o: OneCycleLR(o, 0.1, total_steps=31),
    "sequential": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, 20)], [5]
    ),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.5, 6), ExponentialLR(o, 0.97)]),
}


class Scheduled(Classifier):
    """SGD with one of torch's schedules, by the step or by the epoch, every `frequency`."""

    def __init__(self, schedule: str, interval: str = "step", frequency: int = 1):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        scheduler = MADE[self.hparams.schedule](optimizer)
        config = {
            "scheduler": scheduler,
            "interval": self.hparams.interval,
            "frequency": self.hparams.frequency,
        }
        return {"optimizer": optimizer, "lr_scheduler": config}


class Plateau(Classifier):
    """ReduceLROnPlateau on a metric of the validation, the training epoch or each step."""

    def __init__(self, monitor: str = "val_loss", interval: str = "epoch"):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05, cooldown=1)
        config = {
            "scheduler": scheduler,
            "monitor": self.hparams.monitor,
            "interval": self.hparams.interval,
        }
        return {"optimizer": optimizer, "lr_scheduler": {**config, "strict": True}}


class EstimatedOneCycle(Classifier):
    """Lightning's documented idiom."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = OneCycleLR(
            optimizer, max_lr=0.05, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class NumpyCosine(Classifier):
    """A warm-up and numpy's cosine: the rate becomes a numpy scalar half-way."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.05)

        def rate(step):
            return (step + 1) / 12 if step < 12 else 0.5 * (1 + np.cos(np.pi * (step - 12) / 20))

        return [optimizer], [{"scheduler": LambdaLR(optimizer, rate), "interval": "step"}]


class CosineScheduler:
    """A schedule that is not a class of torch's, in the manner of timm's.

    It has step(epoch) and step_update(num_updates).
    """

    def __init__(self, optimizer, t_initial, warmup_t, noise_seed=None):
        self.optimizer, self.t_initial, self.warmup_t = optimizer, t_initial, warmup_t
        self.base_values = [group["lr"] for group in optimizer.param_groups]
        self.metric = None

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict):
        self.__dict__.update(state_dict)

    def step(self, epoch, metric=None):
        self.metric = metric
        if epoch < self.warmup_t:
            factor = (epoch + 1) / self.warmup_t
        else:
            factor = 0.5 * (1 + math.cos(math.pi * epoch / self.t_initial))
        for group, value in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = value * factor


class TimmScheduled(Classifier):
    """lr_scheduler_step is overridden.

    Lightning's documentation says so for schedulers of others.
    """

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": CosineScheduler(optimizer, 5, 2), "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)


class NoamScheduler(torch.optim.lr_scheduler.LRScheduler):
    """A subclass of torch's base."""

    def __init__(self, optimizer, d_model=64, warmup=8):
        self.d_model, self.warmup = d_model, warmup
        super().__init__(optimizer)

    def get_lr(self):
        step = max(1, self._step_count)
        scale = self.d_model**-0.5 * min(step**-0.5, step * self.warmup**-1.5)
        return [base * scale for base in self.base_lrs]


class Noam(Classifier):
    """The schedule of "Attention is all you need"."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1.0, betas=(0.9, 0.98))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": NoamScheduler(optimizer), "interval": "step"},
        }


class WarmedUp(Classifier):
    """optimizer_step is overridden for a warm-up, as Lightning's documentation does."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 15:
            lr_scale = min(1.0, float(self.trainer.global_step + 1) / 15.0)
            for pg in optimizer.param_groups:
                pg["lr"] = lr_scale * self.hparams.lr


class TwoSchedulers(Classifier):
    """Two schedules of one optimizer: one by the step, one by the epoch."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        by_step = {"scheduler": ExponentialLR(optimizer, 0.99), "interval": "step", "name": "step"}
        by_epoch = {"scheduler": StepLR(optimizer, 1, 0.7), "interval": "epoch", "name": "epoch"}
        return [optimizer], [by_step, by_epoch]
