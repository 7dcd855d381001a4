"""Nothing left to chance: what is random in a step is a function of (seed, epoch, position), for any DataLoader.

So there is nothing to save of samplers, workers and random number generators, and a run that was interrupted draws what
it would have drawn. torch's DataLoader draws the order of an epoch, and each worker's seed, from the generators of its
process, which a new process has in another state.
"""

import functools
import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from app.resident import Course, Division, ResidentLoader
from app.stop import SIGNALS

# What a DataLoader is made again with, besides its dataset and its order.
KEPT = ("num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor",
        "persistent_workers", "in_order")  # fmt: skip


def seed_all(*key: object) -> None:
    """Seed the generators of random, numpy and torch, on the CPU and the GPU, with the whole of `key`: 15 us."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 0.4 ms where there is no GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def position(trainer: Trainer) -> tuple[int, int]:
    """Return the epoch that training is in, and how many of its batches are done."""
    loop = trainer.fit_loop
    return loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.processed


class Keyed(Dataset):
    """Sample (epoch, position, index) of any map-style dataset is sample `index`, drawn with a seed of its own."""

    def __init__(self, dataset: Dataset, *seed: object) -> None:
        self.dataset, self.seed = dataset, seed
        if hasattr(dataset, "__getitems__"):  # a dataset that fetches a whole batch at once
            self.__getitems__ = self._batch

    def __getitem__(self, key: tuple[int, int, int]) -> Any:
        epoch, place, index = key
        seed_all("sample", *self.seed, epoch, place)
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # of a copy that is not complete yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _batch(self, keys: Sequence[tuple[int, int, int]]) -> Any:
        seed_all("samples", *self.seed, *keys[0][:2])
        return self.dataset.__getitems__([index for _, _, index in keys])


class Batches(Sampler):
    """One rank's batches of keys for `Keyed`, in the order that a DataLoader's own sampler draws for each epoch.

    Args:
        loader: The DataLoader.
        seed: Decides the order, with the epoch.
        position: Returns the epoch and the batch at which an iteration starts.
        rank: This rank.
        world_size: Number of ranks that share each batch.
    """

    def __init__(self, loader: DataLoader, seed: Sequence, position: Callable, rank: int, world_size: int) -> None:
        made = loader.batch_sampler
        self.whole = type(made) is not BatchSampler
        if self.whole:  # it makes batches of its own: a rank gets every nth; the last, too few for all, are left out
            self.sampler, size, drop_last = made, 1, True
        else:
            self.sampler, size, drop_last = made.sampler, made.batch_size, made.drop_last
        self.seed, self.position, self.rank = tuple(seed), position, rank
        self.course = Course(Division(len(self.sampler), size, world_size, drop_last))
        if not len(self):
            raise ValueError(
                f"--data: {len(self.sampler)} {'batches' if self.whole else 'samples'} for {world_size} ranks and a "
                f"batch size of {size}; allowed is at least one batch for each rank"
            )

    def __len__(self) -> int:
        return self.course.division.batches

    def sizes(self, epoch: int, batch: int) -> list[int]:
        """Return the number of samples that each rank has in a batch."""
        division, first = self.course.of_epoch(epoch)
        return [1] * division.ranks if self.whole else division.sizes(batch - first)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        epoch, start = self.position()
        order = self._order(epoch)
        division, first = self.course.of_epoch(epoch)
        for batch in range(start, len(self)):
            places = division.part(batch - first, self.rank)
            if self.whole:
                yield [(epoch, (place, k), index) for place in places for k, index in enumerate(order[place])]
            else:
                yield [(epoch, place, order[place]) for place in places]

    def _order(self, epoch: int) -> list:
        """Return all that the sampler draws in an epoch."""
        with isolate_rng():
            seed_all("order", *self.seed, epoch)
            for owner in (self.sampler, getattr(self.sampler, "sampler", None)):
                if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                    generator.manual_seed(torch.initial_seed())
                if hasattr(owner, "set_epoch"):
                    owner.set_epoch(epoch)
            return list(self.sampler)


def exact(
    loader: Any, *seed: object, position: Callable = lambda: (0, 0), rank: int = 0, world_size: int = 1
) -> tuple[Any, str]:
    """Return `loader` with an order and samples that are functions of `seed`, epoch and position, or why it cannot be.

    `rank` of `world_size` ranks gets its share of each batch of all ranks, each sample once, unless the loader has a
    DistributedSampler already. Workers live on when a signal comes to all processes: their own process ends them.
    """
    if isinstance(loader, ResidentLoader):
        return loader, ""
    if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
        sampler = getattr(loader, "sampler", None)
        if world_size > 1 and isinstance(loader, DataLoader) and not isinstance(sampler, DistributedSampler):
            raise ValueError(
                f"--data: a {type(loader).__name__} cannot be shared out among {world_size} ranks; allowed is a "
                "torch.utils.data.DataLoader, or one with a DistributedSampler"
            )
        return loader, f"{type(loader).__name__} goes through its samples in a way of its own"
    if loader.num_workers:
        loader.worker_init_fn = functools.partial(_start_worker, loader.worker_init_fn)
    if isinstance(loader.dataset, IterableDataset):
        return loader, "an IterableDataset has no positions"
    if loader.batch_sampler is None:
        return loader, "it has batch_size=None"
    if isinstance(loader.sampler, DistributedSampler):
        rank, world_size = 0, 1
    batches = Batches(loader, seed, position, rank, world_size)
    kept = {name: getattr(loader, name) for name in KEPT if hasattr(loader, name)}
    made = DataLoader(Keyed(loader.dataset, *seed), batch_sampler=batches, worker_init_fn=loader.worker_init_fn, **kept)
    return made, ""


def divided(loader: Any) -> "ResidentLoader | Batches | None":
    """Return what knows how the ranks divide the batches of a loader, if anything does."""
    if isinstance(loader, DataLoader):
        loader = loader.batch_sampler
    return loader if isinstance(loader, (ResidentLoader, Batches)) else None


def reached(trainer: Trainer) -> int | None:
    """Return the position in the epoch that training has reached, None where it is not the same on all nodes."""
    loader = divided(trainer.train_dataloader)
    return loader.course.reached(*position(trainer)) if loader and loader.course else None


def _start_worker(also: Callable[[int], None] | None, worker: int) -> None:
    """Begin a data worker: a signal ends it only if it comes from the process whose worker it is.

    torchrun and SageMaker signal whole groups of processes; a worker that goes first takes the last batch with it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    parent = os.getppid()

    def wait() -> None:
        while signal.sigwaitinfo(SIGNALS).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    if also:
        also(worker)
