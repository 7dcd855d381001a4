"""Loaders whose samples are random, and their batches as lists."""

import itertools

import torch
from interruptible import Noisy
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from sagemaker_lightning.data.deterministic import make_resumable


def as_lists(loader: DataLoader, limit: int | None = None) -> list[list]:
    return [
        [value.tolist() if isinstance(value, torch.Tensor) else value for value in batch]
        for batch in itertools.islice(loader, limit)
    ]


def batches(loader: DataLoader, epoch: int = 0, start: int = 0, **ranks) -> list[list]:
    """Return the batches of an exact copy of `loader`, as lists."""
    loader_made, reason = make_resumable(loader, 7, "train", **ranks)
    assert loader_made is loader and reason == "" and len(loader_made) >= 1
    loader_made.batch_plan.begin(epoch, 0, start)
    return as_lists(loader_made)


def noisy(**options) -> DataLoader:
    return DataLoader(Noisy(43), batch_size=4, **{"shuffle": True} | options)


class Unending(Sampler):
    """It has no length and no end."""

    def __iter__(self):
        while True:
            yield from torch.randperm(43).tolist()


class Ten(IterableDataset):
    """Ten numbers, each drawn."""

    def __iter__(self):
        yield from torch.rand(10)


class Growing(Dataset):
    """It changes with each sample."""

    seen = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.seen += 1
        return index
