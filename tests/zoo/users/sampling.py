"""Map-style datasets, each sampler of torch, each argument of DataLoader."""

import os
import random
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from basics import Blobs
from pytorch_lightning import LightningDataModule
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)


class Drawing(Blobs):
    """Noise from the three global generators."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * random.gauss(0, 1) + 0.1 * float(np.random.randn()), y


class FromNumpy(Blobs):
    """Noise from numpy's generator, kept in the dataset."""

    def __init__(self, size=40):
        super().__init__(size)
        self.rng = np.random.default_rng(1234)

    def __getitem__(self, index):
        return self.centres[self.targets[index]] + torch.from_numpy(
            self.rng.normal(0, 0.3, 2)
        ).float(), self.targets[index]


class RandomCrop:
    """A transform with Python's generator of its own."""

    def __init__(self):
        self.random = random.Random(9)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * self.random.uniform(0.8, 1.2)


class Transformed(Blobs):
    """A list of transforms, one with a generator, one a closure over one."""

    def __init__(self, size=40):
        super().__init__(size, noise=0.0)
        rng = np.random.RandomState(77)
        self.transforms = [RandomCrop(), lambda x: x + float(rng.normal(0, 0.2))]

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        for transform in self.transforms:
            x = transform(x)
        return x, y


class FromTorch(Blobs):
    """Noise from a torch.Generator that is passed in."""

    def __init__(self, generator, size=40):
        super().__init__(size, noise=0.0)
        self.generator = generator

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.3 * torch.randn(2, generator=self.generator), y


class LazyGenerator(Blobs):
    """A generator that is made on the first access, by the worker's number."""

    def __init__(self, size=40):
        super().__init__(size, noise=0.0)
        self.rng = None

    def __getitem__(self, index):
        if self.rng is None:
            info = torch.utils.data.get_worker_info()
            self.rng = np.random.default_rng(info.id if info else 99)
        x, y = super().__getitem__(index)
        return x + float(self.rng.normal(0, 0.2)), y


class Counting(Blobs):
    """Counts its own calls, and makes samples harder with them."""

    def __init__(self, size=40):
        super().__init__(size)
        self.calls, self.seen = 0, Counter()

    def __getitem__(self, index):
        self.calls += 1
        self.seen[index] += 1
        x, y = super().__getitem__(index)
        return x * (1 + self.calls / 200) + 0.01 * self.seen[index], y


class Cached(Blobs):
    """Keeps each sample, noise included, as it was drawn on the first access."""

    def __init__(self, size=40):
        super().__init__(size)
        self.cache = {}

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class Database(Dataset):
    """A file that each process opens on its first access, as of LMDB and HDF5."""

    def __init__(self, size=40):
        self.path = Path(f"samples-{size}.sqlite").absolute()
        if not self.path.exists():
            temporary = self.path.with_suffix(f".{os.getpid()}")
            connection = sqlite3.connect(temporary)
            connection.execute(
                "create table samples (id integer primary key, x real, y real, label integer)"
            )
            rows = [(i, float(np.sin(i)), float(np.cos(i)), i % 3) for i in range(size)]
            connection.executemany("insert into samples values (?, ?, ?, ?)", rows)
            connection.commit()
            connection.close()
            temporary.replace(self.path)
        self.size, self.connection = size, None

    def open(self):
        self.connection = sqlite3.connect(self.path)

    def __getstate__(self):
        return self.__dict__ | {"connection": None}

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.connection is None:
            self.open()
        (row,) = self.connection.execute(
            "select x, y, label from samples where id = ?", (int(index),)
        )
        return torch.tensor(row[:2], dtype=torch.float) + 0.1 * torch.randn(2), row[2]


def open_in_worker(worker_id):
    """worker_init_fn, as h5py's and LMDB's users write it."""
    dataset = torch.utils.data.get_worker_info().dataset
    dataset.open()


def seed_worker(worker_id):
    """worker_init_fn of PyTorch's notes on randomness."""
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


class Memmapped(Dataset):
    """An array on disk."""

    def __init__(self, size=40):
        path = Path("samples.npy").absolute()
        if not path.exists():
            temporary = path.with_name(f"{os.getpid()}.npy")
            np.save(temporary, np.linspace(-1, 1, 2 * size, dtype=np.float32).reshape(size, 2))
            temporary.replace(path)
        self.array = np.load(path, mmap_mode="r")

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        return torch.from_numpy(self.array[index].copy()), index % 3


class Negatives(Dataset):
    """Recommender: negative samples are drawn again at each epoch's start by who trains."""

    def __init__(self, users=10, items=12):
        self.positives = [(u, (u * 5 + k) % items) for u in range(users) for k in range(2)]
        self.users, self.items = users, items
        self.resample()

    def resample(self):
        self.negatives = [(u, int(np.random.randint(self.items))) for u, _ in self.positives]

    def __len__(self):
        return 2 * len(self.positives)

    def __getitem__(self, index):
        pairs, label = (self.positives, 1) if index < len(self.positives) else (self.negatives, 0)
        user, item = pairs[index % len(self.positives)]
        return torch.tensor([user / self.users, item / self.items]), label


class EpochSampler(Sampler):
    """An order of its own for each epoch; Lightning calls set_epoch."""

    def __init__(self, n, seed=0):
        self.n, self.seed, self.epoch = n, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(np.random.default_rng([self.seed, self.epoch]).permutation(self.n).tolist())


class BalancedBatchSampler(Sampler):
    """Batches with as many of each class, from a RandomState that continues from epoch to epoch."""

    def __init__(self, labels, per_class=2, batches=9):
        self.labels, self.per_class, self.batches = np.asarray(labels), per_class, batches
        self.rng = np.random.RandomState(2)

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            yield [
                int(i)
                for label in np.unique(self.labels)
                for i in self.rng.choice(
                    np.where(self.labels == label)[0], self.per_class, replace=False
                )
            ]


class InfiniteSampler(Sampler):
    """Without an end, as detection frameworks have it."""

    def __init__(self, n):
        self.n, self.generator = n, torch.Generator().manual_seed(5)

    def __iter__(self):
        while True:
            yield from torch.randperm(self.n, generator=self.generator).tolist()


class NoisyCollate:
    """A collate function with a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(11)

    def __call__(self, batch):
        x, y = default_collate(batch)
        return x * (1 + 0.1 * self.rng.standard_normal()), y


class Pinned:
    """A batch class of one's own, as in PyTorch's documentation of memory pinning."""

    def __init__(self, data):
        x, y = default_collate(data)
        self.x, self.y = x + 0.05 * torch.randn_like(x), y

    def pin_memory(self):
        return self

    def to(self, *args, **kwargs):
        return self

    def __iter__(self):
        return iter((self.x, self.y))


def loaders():
    """Return what makes the loader of each kind, given the data module's number of workers."""
    blobs = Drawing()
    weights = np.linspace(0.1, 1, 40)
    generator = torch.Generator().manual_seed(2147483647)
    x = torch.linspace(-1, 1, 80).view(40, 2)
    return {
        "shuffle": lambda: DataLoader(blobs, 4, shuffle=True),
        "sequential": lambda: DataLoader(blobs, 4, sampler=SequentialSampler(blobs)),
        "random": lambda: DataLoader(blobs, 4, sampler=RandomSampler(blobs)),
        "replacement": lambda: DataLoader(
            blobs, 4, sampler=RandomSampler(blobs, replacement=True, num_samples=36), num_workers=1
        ),
        "random-generator": lambda: DataLoader(
            blobs, 4, sampler=RandomSampler(blobs, num_samples=44, generator=generator)
        ),
        "weighted": lambda: DataLoader(blobs, 4, sampler=WeightedRandomSampler(weights, 40)),
        "weighted-generator": lambda: DataLoader(
            blobs,
            4,
            sampler=WeightedRandomSampler(weights, 30, replacement=False, generator=generator),
            num_workers=1,
        ),
        "subset-random": lambda: DataLoader(blobs, 4, sampler=SubsetRandomSampler(range(5, 37))),
        "batch-sampler": lambda: DataLoader(
            blobs, batch_sampler=BatchSampler(RandomSampler(blobs), 6, drop_last=True)
        ),
        "distributed": lambda: DataLoader(
            blobs,
            4,
            sampler=DistributedSampler(blobs, num_replicas=1, rank=0, shuffle=True, seed=3),
        ),
        "set-epoch": lambda: DataLoader(blobs, 4, sampler=EpochSampler(40)),
        "balanced": lambda: DataLoader(
            blobs,
            batch_sampler=BalancedBatchSampler(blobs.targets),
            num_workers=2,
            persistent_workers=True,
        ),
        "infinite": lambda: DataLoader(blobs, 4, sampler=InfiniteSampler(40)),
        "generator": lambda: DataLoader(blobs, 4, shuffle=True, generator=generator, num_workers=2),
        "generator-alone": lambda: DataLoader(blobs, 4, shuffle=True, generator=generator),
        "seed-worker": lambda: DataLoader(
            blobs, 4, shuffle=True, num_workers=2, worker_init_fn=seed_worker, generator=generator
        ),
        "persistent": lambda: DataLoader(
            blobs, 4, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=4
        ),
        "prefetch": lambda: DataLoader(
            blobs, 4, shuffle=True, num_workers=1, prefetch_factor=7, timeout=60
        ),
        "drop-last": lambda: DataLoader(
            blobs, 6, shuffle=True, drop_last=True, pin_memory=True, collate_fn=Pinned
        ),
        "forkserver": lambda: DataLoader(
            blobs,
            4,
            shuffle=True,
            num_workers=1,
            multiprocessing_context="forkserver",
            persistent_workers=True,
        ),
        "out-of-order": lambda: DataLoader(blobs, 4, shuffle=True, num_workers=2, in_order=False),
        "one-by-one": lambda: DataLoader(
            blobs, batch_size=None, sampler=BatchSampler(RandomSampler(blobs), 4, False)
        ),
        "batches-inside": lambda: DataLoader(
            [(x[i : i + 4] * 1.0, torch.arange(4) % 3) for i in range(0, 40, 4)],
            batch_size=None,
            shuffle=True,
        ),
        "list": lambda: DataLoader([(row, i % 3) for i, row in enumerate(x)], 4, shuffle=True),
        "tensors": lambda: DataLoader(TensorDataset(x, torch.arange(40) % 3), 4, shuffle=True),
        "concat": lambda: DataLoader(
            ConcatDataset([Drawing(20), FromNumpy(20), Subset(Transformed(30), range(8))]),
            4,
            shuffle=True,
        ),
        "stack": lambda: DataLoader(
            StackDataset(Blobs(40), FromNumpy(40)),
            4,
            shuffle=True,
            collate_fn=lambda rows: default_collate([(a[0] + b[0], a[1]) for a, b in rows]),
        ),
        "split": lambda: DataLoader(random_split(Drawing(50), [0.8, 0.2])[0], 4, shuffle=True),
        "numpy": lambda: DataLoader(FromNumpy(), 4, shuffle=True),
        "numpy-workers": lambda: DataLoader(
            FromNumpy(), 4, shuffle=True, num_workers=2, persistent_workers=True
        ),
        "transforms": lambda: DataLoader(Transformed(), 4, shuffle=True, num_workers=1),
        "torch-shared": lambda: DataLoader(
            FromTorch(generator), 4, shuffle=True, generator=generator
        ),
        "lazy-generator": lambda: DataLoader(LazyGenerator(), 4, shuffle=True),
        "lazy-generator-workers": lambda: DataLoader(
            LazyGenerator(), 4, shuffle=True, num_workers=2
        ),
        "counting": lambda: DataLoader(Counting(), 4, shuffle=True),
        "counting-workers": lambda: DataLoader(
            Counting(), 4, shuffle=True, num_workers=1, persistent_workers=True
        ),
        "cached": lambda: DataLoader(Cached(), 4, shuffle=True),
        "cached-workers": lambda: DataLoader(
            Cached(), 4, shuffle=True, num_workers=2, persistent_workers=True
        ),
        "database": lambda: DataLoader(Database(), 4, shuffle=True, num_workers=2),
        "database-init": lambda: DataLoader(
            Database(), 4, shuffle=True, num_workers=2, worker_init_fn=open_in_worker
        ),
        "memmap": lambda: DataLoader(Memmapped(), 4, shuffle=True, num_workers=1),
        "collate": lambda: DataLoader(
            blobs, 4, shuffle=True, collate_fn=NoisyCollate(), num_workers=1
        ),
        "negatives": lambda: DataLoader(Negatives(), 4, shuffle=True),
        "one-batch": lambda: DataLoader(Blobs(4), 4),
    }


class SampledData(LightningDataModule):
    """A loader of one kind, and a validation set."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def setup(self, stage):
        self.made = loaders()[self.kind]

    def train_dataloader(self):
        return self.made()

    def val_dataloader(self):
        return DataLoader(Blobs(12), batch_size=6, num_workers=1 if "workers" in self.kind else 0)


class OwnDistributedData(LightningDataModule):
    """A DistributedSampler of one's own: with --trainer.use_distributed_sampler=false."""

    def train_dataloader(self):
        dataset = Drawing()
        return DataLoader(
            dataset, 4, sampler=DistributedSampler(dataset, shuffle=True, seed=1, drop_last=True)
        )


class GrowingData(LightningDataModule):
    """Active learning: the pool grows by the epoch; with reload_dataloaders_every_n_epochs=1."""

    def __init__(self):
        super().__init__()
        self.labelled = list(range(16))
        self.rng = random.Random(4)

    def train_dataloader(self):
        if self.trainer.current_epoch:
            rest = sorted(set(range(40)) - set(self.labelled))
            self.labelled += self.rng.sample(rest, 8)
        return DataLoader(Subset(Drawing(), list(self.labelled)), 4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Blobs(12), 6)


class InPlaceData(LightningDataModule):
    """The list of samples is shuffled in place at each epoch's start.

    A hook shuffles it with the global generator.
    """

    def __init__(self):
        super().__init__()
        self.samples = [(torch.tensor([i / 40, 1.0]), i % 3) for i in range(40)]

    def train_dataloader(self):
        return DataLoader(self.samples, 4)


class StatefulData(LightningDataModule):
    """state_dict and load_state_dict of a data module, as Lightning documents them."""

    def __init__(self):
        super().__init__()
        self.current_train_batch_index = 0
        self.scale = 1.0

    def train_dataloader(self):
        return DataLoader(Drawing(), 4, shuffle=True)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.current_train_batch_index += 1
        self.scale = 1 + self.current_train_batch_index / 50
        return batch[0] * self.scale, batch[1]

    def state_dict(self):
        return {"current_train_batch_index": self.current_train_batch_index}

    def load_state_dict(self, state_dict):
        self.current_train_batch_index = state_dict["current_train_batch_index"]


class FoldData(LightningDataModule):
    """A fold of k, as Lightning's example of k-fold cross-validation."""

    def __init__(self, fold: int = 0, folds: int = 3):
        super().__init__()
        self.fold, self.folds = fold, folds

    def setup(self, stage):
        from sklearn.model_selection import KFold

        splits = list(KFold(self.folds, shuffle=True, random_state=1).split(range(42)))
        train, val = splits[self.fold]
        dataset = Drawing(42)
        self.train_fold, self.val_fold = (
            Subset(dataset, train.tolist()),
            Subset(dataset, val.tolist()),
        )

    def train_dataloader(self):
        return DataLoader(self.train_fold, 4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_fold, 7)
