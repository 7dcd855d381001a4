"""Chance, for the whole of a run: each step's and each sample's draws are those of (seed, epoch, position)."""

from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import CombinedLoader

from sagemaker_lightning.compat import lightning_loaders
from sagemaker_lightning.compat.lightning_loops import combined_loader
from sagemaker_lightning.compat.random_generators import without_entropy
from sagemaker_lightning.data.deterministic import exact, of_class
from sagemaker_lightning.data.epoch_loaders import Drawn, Placed
from sagemaker_lightning.data.seeded_indices import seed_all, unseeded


class Chance(Callback):
    """Seeds every step, and makes the DataLoaders' order and samples functions of seed, epoch and position.

    Args:
        seed: What decides all; None for another one each time.
        share: Whether the ranks share the batches of a DataLoader, which else has a sampler of its own for that.
    """

    def __init__(self, seed: int | None, share: bool = True) -> None:
        self.seed = seed
        self.share = share
        self.loaders = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Agree on a seed, and have exact loaders made of those of the data module or the model."""
        if stage != "fit":
            return
        self.seed = trainer.strategy.broadcast(
            torch.initial_seed() if self.seed is None else self.seed
        )
        without_entropy(unseeded.bits)
        lightnings = lightning_loaders.lightnings_preparing(trainer)

        def prepared(dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
            return self._exact(trainer, lightnings(dataloader, shuffle, mode), mode)

        lightning_loaders.prepare_by(trainer, prepared)

    def stand_aside(self, trainer: Trainer) -> None:
        """Leave the loaders to Lightning."""
        if lightning_loaders.prepare_by_lightning(trainer):
            lightning_loaders.share_by_sampler(trainer, self.share)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn before training."""
        seed_all("fit", self.seed, trainer.global_rank)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn before the first epoch."""
        seed_all("start", self.seed, trainer.global_rank)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn before the first batch, also from the training data."""
        if isinstance(loader := combined_loader(trainer), Placed):
            loader.epoch_begins(trainer.current_epoch)
        seed_all("epoch", self.seed, trainer.current_epoch, trainer.global_rank)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed dropout and the like."""
        step = (
            trainer.fit_loop.epoch_loop.batch_idx
        )  # a step that draws batches itself is told of another one
        seed_all("step", self.seed, trainer.current_epoch, step, trainer.global_rank)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn after the last batch."""
        seed_all("end", self.seed, trainer.current_epoch, trainer.global_rank)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn before the first batch."""
        seed_all("validation", self.seed, trainer.global_step, trainer.global_rank)

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Seed what a validation step draws."""
        seed_all(
            "val", self.seed, trainer.global_step, dataloader_idx, batch_idx, trainer.global_rank
        )

    def together(self, trainer: Trainer, loader: CombinedLoader, kind: str) -> None:
        """Have the loaders of an epoch begin where it does, and each batch have a seed of its own."""
        loader.__class__ = of_class(Placed if kind == "train" else Drawn, type(loader))
        loader.seed = (self.seed, kind)
        loader.rank = trainer.global_rank
        loader.key = lambda: (self.seed, kind, trainer.global_step, trainer.global_rank)
        self.loaders[kind] = []
        if kind == "train":
            loader.prepare()

    def _exact(self, trainer: Trainer, loader: Any, stage: RunningStage) -> Any:
        """Return a loader made exact."""
        kind = {RunningStage.TRAINING: "train", RunningStage.TESTING: "test"}.get(stage, "val")
        if stage == RunningStage.PREDICTING:
            return loader
        ranks = (
            {"rank": trainer.global_rank, "world_size": trainer.world_size} if self.share else {}
        )
        made = self.loaders.setdefault(kind, [])
        number = [len(made)] if made and kind == "train" else []
        made.append(loader)
        return exact(loader, self.seed, kind, *number, **ranks)[0]
