"""Checkpoint files that are whole or absent, and which of them to resume from.

A file is what torch.save writes (torch.load and Lightning read it as any other) with a footer: MARK, the optimizer
step, the number of the save, and the SHA-256 of all before. torch's own format notices a file that is cut off; of
files with one bit changed it loaded every one (a trial with 200). A checksum is no signature: what keeps a file from
running code is weights_only=True.
"""

import hashlib
import io
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

from sagemaker_lightning.contract.atomic_files import whole
from sagemaker_lightning.contract.shutdown import NAME
from sagemaker_lightning.state.encoding import plain

KEY = "sagemaker_lightning"
"""In a checkpoint, what is ours."""
MARK = b"\0sagemaker-lightning 1\0"
FOOTER = struct.Struct(f"<{len(MARK)}sQQ32s")
FOREIGN = "is cut off, or no checkpoint of this program"


class _Hashing:
    """A file that is hashed as it is written."""

    def __init__(self, file) -> None:
        self.file, self.hash = file, hashlib.sha256()

    def write(self, data) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write(path: Path, checkpoint: dict[str, Any], step: int = 0, number: int = 0) -> None:
    """Write `checkpoint` so that `path` is all of it, on the disk, or what it was before; OSError says why not."""
    with whole(path) as file:
        hashing = _Hashing(file)
        try:
            torch.save(checkpoint, hashing)
        except RuntimeError as error:  # torch's writer, where the file's own error says more
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        head = FOOTER.pack(MARK, step, number, b"")[:-32]
        hashing.write(head)
        file.write(hashing.hash.digest())


def read(path: Path) -> dict[str, Any]:
    """Return the checkpoint in `path`, on the CPU; nothing in it can run code."""
    return torch.load(path, map_location="cpu", weights_only=True)


def footer(path: Path) -> tuple[int, int, bytes] | str:
    """Return the step, the number of the save and the checksum that a file ends with, or why it is no checkpoint."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a pipe would be waited for, a link leads anywhere
            return "is not a plain file"
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - FOOTER.size))
            mark, step, number, digest = FOOTER.unpack(file.read().rjust(FOOTER.size))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return (step, number, digest) if mark == MARK else FOREIGN


def examine(path: Path) -> tuple[int, int] | str:
    """Return the step and the number of the save of a whole checkpoint, or what is wrong with the file."""
    found = footer(path)
    if isinstance(found, str):
        return found
    step, number, digest = found
    named = NAME.fullmatch(path.name)
    if not number:
        return "is none to resume from: Lightning's ModelCheckpoint wrote it"
    if named and int(named[1]) != step:
        return f"has another one's name: it is of step {step}"
    return _damage(path, digest) or (step, number)


def damage(path: Path) -> str:
    """Return what is wrong with a file of weights, "" if nothing is; of one without our footer, if torch reads it."""
    found = footer(path)
    if not isinstance(found, str):
        return _damage(path, found[2])
    try:
        read(path)
    except Exception as error:
        return f"cannot be read ({str(error).splitlines()[0]})"
    return ""


def _damage(path: Path, digest: bytes) -> str:
    sha = hashlib.sha256()
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size - len(digest)
            while left > 0 and (block := file.read(min(left, 2**22))):
                sha.update(block)
                left -= len(block)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if sha.digest() == digest else "is damaged: its checksum is another one"


def unreadable(state: dict[str, Any]) -> str:
    """Return why `read` would refuse a state that was written, "" if it would not; its tensors are not looked at."""
    file = io.BytesIO()
    torch.save(apply_to_collection(state, torch.Tensor, lambda tensor: torch.empty(0)), file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        return f"there is a {found[1]} in it" if found else str(error).splitlines()[0]
    return ""


class VerifiedIO(TorchCheckpointIO):
    """Lightning's own checkpoints, such as ModelCheckpoint's, by `write`, where they go to a folder.

    A disk that is full costs no training: `lost` says what could not be written, and the older file stays.
    """

    lost: str | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path, storage_options: Any | None = None) -> None:
        """Write; what goes wrong is in `lost`."""
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        try:
            self.lost = None
            checkpoint = plain(checkpoint, {}, str, copies=False)  # it goes back to whoever asks as plain values
            write(Path(path), checkpoint, checkpoint.get("global_step", 0))
        except OSError as error:
            self.lost = f"{path} could not be written ({error.strerror})"
        return None

    def remove_checkpoint(self, path) -> None:
        """Remove, unless it is the last one there is."""
        if not self.lost:
            super().remove_checkpoint(path)
