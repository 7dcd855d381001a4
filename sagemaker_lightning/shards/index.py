"""The index of a folder of shards: where each sample is, and its checksum.

A shard is a tar file as WebDataset has it: the files of a sample follow one another and have one
name up to its first dot; what follows is the field (`7.cls`, `7.jpg`). One index describes all
shards of a folder. Its first line is JSON; the rows of all samples follow, one table for all
shards. It is read as untrusted input: nothing in it leads outside of the shards.
"""

import bisect
import functools
import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sagemaker_lightning.contract.atomic_files import atomic_write, json_text
from sagemaker_lightning.contract.errors import UserError, printable

NAME = "shards.index"
"""The name of a folder's index."""
FORMAT = "sagemaker-lightning shards 1"
LONGEST_HEADER = 2**26  # bytes: 500,000 shards
MOST_FIELDS = 32
LARGEST_SHARD = 2**43  # bytes; S3's objects have 5 TB at most
ABSENT = -1
"""The size of a field that a sample does not have."""


@dataclass(frozen=True)
class Shard:
    """One shard."""

    name: str
    bytes: int
    samples: int


class Place(NamedTuple):
    """Where a sample is: bytes `start` to `stop` of a shard, by its number."""

    shard: int
    start: int
    stop: int
    fields: list[tuple[str, int, int]]
    """Each of its fields: the name, and where it begins and ends after `start`."""
    crc: int

    def contents(self, data: bytes) -> dict[str, bytes] | None:
        """Return the fields in the sample's bytes; None if these are damaged."""
        found = {field: data[begin:end] for field, begin, end in self.fields}
        return found if checksum(found.values()) == self.crc else None


class Index:
    """The index of a folder of shards.

    Attributes:
        shards: The shards, in the order in which samples are numbered.
        fields: The names of a sample's fields, sorted.
        classes: The names of the classes, if the shards were made of a folder of them.
        rows: Structured [samples]: `offset` int64 [fields] and `size` int32 [fields], both in bytes
            of the shard; `crc` uint32, CRC-32 of the present fields' bytes, one after another.
        first: int64 [shards + 1], the number of each shard's first sample.
        identity: A number from 0 to 2**60 - 1 that tells it from those of other samples.
    """

    def __init__(
        self,
        shards: tuple[Shard, ...],
        fields: tuple[str, ...],
        classes: tuple[str, ...],
        rows: np.ndarray,
        identity: int,
    ) -> None:
        self.shards = shards
        self.fields = fields
        self.classes = classes
        self.rows = rows
        self.first = np.cumsum([0, *(shard.samples for shard in shards)], dtype=np.int64)
        self.identity = identity
        self._first = self.first.tolist()
        # One call of struct takes a tenth of the time that numpy takes for a row's three parts.
        self._row = struct.Struct(f"<{len(fields)}q{len(fields)}iI")
        self._bytes = rows.view(np.uint8).data

    def __len__(self) -> int:
        return int(self._first[-1])

    def place(self, sample: int) -> Place:
        """Return where a sample is."""
        count = len(self.fields)
        row = self._row.unpack_from(self._bytes, sample * self._row.size)
        present = [
            (field, offset, offset + size)
            for field, offset, size in zip(self.fields, row, row[count:], strict=False)
            if size != ABSENT
        ]
        start = min([begin for _, begin, _ in present])
        stop = max([end for _, _, end in present])
        fields = [(field, begin - start, end - start) for field, begin, end in present]
        shard = bisect.bisect_right(self._first, sample) - 1
        return Place(shard, start, stop, fields, row[-1])


def row_type(fields: int) -> np.dtype:
    """Return the type of a sample's row."""
    return np.dtype([("offset", "<i8", (fields,)), ("size", "<i4", (fields,)), ("crc", "<u4")])


def digest(content: bytes) -> str:
    """Return a hash of an index's bytes, as text."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def checksum(contents: Iterable[bytes]) -> int:
    """Return the CRC-32 of contents, one after another."""
    value = 0
    for content in contents:
        value = zlib.crc32(content, value)
    return value


def write(
    path: Path,
    shards: Sequence[Shard],
    fields: Sequence[str],
    classes: Sequence[str],
    tables: Iterable[bytes],
) -> None:
    """Write an index.

    Args:
        path: The file.
        shards: The shards.
        fields: The names of the fields, sorted.
        classes: The names of the classes; () if there are none.
        tables: The rows of each shard, as bytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    tables = list(tables)
    for table in tables:
        digest.update(table)
    header = {
        "format": FORMAT,
        "fields": list(fields),
        "classes": list(classes),
        "blake2b": digest.hexdigest(),
        "shards": [[shard.name, shard.bytes, shard.samples] for shard in shards],
    }
    with atomic_write(path) as file:
        file.write(json_text(header).encode() + b"\n")
        for table in tables:
            file.write(table)


@functools.lru_cache(maxsize=8)
def known(path: str, identity: int) -> Index:
    """Return the index in a file that was read before, by this process or by another one.

    It is kept outside of datasets, so that these stay small: data workers get copies of them.

    Raises UserError if it is another one now.
    """
    index = read(Path(path))
    if index.identity != identity:
        raise UserError(f"{path}: found another index than before; do not change a channel in use")
    return index


def read(path: Path, name: str = "") -> Index:
    """Return the index in a file; the rows stay there until they are needed.

    Args:
        path: The file.
        name: What messages call it, if the file is a copy.

    Raises UserError if it is damaged, or leads outside of its shards; FileNotFoundError.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{name or path}: found no index of shards ({printable(str(error))[:200]}); make it "
            "again with `python -m sagemaker_lightning.shards index`"
        ) from None


def _read(path: Path, file: BinaryIO) -> Index:
    line = file.readline(LONGEST_HEADER)
    if not line.endswith(b"\n") or not line.startswith(b'{"format": "' + FORMAT.encode()):
        raise ValueError("its first line is another one")
    header = json.loads(line)
    fields = tuple(checked_name(field) for field in header["fields"])
    classes = tuple(checked_name(name) for name in header["classes"])
    if not 0 < len(fields) <= MOST_FIELDS or len(set(fields)) != len(fields):
        raise ValueError(f"it has {len(fields)} fields")
    shards = tuple(_shard(*entry) for entry in header["shards"])
    if len({shard.name for shard in shards}) != len(shards) or not shards:
        raise ValueError("two shards have one name, or there is none")
    samples = sum(shard.samples for shard in shards)
    dtype = row_type(len(fields))
    size = path.stat().st_size - len(line)
    if samples * dtype.itemsize != size:
        raise ValueError(
            f"it has {size} bytes of rows, and names {samples} samples of {dtype.itemsize}"
        )
    rows = np.asarray(np.memmap(path, dtype, mode="r", offset=len(line), shape=(samples,)))
    checksum = hashlib.blake2b(rows, digest_size=16)  # type: ignore[arg-type]  # it is a buffer
    if checksum.hexdigest() != header["blake2b"]:
        raise ValueError("its checksum does not match")
    # `shards index` makes an index again without the names of the classes, of the same samples.
    of_samples = json_text({**header, "classes": []}).encode()
    number = hashlib.blake2b(of_samples, digest_size=8).digest()
    index = Index(shards, fields, classes, rows, int.from_bytes(number, "little") >> 4)
    for shard, begin, end in zip(shards, index.first, index.first[1:], strict=False):
        _check_rows(shard, rows[begin:end])
    return index


def checked_name(value: Any) -> str:
    """Return the name of a class, a field or a shard; ValueError if an index cannot have it."""
    if not isinstance(value, str) or not 0 < len(value) <= 1000 or not value.isprintable():
        raise ValueError(f"a name is {str(value)[:40]!r}")
    return value


def _shard(name: Any, size: Any, samples: Any) -> Shard:
    if name in (".", "..") or "/" in checked_name(name):
        raise ValueError(f"a shard is {name!r}, which is outside of the folder")
    for number in (size, samples):
        if type(number) is not int or not 0 < number <= LARGEST_SHARD:
            raise ValueError(f"{name} has {size} bytes and {samples} samples")
    return Shard(name, size, samples)


def _check_rows(shard: Shard, rows: np.ndarray) -> None:
    sizes = rows["size"].astype(np.int64)
    absent = sizes == ABSENT
    offsets = np.where(absent, 0, rows["offset"])
    ends = offsets + np.maximum(sizes, 0)
    wrong = (sizes < ABSENT) | (offsets < 0) | (offsets > shard.bytes) | (ends > shard.bytes)
    if wrong.any() or absent.all(axis=1).any():
        raise ValueError(f"a sample is outside of {shard.name}, or has no field")


def table(
    samples: Sequence[tuple[Mapping[str, tuple[int, int]], int]], fields: Sequence[str]
) -> bytes:
    """Return the rows of a shard's samples.

    Args:
        samples: For each sample, the offset and the size of each field, and the checksum.
        fields: The names of the fields, sorted.
    """
    rows = np.zeros(len(samples), row_type(len(fields)))
    rows["size"] = ABSENT
    for row, (places, crc) in zip(rows, samples, strict=True):
        row["crc"] = crc
        for number, field in enumerate(fields):
            if field in places:
                row["offset"][number], row["size"][number] = places[field]
    return rows.tobytes()
