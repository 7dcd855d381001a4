"""process/parent_process.py: a rank ends when its launcher is gone.

It ends whether or not it had begun before that.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import warm
from containers import ROOT

from sagemaker_lightning.process import parent_process
from sagemaker_lightning.process.parent_process import (
    LAUNCHER_ENDED,
    LAUNCHER_VARIABLE,
    bind_to_launcher,
    bound_to_launcher,
    end_with_launcher,
    outlive_launcher,
)

HANG_SECONDS = 120
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


SCRIPT = """
import os
import time
from pathlib import Path

rank = os.environ.get("LOCAL_RANK", "0")
if rank == "1" or "TORCHELASTIC_RUN_ID" in os.environ:
    Path(f"rank-{rank}").write_text(str(os.getpid()))
    while not Path("go").exists():  # its imports take a while
        time.sleep(0.05)

import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
from sagemaker_lightning import ExactResume

settings = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "logger": False}
trainer = pl.Trainer(max_epochs=1, callbacks=[ExactResume("checkpoints", seed=1)], **settings)
trainer.fit(BoringModel())
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "ranks", "number"),
    [([], 1, signal.SIGTERM), (TORCHRUN, 2, signal.SIGKILL)],
    ids=["Lightning's launcher", "torchrun"],
)
def test_a_rank_of_a_users_own_script_that_imports_while_its_launcher_goes(
    tmp_path, command, ranks, number
):
    (tmp_path / "script.py").write_text(SCRIPT)
    with (tmp_path / "log").open("w") as log:
        launcher = warm.start(
            ["python", *command, "script.py"],
            tmp_path,
            os.environ | {"PYTHONPATH": str(ROOT)},
            log.fileno(),
        )
    processes = []
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while len(processes) < ranks:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
            pids = [path.read_text() for path in tmp_path.glob("rank-*")]
            processes = [psutil.Process(int(pid)) for pid in pids if pid]
        launcher.send_signal(number)
        launcher.wait(HANG_SECONDS)
        (tmp_path / "go").touch()
        _, alive = psutil.wait_procs(processes, HANG_SECONDS)
        assert not alive, (tmp_path / "log").read_text()
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.kill()


# In this process ----------------------------------------------------------------------------------

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2  # prctl(2)


def death_signal() -> int:
    """Return the signal that the kernel sends this process when its parent ends; 0: none."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


@pytest.fixture
def killed(monkeypatch) -> Iterator[list]:
    """The signals that this process sends itself; the kernel's own one is restored.

    Other processes get theirs: whenever objects of another test are collected, loaders of theirs
    end their workers.
    """
    before = death_signal()
    processes = []
    send = os.kill

    def kill(pid: int, number: int) -> None:
        if pid == os.getpid():
            processes.append((pid, number))
        else:
            send(pid, number)

    monkeypatch.setattr(os, "kill", kill)
    yield processes
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, before)


def test_who_is_no_rank_may_launch_ranks(killed):
    variables = {"A": "1"}
    with bound_to_launcher(variables):
        assert variables == {"A": "1", LAUNCHER_VARIABLE: str(os.getpid())}
    assert variables == {"A": "1"}
    end_with_launcher({})
    assert death_signal() == 0 and killed == []


def test_who_launches_ranks_does_not_end_with_its_own_parent(killed):
    """Lightning sets LOCAL_RANK in the process that launches ranks, too: it is rank 0.

    Its parent may be a shell whose terminal is closed.
    """
    variables = {}
    bind_to_launcher(variables)
    variables["LOCAL_RANK"] = "0"
    end_with_launcher(variables)
    bind_to_launcher(variables)
    assert variables == {LAUNCHER_VARIABLE: str(os.getpid()), "LOCAL_RANK": "0"}
    assert death_signal() == 0 and killed == []


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("uses", ["True", "False"])
@pytest.mark.parametrize("launcher", [{}, {LAUNCHER_VARIABLE: str(os.getppid())}], ids=len)
def test_a_torchrun_whose_store_is_gone_has_ended(killed, serves, uses, launcher):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
        if not serves:
            server.close()
        rank = {"LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        end_with_launcher(rank | {"TORCHELASTIC_USE_AGENT_STORE": uses} | launcher)
    ended = not serves and uses == "True" and not launcher
    assert killed == ([(os.getpid(), LAUNCHER_ENDED)] if ended else [])


def test_a_store_that_does_not_answer_says_nothing(killed, monkeypatch):
    def time_out(*_) -> None:
        raise TimeoutError

    monkeypatch.setattr(parent_process.socket, "create_connection", time_out)
    rank = {"LOCAL_RANK": "0", "MASTER_ADDR": "algo-1", "MASTER_PORT": "1"}
    end_with_launcher(rank | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert killed == []


def test_a_rank_ends_with_its_launcher_until_it_may_outlive_it(killed):
    rank = {"LOCAL_RANK": "0"}
    for launcher in ({}, {LAUNCHER_VARIABLE: str(os.getppid())}):
        end_with_launcher(rank | launcher)
        assert death_signal() == LAUNCHER_ENDED and killed == []
        outlive_launcher({})
        assert death_signal() == LAUNCHER_ENDED
        outlive_launcher(rank)
        assert death_signal() == 0
        variables = rank | launcher
        with bound_to_launcher(variables):
            assert death_signal() == LAUNCHER_ENDED
        assert variables == rank | launcher  # it launches no ranks


def test_a_launcher_that_has_ended_is_gone_although_nobody_has_asked_for_its_status(killed):
    with subprocess.Popen(["true"]) as launcher:
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
        rank = {"LOCAL_RANK": "0", LAUNCHER_VARIABLE: str(launcher.pid)}
        end_with_launcher(rank)
    assert killed == [(os.getpid(), LAUNCHER_ENDED)]
    end_with_launcher(rank)  # now it is gone
    assert killed == [(os.getpid(), LAUNCHER_ENDED)] * 2
