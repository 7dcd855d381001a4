"""Makes shards and their index; `python -m sagemaker_lightning.shards`.

    ... make FOLDER OUTPUT     of a folder of images, with a folder in it for each class
    ... make TABLE OUTPUT      of a Parquet table: bytes are files, `label` is the class
    ... index FOLDER           makes the index of tar shards that are there, as WebDataset has them
    ... check FOLDER           reads all samples of a folder or s3://BUCKET/PREFIX

A call that was interrupted continues where it was. The same files and flags make the same bytes.
"""

import argparse
import hashlib
import io
import json
import os
import random
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from sagemaker_lightning.contract.atomic_files import atomic_write, json_text, remove_leftovers
    from sagemaker_lightning.contract.command_line import Parser
    from sagemaker_lightning.contract.errors import UserError, printable
    from sagemaker_lightning.shards import index as indexes
    from sagemaker_lightning.shards.index import Shard
except ImportError as missing:
    sys.exit(
        f"error: {sys.executable} has no {missing.name}; use the python of the training, or "
        "install the extra `rows` of this package"
    )

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp"}
STATE = "shards.unfinished"
"""The folder, in the output, of what says how far an unfinished call is."""
SECONDS = 5.0  # between two lines of progress
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

Sample = dict[str, bytes]


@dataclass(frozen=True)
class Written:
    """What is noted of a shard that is finished."""

    shard: Shard
    samples: list[tuple[dict[str, tuple[int, int]], int]]
    """For each sample, the offset and the size of each field in the shard, and the checksum."""

    def save(self, path: Path) -> None:
        """Write it to a file."""
        shard = self.shard
        with atomic_write(path) as file:
            content = [shard.name, shard.bytes, shard.samples, self.samples]
            file.write(json_text(content).encode())

    @classmethod
    def load(cls, path: Path) -> "Written | None":
        """Return what a file has; None if there is no such file."""
        if not path.exists():
            return None
        *shard, samples = json.loads(path.read_bytes())
        return cls(Shard(*shard), samples)


def make(origin: Path, output: Path, shard_bytes: int, seed: int) -> None:
    """Write the shards of a folder of images, or of a Parquet table, and their index.

    Args:
        origin: The folder or the table.
        output: A new or empty folder, or one that such a call has begun.
        shard_bytes: Bytes of a shard: the last sample may exceed them.
        seed: Decides in which order a folder's images are. A table's rows stay in theirs.

    Raises UserError; OSError.
    """
    if origin.is_dir():
        files, classes = _images(origin, seed)
        about: list[Any] = [[str(file.relative_to(origin)), size] for file, size in files]
        total = len(files)
    elif origin.suffix == ".parquet" and origin.is_file():
        total, about = _rows(origin), [origin.stat().st_size, origin.stat().st_mtime_ns]
        classes = ()
    else:
        raise UserError(
            f"{origin}: found no folder and no .parquet file; give a folder with a folder of "
            "images for each class, or a table"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    state = _begun(output, ["make", about, shard_bytes, seed])
    progress = Progress(total)

    def samples(first: int) -> Iterator[Sample]:
        if not origin.is_dir():
            yield from _samples_of_table(origin, first)
            return
        for file, _ in files[first:]:
            number = numbers[file.relative_to(origin).parts[0]]
            field = {"jpeg": "jpg"}.get(file.suffix[1:].lower(), file.suffix[1:].lower())
            yield {"cls": str(number).encode(), field: file.read_bytes()}

    written: list[Written] = []
    done = 0
    while done < total:
        name = f"shard-{len(written):06}.tar"
        noted = state / f"{name}.json"
        shard = Written.load(noted)
        if shard is None:
            shard = _write_shard(output / name, samples(done), done, shard_bytes, progress)
            shard.save(noted)
        done += shard.shard.samples
        progress.reached(done, shard.shard.name)
        written.append(shard)
    _finish(output, written, classes, state)


def index(folder: Path) -> None:
    """Write the index of the tar shards of a folder.

    Raises UserError; OSError.
    """
    names = sorted(path.name for path in folder.glob("*.tar")) if folder.is_dir() else []
    if not names:
        found = "no *.tar" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: found {found}, expected tar shards; give their folder")
    about = [
        [name, (folder / name).stat().st_size, (folder / name).stat().st_mtime_ns] for name in names
    ]
    state = _begun(folder, ["index", about])
    progress = Progress(len(names), "shards")
    written = []
    for number, name in enumerate(names):
        noted = state / f"{name}.json"
        shard = Written.load(noted)
        if shard is None:
            shard = _scanned(folder / name)
            shard.save(noted)
        progress.reached(number + 1, name)
        written.append(shard)
    _finish(folder, written, (), state)


def check(location: str) -> int:
    """Read all samples of a folder or s3://BUCKET/PREFIX; return their number.

    Raises UserError for the first shard or sample that is not what the index says.
    """
    from sagemaker_lightning.shards.dataset import ShardedDataset  # it imports torch

    data = ShardedDataset(location, cache_dir="")
    progress = Progress(len(data))
    for first in range(0, len(data), 64):
        numbers = list(range(first, min(first + 64, len(data))))
        data.__getitems__(numbers)
        progress.reached(numbers[-1] + 1, location)
    return len(data)


class Progress:
    """Prints how far a call is, every SECONDS and at its end."""

    def __init__(self, total: int, what: str = "samples") -> None:
        self.total = total
        self.what = what
        self.said = time.monotonic()

    def reached(self, done: int, where: str) -> None:
        """Note that `done` of all are done."""
        now = time.monotonic()
        if now - self.said < SECONDS and done < self.total:
            return
        self.said = now
        print(f"{done} of {self.total} {self.what}, {printable(where)}", flush=True)


def _begun(output: Path, call: list[Any]) -> Path:
    """Return the folder of the state of a call, which is made, or there from an earlier one."""
    number = hashlib.blake2b(json.dumps(call).encode(), digest_size=16).hexdigest()
    state = output / STATE
    others = [entry.name for entry in output.iterdir()] if output.is_dir() else []
    if call[0] == "make" and others and STATE not in others:
        raise UserError(
            f"{output}: found {sorted(others)[0]}, expected a new or empty folder; give one"
        )
    state.mkdir(parents=True, exist_ok=True)
    remove_leftovers(output, "*")
    remove_leftovers(state, "*")
    noted = state / "call"
    if not noted.exists():
        with atomic_write(noted) as file:
            file.write(number.encode())
    if noted.read_text() != number:
        raise UserError(
            f"{output}: found what a call with other files or flags has begun; give those, or a "
            f"new folder (for `index`: remove {STATE})"
        )
    return state


def _finish(output: Path, written: list[Written], classes: Sequence[str], state: Path) -> None:
    """Write the index, and remove the state."""
    fields = sorted({field for shard in written for places, _ in shard.samples for field in places})
    indexes.write(
        output / indexes.NAME,
        [shard.shard for shard in written],
        fields,
        classes,
        (indexes.table(shard.samples, fields) for shard in written),
    )
    indexes.read(output / indexes.NAME)
    for path in state.iterdir():
        path.unlink()
    state.rmdir()
    count = sum(shard.shard.samples for shard in written)
    print(f"{output / indexes.NAME}: {count} samples in {len(written)} shards")


def _write_shard(
    path: Path, samples: Iterator[Sample], first: int, shard_bytes: int, progress: Progress
) -> Written:
    """Write samples to a shard until it has its size."""
    noted: list[tuple[dict[str, tuple[int, int]], int]] = []
    with atomic_write(path) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for sample in samples:
            places = {}
            for field, content in sorted(sample.items()):
                entry = tarfile.TarInfo(f"{first + len(noted):09}.{field}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
                padded = -(-len(content) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                places[field] = (archive.offset - padded, len(content))
            noted.append((places, _checksum(sample)))
            progress.reached(first + len(noted), path.name)
            if archive.offset >= shard_bytes:
                break
    return Written(Shard(path.name, path.stat().st_size, len(noted)), noted)


def _checksum(sample: Sample) -> int:
    return indexes.checksum([content for _, content in sorted(sample.items())])


def _scanned(path: Path) -> Written:
    """Return what is in a tar shard: each run of files that have one name up to the first dot."""
    size = path.stat().st_size
    noted: list[tuple[dict[str, tuple[int, int]], int]] = []
    last = None
    sample: Sample = {}
    places: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # the stubs lack it
                folder, _, file = member.name.rpartition("/")
                name, _, field = file.partition(".")
                if not member.isreg() or member.issparse() or name.startswith("__"):
                    continue
                if not field.isprintable() or not 0 < len(field) <= 100:
                    raise ValueError(f"a file is {printable(member.name)[:100]!r}, without a field")
                if member.offset_data + member.size > size or member.size >= 2**31:
                    raise ValueError(f"{printable(member.name)[:100]} has {member.size} bytes")
                if last is not None and (folder, name) != last:
                    noted.append((places, _checksum(sample)))
                    sample, places = {}, {}
                if field in sample:
                    raise ValueError(f"{printable(member.name)[:100]} is there twice in a row")
                last = folder, name
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                sample[field] = content.read()
                places[field] = (member.offset_data, member.size)
    except Exception as error:  # tarfile raises nearly any of them for a damaged header
        raise UserError(
            f"{path}: found no whole tar shard ({printable(str(error))[:200]}); make it anew"
        ) from None
    if sample:
        noted.append((places, _checksum(sample)))
    if not noted:
        raise UserError(f"{path}: found no file in it, expected samples; remove it")
    return Written(Shard(path.name, size, len(noted)), noted)


def _images(folder: Path, seed: int) -> tuple[list[tuple[Path, int]], tuple[str, ...]]:
    """Return a folder's images with their sizes, shuffled, and the names of the classes."""
    classes = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
    files = []
    for name in classes:
        for parent, _, names in os.walk(folder / name):
            paths = [Path(parent, each) for each in names if each.lower().endswith(IMAGES)]
            files += [(path, path.stat().st_size) for path in paths]
    if not files:
        raise UserError(
            f"{folder}: found no image in a folder of a class, expected CLASS/*.jpg or the like; "
            f"expected {', '.join(IMAGES)}"
        )
    files.sort()
    random.Random(seed).shuffle(files)
    return files, classes


def _rows(table: Path) -> int:
    return int(_parquet(table).metadata.num_rows)


def _parquet(table: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{table}: this Python has no pyarrow; install the extra `rows`, or give a folder"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(table)
    except (OSError, ValueError) as error:  # pyarrow's errors are these
        raise UserError(
            f"{table}: found no Parquet table ({printable(str(error))[:200]}); make it anew"
        ) from None


def _samples_of_table(table: Path, first: int) -> Iterator[Sample]:
    """Yield the samples of a table's rows from row `first` on."""
    file = _parquet(table)
    begin = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if begin + rows > first:
            for number, batch in enumerate(file.iter_batches(64, row_groups=[group])):
                for place, row in enumerate(batch.to_pylist()):
                    if begin + 64 * number + place >= first:
                        yield _sample(row, table)
        begin += rows


def _sample(row: dict[str, Any], table: Path) -> Sample:
    """Return a row's fields: bytes as they are, texts, and other values as JSON."""
    sample = {}
    for column, value in row.items():
        if value is None:
            continue
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            value = value["bytes"]  # an image of Hugging Face's datasets
        name = "cls" if column == "label" else column
        if isinstance(value, bytes):
            kind = next((kind for magic, kind in MAGIC.items() if value.startswith(magic)), "")
            sample[kind if kind and kind not in sample else name] = value
        else:
            text = value if isinstance(value, str) else json_text(value, default=str)
            sample[name] = text.encode()
    if not sample or any("/" in field or not field.isprintable() for field in sample):
        raise UserError(f"{table}: found a row without a value, or a column with / in its name")
    return sample


def size(text: str) -> int:
    """Return the bytes of a text such as 256M."""
    try:
        number = int(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else int(text)
    except ValueError:
        number = 0
    if number < 1:
        expected = "expected bytes, such as 200K, 100M or 1G"
        raise argparse.ArgumentTypeError(f"found {text!r}, {expected}")
    return number


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line asks for."""
    parser = Parser(
        prog="python -m sagemaker_lightning.shards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="make shards and their index")
    making.add_argument("origin", type=Path, metavar="FOLDER or TABLE")
    making.add_argument("output", type=Path, metavar="OUTPUT")
    making.add_argument(
        "--shard-bytes", type=size, default=size("256M"), help="such as 1G (default: 256M)"
    )
    making.add_argument("--seed", type=int, default=0, help="decides a folder's order")
    indexing = commands.add_parser("index", help="make the index of tar shards")
    indexing.add_argument("folder", type=Path, metavar="FOLDER")
    checking = commands.add_parser("check", help="read all samples")
    checking.add_argument("location", metavar="FOLDER or s3://BUCKET/PREFIX")
    args = parser.parse_args(arguments)
    try:
        if args.command == "make":
            make(args.origin, args.output, args.shard_bytes, args.seed)
        elif args.command == "index":
            index(args.folder)
        else:
            print(f"{args.location}: {check(args.location)} samples are whole")
    except (UserError, OSError) as error:
        sys.exit(f"error: {printable(str(error))[:1000]}")
