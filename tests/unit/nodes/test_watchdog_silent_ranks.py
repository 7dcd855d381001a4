"""nodes/watchdog.py: the death of ranks that say nothing to it, as in a program of the user's."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from containers import ROOT
from waiting import becomes_true

from sagemaker_lightning.callbacks.heartbeat import Heartbeat
from sagemaker_lightning.contract.rendezvous import free_port
from sagemaker_lightning.nodes import watchdog
from sagemaker_lightning.nodes.watchdog import Watchdog

# Says that it is about to train, or that it trains, and waits.
RANK = """
import os, signal, sys, time
from pathlib import Path
from sagemaker_lightning.nodes.rank_progress import ProgressFile
progress = ProgressFile(Path(sys.argv[1]))
if sys.argv[2] == "trains":
    progress.begin(3)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
print(flush=True)
time.sleep(600)
"""
QUIET_SECONDS = 0.6  # more than it takes the watch to act, below


@pytest.fixture
def watch(monkeypatch) -> Iterator[Watchdog]:
    monkeypatch.setattr(watchdog, "LOOKS_FOR_RANKS", 0.01)
    options = {"port": free_port(), "connect_timeout": 90.0, "silence_timeout": 90.0}
    given = []
    options |= {"may_restart": True, "ends_by_itself": 0.2, "on_reason": given.append}
    with Watchdog("algo-1", ("algo-1",), {}, **options) as started:
        started.given = given
        yield started


@pytest.fixture
def rank(watch) -> Iterator:
    """A function that starts a rank, and returns it once the watch has seen it."""
    started = []

    def start(how: str = "trains", **variables: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", RANK, str(watch.path), how],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | (variables or {"LOCAL_RANK": "1"}),
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout.readline() == b"\n"
        if not variables:
            assert becomes_true(lambda: watch.rank_processes)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_how_the_first_rank_has_ended_is_known(watch, rank):
    """Where it was asked to stop, the others only lose it."""
    first, second = rank("starts"), rank("starts")
    assert becomes_true(lambda: len(watch.rank_processes) == 2)
    assert watch.first_status is None
    first.terminate()
    assert becomes_true(lambda: watch.first_status == -signal.SIGTERM)
    second.send_signal(signal.SIGINT)
    assert becomes_true(lambda: not watch.rank_processes)
    assert watch.first_status == -signal.SIGTERM


@pytest.mark.parametrize("how", ["starts", "trains"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_ends_the_program_whose_launcher_does_not(watch, rank, how, number):
    """torchrun lets the others save; they wait for the dead one."""
    process = rank(how)
    process.send_signal(number)
    assert becomes_true(lambda: watch.given)
    (reason,) = watch.given
    says = f", the rank with PID {process.pid} ended without giving a reason: it was killed by "
    assert f"{says}{number.name}" in reason.why and reason.is_local
    assert reason.why.startswith("host ")  # other hosts say it, too
    assert reason in watch.suspicions and not watch.rank_processes


def test_a_launcher_that_ends_in_time_says_more(watch, rank):
    process = rank()
    process.kill()
    assert becomes_true(lambda: not watch.rank_processes)
    watch.program_ended()
    assert not becomes_true(lambda: watch.given or watch.suspicions, QUIET_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGABRT])
def test_an_end_that_another_one_may_have_caused_is_left_to_the_launcher(watch, rank, number):
    process = rank()
    process.send_signal(number)
    assert becomes_true(lambda: not watch.rank_processes)
    assert not becomes_true(lambda: watch.given, QUIET_SECONDS)
    if number == signal.SIGTERM:
        assert not watch.suspicions
        return
    # The reason if the program says no more than that a rank was lost.
    reason = watch.wait_for_reason()
    says = (
        f", the rank with PID {process.pid} ended without giving a reason: it was killed by SIGABRT"
    )
    assert says in reason.why and reason.is_local and reason in watch.suspicions


@pytest.mark.parametrize("said", ["", "; before, a rank said: lost a peer (NCCL error: x)"])
def test_the_first_rank_that_ends_with_a_status_is_suspected(watch, rank, said):
    """What a rank has said of others may be its own error, as with NCCL."""
    watch.first_loss = said.removeprefix("; before, a rank said: ")
    first, second = rank("starts"), rank("starts")
    assert becomes_true(lambda: len(watch.rank_processes) == 2)
    first.send_signal(signal.SIGUSR1)  # it ends with status 3
    assert becomes_true(lambda: watch.suspicions)
    second.send_signal(signal.SIGABRT)
    assert becomes_true(lambda: not watch.rank_processes)
    reason = watch.wait_for_reason()
    says = f"PID {first.pid} ended without giving a reason: its exit status was 3{said}"
    assert reason.why.endswith(says)
    assert not watch.given and watch.statuses == {first.pid: 3, second.pid: -signal.SIGABRT}


@pytest.mark.parametrize(
    "variables",
    [{"LOCAL_RANK": "1", "TORCHELASTIC_MAX_RESTARTS": "2"}, {"MINE": "1"}],
    ids=["torchrun starts it again", "a training that a program starts and kills"],
)
def test_the_death_of_what_nobody_waits_for_ends_nothing(watch, rank, variables):
    process = rank(**variables)
    process.kill()
    assert not becomes_true(lambda: watch.given or watch.rank_processes, QUIET_SECONDS)


def test_a_rank_that_speaks_is_heard_alone(watch, rank, monkeypatch):
    """How it has ended is known as for all of those."""
    process = rank()
    monkeypatch.setattr(watchdog, "_rank_and_launcher", lambda connection: (process.pid, 1))
    speaks = Heartbeat(watch.path, "host algo-1, rank 0")
    assert becomes_true(lambda: watch.speakers == {process.pid})
    speaks.done()
    speaks.socket.close()
    process.kill()
    assert becomes_true(lambda: not watch.rank_processes)
    assert not becomes_true(lambda: watch.given or watch.suspicions, QUIET_SECONDS)


def test_a_rank_that_lives_holds_nothing_open_after_the_watch(watch, rank):
    rank()
    descriptors = set(watch.rank_processes)
    watch._run_in_loop(watch._leave())
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
