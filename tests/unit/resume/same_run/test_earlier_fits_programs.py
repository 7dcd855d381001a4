"""Programs that call fit several times: each training has checkpoints of its own.

A program that is started again calls fit for the earlier trainings again. These train nothing, and
what the program does between its trainings finds what it found.
"""

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import nightly
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from short_fits import (
    Noted,
    alone_and_resumed,
    as_in_a_new_process,
    interrupted,
    saved,
    trainer,
    weights,
)
from torch.utils.data import DataLoader, Subset, TensorDataset

from sagemaker_lightning.contract.errors import UserError


class Consolidating(Noted):
    """Keeps, at each training's end, what the next one is drawn towards."""

    def __init__(self, **moments):
        super().__init__(**moments)
        self.anchors = []
        self.kept = {}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + sum((self.line.weight - each).square().sum() for each in self.anchors)

    def on_train_end(self):
        self.anchors.append(self.line.weight.detach().clone())
        self.kept[len(self.anchors)] = [float(self.line.weight.sum())]


@pytest.mark.parametrize(
    "stop", nightly.all_but(["batch 2:1"], ["batch 0:2", "batch 2:1", "batch 3:3"])
)
def test_what_an_earlier_training_of_a_program_has_made_comes_back(tmp_path: Path, capfd, stop):
    """A program that is started again calls fit for it, which trains nothing."""

    def program(folder: Path, **moments) -> Consolidating:
        fits = trainer(folder)
        model = Consolidating(**moments)
        fits.fit(model)
        fits.fit_loop.max_epochs = 4
        fits.fit(model)
        return model

    alone, resumed = alone_and_resumed(program, tmp_path, stop)
    assert resumed.kept == alone.kept and weights(resumed) == weights(alone)
    assert "warning" not in capfd.readouterr().out


class Teaching(Noted):
    """Is drawn towards teachers; notes the optimizer with which each training begins."""

    def __init__(self, **moments):
        super().__init__(**moments)
        self.teachers = []

    def on_train_start(self):
        super().on_train_start()
        self.note(f"optimizer of {len(self.trainer.optimizers[0].state)} states")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + sum((self.line.weight - each).square().sum() for each in self.teachers)


def self_training(folder: Path, **moments: str) -> list:
    """Train three times; each time on more data, chosen by the model and at random."""
    data = TensorDataset(torch.arange(48.0).view(24, 2) / 48)
    chosen, pool = [0, 1, 2, 3], [*range(4, 24)]
    settings = {
        "logger": CSVLogger(folder, version=1),
        "enable_checkpointing": True,
        "log_every_n_steps": 1,
        "every_n_steps": 2,
    }
    kept = ModelCheckpoint(folder / "kept", monitor="error", save_top_k=2)
    fits = trainer(folder, kept, **settings)
    model = Teaching(**moments)
    said = []
    for turn in range(3):
        fits.fit_loop.max_epochs = fits.current_epoch + 2
        fits.fit(model, DataLoader(Subset(data, chosen), 2, shuffle=True))
        outputs = model.line(data.tensors[0])[pool, 0]
        added = {pool[place] for place in [*outputs.argsort()[:2].tolist(), random.randrange(8)]}
        chosen += sorted(added)
        pool = [index for index in pool if index not in added]
        model.teachers.append(model.line.weight.detach() * (1 + torch.rand(2)))
        model.line.weight.data /= 2
        said.append((sorted(added), turn, fits.callback_metrics["error"].item()))
    rows = (folder / "lightning_logs/version_1/metrics.csv").read_text()
    names = sorted(path.name for path in (folder / "kept").iterdir())
    return [said, model.events, weights(model), rows, names]


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param(["batch 1:1"], marks=pytest.mark.thorough),
        ["batch 2:0"],
        pytest.param(["validation 2:1", "end 4"], marks=pytest.mark.thorough),
        ["batch 3:2", "batch 4:0", "batch 5:1"],
    ],
    ids=str,
)
def test_what_a_program_does_between_its_trainings_finds_what_it_found(tmp_path: Path, stops):
    alone, resumed = alone_and_resumed(self_training, tmp_path, *stops)
    assert resumed == alone
    begun = [event for event in alone[1] if event.startswith("optimizer of")]
    assert begun == ["optimizer of 0 states"] * 3  # as plain Lightning makes them
    assert all([*saved(tmp_path / "alone" / name)] for name in (".", "fit-2", "fit-3"))


@pytest.fixture
def no_handler() -> Iterator[None]:
    """Have no handler of SIGTERM: Lightning's calls it, and that of pytest raises."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("no_handler")
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
def test_sigterm_that_comes_as_a_training_ends_stops_the_next_one(tmp_path: Path, hook):
    """The first one has nothing left to stop; whoever stops the job says so once."""

    def late(model: Noted) -> None:
        if model.global_step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    Late = type("Late", (Noted,), {hook: late})  # noqa: N806  # a class

    fits = trainer(tmp_path)
    fits.fit(model := Late())
    fits.fit_loop.max_epochs = 4
    with pytest.raises(SystemExit, match="143"):
        fits.fit(model)
    assert [*saved(tmp_path / "fit-2")] == [9]


def trained_twice(folder: Path, first: int = 2, **moments: str) -> Noted:
    fits = trainer(folder, max_epochs=first)
    fits.fit(model := Noted(**moments))
    fits.fit_loop.max_epochs = 4
    fits.fit(model)
    return model


def test_a_first_training_of_another_length_is_refused(tmp_path: Path):
    """The second one would continue from where the first one ends no more."""
    with interrupted():
        trained_twice(tmp_path, stop="batch 3:1")
    says = (
        r"found max_epochs=1 and max_steps=-1, expected 2 and -1: the training of \S+fit-2 began "
    )
    with pytest.raises(UserError, match=says):
        trained_twice(tmp_path, first=1)


def test_a_first_training_whose_checkpoints_are_gone_is_refused(tmp_path: Path):
    with interrupted():
        trained_twice(tmp_path, stop="batch 3:1")
    for path in tmp_path.glob("step-*.ckpt"):
        path.unlink()
    with pytest.raises(UserError, match=r"found no checkpoint, .* before that of \S+fit-2"):
        trained_twice(tmp_path)


def test_another_trainer_continues_the_newest_training(tmp_path: Path, capfd):
    """As in a notebook that makes its trainer again, with a higher limit."""
    model = trained_twice(tmp_path)
    capfd.readouterr()
    trainer(tmp_path, max_epochs=5).fit(model)
    assert f"resuming from step 16: {tmp_path / 'fit-2'}" in capfd.readouterr().out
    assert model.events[-2:] == ["end 4", "all"]


def test_a_training_that_has_failed_is_the_same_one_if_it_is_tried_again(tmp_path: Path, capfd):
    fits = trainer(tmp_path)
    fits.fit(model := Noted(fails="batch 3:1"))
    fits.fit_loop.max_epochs = 4
    with pytest.raises(RuntimeError, match="as it was asked to"):
        fits.fit(model)
    model.fails = ""
    model.calls = 7
    capfd.readouterr()
    fits.fit(model)
    (line,) = re.findall("^warning: (.*)$", capfd.readouterr().out, re.MULTILINE)
    assert line.startswith(
        "model.calls, model.fails: changed between the fit() that failed and this one"
    )
    assert [path.name for path in tmp_path.glob("fit-*")] == ["fit-2"]
    as_in_a_new_process()
    assert weights(model) == weights(trained_twice(tmp_path / "alone"))
