"""How CSVLogger begins its file, and where loggers keep their version, client and run.

A CSVLogger removes the file of the run that is being resumed: Lightning-AI/pytorch-lightning #19446
made it so, as rows with other columns cannot be added to a file. callbacks/loggers.py continues the
file.

On an upgrade: compare loggers/csv_logs.py of pytorch_lightning and of lightning_fabric: when the
writer is made, and which of its methods touch the file; and where loggers keep the version that
they were given. Compare loggers/mlflow.py: when the run is made, and that all points go to the
client's `log_batch`; and loggers/wandb.py: when `wandb.init` is called, and with which arguments.
EventFileWriter in tensorboard/summary/writer/event_file_writer.py: how it names its file.
"""

import sys
import time
from typing import Any

from fsspec import AbstractFileSystem
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment


class Writer(ExperimentWriter):
    """The writer of a CSVLogger's file; two of its steps can be overridden."""

    @property
    def files(self) -> AbstractFileSystem:
        """The file system in which the file is."""
        return self._fs

    def begin_file(self) -> None:
        """Make way for a new file: remove one that is there.

        It is called when the writer is made.
        """
        super()._check_log_dir_exists()

    def add_columns(self, columns: list[str]) -> None:
        """Write the file again with more columns; to be overridden."""
        raise NotImplementedError

    def _check_log_dir_exists(self) -> None:
        self.begin_file()

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self.add_columns(fieldnames)


class WriterLogger(CSVLogger):
    """A CSVLogger whose writer `make_writer` makes; a base before its own class."""

    def make_writer(self) -> Writer:
        """Return the writer; to be overridden."""
        raise NotImplementedError

    @property
    @rank_zero_experiment
    def experiment(self) -> Writer:
        """The writer, made when it is first used.

        `CSVLogger.finalize` asks whether it was made.
        """
        if self._experiment is None:
            self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = self.make_writer()
        return self._experiment


def writer(logger: CSVLogger | TensorBoardLogger) -> Any:
    """Return the writer of a CSVLogger or a TensorBoardLogger, None if it was not used yet."""
    return logger._experiment


def event_folders(logger: TensorBoardLogger) -> set[str]:
    """Return the folders of the files that a TensorBoardLogger writes when it is told to.

    `SummaryWriter.add_scalars` makes folders of their own.
    """
    writers = getattr(logger.experiment, "all_writers", None) or ()
    return {str(folder).rstrip("/") for folder in (logger.log_dir, *writers)}


def begin_last_file(logger: TensorBoardLogger, second: int) -> None:
    """Have a TensorBoardLogger write on in a file that comes after those that are there.

    Its writer was closed. TensorBoard reads the files of a folder in the order of their names,
    which begin with a time: by a clock that is behind, the next file would be the first one.

    Args:
        logger: The logger.
        second: The newest time that a name has, in seconds since the epoch.
    """
    names_files = sys.modules.get("tensorboard.summary.writer.event_file_writer")
    if names_files is None or time.time() >= second + 1:
        return
    clock = names_files.time
    names_files.time = _Clock(second + 1)
    try:
        logger.experiment._get_file_writer()
    finally:
        names_files.time = clock


class _Clock:
    """Stands for the module `time`, and shows a fixed time."""

    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        """Return the time, in seconds since the epoch."""
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class RunLogger(WandbLogger):
    """A WandbLogger that hands out a run that `take_run` has seen; a base before its own class."""

    def take_run(self, run: Any) -> None:
        """See the run before anything is logged to it; to be overridden.

        It is called whenever somebody asks for the run.
        """
        raise NotImplementedError

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run, made when it is first used."""
        run = super().experiment
        self.take_run(run)
        return run


def copies_tensorboard(logger: WandbLogger) -> bool:
    """Return whether the points come from TensorBoard's files, by `sync_tensorboard`."""
    return bool(logger._wandb_init.get("sync_tensorboard"))


def client(logger: MLFlowLogger) -> Any:
    """Return what a logger sends its points by."""
    return logger._mlflow_client


def tracking_uri(logger: MLFlowLogger) -> str:
    """Return the address or the ARN of a logger's server."""
    return logger._tracking_uri


def send_by(logger: MLFlowLogger, client: Any) -> None:
    """Have a logger send its points by another client."""
    logger._mlflow_client = client


def identity(logger: Any) -> Any:
    """Return the name of a logger, by which the interrupted run's logger is known.

    It is a query: to ask a MLFlowLogger for its `name` makes a run.
    """
    return logger._experiment_name if isinstance(logger, MLFlowLogger) else logger.name


def version(logger: Any) -> Any:
    """Return the version of a logger, which is the id of its run for MLflow and W&B.

    It is None if they have not made the run yet: to ask a MLFlowLogger makes it.
    """
    return logger._run_id if isinstance(logger, MLFlowLogger) else logger.version


def set_version_if_none(logger: Any, version: int | str) -> None:
    """Give a logger a version if it has none.

    By itself it would take the next free one, or a new run.
    """
    if isinstance(logger, MLFlowLogger):
        logger._run_id = logger._run_id or version
    elif isinstance(logger, WandbLogger):
        if logger.version is None:
            logger._id = logger._wandb_init["id"] = version
    elif getattr(logger, "_version", "") is None:
        logger._version = version
