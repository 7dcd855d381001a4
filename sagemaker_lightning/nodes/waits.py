"""What a process waits for, as the kernel says: can only its own program bring it?

A program that waits for a database, for a file that somebody is to write, or for a time may
continue at any moment. One in which all processes wait for a lock, or for one another, never does.
"""

import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sagemaker_lightning.contract.process_stat import process_status
from sagemaker_lightning.process import start_notice


class _Calls(NamedTuple):
    """The numbers of some system calls, as asm/unistd.h has them."""

    futex: str
    read: str
    of_children: frozenset[str]
    """wait4 and waitid."""
    of_time: frozenset[str]
    """nanosleep and clock_nanosleep."""


CALLS = {
    "x86_64": _Calls("202", "0", frozenset({"61", "247"}), frozenset({"35", "230"})),
    "aarch64": _Calls("98", "63", frozenset({"260", "95"}), frozenset({"101", "115"})),
}
FUTEX_TIMEOUT = 4  # the place of futex's timeout in /proc/PID/syscall, where its number is first
SERVING = ("pt_", "gloo_", "NCCL", "cuda", start_notice.THREAD)
"""How the names of threads begin that torch, gloo, NCCL, CUDA and this package have.

They serve the other threads, and bring nothing that the program waits for.
"""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""The variable that torchrun gives its ranks, by which torch knows that it has started them."""


def waits_within(pid: int, is_rank: bool = False) -> bool:
    """Return whether a process waits for a lock, a child or a pipe, and for nothing else.

    Return False where that is unknown. A thread that waits for a time, or for a lock with a limit,
    may look for something each time: that counts only if it is not the main thread of a rank.
    Lightning's launcher, loggers and progress bars have such threads.

    Args:
        pid: The process.
        is_rank: Whether it is a rank that is about to train, or has been started by one.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return all(_waits_within(pid, thread, is_rank) for thread in threads)
    except OSError:
        return False


def _waits_within(pid: int, thread: Path, is_rank: bool) -> bool:
    """Return whether a thread waits so, or serves others; `thread` is its folder in /proc."""
    calls = CALLS.get(platform.machine())
    is_main = thread.name == str(pid)
    try:
        if not is_main and (thread / "comm").read_text().startswith(SERVING):
            return True
        is_helper = is_rank and not is_main
        words = (thread / "syscall").read_text().split()
        if not calls or len(words) <= FUTEX_TIMEOUT:  # "running"
            return False
        if words[0] == calls.futex:
            return is_helper or not int(words[FUTEX_TIMEOUT], 16)
        if words[0] == calls.read:
            file = int(words[1], 16)
            # Whoever has started the program may hold the other end of its stdin.
            return file != 0 and str(Path(f"/proc/{pid}/fd/{file}").readlink()).startswith("pipe:")
    except FileNotFoundError:  # the thread has just ended
        return not is_main
    return words[0] in calls.of_children or (is_helper and words[0] in calls.of_time)


def wakes(pid: int) -> int:
    """Return how often the main thread of a process has begun to wait."""
    return int(process_status(pid).get("voluntary_ctxt_switches", 0))


def torchruns(parents: Mapping[int, int]) -> set[int]:
    """Return those processes of a program that are a torchrun, which looks at its ranks for ever.

    Args:
        parents: The PID of the parent of each process of the program.
    """
    ranks = {pid for pid in parents if _is_of_torchrun(pid)}
    return {parents[rank] for rank in ranks} - ranks


def _is_of_torchrun(pid: int) -> bool:
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any(variable.startswith(f"{TORCHRUN}=".encode()) for variable in variables)
    return False
