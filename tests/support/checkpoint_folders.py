"""Folders with checkpoints, and what is chosen of them."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.files.checkpoint_dir import CheckpointDir, choose_checkpoint


def state(step: int) -> dict:
    return {
        "weights": torch.full((100,), float(step)),
        checkpoint_file.ENTRIES_KEY: {"parts": {"loggers": [{"version": 3}]}},
    }


@pytest.fixture(name="folder")
def folder_of_three(tmp_path: Path) -> CheckpointDir:
    directory = CheckpointDir(CheckpointHome(tmp_path / "checkpoints"), keep=3)
    for step in (10, 20, 30):
        directory.save(state(step), step, number=step * 7)
    return directory


def chosen(
    folder: CheckpointDir, hosts: int = 1, missing_file: Callable[[Path], str] = lambda path: ""
) -> Path | None:
    return choose_checkpoint(
        CheckpointDir(CheckpointHome(folder.path), 3),
        "algo-1",
        lambda choice: [choice] * hosts,
        True,
        missing_file,
    )


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def leftover(path: Path, draw: random.Random) -> None:
    path.with_name(f"step-000000040.ckpt.{draw.randrange(10**6)}.sagemaker-ignore").write_bytes(
        b"half"
    )


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)


def fails_on_a_full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def without_ranks(removed: list[str] | None = None) -> SimpleNamespace:
    """Return what a callback uses of a trainer of one rank; it notes what is removed."""
    strategy = SimpleNamespace(
        checkpoint_io=None,
        reduce_boolean_decision=lambda decision, all=True: decision,
        broadcast=lambda value: value,
        remove_checkpoint=(removed if removed is not None else []).append,
    )
    return SimpleNamespace(strategy=strategy, is_global_zero=True)
