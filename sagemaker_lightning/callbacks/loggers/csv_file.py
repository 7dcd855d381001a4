"""A CSVLogger in a resumed run: its file is cut back to the checkpoint, and continues."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import CSVLogger

from sagemaker_lightning.callbacks.loggers.base import (
    FileContinuation,
    Trainings,
    is_count,
    put_before_its_class,
    replace_file,
)
from sagemaker_lightning.compat import csv_logger
from sagemaker_lightning.contract.log import log


class CSVContinuation(FileContinuation):
    """The continuation of a CSVLogger. A pause is described by the rows that were written in it."""

    serves = CSVLogger

    def first_pause(self) -> list[dict[str, Any]]:
        """Return no rows."""
        return []

    @property
    def is_ours(self) -> bool:
        """Whether `ContinuedWriter` writes the file."""
        return isinstance(self.logger, ContinuedCSVLogger)

    def prepare(self, folder: Path | None) -> None:
        """Have `ContinuedWriter` write the file, unless the logger's class has a writer."""
        if getattr(type(self.logger), "experiment", None) is not CSVLogger.experiment:
            return
        put_before_its_class(self.logger, ContinuedCSVLogger)
        if writer := csv_logger.writer(self.logger):
            writer.__class__ = ContinuedWriter
            vars(writer)["trainings"] = self.trainings

    def _flush(self) -> None:
        if self.is_ours and (writer := csv_logger.writer(self.logger)):
            writer.save()

    def begin_training(self) -> None:
        """Write the rows of the pause, which ends."""
        self._flush()
        self.trainings.begin([])

    def end_training(self) -> None:
        """Write the rows of the training. Those that follow belong to a pause."""
        self._flush()
        self.trainings.end([])

    def keep_files(self, trains: bool) -> None:
        """Keep the file that is there."""
        if self.is_ours:
            self.logger.continue_file(trains)

    def state(self) -> dict[str, Any]:
        """Return the file's columns and its size in bytes, too."""
        return super().state() | (self.logger.experiment.state() if self.is_ours else {})

    def takes(self, state: Mapping[str, Any]) -> bool:
        """Return whether the state has columns and a size, if it has to."""
        columns = state.get("columns")
        return super().takes(state) and (
            not self.is_ours
            or (
                isinstance(columns, list)
                and all(isinstance(column, str) for column in columns)
                and is_count(state.get("size"))
            )
        )

    def cut_back(self, state: Mapping[str, Any], step: int, first: bool) -> None:
        """Remove the rows after the checkpoint, but not those of pauses since."""
        if self.is_ours and first:
            pauses = self.trainings.pauses_since(state["training"])
            rows = [row for pause in pauses for row in pause]
            self.logger.experiment.continue_from(state["columns"], state["size"], rows)

    def begin_anew(self) -> None:
        """Begin a new file, if it was not known yet whether to continue one."""
        if self.is_ours:
            self.logger.experiment.start_file()


class ContinuedWriter(csv_logger.Writer):
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
        if self.waits:
            return
        if self.trainings.in_pause:
            self.trainings.pauses[-1] += self.metrics
        super().save()

    def start_file(self) -> None:
        """Start a new file, if it was not known yet whether to continue one."""
        if self.waits:
            self.waits = self.adds = False
            self.begin_file()

    def continue_from(
        self, columns: Sequence[str], size: int, rows: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Continue a file as it was when the checkpoint was taken.

        It had these columns and `size` bytes. All after that is removed. If the file has fewer
        bytes, a warning says that rows are missing.

        Args:
            columns: The columns that the file had.
            size: Its size in bytes.
            rows: Rows that are written after these: those of pauses since.
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
            log.warning(f"{path} lacks rows of the interrupted run: the curves have a gap")
        if kept:
            replace_file(self.files, path, kept)
        else:
            self.metrics_keys = []
            if self.files.isfile(path):
                self.files.rm_file(path)
        if rows:
            self.metrics = list(rows)
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
        replace_file(
            self.files, self.metrics_file_path, _with_columns(self._read(), columns).encode()
        )

    def _read(self) -> str:
        path = self.metrics_file_path
        return self.files.cat_file(path).decode(errors="replace") if self.files.isfile(path) else ""


class ContinuedCSVLogger(csv_logger.WriterLogger):
    """The base that a CSVLogger gets before its own class, so that `ContinuedWriter` writes."""

    waits = False
    adds = False

    def make_writer(self) -> ContinuedWriter:
        """Return the writer."""
        return ContinuedWriter(self.log_dir, self.waits, self.adds, CSVContinuation(self).trainings)

    def continue_file(self, trains: bool) -> None:
        """Keep the file that is there.

        Args:
            trains: Whether the training begins: rows wait until it is known which come again. The
                rows of a run before it, such as a validation, are added.
        """
        self.waits = trains
        self.adds = not trains
        writer = csv_logger.writer(self)
        if trains and isinstance(writer, ContinuedWriter):
            writer.wait()


def _with_columns(content: str, columns: Sequence[str]) -> str:
    """Return the content of a CSV file with these columns."""
    output = io.StringIO(newline="")
    writer = csv.DictWriter(output, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(csv.DictReader(io.StringIO(content, newline="")))
    return output.getvalue()
