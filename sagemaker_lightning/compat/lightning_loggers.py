"""Where a logger keeps the version that it was given.

On an upgrade: see `version` in loggers/csv_logs.py and loggers/tensorboard.py of lightning_fabric.
"""

from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import OnExceptionCheckpoint

from sagemaker_lightning.compat.lightning_trainer import callbacks_of


def set_version_if_none(logger: Any, version: int | str) -> None:
    """Give a logger a version if it has none: by itself it would take the next free one."""
    if getattr(logger, "_version", "") is None:
        logger._version = version


def forget_unused_versions(trainer: Trainer) -> None:
    """Have loggers choose their version once more if Lightning has asked them for it too early.

    With an OnExceptionCheckpoint, it looks for checkpoints in the loggers' folders before it calls
    any hook (`_parse_ckpt_path` in trainer/connectors/checkpoint_connector.py), and a logger takes
    the next free version when it is asked first.
    """
    if not any(isinstance(each, OnExceptionCheckpoint) for each in callbacks_of(trainer)):
        return
    loggers: list[Any] = trainer.loggers
    for logger in loggers:
        chooses = hasattr(logger, "_get_next_version") and hasattr(logger, "_version")
        is_unused = chooses and getattr(logger, "_experiment", logger) is None
        if is_unused and logger._version == logger._get_next_version():
            logger._version = None
