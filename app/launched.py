"""A rank ends with the process that launched it, whenever that ends. Standard library only."""

import ctypes
import os
import signal
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

LAUNCHER = "SAGEMAKER_LIGHTNING_LAUNCHER"  # the PID of the process that starts ranks, in their environment
PR_SET_PDEATHSIG = 1  # prctl(2)


@contextmanager
def bound(variables: MutableMapping[str, str]) -> Iterator[None]:
    """Have the kernel end this process when the launcher that started it ends: it would wait for its peers for ever.

    Args:
        variables: Those of this process; one without LOCAL_RANK, which may launch others, is named in them meanwhile.
    """
    if "LOCAL_RANK" not in variables:  # set by torchrun, and by Lightning for the ranks it starts
        launches(variables)
        try:
            yield
        finally:
            variables.pop(LAUNCHER, None)
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if _has_ended(variables.get(LAUNCHER, "")):  # before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
    yield


def launches(variables: MutableMapping[str, str]) -> None:
    """Name this process as the launcher of the ranks that get these variables."""
    variables[LAUNCHER] = str(os.getpid())


def _has_ended(process: str) -> bool:
    return bool(process) and state_of(int(process))[:1] in ([], ["Z"], ["X"])


def state_of(process: int) -> list[str]:
    """Return what the kernel tells of a process, from its state on (proc_pid_stat(5)); nothing if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return []
