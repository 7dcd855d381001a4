"""Samples are seeded one by one where they draw, and batch by batch where they do not."""

import random
import secrets
from types import SimpleNamespace

import numpy as np
import pytest
import short_fits
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from seeded_loaders import Growing, Ten
from torch.utils.data import DataLoader, Dataset, TensorDataset, _DatasetKind
from torchdata.stateful_dataloader import StatefulDataLoader

from sagemaker_lightning.compat.random_generators import entropy_replaced
from sagemaker_lightning.compat.torch_data import fetcher_function, replace_fetcher_function
from sagemaker_lightning.data import sample_seeding, seeded_indices
from sagemaker_lightning.data.deterministic import make_deterministic, make_resumable
from sagemaker_lightning.data.sample_seeding import (
    Fetchers,
    Plan,
    SeededSamplesWithState,
    Watch,
    start_worker,
)
from sagemaker_lightning.data.seeded_indices import UserGenerators, seed_all, unseeded


def undone(draw):
    """Return what is drawn, and leave the generators as they were."""
    with torch.random.fork_rng(devices=[]):
        return draw()


DRAWS = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy, a normal number": np.random.randn,
    "torch": lambda: torch.rand(()).item(),
    "a numpy generator made without a seed": lambda: np.random.default_rng().random(),
    "a Random made without a seed": lambda: random.Random().random(),
    "torch's seed": lambda: torch.initial_seed() % 1000 / 1000,
    "a draw that leaves no trace": lambda: undone(lambda: torch.rand(()).item()),
    "numpy's state": lambda: float(np.random.get_state()[1][5] % 1000) / 1000,
    "random's state": lambda: random.getstate()[1][5] % 1000 / 1000,
}
"""Each kind of draw that a seed for each sample decides."""


class Seldom(Dataset):
    """32 samples; some of them draw.

    Args:
        draw: How they draw.
        drawing: Their indices.
    """

    def __init__(self, draw, drawing) -> None:
        self.draw = draw
        self.drawing = drawing
        self.made = 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> float:
        self.made += 1
        return index + self.draw() if index in self.drawing else float(index)


def epoch(dataset: Dataset, begin: int = 0, **options) -> list[list[float]]:
    """Return the batches of an epoch after the first `begin`."""
    loader = make_deterministic(DataLoader(dataset, 4, **options), seed=7)
    loader.begin_epoch(0, begin)
    with entropy_replaced(unseeded.bits):
        return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_sample_that_draws_after_many_that_do_not_draws_as_ever(draw):
    everywhere = epoch(Seldom(draw, range(32)))
    for drawing in ({0}, {31}, {13, 14, 22}):
        expected = [
            [
                value if int(index) in drawing else float(index)
                for index, value in enumerate(batch, 4 * n)
            ]
            for n, batch in enumerate(everywhere)
        ]
        assert epoch(Seldom(draw, drawing)) == expected
        assert epoch(Seldom(draw, drawing), begin=3) == expected[3:]


@pytest.mark.slow
def test_workers_draw_the_samples_that_one_process_draws():
    draw = DRAWS["numpy"]
    for drawing in ({13, 14, 30}, range(32)):
        assert epoch(Seldom(draw, drawing), num_workers=2) == epoch(Seldom(draw, drawing))


def test_what_is_drawn_after_a_batch_does_not_depend_on_the_batches_before_it():
    def draws(begin: int) -> list[float]:
        loader = make_deterministic(DataLoader(Seldom(random.random, {13}), 4), seed=7)
        loader.begin_epoch(0, begin)
        return [random.random() + np.random.rand() + torch.rand(()).item() for _ in loader]

    assert [draws(begin) for begin in range(8)] == [draws(0)[begin:] for begin in range(8)]


def test_a_sample_that_fails_by_its_draw_is_drawn_again_with_its_seed():
    def draw() -> float:
        drawn = random.random()
        if drawn > limit:
            raise ValueError(drawn)
        return drawn

    limit = 2.0
    ends = epoch(Seldom(draw, {13}))[3][1]
    limit = ends - 13 + 1e-9
    assert epoch(Seldom(draw, {13}))[3][1] == ends
    limit = (ends - 13) * 0.99
    with pytest.raises(ValueError, match=str(ends - 13)[:6]):
        epoch(Seldom(draw, {13}))


@pytest.mark.parametrize(
    ("drawing", "made"),
    [((), 32), (range(32), 32), ({0, 31}, 32), ({31}, 36)],
    ids=["no sample draws", "all draw", "the first draws", "only the last draws"],
)
def test_a_batch_is_drawn_again_only_if_none_before_it_has_drawn(drawing, made):
    dataset = Seldom(random.random, drawing)
    epoch(dataset)
    assert dataset.made == made


@pytest.mark.parametrize(
    ("dataset", "seeds"),
    [
        (TensorDataset(torch.arange(32.0)), 5 + 7),
        (Seldom(random.random, ()), 5 + 7),
        (Seldom(random.random, {0}), 8 * 5),
        (Seldom({"generator": random.Random(1)}, ()), 8 * 5),
    ],
    ids=["tensors", "no draw", "a draw", "a generator of its own"],
)
def test_a_batch_has_one_seed_where_no_sample_draws(monkeypatch, dataset, seeds):
    loader = make_deterministic(DataLoader(dataset, 4), seed=7)
    loader.begin_epoch(0)
    numbers = []
    seed_by = seeded_indices.seed_by
    monkeypatch.setattr(
        seeded_indices, "seed_by", lambda number: numbers.append(number) or seed_by(number)
    )
    assert len([*loader]) == 8
    assert len(numbers) == seeds


class SeldomAndCounting(Seldom):
    """16 samples, float32 [2]; each depends on how many were made before it."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([super().__getitem__(index), self.made])


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["batch 0:0", "batch 0:1", "batch 0:2", "batch 1:0", "batch 1:2"])
def test_a_batch_is_drawn_again_in_a_resumed_run_as_in_one_left_alone(tmp_path, stop):
    """The eleventh sample alone draws: the batch of its first epoch is drawn twice."""

    def fit(folder: str, stop: str = "") -> tuple[list[float], int]:
        dataset = SeldomAndCounting(random.random, {11})
        trainer = short_fits.trainer(tmp_path / folder)  # it seeds what the model draws
        model = short_fits.Noted(stop)
        trainer.fit(model, DataLoader(dataset, 4))
        return short_fits.weights(model), dataset.made

    expected = fit("alone")
    assert expected[1] == 2 * 16 + 4
    with short_fits.interrupted():
        fit("stopped", stop)
    assert fit("stopped") == expected


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_what_changes_in_a_worker_is_reported_once_by_the_first_rank(
    capfd, monkeypatch, rank, lines
):
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    list(make_resumable(DataLoader(Growing(), 2, num_workers=1), 7)[0])
    says = "Growing.seen changes in the data workers, where no checkpoint saves it"
    assert capfd.readouterr().out.count(says) == lines


@pytest.mark.parametrize(
    ("names", "batches_seen", "says"),
    [
        ("a", 2, "warning: Growing.a changes"),
        ("a", 4, "warning: Growing.a changes"),
        ("a", 5, ""),
        ("a", 63, ""),
        ("a", 64, "warning: Growing.a changes"),
        ("a", 65, ""),
        ("a", 128, "warning: Growing.a changes"),
        ("a", 192, ""),
        ("", 2, ""),
        ("abc", 2, "warning: Growing.a, Growing.b, Growing.c changes"),
        ("abcd", 2, "warning: Growing.a, Growing.b, Growing.c and 1 more changes"),
        ("abcde", 2, "warning: Growing.a, Growing.b, Growing.c and 2 more changes"),
    ],
)
def test_when_it_is_looked_whether_workers_change_a_dataset(capsys, names, batches_seen, says):
    dataset = Growing()
    watch = Watch({"dataset": dataset}, torch.zeros(1, dtype=torch.uint8))
    dataset.made_by_the_first_batch = 1
    watch.look(1)
    for name in names:
        setattr(dataset, name, 1)
    watch.look(batches_seen)
    assert capsys.readouterr().out.partition(" in the data workers")[0] == says
    dataset.a = 2
    watch.look(256)
    assert bool(capsys.readouterr().out) is (not says)


def fetchers(**options) -> Fetchers:
    """Return what makes fetchers for a dataset that changes with each sample."""
    plan_ = Plan((7,), warned=torch.zeros(2, dtype=torch.uint8))
    return Fetchers(plan_, {"dataset": Growing()}, **options)


@pytest.mark.parametrize(("worker", "lines"), [(0, 1), (1, 0), (None, 0)])
def test_the_first_worker_tells_what_changes_for_all_of_them(capsys, worker, lines):
    maker = fetchers(worker=worker)
    dataset = maker.watch.roots["dataset"]
    fetcher = maker.create(_DatasetKind.Map, dataset, True, list, False)
    for _ in range(3):
        assert fetcher.fetch([3, 1]) == [3, 1]
    assert capsys.readouterr().out.count("Growing.seen changes") == lines


class Searching(Dataset):
    """Takes what comes next of something, and there is nothing for one number."""

    def __getitem__(self, number):
        return next(each for each in (1, 2) if number < 3)

    def __len__(self):
        return 4


@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_that_ends_the_epoch_is_named(capfd, workers):
    """torch takes its StopIteration for the end of the data."""
    loader = make_resumable(DataLoader(Searching(), num_workers=workers), 7)[0]
    assert len([*loader]) == 3
    assert (
        "warning: Searching, or what it calls for an item, raised StopIter" in capfd.readouterr()[0]
    )


def test_workers_that_stay_draw_as_new_ones():
    """One of them makes a fetcher for each iteration; a new one makes its first for a later one."""

    def drawn(maker: Fetchers) -> float:
        fetcher = maker.create(_DatasetKind.Iterable, Ten(), True, torch.tensor, False)
        return fetcher.fetch([0]).item()

    stays = fetchers(worker=1)
    iterations = [drawn(stays) for _ in range(3)]
    new = [drawn(Fetchers(Plan((7,), turn), {}, 1)) for turn in range(3)]
    assert len({*new}) == 3 and iterations == new
    assert drawn(fetchers(worker=0)) == drawn(fetchers()) not in new


def test_a_worker_that_stays_continues_with_anothers_samples_in_one_iteration_only():
    def drawn(maker: Fetchers) -> float:
        fetcher = maker.create(_DatasetKind.Iterable, Ten(), True, torch.tensor, False)
        return fetcher.fetch([0]).item()

    resumed = Fetchers(Plan((7,), 1, ((1, 0), (0, 2))), {}, 1)
    drawn(resumed)
    assert drawn(resumed) == drawn(Fetchers(Plan((7,), 2), {}, 1))


def test_a_worker_is_seeded_before_the_users_function_and_draws_as_planned(monkeypatch):
    dataset = Ten()
    prepared = []

    def draw(worker: int) -> None:
        prepared.append((worker, np.random.default_rng().random()))

    monkeypatch.setattr(
        torch.utils.data, "get_worker_info", lambda: SimpleNamespace(dataset=dataset)
    )
    monkeypatch.setattr(sample_seeding, "end_with_the_loader", lambda: prepared.append("signals"))
    function = fetcher_function()
    with entropy_replaced(secrets.randbits):
        for worker_init_fn in (draw, draw, None):
            torch.manual_seed(5)
            start_worker(worker_init_fn, torch.tensor, Plan((7,)), 1)
            assert fetcher_function() is not function
            fetcher = fetcher_function()(_DatasetKind.Iterable, dataset, True, torch.tensor, False)
            drawn = fetcher.fetch([0])
            replace_fetcher_function(function)
    assert prepared == ["signals", prepared[1], "signals", prepared[1], "signals"]
    assert prepared[1][0] == 1
    seed_all("sample", 7, 0, 1, 0)
    assert drawn == torch.rand(1)


class Generators:
    """A dataset's generators; the second one is made with the first sample."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def draw(self) -> tuple[float, ...]:
        if not hasattr(self, "second"):
            self.second = random.Random(2)
        return self.random.random(), self.second.random(), torch.rand(1).item()


class Walk:
    """An iterator over ten samples that saves how far it is."""

    def __init__(self, dataset: Generators) -> None:
        self.dataset = dataset
        self.at = 0

    def __next__(self) -> tuple[float, ...]:
        if self.at == 10:
            raise StopIteration
        self.at += 1
        return self.at, *self.dataset.draw()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def samples_of(dataset: Generators, seed: int = 7) -> SeededSamplesWithState:
    return SeededSamplesWithState(Walk(dataset), (seed,), 0, UserGenerators({"dataset": dataset}))


@pytest.mark.parametrize("done", [1, 3, 10])
def test_samples_with_a_state_continue_where_they_were(done):
    """With their generators, and with the seed of the iteration in which they were."""
    first = samples_of(Generators())
    for _ in range(done):
        next(first)
    state = first.state_dict()
    dataset = Generators()
    dataset.draw()
    dataset.third = random.Random(3)  # as of another version of the dataset
    second = samples_of(dataset, seed=8)
    second.load_state_dict(state)
    rest = list(iter(lambda: next(second, None), None))
    assert rest == list(iter(lambda: next(first, None), None)) and len(rest) == 10 - done
    assert dataset.third.random() == random.Random(3).random()


@pytest.mark.parametrize("make", [lambda: Walk(Generators()), lambda: iter(range(1, 11))])
def test_samples_that_have_ended_stay_at_their_end(make):
    """Even if their own state, if they have one, says that they are at the beginning."""
    samples = make()
    first = SeededSamplesWithState(samples, (7,), 0, UserGenerators({}))
    assert len(list(iter(lambda: next(first, None), None))) == 10
    if isinstance(samples, Walk):
        samples.at = 0
    state = first.state_dict()
    for _ in range(2):
        second = SeededSamplesWithState(make(), (7,), 0, UserGenerators({}))
        second.load_state_dict(state)
        state = second.state_dict()
        assert next(second, None) is None


@pytest.mark.parametrize("drawn_before", [0, 1, 4])
def test_samples_count_on_from_those_that_were_drawn_before(drawn_before):
    """As planned for a loader whose dataset goes to a position, and does not count."""

    def draws(first: tuple[tuple[int, int], ...]) -> list[float]:
        samples = (torch.rand(1) for _ in range(10))
        fetcher = Fetchers(Plan((7,), 0, first), {}).create(
            _DatasetKind.Iterable, samples, False, float, False
        )
        return [fetcher.fetch(None) for _ in range(10)]

    alone = draws(())
    assert len(set(alone)) == 10
    assert draws(((0, drawn_before),))[: 10 - drawn_before] == alone[drawn_before:]


def test_a_datasets_generators_begin_each_iteration_by_its_number():
    def drawn(turn: int, before: int) -> float:
        dataset = Generators()
        for _ in range(before):
            dataset.draw()
        maker = Fetchers(Plan((7,), turn), {"dataset": dataset})
        maker.create(_DatasetKind.Iterable, Ten(), True, torch.tensor, False)
        return dataset.random.random()

    assert drawn(1, 0) == drawn(1, 5) != drawn(2, 0)


def test_a_loader_with_a_state_may_ask_for_single_samples_and_for_none():
    class Remembering(Growing):
        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    def drawn(**options) -> list:
        return list(make_resumable(StatefulDataLoader(Remembering(), **options), 7)[0])

    assert drawn(batch_size=None) == list(range(12))
    assert drawn(batch_sampler=[[2, 3], [], [1]], collate_fn=list) == [[2, 3], [], [1]]
