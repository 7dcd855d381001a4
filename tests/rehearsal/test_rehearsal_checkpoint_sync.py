"""The copies of a job's checkpoints in S3, and what is restored from them."""

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from rehearsed_inputs import (
    HANG_SECONDS,
    PAGE_SIZE,
    content,
    empty_bucket,  # noqa: F401  the fixture s3
    file_texts,
    keys,
    put_objects,
    write_files,
)
from rehearsed_jobs import make_uploader
from waiting import wait_until

from sagemaker_rehearsal.jobs import checkpoint_sync
from sagemaker_rehearsal.jobs.channels import JobFailed
from sagemaker_rehearsal.jobs.record import Saved


@pytest.fixture
def clock(monkeypatch):
    fake_clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(checkpoint_sync, "time", SimpleNamespace(monotonic=lambda: fake_clock.now))
    return fake_clock


def test_a_copy_goes_with_the_folder(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path / "a")
    write_files(
        uploader.folder.root,
        "1",
        "sub/deep/2",
        ".hidden",
        "with space",
        "x.sagemaker-ignore",
        "sub/y.sagemaker-ignore",
    )
    (uploader.folder.root / "link").symlink_to("1")
    (uploader.folder.root / "nowhere").symlink_to("/no/such/file")
    (uploader.folder.root / "folder").symlink_to("sub")
    os.mkfifo(uploader.folder.root / "pipe")
    uploader._look()
    expected = ["run/.hidden", "run/1", "run/link", "run/sub/deep/2", "run/with space"]
    assert keys(s3) == expected and content(s3, "run/link") == b"1"
    put_objects(s3, "run/of another")
    (uploader.folder.root / "sub/deep/2").unlink()
    (uploader.folder.root / "1").write_text("changed")
    uploader._look()
    assert keys(s3) == ["run/.hidden", "run/1", "run/link", "run/of another", "run/with space"]
    assert content(s3, "run/1") == b"changed" == content(s3, "run/link") and uploader.notes == []


def test_a_checkpoint_is_recorded_as_saved_and_as_copied(s3, tmp_path, clock):
    """It is in S3 when all of its files are; what was restored is not saved again."""
    write_files(tmp_path / "a", "step-1/a")
    uploader = make_uploader(s3, tmp_path / "a", lag=5.0)
    told = []
    uploader.note_checkpoint = lambda *what: told.append(what)
    uploader._look()
    assert told == []
    write_files(uploader.folder.root, "step-9/a", "step-9/b", "other")
    uploader._look()
    assert set(told) == {(9, False)}
    told.clear()
    clock.now += 6
    uploader._look()
    assert told == [(9, False), (9, True)]
    told.clear()
    write_files(uploader.folder.root, "step-9/c")
    uploader._look()
    assert told == [(9, False)]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-000000044.ckpt", 44),
        ("epoch=3-step=120.ckpt", 120),
        ("checkpoint-500/model.safetensors", 500),
        ("run/step_7", 7),
        ("step0", 0),
        ("step-000000044.ckpt.sagemaker-uploaded", None),
        ("last.ckpt", None),
        ("journal-1.bin", None),
        ("footstep-3", None),
        (f"step-{'9' * 16}", None),
    ],
)
def test_the_step_in_the_name_of_a_checkpoint(name, step):
    assert checkpoint_sync.step_in(name) == step


@pytest.mark.parametrize(
    ("sync", "seconds", "why"),
    [
        ({}, 0, ""),
        ({"lag": 5.0}, 4, "its copy lags (--sync-lag=5)"),
        ({"settle": 5.0}, 4, "its copy waits for the last change (--sync-settle=5)"),
        ({"stall_after": 3.0}, 4, "nothing was copied any more (--sync-stall-after=3)"),
        ({"lag": 5.0}, 6, "its copy had not begun before the end of its host"),
    ],
)
def test_why_the_newest_checkpoint_is_not_in_s3(s3, tmp_path, clock, sync, seconds, why):
    uploader = make_uploader(s3, tmp_path / "a", **sync)
    own = ("step-000000009.ckpt", "step-000000010.ckpt")
    write_files(uploader.folder.root, *own, "best-step=12.ckpt", "other")
    if "stall_after" not in sync:  # it looks no more
        uploader._look()
    clock.now += seconds
    uploader.ended.set()
    assert uploader.newest() == Saved(10, {"step-000000010.ckpt": why})


def test_a_newest_checkpoint_that_the_copy_has_not_seen_or_is_cut_off(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path / "a")
    assert uploader.newest() is None
    write_files(uploader.folder.root, "step-9.ckpt")
    uploader._look()
    (uploader.folder.root / "step-9.ckpt").write_text("changed since")
    assert uploader.newest() == Saved(
        9, {"step-9.ckpt": "its copy had not begun before the end of its host"}
    )
    uploader._alive = lambda _: (_ for _ in ()).throw(checkpoint_sync.Cut)
    uploader._look()
    assert uploader.newest() == Saved(
        9, {"step-9.ckpt": "its copy was cut off by the end of its host"}
    )


def test_a_checkpoint_of_several_files(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path / "a")
    write_files(uploader.folder.root, "checkpoint-5/a", "checkpoint-5/b", "checkpoint-4/c")
    uploader._look()
    write_files(uploader.folder.root, "checkpoint-5/c")
    why = "its copy had not begun before the end of its host"
    assert uploader.newest() == Saved(
        5, {"checkpoint-5/a": "", "checkpoint-5/b": "", "checkpoint-5/c": why}
    )


def record_uploads(uploader: checkpoint_sync.Uploader) -> list[str]:
    """Record the names that an Uploader uploads from now on in the returned list."""
    uploaded = []
    real_upload = uploader._upload

    def upload_and_note(name: str) -> bool:
        uploaded.append(name)
        return real_upload(name)

    uploader._upload = upload_and_note
    return uploaded


def test_what_has_not_changed_is_not_uploaded_again(s3, tmp_path, clock):
    put_objects(s3, "run/old", "run/sub/older", "run-2/x", "run")
    assert checkpoint_sync.restore(s3, "s3://bucket/run", tmp_path) == (
        2,
        len("run/old" + "run/sub/older"),
    )
    assert file_texts(tmp_path) == {"old": "run/old", "sub/older": "run/sub/older"}
    uploader = make_uploader(s3, tmp_path)
    uploaded = record_uploads(uploader)
    uploader._look()
    assert uploaded == []
    write_files(tmp_path, "new")
    uploader._look()
    uploader._look()
    assert uploaded == ["new"]
    status_before = (tmp_path / "new").stat()
    (tmp_path / "other").write_text("NEW")  # another file of the same size and time
    os.utime(tmp_path / "other", ns=(status_before.st_mtime_ns, status_before.st_mtime_ns))
    (tmp_path / "other").replace(tmp_path / "new")
    uploader._look()
    assert uploaded == ["new", "new"] and content(s3, "run/new") == b"NEW"
    (tmp_path / "old").replace(tmp_path / "older")
    uploader._look()
    assert keys(s3, "run/") == ["run/new", "run/older", "run/sub/older"]
    assert keys(s3, "run-2/") == ["run-2/x"]


@pytest.mark.slow
def test_what_is_restored_from_nothing_and_from_no_bucket(s3, tmp_path):
    assert checkpoint_sync.restore(s3, "s3://bucket/run/", tmp_path) == (0, 0)
    put_objects(s3, *(f"run/{number}" for number in range(PAGE_SIZE + 1)))
    assert checkpoint_sync.restore(s3, "s3://bucket/run/", tmp_path)[0] == PAGE_SIZE + 1
    says = "Checkpoint download failed: s3://no-such-bucket/x: NoSuchBucket"
    with pytest.raises(JobFailed, match=says):
        checkpoint_sync.restore(s3, "s3://no-such-bucket/x", tmp_path)
    put_objects(s3, "run/../../x")
    with pytest.raises(JobFailed, match="is not a name of a file"):
        checkpoint_sync.restore(s3, "s3://bucket/run", tmp_path / "a")


@pytest.mark.parametrize(
    "uri", ["s3://bucket/run", "s3://bucket/run/", "s3://bucket", "s3://bucket/"]
)
def test_a_copy_and_its_restoration_are_one(s3, tmp_path, clock, uri):
    uploader = make_uploader(s3, tmp_path / "a", uri)
    write_files(uploader.folder.root, "1", "b/2")
    uploader._look()
    assert checkpoint_sync.restore(s3, uri, tmp_path / "b") == (2, 4)
    assert file_texts(tmp_path / "b") == file_texts(tmp_path / "a")


def test_a_lag_counts_from_the_change(s3, tmp_path, clock):
    """A file that grows all the time is uploaded half-written."""
    uploader = make_uploader(s3, tmp_path, lag=10.0)
    for second in range(11):
        assert keys(s3) == []
        (tmp_path / "a").write_text("x" * (second + 1))
        clock.now = 100.0 + second
        uploader._look()
    assert content(s3, "run/a") == b"x" * 11
    (tmp_path / "a").write_text("again")
    clock.now = 150.0
    uploader._look()
    assert content(s3, "run/a") == b"x" * 11
    clock.now = 160.0
    uploader._look()
    assert content(s3, "run/a") == b"again"


def test_a_file_that_has_not_settled_is_not_uploaded(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path, settle=3.0)
    for second in range(20):
        (tmp_path / "a").write_text("x" * (second + 1))
        clock.now = 100.0 + second
        uploader._look()
    clock.now = 121.9
    uploader._look()
    assert keys(s3) == []
    clock.now = 122.0
    uploader._look()
    assert content(s3, "run/a") == b"x" * 20


def test_a_deletion_that_is_not_passed_on(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path, deletions=False)
    write_files(tmp_path, "a")
    uploader._look()
    (tmp_path / "a").unlink()
    uploader._look()
    assert keys(s3) == ["run/a"]


@pytest.mark.parametrize("are_uploaded", [False, True])
def test_markers(s3, tmp_path, clock, are_uploaded):
    uploader = make_uploader(s3, tmp_path, markers=True, markers_uploaded=are_uploaded)
    write_files(tmp_path, "sub/a")
    uploader._look()
    beside = ["a", "a.sagemaker-uploaded", "a.sagemaker-uploading"]
    assert sorted(file_texts(tmp_path / "sub")) == beside
    uploader._look()
    assert keys(s3) == [f"run/sub/{name}" for name in (beside if are_uploaded else ["a"])]
    (tmp_path / "sub/a").unlink()
    uploader._look()
    uploader._look()
    assert file_texts(tmp_path / "sub") == {} and keys(s3) == []


def disturb_uploads(uploader: checkpoint_sync.Uploader, monkeypatch, disturb) -> None:
    """Call a function in the middle of each upload."""
    real_upload = uploader.s3.upload_fileobj

    def disturb_then_upload(file, bucket, key, **options):
        disturb(uploader.folder.root / key.removeprefix(uploader.prefix))
        return real_upload(file, bucket, key, **options)

    monkeypatch.setattr(uploader.s3, "upload_fileobj", disturb_then_upload)


@pytest.mark.parametrize("deleted", ["file", "folder", "a file in the folder's place"])
def test_what_is_deleted_during_its_upload(s3, tmp_path, clock, monkeypatch, deleted):
    """The copy continues, with and without the folder of the markers."""
    uploader = make_uploader(s3, tmp_path, markers=True)
    write_files(tmp_path, "sub/a")

    def delete(path: Path) -> None:
        if path.name == "a":
            path.unlink()
            if deleted != "file":
                path.with_name("a.sagemaker-uploading").unlink()
                path.parent.rmdir()
            if deleted.startswith("a file"):
                write_files(tmp_path, "sub")

    disturb_uploads(uploader, monkeypatch, delete)
    uploader._look()
    write_files(tmp_path, "b")
    uploader._look()
    uploader._look()
    assert keys(s3) == (["run/b", "run/sub"] if deleted.startswith("a file") else ["run/b"])
    assert uploader.notes == [] and not list(tmp_path.rglob("a.sagemaker*"))


def test_a_folder_that_is_deleted_after_an_upload_in_it(s3, tmp_path, clock, monkeypatch):
    uploader = make_uploader(s3, tmp_path, markers=True)
    write_files(tmp_path, "sub/a", "sub/b")
    real_upload = uploader.s3.upload_fileobj

    def upload_then_delete(*arguments, **options) -> None:
        real_upload(*arguments, **options)
        shutil.rmtree(tmp_path / "sub", ignore_errors=True)

    monkeypatch.setattr(uploader.s3, "upload_fileobj", upload_then_delete)
    uploader._look()
    assert len(keys(s3)) == 1
    uploader._look()
    assert keys(s3) == [] == uploader.notes and list(tmp_path.iterdir()) == []


def test_what_is_written_during_its_upload_is_uploaded_again(s3, tmp_path, clock, monkeypatch):
    uploader = make_uploader(s3, tmp_path)
    write_files(tmp_path, "a")
    disturbances = [lambda path: path.write_text("later"), lambda path: None]
    disturb_uploads(uploader, monkeypatch, lambda path: disturbances.pop(0)(path))
    uploader._look()
    uploader._look()
    assert content(s3, "run/a") == b"later" and disturbances == []


@pytest.mark.parametrize("no_bucket", [True, False])
def test_a_copy_that_fails_is_reported_and_tried_again(s3, tmp_path, clock, monkeypatch, no_bucket):
    uploader = make_uploader(s3, tmp_path, "s3://bucket-2/run")
    write_files(tmp_path, "a")
    if no_bucket:
        uploader._look()
        (note,) = uploader.notes
        assert note.startswith("the copy of checkpoints to s3://bucket-2/run/ fails: ")
    else:

        def refuse(path: Path) -> None:
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            disturb_uploads(uploader, patch, refuse)
            uploader._look()
        assert uploader.notes == [
            "a checkpoint is not copied to S3: a container's root has written it for itself only"
        ]
    uploader.bucket = "bucket"
    uploader._look()
    assert keys(s3) == ["run/a"]


@pytest.mark.slow
def test_a_copy_that_stalls(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path, stall_after=10.0)
    waits = []
    real_wait = uploader.ended.wait
    uploader.ended.wait = lambda seconds: waits.append(seconds) or real_wait(seconds)
    clock.now = 109.9
    uploader.start()
    write_files(tmp_path, "a")
    wait_until(lambda: keys(s3) == ["run/a"])
    clock.now = 110.0
    uploaded = record_uploads(uploader)
    waits_before = len(waits)
    wait_until(lambda: len(waits) > waits_before + 1)
    write_files(tmp_path, "b")
    wait_until(lambda: len(waits) > waits_before + 20)
    uploader.finish()
    assert uploaded == [] and keys(s3) == ["run/a"]


@pytest.mark.parametrize("flush", [False, True])
def test_what_the_end_leaves(s3, tmp_path, flush):
    uploader = make_uploader(s3, tmp_path, flush=flush, lag=1000.0)
    uploader.start()
    write_files(tmp_path, "a")
    wait_until(lambda: "a" in uploader.seen)
    uploader.finish()
    assert keys(s3) == (["run/a"] if flush else []) and not uploader.is_alive()
    uploader.finish()  # once more, at the end of the attempt
    assert keys(s3) == (["run/a"] if flush else [])


@pytest.mark.slow
def test_the_end_cuts_an_upload(s3, tmp_path, monkeypatch):
    """Neither the file is there, nor an unfinished upload in parts."""
    uploader = make_uploader(s3, tmp_path)
    has_begun = threading.Event()
    real_alive = uploader._alive

    def wait_for_the_end(size: int) -> None:
        has_begun.set()
        assert uploader.ended.wait(HANG_SECONDS)
        real_alive(size)

    monkeypatch.setattr(uploader, "_alive", wait_for_the_end)
    for name, size in (("a", 1_000_000), ("b", 20_000_000)):
        (tmp_path / name).write_bytes(bytes(size))
    os.utime(tmp_path / "b", (1, 1))  # the oldest comes first
    uploader.start()
    assert has_begun.wait(HANG_SECONDS)
    uploader.finish()
    assert keys(s3) == [] and not s3.list_multipart_uploads(Bucket="bucket").get("Uploads")
    assert uploader.notes == [] and not uploader.seen["b"].uploaded
