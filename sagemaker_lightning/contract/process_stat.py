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
