"""Iterators of DataLoaders that user code keeps: the rest of an iteration is that of the other."""

import copy
import itertools
import json
import sys

import pytest
import torch
from graph_records import Thing, nodes_of, record_of, through_a_file, train
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.kinds import draws
from sagemaker_lightning.state.graph.start import Start

ROWS = torch.arange(20.0)


class Halves(Sampler):
    """A sampler of a user's own."""

    def __iter__(self):
        yield from torch.randperm(10).tolist()

    def __len__(self) -> int:
        return 10


@pytest.fixture(autouse=True)
def watched():
    """What ExactResume does while a trainer trains."""
    torch.manual_seed(1)
    with draws.watching():
        yield


LOADERS = {
    "shuffled": lambda: DataLoader(TensorDataset(ROWS), 3, shuffle=True),
    "in order": lambda: DataLoader(TensorDataset(ROWS), 3),
    "without its last batch": lambda: DataLoader(
        TensorDataset(ROWS), 3, shuffle=True, drop_last=True
    ),
    "a generator of its own": lambda: DataLoader(
        TensorDataset(ROWS), 3, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "weighted": lambda: DataLoader(
        TensorDataset(ROWS), 3, sampler=WeightedRandomSampler([*range(1, 21)], 30)
    ),
    "a subset": lambda: DataLoader(TensorDataset(ROWS), 3, sampler=SubsetRandomSampler(range(15))),
    "single samples": lambda: DataLoader(
        TensorDataset(ROWS), batch_size=None, sampler=RandomSampler(ROWS, True, 50)
    ),
    "a batch sampler": lambda: DataLoader(
        TensorDataset(ROWS), batch_sampler=BatchSampler(SequentialSampler(ROWS), 4, False)
    ),
}


def rest(iterator) -> list:
    return [row.tolist() for (row,) in iterator]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize("is_there", [True, False], ids=["at the start", "made while training"])
def test_an_iteration_continues(make, taken, is_there):
    def begin():
        thing = Thing(loader=make(), iterator=None)
        if is_there:
            thing.iterator = iter(thing.loader)
        return thing

    def change(thing):
        thing.iterator = thing.iterator or iter(thing.loader)
        for _ in range(taken):
            next(thing.iterator)

    trained, resumed = train(begin, change)
    generator = torch.get_rng_state()
    expected = rest(trained.iterator)
    after = torch.get_rng_state()
    torch.set_rng_state(generator)
    assert rest(resumed.iterator) == expected != []
    assert torch.get_rng_state().equal(after)


def begun(make=LOADERS["shuffled"]):
    """Return an object with a loader, as a program makes it."""
    return Thing(loader=make(), iterator=None)


def draw_one(thing):
    """Train a step that draws from a new iterator."""
    thing.iterator = iter(thing.loader)
    next(thing.iterator)


def test_what_is_restored_is_saved_again_further_on():
    trained, resumed = train(begun, draw_one)
    next(trained.iterator), next(resumed.iterator)
    again = begun()
    record = record_of(begun, lambda thing: vars(thing).update(vars(resumed)))[0]
    restore({"model": again}, Start({"model": again}), through_a_file(record))
    assert rest(again.iterator) == rest(trained.iterator) == rest(resumed.iterator) != []


def test_iterators_that_are_joined_continue():
    def begin():
        return Thing(one=LOADERS["shuffled"](), other=LOADERS["weighted"](), both=None)

    def change(thing):
        thing.both = enumerate(zip(thing.one, thing.other, strict=False))
        next(thing.both), next(thing.both)

    trained, resumed = train(begin, change)
    expected, found = list(trained.both), list(resumed.both)
    assert str(found) == str(expected) and len(found) == 5


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python does not tell where a cycle is")
@pytest.mark.parametrize("taken", [1, 6, 7, 10, 20])
def test_a_cycle_over_a_loader_continues(taken):
    """In its first round over seven batches, and in later ones."""

    def begin():
        return Thing(loader=LOADERS["shuffled"](), cycle=None)

    def change(thing):
        thing.cycle = itertools.cycle(thing.loader)
        for _ in range(taken):
            next(thing.cycle)

    trained, resumed = train(begin, change)
    expected, found = (str([*itertools.islice(each.cycle, 20)]) for each in (trained, resumed))
    assert found == expected


UNKNOWN = {
    "a sampler of a user's": lambda: DataLoader(TensorDataset(ROWS), 3, sampler=Halves()),
    "workers": lambda: DataLoader(TensorDataset(ROWS), 3, shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_an_order_that_is_not_known_is_said(make):
    _, unsaved = record_of(lambda: begun(make), draw_one)
    assert [each.name for each in unsaved] == ["iterator"]


def test_an_order_is_not_known_any_more_once_its_sampler_has_changed():
    def change(thing):
        draw_one(thing)
        thing.loader.sampler.weights[3] += 1.0

    _, unsaved = record_of(lambda: begun(LOADERS["weighted"]), change)
    assert "iterator" in [each.name for each in unsaved]


def forged(change):
    record, _ = record_of(begun, draw_one)
    nodes = nodes_of(record)
    change(next(node for node in nodes if node[0] == "draws"))
    thing = begun()
    restore({"model": thing}, Start({"model": thing}), {**record, "nodes": json.dumps(nodes)})
    return thing


@pytest.mark.parametrize(
    "note",
    [None, [], [None, None, -1], [None, None, 1 << 60], [None, None, True], [7, None, 1]],
    ids=str,
)
def test_a_forged_position_is_refused(note):
    def change(node):
        node[2] = note

    with pytest.raises(UserError, match="damaged or forged"):
        forged(change)


@pytest.mark.parametrize("text", ["zz", "00", "", "ab" * 5056])
def test_a_forged_state_is_refused(text):
    def change(node):
        node[2] = [text, None, 1]

    with pytest.raises(UserError, match="damaged or forged"):
        forged(change)


def test_draws_of_others_are_as_before():
    """Torch's iterators are what they were once a training is over."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter  # what `watching` replaces

    within = _BaseDataLoaderIter._next_index
    with draws.watching():
        assert _BaseDataLoaderIter._next_index is not within
    assert _BaseDataLoaderIter._next_index is within
    assert rest(copy.copy(LOADERS["in order"]())) == [
        ROWS[begin : begin + 3].tolist() for begin in range(0, 20, 3)
    ]
