"""data/loaders/several.py: the training loaders of an epoch continue with the right batches.

A new process begins where another one stopped, and its batches are those of an uninterrupted run.
New loaders play the part of the new process; Lightning's fetcher may be one batch ahead.
"""

from multiprocessing import active_children
from types import SimpleNamespace

import nightly
import pytest
import streams
import torch
from loader_epochs import (
    EPOCHS,
    LOADERS,
    STATEFUL,
    TWO_WORKERS,
    AtOnce,
    Counting,
    Ending,
    Lines,
    Looping,
    Numbers,
    OfHuggingFace,
    OfLitdata,
    OfLitdatas,
    Raising,
    Shared,
    begin,
    cycle,
    made,
    of_counting_nodes,
    of_mixed_nodes,
    of_nodes,
    of_nodes_with_a_generator,
    of_nodes_with_an_own_sampler,
    of_unpacking_nodes,
    rest,
    stopped,
    train,
)
from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader
from torchdata import nodes

from sagemaker_lightning.compat.lightning_loops import _TakesLoaders
from sagemaker_lightning.data.loaders import several
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.resume.moments import _Loaders
from sagemaker_lightning.state.graph import values

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


@pytest.mark.parametrize("limit", nightly.all_but([3], [0, 3]))
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in LOADERS])
def test_loaders_continue_from_any_batch(name, limit):
    alone = train(LOADERS[name], limit=limit)
    later = (2, 0) if alone[-1][0] == 2 else (1, 0)
    for stops in (
        [(0, 2)],
        [(1, 0)],
        [(0, 2), (1, 1), later] if later[0] == 2 else [(0, 2), later],
    ):
        assert train(LOADERS[name], stops, limit) == alone


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
    "torchdata's nodes, mixed": of_mixed_nodes,
    "torchdata's nodes, with a generator": of_nodes_with_a_generator,
    "torchdata's nodes, of an own sampler": of_nodes_with_an_own_sampler,
    "nodes of the user's": of_counting_nodes,
    "nodes that draw ahead when they get a state": of_unpacking_nodes,
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


@pytest.mark.parametrize("end", ["reset", "leave"])
def test_an_iterator_is_closed_when_nobody_continues_it(end):
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


@pytest.mark.parametrize("options", [{}, STATEFUL, {**STATEFUL, "persistent": True}], ids=str)
def test_no_worker_outlives_its_loaders(options):
    """Left to the garbage collector, each loader of torchdata would be waited for for 5 s, because
    nothing tells its workers to end.
    """
    children_before = set(active_children())
    combined, fetcher = begin(made("resumable", **TWO_WORKERS, **options))
    combined.begin(fetcher, 0, 0)
    next(fetcher)
    assert len(set(active_children()) - children_before) == 2
    combined.reset()
    assert set(active_children()) <= children_before


def test_no_worker_outlives_loaders_that_are_made_anew():
    """Lightning makes them again with `reload_dataloaders_every_n_epochs`; persistent loaders keep
    workers.
    """

    class Loop(_Loaders, _TakesLoaders):
        kind = "train"
        trainer = SimpleNamespace(global_rank=0, world_size=1)
        of = SimpleNamespace(seeding=Seeding(7))

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


def test_steps_that_draw_batches_continue_at_the_batch_that_was_drawn_last():
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
    """A loader that is there again continues; none of a run fails for others."""
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
        return len(values.decode(combined.states(fetcher, within)["ahead"]))

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


def test_workers_of_loaders_that_stay_continue(monkeypatch):
    ended = []
    monkeypatch.setattr(several, "end_workers", ended.append)
    first, second = DataLoader(range(2)), DataLoader(range(2))
    loaders = several.EndingLoaders([first, second], "sequential")
    loaders.leave(several.EndingLoaders([first], "sequential"))
    assert ended == [second]
    loaders.leave()
    assert ended == [second, first, second]


def test_nodes_that_draw_ahead_in_a_thread_leave_no_batch_out():
    """To draw the first batch twice would move what they draw from while they continue."""

    def ahead() -> nodes.Loader:
        node = of_counting_nodes().root
        return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2))

    combined, fetcher = begin(ahead)
    combined.begin(fetcher, 0, 0, None, True)
    assert combined.why.startswith("torchdata.nodes.loader.Loader draws other batches each time")
    assert train(ahead) == train(ahead, [(1, 0), (2, 0)]) == train(of_counting_nodes)
