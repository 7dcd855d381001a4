"""A TensorBoardLogger in a resumed run: its files are cut back to the checkpoint.

Here is also our own TensorBoard logger, which has the flags that people set.

A file of TensorBoard is a sequence of records: the length of an event (uint64), a checksum of the
length (4 bytes), the event, a checksum of the event (tensorflow/core/lib/io/record_writer.h). The
clock says nothing of what was logged after the checkpoint, as that of the next machine may be
behind: the checkpoint has how long the files were.
"""

import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from pytorch_lightning.loggers import TensorBoardLogger

from sagemaker_lightning.callbacks.loggers.base import FileContinuation, replace_file
from sagemaker_lightning.compat import tensorboard_logger
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log

EVENTS = ".tfevents."
"""What the name of each file of events has in it; the seconds since the epoch follow."""
Sizes = dict[str, int]
"""The sizes of a TensorBoardLogger's files, in bytes, by their paths below its folder."""
EVENT_HEADER = struct.Struct("<QI")
CHECKSUM_BYTES = 4  # bytes of the checksum after an event


class Logger(TensorBoardLogger):
    """TensorBoard's logger, with the flags that people set.

    Raises UserError if `flush_secs` is below 1.

    Args:
        save_dir: Folder or s3:// address of the logs.
        name: Sub-folder of this experiment.
        version: Sub-folder of this run. If it is not given, it is the next free number; in a
            resumed run, the interrupted run's.
        flush_secs: Seconds after which logged values are written.
    """

    def __init__(
        self,
        save_dir: str,
        name: str = "lightning_logs",
        version: int | str | None = None,
        flush_secs: int = 120,
    ) -> None:
        if flush_secs < 1:  # TensorBoard's thread would take a whole core
            raise UserError(f"--logger.flush_secs: found {flush_secs}, expected 1 or more")
        # The timer of TensorBoard's thread does not accept every number; a day is as good as never.
        super().__init__(
            save_dir, name=name, version=version, flush_secs=min(flush_secs, 24 * 3600)
        )
        self.seconds_between_saves = flush_secs
        self.next_save_at = 0.0

    def save(self) -> None:
        """Write the logged values, every `flush_secs` seconds.

        Lightning calls it at every logged step. On S3, all values ever logged are written as a new
        object, and training waits for that.
        """
        if time.monotonic() >= self.next_save_at:
            self.save_now()

    def save_now(self) -> None:
        """Write the logged values."""
        super().save()
        self.next_save_at = time.monotonic() + self.seconds_between_saves


class TensorBoardContinuation(FileContinuation):
    """The continuation of a TensorBoardLogger.

    A pause is described by the sizes of the files when it began, and when it ended.
    """

    serves = TensorBoardLogger

    def first_pause(self) -> list[Sizes]:
        """Return that there was no file."""
        return [{}, {}]

    def _flushed_sizes(self) -> Sizes:
        """Write what the logger holds, and return its files' sizes; {} if it was not used yet."""
        if writer := tensorboard_logger.writer(self.logger):
            writer.flush()
            return event_files(self.logger)
        return {}

    def begin_training(self) -> None:
        """Note the sizes of the files at the end of the pause."""
        sizes = self._flushed_sizes()
        pause = self.trainings.begin([sizes, sizes])
        pause[1] = sizes

    def end_training(self) -> None:
        """Note the sizes of the files, after which a pause is logged."""
        sizes = self._flushed_sizes()
        self.trainings.end([sizes, sizes])

    def save(self) -> None:
        """Write all that was logged."""
        if isinstance(self.logger, Logger):
            self.logger.save_now()
        else:
            self.logger.save()

    def state(self) -> dict[str, Any]:
        """Return the sizes of the files, too."""
        return super().state() | {"event_files": event_files(self.logger)}

    def cut_back(self, state: Mapping[str, Any], step: int, first: bool) -> None:
        """Remove what was logged after the checkpoint, but not what was in pauses since."""
        folder = self.logger.log_dir
        if not first and "://" in folder:
            return
        if first:
            self.logger.experiment.close()  # later events go to a new file
        pauses = self.trainings.pauses_since(state["training"])
        lacking = remove_later_events(folder, step, state.get("event_files"), pauses)
        if first:
            if step >= 0:  # else all steps are logged again
                _warn_of_gap(folder, lacking)
            tensorboard_logger.begin_last_file(self.logger, _newest_second(self.logger))


def event_files(logger: TensorBoardLogger) -> Sizes:
    """Return the sizes of a logger's own files of events, by their paths below its folder.

    Files of others below that folder, such as those of HostMetrics, are left out: their writers may
    hold events back.
    """
    own_folders = tensorboard_logger.event_folders(logger)
    folder = str(logger.log_dir).rstrip("/")
    return {
        name: size
        for name, size in _event_files(folder)[2].items()
        if f"{folder}/{name}".rpartition("/")[0] in own_folders
    }


def _event_files(folder: str) -> tuple[AbstractFileSystem, str, Sizes]:
    """Return the file system and the path of a folder, and the sizes of the files of events there.

    The sizes are by the files' paths below the folder.
    """
    files, root = url_to_fs(folder)
    found = files.find(root, detail=True) if files.exists(root) else {}
    return (
        files,
        root,
        {
            path.removeprefix(f"{root.rstrip('/')}/"): info["size"]
            for path, info in sorted(found.items())
            if EVENTS in path.rpartition("/")[2]
        },
    )


def remove_later_events(
    folder: str, step: int, sizes: Sizes | None, pauses: Sequence[list[Sizes]] = ()
) -> list[str]:
    """Remove from TensorBoard's files what was logged after a checkpoint was taken.

    What the logger's own files had then is known. In other files, such as those of another
    host, or below the logger's folder, everything after the checkpoint's step was logged later.
    If all that the logger's own files had is gone, as on another machine, what there is now was
    logged at this start: it stays.

    Args:
        folder: Folder or s3:// address of the files.
        step: The optimizer step of the checkpoint.
        sizes: What `event_files` returned when the checkpoint was taken; None if it is not known.
        pauses: What it returned when each pause after that began, and when it ended. What was
            logged in a pause is kept. The entries are changed: they say where it is now.

    Returns:
        The files that had more when the checkpoint was taken.
    """
    files, root, present = _event_files(folder)
    had = {name: _size(sizes, name) for name in sizes} if isinstance(sizes, dict) else {}
    folders = {"", *(name.rpartition("/")[0] for name in had)}
    are_gone = any(had.values()) and present.keys().isdisjoint(name for name in had if had[name])
    for name in present:
        is_own = isinstance(sizes, dict) and name.rpartition("/")[0] in folders
        if is_own and are_gone:
            continue
        path = f"{root.rstrip('/')}/{name}"
        content = files.cat_file(path)
        if is_own:
            kept = b"".join(record for record, _ in _records(content[: had.get(name, 0)]))
            for begin, end in pauses:
                logged = content[_size(begin, name) : _size(end, name)]
                begin[name] = len(kept)
                kept += logged
                end[name] = len(kept)
        else:
            kept = b"".join(record for record, at in _records(content) if at <= step)
        if not kept and content:  # such as a file that was begun just now
            files.rm_file(path)
        elif kept != content:
            replace_file(files, path, kept)
    return [name for name in had if had[name] > present.get(name, 0)]


def _size(sizes: Sizes, name: str) -> int:
    """Return the size of a file; 0 if it is not known. A checkpoint may say anything."""
    size = sizes.get(name)
    return max(size, 0) if isinstance(size, int) else 0


def _warn_of_gap(folder: str, lacking: Sequence[str]) -> None:
    if lacking:
        log.warning(
            f"{folder} lacks points of the interrupted run (in {len(lacking)} of "
            "TensorBoard's files): the curves have a gap"
        )


def _newest_second(logger: TensorBoardLogger) -> int:
    """Return the latest of the times in the names of a logger's files; 0 if there is none.

    TensorBoard reads the files of a folder in the order of their names.
    """
    seconds = [
        re.search(rf"{re.escape(EVENTS)}(\d{{1,15}})\.", name)
        for name in _event_files(logger.log_dir)[2]
        if "/" not in name
    ]
    return max((int(match[1]) for match in seconds if match), default=0)


def read_events(content: bytes) -> Iterator[tuple[str, int, Any]]:
    """Yield tag, step and value of all curves in a file's content.

    A value that is not a number is yielded as bytes.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    for record, _ in _records(content):
        event = Event.FromString(record[EVENT_HEADER.size : -CHECKSUM_BYTES])
        for value in event.summary.value:
            if not value.tag.startswith("_hparams_/"):  # contains the time at which the run began
                number = (
                    value.simple_value
                    if value.HasField("simple_value")
                    else value.SerializeToString()
                )
                yield value.tag, event.step, number


def _records(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield each complete record of a file, and its step."""
    # Imported here: it takes half a second, which only a resumed run needs.
    from tensorboard.compat.proto.event_pb2 import Event

    start = 0
    while start + EVENT_HEADER.size <= len(content):
        length, _ = EVENT_HEADER.unpack_from(content, start)
        end = start + EVENT_HEADER.size + length + CHECKSUM_BYTES
        if end > len(content):
            return  # the process was killed while writing it
        event = Event.FromString(content[start + EVENT_HEADER.size : end - CHECKSUM_BYTES])
        yield content[start:end], event.step
        start = end
