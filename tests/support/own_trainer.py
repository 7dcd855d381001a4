"""Scripts with a Trainer of their own, written by readers of Lightning's documentation.

    python own_trainer.py CASE

A script prints the digest of all weights at its end. At STOP_AT and KILL_AT, as EPOCH:BATCH, a
model sends its own process a signal (strangers.py).
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, WandbLogger
from pytorch_lightning.tuner import Tuner
from strangers import interrupt
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    random_split,
)
from torchmetrics import MaxMetric
from torchmetrics.classification import BinaryAccuracy

from sagemaker_lightning import ExactResume, SageMakerEnvironment, report_failures


class Noisy(Dataset):
    def __len__(self) -> int:
        return 43

    def __getitem__(self, index: int):
        return torch.tensor([index / 43, 1.0]) + 0.1 * torch.randn(2), torch.tensor([index % 2.0])


class Classifier(pl.LightningModule):
    """A model with dropout, batch norm, a metric and a schedule."""

    def __init__(self, lr: float = 0.05, batch_size: int = 4, name: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.batch_size = batch_size
        self.name = name
        self.network = nn.Sequential(
            nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )

    def step(self, batch):
        inputs, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(self.network(inputs), labels)

    def training_step(self, batch, batch_idx):
        interrupt(f"{self.name}{self.current_epoch}:{batch_idx}")
        loss = self.step(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.network(batch[0])

    def train_dataloader(self):
        return DataLoader(Noisy(), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Noisy(), batch_size=8)

    test_dataloader = predict_dataloader = val_dataloader

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Adversarial(pl.LightningModule):
    """The documentation's GAN: two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(
            nn.Linear(2, 8), nn.Dropout(0.2), nn.LeakyReLU(0.2), nn.Linear(8, 1)
        )

    def loss(self, points, real: bool):
        answer = self.discriminator(points)
        return nn.functional.binary_cross_entropy_with_logits(
            answer, torch.full_like(answer, float(real))
        )

    def training_step(self, batch, batch_idx):
        interrupt(f"{self.current_epoch}:{batch_idx}")
        points, _ = batch
        first, second = self.optimizers()
        fake = self.generator(torch.randn(len(points), 3))
        self.toggle_optimizer(first)
        loss = self.loss(fake, True)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        other = (self.loss(points, True) + self.loss(fake.detach(), False)) / 2
        second.zero_grad()
        self.manual_backward(other)
        second.step()
        self.untoggle_optimizer(second)
        self.log_dict({"g_loss": loss, "d_loss": other}, prog_bar=True)

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.generator.parameters(), 0.01),
            torch.optim.Adam(self.discriminator.parameters(), 0.01),
        ], []


class Blobs(pl.LightningDataModule):
    """Splits its points in setup, with no seed of its own."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        points = torch.randn(43, 2)
        labels = (points.sum(1, keepdim=True) > 0).float()
        self.train, self.val = random_split(TensorDataset(points, labels), [35, 8])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 4)


class Bare(Classifier):
    """Gets its data from a data module or a loader."""

    train_dataloader = val_dataloader = test_dataloader = pl.LightningModule.val_dataloader


class ByHand(Bare):
    """Steps every third batch, clips, keeps metrics and a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accuracy = BinaryAccuracy()
        self.best = MaxMetric()
        self.history: list[float] = []

    def training_step(self, batch, batch_idx):
        interrupt(f"{self.current_epoch}:{batch_idx}")
        loss = self.step((batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1])) / 3
        self.manual_backward(loss)
        self.accuracy(self.network(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        if (batch_idx + 1) % 3 == 0 or self.trainer.is_last_batch:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def on_validation_epoch_end(self):
        self.best(self.trainer.callback_metrics["val_loss"])
        self.history.append(float(self.best.compute()))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint):
        self.history = checkpoint["history"]


def trainer(
    job: SageMakerEnvironment, folder: str = "", seed: int | None = 42, **options
) -> pl.Trainer:
    callbacks = [
        *options.pop("callbacks", []),
        ExactResume(job.checkpoint_dir / folder, seed=seed, every_n_minutes=0),
    ]
    settings = {"max_epochs": 3, "accelerator": "cpu", "devices": 1, "enable_model_summary": False}
    return pl.Trainer(
        **settings
        | {"enable_progress_bar": False, "callbacks": callbacks, "logger": False}
        | options
    )


def plain(job) -> list:
    made = trainer(job)
    model = Classifier()
    made.fit(model)
    return [model]


def adversarial(job) -> list:
    made = trainer(job)
    model = Adversarial()
    made.fit(model, DataLoader(Noisy(), 4, shuffle=True, num_workers=1))
    return [model]


def loaders(job) -> list:
    """Train with the user's own loaders, loggers and checkpoints."""
    train, val = random_split(Noisy(), [35, 8], torch.Generator().manual_seed(1))
    best = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    callbacks = [best, EarlyStopping("val_loss", patience=5), LearningRateMonitor()]
    made = trainer(
        job, callbacks=callbacks, logger=CSVLogger("curves", version=0), log_every_n_steps=1
    )
    model = Classifier()
    made.fit(model, DataLoader(train, 4, shuffle=True), DataLoader(val, 4))
    print(
        "BEST", best.best_model_path.removeprefix(str(Path.cwd())), f"{best.best_model_score:.6f}"
    )
    return [model]


def tracked(job) -> list:
    """Log to a server of MLflow and to W&B besides a file."""
    loggers = [
        CSVLogger("curves", version=0),
        MLFlowLogger(os.environ["EXPERIMENT"], tracking_uri=os.environ["TRACKING"]),
        WandbLogger(project="mine", offline=True),
    ]
    devices = int(os.environ["DEVICES"])
    settings = {"log_every_n_steps": 1, "callbacks": [LearningRateMonitor()], "devices": devices}
    made = trainer(job, logger=loggers, strategy="ddp" if devices > 1 else "auto", **settings)
    model = Classifier()
    made.fit(model)
    made.test(model, verbose=False)
    return [model]


def folds(job) -> list:
    """Call a function with a Trainer twice, with one loader and one seed for each call."""
    loader = DataLoader(Noisy(), 4, shuffle=True)
    models = []
    for fold in range(2):
        made = trainer(job, f"fold-{fold}", seed=fold)
        models.append(Classifier(name=f"{fold}/"))
        made.fit(models[-1], loader)
    return models


def around(job) -> list:
    """Validate, test and predict before and after the training."""
    made = trainer(job)
    model = Classifier()
    made.validate(model, verbose=False)
    made.predict(model)
    made.fit(model)
    made.validate(model, verbose=False)
    made.test(model, verbose=False)
    made.predict(model)
    return [model]


def longer(job) -> list:
    """Continue the training with a second fit."""
    made = trainer(job, max_epochs=2)
    model = Classifier()
    made.fit(model)
    made.fit_loop.max_epochs = 3
    made.fit(model)
    return [model]


def tuned(job) -> list:
    """Search for the learning rate and the batch size before training."""
    made = trainer(job)
    model = Classifier()
    tuner = Tuner(made)
    print("LR", tuner.lr_find(model, num_training=20).suggestion())
    print("SIZE", tuner.scale_batch_size(model, max_trials=2))
    made.fit(model)
    return [model]


def overfit(job) -> list:
    made = trainer(job, overfit_batches=5)
    model = Classifier()
    made.fit(model)
    return [model]


def by_hand(job) -> list:
    """Optimize by hand, with a data module that draws a split."""
    made = trainer(job, logger=CSVLogger("curves", version=0), log_every_n_steps=1)
    model = ByHand()
    made.fit(model, datamodule=Blobs())
    print("BEST", model.history)
    return [model]


def two_ranks(job) -> list:
    made = trainer(job, devices=2, strategy="ddp")
    model = Classifier()
    made.fit(model)
    return [model]


def three_ranks(job) -> list:
    made = trainer(job, devices=3, strategy="ddp_find_unused_parameters_true")
    model = Adversarial()
    made.fit(model, DataLoader(Noisy(), 4, shuffle=True))
    time.sleep(made.global_rank)  # work after training, which takes other ranks longer than rank 0
    return [model]


def main() -> None:
    job = SageMakerEnvironment.read()
    torch.seed()
    with report_failures(job):
        models = globals()[sys.argv[1]](job)
        state = [
            value.numpy().tobytes() for model in models for value in model.state_dict().values()
        ]
        print("WEIGHTS", hashlib.sha256(b"".join(state)).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
