"""ExactResume in trainings of a few batches: when it saves and stops, what it says and leaves.

They run in this process and take some hundredths of a second each.
"""

import os
import signal
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.tuner import Tuner
from torch import distributed, nn
from torch._dynamo import config as dynamo
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sagemaker_lightning import ExactResume, SageMakerEnvironment, UserError
from sagemaker_lightning.callbacks import divergence
from sagemaker_lightning.contract import shutdown
from sagemaker_lightning.resume import (
    agreement,
    callback,
    checkpoint_dir,
    checkpoint_file,
    drilled_run,
    folder_lock,
    verification,
)
from sagemaker_lightning.resume.best_model import BestModel
from sagemaker_lightning.state import batch_digest

OF_RESUME = ("seed", "every_n_steps", "keep", "exact", "other_settings", "strict", "settings")
OF_RESUME += ("saves", "environment", "stop")


class Line(pl.LightningModule):
    """A line with noise, trained on four batches an epoch.

    Args:
        factor: What multiplies the loss.
    """

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        nn.init.constant_(self.line.weight, 0.5)
        nn.init.constant_(self.line.bias, 0.0)
        self.lr = 0.1
        self.factor = factor

    def training_step(self, batch, batch_idx):
        loss = (self.line(batch[0] + torch.rand(2, 1)) - 1).square().mean()
        self.log("loss", loss, on_step=True)
        return self.factor * loss

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(8.0)[:, None] / 8), 2, shuffle=True)

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

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__(factor)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


class At(pl.Callback):
    """Calls a function when a step's batch begins or ends."""

    def __init__(self, step: int, function: Callable, begins: bool = False) -> None:
        self.step = step
        self.function = function
        self.begins = begins

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.begins and trainer.global_step + 1 == self.step:
            self.function()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not self.begins and trainer.global_step == self.step:
            self.function()


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise RuntimeError("as it was told")


def trainer(folder: Path, *callbacks: pl.Callback, **options) -> pl.Trainer:
    """Return a trainer of one epoch, with an ExactResume."""
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
    callback._finished.clear()
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
    """Expect that a training fails as it was told to."""
    with pytest.raises(RuntimeError, match="as it was told"):
        yield


def saved(folder: Path) -> dict[int, str]:
    """Return when each checkpoint in a folder was saved, by step."""
    entries = [
        checkpoint_file.read(path)[checkpoint_file.ENTRIES_KEY]
        for path in sorted(folder.glob("step-*.ckpt"))
    ]
    return {each["step"]: each["kind"] for each in entries}


def equal(one: pl.LightningModule, other: pl.LightningModule) -> bool:
    """Return whether two models have the same weights, bit for bit."""
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


# Stopped and resumed ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Line:
    """A model that was trained without an interruption."""
    return fit(tmp_path_factory.mktemp("alone"))


class Announces(pl.Callback):
    """Prints that a batch begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        print(f"batch {trainer.global_step + 1}")


AS_IT_WAS = (
    "the state is as it was saved, and the next batch the one that was to come, bit for bit"
)


def test_a_run_that_is_stopped_twice_ends_with_the_same_weights(tmp_path, capfd, alone):
    """The last time with the same trainer. Each result is said as soon as it is known."""
    with interrupted():
        fit(tmp_path, At(1, press_ctrl_c))
    again = trainer(tmp_path, At(3, press_ctrl_c), Announces())
    capfd.readouterr()
    with interrupted():
        again.fit(Line())
    assert capfd.readouterr().out.splitlines() == [
        f"resuming from step 1: {tmp_path / 'step-000000001.ckpt'}",
        "batch 2",
        f"resumed at step 1: {AS_IT_WAS}",
        "batch 3",
    ]
    again.fit(model := Line())
    assert equal(model, alone)
    assert saved(tmp_path) == {1: "batch", 3: "batch", 4: "epoch"}
    result = {"identical": True, "steps": 0, "said": AS_IT_WAS}
    assert resume_of(again).resumes == [{"step": 1} | result, {"step": 3} | result]


def kill(folder: Path, model: type[Line] = Line, step: int = 4) -> None:
    """Leave a run as if it was killed in a step: its newest checkpoint is of step 2."""
    with failed():
        fit(folder, At(step, fail, begins=True), model=model(), every_n_steps=2)
    assert saved(folder) == {2: "batch"}


def end(folder: Path, step: int) -> pl.Callback:
    """Return a callback that ends the training at a step."""
    return At(step, lambda: setattr(ends.trainer, "should_stop", True))


class Ends(pl.Callback):
    """Ends the training at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == self.step


@pytest.mark.parametrize(
    ("last", "options", "says"),
    [
        (6, {}, "the next 2 steps are those of the interrupted run, bit for bit"),
        (3, {}, "the next step is that of the interrupted run, bit for bit"),
        (6, {"other_settings": True}, ""),
    ],
)
def test_steps_that_are_done_again_are_compared(tmp_path, capfd, last, options, says):
    """As many as there are until the training ends; none if the run may be another one."""
    kill(tmp_path, step=5)
    capfd.readouterr()
    fit(tmp_path, Ends(last), Announces(), max_epochs=2, **options)
    lines = [line for line in capfd.readouterr().out.splitlines() if "resumed at" in line]
    assert lines == ([f"resumed at step 2: {says}"] if says else [])
