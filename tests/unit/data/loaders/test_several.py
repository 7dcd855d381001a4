"""Training loaders of every kind continue at any batch with the right batches.

A new process begins where another one stopped, and its batches are those of an uninterrupted run.
New loaders play the part of the new process; Lightning's fetcher may be one batch ahead.
"""

import io
import itertools
import os
import queue
import random
import re
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import streams
import torch
from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, get_worker_info
from torchdata import nodes

from sagemaker_lightning.compat.lightning_loops import _TakesLoaders
from sagemaker_lightning.compat.random_generators import entropy_replaced
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import exact, plan
from sagemaker_lightning.data.partition import PartitionedLoader
from sagemaker_lightning.data.seeded_indices import seed_all, unseeded
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.resume.fit_loops import _Loaders

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
    """Return what is left of an epoch, which to iterate over would begin anew."""
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
ALWAYS_RUN = [
    "a buffer",
    "a stream that counts",
    "a dataset with a state",
    "a state",
    "a state of a dataset, without workers",
    "a loader of its own",
    "a loader of its own with a state",
    "lazy",
    "the shortest",
    "a state in workers that stay",
    "a stateful loader without a state",
    "lazy in workers",
    "a generator",
    "the longest, and others again",
]


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a test of these loaders: data workers take seconds."""
    return [
        *([] if name in ALWAYS_RUN else [pytest.mark.soak]),
        *([pytest.mark.slow] if "workers" in name.replace("without workers", "") else []),
    ]


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in LOADERS])
def test_any_batch(name, limit):
    alone = train(LOADERS[name], limit=limit)
    later = (2, 0) if alone[-1][0] == 2 else (1, 0)
    for stops in (
        [(0, 2)],
        [(1, 0)],
        [(0, 2), (1, 1), later] if later[0] == 2 else [(0, 2), later],
    ):
        assert train(LOADERS[name], stops, limit) == alone


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
    """A loader that is its own iterator, and begins anew with each iteration."""

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

    course = None

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

    An iteration that was left before its end would go on.
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
    """Return torchdata's loader of nodes, which saves its state and is no DataLoader."""
    samples = nodes.SamplerWrapper(RandomSampler(range(8)))
    return nodes.Loader(nodes.Mapper(nodes.Batcher(samples, 2), torch.tensor))


def cycle(*loaders) -> CombinedLoader:
    return CombinedLoader(loaders, "max_size_cycle")


SMALL_LOADERS = {
    "a range": lambda: range(4),
    "drawn at once": AtOnce,
    "its own iterator": Looping,
    "a file": lambda: DataLoader(Lines(), 2),
    "a state of an end": Ending,
    "a state that stays": lambda: DataLoader(OfHuggingFace(), 4),
    "a state that stays, stateful": lambda: streams.StatefulDataLoader(OfHuggingFace(), 4),
    "a state without its buffer": lambda: DataLoader(OfHuggingFace(8), 4),
    "a state without its buffer, stateful": lambda: streams.StatefulDataLoader(OfHuggingFace(8), 4),
    "a state that raises": lambda: DataLoader(Raising(8), 4),
    "a state that raises, stateful": lambda: streams.StatefulDataLoader(Raising(8), 4),
    "a state without its epoch": streams.Forgetful,
    "torchdata's nodes": of_nodes,
    "litdata's": OfLitdata,
    "litdata's of several datasets": OfLitdatas,
    "shared by itself": lambda: Shared(4),
    "a sampler that counts": lambda: DataLoader(range(9), 2, sampler=Counting(9)),
    "shorter streams": lambda: cycle(
        DataLoader(Numbers(10), 2), DataLoader(Numbers(6), 2), DataLoader(Numbers(2), 2)
    ),
    "a shorter sampler": lambda: cycle(
        DataLoader(range(14), 2), DataLoader(range(6), 2, sampler=Counting(6))
    ),
    "others of another length": lambda: CombinedLoader(
        [Shared(2), DataLoader(range(4)), DataLoader(Numbers(3), 1)], "max_size"
    ),
}


@pytest.mark.parametrize("name", SMALL_LOADERS)
def test_each_batch(name):
    """A run may be stopped before each of them, here before every third one."""
    make = SMALL_LOADERS[name]
    alone = train(make)
    places = [(epoch, batch) for epoch, batch, _ in alone]
    assert len({epoch for epoch, _ in places}) == EPOCHS
    for first in (1, 2, 3):
        assert train(make, places[first::3]) == alone


def test_an_epoch_that_ends_with_a_streams_last_batch_leaves_the_next_one_its_end():
    """The next epoch's first iteration is empty, and the loaders begin it again."""
    make = made("counted+resumable", "max_size_cycle", **STATEFUL)
    assert train(make, [(2, 0)]) == train(make)


def test_a_stream_without_batches_gives_none():
    assert train(lambda: DataLoader(Numbers(0), 4)) == []


@pytest.mark.parametrize(
    "name",
    [
        "a buffer",
        "a stream that counts",
        "a dataset with a state",
        "a loader of its own",
        "lazy",
        "a generator",
        "the longest, and others again",
    ],
)
def test_to_look_whether_batches_can_be_drawn_again_changes_none(name):
    assert train(LOADERS[name], proves=True) == train(LOADERS[name], proves=False)


def test_a_stream_of_one_batch():
    make = lambda: DataLoader(Numbers(4), 4)  # noqa: E731
    assert [place[:2] for place in train(make)] == [(epoch, 0) for epoch in range(3)]


class Numbers(IterableDataset):
    """Some numbers, each drawn."""

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


@pytest.mark.parametrize(("rank", "told"), [(0, 1), (1, 0)])
def test_the_first_rank_tells_what_a_resumed_epoch_takes(capsys, monkeypatch, rank, told):
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    states = stopped(LOADERS["a buffer"], 2) | {"why": "a reason"}
    assert not capsys.readouterr().out
    combined, fetcher = begin(LOADERS["a buffer"])
    combined.begin(fetcher, 0, 2, states)
    output = capsys.readouterr().out
    drawn_again = (
        r"the training data cannot start at a batch \(streams\.Buffered\): the 3 batches before "
        r"this one were drawn again, in \d\.\d s\n"
    )
    differs = "a reason: the rest of this epoch differs from that of an uninterrupted run\n"
    assert len(re.findall(drawn_again, output)) == output.count(differs) == told
    assert output.count("\n") == 2 * told


def test_nothing_is_told_of_an_epoch_that_begins(capsys):
    states = stopped(LOADERS["a buffer"], 0) | {"why": "a reason", "ahead": []}
    combined, fetcher = begin(LOADERS["a buffer"])
    combined.begin(fetcher, 0, 0, states)
    assert not capsys.readouterr().out


def test_another_number_of_workers_cannot_go_on_with_the_state_of_the_first():
    states = stopped(LOADERS["a state"], 2)
    combined, fetcher = begin(made("resumable", **STATEFUL, workers=1))
    says = (
        "--data: streams.Resumable saved its state with 0 data workers, now there are 1; go on "
        "with num_workers=0"
    )
    with pytest.raises(UserError, match=says):
        combined.begin(fetcher, 0, 2, states)


def test_what_moves_a_batch_to_the_device_draws_by_its_place():
    def drawn(epoch: int = 0, start: int = 0, rank: int = 0) -> list[float]:
        combined, _ = begin(made("points"))
        combined.rank = rank
        combined.begin(combined, epoch, start)
        return [torch.rand(1).item() for _ in iter(lambda: next(combined, None), None)]

    numbers = drawn()
    assert drawn(start=3) == numbers[3:]
    assert len({*numbers, *drawn(epoch=1), *drawn(rank=1)}) == 3 * len(numbers)


@pytest.mark.parametrize("dataset", ["points", "buffered", "steady"])
def test_a_hook_that_iterates_sees_the_same_after_a_resume(dataset):
    """An uninterrupted run has drawn from the loader before; a resumed one has not."""

    def seen(trained: bool, epoch: int = 1) -> str:
        combined, fetcher = begin(made(dataset))
        if trained:
            combined.begin(fetcher, 0, 0)
            next(fetcher)
        loop = SimpleNamespace(_combined_loader=combined)
        trainer = SimpleNamespace(fit_loop=loop, current_epoch=epoch, global_rank=0)
        Seeding(7).on_train_epoch_start(trainer, None)
        return str(list(combined.flattened[0]))

    assert seen(True) == seen(False) != seen(False, epoch=2)


def test_a_hook_between_epochs_sees_the_same_after_a_resume():
    """A loader that saves its state draws by the number of its iteration."""
    make = lambda: streams.StatefulDataLoader(Numbers(8), 4)  # noqa: E731

    def seen(combined: CombinedLoader) -> str:
        combined.epoch_begins(1)
        return str(list(combined.flattened[0]))

    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0)
    rest(fetcher)
    states = combined.states(fetcher, False)
    resumed, _ = begin(make)
    resumed.give_back(states)
    assert seen(resumed) == seen(combined) != seen(begin(make)[0])


def test_what_begins_an_epoch_leaves_generators_alone_that_a_loader_saves():
    keeping, shared = streams.Keeping(), Shared(2)
    keeping.rng, shared.rng = random.Random(1), random.Random(2)
    combined, _ = begin(lambda: [keeping, shared])
    combined.epoch_begins(3)
    assert keeping.rng.random() == random.Random(1).random()
    assert shared.rng.random() == random.Random(2).random()


def test_equal_streams_side_by_side_draw_apart():
    make = lambda: [DataLoader(Numbers(8), 4), DataLoader(Numbers(8), 4)]  # noqa: E731
    for _, _, batch in train(make):
        first, second = re.findall(r"tensor\((.*?)\)", batch)
        assert first != second


@pytest.mark.parametrize("end", ["reset", "leave"])
def test_an_iterator_is_closed_when_nobody_goes_on_with_it(end):
    closed = []

    class Opening:
        def __iter__(self):
            try:
                yield from range(5)
            finally:
                closed.append(True)

    combined, fetcher = begin(lambda: Opening())
    combined.begin(fetcher, 0, 0)
    next(fetcher)
    assert not closed
    getattr(combined, end)()
    assert closed == [True]
    combined.reset()
    assert next(combined, None) is None  # until somebody begins an epoch


class Unseeded(IterableDataset):
    """It draws an order as it begins, before its first sample."""

    def __iter__(self):
        return iter(torch.rand(8).tolist())

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("dataset", [Unseeded(), Numbers(8)], ids=["at once", "one by one"])
def test_a_loader_with_a_state_draws_by_the_number_of_its_iteration(dataset):
    def loader():
        torch.rand(1)
        return exact(streams.StatefulDataLoader(dataset, 4), 7)[0]

    first = loader()
    iterations = [str(list(first)) for _ in range(3)]
    assert len(set(iterations)) == 3
    second = loader()
    plan(second, 1, 0)
    assert [str(list(second)) for _ in range(2)] == iterations[1:]


def test_each_sample_of_a_loader_with_a_state_has_a_seed_of_its_own():
    def noise(batch_size: int) -> list[float]:
        loader, reason = exact(streams.StatefulDataLoader(streams.Remembered(), batch_size), 7)
        assert reason
        return torch.cat([inputs for inputs, _ in loader]).tolist()

    assert noise(4) == noise(5)


def test_batches_leave_the_generators_of_a_loader_with_a_state_alone():
    """Its dataset saves them, and draws on from them."""

    def noise(batch_size: int) -> list[float]:
        combined, fetcher = begin(
            lambda: streams.StatefulDataLoader(streams.Resumable(), batch_size)
        )
        combined.begin(fetcher, 0, 0)
        return torch.cat([inputs for (inputs, _), _, _ in rest(fetcher)]).tolist()

    assert noise(4) == noise(5)


def test_a_stateful_loader_of_plain_samples_has_positions():
    def drawn(start: int) -> list[str]:
        loader, reason = exact(streams.StatefulDataLoader(streams.Points(), 4, shuffle=True), 7)
        assert not reason
        loader.begin_epoch(1, start)
        return list(map(str, loader))

    assert drawn(3) == drawn(0)[3:]


@pytest.mark.parametrize(
    "make",
    [
        lambda: streams.StatefulDataLoader(Numbers(8), 4),
        lambda: streams.StatefulDataLoader(
            streams.Counted(), 8, num_workers=1, persistent_workers=True
        ),
        OfLitdata,
    ],
    ids=["stateful", "workers that stay", "litdata's"],
)
def test_validations_draw_the_same_from_a_loader_with_a_state(make):
    seeding = Seeding(7)
    trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=4)
    combined = CombinedLoader(
        [seeding._exact(trainer, make(), RunningStage.VALIDATING)], "sequential"
    )
    seeding.together(trainer, combined, "val")
    first = str([batch for batch, _, _ in combined])
    trainer.global_step = 9
    next(iter(combined))  # a validation may be left before its end
    assert str([batch for batch, _, _ in combined]) == first
    combined.reset()


def draw_an_offset(worker: int) -> None:
    """Give a worker's dataset a number that nothing seeds."""
    get_worker_info().dataset.level = np.random.default_rng().random()


@pytest.mark.parametrize("persistent", [False, True])
def test_what_worker_init_fn_draws_is_the_same_after_a_resume(persistent):
    def make():
        return DataLoader(
            streams.Points(),
            20,
            num_workers=1,
            worker_init_fn=draw_an_offset,
            persistent_workers=persistent,
        )

    assert train(make, [(1, 0)]) == train(make)


@pytest.mark.parametrize("options", [{}, STATEFUL, {**STATEFUL, "persistent": True}], ids=str)
def test_no_worker_outlives_its_loaders(options):
    """No worker outlives its loaders.

    Left to the garbage collector, each loader of torchdata would be waited for for 5 s, because
    nothing tells its workers to end.
    """
    children_before = set(active_children())
    combined, fetcher = begin(made("resumable", **TWO_WORKERS, **options))
    combined.begin(fetcher, 0, 0)
    next(fetcher)
    assert len(set(active_children()) - children_before) == 2
    combined.reset()
    assert set(active_children()) <= children_before


@pytest.mark.parametrize("options, rank, begin_anew", [({}, 0, 1), ({}, 1, 0), (STATEFUL, 0, 0)])
def test_workers_that_stay_are_said_to_begin_anew(capsys, monkeypatch, options, rank, begin_anew):
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    begin(made("resumable", **TWO_WORKERS, **options, persistent=True))
    begin(streams.Steady)
    warning = "persistent_workers: the workers of streams.Resumable start anew with each epoch"
    output = capsys.readouterr().out
    assert output.count(warning) == output.count("\n") == begin_anew


def test_no_worker_outlives_loaders_that_are_made_anew():
    """No worker outlives loaders that are made anew, except those that stay.

    Lightning makes them anew with `reload_dataloaders_every_n_epochs`; persistent loaders keep
    workers.
    """

    class Loop(_Loaders, _TakesLoaders):
        kind = "train"
        trainer = SimpleNamespace(global_rank=0)
        restart = SimpleNamespace(seeding=Seeding(7))

    children_before = set(active_children())
    loop = Loop()
    combined, fetcher = begin(made("resumable+resumable", workers=1, **STATEFUL, persistent=True))
    vars(loop)["_combined_loader"] = combined
    combined.begin(fetcher, 0, 0)
    stays = combined.flattened[0]
    loop._combined_loader = CombinedLoader([stays])
    assert set(active_children()) - children_before == set(stays._iterator._workers)
    loop._combined_loader.reset()
    assert set(active_children()) <= children_before


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_has_ended_before_the_others_does_not_begin_anew(persistent):
    """A worker that ended before the others does not begin anew.

    At its end its dataset says that it is at its beginning; the epoch continues with the other
    worker.
    """
    make = made("uneven", **STATEFUL, **TWO_WORKERS, persistent=persistent)
    alone = train(make)
    assert train(make, [(0, 7), (1, 9)]) == alone
    assert [epoch for epoch, _, _ in alone] == [0] * 11 + [1] * 11 + [2] * 11


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_litdata(tmp_path, monkeypatch, workers):
    """litdata's loader saves its position, and counts its epochs.

    What samples draw in its workers is not part of its state.
    """
    monkeypatch.chdir(tmp_path)
    streams.Streamed().prepare_data()
    make = lambda: streams.Streamed(workers).train_dataloader()  # noqa: E731
    for limit in (0, 7):
        alone = train(make, limit=limit)
        assert len(alone) == 3 * (limit or 10) and len({batch for _, _, batch in alone}) == len(
            alone
        )
        assert train(make, [(0, 3), (1, 0), (1, 2), (2, 0)], limit) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers", [pytest.param(0, marks=pytest.mark.soak), pytest.param(1, marks=pytest.mark.soak), 2]
)
@pytest.mark.parametrize(
    "mode",
    [
        "all",
        *(
            pytest.param(mode, marks=pytest.mark.soak)
            for mode in ("weights", "batches", "parallel")
        ),
    ],
)
def test_litdata_of_several_datasets(tmp_path, monkeypatch, workers, mode):
    """Here its state is right between epochs only, so an epoch is drawn again."""
    monkeypatch.chdir(tmp_path)
    streams.Mixed().prepare_data()
    make = lambda: streams.Mixed(workers, mode).train_dataloader()  # noqa: E731
    alone = train(make)
    last_batch = max(batch for epoch, batch, _ in alone if epoch == 1)
    assert len({batch for _, _, batch in alone}) == len(alone)
    assert train(make, [(0, 4), (1, 0), (1, last_batch), (2, 0)]) == alone


def test_the_place_in_an_epoch_is_known():
    """How long it is, too; who iterates once more begins at its first batch."""
    make = lambda: cycle(DataLoader(range(6)), Shared(4))  # noqa: E731
    combined, fetcher = begin(make)
    assert combined.drawn == 0
    combined.begin(fetcher, 1, 2)
    assert len(combined) == fetcher.length == 6 and combined.drawn == 2
    assert [index for _, index, _ in rest(combined)] == [2, 3, 4, 5] and combined.drawn == 6
    assert [index for _, index, _ in combined] == [0, 1, 2, 3, 4, 5]
    combined, fetcher = begin(lambda: DataLoader(Numbers(8), 4))
    combined.begin(fetcher, 0, 0)
    assert fetcher.length is None


def test_steps_that_draw_batches_go_on_at_the_batch_that_was_drawn_last():
    def begin_with_iterator(step: int, states: dict | None = None):
        combined, _ = begin(made("steady"))
        fetcher = _DataLoaderIterDataFetcher()
        fetcher.setup(combined)
        iter(fetcher)
        return combined, fetcher, combined.begin(fetcher, 0, step, states)

    combined, fetcher, _ = begin_with_iterator(0)
    batches = next(fetcher)
    for _ in range(5):
        next(batches)
    states = combined.states(fetcher, True)
    _, resumed, drawn = begin_with_iterator(2, states)
    assert drawn == 5
    assert str(next(next(resumed))) == str(next(batches))


@pytest.mark.parametrize(
    ("make", "ahead"),
    [
        (lambda size: DataLoader(range(size)), 0),
        (lambda size: DataLoader(Numbers(size), 1), 1),  # the checkpoint holds one more
    ],
    ids=["order", "stream"],
)
def test_nothing_is_left_of_an_epoch_of_data_that_have_become_shorter(make, ahead):
    sizes = iter([7, 2])
    seen = train(lambda: make(next(sizes)), [(0, 3)])
    assert [epoch for epoch, _, _ in seen] == [0] * (3 + ahead) + [1, 1, 2, 2]


def test_other_loaders_than_before_begin_without_a_state():
    """A loader that is there again goes on; none of a run fails for others."""
    three = [streams.Keeping, Looping, streams.Keeping]

    def batches(begins: list, states: dict) -> list:
        combined, fetcher = begin(lambda: [kind() for kind in begins])
        combined.give_back(states)
        combined.begin(fetcher, 0, 2, states)
        return next(fetcher)[0]

    for before in (three[:1], three):
        states = stopped(lambda kinds=before: [kind() for kind in kinds], 2)
        assert str(batches(three[:2], states)[0]) == str(batches(before, states)[0])


def test_a_checkpoint_holds_a_batch_ahead_only_where_it_cannot_be_drawn_again():
    class InWorkers(streams.Steady):
        num_workers = 1

    def ahead(make, within: bool = True) -> int:
        combined, fetcher = begin(make)
        combined.begin(fetcher, 0, 0)
        next(fetcher)
        assert len(fetcher.batches) == 1
        return len(combined.states(fetcher, within)["ahead"])

    assert ahead(streams.Steady) == ahead(streams.Keeping) == 1
    assert ahead(streams.Steady, within=False) == ahead(InWorkers) == 0
    stateless = lambda: streams.StatefulDataLoader(Numbers(8), 2)  # noqa: E731
    assert ahead(stateless) == 1


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize(
    "loader",
    [
        streams.Steady,
        streams.Keeping,
        lambda: DataLoader(Numbers(12), 4),
        lambda: DataLoader(range(12), 4, sampler=Counting(12)),
        lambda: DataLoader(streams.Points(), 20, num_workers=1, persistent_workers=True),
    ],
    ids=["order", "state", "stream", "sampler", "workers that stay"],
)
def test_what_the_program_gives_anew_is_in_no_checkpoint(loader, within):
    """A resumed run may rightly have another folder than the first one, or another number."""

    def make():
        made_loader = loader()
        for owner in (made_loader, *map(vars(made_loader).get, ("dataset", "sampler"))):
            if hasattr(owner, "__dict__"):
                owner.folder = "a folder"
        return made_loader

    states = None
    for epoch in (0, 1):
        combined, fetcher = begin(make)
        if states and not within:
            combined.give_back(states)
        combined.begin(fetcher, 0 if within else epoch, epoch if within else 0, states, proves=True)
        next(fetcher)
        if not within:
            rest(fetcher)
        states = combined.states(fetcher, within)
        combined.reset()
        assert "folder" not in str(states)


def test_a_dataset_is_no_part_of_the_order():
    combined, fetcher = begin(lambda: DataLoader(streams.Points(), 8, shuffle=True))
    combined.begin(fetcher, 0, 0)
    combined.flattened[0].dataset.level = 5.0
    next(fetcher)
    assert combined.states(fetcher, True)["loaders"][0]["order"] == {}


def test_what_a_run_has_changed_in_a_stream_is_changed_after_a_resume():
    """What was drawn before is drawn again from the stream as it was."""
    make = lambda: DataLoader(streams.Buffered(), 8)  # noqa: E731

    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0)
    next(fetcher)
    combined.flattened[0].dataset.level = 5.0
    next(fetcher)
    states = combined.states(fetcher, True)
    resumed, other = begin(make)
    resumed.begin(other, 0, 2, states)
    assert resumed.flattened[0].dataset.level == 5.0
    assert str(rest(other)) == str(rest(fetcher))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_first_batch_is_drawn_twice_once(workers):
    """Not where workers have to draw an epoch's first batches again, which takes long enough."""

    class Watched(streams.Steady):
        num_workers = workers
        iterations = 0

        def __iter__(self):
            Watched.iterations += 1
            return super().__iter__()

    combined, fetcher = begin(Watched)
    combined.begin(fetcher, 0, 0, proves=True)
    assert Watched.iterations == 2
    states = combined.states(fetcher, True)
    rest(fetcher)
    combined.begin(fetcher, 1, 0, proves=True)
    assert Watched.iterations == 3
    combined, fetcher = begin(Watched)
    combined.begin(fetcher, 0, 1, states, proves=True)
    assert Watched.iterations == (4 if workers else 5)


def test_a_loaders_generator_which_seeds_its_workers_is_seeded_by_the_epoch():
    def seed(epoch: int) -> int:
        combined, fetcher = begin(lambda: DataLoader(range(8), 4, generator=torch.Generator()))
        combined.flattened[0].generator.seed()
        combined.begin(fetcher, epoch, 0)
        return combined.flattened[0].generator.initial_seed()

    assert seed(1) == seed(1) != seed(2)


@pytest.mark.parametrize("stateful", [False, True])
def test_workers_stay_where_a_checkpoint_can_hold_what_is_in_them(stateful):
    children_before = set(active_children())
    combined, fetcher = begin(made("resumable", workers=1, persistent=True, stateful=stateful))
    workers = []
    for epoch in (0, 1):
        combined.begin(fetcher, epoch, 0)
        next(fetcher)
        workers.append({child.pid for child in set(active_children()) - children_before})
    combined.reset()
    assert len(workers[1]) == 1 and (workers[0] == workers[1]) == stateful


@pytest.mark.parametrize(
    ("options", "done"), [({}, 1), (STATEFUL, 1), ({"persistent": True}, 0)], ids=str
)
def test_workers_hold_the_data_of_their_start(options, done):
    """A run that is resumed starts workers with the same data, whatever has changed since."""
    make = made("remembered", workers=1, **options)
    combined, fetcher = begin(make)
    combined.limits = 3
    dataset = combined.flattened[0].dataset
    dataset.level = 1.0
    for epoch in (0, 1):
        combined.begin(fetcher, epoch, 0)
        dataset.level += 5.0
        if not epoch:
            rest(fetcher)
    if done:
        next(fetcher)
        states = combined.states(fetcher, True)
    else:
        rest(fetcher)
        states = combined.states(fetcher, False)
        combined.begin(fetcher, 2, 0)
    resumed, other = begin(make)
    resumed.limits = 3
    if not done:
        resumed.give_back(states)
        assert resumed.flattened[0].dataset.level == 11.0
    resumed.begin(other, 1 if done else 2, done, states)
    assert resumed.flattened[0].dataset.level == 11.0
    other.fetched += done
    assert str(rest(other)) == str(rest(fetcher))
    combined.reset()
    resumed.reset()


def test_what_is_not_the_same_when_drawn_again_is_told():
    class Timed(IterableDataset):
        ticks = iter(range(1000))

        def __iter__(self):
            yield from (float(next(self.ticks)) for _ in range(12))

    def why(make) -> str:
        combined, fetcher = begin(make)
        combined.begin(fetcher, 0, 0, proves=True)
        return combined.why

    class Own(DataLoader):
        pass

    assert why(lambda: streams.Unsteady()) == "streams.Unsteady draws other batches each time"
    assert why(lambda: DataLoader(Timed(), 4)).endswith("Timed draws other batches each time")
    assert why(lambda: Own(Timed(), 4)).endswith("Own draws other batches each time")
    assert (
        why(lambda: [streams.Steady(), streams.Unsteady()])
        == "streams.Unsteady draws other batches each time"
    )
    for repeatable in (
        streams.Steady,
        made("buffered"),
        made("points"),
        made("resumable", **STATEFUL),
    ):
        assert why(repeatable) == ""


class KeepingWorkers(DataLoader):
    """Goes on with one iterator over all epochs, as timm's MultiEpochsDataLoader."""

    def __init__(self, **options) -> None:
        super().__init__(range(8), 2, **options)
        vars(self)["batch_sampler"] = itertools.cycle(list(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        yield from itertools.islice(self.iterator, 4)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow)],
    ids=["no workers", "workers"],
)
@pytest.mark.parametrize("stage", ["training", "validation"])
def test_a_loader_that_keeps_an_iterator_is_left_as_it_is(options, stage):
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]] * EPOCHS
    if stage == "validation":
        trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=4)
        seeding = Seeding(7)
        loader = seeding._exact(trainer, KeepingWorkers(**options), RunningStage.VALIDATING)
        combined = CombinedLoader([loader], "sequential")
        seeding.together(trainer, combined, "val")
        drawn = [batch.tolist() for _ in range(EPOCHS) for batch, _, _ in combined]
    else:
        combined, fetcher = begin(lambda: KeepingWorkers(**options))
        drawn = []
        for epoch in range(EPOCHS):
            combined.begin(fetcher, epoch, 0, proves=True)
            drawn += [batch.tolist() for batch, _, _ in rest(fetcher)]
        assert combined.why == (
            "test_several.KeepingWorkers keeps an iterator from one epoch to the next, so it "
            "draws as without this callback, and a resumed run has other batches than one left "
            "alone"
        )
    combined.reset()
    assert drawn == expected


class InThread:
    """A loader that draws ahead, in a thread."""

    def __iter__(self):
        batches = queue.Queue(1)
        thread = Thread(target=lambda: [batches.put(number) for number in range(4)], daemon=True)
        thread.start()
        for _ in range(4):
            yield batches.get()


def test_a_loader_that_draws_in_a_thread_is_told():
    combined, fetcher = begin(InThread)
    combined.begin(fetcher, 0, 0, proves=True)
    assert combined.why.startswith("test_several.InThread draws in a thread of its own, so ")
    assert [batch for batch, _, _ in rest(fetcher)] == [0, 1, 2, 3]


def test_a_batch_ahead_that_no_checkpoint_can_hold_is_told():
    class Thing:
        pass

    def make():
        return streams.StatefulDataLoader(
            streams.Resumable(), 4, collate_fn=lambda samples: Thing()
        )

    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0)
    assert combined.why.endswith("Thing, which no checkpoint can hold") and combined.why.startswith(
        "a batch holds a test_several."
    )
    assert combined.states(fetcher, True)["ahead"] == []


def test_states_are_taken_only_when_they_are_asked_for():
    class Counting(streams.Keeping):
        states_taken = 0

        def state_dict(self):
            Counting.states_taken += 1
            return super().state_dict()

    train(Counting)
    assert Counting.states_taken == 1  # asked once: can a checkpoint hold it?
    train(Counting, [(0, 2)])
    assert Counting.states_taken == 3


def test_a_state_that_no_checkpoint_can_hold_is_not_needed():
    class Odd(streams.Keeping):
        def state_dict(self):
            return super().state_dict() | {"odd": self}

    assert train(Odd, [(0, 2), (1, 1)]) == train(Odd)


def test_what_is_made_without_a_seed_follows_from_what_is_drawn():
    def made() -> list[float]:
        seed_all("sample", 1)
        makers = (
            np.random.default_rng,
            random.Random,
            np.random.RandomState,
            np.random.default_rng,
        )
        return [float(make().random()) for make in makers]

    with entropy_replaced(unseeded.bits):
        numbers = made()
        assert numbers == made() and len(set(numbers)) == 4
        for size in (1, 8, 63, 128, 1000):  # all of its bits are drawn
            drawn = [unseeded.bits(size) for _ in range(40)]
            assert max(drawn).bit_length() == size and any(bits & 1 for bits in drawn)
        assert random.SystemRandom().random() != random.SystemRandom().random()
        unseeded.end()
        assert np.random.default_rng().random() != np.random.default_rng().random()


def test_only_the_thread_that_trains_draws_what_follows():
    seed_all("sample", 1)
    expected = [unseeded.bits(64) for _ in range(2)]
    others = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            seed_all("sample", 1)
            first = unseeded.bits(64)
            others.append(pool.submit(unseeded.bits, 64).result())
            assert [first, unseeded.bits(64)] == expected
    assert len({*others, *expected}) == 4


def test_a_process_forked_from_the_one_that_trains_draws_something_else():
    seed_all("sample", 1)
    expected = unseeded.bits(64)
    seed_all("sample", 1)
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, str(unseeded.bits(64)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert int(pipe.read()) != expected
