"""What loggers and progress have logged, after a resume."""

import contextlib
import csv
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import pytorch_lightning as pl
from own_fits import PressCtrlC, Stops, Untested, short_trainer
from own_trainer import Classifier
from pytorch_lightning.loggers import CSVLogger, Logger


def rows_of(folder: Path) -> str:
    return (folder / "lightning_logs/version_0/metrics.csv").read_text()


@pytest.mark.slow
def test_a_logger_that_was_used_before_fit_continues_in_its_file(tmp_path: Path):
    """A validation before the training opens the logger's file, in each run."""

    def train(folder: Path, stops: bool) -> None:
        logger = CSVLogger(folder / "logs")
        trainer = short_trainer(
            folder / "run", *([PressCtrlC(1)] if stops else []), logger=logger, log_every_n_steps=1
        )
        pl.seed_everything(3)
        model = Classifier()
        trainer.validate(model, verbose=False)
        trainer.fit(model)

    train(tmp_path / "alone", stops=False)
    with pytest.raises(SystemExit):
        train(tmp_path / "cut", stops=True)
    train(tmp_path / "cut", stops=False)
    assert [path.name for path in (tmp_path / "cut/logs/lightning_logs").iterdir()] == ["version_0"]
    assert rows_of(tmp_path / "cut/logs") == rows_of(tmp_path / "alone/logs")


class LogsEachValidationBatch(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch), on_step=True)


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 2])
def test_the_batches_of_validations_are_counted_on(tmp_path: Path, every: int):
    """Lightning logs them over their number, which starts over with new loaders."""

    def train(folder: Path, until: int) -> None:
        trainer = short_trainer(
            folder,
            Stops(until),
            max_epochs=4,
            reload_dataloaders_every_n_epochs=every,
            val_check_interval=5,
            limit_val_batches=2,
            logger=CSVLogger(folder / "logs"),
        )
        trainer.fit(LogsEachValidationBatch())

    train(tmp_path / "alone", until=0)
    for step in (14, 22):
        with pytest.raises(SystemExit):
            train(tmp_path / "cut", until=step)
    train(tmp_path / "cut", until=0)
    rows = rows_of(tmp_path / "alone/logs")
    assert rows_of(tmp_path / "cut/logs") == rows
    values = csv.DictReader(rows.splitlines())
    numbers = [int(row["step"]) for row in values if row["val_loss_step"]]
    assert max(numbers) == (7 if every else 15)


class History(Logger):
    """Keeps what is logged in memory."""

    name = "history"
    version = 0

    def __init__(self, as_arrays: bool = False) -> None:
        super().__init__()
        self.as_arrays = as_arrays
        self.values: dict[str, list] = {}

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.values.setdefault(name, []).append((step, self.kept(value)))

    def kept(self, value: float):
        return np.ma.masked_array([value]) if self.as_arrays else value


@pytest.mark.slow
def test_a_logger_in_memory_has_the_earlier_values(tmp_path: Path, capfd):
    """If a checkpoint can hold them; else a line names it."""

    def train(folder: Path, presses: int, as_arrays: bool = False) -> dict:
        logger = History(as_arrays)
        trainer = short_trainer(folder, PressCtrlC(presses), logger=logger, log_every_n_steps=1)
        pl.seed_everything(3)
        with pytest.raises(SystemExit) if presses else contextlib.nullcontext():
            trainer.fit(Classifier())
        return logger.values

    expected = train(tmp_path / "alone", 0)
    train(tmp_path / "run", 1)
    assert train(tmp_path / "run", 0) == expected and len(expected["train_loss_step"]) == 11
    assert "History" not in capfd.readouterr().out
    train(tmp_path / "arrays", 1, as_arrays=True)
    says = "History.values holds a numpy.ma.MaskedArray, which cannot be saved"
    assert capfd.readouterr().out.count(says) == 1


class Rows(History):
    """Keeps what is logged in a table, and makes another one for each row."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.rows = pyarrow.table({"loss": pyarrow.array([], "float64")}) if empty else None

    def log_metrics(self, metrics, step=None):
        row = pyarrow.table({"loss": [float(metrics.get("train_loss_step", 0))]})
        self.rows = pyarrow.concat_tables([self.rows, row]) if self.rows is not None else row


@pytest.mark.parametrize("empty", [True, False])
def test_a_table_that_no_checkpoint_can_hold_is_named(tmp_path: Path, capfd, empty):
    short_trainer(tmp_path, logger=Rows(empty), log_every_n_steps=5).fit(Untested())
    says = f"{__name__}.Rows.rows is a pyarrow.lib.Table, which cannot be saved"
    assert capfd.readouterr().out.count(says) == 1


def test_what_is_logged_by_hand_before_fit_is_kept(tmp_path: Path, capfd):
    model = Classifier()
    for _ in range(2):
        logger = CSVLogger(tmp_path / "logs")
        logger.experiment.log_metrics({"mine": 1.0}, step=0)
        short_trainer(tmp_path / "run", logger=logger, log_every_n_steps=1).fit(model)
    assert "mine" in rows_of(tmp_path / "logs").splitlines()[0]
    assert (
        "CSVLogger: this run logs to version 1, the interrupted run logged to version 0"
        in capfd.readouterr().out
    )
