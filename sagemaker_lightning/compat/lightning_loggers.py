"""Where a logger keeps the version that it was given.

On an upgrade: see `version` in loggers/csv_logs.py and loggers/tensorboard.py of lightning_fabric.
"""

from typing import Any


def set_version_if_none(logger: Any, version: int | str) -> None:
    """Give a logger a version if it has none: by itself it would take the next free one."""
    if getattr(logger, "_version", "") is None:
        logger._version = version
