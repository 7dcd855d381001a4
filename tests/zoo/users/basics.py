"""A classifier of points, as in Lightning's introduction.

Most callbacks, flags and loaders are tried on it.
"""

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    """Points around three centres, with noise that is drawn again at each access."""

    def __init__(self, size: int = 40, noise: float = 0.3) -> None:
        self.noise = noise
        self.targets = torch.arange(size) % 3
        self.centres = torch.tensor([[0.0, 1.0], [1.0, 0.0], [-1.0, -1.0]])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index):
        target = self.targets[index]
        return self.centres[target] + self.noise * torch.randn(2), target


class BlobsData(LightningDataModule):
    """Shuffled training batches, and a validation set."""

    def __init__(self, batch_size: int = 4, num_workers: int = 0, size: int = 40):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.train_set = Blobs(self.hparams.size)
        self.val_set = Blobs(12, noise=0.0)

    def train_dataloader(self):
        return DataLoader(
            self.train_set,
            batch_size=self.hparams.batch_size,
            shuffle=True,
            num_workers=self.hparams.num_workers,
        )

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=6)


class Classifier(LightningModule):
    """A small network with batch norm and dropout."""

    def __init__(self, hidden: int = 16, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Linear(2, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2)
        )
        self.head = nn.Linear(hidden, 3)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
