"""Trainings of a few batches in the tests' own process, and what happens in them."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning import ExactResume
from sagemaker_lightning.resume import run, stopping
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.same_run import earlier_fits

OF_RESUME = ("seed", "every_n_minutes", "every_n_steps", "keep", "exact", "other_settings")
OF_RESUME += ("strict", "settings", "saves", "environment", "stop")


class Line(pl.LightningModule):
    """A line with noise, trained on six batches an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        nn.init.constant_(self.line.weight, 0.5)
        nn.init.constant_(self.line.bias, 0.0)
        self.lr = 0.1

    def training_step(self, batch, batch_idx):
        loss = (self.line(batch[0] + torch.rand(2, 1)) - 1).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(12.0)[:, None] / 12), 2, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class Validated(Line):
    """With three batches of a validation."""

    def validation_step(self, batch, batch_idx):
        self.log("error", self.line(batch[0]).abs().mean())

    test_step = validation_step

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(3, 1)))

    test_dataloader = val_dataloader


class ByHand(Line):
    """Optimizes by hand, and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


class At(pl.Callback):
    """Calls a function at a moment.

    Args:
        moment: Such as "batch 1", "end of batch 1", "check 0" (a batch of the check before
            training), "validation 0", "test 0" or "end of epoch 0"; an expression for several.
        function: Called with the trainer.
    """

    def __init__(self, moment: str, function: Callable) -> None:
        self.moment = moment
        self.function = function

    def reached(self, trainer: pl.Trainer, moment: str) -> None:
        if re.fullmatch(self.moment, moment):
            self.function(trainer)

    def on_train_batch_start(self, trainer, *_):
        self.reached(trainer, f"batch {trainer.global_step + 1}")

    def on_train_batch_end(self, trainer, *_):
        self.reached(trainer, f"end of batch {trainer.global_step}")

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, *_):
        what = "check" if trainer.sanity_checking else "validation"
        self.reached(trainer, f"{what} {batch_idx}")

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, *_):
        self.reached(trainer, f"test {batch_idx}")

    def on_train_epoch_end(self, trainer, *_):
        self.reached(trainer, f"end of epoch {trainer.current_epoch}")


def press_ctrl_c(trainer: pl.Trainer) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail(trainer: pl.Trainer) -> None:
    raise RuntimeError("as it was asked to")


def end(trainer: pl.Trainer) -> None:
    trainer.should_stop = True


class Announces(pl.Callback):
    """Prints that a batch begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        print(f"batch {trainer.global_step + 1}")


def trainer(folder: Path, *callbacks: pl.Callback, **options) -> pl.Trainer:
    """Return a trainer of one epoch, with an ExactResume."""
    if options.pop("reseeds", True):
        torch.manual_seed(1)
    of_resume = {name: options.pop(name) for name in OF_RESUME if name in options}
    resume = ExactResume(folder, **{"seed": 1, "every_n_minutes": 0} | of_resume)
    settings = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    settings |= {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1}
    return pl.Trainer(**settings | options, callbacks=[*callbacks, resume])


def resume_of(trainer: pl.Trainer) -> ExactResume:
    return next(each for each in trainer.callbacks if isinstance(each, ExactResume))


def fit(folder: Path, *callbacks: pl.Callback, model=None, **options) -> pl.LightningModule:
    """Train, as in a new process; return the model."""
    earlier_fits._finished.clear()
    model = model or Line()
    trainer(folder, *callbacks, **options).fit(model)
    return model


@contextmanager
def interrupted(status: int = 130) -> Iterator[None]:
    """Expect that a training is stopped by Ctrl-C."""
    with pytest.raises(SystemExit) as stopped:
        yield
    assert stopped.value.code == status


@contextmanager
def failed() -> Iterator[None]:
    """Expect that a training fails as it was asked to."""
    with pytest.raises(RuntimeError, match="as it was asked to"):
        yield


def saved(folder: Path) -> dict[int, str]:
    """Return when each checkpoint in a folder was saved, by step."""
    entries = [
        checkpoint_file.read(path)[checkpoint_file.ENTRIES_KEY]
        for path in sorted(folder.glob("step-*.ckpt"))
    ]
    return {each["step"]: each["resume_point"] for each in entries}


def equal(one: pl.LightningModule, other: pl.LightningModule) -> bool:
    """Return whether two models have the same weights, bit for bit."""
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


class TurnedClock(pl.Callback):
    """A clock that moves a minute with each batch; to save one checkpoint takes some seconds."""

    def __init__(self, monkeypatch, slow: str, seconds: float) -> None:
        now = [1000.0]
        clock = SimpleNamespace(monotonic=lambda: now[0])
        monkeypatch.setattr(stopping, "time", clock)
        monkeypatch.setattr(run, "time", clock)
        self.tick = lambda seconds: now.__setitem__(0, now[0] + seconds)
        self.slow, self.seconds = slow, f"{seconds}"

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if f"{trainer.global_step}" == self.slow:
            self.tick(float(self.seconds))

    def on_load_checkpoint(self, *_):
        """Only what may be loaded is asked for."""

    def on_train_batch_start(self, *_):
        self.tick(60)


def kill(folder: Path, model: type[Line] = Line) -> None:
    """Leave a run as if it was killed in step 6: its newest checkpoint is of step 3."""
    with failed():
        fit(folder, At("batch 6", fail), model=model(), every_n_steps=3)
    assert saved(folder) == {3: "batch"}


class Scaled(Line):
    """Multiplies the loss by what a variable of the environment says."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float(os.environ["FACTOR"])


class Stream:
    """Six batches, which are others each time."""

    count = 0

    def __iter__(self):
        for _ in range(6):
            Stream.count += 1
            yield [torch.full((2, 1), Stream.count / 100)]


class Streamed(Validated):
    """Trains on a stream that cannot be saved."""

    def train_dataloader(self):
        return Stream()
