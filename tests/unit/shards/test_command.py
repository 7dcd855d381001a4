"""The command that makes shards and indexes: resumable, and careful with what it reads."""

import io
import os
import tarfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tar_shards
from PIL import Image

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.shards import command
from sagemaker_lightning.shards import index as indexes
from sagemaker_lightning.shards.dataset import ShardedDataset


@pytest.fixture
def images(tmp_path):
    """A folder of 30 images in three classes."""
    for number in range(30):
        path = tmp_path / "images" / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((8, 8, 3), number, np.uint8)
        Image.fromarray(pixels).save(path)
    (tmp_path / "images" / "a" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def brightness(sample):
    return int(np.asarray(Image.open(io.BytesIO(sample["png"])))[0, 0, 0]), int(sample["cls"])


def call(*arguments):
    command.main(list(map(str, arguments)))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_of_images_becomes_shards(images, tmp_path, capsys):
    call("make", images, tmp_path / "out", "--shard-bytes=20K")
    data = ShardedDataset(tmp_path / "out", brightness)
    assert data.classes == ("a", "b", "c") and len(data.index.shards) > 2
    seen = [data[number] for number in range(len(data))]
    assert sorted(seen) == [(number, number % 3) for number in range(30)] and sorted(seen) != seen
    assert "30 of 30 samples, shard-" in capsys.readouterr().out
    call("check", tmp_path / "out")
    assert "30 samples are whole" in capsys.readouterr().out
    call("make", images, tmp_path / "again", "--shard-bytes=20K")
    assert files(tmp_path / "again") == files(tmp_path / "out")
    call("make", images, tmp_path / "other", "--shard-bytes=20K", "--seed=1")
    assert files(tmp_path / "other") != files(tmp_path / "out")


def test_webdataset_reads_the_shards_by_the_names_of_files(images, tmp_path):
    call("make", images, tmp_path / "out")
    with tarfile.open(tmp_path / "out/shard-000000.tar") as archive:
        assert archive.getnames()[:2] == ["000000000.cls", "000000000.png"]


@pytest.mark.parametrize("shards_before", [0, 1, 2])
def test_an_interrupted_call_continues(images, tmp_path, monkeypatch, capsys, shards_before):
    call("make", images, tmp_path / "whole", "--shard-bytes=20K")
    write = command._write_shard
    written = []

    def interrupted(path, *rest):
        if len(written) == shards_before:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path)
        return write(path, *rest)

    monkeypatch.setattr(command, "_write_shard", interrupted)
    with pytest.raises(SystemExit) as ended:
        call("make", images, tmp_path / "out", "--shard-bytes=20K")
    assert ended.value.code == 130 and "the same call continues" in capsys.readouterr().err
    monkeypatch.setattr(command, "_write_shard", lambda *rest: written.append(0) or write(*rest))
    call("make", images, tmp_path / "out", "--shard-bytes=20K")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert len(written) == len(list((tmp_path / "out").glob("*.tar")))


def test_other_flags_or_files_do_not_continue(images, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_finish", lambda *rest: None)
    call("make", images, tmp_path / "out", "--shard-bytes=20K")
    (images / "a/0.png").write_bytes(b"another")
    for flags in ["--shard-bytes=20K"], ["--shard-bytes=30K"]:
        with pytest.raises(
            SystemExit, match="error: .*found the work of a call with other files or flags"
        ):
            call("make", images, tmp_path / "out", *flags)


@pytest.mark.parametrize("damage", ["removed", "truncated", "note"])
def test_a_shard_that_was_lost_meanwhile_is_written_again(images, tmp_path, monkeypatch, damage):
    call("make", images, tmp_path / "whole", "--shard-bytes=20K")
    with monkeypatch.context() as patch:
        patch.setattr(command, "_finish", lambda *rest: None)
        call("make", images, tmp_path / "out", "--shard-bytes=20K")
    shard = tmp_path / "out/shard-000000.tar"
    if damage == "removed":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-600])
    else:
        (tmp_path / "out" / command.STATE / "shard-000000.tar.json").write_bytes(b'["half')
    call("make", images, tmp_path / "out", "--shard-bytes=20K")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_an_output_within_the_folder_is_refused(images):
    for output in (images, images / "shards"):
        with pytest.raises(SystemExit, match="error: .*: found it within .*images"):
            call("make", images, output)


@pytest.mark.parametrize("moment", ["the index", "what is made", "the state", "the last line"])
def test_a_call_that_was_killed_at_its_end_says_that_all_is_done(
    images, tmp_path, monkeypatch, capsys, moment
):
    call("make", images, tmp_path / "whole", "--shard-bytes=20K")

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "the index":
            patch.setattr(command.Path, "replace", killed)
        elif moment == "what is made":
            patch.setattr(command, "_made", killed)
        elif moment == "the state":
            patch.setattr(command.Path, "rmdir", killed)
        else:
            patch.setattr(command, "_remove", killed)
        with pytest.raises(SystemExit):
            call("make", images, tmp_path / "out", "--shard-bytes=20K")
    monkeypatch.setattr(command, "_write_shard", killed)  # no shard is written again
    for _ in range(2):
        call("make", images, tmp_path / "out", "--shard-bytes=20K")
        assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert capsys.readouterr().out.endswith("shards.index: all is done, 30 samples\n")


def test_an_index_that_is_made_anew_is_of_the_same_samples(images, tmp_path):
    """It has no names of classes, and an interrupted run continues with it."""
    call("make", images, tmp_path / "out")
    index = tmp_path / "out/shards.index"
    made = indexes.read(index)
    index.unlink()
    call("index", tmp_path / "out")
    found = indexes.read(index)
    assert found.identity == made.identity and made.classes and not found.classes


def other_flags(images, out):
    return ["--seed=1"]


def other_images(images, out):
    (images / "a/0.png").touch()
    return []


def another_index(images, out):
    call("index", out)  # it has no classes
    return []


def no_note(images, out):
    (out / command.MADE).unlink()
    return []


@pytest.mark.parametrize("change", [other_flags, other_images, another_index, no_note])
def test_what_another_call_has_made_is_refused(images, tmp_path, change):
    call("make", images, tmp_path / "out")
    more = change(images, tmp_path / "out")
    with pytest.raises(SystemExit, match=r"error: .*out: found the shards\.index of another call"):
        call("make", images, tmp_path / "out", *more)


@pytest.mark.parametrize("damage", ["removed", "truncated"])
def test_what_is_made_and_not_whole_any_more_is_named(images, tmp_path, damage):
    call("make", images, tmp_path / "out")
    shard = tmp_path / "out/shard-000000.tar"
    content = shard.read_bytes()
    shard.unlink()
    if damage == "truncated":
        shard.write_bytes(content[:-1])
    says = r"error: .*shard-000000.tar: found no file of \d+ bytes, which shards.index names"
    with pytest.raises(SystemExit, match=says):
        call("make", images, tmp_path / "out")


def test_a_full_disk_names_the_output(images, tmp_path, monkeypatch):
    def full(*rest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "_write_shard", full)
    with pytest.raises(SystemExit, match=r"error: .*out: \[Errno 28\] No space left"):
        call("make", images, tmp_path / "out")


def test_nothing_is_overwritten(images, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(SystemExit, match="error: .*out: found mine, expected a new or empty"):
        call("make", images, tmp_path / "out")


@pytest.mark.parametrize("name", ["nothing", "table.csv", "broken.parquet", "empty"])
def test_what_is_not_a_folder_of_images_and_no_table(tmp_path, name):
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "broken.parquet").write_text("no")
    (tmp_path / "empty/a").mkdir(parents=True)
    with pytest.raises(SystemExit, match="error: .*found no (folder|image|Parquet table)"):
        call("make", tmp_path / name, tmp_path / "out")


def test_a_table_becomes_shards(images, tmp_path, capsys):
    paths = sorted(images.rglob("*.png"))
    rows = {
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in paths],
        "label": ["abc".index(path.parent.name) for path in paths],
        "caption": [None, *(path.stem for path in paths[1:])],
    }
    table = pyarrow.table(rows)
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=7)
    call("make", tmp_path / "t.parquet", tmp_path / "out", "--shard-bytes=20K")
    assert "caption: 1 of 30 samples have none" in capsys.readouterr().out
    data = ShardedDataset(tmp_path / "out")
    assert len(data) == 30 and len(data.index.shards) > 2
    for number, path in enumerate(paths):
        sample = data[number]
        assert sample.pop("caption", None) == (path.stem.encode() if number else None)
        label = str("abc".index(path.parent.name)).encode()
        assert sample == {"png": path.read_bytes(), "cls": label}


def archive_of(path, entries):
    with tarfile.open(path, "w") as archive:
        for name, content in entries:
            if isinstance(content, bytes):
                tar_shards.add(archive, name, content)
                continue
            entry = tarfile.TarInfo(name)
            entry.type = content["type"]
            entry.linkname = "/etc/passwd"
            archive.addfile(entry)


def test_shards_with_odd_names_and_kinds_of_files(tmp_path, capsys):
    """Names are never paths; links, folders, and WebDataset's __x__ and ._x are not samples."""
    entries = [
        ("__meta__.json", b"{}"),
        ("a/._1.txt", b"macOS"),
        ("../../etc/7.txt", b"1"),
        ("/etc/8.txt", b"2"),
        ("folder", {"type": tarfile.DIRTYPE}),
        ("9.txt", {"type": tarfile.SYMTYPE}),
        ("a/1.txt", b"3"),
        ("b/1.txt", b"4"),
        ("b/1.seg.png", b"5"),
    ]
    archive_of(tmp_path / "odd.tar", entries)
    call("index", tmp_path)
    data = ShardedDataset(tmp_path)
    assert [data[number]["txt"] for number in range(4)] == [b"1", b"2", b"3", b"4"]
    assert data[3]["seg.png"] == b"5"
    assert "odd.tar: 1 links are left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], "found no file in it"),
        ([("nofield", b"1")], "without a field"),
        ([("1.\x1b[2J", b"1")], "without a field"),
        ([("1.txt", b"1"), ("1.txt", b"2")], "is there twice in a row"),
    ],
)
def test_a_shard_that_has_no_samples(tmp_path, entries, says):
    archive_of(tmp_path / "a.tar", entries)
    with pytest.raises(SystemExit, match=says) as raised:
        call("index", tmp_path)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("length", [100, 600, 1500])
def test_a_truncated_tar(tmp_path, length):
    archive_of(tmp_path / "a.tar", [("1.txt", b"1" * 900)])
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:length])
    with pytest.raises(SystemExit, match="found no whole tar shard|found no file"):
        call("index", tmp_path)


@pytest.mark.parametrize("damage", ["flipped bit", "zeros", "cut at a header", "joined"])
def test_a_header_that_is_damaged_does_not_end_a_shard(tmp_path, damage):
    """tarfile takes each of these for the end: the samples behind it would be left out."""
    archive_of(tmp_path / "a.tar", [(f"{number}.txt", b"1" * 900) for number in range(9)])
    content = bytearray((tmp_path / "a.tar").read_bytes())
    header = 3 * 1536  # of the fourth file
    if damage == "flipped bit":
        content[header + 7] ^= 1
    elif damage == "zeros":
        content[header : header + 512] = bytes(512)
    elif damage == "cut at a header":
        del content[header:]
    else:
        content = content + content
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(SystemExit, match="found no whole tar shard .*byte .* is not a header"):
        call("index", tmp_path)


def test_a_good_index_stays_if_another_one_cannot_be_made(tmp_path):
    archive_of(tmp_path / "a.tar", [("1.txt", b"1")])
    call("index", tmp_path)
    before = (tmp_path / "shards.index").read_bytes()
    archive_of(tmp_path / "a.tar", [(f"1.{number}", b"1") for number in range(33)])
    with pytest.raises(SystemExit, match=r"found 33 kinds of files in the samples \(0, 1, 10 and"):
        call("index", tmp_path)
    assert (tmp_path / "shards.index").read_bytes() == before


def test_a_pipe_among_the_shards_is_named(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(SystemExit, match="error: .*a.tar: found no file"):
        call("index", tmp_path)


def test_a_size_larger_than_the_file(tmp_path):
    archive_of(tmp_path / "a.tar", [("1.txt", b"1")])
    data = bytearray((tmp_path / "a.tar").read_bytes())
    entry = tarfile.TarInfo("1.txt")
    entry.size = 2**33
    data[:512] = entry.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(SystemExit, match="found no whole tar shard"):
        call("index", tmp_path)


@pytest.mark.parametrize(("text", "bytes_"), [("7", 7), ("2K", 2048), ("1G", 2**30)])
def test_sizes(text, bytes_):
    assert command.size(text) == bytes_


@pytest.mark.parametrize("text", ["0", "-1M", "x", "", "1T"])
def test_a_wrong_size_is_refused(text):
    with pytest.raises(SystemExit):
        call("make", "a", "b", f"--shard-bytes={text}")


def test_a_check_reads_every_sample(tmp_path):
    folder = tar_shards.write(tmp_path / "shards")
    assert command.check(str(folder)) > 0
    (*_, last) = sorted(folder.glob("*.tar"))
    content = bytearray(last.read_bytes())
    content[512] ^= 1  # where the first sample of it begins
    last.write_bytes(content)
    with pytest.raises(UserError, match="found other bytes"):
        command.check(str(folder))
