"""Locks between rehearsals of one machine, which the kernel releases when a process ends."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# In the folder that a rehearsal has for its jobs, locked as long as it runs.
FILE_NAME = "lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder while the block runs; other threads and processes wait for it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def hold(folder: Path) -> TextIO:
    """Show that the rehearsal of a folder runs, until the file that is returned is closed."""
    lock = (folder / FILE_NAME).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def alive(folder: Path) -> bool:
    """Return whether the rehearsal of a folder still runs."""
    try:
        with (folder / FILE_NAME).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    # BlockingIOError: it runs. PermissionError: it is another user's.
    except (BlockingIOError, PermissionError):
        return True
    return False
