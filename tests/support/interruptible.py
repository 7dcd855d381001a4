"""A job that records all it does, so that tests can interrupt and compare it.

The model and the data are a user's own. Three things are random: the order (a DataLoader that
shuffles), the augmentation (in workers, too) and dropout. A resumed run must continue batch norm,
an average of the weights, a schedule, early stopping and epoch-level metrics.
"""

import hashlib
import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import numpy as np
import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

try:
    from pytorch_lightning.callbacks import EMAWeightAveraging
except ImportError:  # Lightning 2.5 has no such callback: its runs (`make compat`) average nothing

    class EMAWeightAveraging(Callback):
        def __init__(self, decay: float) -> None:
            self.decay = decay


class Noisy(Dataset):
    """`size` samples whose augmentation draws from each of the three generators."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(size, 6, generator=generator)
        self.labels = (self.inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        noise = torch.randn(6) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return self.inputs[index] + noise, self.labels[index], index


class Data(LightningDataModule):
    """`size` noisy samples in shuffled batches.

    Args:
        size: Training samples.
        batch_size: Samples of a rank's batch.
        num_workers: Data workers.
        persistent: Whether the workers stay from epoch to epoch.
        slow: Which hook takes half a minute, "prepare_data" or "setup".
    """

    def __init__(
        self,
        size: int = 43,
        batch_size: int = 4,
        num_workers: int = 0,
        persistent: bool = False,
        slow: str = "",
    ) -> None:
        super().__init__()
        self.slow = slow
        self.size = size
        self.batch_size = batch_size
        self.workers = {"num_workers": num_workers, "persistent_workers": persistent}

    def prepare_data(self) -> None:
        self._wait("prepare_data")

    def setup(self, stage: str) -> None:
        self._wait("setup")

    def _wait(self, hook: str) -> None:
        if self.slow == hook:
            print(f"IN {hook}", flush=True)
            time.sleep(30)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Noisy(self.size), self.batch_size, shuffle=True, **self.workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Noisy(18), self.batch_size, **self.workers)


class Model(LightningModule):
    """A classifier with batch norm and dropout.

    Each step, validation and epoch becomes a line of events-RANK.jsonl.

    Args:
        schedule: "onecycle" (by step), "plateau" (by validation loss), "step" (by epoch) or "none".
        sleep: Seconds that a step takes.
        val_sleep: Seconds that a validation step takes.
    """

    def __init__(
        self, schedule: str = "onecycle", sleep: float = 0.0, val_sleep: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = nn.Sequential(
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, 8),
            nn.Tanh(),
            nn.Linear(8, 2),
        )
        self.mean = MeanMetric()
        self.schedule = schedule
        self.sleep = sleep
        self.val_sleep = val_sleep

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        inputs, labels, index = batch
        time.sleep(self.sleep)
        loss = nn.functional.cross_entropy(self.network(inputs), labels)
        self.mean(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if batch_idx % 3 == 0:
            self.log("third", loss * 2, on_step=True, on_epoch=True, reduce_fx="max")
        self.note(
            "step",
            self.current_epoch,
            batch_idx,
            loss.item(),
            self.lr(),
            inputs.sum().item(),
            sorted(index.tolist()),
        )
        return loss

    def validation_step(self, batch, batch_idx: int) -> None:
        inputs, labels, _ = batch
        if self.trainer.sanity_checking:
            print("IN sanity check", flush=True)
        time.sleep(self.val_sleep)
        loss = nn.functional.cross_entropy(
            self.network(inputs + torch.randn_like(inputs) * 0.01), labels
        )
        self.log("val_loss", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            value = self.trainer.callback_metrics.get("val_loss", torch.tensor(0.0)).item()
            self.note("val", self.current_epoch, self.global_step, value)

    def on_train_epoch_end(self) -> None:
        """Write down the metrics of the epoch."""
        names = ("loss_epoch", "mean", "third_epoch")
        self.note(
            "epoch",
            self.current_epoch,
            self.global_step,
            *(float(self.trainer.callback_metrics.get(name, -1.0)) for name in names),
        )

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if self.schedule == "onecycle":
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=400)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }
        if self.schedule == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, factor=0.5, threshold=0.1
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }
        if self.schedule == "step":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]
        return optimizer

    def lr(self) -> float:
        """Return the learning rate."""
        return self.trainer.optimizers[0].param_groups[0]["lr"]

    def note(self, event: str, epoch: int, position: int, *values: object) -> None:
        """Write a line."""
        with Path(f"events-{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([event, epoch, position, *values]) + "\n")


class Wider(Model):
    """A model with other shapes."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.network[0] = nn.Linear(6, 20)
        self.network[1] = nn.BatchNorm1d(20)
        self.network[4] = nn.Linear(20, 8)


class Average(EMAWeightAveraging):
    """An average of the weights that soon differs from them."""

    def __init__(self) -> None:
        super().__init__(decay=0.8)


def weights(model: Path) -> str:
    """Return the hash of the weights in a model.pt."""
    state = torch.load(model, weights_only=True)
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].numpy().tobytes())
    return digest.hexdigest()[:16]


def events(folder: Path, rank: int = 0) -> dict[str, list]:
    """Return what a rank did, by kind, epoch and position.

    AssertionError: something was done twice, with different results.
    """
    recorded: dict[str, list] = {}
    for line in (folder / f"events-{rank}.jsonl").read_text().splitlines():
        event, epoch, position, *values = json.loads(line)
        key = f"{event} {epoch} {position}"
        assert recorded.setdefault(key, values) == values, (key, recorded[key], values)
    return recorded


def main() -> None:
    """Train with the command line's flags; LIMIT_FILES, if set, limits the size of files."""
    from app import train

    if limit := os.environ.get("LIMIT_FILES"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    train.main()


if __name__ == "__main__":
    main()
