"""Ends a rank when the process that launched it ends. Standard library only."""

import ctypes
import os
import signal
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from sagemaker_lightning.contract.process_stat import process_stat

# The environment variable that tells ranks the PID of the process that starts them.
LAUNCHER_VARIABLE = "SAGEMAKER_LIGHTNING_LAUNCHER"
STORE_SECONDS = 5.0  # seconds that torchrun's store may take to accept a connection
PR_SET_PDEATHSIG = 1  # prctl(2)
LAUNCHER_ENDED = signal.SIGSTKFLT
"""The signal that ends a rank because its launcher has ended.

Nothing else sends it (signal(7): "unused"). So the exit status of a rank tells whether its launcher
took it along, or whether something has killed it, such as the kernel where memory is short.
"""


@contextmanager
def bound_to_launcher(variables: MutableMapping[str, str]) -> Iterator[None]:
    """Do as `bind_to_launcher`; afterwards this process launches no ranks any more.

    Args:
        variables: The environment of this process.
    """
    bind_to_launcher(variables)
    try:
        yield
    finally:
        if not _is_rank(variables):
            variables.pop(LAUNCHER_VARIABLE, None)


def bind_to_launcher(variables: MutableMapping[str, str]) -> None:
    """Let the kernel kill this process, if it is a rank, when its launcher ends.

    Otherwise the rank would wait for its peers for ever. A process that is not a rank may launch
    ranks: `variables`, its environment, name it as their launcher from now on.
    """
    if _is_rank(variables):
        end_with_launcher(variables)
    else:
        become_launcher(variables)


def end_with_launcher(variables: Mapping[str, str]) -> None:
    """Let the kernel kill this process, if it is a rank, when its launcher ends."""
    if not _is_rank(variables):
        return
    _set_death_signal(LAUNCHER_ENDED)
    # The kernel sends no signal for a launcher that had ended before this call.
    if _launcher_has_ended(variables):
        os.kill(os.getpid(), LAUNCHER_ENDED)


def outlive_launcher(variables: Mapping[str, str]) -> None:
    """Let this process, if it is a rank, continue when its launcher ends.

    A program may have work for each rank after its training, and rank 0 may be done with its own
    first.
    """
    if _is_rank(variables):
        _set_death_signal(0)


def become_launcher(variables: MutableMapping[str, str]) -> None:
    """Name this process as the launcher of the ranks that get these variables."""
    variables[LAUNCHER_VARIABLE] = str(os.getpid())


def launch_no_more(variables: MutableMapping[str, str]) -> None:
    """Undo `become_launcher`, unless ranks were started: then this process is known by it."""
    if "LOCAL_RANK" not in variables:
        variables.pop(LAUNCHER_VARIABLE, None)


def _is_rank(variables: Mapping[str, str]) -> bool:
    """Return whether another process has launched this one as a rank.

    torchrun sets LOCAL_RANK, and so does Lightning: for the ranks that it starts, and in the
    process that starts them.
    """
    return "LOCAL_RANK" in variables and variables.get(LAUNCHER_VARIABLE) != str(os.getpid())


def _set_death_signal(number: int) -> None:
    """Choose the signal that the kernel sends this process when its parent ends; 0: none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _launcher_has_ended(variables: Mapping[str, str]) -> bool:
    """Return whether the launcher of this rank has ended; False if that is unknown."""
    if LAUNCHER_VARIABLE in variables:
        return process_stat(int(variables[LAUNCHER_VARIABLE]))[:1] in ([], ["Z"], ["X"])
    # A torchrun that knows nothing of us does not say who it is. But it serves the store where its
    # ranks meet, and has begun to before it starts them.
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        try:
            socket.create_connection(address, STORE_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
