"""The parts of a job as SageMaker leaves them: model.tar.gz, local or on S3, or a folder; read as untrusted input.

Nothing is unpacked: files are read where they are, by their names without folders, and no link is followed.
"""

import os
import stat
import sys
import tarfile
import zlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

# of an archive between two files: tarfile reads long names and the like into memory
HEADER_BYTES = 2**20
FILES = 100_000  # of a MODEL


class Model:
    """The files of one MODEL."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path

    def files(self) -> Iterator[tuple[str, BinaryIO]]:
        """Yield each file's name and content, which is to be read before the next one; ValueError if it is unsafe."""
        try:
            for number, (name, file) in enumerate(
                self._folder() if self.path.is_dir() else self._archive()
            ):
                if number == FILES:
                    raise ValueError(
                        f"{self.name} has more than {FILES} files; give the files of the parts alone"
                    )
                yield name, file
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"{self.name} is damaged or no archive ({reason}); copy it again"
            ) from None

    def _folder(self) -> Iterator[tuple[str, BinaryIO]]:
        for folder, _, names in os.walk(self.path):
            for name in sorted(names):
                path = Path(folder, name)
                if not stat.S_ISREG(path.lstat().st_mode):
                    self._check_other(name)
                    continue
                # A link or a pipe that took its place since then is not followed or waited for.
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with os.fdopen(descriptor, "rb") as file:
                    yield name, file

    def _archive(self) -> Iterator[tuple[str, BinaryIO]]:
        with self.path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with _Archive.open(self.path, "r|gz" if zipped else "r|") as archive:
            while member := archive.next():
                path = Path(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(
                        f"{self.name} has a file {member.name!r}, which is outside of it; copy it again"
                    )
                if member.isreg() and not member.issparse():
                    yield path.name, archive.extractfile(member)
                elif not member.isdir():
                    self._check_other(path.name)
                # tarfile keeps all, for a random access that a stream has not
                archive.members.clear()

    def _check_other(self, name: str) -> None:
        """Raise ValueError for a link, device or pipe in the place of a part's file; others are nobody's business."""
        if fnmatchcase(name, "manifest-*.json") or name.endswith(".npy"):
            raise ValueError(
                f"{self.name}: {name} is a link or no regular file; give the file itself"
            )


class _Archive(tarfile.TarFile):
    """A stream whose headers are of bounded length: a name of gigabytes takes kilobytes when it is packed."""

    def next(self) -> tarfile.TarInfo | None:
        """Return the next file, None at the end; TarError if what is there is none."""
        if not isinstance(self.fileobj, _Metered):
            self.fileobj = _Metered(self.fileobj)
        self.fileobj.left = HEADER_BYTES
        try:
            return super().next()
        except (tarfile.TarError, EOFError, zlib.error, OSError):
            raise
        except Exception as error:  # a damaged header raises nearly anything
            raise tarfile.ReadError(str(error) or type(error).__name__) from None
        finally:
            self.fileobj.left = 2**63  # of a file's content


class _Metered:
    """A file of which no more than `left` bytes are read."""

    def __init__(self, file: Any) -> None:
        self.file, self.left = file, 0

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError("its headers are too long")
        return self.file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def opened(name: str, folder: Path) -> Model:
    """Return a MODEL, fetched into `folder` if it is on S3."""
    if not name.startswith("s3://"):
        try:
            found = Path(name).is_dir() or Path(name).is_file()
        except (OSError, ValueError):  # too long a name, or NUL in it
            found = False
        if not found:
            raise ValueError(
                f"{name}: found no such file; allowed are model.tar.gz, s3://BUCKET/KEY and a folder"
            )
        return Model(name, Path(name))
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise ValueError(
            f"{name}: {sys.executable} has no boto3; pip install boto3, or give a file"
        ) from None

    bucket, _, key = name.removeprefix("s3://").partition("/")
    path = folder / f"{len(list(folder.iterdir()))}.tar.gz"
    try:
        region = os.environ.get("AWS_REGION") or boto3.Session().region_name or "us-east-1"
        patience = Config(connect_timeout=5, retries={"mode": "standard"})
        boto3.client("s3", region_name=region, config=patience).download_file(
            bucket, key, str(path)
        )
    except (BotoCoreError, ClientError) as error:
        raise ValueError(f"{name} could not be fetched: {error}") from None
    return Model(name, path)
