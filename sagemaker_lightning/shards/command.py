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
import signal
import sys
import tarfile
import time
from collections import Counter
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
    from sagemaker_lightning.shards.origins import Sample, origin_at
except ImportError as missing:
    sys.exit(
        f"error: {sys.executable} has no {missing.name}; use the python of the training, or "
        "install the extra `rows` of this package"
    )

STATE = "shards.unfinished"
"""The folder, in the output, of what says how far an unfinished call is."""
MADE = "shards.made"
"""The file, in the output, of what tells a call of `make` that is done, and its index."""
SECONDS = 5.0  # between two lines of progress
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
PIECE = 2**20  # bytes that are read at once


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
        """Return what a file has; None if there is no such file, or if it is damaged."""
        try:
            *shard, samples = json.loads(path.read_bytes())
            return cls(Shard(*shard), samples)
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def is_in(self, folder: Path) -> bool:
        """Return whether a folder still has the shard, and as large as it was."""
        path = folder / self.shard.name
        return path.is_file() and path.stat().st_size == self.shard.bytes


def make(path: Path, output: Path, shard_bytes: int, seed: int) -> None:
    """Write the shards of a folder of images, or of a Parquet table, and their index.

    Args:
        path: The folder or the table.
        output: A new or empty folder, or one that such a call has begun; it is not in the folder.
        shard_bytes: Bytes of a shard: the last sample may exceed them.
        seed: Decides in which order a folder's images are. A table's rows stay in theirs.

    Raises UserError; OSError.
    """
    if path.resolve() in (output.resolve(), *output.resolve().parents):
        raise UserError(f"{output}: found it within {path}, expected a folder beside it; give one")
    origin = origin_at(path, seed)
    classes = list(origin.classes)
    call = _number(["make", origin.identity, classes, shard_bytes, seed])
    if _is_made(output, call):
        print(f"{output / indexes.NAME}: all is done, {origin.total} samples")
        return
    state = _begun(output, call)
    progress = Progress(origin.total)
    written: list[Written] = []
    done = 0
    while done < origin.total:
        name = f"shard-{len(written):06}.tar"
        noted = state / f"{name}.json"
        shard = Written.load(noted)
        if shard is None or not shard.is_in(output):
            samples = origin.samples(done)
            shard = _write_shard(output / name, samples, done, shard_bytes, progress)
            shard.save(noted)
        done += shard.shard.samples
        progress.reached(done, shard.shard.name)
        written.append(shard)
    _finish(output, written, classes, state, call)


def index(folder: Path) -> None:
    """Write the index of the tar shards of a folder.

    Raises UserError; OSError.
    """
    names = sorted(path.name for path in folder.glob("*.tar")) if folder.is_dir() else []
    if not names:
        found = "no *.tar" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: found {found}, expected tar shards; give their folder")
    about = []
    for name in names:
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: found no file, expected a tar shard; remove it")
        status = path.stat()
        about.append([name, status.st_size, status.st_mtime_ns])
    state = _begun(folder, _number(["index", about]))
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


def _number(call: list[Any]) -> str:
    """Return what tells a call, with its files and flags, from others."""
    return hashlib.blake2b(json.dumps(call).encode(), digest_size=16).hexdigest()


def _is_made(output: Path, call: str) -> bool:
    """Return whether a call of `make` is done: it may have been killed before it said so.

    Raises UserError if the output has anything else, or what is made there is not whole any more.
    """
    others = sorted(entry.name for entry in output.iterdir()) if output.is_dir() else []
    if not others or (STATE in others and MADE not in others):
        return False
    made = output / MADE
    name = output / indexes.NAME
    if not made.is_file() or not name.is_file() or made.read_text() != _made(call, name):
        is_done = indexes.NAME in others
        found = f"the {indexes.NAME} of another call" if is_done else others[0]
        raise UserError(f"{output}: found {found}, expected a new or empty folder; give one")
    for shard in indexes.read(name).shards:
        if not Written(shard, []).is_in(output):
            raise UserError(
                f"{output / shard.name}: found no file of {shard.bytes} bytes, which "
                f"{indexes.NAME} names; make all shards again, in a new or empty folder"
            )
    _remove(output / STATE)
    return True


def _made(call: str, index_file: Path) -> str:
    return f"{call} {indexes.digest(index_file.read_bytes())}"


def _remove(state: Path) -> None:
    if state.is_dir():
        for path in state.iterdir():
            path.unlink()
        state.rmdir()


def _begun(output: Path, number: str) -> Path:
    """Return the folder of the state of a call, which is made, or there from an earlier one."""
    state = output / STATE
    state.mkdir(parents=True, exist_ok=True)
    remove_leftovers(output, "*")
    remove_leftovers(state, "*")
    noted = state / "call"
    if not noted.exists():
        with atomic_write(noted) as file:
            file.write(number.encode())
    if noted.read_text() != number:
        raise UserError(
            f"{output}: found the work of a call with other files or flags; give those, or a "
            f"new folder (for `index`: remove {STATE})"
        )
    return state


def _finish(
    output: Path, written: list[Written], classes: Sequence[str], state: Path, made: str = ""
) -> None:
    """Write the index, note the call of `make` that is done, if it is one, and remove the state."""
    numbers = Counter(field for shard in written for places, _ in shard.samples for field in places)
    fields = sorted(numbers)
    if len(fields) > indexes.MOST_FIELDS:
        raise UserError(
            f"{output}: found {len(fields)} kinds of files in the samples ({', '.join(fields[:3])} "
            f"and others), expected at most {indexes.MOST_FIELDS}; a sample's files have one name "
            "up to the first dot"
        )
    unfinished = state / indexes.NAME
    indexes.write(
        unfinished,
        [shard.shard for shard in written],
        fields,
        classes,
        (indexes.table(shard.samples, fields) for shard in written),
    )
    indexes.read(unfinished)
    unfinished.replace(output / indexes.NAME)
    if made:
        with atomic_write(output / MADE) as file:
            file.write(_made(made, output / indexes.NAME).encode())
    _remove(state)
    count = sum(shard.shard.samples for shard in written)
    for field, number in sorted(numbers.items()):
        if number < count:
            print(f"{printable(field)}: {count - number} of {count} samples have none")
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
    links = 0
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # the stubs lack it
                folder, _, file = member.name.rpartition("/")
                name, _, field = file.partition(".")
                if member.islnk() or member.issym():
                    links += 1
                # WebDataset leaves out __x__, and what begins with a dot, such as macOS's ._x.
                if not member.isreg() or member.issparse() or name.startswith("__") or not name:
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
            if not _has_only_zeros_after(path, archive.offset):
                raise ValueError(f"byte {archive.offset} is not a header or the archive's end")
    except Exception as error:  # tarfile raises nearly any of them for a damaged header
        raise UserError(
            f"{path}: found no whole tar shard ({printable(str(error))[:200]}); make it again"
        ) from None
    if sample:
        noted.append((places, _checksum(sample)))
    if not noted:
        raise UserError(f"{path}: found no file in it, expected samples; remove it")
    if links:
        print(
            f"{printable(str(path))}: {links} links are left out; pack the files that they lead to"
        )
    return Written(Shard(path.name, size, len(noted)), noted)


def _has_only_zeros_after(path: Path, offset: int) -> bool:
    """Return whether a tar has its end at an offset: zeros, and nothing else.

    tarfile takes a damaged header for the end, but for the first one.
    """
    with path.open("rb") as file:
        file.seek(offset)
        if len(piece := file.read(PIECE)) < tarfile.BLOCKSIZE:
            return False
        while piece:
            if piece.strip(b"\0"):
                return False
            piece = file.read(PIECE)
    return True


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
    checking.add_argument("folder", metavar="FOLDER or s3://BUCKET/PREFIX")
    args = parser.parse_args(arguments)
    try:
        if args.command == "make":
            make(args.origin, args.output, args.shard_bytes, args.seed)
        elif args.command == "index":
            index(args.folder)
        else:
            print(f"{args.folder}: {check(args.folder)} samples are whole")
    except KeyboardInterrupt:
        print("interrupted: the same call continues", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError) as error:
        names_file = isinstance(error, UserError) or error.filename
        where = "" if names_file else f"{args.output if args.command == 'make' else args.folder}: "
        sys.exit(f"error: {printable(where + str(error))[:1000]}")
