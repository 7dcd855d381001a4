"""Results that come in blocks of rows: committed one by one, so that a run that is interrupted goes on.

A block is a file `START-STOP.npz` of arrays for the rows from START to before STOP, whole or absent; the checksums are
those of zip. A run of other settings or of another source has another folder.
"""

import hashlib
import json
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sagemaker_lightning.contract.atomic_files import whole
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.rows import partition, parts

Arrays = Mapping[str, np.ndarray]


class Blocks:
    """The blocks of a run.

    Args:
        folder: SageMaker's checkpoint folder.
        run: What decides the result, and nothing else: the source and the settings.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        digest = hashlib.blake2b(
            json.dumps(run, sort_keys=True, default=str).encode(), digest_size=8
        ).hexdigest()
        self.folder = folder / f"blocks-{digest}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def commit(self, rows: range, arrays: Arrays) -> None:
        """Put a block on the disk."""
        with whole(self._path(rows)) as file:
            np.savez(file, **arrays)

    def named(self) -> list[range]:
        """Return the rows of each block that is there."""
        return [
            range(*map(int, path.stem.split("-")))
            for path in sorted(self.folder.glob("[0-9]*-[0-9]*.npz"))
        ]

    def whole(self) -> list[range]:
        """Return the rows of each block that is whole; one that is damaged is removed, and a line says so."""
        found = []
        for rows in self.named():
            path = self._path(rows)
            try:
                with zipfile.ZipFile(path) as archive:
                    damaged = archive.testzip()
            except (zipfile.BadZipFile, OSError) as error:
                damaged = str(error)
            if damaged:
                print(
                    f"warning: {path} is damaged ({damaged}); its rows are done again", flush=True
                )
                path.unlink()
            else:
                found.append(rows)
        return found

    def read(self, part: range) -> Iterator[tuple[range, dict[str, np.ndarray]]]:
        """Yield blocks that have all rows of `part` once, in order, with their arrays: each a block, or a piece of it.

        Where blocks overlap, as after a change of the number of hosts, the one that begins first is taken.
        """
        reached = part.start
        for rows in sorted(self.named(), key=lambda rows: (rows.start, -rows.stop)):
            first, last = max(reached, rows.start), min(part.stop, rows.stop)
            if first >= last:
                continue
            with np.load(self._path(rows), allow_pickle=False) as file:
                yield range(first, last), cut(dict(file), rows, range(first, last))
            reached = last

    def _path(self, rows: range) -> Path:
        return self.folder / f"{rows.start:015d}-{rows.stop:015d}.npz"


def cut(arrays: dict[str, np.ndarray], rows: range, part: range) -> dict[str, np.ndarray]:
    """Return what of a block's arrays belongs to `part` of its rows.

    `counts`, where there is one, says how many entries each row has in the other arrays; else each row has one.
    """
    first, last = part.start - rows.start, part.stop - rows.start
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
) -> None:
    """Commit what `done` lacks of `part`, in blocks of `size` rows at most; `say` gets a line every few seconds."""
    left = partition.missing(part, done)
    total = sum(map(len, left))
    if total < len(part):
        say(f"rows {part.start} to {part.stop}: {len(part) - total} are done already")
    began = said = time.monotonic()
    ready = 0
    for piece in left:
        for first in range(piece.start, piece.stop, size):
            rows = range(first, min(first + size, piece.stop))
            blocks.commit(rows, check(function(rows), rows))
            ready += len(rows)
            now = time.monotonic()
            if now - said >= 5 or ready == total:
                rate = ready / (now - began)
                say(f"rows={ready}/{total} rows/s={rate:.1f} left={(total - ready) / rate:.0f}s")
                said = now


def check(arrays: Any, rows: range) -> dict[str, np.ndarray]:
    """Return what a function made of a block, by name; UserError if it does not fit the rows."""
    found = arrays if isinstance(arrays, Mapping) else {"result": arrays}
    found = {name: np.asarray(array) for name, array in found.items()}
    entries = int(found["counts"].sum()) if "counts" in found else len(rows)
    for name, array in found.items():
        parts.check_name(name)
        wanted = len(rows) if name == "counts" else entries
        if array.ndim == 0 or len(array) != wanted or not parts.plain(array.dtype):
            raise UserError(
                f"the function returned {name}: {array.dtype} {list(array.shape)} for {len(rows)} rows; allowed are "
                f"arrays of numbers whose first dimension is {wanted}"
            )
    return found
