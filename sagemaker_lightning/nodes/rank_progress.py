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

RECORD = struct.Struct("<5q?")
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
    """When it last began or ended a batch, of a training or of a validation."""
    is_training: bool
    """Whether its training has begun and has not ended."""


class ProgressFile:
    """The file of this rank.

    Args:
        watch: The socket of the node's watch, beside which the file is made; None for no file.

    Attributes:
        began_with: The optimizer step with which the training began.
        first_step_at: When its first batch was done, in ns of time.monotonic_ns(); 0 before.
    """

    def __init__(self, watch: Path | None) -> None:
        self.memory: mmap.mmap | None = None
        self.began_with = self.first_step_at = 0
        self.is_training = False
        if not (watch and watch.parent.is_dir()):
            return
        with suppress(OSError):  # without it, the watch knows less of this rank
            self.pid = os.getpid()
            with watch.with_name(f"{PREFIX}{self.pid}").open("w+b") as file:
                file.truncate(RECORD.size)
                self.memory = mmap.mmap(file.fileno(), RECORD.size)
            RECORD.pack_into(self.memory, 0, self.pid, 0, 0, 0, 0, False)

    def begin(self, step: int) -> None:
        """Note that the training begins, with an optimizer step."""
        self.began_with = step
        self.is_training = True
        self.move(step)

    def batch_ended(self, step: int) -> None:
        """Note that a batch of the training is done, and the optimizer step since then."""
        self.first_step_at = self.first_step_at or time.monotonic_ns()
        self.move(step)

    def end(self, step: int) -> None:
        """Note that the training has ended: what comes now may take as long as it likes."""
        self.is_training = False
        self.move(step)

    def move(self, step: int) -> None:
        """Note that this rank continues."""
        if self.memory:
            moved_at = time.monotonic_ns()
            record = (self.pid, self.began_with, step, self.first_step_at, moved_at)
            RECORD.pack_into(self.memory, 0, *record, self.is_training)


def read(watch: Path) -> Iterator[RankProgress]:
    """Yield what the ranks of a node have written that have begun to train.

    Those that have ended are among them.

    Args:
        watch: The socket of the node's watch.
    """
    return (rank for rank in all_ranks(watch) if rank.moved_at)


def starting(watch: Path) -> set[int]:
    """Return the PIDs of the ranks that have not begun to train yet; some may have ended.

    Args:
        watch: The socket of the node's watch.
    """
    return {rank.pid for rank in all_ranks(watch) if not rank.moved_at}


def all_ranks(watch: Path) -> Iterator[RankProgress]:
    """Yield what the ranks of a node have written, also before they train and after their end.

    Args:
        watch: The socket of the node's watch.
    """
    for file in watch.parent.glob(f"{PREFIX}*"):
        with suppress(OSError, struct.error):
            pid, began_with, step, first, moved, is_training = RECORD.unpack(file.read_bytes())
            if pid:
                yield RankProgress(pid, began_with, step, first / 1e9, moved / 1e9, is_training)
