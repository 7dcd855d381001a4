"""process/parent_process.py: a rank ends when its launcher is gone.

It ends whether or not it had begun before that.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from containers import ROOT

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
