"""The checkpoint folder and S3, kept alike: restored before the start, copied while the job runs, in all the ways that
users have met (contract, 1.5; each is a field of settings.Sync)."""

import os
import stat
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from rehearsal.api import clients
from rehearsal.jobs.channels import JobFailed, inside, relative
from rehearsal.jobs.folders import NO_KEY, Folder
from rehearsal.settings import Sync

IGNORED = ".sagemaker-ignore"
UPLOADING, UPLOADED = ".sagemaker-uploading", ".sagemaker-uploaded"


class Cut(Exception):
    """The instance is gone, in the middle of an upload."""


@dataclass
class Seen:
    """A file as it was when it was last looked at."""

    state: tuple[int, int, int]  # size, time of change in nanoseconds, the inode
    since: float  # when it was first seen in that state
    changed: float  # when it was first seen in a state that is not in S3
    uploaded: bool


def restore(s3, uri: str, folder: Path) -> tuple[int, int]:
    """Copy all that is at `uri` to `folder`, and return how many files and bytes that were."""
    bucket, prefix = below(uri)
    folder.mkdir(exist_ok=True)
    files = size = 0
    try:
        for key, length in clients.objects(s3, bucket, prefix):
            path = inside(folder, relative(key, prefix))
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, key, str(path), Config=clients.WHOLE)
            files, size = files + 1, size + length
    except (ClientError, BotoCoreError, OSError) as error:
        raise JobFailed(
            f"ClientError: Checkpoint download failed: {uri}: {clients.reason(error)}"
        ) from error
    return files, size


def below(uri: str) -> tuple[str, str]:
    """Return the bucket and the prefix of what is below `uri`: of s3://bucket/run, not of s3://bucket/run-2."""
    bucket, prefix = clients.split(uri)
    return bucket, prefix if prefix.endswith("/") or not prefix else f"{prefix}/"


class Uploader(threading.Thread):
    """Copies one host's checkpoint folder to S3 as long as its container runs."""

    def __init__(self, s3, uri: str, folder: Path, sync: Sync, note) -> None:
        super().__init__(name=f"upload of {folder}", daemon=True)
        self.s3, self.folder, self.sync, self.note = s3, Folder(folder), sync, note
        self.bucket, self.prefix = below(uri)
        self.ended, self.started = threading.Event(), time.monotonic()
        # What was restored is in S3 already.
        self.seen = {
            name: Seen(state, self.started, self.started, True)
            for name, state in self._files().items()
        }

    def run(self) -> None:
        """Look at the folder again and again."""
        while not self.ended.wait(self.sync.every):
            if (
                self.sync.stall_after is None
                or time.monotonic() - self.started < self.sync.stall_after
            ):
                self._look()

    def finish(self) -> None:
        """The container has ended: an upload that is under way is cut off, unless --sync-flush."""
        self.ended.set()
        self.join()
        if self.sync.flush:
            self.ended.clear()
            self._look(flush=True)

    def _look(self, flush: bool = False) -> None:
        now, files = time.monotonic(), self._files()
        for name, state in sorted(files.items(), key=lambda item: item[1][1]):
            seen = self.seen.get(name)
            if seen is None or seen.state != state:
                changed = now if seen is None or seen.uploaded else seen.changed
                seen = self.seen[name] = Seen(state, now, changed, False)
            ready = now - seen.changed >= self.sync.lag and now - seen.since >= self.sync.settle
            if not seen.uploaded and (ready or flush) and not self.ended.is_set():
                seen.uploaded = self._upload(name)
        for name in [name for name in self.seen if name not in files]:
            del self.seen[name]
            if self.sync.deletions and not self.ended.is_set():
                self._tried(
                    lambda name=name: self.s3.delete_object(
                        Bucket=self.bucket, Key=self.prefix + name
                    )
                )
            for suffix in (UPLOADING, UPLOADED):
                with suppress(OSError):
                    self.folder.unlink(name + suffix)

    def _files(self) -> dict[str, tuple[int, int, int]]:
        """Return what is to be uploaded, with its state."""
        found = {}
        for name, state in self.folder.walk(self._left_out):
            marker = name.endswith((UPLOADING, UPLOADED))
            if name.endswith(IGNORED) or (marker and not self.sync.markers_uploaded):
                continue
            if stat.S_ISLNK(state.st_mode):
                try:
                    with self.folder.open(name) as file:
                        state = os.fstat(file.fileno())
                except OSError:  # it leads to nothing, or out of the folder
                    continue
            if stat.S_ISREG(state.st_mode):
                found[name] = state.st_size, state.st_mtime_ns, state.st_ino
        return found

    def _left_out(self, name: str, why: str) -> None:
        if why == NO_KEY:  # all else may be another the next time
            self.note(f"the checkpoint {name} is not copied to S3: {why}")

    def _upload(self, name: str) -> bool:
        """Copy a file, as it is now, and return whether it is there."""
        markers = self.sync.markers and not name.endswith((UPLOADING, UPLOADED))
        if markers:
            self._mark(name + UPLOADING)
        done = self._tried(lambda: self._copy(name))
        if markers and done:
            self._mark(name + UPLOADED)
        return done

    def _copy(self, name: str) -> None:
        with self.folder.open(name) as file:
            self.s3.upload_fileobj(
                file, self.bucket, self.prefix + name, Callback=self._alive, Config=clients.WHOLE
            )

    def _mark(self, name: str) -> None:
        """Make a file's marker, if its folder is there, and this user's."""
        with suppress(OSError):
            self.folder.touch(name)

    def _alive(self, _: int) -> None:
        if self.ended.is_set():
            raise Cut

    def _tried(self, call) -> bool:
        """Return whether a call of S3 worked; a file that is gone meanwhile, or still written, is looked at again."""
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
        except Exception as error:  # whatever it is, the other files are copied
            self.note(f"the copy of checkpoints to s3://{self.bucket}/{self.prefix} fails: {error}")
            return False
        return True
