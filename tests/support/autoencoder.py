"""The autoencoder of Lightning's first page of documentation, on noise instead of MNIST.

    python autoencoder.py

trains it by itself. Nothing here uses anything of ours, except `Interrupted`.
"""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self, hidden: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 3)
        )
        self.decoder = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 28 * 28))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        x = x.view(x.size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Noise(L.LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str):
        self.images = torch.rand(40, 1, 28, 28, generator=torch.Generator().manual_seed(1))

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.images), batch_size=self.batch_size, shuffle=True)


class Interrupted(LitAutoEncoder):
    def on_train_batch_start(self, batch, batch_idx):
        from strangers import interrupt

        interrupt(f"{self.current_epoch}:{batch_idx}")


if __name__ == "__main__":
    L.seed_everything(1)
    folder = os.environ.get("SM_MODEL_DIR", "model")
    checkpoint = ModelCheckpoint(folder, filename="autoencoder")
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[checkpoint], logger=CSVLogger(folder)
    )
    trainer.fit(LitAutoEncoder(hidden=6), datamodule=Noise())
    model = LitAutoEncoder.load_from_checkpoint(f"{folder}/autoencoder.ckpt")
    assert model.hparams.hidden == 6
    print("TRAINED", trainer.global_step, L.__version__)
