"""Checkpoint files that are intact or absent, each with a checksum.

A file is what torch.save writes, followed by a footer: a mark with the format's version, the
optimizer step, the number of the save, and the SHA-256 of everything before. torch.load and
Lightning read it like any other. torch's own format notices a file that is cut off; of files with
one bit changed it loaded every one (a trial with 200). A checksum is not a signature:
weights_only=True is what keeps a file from running code.
"""

import glob
import hashlib
import io
import os
import pickle
import re
import stat
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from fsspec.core import url_to_fs
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from sagemaker_lightning.compat import torch_unpickler
from sagemaker_lightning.compat.torch_modules import stored_parts
from sagemaker_lightning.contract.atomic_files import atomic_write, remove_leftovers
from sagemaker_lightning.contract.checkpoint_home import CHECKPOINT_NAME
from sagemaker_lightning.contract.errors import with_article
from sagemaker_lightning.state.readable import readable

ENTRIES_KEY = "sagemaker_lightning"
"""The key of this package's entries in a checkpoint."""
BEFORE_HOOKS = f"{ENTRIES_KEY}_before_hooks"
"""What `on_save_checkpoint` has replaced in the checkpoint, by key."""
FORMAT_VERSION = 16
"""The version of the format: of the footer, and of what the entries of this package mean.

Raise it with each change after which an older checkpoint would be read wrongly, such as another
`state_key` of a callback. A checkpoint of another format is refused.
"""
MARK = f"\0sagemaker-lightning {FORMAT_VERSION}\0".encode()
FOOTER = struct.Struct(f"<{len(MARK)}sQQ32s")
# The end of a file of any format. All that follows the mark has the same length in all of them.
ANY_MARK = re.compile(rb"\0sagemaker-lightning (\d+)\0.{48}\Z", re.DOTALL)
MAX_DEPTH = 250
"""How often a part of a checkpoint may be within another one, at most.

`readable` writes plain values to less than half of it, and Lightning recurses into what it reads.
"""
SPARE_PARTS = 1 << 16
SPARE_BYTES = 1 << 26
"""What a checkpoint may hold besides what its own size allows."""
SHORT_TEXT = 200
"""Characters of a text of which a file may have one and name it many times, as it does labels."""
NUMBERS = bool, int, float, complex, type(None)
PLAIN = *NUMBERS, torch.dtype, torch.device
"""Classes of what a checkpoint holds besides tensors, text and containers."""
ALWAYS_READABLE = str, bool, float, type(None)
"""Classes of which torch reads any value."""
NOT_OURS = "is cut off, or not a checkpoint of this program"


class _HashingFile:
    """A file whose content is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        """Do nothing: `atomic_write` flushes the file."""


def write(path: Path, checkpoint: Mapping[str, Any], step: int = 0, number: int = 0) -> bytes:
    """Write a checkpoint; return its SHA-256.

    The file is complete on the disk, or as it was before.

    Args:
        path: The file.
        checkpoint: What torch.save writes.
        step: Its optimizer step.
        number: The number of the save; 0 if no run resumes from it.

    Raises:
        OSError: It could not be written.
    """
    with atomic_write(path) as file:
        hashing = _HashingFile(file)
        try:
            torch.save(checkpoint, hashing)  # type: ignore[arg-type]  # torch writes and flushes alone
        except RuntimeError as error:  # raised by torch's writer; the file's own error says more
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        head = FOOTER.pack(MARK, step, number, b"")[:-32]
        hashing.write(head)
        file.write(hashing.hash.digest())
    return hashing.hash.digest()


def read(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Return the checkpoint in a file, with tensors on the CPU; it has plain values alone.

    Args:
        path: The file.
        mmap: Whether tensors are read from the file only when they are used.

    Raises:
        UnpicklingError, RuntimeError, ...: torch cannot read it, or parts of it are compressed.
    """
    with torch_unpickler.plain_values():
        return _read(path, mmap)


def _read(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Return what is in a file, with tensors on the CPU; it cannot run code."""
    if zipfile.is_zipfile(path):  # as all files since torch 1.6
        with zipfile.ZipFile(path) as parts:
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts.infolist()):
                raise pickle.UnpicklingError("a part of it is compressed")
            if not _has_one_directory(path, parts):
                raise pickle.UnpicklingError("it has more than one list of its parts")
    torch_unpickler.bound()
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    return content


def _has_one_directory(path: Path, parts: zipfile.ZipFile) -> bool:
    """Return whether the list of parts that Python reads is the one that torch reads.

    Python takes the list that lies before its end, torch the one whose place the end says. That of
    a large file says it in two places.
    """
    with path.open("rb") as file:
        file.seek(parts.start_dir)
        end = file.read()
    place = end.rfind(b"PK\5\6")
    (start,) = struct.unpack_from("<I", end, place + 16)
    if end[place - 20 : place - 16] == b"PK\6\7":
        (of_large,) = struct.unpack_from("<Q", end, place - 12)
        at = of_large - parts.start_dir
        if at != place - 76 or end[at : at + 4] != b"PK\6\6":
            return False
        (start,) = struct.unpack_from("<Q", end, at + 48)
    return bool(start == parts.start_dir)


def read_footer(path: Path) -> tuple[int, int, bytes] | str:
    """Return step, number of the save and checksum at the end of a file.

    If the file is not a checkpoint of this format, return a text that says why.
    """
    end = _end(path)
    if isinstance(end, str):
        return end
    mark, step, number, digest = FOOTER.unpack(end.rjust(FOOTER.size)[-FOOTER.size :])
    return (step, number, digest) if mark == MARK else NOT_OURS


def other_format(path: Path) -> int | None:
    """Return the format of a checkpoint that another version of this program wrote.

    None for all other files: a checkpoint of this format, or no checkpoint.
    """
    end = _end(path)
    match = None if isinstance(end, str) else ANY_MARK.search(end)
    return int(match[1]) if match and int(match[1]) != FORMAT_VERSION else None


def _end(path: Path) -> bytes | str:
    """Return the last bytes of a file, more than a footer has.

    If it cannot be read, return a text that says why.
    """
    try:
        # Opening a pipe would block, and a link may lead anywhere.
        if not stat.S_ISREG(path.lstat().st_mode):
            return "is not a plain file"
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * FOOTER.size))
            return file.read()
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def identify(path: Path) -> tuple[int, int] | str:
    """Return step and number of the save of a checkpoint, as its footer and its name say.

    If the file is not a checkpoint to resume from, return a text that says why. Its checksum is not
    compared, which would take reading all of it.
    """
    footer_or_problem = read_footer(path)
    if isinstance(footer_or_problem, str):
        return footer_or_problem
    step, number, _ = footer_or_problem
    name_match = CHECKPOINT_NAME.fullmatch(path.name)
    if not number:
        return "is not one to resume from: Lightning's ModelCheckpoint wrote it"
    if name_match and int(name_match[1]) != step:
        return f"has the name of another checkpoint: it is of step {step}"
    return step, number


def examine(path: Path) -> tuple[int, int] | str:
    """Return step and number of the save of an intact checkpoint.

    If the file is not an intact checkpoint to resume from, return a text that says why.
    """
    step_and_number = identify(path)
    if isinstance(step_and_number, str):
        return step_and_number
    return damage(path) or _size_problem(path) or step_and_number


def _size_problem(path: Path) -> str:
    """Return what is wrong with the content of a file with a right checksum; "" if nothing.

    A checkpoint is input. By a few bytes, pickle makes a list that holds another one many times,
    and torch a tensor whose elements are all one number in memory. Whoever copies them makes each
    part again. So the parts of a checkpoint to resume from are not larger together than its file.
    They have plain values alone: torch reads functions and classes, too.
    """
    try:
        state = read(path, mmap=True)
    except Exception as error:
        return f"cannot be read ({_reason(error)})"
    if not isinstance(state, dict) or not isinstance(state.get(ENTRIES_KEY), dict):
        return NOT_OURS
    size = path.stat().st_size
    parts_left = size + SPARE_PARTS
    bytes_left = 2 * size + SPARE_BYTES
    stack: list[tuple[Any, int]] = [(state, 0)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, torch.Tensor):
            bytes_left -= sum(part.numel() * part.itemsize for part in stored_parts(value))
            if vars(value):  # torch would set any attribute, also in place of a method
                return "is forged: it holds a tensor with attributes"
        elif isinstance(value, (str, bytes, bytearray)):
            bytes_left -= len(value) if len(value) > SHORT_TEXT else 0
        elif isinstance(value, (dict, list, tuple, set, frozenset)):
            parts_left -= len(value)
            members = [*value, *value.values()] if isinstance(value, dict) else [*value]
            members += getattr(value, "__dict__", {}).values()  # such as a state dict's versions
            stack += [(each, depth + 1) for each in members if type(each) not in NUMBERS]
        elif not isinstance(value, PLAIN):
            return f"is forged: it holds {with_article(type(value).__name__)}"
        if parts_left < 0 or bytes_left < 0 or depth > MAX_DEPTH:
            return "is forged: it is small, and what it holds is not"
    return ""


def damage(path: Path) -> str:
    """Return what is wrong with a file of weights; "" if nothing is.

    A file without our footer counts as intact if torch can read it.
    """
    footer_or_problem = read_footer(path)
    if not isinstance(footer_or_problem, str):
        return _checksum_problem(path, footer_or_problem[2])
    try:
        _read(path)
    except Exception as error:
        return f"cannot be read ({_reason(error)})"
    return ""


def _checksum_problem(path: Path, digest: bytes) -> str:
    """Return what is wrong with a file that should have a SHA-256; "" if nothing."""
    sha = hashlib.sha256()
    try:
        with path.open("rb") as file:
            bytes_left = os.fstat(file.fileno()).st_size - len(digest)
            while block := file.read(min(bytes_left, 2**22)):
                sha.update(block)
                bytes_left -= len(block)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if sha.digest() == digest else "is damaged: its checksum does not match"


def size(state: Mapping[str, Any]) -> int:
    """Return about how many bytes a checkpoint has: its tensors and texts."""
    found = 0
    stack: list[Any] = [state]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            found += sum(part.numel() * part.itemsize for part in stored_parts(value))
        elif isinstance(value, (str, bytes)):
            found += len(value)
        elif isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, (list, tuple)):
            stack += value
    return found


def why_unreadable(state: dict[str, Any]) -> str:
    """Return why `read` would refuse a state once it is written; "" if it would not.

    The values of its tensors are not checked.
    """
    # Nearly all is of a few kinds; to write and read it, too, would take a second for many weights.
    doubtful: list[Any] = []
    stack: list[Any] = [state]
    while stack:
        value = stack.pop()
        class_ = type(value)
        if class_ in (dict, OrderedDict):
            stack += [*value.keys(), *value.values(), *getattr(value, "__dict__", {}).values()]
        elif class_ in (list, tuple):
            stack += value
        elif class_ is int:
            doubtful += [value] if value.bit_length() > 64 else []
        elif class_ not in ALWAYS_READABLE and not isinstance(value, torch.Tensor):
            doubtful.append(value)
    if not doubtful:
        return ""
    file = io.BytesIO()
    torch.save(doubtful, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception as error:
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    """Return in a line why torch does not read a file."""
    if class_match := re.search(r"GLOBAL (\S+)", str(error)):
        return f"there is {with_article(class_match[1])} in it"
    # What comes before the unpickler's own words is advice about weights_only.
    reason = str(error).rpartition("WeightsUnpickler error:")[-1].strip()
    return reason.splitlines()[0] if reason else type(error).__name__


class CheckedIO(TorchCheckpointIO):
    """Writes Lightning's own checkpoints, such as ModelCheckpoint's, with a checksum.

    This applies to files in a folder, not at a URL. A full disk does not end the training:
    `problem` says what could not be written, and the older file stays.

    Args:
        plain_values: Whether to write what can be read with weights_only=True: text in place of
            objects, and plain values in place of arrays. If not, a file has what Lightning writes.
    """

    problem = ""
    """What could not be written last; "" if all was written."""

    def __init__(self, plain_values: bool) -> None:
        super().__init__()
        self.plain_values = plain_values
        self.left_out: tuple[str, ...] = ()

    @contextmanager
    def leaving_out(self, *names: str) -> Iterator[None]:
        """Write checkpoints without entries of these names while the block lasts."""
        self.left_out = names
        try:
            yield
        finally:
            self.left_out = ()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; if that fails, `problem` says why."""
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        # A run that was killed while it wrote this file writes it again once it has resumed.
        remove_leftovers(Path(path).parent, glob.escape(Path(path).name))
        try:
            self.problem = ""
            checkpoint = {
                name: value for name, value in checkpoint.items() if name not in self.left_out
            }
            if self.plain_values:
                checkpoint = readable(checkpoint, copies=False)
            write(Path(path), checkpoint, checkpoint.get("global_step", 0))
        except OSError as error:
            self.problem = f"{path} could not be written ({error.strerror})"
        return None

    def forget_problem(self) -> None:
        """Forget what could not be written before."""
        self.problem = ""

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file, unless a newer one could not be written; folders are not ours."""
        files, path_in_files = url_to_fs(str(path))
        if not self.problem and files.isfile(path_in_files):
            files.rm_file(path_in_files)
