"""Tables of numbers in .npy or Parquet files, read as untrusted input.

.npy files are memory-mapped.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.rows import partition

DTYPES = {"float16", "float32", "float64"}
# Bytes that are read at a time.
PIECE_BYTES = 2**26


@dataclass(frozen=True)
class Table:
    """The rows of some files as one table, float32 [rows, columns].

    Args:
        folder: Where the files are: SageMaker's channel, or the folder of a single file.
        arrays: The rows of each file, [n, columns], by its path below `folder`. The files follow
            one another in the order of their names.
        channel: What error messages call the folder.
    """

    folder: Path
    arrays: Mapping[str, np.ndarray]
    channel: str

    @classmethod
    def read(cls, folder: Path, channel: str) -> "Table":
        """Open all .npy and .parquet files below a folder, or one file.

        Raises UserError that names the file which is wrong, and why.
        """
        paths = [folder] if folder.is_file() else sorted(folder.rglob("*"))
        paths = [path for path in paths if path.suffix in (".npy", ".parquet") and path.is_file()]
        if not paths:
            raise UserError(
                f"{channel}: {folder} holds no .npy or .parquet file; expected both, of rows of "
                "numbers"
            )
        root = folder.parent if folder.is_file() else folder
        arrays = {}
        for path in paths:
            name = path.relative_to(root).as_posix()
            arrays[name] = _open_rows(path, f"{channel}: {name}")
        (first_name, first), *others = arrays.items()
        for name, array in others:
            if array.shape[1] != first.shape[1]:
                raise UserError(
                    f"{channel}: {name} has {array.shape[1]} columns, {first_name} has "
                    f"{first.shape[1]}; expected files of equal width"
                )
        return cls(root, arrays, channel)

    def __len__(self) -> int:
        return sum(map(len, self.arrays.values()))

    @property
    def columns(self) -> int:
        """Number of columns."""
        return int(next(iter(self.arrays.values())).shape[1])

    @cached_property
    def places(self) -> dict[str, range]:
        """The rows of each file, by its path below `folder`."""
        return partition.files({name: len(array) for name, array in self.arrays.items()})

    def __getitem__(self, rows: range) -> np.ndarray:
        """Return a copy of some rows, float32 [len(rows), columns].

        Raises UserError that names the first row whose numbers are not finite in float32.
        """
        result = np.empty((len(rows), self.columns), dtype=np.float32)
        for name, array in self.arrays.items():
            place = self.places[name]
            first = max(place.start, rows.start)
            last = min(place.stop, rows.stop)
            if first < last:
                piece = result[first - rows.start : last - rows.start]
                # A float64 beyond the range of float32 becomes infinite; the check below reports
                # it.
                with np.errstate(over="ignore"):
                    piece[:] = array[first - place.start : last - place.start]
                if not np.isfinite(piece).all():
                    row = (
                        int(np.flatnonzero(~np.isfinite(piece).all(axis=1))[0])
                        + first
                        - place.start
                    )
                    raise UserError(
                        f"{self.channel}: {name}, row {row} has a number that is not finite in "
                        "float32; expected finite ones"
                    )
        return result

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the table.

        They are equal for tables with equal file names, shapes, dtypes and numbers.
        """
        digest = hashlib.blake2b(digest_size=8)
        for name, array in self.arrays.items():
            digest.update(repr((name, array.shape, array.dtype.str)).encode())
            step = max(1, PIECE_BYTES // (array.shape[1] * array.itemsize))
            for first in range(0, len(array), step):
                piece: Any = np.ascontiguousarray(array[first : first + step])
                digest.update(piece)
        return digest.hexdigest()


def _open_rows(path: Path, where: str) -> np.ndarray:
    """Return a file's rows, [n, columns]; a .npy file is mapped and not read yet.

    Raises UserError if the file cannot be read or has another shape or dtype.
    """
    try:
        # Not numpy.load, which opens archives of arrays, too, whatever their names.
        rows = (
            np.lib.format.open_memmap(path, mode="r")
            if path.suffix == ".npy"
            else _read_parquet(path)
        )
    # A damaged file can raise nearly any exception.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{where} cannot be read: {reason}; copy it again") from None
    if rows.ndim != 2 or rows.dtype.name not in DTYPES or 0 in rows.shape:
        raise UserError(
            f"{where} is {rows.dtype} {list(rows.shape)}; expected [rows, columns] of "
            f"{', '.join(sorted(DTYPES))}, at least one of each"
        )
    return rows


def _read_parquet(path: Path) -> np.ndarray:
    """Return the rows of a Parquet file, [n, columns].

    The file has one column of lists, all of one length, or else only columns of numbers of one
    type. Raises ValueError for anything else, and for nulls.
    """
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
    if len(table.columns) > 1:
        raise ValueError(
            f"it has {len(table.columns)} columns; expected one of lists, or all of numbers"
        )
    column = lists[0].combine_chunks()
    lengths = (
        set(column.value_lengths().to_pylist())
        if hasattr(column, "value_lengths")
        else {column.type.list_size}
    )
    if len(lengths) != 1:
        raise ValueError(
            f"its lists have {min(lengths)} to {max(lengths)} numbers; expected one length"
        )
    flat = column.flatten()
    if flat.null_count:
        raise ValueError("it has numbers that are null")
    rows: np.ndarray = flat.to_numpy().reshape(len(column), *lengths)
    return rows
