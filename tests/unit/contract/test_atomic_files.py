"""contract/atomic_files.py: a file is complete, on the disk, and readable for everybody.

JSON is written without the values that JSON lacks.
"""

import json
import math
import os
from pathlib import Path

import pytest

from sagemaker_lightning.contract.atomic_files import (
    IGNORED_SUFFIX,
    atomic_write,
    atomic_writes,
    check_writable,
    json_text,
    remove_leftovers,
)
from sagemaker_lightning.contract.errors import UserError


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch
):
    """A crash of the machine leaves the old file or the complete new one.

    fsync(2) of the file, then of the folder.
    """
    events = []
    sync = os.fsync
    replace = os.replace

    def synced(descriptor: int) -> None:
        status = os.fstat(descriptor)
        events.append(("fsync", status.st_ino, status.st_size))
        sync(descriptor)

    def replaced(source, target) -> None:
        events.append(("rename", Path(source).stat().st_ino, target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    path = tmp_path / "deep/er/x.ckpt"
    with atomic_write(path) as file:
        file.write(b"12345")
    folder = path.parent.stat()
    status = path.stat()
    assert [event[:2] for event in events] == [
        ("fsync", status.st_ino),
        ("rename", status.st_ino),
        ("fsync", folder.st_ino),
    ]
    assert events[0][2] == 5  # all of it
    assert path.read_bytes() == b"12345"
    descriptors = Path("/proc/self/fd").iterdir()
    assert not [link for link in descriptors if link.resolve() == path.parent]


def test_without_sync_the_disk_is_not_waited_for(tmp_path: Path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with atomic_write(tmp_path / "x", sync=False) as file:
        file.write(b"x")
    assert (tmp_path / "x").read_bytes() == b"x" and synced == []


def test_everybody_may_read_it(tmp_path: Path):
    """The files are uploaded by another user than the container's."""
    umask = os.umask(0o077)
    try:
        with atomic_write(tmp_path / "x") as file:
            file.write(b"x")
    finally:
        os.umask(umask)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_is_not_finished_leaves_what_was_there(tmp_path: Path, error):
    path = tmp_path / "x"
    path.write_bytes(b"before")
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b"half")
        aside = [entry for entry in tmp_path.iterdir() if entry != path]
        assert [entry.suffix for entry in aside] == [IGNORED_SUFFIX]
        assert path.read_bytes() == b"before"
        raise error
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"before"


def test_several_files_get_their_names_when_all_are_on_the_disk(tmp_path: Path, monkeypatch):
    """If the disk is full at the last file, all old files stay."""
    first_path = tmp_path / "first"
    last_path = tmp_path / "last"
    first_path.write_bytes(b"before")
    sync = os.fsync
    synced = []

    def full_at_the_second(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full_at_the_second)
        with pytest.raises(OSError), atomic_writes([first_path, last_path]) as files:
            for file in files:
                file.write(b"after")
    assert list(tmp_path.iterdir()) == [first_path] and first_path.read_bytes() == b"before"
    with atomic_writes([first_path, last_path]) as files:
        for file in files:
            file.write(b"after")
    assert first_path.read_bytes() == last_path.read_bytes() == b"after"


def test_a_file_that_cannot_get_its_name_leaves_nothing_beside_it(tmp_path: Path):
    """The first of the two has its name already."""
    (tmp_path / "last").mkdir()
    with (
        pytest.raises(IsADirectoryError),
        atomic_writes([tmp_path / "first", tmp_path / "last"]) as files,
    ):
        files[0].write(b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "last"]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path):
    leftover = tmp_path / f"model.pt.abc{IGNORED_SUFFIX}"
    other_files = [
        tmp_path / name
        for name in ("model.pt", f"config.yaml.abc{IGNORED_SUFFIX}", f"mine{IGNORED_SUFFIX}")
    ]
    for path in (leftover, *other_files):
        path.touch()
    other_files.append(tmp_path / f"model.folder.abc{IGNORED_SUFFIX}")
    other_files[-1].mkdir()
    remove_leftovers(tmp_path, "model.*")
    remove_leftovers(tmp_path / "none", "*")
    assert sorted(tmp_path.iterdir()) == sorted(other_files)


def test_a_folder_that_can_be_written_to_is_made_and_left_empty(tmp_path: Path):
    check_writable(tmp_path / "a/b", "the model")
    assert list((tmp_path / "a/b").iterdir()) == []
    check_writable(tmp_path / "a/b", "the model")
    (tmp_path / "file").touch()
    says = r"/file: the model cannot be written there \(File exists\); expected a"
    with pytest.raises(UserError, match=says):
        check_writable(tmp_path / "file", "the model")


def test_a_folder_that_is_read_only_is_named(tmp_path: Path, monkeypatch):
    def refuse(**_) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(UserError, match=r": logs cannot be written there \(Read-only file system"):
        check_writable(tmp_path, "logs")


def test_json_has_null_for_what_is_not_a_number():
    value = {
        "a": [1.5, math.nan, (math.inf, -math.inf)],
        "b": {"c": math.nan, "d": True, "e": "nan"},
    }
    assert (
        json_text(value)
        == '{"a": [1.5, null, [null, null]], "b": {"c": null, "d": true, "e": "nan"}}'
    )
    assert json.loads(json_text({"x": 2}, indent=1)) == {"x": 2}
    assert "\n" in json_text({"x": 2}, indent=1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({math.nan: 1})
