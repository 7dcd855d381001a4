"""Safe access to the folders of a job, where its program may have put anything.

There may be links, pipes, devices, and names that no store takes. Opening a path follows its links,
and somebody may change them between a check and the opening. So each part of a name is opened by
itself, inside the folder that was opened before, and never through a link.
"""

import errno
import io
import os
import posixpath
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# O_NONBLOCK: opening a pipe would otherwise wait for its other end.
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
# The largest number of links that lead to one another.
MAX_LINKS = 8
# Bytes of a name: S3 takes no longer key.
MAX_NAME_BYTES = 1024
NO_KEY_REASON = "S3 takes no such name"


class Steady(io.FileIO):
    """A file to read that raises an error if it has become shorter.

    An upload would wait for minutes for the missing rest.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.size = os.fstat(descriptor).st_size

    def read(self, size: int = -1) -> bytes:
        """Read bytes; OSError if the file has become shorter since it was opened."""
        data = super().read(size)
        if not data and size and self.tell() < self.size:
            raise OSError(errno.EIO, "the file has become shorter")
        return data


@dataclass(frozen=True)
class Folder:
    """A folder that a job's program can write to.

    Attributes:
        root: A folder that only the rehearsal can replace.
        below: The folder's name below `root`; the program may have put something else there.
    """

    root: Path
    below: str = ""

    def walk(
        self, failed: Callable[[str, str], None] = lambda *_: None
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the name and the state of everything in the folder.

        Links are not followed. Each folder comes before its content. `failed` gets the name of what
        cannot be looked at, and the reason.
        """
        waiting = [""]
        while waiting:
            inner = waiting.pop()
            try:
                entries = self._content(inner)
            except FileNotFoundError:
                continue
            except OSError as error:
                failed(inner or self.below, error.strerror)
                continue
            for name, state in entries:
                if not _is_key(name):
                    failed(ascii(name)[:100], NO_KEY_REASON)
                    continue
                yield name, state
                if stat.S_ISDIR(state.st_mode):
                    waiting.append(name)

    def open(self, name: str) -> Steady:
        """Open a regular file for reading, or one that a link in this folder leads to.

        Raises OSError for anything else.
        """
        for _ in range(MAX_LINKS):
            with self._entered(posixpath.dirname(name)) as folder:
                last = posixpath.basename(name)
                state = os.stat(last, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISLNK(state.st_mode):
                    return _open_regular(last, folder, state)
            name = self.link(name)[1]
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)

    def link(self, name: str) -> tuple[str, str]:
        """Return a link's text, and the name in this folder that it stands for.

        Raises OSError if the link leads out of the folder.
        """
        with self._entered(posixpath.dirname(name)) as folder:
            target = os.readlink(posixpath.basename(name), dir_fd=folder)
        above = PurePosixPath(name).parts[:-1]
        parts = PurePosixPath(target).parts
        up = len(list(takewhile("..".__eq__, parts)))
        # A `..` after a name may lead anywhere, because the name may be that of a link.
        if target.startswith("/") or up > len(above) or ".." in parts[up:]:
            raise OSError(errno.EXDEV, "the link leads out of the folder", name)
        return target, str(PurePosixPath(*above[: len(above) - up], *parts[up:]))

    def touch(self, name: str) -> None:
        """Make an empty file, or set the time of what is there; a link is not followed."""
        with self._entered(posixpath.dirname(name)) as folder:
            last = posixpath.basename(name)
            try:
                os.close(os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder))
            except FileExistsError:
                os.utime(last, dir_fd=folder, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        """Remove a file or a link."""
        with self._entered(posixpath.dirname(name)) as folder:
            os.unlink(posixpath.basename(name), dir_fd=folder)

    @contextmanager
    def _entered(self, inner: str) -> Iterator[int]:
        """Yield the descriptor of a folder below this one."""
        folder = os.open(self.root, FOLDER_FLAGS)
        try:
            for part in PurePosixPath(self.below, inner).parts:
                if part in ("/", ".."):
                    raise OSError(errno.EXDEV, "the name leads out of the folder", inner)
                folder, above = os.open(part, FOLDER_FLAGS, dir_fd=folder), folder
                os.close(above)
            yield folder
        finally:
            os.close(folder)

    def _content(self, inner: str) -> list[tuple[str, os.stat_result]]:
        """Return the names and states of the content of one folder, sorted."""
        entries_found = []
        with self._entered(inner) as folder, os.scandir(folder) as entries:
            for entry in entries:
                # The entry is gone in the meantime.
                with suppress(FileNotFoundError):
                    entries_found.append(
                        (posixpath.join(inner, entry.name), entry.stat(follow_symlinks=False))
                    )
        return sorted(entries_found)


def copy(source: Path, target: Path) -> None:
    """Copy folders and regular files, however deep, into an existing folder."""
    folder = Folder(source)
    for name, state in folder.walk():
        if stat.S_ISDIR(state.st_mode):
            (target / name).mkdir(exist_ok=True)
        elif stat.S_ISREG(state.st_mode):
            with folder.open(name) as file, (target / name).open("xb") as target_file:
                shutil.copyfileobj(file, target_file)


def remove(folder: Path) -> None:
    """Remove a folder, as far as this user may; links are not followed.

    rm does it, because a tree may be deeper than Python's stack.
    """
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _open_regular(name: str, folder: int, state: os.stat_result) -> Steady:
    """Open a regular file.

    `state` is that before the opening: merely opening a device may have an effect.
    """
    _check_regular(state, name)
    descriptor = os.open(name, FILE_FLAGS, dir_fd=folder)
    try:
        # Somebody may have changed it since.
        _check_regular(os.fstat(descriptor), name)
    except OSError:
        os.close(descriptor)
        raise
    return Steady(descriptor)


def _check_regular(state: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", name)


def _is_key(name: str) -> bool:
    """Return whether S3 takes a key that ends with this name."""
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
