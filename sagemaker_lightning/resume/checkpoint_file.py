"""Checkpoint files that are intact or absent, each with a checksum.

A file is what torch.save writes, followed by a footer: MARK, the optimizer step, the number of the
save, and the SHA-256 of everything before. torch.load and Lightning read it like any other. torch's
own format notices a file that is cut off; of files with one bit changed it loaded every one (a
trial with 200). A checksum is no signature: weights_only=True is what keeps a file from running
code.
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
"""The key of this package's entries in a checkpoint."""
MARK = b"\0sagemaker-lightning 1\0"
FOOTER = struct.Struct(f"<{len(MARK)}sQQ32s")
FOREIGN = "is cut off, or no checkpoint of this program"


class _HashingFile:
    """A file whose content is hashed while it is written."""

    def __init__(self, file) -> None:
        self.file = file
        self.hash = hashlib.sha256()

    def write(self, data) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write(path: Path, checkpoint: dict[str, Any], step: int = 0, number: int = 0) -> None:
    """Write a checkpoint: the file is complete on the disk, or as it was before.

    Args:
        path: The file.
        checkpoint: What torch.save writes.
        step: Its optimizer step.
        number: The number of the save; 0 if it is none to resume from.

    Raises:
        OSError: It could not be written.
    """
    with whole(path) as file:
        hashing = _HashingFile(file)
        try:
            torch.save(checkpoint, hashing)
        except RuntimeError as error:  # raised by torch's writer; the file's own error says more
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        head = FOOTER.pack(MARK, step, number, b"")[:-32]
        hashing.write(head)
        file.write(hashing.hash.digest())


def read(path: Path) -> dict[str, Any]:
    """Return the checkpoint in a file, with tensors on the CPU; it cannot run code."""
    return torch.load(path, map_location="cpu", weights_only=True)


def footer(path: Path) -> tuple[int, int, bytes] | str:
    """Return step, number of the save and checksum at the end of a file.

    If the file is no checkpoint, return a text that says why.
    """
    try:
        # Opening a pipe would block, and a link may lead anywhere.
        if not stat.S_ISREG(path.lstat().st_mode):
            return "is not a plain file"
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - FOOTER.size))
            mark, step, number, digest = FOOTER.unpack(file.read().rjust(FOOTER.size))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return (step, number, digest) if mark == MARK else FOREIGN


def examine(path: Path) -> tuple[int, int] | str:
    """Return step and number of the save of an intact checkpoint.

    If the file is no intact checkpoint to resume from, return a text that says why.
    """
    footer_or_problem = footer(path)
    if isinstance(footer_or_problem, str):
        return footer_or_problem
    step, number, digest = footer_or_problem
    name_match = NAME.fullmatch(path.name)
    if not number:
        return "is none to resume from: Lightning's ModelCheckpoint wrote it"
    if name_match and int(name_match[1]) != step:
        return f"has another one's name: it is of step {step}"
    return _checksum_problem(path, digest) or (step, number)


def damage(path: Path) -> str:
    """Return what is wrong with a file of weights; "" if nothing is.

    A file without our footer counts as intact if torch can read it.
    """
    footer_or_problem = footer(path)
    if not isinstance(footer_or_problem, str):
        return _checksum_problem(path, footer_or_problem[2])
    try:
        read(path)
    except Exception as error:
        return f"cannot be read ({str(error).splitlines()[0]})"
    return ""


def _checksum_problem(path: Path, digest: bytes) -> str:
    """Return what is wrong with a file that should have a SHA-256; "" if nothing."""
    sha = hashlib.sha256()
    try:
        with path.open("rb") as file:
            bytes_left = os.fstat(file.fileno()).st_size - len(digest)
            while bytes_left > 0 and (block := file.read(min(bytes_left, 2**22))):
                sha.update(block)
                bytes_left -= len(block)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if sha.digest() == digest else "is damaged: its checksum is another one"


def unreadable(state: dict[str, Any]) -> str:
    """Return why `read` would refuse a state once it is written; "" if it would not.

    The values of its tensors are not checked.
    """
    file = io.BytesIO()
    torch.save(apply_to_collection(state, torch.Tensor, lambda tensor: torch.empty(0)), file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception as error:
        class_match = re.search(r"GLOBAL (\S+)", str(error))
        return f"there is a {class_match[1]} in it" if class_match else str(error).splitlines()[0]
    return ""


class VerifiedIO(TorchCheckpointIO):
    """Writes Lightning's own checkpoints, such as ModelCheckpoint's, with a checksum.

    This applies to files in a folder, not at a URL. A full disk does not end the training: `lost`
    says what could not be written, and the older file stays.

    Args:
        plain_values: Whether to write what can be read with weights_only=True: text in place of
            objects, and plain values in place of arrays. If not, a file has what Lightning writes.
    """

    lost: str | None = None

    def __init__(self, plain_values: bool) -> None:
        super().__init__()
        self.plain_values = plain_values

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; if that fails, `lost` says why."""
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        try:
            self.lost = None
            if self.plain_values:
                checkpoint = plain(checkpoint, {}, str, copies=False)
            write(Path(path), checkpoint, checkpoint.get("global_step", 0))
        except OSError as error:
            self.lost = f"{path} could not be written ({error.strerror})"
        return None

    def remove_checkpoint(self, path) -> None:
        """Remove a file, unless a newer one could not be written."""
        if not self.lost:
            super().remove_checkpoint(path)
