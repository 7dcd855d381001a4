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
from sagemaker_lightning.nodes.hang_watch import BUSY_BYTES, HangWatch
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


def watched(folder: Path, program: int | None = None) -> HangWatch:
    """Return what watches a program, given by its PID, whose ranks write in a folder."""
    return HangWatch(folder / "ranks", LIMIT, lambda: program)


def works_for_a_while(pid: int) -> None:
    """Wait until a process and its children have used a fifth of a second of processor time."""

    def ticks() -> int:
        processes = hang_watch._processes()
        below = hang_watch._with_children({pid}, processes)
        return sum(hang_watch._ticks(processes[each]) for each in below)

    before = ticks()
    deadline = time.monotonic() + 60
    while ticks() < before + 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_ranks_that_do_nothing_hang(start, tmp_path):
    start("sleeps")
    watch = watched(tmp_path)
    assert watch.look(1000.0) == watch.look(1000.0 + LIMIT - 1) == ""
    assert watch.look(1000.0 + LIMIT) == (
        "its ranks hang after step 7: for 600 s, none has begun or ended a batch, and none has "
        "used a processor"
    )


@pytest.mark.parametrize("where", [[], ["in a child"]])
@pytest.mark.parametrize("trains", [True, False])
def test_a_process_that_is_stopped_hangs_whatever_the_others_do(start, tmp_path, where, trains):
    """A rank at any time, and what has launched the ranks: it would not learn of their end."""
    process = start("works", *where)
    note(tmp_path, process.pid, trains=trains)
    watch = watched(tmp_path, process.pid)
    assert watch.look(1000.0) == ""
    stop(process)
    assert watch.look(1000.0) == watch.look(999.0 + LIMIT) == ""
    says = f"its process {process.pid} has been stopped (SIGSTOP) for 600 s"
    assert watch.look(1000.0 + LIMIT) == says
    assert watched(tmp_path, process.pid).look(2000.0) == ""  # its time begins now


def test_what_continues_and_is_stopped_again_has_its_time_again(start, tmp_path):
    process = start("works")
    note(tmp_path, process.pid, trains=False)
    watch = watched(tmp_path, process.pid)
    stop(process)
    assert watch.look(1000.0) == ""
    process.send_signal(signal.SIGCONT)
    while psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert watch.look(1001.0) == ""
    stop(process)
    assert watch.look(1002.0) == watch.look(1001.0 + LIMIT) == ""
    assert watch.look(1002.0 + LIMIT)


def test_a_process_that_is_not_the_programs_may_be_stopped(start, tmp_path):
    process = start("works")
    note(tmp_path, process.pid, trains=False)
    watch = watched(tmp_path, os.getpid() + 1)
    stop(process)
    assert watch.look(1000.0) == watch.look(9000.0) == ""


@pytest.mark.parametrize("where", [[], ["in a child"]])
def test_a_long_step_is_not_a_hang(start, tmp_path, where):
    """As long as the rank, or what it has started, such as a compiler, uses a processor."""
    process = start("works", *where)
    watch = watched(tmp_path)
    watch.look(1000.0)
    works_for_a_while(process.pid)
    assert watch.look(1001.0) == "" and watch.look(1001.0 + LIMIT - 1) == ""


def test_what_others_do_in_its_session_is_no_work_of_a_ranks(start, tmp_path):
    """Such as a program beside it, or another test of this run."""
    other = start("works", own_session=False)
    (tmp_path / f"rank-{other.pid}").unlink()
    start("sleeps", own_session=False)
    watch = watched(tmp_path)
    watch.look(1000.0)
    before = psutil.Process(other.pid).cpu_times().user
    while psutil.Process(other.pid).cpu_times().user < before + 0.2:
        time.sleep(0.01)
    watch.look(1001.0)
    assert watch.look(1000.0 + LIMIT)


def test_a_rank_that_continues_does_not_hang(start, tmp_path):
    process = start("sleeps")
    watch = watched(tmp_path)
    for number in range(50):
        note(tmp_path, process.pid, moved_at=number + 1)
        assert watch.look(1000.0 + number * LIMIT) == ""


def test_what_is_not_training_takes_as_long_as_it_likes(start, tmp_path):
    process = start("sleeps")
    note(tmp_path, process.pid, trains=False)
    watch = watched(tmp_path)
    assert watch.look(1000.0) == watch.look(9000.0) == ""
    note(tmp_path, process.pid)
    assert watch.look(9001.0) == ""  # its time begins now


# Before the first step ----------------------------------------------------------------------------

STARTS = 3 * LIMIT


@pytest.fixture
def starts(start, tmp_path, monkeypatch):
    """A function that starts a rank which does not train yet, in a network where nothing happens.

    It returns the rank's PID, and a function that returns why it counts as hanging at a time.
    """
    monkeypatch.setattr(hang_watch, "_bytes_of_network", lambda: 5)

    def begin(*arguments: str) -> tuple:
        process = start(*arguments)
        (tmp_path / f"rank-{process.pid}").write_bytes(RECORD.pack(process.pid, 0, 0, 0, 0, False))
        watch = watched(tmp_path, process.pid)

        def why_idle(now: float) -> str:
            assert watch.look(now) == ""  # other hosts may do what it waits for
            return watch.why_idle

        return process.pid, why_idle

    return begin


def test_a_start_that_does_nothing_hangs_once_it_has_taken_three_times_as_long(starts):
    _, why_idle = starts("sleeps")
    assert why_idle(1000.0) == why_idle(999.0 + STARTS) == ""
    assert why_idle(1000.0 + STARTS) == (
        "its ranks hang before the first step: for 1800 s, they have used no processor, no file "
        "and no network"
    )


@pytest.mark.parametrize("where", [[], ["in a child"]])
def test_a_start_that_computes_does_not_hang(starts, where):
    """Imports, a compiler, data that are prepared."""
    pid, why_idle = starts("works", *where)
    why_idle(1000.0)
    works_for_a_while(pid)
    assert why_idle(1001.0) == why_idle(1000.0 + STARTS) == ""
    assert why_idle(2000.0 + STARTS)


@pytest.mark.parametrize("what", ["_bytes_moved", "_bytes_of_network"])
@pytest.mark.parametrize(("share", "hangs"), [(0.9, True), (1.1, False)])
def test_a_start_that_reads_or_downloads_does_not_hang(starts, monkeypatch, what, share, hangs):
    """Unless it is as little as a watch itself sends."""
    _, why_idle = starts("sleeps")
    before = getattr(hang_watch, what)
    why_idle(1000.0)
    moved = share * BUSY_BYTES * STARTS
    monkeypatch.setattr(hang_watch, what, lambda *of: before(*of) + moved)
    assert bool(why_idle(1000.0 + STARTS)) is hangs


def test_a_program_without_a_rank_that_is_to_train_does_not_hang(starts, tmp_path):
    """It may be any program: nothing is known of what it waits for."""
    pid, why_idle = starts("sleeps")
    (tmp_path / f"rank-{pid}").unlink()
    assert why_idle(1000.0) == why_idle(1000.0 + STARTS) == ""


def test_once_a_rank_has_begun_to_train_there_is_no_start(starts, tmp_path):
    pid, why_idle = starts("sleeps")
    assert why_idle(1000.0) == "" and why_idle(1000.0 + STARTS)
    note(tmp_path, pid, trains=False)
    assert why_idle(1001.0 + STARTS) == why_idle(9000.0) == ""
