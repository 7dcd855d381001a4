"""What a training found at its start, for one that is killed before its first checkpoint.

The next run starts over. With this, it logs to the same files, and its ModelCheckpoints write
their files again, as after an interruption with a checkpoint. Without it, there would be a
`version_1` and a `-v1` that a run left alone does not have.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.contract.atomic_files import write_instead

NAME = "first-start.json"
"""The file, in the folder of the checkpoints. The first checkpoint takes its place."""
MAX_BYTES = 1 << 24
"""Bytes that are read of it, at most: it is input."""


class FirstStart(NamedTuple):
    """What a training found at its start."""

    loggers: Sequence[Mapping[str, Any]]
    """What `loggers.states` returned."""
    model_files: Mapping[str, Sequence[str]] | None
    """What `user_checkpoints.file_names` returned; None before the hooks that begin training."""


def write(folder: Path, start: FirstStart) -> None:
    """Write it. A disk that is full costs no more than these names."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_instead(folder / NAME, json.dumps(start._asdict()).encode())


def read(folder: Path) -> FirstStart | None:
    """Return what was written; None if nothing was, or it cannot be read."""
    if not files(folder):  # a pipe would be waited for
        return None
    try:
        with (folder / NAME).open("rb") as file:
            written = json.loads(file.read(MAX_BYTES))
        names = written["model_files"]
        model_files = (
            names
            if names is None
            else {
                key: [name for name in names_of if isinstance(name, str)]
                for key, names_of in dict(names).items()
            }
        )
        return FirstStart(loggers.well_formed(written["loggers"]), model_files)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def now() -> float:
    """Return the time of files that are written now, in seconds since 1970."""
    return time.time()


def has_written_since(folder: Path, path: Any, until: float) -> bool:
    """Return whether a file was written after a training's start, and before a time.

    Args:
        folder: The folder that has what the start found.
        path: The file; what is not a file was not written.
        until: The time, in seconds since 1970.
    """
    try:
        return (folder / NAME).stat().st_mtime < Path(path).stat().st_mtime < until
    except (OSError, TypeError, ValueError):
        return False


def forget(folder: Path) -> None:
    """Remove it: there is a checkpoint."""
    with suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)


def files(folder: Path) -> list[Path]:
    """Return its file, if there is one."""
    return [folder / NAME] if (folder / NAME).is_file() else []
