"""What shards are made of: a folder of images, or a Parquet table."""

import os
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sagemaker_lightning.contract.atomic_files import json_text
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.shards.index import MOST_FIELDS, checked_name

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
BEGINNINGS = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    **{b"P%d" % number: "ppm" for number in range(1, 7)},
}
"""The first bytes of images, and the names of their kinds."""
ROWS = 64  # read at once
LABELS = 2**16  # the same, of a column of labels

Sample = dict[str, bytes]


class Origin(ABC):
    """What shards are made of.

    Attributes:
        total: Number of samples.
        classes: The names of the classes, by number; () if they have no names.
        identity: What changes if the samples may have changed: plain values.
    """

    total: int
    classes: Sequence[str] = ()
    identity: list[Any]

    @abstractmethod
    def samples(self, first: int) -> Iterator[Sample]:
        """Yield the samples from number `first` on."""


def origin_at(path: Path, seed: int) -> Origin:
    """Return what is at a path.

    Args:
        path: A folder or a table.
        seed: Decides in which order a folder's images are. A table's rows stay in theirs.

    Raises UserError; OSError.
    """
    if path.is_dir():
        return ImageFolder(path, seed)
    if path.suffix == ".parquet" and path.is_file():
        return Table(path)
    raise UserError(
        f"{path}: found no folder and no .parquet file; give a folder with a folder of images for "
        "each class, or a table"
    )


class ImageFolder(Origin):
    """A folder with a folder of images for each class, which may have folders within.

    It leaves out folders whose names begin with a dot, and files whose names are not images'.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.left_out: Counter[str] = Counter()
        self.example = ""
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
        self._leave_out(entry for entry in entries if not entry.is_dir())
        folders = [entry for entry in entries if entry.is_dir()]
        self.classes = tuple(entry.name for entry in folders)
        found = {entry: list(self._images(entry)) for entry in folders}
        if not any(found.values()):
            raise UserError(
                f"{folder}: found no image in a folder of a class, expected CLASS/*.jpg or the "
                f"like; expected {', '.join(SUFFIXES)}"
            )
        for entry, images in found.items():
            _check_name(entry.name, f"{folder}: a class")
            if not images:
                raise UserError(f"{entry}: found no image in it; remove it, or put images there")
        self.files = [path for images in found.values() for path in images]
        self.files.sort()
        random.Random(seed).shuffle(self.files)
        self.total = len(self.files)
        # An image that was replaced may have the size of the one before.
        states = [(path, path.stat()) for path in self.files]
        self.identity = [
            [str(path.relative_to(folder)), state.st_size, state.st_mtime_ns]
            for path, state in states
        ]
        self._say_left_out()

    def _images(self, folder: Path) -> Iterator[Path]:
        """Yield the images below a class's folder; links to folders are followed."""
        for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
            here = os.path.realpath(parent)
            above = {os.path.realpath(each) for each in Path(parent).parents}
            if here in above:
                raise UserError(f"{parent}: found a link to a folder that it is in; remove it")
            folders[:] = [each for each in folders if not each.startswith(".")]
            paths = [Path(parent, name) for name in names]
            yield from (path for path in paths if path.suffix.lower() in SUFFIXES)
            self._leave_out(path for path in paths if path.suffix.lower() not in SUFFIXES)

    def _leave_out(self, paths: Iterator[Path]) -> None:
        for path in paths:
            self.left_out[path.suffix.lower()] += 1
            self.example = self.example or str(path)

    def _say_left_out(self) -> None:
        if not self.left_out:
            return
        kinds = [kind or "no suffix" for kind, _ in self.left_out.most_common(3)]
        text = (
            f"{self.left_out.total()} files are left out ({', '.join(kinds)}), such as "
            f"{self.example}: images are {', '.join(SUFFIXES)} in the folder of a class"
        )
        print(printable(text))

    def samples(self, first: int) -> Iterator[Sample]:
        """Yield each image with the number of its class, `cls`."""
        numbers = {name: str(number).encode() for number, name in enumerate(self.classes)}
        for path in self.files[first:]:
            if not path.is_file():
                raise UserError(f"{path}: found no file, expected an image; remove it")
            content = path.read_bytes()
            if not image_kind(content):
                found = "other bytes than an image's" if content else "an empty file"
                raise UserError(f"{path}: found {found}; remove it, or replace it by an image")
            suffix = path.suffix[1:].lower()
            field = {"jpeg": "jpg"}.get(suffix, suffix)
            yield {"cls": numbers[path.relative_to(self.folder).parts[0]], field: content}


def _raise(error: OSError) -> None:
    raise error


def image_kind(content: bytes) -> str:
    """Return the kind of an image, such as "png", by its first bytes; "" for other content."""
    return next((kind for start, kind in BEGINNINGS.items() if content.startswith(start)), "")


def _check_name(name: str, what: str) -> None:
    """Raise UserError if an index cannot have a name.

    Args:
        name: The name.
        what: What has it, for the message.
    """
    try:
        checked_name(name)
    except ValueError:
        raise UserError(
            f"{what} has the name {printable(name)[:40]!r}; expected 1 to 1,000 printable "
            "characters; rename it"
        ) from None


class Table(Origin):
    """A Parquet table: bytes are files, `label` is the class."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = self._open()
        state = path.stat()
        self.identity = [state.st_size, state.st_mtime_ns]
        self.total = int(file.metadata.num_rows)
        columns = file.schema_arrow.names
        if not self.total or not columns:
            raise UserError(
                f"{path}: found {self.total} rows of {len(columns)} columns, expected samples"
            )
        if len(columns) > MOST_FIELDS:
            raise UserError(
                f"{path}: found {len(columns)} columns, expected at most {MOST_FIELDS}; leave out "
                "those that the training does not need"
            )
        for column in columns:
            _check_name(column, f"{path}: a column")
            if "/" in column:
                raise UserError(f"{path}: found / in the name of the column {column}; rename it")
        names = [_field_of(column) for column in columns]
        if twice := [column for column in columns if names.count(_field_of(column)) > 1]:
            raise UserError(
                f"{path}: found the columns {' and '.join(twice[:2])}, which become one field; "
                "rename or remove one"
            )
        for column in columns:
            if _field_of(column) == "cls":
                self._check_labels(file, column)

    def _check_labels(self, file: Any, column: str) -> None:
        """Raise UserError for the first row whose class is not a whole number."""
        first = 0
        for rows in self._read(file, range(file.num_row_groups), [column]):
            for number, row in enumerate(rows, first):
                label = row[column]
                if type(label) is int or (isinstance(label, (str, bytes)) and _is_whole(label)):
                    continue
                found = "no value" if label is None else printable(repr(label))[:40]
                raise UserError(
                    f"{self.path}: row {number} has {found} in {column}, expected a whole number, "
                    "that of its class; correct it, or rename the column if it is not the class"
                )
            first += len(rows)

    def _open(self) -> Any:
        try:
            import pyarrow.parquet
        except ImportError:
            raise UserError(
                f"{self.path}: this Python has no pyarrow; install the extra `rows`, or give a "
                "folder"
            ) from None
        try:
            return pyarrow.parquet.ParquetFile(self.path)
        except Exception as error:  # pyarrow has errors of many classes for a damaged table
            raise UserError(
                f"{self.path}: found no Parquet table ({printable(str(error))[:200]}); make it "
                "again"
            ) from None

    def samples(self, first: int) -> Iterator[Sample]:
        """Yield a row's bytes as files, texts as they are, and other values as JSON."""
        begin = 0
        file = self._open()
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if begin + rows > first:
                place = begin
                for rows_read in self._read(file, [group]):
                    for row in rows_read:
                        if place >= first:
                            yield self._sample(row, place)
                        place += 1
            begin += rows

    def _read(
        self, file: Any, groups: Iterable[int], columns: list[str] | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of row groups, some at a time; those of some columns, or of all."""
        for group in groups:
            size = LABELS if columns else ROWS
            try:
                for batch in file.iter_batches(size, row_groups=[group], columns=columns):
                    yield batch.to_pylist()
            except Exception as error:  # as above; also a value that Python has no type for
                raise UserError(
                    f"{self.path}: row group {group} cannot be read "
                    f"({printable(str(error))[:300]}); make the table again, or leave out the "
                    "column"
                ) from None

    def _sample(self, row: dict[str, Any], number: int) -> Sample:
        sample: Sample = {}
        fields = {*map(_field_of, row)}
        for column, value in row.items():
            if value is None:
                continue
            if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
                value = value["bytes"]  # an image of Hugging Face's datasets
            field = _field_of(column)
            if isinstance(value, bytes):
                kind = image_kind(value)
                is_free = kind and kind not in fields and kind not in sample
                sample[kind if is_free else field] = value
                continue
            try:
                text = value if isinstance(value, str) else json_text(value, default=_plain)
            except TypeError:
                raise UserError(
                    f"{self.path}: row {number} has bytes within {column}; give each file a column"
                ) from None
            sample[field] = text.encode()
        if not sample:
            raise UserError(f"{self.path}: row {number} has no value; remove it")
        return sample


def _is_whole(label: str | bytes) -> bool:
    """Return whether a text is a whole number, as `int` reads it."""
    try:
        int(label)
    except ValueError:
        return False
    return True


def _field_of(column: str) -> str:
    """Return the name of the field that a column becomes, unless it has an image."""
    return "cls" if column == "label" else column


def _plain(value: Any) -> str:
    """Return a value that JSON does not have, such as a date, as text."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError
    return str(value)
