"""Writes a file completely or not at all, or over anything; and JSON that every reader accepts."""

import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from sagemaker_lightning.contract.errors import UserError

IGNORED_SUFFIX = ".sagemaker-ignore"
"""SageMaker's uploader skips files with this ending.

AWS's XGBoost container uses this ending while it writes its checkpoints.
"""


@contextmanager
def atomic_write(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write, which becomes `path` when the block ends well.

    After an error, `path` is what it was before. After success, all of it is on the disk. The
    folder is created if it does not exist. Raises OSError if the file cannot be written.

    Args:
        path: The file.
        sync: Whether to wait until it is on the disk. Without that, a crash of the machine may lose
            it; a crash of the process does not.
    """
    with atomic_writes([path], sync) as (file,):
        yield file


@contextmanager
def atomic_writes(paths: Sequence[Path], sync: bool = True) -> Iterator[list[BinaryIO]]:
    """Yield a file to write for each path, as `atomic_write` does for one.

    They get their names one after another, in this order, once all of them are on the disk.
    """
    temporary: list[str] = []
    try:
        with ExitStack() as stack:
            files: list[BinaryIO] = []
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                # The temporary file is in the same folder, because a rename is atomic only within
                # one file system. Hosts may share the folder, so each uses a name of its own.
                descriptor, name = tempfile.mkstemp(
                    prefix=f"{path.name}.", suffix=IGNORED_SUFFIX, dir=path.parent
                )
                temporary.append(name)
                files.append(stack.enter_context(os.fdopen(descriptor, "wb")))
                os.fchmod(descriptor, 0o644)  # mkstemp sets 600, which is for secrets
            yield files
            for file in files:
                file.flush()
                if sync:
                    os.fsync(file.fileno())
        for name, path in zip(temporary, paths, strict=True):
            os.replace(name, path)
        for folder in dict.fromkeys(path.parent for path in paths) if sync else ():
            _sync_folder(folder)
    except BaseException:
        for name in temporary:
            Path(name).unlink(missing_ok=True)
        raise


def write_instead(path: Path, data: bytes) -> None:
    """Write a small file in the place of whatever is there, which is not followed.

    A job's program may have left anything there: a pipe would wait for a reader, a link would lead
    elsewhere. A folder gets another name; all else is removed. If the file's own folder is not a
    folder any more, it is made again in the same way. On a full disk, this needs no more room than
    what was there.

    Raises:
        FileExistsError: Another process has made the file at the same time.
        OSError: The file cannot be written.
    """
    if not path.parent.is_dir():
        _make_way(path.parent)
        path.parent.mkdir(exist_ok=True)
    _make_way(path)
    with path.open("xb") as file:
        file.write(data)


def _make_way(path: Path) -> None:
    """Free the name of a file or folder; raise OSError if that is not possible."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        path.rename(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))


def remove_leftovers(folder: Path, names: str) -> None:
    """Remove what processes that were killed while they wrote have left in a folder.

    Args:
        folder: The folder; nobody else may be writing to it.
        names: A pattern, as of glob, of the names that the files would have got.
    """
    for path in folder.glob(f"{names}.*{IGNORED_SUFFIX}"):
        with suppress(OSError):
            path.unlink()


def check_writable(folder: Path, what: str) -> None:
    """Create a folder if needed; raise UserError if it cannot be written to.

    Args:
        folder: The folder.
        what: What is to be written there, for the message.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{folder.absolute()}: {what} cannot be written there ({error.strerror}); expected a "
            "writable folder"
        ) from None


def json_text(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with null for NaN and infinities.

    JSON has no such numbers. `options` are those of json.dumps.
    """
    return json.dumps(_with_null_for_nonfinite(value), allow_nan=False, **options)


def _with_null_for_nonfinite(value: Any) -> Any:
    """Return a copy of `value` with None for each float that is NaN or infinite."""
    if isinstance(value, dict):
        return {key: _with_null_for_nonfinite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_null_for_nonfinite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
