"""process/parent_process.py: a rank ends when its launcher is gone.

It ends whether or not it had begun before that.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import ROOT

from sagemaker_lightning.process.parent_process import (
    LAUNCHER_VARIABLE,
    bound_to_launcher,
    end_with_launcher,
    outlive_launcher,
)

RANK = """
import os, time
os.read(0, 1)  # until the launcher is gone, or is to go
from sagemaker_lightning.process.parent_process import bound_to_launcher
with bound_to_launcher(os.environ):
    os.write(1, b"lives")
    time.sleep(60)
"""
LAUNCHER = f"""
import os, subprocess, sys
from sagemaker_lightning.process.parent_process import become_launcher
become_launcher(os.environ)
variables = os.environ | {{"LOCAL_RANK": "1"}}
child = subprocess.Popen([sys.executable, "-S", "-c", {RANK!r}], env=variables)
print(child.pid, flush=True)
sys.stdin.close()
os.read(int(sys.argv[1]), 1)  # until it is killed
"""


def launched(variables: dict[str, str]) -> tuple[int, int, int, subprocess.Popen]:
    """Start a launcher and return a descriptor, a descriptor, a PID and a process.

    The first descriptor lets the launcher's rank begin, and the rank writes to the second one. The
    PID is the rank's, the process the launcher's.
    """
    go = os.pipe()
    printed = os.pipe()
    end_pipe = os.pipe()
    started = subprocess.Popen(
        [sys.executable, "-S", "-c", LAUNCHER, str(end_pipe[0])],
        stdin=go[0],
        stdout=printed[1],
        pass_fds=(end_pipe[0],),
        env=variables | {"PYTHONPATH": str(ROOT)},
    )
    for descriptor in (go[0], printed[1], end_pipe[0]):
        os.close(descriptor)
    rank = int(os.read(printed[0], 100))
    started.ends = end_pipe[1]
    return go[1], printed[0], rank, started


def test_a_rank_that_begins_when_its_launcher_is_gone():
    go, printed, rank, launcher = launched({})
    launcher.kill()
    launcher.wait()
    os.write(go, b"x")
    assert os.read(printed, 100) == b""  # it has ended, and said nothing
    for descriptor in (go, printed, launcher.ends):
        os.close(descriptor)


def test_a_rank_whose_launcher_goes_afterwards():
    # PID 1 is another program's, and that program is alive.
    go, printed, rank, launcher = launched({"SAGEMAKER_LIGHTNING_LAUNCHER": "1"})
    os.write(go, b"x")
    assert os.read(printed, 100) == b"lives"
    variables = Path(f"/proc/{rank}/environ").read_text().split("\0")
    assert f"SAGEMAKER_LIGHTNING_LAUNCHER={launcher.pid}" in variables
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert os.read(printed, 100) == b""
    for descriptor in (go, printed, launcher.ends):
        os.close(descriptor)


# In this process ----------------------------------------------------------------------------------

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2  # prctl(2)


def death_signal() -> int:
    """Return the signal that the kernel sends this process when its parent ends; 0: none."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


@pytest.fixture
def killed(monkeypatch) -> Iterator[list]:
    """The processes that were killed, with their signals; the kernel's own one is restored."""
    before = death_signal()
    processes = []
    monkeypatch.setattr(os, "kill", lambda *process: processes.append(process))
    yield processes
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, before)


def test_who_is_no_rank_may_launch_ranks(killed):
    variables = {"A": "1"}
    with bound_to_launcher(variables):
        assert variables == {"A": "1", LAUNCHER_VARIABLE: str(os.getpid())}
    assert variables == {"A": "1"}
    end_with_launcher({})
    assert death_signal() == 0 and killed == []


def test_a_rank_ends_with_its_launcher_until_it_may_outlive_it(killed):
    rank = {"LOCAL_RANK": "0"}
    for launcher in ({}, {LAUNCHER_VARIABLE: str(os.getppid())}):
        end_with_launcher(rank | launcher)
        assert death_signal() == signal.SIGKILL and killed == []
        outlive_launcher({})
        assert death_signal() == signal.SIGKILL
        outlive_launcher(rank)
        assert death_signal() == 0
        variables = rank | launcher
        with bound_to_launcher(variables):
            assert death_signal() == signal.SIGKILL
        assert variables == rank | launcher  # it launches no ranks


def test_a_launcher_that_has_ended_is_gone_although_nobody_has_asked_for_its_status(killed):
    with subprocess.Popen(["true"]) as launcher:
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
        rank = {"LOCAL_RANK": "0", LAUNCHER_VARIABLE: str(launcher.pid)}
        end_with_launcher(rank)
    assert killed == [(os.getpid(), signal.SIGKILL)]
    end_with_launcher(rank)  # now it is gone
    assert killed == [(os.getpid(), signal.SIGKILL)] * 2
