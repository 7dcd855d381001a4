"""Keeps two trainings from writing to one folder of checkpoints at the same time.

The lock is flock(2) on the folder itself. It needs no file, which SageMaker would copy to S3, and
every process that has the folder sees it, in whatever container. The kernel releases it when the
process ends, however it ends. Where the file system has no such locks (NFS has none for folders),
nothing is locked.
"""

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

_held: dict[Path, int] = {}
"""The descriptors of the folders that this process has locked."""


def lock(folder: Path, patience: float) -> str:
    """Lock a folder for this process; return who has it if another process does, else "".

    A process that has the lock already keeps it.

    Args:
        folder: The folder; it exists.
        patience: Seconds to wait for another process.
    """
    folder = folder.resolve()
    if folder in _held and os.path.samestat(os.fstat(_held[folder]), folder.stat()):
        return ""
    unlock(folder)  # of a folder that somebody has removed since
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_locked = error.errno == errno.EWOULDBLOCK  # else the file system has no such locks
            if is_locked and time.monotonic() - began < patience:
                time.sleep(0.1)
                continue
            inode = os.fstat(descriptor).st_ino
            os.close(descriptor)
            return _owner(inode) if is_locked else ""
        _held[folder] = descriptor
        return ""


def unlock(folder: Path) -> None:
    """Release the lock of a folder, if this process has it."""
    if (descriptor := _held.pop(folder.resolve(), None)) is not None:
        os.close(descriptor)


def _owner(inode: int) -> str:
    """Return the process that has locked an inode, as far as this container sees it."""
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # "1: FLOCK  ADVISORY  WRITE 4242 fe:01:131 0 EOF", proc_locks(5)
            if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}") and int(fields[4]) > 0:
                return f"process {fields[4]}"
    return "another process"


def _forget() -> None:
    """Give up the locks in a child process, such as a data worker.

    The lock lasts as long as any copy of its descriptor is open, and a worker may live longer than
    the training.
    """
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
