"""A stand-in for a rank's process: it connects to the watchdog, and ends as a test wants.

    python tests/support/rank_process.py PATH NAME CODE

connects to PATH, sends its NAME, and runs CODE once `let_run` is called. CODE can use `say`, which
sends a message, `line`, the connection, and `launch`, which starts a rank as Lightning's launcher
does: a child that is killed together with its parent. This file needs only the standard library.
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

# As sagemaker_lightning/process/parent_process.py has them.
PR_SET_PDEATHSIG = 1  # prctl(2)
LAUNCHER_ENDED = signal.SIGSTKFLT


@contextmanager
def process(path: Path, name: str, code: str) -> Iterator["subprocess.Popen"]:
    """Run a rank's process while the block lasts; it runs `code` once `let_run` is called.

    Nothing asks for the process's exit status.
    """
    started = _start(path, name, code)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def let_run(started: subprocess.Popen) -> None:
    """Let a process run its code."""
    started.stdin.write(b"\n")
    started.stdin.flush()


def _start(path: Path, name: str, code: str) -> subprocess.Popen:
    command = [sys.executable, "-S", __file__, str(path), name, code]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout.readline() == b"connected\n"
    return started


def main(path: str, name: str, code: str) -> None:
    """Connect, wait for `let_run`, and run the code."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LAUNCHER_ENDED)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)

        def say(**message: str) -> None:
            connection.sendall(json.dumps(message).encode() + b"\n")

        def launch(name: str) -> subprocess.Popen:
            return _start(Path(path), name, "")

        say(rank=name, status=f"{name} is there")
        print("connected", flush=True)
        sys.stdin.readline()
        exec(code, {"say": say, "launch": launch, "line": connection, "os": os, "signal": signal})


if __name__ == "__main__":
    main(*sys.argv[1:])
