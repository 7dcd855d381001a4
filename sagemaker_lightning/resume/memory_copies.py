"""Copies of the state in memory, from which ranks that have died continue in their container.

A copy is a checkpoint like any other, in a folder that the launcher has made (launch/
memory_folder.py), and newer than those on the disk. It is taken as often as that takes a hundredth
of the time, or in each step if that takes less. Once ranks have died, it is taken more often, so
that copies and steps done again take the least time together. It ends with the job.
"""

import hashlib
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.process.threads import usable_cpus
from sagemaker_lightning.resume.files import checkpoint_file

MAX_SHARE = 0.01
"""Share of the time, at most, that copies take in a job in which no rank has died."""
FIRST_SECONDS = 5.0
"""To the first copy of a training, which tells what one takes."""
ROOM = 4
"""Sizes of a copy that must be free: there are two while one is written, and others need room."""


def folder_of(copies: Path | None, checkpoints: Path) -> Path | None:
    """Return the folder for the copies of one training; None if there are no copies.

    Args:
        copies: The folder for the copies of all trainings of this program.
        checkpoints: The folder of this training's checkpoints.
    """
    name = hashlib.sha256(os.fsencode(checkpoints.resolve())).hexdigest()[:16]
    return copies / name if copies else None


class MemoryCopies:
    """The copies of one training; rank 0 says when one is due.

    Args:
        folder: Their folder; None if there are none.
        hosts: Number of hosts. On several, the copy before the newest is kept, too: a host may be
            killed while it writes.
        writes: Whether this rank writes them; one rank of each host does.
        deaths: When ranks of this job have died, in seconds of time.monotonic(), in their order.
        on_cpu: Whether the ranks train on this host's processors.

    Attributes:
        spent: Seconds that all copies of this rank have cost so far.
    """

    def __init__(
        self,
        folder: Path | None,
        hosts: int,
        writes: bool,
        deaths: Sequence[float] = (),
        on_cpu: bool = False,
    ) -> None:
        self.home = CheckpointHome(folder) if folder else None
        self.keeps_former = hosts > 1
        self.writes = writes
        self.deaths = deaths
        self.on_cpu = on_cpu
        self.problem = "" if folder else "there is no folder for them"
        """Why there are no more copies; "" as long as there are."""
        self.thread: threading.Thread | None = None
        self.taken_at = time.monotonic()
        self.seconds = FIRST_SECONDS * MAX_SHARE
        """What the last one has cost."""
        self.spent = 0.0
        self.is_asked = False

    def ask(self) -> bool:
        """Return whether a copy is due, once for each: the ranks agree on when it is taken."""
        if self.problem or self.is_asked or self._is_writing:
            return False
        self.is_asked = time.monotonic() - self.taken_at >= self.interval
        return self.is_asked

    @property
    def interval(self) -> float:
        """Seconds between two copies.

        Where deaths come every M seconds and a copy takes C, copies and lost steps take the least
        time together with sqrt(2 C M) seconds between two copies (J. W. Young, "A first order
        approximation to the optimum checkpoint interval", CACM 17 (9), 1974; the higher orders of
        J. T. Daly, FGCS 22 (3), 2006, matter only where C is not small against M). M is what the
        deaths since the first one say, and grows as long as there are no more.
        """
        longest = self.seconds / MAX_SHARE
        if not self.deaths:
            return longest
        between_deaths = (time.monotonic() - self.deaths[0]) / len(self.deaths)
        return min(longest, math.sqrt(2 * self.seconds * between_deaths))

    def state_saved(self) -> None:
        """Note that a checkpoint or a copy of the present state is saved."""
        self.taken_at = time.monotonic()
        self.is_asked = False

    @property
    def _is_writing(self) -> bool:
        return bool(self.thread and self.thread.is_alive())

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self.thread:
            self.thread.join()

    def write(self, state: Mapping[str, Any], began: float) -> None:
        """Write a copy in the background, if this rank does; nothing else may be written now.

        Args:
            state: The state; nobody may change it any more.
            began: When this rank began to take it, in seconds of time.monotonic().
        """
        waited = time.monotonic() - began
        if self.home and self.writes:
            args = self.home, state, waited
            self.thread = threading.Thread(target=self._write, args=args, name="copy")
            self.thread.start()

    def _write(self, home: CheckpointHome, state: Mapping[str, Any], waited: float) -> None:
        entries = state[checkpoint_file.ENTRIES_KEY]
        try:
            home.folder.mkdir(mode=0o700, exist_ok=True)
            path = home.path_of(entries["step"])
            former = [home.path_of(step) for step in home.steps()]
            former = [each for each in former if each != path]
            for each in former[:-1]:  # all hosts have the one after it
                each.unlink()
            if problem := room_problem(home.folder, checkpoint_file.size(state)):
                self.give_up(problem)
                return
            checkpoint_file.write(path, state, entries["step"], entries["number"])
            for each in () if self.keeps_former else former[-1:]:
                each.unlink()
        except Exception as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            self.give_up(f"{home.folder}: {why}")
        # Ranks that train on all processors wait for the one whose processor this thread has used.
        # Where a GPU trains, most processors have nothing to do.
        missed = 1.0 if self.on_cpu else 1 / usable_cpus()
        self.seconds = waited + time.thread_time() * missed
        self.spent += self.seconds

    def give_up(self, problem: str) -> None:
        """Keep no copies from now on, and print why.

        Args:
            problem: Why; "" if another rank has printed it.
        """
        self.remove()
        if problem:
            log.warning(
                f"no copies of the state are kept in memory: {problem}; ranks that die continue "
                "from a checkpoint"
            )
        self.problem = problem or "another rank has said it"

    def remove(self) -> None:
        """Remove all copies of this training."""
        if self.home and self.writes:
            for step in self.home.steps():
                self.home.path_of(step).unlink(missing_ok=True)


def room_problem(folder: Path, size: int) -> str:
    """Return why a copy has no room; "" if it has.

    Args:
        folder: Its folder.
        size: Its bytes.
    """
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize + sum(each.stat().st_size for each in folder.iterdir())
    if free < ROOM * size:
        return (
            f"a copy has {_mib(size)}, and {folder.parents[1]} has {_mib(free)} free; {ROOM} times "
            "a copy are needed, half of it for data workers (docker run --shm-size)"
        )
    if (memory := available_memory()) < 2 * size:
        return f"a copy has {_mib(size)}, and {_mib(memory)} of memory are available"
    return ""


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that this process can still use.

    Args:
        cgroup: Where a container's own cgroup is mounted, of version 2.
    """
    available: int = psutil.virtual_memory().available
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = map(str.split, (cgroup / "memory.stat").read_text().splitlines())
        of_kind = {name: int(value) for name, value in lines}
    except (OSError, ValueError, LookupError):  # no limit, or no cgroup of its own
        return available
    reclaimable = of_kind.get("file", 0) - of_kind.get("shmem", 0)
    return min(available, limit - used + reclaimable)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
