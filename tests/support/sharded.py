"""What sharded ranks train: models of several kinds, interrupted and resumed (ranks.py)."""

import hashlib
import math
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning import ExactResume, SageMakerCLI
from sagemaker_lightning.cli import safetensors_files
from sagemaker_lightning.compat import model_parallel

SAMPLES = 96
WIDTH = 12


class Block(nn.Module):
    """Two layers with dropout; `calls` counts, as users' modules do."""

    def __init__(self, width: int = WIDTH, hidden: int = 22) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.1)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return inputs + self.dropout(self.second(torch.relu(self.first(inputs))))


class Moving(nn.Module):
    """Adds a moving mean of its inputs, which each rank has of its own samples, to them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.count += 1
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return inputs + self.mean * self.count / 10


class Network(nn.Module):
    """Blocks between an embedding and a head of the same weights, with batch norm's buffers."""

    def __init__(self, tied: bool = True, buffers: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.moving = Moving() if buffers else nn.Identity()
        self.head = nn.Linear(WIDTH, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.recompute = False

    def forward(self, tokens):
        hidden = self.embedding(tokens).mean(1)
        for block in self.blocks:
            hidden = (
                checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
            )
        return self.head(self.norm(self.moving(hidden)))


def shard(network: Network, mesh: DeviceMesh) -> None:
    """Share a network out: over the mesh's second dimension each block, over the first all."""
    if mesh["tensor_parallel"].size() > 1:
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        for block in network.blocks:
            parallelize_module(block, mesh["tensor_parallel"], plan)
    for block in network.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(network, mesh=mesh["data_parallel"])


def weights_of(model: pl.LightningModule) -> dict[str, Any]:
    """Return the weights, shared out: a state dict has them so, whatever a validation has left."""
    return {name: value for name, value in model.state_dict().items() if "weight" in name}


class Average(pl.Callback):
    """An average of the weights of the user's own, a DTensor for each of them."""

    def __init__(self) -> None:
        self.average = {}

    def on_train_start(self, trainer, pl_module) -> None:
        if not self.average:
            self.average = {
                name: value.detach().clone() for name, value in weights_of(pl_module).items()
            }

    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        for name, value in weights_of(pl_module).items():
            self.average[name].lerp_(value.detach(), 0.1)

    def on_train_end(self, trainer, pl_module) -> None:
        model_parallel.load_whole(pl_module, self.average, strict=False)


class LaterAverage(Average):
    """The same, from the second epoch on: no program has it at its start."""

    def on_train_start(self, trainer, pl_module) -> None:
        pass

    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        if trainer.current_epoch:
            super().on_train_start(trainer, pl_module)
            super().on_train_batch_end(trainer, pl_module)


class SavedAverage(Average):
    """The same, in a state dict."""

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]


class Model(pl.LightningModule):
    """Predicts a class of tokens; it counts, and remembers its losses."""

    def __init__(self, kind: str = "", interruption: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.interruption = interruption
        self.network = None
        self.seen = []
        self.losses = []
        self.automatic_optimization = kind != "two optimizers"

    def configure_model(self) -> None:
        if self.network is not None:
            return
        torch.manual_seed(5 + (self.trainer.global_rank if self.kind == "other seeds" else 0))
        with torch.device("meta" if self.kind == "meta" else "cpu"):
            self.network = Network(self.kind != "two optimizers", self.kind == "buffers")
        self.network.recompute = self.kind == "recomputed"
        if wrap := WRAPPERS.get(self.kind):
            for number, block in enumerate(self.network.blocks):
                self.network.blocks[number] = wrap(block)
        if self.kind == "frozen":
            self.network.blocks[0].requires_grad_(False)
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            if self.kind == "tie split":
                fully_shard(self.network.head, mesh=self.device_mesh["data_parallel"])
            if self.kind == "wrong dimension":
                fully_shard(self.network, mesh=self.device_mesh["tensor_parallel"])
                return
            if self.kind == "other seeds":
                return
            if self.kind == "early optimizer":
                self.early = torch.optim.Adam(self.network.parameters())
            shard(self.network, self.device_mesh)

    def loss(self, batch):
        tokens, labels, _ = batch
        return nn.functional.cross_entropy(self.network(tokens).float(), labels)

    def training_step(self, batch, batch_idx):
        self.interrupt(f"{self.current_epoch}:{batch_idx}")
        self.seen.append(batch[2].tolist())
        with Path(f"seen-{self.trainer.global_rank}").open("a") as file:
            file.write(f"{self.trainer.global_step} {batch[2].tolist()}\n")
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.interrupt(f"val {self.current_epoch}:{batch_idx}")
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.interrupt(f"end {self.current_epoch}")

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ) -> None:
        """Compare the norm of the whole gradients with what clipping is to make of it."""
        before = self.norm() if gradient_clip_val else 0
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        if gradient_clip_val:
            expected = min(before, gradient_clip_val)
            assert math.isclose(self.norm(), expected, rel_tol=1e-3), (before, self.norm())

    def norm(self) -> float:
        found = [each.grad for each in self.parameters() if each.grad is not None]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
        return torch.cat([each.flatten() for each in whole]).norm().item()

    def interrupt(self, place: str) -> None:
        """Send this process a signal, or fill its disk, if it is time.

        The last checkpoint is written by then.
        """
        action, _, at = self.interruption.partition(" at ")
        rank = int(os.environ.get("RANK", 0))
        if at != place or rank != int(os.environ.get("WORLD_SIZE", 1)) - 1:
            return
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        if action == "fill":  # a limit on files' sizes stands for a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
            return
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGTERM)
        time.sleep(0.1)

    def configure_optimizers(self):
        if self.kind == "early optimizer":
            return self.early
        if self.kind == "two optimizers":
            return [
                torch.optim.Adam(self.network.blocks.parameters(), 0.01),
                torch.optim.SGD(
                    [
                        *self.network.embedding.parameters(),
                        *self.network.norm.parameters(),
                        *self.network.head.parameters(),
                    ],
                    0.05,
                    momentum=0.9,
                ),
            ], []
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        if self.kind in STEPS:
            rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, STEPS[self.kind])
            return [optimizer], [{"scheduler": rates, "interval": "step"}]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


WRAPPERS = {"wrapped": checkpoint_wrapper, "compiled": partial(torch.compile, backend="eager")}
STEPS = {"scheduled": 40}
"""The steps of the schedules of some kinds."""
AVERAGES = {"averaged": Average, "averaged later": LaterAverage, "average saved": SavedAverage}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-true"},
    "mixed": {"precision": "bf16-mixed"},
}
"""The trainer's options of some kinds of models."""


def data(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return the loaders of tokens, labels and the samples' numbers."""
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 7, (SAMPLES, 4), generator=draws)
    labels = torch.randint(0, 7, (SAMPLES,), generator=draws)
    samples = TensorDataset(tokens, labels, torch.arange(SAMPLES))
    val_samples = TensorDataset(tokens[:24], labels[:24], torch.arange(24))
    return DataLoader(samples, batch_size, shuffle=True), DataLoader(val_samples, batch_size)


@dataclass
class Trained:
    """What a rank has at the end."""

    weights: str
    """A hash of all weights and buffers, and of the optimizers' states."""
    seen: list = field(default_factory=list)
    calls: int = 0
    steps: int = 0


def train(
    folder: Path,
    kind: str = "",
    mesh: tuple[int, int] | None = None,
    interruption: str = "",
    epochs: int = 2,
    every: int = 2,
    batch_size: int | None = None,
    models: Path | None = None,
    begin: Path | None = None,
    **arguments: Any,
) -> Trained:
    """Train a model on this rank.

    Args:
        folder: The folder of the checkpoints.
        kind: The kind of model.
        mesh: The sizes for data and tensor parallelism; None for DDP, or one process.
        interruption: "stop at EPOCH:BATCH", or "kill" or "fill" (the disk) in place of "stop"; the
            last rank gets it.
        epochs: Number of epochs.
        every: Optimizer steps between two checkpoints.
        batch_size: A rank's; None for 12 of all ranks.
        models: The folder of a ModelCheckpoint's files; None for no ModelCheckpoint.
        begin: The checkpoint of Lightning's that training begins with.
        arguments: More for ExactResume.
    """
    torch.use_deterministic_algorithms(True)
    resume = ExactResume(folder, seed=3, every_n_minutes=0, every_n_steps=every, **arguments)
    model = Model(kind, interruption)
    world = int(os.environ.get("WORLD_SIZE", 1))
    nodes = world // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    strategy: Any = "ddp" if world > 1 else "auto"
    shares = world
    if mesh:
        strategy = ModelParallelStrategy(*mesh)
        shares = mesh[0]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world // nodes,
        num_nodes=nodes,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[resume, *(AVERAGES[kind]() for _ in range(kind in AVERAGES))],
        logger=False,
        enable_checkpointing=models is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        **OPTIONS.get(kind, {}),
    )
    if models:
        trainer.callbacks.append(ModelCheckpoint(models, filename="model", save_top_k=1))
    trainer.fit(model, *data(batch_size or 12 // shares), ckpt_path=begin)
    return Trained(
        state_hash(model, trainer),
        model.seen,
        model.network.blocks[0].calls,
        trainer.global_step,
    )


def train_with_sizes_of_rank() -> None:
    """Train with a mesh that is another one on each rank."""
    train(Path("checkpoints"), mesh=[(2, 1), (1, 2)][int(os.environ["RANK"])])


def train_in_folder_of_rank(interruption: str = "") -> Trained:
    """Train with a folder that has another path on each rank."""
    return train(Path(f"checkpoints-{os.environ['RANK']}"), "", (2, 1), interruption)


class Alone(Model):
    """The same, with data of its own, for the command line, which returns no model."""

    made: list[Model] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)

    def train_dataloader(self):
        return data(6)[0]

    def val_dataloader(self):
        return data(6)[1]


def export(file_bytes: int, *arguments: str) -> str:
    """Train by the command line; return a hash of the best model's network."""
    safetensors_files.FILE_BYTES = file_bytes
    sys.argv = ["train.py", *arguments]
    SageMakerCLI(Alone)
    return hash_of(Alone.made[-1].network.state_dict(), [])


def state_hash(model: pl.LightningModule, trainer: pl.Trainer) -> str:
    """Return a hash of a model's whole weights, all its buffers, and its optimizers' states."""
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    return hash_of(model.state_dict() | dict(model.named_buffers()), states)


def hash_of(weights: dict[str, Any], optimizer_states: list[dict[str, Any]]) -> str:
    digest = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().view(-1).view(torch.uint8).tolist()
        digest.update(repr((name, value)).encode())

    for name, value in weights.items():
        add(name, value)
    for optimizer_state in optimizer_states:
        state = optimizer_state["state"]
        for number in sorted(state):
            for name, value in state[number].items():
                add(f"{number} {name}", value)
    return digest.hexdigest()[:16]
