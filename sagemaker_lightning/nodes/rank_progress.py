"""How far each rank of a node has come, in a small file that outlives the rank.

A rank writes into memory that it shares with the file, which costs less than a microsecond and no
call of the system. Whoever watches the node reads it, also after the rank was killed.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RECORD = struct.Struct("<8q2?")
PREFIX = "rank-"


@dataclass(frozen=True)
class RankProgress:
    """What a rank has written; times are seconds of time.monotonic(), 0 before."""

    pid: int
    began_with: int
    """The optimizer step with which its training began."""
    step: int
    """The optimizer step that it has reached."""
    first_step_at: float
    """When its first batch was done."""
    moved_at: float
    """When it last began or ended a batch while it trained, or began, ended or failed to train."""
    longest_pause: float
    """The most seconds between two such moments so far."""
    ranks: int
    """How many ranks its host has; 0 before all of them are there."""
    launcher: int
    """The PID of the process that has started it as one of several ranks; 0 if none has."""
    is_training: bool
    """Whether its training has begun and has not ended."""
    has_failed: bool
    """Whether an error has ended its training."""


class ProgressFile:
    """The file of this rank.

    Args:
        watch: The socket of the node's watch, beside which the file is made; None for no file.
        ranks: How many ranks this host has; 0 before all of them are there.

    Attributes:
        began_with: The optimizer step with which the training began.
        first_step_at: When its first batch was done, in ns of time.monotonic_ns(); 0 before.
    """

    def __init__(self, watch: Path | None, ranks: int = 0) -> None:
        self.memory: mmap.mmap | None = None
        self.ranks = ranks
        self.began_with = self.step = 0
        self.first_step_at = self.moved_at = self.longest_pause = 0
        self.is_training = self.has_failed = False
        if not (watch and watch.parent.is_dir()):
            return
        with suppress(OSError):  # without it, the watch knows less of this rank
            self.pid = os.getpid()
            self.launcher = os.getppid() if "LOCAL_RANK" in os.environ else 0
            with watch.with_name(f"{PREFIX}{self.pid}").open("w+b") as file:
                file.truncate(RECORD.size)
                self.memory = mmap.mmap(file.fileno(), RECORD.size)
            self._write()

    def note_ranks(self, ranks: int) -> None:
        """Note how many ranks this host has; all of them are there."""
        self.ranks = ranks
        self._write()

    def begin(self, step: int) -> None:
        """Note that the training begins, with an optimizer step."""
        self.began_with = step
        self.is_training = True
        self.move(step)

    def batch_ended(self, step: int) -> None:
        """Note that a batch of the training is done, and the optimizer step since then."""
        self.first_step_at = self.first_step_at or time.monotonic_ns()
        self.move(step)

    def move(self, step: int) -> None:
        """Note that this rank continues, if it trains."""
        if self.is_training:
            now = time.monotonic_ns()
            self.longest_pause = max(self.longest_pause, now - (self.moved_at or now))
            self.moved_at, self.step = now, step
            self._write()

    def end(self, step: int) -> None:
        """Note that the training has ended: what comes now may take as long as it likes."""
        self.move(step)
        self.is_training = False
        self._write()

    def fail(self) -> None:
        """Note that an error has ended the training."""
        self.has_failed = True
        self.moved_at = self.moved_at and time.monotonic_ns()
        self._write()

    def _write(self) -> None:
        if self.memory:
            RECORD.pack_into(
                self.memory,
                0,
                self.pid,
                self.began_with,
                self.step,
                self.first_step_at,
                self.moved_at,
                self.longest_pause,
                self.ranks,
                self.launcher,
                self.is_training,
                self.has_failed,
            )


def read(watch: Path) -> Iterator[RankProgress]:
    """Yield what the ranks of a node have written that have begun to train.

    Those that have ended are among them.

    Args:
        watch: The socket of the node's watch.
    """
    return (rank for rank in all_ranks(watch) if rank.moved_at)


def all_ranks(watch: Path) -> Iterator[RankProgress]:
    """Yield what the ranks of a node have written, also before they train and after their end.

    Args:
        watch: The socket of the node's watch.
    """
    for file in watch.parent.glob(f"{PREFIX}*"):
        with suppress(OSError, struct.error):
            pid, began_with, step, first, moved, pause, *others = RECORD.unpack(file.read_bytes())
            if pid:
                seconds = (first / 1e9, moved / 1e9, pause / 1e9)
                yield RankProgress(pid, began_with, step, *seconds, *others)
