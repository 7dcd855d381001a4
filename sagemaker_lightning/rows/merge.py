"""Merges what the hosts of a job have computed into one file for each array.

    sagemaker-lightning-merge MODEL... --output FOLDER

In a checkout, it is `python scripts/merge_parts.py`. MODEL is a model.tar.gz, local or
s3://BUCKET/KEY, or a folder of parts. FOLDER is new or empty: nothing is overwritten. The parts
must have each row exactly once, and must come from one source with one set of settings. A gap, an
overlap, a part of another job and a damaged part are errors that name the part; then nothing is
left in FOLDER. The parts of hosts with files of their own (ShardedByS3Key) follow one another by
host; manifest.json says which rows belong to which file.

What is on S3 is downloaded into FOLDER/.downloads, from the bucket's region, and removed at the
end. It stays if a download was interrupted: the same command continues it.
"""

import argparse
import contextlib
import hashlib
import math
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

try:
    import numpy as np

    from sagemaker_lightning.contract.atomic_files import atomic_write, json_text
    from sagemaker_lightning.contract.command_line import Parser
    from sagemaker_lightning.contract.errors import printable
    from sagemaker_lightning.rows.archives import Model, opened
    from sagemaker_lightning.rows.byte_progress import ByteProgress, say
    from sagemaker_lightning.rows.manifests import LARGEST_NUMBER, manifests, ordered, title
    from sagemaker_lightning.rows.parts import HEADER_BYTES, header
except ImportError as missing:
    sys.exit(
        f"error: {sys.executable} has no {missing.name}; install the extra `rows` of this "
        "package, or, in a checkout, run `make env` and use .venv/bin/python"
    )

# Bytes that are copied at a time; a multiple of the size of every kind of number.
PIECE_BYTES = 2**24
# The folder in the output for what is downloaded.
DOWNLOADS = ".downloads"


def merge(names: list[str], output: Path) -> dict[str, Any]:
    """Write the merged arrays and manifest.json into `output`; return the manifest.

    Args:
        names: The MODELs: paths, or s3:// addresses.
        output: A new or empty folder.

    Raises ValueError if anything is wrong; then `output` is left as it was, but for what is already
    downloaded where a download, or the room on the disk, has an early end.
    """
    is_new = not output.exists()
    downloads = output / DOWNLOADS
    try:
        output.mkdir(parents=True, exist_ok=True)
        # A link would lead what is downloaded elsewhere.
        is_ours = downloads.is_dir() and not downloads.is_symlink()
        first_entry = next(
            (path for path in output.iterdir() if path != downloads or not is_ours), None
        )
    except OSError as error:
        raise ValueError(
            f"--output: found {output}: {error.strerror}; expected a new or empty folder"
        ) from None
    if first_entry:
        raise ValueError(
            f"--output: {output} holds {first_entry.name} already; expected a new or empty folder"
        )
    try:
        models = [opened(name, downloads) for name in names]
        try:
            manifest = _merge_models(models, output)
        # What is wrong may be in what was downloaded.
        except ValueError:
            shutil.rmtree(downloads, ignore_errors=True)
            raise
        shutil.rmtree(downloads, ignore_errors=True)
        return manifest
    except OSError as error:
        raise ValueError(
            f"--output: {output} cannot be written ({error.strerror}); give it space"
        ) from None
    finally:
        # What is not empty stays: what was downloaded, and what was merged.
        for folder in (downloads, output) if is_new else (downloads,):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _merge_models(models: list[Model], output: Path) -> dict[str, Any]:
    parts = ordered(manifests(models))
    plan = _plan(parts)
    manifest_content = _manifest(parts, plan)
    wanted: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}
    for part in parts:
        for name, array in part["arrays"].items():
            other, _ = wanted.setdefault((part["model"], array["file"]), (part, name))
            if other is not part:
                raise ValueError(
                    f"{array['file']} is of both {title(other)} and {title(part)}; copy them again"
                )
    sizes = [_byte_count(kind) for kind, _ in plan.values()]
    progress = ByteProgress("merging", sum(sizes))
    merged = 0
    with contextlib.ExitStack() as stack:
        stack.push(partial(_remove_unless_complete, [output / f"{name}.npy" for name in plan]))
        # The manifest gets its name last.
        manifest_file = stack.enter_context(atomic_write(output / "manifest.json"))
        manifest_file.write(json_text(manifest_content, indent=1).encode())
        files = {}
        for name, (kind, _) in plan.items():
            files[name] = stack.enter_context(atomic_write(output / f"{name}.npy"))
            files[name].write(header(np.dtype(kind["dtype"]), tuple(kind["shape"])))
        for model in models:
            for file_name, content in model.files():
                if wanted_array := wanted.pop((model.name, file_name), None):
                    part, name = wanted_array
                    _copy_rows(
                        content,
                        files[name],
                        plan[name][1][id(part)],
                        part,
                        name,
                        _number_offset(parts, part, name),
                    )
                    merged += _byte_count(part["arrays"][name])
                    progress.reach(merged)
        if wanted:
            model_name, file_name = min(wanted)
            raise ValueError(f"{model_name}: {file_name} is missing, which its manifest names")
    return manifest_content


def _remove_unless_complete(paths: list[Path], error_type: type | None, *_: Any) -> None:
    """Remove the files that were renamed already, if an exception occurs."""
    for path in paths if error_type else ():
        path.unlink(missing_ok=True)


def _plan(parts: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[int, int]]]:
    """Return each merged array's dtype and shape, and where each part begins in it."""
    plan: dict[str, tuple[dict[str, Any], dict[int, int]]] = {}
    filled = [part for part in parts if part["arrays"]]
    for part in filled:
        if part["arrays"].keys() != filled[0]["arrays"].keys():
            raise ValueError(
                f"{title(part)} has {', '.join(sorted(part['arrays']))}, and {title(filled[0])} "
                f"has {', '.join(sorted(filled[0]['arrays']))}; merge parts of one job"
            )
        for name, array in part["arrays"].items():
            kind, begins = plan.setdefault(
                name, ({"dtype": array["dtype"], "shape": [0, *array["shape"][1:]]}, {})
            )
            if (array["dtype"], array["shape"][1:]) != (kind["dtype"], kind["shape"][1:]):
                raise ValueError(
                    f"{title(part)}: {name} is {array['dtype']} {array['shape'][1:]} a row, others "
                    f"have {kind['dtype']} {kind['shape'][1:]}"
                )
            begins[id(part)] = kind["shape"][0]
            kind["shape"][0] += array["shape"][0]
            if _byte_count(kind) > LARGEST_NUMBER:
                raise ValueError(
                    f"{name} is {kind['dtype']} {kind['shape']} in all, which is too large"
                )
    return plan


def _byte_count(array: dict[str, Any]) -> int:
    """Return the bytes of an array's numbers, given its dtype and shape."""
    return int(math.prod(array["shape"]) * np.dtype(array["dtype"]).itemsize)


def _number_offset(parts: list[dict[str, Any]], part: dict[str, Any], name: str) -> int:
    """Return what to add to the numbers of an array that number rows.

    A host with files of its own numbers its rows from 0; add the rows of the hosts before it.
    """
    if part["total"] is not None or name not in part["settings"].get("numbers", ()):
        return 0
    return sum(other["rows"][1] for other in parts[: parts.index(part)])


def _copy_rows(
    content: BinaryIO, file: BinaryIO, entry: int, part: dict[str, Any], name: str, offset: int
) -> None:
    """Copy an array's rows to their position in `file`.

    Raises ValueError if the rows are not what the manifest says.
    """
    array = part["arrays"][name]
    dtype = np.dtype(array["dtype"])
    shape = tuple(array["shape"])
    where = f"{part['model']}: {array['file']}"
    if content.read(HEADER_BYTES) != header(dtype, shape):
        raise ValueError(
            f"{where} is not {dtype} {list(shape)}, as its manifest says; copy it again"
        )
    size = dtype.itemsize * math.prod(shape[1:])
    file.seek(HEADER_BYTES + entry * size)
    digest = hashlib.blake2b(digest_size=16)
    left = shape[0] * size
    while left and (piece := content.read(min(PIECE_BYTES, left))):
        digest.update(piece)
        left -= len(piece)
        file.write(
            _shift_numbers(piece, dtype, part["rows"][1], offset, where) if offset else piece
        )
    if left or content.read(1) or digest.hexdigest() != array["blake2b"]:
        raise ValueError(f"{where} is damaged: its checksum does not match; copy it again")


def _shift_numbers(piece: bytes, dtype: np.dtype, rows: int, offset: int, where: str) -> bytes:
    """Add `offset` to row numbers; ValueError if they are not below the host's `rows`."""
    numbers = np.frombuffer(piece[: len(piece) // dtype.itemsize * dtype.itemsize], dtype)
    if not len(numbers):
        return b""
    if numbers.min() < 0 or numbers.max() >= rows:
        raise ValueError(
            f"{where} has {numbers.min()} to {numbers.max()}; expected numbers of its {rows} rows"
        )
    if rows + offset - 1 > np.iinfo(dtype).max:
        raise ValueError(
            f"{where} is {dtype}, which cannot number {rows + offset} rows; compute it as int64"
        )
    return (numbers + offset).astype(dtype).tobytes()


def _manifest(parts: list[dict[str, Any]], plan: dict[str, Any]) -> dict[str, Any]:
    files = {}
    next_row = 0
    for part in parts if parts[0]["total"] is None else parts[:1]:
        for name, rows in sorted(part["files"].items()):
            files[name] = [next_row, next_row + rows]
            next_row += rows
    about = {"rows": next_row, "files": files, "settings": parts[0]["settings"]}
    return about | {"arrays": {name: kind for name, (kind, _) in plan.items()}}


def main() -> None:
    """Merge what the command line names, and print the merged files."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--output", type=Path, required=True, help="folder of the merged files")
    args = parser.parse_args()
    try:
        manifest = merge(args.models, args.output)
    except ValueError as error:
        # The names in the message come from whoever made the parts: they must not put new lines or
        # control sequences on the terminal.
        line = printable(str(error))
        _say_what_stays(args.output)
        sys.exit(f"error: {line if len(line) <= 1000 else f'{line[:997]}...'}")
    except KeyboardInterrupt:
        _say_what_stays(args.output)
        sys.exit(130)
    for name, kind in manifest["arrays"].items():
        print(f"{args.output / name}.npy: {np.dtype(kind['dtype'])} {kind['shape']}")


def _say_what_stays(output: Path) -> None:
    """Say how a download that was interrupted continues, if there is one."""
    if (output / DOWNLOADS).is_dir():
        say(f"what is downloaded stays in {output / DOWNLOADS}; the same command continues")


if __name__ == "__main__":
    main()
