"""Writes a host's part of a result: a .npy file for each array, and a manifest.

neighbours-000000000000000-000000000020000.npy      the rows 0 to 19999
manifest-000000000000000-000000000020000.json       source, settings, hosts, checksums
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sagemaker_lightning.contract.atomic_files import atomic_write, json_text, remove_leftovers
from sagemaker_lightning.contract.errors import UserError

# Bytes of each file's header. The length is fixed, so that the header can be written after the
# rows.
HEADER_BYTES = 256
DTYPE_TEXT = re.compile(r"[<>|](?:[biufc]|[mM]|[SUV])[1-9]\d{0,8}(?:\[\w+\])?")
ARRAY_NAME = re.compile(r"\w[\w .+-]{0,99}")


def check_name(name: object) -> None:
    """Raise UserError unless an array's name can be the name of a file.

    That excludes separators, a dot in front, and more than 100 bytes.
    """
    if type(name) is not str or not ARRAY_NAME.fullmatch(name) or len(name.encode()) > 100:
        raise UserError(
            f"found an array {str(name)[:120]!r}; expected names of up to 100 letters, digits, "
            "blanks and _.+-, the first a letter or a digit"
        )


def plain(dtype: np.dtype) -> bool:
    """Return whether a dtype has a fixed size and its short name describes it fully.

    Objects, records and extension types are not plain.
    """
    return (
        DTYPE_TEXT.fullmatch(dtype.str) is not None
        and np.dtype(dtype.str) == dtype
        and not dtype.hasobject
    )


def header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the header of a .npy file (format 1.0, numpy.lib.format).

    It has HEADER_BYTES bytes, padded with blanks. Raises UserError if the shape does not fit.
    """
    text = repr(
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    body = text.encode().ljust(HEADER_BYTES - 11) + b"\n"
    if len(body) != HEADER_BYTES - 10:
        raise UserError(
            f"an array of {len(shape)} dimensions is too much for a header of {HEADER_BYTES} bytes"
        )
    return np.lib.format.magic(1, 0) + len(body).to_bytes(2, "little") + body


class Stream:
    """A .npy file that is written row by row.

    Args:
        file: An empty file, which is written from its start.
        name: The name that the file gets, for messages and the manifest.
        like: An array [n, ...] with the dtype and the row shape of the file.
    """

    def __init__(self, file: BinaryIO, name: str, like: np.ndarray) -> None:
        self.file = file
        self.name = name
        self.dtype = like.dtype
        self.rest = like.shape[1:]
        self.length = 0
        self.digest = hashlib.blake2b(digest_size=16)
        self.file.write(bytes(HEADER_BYTES))

    def add(self, rows: np.ndarray) -> None:
        """Write rows, [n, ...]; UserError if their dtype or shape differs from the file's."""
        if rows.dtype != self.dtype or rows.shape[1:] != self.rest:
            raise UserError(
                f"{self.name}: rows of {rows.dtype} {list(rows.shape[1:])} after rows of "
                f"{self.dtype} {list(self.rest)}; a result has one kind of rows"
            )
        rows = np.ascontiguousarray(rows)
        self.digest.update(rows.data.cast("B") if rows.size else b"")
        self.file.write(rows.data.cast("B") if rows.size else b"")
        self.length += len(rows)

    def finish(self) -> dict[str, Any]:
        """Finish the content, and return its entry for the manifest.

        The entry has dtype, shape, file name, and a checksum (BLAKE2b) of the rows without the
        header.
        """
        shape = (self.length, *self.rest)
        self.file.seek(0)
        self.file.write(header(self.dtype, shape))
        kind = {"dtype": np.lib.format.dtype_to_descr(self.dtype), "shape": list(shape)}
        return kind | {"file": self.name, "blake2b": self.digest.hexdigest()}


def write(
    folder: Path,
    part: range,
    blocks: Iterable[tuple[range, Mapping[str, np.ndarray]]],
    about: Mapping[str, Any],
) -> Path:
    """Write the arrays and the manifest of one part; return the manifest's path.

    Args:
        folder: Where to; it is created if it does not exist.
        part: The rows of this part.
        blocks: Rows and arrays by name; together they must be the rows of `part`, in order.
        about: What the manifest says besides rows and arrays: host, source, settings, ...

    A part without rows has a manifest only. Raises UserError if a block is missing in between or
    has other arrays than those before, ValueError if rows at the end are missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    span = f"{part.start:015d}-{part.stop:015d}"
    # Each host numbers the rows of its own files from 0, so the row numbers of several hosts are
    # equal. The host's name keeps the files apart when all parts come into one archive.
    if about.get("total") is None:
        span += f"-{about.get('host')}"
    streams: dict[str, Stream] = {}
    remove_leftovers(folder, f"*-{span}.npy")
    reached = part.start
    with contextlib.ExitStack() as stack:
        for rows, arrays in blocks:
            if rows.start != reached or arrays.keys() != (streams or arrays).keys():
                raise UserError(
                    f"rows {reached} to {rows.start} are missing, or have other arrays than those "
                    "before"
                )
            for name, array in arrays.items():
                if name not in streams:
                    target = folder / f"{name}-{span}.npy"
                    file = stack.enter_context(atomic_write(target))
                    streams[name] = Stream(file, target.name, array)
                streams[name].add(array)
            reached = rows.stop
        if reached != part.stop:
            raise ValueError(f"rows {reached} to {part.stop} are missing")
        finished = {name: stream.finish() for name, stream in streams.items()}
    path = folder / f"manifest-{span}.json"
    # Files of an earlier job would be uploaded with these, and its parts would overlap with them.
    earlier_files = _files_of(folder, about.get("host"))
    with atomic_write(path) as file:
        file.write(
            json_text(
                {"rows": [part.start, part.stop], "arrays": finished} | dict(about), indent=1
            ).encode()
        )
    for name in earlier_files - {path.name} - {array["file"] for array in finished.values()}:
        (folder / name).unlink(missing_ok=True)
    return path


def _files_of(folder: Path, host: str | None) -> set[str]:
    """Return the names of the files in a folder that are a host's manifests and arrays."""
    names = set()
    for path in folder.glob("manifest-*.json"):
        # The file may be something else that only has such a name.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            manifest = json.loads(path.read_text())
            if manifest["host"] == host:
                names |= {path.name} | {array["file"] for array in manifest["arrays"].values()}
    return names & {path.name for path in folder.iterdir() if path.is_file()}
