"""Notices that the ranks of a node hang: none continues, and none uses a processor.

A long step, a compilation and a validation use one. A rank that waits for a peer in a collective
does not, and neither does one that is frozen. A rank that loops for ever looks like a long step,
and NCCL's kernels keep a processor busy while they wait: there, the limit of torch's collectives
ends those that wait.
"""

from pathlib import Path

from sagemaker_lightning.contract.process_stat import PARENT, process_stat
from sagemaker_lightning.nodes import rank_progress

TICKS_PER_SECOND = 100  # sysconf(_SC_CLK_TCK) on all of Linux's architectures that PyTorch has
BUSY_SHARE = 0.05
"""Share of one processor that a node's ranks use, together, if they are at work.

Threads that only look whether there is something to do use less.
"""
SPAN = 1.0
"""Seconds, at least, over which the share is taken: within a short time, one tick is a lot."""
USER_TICKS, SYSTEM_TICKS = 11, 12  # places among the fields of process_stat


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

    def look(self, now: float) -> str:
        """Return why the ranks count as hanging, in one line; "" if they do not.

        Args:
            now: The time, in seconds of time.monotonic().
        """
        ranks = [rank for rank in rank_progress.read(self.watch) if rank.is_training]
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
        frozen = [rank for rank in ranks if process_stat(rank.pid)[:1] == ["T"]]
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
