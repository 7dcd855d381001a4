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

from sagemaker_lightning.nodes import hang_watch, rank_progress, waits
from sagemaker_lightning.nodes.hang_watch import BUSY_BYTES, HangWatch
from sagemaker_lightning.nodes.rank_progress import RECORD

LIMIT = 600.0
# Sleeps, waits for a lock, works or runs other code, in a session of its own, or in a child.
CODE = """
import os, sys, time
lock = __import__("_thread").allocate_lock()
if sys.argv[1] not in ("works", "sleeps"):
    if len(sys.argv) > 2 and os.fork():
        os.wait()
    exec(sys.argv[1])
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
        RECORD.pack(pid, 0, 7, 1, moved_at, 0, 0, 0, trains, False)
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
    assert watch.hangs_since == 1000.0  # what it has cost


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


def test_a_step_that_takes_far_longer_than_all_before_is_named(start, tmp_path, caplog):
    """It may end: so it is named, and again only when it has taken twice as long."""
    process = start("works")
    record = [process.pid, 0, 7, 1, int(1000e9), int(200e9), 0, 0, True, False]
    (tmp_path / f"rank-{process.pid}").write_bytes(RECORD.pack(*record))
    watch = watched(tmp_path)
    with caplog.at_level("INFO"):
        watch._look_at_pause(list(rank_progress.read(watch.watch)), 4999.0)
        assert not caplog.messages
        for now in (5000.0, 5010.0, 8999.0, 9000.0):
            watch._look_at_pause(list(rank_progress.read(watch.watch)), now)
    says = "begun and ended no batch for {} s, after step 7; 200 s was the most before"
    first, second = caplog.messages
    assert says.format(4000) in first and says.format(8000) in second


def test_a_step_that_takes_longer_than_the_job_says_hangs(start, tmp_path):
    """Even if it uses a processor, and another rank continues."""
    works, continues = start("works"), start("works")
    watch = HangWatch(tmp_path / "ranks", LIMIT, lambda: None, 900.0)
    note(tmp_path, works.pid, moved_at=int(1000e9))
    for now in (1899.0, 1900.0):
        note(tmp_path, continues.pid, moved_at=int(now * 1e9))
        why = watch.look(now)
        assert bool(why) == (now == 1900.0)
    assert why == (
        f"its rank with PID {works.pid} hangs after step 7: for 900 s, it has begun and ended no "
        "batch (SAGEMAKER_LIGHTNING_BATCH_TIMEOUT is 900)"
    )
    assert watch.hangs_since == 1000.0


def test_a_thousand_long_steps_are_not_named(tmp_path, caplog):
    """A line comes after half an hour, whatever the steps before have taken."""
    watch = watched(tmp_path)
    progress = rank_progress.RankProgress(1, 0, 7, 1.0, 1000.0, 1.0, 0, 0, True, False)
    with caplog.at_level("INFO"):
        for number in range(1000):
            watch._look_at_pause([progress], 1000.0 + STARTS * number / 1000)
    assert not caplog.messages


# Before the first step ----------------------------------------------------------------------------

STARTS = 3 * LIMIT
LOCKED = "lock.acquire(); lock.acquire()"
MADE_LOCKED = f"lock = __import__('_thread').allocate_lock(); {LOCKED}"
THREAD = f"import threading; threading.Thread(target=lambda: exec(sys.argv[3])).start(); {LOCKED}"


@pytest.fixture
def starts(start, tmp_path, monkeypatch):
    """A function that starts a rank which does not train yet, in a network where nothing happens.

    It returns the rank's PID, and a function that returns why it counts as hanging at a time.
    """
    monkeypatch.setattr(hang_watch, "_bytes_of_network", lambda: 5)

    def begin(*arguments: str, settles: bool = True) -> tuple:
        process = start(*arguments)
        record = RECORD.pack(process.pid, *[0] * 7, False, False)
        (tmp_path / f"rank-{process.pid}").write_bytes(record)
        watch = watched(tmp_path, process.pid)
        if settles:
            settle(process.pid)

        def why_idle(now: float) -> str:
            assert watch.look(now) == ""  # other hosts may do what it waits for
            return watch.why_idle

        return process.pid, why_idle

    return begin


def settle(pid: int) -> None:
    """Wait until a process and its children have begun to wait for good."""

    def state() -> list:
        processes = hang_watch._processes()
        below = sorted(hang_watch._with_children({pid}, processes))
        return [(each, waits.wakes(each), hang_watch._ticks(processes[each])) for each in below]

    deadline = time.monotonic() + 60
    before: list = []
    while (now := state()) != before:
        assert time.monotonic() < deadline
        before = now
        time.sleep(0.3)


@pytest.mark.parametrize("is_rank", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        [LOCKED],
        [LOCKED, "in a child"],
        [THREAD, "", LOCKED],
        ["read, _ = os.pipe(); os.read(read, 1)"],
    ],
    ids=["lock", "child", "thread", "pipe"],
)
def test_a_start_that_waits_for_itself_hangs_once_it_has_taken_three_times_as_long(
    starts, tmp_path, arguments, is_rank
):
    """Also before it has said that it is to train: in its imports, or a model's constructor."""
    pid, why_idle = starts(*arguments)
    if not is_rank:
        (tmp_path / f"rank-{pid}").unlink()
    assert why_idle(1000.0) == why_idle(999.0 + STARTS) == ""
    assert why_idle(1000.0 + STARTS) == (
        "its program hangs before the first step: for 1800 s, it has used no processor and no "
        "file, and all of its processes wait for a lock or for one another"
    )


@pytest.mark.parametrize("is_rank", [True, False])
@pytest.mark.parametrize("waits_for", ["threading.Event().wait(600)", "time.sleep(600)"])
def test_a_thread_that_waits_for_a_time_may_look_for_something(
    starts, tmp_path, is_rank, waits_for
):
    """Those of a rank are Lightning's, loggers' and progress bars'."""
    pid, why_idle = starts(THREAD, "", waits_for)
    if not is_rank:
        (tmp_path / f"rank-{pid}").unlink()
    assert why_idle(1000.0) == "" and bool(why_idle(1000.0 + STARTS)) is is_rank


def test_the_thread_that_says_what_a_start_does_brings_nothing(starts, tmp_path):
    code = f"sys.path.insert(0, {str(ROOT)!r})\n"
    code += "from sagemaker_lightning.process import start_notice\n"
    code += f"start_notice.begin('importing')\n{LOCKED}"
    pid, why_idle = starts(code)
    (tmp_path / f"rank-{pid}").unlink()
    while not any(
        name.read_text() == "start-notice\n" for name in Path(f"/proc/{pid}/task").glob("*/comm")
    ):
        time.sleep(0.01)
    settle(pid)
    assert why_idle(1000.0) == "" and why_idle(1000.0 + STARTS)


OUTSIDE = {
    "a time": "time.sleep(600)",
    "a socket": "import socket; pair = socket.socketpair(); pair[0].recv(1)",
    "a lock, for a time": "lock.acquire(); lock.acquire(timeout=600)",
    "a file that is a pipe": "os.mkfifo('fifo'); open('fifo')",
    "a lock of a file": (
        "import fcntl; files = [open('file', 'w') for _ in '12']\n"
        "for file in files: fcntl.flock(file, fcntl.LOCK_EX)"
    ),
    "a signal": "import signal; signal.pause()",
}


@pytest.mark.parametrize("waits_for", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("where", ["", "in a child", "in a thread"])
def test_a_start_that_waits_for_what_others_bring_does_not_hang(
    starts, tmp_path, monkeypatch, caplog, waits_for, where
):
    """For however long; a line says so once."""
    monkeypatch.setattr("test_hang_watch.ROOT", tmp_path)
    if where == "in a thread" and waits_for == OUTSIDE["a signal"]:
        pytest.skip("a thread cannot")
    if where == "in a thread" and ("timeout" in waits_for or "sleep" in waits_for):
        pytest.skip("another test has that")
    code = (
        [THREAD, "", waits_for] if where == "in a thread" else [waits_for, *filter(None, [where])]
    )
    pid, why_idle = starts(*code)
    with caplog.at_level("INFO"):
        for now in (1000.0, 999.0 + STARTS, 1000.0 + STARTS, 90000.0):
            assert why_idle(now) == ""
    (line,) = caplog.messages
    assert line.startswith("the program has done nothing for 1800 s, and no step is trained yet")


def test_a_start_that_looks_now_and_then_whether_it_may_continue_does_not_hang(starts):
    """Here, a thread of a rank looks, and has its main thread continue each time."""
    pid, why_idle = starts(
        "import threading\n"
        "def look():\n"
        " while True:\n"
        "  threading.Event().wait(0.05)\n"
        "  if lock.locked(): lock.release()\n"
        "threading.Thread(target=look, daemon=True).start()\n"
        "while True: lock.acquire()",
        settles=False,
    )
    assert why_idle(1000.0) == ""
    before = waits.wakes(pid)
    while waits.wakes(pid) == before:
        time.sleep(0.01)
    assert why_idle(1001.0) == why_idle(1000.0 + STARTS) == ""


def test_a_torchrun_looks_at_its_ranks_all_the_time(starts):
    """What they wait for decides."""
    pid, why_idle = starts(
        "if os.fork():\n while True: time.sleep(0.01)\n"
        "os.environ['TORCHELASTIC_RUN_ID'] = 'x'\n"
        f"os.execl(sys.executable, sys.executable, '-ISc', {MADE_LOCKED!r})",
        settles=False,
    )
    parents: dict[int, int] = {}
    while waits.torchruns(parents) != {pid} or not waits.waits_within(max(parents)):
        time.sleep(0.01)
        parents = {child.pid: pid for child in psutil.Process(pid).children()}
    assert why_idle(1000.0) == "" and why_idle(1000.0 + STARTS)


@pytest.mark.parametrize("where", [[], ["in a child"]])
def test_a_start_that_computes_does_not_hang(starts, where):
    """Imports, a compiler, data that are prepared."""
    pid, why_idle = starts("works", *where, settles=False)
    why_idle(1000.0)
    works_for_a_while(pid)
    assert why_idle(1001.0) == why_idle(1000.0 + STARTS) == ""


@pytest.mark.parametrize(("share", "hangs"), [(0.9, True), (1.1, False)])
def test_a_start_that_reads_does_not_hang(starts, monkeypatch, share, hangs):
    """Unless it is as little as a watch itself writes."""
    _, why_idle = starts(LOCKED)
    before = hang_watch._bytes_moved
    why_idle(1000.0)
    moved = share * BUSY_BYTES * STARTS
    monkeypatch.setattr(hang_watch, "_bytes_moved", lambda *of: before(*of) + moved)
    assert bool(why_idle(1000.0 + STARTS)) is hangs


@pytest.mark.parametrize(("share", "is_named"), [(0.9, True), (1.1, False)])
def test_a_start_that_downloads_is_not_named(starts, monkeypatch, caplog, share, is_named):
    """Where all of it waits for a lock, the network is somebody else's."""
    for code, hangs in (("sleeps", False), (LOCKED, True)):
        monkeypatch.setattr(hang_watch, "_bytes_of_network", lambda: 5)
        _, why_idle = starts(code)
        why_idle(1000.0)
        moved = share * BUSY_BYTES * STARTS
        monkeypatch.setattr(hang_watch, "_bytes_of_network", lambda moved=moved: 5 + moved)
        with caplog.at_level("INFO"):
            assert bool(why_idle(1000.0 + STARTS)) is hangs
        assert bool(caplog.messages) is is_named


def test_a_start_that_waits_for_others_meanwhile_has_its_time_again(starts, monkeypatch):
    _, why_idle = starts(LOCKED)
    why_idle(1000.0)
    with monkeypatch.context() as patch:
        patch.setattr(waits, "waits_within", lambda *of: False)
        assert why_idle(1001.0) == ""
    assert why_idle(1000.0 + STARTS) == "" and why_idle(1001.0 + STARTS)


def test_once_a_rank_has_begun_to_train_there_is_no_start(starts, tmp_path):
    pid, why_idle = starts(LOCKED)
    assert why_idle(1000.0) == "" and why_idle(1000.0 + STARTS)
    note(tmp_path, pid, trains=False)
    assert why_idle(1001.0 + STARTS) == why_idle(9000.0) == ""
