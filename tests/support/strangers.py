"""Models and data of users who have read Lightning's documentation, and not ours.

Each is one way in which an interrupted run may end with other weights. At STOP_AT and KILL_AT, as
EPOCH:BATCH or "validation STEP", the model sends its own process a signal.
"""

import itertools
import os
import random
import signal
import threading
import time
from collections import deque, namedtuple

import numpy as np
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric, MinMaxMetric
from torchmetrics.wrappers import Running

SAMPLES = 40
RANDOM = random.Random(5)


def interrupt(place: str) -> None:
    """Send this process a signal, if it is time.

    The last checkpoint is on the disk by then, even on a slow one.
    """
    for name, number in (("STOP_AT", signal.SIGTERM), ("KILL_AT", signal.SIGKILL)):
        if os.environ.get(name) == place:
            os.environ.pop(name)
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            os.kill(os.getpid(), number)
            time.sleep(0.1)  # for the thread that hears it
    if os.environ.get("FAIL_AT") == place:
        raise RuntimeError("as it was asked to")


# Data ---------------------------------------------------------------------------------------------


class Points(Dataset):
    """Points with noise, from a generator of a kind of its own."""

    def __init__(self, generator=None) -> None:
        self.generator = generator
        self.level = 0.1
        self.seen = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        self.seen += 1
        return torch.tensor([index / SAMPLES, 1.0]) + self.level * self.noise(), torch.tensor(
            [index % 2.0]
        )

    def noise(self) -> float:
        """Return a random number."""
        if self.generator is None:
            return float(torch.rand(()) + np.random.rand() + random.random())
        if isinstance(self.generator, torch.Generator):
            return float(torch.rand((), generator=self.generator))
        return float(
            self.generator.random() if hasattr(self.generator, "random") else self.generator.rand()
        )


class OfModule(Points):
    """Points whose generator is a variable of the module."""

    def noise(self) -> float:
        """Return a random number."""
        return RANDOM.random()


class Lazily(Points):
    """Points whose generator is made by worker_init_fn, or else at the first use."""

    def noise(self) -> float:
        """Return a random number."""
        if self.generator is None:
            self.generator = np.random.default_rng(3)
        return float(self.generator.random())


class Timed(Points):
    """Points that depend on the time."""

    def noise(self) -> float:
        """Return a number from the clock, which nobody can return again."""
        return time.time() % 1


class Growing(Points):
    """Points that get harder the more of them were seen."""

    def noise(self) -> float:
        """Return a number that depends on a counter."""
        return self.seen / 100


class Shuffled(Sampler):
    """An order drawn from a generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self):
        order = list(range(SAMPLES))
        self.random.shuffle(order)
        return iter(order)


class Counting(Sampler):
    """An order that changes each time, by a counter."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self):
        self.epoch += 1
        return iter(
            torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        )


class Stream(IterableDataset):
    """Points one after the other, shuffled by a generator that counts its epochs."""

    def __init__(self) -> None:
        self.epoch = 0
        self.random = random.Random(1)

    def __iter__(self):
        self.epoch += 1
        order = torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        for index in order:
            noise = self.random.random() + float(torch.rand(()))
            yield torch.tensor([index / SAMPLES, 1.0 + noise]), torch.tensor([index % 2.0])


class Saved(IterableDataset):
    """A stream that saves its position, and for that reason cannot be started again."""

    def __init__(self) -> None:
        self.at = 0
        self.epoch = 0

    def __iter__(self):
        if self.at == 0:
            self.epoch += 1
        while self.at < SAMPLES:
            self.at += 1
            yield torch.tensor([self.at / SAMPLES, self.epoch / 3.0]), torch.tensor([self.at % 2.0])
        self.at = 0

    def state_dict(self):
        """Return the position."""
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        """Go to the position."""
        self.at = state["at"]
        self.epoch = state["epoch"]


class Collate:
    """Joins samples, with noise from a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState(2)

    def __call__(self, samples):
        inputs, labels = torch.utils.data.default_collate(samples)
        return inputs + 0.1 * float(self.generator.rand()), labels


DATASETS = {
    "plain": Points,
    "numpy": lambda: Points(np.random.default_rng(0)),
    "state": lambda: Points(np.random.RandomState(0)),
    "random": lambda: Points(random.Random(0)),
    "torch": lambda: Points(torch.Generator().manual_seed(0)),
    "module": OfModule,
    "lazily": Lazily,
    "growing": Growing,
    "timed": Timed,
    "stream": Stream,
    "saved": Saved,
}
SAMPLERS = {"shuffled": Shuffled, "counting": Counting}
KINDS = {"torch": DataLoader, "stateful": StatefulDataLoader}


class Data(LightningDataModule):
    """One loader, or two.

    Args:
        dataset: Which dataset.
        sampler: Which sampler; without one, the loader shuffles.
        workers: Number of data workers.
        persistent: Whether the workers stay from epoch to epoch.
        several: Whether there are two loaders, by name.
        collate: Whether samples are joined by a function of its own.
        kind: Which class of loaders.
    """

    def __init__(
        self,
        dataset: str = "plain",
        sampler: str = "",
        workers: int = 0,
        persistent: bool = False,
        several: bool = False,
        collate: bool = False,
        kind: str = "torch",
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.sampler = sampler
        self.several = several
        self.kind = kind
        self.collate = {"collate_fn": Collate()} if collate else {}
        self.workers = {"num_workers": workers, "persistent_workers": persistent}

    def one(self, size: int):
        """Return a loader."""
        order = {"sampler": SAMPLERS[self.sampler]()} if self.sampler else {"shuffle": True}
        order = {} if self.dataset in ("stream", "saved") else order
        return KINDS[self.kind](
            DATASETS[self.dataset](), size, **order, **self.workers, **self.collate
        )

    def train_dataloader(self):
        """Return the loaders."""
        if not self.several:
            return self.one(4)
        return {"a": self.one(4), "b": self.one(10)}


class Validated(Data):
    """Data with a validation."""

    def val_dataloader(self):
        """Return a loader that draws random numbers."""
        return DataLoader(Points(np.random.default_rng(4)), 10)


class Named(Data):
    """Data whose arguments have names of their own.

    Args:
        samples: Samples of a batch.
        processes: Number of data workers.
        times: Factor of the noise.
    """

    def __init__(self, samples: int = 4, processes: int = 0, times: int = 4) -> None:
        super().__init__(workers=processes)
        self.samples = samples
        self.times = times

    def train_dataloader(self):
        """Return a loader."""
        loader = self.one(self.samples)
        loader.dataset.level *= self.times
        return loader


# Modules ------------------------------------------------------------------------------------------


class Model(LightningModule):
    """A regression with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        interrupt(f"{self.current_epoch}:{batch_idx}")
        if isinstance(batch, dict):
            return sum(self.loss(one) for one in batch.values() if one is not None)
        return self.loss(batch)

    def loss(self, batch):
        """Return the loss."""
        return nn.functional.mse_loss(self.head(self.body(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        """Log the loss."""
        interrupt(f"validation {self.global_step}")
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), 0.05)


class Estimated(Model):
    """Asks Lightning for the number of steps."""

    def configure_optimizers(self):
        """Return SGD and OneCycleLR."""
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Anchored(Model):
    """Goes through the training data when an epoch begins."""

    def on_train_epoch_start(self):
        """Note the first batch, and all batches."""
        batches = [batch[0].mean() for batch in self.trainer.train_dataloader]
        self.anchor = batches[0] + sum(batches) / len(batches)

    def loss(self, batch):
        """Return the loss."""
        return super().loss(batch) + (self.head.bias - self.anchor).square().sum()


class Augmented(Model):
    """Draws random numbers on the way to the device."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        """Add noise."""
        return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]


class Adversarial(Model):
    """Trains two parts in turns, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        """Train both parts; return no loss."""
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        """Return two optimizers whose learning rates change."""
        optimizers = [
            torch.optim.SGD(self.body.parameters(), 0.05),
            torch.optim.Adam(self.head.parameters(), 0.01),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 3) for one in optimizers]


class EvalMode(Model):
    """Has a part that is frozen when an epoch starts."""

    def on_train_epoch_start(self):
        """Freeze the part."""
        self.body.eval()


class Unfrozen(Model):
    """Has a part that is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def on_train_epoch_start(self):
        """Train the part."""
        if self.current_epoch == 1:
            self.body.requires_grad_(True)


class NumpyCosine(Model):
    """Has a learning rate that becomes a numpy scalar."""

    def configure_optimizers(self):
        """Return SGD and LambdaLR."""

        def rate(step: int) -> float:
            return (step + 1) / 10 if step < 10 else 0.5 * (1 + np.cos(np.pi * (step - 10) / 60))

        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Sparse(Model):
    """Has a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(8).to_sparse())


class Lazy(Model):
    """Has a layer that gets its shape from the first batch, and buffers that are added later."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(1)
        self.register_buffer("mean", None)
        self.register_buffer("bank", torch.zeros(0, 1))

    def loss(self, batch):
        """Return the loss, and keep what was seen."""
        if self.mean is None:
            self.mean = batch[0].mean(0)
            self.register_buffer("late", torch.ones(2))
        self.bank = torch.cat([self.bank, batch[1]])
        self.late += 0.1
        return (
            super().loss((batch[0] - self.mean * self.late, batch[1]))
            + self.bank.mean() * self.head.weight.sum()
        )


Step = namedtuple("Step", ["loss", "at"])


class Remembering(Model):
    """Keeps its state in plain attributes.

    They are numbers, lists, a replay buffer, a generator and an object of its own.
    """

    class Memory:
        """An object of its own."""

        def __init__(self) -> None:
            self.steps = deque(maxlen=5)
            self.best = {"loss": np.float32(9.0)}

    def __init__(self) -> None:
        super().__init__()
        self.memory = self.Memory()
        self.count = 0
        self.generator = np.random.default_rng(1)
        self.average = torch.zeros(())
        self.teacher = [nn.Linear(2, 1)]

    def on_train_start(self):
        """Start, as if there had been no run before."""
        self.count = 0

    def on_train_epoch_start(self):
        """Start new lists and a new object."""
        self.losses = []
        self.extra = self.Memory()

    def training_step(self, batch, batch_idx):
        """Return the loss, which depends on everything that is kept."""
        loss = super().training_step(batch, batch_idx)
        self.count += 1
        self.losses.append(loss.detach())
        self.extra.steps.append(batch_idx)
        self.memory.steps.append(Step(float(loss.detach()), np.array([batch_idx])))
        self.memory.best["loss"] = min(self.memory.best["loss"], np.float32(loss.detach()))
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        with torch.no_grad():
            self.teacher[0].weight.mul_(0.9).add_(self.head.weight[:, :2], alpha=0.1)
        kept = (
            self.count / 100
            + self.memory.steps[0].loss
            + float(self.memory.best["loss"])
            + self.generator.random()
        )
        kept += sum(self.losses) / len(self.losses) + self.average + sum(self.extra.steps) / 10
        return (
            loss * (1 + np.tanh(float(kept)) * 0.1)
            + 0.1 * self.teacher[0](batch[0]).detach().mean() * self.head.bias.sum()
        )

    def on_save_checkpoint(self, checkpoint):
        """Save numpy numbers."""
        checkpoint["best"] = {"loss": np.min([1.0, 2.0]), "all": np.arange(3)}

    def on_load_checkpoint(self, checkpoint):
        """Check that the numpy numbers are there."""
        assert (
            type(checkpoint["best"]["loss"]) is np.float64
            and type(checkpoint["best"]["all"]) is np.ndarray
        )


class Forgetful(Remembering):
    """Loads nothing of what its hook saves: it is not asked, and a validation is stopped within."""

    on_load_checkpoint = LightningModule.on_load_checkpoint


class Cycling(Model):
    """Keeps an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = itertools.cycle(map(abs, [1.0, 1.1, 0.9, 1.2, 1.3] * 9))

    def loss(self, batch):
        """Return the loss, weighed."""
        return super().loss(batch) * next(self.signs)


class Measured(Model):
    """Keeps metrics with wrappers, and resets some of them as the best-known template does."""

    def __init__(self) -> None:
        super().__init__()
        self.range = MinMaxMetric(MeanMetric())
        self.recent = Running(MeanMetric(), window=3)

    def on_train_start(self):
        """Reset the metrics that the check before training has used."""
        self.range.reset()

    def training_step(self, batch, batch_idx):
        """Return the loss, which depends on the metrics."""
        loss = super().training_step(batch, batch_idx)
        self.range.update(loss.detach())
        self.recent.update(loss.detach())
        found = self.range.compute()
        return loss * (1 + 0.1 * torch.tanh(found["max"] + found["min"] + self.recent.compute()))


class Partial(Model):
    """Saves only what it trains, as parameter-efficient fine-tuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.body[0].requires_grad_(False)

    def state_dict(self, *args, **kwargs):
        """Return the head."""
        return {
            name: value
            for name, value in super().state_dict(*args, **kwargs).items()
            if "body.0" not in name
        }


class Hyper(Model):
    """Saves hyperparameters of any kind."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": lr, "criterion": nn.MSELoss(), "kind": Model})


class Logging(Model):
    """Logs by step and by epoch, a rate, hyperparameters with a metric, and a text."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_train_start(self):
        """Log before the first step."""
        for logger in self.loggers:
            logger.log_metrics({"begun": 1.0}, step=0)
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(self.hparams, {"hp/loss": 0.0})
                logger.experiment.add_text("note", "begun")

    def loss(self, batch):
        """Return the loss, and log it."""
        loss = super().loss(batch)
        if self.trainer.training:
            self.log("loss", loss, on_step=True, on_epoch=True)
            if self.current_epoch:
                self.log("later", loss * 2)
        return loss


class Accumulating(Model):
    """Takes its optimizer steps by itself, one every fourth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        """Add to the gradients, and take a step at every fourth batch."""
        self.manual_backward(super().training_step(batch, batch_idx) / 4)
        if (batch_idx + 1) % 4 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


# Callbacks ----------------------------------------------------------------------------------------
