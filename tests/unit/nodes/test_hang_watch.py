"""nodes/hang_watch.py: what counts as a hang, with real processes and times of the test's own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from containers import ROOT

from sagemaker_lightning.nodes import hang_watch, rank_progress
from sagemaker_lightning.nodes.hang_watch import HangWatch
from sagemaker_lightning.nodes.rank_progress import RECORD

LIMIT = 600.0
# Sleeps, or works until it is told to sleep, in a session of its own.
CODE = """
import os, sys, time
if sys.argv[1] == "works":
    if len(sys.argv) > 2 and os.fork():
        time.sleep(600)
    while True:
        pass
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path) -> Iterator:
    """A function that starts a rank, which writes that it trains and is at step 7."""
    started = []

    def start(*arguments: str, own_session: bool = True) -> subprocess.Popen:
        command = [sys.executable, "-I", "-S", "-c", CODE, *arguments]
        options = {"start_new_session": True} if own_session else {"process_group": 0}
        process = subprocess.Popen(command, cwd=ROOT, **options)
        started.append(process)
        note(tmp_path, process.pid)
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def note(folder: Path, pid: int, moved_at: int = 1, trains: bool = True) -> None:
    (folder / f"{rank_progress.PREFIX}{pid}").write_bytes(
        RECORD.pack(pid, 0, 7, 1, moved_at, trains)
    )


def used(pid: int, ticks: int) -> None:
    """Wait until a process and its children have used so much processor time."""
    deadline = time.monotonic() + 60
    while sum(hang_watch._ticks_with_children({pid}).values()) < ticks:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_that_do_nothing_hang(start, tmp_path):
    start("sleeps")
    watch = HangWatch(tmp_path / "ranks", LIMIT)
    assert watch.look(1000.0) == watch.look(1000.0 + LIMIT - 1) == ""
    assert watch.look(1000.0 + LIMIT) == (
        "its ranks hang after step 7: for 600 s, none has begun or ended a batch, and none has "
        "used a processor"
    )


def test_a_rank_that_is_stopped_is_named(start, tmp_path):
    process = start("works")
    watch = HangWatch(tmp_path / "ranks", LIMIT)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    watch.look(1000.0)
    says = watch.look(1000.0 + LIMIT)
    assert says.endswith(f"; the process {process.pid} is stopped")


def test_what_has_launched_the_ranks_and_is_stopped_hangs(start, tmp_path):
    """It would never learn that they have ended."""
    launcher = start("works", "in a child")
    (tmp_path / f"rank-{launcher.pid}").unlink()
    while not (children := psutil.Process(launcher.pid).children()):
        time.sleep(0.01)
    note(tmp_path, children[0].pid)
    watch = HangWatch(tmp_path / "ranks", LIMIT)
    assert watch.look(1000.0) == ""
    launcher.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, launcher.pid, os.WSTOPPED | os.WNOWAIT)
    children[0].kill()
    note(tmp_path, children[0].pid, trains=False)
    assert watch.look(1001.0) == watch.look(1000.0 + LIMIT - 1) == ""
    says = f"the process {launcher.pid}, which has started its ranks, is stopped"
    assert watch.look(1000.0 + LIMIT) == says
    assert HangWatch(tmp_path / "ranks", LIMIT).look(1000.0 + LIMIT) == ""  # its time begins now
    launcher.send_signal(signal.SIGCONT)
    while psutil.Process(launcher.pid).status() == psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert watch.look(1000.0 + LIMIT) == ""


@pytest.mark.parametrize("where", [[], ["in a child"]])
def test_a_long_step_is_not_a_hang(start, tmp_path, where):
    """As long as the rank, or what it has started, such as a compiler, uses a processor."""
    process = start("works", *where)
    watch = HangWatch(tmp_path / "ranks", LIMIT)
    watch.look(1000.0)
    before = sum(hang_watch._ticks_with_children({process.pid}).values())
    used(process.pid, before + 20)
    assert watch.look(1001.0) == "" and watch.look(1001.0 + LIMIT - 1) == ""


def test_what_others_do_in_its_session_is_no_work_of_a_ranks(start, tmp_path):
    """Such as a program beside it, or another test of this run."""
    other = start("works", own_session=False)
    (tmp_path / f"rank-{other.pid}").unlink()
    start("sleeps", own_session=False)
    watch = HangWatch(tmp_path / "ranks", LIMIT)
    watch.look(1000.0)
    before = psutil.Process(other.pid).cpu_times().user
    while psutil.Process(other.pid).cpu_times().user < before + 0.2:
        time.sleep(0.01)
    watch.look(1001.0)
    assert watch.look(1000.0 + LIMIT)


def test_a_rank_that_continues_does_not_hang(start, tmp_path):
    process = start("sleeps")
    watch = HangWatch(tmp_path / "ranks", LIMIT)
    for number in range(50):
        note(tmp_path, process.pid, moved_at=number + 1)
        assert watch.look(1000.0 + number * LIMIT) == ""


def test_what_is_not_training_takes_as_long_as_it_likes(start, tmp_path):
    process = start("sleeps")
    note(tmp_path, process.pid, trains=False)
    watch = HangWatch(tmp_path / "ranks", LIMIT)
    assert watch.look(1000.0) == watch.look(9000.0) == ""
    note(tmp_path, process.pid)
    assert watch.look(9001.0) == ""  # its time begins now
