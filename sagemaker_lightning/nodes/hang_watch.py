"""Notices that the program of a node hangs.

- A process of it is stopped (SIGSTOP, state T): it does nothing, and never learns what others do.
- Its ranks train, and none continues, and none uses a processor. A long step, a compilation and a
  validation use one. A rank that waits for a peer in a collective does not, and neither does one
  that waits for a lock. A rank that loops for ever looks like a long step, and NCCL's kernels keep
  a processor busy while they wait: there, the limit of torch's collectives ends those that wait.
- A rank trains, and begins and ends no batch for longer than the job says that it may.
- No rank trains yet, or none is known: the program does nothing at all, and all of its processes
  wait for a lock, or for one another (nodes/waits.py). A program may wait for something else then,
  such as a database, for as long as it likes. So this takes longer, and has to be so on all hosts:
  a rank that waits for one of another host waits for a lock, too.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.process_stat import PARENT, process_stat
from sagemaker_lightning.nodes import rank_progress, waits
from sagemaker_lightning.nodes.rank_progress import RankProgress

TICKS_PER_SECOND = 100  # sysconf(_SC_CLK_TCK) on all of Linux's architectures that PyTorch has
BUSY_SHARE = 0.05
"""Share of one processor that a node's ranks use, together, if they are at work.

Threads that only look whether there is something to do use less.
"""
BUSY_BYTES = 2**16
"""Bytes a second that a program which starts reads, writes, sends and gets, if it is at work.

The watch's own messages to 500 other hosts are less.
"""
START_FACTOR = 3
"""How many times the limit a start may take without a sign of work.

With the default limit, it is what torch's collectives wait for. It is also how many times the limit
a step has to take, at least, before a line says so.
"""
LONG_PAUSE_FACTOR = 20
"""How many times the longest one so far a step has to take before a line says so."""
SPAN = 1.0
"""Seconds, at least, over which the share is taken: within a short time, one tick is a lot."""
TICKS = slice(11, 15)
"""Places of the processor time among the fields of process_stat: its own, and that of its children
that have ended."""
STOPPED = "T"  # a state of process_stat

Processes = dict[int, list[str]]
"""The fields of process_stat, by PID."""


@dataclass
class Activity:
    """The last sign of work of some processes.

    Args:
        limits: What they use a second, at least, if they are at work: one number for each counter.
    """

    limits: tuple[float, ...]
    worked_at: float = 0.0
    looked_at: float = 0.0
    used: dict[object, tuple[float, ...]] = field(default_factory=dict)
    """The counters by what has used them, such as a PID, when it was last looked at."""
    moved_at: float = 0.0

    def is_due(self, now: float, moved_at: float = 0.0) -> bool:
        """Return whether the counters say something new."""
        return not self.used or moved_at != self.moved_at or now - self.looked_at >= SPAN

    def seconds_without(
        self, used: dict[object, tuple[float, ...]], now: float, moved_at: float = 0.0
    ) -> float:
        """Return for how long there has been no sign of work.

        Args:
            used: The counters now.
            now: The time, in seconds of time.monotonic().
            moved_at: When one of them has said that it continues, the last time.
        """
        passed = now - self.looked_at
        none = (0.0,) * len(self.limits)
        growth = [
            sum(now_[place] - self.used.get(key, none)[place] for key, now_ in used.items())
            for place in range(len(self.limits))
        ]
        is_busy = any(
            more > limit * passed for more, limit in zip(growth, self.limits, strict=True)
        )
        if not self.used or is_busy or moved_at != self.moved_at:
            self.worked_at = now
        self.used, self.looked_at, self.moved_at = used, now, moved_at
        return now - self.worked_at


class HangWatch:
    """Looks at the program of a node every now and then.

    Args:
        watch: The socket of the node's watch, beside which the ranks write.
        limit: Seconds without a sign of work after which the ranks count as hanging.
        program: Returns the PID of the program; None before there is one.
        batch_limit: Seconds that a rank may train without beginning or ending a batch.

    Attributes:
        why_idle: Why the program counts as hanging at its start, if those of all hosts do; "" if it
            does not. It may wait for what another host does.
        hangs_since: Since when it hangs, in seconds of time.monotonic(), once a reason is known.
    """

    def __init__(
        self,
        watch: Path,
        limit: float,
        program: Callable[[], int | None],
        batch_limit: float = math.inf,
    ) -> None:
        self.watch = watch
        self.limit = limit
        self.batch_limit = batch_limit
        self.program = program
        self.why_idle = ""
        self.hangs_since = 0.0
        self.training = self._activity_of_training()
        self.start = self._activity_of_start()
        self.locked = self._activity_of_locked()
        self.looks_outside = 0  # how often a process of the start has waited for what others bring
        self.said_of_start = 0.0  # since when the program did nothing, if a line has said so
        self.said_pauses: dict[int, float] = {}  # how long the one was that a line said, by PID
        self.stopped: dict[int, float] = {}  # when each was found so, by PID

    def look(self, now: float) -> str:
        """Return why the program hangs, whatever other hosts do, in one line; "" if it does not.

        Args:
            now: The time, in seconds of time.monotonic().
        """
        processes = _processes()
        below = _with_children({self.program() or 0} & processes.keys(), processes)
        known = list(rank_progress.all_ranks(self.watch))
        ranks = [rank for rank in known if rank.moved_at]
        starting = {rank.pid for rank in known if not rank.moved_at} & processes.keys()
        training = [rank for rank in ranks if rank.is_training]
        self._look_at_start(set() if ranks else below, starting, processes, now)
        living = [rank for rank in training if rank.pid in processes and not rank.has_failed]
        why = self._look_at_pause(living, now)
        why = why or self._look_at_ranks(training, starting, processes, now)
        stopped = [pid for pid in sorted(below) if processes[pid][0] == STOPPED]
        self.stopped = {pid: self.stopped.get(pid, now) for pid in stopped}
        for pid, since in self.stopped.items():
            if why or now - since >= self.limit:
                self.hangs_since = since
                return f"its process {pid} has been stopped (SIGSTOP) for {now - since:.0f} s"
        return why

    def _activity_of_training(self) -> Activity:
        return Activity((BUSY_SHARE * TICKS_PER_SECOND,))

    def _activity_of_start(self) -> Activity:
        return Activity((BUSY_SHARE * TICKS_PER_SECOND, BUSY_BYTES, 0.0, math.inf))

    def _activity_of_locked(self) -> Activity:
        return Activity((BUSY_SHARE * TICKS_PER_SECOND, BUSY_BYTES, 0.0, 0.0))

    def _look_at_ranks(
        self, training: list[RankProgress], starting: set[int], processes: Processes, now: float
    ) -> str:
        """Return why these ranks count as hanging; "" if they do not."""
        if not training:
            self.training = self._activity_of_training()
            return ""
        moved_at = max(rank.moved_at for rank in training)
        if not self.training.is_due(now, moved_at):
            return ""
        pids = {rank.pid for rank in training} | starting
        below = _with_children(pids & processes.keys(), processes)
        used: dict[object, tuple[float, ...]] = {pid: (_ticks(processes[pid]),) for pid in below}
        seconds = self.training.seconds_without(used, now, moved_at)
        if seconds < self.limit:
            return ""
        self.hangs_since = now - seconds
        step = max(rank.step for rank in training)
        return (
            f"its ranks hang after step {step}: for {seconds:.0f} s, none has begun or ended a "
            "batch, and none has used a processor"
        )

    def _look_at_start(
        self, pids: set[int], ranks: set[int], processes: Processes, now: float
    ) -> None:
        """Note why these processes, of which none trains, count as hanging.

        Print a line, once, if they do nothing, and may wait for what others bring.

        Args:
            pids: The processes of the program; none if a rank trains, or has trained.
            ranks: The ranks that are to train.
            processes: All processes.
            now: The time.
        """
        self.why_idle = ""
        if not pids:
            self.start = self._activity_of_start()
            self.locked = self._activity_of_locked()
            return
        if not self.start.is_due(now):
            return
        torchruns = waits.torchruns({pid: int(processes[pid][PARENT]) for pid in pids})
        of_ranks = _with_children(ranks, processes)
        outside = [
            pid for pid in sorted(pids - torchruns) if not waits.waits_within(pid, pid in of_ranks)
        ]
        self.looks_outside += bool(outside)
        used: dict[object, tuple[float, ...]] = {
            pid: (
                _ticks(processes[pid]),
                _bytes_moved(pid),
                0 if pid in torchruns else waits.wakes(pid),
                0,
            )
            for pid in pids
        }
        used["looks"] = (0, 0, 0, self.looks_outside)
        locked = self.locked.seconds_without(used, now)
        used["network"] = (0, _bytes_of_network(), 0, 0)
        idle = self.start.seconds_without(used, now)
        if locked >= START_FACTOR * self.limit:
            self.hangs_since = now - locked
            self.why_idle = (
                f"its program hangs before the first step: for {locked:.0f} s, it has used no "
                "processor and no file, and all of its processes wait for a lock or for one another"
            )
        elif idle >= START_FACTOR * self.limit and self.said_of_start != self.start.worked_at:
            self.said_of_start = self.start.worked_at
            log.info(
                f"the program has done nothing for {idle:.0f} s, and no step is trained yet: its "
                f"process {(outside or [*pids])[0]} waits for something that may still come"
            )

    def _look_at_pause(self, training: list[RankProgress], now: float) -> str:
        """Return why a rank counts as hanging that has not moved for long; "" if none does.

        Nobody but the job can tell a loop that never ends from a long step. So print a line if one
        takes far longer than all before it, and again at each doubling.
        """
        for rank in sorted(training, key=lambda rank: rank.moved_at)[:1]:
            pause = now - rank.moved_at
            if pause >= self.batch_limit:
                self.hangs_since = rank.moved_at
                return (
                    f"its rank with PID {rank.pid} hangs after step {rank.step}: for {pause:.0f} s,"
                    " it has begun and ended no batch (SAGEMAKER_LIGHTNING_BATCH_TIMEOUT is "
                    f"{self.batch_limit:.0f})"
                )
            usual = max(LONG_PAUSE_FACTOR * rank.longest_pause, START_FACTOR * self.limit)
            said = self.said_pauses.get(rank.pid, 0.0)
            if pause < usual:
                self.said_pauses.pop(rank.pid, None)
            elif pause >= 2 * said:
                self.said_pauses[rank.pid] = pause
                log.warning(
                    f"the rank with PID {rank.pid} has begun and ended no batch for {pause:.0f} s, "
                    f"after step {rank.step}; {rank.longest_pause:.0f} s was the most before: it "
                    "may loop for ever; MaxRuntimeInSeconds ends it, or "
                    "SAGEMAKER_LIGHTNING_BATCH_TIMEOUT"
                )
        return ""


def _processes() -> Processes:
    """Return all processes of this container."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return {pid: fields for pid in pids if (fields := process_stat(pid))}


def _with_children(pids: Iterable[int], processes: Processes) -> set[int]:
    """Return these processes and all that they have started: ranks, data workers, compilers."""
    children: dict[int, list[int]] = {}
    for pid, fields in processes.items():
        children.setdefault(int(fields[PARENT]), []).append(pid)
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, ())
    return found


def _ticks(fields: list[str]) -> int:
    """Return the processor time of a process, and of what it has started and has ended."""
    return sum(map(int, fields[TICKS]))


def _bytes_moved(pid: int) -> int:
    """Return the bytes that a process has read and written; proc_pid_io(5)."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))
    return 0


def _bytes_of_network() -> int:
    """Return the bytes that this container has got and sent, its own interfaces together."""
    with suppress(OSError):
        lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
        counts = [line.partition(":")[2].split() for line in lines]
        return sum(int(each[0]) + int(each[8]) for each in counts)
    return 0
