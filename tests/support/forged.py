"""Trainings that were interrupted, and checkpoints of theirs that somebody has changed."""

import hashlib
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sagemaker_lightning.resume.files import checkpoint_file

ENTRIES = checkpoint_file.ENTRIES_KEY


def forge(folder: Path, change: Callable[[dict], object]) -> Path:
    """Change the newest checkpoint's content; the file has the checksum of what it has then."""
    path = max(folder.glob("step-*.ckpt"))
    step, number, _ = checkpoint_file.read_footer(path)
    content = checkpoint_file.read(path)
    change(content)
    checkpoint_file.write(path, content, step, number)
    for other in {*folder.glob("step-*.ckpt"), folder / "last.ckpt"} - {path}:
        other.unlink(missing_ok=True)  # the run has only the forged one
    return path


def state_of_rank(content: dict) -> dict:
    return content[ENTRIES]["ranks"][0]


# Sizes and types ----------------------------------------------------------------------------------


@pytest.fixture(name="bounded")
def little_memory() -> Iterator[None]:
    """Let a test fail, and not the machine, if it takes memory or processor time without an end."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, limits[1]))
    before = signal.signal(signal.SIGPROF, lambda *_: pytest.fail("it takes too long"))
    signal.setitimer(signal.ITIMER_PROF, 120)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    resource.setrlimit(resource.RLIMIT_AS, limits)


def expanded() -> torch.Tensor:
    return torch.ones(1).expand(10**10)


def rewrite(path: Path, content: bytes) -> None:
    """Write a file with the footer of a checkpoint and a right checksum."""
    step, number, _ = checkpoint_file.read_footer(path)
    head = checkpoint_file.FOOTER.pack(checkpoint_file.MARK, step, number, b"")[:-32]
    path.write_bytes(content + head + hashlib.sha256(content + head).digest())
