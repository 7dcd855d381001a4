"""The journal of a run: for each batch, digests of what went in and what came out, beside the checkpoints.

Each rank has a file of its own, of records of one size, which lie after the oldest checkpoint that is kept. A process
that is killed loses nothing that was written. What is in a file is believed only record by record, each with a
checksum: copied while it was written, cut off, or somebody else's, it does no harm.
"""

import errno
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sagemaker_lightning.contract.atomic_files import IGNORED

MARK = b"\0sagemaker-lightning journal 1\0"
HEADER = struct.Struct(f"<{len(MARK)}s16sII400sI")
RECORD = struct.Struct("<6QI")
LIMIT = 1 << 16  # records of a file, 52 bytes each; what comes after is not noted until a checkpoint is saved
SHARE = 0.002  # of the time, at most, training waits for the file
AHEAD = 1  # the loss of a batch that was fetched ahead
Place = tuple[int, int]
"""An epoch, and a batch in it, both from 0."""


@dataclass(frozen=True)
class Step:
    """A batch that was trained on: its place, and a digest of each thing that decides what comes of it.

    Args:
        step: The optimizer step that it belongs to, from 1.
        epoch: Its epoch.
        batch: Its number in the epoch.
        data: Digest of the batch as training_step got it; of one that was fetched ahead, as the loader gave it.
        rates: Digest of the learning rates.
        loss: Digest of the losses; 0 of a batch that was to come when the run was stopped, AHEAD of the one after it.
    """

    step: int
    epoch: int
    batch: int
    data: int
    rates: int
    loss: int

    @property
    def place(self) -> Place:
        """Where in the run it is."""
        return self.epoch, self.batch


class Journal:
    """One rank's journal of a run, of which it writes a file.

    A file that cannot be written is no reason to end a job: `problem` says why not.

    Args:
        folder: The folder of the checkpoints.
        run: Tells the run from others, 16 bytes.
        rank: This rank.
        ranks: Number of ranks.
        machine: What it runs on, in up to 400 bytes.
    """

    def __init__(self, folder: Path, run: bytes, rank: int, ranks: int, machine: str) -> None:
        self.path = folder / f"journal-{rank}.bin"
        self.head = _with_checksum(HEADER, MARK, run, rank, ranks, machine.encode()[:400])
        self.records: dict[Place, bytes] = {}
        self.descriptor, self.problem = -1, ""
        self.unwritten = bytearray()
        self.due = 0.0  # when the file may be written to again

    def begin(self, known: Iterable[Step]) -> None:
        """Begin the file, with what an interrupted run has noted."""
        self.records = {step.place: _packed(step) for step in known}
        self._write_anew()

    def add(self, step: Step) -> None:
        """Note a step."""
        if len(self.records) < LIMIT or step.place in self.records:
            self.records[step.place] = _packed(step)
            self.unwritten += self.records[step.place]
            if time.monotonic() >= self.due:
                self.write()

    def write(self) -> None:
        """Write what is not written yet."""
        if not self.unwritten or self.descriptor < 0:
            return
        began = time.monotonic()
        try:
            if os.write(self.descriptor, self.unwritten) < len(self.unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._fail(error)
        self.unwritten.clear()
        ended = time.monotonic()
        self.due = ended + (ended - began) / SHARE

    def keep(self, first: Place) -> None:
        """Forget what lies before a place."""
        old = [place for place in self.records if place < first]
        for place in old:
            del self.records[place]
        if len(old) > len(self.records) and self.descriptor >= 0:
            self._write_anew()

    def forget_after(self, last: Place) -> None:
        """Forget what was noted of later places: the run has come to be another one."""
        self.records = {place: record for place, record in self.records.items() if place <= last}
        self._write_anew()

    def close(self) -> None:
        """Write all, and close the file."""
        self.write()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _write_anew(self) -> None:
        """Put a file with all records in place of the one there is."""
        aside = self.path.with_name(f"{self.path.name}{IGNORED}")
        try:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.unlink(missing_ok=True)
            self.descriptor = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
            os.write(self.descriptor, self.head + b"".join(self.records.values()))
            os.replace(aside, self.path)
        except OSError as error:
            self._fail(error)
        self.unwritten.clear()

    def _fail(self, error: OSError) -> None:
        self.problem = str(error.strerror)
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def files(folder: Path) -> list[Path]:
    """Return the files of journals in a folder."""
    return sorted(folder.glob("journal-*.bin"))


def read(folder: Path, run: bytes, rank: int, ranks: int) -> tuple[list[Step], str, str]:
    """Return what a rank of a run has noted, in order, what it ran on, and what is wrong with the file, if anything is.

    Of another run, or of another number of ranks, nothing is returned, and nothing is wrong with it.
    """
    path = folder / f"journal-{rank}.bin"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return [], "", f"{path} is not a plain file"
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            content = file.read(2 * LIMIT * RECORD.size)
    except FileNotFoundError:
        return [], "", ""
    except OSError as error:
        return [], "", f"{path} cannot be read ({error.strerror})"
    known = _checked(HEADER, head)
    if not known or known[0] != MARK:
        return [], "", f"{path} is damaged, or no journal of this program"
    if known[1:4] != (run, rank, ranks):
        return [], "", ""
    steps: dict[Place, Step] = {}
    for start in range(0, len(content) - RECORD.size + 1, RECORD.size):
        record = _checked(RECORD, content[start : start + RECORD.size])
        if not record:
            return _sorted(steps), _text(known[4]), f"{path} is damaged after {start // RECORD.size} batches"
        step = Step(*record)
        steps[step.place] = step
    return _sorted(steps), _text(known[4]), ""


def _sorted(steps: dict[Place, Step]) -> list[Step]:
    return [steps[place] for place in sorted(steps)]


def _packed(step: Step) -> bytes:
    return _with_checksum(RECORD, step.step, step.epoch, step.batch, step.data, step.rates, step.loss)


def _with_checksum(kind: struct.Struct, *values: object) -> bytes:
    packed = kind.pack(*values, 0)[:-4]
    return packed + zlib.crc32(packed).to_bytes(4, "little")


def _checked(kind: struct.Struct, packed: bytes) -> tuple | None:
    """Return the values of a record without its checksum, None if that is another one."""
    if len(packed) != kind.size or zlib.crc32(packed[:-4]) != int.from_bytes(packed[-4:], "little"):
        return None
    return kind.unpack(packed)[:-1]


def _text(content: bytes) -> str:
    """Return text that may be printed, whatever it was."""
    text = content.rstrip(b"\0").decode(errors="replace")
    return "".join(one for one in text if one.isprintable())
