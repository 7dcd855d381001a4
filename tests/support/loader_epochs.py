"""Loaders of every kind, and epochs of them that are stopped and continue, without a trainer.

New loaders play the part of a new process; Lightning's fetcher may be one batch ahead.
"""

import io
import itertools
import random
from types import SimpleNamespace

import numpy as np
import streams
import torch
from pytorch_lightning.loops.fetchers import _PrefetchDataFetcher
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, get_worker_info
from torchdata import nodes

from sagemaker_lightning.data.partition import PartitionedLoader
from sagemaker_lightning.data.seeding import Seeding

EPOCHS = 3


def begin(make, limit: int = 0) -> tuple[CombinedLoader, _PrefetchDataFetcher]:
    """Set up the loaders of a new process."""
    torch.manual_seed(5)
    seeding = Seeding(7)
    trainer = SimpleNamespace(global_rank=0, world_size=1)
    combined = (
        loader_made
        if isinstance(loader_made := make(), CombinedLoader)
        else CombinedLoader(loader_made, "max_size_cycle")
    )
    combined.flattened = [
        seeding._exact(trainer, part, RunningStage.TRAINING) for part in combined.flattened
    ]
    combined.limits = limit or None
    seeding.together(trainer, combined, "train")
    fetcher = _PrefetchDataFetcher()
    fetcher.setup(combined)
    iter(fetcher)
    return combined, fetcher


def rest(batches) -> list:
    """Return what is left of an epoch, which to iterate over would start over."""
    return list(iter(lambda: next(batches, None), None))


def train(make, stops=(), limit: int = 0, proves: bool = True) -> list[tuple[int, int, str]]:
    """Return (epoch, batch, its content) of all epochs.

    The processes that load them are stopped before some of the batches.
    """
    stops = list(stops)
    batches_seen = []
    combined, fetcher = begin(make, limit)
    epoch = 0
    batches_done = 0
    states = None
    while epoch < EPOCHS:
        batches_done = combined.begin(fetcher, epoch, batches_done, states, proves)
        fetcher.fetched += batches_done
        states = None
        within = False
        while not fetcher.done and not within:
            try:
                batch = next(fetcher)[0]
            except StopIteration:
                break
            batches_seen.append((epoch, batches_done, str(batch)))
            batches_done += 1
            within = stops[:1] == [(epoch, batches_done)] and not fetcher.done
        if not within:
            epoch = epoch + 1
            batches_done = 0
        if stops[:1] == [(epoch, batches_done)]:
            stops.pop(0)
            states = combined.states(fetcher, within)
            combined.reset()
            combined, fetcher = begin(make, limit)
            if not within:
                combined.give_back(states)
    combined.reset()
    assert not stops
    return batches_seen


def made(dataset: str, mode: str = "", **options):
    return lambda: streams.Data(dataset, mode, **options).train_dataloader()


STATEFUL = {"stateful": True}


TWO_WORKERS = {"workers": 2}


LOADERS = {
    "a buffer": made("buffered"),
    "a buffer in workers": made("buffered", **TWO_WORKERS, persistent=True),
    "a stream that counts": made("counted"),
    "without seeds, in workers": made("unseeded", **TWO_WORKERS),
    "a dataset with a state": made("hidden"),
    "a state": made("resumable", **STATEFUL),
    "a state in workers": made("resumable", **STATEFUL, **TWO_WORKERS),
    "a state in workers that stay": made("resumable", **STATEFUL, **TWO_WORKERS, persistent=True),
    "few snapshots": made("resumable", **STATEFUL, **TWO_WORKERS, every=4),
    "a state of an iterator": made("walked", **STATEFUL, **TWO_WORKERS),
    "a stateful loader without a state": made("counted", **STATEFUL),
    "a stateful loader without a state, in workers": made(
        "buffered", **STATEFUL, **TWO_WORKERS, persistent=True
    ),
    "a state of a dataset": made("remembered", **STATEFUL, **TWO_WORKERS, persistent=True),
    "shards in workers": made("sharded", **TWO_WORKERS),
    "a loader of its own": made("steady"),
    "a loader of its own with a state": made("keeping"),
    "a generator": made("generator"),
    "lazy": made("lazy"),
    "lazy in workers": made("lazy", **TWO_WORKERS, persistent=True),
    "late in workers": made("late", **TWO_WORKERS),
    "local in workers": made("local", **TWO_WORKERS),
    "lazily joined": made("points", collate=True),
    "the shortest": made("points+buffered", "min_size"),
    "the longest": made("counted+points+steady", "max_size", **TWO_WORKERS),
    "the longest, and others again": made("points+counted+buffered", "max_size_cycle"),
    "a dict of states": made("resumable+remembered", "dict", **STATEFUL),
    "the shortest of states": made("resumable+walked", "min_size", **STATEFUL, **TWO_WORKERS),
    "the longest of states": made("remembered+resumable+keeping", "max_size", **STATEFUL),
    "a cycle of states": made(
        "counted+resumable+points", "max_size_cycle", **STATEFUL, **TWO_WORKERS
    ),
    "a state of a dataset, without workers": made("remembered", **STATEFUL),
}


class Counting(Sampler):
    """A sampler that shuffles by the number of times that it was iterated over."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(self.size).tolist())


class AtOnce:
    """A loader that draws its batches as it begins, also from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __iter__(self):
        return iter((torch.rand(4).numpy() + self.rng.random(4)).tolist())


class Looping:
    """A loader that is its own iterator, and starts over with each iteration."""

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == 4:
            raise StopIteration
        self.at += 1
        return self.at + torch.rand(1).item()


class Lines(IterableDataset):
    """Lines of a file, of which each iteration reads some more; it saves its position."""

    def __init__(self) -> None:
        self.file = io.StringIO("".join(f"{line}\n" for line in range(20)))

    def __iter__(self):
        for line in itertools.islice(iter(self.file.readline, ""), 8):
            yield float(line) + torch.rand(1).item()

    def state_dict(self):
        return {"position": self.file.tell()}

    def load_state_dict(self, state):
        self.file.seek(state["position"])


class OfHuggingFace(IterableDataset):
    """A stream as Hugging Face's, shuffled in a buffer.

    Its state has no buffer, says at its end that nothing is left, and once it is loaded each
    iteration begins there.

    Args:
        buffer: Number of samples that the buffer holds.
    """

    __module__ = "datasets.iterable_dataset"

    def __init__(self, buffer: int = 1) -> None:
        self.buffer = buffer
        self.rng = np.random.default_rng(3)
        self.at = 0
        self.start = None

    def __iter__(self):
        buffer = []
        self.at = self.start or 0
        while self.at < 24:
            buffer.append(self.at)
            self.at += 1
            if len(buffer) == self.buffer:
                yield float(buffer.pop(self.rng.integers(len(buffer))))
        while buffer:
            yield float(buffer.pop(self.rng.integers(len(buffer))))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


class Raising(OfHuggingFace):
    """A stream whose state cannot be had."""

    def state_dict(self):
        raise RuntimeError("not begun")


class Ending:
    """A loader of its own whose state says at its end that nothing is left."""

    def __init__(self) -> None:
        self.at = self.first = 0

    def __iter__(self):
        first, self.first = self.first, 0
        for self.at in range(first + 1, 5):
            yield self.at + torch.rand(1).item()

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.first = state["at"]


class Shared(PartitionedLoader):
    """A loader that shares its batches among the ranks itself."""

    epoch_plan = None

    def __init__(self, size: int) -> None:
        self.size = size
        self.place = (0, 0)

    def __len__(self) -> int:
        return self.size

    def sizes(self, epoch: int, batch: int) -> list[int]:
        return [1]

    def begin(self, epoch: int, batch: int) -> None:
        assert batch <= self.size
        self.place = epoch, batch

    def __iter__(self):
        (epoch, first), self.place = self.place, (-1, 0)
        yield from ((epoch, batch) for batch in range(first, self.size))


class Samples(IterableDataset):
    """Some numbers, each drawn; it begins where its loader says."""

    first = shift = 0

    def __init__(self) -> None:
        self._datasets = [self]  # as those of several datasets have

    def __iter__(self):
        yield from (
            torch.tensor([self.shift + index + torch.rand(1).item()])
            for index in range(self.first, 8)
        )


class OfLitdata(DataLoader):
    """A loader that goes to its position, as litdata's, whose dataset does not count.

    An iteration that was left before its end would continue.
    """

    __module__ = "litdata.streaming.dataloader"
    restore = False
    at = 0

    def __init__(self) -> None:
        super().__init__(Samples(), 2)
        del self.dataset._datasets

    def __iter__(self):
        self.at = self.at if self.restore else 0
        self.restore = True
        self.dataset.first = self.at * self.batch_size
        for batch in super().__iter__():
            self.at += 1
            yield batch
        self.restore = False

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
        self.restore = True


class Memory(dict):
    """Memory that processes share: a copy of what has it has the same."""

    def __deepcopy__(self, memo):
        return self


class Mosaic(IterableDataset):
    """Numbers in the order of an epoch; workers take turns from where an epoch continues."""

    epoch = first = 0

    def __len__(self):
        return 24

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = np.random.default_rng(self.epoch).permutation(24)[self.first :]
        for batch in range(worker, len(order) // 2, workers):
            for number in order[2 * batch : 2 * batch + 2]:
                yield torch.tensor(number + torch.rand(1).item())


class OfStreaming(DataLoader):
    """A loader as of mosaicml-streaming, whose position is in shared memory.

    The state of an end leads to that end. One of an epoch before the present one is ignored.
    """

    __module__ = "streaming.base.dataloader"

    def __init__(self, workers: int = 0) -> None:
        super().__init__(Mosaic(), 2, num_workers=workers)
        self.memory = Memory(next_epoch=0, resume=None)
        self.given = 0

    def _place(self, epoch: int) -> tuple[int, int]:
        resume = self.memory["resume"]
        if resume is None or resume["epoch"] < epoch:
            return epoch, 0
        return resume["epoch"], resume["samples"]

    def __iter__(self):
        epoch, first = self._place(self.memory["next_epoch"])
        self.memory["next_epoch"] = epoch + 1
        self.dataset.epoch, self.dataset.first = epoch, first
        self.given = 0
        for batch in super().__iter__():
            self.given += len(batch)
            yield batch

    def state_dict(self):
        epoch, first = self._place(self.memory["next_epoch"] - 1)
        return {"epoch": epoch, "samples": first + self.given}

    def load_state_dict(self, state):
        self.memory["resume"] = state


class OfLitdatas(DataLoader):
    """A loader of several datasets, as litdata's; its state is right between epochs only."""

    __module__ = "litdata.streaming.dataloader"
    restore = False
    epoch = 0

    def __init__(self) -> None:
        super().__init__(Samples(), 2)

    def __iter__(self):
        self.epoch += 1
        self.dataset.shift = self.epoch
        yield from super().__iter__()

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def of_nodes() -> nodes.Loader:
    """Return torchdata's loader of nodes, which saves its state and is not a DataLoader."""
    samples = nodes.SamplerWrapper(RandomSampler(range(8)))
    return nodes.Loader(nodes.Mapper(nodes.Batcher(samples, 2), torch.tensor))


class Shuffled(list):
    """Numbers in an order that a generator of their own decides."""

    def __init__(self) -> None:
        super().__init__(range(8))
        self.rng = random.Random(3)

    def __iter__(self):
        return iter(self.rng.sample(range(8), 8))


def of_nodes_with_a_generator() -> nodes.Loader:
    """Return torchdata's loader of a sampler of torch's that has a generator."""
    sampler = RandomSampler(range(8), generator=torch.Generator().manual_seed(4))
    return nodes.Loader(nodes.Mapper(nodes.Batcher(nodes.SamplerWrapper(sampler), 2), torch.tensor))


def of_nodes_with_an_own_sampler() -> nodes.Loader:
    """Return torchdata's loader of a user's sampler, which saves no state."""
    samples = nodes.SamplerWrapper(Shuffled())
    return nodes.Loader(nodes.Mapper(nodes.Batcher(samples, 2), torch.tensor))


def of_mixed_nodes() -> nodes.Loader:
    """Return torchdata's loader of two sources, mixed by an order that counts its epochs."""
    sources = {name: nodes.SamplerWrapper(RandomSampler(range(4))) for name in "ab"}
    mixed = nodes.MultiNodeWeightedSampler(sources, {"a": 0.6, "b": 0.4}, seed=3)
    return nodes.Loader(nodes.Mapper(nodes.Batcher(mixed, 2), torch.tensor))


class Passes(nodes.BaseNode):
    """Numbers in an order of each pass; a pass is counted once nothing is left of it."""

    passes = 0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.at = initial_state["at"] if initial_state else 0
        self.passes = initial_state["passes"] if initial_state else self.passes
        self.order = np.random.default_rng(self.passes).permutation(8).tolist()

    def next(self):
        if self.at == len(self.order):
            self.passes += 1
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]

    def get_state(self):
        return {"at": self.at, "passes": self.passes}


def of_counting_nodes() -> nodes.Loader:
    """Return torchdata's loader of a node of the user's that counts its passes."""
    return nodes.Loader(nodes.Mapper(nodes.Batcher(Passes(), 2), torch.tensor))


class Chunks:
    """Chunks of numbers; an iteration continues where the one before was left."""

    at = 0

    def __iter__(self):
        while self.at < 4:
            self.at += 1
            yield list(range(2 * self.at, 2 * self.at + 2))
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def of_unpacking_nodes() -> nodes.Loader:
    """Return torchdata's loader of a node that draws ahead when it gets a state."""
    numbers = nodes.Unbatcher(nodes.IterableWrapper(Chunks()))
    return nodes.Loader(nodes.Mapper(nodes.Batcher(numbers, 2), torch.tensor))


def cycle(*loaders) -> CombinedLoader:
    return CombinedLoader(loaders, "max_size_cycle")


class Numbers(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        yield from (torch.rand(1).item() for _ in range(self.size))


def stopped(make, done: int) -> dict:
    """Return the state of loaders whose process is stopped after `done` batches."""
    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0)
    for _ in range(done):
        next(fetcher)
    states = combined.states(fetcher, True)
    combined.reset()
    return states
