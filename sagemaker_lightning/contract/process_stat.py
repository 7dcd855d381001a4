"""What the kernel says of a process. Standard library only."""

from contextlib import suppress
from pathlib import Path

PARENT = 1
"""The place of the parent's PID among the fields."""
START_TIME = 19
"""The place of the time at which the process began, in ticks since the machine was started."""


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, from the process's state on.

    Return [] if the process is gone.

    proc_pid_stat(5) describes the fields. The process's name, before its state, may have any bytes.
    """
    with suppress(OSError):
        content = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return content.rpartition(")")[2].split()
    return []


def process_status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status by name (proc_pid_status(5)); {} if it is gone."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {}


def has_signal(mask: str, number: int) -> bool:
    """Return whether a mask of /proc/PID/status, such as that of "SigCgt", has a signal."""
    return bool(int(mask, 16) >> (number - 1) & 1)
