"""Data, samplers and library objects that training changes are as they were."""

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import pytorch_lightning as pl
import torch
from own_fits import Sees, StopsAt, Untested, short_trainer
from own_trainer import Classifier, Noisy
from torch.utils.data import DataLoader, default_collate
from torchmetrics import MeanMetric, MetricTracker

from sagemaker_lightning.compat import lightning_loops


class Fading(Noisy):
    """Points whose noise training changes; data workers have copies of it."""

    def __init__(self) -> None:
        self.noise = 1.0

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        return self.noise * inputs, labels


class Batches:
    """An iterable of batches, in place of a DataLoader; it counts them."""

    def __init__(self) -> None:
        self.noise = 1.0

    def __len__(self) -> int:
        return 11

    def __iter__(self):
        for _ in range(11):
            self.noise *= 0.99
            yield self.noise * torch.randn(4, 2), torch.randint(2, (4, 1)).float()


class FadingLoader(DataLoader):
    """A DataLoader with an attribute of its own, which the iteration changes."""

    noise = 1.0

    def __iter__(self):
        for inputs, labels in super().__iter__():
            self.noise *= 0.99
            yield self.noise * inputs, labels


class Around:
    """A loader around another one."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.noise = 1.0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for inputs, labels in self.loader:
            yield self.noise * inputs, labels


class Curriculum(Classifier):
    """A model that changes the data on which it is trained."""

    def __init__(self, make_loader: Callable) -> None:
        super().__init__()
        self.make_loader = make_loader

    def train_dataloader(self):
        return self.make_loader()

    def changing(self):
        loader = self.trainer.train_dataloader
        return loader if hasattr(loader, "noise") else loader.dataset

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        self.changing().noise *= 1 - 0.1 * outputs["loss"].item()


class KeptCurriculum(Curriculum):
    """It keeps the data, too."""

    def train_dataloader(self):
        self.data = self.make_loader()
        return self.data


class Darkening(Classifier):
    """Its validations change the weights, and what they validate changes, too."""

    def val_dataloader(self):
        return FadingLoader(Noisy(), self.batch_size)

    def validation_step(self, batch, batch_idx):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1 - 0.001 * batch[0].mean())


def resumed_and_alone(
    folder: Path, model: Classifier, *places: tuple[int, int], **options
) -> list[Classifier]:
    """Train a model with a stop at each (epoch, batch) and without one; return both models."""
    options = {"max_epochs": 3} | options
    short_trainer(folder / "alone", **options).fit(alone := copy.deepcopy(model))
    for place in places:
        with pytest.raises(SystemExit):
            trainer = short_trainer(folder / "interrupted", StopsAt(*place), **options)
            trainer.fit(copy.deepcopy(model))
    short_trainer(folder / "interrupted", **options).fit(resumed := copy.deepcopy(model))
    return [resumed, alone]


CHANGING = {
    "a dataset": lambda: Curriculum(lambda: DataLoader(Fading(), 4, shuffle=True)),
    "a dataset of a data worker": lambda: Curriculum(
        lambda: DataLoader(Fading(), 4, shuffle=True, num_workers=1)
    ),
    "an iterable": lambda: Curriculum(Batches),
    "an iterable that the model keeps": lambda: KeptCurriculum(Batches),
    "a DataLoader of a class of one's own": lambda: Curriculum(
        lambda: FadingLoader(Noisy(), 4, shuffle=True)
    ),
    "a loader around one with a data worker": lambda: Curriculum(
        lambda: Around(DataLoader(Noisy(), 4, shuffle=True, num_workers=1))
    ),
    "a loader of validations": Darkening,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGING)
def test_what_changes_in_the_data_is_as_it_was(tmp_path: Path, case: str):
    """In the first epoch, as the second one begins, and within it."""
    resumed, alone = resumed_and_alone(tmp_path, CHANGING[case](), (0, 5), (1, 0), (1, 5))
    assert all(map(torch.equal, resumed.state_dict().values(), alone.state_dict().values()))
    if isinstance(resumed, Curriculum):
        assert resumed.changing().noise == alone.changing().noise < 1


class Stored(torch.utils.data.Dataset):
    """Samples in a table, which no checkpoint holds."""

    def __init__(self, values: torch.Tensor) -> None:
        self.rows = pyarrow.table({"x": values.tolist()})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        return torch.tensor([self.rows["x"][index].as_py(), 1.0]), torch.tensor([index % 2.0])


class Redrawn(Untested):
    """Draws its data when Lightning asks for it; they depend on what training has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 1.0

    def train_dataloader(self):
        return DataLoader(Stored(self.level * torch.rand(16)), 4, shuffle=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.level *= 0.99


@pytest.mark.slow
def test_data_that_are_made_anew_while_training_are_as_they_were(tmp_path: Path, capfd):
    """Within an epoch those of the epoch in which they were made, at its end new ones."""
    model = Redrawn()
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 2}
    short_trainer(tmp_path / "alone", **options).fit(alone := copy.deepcopy(model))
    for place in ((1, 3), (3, 1)):
        with pytest.raises(SystemExit):
            short_trainer(tmp_path / "run", StopsAt(*place), **options).fit(copy.deepcopy(model))
    short_trainer(tmp_path / "run", **options).fit(resumed := copy.deepcopy(model))
    assert all(map(torch.equal, resumed.state_dict().values(), alone.state_dict().values()))
    assert resumed.level == alone.level
    assert "warning: resumed" not in capfd.readouterr().out


class Adding(Classifier):
    """It keeps the mean of its losses at an object of Lightning's or torch's, and trains by it."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        owner = {
            "trainer": self.trainer,
            "optimizer": self.trainer.optimizers[0],
            "Lightning's optimizer": self.optimizers(),
            "loader": self.trainer.train_dataloader,
        }[self.owner]
        if not hasattr(owner, "losses"):
            owner.losses = []
        owner.losses.append(outputs["loss"].item())
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1 - 0.0003 * sum(owner.losses))


class AddingToParameters(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.count = getattr(parameter, "count", 0) + 1
                average = getattr(parameter, "average", parameter)
                parameter.average = average * 0.9 + parameter * 0.1
                parameter.add_(parameter.average, alpha=-0.001 * parameter.count)


def doubled(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = default_collate(samples)
    return 2 * inputs, labels


class Collating(Classifier):
    """It has its batches put together in another way from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.collating = {"later": doubled}  # a checkpoint names no function

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.train_dataloader.collate_fn = self.collating["later"]


ADDING = {
    **{
        f"to the {owner}": functools.partial(Adding, owner)
        for owner in ("trainer", "optimizer", "Lightning's optimizer", "loader")
    },
    "to parameters": AddingToParameters,
    "a function to the loader": Collating,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ADDING)
def test_what_is_added_to_a_librarys_object_is_there_again(tmp_path: Path, case: str):
    resumed, alone = resumed_and_alone(tmp_path, ADDING[case](), (0, 5), (1, 5))
    assert all(map(torch.equal, resumed.state_dict().values(), alone.state_dict().values()))


@pytest.mark.slow
def test_what_libraries_set_themselves_is_not_added(tmp_path: Path):
    sees = Sees()
    short_trainer(tmp_path, sees).fit(model := Classifier())
    parameters = {f"parameters.{name}": {} for name, _ in model.named_parameters()}
    collating = {"collate_fn": default_collate}
    # What functions of the program keep is its own.
    of_libraries = {
        name: added for name, added in sees.added.items() if not name.startswith("variables.")
    }
    loops = {f"trainer.{name}": {} for name in lightning_loops.own_attributes()}
    of_libraries["trainer"].pop("callbacks")  # training may add some
    assert of_libraries == parameters | {
        **loops,
        "trainer": {},
        "optimizers.0": {},
        "lightning_optimizers.0": {},
        "train.0.loader": collating,
        "val.0.loader": collating,
    }


class Iterating(Classifier):
    """It has an iterator of its own, with data workers."""

    def on_fit_start(self) -> None:
        self.batches = iter(DataLoader(torch.arange(400.0), 4, num_workers=2))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return super().training_step((inputs + next(self.batches).mean(), labels), batch_idx)


@pytest.mark.slow
def test_an_iterator_of_ones_own_is_reported_and_left_alone(tmp_path: Path, capfd):
    """Some of its attributes belong to its workers: others from before would break it."""
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, StopsAt(0, 5)).fit(Iterating())
    short_trainer(tmp_path).fit(Iterating())
    warnings = re.findall(
        r"^warning: (.*) and no checkpoint can hold", capfd.readouterr().out, re.M
    )
    assert warnings == ["model.batches is a _MultiProcessingDataLoaderIter,"] * 2


class Beside(Untested):
    """Trains by what it keeps beside its weights and its optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("saved", torch.zeros(()))
        self.teacher = [torch.nn.Linear(2, 1), torch.nn.LazyLinear(1)]
        self.mean = MeanMetric()
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        self.scale = torch.nn.Parameter(torch.ones(()))  # no optimizer has it

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.scale
        with torch.no_grad():
            self.seen += 1
            self.saved += 2
            self.teacher[0].weight.mul_(0.9).add_(self.network[0].weight.mean(0))
            self.mean(loss)
            self.tracker(loss)
            kept = self.seen + self.saved + self.teacher[0].weight.sum() + self.mean.compute()
            kept += self.tracker.compute_all().sum()
            kept += 0 if self.scale.grad is None else self.scale.grad
        return loss * (1 + 0.01 * kept)

    def configure_optimizers(self):
        return torch.optim.SGD(self.network.parameters(), 0.05)


@pytest.mark.slow
def test_what_a_model_keeps_beside_its_weights_is_as_it_was(tmp_path: Path):
    options = {"max_epochs": 2, "limit_train_batches": 4}
    resumed, alone = resumed_and_alone(tmp_path, Beside(), (1, 1), **options)
    weights = zip(resumed.network.parameters(), alone.network.parameters(), strict=True)
    assert all(torch.equal(*each) for each in weights)
    assert resumed.seen == alone.seen == 8 and resumed.saved == 16
    assert torch.equal(resumed.teacher[0].weight, alone.teacher[0].weight)
    assert resumed.tracker.n_steps == 2 and resumed.mean.compute() == alone.mean.compute()
    assert torch.equal(resumed.tracker.compute_all(), alone.tracker.compute_all())
    assert torch.equal(resumed.scale.grad, alone.scale.grad)


class Harder(torch.utils.data.Sampler):
    """Draws an epoch at its start, by weights that training changes meanwhile.

    It shares the model's generator.
    """

    def __init__(self, model: pl.LightningModule) -> None:
        self.weights = np.ones(43)
        self.model = model

    def __len__(self) -> int:
        return 43

    def __iter__(self):
        probabilities = self.weights / self.weights.sum()
        return iter(self.model.draws.choice(43, 43, p=probabilities).tolist())


class Mining(Classifier):
    """A model that draws more of what has a large loss."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(3)
        self.seen = 0
        self.sampler = Harder(self)

    def train_dataloader(self):
        return DataLoader(Noisy(), self.batch_size, sampler=self.sampler)

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        self.seen += 1
        loss = outputs["loss"].item()
        self.sampler.weights[4 * batch_idx] += self.seen * loss * self.draws.random()


@pytest.mark.slow
def test_what_training_changes_in_a_sampler_counts_for_the_next_epoch(tmp_path: Path):
    """A training is stopped as an epoch begins, within it and at its end."""
    places = (0, 0), (0, 7), (0, 10)
    resumed, alone = resumed_and_alone(tmp_path, Mining(), *places)
    assert all(map(torch.equal, resumed.state_dict().values(), alone.state_dict().values()))
    assert (resumed.sampler.weights == alone.sampler.weights).all()
    assert resumed.seen == alone.seen == 33 and resumed.draws.random() == alone.draws.random()


@pytest.mark.slow
def test_lightnings_profiler_sees_the_loader(tmp_path: Path):
    profiler = pl.profilers.SimpleProfiler()
    trainer = short_trainer(tmp_path, profiler=profiler)
    trainer.fit(Classifier())
    waits = profiler.recorded_durations["[EpochLoop].train_dataloader_next"]
    assert len(waits) >= trainer.num_training_batches
