"""Users' loaders and datasets other than a DataLoader over a map-style dataset."""

import itertools
import os
import random
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningDataModule
from pytorch_lightning.utilities import CombinedLoader
from strangers import SAMPLES, Estimated, Model, Points, interrupt
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"


def sample(index: int, noise: float):
    """Return an input and a label."""
    return torch.tensor([index / SAMPLES, 1.0 + noise]), torch.tensor([index % 2.0])


def noise() -> float:
    """Return a number drawn from the process's generators."""
    return float(torch.rand(()) + np.random.rand() + random.random())


# Streams ------------------------------------------------------------------------------------------


class Buffered(IterableDataset):
    """A stream that is shuffled in a buffer; each worker yields its part."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.level = 0.0

    def indices(self):
        """Yield the indices of this worker, in an order that is the same on all workers."""
        order = list(range(SAMPLES))
        self.random.shuffle(order)
        info = get_worker_info()
        return order[info.id :: info.num_workers] if info else order

    def __iter__(self):
        buffer = []
        for index in self.indices():
            buffer.append(index)
            if len(buffer) > 8:
                yield sample(buffer.pop(random.randrange(8)), noise())
        random.shuffle(buffer)
        for index in buffer:
            yield sample(index, self.level + noise())


class Sized(Buffered):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return SAMPLES


class Sharded(IterableDataset):
    """Shards of samples in another order each time; each worker of each rank reads its own."""

    def __init__(self, shards: int = 8) -> None:
        self.shards = [range(first, SAMPLES, shards) for first in range(shards)]
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = list(self.shards)
        random.Random(self.epoch).shuffle(order)
        for shard in order[rank * workers + worker :: ranks * workers]:
            for index in shard:
                yield sample(index, noise())


class Dated(IterableDataset):
    """A stream whose order depends on the time at which it was made."""

    def __init__(self) -> None:
        self.seed = time.time_ns()

    def __iter__(self):
        order = list(range(SAMPLES))
        random.Random(self.seed).shuffle(order)
        return (sample(index, 0.0) for index in order)


class Measured(IterableDataset):
    """A stream that begins with prepared samples, and continues with times that it measures."""

    def __iter__(self):
        for index in range(SAMPLES):
            yield sample(index, time.perf_counter() % 1 if index >= 8 else 0.0)


class Counted(IterableDataset):
    """A stream that knows its length, and shuffles by its epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self):
        self.epoch += 1
        for index in np.random.default_rng(self.epoch).permutation(SAMPLES):
            yield sample(int(index), noise())


class Unseeded(Buffered):
    """A stream that shuffles with a generator without a seed."""

    def indices(self):
        return np.random.default_rng().permutation(SAMPLES).tolist()


class Resumable(IterableDataset):
    """A stream that saves its position, but not its generator; each worker has its part."""

    def __init__(self) -> None:
        self.at = 0
        self.epoch = 0
        self.generator = np.random.default_rng(2)

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        if not self.at:
            self.epoch += 1
        order = torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()[first::step]
        for index in order[self.at :]:
            self.at += 1
            yield sample(index, noise() + self.generator.random())
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at = state["at"]
        self.epoch = state["epoch"]


class Uneven(Resumable):
    """A stream whose first worker has a quarter of it."""

    def __iter__(self):
        info = get_worker_info()
        if not self.at:
            self.epoch += 1
        order = torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        if info:
            order = order[SAMPLES // 4 :] if info.id else order[: SAMPLES // 4]
        while self.at < len(order):
            self.at += 1
            yield sample(order[self.at - 1], noise())
        self.at = 0


class Walk:
    """An iterator that saves its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == SAMPLES:
            raise StopIteration
        self.at += 1
        return sample(self.at, noise())

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Walked(IterableDataset):
    """A stream whose iterator saves its position."""

    def __iter__(self):
        return Walk()


class Hidden(IterableDataset):
    """A stream as a library makes it, which continues at the position of its last iterator.

    It can save the position and go to a saved one.
    """

    def __init__(self) -> None:
        self.walks = [Walk()]

    def __iter__(self):
        yield from itertools.islice(self.walks[0], 20)
        if self.walks[0].at == SAMPLES:
            self.walks[0].at = 0

    def state_dict(self):
        return self.walks[0].state_dict()

    def load_state_dict(self, state):
        self.walks[0].load_state_dict(state)


class Remembered(Points):
    """A dataset with a state: the number of samples that were read."""

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


# Generators that are made on the way --------------------------------------------------------------


class Lazy(Points):
    """Points with a generator that is made with the first sample."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make
        self.rng = None

    def noise(self) -> float:
        """Return a random number."""
        if self.rng is None:
            self.rng = self.make()
        return self.rng.random()


class Late(Points):
    """Points with a generator that is made with a rare sample."""

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        if index == 33:
            if not hasattr(self, "rare"):
                self.rare = np.random.default_rng(9)
            inputs = inputs + self.rare.random()
        return inputs, labels


class Local(Points):
    """Points that draw from a generator made for each point."""

    def noise(self) -> float:
        """Return a random number."""
        return (
            np.random.default_rng().random()
            + random.Random().random()
            + np.random.RandomState().rand()
        )


class LazyCollate:
    """Joins samples, with noise from a generator that is made with the first batch."""

    rng = None

    def __call__(self, samples):
        if self.rng is None:
            self.rng = random.Random(4)
        inputs, labels = torch.utils.data.default_collate(samples)
        return inputs + self.rng.random(), labels


def give_generator(worker: int) -> None:
    """Give the worker's dataset a generator, as PyTorch's documentation of worker_init_fn does."""
    info = get_worker_info()
    info.dataset.generator = np.random.default_rng(info.seed)


class Growing(Points):
    """Points that get harder the more of them were seen."""

    def noise(self) -> float:
        """Return a number that depends on a counter."""
        return self.seen / 100


class Flagged(Points):
    """Points with a flag that says whether their generator is made."""

    ready = False

    def noise(self) -> float:
        """Return a random number."""
        if not self.ready:
            self.rng = np.random.default_rng(1)
            self.ready = True
        return self.rng.random()


class Ordered(Points):
    """Points in a long order that is shuffled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(70_000))
        self.weights = np.zeros(70_000)

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(self.order[index] % SAMPLES)
        return inputs + self.weights[index], labels


# Loaders ------------------------------------------------------------------------------------------


class Unsteady:
    """A loader of its own that draws its order from the operating system."""

    def __iter__(self):
        for _ in range(10):
            yield torch.tensor([[random.SystemRandom().random(), 1.0]] * 4), torch.ones(4, 1)


class Steady:
    """A loader of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __iter__(self):
        for index in self.rng.permutation(10):
            yield torch.full((4, 2), index / 10 + noise()) + torch.randn(4, 2), torch.ones(4, 1)


class Keeping(Steady):
    """A loader of its own that saves its position."""

    def __init__(self) -> None:
        self.at = self.epoch = 0

    def __iter__(self):
        if not self.at:
            self.epoch += 1
        while self.at < 10:
            self.at += 1
            yield torch.full((4, 2), self.at / 10 + self.epoch + noise()), torch.ones(4, 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at = state["at"]
        self.epoch = state["epoch"]


class Forgetful(Keeping):
    """A loader that forgets its epoch."""

    def load_state_dict(self, state):
        self.at = state["at"]


DATASETS = {
    "points": Points,
    "buffered": Buffered,
    "sized": Sized,
    "counted": Counted,
    "unseeded": Unseeded,
    "sharded": Sharded,
    "dated": Dated,
    "measured": Measured,
    "resumable": Resumable,
    "uneven": Uneven,
    "walked": Walked,
    "hidden": Hidden,
    "remembered": Remembered,
    "late": Late,
    "local": Local,
    "growing": Growing,
    "flagged": Flagged,
    "ordered": Ordered,
    "lazy": lambda: Lazy(lambda: np.random.default_rng(3)),
    "lazy without seed": lambda: Lazy(np.random.default_rng),
    "lazy random": lambda: Lazy(random.Random),
}
LOADERS = {
    "unsteady": Unsteady,
    "steady": Steady,
    "keeping": Keeping,
    "forgetful": Forgetful,
    "generator": lambda: iter(Steady()),
}


class Data(LightningDataModule):
    """One loader, or several.

    Args:
        dataset: Which dataset, or which loader; with + between them, several.
        mode: How several are combined; "" for a list, "dict" for a dict.
        workers: Number of data workers.
        persistent: Whether the workers stay from epoch to epoch.
        stateful: Whether the loader is torchdata's.
        every: Steps between two snapshots of the state in its workers.
        init: Whether worker_init_fn makes a generator.
        collate: Whether samples are joined by a function that makes a generator.
    """

    def __init__(
        self,
        dataset: str = "points",
        mode: str = "",
        workers: int = 0,
        persistent: bool = False,
        stateful: bool = False,
        every: int = 1,
        init: bool = False,
        collate: bool = False,
    ) -> None:
        super().__init__()
        self.names = dataset.split("+")
        self.mode = mode
        self.kind = DataLoader
        self.options = {"num_workers": workers, "persistent_workers": persistent}
        if stateful:
            self.kind = StatefulDataLoader
            self.options["snapshot_every_n_steps"] = every
        if init:
            self.options["worker_init_fn"] = give_generator
        if collate:
            self.options["collate_fn"] = LazyCollate()

    def one(self, name: str, size: int):
        if name in LOADERS:
            return LOADERS[name]()
        dataset = DATASETS[name]()
        shuffle = {} if isinstance(dataset, IterableDataset) else {"shuffle": True}
        return self.kind(dataset, size, **shuffle, **self.options)

    def train_dataloader(self):
        loaders = [self.one(name, 4 + 6 * number) for number, name in enumerate(self.names)]
        if len(loaders) == 1:
            return loaders[0]
        if self.mode == "dict":
            return dict(zip("abc", loaders, strict=False))
        return CombinedLoader(loaders, self.mode) if self.mode else loaders


def write(folder: Path, size: int) -> None:
    """Write numbers as litdata's samples, once."""
    if not (folder / "index.json").exists():
        from litdata.streaming import Cache

        cache = Cache(str(folder), chunk_size=7)
        for index in range(size):
            cache[index] = index
        cache.done()
        cache.merge()


class Streamed(LightningDataModule):
    """litdata's loader of samples in a folder; the samples are written there once.

    Args:
        workers: Number of data workers.
        folder: Where the samples are.
    """

    def __init__(self, workers: int = 0, folder: str = "samples") -> None:
        super().__init__()
        self.workers = workers
        self.folder = Path(folder)

    def prepare_data(self) -> None:
        write(self.folder, SAMPLES)

    def train_dataloader(self):
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(
            str(self.folder), shuffle=True, transform=lambda index: sample(index, noise())
        )
        return StreamingDataLoader(dataset, batch_size=4, num_workers=self.workers)


class Mixed(LightningDataModule):
    """litdata's mixture of two datasets, the second of which has half as many samples.

    Args:
        workers: Number of data workers.
        kind: "all": both to their ends; "weights": three of the first to one of the second, until
            one ends; "batches": each batch of one of them; "parallel": a pair of both.
    """

    def __init__(self, workers: int = 0, kind: str = "all") -> None:
        super().__init__()
        self.workers = workers
        self.kind = kind

    def prepare_data(self) -> None:
        write(Path("first"), SAMPLES)
        write(Path("second"), SAMPLES // 2)

    def train_dataloader(self):
        from litdata import (
            CombinedStreamingDataset,
            ParallelStreamingDataset,
            StreamingDataLoader,
            StreamingDataset,
        )

        def draw(index):
            return sample(index, noise())

        sets = [
            StreamingDataset(name, shuffle=True, transform=draw) for name in ("first", "second")
        ]
        if self.kind == "parallel":
            both = ParallelStreamingDataset(
                sets, transform=lambda pair: (pair[0][0] + pair[1][0], pair[0][1])
            )
        elif self.kind == "weights":
            both = CombinedStreamingDataset(
                sets, seed=5, weights=[0.75, 0.25], iterate_over_all=False
            )
        elif self.kind == "batches":
            both = CombinedStreamingDataset(sets, batching_method="per_stream")
        else:
            both = CombinedStreamingDataset(sets)
        return StreamingDataLoader(both, batch_size=4, num_workers=self.workers)


# Modules and callbacks ----------------------------------------------------------------------------


class Both(Model):
    """Trains on the batches of several loaders."""

    def training_step(self, batch, batch_idx):
        interrupt(f"{self.current_epoch}:{batch_idx}")
        return sum(self.loss(one) for one in batch if one is not None)


class Drawing(Model):
    """Draws several batches for each step by itself."""

    def __init__(self, each: int = 1) -> None:
        super().__init__()
        self.each = each

    def training_step(self, dataloader_iter):
        interrupt(f"{self.current_epoch}:{self.trainer.fit_loop.epoch_loop.batch_idx}")
        return sum(self.loss(next(dataloader_iter)[0]) for _ in range(self.each))


class Ahead(Model):
    """Draws its batches by itself, one ahead."""

    batch = None

    def training_step(self, dataloader_iter):
        interrupt(f"{self.current_epoch}:{self.trainer.fit_loop.epoch_loop.batch_idx}")
        now = self.batch or next(dataloader_iter)[0]
        try:
            self.batch = next(dataloader_iter)[0]
        except StopIteration:
            self.batch = None
        return self.loss(now)


class Shuffling(Callback):
    """Shuffles the dataset's contents, and counts in them."""

    def on_train_epoch_start(self, trainer, pl_module):
        random.shuffle(trainer.train_dataloader.dataset.order)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.train_dataloader.dataset.weights[batch_idx] += 1


class OfModel(LightningDataModule):
    """Uses the model's loaders."""

    def train_dataloader(self):
        return self.trainer.lightning_module.train_dataloader()


class Step:
    def __init__(self, *parts) -> None:
        self.parts = parts

    def __iter__(self):
        return iter(self.parts)


class Memory:
    """A replay buffer."""

    def __init__(self, size: int) -> None:
        self.steps = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self.steps)

    def sample(self, size: int):
        """Return steps at random."""
        places = np.random.choice(len(self.steps), size)
        return [self.steps[place] for place in places]


class Replay(IterableDataset):
    """Steps from a replay buffer, as in Lightning's examples of reinforcement learning.

    Args:
        memory: The buffer.
        live: Whether each step is drawn when it is asked for, instead of all at an epoch's start.
    """

    def __init__(self, memory: Memory, live: bool) -> None:
        self.memory = memory
        self.live = live

    def __iter__(self):
        drawn = itertools.repeat(None, SAMPLES) if self.live else self.memory.sample(SAMPLES)
        for step in drawn:
            state, reward, _ = step or self.memory.sample(1)[0]
            yield torch.from_numpy(state), torch.tensor([reward])


class Agent(Model):
    """Learns from a replay buffer that it fills.

    Args:
        size: Steps that the buffer holds.
        live: Whether steps are drawn from the buffer while it is filled.
        objects: Whether steps are objects of a class.
    """

    def __init__(self, size: int = 50, live: bool = False, objects: bool = False) -> None:
        super().__init__()
        self.memory = Memory(size)
        self.live = live
        self.kind = Step if objects else lambda *parts: parts
        for _ in range(size):
            self.play()

    def play(self) -> None:
        """Add a step."""
        self.memory.steps.append(
            self.kind(np.random.rand(2).astype(np.float32), float(np.random.rand()), False)
        )

    def train_dataloader(self):
        return DataLoader(Replay(self.memory, self.live), 4)

    def training_step(self, batch, batch_idx):
        self.play()
        return super().training_step(batch, batch_idx)


class Steps(Callback):
    """Makes the dataset harder, step by step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trainer.train_dataloader.dataset.level += 0.1


__all__ = ["Both", "Estimated", "Model", "Points", "nn", "Dataset"]
