"""Notices that the ranks of a node hang: none continues, and none uses a processor.

A long step, a compilation and a validation use one. A rank that waits for a peer in a collective
does not, and neither does one that is frozen. A rank that loops for ever looks like a long step,
and NCCL's kernels keep a processor busy while they wait: there, the limit of torch's collectives
ends those that wait.

What has launched the ranks, such as torchrun, waits for them. If it is stopped, it never learns of
their end.
"""

import os
from pathlib import Path

from sagemaker_lightning.contract.process_stat import PARENT, process_stat
from sagemaker_lightning.nodes import rank_progress
from sagemaker_lightning.nodes.rank_progress import RankProgress

TICKS_PER_SECOND = 100  # sysconf(_SC_CLK_TCK) on all of Linux's architectures that PyTorch has
BUSY_SHARE = 0.05
"""Share of one processor that a node's ranks use, together, if they are at work.

Threads that only look whether there is something to do use less.
"""
SPAN = 1.0
"""Seconds, at least, over which the share is taken: within a short time, one tick is a lot."""
USER_TICKS, SYSTEM_TICKS = 11, 12  # places among the fields of process_stat
STOPPED = "T"  # a state of process_stat


class HangWatch:
    """Looks at the ranks of a node every now and then.

    Args:
        watch: The socket of the node's watch, beside which the ranks write.
        limit: Seconds without a sign of work after which the ranks count as hanging.
    """

    def __init__(self, watch: Path, limit: float) -> None:
        self.watch = watch
        self.limit = limit
        self.moved_at = 0.0  # when a rank last continued
        self.looked_at = self.worked_at = 0.0
        self.ticks: dict[int, int] = {}  # of each process, when it was last looked at
        self.launchers: set[int] = set()  # PIDs
        self.launchers_ran_at = 0.0  # when none of them was stopped, the last time

    def look(self, now: float) -> str:
        """Return why the ranks, or what has launched them, count as hanging, in one line.

        Return "" if they do not.

        Args:
            now: The time, in seconds of time.monotonic().
        """
        ranks = list(rank_progress.read(self.watch))
        training = [rank for rank in ranks if rank.is_training]
        return self._look_at_ranks(training, now) or self._look_at_launchers(
            {rank.pid for rank in ranks}, {rank.pid for rank in training}, now
        )

    def _look_at_launchers(self, ranks: set[int], training: set[int], now: float) -> str:
        """Return why what has launched these PIDs counts as hanging; "" if it does not."""
        parents = {parent for pid in ranks for parent in process_stat(pid)[PARENT : PARENT + 1]}
        self.launchers |= {int(parent) for parent in parents} - {os.getpid()}
        stopped = [pid for pid in self.launchers - training if process_stat(pid)[:1] == [STOPPED]]
        if not (stopped and self.launchers_ran_at):
            self.launchers_ran_at = now
        if not stopped or now - self.launchers_ran_at < self.limit:
            return ""
        return f"the process {stopped[0]}, which has started its ranks, is stopped"

    def _look_at_ranks(self, ranks: list[RankProgress], now: float) -> str:
        """Return why these ranks, which train, count as hanging; "" if they do not."""
        if not ranks:
            self.ticks = {}
            return ""
        moved_at = max(rank.moved_at for rank in ranks)
        if self.ticks and moved_at == self.moved_at and now - self.looked_at < SPAN:
            return ""
        ticks = _ticks_with_children({rank.pid for rank in ranks})
        used = sum(ticks[pid] - self.ticks.get(pid, 0) for pid in ticks) / TICKS_PER_SECOND
        is_busy = used > BUSY_SHARE * (now - self.looked_at)
        if not self.ticks or is_busy or moved_at != self.moved_at:
            self.worked_at = now
        self.moved_at, self.ticks, self.looked_at = moved_at, ticks, now
        if now - self.worked_at < self.limit:
            return ""
        frozen = [rank for rank in ranks if process_stat(rank.pid)[:1] == [STOPPED]]
        step = max(rank.step for rank in ranks)
        return (
            f"its ranks hang after step {step}: for {now - self.worked_at:.0f} s, none has begun "
            "or ended a batch, and none has used a processor"
            f"{f'; the process {frozen[0].pid} is stopped' if frozen else ''}"
        )


def _ticks_with_children(pids: set[int]) -> dict[int, int]:
    """Return the processor time of these processes and of all that they have started, by PID.

    These are data workers and compilers.
    """
    everything = {
        int(folder.name): fields
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and (fields := process_stat(int(folder.name)))
    }
    children: dict[int, list[int]] = {}
    for pid, fields in everything.items():
        children.setdefault(int(fields[PARENT]), []).append(pid)
    found = {}
    waiting = list(pids & everything.keys())
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            fields = everything[pid]
            found[pid] = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
            waiting += children.get(pid, ())
    return found
