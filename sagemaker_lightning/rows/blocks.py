"""Results in blocks of rows, committed one by one, so that a run can continue.

A block is a file `START-STOP.npz` with arrays for the rows from START up to, but not including,
STOP. It is complete or absent. Its checksums are those of the zip format. A run with other settings
or another source has another folder.
"""

import hashlib
import json
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sagemaker_lightning.contract.atomic_files import atomic_write
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.rows import partition, parts

Arrays = Mapping[str, np.ndarray]
NAME = re.compile(r"\d{15}-\d{15}\.npz", re.ASCII)


class Blocks:
    """The committed blocks of a run.

    Args:
        folder: SageMaker's checkpoint folder.
        run: Everything that decides the result, and nothing else: the source and the settings.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        digest = hashlib.blake2b(
            json.dumps(run, sort_keys=True, default=str).encode(), digest_size=8
        ).hexdigest()
        self.folder = folder / f"blocks-{digest}"

    def commit(self, rows: range, arrays: Arrays) -> None:
        """Write a block to the disk, atomically."""
        with atomic_write(self.path(rows)) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle

    def named(self) -> list[range]:
        """Return the rows of each block file, without a look into the files."""
        named_rows = [
            range(*map(int, path.stem.split("-")))
            for path in sorted(self.folder.glob("[0-9]*-[0-9]*.npz"))
            if NAME.fullmatch(path.name)
        ]
        return [rows for rows in named_rows if rows]

    def whole(self) -> list[range]:
        """Return the rows of each intact block.

        Damaged blocks are removed, with a warning each.
        """
        intact = []
        for rows in self.named():
            path = self.path(rows)
            try:
                with zipfile.ZipFile(path) as archive:
                    damaged = archive.testzip()
            # A damaged file can raise nearly any exception.
            except Exception as error:
                damaged = str(error) or type(error).__name__
            if damaged:
                log.warning(f"{path} is damaged ({damaged}); its rows are done again")
                path.unlink()
            else:
                intact.append(rows)
        return intact

    def read(self, part: range) -> Iterator[tuple[range, dict[str, np.ndarray]]]:
        """Yield rows and arrays of blocks that together have all of `part`, in order.

        Each row comes once. Blocks may overlap, for example after the number of hosts has changed;
        then the one that begins first is used, and only the rest of the next one.
        """
        reached = part.start
        for rows in sorted(self.named(), key=lambda rows: (rows.start, -rows.stop)):
            first = max(reached, rows.start)
            last = min(part.stop, rows.stop)
            if first >= last:
                continue
            with np.load(self.path(rows), allow_pickle=False) as file:
                yield range(first, last), cut(dict(file), rows, range(first, last))
            reached = last

    def path(self, rows: range) -> Path:
        """Return the file of a block."""
        return self.folder / f"{rows.start:015d}-{rows.stop:015d}.npz"


def cut(arrays: dict[str, np.ndarray], rows: range, part: range) -> dict[str, np.ndarray]:
    """Return the entries of a block's arrays that belong to `part`.

    Args:
        arrays: The arrays of the block. If there is an array `counts`, [rows], it says how many
            entries each row has in the other arrays; else each row has one entry.
        rows: The rows of the block.
        part: Some of these rows.
    """
    first = part.start - rows.start
    last = part.stop - rows.start
    if "counts" not in arrays:
        return {name: array[first:last] for name, array in arrays.items()}
    ends = np.concatenate([[0], np.cumsum(arrays["counts"])])
    entries = slice(ends[first], ends[last])
    return {
        name: array[first:last] if name == "counts" else array[entries]
        for name, array in arrays.items()
    }


def compute(
    blocks: Blocks,
    part: range,
    done: Sequence[range],
    size: int,
    function: Callable[[range], Arrays],
    say: Callable[[str], None],
    has_failed: threading.Event,
) -> None:
    """Compute and commit the rows of `part` that are not in `done`.

    Args:
        blocks: Where to commit.
        part: The rows to compute.
        done: Rows that are committed already.
        size: The largest number of rows of a block.
        function: Takes rows and returns their arrays by name.
        say: Gets a line about the progress, every 5 seconds at most.
        has_failed: Set when another device has failed: no further block is computed.
    """
    missing_ranges = partition.missing(part, done)
    total = sum(map(len, missing_ranges))
    if total < len(part):
        say(f"rows {part.start} to {part.stop}: {len(part) - total} are done already")
    start_time = last_report = time.monotonic()
    computed = 0
    for piece in missing_ranges:
        for first in range(piece.start, piece.stop, size):
            if has_failed.is_set():
                return
            rows = range(first, min(first + size, piece.stop))
            blocks.commit(rows, check(function(rows), rows))
            computed += len(rows)
            current_time = time.monotonic()
            if current_time - last_report >= 5 or computed == total:
                rate = computed / (current_time - start_time)
                say(
                    f"rows={computed}/{total} rows/s={rate:.1f} "
                    f"left={(total - computed) / rate:.0f}s"
                )
                last_report = current_time


def check(arrays: Any, rows: range) -> dict[str, np.ndarray]:
    """Return a function's arrays for a block, by name.

    Raises UserError if they do not fit the rows. An array without a name becomes `result`. An array
    `counts` says how many entries each row has in the others.
    """
    by_name = arrays if isinstance(arrays, Mapping) else {"result": arrays}
    by_name = {name: np.asarray(array) for name, array in by_name.items()}
    entries = int(by_name["counts"].sum()) if "counts" in by_name else len(rows)
    for name, array in by_name.items():
        parts.check_name(name)
        expected_length = len(rows) if name == "counts" else entries
        if array.ndim == 0 or len(array) != expected_length or not parts.plain(array.dtype):
            raise UserError(
                f"the function returned {name}: {array.dtype} {list(array.shape)} for {len(rows)} "
                f"rows; expected arrays of numbers whose first dimension is {expected_length}"
            )
    return by_name
