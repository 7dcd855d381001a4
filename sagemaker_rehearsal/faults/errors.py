"""The error of a fault that is not possible here."""

import os
import shutil
import subprocess
from collections.abc import Sequence


class CannotInject(Exception):
    """A fault is not possible; the message says why, in one line."""


def run(command: Sequence[str]) -> str:
    """Run a program of this machine's and return what it prints.

    Raises CannotInject if it is not installed, or fails.
    """
    if not shutil.which(command[0]):
        raise CannotInject(f"it needs {command[0]}, which is not installed")
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode:
        lines = completed.stderr.strip().splitlines()
        why = lines[-1] if lines else f"exit status {completed.returncode}"
        words = "" if "-c" in command else f"{' '.join(command)[:200]}: "
        raise CannotInject(f"{words}{why}")
    return completed.stdout


def check_namespace(pid: int, kind: str, what: str) -> None:
    """Raise CannotInject unless a process has a namespace of its own, which this user may enter.

    Otherwise the fault would be this whole machine's.

    Args:
        pid: The process.
        kind: The name of the namespace in /proc/PID/ns.
        what: What it is for, in words.
    """
    if os.geteuid() != 0:
        raise CannotInject("it needs root")
    try:
        own, its = (os.stat(f"/proc/{each}/ns/{kind}").st_ino for each in ("self", pid))  # noqa: PTH116
    except OSError:
        raise CannotInject(f"process {pid} has ended") from None
    if own == its:
        raise CannotInject(f"the host has no {what} of its own, but this machine's")
