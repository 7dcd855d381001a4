"""Data, samplers and library objects that training changes are as they were."""

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path

import nightly
import pytest
import torch
from own_fits import Sees, StopsAt, short_trainer
from own_trainer import Classifier, Noisy
from torch.utils.data import DataLoader, default_collate

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
@pytest.mark.parametrize(
    "case", nightly.all_but(["a dataset of a data worker", "an iterable"], CHANGING)
)
def test_what_changes_in_the_data_is_as_it_was(tmp_path: Path, case: str):
    """In the first epoch, as the second one begins, and within it."""
    resumed, alone = resumed_and_alone(tmp_path, CHANGING[case](), (0, 5), (1, 0), (1, 5))
    assert all(map(torch.equal, resumed.state_dict().values(), alone.state_dict().values()))
    if isinstance(resumed, Curriculum):
        assert resumed.changing().noise == alone.changing().noise < 1


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
@pytest.mark.parametrize("case", nightly.all_but(["to parameters", "to the trainer"], ADDING))
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
        r"^warning: (.*) and its position cannot be saved", capfd.readouterr().out, re.M
    )
    assert (
        warnings
        == ["model.batches is a torch.utils.data.dataloader._MultiProcessingDataLoaderIter,"] * 2
    )
