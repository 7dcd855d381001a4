"""data/loaders/positioned.py: loaders that begin at any batch."""

import multiprocessing
import random

import numpy as np
import pytest
import streams
import torch
from loader_epochs import (
    STATEFUL,
    begin,
    made,
    rest,
    train,
)
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from sagemaker_lightning.compat.random_generators import entropy_replaced
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.batch_order import PlacedOrder, PlacedSampler
from sagemaker_lightning.data.deterministic import make_resumable
from sagemaker_lightning.data.seeded_indices import seed_all, unseeded


def test_a_stateful_loader_of_plain_samples_has_positions():
    def drawn(start: int) -> list[str]:
        loader, reason = make_resumable(
            streams.StatefulDataLoader(streams.Points(), 4, shuffle=True), 7
        )
        assert not reason
        loader.begin_epoch(1, start)
        return list(map(str, loader))

    assert drawn(3) == drawn(0)[3:]


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


def test_a_dataset_is_no_part_of_the_order():
    combined, fetcher = begin(lambda: DataLoader(streams.Points(), 8, shuffle=True))
    combined.begin(fetcher, 0, 0)
    combined.flattened[0].dataset.level = 5.0
    next(fetcher)
    assert combined.states(fetcher, True)["loaders"][0]["order"]["nodes"] == "[]"


def test_a_loaders_generator_which_seeds_its_workers_is_seeded_by_the_epoch():
    def seed(epoch: int) -> int:
        combined, fetcher = begin(lambda: DataLoader(range(8), 4, generator=torch.Generator()))
        combined.flattened[0].generator.seed()
        combined.begin(fetcher, epoch, 0)
        return combined.flattened[0].generator.initial_seed()

    assert seed(1) == seed(1) != seed(2)


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


class Gradual(Sampler):
    """Draws each index when it is asked for it, from generators of every kind."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.ended = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self):
        left = list(range(10))
        while left:
            chance = random.random() + np.random.rand() + torch.rand(1).item() + self.rng.random()
            chance += np.random.default_rng().random()
            yield left.pop(int(chance * 1000) % len(left))
        self.ended += 1


def test_a_sampler_draws_the_same_as_asked_and_at_once():
    """At once with two ranks: one may begin an epoch that two continue with."""

    def indices(ranks: int) -> list[int]:
        parts = []
        for rank in range(ranks):
            loader = DataLoader(range(10), 4 // ranks, sampler=Gradual())
            loader = make_resumable(loader, 7, rank=rank, world_size=ranks)[0]
            loader.begin_epoch(1)
            parts.append([batch.tolist() for batch in loader])
        return [index for batches in zip(*parts, strict=True) for part in batches for index in part]

    with entropy_replaced(unseeded.bits):
        assert indices(1) == indices(2)
        assert sorted(indices(1)) == list(range(10))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_comes_to_its_end_with_the_last_batch(drop_last):
    sampler = Gradual()
    combined, fetcher = begin(
        lambda: DataLoader(range(10), 4, sampler=sampler, drop_last=drop_last)
    )
    for epoch in range(2):
        combined.begin(fetcher, epoch, 0)
        assert sampler.ended == epoch
        assert len(rest(fetcher)) == 3 - drop_last
    assert sampler.ended == 2


def test_a_sampler_leaves_the_generators_of_the_process_alone():
    loader = make_resumable(DataLoader(range(10), 4, sampler=Gradual()), 7)[0]
    loader.begin_epoch(0)
    seed_all("a step")
    expected = random.random(), np.random.rand(), torch.rand(1).item(), unseeded.bits(64)
    seed_all("a step")
    indices = iter(loader.batch_plan)
    next(indices)
    next(indices)
    drawn = random.random(), np.random.rand(), torch.rand(1).item(), unseeded.bits(64)
    assert drawn == expected


RESUMED = []  # what InPlace was given


class InPlace(PlacedSampler):
    """Batches in an order that a number decides."""

    marks = {"size": 3}

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        raise AssertionError("the order is given, not drawn")

    def placed(self, number):
        return Rotated(range(number % 5, number % 5 + 5))

    def check_same(self, marks, within):
        RESUMED.append((marks, within))


class Rotated(PlacedOrder):
    def __init__(self, numbers) -> None:
        self.numbers = numbers
        self.reached = []

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, batch):
        return [self.numbers[batch] % 5]

    def reach(self, batch):
        self.reached.append(batch)


def test_an_order_by_set_epoch_is_compared_with_that_of_the_interrupted_run():
    def make():
        return DataLoader(range(5), batch_sampler=InPlace())

    RESUMED.clear()
    combined, fetcher = begin(make)
    combined.begin(fetcher, 1, 2)
    states = combined.states(fetcher, True)
    assert states["loaders"][0]["marks"] == {"size": 3}
    resumed, other = begin(make)
    resumed.begin(other, 1, 2, states)
    assert RESUMED == [({"size": 3}, True)]
    assert str(rest(other)) == str(rest(fetcher))
    for forged in (7, {"size": "x"}, {"size": None}):
        states["loaders"][0]["marks"] = forged
        third, fetcher = begin(make)
        with pytest.raises(UserError, match="checkpoint"):
            third.begin(fetcher, 1, 2, states)


def test_an_order_that_is_reported_is_shared_by_ranks():
    parts = []
    for rank in range(2):
        loader = make_resumable(
            DataLoader(range(5), batch_sampler=InPlace()), 7, rank=rank, world_size=2
        )[0]
        loader.begin_epoch(1)
        parts.append([batch.item() for batch in loader])
    loader = make_resumable(DataLoader(range(5), batch_sampler=InPlace()), 7)[0]
    loader.begin_epoch(1)
    order = loader.batch_plan.begun
    assert [batch.item() for batch in loader] == [order[batch][0] for batch in range(5)]
    assert order.reached == [0, 1, 2, 3, 4]
    assert parts == [[order[0][0], order[2][0]], [order[1][0], order[3][0]]]


class Levelled(Dataset):
    """Its samples have a level that training sets, in memory that workers share."""

    def __init__(self):
        self.level = multiprocessing.Value("i", 0)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index, self.level.value


def test_workers_that_start_anew_read_what_processes_share_as_it_is_now():
    """They get the rest as the interrupted run's workers had copies of it."""

    class Noting(Sampler):
        """Notes the level when the workers begin to read."""

        def __iter__(self):
            levels.append(dataset.level.value)
            return iter(range(8))

        def __len__(self):
            return 8

    levels = []
    dataset = Levelled()
    options = {"sampler": Noting(), "num_workers": 1, "persistent_workers": True}
    combined, fetcher = begin(lambda: DataLoader(dataset, 2, **options))
    combined.begin(fetcher, 0, 0)
    next(fetcher)
    dataset.level.value = 3
    states = combined.states(fetcher, True)
    dataset = Levelled()
    combined, fetcher = begin(lambda: DataLoader(dataset, 2, **options))
    dataset.level.value = 3  # the user's objects are restored before
    combined.begin(fetcher, 0, 1, states)
    assert levels == [0, 3]
