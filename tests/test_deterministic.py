"""Order and samples of any DataLoader are functions of (seed, epoch, position).

They do not depend on the number of workers or ranks.
"""

import copy
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from interruptible import Noisy
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import Exact, divided, exact
from sagemaker_lightning.data.seeded_indices import Found, seed_all
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.state import object_graph


def batches(loader: DataLoader, epoch: int = 0, start: int = 0, **ranks) -> list[list]:
    """Return the batches of an exact copy of `loader`, as lists."""
    loader_made, reason = exact(loader, 7, "train", **ranks)
    assert loader_made is loader and reason == "" and len(loader_made) >= 1
    loader_made.exactly.begin(epoch, 0, start)
    return [
        [value.tolist() if isinstance(value, torch.Tensor) else value for value in batch]
        for batch in loader_made
    ]


def noisy(**options) -> DataLoader:
    return DataLoader(Noisy(43), batch_size=4, **{"shuffle": True} | options)


@pytest.mark.slow
def test_chance_is_a_function_of_seed_epoch_and_position():
    all_batches = batches(noisy())
    assert len(all_batches) == 11 and sorted(sum((batch[2] for batch in all_batches), [])) == list(
        range(43)
    )
    torch.rand(3)
    assert batches(noisy()) == all_batches
    assert batches(noisy(), start=4) == all_batches[4:]
    assert batches(noisy(num_workers=2), start=3) == all_batches[3:]
    assert batches(noisy(num_workers=1, persistent_workers=True, prefetch_factor=4)) == all_batches
    assert batches(noisy(), epoch=1) != all_batches
    fixed = [torch.tensor(batches(noisy(shuffle=False), epoch=epoch)[0][0]) for epoch in (0, 1)]
    assert not torch.isclose(
        *fixed
    ).any()  # the same samples in the same places, each with other noise
    assert divided(exact(noisy(), 8, "train")[0])._order(0, 0) != divided(
        exact(noisy(), 7, "train")[0]
    )._order(0, 0)
    assert len(batches(noisy(drop_last=True))) == 10
    assert [batch[2] for batch in batches(noisy(shuffle=False))] == [
        batch[2].tolist() for batch in noisy(shuffle=False)
    ]


def test_the_generators_of_the_process_are_left_alone():
    seed_all("x")
    expected = torch.rand(1)
    seed_all("x")
    divided(exact(noisy(), 7, "train")[0])._order(0, 0)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.slow
def test_ranks_take_each_sample_once():
    one_process = [
        sorted(batch[2]) for batch in batches(DataLoader(Noisy(43), batch_size=12, shuffle=True))
    ]
    ranks = [batches(noisy(), rank=rank, world_size=3) for rank in range(3)]
    assert [
        sorted(sum((batch[2] for batch in parts), [])) for parts in zip(*ranks, strict=True)
    ] == one_process
    loader = divided(exact(noisy(), 7, "train", rank=1, world_size=3)[0])
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


def test_a_distributed_sampler_shares_out_by_itself():
    make = lambda rank: DataLoader(  # noqa: E731
        TensorDataset(torch.arange(10)),
        batch_size=2,
        sampler=DistributedSampler(range(10), 2, rank, seed=3),
    )
    ranks = [batches(make(rank), epoch=1, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(sum((sum(batch, []) for rank in ranks for batch in rank), [])) == list(range(10))
    assert ranks[0] != batches(make(0), epoch=2)


def test_what_has_no_positions_is_said():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(5)

    class Mine(DataLoader):
        def __iter__(self):
            return super().__iter__()

    loader = DataLoader(Stream())
    assert exact(loader, 7) == (loader, "an IterableDataset has no positions")
    own_dataset = Mine(TensorDataset(torch.arange(3)))
    assert exact(own_dataset, 7) == (
        own_dataset,
        "Mine goes through its samples in a way of its own",
    )
    assert exact([1, 2], 7) == ([1, 2], "list goes through its samples in a way of its own")
    with pytest.raises(UserError, match="a Mine cannot be shared out among 2 ranks"):
        exact(Mine(TensorDataset(torch.arange(3))), 7, rank=0, world_size=2)


def test_a_dataset_that_fetches_whole_batches_still_does():
    class Whole(TensorDataset):
        def __getitems__(self, indices):
            return [(torch.tensor(indices), torch.rand(1))]

    loader = DataLoader(
        Whole(torch.arange(8)), batch_size=4, shuffle=True, collate_fn=lambda batch: batch[0]
    )
    assert batches(loader) == batches(loader) and len(batches(loader)[0][0]) == 4
    draws = {batch[1][0] for epoch in (0, 1) for batch in batches(loader, epoch=epoch)}
    assert len(draws) == 4  # of each batch and epoch


def test_a_loader_without_batches_is_exact():
    class Drawn(TensorDataset):
        def __getitem__(self, index):
            return torch.rand(len(index) if isinstance(index, list) else 1)

    order = BatchSampler(RandomSampler(range(9)), 2, False)
    make = lambda workers: DataLoader(  # noqa: E731
        Drawn(torch.arange(9)), None, sampler=order, num_workers=workers
    )

    def drawn(start: int, workers: int) -> list:
        loader_made, reason = exact(make(workers), 7)
        loader_made.exactly.begin(1, 0, start)
        assert not reason
        return [sample.tolist() for sample in loader_made]

    assert [len(batch) for batch in drawn(0, 0)] == [2, 2, 2, 2, 1]
    assert drawn(2, 0) == drawn(0, 0)[2:] == drawn(2, 1)


def test_a_loader_may_have_indices_of_its_own():
    """As scvi-tools' has: the samples that it is for."""

    class Part(DataLoader):
        def __init__(self, indices, **options) -> None:
            self.indices = indices
            super().__init__(Subset(range(40), indices), **options)

    loader, reason = exact(Part(list(range(5, 15)), batch_size=5, shuffle=True), 1)
    assert not reason and sorted(torch.cat(list(loader)).tolist()) == loader.indices


def test_a_loader_that_was_trained_on_makes_predictions(tmp_path: Path):
    """Lightning makes another of the same class, with a sampler that notes the indices."""

    class Doubles(pl.LightningModule):
        def predict_step(self, batch, batch_idx):
            return batch * 2

    loader, _ = exact(DataLoader(torch.arange(10.0), 4), 1)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, enable_progress_bar=False
    )
    assert torch.cat(trainer.predict(Doubles(), loader)).tolist() == [
        2.0 * number for number in range(10)
    ]
    assert type(copy.copy(loader)) is type(loader)


def test_a_loader_stays_what_it_is():
    loader = noisy(num_workers=1)
    sampler = loader.sampler
    batch_sampler = loader.batch_sampler
    data = loader.dataset
    loader_made, _ = exact(loader, 7)
    assert (
        loader_made is loader
        and isinstance(loader_made, DataLoader)
        and type(loader_made).__name__ == "DataLoader"
    )
    assert (loader_made.sampler, loader_made.batch_sampler, loader_made.dataset) == (
        sampler,
        batch_sampler,
        data,
    )
    assert (
        loader_made.batch_size == 4
        and loader_made.worker_init_fn is None
        and not loader_made.drop_last
    )
    loader_made.dataset.inputs = torch.zeros(43, 6)  # seen by workers, too
    assert max(batch[0].abs().max() for batch in loader_made) < 2


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
@pytest.mark.parametrize("batches_before", [0, 2, 3, 4, 6])
def test_several_loaders_begin_where_they_were(mode, batches_before):
    """This holds if one of them has begun again, and if one has no positions."""

    class Stream(IterableDataset):
        def __iter__(self):
            yield from torch.rand(20)

    def epoch(batches_done: int) -> list:
        seeding = Seeding(7)
        trainer = SimpleNamespace(global_rank=0, world_size=1)
        loaders = [noisy(), DataLoader(Noisy(43), batch_size=15), DataLoader(Stream(), 5)]
        combined = CombinedLoader(
            [
                seeding._exact(trainer, loader_part, RunningStage.TRAINING)
                for loader_part in loaders
            ],
            mode,
        )
        seeding.together(trainer, combined, "train")
        combined.begin(combined, 1, batches_done)
        drawn_batches = []
        while batch := next(combined, None):
            drawn_batches.append(str(batch))
        return drawn_batches

    assert len(epoch(0)) == {"max_size_cycle": 11, "min_size": 3, "max_size": 11}[mode]
    assert epoch(batches_before) == epoch(0)[batches_before:]


class CollatesItself(DataLoader):
    """As neuralforecast's: its collate_fn is a method of its own."""

    def __init__(self, dataset):
        super().__init__(dataset, batch_size=2, collate_fn=self.collate)

    def collate(self, samples):
        return torch.stack(samples)


def test_what_a_loader_has_of_ours_is_no_state_of_the_users():
    loader, _ = exact(CollatesItself(list(torch.zeros(4, 1))), 7, "train")
    paths = {path for path, _ in object_graph.walk({"collate_fn": loader.collate_fn})}
    assert "collate_fn.self" in paths and "collate_fn.self.dataset" in paths
    assert not [path for path in paths if re.search("planned|exactly", path)]
    assert set(object_graph.LOADER_ATTRIBUTES) == set(Exact.__annotations__)


def test_a_generator_that_was_not_there_before_is_found():
    """Else no batch is drawn a second time."""
    dataset = SimpleNamespace(own=random.Random(0), late=None)
    found = Found({"dataset": dataset})
    assert not found.more()
    dataset.late = random.Random(1)
    assert found.more() and not found.more()
    dataset.late = None
    assert not found.more()
