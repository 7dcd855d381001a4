"""Reads the parts of a job from where SageMaker left them, as untrusted input.

A MODEL is a model.tar.gz, local or on S3, or a folder. Nothing is unpacked: files are read in place
and known by their names without folders; links are not followed.
"""

import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from sagemaker_lightning.contract.s3_address import SCHEME
from sagemaker_lightning.rows.downloads import fetch

# Bytes of an archive between two files: tarfile reads long names and other headers into memory.
MAX_HEADER_BYTES = 2**20
UNLIMITED = 2**63
# The largest number of files in one MODEL.
MAX_FILES = 100_000


class Model:
    """The files of one MODEL: a local archive or folder."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    def files(self) -> Iterator[tuple[str, BinaryIO]]:
        """Yield the name and the content of each file.

        The content must be read before the next file is taken. Raises ValueError if the MODEL is
        damaged or unsafe to read.
        """
        try:
            for number, (name, file) in enumerate(
                self._files_of_folder() if self.path.is_dir() else self._files_of_archive()
            ):
                if number == MAX_FILES:
                    raise ValueError(
                        f"{self.name} has more than {MAX_FILES} files; give the files of the parts "
                        "alone"
                    )
                yield name, file
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"{self.name} is damaged or no archive ({reason}); copy it again"
            ) from None

    def _files_of_folder(self) -> Iterator[tuple[str, BinaryIO]]:
        for folder, _, names in os.walk(self.path):
            for name in sorted(names):
                path = Path(folder, name)
                if not stat.S_ISREG(path.lstat().st_mode):
                    self._refuse_special_file(name)
                    continue
                # The path may have become a link or a pipe since the check: do not follow it, do
                # not block.
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with os.fdopen(descriptor, "rb") as file:
                    yield name, file

    def _files_of_archive(self) -> Iterator[tuple[str, BinaryIO]]:
        with self.path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with _expecting_damage():
            archive = _LimitedArchive.open(self.path, "r|gz" if zipped else "r|")
        with archive:
            while member := archive.next():
                path = Path(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(
                        f"{self.name} has a file {member.name!r}, which is outside of it; copy it "
                        "again"
                    )
                if member.isreg() and not member.issparse():
                    content: Any = archive.extractfile(member)
                    yield path.name, content
                elif not member.isdir():
                    self._refuse_special_file(path.name)
                # tarfile keeps all members for random access, which a stream does not have.
                archive.members.clear()  # type: ignore[attr-defined]  # the stubs lack it

    def _refuse_special_file(self, name: str) -> None:
        """Raise ValueError for a link, device or pipe that is named like a file of a part.

        Special files with other names are ignored.
        """
        if fnmatchcase(name, "manifest-*.json") or name.endswith(".npy"):
            raise ValueError(
                f"{self.name}: {name} is a link or no regular file; give the file itself"
            )


@contextmanager
def _expecting_damage() -> Iterator[None]:
    """Raise ReadError in place of what tarfile's own code raises for a damaged header."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, OSError):
        raise
    # That can be nearly any exception.
    except Exception as error:
        raise tarfile.ReadError(str(error) or type(error).__name__) from None


class _LimitedArchive(tarfile.TarFile):
    """An archive that is read as a stream, with headers of bounded length.

    A name of gigabytes takes only kilobytes in a compressed archive.
    """

    def next(self) -> tarfile.TarInfo | None:
        """Return the next file, None at the end; TarError for a damaged or long header."""
        if not isinstance(self.fileobj, _LimitedFile):
            self.fileobj = _LimitedFile(self.fileobj)
        self.fileobj.limit(MAX_HEADER_BYTES)
        try:
            with _expecting_damage():
                return super().next()
        finally:
            self.fileobj.limit(UNLIMITED)  # for the content of a file


class _LimitedFile:
    """A file that refuses to read more than `left` bytes."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.left = 0

    def limit(self, size: int) -> None:
        """Let `size` more bytes be read."""
        self.left = size

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; tarfile.ReadError if that exceeds what is left."""
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError("its headers are too long")
        content: bytes = self.file.read(size)
        return content

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def opened(name: str, folder: Path) -> Model:
    """Return the MODEL of a path or an s3:// address.

    What is on S3 is downloaded into `folder`, or is there already.

    Raises ValueError if there is no such file, or if it cannot be downloaded.
    """
    if not name.startswith(SCHEME):
        try:
            exists = Path(name).is_dir() or Path(name).is_file()
        # The name is too long, or has NUL in it.
        except (OSError, ValueError):
            exists = False
        if not exists:
            raise ValueError(
                f"{name}: found no such file; expected model.tar.gz, s3://BUCKET/KEY and a folder"
            )
        return Model(name, Path(name))
    return Model(name, fetch(name, folder))
