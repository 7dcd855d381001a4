"""nodes/rank_progress.py: what a rank has written is there after its end."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from sagemaker_lightning.nodes import rank_progress
from sagemaker_lightning.nodes.rank_progress import ProgressFile
from sagemaker_lightning.resume.container_restarts import ContainerRestarts


def test_what_a_killed_rank_has_reached(tmp_path):
    watch = tmp_path / "ranks"
    began = time.monotonic()
    if not (pid := os.fork()):
        progress = ProgressFile(watch)
        progress.begin(4)
        progress.batch_ended(5)
        progress.batch_ended(6)
        progress.move(6)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (rank,) = rank_progress.read(watch)
    assert (rank.pid, rank.began_with, rank.step) == (pid, 4, 6)
    assert began < rank.first_step_at < rank.moved_at < time.monotonic()


def test_a_rank_that_has_not_trained(tmp_path):
    ProgressFile(tmp_path / "ranks").begin(4)
    (rank,) = rank_progress.read(tmp_path / "ranks")
    assert (rank.step, rank.first_step_at, rank.is_training) == (4, 0.0, True)


def test_a_rank_that_has_not_begun_to_train(tmp_path, monkeypatch):
    """What it does meanwhile is not a training: for example a check by some validation batches."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    watch = tmp_path / "ranks"
    progress = ProgressFile(watch)
    progress.note_ranks(4)
    progress.move(0)
    assert list(rank_progress.read(watch)) == []
    (rank,) = rank_progress.all_ranks(watch)
    assert (rank.pid, rank.ranks, rank.launcher) == (os.getpid(), 4, os.getppid())
    progress.begin(4)
    assert len(list(rank_progress.read(watch))) == 1


def test_the_longest_time_between_two_batches(tmp_path, monkeypatch):
    progress = ProgressFile(tmp_path / "ranks")
    for now in (5, 6, 9, 11):
        monkeypatch.setattr(time, "monotonic_ns", lambda now=now: now * 10**9)
        progress.begin(4) if now == 5 else progress.move(4)
    (rank,) = rank_progress.read(tmp_path / "ranks")
    assert (rank.moved_at, rank.longest_pause) == (11.0, 3.0)


@pytest.mark.parametrize(
    ("error", "fails"),
    [(KeyError(), True), (KeyboardInterrupt(), True), (SystemExit(143), True)]
    + [(SystemExit(), False), (SystemExit(0), False)],
)
def test_an_error_that_leaves_a_training_is_not_the_end_that_sys_exit_is(error, fails, tmp_path):
    restarts = ContainerRestarts(SimpleNamespace(watch=tmp_path / "ranks"))
    restarts.progress.begin(4)
    restarts.training_fails(error)
    (rank,) = rank_progress.read(tmp_path / "ranks")
    assert (rank.is_training, rank.has_failed) == (True, fails)


def test_a_training_that_has_ended(tmp_path):
    progress = ProgressFile(tmp_path / "ranks")
    progress.begin(4)
    progress.end(9)
    (rank,) = rank_progress.read(tmp_path / "ranks")
    assert (rank.step, rank.is_training) == (9, False)


def test_without_a_watch_nothing_is_written(tmp_path):
    for watch in (None, tmp_path / "no/ranks"):
        progress = ProgressFile(watch)
        progress.begin(4)
        progress.batch_ended(5)
        assert progress.first_step_at
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_a_ranks_says_nothing(tmp_path):
    (tmp_path / "rank-1").write_bytes(b"x")
    (tmp_path / "rank-2").write_bytes(bytes(rank_progress.RECORD.size))
    (tmp_path / "rank-3").mkdir()
    assert list(rank_progress.read(tmp_path / "ranks")) == []
