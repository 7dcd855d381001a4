"""A user's own loggers draw one curve, however often the run was interrupted.

No point is lost, and none is there twice.
"""

import csv
import json
import time
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from test_interruptions import points
from test_strangers import Run
from torch.utils.tensorboard import SummaryWriter

from sagemaker_lightning.callbacks.loggers import (
    ContinuedWriter,
    prepare_files,
    remove_later_events,
)

LOGGERS = [
    {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}},
    {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "logs"}},
    {
        "class_path": "CSVLogger",
        "init_args": {"save_dir": "logs", "name": "mine", "version": "all", "prefix": "x"},
    },
    {
        "class_path": "TensorBoardLogger",
        "init_args": {"save_dir": "boards", "sub_dir": "a", "log_graph": True},
    },
]
FLAGS = [
    "--model=strangers.Logging",
    "--data=strangers.Validated",
    f"--trainer.logger={json.dumps(LOGGERS)}",
    "--trainer.callbacks=LearningRateMonitor",
    "--trainer.log_every_n_steps=2",
]


def curves(folder: Path) -> dict:
    """Return what the loggers' files hold, by folder."""
    contents = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.glob("logs/**/metrics.csv"))
    }
    boards = {
        file.parent for name in ("logs", "boards") for file in folder.glob(f"{name}/**/events.*")
    }
    return contents | {
        str(board.relative_to(folder)): sorted(map(str, points(board))) for board in boards
    }


@pytest.mark.slow
def test_own_loggers_have_one_curve(tmp_path: Path):
    alone = Run(tmp_path / "alone", *FLAGS)
    run = Run(tmp_path / "run", *FLAGS)
    alone.finish()
    expected = curves(alone.folder)
    rows = list(
        csv.DictReader(expected["logs/lightning_logs/version_0/metrics.csv"].decode().splitlines())
    )
    assert all(
        any(row[name] for row in rows)
        for name in ("begun", "later", "lr-SGD", "val_loss", "loss_epoch")
    )
    assert (
        run.start(KILL_AT="1:2") == -9
        and run.start(STOP_AT="1:5") == 143
        and run.start(KILL_AT="2:3") == -9
    )
    run.finish()
    assert curves(run.folder) == expected
    run.finish()  # the run has already finished
    assert curves(run.folder) == expected


@pytest.mark.slow
def test_a_log_that_is_lost_is_said(tmp_path: Path):
    run = Run(tmp_path, *FLAGS)
    assert run.start(STOP_AT="1:5") == 143
    file = tmp_path / "logs/lightning_logs/version_0/metrics.csv"
    file.unlink()
    run.finish()
    assert (
        "version_0/metrics.csv lacks rows of the interrupted run: the curves have a gap"
        in run.output
    )
    assert "later" in file.read_text().splitlines()[0]


@pytest.mark.parametrize("version", ["/code", "../code", "..", "a/../../code"])
def test_a_checkpoint_leads_to_no_logs_outside_of_their_folder(tmp_path: Path, version, capsys):
    """Its file may be forged; the logs of the interrupted run are written anew."""
    for kind in (CSVLogger, TensorBoardLogger):
        logger = kind(tmp_path, name="logs")
        state = {"kind": kind.__name__, "name": "logs", "version": version}
        prepare_files([logger], [state])
        assert logger.log_dir == str(tmp_path / "logs/version_0")
        assert f"this run logs to version 0, the interrupted run logged to version {version}" in (
            capsys.readouterr().out
        )


def test_a_parser_still_finds_the_class_of_a_logger_by_its_name(tmp_path: Path):
    """A program may make a LightningCLI after a training."""
    prepared = CSVLogger(tmp_path)
    prepare_files([prepared], [])
    assert type(prepared) is not CSVLogger
    parser = ArgumentParser()
    parser.add_argument("--logger", type=Logger)
    parsed = parser.parse_args(["--logger=CSVLogger", f"--logger.save_dir={tmp_path}"])
    assert parsed.logger.class_path == "pytorch_lightning.loggers.CSVLogger"


def rows(folder: Path, waits: bool) -> ContinuedWriter:
    return ContinuedWriter(str(folder), waits)


def test_a_file_goes_on_where_the_checkpoint_was(tmp_path: Path):
    """So it does if the file has got more columns since, or its last row is incomplete."""
    first_rows = rows(tmp_path, waits=False)
    for step in range(3):
        first_rows.log_metrics({"loss": step / 3, "text": 'a "b", c'}, step)
    first_rows.save()
    state = first_rows.state()
    content = (tmp_path / "metrics.csv").read_bytes()
    first_rows.log_metrics({"loss": 1.0, "more": 2.0}, 3)
    first_rows.save()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("7,0.1")
    second = rows(tmp_path, waits=True)
    second.log_metrics({"loss": 9.0}, 0)
    second.save()
    second.continue_from(**state)
    assert (tmp_path / "metrics.csv").read_bytes() == content
    second.log_metrics({"loss": 1.0, "more": 2.0}, 3)
    second.save()
    read_rows = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
    assert [row["more"] for row in read_rows] == ["", "", "", "2.0"]


def test_a_file_that_nobody_goes_on_with_is_removed_as_lightning_does(tmp_path: Path):
    first_rows = rows(tmp_path, waits=False)
    first_rows.log_metrics({"loss": 1.0}, 0)
    first_rows.save()
    second = rows(tmp_path, waits=True)
    second.log_metrics({"loss": 2.0}, 0)
    second.save()
    assert "1.0" in (tmp_path / "metrics.csv").read_text()
    second.start_file()
    second.save()
    assert (tmp_path / "metrics.csv").read_text().split() == ["loss,step", "2.0,0"]


def test_a_file_that_is_written_anew_is_whole_or_as_it_was(tmp_path: Path, monkeypatch):
    first_rows = rows(tmp_path, waits=False)
    first_rows.log_metrics({"loss": 1.0}, 0)
    first_rows.save()
    content_before = (tmp_path / "metrics.csv").read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: 1 / 0)  # as if it were killed before that
    first_rows.log_metrics({"more": 1.0}, 1)
    with pytest.raises(ZeroDivisionError):
        first_rows.save()
    assert (tmp_path / "metrics.csv").read_bytes() == content_before


@pytest.mark.slow
def test_files_of_tensorboard_are_cut_off_at_a_moment(tmp_path: Path):
    """A file that was begun later is removed; what was written in a later pause stays."""
    moments = []
    for name in ("a", "b"):
        with SummaryWriter(tmp_path, filename_suffix=name) as writer:
            moments.append(time.time())
            for step in range(3):
                writer.add_scalar("loss", 1.0, step, walltime=moments[-1] + 10 * step)
    assert len(points(tmp_path)) == 6
    start = moments[0]
    remove_later_events(str(tmp_path), start + 15, [(moments[1] + 20, moments[1] + 21)])
    assert len(points(tmp_path)) == 5  # all of a, and two of b
    remove_later_events(str(tmp_path), start)
    assert points(tmp_path) == [("loss", 0, [1.0])]
    assert [path.name[-1] for path in tmp_path.iterdir()] == ["a"]
