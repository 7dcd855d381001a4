"""A quick model and data for the tests of several nodes.

Each rank records what it saw. The labels of the data are the samples' numbers. The model has no
batch norm, so that N ranks compute what one does.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import nn

from app.data import ResidentDataModule


class Counted(ResidentDataModule):
    """`samples` images of noise, [N, 3, 8, 8], numbered by their labels."""

    name = "counted"
    classes = tuple("0123456789")
    flip = False
    mean = (0.5,) * 3
    std = (0.25,) * 3

    def __init__(self, samples: int = 203, val_split: int | float = 20, **kwargs) -> None:
        super().__init__(val_split=val_split, **kwargs)
        self.samples = samples

    def prepare_data(self) -> None:
        folder = Path(os.environ.get("SM_OUTPUT_DATA_DIR", "."))
        with (folder / "prepared").open("a") as file:
            file.write("prepared\n")

    def load(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return images, uint8 [N, 3, 8, 8], and their numbers, int64 [N]."""
        size = self.samples if train else 30
        images = np.random.RandomState(int(train)).randint(0, 256, (size, 3, 8, 8)).astype(np.uint8)
        return images, np.arange(size)


class Probe(LightningModule):
    """Two layers; each rank's samples and losses go to probe-RANK.json.

    Args:
        fail_at: Step at which `fail_rank` raises.
        sleep: Seconds that a step takes.
    """

    def __init__(self, fail_at: int = -1, fail_rank: int = 1, sleep: float = 0.0) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 10))
        self.fail_at = fail_at
        self.fail_rank = fail_rank
        self.sleep = sleep
        self.seen = []

    def training_step(
        self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        images, numbers = batch
        time.sleep(self.sleep)
        if self.global_step == self.fail_at and self.global_rank == self.fail_rank:
            raise RuntimeError("the probe fails, as it was asked to")
        loss = nn.functional.cross_entropy(self.network(images), numbers % 10)
        self.seen.append([numbers.tolist(), loss.item()])
        return loss

    def on_train_start(self) -> None:
        """Print that training has begun, and over which network."""
        names = ("MASTER_PORT", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        print("TRAINING", *(f"{name}={os.environ.get(name)}" for name in names), flush=True)

    def on_train_end(self) -> None:
        """Write the file of what this rank has seen."""
        folder = Path(os.environ.get("SM_OUTPUT_DATA_DIR", "."))
        (folder / f"probe-{self.global_rank}.json").write_text(json.dumps(self.seen))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum, which is linear in the gradient."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
