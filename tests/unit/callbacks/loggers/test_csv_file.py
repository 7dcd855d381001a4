"""callbacks/loggers/csv_file.py: a CSVLogger's file continues from the checkpoint."""

import csv
import warnings
from pathlib import Path

import fsspec
import pytest
from jsonargparse import ArgumentParser
from pytorch_lightning.loggers import CSVLogger, Logger

from sagemaker_lightning.callbacks.loggers import (
    begin_files,
    continue_files,
    prepare_files,
    save_states,
)
from sagemaker_lightning.callbacks.loggers.base import Trainings
from sagemaker_lightning.callbacks.loggers.csv_file import ContinuedWriter


def csv_rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a CSVLogger's file, without the cells that are empty."""
    rows = csv.DictReader((folder / "logs/version_0/metrics.csv").read_text().splitlines())
    return [{name: value for name, value in row.items() if value} for row in rows]


def test_a_validation_before_the_training_adds_its_rows(tmp_path: Path):
    """If the training continues, they are not there: the interrupted run has logged them."""
    first = CSVLogger(tmp_path, "logs")
    prepare_files([first], [])
    assert save_states([first])[0]["size"] == 0  # there is no file yet
    first.log_metrics({"loss": 1.0}, 1)
    states = save_states([first])
    logger = CSVLogger(tmp_path, "logs")
    prepare_files([logger], states, trains=False)
    logger.log_metrics({"val_loss": 3.0}, 3)
    logger.save()
    whole = [{"loss": "1.0", "step": "1"}]
    assert csv_rows(tmp_path) == [*whole, {"val_loss": "3.0", "step": "3"}]
    prepare_files([logger], states)
    logger.log_metrics({"loss": 9.0}, 9)
    logger.save()
    assert len(csv_rows(tmp_path)) == 2  # the row waits
    continue_files([logger], states, 1, first=True)
    assert csv_rows(tmp_path) == whole


def test_a_training_that_continues_with_nothing_begins_a_new_file(tmp_path: Path):
    first = CSVLogger(tmp_path, "logs")
    prepare_files([first], [])
    with warnings.catch_warnings(action="error"):  # Lightning's of a folder that it looks for
        first.log_metrics({"loss": 1.0}, 1)
    states = save_states([first])
    for step, begin in enumerate(
        (begin_files, lambda loggers: continue_files(loggers, [], 1, True)), 2
    ):
        logger = CSVLogger(tmp_path, "logs")
        prepare_files([logger], states)
        logger.log_metrics({"loss": 2.0}, step)
        begin([logger])
        logger.save()
        assert csv_rows(tmp_path) == [{"loss": "2.0", "step": str(step)}]
    nothing = states[0] | {"columns": [], "size": 0}
    prepare_files([logger := CSVLogger(tmp_path, "logs")], [nothing])
    continue_files([logger], [nothing], 1, first=True)
    assert not (tmp_path / "logs/version_0/metrics.csv").exists()


@pytest.mark.parametrize("logs_first", [False, True])
def test_a_run_that_continues_nothing_replaces_the_file(tmp_path: Path, logs_first):
    """So do Lightning's own loggers, whose version the program has chosen."""
    file = tmp_path / "logs/version_0/metrics.csv"
    file.parent.mkdir(parents=True)
    file.write_text("loss,step\n1.0,1\n")
    logger = CSVLogger(tmp_path, "logs", version=0)
    if not logs_first:
        prepare_files([logger], [])
    with pytest.warns(UserWarning, match="Previous log files in this directory will be deleted"):
        logger.log_metrics({"loss": 2.0}, 2)
    prepare_files([logger], [])
    logger.save()
    assert csv_rows(tmp_path) == [{"loss": "2.0", "step": "2"}]


def test_a_parser_still_finds_the_class_of_a_logger_by_its_name(tmp_path: Path):
    """A program may make a LightningCLI after a training."""
    prepared = CSVLogger(tmp_path)
    prepare_files([prepared], [])
    assert type(prepared) is not CSVLogger
    parser = ArgumentParser()
    parser.add_argument("--logger", type=Logger)
    parsed = parser.parse_args(["--logger=CSVLogger", f"--logger.save_dir={tmp_path}"])
    assert parsed.logger.class_path == "pytorch_lightning.loggers.CSVLogger"


def rows(folder: Path | str, waits: bool) -> ContinuedWriter:
    return ContinuedWriter(str(folder), waits, False, Trainings([]))


def test_a_file_continues_where_the_checkpoint_was(tmp_path: Path, capsys):
    """So it does if the file has got more columns since, or its last row is incomplete."""
    first_rows = rows(tmp_path, waits=False)
    for step in range(3):
        first_rows.log_metrics({"loss": step / 3, "text": 'a "b", c'}, step)
    first_rows.save()
    state = first_rows.state()
    content = (tmp_path / "metrics.csv").read_bytes()
    first_rows.log_metrics({"loss": 1.0, "more": 2.0}, 3)
    first_rows.save()
    with (tmp_path / "metrics.csv").open("ab") as file:
        file.write(b"7,0.1,\xc3")  # the half of a letter
    second = rows(tmp_path, waits=True)
    second.log_metrics({"loss": 9.0}, 0)
    second.save()
    second.continue_from(**state)
    assert (tmp_path / "metrics.csv").read_bytes() == content and not capsys.readouterr().out
    second.log_metrics({"loss": 1.0, "more": 2.0}, 3)
    second.save()
    read_rows = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
    assert [row["more"] for row in read_rows] == ["", "", "", "2.0"]


def test_a_file_that_is_lost_begins_anew_and_a_line_says_so(tmp_path: Path, capsys):
    lost = rows(tmp_path, waits=True)
    lost.continue_from(columns=["loss", "step"], size=17)
    says = f"warning: {tmp_path}/metrics.csv lacks rows of the interrupted run: the curves have a"
    assert capsys.readouterr().out.startswith(says)
    assert not list(tmp_path.iterdir())
    lost.log_metrics({"more": 1.0}, 3)
    lost.save()
    assert (tmp_path / "metrics.csv").read_text().split() == ["more,step", "1.0,3"]


def test_a_file_that_no_run_continues_is_removed_as_lightning_does(tmp_path: Path):
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
    rows(tmp_path, waits=False)
    assert not (tmp_path / "metrics.csv").exists()


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


def test_a_file_in_an_object_store():
    store = fsspec.filesystem("memory")
    writer = rows("memory://logs", waits=False)
    for step, name in enumerate(("loss", "more", "loss")):
        writer.log_metrics({name: 1.0}, step)
        writer.save()
        if step == 0:
            state = writer.state()
    (path,) = store.find("/logs")
    assert store.cat_file(path) == b"loss,more,step\r\n1.0,,0\r\n,1.0,1\r\n1.0,,2\r\n"
    rows("memory://logs", waits=True).continue_from(**state)
    assert store.cat_file(path) == b"loss,step\r\n1.0,0\r\n" and path.endswith("/metrics.csv")
    store.rm("/logs", recursive=True)
