"""Trains a tiny model on a loader of a library's, and interrupts itself where it is asked to.

What each step had is written to `seen.jsonl` in the working folder, and the weights at the end to
`weights.pt`.
"""

import argparse
import hashlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

EPOCHS = 3
SAMPLES = 40
BATCH_SIZE = 4


def sample(number: float) -> Tensor:
    """Return a sample, float32 [2]: its number, and noise from each of the process's generators."""
    noise = torch.rand(1).item() + np.random.rand() + random.random()
    return torch.tensor([float(number), noise])


class Model(pl.LightningModule):
    """Two weights, which depend on the order of all samples.

    Args:
        numbers: Returns a float tensor of a batch.
        set_epoch: Whether it tells the data in which epoch it is, as some libraries ask for.
    """

    def __init__(self, numbers: Callable[[Any], Tensor], set_epoch: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, -0.5]))
        self.numbers = numbers
        self.set_epoch = set_epoch

    def on_train_epoch_start(self) -> None:
        """Tell the dataset which epoch begins."""
        if self.set_epoch:
            self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Leave the batch where it is: on the CPU."""
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Note what the batch has, and return a loss."""
        values = self.numbers(batch).detach().float().contiguous()
        line = {
            "step": self.global_step,
            "epoch": self.current_epoch,
            "batch": batch_idx,
            "first": [round(value, 3) for value in values.flatten().tolist()[:8]],
            "numbers": values.reshape(len(values), -1)[:, 0].tolist(),
            "digest": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
        }
        with Path("seen.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        pair = torch.stack([values.mean(), values.std()]) / SAMPLES
        return ((pair * self.weight).sum() - 1) ** 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer with a state."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Interrupting(pl.Callback):
    """Sends this process a signal after a batch of an epoch, or at its end.

    Args:
        moment: EPOCH:BATCH:SIGNAL; BATCH is `end` for the epoch's end, `begin` for its beginning.
    """

    def __init__(self, moment: str) -> None:
        epoch, self.batch, name = moment.split(":")
        self.epoch = int(epoch)
        self.signal = signal.Signals[name]

    def _arrive(self, trainer: pl.Trainer, batch: object) -> None:
        if trainer.current_epoch == self.epoch and str(batch) == self.batch:
            os.kill(os.getpid(), self.signal)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Interrupt before the first batch."""
        self._arrive(trainer, "begin")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Interrupt after a batch."""
        self._arrive(trainer, args[3])

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Interrupt after the last batch."""
        self._arrive(trainer, "end")


def train(
    loaders: dict[str, Callable[..., Any]],
    numbers: Callable[[Any], Tensor] = lambda batch: batch,
    set_epoch: tuple[str, ...] = (),
) -> None:
    """Train on the loader that the command line names.

    Args:
        loaders: Functions that make a loader of the options `num_workers`, `persistent_workers`.
        numbers: Returns a float tensor of a batch.
        set_epoch: The loaders whose dataset gets the epoch.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=loaders)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--plain", action="store_true", help="as Lightning does, without resume")
    parser.add_argument("--every", type=int, default=3, help="steps between two checkpoints")
    parser.add_argument("--interrupt", help="EPOCH:BATCH:SIGNAL")
    args = parser.parse_args()
    pl.seed_everything(42, workers=True, verbose=False)
    callbacks: list[pl.Callback] = []
    if not args.plain:
        from sagemaker_lightning import ExactResume

        callbacks.append(ExactResume("checkpoints", seed=42, every_n_steps=args.every))
    if args.interrupt:
        callbacks.append(Interrupting(args.interrupt))
    loader = loaders[args.name](num_workers=args.workers, persistent_workers=args.persistent)
    model = Model(numbers, args.name in set_epoch)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_checkpointing=not args.plain,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(model, loader)
    torch.save(model.state_dict(), "weights.pt")
