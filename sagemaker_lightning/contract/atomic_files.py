"""Files that are whole or absent, whether a folder can be written to, and JSON that every reader takes."""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sagemaker_lightning.contract.errors import UserError

IGNORED = ".sagemaker-ignore"
"""Files of this ending SageMaker's uploader leaves alone (AWS's XGBoost container writes its checkpoints so)."""


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write; `path` is then all of it, on the disk, or what it was before. OSError says why not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside it: a rename is atomic within a file system only. Hosts may share the folder: each has a name of its own.
    descriptor, aside = tempfile.mkstemp(prefix=f"{path.name}.", suffix=IGNORED, dir=path.parent)
    try:
        os.fchmod(descriptor, 0o644)  # mkstemp's 600 is for secrets
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _sync(path.parent)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def check_writable(folder: Path, what: str) -> None:
    """Create `folder` if need be; UserError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{folder.absolute()}: {what} cannot be written there ({error.strerror}); allowed is a writable folder"
        ) from None


def json_text(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with null for NaN and infinities, which JSON lacks; `options` are those of json.dumps."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
