"""A model and data of a user who knows nothing of this project.

The model has no num_classes and no network, the data have no test set.
"""

import time

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Data(pl.LightningDataModule):
    def __init__(self, size: int = 64):
        super().__init__()
        self.size = size

    def train_dataloader(self):
        images = torch.randn(self.size, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(images, (images.sum(1) > 0).long()), batch_size=8)

    def val_dataloader(self):
        return self.train_dataloader()


class Model(pl.LightningModule):
    def __init__(self, width: int = 3):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
        )

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Slow(Model):
    """A step takes a tenth of a second, which leaves the processors to others."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)


class Shares(Model):
    def __init__(
        self,
        share: float | int = 0.5,
        shares: list[float | int] = (),
        name: str | float | int = "",
        rate: float = 0.1,
    ):
        super().__init__()
