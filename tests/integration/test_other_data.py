"""Other data than the run began with are said."""

from pathlib import Path

import pytest
import torch
from own_fits import PressCtrlC, Stops, Untested, short_trainer
from own_trainer import Classifier
from torch.utils.data import DataLoader, TensorDataset


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "seed", "says"),
    [
        (28, 1, "the length of train.0.dataset, the numbers in train.0.dataset.tensors differ"),
        (24, 2, "the numbers in train.0.dataset.tensors differ"),
        (24, 1, ""),
    ],
)
def test_other_data_are_said_at_an_epochs_end_too(tmp_path: Path, capfd, samples, seed, says):
    """No step is recorded there yet that could differ."""

    def loader(samples: int, seed: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        columns = [torch.rand(samples, size, generator=generator) for size in (2, 1)]
        return DataLoader(TensorDataset(*columns), 4, shuffle=True)

    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1, batch=5), max_epochs=2).fit(Untested(), loader(24, 1))
    capfd.readouterr()
    short_trainer(tmp_path, PressCtrlC(0), max_epochs=2).fit(Untested(), loader(samples, seed))
    output = capfd.readouterr().out
    assert (
        f"on rank 0, {says}; likely because of data that were read or drawn again" in output
    ) is (bool(says))
    assert ("warning: resumed" in output) is bool(says)


class Validated(Classifier):
    """Gets its training data, and its validation data from a test."""

    val_dataloader = None


def numbers(seed: int, samples: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        *(torch.rand(samples, size, generator=generator).round() for size in (2, 1))
    )


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (
            DataLoader(numbers(1, 9), 4),
            "the length of val.0.dataset, the numbers in val.0.dataset.tensors differ",
        ),
        (DataLoader(numbers(2), 4), "the numbers in val.0.dataset.tensors differ"),
        (DataLoader(numbers(1), 2), "the batch_size of val.0 differs"),
        (DataLoader(numbers(1), 4), ""),
    ],
)
def test_other_validation_data_are_said(tmp_path: Path, capfd, loader, says, every):
    """They decide the best model and when training ends. The next validation may come later."""
    options = {"max_epochs": 2, "check_val_every_n_epoch": every}
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1), **options).fit(
            Validated(), val_dataloaders=DataLoader(numbers(1), 4)
        )
    capfd.readouterr()
    short_trainer(tmp_path, PressCtrlC(0), **options).fit(Validated(), val_dataloaders=loader)
    output = capfd.readouterr().out
    assert f"on rank 0, {says}; likely because of data" in output or not says
    assert ("warning: resumed" in output) is bool(says)


class Drawn(Classifier):
    """Draws its validation data whenever Lightning asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first_numbers: dict[int, float] = {}

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(8, 2), torch.ones(8, 1)), 4)

    def validation_step(self, batch, batch_idx):
        self.first_numbers.setdefault(self.current_epoch, float(batch[0][0, 0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stops", "epochs", "every", "reloads"),
    [((6, 9, 13), 4, 1, 2), ((6, 16), 6, 3, 2), ((6,), 2, 1, 0)],
)
def test_validation_data_that_are_drawn_anew_every_other_epoch(
    tmp_path: Path, stops, epochs, every, reloads
):
    """Or only once. An epoch has four batches."""
    options = {"reload_dataloaders_every_n_epochs": reloads, "check_val_every_n_epoch": every}
    options |= {"max_epochs": epochs, "limit_train_batches": 4}
    uninterrupted = Drawn()
    short_trainer(tmp_path / "whole", **options).fit(uninterrupted)
    draws = len(set(uninterrupted.first_numbers.values()))
    assert draws == (1 if not reloads else 2 if every == 1 else 3)
    drawn = {}
    for step in stops:
        with pytest.raises(SystemExit):
            short_trainer(tmp_path / "run", Stops(step), **options).fit(interrupted := Drawn())
        drawn |= interrupted.first_numbers
    short_trainer(tmp_path / "run", **options).fit(resumed := Drawn())
    assert drawn | resumed.first_numbers == uninterrupted.first_numbers


@pytest.mark.slow
def test_other_batches_are_said_at_an_epochs_end_too(tmp_path: Path, capfd):
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1, batch=10), max_epochs=2).fit(Untested())
    capfd.readouterr()
    short_trainer(tmp_path, PressCtrlC(0), max_epochs=2).fit(Untested(batch_size=8))
    output = capfd.readouterr().out
    assert "warning: model.batch_size" not in output
    assert "on rank 0, the batch_size of train.0 differs" in output
