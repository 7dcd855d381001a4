"""TensorBoard's files: one continuous curve, also of a job that was interrupted.

A file of events is a row of records: the length of an event (uint64), a checksum of it (4 bytes), the event, a checksum
of that (tensorflow/core/lib/io/record_writer.h); an event is a protocol buffer that says when it was written.
"""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.loggers.logger import rank_zero_experiment

from app import lean

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
        self, save_dir: str, name: str = "lightning_logs", version: int | str | None = None, flush_secs: int = 120
    ) -> None:
        if flush_secs < 1:  # TensorBoard's thread would take a whole core
            raise ValueError(f"--logger.flush_secs: found {flush_secs}, allowed is 1 or more")
        super().__init__(save_dir, name=name, version=version, flush_secs=flush_secs)
        self.every, self.due, self.goes_on = flush_secs, 0.0, False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """TensorBoard's writer, imported when it is first wanted."""
        if self._experiment is None and "://" not in str(self.save_dir):
            lean.import_tensorboard()
        return super().experiment

    def save(self) -> None:
        """Write what was logged, every flush_secs; Lightning asks for it at every logged step.

        On S3 it is all that was ever logged, as a new object, for which the training waits.
        """
        if time.monotonic() >= self.due:
            super().save()
            self.due = time.monotonic() + self.every

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Log them, once: a run that is resumed has done so."""
        if not self.goes_on:
            super().log_hyperparams(*args, **kwargs)

    def go_on(self, version: int | str) -> None:
        """Write where a run of before has written."""
        self._version, self.goes_on = version, True


def flush(logger: Any) -> None:
    """Have all that was logged written."""
    if isinstance(logger, Logger):
        logger.due = 0.0
    logger.save()


def forget_after(logger: Any, moment: float, first: bool) -> None:
    """Remove what was logged after a moment, in seconds since the epoch: it is going to be logged again.

    Every host does so with its own files; with those on S3, the `first` one.
    """
    if isinstance(logger, TensorBoardLogger) and (first or "://" not in logger.log_dir):
        cut(logger.log_dir, moment)


def cut(folder: str, moment: float) -> None:
    """Remove from all of TensorBoard's files in a folder or at an s3:// address what was written after a moment."""
    files, place = url_to_fs(folder)
    for path in files.find(place) if files.exists(place) else ():
        if ".tfevents." not in path.rpartition("/")[2]:
            continue
        content = files.cat_file(path)
        kept = b"".join(record for record, when in _records(content) if when <= moment)
        if kept == content or not kept:  # nothing is to go; or all is, as of a file that was begun just now
            if not kept and content:
                files.rm_file(path)
        elif "://" in folder:
            files.pipe_file(path, kept)
        else:
            aside = Path(f"{path}.aside")
            aside.write_bytes(kept)
            os.replace(aside, path)


def events(content: bytes) -> Iterator[tuple[str, int, Any]]:
    """Yield tag, step and value of all that a file's content shows as curves; what is no number stays bytes."""
    from tensorboard.compat.proto.event_pb2 import Event

    for record, _ in _records(content):
        event = Event.FromString(record[HEAD.size : -TAIL])
        for value in event.summary.value:
            if not value.tag.startswith("_hparams_/"):  # it has the moment at which the run began
                number = value.simple_value if value.HasField("simple_value") else value.SerializeToString()
                yield value.tag, event.step, number


def _records(content: bytes) -> Iterator[tuple[bytes, float]]:
    """Yield each whole record of a file, and when it was written."""
    from tensorboard.compat.proto.event_pb2 import Event  # here: half a second that only a resumed run is worth

    start = 0
    while start + HEAD.size <= len(content):
        length, _ = HEAD.unpack_from(content, start)
        end = start + HEAD.size + length + TAIL
        if end > len(content):
            return  # it was being written when the process was killed
        event = Event.FromString(content[start + HEAD.size : end - TAIL])
        yield content[start:end], event.wall_time
        start = end
