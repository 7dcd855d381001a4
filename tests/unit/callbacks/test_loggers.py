"""callbacks/loggers: which files and runs the loggers of a resumed run continue."""

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonargparse import ArgumentParser
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from test_interruptions import points

from sagemaker_lightning.callbacks import loggers as our_loggers
from sagemaker_lightning.callbacks.loggers import (
    begin_files,
    continue_files,
    end_training,
    prepare_files,
    save_states,
    tensorboard_events,
)


@pytest.mark.parametrize("version", ["/code", "../code", "..", "a/../../code", ""])
def test_a_checkpoint_leads_to_no_logs_outside_of_their_folder(tmp_path: Path, version, capsys):
    """Its file may be forged; the logs of the interrupted run are written again."""
    for kind in (CSVLogger, TensorBoardLogger):
        logger = kind(tmp_path, name="logs")
        state = {"kind": kind.__name__, "name": "logs", "version": version}
        prepare_files([logger], [state])
        assert logger.log_dir == str(tmp_path / "logs/version_0")
        assert f"this run logs to version 0, the interrupted run logged to version {version}" in (
            capsys.readouterr().out
        )


@pytest.mark.parametrize("version", [4, "four", "a..b"])
def test_a_logger_gets_the_version_of_the_interrupted_run(tmp_path: Path, version):
    """The states are those of loggers of the same class and name, one after the other."""
    states = [
        {"kind": "TensorBoardLogger", "name": "logs", "version": 9},
        {"kind": "CSVLogger", "name": "logs", "version": version},
        {"kind": "CSVLogger", "name": "other", "version": 8},
        {"kind": "CSVLogger", "name": "logs", "version": 6},
    ]
    loggers = [CSVLogger(tmp_path, name="logs") for _ in range(2)]
    loggers += [CSVLogger(tmp_path, name="mine"), TensorBoardLogger(tmp_path, name="logs")]
    prepare_files(loggers, states)
    assert [logger.version for logger in loggers] == [version, 6, 0, 9]


def test_only_a_training_says_that_it_logs_elsewhere(tmp_path: Path, capsys):
    state = {"kind": "CSVLogger", "name": "logs", "version": 4}
    logger = CSVLogger(tmp_path, name="logs", version=2)
    for trains in (False, True):
        prepare_files([logger], [state], trains=trains)
        assert ("logged to version 4" in capsys.readouterr().out) == trains
    assert logger.version == 2
    prepare_files([CSVLogger(tmp_path, name="logs", version=4)], [state])
    assert not capsys.readouterr().out


FORGED = {
    "nothing": {},
    "a training in words": {"training": "one"},
    "a training below zero": {"training": -3, "columns": [], "size": 0},
    "columns of numbers": {"training": 1, "columns": [1, 2], "size": 0},
    "no size": {"training": 1, "columns": ["step"]},
    "a size in words": {"training": 1, "columns": ["step"], "size": "9" * 99},
    "sizes in a list": {"training": 1, "event_files": [1]},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_state_that_no_logger_saves_ends_no_training(tmp_path: Path, kind, forged):
    logger = kind(tmp_path, name="logs")
    state = {"kind": kind.__name__, "name": "logs", "version": 0} | forged
    prepare_files([logger], [state])
    continue_files([logger], [state], step=3, first=True)
    logger.log_metrics({"loss": 1.0}, step=4)
    assert save_states([logger])[0]["version"] == 0


def csv_rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a CSVLogger's file, without the cells that are empty."""
    rows = csv.DictReader((folder / "logs/version_0/metrics.csv").read_text().splitlines())
    return [{name: value for name, value in row.items() if value} for row in rows]


@pytest.mark.parametrize("fails_first", [False, True])
def test_what_is_logged_between_two_trainings_stays(tmp_path: Path, fails_first, capsys):
    """The second one continues from a checkpoint of the first, and logs the rest again."""
    loggers = [CSVLogger(tmp_path / "csv", "logs"), TensorBoardLogger(tmp_path / "board", "logs")]

    def log(**values: float) -> None:
        for logger in loggers:
            logger.log_metrics(values, step=int(*values.values()))

    log(before=1.0)
    loggers[0].save()
    for _ in range(1 + fails_first):
        prepare_files(loggers, [])
        begin_files(loggers)
    log(loss=2.0)
    states = save_states(loggers)
    log(loss=3.0)
    for _ in range(1 if fails_first else 2):
        end_training(loggers)
    prepare_files(loggers, states, trains=False)  # for a validation
    log(test=4.0)
    assert [state["training"] for state in states] == [1 + fails_first] * 2
    prepare_files(loggers, states)
    log(loss=5.0)  # by a hook that the first training has called, too
    continue_files(loggers, states, 2, first=True)
    log(loss=3.0)
    states = save_states(loggers)
    values = [{"before": "1.0"}, {"loss": "2.0"}, {"test": "4.0"}, {"loss": "3.0"}]
    steps = [str(int(float(*value.values()))) for value in values]
    expected = [value | {"step": step} for value, step in zip(values, steps, strict=True)]
    assert csv_rows(tmp_path / "csv") == expected
    curve = sorted((step, tag) for tag, step, _ in points(tmp_path / "board"))
    assert curve == [(1, "before"), (2, "loss"), (3, "loss"), (4, "test")]
    assert len(list((tmp_path / "board").rglob("events.*"))) == 2  # later ones have a new file
    assert not capsys.readouterr().out
    end_training(loggers)
    log(test=6.0)
    prepare_files(loggers, states)
    continue_files(loggers, states, 2, first=True)
    assert csv_rows(tmp_path / "csv") == [*expected, {"test": "6.0", "step": "6"}]


def test_other_hosts_leave_the_files_of_the_first_one(tmp_path: Path, monkeypatch):
    cleaned = []
    monkeypatch.setattr(
        tensorboard_events, "remove_later_events", lambda *call: cleaned.append(call)
    )
    file = tmp_path / "logs/version_0/metrics.csv"
    file.parent.mkdir(parents=True)
    file.write_text("loss,step\n1.0,1\n2.0,2\n")
    loggers = [CSVLogger(tmp_path, "logs", version=0)]
    loggers += [
        TensorBoardLogger(folder, "logs", version=0) for folder in (tmp_path, "s3://bucket/logs")
    ]
    states = [
        {"kind": type(logger).__name__, "name": "logs", "version": 0, "training": 1}
        | {"columns": ["loss", "step"], "size": 17, "event_files": {"a.tfevents.1": 5}}
        for logger in loggers
    ]
    prepare_files(loggers, states)
    continue_files(loggers, states, 5, first=False)
    assert cleaned == [(str(tmp_path / "logs/version_0"), 5, {"a.tfevents.1": 5}, [])]
    assert file.read_text().endswith("2.0,2\n")
    states[1]["version"] = 7  # this run logs to another folder
    continue_files(loggers[1:2], states[1:2], 5, first=True)
    assert len(cleaned) == 1


def test_a_command_line_writes_its_config_again(tmp_path: Path, monkeypatch):
    """Without it, a LightningCLI refuses to where the interrupted run has written one."""
    writers = [SaveConfigCallback(ArgumentParser(), None) for _ in range(2)]
    trainer = SimpleNamespace(callbacks=[object(), *writers])
    our_loggers.write_config_again(trainer)
    assert [writer.overwrite for writer in writers] == [True, True]
    monkeypatch.delitem(sys.modules, "pytorch_lightning.cli")  # a program without it
    assert not our_loggers.config_writers(trainer)
