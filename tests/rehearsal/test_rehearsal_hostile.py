"""A hostile program leaves files: the rehearsal stays in its folders, and never hangs."""

import errno
import io
import os
import socket
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from containers import ROOT
from environments import python_of
from rehearsed_jobs import make_uploader

from sagemaker_rehearsal.jobs import artifacts, folders
from sagemaker_rehearsal.jobs.folders import Folder
from sagemaker_rehearsal.jobs.layout import Layout

SECRET = b"a secret of this machine"
HANG_SECONDS = 30  # what is not done by then hangs
REQUEST = {"TrainingJobName": "job", "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"}}


class Store:
    """A stand-in for S3 with one bucket."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def upload_fileobj(self, file, bucket: str, key: str, **_) -> None:
        """Keep a file's content."""
        key.encode()  # botocore fails on a name that cannot be encoded
        self.content[key] = file.read()

    def upload_file(self, path: str, bucket: str, key: str, **_) -> None:
        """Keep the content of the file that a path leads to."""
        with Path(path).open("rb") as file:
            self.upload_fileobj(file, bucket, key)

    def delete_object(self, *, Bucket: str, Key: str) -> None:  # noqa: N803
        """Forget a file."""
        self.content.pop(Key, None)

    def all(self) -> bytes:
        """Return all contents, those of archives unpacked."""
        contents = [*self.content.values()]
        for key, content in self.content.items():
            if key.endswith(".tar.gz"):
                with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                    contents += [tar.extractfile(member).read() for member in tar if member.isreg()]
        return b"\n".join(contents)


def call_in_thread(function: Callable, *arguments):
    """Return what a function returns; fail if it hangs."""
    results: list = []

    def run() -> None:
        try:
            results.append(function(*arguments))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert results, "it hangs"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@pytest.fixture
def host(tmp_path) -> Iterator[Path]:
    host_folder = tmp_path / "work/1/algo-1"
    Layout(host_folder, "/opt/ml/checkpoints").make()
    yield host_folder
    subprocess.run(["rm", "-rf", tmp_path / "work"], check=True)  # pytest cannot remove a deep tree


@pytest.fixture
def outside(tmp_path) -> Path:
    """A folder of this machine that does not belong to any job."""
    outside_folder = tmp_path / "outside"
    outside_folder.mkdir()
    for name in ("secret", "failure", "x.sagemaker-uploading", "data"):
        (outside_folder / name).write_bytes(SECRET)
        os.utime(outside_folder / name, (1, 1))
    return outside_folder


def entries(folder: Path) -> dict[str, tuple]:
    """Return the entries of a folder, with their times and sizes."""
    return {path.name: (path.lstat().st_mtime, path.lstat().st_size) for path in folder.iterdir()}


def take_files(host: Path) -> tuple[Store, str, list[str]]:
    """Take a host's files as the rehearsal does.

    Return the store, the text of the host's failure file, and the notes.
    """
    store = Store()
    notes = []
    uploader = make_uploader(store, host / "checkpoints", markers=True, markers_uploaded=True)
    uploader.seen.clear()  # no file of it was restored
    for _ in range(3):
        call_in_thread(uploader._look)
    for compression in ("NONE", "GZIP"):
        output = REQUEST["OutputDataConfig"] | {"CompressionType": compression}
        request = REQUEST | {"OutputDataConfig": output}
        call_in_thread(
            artifacts.upload, store, request, {"algo-1": host}, host.parent, notes.append
        )
    return store, call_in_thread(Layout(host, None).failure), [*uploader.notes, *notes]


WRITTEN_FOLDERS = ["model", "output/data", "checkpoints"]


def link_files(host: Path, outside: Path) -> None:
    """Make links to files, directly and by other links, absolute and relative."""
    for folder in (host / name for name in WRITTEN_FOLDERS):
        (folder / "sub/deeper").mkdir(parents=True)
        (folder / "1").symlink_to(outside / "secret")
        (folder / "2").symlink_to(os.path.relpath(outside / "secret", folder))
        (folder / "3").symlink_to("2")
        (folder / "sub/deeper/up").symlink_to("../..")
        (folder / "sub/deeper/4").symlink_to("up/" + os.path.relpath(outside / "secret", folder))
        (folder / "5").symlink_to("sub/deeper/up/" + os.path.relpath(outside / "secret", folder))
    (host / "output/failure").symlink_to(outside / "secret")


def link_folders(host: Path, outside: Path) -> None:
    """Make links to folders, inside a folder."""
    for folder in (host / name for name in WRITTEN_FOLDERS):
        (folder / "sub").symlink_to(outside)
        (folder / "name").symlink_to("sub/secret")


def link_places(host: Path, outside: Path) -> None:
    """Replace the folders themselves by links."""
    for name in WRITTEN_FOLDERS:
        (host / name).rmdir()
        (host / name).symlink_to(outside)


def link_output(host: Path, outside: Path) -> None:
    """Replace the folder of the failure by a link."""
    (host / "output/data").rmdir()
    (host / "output").rmdir()
    (host / "output").symlink_to(outside)


@pytest.mark.parametrize("attack", [link_files, link_folders, link_places, link_output])
def test_no_link_leads_out(host, outside, attack):
    entries_before = entries(outside)
    attack(host, outside)
    store, failure, _ = take_files(host)
    assert failure == "" and SECRET not in store.all() and entries(outside) == entries_before


@pytest.mark.parametrize("suffix", [".sagemaker-uploading", ".sagemaker-uploaded"])
@pytest.mark.parametrize("target", ["secret", "new"])
def test_a_marker_that_is_a_link(host, outside, suffix, target):
    """Nothing is made, touched or removed at the link's target."""
    entries_before = entries(outside)
    store = Store()
    folder = host / "checkpoints"
    (folder / "x").write_text("x")
    (folder / f"x{suffix}").symlink_to(outside / target)
    uploader = make_uploader(store, folder, markers=True)
    uploader.seen.clear()
    uploader._look()
    assert store.content == {"run/x": b"x"} and entries(outside) == entries_before
    (folder / "x").unlink()
    uploader._look()
    assert store.content == {} and entries(outside) == entries_before and not list(folder.iterdir())


def test_a_folder_that_becomes_a_link(host, outside):
    """The markers of its former files are not removed at the link's target."""
    entries_before = entries(outside)
    store = Store()
    folder = host / "checkpoints"
    uploader = make_uploader(store, folder, markers=True)
    (folder / "sub").mkdir()
    (folder / "sub/x").write_text("x")
    uploader._look()
    assert store.content == {"run/sub/x": b"x"}
    (folder / "sub").rename(folder / "old")
    (folder / "sub").symlink_to(outside)
    uploader._look()
    assert entries(outside) == entries_before and SECRET not in store.all()
    assert set(store.content) == {"run/old/x"}


def test_a_link_out_is_not_a_checkpoint(host, outside):
    """A link that leads out is not a checkpoint.

    The uploader does not look at it. If it takes a checkpoint's place between the look and the
    copy, the uploader does not open it.
    """
    store = Store()
    folder = host / "checkpoints"
    (folder / "before").symlink_to(outside / "secret")
    uploader = make_uploader(store, folder, markers=True)
    assert uploader._files() == {}
    (folder / "x").write_text("x")
    real_upload = uploader._upload

    def upload_a_link(name: str) -> bool:
        (folder / name).unlink()
        (folder / name).symlink_to(outside / "secret")
        return real_upload(name)

    uploader._upload = upload_a_link
    uploader._look()
    assert store.content == {} and uploader.seen["x"].uploaded is False


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_link_between_a_check_and_the_opening(host, outside, monkeypatch, linked):
    folder = host / "model"
    real_stat = os.stat
    (folder / "sub").mkdir()
    (folder / "sub/secret").write_text("x")

    def stat_then_link(name, *arguments, **options):
        status = real_stat(name, *arguments, **options)
        if name == "secret":
            monkeypatch.undo()
            if linked == "file":
                (folder / "sub/secret").unlink()
                (folder / "sub/secret").symlink_to(outside / "secret")
            else:
                (folder / "sub").rename(folder / "old")
                (folder / "sub").symlink_to(outside)
        return status

    monkeypatch.setattr(os, "stat", stat_then_link)
    if linked == "file":
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            Folder(folder).open("sub/secret")
    else:
        with Folder(folder).open("sub/secret") as file:
            assert file.read() == b"x"  # of the folder that was opened


def make_special_files(folder: Path) -> None:
    """Make a pipe, a socket, a link in a loop, and as root a device that never ends."""
    os.mkfifo(folder / "pipe")
    (folder / "to-pipe").symlink_to("pipe")
    (folder / "loop").symlink_to("loop")
    previous_folder = Path.cwd()
    os.chdir(folder)  # a socket's path has to be short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("socket")
    finally:
        os.chdir(previous_folder)
    if os.geteuid() == 0:
        os.mknod(folder / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero


def test_what_is_not_a_file(host):
    for folder_name in WRITTEN_FOLDERS:
        make_special_files(host / folder_name)
        (host / folder_name / "file").write_text(folder_name)
    for name in ("x.sagemaker-uploading", "file.sagemaker-uploading", "file.sagemaker-uploaded"):
        os.mkfifo(host / "checkpoints" / name)
    os.mkfifo(host / "output/failure")
    store, failure, notes = take_files(host)
    assert failure == "" and store.content["run/file"] == b"checkpoints"
    names = {key.rpartition("/")[2] for key in store.content}
    assert names == {"file", "model.tar.gz", "output.tar.gz"}
    with tarfile.open(fileobj=io.BytesIO(store.content["out/job/output/model.tar.gz"])) as tar:
        assert sorted(tar.getnames()) == ["file", "loop", "to-pipe"]
    for name in ("pipe", "socket") + ("device",) * (os.geteuid() == 0):
        assert f"model: {name} of algo-1 is left out: it is not a regular file" in notes


def test_an_archive_can_be_unpacked_and_makes_nobody_root(host, outside, tmp_path):
    link_files(host, outside)
    model = host / "model"
    (model / "program").write_text("x")
    os.link(model / "program", model / "twice")
    (model / "program").chmod(0o6755)
    (model / "inner").symlink_to("sub/../program")
    (model / "good").symlink_to("sub/deeper/up/program")
    (model / "sub/good").symlink_to("../program")
    store, _, notes = take_files(host)
    with tarfile.open(fileobj=io.BytesIO(store.content["out/job/output/model.tar.gz"])) as tar:
        assert not any(member.mode & 0o7000 for member in tar)
        tar.extractall(tmp_path / "unpacked", filter="data")
    unpacked = tmp_path / "unpacked"
    assert [(unpacked / name).read_text() for name in ("program", "twice", "good", "sub/good")] == [
        "x"
    ] * 4
    # It may lead out: sub may be a link.
    assert "model: inner of algo-1 is left out: the link leads out of the folder" in notes
    assert store.content["out/job/output/model/sub/good"] == b"x"


def make_nested_folders(folder: Path, levels: int) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("deep", dir_fd=descriptor)
        inner = os.open("deep", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    os.close(descriptor)


@pytest.fixture
def small_stack() -> Iterator[None]:
    """Limit the stack: it takes long to make and to remove very deep folders."""
    previous_limit = sys.getrecursionlimit()
    sys.setrecursionlimit(250)
    yield
    sys.setrecursionlimit(previous_limit)


@pytest.mark.slow
def test_folders_deeper_than_pythons_stack(host, small_stack):
    for name in WRITTEN_FOLDERS:
        make_nested_folders(host / name, 300)
        (host / name / "file").write_text(name)
    store, _, notes = take_files(host)
    assert store.content["run/file"] == b"checkpoints"
    assert any("S3 takes no such name" in note for note in notes)
    folders.remove(host)
    assert not host.exists()


def test_removing_follows_no_link(host, outside):
    entries_before = entries(outside)
    link_files(host, outside)
    (host / "folder").symlink_to(outside)
    folders.remove(host)
    assert not host.exists() and entries(outside) == entries_before


def test_names_that_s3_does_not_take(host):
    for name in WRITTEN_FOLDERS:
        (host / name / "\udcff\udcfe").write_text("x")
        (host / name / "ü").write_text(name)
    store, _, notes = take_files(host)
    assert store.content["run/ü"] == b"checkpoints"
    assert store.content["out/job/output/model/ü"] == b"model"
    assert sum("S3 takes no such name" in note for note in notes) == 8


def test_checkpoints_in_deep_folders_are_restored(tmp_path, small_stack):
    name = "a/" * 150 + "x"
    (tmp_path / "from" / name).parent.mkdir(parents=True)
    (tmp_path / "from" / name).write_text("x")
    (tmp_path / "from/link").symlink_to("/etc/passwd")
    (tmp_path / "to").mkdir()
    folders.copy(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to" / name).read_text() == "x"
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["a"]


def test_a_failure_of_a_terabyte(host):
    path = host / "output/failure"
    path.write_text("ü" * 2000)
    os.truncate(path, 2**40)
    assert call_in_thread(Layout(host, None).failure) == "ü" * 1024


def test_a_file_that_becomes_shorter_while_it_is_copied(host):
    """The copy ends, because the other side would wait for the rest."""
    path = host / "checkpoints/x"
    path.write_bytes(b"x" * 100_000)
    with Folder(host, "checkpoints").open("x") as file:
        assert len(file.read(10_000)) == 10_000
        os.truncate(path, 20_000)
        assert len(file.read(50_000)) == 10_000
        with pytest.raises(OSError, match="the file has become shorter"):
            file.read(50_000)
    with Folder(host, "checkpoints").open("x") as file:
        assert len(file.read()) == 20_000 and file.read(10) == b""


def test_a_copy_that_fails_continues(host):
    """If the rehearsal itself fails at one file, it says so and copies the others."""
    store = Store()
    uploader = make_uploader(store, host / "checkpoints")
    real_upload = store.upload_fileobj

    def upload_or_fail(file, bucket: str, key: str, **options) -> None:
        if key.endswith("bad"):
            raise RuntimeError("a fault")
        real_upload(file, bucket, key, **options)

    store.upload_fileobj = upload_or_fail
    (host / "checkpoints/bad").write_text("x")
    (host / "checkpoints/good").write_text("x")
    uploader.start()
    for _ in range(1000):
        if "run/good" in store.content:
            break
        uploader.ended.wait(0.01)
    uploader.finish()
    assert set(store.content) == {"run/good"}
    assert uploader.notes[0] == "the copy of checkpoints to s3://bucket/run/ fails: a fault"


# A rehearsal starts beside containers, given as NAME=LABEL; prints which are gone afterwards.
STARTING_PROGRAM = """
import sys
from types import SimpleNamespace
from sagemaker_rehearsal import owner
from sagemaker_rehearsal.engines import containers


def container(text):
    name, _, label = text.partition("=")
    return SimpleNamespace(
        name=name, labels={containers.LABEL: label}, remove=lambda **_: print("removed", name)
    )


def listed(filters, **_):
    wanted = filters["label"].partition("=")[2]
    return [each for each in made if not wanted or each.labels[containers.LABEL] == wanted]


made = [container(text) for text in sys.argv[1:]]
client = SimpleNamespace(
    containers=SimpleNamespace(list=listed),
    networks=SimpleNamespace(list=lambda **_: []),
    images=SimpleNamespace(list=lambda **_: []),
)
starting = owner.Owner()
starting.end_orphans(client)
starting.close(client)
"""


@pytest.mark.slow
def test_only_what_an_owner_has_left_is_removed_at_the_next_start(tmp_path):
    """A label is any text: containers have those of their images."""
    cache = tmp_path / "cache" / "sagemaker-lightning-rehearsal"
    dead = tmp_path / "elsewhere" / "sagemaker-lightning-rehearsal" / ("a" * 12)
    linked = cache / ("b" * 12)
    precious = [
        tmp_path / "work/file",
        tmp_path / "elsewhere/sagemaker-lightning-rehearsal/notes/file",
        tmp_path / "work" / ("c" * 12) / "file",
    ]
    for path in [*precious, cache / ("d" * 12) / "processes", dead / "jobs/file"]:
        path.parent.mkdir(parents=True)
        path.write_text("")
    linked.symlink_to(tmp_path / "work")
    labels = ["", ".", str(linked), *(str(path.parent) for path in precious), str(precious[0])]
    named = [f"rehearsal-{label[-12:][:6]}-{number}={label}" for number, label in enumerate(labels)]
    completed = subprocess.run(
        [
            python_of("rehearsal"),
            "-c",
            STARTING_PROGRAM,
            *named,
            f"rehearsal-aaaaaa-job-algo-1={dead}",
            f"mine={dead}",
        ],
        # An empty label is the working folder.
        cwd=tmp_path / "work",
        env=os.environ | {"XDG_CACHE_HOME": str(cache.parent), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert completed.stdout == "removed rehearsal-aaaaaa-job-algo-1\n"
    assert all(path.exists() for path in precious) and linked.is_symlink()
    assert not dead.exists() and not (cache / ("d" * 12)).exists()
