"""A user's own loggers draw one curve, however often the run was interrupted.

No point is lost, and none is there twice.
"""

import csv
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from jsonargparse import ArgumentParser
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_interruptions import points
from test_strangers import Run
from torch.utils.tensorboard import SummaryWriter

from sagemaker_lightning.callbacks import loggers as our_loggers
from sagemaker_lightning.callbacks.loggers import (
    ContinuedWriter,
    begin_files,
    continue_files,
    end_training,
    prepare_files,
    read_events,
    remove_later_events,
    save_states,
)
from sagemaker_lightning.contract.errors import UserError

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


@pytest.mark.parametrize("version", ["/code", "../code", "..", "a/../../code", ""])
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


def test_tensorboards_values_are_written_each_so_many_seconds(tmp_path: Path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    written = []
    monkeypatch.setattr(our_loggers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(TensorBoardLogger, "save", lambda logger: written.append(clock.now))
    logger = our_loggers.Logger(tmp_path, flush_secs=10)
    for clock.now in (0.0, 9.0, 10.0, 19.0):
        logger.save()
    save_states([logger])  # a checkpoint needs all of them
    for clock.now in (28.0, 29.0):
        logger.save()
    assert written == [0.0, 10.0, 19.0, 29.0]
    assert our_loggers.Logger(tmp_path, flush_secs=1)._kwargs["flush_secs"] == 1
    with pytest.raises(UserError, match="^--logger.flush_secs: found 0, allowed is 1 or more$"):
        our_loggers.Logger(tmp_path, flush_secs=0)
    never = our_loggers.Logger(tmp_path, flush_secs=10**12)
    assert never._kwargs["flush_secs"] == 24 * 3600 and never.seconds_between_saves == 10**12


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


def test_a_validation_before_the_training_adds_its_rows(tmp_path: Path):
    """If the training goes on, they are not there: the interrupted run has logged them."""
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


def test_a_training_that_goes_on_with_nothing_begins_a_new_file(tmp_path: Path):
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


def test_other_hosts_leave_the_files_of_the_first_one(tmp_path: Path, monkeypatch):
    cleaned = []
    monkeypatch.setattr(our_loggers, "remove_later_events", lambda *call: cleaned.append(call))
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
    return ContinuedWriter(str(folder), waits, False, our_loggers.Trainings())


def test_a_file_goes_on_where_the_checkpoint_was(tmp_path: Path, capsys):
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


def test_a_command_line_writes_its_config_again(tmp_path: Path, monkeypatch):
    """Without it, a LightningCLI refuses to where the interrupted run has written one."""
    writers = [SaveConfigCallback(ArgumentParser(), None) for _ in range(2)]
    trainer = SimpleNamespace(callbacks=[object(), *writers])
    our_loggers.write_config_again(trainer)
    assert [writer.overwrite for writer in writers] == [True, True]
    monkeypatch.delitem(sys.modules, "pytorch_lightning.cli")  # a program without it
    assert not our_loggers.config_writers(trainer)


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


def event_file(path: Path, times: list[float]) -> list[bytes]:
    """Write a file of TensorBoard with an event at each of some times; return its records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with SummaryWriter(path.parent) as writer:
        for step, moment in enumerate(times):
            writer.add_scalar("loss", 0.5, step, walltime=moment)
    (made,) = path.parent.glob("events.*")
    made.rename(path)
    records = [record for record, _ in our_loggers._records(path.read_bytes())]
    assert b"".join(records) == path.read_bytes()
    return records[-len(times) :]


def test_a_file_of_tensorboard_that_was_cut_off_has_its_whole_records(tmp_path: Path):
    records = event_file(tmp_path / "a.tfevents.1", [1.0, 2.0, 3.0])
    content = b"".join(records)
    for cut in range(1, len(records[-1]) + 1):
        assert [step for _, step, _ in read_events(content[:-cut])] == [0, 1]
    assert list(read_events(content)) == [("loss", step, 0.5) for step in range(3)]


def test_only_files_with_later_events_are_written_again(tmp_path: Path):
    """A file of a host that the checkpoint does not know has the steps up to the checkpoint's."""
    records = event_file(tmp_path / "a.tfevents.1", [9.0, 1.0, 3.0, 4.0])
    ends = [sum(map(len, records[:number])) for number in range(5)]
    contents = {
        "a.tfevents.1": b"".join(records),
        "b.tfevents.1": b"".join(records[:2]),
        "c.tfevents.1": b"",
        "d.tfevents.1": b"".join(records[2:]),
        "tfevents.txt": b"a note",
        "system/two/e.tfevents.1": b"".join(records),
        "system/two/f.tfevents.1": b"".join(records[:2]),
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)

    def files() -> dict[str, Path]:
        return {
            str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()
        }

    numbers = {name: path.stat().st_ino for name, path in files().items()}
    known = {"a.tfevents.1": ends[2], "b.tfevents.1": ends[2], "c.tfevents.1": 0}
    pauses = [
        [{"a.tfevents.1": ends[2]}, {"a.tfevents.1": ends[3], "d.tfevents.1": len(records[2])}],
        [{"d.tfevents.1": ends[4] - ends[2]}, {"d.tfevents.1": ends[4] - ends[2]}],
    ]
    assert remove_later_events(str(tmp_path), 1, known, pauses) == []
    contents["a.tfevents.1"] = b"".join(records[:3])
    contents["d.tfevents.1"] = records[2]
    contents["system/two/e.tfevents.1"] = b"".join(records[:2])
    assert {name: path.read_bytes() for name, path in files().items()} == contents
    for name in ("b.tfevents.1", "c.tfevents.1", "tfevents.txt", "system/two/f.tfevents.1"):
        assert files()[name].stat().st_ino == numbers[name]
    assert remove_later_events(str(tmp_path), 1, known, pauses) == []  # they stay where they are
    assert {name: path.read_bytes() for name, path in files().items()} == contents
    known["gone.tfevents.1"] = known["c.tfevents.1"] = 1
    assert remove_later_events(str(tmp_path), 1, known) == ["c.tfevents.1", "gone.tfevents.1"]
    assert not (tmp_path / "d.tfevents.1").exists() and (tmp_path / "c.tfevents.1").exists()
    assert remove_later_events(str(tmp_path / "none"), 2, {}) == []


@pytest.mark.parametrize("sizes", [{"a.tfevents.1": -5}, {"a.tfevents.1": "much"}, [5], None])
def test_sizes_that_a_checkpoint_may_not_have_do_no_harm(tmp_path: Path, sizes):
    """Without any, what is kept is what was logged up to the checkpoint's step."""
    event_file(tmp_path / "a.tfevents.1", [1.0, 2.0, 3.0])
    remove_later_events(str(tmp_path), 1, sizes)
    is_kept = not isinstance(sizes, dict)
    contents = [path.read_bytes() for path in tmp_path.iterdir()]
    steps = [step for content in contents for _, step, _ in read_events(content)]
    assert steps == ([0, 1] if is_kept else [])


def points_as_tensorboard_shows_them(folder: Path) -> list[tuple[int, float]]:
    """Return steps and values of the curve of the loss, in the order in which they are read."""
    shown = EventAccumulator(str(folder))
    shown.Reload()
    return [(event.step, event.value) for event in shown.Scalars("loss")]


@pytest.mark.parametrize("offset", [0, -3600, -5, 3600])
def test_points_stay_if_the_clock_of_the_next_machine_is_behind(tmp_path, monkeypatch, offset):
    """Whatever it shows, they are there once, in their order."""
    clock = time.time
    states: list = []
    for attempt in range(4):
        monkeypatch.setattr(time, "time", lambda attempt=attempt: clock() + attempt * offset)
        logger = TensorBoardLogger(tmp_path, "logs")
        prepare_files([logger], states)
        first = 2 * attempt
        logger.log_metrics({"loss": 99.0}, first)  # by a hook: the interrupted run has done so
        (continue_files if states else begin_files)(
            [logger], *([states, first, True] if states else [])
        )
        for step in range(first, first + 2):
            logger.log_metrics({"loss": step / 2}, step)
        states = save_states([logger])
        logger.log_metrics({"loss": 98.0}, first + 2)  # after the checkpoint: lost
        logger.save()
        logger.experiment.close()
    logger = TensorBoardLogger(tmp_path, "logs")
    prepare_files([logger], states)
    continue_files([logger], states, 8, first=True)
    logger.log_metrics({"loss": 4.0}, 8)
    logger.save()
    expected = [(step, step / 2) for step in range(9)]
    assert points_as_tensorboard_shows_them(tmp_path / "logs/version_0")[1:] == expected


def test_points_that_are_lost_are_said(tmp_path, capsys):
    logger = TensorBoardLogger(tmp_path, "logs")
    prepare_files([logger], [])
    logger.log_metrics({"loss": 1.0}, 1)
    states = save_states([logger])
    logger.experiment.close()
    (file,) = (tmp_path / "logs/version_0").glob("*.tfevents.*")
    file.write_bytes(file.read_bytes()[:-9])
    logger = TensorBoardLogger(tmp_path, "logs")
    prepare_files([logger], states)
    continue_files([logger], states, 1, first=True)
    assert capsys.readouterr().out == (
        f"warning: {logger.log_dir} lacks points of the interrupted run (in 1 of TensorBoard's "
        "files): the curves have a gap\n"
    )


@pytest.fixture
def objects() -> Callable[[], dict[str, bytes]]:
    """Return a function that returns the objects of a store, at memory://logs."""
    store = fsspec.filesystem("memory")
    yield lambda: {path.rpartition("/")[2]: store.cat_file(path) for path in store.find("/logs")}
    store.rm("/logs", recursive=True)


def test_logs_in_an_object_store(tmp_path: Path, objects):
    records = event_file(tmp_path / "a.tfevents.1", [1.0, 2.0])
    fsspec.filesystem("memory").pipe_file("/logs/a.tfevents.1", b"".join(records))
    remove_later_events("memory://logs", 1, {"a.tfevents.1": len(records[0])})
    assert objects() == {"a.tfevents.1": records[0]}
    remove_later_events("memory://logs", 1, {})
    writer = rows("memory://logs", waits=False)
    for step, name in enumerate(("loss", "more", "loss")):
        writer.log_metrics({name: 1.0}, step)
        writer.save()
        if step == 0:
            state = writer.state()
    assert objects() == {"metrics.csv": b"loss,more,step\r\n1.0,,0\r\n,1.0,1\r\n1.0,,2\r\n"}
    rows("memory://logs", waits=True).continue_from(**state)
    assert objects() == {"metrics.csv": b"loss,step\r\n1.0,0\r\n"}
