"""Curves that go on: what an interrupted run has logged is neither lost nor doubled, by Lightning's loggers of files.

What was logged after a checkpoint is going to be logged again, and what hooks log before training goes on was logged by
the run of before: both are removed. TensorBoard's events say when they were written; of CSVLogger's file, the
checkpoint says how long it was.

A file of TensorBoard's is a row of records: the length of an event (uint64), a checksum of it (4 bytes), the event, a
checksum of that (tensorflow/core/lib/io/record_writer.h).
"""

import csv
import io
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.loggers.logger import rank_zero_experiment

from sagemaker_lightning.compat import lightning_loggers, overhead
from sagemaker_lightning.contract.errors import UserError

HEAD = struct.Struct("<QI")
TAIL = 4  # bytes


class Logger(TensorBoardLogger):
    """TensorBoard, with the flags that people set.

    Args:
        save_dir: Folder or s3:// address of the logs.
        name: Sub-folder of this experiment.
        version: Sub-folder of this run; the next free number if it is not given, and that of before in a run that is
            resumed.
        flush_secs: Seconds after which what was logged is written.
    """

    def __init__(
        self,
        save_dir: str,
        name: str = "lightning_logs",
        version: int | str | None = None,
        flush_secs: int = 120,
    ) -> None:
        if flush_secs < 1:  # TensorBoard's thread would take a whole core
            raise UserError(f"--logger.flush_secs: found {flush_secs}, allowed is 1 or more")
        # Of TensorBoard's thread, whose timer does not take any number; a day is as good as never.
        super().__init__(
            save_dir, name=name, version=version, flush_secs=min(flush_secs, 24 * 3600)
        )
        self.every = flush_secs
        self.due = 0.0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """TensorBoard's writer, imported when it is first wanted."""
        if "://" not in str(self.save_dir):
            overhead.import_tensorboard()
        return super().experiment

    def save(self) -> None:
        """Write what was logged, every flush_secs; Lightning asks for it at every logged step.

        On S3 it is all that was ever logged, as a new object, for which the training waits.
        """
        if time.monotonic() >= self.due:
            super().save()
            self.due = time.monotonic() + self.every


class Rows(lightning_loggers.Writer):
    """CSVLogger's file. Lightning's own writer begins by removing the one that is there.

    Args:
        log_dir: Folder or s3:// address of the file.
        waits: Whether it is still to be known if this run goes on with the file that is there.
    """

    def __init__(self, log_dir: str, waits: bool) -> None:
        self.waits = waits
        super().__init__(log_dir)

    def begin_file(self) -> None:
        """Remove a file that is there, unless it may be that of this run."""
        if not self.waits:
            super().begin_file()

    def save(self) -> None:
        """Write the rows that have come since, once it is known what they belong to."""
        if not self.waits:
            super().save()

    def begin(self) -> None:
        """Write a file of its own."""
        if self.waits:
            self.waits = False
            self.begin_file()

    def go_on(self, columns: Sequence[str], size: int) -> None:
        """Go on with a file that had `size` bytes, of these columns, when the checkpoint was taken."""
        self.metrics = []
        self.metrics_keys = list(columns)
        self.waits = False
        path = self.metrics_file_path
        content = self._read()
        if size and content and next(csv.reader(io.StringIO(content))) != self.metrics_keys:
            content = _table(content, self.metrics_keys)  # there were more of them since
        kept = content.encode()[:size]
        if len(kept) < size:
            print(
                f"warning: {path} lacks rows of the interrupted run: the curves have a gap",
                flush=True,
            )
        if kept:
            _replace(self.files, path, kept)
            return
        self.metrics_keys = []
        if self.files.isfile(path):
            self.files.rm_file(path)

    def state(self) -> dict[str, Any]:
        """Return what `go_on` takes."""
        exists = self.files.isfile(self.metrics_file_path)
        return {
            "columns": list(self.metrics_keys),
            "size": self.files.size(self.metrics_file_path) if exists else 0,
        }

    def add_columns(self, columns: list[str]) -> None:
        """Write the file anew with more columns, whole or not at all."""
        _replace(self.files, self.metrics_file_path, _table(self._read(), columns).encode())

    def _read(self) -> str:
        path = self.metrics_file_path
        return self.files.cat_file(path).decode(errors="replace") if self.files.isfile(path) else ""


class OfRows(lightning_loggers.WriterLogger):
    """What the class of a CSVLogger has before itself, so that it writes by `Rows`."""

    waits = False

    def make_writer(self) -> Rows:
        """Return the writer."""
        return Rows(self.log_dir, self.waits)


def prepare(loggers: Iterable[Any], told: Sequence[Mapping[str, Any]]) -> None:
    """Have loggers that have written nothing yet write where those of a run of before did, which have `told`."""
    loggers = list(loggers)
    for logger in loggers:
        kind = type(logger)
        if (
            isinstance(logger, CSVLogger) and kind.experiment is CSVLogger.experiment
        ):  # it writes as Lightning does
            logger.__class__ = type(kind.__name__, (OfRows, kind), {"__module__": kind.__module__})
    for logger, before in _both(loggers, told):
        lightning_loggers.take_version(logger, before["version"])
        if isinstance(logger, OfRows):
            logger.waits = logger.version == before["version"]


def tell(loggers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return what is to be known of loggers to go on with what they have written; it is written when this returns."""
    found = []
    for logger in loggers:
        if isinstance(logger, Logger):
            logger.due = 0.0
        logger.save()
        own = {
            "kind": type(logger).__name__,
            "name": _plain(logger.name),
            "version": _plain(logger.version),
        }
        found.append(own | (logger.experiment.state() if isinstance(logger, OfRows) else {}))
    return found


def go_on(
    loggers: Iterable[Any], told: Sequence[Mapping[str, Any]], moment: float, first: bool
) -> None:
    """Remove what was logged after a moment, in seconds since the epoch, at which loggers have `told`.

    Every host does so with its own files; with those on S3, the `first` one.
    """
    loggers = list(loggers)
    for logger, before in _both(loggers, told):
        if before["version"] != logger.version:
            continue  # it has another folder
        if isinstance(logger, TensorBoardLogger) and (first or "://" not in logger.log_dir):
            if first:
                logger.experiment.close()  # what comes now goes to a new file
            cut(logger.log_dir, moment)
        elif isinstance(logger, OfRows) and first:
            logger.experiment.go_on(before["columns"], before["size"])
    begin(loggers if first else ())


def begin(loggers: Iterable[Any]) -> None:
    """Have all loggers that still wait write as if nothing had been."""
    for logger in loggers:
        if isinstance(logger, OfRows):
            logger.experiment.begin()


def _both(
    loggers: Sequence[Any], told: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield each logger with what one of its kind and name has told, the first with the first."""
    left = list(told)
    for logger in loggers:
        for before in left:
            if (before["kind"], before["name"]) == (type(logger).__name__, _plain(logger.name)):
                left.remove(before)
                yield logger, before
                break


def _plain(name: Any) -> int | str | None:
    """Return a logger's name or version, of which somebody else's class may have one of any type."""
    return name if isinstance(name, (int, str)) else None


def _table(content: str, columns: Sequence[str]) -> str:
    """Return a file of rows with these columns."""
    made = io.StringIO(newline="")
    writer = csv.DictWriter(made, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(csv.DictReader(io.StringIO(content, newline="")))
    return made.getvalue()


def cut(folder: str, moment: float) -> None:
    """Remove from all of TensorBoard's files in a folder or at an s3:// address what was written after a moment."""
    files, place = url_to_fs(folder)
    for path in files.find(place) if files.exists(place) else ():
        if ".tfevents." not in path.rpartition("/")[2]:
            continue
        content = files.cat_file(path)
        kept = b"".join(record for record, when in _records(content) if when <= moment)
        if not kept and content:  # as of a file that was begun just now
            files.rm_file(path)
        elif kept != content:
            _replace(files, path, kept)


def _replace(files: AbstractFileSystem, path: str, content: bytes) -> None:
    """Have a file be all of `content`, or what it was before."""
    if "file" not in files.protocol:
        files.pipe_file(path, content)  # an object is replaced as a whole
        return
    aside = Path(f"{path}.aside")
    aside.write_bytes(content)
    os.replace(aside, path)


def events(content: bytes) -> Iterator[tuple[str, int, Any]]:
    """Yield tag, step and value of all that a file's content shows as curves; what is no number stays bytes."""
    from tensorboard.compat.proto.event_pb2 import Event

    for record, _ in _records(content):
        event = Event.FromString(record[HEAD.size : -TAIL])
        for value in event.summary.value:
            if not value.tag.startswith("_hparams_/"):  # it has the moment at which the run began
                number = (
                    value.simple_value
                    if value.HasField("simple_value")
                    else value.SerializeToString()
                )
                yield value.tag, event.step, number


def _records(content: bytes) -> Iterator[tuple[bytes, float]]:
    """Yield each whole record of a file, and when it was written."""
    from tensorboard.compat.proto.event_pb2 import (
        Event,
    )  # here: half a second that only a resumed run is worth

    start = 0
    while start + HEAD.size <= len(content):
        length, _ = HEAD.unpack_from(content, start)
        end = start + HEAD.size + length + TAIL
        if end > len(content):
            return  # it was being written when the process was killed
        event = Event.FromString(content[start + HEAD.size : end - TAIL])
        yield content[start:end], event.wall_time
        start = end
