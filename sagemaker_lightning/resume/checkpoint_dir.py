"""The folder of a job's checkpoints: which of them to resume from, writing one more, and removing what is too old."""

import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sagemaker_lightning.contract.atomic_files import IGNORED
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.shutdown import NAME
from sagemaker_lightning.resume.checkpoint_file import KEY, examine, footer, write

UPLOADING, UPLOADED = ".sagemaker-uploading", ".sagemaker-uploaded"  # empty files of the uploader's, beside each file
LAST = "last.ckpt"


@dataclass
class Folder:
    """The folder of a job's checkpoints, as one host sees it.

    Args:
        path: The folder.
        keep: How many checkpoints stay.
    """

    path: Path
    keep: int
    whole: list[int] = field(default_factory=list)
    """The steps of the checkpoints known to be whole, oldest first."""
    started: float = 0.0
    """When this process began, in seconds since the epoch: an uploader's mark that is older is of an earlier job."""

    def file(self, step: int) -> Path:
        """Return the name of the checkpoint of a step."""
        return self.path / f"step-{step:09d}.ckpt"

    def named(self) -> list[tuple[int, Path]]:
        """Return all that have a checkpoint's name, newest step first, which is not always the newest file: a copy
        from S3 has the time of the copy. last.ckpt is another name of one of them, which may be gone."""
        entries = list(self.path.iterdir()) if self.path.is_dir() else []
        found = [(int(match[1]), entry) for entry in entries if (match := NAME.fullmatch(entry.name))]
        for entry in entries:
            if entry.name == LAST:
                says = footer(entry)
                found.append((-1 if isinstance(says, str) else says[0], entry))
        return sorted(found, key=lambda one: (one[0], one[1].name != LAST), reverse=True)

    def foreign(self) -> list[tuple[Path, str]]:
        """Return what looks like a checkpoint, has not its name, and is not ModelCheckpoint's; and what it is."""
        others = {path for path in self.path.glob("*.ckpt") if not NAME.fullmatch(path.name) and path.name != LAST}
        found = [(path, footer(path)) for path in sorted(others)]
        return [
            (path, is_ if isinstance(is_, str) else f"has not its own name, which is {self.file(is_[0]).name}")
            for path, is_ in found
            if isinstance(is_, str) or is_[1]  # Lightning's own have no number
        ]

    def loggers(self) -> list[dict[str, Any]]:
        """Return what the newest checkpoint tells of the run's loggers; nothing if there is none."""
        for _, path in self.named():
            with suppress(Exception):  # whatever is in a damaged file; `choose` will say so
                return torch.load(path, weights_only=True, mmap=True)[KEY]["loggers"]
        return []

    def newest(
        self, limit: float, say: Callable[[str], None], lacks: Callable[[Path], str]
    ) -> tuple[int, int, Path] | None:
        """Return step, number of the save and path of the newest whole checkpoint up to step `limit`.

        `lacks` returns which file goes with a checkpoint and is not there or damaged, or "".
        """
        for step, path in self.named():
            if step > limit:
                continue
            found = examine(path)
            if isinstance(found, str):
                say(f"checkpoint {path} {found}; it is skipped")
            elif found[0] <= limit and (problem := lacks(path)):
                say(f"checkpoint {path} goes with {problem}; it is skipped")
            elif found[0] <= limit:
                return *found, path
        return None

    def add(self, checkpoint: dict[str, Any], step: int, number: int) -> None:
        """Write a checkpoint, give it the name last.ckpt, too, and remove what is no longer needed."""
        write(self.file(step), checkpoint, step, number)
        self.whole = sorted({*self.whole, step})
        with suppress(OSError):  # a file system without hard links: whoever looks for last.ckpt looks in vain
            aside = self.path / f"{LAST}.{os.getpid()}{IGNORED}"
            aside.unlink(missing_ok=True)
            os.link(self.file(step), aside)
            os.replace(aside, self.path / LAST)
        for old in self.whole[: -self.keep]:
            if not self._is_uploading(self.file(old)):
                self.file(old).unlink(missing_ok=True)
                self.whole.remove(old)

    def clean(self) -> None:
        """Remove what an earlier process of this host, killed while it wrote, has left."""
        for path in self.path.glob(f"*.ckpt.*{IGNORED}"):
            with suppress(OSError):
                path.unlink()

    def _is_uploading(self, file: Path) -> bool:
        begun, ended = (file.with_name(file.name + ending) for ending in (UPLOADING, UPLOADED))
        with suppress(OSError):
            return begun.stat().st_mtime >= self.started and not ended.exists()
        return False


class Writer:
    """Writes to a folder in the background, one checkpoint at a time."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.thread: threading.Thread | None = None
        self.problem: Exception | None = None  # why the last one could not be written

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return bool(self.thread and self.thread.is_alive())

    @property
    def why(self) -> str:
        """Why the last checkpoint could not be written; "" if it could."""
        if isinstance(self.problem, OSError) and self.problem.strerror:
            return self.problem.strerror
        return " ".join(f"{type(self.problem).__name__}: {self.problem}".split()) if self.problem else ""

    def write(self, checkpoint: dict[str, Any], step: int, number: int) -> None:
        """Begin to write a checkpoint, which nobody changes any more, when the one before is written."""
        self.wait()
        self.check("training goes on, but")
        self.thread = threading.Thread(target=partial(self._write, checkpoint, step, number), name="checkpoint")
        self.thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self.thread:
            self.thread.join()

    def check(self, how: str) -> None:
        """Say that the last checkpoint could not be written, if it could not; the error, if there is no older one."""
        if not self.problem:
            return
        if not self.folder.whole:
            raise self.problem
        print(
            f"warning: {how} no checkpoint could be written to {self.folder.path} ({self.why}); the "
            f"newest whole one is {self.folder.file(self.folder.whole[-1]).name}",
            flush=True,
        )

    def _write(self, checkpoint: dict[str, Any], step: int, number: int) -> None:
        try:
            self.folder.add(checkpoint, step, number)
            self.problem = None
        except Exception as error:
            if not isinstance(error, OSError):  # nobody's disk: our own mistake, or memory that is short
                traceback.print_exception(error)
            self.problem = error


def choose(
    folder: Folder, host: str, gather: Callable[[Any], list], examines: bool, lacks: Callable[[Path], str]
) -> Path | None:
    """Return the newest checkpoint that is whole, and the same, on all hosts; None where no host has any.

    All ranks call it, `gather` gives each what all say; on each host one rank `examines` the files. UserError, on all
    ranks, if there are some but none will do. One that `lacks` what goes with it (see Folder.newest) will do if all do:
    a copy of the folder, as SageMaker's to S3, may have a checkpoint and not yet the file beside it.
    """
    problems: list[str] = []
    strict, lacking = True, False  # whether `lacks` counts, and has spoken

    def say(problem: str) -> None:
        problem = " ".join(problem.encode(errors="replace").decode().split())  # a file may have any name
        if problem not in problems:
            problems.append(problem)
            print(f"warning: {problem}", flush=True)

    def lacked(path: Path) -> str:
        nonlocal lacking
        problem = lacks(path) if strict else ""
        lacking = lacking or bool(problem)
        return problem

    if examines:
        folder.clean()
        for path, problem in folder.foreign():
            say(f"checkpoint {path} {problem}; it is skipped")
    limit, first = float("inf"), None
    while True:
        found = folder.newest(limit, say, lacked) if examines else None
        own = (host, found and found[:2], found and found[2].name, problems, lacking)
        told = [one for one in gather(own if examines else None) if one]
        saves = [save for _, save, *_ in told]
        first = first or told
        if None in saves and strict and any(lacks_some for *_, lacks_some in told):
            strict, limit = False, float("inf")
            continue
        if None in saves:
            break
        if len(set(saves)) == 1:
            folder.whole = sorted({step for step, _ in folder.named() if 0 <= step <= saves[0][0]})
            return folder.path / next(name for place, _, name, *_ in told if place == host)
        steps = {step for step, _ in saves}
        limit = min(steps) if len(steps) > 1 else min(steps) - 1
    if limit == float("inf") and not any(saves) and not any(problems for *_, problems, _ in told):
        return None
    raise _none_will_do(folder, first, told)


def _none_will_do(folder: Folder, first: list[tuple], told: list[tuple]) -> UserError:
    """Return the error that says what each host has, and what is wrong with it: as told at first, and at last."""
    have = "; ".join(f"{host} has {f'step {save[0]}' if save else 'none'}" for host, save, *_ in first)
    why = [problem for *_, problems, _ in told for problem in problems]
    return UserError(
        f"--resume.dirpath={folder.path}: found checkpoints, but none that is whole and the same on all hosts "
        f"({have}{'; ' if why else ''}{'; '.join(why[:3])}); bring one back, or move them away to start anew"
    )
