"""Merge what the hosts of a job have computed into one file of each array.

    python scripts/merge_parts.py MODEL... --output FOLDER

MODEL is a model.tar.gz, local or s3://BUCKET/KEY, or a folder of parts. FOLDER is new or empty: nothing is overwritten.
The parts must have all rows exactly once, and be of one source and one kind of settings; a gap, an overlap, a part of
something else or a damaged one is an error that names it, and nothing is left in the output. Parts of hosts with files
of their own (ShardedByS3Key) come host by host; manifest.json says which rows are those of which file.
"""

import argparse
import contextlib
import hashlib
import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sagemaker_lightning.contract.atomic_files import json_text, whole
from sagemaker_lightning.rows.archives import Model, opened
from sagemaker_lightning.rows.manifests import LARGEST, manifests, ordered, title
from sagemaker_lightning.rows.parts import HEADER, header

PIECE = 2**24  # bytes that are copied at a time; a multiple of the size of every kind of number


def merge(names: list[str], output: Path) -> dict[str, Any]:
    """Write the merged arrays and manifest.json into `output`, and return the latter; ValueError leaves it as it was.

    `output` is new or empty.
    """
    new = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        before = next(output.iterdir(), None)
    except OSError as error:
        raise ValueError(
            f"--output: found {output}: {error.strerror}; allowed is a new or empty folder"
        ) from None
    if before:
        raise ValueError(
            f"--output: {output} holds {before.name} already; allowed is a new or empty folder"
        )
    try:
        with tempfile.TemporaryDirectory(dir=output) as aside:
            return _merged([opened(name, Path(aside)) for name in names], output)
    except OSError as error:
        raise ValueError(
            f"--output: {output} cannot be written ({error.strerror}); give it space"
        ) from None
    finally:
        if new:
            with contextlib.suppress(OSError):  # it is not empty: all is well
                output.rmdir()


def _merged(models: list[Model], output: Path) -> dict[str, Any]:
    parts = ordered(manifests(models))
    plan = _plan(parts)
    about = _about(parts, plan)
    wanted: dict[tuple[str, str], tuple[dict, str]] = {}
    for part in parts:
        for name, array in part["arrays"].items():
            other, _ = wanted.setdefault((part["model"], array["file"]), (part, name))
            if other is not part:
                raise ValueError(
                    f"{array['file']} is of both {title(other)} and {title(part)}; copy them again"
                )
    with contextlib.ExitStack() as stack:
        stack.push(partial(_undo, [output / f"{name}.npy" for name in plan]))
        manifest = stack.enter_context(whole(output / "manifest.json"))  # it gets its name last
        manifest.write(json_text(about, indent=1).encode())
        files = {}
        for name, (kind, _) in plan.items():
            files[name] = stack.enter_context(whole(output / f"{name}.npy"))
            files[name].write(header(np.dtype(kind["dtype"]), tuple(kind["shape"])))
        for model in models:
            for file_name, content in model.files():
                if found := wanted.pop((model.name, file_name), None):
                    part, name = found
                    _copy(
                        content,
                        files[name],
                        plan[name][1][id(part)],
                        part,
                        name,
                        _offset(parts, part, name),
                    )
        if wanted:
            model_name, file_name = min(wanted)
            raise ValueError(f"{model_name}: {file_name} is missing, which its manifest names")
    return about


def _undo(paths: list[Path], kind: type | None, *_: Any) -> None:
    """Remove the files that have their names already, if one fails."""
    for path in paths if kind else ():
        path.unlink(missing_ok=True)


def _plan(parts: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[int, int]]]:
    """Return of each array its dtype and shape, and at which entry each part's begins."""
    found: dict[str, tuple[dict[str, Any], dict[int, int]]] = {}
    filled = [part for part in parts if part["arrays"]]
    for part in filled:
        if part["arrays"].keys() != filled[0]["arrays"].keys():
            raise ValueError(
                f"{title(part)} has {', '.join(sorted(part['arrays']))}, and {title(filled[0])} has "
                f"{', '.join(sorted(filled[0]['arrays']))}; merge parts of one job"
            )
        for name, array in part["arrays"].items():
            kind, begins = found.setdefault(
                name, ({"dtype": array["dtype"], "shape": [0, *array["shape"][1:]]}, {})
            )
            if (array["dtype"], array["shape"][1:]) != (kind["dtype"], kind["shape"][1:]):
                raise ValueError(
                    f"{title(part)}: {name} is {array['dtype']} {array['shape'][1:]} a row, others have "
                    f"{kind['dtype']} {kind['shape'][1:]}"
                )
            begins[id(part)] = kind["shape"][0]
            kind["shape"][0] += array["shape"][0]
            if math.prod(kind["shape"]) * np.dtype(kind["dtype"]).itemsize > LARGEST:
                raise ValueError(
                    f"{name} is {kind['dtype']} {kind['shape']} in all, which is too large"
                )
    return found


def _offset(parts: list[dict[str, Any]], part: dict[str, Any], name: str) -> int:
    """Return what is added to the numbers of an array: of rows that a host numbers from 0, the rows before its own."""
    if part["total"] is not None or name not in part["settings"].get("numbers", ()):
        return 0
    return sum(other["rows"][1] for other in parts[: parts.index(part)])


def _copy(
    content: BinaryIO, file: BinaryIO, entry: int, part: dict[str, Any], name: str, offset: int
) -> None:
    """Copy an array's rows to their place; ValueError if they are not what the manifest says."""
    array = part["arrays"][name]
    dtype, shape = np.dtype(array["dtype"]), tuple(array["shape"])
    where = f"{part['model']}: {array['file']}"
    if content.read(HEADER) != header(dtype, shape):
        raise ValueError(
            f"{where} is not {dtype} {list(shape)}, as its manifest says; copy it again"
        )
    size = dtype.itemsize * math.prod(shape[1:])
    file.seek(HEADER + entry * size)
    digest, left = hashlib.blake2b(digest_size=16), shape[0] * size
    while left and (piece := content.read(min(PIECE, left))):
        digest.update(piece)
        left -= len(piece)
        file.write(_moved(piece, dtype, part["rows"][1], offset, where) if offset else piece)
    if left or content.read(1) or digest.hexdigest() != array["blake2b"]:
        raise ValueError(f"{where} is damaged: its checksum is another; copy it again")


def _moved(piece: bytes, dtype: np.dtype, rows: int, offset: int, where: str) -> bytes:
    """Return numbers of a host's own `rows`, each greater by `offset`."""
    numbers = np.frombuffer(piece[: len(piece) // dtype.itemsize * dtype.itemsize], dtype)
    if not len(numbers):
        return b""
    if numbers.min() < 0 or numbers.max() >= rows:
        raise ValueError(
            f"{where} has {numbers.min()} to {numbers.max()}; allowed are numbers of its {rows} rows"
        )
    if rows + offset > np.iinfo(dtype).max:
        raise ValueError(
            f"{where} is {dtype}, which cannot number {rows + offset} rows; compute it as int64"
        )
    return (numbers + offset).astype(dtype).tobytes()


def _about(parts: list[dict[str, Any]], plan: dict[str, Any]) -> dict[str, Any]:
    found, first = {}, 0
    for part in parts if parts[0]["total"] is None else parts[:1]:
        for name, rows in sorted(part["files"].items()):
            found[name] = [first, first + rows]
            first += rows
    about = {"rows": first, "files": found, "settings": parts[0]["settings"]}
    return about | {"arrays": {name: kind for name, (kind, _) in plan.items()}}


def main() -> None:
    """Do as the command line says."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("models", nargs="+", metavar="MODEL")
    made.add_argument("--output", type=Path, required=True, help="folder of the merged files")
    given = made.parse_args()
    try:
        about = merge(given.models, given.output)
    except ValueError as error:
        # Names in it are those of whoever made the parts: they get no new line and no command to the terminal.
        line = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(error))
        sys.exit(f"error: {line if len(line) <= 1000 else f'{line[:997]}...'}")
    for name, kind in about["arrays"].items():
        print(f"{given.output / name}.npy: {np.dtype(kind['dtype'])} {kind['shape']}")


if __name__ == "__main__":
    main()
