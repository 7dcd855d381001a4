"""The journal of a run: for each batch, digests of its input and its results.

It is stored beside the checkpoints. Each rank has a file of its own, with records of one size for
the batches after the oldest checkpoint that is kept. A process that is killed loses nothing that it
has written. Each record has a checksum and is believed on its own: a file that was copied while it
was written, that was cut off, or that is somebody else's, does no harm.
"""

import errno
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sagemaker_lightning.contract.atomic_files import atomic_write

MARK = b"\0sagemaker-lightning journal 1\0"
HEADER = struct.Struct(f"<{len(MARK)}s16sII400sI")
RECORD = struct.Struct("<6QI")
# Records of a file, 52 bytes each; later ones are dropped until a checkpoint is saved.
MAX_RECORDS = 1 << 16
MAX_WAITING_SHARE = 0.002  # share of the time, at most, that training waits for the file
FETCHED_AHEAD = 1  # stands for the loss of a batch that was fetched ahead
Position = tuple[int, int]
"""An epoch and the number of a batch in it, both from 0."""


class Step(NamedTuple):
    """A batch of the training: its position, and digests of what it depends on.

    Args:
        step: The optimizer step that it belongs to, from 1.
        epoch: Its epoch, from 0.
        batch: Its number in the epoch, from 0.
        data: Digest of the batch as training_step got it. If it was fetched ahead: as the loader
            returned it.
        rates: Digest of the learning rates.
        loss: Digest of the losses. 0 for the batch that was to come when the run was stopped,
            FETCHED_AHEAD for the one after it.
    """

    step: int
    epoch: int
    batch: int
    data: int
    rates: int
    loss: int

    @property
    def position(self) -> Position:
        """Epoch and number of the batch."""
        return self.epoch, self.batch


class Journal:
    """One rank's journal of a run; it writes a file.

    A file that cannot be written is no reason to end a job: `take_problem` then says why.

    Args:
        folder: The folder of the checkpoints.
        run: Identifies the run, 16 bytes.
        rank: This rank.
        ranks: Number of ranks.
        machine: What the run depends on besides its settings; 400 bytes of it are kept.
    """

    def __init__(self, folder: Path, run: bytes, rank: int, ranks: int, machine: str) -> None:
        self.path = folder / f"journal-{rank}.bin"
        self.header = _packed_with_checksum(HEADER, MARK, run, rank, ranks, machine.encode())
        self.records: dict[Position, bytes] = {}
        self.records_in_file = 0  # with those that were removed, or were replaced, since
        self.descriptor: int | None = None  # of the file while it can be written to
        self.problem = ""
        self.unwritten = bytearray()
        # When the file may be written to again, in seconds of time.monotonic().
        self.next_write_at = 0.0

    def start_file(self, known: Iterable[Step]) -> None:
        """Create the file, starting with the steps of an interrupted run."""
        self.records = {step.position: _packed_record(step) for step in known}
        self._replace_file()

    def add(self, step: Step) -> None:
        """Record a step; the file may get it later."""
        if len(self.records) < MAX_RECORDS or step.position in self.records:
            self.records[step.position] = _packed_record(step)
            self.unwritten += self.records[step.position]
            self.records_in_file += 1
            if time.monotonic() >= self.next_write_at:
                self.write()

    def write(self) -> None:
        """Write the steps that are not in the file yet."""
        if not self.unwritten or self.descriptor is None:
            return
        started = time.monotonic()
        try:
            if os.write(self.descriptor, self.unwritten) < len(self.unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._give_up(error)
        self.unwritten.clear()
        ended = time.monotonic()
        self.next_write_at = ended + (ended - started) / MAX_WAITING_SHARE

    def take_problem(self) -> str:
        """Return why the file could not be written since the last call; "" if it could."""
        problem = self.problem
        self.problem = ""
        return problem

    def remove_before(self, first: Position) -> None:
        """Remove the steps before a position; from the file, once most of it is outdated."""
        for place in [place for place in self.records if place < first]:
            del self.records[place]
        if self.records_in_file > 2 * len(self.records) and self.descriptor is not None:
            self._replace_file()

    def remove_after(self, last: Position) -> None:
        """Remove the steps after a position: from there on, this run is another one."""
        self.records = {place: record for place, record in self.records.items() if place <= last}
        self._replace_file()

    def close(self) -> None:
        """Write everything and close the file."""
        self.write()
        self._close_file()

    def _close_file(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.descriptor = None

    def _replace_file(self) -> None:
        """Replace the file by one with all records."""
        try:
            self._close_file()
            # Training does not wait for the disk: a record that a crash of the machine loses is one
            # that is not compared.
            with atomic_write(self.path, sync=False) as file:
                file.write(self.header + b"".join(self.records.values()))
            self.records_in_file = len(self.records)
            self.descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._give_up(error)
        self.unwritten.clear()

    def _give_up(self, error: OSError) -> None:
        """Stop writing because of an error."""
        self.problem = str(error.strerror)
        self._close_file()


def files(folder: Path) -> list[Path]:
    """Return all journal files in a folder."""
    return sorted(folder.glob("journal-*.bin"))


def read(folder: Path, run: bytes, rank: int, ranks: int) -> tuple[list[Step], str, str]:
    """Return what a rank of a run has recorded.

    A file of another run, or of another number of ranks, counts as empty.

    Args:
        folder: The folder of the checkpoints.
        run: Identifies the run, 16 bytes.
        rank: The rank.
        ranks: Number of ranks.

    Returns:
        The steps in order, what the run depended on besides its settings, and what is wrong with
        the file; "" if nothing is.
    """
    path = folder / f"journal-{rank}.bin"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return [], "", f"{path} is not a plain file"
        with path.open("rb") as file:
            header = file.read(HEADER.size)
            content = file.read(2 * MAX_RECORDS * RECORD.size)
    except FileNotFoundError:
        return [], "", ""
    except OSError as error:
        return [], "", f"{path} cannot be read ({error.strerror})"
    header_values = _unpacked_if_intact(HEADER, header)
    if not header_values or header_values[0] != MARK:
        return [], "", f"{path} is damaged, or no journal of this program"
    if header_values[1:4] != (run, rank, ranks):
        return [], "", ""
    steps: dict[Position, Step] = {}
    for start in range(0, len(content) - RECORD.size + 1, RECORD.size):
        record_values = _unpacked_if_intact(RECORD, content[start : start + RECORD.size])
        if not record_values:
            return (
                _by_position(steps),
                _printable(header_values[4]),
                f"{path} is damaged after {start // RECORD.size} batches",
            )
        step = Step(*record_values)
        steps[step.position] = step
    return _by_position(steps), _printable(header_values[4]), ""


def _by_position(steps: dict[Position, Step]) -> list[Step]:
    """Return the steps in the order of their positions."""
    return [steps[place] for place in sorted(steps)]


def _packed_record(step: Step) -> bytes:
    return _packed_with_checksum(RECORD, *step)


def _packed_with_checksum(layout: struct.Struct, *values: object) -> bytes:
    """Return values packed in a layout, whose last field is their CRC-32."""
    packed = layout.pack(*values, 0)[:-4]
    return packed + zlib.crc32(packed).to_bytes(4, "little")


def _unpacked_if_intact(layout: struct.Struct, packed: bytes) -> tuple[Any, ...] | None:
    """Return a record's values without the checksum; None if that is wrong."""
    if len(packed) != layout.size or zlib.crc32(packed[:-4]) != int.from_bytes(
        packed[-4:], "little"
    ):
        return None
    return layout.unpack(packed)[:-1]


def _printable(content: bytes) -> str:
    """Return text that is safe to print, whatever the bytes are."""
    text = content.rstrip(b"\0").decode(errors="replace")
    return "".join(character for character in text if character.isprintable())
