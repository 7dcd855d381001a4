"""Loggers in a resumed run: what the interrupted run logged is neither lost nor doubled.

This is for Lightning's own loggers. What was logged after a checkpoint will be logged again by the
resumed run, and what hooks log before training resumes was logged by the interrupted run. Both are
removed from files: the checkpoint contains how long they were. The clock says nothing of that, as
that of the next machine may be behind. From a server nothing can be removed: what it has is not
sent again (mlflow_points.py, wandb_rows.py).

A program may train several times, and log something in between, such as the results of a test. A
training that continues from a checkpoint of an earlier one does not log that again: it stays.

A file of TensorBoard is a sequence of records: the length of an event (uint64), a checksum of the
length (4 bytes), the event, a checksum of the event (tensorflow/core/lib/io/record_writer.h).
"""

import csv
import io
import re
import struct
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from sagemaker_lightning.callbacks import mlflow_points, wandb_rows
from sagemaker_lightning.compat import lightning_loggers
from sagemaker_lightning.contract.atomic_files import atomic_write
from sagemaker_lightning.contract.errors import UserError

FILE_LOGGERS = (CSVLogger, TensorBoardLogger)
"""Lightning's loggers whose files a resumed run continues."""
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
            raise UserError(f"--logger.flush_secs: found {flush_secs}, allowed is 1 or more")
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


def config_writers(trainer: Trainer) -> list[Callback]:
    """Return what writes the config.yaml of a LightningCLI: Lightning's SaveConfigCallbacks."""
    cli = sys.modules.get("pytorch_lightning.cli")  # programs without it need not import it
    return [
        callback
        for callback in trainer.callbacks
        if cli and isinstance(callback, cli.SaveConfigCallback)
    ]


def write_config_again(trainer: Trainer) -> None:
    """Let a LightningCLI write its config.yaml, although the interrupted run has written one.

    It refuses to, unless told otherwise (`save_config_kwargs`), and a logger's folder is a new one
    in each run that resumes nothing.
    """
    for callback in config_writers(trainer):
        callback.overwrite = True


class Trainings:
    """The trainings of this process that a logger has seen, and the pauses between them.

    Pause 0 is before the first training, pause 1 after it, and so on.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of trainings that have begun."""
        self.pauses: list[list[Sizes]] = [[{}, {}]]
        """The sizes of a TensorBoardLogger's files when each pause began, and when it ended."""
        self.rows: list[list[dict[str, Any]]] = [[]]
        """What a CSVLogger wrote in each pause."""

    @property
    def in_pause(self) -> bool:
        """Whether no training is running."""
        return len(self.pauses) > self.count

    def begin(self, sizes: Sizes) -> None:
        """End the pause: a training begins. The files have these sizes now."""
        self.end(sizes)  # one that was left without a word
        self.pauses[-1][1] = sizes
        self.count += 1

    def end(self, sizes: Sizes) -> None:
        """Begin a pause, if a training is running. The files have these sizes now."""
        if not self.in_pause:
            self.pauses.append([sizes, sizes])
            self.rows.append([])

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Remember rows that are written in a pause."""
        if self.in_pause:
            self.rows[-1] += rows

    def pauses_since(self, number: int) -> list[list[Sizes]]:
        """Return the files' sizes at the ends of each pause between training `number` and this."""
        return self.pauses[number : self.count]

    def rows_since(self, number: int) -> list[dict[str, Any]]:
        """Return the rows of these pauses."""
        return [row for rows in self.rows[number : self.count] for row in rows]


_trainings: "weakref.WeakKeyDictionary[Any, Trainings]" = weakref.WeakKeyDictionary()
"""The trainings of this process, by logger."""


class ContinuedWriter(lightning_loggers.Writer):
    """The writer of CSVLogger's file; it keeps a file that is there already.

    Lightning's own writer begins by removing it.

    Args:
        log_dir: Folder or s3:// address of the file.
        waits: Whether it is not known yet if this run continues the file that is there.
        adds: Whether it adds rows to the file that is there until it waits.
        trainings: Gets the rows that are written between two trainings.
    """

    waits = False

    def __init__(self, log_dir: str, waits: bool, adds: bool, trainings: Trainings) -> None:
        self.waits = waits
        self.adds = adds
        self.trainings = trainings
        super().__init__(log_dir)
        if adds and (content := self._read()):
            self.metrics_keys = next(csv.reader(io.StringIO(content)))

    def begin_file(self) -> None:
        """Remove a file that is there, unless this run may continue it."""
        if not (self.waits or self.adds):
            super().begin_file()

    def wait(self) -> None:
        """Write no more rows until it is known if this run continues the file."""
        self.waits = True

    def save(self) -> None:
        """Write the new rows, once it is known which file they belong to."""
        if not self.waits:
            self.trainings.write(self.metrics)
            super().save()

    def start_file(self) -> None:
        """Start a new file, if it was not known yet whether to continue one."""
        if self.waits:
            self.waits = self.adds = False
            self.begin_file()

    def continue_from(self, columns: Sequence[str], size: int, training: int | None = None) -> None:
        """Continue a file as it was when the checkpoint was taken.

        It had these columns and `size` bytes. Rows after that are removed, except those that were
        written between the training of the checkpoint and this one. If the file has fewer bytes, a
        warning says that rows are missing.

        Args:
            columns: The columns that the file had.
            size: Its size in bytes.
            training: Number of the training of this process that took the checkpoint; None for
                this one.
        """
        self.metrics = []
        self.metrics_keys = list(columns)
        self.waits = False
        path = self.metrics_file_path
        content = self._read()
        if size and content and next(csv.reader(io.StringIO(content))) != self.metrics_keys:
            content = _with_columns(content, self.metrics_keys)  # columns have been added since
        kept = content.encode()[:size]
        if len(kept) < size:
            print(
                f"warning: {path} lacks rows of the interrupted run: the curves have a gap",
                flush=True,
            )
        if kept:
            _replace_file(self.files, path, kept)
        else:
            self.metrics_keys = []
            if self.files.isfile(path):
                self.files.rm_file(path)
        if training is not None:
            self.metrics = self.trainings.rows_since(training)
            super().save()

    def state(self) -> dict[str, Any]:
        """Return what `continue_from` takes: the columns, and the file's size in bytes."""
        exists = self.files.isfile(self.metrics_file_path)
        return {
            "columns": list(self.metrics_keys),
            "size": self.files.size(self.metrics_file_path) if exists else 0,
        }

    def add_columns(self, columns: list[str]) -> None:
        """Write the file again with more columns, completely or not at all."""
        _replace_file(
            self.files, self.metrics_file_path, _with_columns(self._read(), columns).encode()
        )

    def _read(self) -> str:
        path = self.metrics_file_path
        return self.files.cat_file(path).decode(errors="replace") if self.files.isfile(path) else ""


class ContinuedCSVLogger(lightning_loggers.WriterLogger):
    """The base that a CSVLogger gets before its own class, so that `ContinuedWriter` writes."""

    waits = False
    adds = False

    def make_writer(self) -> ContinuedWriter:
        """Return the writer."""
        return ContinuedWriter(self.log_dir, self.waits, self.adds, _trainings_of(self))

    def continue_file(self, trains: bool) -> None:
        """Keep the file that is there.

        Args:
            trains: Whether the training begins: rows wait until it is known which come again. The
                rows of a run before it, such as a validation, are added.
        """
        self.waits = trains
        self.adds = not trains
        if trains and (writer := lightning_loggers.writer(self)):
            writer.wait()


def prepare_files(
    loggers: Iterable[Any],
    states: Sequence[Mapping[str, Any]],
    folder: Path | None = None,
    trains: bool = True,
) -> None:
    """Make loggers continue the files and runs of the interrupted run.

    A logger that somebody has used before has chosen its version already: it stays there, and a
    line says so.

    Args:
        loggers: The loggers of this run.
        states: What `save_states` returned in the interrupted run.
        folder: The folder of the checkpoints; None if this run saves none.
        trains: Whether the training begins, and not another run of the trainer, such as a
            validation or a search.
    """
    loggers = list(loggers)
    for logger in loggers:
        _use_ours(logger, folder)
        if trains and isinstance(logger, FILE_LOGGERS):
            _flush(logger)
            _trainings_of(logger).begin(_sizes_if_used(logger))
    for logger, state in _with_states(loggers, states):
        if isinstance(logger, (MLFlowLogger, WandbLogger)):
            _continue_run(logger, state["version"], trains)
            continue
        if _is_name(state["version"]):
            lightning_loggers.set_version_if_none(logger, state["version"])
        if logger.version == state["version"]:
            if isinstance(logger, ContinuedCSVLogger):
                logger.continue_file(trains)
        elif trains and isinstance(logger, FILE_LOGGERS):
            _say_that_it_is_another(logger, state["version"], "version")


def well_formed(states: Any) -> list[Mapping[str, Any]]:
    """Return those of the states in a checkpoint, which is input, that `save_states` may return."""
    names = "kind", "name", "version"
    return [
        state
        for state in (states if isinstance(states, list) else ())
        if isinstance(state, dict)
        and all(isinstance(state.get(name), (int, str, type(None))) for name in names)
    ]


def _is_name(version: Any) -> bool:
    """Return whether a version of a checkpoint, which is input, names a folder or a file.

    A path would lead to files outside of the logger's folder, which are then written anew.
    """
    return isinstance(version, int) or (
        isinstance(version, str)
        and version not in ("", "..")
        and version.isprintable()
        and Path(version).name == version
    )


def _use_ours(logger: Any, folder: Path | None) -> None:
    """Put what continues files and runs into a logger, unless its class has its own."""
    experiment = getattr(type(logger), "experiment", None)
    if isinstance(logger, CSVLogger) and experiment is CSVLogger.experiment:
        _put_before_its_class(logger, ContinuedCSVLogger)
        if writer := lightning_loggers.writer(logger):
            writer.__class__ = ContinuedWriter
            writer.trainings = _trainings_of(logger)
    elif folder and isinstance(logger, WandbLogger) and experiment is WandbLogger.experiment:
        if not lightning_loggers.copies_tensorboard(logger):
            _put_before_its_class(logger, wandb_rows.ContinuedWandbLogger, folder=folder)
    elif folder and isinstance(logger, MLFlowLogger):
        mlflow_points.points(logger)


def _put_before_its_class(logger: Any, ours: type, **attributes: Any) -> None:
    own_class = type(logger)
    attributes["__module__"] = own_class.__module__
    # A parser that looks a class up by its name, jsonargparse's, passes local ones over.
    attributes["__qualname__"] = f"_put_before_its_class.<locals>.{own_class.__qualname__}"
    logger.__class__ = type(own_class.__name__, (ours, own_class), attributes)


def end_training(loggers: Iterable[Any]) -> None:
    """Note that the training which the loggers were prepared for is over."""
    for logger in loggers:
        if isinstance(logger, FILE_LOGGERS):
            _flush(logger)
            _trainings_of(logger).end(_sizes_if_used(logger))


def _trainings_of(logger: CSVLogger | TensorBoardLogger) -> Trainings:
    """Return the trainings of this process that a logger has seen."""
    return _trainings.setdefault(logger, Trainings())


def _flush(logger: Any) -> None:
    """Write what a CSVLogger or a TensorBoardLogger still holds."""
    if not (writer := lightning_loggers.writer(logger)):
        return
    if isinstance(logger, ContinuedCSVLogger):
        writer.save()
    elif isinstance(logger, TensorBoardLogger):
        writer.flush()


@rank_zero_only
def _continue_run(logger: Any, run_id: str | None, trains: bool) -> None:
    """Make a logger of a server continue the interrupted run."""
    is_mlflow = isinstance(logger, MLFlowLogger)
    if not _is_name(run_id) or (is_mlflow and not mlflow_points.is_there(logger, run_id)):
        return
    lightning_loggers.set_version_if_none(logger, run_id)
    if lightning_loggers.version(logger) != run_id:
        if trains:
            _say_that_it_is_another(logger, run_id, "run_id" if is_mlflow else "id")
    elif is_mlflow and trains:
        mlflow_points.points(logger).wait(run_id)
    elif is_mlflow:
        mlflow_points.points(logger).repeat(run_id)
    elif isinstance(logger, wandb_rows.ContinuedWandbLogger):
        logger.wait()


@rank_zero_only
def _say_that_it_is_another(logger: Any, version: int | str | None, argument: str) -> None:
    print(
        f"{type(logger).__name__}: this run logs to {argument} "
        f"{lightning_loggers.version(logger)}, the interrupted run logged to {argument} {version}, "
        f"so their values are not in one curve; give the logger {argument}={version!r}, or use it "
        "only after fit has begun",
        flush=True,
    )


def save_states(loggers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return what a resumed run has to know about the loggers.

    All that was logged is written when this returns, or sent.
    """
    states = []
    for logger in loggers:
        if isinstance(logger, Logger):
            logger.save_now()
        else:
            logger.save()
        version = _plain_or_none(lightning_loggers.version(logger))
        state = {
            "kind": type(logger).__name__,
            "name": _plain_or_none(lightning_loggers.identity(logger)),
            "version": version,
        }
        if isinstance(logger, FILE_LOGGERS):
            state["training"] = _trainings_of(logger).count
        if isinstance(logger, TensorBoardLogger):
            state["event_files"] = event_files(logger)
        if isinstance(logger, ContinuedCSVLogger):
            state |= logger.experiment.state()
        elif isinstance(logger, wandb_rows.ContinuedWandbLogger) and logger.rows:
            state |= logger.rows.state()
        elif isinstance(logger, MLFlowLogger) and version:
            state["points"] = mlflow_points.points(logger).state(version)
        states.append(state)
    return states


def continue_files(
    loggers: Iterable[Any], states: Sequence[Mapping[str, Any]], step: int, first: bool
) -> None:
    """Remove what was logged after a checkpoint was taken, and continue the files.

    Every host does so with its own files. The files on S3 are left to the first one.

    Args:
        loggers: The loggers of this run.
        states: What `save_states` returned when the checkpoint was taken.
        step: The optimizer step of the checkpoint.
        first: Whether this is the first host.
    """
    loggers = list(loggers)
    for logger, state in _with_states(loggers, states):
        if state["version"] != lightning_loggers.version(logger):
            continue  # it writes to another folder
        if isinstance(logger, MLFlowLogger):
            if first and state["version"]:
                mlflow_points.points(logger).continue_from(state["version"], state["points"])
            continue
        if not isinstance(logger, FILE_LOGGERS):
            if isinstance(logger, wandb_rows.ContinuedWandbLogger) and first and "rows" in state:
                logger.make_rows().continue_from(state["rows"], state["size"], state["end"])
            continue
        trainings = _trainings_of(logger)
        training = state.get("training", trainings.count)
        if isinstance(logger, TensorBoardLogger) and (first or "://" not in logger.log_dir):
            if first:
                logger.experiment.close()  # later events go to a new file
            pauses = trainings.pauses_since(training)
            lacking = remove_later_events(logger.log_dir, step, state.get("event_files"), pauses)
            if first:
                _warn_of_gap(logger.log_dir, lacking)
                lightning_loggers.begin_last_file(logger, _newest_second(logger))
        elif isinstance(logger, ContinuedCSVLogger) and first:
            logger.experiment.continue_from(state["columns"], state["size"], training)
    begin_files(loggers if first else ())


def begin_files(loggers: Iterable[Any]) -> None:
    """Make the loggers that still wait start new files."""
    for logger in loggers:
        if isinstance(logger, ContinuedCSVLogger):
            logger.experiment.start_file()
        elif isinstance(logger, MLFlowLogger):
            mlflow_points.points(logger).log_held()
        elif isinstance(logger, wandb_rows.ContinuedWandbLogger) and logger.rows:
            logger.rows.log_held()


def _with_states(
    loggers: Sequence[Any], states: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield each logger with the state of a logger of the same class and name.

    If there are several of these, the first gets the first state, and so on.
    """
    states_left = list(states)
    for logger in loggers:
        for state in states_left:
            if (state.get("kind"), state.get("name")) == (
                type(logger).__name__,
                _plain_or_none(lightning_loggers.identity(logger)),
            ):
                states_left.remove(state)
                yield logger, state
                break


def _plain_or_none(name: Any) -> int | str | None:
    """Return a logger's name or version if it is an int or a str, else None.

    Somebody else's logger may have one of any type.
    """
    return name if isinstance(name, (int, str)) else None


def _with_columns(content: str, columns: Sequence[str]) -> str:
    """Return the content of a CSV file with these columns."""
    output = io.StringIO(newline="")
    writer = csv.DictWriter(output, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(csv.DictReader(io.StringIO(content, newline="")))
    return output.getvalue()


def event_files(logger: TensorBoardLogger) -> Sizes:
    """Return the sizes of a logger's own files of events, by their paths below its folder.

    Files of others below that folder, such as those of HostMetrics, are left out: their writers may
    hold events back.
    """
    own_folders = lightning_loggers.event_folders(logger)
    folder = str(logger.log_dir).rstrip("/")
    return {
        name: size
        for name, size in _event_files(folder)[2].items()
        if f"{folder}/{name}".rpartition("/")[0] in own_folders
    }


def _sizes_if_used(logger: Any) -> Sizes:
    """Return the sizes of a TensorBoardLogger's files; {} if this process has not used it."""
    is_used = isinstance(logger, TensorBoardLogger) and lightning_loggers.writer(logger)
    return event_files(logger) if is_used else {}


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

    Of the logger's own files, what they had then is known. In other files, such as those of another
    host, or below the logger's folder, everything after the checkpoint's step was logged later.

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
    sizes = sizes if isinstance(sizes, dict) else None
    folders = {"", *(name.rpartition("/")[0] for name in sizes or ())}
    for name in present:
        path = f"{root.rstrip('/')}/{name}"
        content = files.cat_file(path)
        if sizes is None or name.rpartition("/")[0] not in folders:
            kept = b"".join(record for record, at in _records(content) if at <= step)
        else:
            kept = b"".join(record for record, _ in _records(content[: _size(sizes, name)]))
            for begin, end in pauses:
                logged = content[_size(begin, name) : _size(end, name)]
                begin[name] = len(kept)
                kept += logged
                end[name] = len(kept)
        if not kept and content:  # such as a file that was begun just now
            files.rm_file(path)
        elif kept != content:
            _replace_file(files, path, kept)
    return [name for name in sizes or () if _size(sizes, name) > present.get(name, 0)]


def _size(sizes: Sizes, name: str) -> int:
    """Return the size of a file; 0 if it is not known. A checkpoint may say anything."""
    size = sizes.get(name)
    return max(size, 0) if isinstance(size, int) else 0


def _warn_of_gap(folder: str, lacking: Sequence[str]) -> None:
    if lacking:
        print(
            f"warning: {folder} lacks points of the interrupted run (in {len(lacking)} of "
            "TensorBoard's files): the curves have a gap",
            flush=True,
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


def _replace_file(files: AbstractFileSystem, path: str, content: bytes) -> None:
    """Write a file so that it has all of `content`, or stays as it was."""
    if "file" not in files.protocol:
        files.pipe_file(path, content)  # an object is replaced as a whole
        return
    with atomic_write(Path(path)) as file:
        file.write(content)


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
