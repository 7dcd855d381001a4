"""Users' code whose state no checkpoint can restore, one class for each way.

The drill tells these ways apart. Some of the classes fail.
"""

import os
import signal
import time
from pathlib import Path
from queue import Queue

import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

CALLS = Queue()  # of a function that counts; no checkpoint has a library's object


class Points(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int):
        return torch.tensor([index / 32, 1.0]) + 0.1 * torch.randn(2), torch.tensor([index % 2.0])


class Urandom(Points):
    """Points with noise from the operating system."""

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        return inputs + os.urandom(1)[0] / 2560, labels


class Data(LightningDataModule):
    """A loader for training and one for validation."""

    points = Points
    collate = None

    def train_dataloader(self):
        return DataLoader(self.points(), 4, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(Points(), 8)


class FromTheSystem(Data):
    """Data whose points have noise from the operating system."""

    points = Urandom


def collate(samples):
    """Join samples, and count in a variable of the module."""
    CALLS.put(1)
    inputs, labels = torch.utils.data.default_collate(samples)
    return inputs + CALLS.qsize() / 10, labels


class Joined(Data):
    """Data whose samples are joined by a function that counts its calls."""

    collate = staticmethod(collate)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


class Counting(Model):
    """Counts its steps in a variable of the module."""

    def training_step(self, batch, batch_idx):
        """Return the loss, which falls as the count rises."""
        CALLS.put(1)
        return super().training_step(batch, batch_idx) / CALLS.qsize()


class Rate(Model):
    """Has a learning rate that depends on a counter of its own."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        calls = map(abs, range(1000))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + next(calls)))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Metric(Model):
    """Logs a metric of its own; no step depends on it."""

    def on_train_epoch_end(self):
        """Log how often this process has trained an epoch."""
        CALLS.put(1)
        self.log("epochs_seen", float(CALLS.qsize()))


class Rows(Model):
    """Writes rows to a file of its own."""

    def training_step(self, batch, batch_idx):
        """Return the loss, and add a row."""
        loss = super().training_step(batch, batch_idx)
        with Path("losses.csv").open("a") as file:
            file.write(f"{self.global_step},{loss.item()}\n")
        return loss


class ReadsItsFile(Model):
    """Counts its steps in a file."""

    def training_step(self, batch, batch_idx):
        """Return the loss, which falls as the file grows."""
        with Path("steps").open("a") as file:
            file.write("x")
        return super().training_step(batch, batch_idx) / Path("steps").stat().st_size


class Failing(Model):
    """Fails in its training step."""

    def training_step(self, batch, batch_idx):
        raise RuntimeError("the third moon is in the wrong house")


class FailsOnResume(Model):
    def on_load_checkpoint(self, checkpoint):
        raise RuntimeError("no such moon")


class Hanging(Model):
    """Takes over the signals, as an event loop in the process does, and then waits for ever."""

    def on_train_start(self):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, lambda *_: time.sleep(10_000))


class Deaf(Model):
    """Ignores all signals."""

    def on_train_start(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Elsewhere(Callback):
    """Writes to a folder of its own."""

    def __init__(self, dirpath: str) -> None:
        self.dirpath = dirpath
