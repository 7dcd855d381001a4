"""data/batch_order.py: the order of any sampler, shared out over ranks."""

import itertools

import pytest
import torch
from interruptible import Noisy
from seeded_loaders import Unending, as_lists, batches, noisy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import divided, make_deterministic, make_resumable


@pytest.mark.slow
def test_an_order_without_an_end_has_no_length():
    class Endless(Sampler):
        def __iter__(self):
            return itertools.cycle((0, 1))

    loader, why = make_resumable(DataLoader(torch.arange(2), sampler=Endless()), 1)
    assert not why
    with pytest.raises(TypeError, match="^Endless has no length$"):
        len(loader)


@pytest.mark.slow
def test_ranks_take_each_sample_once():
    one_process = [
        sorted(batch[2]) for batch in batches(DataLoader(Noisy(43), batch_size=12, shuffle=True))
    ]
    ranks = [batches(noisy(), rank=rank, world_size=3) for rank in range(3)]
    assert [
        sorted(sum((batch[2] for batch in parts), [])) for parts in zip(*ranks, strict=True)
    ] == one_process
    loader = divided(make_resumable(noisy(), 7, "train", rank=1, world_size=3)[0])
    assert [loader.sizes(0, batch) for batch in range(len(loader))] == [[4, 4, 4]] * 3 + [[3, 2, 2]]


@pytest.mark.slow
def test_any_sampler_that_draws_is_exact():
    data = TensorDataset(torch.arange(30))
    samplers = [
        lambda: WeightedRandomSampler(torch.arange(1.0, 31.0), 30),
        lambda: SubsetRandomSampler(range(5, 25)),
        lambda: RandomSampler(data, replacement=True, num_samples=17),
        lambda: RandomSampler(data, generator=torch.Generator()),
    ]
    for make in samplers:
        all_batches = batches(DataLoader(data, batch_size=4, sampler=make()), epoch=2)
        assert (
            batches(DataLoader(data, batch_size=4, sampler=make()), epoch=2, start=2)
            == all_batches[2:]
        )
        assert batches(DataLoader(data, batch_size=4, sampler=make()), epoch=3) != all_batches


class Endless(RandomSampler):
    """As mmengine's: it has the length of the data, and no end."""

    drawn = 0

    def __iter__(self):
        while self.drawn < 100:  # whoever draws all of it fails, and does not hang
            self.drawn += len(self.data_source)
            yield from super().__iter__()
        raise AssertionError("drawn beyond its length")


def test_a_sampler_with_a_length_and_no_end():
    data = TensorDataset(torch.arange(30))
    make = lambda: DataLoader(data, batch_size=4, sampler=Endless(data))  # noqa: E731
    all_batches = batches(make())
    assert sorted(sum((batch for (batch,) in all_batches), [])) == list(range(30))
    assert batches(make(), start=5) == all_batches[5:]


def test_a_sampler_with_a_length_comes_to_its_end():
    """Some count their epochs after the last sample."""

    class Counting(Sampler):
        epochs = 0

        def __len__(self) -> int:
            return 8

        def __iter__(self):
            yield from range(8)
            self.epochs += 1

    sampler = Counting()
    assert len(batches(DataLoader(TensorDataset(torch.arange(8)), 4, sampler=sampler))) == 2
    assert sampler.epochs == 1


def test_a_sampler_may_draw_fewer_than_its_length():
    class Fewer(Sampler):
        def __len__(self) -> int:
            return 12

        def __iter__(self):
            yield from range(7)

    data = TensorDataset(torch.arange(12))
    assert batches(DataLoader(data, 4, sampler=Fewer())) == [[[0, 1, 2, 3]]]


class UnendingPairs(Sampler):
    """Batches of two, without an end."""

    def __iter__(self):
        while True:
            yield from torch.randperm(42).view(-1, 2).tolist()


UNENDING = {
    "batches of four": lambda: DataLoader(Noisy(43), 4, sampler=Unending()),
    "batches of its own": lambda: DataLoader(Noisy(43), batch_sampler=UnendingPairs()),
    "single samples": lambda: DataLoader(Noisy(43), None, sampler=Unending()),
}


@pytest.mark.parametrize("kind", UNENDING)
def test_a_sampler_without_a_length(kind: str):
    def drawn(limit: int, epoch: int = 0, start: int = 0, **ranks) -> list[list]:
        loader, reason = make_resumable(UNENDING[kind](), 7, **ranks)
        assert not reason and loader.batch_plan.sizes(epoch, start) == [1] * len(ranks or "1")
        with pytest.raises(TypeError, match="Unending.* has no length"):
            len(loader)
        loader.begin_epoch(epoch, start)
        return as_lists(loader, limit)

    def samples(parts: list[list]) -> list[int]:
        return torch.tensor([batch[2] for batch in parts]).flatten().tolist()

    alone = drawn(50)
    assert torch.tensor(alone[0][1]).dim() == (kind != "single samples")
    assert drawn(47, start=3) == alone[3:]
    assert samples(drawn(8, epoch=1)) != samples(alone[:8])
    noise = {str(batch[0]) for batch in alone}
    assert len(noise) == 50
    ranks = [drawn(4, rank=rank, world_size=2) for rank in range(2)]
    shared = [batch for parts in zip(*ranks, strict=True) for batch in parts]
    assert samples(shared) == samples(alone[:8])
    assert not noise & {str(batch[0]) for batch in ranks[1]}


def test_a_sampler_without_a_length_ends_with_its_last_whole_batch():
    class OfTen(Sampler):
        def __iter__(self):
            yield from range(10)

    loader, _ = make_resumable(DataLoader(TensorDataset(torch.arange(10)), 4, sampler=OfTen()), 7)
    assert as_lists(loader) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_batches_of_ones_own_go_to_the_ranks_in_turn():
    class Pairs(BatchSampler):
        def __iter__(self):
            yield from ([k, k + 1] for k in torch.randperm(9).tolist())

        def __len__(self):
            return 9

    data = TensorDataset(torch.arange(30))
    make = lambda: DataLoader(data, batch_sampler=Pairs(range(0), 1, False))  # noqa: E731
    all_batches = batches(make())
    assert len(all_batches) == 9 and batches(make(), start=5) == all_batches[5:]
    ranks = [batches(make(), rank=rank, world_size=2) for rank in range(2)]
    assert ranks == [all_batches[0:8:2], all_batches[1:8:2]]
    assert make_resumable(make(), 7, rank=1, world_size=2)[0].batch_plan.sizes(0, 3) == [1, 1]
    few = "the training data: 9 batches for 10 ranks and a batch size of 1; expected at"
    with pytest.raises(UserError, match=few):
        make_resumable(make(), 7, rank=0, world_size=10)


class OfEpoch(Sampler):
    """An order of nine that depends on the epoch that the sampler was given."""

    epoch = 0

    def __len__(self) -> int:
        return 9

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_the_sampler_within_a_sampler_of_batches_gets_the_epoch():
    class Shuffling(OfEpoch):
        def __iter__(self):
            yield from range(self.epoch, self.epoch + 9)

    class Pairs(BatchSampler):
        """A class of the user's own."""

    make = lambda: DataLoader(  # noqa: E731
        TensorDataset(torch.arange(30)), batch_sampler=Pairs(Shuffling(), 2, True)
    )
    assert batches(make(), epoch=3) == [[[3, 4]], [[5, 6]], [[7, 8]], [[9, 10]]]


def test_no_epoch_is_set_on_a_sampler_of_batches():
    """Lightning sets none either: the run would have other batches than with Lightning alone."""

    class Shifting(OfEpoch):
        def __iter__(self):
            yield from ([self.epoch + number] for number in range(9))

    make = lambda: DataLoader(TensorDataset(torch.arange(30)), batch_sampler=Shifting())  # noqa: E731
    assert batches(make(), epoch=3) == [[[number]] for number in range(9)]


def test_too_few_samples_for_all_ranks_are_an_error():
    few = "the training data: 3 samples for 4 ranks and a batch size of 5; expected at"
    with pytest.raises(UserError, match=few):
        make_resumable(DataLoader(range(3), 5), 7, rank=3, world_size=4)
    loader, _ = make_resumable(DataLoader(range(4), 5), 7, rank=3, world_size=4)
    assert len(loader) == 1


def test_an_epoch_continues_with_another_number_of_ranks():
    order = sum((batch[2] for batch in batches(noisy(), epoch=1)), [])
    before, _ = make_resumable(noisy(), 7, "train", rank=1, world_size=2)
    reached = before.batch_plan.epoch_plan.reached(1, 3)
    loaders = [make_resumable(noisy(), 7, "train", rank=rank, world_size=3)[0] for rank in range(3)]
    seen = []
    for loader in loaders:
        loader.batch_plan.epoch_plan.continue_from(1, reached)
        start = loader.batch_plan.epoch_plan.of_epoch(1)[1]
        loader.begin_epoch(1, start)
        seen.append([batch[2] for batch in as_lists(loader)])
    together = [sum(parts, []) for parts in zip(*seen, strict=True)]
    assert reached == 24 and together == [order[24:36], order[36:]]
    assert [loaders[0].batch_plan.sizes(1, start + batch) for batch in range(2)] == [
        [4, 4, 4],
        [3, 2, 2],
    ]
    epoch_plan = loaders[0].batch_plan.epoch_plan
    assert [epoch_plan.reached(1, start + batch) for batch in range(3)] == [24, 36, 43]
    assert epoch_plan.of_epoch(2) == (epoch_plan.division, 0) and epoch_plan.reached(2, 1) == 12


def test_ranks_know_whether_they_share_an_order():
    def drawn(rank: int, epoch: int = 0, world_size: int = 2) -> int:
        loader, _ = make_resumable(noisy(), 7, rank=rank, world_size=world_size)
        loader.begin_epoch(epoch)
        return loader.batch_plan.drawn

    assert drawn(0) == drawn(1) != drawn(0, epoch=1)
    assert drawn(0, world_size=1) == 0  # there is nobody to compare with


def test_processes_share_a_loader_without_a_trainer():
    def drawn(**ranks) -> list[int]:
        loader = make_deterministic(noisy(), 7, **ranks)
        return sum((batch[2] for batch in as_lists(loader)), [])

    assert sorted(drawn()) == list(range(43))
    shares = [drawn(rank=rank, world_size=2) for rank in range(2)]
    assert sorted(sum(shares, [])) == list(range(43)) and list(map(len, shares)) == [22, 21]


def test_a_sampler_that_has_got_longer_is_drawn_to_its_end_once_the_loaders_are_asked_for_anew():
    class Growing(Sampler):
        size = 2

        def __len__(self) -> int:
            return self.size

        def __iter__(self):
            yield from range(self.size)

    loader, _ = make_resumable(DataLoader(range(9), sampler=Growing()), 7, "train")
    assert len(loader) == 2
    loader.sampler.size = 4
    assert len(make_resumable(loader, 7, "train")[0]) == 4
