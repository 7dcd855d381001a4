"""Samples are seeded one by one where they draw, and batch by batch where they do not."""

import random

import numpy as np
import pytest
import short_fits
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sagemaker_lightning.compat.random_generators import entropy_replaced
from sagemaker_lightning.data import seeded_indices
from sagemaker_lightning.data.deterministic import make_deterministic
from sagemaker_lightning.data.seeded_indices import unseeded


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
    keys = []
    seed_all = seeded_indices.seed_all
    monkeypatch.setattr(seeded_indices, "seed_all", lambda *key: keys.append(key) or seed_all(*key))
    assert len([*loader]) == 8
    assert len(keys) == seeds


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
