"""Restores checkpoints from S3 before the start, then uploads the folder to S3.

The upload can go wrong in all the ways that users have met in the service; each is a field of
settings.Sync.
"""

import os
import re
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from sagemaker_lightning.contract.atomic_files import IGNORED_SUFFIX
from sagemaker_lightning.contract.checkpoint_home import (
    CHECKPOINT_NAME,
    UPLOADED_SUFFIX,
    UPLOADING_SUFFIX,
)
from sagemaker_rehearsal.api import clients
from sagemaker_rehearsal.jobs.channels import JobFailed, inside, relative
from sagemaker_rehearsal.jobs.folders import NO_KEY_REASON, Folder
from sagemaker_rehearsal.jobs.record import Saved
from sagemaker_rehearsal.settings import Sync

# Files of one checkpoint that are noted, at most.
MAX_SAVED_FILES = 100
# The step in the name of a checkpoint, or of its folder: step-000000044.ckpt, epoch=3-step=44.ckpt,
# checkpoint-44/model.safetensors.
STEP_IN_NAME = re.compile(r"(?<![a-z])(?:step|checkpoint)[-_=]?(\d{1,15})(?!\d)")


class Cut(Exception):
    """The instance ended in the middle of an upload."""


@dataclass
class Seen:
    """A file as it was when it was last looked at."""

    # Size in bytes, time of the last change in nanoseconds, inode.
    state: tuple[int, int, int]
    # When the file was first seen in this state.
    since: float
    # When the file was first seen in a state that is not in S3.
    changed: float
    uploaded: bool


def restore(s3, uri: str, folder: Path) -> tuple[int, int]:
    """Copy everything at `uri` to `folder`; return the numbers of files and bytes.

    Raises JobFailed if something cannot be copied.
    """
    bucket, prefix = below(uri)
    folder.mkdir(exist_ok=True)
    files = 0
    size = 0
    try:
        for key, length in clients.objects(s3, bucket, prefix):
            path = inside(folder, relative(key, prefix))
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, key, str(path), Config=clients.ONE_PIECE_TRANSFER)
            files += 1
            size += length
    except (ClientError, BotoCoreError, OSError) as error:
        raise JobFailed(
            f"ClientError: Checkpoint download failed: {uri}: {clients.reason(error)}"
        ) from error
    return files, size


def step_in(name: str) -> int | None:
    """Return the step in the name of a checkpoint's file, None if there is none."""
    match = STEP_IN_NAME.search(name)
    is_marker = name.endswith((UPLOADING_SUFFIX, UPLOADED_SUFFIX))
    return int(match[1]) if match and not is_marker else None


def below(uri: str) -> tuple[str, str]:
    """Return the bucket and the prefix of what is below an s3:// address.

    Objects below s3://bucket/run-2 are not below s3://bucket/run.
    """
    bucket, prefix = clients.split(uri)
    return bucket, prefix if prefix.endswith("/") or not prefix else f"{prefix}/"


class Uploader(threading.Thread):
    """Uploads one host's checkpoint folder to S3 while its container runs.

    `note_checkpoint` gets the step of each checkpoint that appears or changes in the folder, and
    whether all of its files are in S3.
    """

    def __init__(
        self,
        s3,
        uri: str,
        folder: Path,
        sync: Sync,
        note,
        note_checkpoint: Callable[[int, bool], None] = lambda *_: None,
    ) -> None:
        super().__init__(name=f"upload of {folder}", daemon=True)
        self.s3 = s3
        self.folder = Folder(folder)
        self.sync = sync
        self.note = note
        self.note_checkpoint = note_checkpoint
        self.bucket, self.prefix = below(uri)
        self.ended = threading.Event()
        self.started = time.monotonic()
        # The file whose upload the host's end has cut off.
        self.cut: str | None = None
        # What was restored is in S3 already.
        self.seen = {
            name: Seen(state, self.started, self.started, True)
            for name, state in self._files().items()
        }

    def run(self) -> None:
        """Look at the folder every `sync.every` seconds."""
        while not self.ended.wait(self.sync.every):
            if (
                self.sync.stall_after is None
                or time.monotonic() - self.started < self.sync.stall_after
            ):
                # Whatever it is, the folder is looked at again.
                try:
                    self._look()
                except Exception as error:
                    self.note(f"the checkpoints could not be looked at: {error!r}")

    def finish(self) -> None:
        """End the uploads, because the container has ended.

        An upload under way is cut off. With --sync-flush, the folder is then uploaded once more.
        """
        self.ended.set()
        self.join()
        if self.sync.flush:
            self.ended.clear()
            self._look(flush=True)

    def newest(self) -> Saved | None:
        """Return the newest checkpoint in the folder, None if no file names a step.

        Call it once, after `finish`.
        """
        moment = time.monotonic()
        files = self._files()
        steps = {name: step for name in files if (step := step_in(name)) is not None}
        # Beside the runtime's own checkpoints, other files are not what it continues from.
        steps = {name: steps[name] for name in steps if CHECKPOINT_NAME.fullmatch(name)} or steps
        if not steps:
            return None
        newest = max(steps.values())
        names = sorted(name for name, step in steps.items() if step == newest)[:MAX_SAVED_FILES]
        return Saved(newest, {name: self._why_missing(name, files[name], moment) for name in names})

    def _why_missing(self, name: str, state: tuple[int, int, int], moment: float) -> str:
        """Return why a file is not in S3 as it is at the host's end; "" if it is."""
        seen = self.seen.get(name)
        if seen and seen.state == state and seen.uploaded:
            return ""
        sync = self.sync
        if sync.stall_after is not None and moment - self.started >= sync.stall_after:
            return f"nothing was copied any more (--sync-stall-after={sync.stall_after:g})"
        if name == self.cut:
            return "its copy was cut off by the end of its host"
        if seen and seen.state == state and moment - seen.changed < sync.lag:
            return f"its copy lags (--sync-lag={sync.lag:g})"
        if seen and seen.state == state and moment - seen.since < sync.settle:
            return f"its copy waits for the last change (--sync-settle={sync.settle:g})"
        return "its copy had not begun before the end of its host"

    def _look(self, flush: bool = False) -> None:
        moment = time.monotonic()
        files = self._files()
        for name, state in sorted(files.items(), key=lambda item: item[1][1]):
            seen = self.seen.get(name)
            if seen is None or seen.state != state:
                changed = moment if seen is None or seen.uploaded else seen.changed
                seen = self.seen[name] = Seen(state, moment, changed, False)
                self._tell(name)
            is_ready = (
                moment - seen.changed >= self.sync.lag and moment - seen.since >= self.sync.settle
            )
            if not seen.uploaded and (is_ready or flush) and not self.ended.is_set():
                self.seen[name] = replace(seen, uploaded=self._upload(name))
                self._tell(name)
        for name in [name for name in self.seen if name not in files]:
            del self.seen[name]
            if self.sync.deletions and not self.ended.is_set():
                self._try_call(
                    lambda name=name: self.s3.delete_object(
                        Bucket=self.bucket, Key=self.prefix + name
                    )
                )
            for suffix in (UPLOADING_SUFFIX, UPLOADED_SUFFIX):
                with suppress(OSError):
                    self.folder.unlink(name + suffix)

    def _tell(self, name: str) -> None:
        """Tell what has become of the checkpoint that a file belongs to."""
        if (step := step_in(name)) is not None:
            parts = [seen for other, seen in self.seen.items() if step_in(other) == step]
            self.note_checkpoint(step, all(seen.uploaded for seen in parts))

    def _files(self) -> dict[str, tuple[int, int, int]]:
        """Return the files to upload, by name, with their state."""
        files = {}
        for name, state in self.folder.walk(self._note_left_out):
            is_marker = name.endswith((UPLOADING_SUFFIX, UPLOADED_SUFFIX))
            if name.endswith(IGNORED_SUFFIX) or (is_marker and not self.sync.markers_uploaded):
                continue
            if stat.S_ISLNK(state.st_mode):
                try:
                    with self.folder.open(name) as file:
                        state = os.fstat(file.fileno())
                # The link leads to nothing, or out of the folder.
                except OSError:
                    continue
            if stat.S_ISREG(state.st_mode):
                files[name] = state.st_size, state.st_mtime_ns, state.st_ino
        return files

    def _note_left_out(self, name: str, why: str) -> None:
        # Every other reason may be gone at the next look.
        if why == NO_KEY_REASON:
            self.note(f"the checkpoint {name} is not copied to S3: {why}")

    def _upload(self, name: str) -> bool:
        """Copy a file as it is now; return whether it is in S3."""
        markers = self.sync.markers and not name.endswith((UPLOADING_SUFFIX, UPLOADED_SUFFIX))
        if markers:
            self._make_marker(name + UPLOADING_SUFFIX)
        is_uploaded = self._try_call(lambda: self._copy(name))
        if markers and is_uploaded:
            self._make_marker(name + UPLOADED_SUFFIX)
        return is_uploaded

    def _copy(self, name: str) -> None:
        try:
            with self.folder.open(name) as file:
                self.s3.upload_fileobj(
                    file,
                    self.bucket,
                    self.prefix + name,
                    Callback=self._alive,
                    Config=clients.ONE_PIECE_TRANSFER,
                )
        except Cut:
            self.cut = name
            raise

    def _make_marker(self, name: str) -> None:
        """Make a file's marker, if its folder exists and belongs to this user."""
        with suppress(OSError):
            self.folder.touch(name)

    def _alive(self, _: int) -> None:
        if self.ended.is_set():
            raise Cut

    def _try_call(self, call) -> bool:
        """Return whether a call of S3 succeeded.

        A file that is gone in the meantime, or still written, is looked at again.
        """
        try:
            call()
        except PermissionError:
            self.note(
                "a checkpoint is not copied to S3: a container's root has written it for itself "
                "only"
            )
            return False
        except (Cut, OSError):
            return False
        # Whatever it is, the other files are still copied.
        except Exception as error:
            self.note(f"the copy of checkpoints to s3://{self.bucket}/{self.prefix} fails: {error}")
            return False
        return True
