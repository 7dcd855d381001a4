"""Finds the ranks of a training among its processes; kills, freezes and slows them."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from sagemaker_lightning.contract.process_stat import PARENT, START_TIME, process_stat
from sagemaker_rehearsal.faults.errors import CannotInject

# The places of the processor time, in ticks, among the fields of process_stat.
USER_TIME = 11
SYSTEM_TIME = 12
# The variable by which a rank knows that torchrun has started it.
TORCHRUN = b"TORCHELASTIC_RUN_ID"
# The program that forks ranks, and how their names begin.
FORKS_RANKS = b"/launch/warm_start.py"
FORKED_RANK = b"rank-"
# A rank that is slowed runs for the first of these seconds, and stands still for the second.
RUN_SECONDS = 0.02
STILL_SECONDS = 0.18


def find_ranks(pid: int) -> dict[int, int]:
    """Return the process of each rank among a process and all that it has started.

    torchrun, Lightning and other launchers give each rank its number in LOCAL_RANK; a rank's own
    children inherit it. Lightning's rank 0 has started the others, and has no such variable. Where
    no process has it, the one that has used most processor time is rank 0.

    Args:
        pid: The process that has started the training, e.g. torchrun.

    Returns PIDs by local rank. It is empty if the process has ended.
    """
    family = _family(pid)
    ranks: dict[int, int] = {}
    for process in family:
        if (number := _local_rank(process)) is not None:
            ranks.setdefault(number, process)
    if ranks and 0 not in ranks:
        first = ranks[min(ranks)]
        # A launcher of its own is not a rank.
        if family[first] in family and TORCHRUN not in _variables(first):
            ranks[0] = family[first]
    if not ranks and family:
        ranks[0] = max(family, key=_ticks)
    return dict(sorted(ranks.items()))


def kill(rank: int) -> None:
    """Kill a process with SIGKILL, as the kernel does where memory is short."""
    _signal(rank, signal.SIGKILL)


def freeze(rank: int) -> Callable[[], None]:
    """Freeze a process with SIGSTOP; return the function that lets it continue."""
    started = _start_of(rank)
    _signal(rank, signal.SIGSTOP)
    return lambda: _continue(rank, started)


def slow(rank: int) -> Callable[[], None]:
    """Let a process run for a tenth of the time; return the function that ends it."""
    started = _start_of(rank)
    _signal(rank, 0)
    ended = threading.Event()

    def hold_up() -> None:
        while not ended.wait(RUN_SECONDS) and _start_of(rank) == started:
            try:
                _signal(rank, signal.SIGSTOP)
            except CannotInject:
                return
            ended.wait(STILL_SECONDS)
            _continue(rank, started)

    thread = threading.Thread(target=hold_up, name=f"slows {rank}", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


def _family(pid: int) -> dict[int, int]:
    """Return the parents of a process and of all its descendants; parents come first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := process_stat(int(entry.name))):
            children.setdefault(int(fields[PARENT]), []).append(int(entry.name))
    own = process_stat(pid)
    family = {pid: int(own[PARENT])} if own else {}
    waiting = [*family]
    while waiting:
        parent = waiting.pop(0)
        for child in sorted(children.get(parent, ())):
            family[child] = parent
            waiting.append(child)
    return {each: parent for each, parent in family.items() if process_stat(each)[:1] != ["Z"]}


def _local_rank(pid: int) -> int | None:
    """Return the LOCAL_RANK that a process was started with, None without one.

    This project's runtime restarts ranks by fork, from a process with the variables of a rank;
    their names have the number (sagemaker_lightning/launch/warm_start.py).
    """
    is_forked = FORKS_RANKS in _read(pid, "cmdline")
    number = _variables(pid).get(b"LOCAL_RANK", b"")
    if is_forked:
        name = _read(pid, "comm").strip()
        number = name.removeprefix(FORKED_RANK) if name.startswith(FORKED_RANK) else b""
    return int(number) if number.isdigit() and len(number) < 6 else None


def _variables(pid: int) -> dict[bytes, bytes]:
    """Return the environment that a process was started with."""
    entries = (entry.partition(b"=") for entry in _read(pid, "environ").split(b"\0"))
    return {name: value for name, _, value in entries}


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process in /proc; nothing if the process is gone, or another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _ticks(pid: int) -> int:
    fields = process_stat(pid)
    return int(fields[USER_TIME]) + int(fields[SYSTEM_TIME]) if fields else -1


def _start_of(pid: int) -> str:
    """Return when a process has started, "" if it is gone: its number may be another's later."""
    fields = process_stat(pid)
    return fields[START_TIME] if fields else ""


def _continue(pid: int, started: str) -> None:
    if started and _start_of(pid) == started:
        try:
            _signal(pid, signal.SIGCONT)
        except CannotInject:  # it has ended since
            return


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise CannotInject(f"process {pid} has ended") from None
    except PermissionError:
        raise CannotInject(f"process {pid} is another user's: it needs root") from None
