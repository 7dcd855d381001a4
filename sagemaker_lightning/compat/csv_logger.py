"""How a CSVLogger begins its file.

It removes the file of the run that is being resumed: Lightning-AI/pytorch-lightning #19446 made it
so, as rows with other columns cannot be added to a file. callbacks/loggers/csv_file.py continues
the file.

On an upgrade: compare loggers/csv_logs.py of pytorch_lightning and of lightning_fabric: when the
writer is made, and which of its methods touch the file.
"""

from fsspec import AbstractFileSystem
from pytorch_lightning.loggers import CSVLogger
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
        return self._experiment  # type: ignore[return-value]  # `make_writer` has made it


def writer(logger: CSVLogger) -> ExperimentWriter | None:
    """Return the writer of a logger, None if it was not used yet."""
    return logger._experiment  # type: ignore[return-value]  # Lightning names its base there
