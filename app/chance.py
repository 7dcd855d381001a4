"""Chance, for the whole of a run: each step's and each sample's draws are those of (seed, epoch, position)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import CombinedLoader

from app.exact import exact, position, seed_all


class Chance(Callback):
    """Seeds every step, and makes the DataLoaders' order and samples functions of seed, epoch and position.

    Args:
        seed: What decides all; None for another one each time.
        share: Whether the ranks share the batches of a DataLoader, which else has a sampler of its own for that.
    """

    def __init__(self, seed: int | None, share: bool = True) -> None:
        self.seed, self.share = seed, share

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Agree on a seed, and put exact loaders in place of those that the data module or the model makes."""
        if stage != "fit":
            return
        self.seed = trainer.strategy.broadcast(torch.initial_seed() if self.seed is None else self.seed)
        validation = trainer.fit_loop.epoch_loop.val_loop
        for loop, kind in ((trainer.fit_loop, "train"), (validation, "val"), (trainer.validate_loop, "val"),
                           (trainer.test_loop, "test")):  # fmt: skip
            loop._data_source.dataloader = partial(self._loaders, trainer, loop._data_source.dataloader, kind)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn before the first batch."""
        seed_all("epoch", self.seed, trainer.current_epoch, trainer.global_rank)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed dropout and the like."""
        seed_all("step", self.seed, trainer.current_epoch, batch_idx, trainer.global_rank)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn before the first batch."""
        seed_all("validation", self.seed, trainer.global_step, trainer.global_rank)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Seed what a validation step draws."""
        seed_all("val", self.seed, trainer.global_step, dataloader_idx, batch_idx, trainer.global_rank)

    def _loaders(self, trainer: Trainer, lightnings, kind: str) -> Any:
        """Return the loaders of a source, made exact."""
        ranks = {"rank": trainer.global_rank, "world_size": trainer.world_size} if self.share else {}
        found = lightnings()
        if kind != "train":
            return _each(found, lambda loader: exact(loader, self.seed, kind, **ranks)[0])
        if isinstance(found, (list, tuple, dict, CombinedLoader)):  # each has a length of its own, and may begin again
            why = "each of them begins anew"
            made = _each(
                found,
                lambda loader: exact(loader, self.seed, kind, position=lambda: (position(trainer)[0], 0), **ranks)[0],
            )
        else:
            made, why = exact(found, self.seed, kind, position=partial(position, trainer), **ranks)
        if why and trainer.is_global_zero:
            print(
                f"warning: the training data is a {type(found).__name__}, and {why}: if the run is resumed within an "
                "epoch, it sees other samples than without an interruption; from an epoch's end on, all is well",
                flush=True,
            )
        return made


def _each(found: Any, change: Callable[[Any], Any]) -> Any:
    """Return loaders, in whatever they are kept, with each of them changed."""
    if isinstance(found, CombinedLoader):
        found.flattened = [change(loader) for loader in found.flattened]
        return found
    if isinstance(found, dict):
        return {name: _each(one, change) for name, one in found.items()}
    return [_each(one, change) for one in found] if isinstance(found, (list, tuple)) else change(found)
