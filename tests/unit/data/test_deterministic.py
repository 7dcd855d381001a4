"""Order and samples of any DataLoader are functions of (seed, epoch, position).

They do not depend on the number of workers or ranks.
"""

import copy
import random
import re
import time
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import CombinedLoader
from seeded_loaders import Growing, Ten, Unending, as_lists, batches, noisy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from sagemaker_lightning.compat import lightning_loaders
from sagemaker_lightning.compat.torch_data import fetcher_function
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import (
    ReproducibleLoader,
    data_of,
    divided,
    keeps_workers,
    make_deterministic,
    make_resumable,
    order_of,
    plan,
    position,
    reached,
    restore_loader,
)
from sagemaker_lightning.data.partition import PartitionedLoader
from sagemaker_lightning.data.sample_seeding import Plan, has_state
from sagemaker_lightning.data.seeded_indices import UserGenerators, seed_all, unseeded
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.state import object_graph


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
    assert divided(make_resumable(noisy(), 8, "train")[0])._order(0, 0) != divided(
        make_resumable(noisy(), 7, "train")[0]
    )._order(0, 0)
    assert len(batches(noisy(drop_last=True))) == 10
    assert [batch[2] for batch in batches(noisy(shuffle=False))] == [
        batch[2].tolist() for batch in noisy(shuffle=False)
    ]


def test_the_generators_of_the_process_are_left_alone():
    seed_all("x")
    expected = torch.rand(1)
    seed_all("x")
    divided(make_resumable(noisy(), 7, "train")[0])._order(0, 0)
    assert torch.equal(torch.rand(1), expected)
    seed_all("x")
    next(iter(divided(make_resumable(DataLoader(range(43), sampler=Unending()), 7)[0])))
    assert torch.equal(torch.rand(1), expected)
    function = fetcher_function()
    batches(noisy())
    assert fetcher_function() is function  # other loaders draw as before


def test_an_iteration_begins_at_its_position_and_the_next_at_the_first_batch():
    loader, _ = make_resumable(noisy(), 7, "train")
    assert as_lists(loader) == batches(noisy(), epoch=0)
    loader.begin_epoch(0)
    assert as_lists(loader) == batches(noisy(), epoch=0)
    loader.begin_epoch(1, 4)
    assert as_lists(loader) == batches(noisy(), epoch=1)[4:]
    assert as_lists(loader) == batches(noisy(), epoch=1)
    loader.batch_plan.begin(1, 1, 4)
    loader.batch_plan.rewind(2)
    assert as_lists(loader) == batches(noisy(), epoch=2)


def test_a_second_iteration_within_an_epoch_has_an_order_and_chance_of_its_own():
    def drawn(turn: int, **options) -> list[list]:
        loader, _ = make_resumable(noisy(**options), 7)
        loader.batch_plan.begin(3, turn, 0)
        return as_lists(loader)

    assert drawn(1) == drawn(1)
    orders = {str([batch[2] for batch in drawn(turn)]) for turn in range(3)}
    noise = {str([batch[0] for batch in drawn(turn, shuffle=False)]) for turn in range(3)}
    assert len(orders) == len(noise) == 3


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
    assert make_resumable(loader, 7) == (loader, "an IterableDataset has no positions")
    own_dataset = Mine(TensorDataset(torch.arange(3)))
    assert make_resumable(own_dataset, 7) == (
        own_dataset,
        "Mine goes through its samples in a way of its own",
    )
    assert make_resumable([1, 2], 7) == (
        [1, 2],
        "list goes through its samples in a way of its own",
    )
    with pytest.raises(UserError, match="a Mine cannot be shared out among 2 ranks"):
        make_resumable(Mine(TensorDataset(torch.arange(3))), 7, rank=0, world_size=2)
    data = TensorDataset(torch.arange(3))
    shared = Mine(data, sampler=DistributedSampler(data, 2, 0))
    ranks = {"rank": 0, "world_size": 2}
    assert (
        make_resumable(shared, 7, **ranks)[1] == "Mine goes through its samples in a way of its own"
    )
    assert (
        make_resumable(DataLoader(Stream()), 7, **ranks)[1] == "an IterableDataset has no positions"
    )
    assert (
        make_resumable(Mine(Stream()), 7)[1] == "Mine goes through its samples in a way of its own"
    )


def test_a_loader_may_be_used_twice():
    stream = DataLoader(Ten())
    make_resumable(stream, 7)
    changed = type(stream)
    assert make_resumable(stream, 7) == (stream, "") and type(stream) is changed
    loader, _ = make_resumable(noisy(), 7, "train")
    loader.begin_epoch(1, 3)
    assert make_resumable(loader, 7, "val") == (loader, "")
    assert as_lists(loader) == batches(noisy(), epoch=1)[3:]  # training continues where it is


def test_a_loader_that_a_checkpoint_has_made_again_by_its_class_is_made_exact():
    """One that a user's attribute holds has of ours what its class says, and nothing more."""
    loader = make_resumable(DataLoader(list(range(8)), 4), 1)[0]
    again = DataLoader.__new__(type(loader))
    ours = object_graph.LOADER_ATTRIBUTES
    vars(again).update({name: each for name, each in vars(loader).items() if name not in ours})
    assert make_resumable(again, 1) == (again, "")
    assert list(map(str, again)) == list(map(str, loader))


def test_a_loader_that_shares_its_batches_itself_keeps_its_order():
    class Own(PartitionedLoader):
        def sizes(self, epoch, batch):
            return [1]

        def begin(self, epoch, batch):
            pass

    loader = Own()
    assert make_resumable(loader, 7) == (loader, "") and divided(loader) is loader
    assert not keeps_workers(loader)
    says = "^make_deterministic: Own has an order of its own; expected a torch.utils.data"
    with pytest.raises(UserError, match=says):
        make_deterministic(loader, 7)


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
        loader_made, reason = make_resumable(make(workers), 7)
        loader_made.batch_plan.begin(1, 0, start)
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

    loader, reason = make_resumable(Part(list(range(5, 15)), batch_size=5, shuffle=True), 1)
    assert not reason and sorted(torch.cat(list(loader)).tolist()) == loader.indices


def test_a_loader_that_was_trained_on_makes_predictions(tmp_path: Path):
    """Lightning makes another of the same class, with a sampler that notes the indices."""

    class Doubles(pl.LightningModule):
        def predict_step(self, batch, batch_idx):
            return batch * 2

    loader, _ = make_resumable(DataLoader(torch.arange(10.0), 4), 1)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, enable_progress_bar=False
    )
    assert torch.cat(trainer.predict(Doubles(), loader)).tolist() == [
        2.0 * number for number in range(10)
    ]
    assert type(copy.copy(loader)) is type(loader)
    for another in (type(loader)(range(3)), type(loader)(dataset=range(3))):
        assert type(another) is DataLoader and len(list(another)) == 3


def test_a_loader_is_given_back_as_it_was():
    children_before = set(active_children())
    loader = noisy(num_workers=1, persistent_workers=True)
    attributes = dict(vars(loader))
    make_resumable(loader, 7)
    list(loader)
    assert len(set(active_children()) - children_before) == 1
    restore_loader(loader)
    assert type(loader) is DataLoader and vars(loader) == attributes
    assert set(active_children()) <= children_before


def test_batches_of_workers_come_in_order():
    class Slow(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            if index < 2:
                time.sleep(0.05)
            return index

    loader, _ = make_resumable(DataLoader(Slow(), 2, num_workers=2), 7)
    loader.in_order = False
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert loader.in_order is False and loader.worker_init_fn is None


# Where a training is ------------------------------------------------------------------------------


def training(loader, done: int, drawn: int | None = None) -> SimpleNamespace:
    """Return a trainer in epoch 3 after `done` batches; with `drawn`, its steps draw batches."""
    fetcher = _DataFetcher() if drawn is None else _DataLoaderIterDataFetcher()
    batch_progress = SimpleNamespace(current=SimpleNamespace(processed=done))
    loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(batch_progress=batch_progress),
        epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=3)),
        _data_fetcher=fetcher,
        _combined_loader=SimpleNamespace(drawn=drawn),
    )
    return SimpleNamespace(fit_loop=loop, train_dataloader=loader)


def test_a_position_is_a_number_of_batches_of_an_epoch():
    """In steps that draw them themselves, of batches drawn."""
    assert position(training(None, 4)) == (3, 4)
    assert position(training(None, 4, drawn=9)) == (3, 9)


def test_what_training_has_reached_is_a_number_of_samples():
    """It is not known if the loader has no positions, or if the nodes have different data."""
    loader, _ = make_resumable(noisy(), 7)
    assert reached(training(loader, 0)) == 0 and reached(training(loader, 3)) == 12
    assert reached(training([1, 2], 3)) is None
    loader.batch_plan.epoch_plan = None
    assert reached(training(loader, 3)) is None


def test_what_a_loader_saves_itself_is_not_saved_beside():
    class OfLibrary(DataLoader):
        __module__ = "litdata.streaming.dataloader"

    class OfTorchdata(DataLoader):
        __module__ = "torchdata.stateful_dataloader"

    stream = DataLoader(Ten())
    assert order_of(stream, stateful=True) == {} and set(data_of(stream, stateful=False)) == {
        "dataset",
        "collate_fn",
    }
    assert set(order_of(stream, stateful=False)) == {"sampler", "batch_sampler", "loader"}
    assert data_of(OfLibrary(Ten()), stateful=True) == {}  # it saves its dataset's
    assert set(data_of(OfTorchdata(Ten()), stateful=True)) == {"dataset", "collate_fn"}

    class Librarys(Dataset):
        """A dataset of a library's that saves itself."""

        def state_dict(self):
            return {}

    class Counting(Librarys):
        reads = 0

    Librarys.__module__ = Librarys.state_dict.__module__ = "litdata.streaming.dataset"
    (dataset := Counting()).reads = 5
    (added,) = data_of(OfLibrary(dataset), stateful=True).values()
    assert object_graph.attributes(added) == {"reads": 5}
    assert data_of(range(3), stateful=False) == {}
    loader, _ = make_resumable(noisy(), 7)
    assert set(data_of(loader, stateful=False)) == {"dataset", "collate_fn"}


def test_a_loader_stays_what_it_is():
    loader = noisy(num_workers=1)
    sampler = loader.sampler
    batch_sampler = loader.batch_sampler
    data = loader.dataset
    loader_made, _ = make_resumable(loader, 7)
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


class CollatesItself(DataLoader):
    """As neuralforecast's: its collate_fn is a method of its own."""

    def __init__(self, dataset):
        super().__init__(dataset, batch_size=2, collate_fn=self.collate)

    def collate(self, samples):
        return torch.stack(samples)


def test_what_a_loader_has_of_ours_is_no_state_of_the_users():
    loader, _ = make_resumable(CollatesItself(list(torch.zeros(4, 1))), 7, "train")
    paths = {path for path, _ in object_graph.walk({"collate_fn": loader.collate_fn})}
    assert "collate_fn.self" in paths and "collate_fn.self.dataset" in paths
    assert not [path for path in paths if re.search("planned|batch_plan", path)]
    assert set(object_graph.LOADER_ATTRIBUTES) == set(ReproducibleLoader.__annotations__)


def test_a_generator_that_was_not_there_before_is_found():
    """Else no batch is drawn a second time."""
    dataset = SimpleNamespace(own=random.Random(0), late=None)
    found = UserGenerators({"dataset": dataset})
    found.find()
    assert not found.more()
    dataset.late = random.Random(1)
    assert found.more() and not found.more()
    dataset.late = None
    assert not found.more()


@pytest.mark.parametrize(
    ("batches_before", "is_found"), [(3, True), (4, False), (62, False), (63, True), (64, False)]
)
def test_a_generator_that_hides_is_found_in_the_first_batches_and_in_every_64th(
    batches_before: int, is_found: bool
):
    dataset = Growing()
    dataset.held, dataset.late = [], None
    found = UserGenerators({"dataset": dataset})
    assert not any(found.more() for _ in range(batches_before))
    dataset.held.append(random.Random(1))
    assert found.more() is is_found
    dataset.late = random.Random(2)
    assert found.more() and not found.more()


def test_who_saves_its_own_state():
    def owner(**methods) -> SimpleNamespace:
        return SimpleNamespace(**methods)

    def load(state) -> None:
        pass

    assert has_state(owner(state_dict=lambda: {}, load_state_dict=load))
    assert has_state(owner(state_dict=lambda prefix="": {}, load_state_dict=load))
    for without in (
        owner(),
        owner(state_dict=lambda: {}),
        owner(load_state_dict=load),
        owner(state_dict=lambda: {}, load_state_dict=None),
        owner(state_dict={}, load_state_dict=load),
        owner(state_dict=lambda batches: {}, load_state_dict=load),
    ):
        assert not has_state(without)


# A training's loaders -----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["on_exception", "teardown"])
def test_loaders_are_exact_from_setup_to_the_end(end: str):
    seeding = Seeding()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    randbits = np.random.bit_generator.randbits
    lightnings = lightning_loaders.preparation(trainer)
    seeding.setup(trainer, None, "validate")
    assert lightning_loaders.preparation(trainer) == lightnings
    torch.manual_seed(5)
    seeding.setup(trainer, None, "fit")
    assert seeding.seed == 5 and np.random.bit_generator.randbits == unseeded.bits
    prepare = lightning_loaders.preparation(trainer)
    loaders = {
        stage: prepare(DataLoader(range(8)), shuffle=False, mode=stage)
        for stage in (RunningStage.TRAINING, RunningStage.VALIDATING, RunningStage.PREDICTING)
    }
    assert [isinstance(loader, ReproducibleLoader) for loader in loaders.values()] == [
        True,
        True,
        False,
    ]
    assert prepare([1, 2], shuffle=False, mode=RunningStage.TRAINING) == [1, 2]
    if end == "teardown":
        seeding.teardown(trainer, None, "fit")
    else:
        seeding.on_exception(trainer, None, KeyboardInterrupt())
    assert all(type(loader) is DataLoader for loader in loaders.values())
    assert np.random.bit_generator.randbits == randbits
    seeding.leave_loaders_to_lightning(trainer)
    assert lightning_loaders.preparation(trainer) == lightnings


def test_a_seed_that_is_given_is_the_seed():
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    seeding = Seeding(7)
    seeding.setup(trainer, None, "fit")
    seeding.teardown(trainer, None, "fit")
    assert seeding.seed == 7


def test_loaders_of_the_same_samples_draw_apart():
    """Those of validations draw alike: each is the data's only one, in most programs."""
    seeding = Seeding(7)
    trainer = SimpleNamespace(global_rank=0, world_size=1)

    def drawn(stage: RunningStage) -> str:
        return str(as_lists(seeding._exact(trainer, noisy(), stage)))

    stages = [RunningStage.TRAINING, RunningStage.VALIDATING, RunningStage.TESTING]
    first, second = [drawn(stage) for stage in stages], [drawn(stage) for stage in stages]
    assert len({*first, *second}) == 4 and first[1:] == second[1:]
    seeding.together(trainer, CombinedLoader([noisy()], "min_size"), "train")
    assert drawn(stages[0]) == first[0]  # as when the loaders are made again


@pytest.mark.parametrize(("options", "samples"), [({}, 21), ({"share": False}, 43)])
def test_ranks_share_a_loader_unless_its_sampler_does(options, samples):
    strategy = SimpleNamespace(broadcast=lambda states: states)
    trainer = SimpleNamespace(global_rank=1, world_size=2, strategy=strategy)
    loader = Seeding(7)._exact(trainer, noisy(), RunningStage.TRAINING, **options)
    assert sum(len(batch[2]) for batch in as_lists(loader)) == samples


class OfRank(Sampler):
    """Draws with replacement, by a generator."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def __iter__(self):
        return iter(self.generator.integers(0, 43, 40).tolist())

    def __len__(self):
        return 40


@pytest.mark.parametrize("of_rank", [True, False])
def test_ranks_whose_samplers_have_generators_of_their_own_draw_apart(of_rank):
    of_first = []

    def broadcast(states):
        of_first.append(states)
        return of_first[0]

    def drawn(rank):
        strategy = SimpleNamespace(broadcast=broadcast)
        trainer = SimpleNamespace(global_rank=rank, world_size=2, strategy=strategy)
        loader = DataLoader(noisy().dataset, 4, sampler=OfRank(rank if of_rank else 0))
        exact_loader = Seeding(7)._exact(trainer, loader, RunningStage.TRAINING, share=False)
        return [keys for keys in exact_loader.batch_plan]

    first, second = drawn(0), drawn(1)
    assert (first != second) is of_rank  # the order, of which each takes its part if it is one
    assert all(one.seed != other.seed for one, other in zip(first, second, strict=True))


def test_each_rank_knows_what_each_shared_loader_draws_first():
    def orders(rank: int) -> dict[str, int]:
        seeding = Seeding(7)
        alike = SimpleNamespace(broadcast=lambda states: states)
        trainer = SimpleNamespace(global_rank=rank, world_size=2, strategy=alike)
        loaders = [noisy(), DataLoader(Ten()), noisy(shuffle=False)]
        combined = CombinedLoader(
            [seeding._exact(trainer, loader, RunningStage.TRAINING) for loader in loaders],
            "min_size",
        )
        seeding.together(trainer, combined, "train")
        assert combined.shared_orders == {}
        combined.begin(combined, 0, 0)
        return combined.shared_orders

    assert orders(0) == orders(1)
    assert list(orders(0)) == ["0 RandomSampler", "2 SequentialSampler"]


@pytest.mark.parametrize("number_of_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_litdatas_workers_count_on_from_where_each_of_them_is(number_of_workers, batch_size):
    class Loader:
        __module__ = "litdata.streaming.dataloader"
        num_workers = number_of_workers
        restore = True

    loader = Loader()
    loader.batch_size = batch_size
    loader.planned = Plan(())
    plan(loader, 3, 7)
    samples = [4, 3] if number_of_workers else [7]
    assert loader.planned.turn == 3 and loader.restore is True
    assert loader.planned.first == tuple(
        (worker, (batch_size or 1) * batches) for worker, batches in enumerate(samples)
    )
    plan(loader, 4, 1)
    assert loader.restore is True
    plan(loader, 4, 0)
    assert loader.planned == Plan((), turn=4) and loader.restore is False
    plan(loader, 4, 1)
    assert loader.restore is False  # nothing to go back to


def test_each_batch_of_a_validation_has_draws_of_its_own():
    """They are the same if nothing was trained meanwhile."""
    seeding = Seeding(7)
    trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=4)
    loaders = [
        seeding._exact(trainer, loader, RunningStage.VALIDATING)
        for loader in (DataLoader(Ten(), 4), noisy())
    ]
    combined = CombinedLoader(loaders, "sequential")
    seeding.together(trainer, combined, "val")

    def validation() -> tuple[list[str], list[float]]:
        torch.rand(3)
        seen = [(str(batch), torch.rand(1).item()) for batch, _, _ in combined]
        return [batch for batch, _ in seen], [drawn for _, drawn in seen]

    first_batches, first_draws = validation()
    assert validation() == (first_batches, first_draws)
    assert len(set(first_draws)) == len(first_draws) == 3 + 11
    for name in ("global_step", "global_rank"):
        vars(trainer)[name] += 1
        batches_now, draws_now = validation()
        assert batches_now[3:] == first_batches[3:] and batches_now[0] != first_batches[0]
        assert not set(draws_now) & set(first_draws)
