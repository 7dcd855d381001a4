"""resume/files/folder_lock.py: one process writes into a folder."""

import errno
import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from open_files import open_files

from sagemaker_lightning.resume.files import folder_lock


class Holder:
    """Somebody else's lock of a folder, and a clock that only moves when this process waits."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self.now = 50.0
        self.leaves_at = float("inf")
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(folder_lock, "time", clock)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.leaves_at:
            self.leave()

    def leave(self) -> None:
        os.close(self.descriptor)


def test_a_locked_folder_is_waited_for_until_patience_ends(tmp_path: Path, monkeypatch):
    opened = open_files(tmp_path)
    holder = Holder(tmp_path, monkeypatch)
    owner = f"process {os.getpid()}"
    assert folder_lock.lock(tmp_path, 0.0) == owner and holder.now == 50.0
    assert folder_lock.lock(tmp_path, 3.0) == owner and 53.0 <= holder.now < 53.2
    holder.leaves_at = holder.now + 2.0
    assert folder_lock.lock(tmp_path, 3.0) == "" and holder.now < holder.leaves_at + 0.2
    assert open_files(tmp_path) == opened + 1
    folder_lock.unlock(tmp_path)
    folder_lock.unlock(tmp_path)  # it has it no more
    assert open_files(tmp_path) == opened


def test_a_process_locks_a_folder_once_and_a_new_folder_again(tmp_path: Path, monkeypatch):
    folder = tmp_path / "checkpoints"
    opened = open_files(tmp_path)
    for _ in range(2):
        folder.mkdir()
        assert folder_lock.lock(folder, 0.0) == ""
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", pytest.fail)
            assert folder_lock.lock(folder, 0.0) == ""
        assert open_files(tmp_path) == opened + 1
        other = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        folder.rename(tmp_path / str(time.time()))
    folder_lock.unlock(folder)
    assert open_files(tmp_path) == opened


def test_a_child_has_no_lock_of_its_parents(tmp_path: Path):
    """A data worker may live longer than the training."""
    said, may_end = os.pipe(), os.pipe()
    assert folder_lock.lock(tmp_path, 0.0) == ""
    if not (child := os.fork()):
        try:
            os.write(said[1], f"owner: {folder_lock.lock(tmp_path, 0.0)}".encode())
            os.close(may_end[1])
            os.read(may_end[0], 1)
        finally:
            os._exit(0)
    os.close(said[1])
    assert os.read(said[0], 100).decode() == f"owner: process {os.getpid()}"
    folder_lock.unlock(tmp_path)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for descriptor in (other, said[0], *may_end):
        os.close(descriptor)
    os.waitpid(child, 0)


def test_a_file_system_without_locks_locks_nothing(tmp_path: Path, monkeypatch):
    def has_none(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    opened = open_files(tmp_path)
    monkeypatch.setattr(fcntl, "flock", has_none)
    monkeypatch.setattr(folder_lock.time, "sleep", pytest.fail)
    assert folder_lock.lock(tmp_path, 9.0) == "" and open_files(tmp_path) == opened


LOCKS = """
1: POSIX  ADVISORY  WRITE 11 fe:01:{inode} 0 EOF
2: FLOCK  ADVISORY  WRITE 12 fe:01:9{inode} 0 EOF
2: -> FLOCK  ADVISORY  WRITE 13 fe:01:{inode} 0 EOF
3: FLOCK  ADVISORY  WRITE 0 fe:01:{inode} 0 EOF
"""


@pytest.mark.parametrize(
    ("locks", "owner"),
    [
        (LOCKS, "another process"),
        (f"{LOCKS}4: FLOCK  ADVISORY  WRITE 4242 fe:01:{{inode}} 0 EOF", "process 4242"),
        (f"{LOCKS}4: FLOCK  ADVISORY  WRITE 1 fe:01:{{inode}} 0 EOF", "process 1"),
        ("", "another process"),
        (None, "another process"),
    ],
)
def test_who_has_locked_a_folder_is_named(tmp_path: Path, monkeypatch, locks, owner):
    """As far as it can be known: a process of another container has no number here."""
    holder = Holder(tmp_path, monkeypatch)

    def read_text(path: Path) -> str:
        assert path == Path("/proc/locks")
        if locks is None:
            raise PermissionError
        return locks.format(inode=tmp_path.stat().st_ino).lstrip("\n")

    monkeypatch.setattr(Path, "read_text", read_text)
    assert folder_lock.lock(tmp_path, 0.0) == owner
    holder.leave()
