"""Iterable datasets, loaders that save their state, several loaders, and loaders of one's own."""

import itertools
import random

import numpy as np
import torch
import torch.nn.functional as F
from basics import Blobs, Classifier
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.utilities import CombinedLoader
from torch import nn
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


class Ordered(IterableDataset):
    """The same samples in the same order each time."""

    def __init__(self, start=0, end=40):
        self.start, self.end = start, end

    def __iter__(self):
        for i in range(self.start, self.end):
            yield torch.tensor([np.sin(i), np.cos(i)], dtype=torch.float), i % 3


class Measured(Ordered):
    """With a length."""

    def __len__(self):
        return self.end - self.start


class Sharded(Ordered):
    """Each worker has a part of it, as in PyTorch's documentation; with noise."""

    def __iter__(self):
        info = get_worker_info()
        per_worker = (self.end - self.start) // (info.num_workers if info else 1)
        first = self.start + (info.id if info else 0) * per_worker
        for i in range(first, first + per_worker):
            yield (
                torch.tensor([np.sin(i), np.cos(i)], dtype=torch.float) + 0.1 * torch.randn(2),
                i % 3,
            )


class ShuffleBuffer(IterableDataset):
    """A buffer from which samples are drawn at random, as of WebDataset."""

    def __init__(self, source, size=12, rng=None):
        self.source, self.size, self.rng = source, size, rng or random

    def __iter__(self):
        buffer = []
        for sample in self.source:
            if len(buffer) < self.size:
                buffer.append(sample)
                continue
            i = self.rng.randrange(self.size)
            yield buffer[i]
            buffer[i] = sample
        self.rng.shuffle(buffer)
        yield from buffer


class Endless(IterableDataset):
    """Without an end; its seed counts the epochs."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        generator = np.random.default_rng(self.epoch)
        while True:
            i = int(generator.integers(0, 40))
            yield torch.tensor([np.sin(i), np.cos(i)], dtype=torch.float), i % 3


class Resumable(Ordered):
    """Says where it is."""

    def __init__(self, end=40):
        super().__init__(0, end)
        self.i = 0
        self.random = random.Random(6)

    def __iter__(self):
        while self.i < self.end:
            self.i += 1
            yield (
                torch.tensor([np.sin(self.i), self.random.random()], dtype=torch.float),
                self.i % 3,
            )
        self.i = 0

    def state_dict(self):
        return {"i": self.i, "random": self.random.getstate()}

    def load_state_dict(self, state):
        self.i = state["i"]
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))


class ScaledLoader(DataLoader):
    """A subclass whose batches are changed on the way."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield x * 2, y


class NotALoader:
    """An iterable of batches of one's own, that draws."""

    def __init__(self, batches=9):
        self.batches = batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            yield torch.randn(4, 2), torch.randint(0, 3, (4,))


class GPUBatches:
    """All data in memory, shuffled by the batch: the fast loader of many repositories."""

    def __init__(self, seed=0):
        self.x, self.y = torch.linspace(-1, 1, 80).view(40, 2), torch.arange(40) % 3
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return 10

    def __iter__(self):
        self.order = torch.randperm(40, generator=self.generator)
        self.i = 0
        return self

    def __next__(self):
        if self.i >= 40:
            raise StopIteration
        rows = self.order[self.i : self.i + 4]
        self.i += 4
        return self.x[rows], self.y[rows]


def collated(sample):
    """collate_fn of batch_size=None."""
    return sample[0][None].repeat(2, 1) * torch.tensor([[1.0], [0.9]]), torch.tensor(
        [sample[1]] * 2
    )


def streams():
    """Return what makes each loader."""
    return {
        "ordered": lambda: DataLoader(Ordered(), 4),
        "measured": lambda: DataLoader(Measured(), 4),
        "sharded": lambda: DataLoader(Sharded(), 4, num_workers=2),
        "sharded-persistent": lambda: DataLoader(
            Sharded(), 4, num_workers=2, persistent_workers=True
        ),
        "shuffled": lambda: DataLoader(ShuffleBuffer(Measured()), 4),
        "shuffled-own": lambda: DataLoader(ShuffleBuffer(Ordered(), rng=random.Random(3)), 4),
        "chain": lambda: DataLoader(
            ChainDataset([Measured(0, 20), ShuffleBuffer(Measured(20, 36))]), 4
        ),
        "endless": lambda: DataLoader(Endless(), 4),
        "stream-one-by-one": lambda: DataLoader(
            Measured(0, 12), batch_size=None, collate_fn=collated
        ),
        "stateful": lambda: StatefulDataLoader(Blobs(), 4, shuffle=True),
        "stateful-workers": lambda: StatefulDataLoader(Blobs(), 4, shuffle=True, num_workers=2),
        "stateful-stream": lambda: StatefulDataLoader(Resumable(), 4, num_workers=1),
        "subclass": lambda: ScaledLoader(Blobs(), 4, shuffle=True),
        "iterable": NotALoader,
        "own-iterator": GPUBatches,
    }


class StreamData(LightningDataModule):
    """A loader of one kind, and a validation set."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def train_dataloader(self):
        return streams()[self.kind]()

    def val_dataloader(self):
        return DataLoader(Measured(0, 12), 6)


class SeveralData(LightningDataModule):
    """Two loaders: "dict", "list", or a mode of CombinedLoader; and two for validation."""

    def __init__(self, mode: str = "dict", num_workers: int = 0):
        super().__init__()
        self.mode, self.num_workers = mode, num_workers

    def train_dataloader(self):
        labelled = DataLoader(Blobs(24), 4, shuffle=True, num_workers=self.num_workers)
        unlabelled = DataLoader(Blobs(40, noise=1.0), 8, shuffle=True, drop_last=True)
        both = {"labelled": labelled, "unlabelled": unlabelled}
        if self.mode in ("dict", "list"):
            return both if self.mode == "dict" else list(both.values())
        return CombinedLoader(both, mode=self.mode)

    def val_dataloader(self):
        return [DataLoader(Blobs(8), 4), DataLoader(Blobs(9), 3)]


class SemiSupervised(Classifier):
    """A batch of each loader, or None."""

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = [batch["labelled"], batch["unlabelled"]]
        labelled, unlabelled = batch
        loss = 0.0 * sum(p.sum() for p in self.parameters())
        if labelled is not None:
            loss = loss + F.cross_entropy(self(labelled[0]), labelled[1])
        if unlabelled is not None:
            x = unlabelled[0]
            loss = (
                loss
                + (self(x).softmax(1) - self(x + 0.1 * torch.randn_like(x)).softmax(1))
                .square()
                .mean()
            )
        self.log("train_loss", loss, batch_size=4)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))
        if dataloader_idx == 1:
            self.log("second", self(x).mean(), add_dataloader_idx=False)


class OwnIterator(Classifier):
    """A second loader, of unlabelled data, that the module goes through with iter and next."""

    def setup(self, stage):
        self.unlabelled = DataLoader(Blobs(28, noise=1.0), 4, shuffle=True)
        self.iterator = iter(self.unlabelled)

    def training_step(self, batch, batch_idx):
        try:
            x, _ = next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.unlabelled)
            x, _ = next(self.iterator)
        return super().training_step(batch, batch_idx) + self(x).softmax(1).square().mean()


class OwnCycle(Classifier):
    """The same with itertools.cycle over a list of batches, made in the first step."""

    cycle = None

    def training_step(self, batch, batch_idx):
        if self.cycle is None:
            self.cycle = itertools.cycle([torch.full((4, 2), k / 5) for k in range(5)])
        return (
            super().training_step(batch, batch_idx)
            + self(next(self.cycle)).softmax(1).square().mean()
        )


class OwnLoaders(LightningModule):
    """A module with loaders of its own, and no data module: Lightning's first tutorial."""

    def __init__(self, batch_size: int = 5):
        super().__init__()
        self.batch_size = batch_size
        self.layer = nn.Linear(2, 3)

    def train_dataloader(self):
        return DataLoader(Blobs(45), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Blobs(10), batch_size=self.batch_size)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
