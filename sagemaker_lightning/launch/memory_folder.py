"""A folder in memory that lasts as long as a job: for copies of its state, to continue from.

What is in it is resume/memory_copies.py's. Each job's folder has a name of its own, and the process
that has made it locks it (flock(2)) until it ends, however it ends. So the next one that starts can
tell the folders that killed ones have left.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sagemaker_lightning.contract.log import log

ROOT = Path("/dev/shm")
PREFIX = "sagemaker-lightning-"


@contextmanager
def memory_folder() -> Iterator[Path | None]:
    """Yield a new folder, which only this user can enter, and remove it at the end.

    Yield None, and print a line, if there can be none.
    """
    remove_left_ones()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=ROOT))
    except OSError as error:
        log.warning(
            f"no copies of the state are kept in memory: {ROOT}: {error.strerror}; ranks that die "
            "continue from a checkpoint"
        )
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_left_ones() -> None:
    """Remove the folders of this user that nobody holds any more."""
    for folder in ROOT.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
