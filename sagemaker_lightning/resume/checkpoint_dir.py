"""The folder of a job's checkpoints: which to resume from, which to remove."""

import math
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sagemaker_lightning.contract.atomic_files import IGNORED, remove_leftovers
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.shutdown import NAME
from sagemaker_lightning.resume.checkpoint_file import (
    KEY,
    examine,
    footer,
    other_format,
    save_of,
    write,
)
from sagemaker_lightning.resume.selection import HostCheckpoints, Save, newest_common

# The uploader creates these empty files beside each file that it uploads.
UPLOADING = ".sagemaker-uploading"
UPLOADED = ".sagemaker-uploaded"
LAST = "last.ckpt"


@dataclass
class Folder:
    """The folder of a job's checkpoints, as one host sees it.

    Args:
        path: The folder.
        keep: How many checkpoints are kept.
        name: How messages name the setting of the folder.
        whole: The steps of the checkpoints known to be intact, oldest first.
        started: When this process began, in seconds since the epoch.
    """

    path: Path
    keep: int
    name: str = "--resume.dirpath"
    """How messages name the setting of the folder."""
    whole: list[int] = field(default_factory=list)
    """The steps of the checkpoints known to be intact, oldest first."""
    started: float = 0.0
    """When this process began, in seconds since the epoch.

    An upload mark that is older is of an earlier job.
    """

    @property
    def label(self) -> str:
        """The setting of the folder and its value, as messages have them."""
        return (
            self.name.replace("...", str(self.path))
            if "..." in self.name
            else f"{self.name}={self.path}"
        )

    def empty(self) -> "Folder":
        """Return the same folder; nothing is known of its checkpoints."""
        return replace(self, whole=[])

    def file(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self.path / f"step-{step:09d}.ckpt"

    def named(self) -> list[tuple[int, Path]]:
        """Return step and path of all files with a checkpoint's name, newest step first.

        The newest step is not always the newest file: a copy from S3 has the time of the copy.
        last.ckpt is another name of one of the checkpoints, whose own file may be gone. Its step is
        -1 if it cannot be read.
        """
        entries = list(self.path.iterdir()) if self.path.is_dir() else []
        checkpoints = [
            (int(match[1]), entry) for entry in entries if (match := NAME.fullmatch(entry.name))
        ]
        for entry in entries:
            if entry.name == LAST:
                footer_or_problem = footer(entry)
                checkpoints.append(
                    (-1 if isinstance(footer_or_problem, str) else footer_or_problem[0], entry)
                )
        return sorted(
            checkpoints,
            key=lambda checkpoint: (checkpoint[0], checkpoint[1].name != LAST),
            reverse=True,
        )

    def foreign(self) -> list[tuple[Path, str]]:
        """Return files that look like checkpoints under another name, and the problem.

        Checkpoints of Lightning's ModelCheckpoint are left out.
        """
        others = {
            path
            for path in self.path.glob("*.ckpt")
            if not NAME.fullmatch(path.name) and path.name != LAST
        }
        footers = [(path, footer(path)) for path in sorted(others)]
        return [
            (
                path,
                footer_or_problem
                if isinstance(footer_or_problem, str)
                else f"has not its own name, which is {self.file(footer_or_problem[0]).name}",
            )
            for path, footer_or_problem in footers
            # Lightning's own checkpoints have no number of the save.
            if isinstance(footer_or_problem, str) or footer_or_problem[1]
        ]

    def loggers(self) -> list[dict[str, Any]]:
        """Return what the newest checkpoint says of the run's loggers; empty without one."""
        for _, path in self.named():
            with suppress(Exception):  # a damaged file may raise anything; `choose` reports it
                return torch.load(path, weights_only=True, mmap=True)[KEY]["loggers"]
        return []

    def add(self, checkpoint: dict[str, Any], step: int, number: int) -> None:
        """Write a checkpoint, link it as last.ckpt, and remove those that are too old.

        Args:
            checkpoint: What torch.save writes.
            step: Its optimizer step.
            number: The number of the save.

        Raises:
            OSError: The checkpoint could not be written.
        """
        write(self.file(step), checkpoint, step, number)
        self.whole = sorted({*self.whole, step})
        with suppress(OSError):  # a file system without hard links has no last.ckpt
            link = self.path / f"{LAST}.{os.getpid()}{IGNORED}"
            link.unlink(missing_ok=True)
            os.link(self.file(step), link)
            os.replace(link, self.path / LAST)
        for old in self.whole[: -self.keep]:
            if not self._is_uploading(self.file(old)):
                self.file(old).unlink(missing_ok=True)
                self.whole.remove(old)

    def clean(self) -> None:
        """Remove what earlier processes of this host left when killed while writing."""
        for names in ("*.ckpt", "journal-*.bin"):
            remove_leftovers(self.path, names)

    def _is_uploading(self, file: Path) -> bool:
        """Return whether an uploader is uploading a file now."""
        upload_started, upload_finished = (
            file.with_name(file.name + ending) for ending in (UPLOADING, UPLOADED)
        )
        with suppress(OSError):
            return upload_started.stat().st_mtime >= self.started and not upload_finished.exists()
        return False


class Writer:
    """Writes checkpoints to a folder in the background, one at a time."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.thread: threading.Thread | None = None
        self.problem: Exception | None = None  # why the last checkpoint could not be written

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return bool(self.thread and self.thread.is_alive())

    @property
    def why(self) -> str:
        """Why the last checkpoint could not be written; "" if it could."""
        if isinstance(self.problem, OSError) and self.problem.strerror:
            return self.problem.strerror
        return (
            " ".join(f"{type(self.problem).__name__}: {self.problem}".split())
            if self.problem
            else ""
        )

    def write(self, checkpoint: dict[str, Any], step: int, number: int) -> None:
        """Start writing a checkpoint as soon as the previous one is written.

        Args:
            checkpoint: What torch.save writes; nobody may change it any more.
            step: Its optimizer step.
            number: The number of the save.

        Raises:
            Exception: The previous checkpoint could not be written, and there is no older one.
        """
        self.wait()
        self.check("training goes on, but")
        self.thread = threading.Thread(
            target=partial(self._write, checkpoint, step, number), name="checkpoint"
        )
        self.thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self.thread:
            self.thread.join()

    def check(self, how: str) -> None:
        """Warn if the last checkpoint could not be written.

        Args:
            how: How the sentence of the warning begins.

        Raises:
            UserError: The disk could not take it, and there is no older checkpoint.
            Exception: There is another reason, and no older checkpoint.
        """
        if not self.problem:
            return
        if not self.folder.whole:
            if isinstance(self.problem, OSError):
                raise UserError(
                    f"{self.folder.label}: no checkpoint could be written there ({self.why}); make "
                    "room there (in a job by VolumeSizeInGB), or give another folder"
                )
            raise self.problem
        print(
            f"warning: {how} no checkpoint could be written to {self.folder.path} ({self.why}); "
            f"the newest whole one is {self.folder.file(self.folder.whole[-1]).name}",
            flush=True,
        )

    def _write(self, checkpoint: dict[str, Any], step: int, number: int) -> None:
        try:
            self.folder.add(checkpoint, step, number)
            self.problem = None
        except Exception as error:
            if not isinstance(error, OSError):  # not the disk: a bug of ours, or too little memory
                traceback.print_exception(error)
            self.problem = error


def choose(
    folder: Folder,
    host: str,
    gather: Callable[[Any], list],
    examines: bool,
    lacks: Callable[[Path], str],
) -> Path | None:
    """Return the newest checkpoint that every host has intact; None without any.

    All ranks call it. selection.py decides; here the hosts read the files that it asks for.

    Args:
        folder: The folder of the checkpoints.
        host: Name of this host.
        gather: Returns the values of all ranks, by rank.
        examines: Whether this rank looks at the files; one rank of each host does.
        lacks: Returns which file belongs to a checkpoint and is missing or damaged; "" if none is.

    Raises:
        UserError: See selection.newest_common. All ranks raise it.
    """
    if examines:
        folder.clean()
    own = _Survey(folder, host) if examines else None
    while True:
        hosts = [known for known in gather(own.known() if own else None) if known]
        try:
            save = newest_common(hosts, folder.label)
        except UserError:
            if own:
                own.report()
            raise
        if save is None:
            return None
        if all(save in known.intact for known in hosts):
            break
        if own:
            own.check(save, lacks)
    if own:
        own.report(since=save.step)
    folder.whole = sorted({step for step, _ in folder.named() if 0 <= step <= save.step})
    return folder.path / next(known.intact[save] for known in hosts if known.host == host)


class _Survey:
    """What this host learns of its checkpoints, file by file.

    Args:
        folder: The folder of the checkpoints.
        host: Name of this host.
    """

    def __init__(self, folder: Folder, host: str) -> None:
        self.folder = folder
        self.host = host
        self.files: dict[Save, list[Path]] = {}  # the files of each checkpoint, newest first
        self.intact: dict[Save, str] = {}  # the name of the file that was found intact
        self.incomplete: set[Save] = set()
        self.problems: list[tuple[float, str]] = []  # each with the step that the file claims
        self.other_formats: list[tuple[str, int]] = []
        for path, problem in folder.foreign():
            self._skip(math.inf, path, problem)
        for step, path in folder.named():
            if version := other_format(path):
                self.other_formats.append((path.name, version))
            elif isinstance(save := save_of(path), str):
                self._skip(step, path, save)
            else:
                self.files.setdefault(Save(*save), []).append(path)

    def known(self) -> HostCheckpoints:
        """Return what this host knows now."""
        return HostCheckpoints(
            self.host,
            tuple(self.files),
            dict(self.intact),
            frozenset(self.incomplete),
            tuple(problem for _, problem in self.problems),
            tuple(self.other_formats),
        )

    def check(self, save: Save, lacks: Callable[[Path], str]) -> None:
        """Read the files of a checkpoint until one is intact.

        Args:
            save: The checkpoint.
            lacks: See `choose`.
        """
        if save in self.intact:
            return
        for path in self.files[save]:
            if isinstance(problem := examine(path), str):
                self._skip(save.step, path, problem)
                continue
            self.intact[save] = path.name
            if problem := lacks(path):
                self.incomplete.add(save)
                self._skip(save.step, path, f"goes with {problem}")
            return
        del self.files[save]

    def report(self, since: float = -math.inf) -> None:
        """Print which files are skipped, and why: those of a step or later."""
        for step, problem in self.problems:
            if step >= since:
                print(f"warning: {problem}", flush=True)

    def _skip(self, step: float, path: Path, problem: str) -> None:
        """Note that a file is skipped, and why."""
        # A file's name may have any characters.
        text = f"checkpoint {path} {problem}; it is skipped"
        self.problems.append((step, " ".join(text.encode(errors="replace").decode().split())))
