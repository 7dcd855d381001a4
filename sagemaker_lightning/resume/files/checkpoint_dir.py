"""The folder of a job's checkpoints: which to resume from, which to remove."""

import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.contract.atomic_files import IGNORED_SUFFIX, remove_leftovers
from sagemaker_lightning.contract.checkpoint_home import (
    CHECKPOINT_NAME,
    CheckpointHome,
    Outlook,
    Upload,
    outlook,
)
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.files import first_start, shards
from sagemaker_lightning.resume.files.checkpoint_file import (
    ENTRIES_KEY,
    examine,
    identify,
    other_format,
    read,
    read_footer,
    write,
)
from sagemaker_lightning.resume.files.selection import CheckpointId, HostCheckpoints, newest_common

LONGEST_UPLOAD = 600.0
"""Seconds after which the next checkpoint waits no longer for the copy of the one before."""


@dataclass
class CheckpointDir:
    """The folder of a job's checkpoints, as one host sees it.

    Args:
        home: The folder, and what becomes of it.
        keep: How many checkpoints are kept.
        setting: How messages name the setting of the folder.
        copies: The folder of the copies in memory, which are read as the checkpoints are; None if
            there are none.
        intact_steps: The steps of the checkpoints known to be intact, oldest first.
    """

    home: CheckpointHome
    keep: int
    setting: str = "--resume.dirpath"
    """How messages name the setting of the folder."""
    copies: Path | None = None
    """The folder of the copies in memory; None if there are none."""
    intact_steps: list[int] = field(default_factory=list)
    """The steps of the checkpoints known to be intact, oldest first."""
    files_of: dict[int, list[Path]] = field(default_factory=dict)
    """The files of each checkpoint that this process has written: its own, and the best model."""
    has_marks: bool = False
    """Whether the uploader has left a mark beside a checkpoint that this process has written."""
    was_uploading: bool = False
    """What `is_uploading` found last."""
    next_look: float = 0.0
    """When it looks again, in seconds of time.monotonic()."""
    in_s3_of_all: frozenset[int] | None = None
    """The steps whose shards all hosts know to be in S3; None if there are no shards."""

    @property
    def path(self) -> Path:
        """The folder."""
        return self.home.folder

    @property
    def label(self) -> str:
        """The setting of the folder and its value, as messages have them."""
        return (
            self.setting.replace("...", str(self.path))
            if "..." in self.setting
            else f"{self.setting}={self.path}"
        )

    def unread(self) -> "CheckpointDir":
        """Return the same folder, of whose checkpoints nothing is known."""
        return replace(self, intact_steps=[], files_of={})

    def path_of(self, step: int) -> Path:
        """Return the path of this host's checkpoint of a step."""
        return self.home.path_of(step)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return step and path of all files with a checkpoint's name, newest step first.

        The newest step is not always the newest file: a copy from S3 has the time of the copy.
        """
        return _checkpoints_in(self.path)

    def with_copies(self) -> list[tuple[int, Path]]:
        """Return the same with the copies in memory; one comes before a checkpoint of its step."""
        copies = _checkpoints_in(self.copies) if self.copies else []
        return sorted([*copies, *self.checkpoints()], key=lambda each: -each[0])

    def misnamed(self) -> list[tuple[Path, str]]:
        """Return files that look like checkpoints under another name, and the problem.

        Checkpoints of Lightning's ModelCheckpoint are left out.
        """
        others = {
            path for path in self.path.glob("*.ckpt") if not CHECKPOINT_NAME.fullmatch(path.name)
        }
        footers = [(path, read_footer(path)) for path in sorted(others)]
        return [
            (
                path,
                footer_or_problem
                if isinstance(footer_or_problem, str)
                else f"has a wrong name; its own is {self.path_of(footer_or_problem[0]).name}",
            )
            for path, footer_or_problem in footers
            # Lightning's own checkpoints have no number of the save.
            if isinstance(footer_or_problem, str) or footer_or_problem[1]
        ]

    def newest_loggers(self) -> tuple[list[Mapping[str, Any]], int]:
        """Return what the newest checkpoint says of the run's loggers, and its step.

        Without one, it is what a start says that was killed before its first checkpoint.
        """
        for step, path in self.with_copies():
            if isinstance(identify(path), str):
                continue
            # A damaged file may raise anything; `choose_checkpoint` reports it.
            with suppress(Exception):
                entries = read(path, mmap=True)[ENTRIES_KEY]
                return loggers.well_formed(entries["parts"]["loggers"]), step
        start = first_start.read(self.path)
        return [*start.loggers] if start else [], 0

    def save(
        self, checkpoint: dict[str, Any], step: int, number: int, best: Sequence[Path] = ()
    ) -> None:
        """Write a checkpoint, and remove those that are too old.

        The newest one that is known to be in S3 stays until a newer one is: to remove a file here
        removes it there.

        Args:
            checkpoint: What torch.save writes.
            step: Its optimizer step.
            number: The number of the save.
            best: The files of the best model, which belong to the checkpoint.

        Raises:
            OSError: The checkpoint could not be written.
        """
        write(self.path_of(step), checkpoint, step, number)
        first_start.forget(self.path)
        shards.remove(self.path, step, before=number)
        self.intact_steps = sorted({*self.intact_steps, step})
        own_shards = [path for _, path in shards.paths_in(self.path, step)]
        is_ignored = bool(own_shards) and self.path_of(step).name.endswith(IGNORED_SUFFIX)
        self.files_of[step] = [*([] if is_ignored else [self.path_of(step)]), *own_shards, *best]
        self.next_look = 0.0
        needed = self.intact_steps[-self.keep :] + self.steps_in_s3()[-1:]
        for old in [step for step in self.intact_steps if step not in needed]:
            if self.home.upload_of(self.path_of(old)) is not Upload.GOING_ON:
                self.path_of(old).unlink(missing_ok=True)
                shards.remove(self.path, old)
                self.intact_steps.remove(old)
                self.files_of.pop(old, None)

    def steps_in_s3(self) -> list[int]:
        """Return the steps of the checkpoints that are known to be in S3, oldest first."""
        return [
            step
            for step in self.own_steps_in_s3()
            if self.in_s3_of_all is None or step in self.in_s3_of_all
        ]

    def own_steps_in_s3(self) -> list[int]:
        """Return the steps of which all that this host has is known to be in S3, oldest first."""
        return [step for step in self.intact_steps if self._is_in_s3(step)]

    def is_uploading(self) -> bool:
        """Return whether the newest checkpoint is on its way to S3, as far as marks tell.

        The next one would wait behind it, and come later than one of a later step. It is called
        after each batch, and looks at the files twice a second.
        """
        if time.monotonic() < self.next_look:
            return self.was_uploading
        self.next_look = time.monotonic() + 0.5
        self.was_uploading = False
        if self.home.is_copied and self.files_of:
            step = max(self.files_of)
            path = self.path_of(step)
            self.has_marks |= self.home.upload_of(path) is not Upload.UNKNOWN
            with suppress(OSError):
                is_recent = time.time() - path.stat().st_mtime < LONGEST_UPLOAD
                self.was_uploading = self.has_marks and is_recent and not self._is_in_s3(step)
        return self.was_uploading

    def outlook(self) -> Outlook:
        """Return from where the next run resumes, as far as this host knows."""
        return outlook(self.home, self.intact_steps, self.steps_in_s3())

    def wait_for_s3(self, until: float) -> None:
        """Wait for the copy of the newest checkpoint, if an uploader shows that it copies.

        Nothing is copied once this container has ended.

        Args:
            until: When to stop waiting, in seconds of time.monotonic().
        """
        if not self.files_of or not self.home.has_marks():
            return
        step = max(self.files_of)
        if not self._is_in_s3(step):
            log.info(f"{self.path_of(step)} is complete; it is on its way to S3")
        while not self._is_in_s3(step) and time.monotonic() < until:
            time.sleep(0.1)

    def _is_in_s3(self, step: int) -> bool:
        """Return whether a checkpoint is known to be in S3, with all that belongs to it."""
        return self.home.is_in_s3(*self.files_of.get(step, [self.path_of(step)]))

    def remove_leftovers(self) -> None:
        """Remove what earlier processes of this host left when killed while writing."""
        for names in ("*.ckpt", "*.shard", "journal-*.bin"):
            remove_leftovers(self.path, names)
        shards.remove_orphans(self.path, [step for step, _ in self.checkpoints()])
        if self.copies:
            remove_leftovers(self.copies, "*.ckpt")

    def note_intact(self, newest: int) -> None:
        """Count the checkpoints up to a step as intact.

        Args:
            newest: The step of the checkpoint that every host has found intact.
        """
        steps = {step for step, path in self.checkpoints() if path.is_file()}
        self.intact_steps = sorted(step for step in steps if 0 <= step <= newest)


def _checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of the files in a folder that have a checkpoint's name, newest first."""
    entries = list(folder.iterdir()) if folder.is_dir() else []
    matches = ((CHECKPOINT_NAME.fullmatch(entry.name), entry) for entry in entries)
    return sorted(((int(match[1]), entry) for match, entry in matches if match), reverse=True)


class BackgroundWriter:
    """Writes checkpoints to a folder in the background, one at a time.

    Args:
        folder: The folder.
        shards: What writes this rank's shard before; None if there are none.
        writes: Whether this rank writes the checkpoint itself; one rank of each host does.
    """

    def __init__(
        self,
        folder: CheckpointDir,
        shards: shards.ShardWriter | None = None,
        writes: bool = True,
    ) -> None:
        self.folder = folder
        self.shards = shards
        self.writes = writes
        self.thread: threading.Thread | None = None
        self.problem: Exception | None = None  # why the last checkpoint could not be written

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return bool(self.thread and self.thread.is_alive())

    @property
    def problem_text(self) -> str:
        """Why the last checkpoint could not be written; "" if it could."""
        if isinstance(self.problem, OSError) and self.problem.strerror:
            return self.problem.strerror
        return (
            " ".join(f"{type(self.problem).__name__}: {self.problem}".split())
            if self.problem
            else ""
        )

    def write(
        self,
        checkpoint: dict[str, Any],
        step: int,
        number: int,
        best: Sequence[Path] = (),
        parts: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Start writing a checkpoint as soon as the previous one is written.

        Args:
            checkpoint: What torch.save writes; nobody may change it any more.
            step: Its optimizer step.
            number: The number of the save.
            best: The files of the best model.
            parts: What this rank's shard gets, if there are shards.

        Raises:
            Exception: The previous checkpoint could not be written, and there is no older one.
        """
        self.wait()
        self.warn_of_problem("training continues, but")
        self.thread = threading.Thread(
            target=partial(self._write, checkpoint, step, number, best, parts or {}),
            name="checkpoint",
        )
        self.thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self.thread:
            self.thread.join()

    def warn_of_problem(self, beginning: str) -> None:
        """Warn if the last checkpoint could not be written.

        Args:
            beginning: How the sentence of the warning begins.

        Raises:
            UserError: The disk could not take it, and there is no older checkpoint.
            Exception: There is another reason, and no older checkpoint.
        """
        if not self.problem:
            return
        if not self.folder.intact_steps:
            if isinstance(self.problem, OSError):
                raise UserError(
                    f"{self.folder.label}: no checkpoint could be written there "
                    f"({self.problem_text}); make room there (in a job by VolumeSizeInGB), or give "
                    "another folder"
                )
            raise self.problem
        if not self.writes:
            return
        log.warning(
            f"{beginning} no checkpoint could be written to {self.folder.path} "
            f"({self.problem_text}); the newest intact one is "
            f"{self.folder.path_of(self.folder.intact_steps[-1]).name}"
        )

    def _write(
        self,
        checkpoint: dict[str, Any],
        step: int,
        number: int,
        best: Sequence[Path],
        parts: Mapping[str, Tensor],
    ) -> None:
        try:
            if self.shards:
                checksums = self.shards.write(self.folder.path, step, number, parts)
                checkpoint[ENTRIES_KEY][shards.SHARDS_KEY]["checksums"] = checksums
            if self.writes:
                self.folder.save(checkpoint, step, number, best)
            else:
                self.folder.intact_steps = [step]
            self.problem = None
        except Exception as error:
            if not isinstance(error, OSError):  # not the disk: a bug of ours, or too little memory
                traceback.print_exception(error)
            self.problem = error


def choose_checkpoint(
    folder: CheckpointDir,
    host: str,
    gather: Callable[[Any], list[Any]],
    reads_files: bool,
    missing_file: Callable[[Path], str],
    shard_problem: Callable[[Path], str] = lambda path: "",
    is_restart: bool = False,
) -> Path | None:
    """Return the newest checkpoint that every host has intact; None without any.

    All ranks call it. selection.py decides; here the hosts read the files that it asks for.

    Args:
        folder: The folder of the checkpoints.
        host: Name of this host, which no other one has.
        gather: Returns the values of all ranks, by rank.
        reads_files: Whether this rank reads the files; one rank of each host does.
        missing_file: Returns which file belongs to a checkpoint and is missing or damaged; "" if
            none is.
        shard_problem: Returns which shard of a checkpoint is missing or damaged; "" if none is.
        is_restart: See selection.newest_common.

    Raises:
        UserError: See selection.newest_common. All ranks raise it.
    """
    if reads_files:
        folder.remove_leftovers()
    survey = _Survey(folder, host) if reads_files else None
    while True:
        hosts = [known for known in gather(survey.known() if survey else None) if known]
        try:
            chosen = newest_common(hosts, folder.label, is_restart)
        except UserError:
            if survey:
                survey.report(len(hosts))
            raise
        if chosen is None:
            return None
        if all(chosen in known.intact for known in hosts):
            break
        if survey:
            survey.check(chosen, missing_file, shard_problem)
    if survey:
        survey.report(len(hosts), since=chosen.step)
    folder.note_intact(chosen.step)
    return Path(next(known.intact[chosen] for known in hosts if known.host == host))


class _Survey:
    """What this host learns of its checkpoints, file by file.

    Args:
        folder: The folder of the checkpoints.
        host: Name of this host.
    """

    def __init__(self, folder: CheckpointDir, host: str) -> None:
        self.folder = folder
        self.host = host
        # The files of each checkpoint, newest first.
        self.files: dict[CheckpointId, list[Path]] = {}
        self.intact: dict[CheckpointId, str] = {}  # the path of the file that was found intact
        self.in_memory: set[CheckpointId] = set()
        self.incomplete: set[CheckpointId] = set()
        # Each with the step that the file claims, and the file.
        self.problems: list[tuple[float, Path, str]] = []
        self.other_formats: list[tuple[str, int]] = []
        for path, problem in folder.misnamed():
            self._skip(math.inf, path, problem)
        for step, path in folder.with_copies():
            if version := other_format(path):
                self.other_formats.append((path.name, version))
            elif isinstance(save := identify(path), str):
                self._skip(step, path, save)
            else:
                self.files.setdefault(CheckpointId(*save), []).append(path)
                if self._is_copy(path):
                    self.in_memory.add(CheckpointId(*save))

    def known(self) -> HostCheckpoints:
        """Return what this host knows now."""
        return HostCheckpoints(
            self.host,
            tuple(self.files),
            dict(self.intact),
            frozenset(self.incomplete),
            frozenset(self.in_memory),
            tuple(problem for _, path, problem in self.problems if not self._is_copy(path)),
            tuple(self.other_formats),
            str(self.folder.path),
        )

    def check(
        self,
        save: CheckpointId,
        missing_file: Callable[[Path], str],
        shard_problem: Callable[[Path], str],
    ) -> None:
        """Read the files of a checkpoint until one is intact.

        Args:
            save: The checkpoint.
            missing_file: See `choose_checkpoint`.
            shard_problem: See `choose_checkpoint`.
        """
        for path in self.files[save]:
            if isinstance(problem := examine(path), str) or (problem := shard_problem(path)):
                self._skip(save.step, path, problem)
                continue
            self.intact[save] = str(path)
            if problem := missing_file(path):
                self.incomplete.add(save)
                self._skip(save.step, path, f"refers to {problem}")
            return
        del self.files[save]

    def report(self, hosts: int, since: float = -math.inf) -> None:
        """Print which files are skipped, and why: those of a step or later."""
        place = f" on {self.host}" if hosts > 1 else ""
        for step, _, problem in self.problems:
            if step >= since:
                log.warning(f"{problem}{place}")

    def _skip(self, step: float, path: Path, problem: str) -> None:
        """Note that a file is skipped, and why."""
        # A file's name may have any characters.
        text = f"checkpoint {path} {problem}; it is skipped"
        said = " ".join(text.encode(errors="replace").decode().split())
        self.problems.append((step, path, said))

    def _is_copy(self, path: Path) -> bool:
        return path.parent == self.folder.copies
