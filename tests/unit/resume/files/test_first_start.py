"""resume/files/first_start.py: what a start leaves that is killed before its first checkpoint."""

import csv
import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from short_fits import Noted, interrupted, trainer

from sagemaker_lightning.resume.files import first_start
from sagemaker_lightning.resume.files.first_start import FirstStart


def train(folder: Path, fails: str = "", stop: str = "") -> list[str]:
    """Train two epochs, and return the names of all files of models and loggers.

    Those of events and hyperparameters are left out: the loggers write these when they are saved.
    """
    loggers = CSVLogger(folder / "csv", flush_logs_every_n_steps=1), TensorBoardLogger(folder / "t")
    models = ModelCheckpoint(folder / "models", every_n_train_steps=1, save_top_k=-1)
    fitted = trainer(
        folder / "checkpoints",
        models,
        ModelCheckpoint(every_n_train_steps=2, save_top_k=-1),
        logger=loggers,
        log_every_n_steps=1,
        enable_checkpointing=True,
        num_sanity_val_steps=1,
    )
    fitted.fit(Noted(fails=fails, stop=stop))
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        str(path)
        for path in files
        if path.parts[0] != "checkpoints" and not re.search(r"tfevents|hparams", path.name)
    )


def rows(folder: Path) -> list[list[str]]:
    with (folder / "csv/lightning_logs/version_0/metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_a_start_without_a_checkpoint_leaves_no_second_file(tmp_path, capsys):
    alone = train(tmp_path / "alone")
    for fails in ("batch 0:3", "batch 0:2"):
        with interrupted():
            train(tmp_path / "again", fails)
        assert (tmp_path / "again/checkpoints" / first_start.NAME).is_file()
    capsys.readouterr()
    with interrupted():
        train(tmp_path / "again", stop="batch 1:1")
    assert train(tmp_path / "again") == alone
    line = "the start before it was interrupted before its first checkpoint"
    printed = capsys.readouterr().out
    assert line in printed and "warning:" not in printed
    assert rows(tmp_path / "again") == rows(tmp_path / "alone")
    assert not any("version_1" in name for name in alone)
    assert not first_start.files(tmp_path / "again/checkpoints")


def test_a_start_that_ends_in_the_sanity_check_leaves_no_second_file(tmp_path):
    alone = train(tmp_path / "alone")
    for fails in ("validation 0:0", "batch 0:2"):
        with interrupted():
            train(tmp_path / "again", fails)
    assert train(tmp_path / "again") == alone
    assert rows(tmp_path / "again") == rows(tmp_path / "alone")


class WithHyperparameters(Noted):
    """It has hyperparameters, which TensorBoardLogger writes at each start."""

    def __init__(self, rate: float = 0.1, fails: str = "") -> None:
        super().__init__(fails=fails)
        self.save_hyperparameters("rate")


def test_hyperparameters_are_in_curves_that_are_gone_at_the_next_start(tmp_path, capsys):
    """As on another machine, which has what was saved by a start, but not its curves."""
    for fails in ("batch 0:2", ""):
        shutil.rmtree(tmp_path / "t", ignore_errors=True)
        logged = trainer(tmp_path / "checkpoints", logger=TensorBoardLogger(tmp_path / "t"))
        with interrupted() if fails else nullcontext():
            logged.fit(WithHyperparameters(fails=fails))
    events = b"".join(path.read_bytes() for path in tmp_path.rglob("*tfevents*"))
    assert b"_hparams_/experiment" in events
    assert "gap" not in capsys.readouterr().out


def test_what_was_there_before_stays(tmp_path):
    """A model of another run's has its name; so ours get the next one, at each start."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/epoch=0-step=1.ckpt").write_text("another's")
    with interrupted():
        train(tmp_path, "batch 0:3")
    files = train(tmp_path)
    assert (tmp_path / "models/epoch=0-step=1.ckpt").read_text() == "another's"
    assert "models/epoch=0-step=1-v1.ckpt" in files
    assert "models/epoch=0-step=1-v2.ckpt" not in files


@pytest.mark.parametrize("path", ["last", None])
def test_a_model_that_the_interrupted_start_wrote_is_not_loaded(tmp_path, capsys, path):
    """Lightning itself chooses the last one beside an OnExceptionCheckpoint."""

    def fit(folder, fails=""):
        of_errors = [] if path else [OnExceptionCheckpoint(folder / "errors")]
        models = ModelCheckpoint(folder / "models", every_n_train_steps=1, save_last=True)
        fitted = trainer(folder / "checkpoints", models, *of_errors, enable_checkpointing=True)
        fitted.fit(model := Noted(fails=fails), ckpt_path=path, weights_only=False)
        return fitted.global_step, [*model.parameters()]

    alone = fit(tmp_path / "alone")
    for fails in ("batch 0:3", "batch 0:2"):
        with interrupted():
            fit(tmp_path / "again", fails)
    steps, weights = fit(tmp_path / "again")
    assert steps == alone[0] and all(map(torch.equal, weights, alone[1]))
    line = ".ckpt is not loaded: the start that was interrupted wrote it"
    assert capsys.readouterr().out.count(line) == 2


def test_a_model_of_before_the_first_start_is_loaded_at_each_start(tmp_path, capsys):
    saved = trainer(tmp_path / "other", enable_checkpointing=True)
    saved.fit(Noted())
    saved.save_checkpoint(tmp_path / "given.ckpt")

    def fit(folder, fails=""):
        fitted = trainer(folder, max_epochs=4)
        fitted.fit(model := Noted(fails=fails), ckpt_path=tmp_path / "given.ckpt")
        return [*model.parameters()]

    alone = fit(tmp_path / "alone")
    with interrupted():
        fit(tmp_path / "again", "batch 2:2")
    assert all(map(torch.equal, fit(tmp_path / "again"), alone))
    assert "is not loaded" not in capsys.readouterr().out


WRONG = {
    "no JSON": b"{",
    "no text": b"\xff",
    "no dict": b"[]",
    "no loggers": b'{"model_files": {}}',
    "names that are not a dict": b'{"loggers": [], "model_files": 5}',
    "names that are not a list": b'{"loggers": [], "model_files": {"a": 5}}',
    "nested too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_what_cannot_be_read_is_as_if_it_was_not_there(tmp_path, content):
    (tmp_path / first_start.NAME).write_bytes(content)
    assert first_start.read(tmp_path) is None


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / first_start.NAME)
    assert first_start.read(tmp_path) is None


def test_only_what_is_well_formed_is_read(tmp_path):
    assert first_start.read(tmp_path) is None
    state = {"kind": "CSVLogger", "name": "a", "version": 1}
    content = {"loggers": [state, 5, {"kind": []}], "model_files": {"a": ["x.ckpt", 5]}}
    (tmp_path / first_start.NAME).write_text(json.dumps(content))
    assert first_start.read(tmp_path) == FirstStart([state], {"a": ["x.ckpt"]})
    first_start.forget(tmp_path)
    assert first_start.files(tmp_path) == []
    first_start.forget(tmp_path)


def test_a_full_disk_costs_no_training(tmp_path):
    (tmp_path / "file").touch()
    first_start.write(tmp_path / "file", FirstStart([], {}))
    first_start.write(tmp_path / "new", FirstStart([], {}))
    assert first_start.files(tmp_path / "new") == [tmp_path / "new" / first_start.NAME]
