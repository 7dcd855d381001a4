"""nodes/rank_progress.py: what a rank has written is there after its end."""

import os
import signal
import time

from sagemaker_lightning.nodes import rank_progress
from sagemaker_lightning.nodes.rank_progress import ProgressFile


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


def test_a_rank_that_has_not_begun_to_train(tmp_path):
    watch = tmp_path / "ranks"
    progress = ProgressFile(watch)
    assert list(rank_progress.read(watch)) == []
    assert rank_progress.starting(watch) == {os.getpid()}
    progress.begin(4)
    assert rank_progress.starting(watch) == set() and len(list(rank_progress.read(watch))) == 1


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
