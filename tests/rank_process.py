"""A rank as the watch sees it: a process with a line to it, which ends as a test wants. Standard library only.

    python tests/rank_process.py PATH NAME CODE     connects to PATH, says that it is NAME, and runs CODE when it may

CODE knows `say`, the line, and `launch`, which starts a rank as Lightning's launcher does: a child, killed with it.
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
    """Have a rank's process while the block lasts, and nobody who asks how it ended; `may` it, and it runs `code`."""
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
    """Be a rank."""
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
