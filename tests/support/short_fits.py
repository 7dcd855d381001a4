"""Trainings in this process that take some hundredths of a second, and what happens in them."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning import ExactResume
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.same_run import earlier_fits

OF_RESUME = "every_n_steps", "keep", "other_settings", "parts", "saves", "seed", "strict"


def trainer(folder: Path, *callbacks: pl.Callback, **options) -> pl.Trainer:
    """Return a trainer of two epochs, with an ExactResume."""
    torch.manual_seed(1)
    resume = {name: options.pop(name) for name in OF_RESUME if name in options}
    settings = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    settings |= {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    settings["default_root_dir"] = folder
    resume = ExactResume(folder, **{"seed": 1, "every_n_minutes": 0} | resume)
    return pl.Trainer(**settings | options, callbacks=[*callbacks, resume])


class Noted(pl.LightningModule):
    """A model that notes, as state of its own, what happens in four batches of an epoch.

    At a moment, such as "batch 0:2", it may press Ctrl-C, fail, or end the training.

    Args:
        stop: When it presses Ctrl-C.
        fails: When it fails.
        ends: When it ends the training.
    """

    def __init__(self, stop: str = "", fails: str = "", ends: str = "") -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.validated = 0
        self.stop = stop
        self.fails = fails
        self.ends = ends
        self.events: list[str] = []

    def note(self, event: str) -> None:
        """Note that something happens."""
        self.events.append(event)
        if event == self.stop:
            os.kill(os.getpid(), signal.SIGINT)
        if event == self.fails:
            raise RuntimeError("as it was asked to")
        if event == self.ends:
            self.trainer.should_stop = True

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(8, 2)), 2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(4, 2)), 2)

    def on_train_start(self):
        assert self.trainer.training
        self.line.weight.data *= 2
        self.note("start")

    def on_train_epoch_start(self):
        self.note(f"epoch {self.current_epoch}")

    def training_step(self, batch, batch_idx):
        self.note(f"batch {self.current_epoch}:{batch_idx}")
        loss = (self.line(batch[0] + torch.rand(2, 2)) - 1).square().mean()
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.note(f"loss {loss.item()} at {rate}")
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.note(f"validation {self.current_epoch}:{batch_idx}")
        self.validated += 1
        self.note(f"validated {self.validated}")
        self.log("error", self.line(batch[0]).mean(), on_step=True, on_epoch=True)

    def on_train_epoch_end(self):
        self.note(f"end {self.current_epoch}")

    def on_train_end(self):
        self.note("all")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@contextmanager
def interrupted() -> Iterator[None]:
    """Expect that a training is interrupted or fails; the next one is as in a new process."""
    with pytest.raises((SystemExit, RuntimeError), match="130|as it was asked to"):
        yield
    as_in_a_new_process()


def as_in_a_new_process() -> None:
    """Forget which trainings have ended here."""
    earlier_fits._finished.clear()


def training(make: Callable[..., Noted], **options) -> Callable[..., Noted]:
    """Return a function that makes a model, trains it in a folder, and returns it.

    Args:
        make: Makes the model; it is given the moment at which that is interrupted.
        options: Those of `trainer`.
    """

    def train(folder: Path, **moments: str) -> Noted:
        made = trainer(folder, **options)
        made.fit(model := make(**moments))
        return model

    return train


def alone_and_resumed(train: Callable, folder: Path, *stops: str) -> tuple:
    """Return what a training ends with if it is left alone, and if it is stopped at each moment.

    Args:
        train: Trains in a folder up to a moment, `stop`, if it is given one.
        folder: Where both have a folder.
        stops: When each attempt but the last one is interrupted.
    """
    alone = train(folder / "alone")
    as_in_a_new_process()
    for stop in stops:
        with interrupted():
            train(folder / "run", stop=stop)
    return alone, train(folder / "run")


def weights(model: pl.LightningModule) -> list[float]:
    """Return all values of a model's state dict."""
    return [number for value in model.state_dict().values() for number in value.flatten().tolist()]


def saved(folder: Path) -> dict[int, str]:
    """Return when each checkpoint in a folder was saved, by step."""
    entries = [
        checkpoint_file.read(path)[checkpoint_file.ENTRIES_KEY]
        for path in sorted(folder.glob("step-*.ckpt"))
    ]
    return {each["step"]: each["resume_point"] for each in entries}
