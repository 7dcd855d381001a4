"""Whole shards on a disk, in a bounded space, fetched before they are needed.

All processes of a host share a cache. A sample whose shard is not there is read from its source:
that may be slow, and is never wrong.
"""

import fcntl
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.shards.index import Shard
from sagemaker_lightning.shards.sources import Source, pread
from sagemaker_lightning.shards.threads import mapped, start

CONNECTIONS = 8
PIECE = 2**23  # bytes of a request
RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 300.0
"""What a failure doubles at most."""
IN_USE_SECONDS = 60.0
OF_CACHE = re.compile(r"[0-9a-f]{15}-[0-9]{7,}\.(shard|part)")
"""The names of a cache's files."""


@dataclass(frozen=True)
class DiskCache:
    """The shards of one index that are on a disk.

    Attributes:
        folder: Where they are; others may use it, for other indexes, too.
        limit: Bytes of all shards there, at most.
        identity: The index's.
    """

    folder: Path
    limit: int
    identity: int

    def path(self, number: int) -> Path:
        """Return where a shard is, or would be. Names of an index are not used as paths."""
        return self.folder / f"{self._name(number)}.shard"

    def _name(self, number: int) -> str:
        return f"{self.identity:015x}-{number:07}"

    def read(self, number: int, start: int, stop: int) -> bytes | None:
        """Return the bytes of a shard from `start` to `stop`; None if it is not there."""
        try:
            return pread(f"{self.folder}/{self._name(number)}.shard", start, stop)
        except OSError:
            return None

    def drop(self, number: int) -> None:
        """Remove a shard that was damaged here."""
        with suppress(OSError):
            self.path(number).unlink()

    def keep(self, numbers: Iterable[int]) -> None:
        """Note that shards are in use: no process removes them within IN_USE_SECONDS."""
        for number in numbers:
            with suppress(OSError):
                os.utime(self.path(number))

    def release(self, numbers: Iterable[int]) -> None:
        """Note that this process does not need shards any more."""
        for number in numbers:
            with suppress(OSError):
                os.utime(self.path(number), (0, 0))

    def fetch(self, number: int, shard: Shard, source: Source, in_use: Sequence[int]) -> bool:
        """Fetch a shard; return whether it is there.

        It is not if another process is fetching it, or if there is no room: shards in use stay.

        Raises UserError if it cannot be read; OSError if it cannot be written.
        """
        path = self.path(number)
        if path.exists():
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("ab") as file:
            if not _locked(file):
                return False
            try:
                if path.exists():
                    return True
                if not self._make_room(shard.bytes, {self.path(each) for each in in_use}, file):
                    return False
                _copy(source, shard, part)
                os.replace(part, path)
                return True
            finally:
                part.unlink(missing_ok=True)

    def _make_room(self, size: int, in_use: set[Path], file: BinaryIO) -> bool:
        """Remove the shards that were used longest ago, and reserve room; return whether it fits.

        What processes that were killed have left is removed, too.
        """
        with (self.folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = {}
            for path in self.folder.iterdir():
                if OF_CACHE.fullmatch(path.name):  # the folder may have files of the user's, too
                    with suppress(OSError):
                        files[path] = path.lstat()
            total = sum(status.st_size for status in files.values())
            for path in sorted(files.keys() - in_use, key=lambda path: files[path].st_mtime_ns):
                if total + size <= self.limit:
                    break
                used = files[path].st_mtime > time.time() - IN_USE_SECONDS
                if not _is_left(path) if path.suffix == ".part" else used:
                    continue
                path.unlink(missing_ok=True)
                total -= files[path].st_size
            if total + size > self.limit:
                return False
            os.truncate(file.fileno(), size)
            return True


def _locked(file: BinaryIO) -> bool:
    """Lock a file that is being fetched; return whether no other process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_left(path: Path) -> bool:
    """Return whether nobody is writing a `.part`."""
    try:
        with path.open("rb") as file:
            return _locked(file)
    except OSError:
        return False


def _copy(source: Source, shard: Shard, path: Path) -> None:
    """Copy a shard into a file that is there, by several connections."""
    source.connect()

    def copy(start: int) -> None:
        stop = min(start + PIECE, shard.bytes)
        # One of its own: after an error elsewhere, this piece is not waited for.
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            copied = source.copy(shard.name, start, stop, descriptor)
        finally:
            os.close(descriptor)
        if copied != stop - start:
            raise UserError(
                f"{source.name_of(shard.name)}: found its end before byte {stop}, expected "
                f"{shard.bytes} bytes; upload it again, or make the index again"
            )

    mapped(copy, range(0, shard.bytes, PIECE), CONNECTIONS)


class Prefetcher:
    """Fetches shards in a thread, in the order in which they are needed.

    An error is not raised here: it is raised where a sample is needed.
    """

    def __init__(self, cache: DiskCache, source: Source, shards: Sequence[Shard]) -> None:
        self.cache = cache
        self.source = source
        self.shards = shards
        self.wanted: tuple[int, ...] = ()
        self.touched = 0.0
        self.changed = threading.Condition()
        self.pause = RETRY_SECONDS
        self.has_warned = False
        start(self._run, "shards")

    def want(self, numbers: Sequence[int]) -> None:
        """Have shards fetched, the first one first; what was wanted before may go."""
        numbers = tuple(numbers)
        now = time.monotonic()
        if numbers == self.wanted and now - self.touched < IN_USE_SECONDS / 4:
            return
        self.touched = now
        self.cache.keep(numbers)
        with self.changed:
            self.cache.release(set(self.wanted) - set(numbers))
            self.wanted = numbers
            self.changed.notify()

    def _run(self) -> None:
        while True:
            with self.changed:
                wanted = self.wanted
                missing = [each for each in wanted if not self.cache.path(each).exists()]
                if not missing:
                    self.changed.wait()
                    continue
            if not any(self._fetch(number, wanted) for number in missing):
                with self.changed:
                    self.changed.wait(self.pause)

    def _fetch(self, number: int, wanted: tuple[int, ...]) -> bool:
        shard = self.shards[number]
        try:
            is_there = self.cache.fetch(number, shard, self.source, wanted)
        except (UserError, OSError) as error:
            self.pause = min(2 * self.pause, LONGEST_RETRY_SECONDS)
            if isinstance(error, OSError) and not self.has_warned:
                self.has_warned = True
                log.warning(
                    f"{self.cache.folder}: found {error.strerror} while "
                    f"{self.source.name_of(shard.name)} was fetched; what is not there is read "
                    "sample by sample; make room, or give another cache_dir"
                )
            return False
        if is_there:
            self.pause = RETRY_SECONDS
        return is_there
