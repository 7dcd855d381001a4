"""Rows of numbers from files: .npy, memory-mapped, or Parquet; read as untrusted input."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.rows import partition

KINDS = {"float16", "float32", "float64"}
PIECE = 2**26  # bytes that are read at a time


@dataclass(frozen=True)
class Table:
    """The rows of some files, one file after another in the order of their names, as float32 [rows, columns].

    Args:
        folder: Where the files are: SageMaker's channel, or one file.
        files: Their names in it.
        arrays: Their rows, [n, columns] each.
        channel: What error messages call the folder.
    """

    folder: Path
    files: tuple[str, ...]
    arrays: tuple[np.ndarray, ...]
    channel: str

    @classmethod
    def read(cls, folder: Path, channel: str) -> "Table":
        """Open all .npy and .parquet files of a folder, or one file; UserError says which is wrong and why."""
        paths = [folder] if folder.is_file() else sorted(folder.rglob("*"))
        paths = [path for path in paths if path.suffix in (".npy", ".parquet") and path.is_file()]
        if not paths:
            raise UserError(
                f"{channel}: {folder} holds no .npy or .parquet file; allowed are both, of rows of numbers"
            )
        root = folder.parent if folder.is_file() else folder
        names = tuple(path.relative_to(root).as_posix() for path in paths)
        arrays = tuple(
            _open(path, f"{channel}: {name}") for path, name in zip(paths, names, strict=True)
        )
        for name, array in zip(names, arrays, strict=True):
            if array.shape[1] != arrays[0].shape[1]:
                raise UserError(
                    f"{channel}: {name} has {array.shape[1]} columns, {names[0]} has {arrays[0].shape[1]}; allowed are "
                    "files of equal width"
                )
        return cls(root, names, arrays, channel)

    def __len__(self) -> int:
        return sum(map(len, self.arrays))

    @property
    def columns(self) -> int:
        """Numbers in a row."""
        return self.arrays[0].shape[1]

    @cached_property
    def places(self) -> dict[str, range]:
        """The rows of each file."""
        return partition.files(
            {name: len(array) for name, array in zip(self.files, self.arrays, strict=True)}
        )

    def __getitem__(self, rows: range) -> np.ndarray:
        """Return rows as float32 [len(rows), columns], copied; UserError names the first that is not finite."""
        found = np.empty((len(rows), self.columns), dtype=np.float32)
        for name, array in zip(self.files, self.arrays, strict=True):
            place = self.places[name]
            first, last = max(place.start, rows.start), min(place.stop, rows.stop)
            if first < last:
                piece = found[first - rows.start : last - rows.start]
                # a float64 beyond float32 becomes infinite, and is named below
                with np.errstate(over="ignore"):
                    piece[:] = array[first - place.start : last - place.start]
                if not np.isfinite(piece).all():
                    row = (
                        int(np.flatnonzero(~np.isfinite(piece).all(axis=1))[0])
                        + first
                        - place.start
                    )
                    raise UserError(
                        f"{self.channel}: {name}, row {row} has a number that is not finite in float32; allowed are "
                        "finite ones"
                    )
        return found

    @cached_property
    def fingerprint(self) -> str:
        """What the rows are, as 16 hexadecimal digits: alike where names, kinds and numbers of all files are."""
        digest = hashlib.blake2b(digest_size=8)
        for name, array in zip(self.files, self.arrays, strict=True):
            digest.update(repr((name, array.shape, array.dtype.str)).encode())
            step = max(1, PIECE // max(1, array.shape[1] * array.itemsize))
            for first in range(0, len(array), step):
                digest.update(np.ascontiguousarray(array[first : first + step]))
        return digest.hexdigest()


def _open(path: Path, where: str) -> np.ndarray:
    """Return a file's rows, [n, columns]; those of .npy are not read yet."""
    try:
        found = (
            np.load(path, mmap_mode="r", allow_pickle=False)
            if path.suffix == ".npy"
            else _parquet(path)
        )
    except Exception as error:  # a damaged file raises nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{where} cannot be read: {reason}; copy it again") from None
    if found.ndim != 2 or found.dtype.name not in KINDS or 0 in found.shape:
        raise UserError(
            f"{where} is {found.dtype} {list(found.shape)}; allowed is [rows, columns] of {', '.join(sorted(KINDS))}, "
            "at least one of each"
        )
    return found


def _parquet(path: Path) -> np.ndarray:
    """Return a Parquet file's only column of lists, all of one length, or else its columns of numbers, side by side."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    lists = [column for column in table.columns if pyarrow.types.is_nested(column.type)]
    if any(column.null_count for column in table.columns):
        raise ValueError("it has rows that are null")
    if not lists:
        kinds = {str(column.type): column.type for column in table.columns}
        if len(kinds) != 1:
            raise ValueError(f"its columns are of several types: {', '.join(kinds)}")
        return np.column_stack([column.to_numpy() for column in table.columns])
    if len(lists) > 1 or len(table.columns) > 1:
        raise ValueError(
            f"it has {len(table.columns)} columns; allowed is one of lists, or all of numbers"
        )
    column = lists[0].combine_chunks()
    lengths = (
        set(column.value_lengths().to_pylist())
        if hasattr(column, "value_lengths")
        else {column.type.list_size}
    )
    if len(lengths) != 1:
        raise ValueError(
            f"its lists have {min(lengths)} to {max(lengths)} numbers; allowed is one length"
        )
    flat = column.flatten()
    if flat.null_count:
        raise ValueError("it has numbers that are null")
    return flat.to_numpy().reshape(len(column), *lengths)
