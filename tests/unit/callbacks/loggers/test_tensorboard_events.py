"""callbacks/loggers/tensorboard_events.py: TensorBoard's files continue from the checkpoint."""

import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from sagemaker_lightning.callbacks.loggers import (
    begin_files,
    continue_files,
    prepare_files,
    save_states,
    tensorboard_events,
)
from sagemaker_lightning.callbacks.loggers.tensorboard_events import (
    Logger,
    read_events,
    remove_later_events,
)
from sagemaker_lightning.contract.errors import UserError


def test_tensorboards_values_are_written_each_so_many_seconds(tmp_path: Path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    written = []
    monkeypatch.setattr(tensorboard_events, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(TensorBoardLogger, "save", lambda logger: written.append(clock.now))
    logger = Logger(tmp_path, flush_secs=10)
    for clock.now in (0.0, 9.0, 10.0, 19.0):
        logger.save()
    save_states([logger])  # a checkpoint needs all of them
    for clock.now in (28.0, 29.0):
        logger.save()
    assert written == [0.0, 10.0, 19.0, 29.0]
    assert Logger(tmp_path, flush_secs=1)._kwargs["flush_secs"] == 1
    with pytest.raises(UserError, match="^--logger.flush_secs: found 0, expected 1 or more$"):
        Logger(tmp_path, flush_secs=0)
    never = Logger(tmp_path, flush_secs=10**12)
    assert never._kwargs["flush_secs"] == 24 * 3600 and never.seconds_between_saves == 10**12


def event_file(path: Path, times: list[float]) -> list[bytes]:
    """Write a file of TensorBoard with an event at each of some times; return its records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with SummaryWriter(path.parent) as writer:
        for step, moment in enumerate(times):
            writer.add_scalar("loss", 0.5, step, walltime=moment)
    (made,) = path.parent.glob("events.*")
    made.rename(path)
    records = [record for record, _ in tensorboard_events._records(path.read_bytes())]
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


def test_files_in_an_object_store(tmp_path: Path):
    records = event_file(tmp_path / "a.tfevents.1", [1.0, 2.0])
    store = fsspec.filesystem("memory")
    store.pipe_file("/board/a.tfevents.1", b"".join(records))
    remove_later_events("memory://board", 1, {"a.tfevents.1": len(records[0])})
    assert store.cat_file("/board/a.tfevents.1") == records[0]
    remove_later_events("memory://board", 1, {})
    assert not store.find("/board")
