"""Which files a TensorBoardLogger writes, and how they are named.

On an upgrade: compare loggers/tensorboard.py of lightning_fabric. EventFileWriter in
tensorboard/summary/writer/event_file_writer.py: how it names its file.
"""

import sys
import time
from typing import Any

from pytorch_lightning.loggers import TensorBoardLogger


def writer(logger: TensorBoardLogger) -> Any:
    """Return the writer of a logger, None if it was not used yet."""
    return logger._experiment


def event_folders(logger: TensorBoardLogger) -> set[str]:
    """Return the folders of the files that a TensorBoardLogger writes when it is asked to.

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
    names_files: Any = sys.modules.get("tensorboard.summary.writer.event_file_writer")
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
