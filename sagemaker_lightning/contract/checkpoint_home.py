"""What becomes of a checkpoint folder: what is known to be in S3, what ends with the container.

SageMaker copies the folder of a job's CheckpointConfig to S3 while the container runs, and not once
it has ended. Beside each file it makes an empty file when it begins, and another one when the copy
is there. AWS's XGBoost container goes by these marks (checkpointing.py there).
"""

import os
import re
import time
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from pathlib import Path

from sagemaker_lightning.contract.atomic_files import IGNORED_SUFFIX
from sagemaker_lightning.contract.process_stat import START_TIME, process_stat

UPLOADING_SUFFIX = ".sagemaker-uploading"
UPLOADED_SUFFIX = ".sagemaker-uploaded"
CHECKPOINT_NAME = re.compile(rf"step-(\d{{9,}})\.ckpt(?:{re.escape(IGNORED_SUFFIX)})?")
"""The name of a checkpoint to resume from."""
FIT_NAME = re.compile(r"fit-(\d{1,9})")
"""The folder of a trainer's second and later trainings, in that of its first."""


class Upload(Enum):
    """What is known of a file's copy in S3."""

    UNKNOWN = auto()
    """Nothing: it has no mark."""
    GOING_ON = auto()
    """It is being copied."""
    DONE = auto()
    """It was copied."""
    RESTORED = auto()
    """It has come from S3."""


@dataclass(frozen=True)
class CheckpointHome:
    """A checkpoint folder, and what outlives this container of what is in it."""

    folder: Path
    is_copied: bool = False
    """Whether SageMaker copies the folder to S3, and from there to all hosts at the next start."""
    is_main_host: bool = True
    """Whether this is the host whose checkpoints are copied: all hosts write the same ones."""
    lost: str = ""
    """Why nothing of the folder comes back after an interruption; "" if it does."""
    advice: str = ""
    """What to do about that."""

    @property
    def notice(self) -> str:
        """The line for the start of a run that an interruption makes start over; "" otherwise."""
        return (
            f"an interruption makes this run start over: {self.lost}; {self.advice}"
            if self.lost
            else ""
        )

    def path_of(self, step: int) -> Path:
        """Return the path of this host's checkpoint of a step.

        The other hosts' have a name that SageMaker does not copy: one copy is enough, and all would
        have the same key.
        """
        suffix = "" if self.is_main_host or not self.is_copied else IGNORED_SUFFIX
        return self.folder / f"step-{step:09d}.ckpt{suffix}"

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, oldest first, by their names alone."""
        names = (entry.name for entry in self.folder.iterdir()) if self.folder.is_dir() else ()
        matches = filter(None, map(CHECKPOINT_NAME.fullmatch, names))
        return sorted({int(match[1]) for match in matches})

    def upload_of(self, file: Path) -> Upload:
        """Return what is known of a file's copy in S3."""
        written = _changed(file)
        if not self.is_copied or not written:
            return Upload.UNKNOWN
        if written < container_began():
            return Upload.RESTORED
        began, ended = (
            _changed(file.with_name(file.name + suffix))
            for suffix in (UPLOADING_SUFFIX, UPLOADED_SUFFIX)
        )
        # A mark that is older is of another file of this name, and came from S3 as well.
        if ended >= written:
            return Upload.DONE
        return Upload.GOING_ON if began >= written else Upload.UNKNOWN

    def is_in_s3(self, *files: Path) -> bool:
        """Return whether files are known to be in S3, all of them."""
        return all(self.upload_of(file) in (Upload.DONE, Upload.RESTORED) for file in files)

    def has_marks(self) -> bool:
        """Return whether this container has an uploader that leaves marks."""
        suffixes = (UPLOADING_SUFFIX, UPLOADED_SUFFIX)
        entries = list(self.folder.iterdir()) if self.is_copied and self.folder.is_dir() else []
        return any(
            entry.name.endswith(suffixes) and _changed(entry) >= container_began()
            for entry in entries
        )


@dataclass(frozen=True)
class Outlook:
    """From where the next run resumes, as far as this one knows."""

    step: int
    """The step; 0 if the next run starts over."""
    said: str
    """What the line about an interruption says of it."""
    is_newest: bool
    """Whether it is the newest checkpoint of this run."""


def outlook(home: CheckpointHome, steps: list[int], in_s3: list[int]) -> Outlook:
    """Return from where the next run resumes.

    Args:
        home: The folder.
        steps: The steps of the checkpoints in it, oldest first.
        in_s3: Those that are known to be in S3, with all that belongs to them.
    """
    newest = steps[-1] if steps else 0
    path = home.path_of(newest)
    if home.lost:
        return Outlook(0, f"{home.lost}, so the next run starts over", is_newest=False)
    if not steps:
        return Outlook(0, "there is no checkpoint", is_newest=True)
    if not home.is_copied:
        return Outlook(newest, f"{path} is complete", is_newest=True)
    if not home.is_main_host:
        said = f"the main host copies {path.name.removesuffix(IGNORED_SUFFIX)} to S3"
        return Outlook(newest, said, is_newest=False)
    if newest in in_s3:
        return Outlook(newest, f"{path} is in S3", is_newest=True)
    if not in_s3 and not home.has_marks():
        said = f"{path} is complete here; no mark tells whether it is in S3"
        return Outlook(newest, said, is_newest=True)
    known = f"{home.path_of(in_s3[-1]).name} is" if in_s3 else "no checkpoint is known to be"
    said = f"{known} in S3, {path.name} is so far only here"
    return Outlook(in_s3[-1] if in_s3 else 0, said, is_newest=False)


def outlook_by_names(home: CheckpointHome) -> Outlook:
    """Return from where the next run resumes, by the names and marks in the folder alone.

    It resumes the newest training of the trainer that has a checkpoint.
    """
    homes = [replace(home, folder=path) for path in (*folders_after(home.folder, 1), home.folder)]
    home = next((each for each in homes if each.steps()), home)
    steps = home.steps()
    return outlook(home, steps, [step for step in steps if home.is_in_s3(home.path_of(step))])


def folder_of(folder: Path, fit: int) -> Path:
    """Return the folder for the checkpoints of one of a trainer's trainings.

    Args:
        folder: The folder of the first one.
        fit: Which training it is, from 1.
    """
    return folder / f"fit-{fit}" if fit > 1 else folder


def folders_after(folder: Path, fit: int) -> list[Path]:
    """Return the folders of the trainings after one of them, newest first.

    Args:
        folder: The folder of the first one.
        fit: Which training it is, from 1.
    """
    matches = [FIT_NAME.fullmatch(each.name) for each in folder.glob("fit-*") if each.is_dir()]
    numbers = sorted({int(match[1]) for match in matches if match and int(match[1]) > fit})
    return [folder_of(folder, number) for number in reversed(numbers)]


def ends_with_container(folder: Path) -> bool:
    """Return whether a folder goes with this container: nothing that outlives it is mounted there.

    Docker, containerd and podman make a container's own files an overlay.
    """
    kinds = {
        Path(fields[1].encode().decode("unicode_escape")): fields[2]  # a blank is \\040 there
        for fields in map(str.split, _text("/proc/self/mounts").splitlines())
    }
    overlays = ("overlay", "fuse.fuse-overlayfs")
    folder = folder.resolve()
    of_mount = next((kinds[each] for each in (folder, *folder.parents) if each in kinds), "")
    return kinds.get(Path("/"), "") in overlays and of_mount in (*overlays, "tmpfs")


@cache
def container_began() -> float:
    """Return when this container's first process began, in seconds since the epoch.

    Files that are older have been restored from S3.
    """
    fields = process_stat(1)
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    is_known = len(fields) > START_TIME
    return booted + int(fields[START_TIME]) / ticks_per_second if is_known else 0.0


def _changed(file: Path) -> float:
    """Return when a file was changed, in seconds since the epoch; 0 if it is not there."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
