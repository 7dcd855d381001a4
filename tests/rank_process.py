"""A process that stands in for a rank, connected to the watch, and ends as a test wants.

    python tests/rank_process.py PATH NAME CODE

connects to PATH, sends its NAME, and runs CODE once `may` is called. CODE knows `say`, which sends
a message, `line`, the connection, and `launch`, which starts a rank as Lightning's launcher does: a
child that is killed together with it. It needs only the standard library.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2), as sagemaker_lightning/process/parent_process.py has it


@contextmanager
def process(path: Path, name: str, code: str) -> Iterator["subprocess.Popen"]:
    """Run a rank's process while the block lasts; it runs `code` once `may` is called.

    Nothing asks for the process's exit status.
    """
    started = _start(path, name, code)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def may(started: subprocess.Popen) -> None:
    """Let a process run its code."""
    started.stdin.write(b"\n")
    started.stdin.flush()


def _start(path: Path, name: str, code: str) -> subprocess.Popen:
    line = [sys.executable, "-S", __file__, str(path), name, code]
    started = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout.readline() == b"connected\n"
    return started


def main(path: str, name: str, code: str) -> None:
    """Connect, wait for `may`, and run the code."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)

        def say(**message: str) -> None:
            line.sendall(json.dumps(message).encode() + b"\n")

        def launch(name: str) -> subprocess.Popen:
            return _start(Path(path), name, "")

        say(rank=name, status=f"{name} is there")
        print("connected", flush=True)
        sys.stdin.readline()
        exec(code, {"say": say, "launch": launch, "line": line, "os": os, "signal": signal})


if __name__ == "__main__":
    main(*sys.argv[1:])
