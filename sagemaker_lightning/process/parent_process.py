"""Ends a rank when the process that launched it ends. Standard library only."""

import ctypes
import os
import signal
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

# The environment variable that tells ranks the PID of the process that starts them.
LAUNCHER_VARIABLE = "SAGEMAKER_LIGHTNING_LAUNCHER"
PR_SET_PDEATHSIG = 1  # prctl(2)


@contextmanager
def bound_to_launcher(variables: MutableMapping[str, str]) -> Iterator[None]:
    """Let the kernel kill this rank when its launcher ends.

    Otherwise the rank would wait for its peers for ever. A process without LOCAL_RANK is no rank,
    but may launch ranks: `variables` names it as their launcher while the block runs.

    Args:
        variables: The environment of this process.
    """
    if "LOCAL_RANK" not in variables:  # set by torchrun, and by Lightning for the ranks it starts
        become_launcher(variables)
        try:
            yield
        finally:
            variables.pop(LAUNCHER_VARIABLE, None)
        return
    end_with_launcher(variables)
    yield


def end_with_launcher(variables: Mapping[str, str]) -> None:
    """Let the kernel kill this process, if it is a rank, when its launcher ends."""
    if "LOCAL_RANK" not in variables:
        return
    _set_death_signal(signal.SIGKILL)
    # The kernel sends no signal for a launcher that had ended before this call.
    if _has_ended(variables.get(LAUNCHER_VARIABLE, "")):
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_launcher(variables: Mapping[str, str]) -> None:
    """Let this process, if it is a rank, go on when its launcher ends.

    A program may have work for each rank after its training, and rank 0 may be done with its own
    first.
    """
    if "LOCAL_RANK" in variables:
        _set_death_signal(0)


def _set_death_signal(number: int) -> None:
    """Choose the signal that the kernel sends this process when its parent ends; 0: none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def become_launcher(variables: MutableMapping[str, str]) -> None:
    """Name this process as the launcher of the ranks that get these variables."""
    variables[LAUNCHER_VARIABLE] = str(os.getpid())


def _has_ended(pid: str) -> bool:
    """Return whether a process has ended; False for ""."""
    return bool(pid) and process_stat(int(pid))[:1] in ([], ["Z"], ["X"])


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, from the process's state on.

    Return [] if the process is gone.

    proc_pid_stat(5) describes the fields.
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
