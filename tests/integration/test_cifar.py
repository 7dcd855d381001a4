"""app/cifar10_files.py: the three forms of the data, and bad files.

Bad files are damaged, foreign or hostile.
"""

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import random
import shutil
import tarfile
import threading
import tracemalloc

import numpy as np
import pytest
from conftest import batch, write_cifar
from torchvision.datasets import CIFAR10

from sagemaker_lightning.contract.errors import UserError

from app import cifar10_files


def read(folder, train=True):
    return cifar10_files.read(folder, train, channel="channel training")


@pytest.fixture
def folder(tmp_path):
    return write_cifar(tmp_path / "data").parent


def pack(folder):
    """Put the batches into the authors' archive and remove them."""
    with tarfile.open(folder / cifar10_files.ARCHIVE, "w:gz") as archive:
        archive.add(folder / cifar10_files.FOLDER, cifar10_files.FOLDER)
    shutil.rmtree(folder / cifar10_files.FOLDER)


def test_unpacked_loose_and_packed_give_the_same(folder):
    images, labels = read(folder)
    assert images.dtype == np.uint8 and images.shape == (200, 3, 32, 32)
    assert labels.dtype == np.int64 and labels.tolist() == list(range(10)) * 20
    assert (images[40:80].reshape(40, -1) == batch(40, 1)["data"]).all()
    assert len(read(folder, train=False)[1]) == 40
    loose = read(folder / cifar10_files.FOLDER)
    pack(folder)
    packed = read(folder)
    for folder_of_files in (loose, packed):
        assert (folder_of_files[0] == images).all() and (folder_of_files[1] == labels).all()


@pytest.mark.parametrize("changed_file", ["data_batch_1", "data_batch_4"])
def test_batches_of_other_lengths_come_in_their_order_too(folder, changed_file):
    path = folder / cifar10_files.FOLDER / changed_file
    path.write_bytes(pickle.dumps(batch(10, 9)))
    sent = [
        pickle.loads((folder / cifar10_files.FOLDER / name).read_bytes(), encoding="bytes")
        for name in cifar10_files.TRAIN_FILES
    ]
    images, labels = read(folder)
    pack(folder)  # where data_batch_4 comes first, or anywhere
    for read_images in (images, read(folder)[0]):
        assert (
            read_images.reshape(-1, 3072) == np.concatenate([part["data"] for part in sent])
        ).all()
    assert len(labels) == len(images) == 170


def test_memory_is_needed_for_one_set_of_images_and_not_for_two(folder):
    for number, name in enumerate(cifar10_files.TRAIN_FILES):
        content = pickle.dumps(batch(40, number), protocol=5)
        (folder / cifar10_files.FOLDER / name).write_bytes(content)
    tracemalloc.start()
    try:
        images, _ = read(folder)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Besides them, there is one file's content, and what its pickle has.
    assert images.nbytes < most < 1.7 * images.nbytes


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol(folder, protocol):
    (folder / cifar10_files.FOLDER / "test_batch").write_bytes(pickle.dumps(batch(20, 9), protocol))
    assert (read(folder, train=False)[0].reshape(20, -1) == batch(20, 9)["data"]).all()


def test_a_pickle_of_python_2(folder):
    """The official files have bytes as keys.

    Their arrays have Python 2's str and numpy 1's module names.
    """
    content = pickle.dumps(batch(20, 9), protocol=2).replace(
        b"numpy._core.multiarray", b"numpy.core.multiarray"
    )
    assert b"numpy.core.multiarray" in content
    (folder / cifar10_files.FOLDER / "test_batch").write_bytes(content)
    assert read(folder, train=False)[0].shape == (20, 3, 32, 32)


def pickled_by_python_2(content: bytes, images: int) -> bytes:
    """Return a batch of so many images as Python 2 pickles it: the content is a str of bytes."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR"
        b"(I1\n(I%d\nI3072\ntcnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntb"
        b"I00\nT%btb" % (images, len(content).to_bytes(4, "little") + content)
    )
    return b"\x80\x02}(U\x04data%bU\x06labels](%beu." % (array, b"K\x05" * images)


def test_the_bytes_of_python_2_are_the_images(folder):
    """So are the batches that the authors ship."""
    content = bytes(range(256)) * 24
    path = folder / cifar10_files.FOLDER / "test_batch"
    path.write_bytes(pickled_by_python_2(content, 2))
    images, labels = read(folder, train=False)
    assert images.tobytes() == content and labels.tolist() == [5, 5]
    path.write_bytes(pickled_by_python_2(content + b"12345", 2))
    with pytest.raises(UserError, match=r"test_batch: 'data' is 'u1' \(2, 3072\), must be uint8"):
        read(folder, train=False)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("code_position", ["alone", "inside"])
def test_a_pickle_cannot_run_code(folder, tmp_path, code_position):
    evil = Evil(tmp_path / "ran")
    content = evil if code_position == "alone" else batch(20, 1) | {"filenames": [evil]}
    (folder / cifar10_files.FOLDER / "data_batch_3").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=r"channel training: data_batch_3 .*system"):
        read(folder)
    assert not (tmp_path / "ran").exists()


class Forged:
    """Asks numpy for an array with these arguments."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return np.ndarray, self.arguments


def test_a_pickle_cannot_forge_pointers(folder):
    """Numpy would take an array of objects whose addresses are in the file."""
    data = Forged((1,), np.dtype("O"), b"A" * 8)
    (folder / cifar10_files.FOLDER / "data_batch_3").write_bytes(
        pickle.dumps({"data": data, "labels": [0]}, protocol=3)
    )
    with pytest.raises(UserError, match="data_batch_3: 'data' is None None, must be"):
        read(folder)


def test_columns_of_an_array_may_be_stored_one_after_the_other(folder):
    content = batch(20, 9)
    content["data"] = np.asfortranarray(content["data"])
    for protocol in (2, 5):
        (folder / cifar10_files.FOLDER / "test_batch").write_bytes(pickle.dumps(content, protocol))
        assert (read(folder, train=False)[0].reshape(20, -1) == content["data"]).all()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a CIFAR-10 batch"),
        (b"<html>not found</html>", "not a CIFAR-10 batch"),
        (pickle.dumps([1, 2]), "'data' is NoneType"),
        (pickle.dumps({"labels": [0]}), "'data' is NoneType"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.float32), "labels": [0, 1]}), "f4"),
        (pickle.dumps({"data": np.zeros((2, 3072), object), "labels": [0, 1]}), "O8"),
        (pickle.dumps({"data": np.zeros((2, 1024), np.uint8), "labels": [0, 1]}), "1024"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0, 1]}), "NoneType"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}), "1 of them"),
        (
            pickle.dumps(batch(10, 0, labels=list(range(1, 11)))),
            "label 10 found, expected 0 to 9",
        ),
        (pickle.dumps(batch(10, 0, labels=[0] * 9 + [-1])), "label -1 found, expected 0 to 9"),
        (
            pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["cat"]}),
            "label 'cat' found",
        ),
        (
            pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [True]}),
            "label True found",
        ),
    ],
)
def test_a_foreign_file_is_named(folder, content, says):
    (folder / cifar10_files.FOLDER / "data_batch_4").write_bytes(content)
    with pytest.raises(UserError, match="channel training: data_batch_4") as error:
        read(folder)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_truncated_file_is_named(folder):
    path = folder / cifar10_files.FOLDER / "data_batch_2"
    content = path.read_bytes()
    for length in (1, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match="channel training: data_batch_2"):
            read(folder)


def test_two_hundred_damaged_batches_end_in_one_line_or_in_images(folder):
    """Flipped bytes cause no crash, and no exception but the one that names the file."""
    path = folder / cifar10_files.FOLDER / "test_batch"
    content = path.read_bytes()
    draw = random.Random(0)
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 8)):
            position = draw.randrange(200) if draw.random() < 0.7 else draw.randrange(len(damaged))
            damaged[position] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            assert read(folder, train=False)[0].dtype == np.uint8
        except UserError as error:
            assert str(error).startswith("channel training: test_batch")


def test_a_damaged_archive_is_named(folder):
    pack(folder)
    path = folder / cifar10_files.ARCHIVE
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 255
    unpacked = gzip.decompress(content)
    for damaged in (
        b"",
        content[:1000],
        content[:-9],
        bytes(flipped),
        b"no archive",
        gzip.compress(unpacked[:5000]),
    ):
        path.write_bytes(damaged)
        with pytest.raises(
            UserError, match="channel training: .*(cifar-10-python.tar.gz|data_batch)"
        ):
            read(folder)


def test_an_archive_of_something_else(tmp_path):
    with tarfile.open(tmp_path / cifar10_files.ARCHIVE, "w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.type = tarfile.SYMTYPE
        member.linkname = "/etc/passwd"
        archive.addfile(member)
        archive.addfile(tarfile.TarInfo("../../data_batch_2"), io.BytesIO())
    with pytest.raises(UserError, match="channel training: data_batch_2"):
        read(tmp_path)


def test_a_missing_batch_an_empty_and_an_absent_folder(folder, tmp_path):
    (folder / cifar10_files.FOLDER / "data_batch_5").unlink()
    with pytest.raises(UserError, match="data_batch_5 is missing"):
        read(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"channel training: .*empty holds no CIFAR-10 \(found: nothing\)"
    ):
        read(tmp_path / "empty")
    for name in "fbdace":
        (tmp_path / "empty" / name).touch()
    with pytest.raises(UserError, match=r"\(found: a, b, c, d, e\)"):
        read(tmp_path / "empty")
    with pytest.raises(UserError, match="no such folder"):
        read(tmp_path / "absent")


def test_a_part_of_the_files_is_enough_where_that_is_said(folder, tmp_path):
    for name in ("data_batch_1", "data_batch_3", "data_batch_5", "test_batch"):
        (folder / cifar10_files.FOLDER / name).unlink()
    images, labels = cifar10_files.read(folder, True, "channel training", part=True)
    assert (
        images.reshape(80, -1) == np.concatenate([batch(40, number)["data"] for number in (1, 3)])
    ).all()
    for train, is_partial, says in (
        (True, False, "data_batch_1 is missing"),
        (False, True, "holds no CIFAR-10"),
    ):
        with pytest.raises(cifar10_files.Missing, match=says):
            cifar10_files.read(folder, train, "channel training", part=is_partial)
    with pytest.raises(cifar10_files.Missing, match="no such folder"):
        cifar10_files.read(tmp_path / "absent", True, "channel training", part=True)


def test_a_huge_file_is_not_read(folder):
    path = folder / cifar10_files.FOLDER / "data_batch_1"
    os.truncate(path, cifar10_files.MAX_BYTES + 1)
    with pytest.raises(UserError, match="data_batch_1 has 268435457 bytes"):
        read(folder)


def test_a_file_may_be_as_large_as_the_limit(folder, monkeypatch):
    size = (folder / cifar10_files.FOLDER / "test_batch").stat().st_size
    copy = shutil.copytree(folder, folder.with_name("packed"))
    pack(copy)
    monkeypatch.setattr(cifar10_files, "MAX_BYTES", size)
    assert len(read(folder, train=False)[1]) == len(read(copy, train=False)[1]) == 40
    monkeypatch.setattr(cifar10_files, "MAX_BYTES", size - 1)
    for channel, says in (
        (folder, f"test_batch has {size} bytes"),
        (copy, "test_batch is missing"),
    ):
        with pytest.raises(UserError, match=says):
            read(channel, train=False)


def test_a_download_is_checked_and_whole_or_absent(tmp_path, monkeypatch):
    """The dataset's host cannot be reached from here: a server on loopback stands in for it."""
    source = tmp_path / "source"
    write_cifar(source)
    pack(source)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=source)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        monkeypatch.setattr(
            CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{cifar10_files.ARCHIVE}"
        )
        download_twice(source, tmp_path / "new/target", monkeypatch)
        server.shutdown()


def download_twice(source, target, monkeypatch):
    with pytest.raises(UserError, match="--data.download"):
        cifar10_files.download(target)  # another MD5 than the authors'
    assert list(target.iterdir()) == []

    monkeypatch.setattr(
        CIFAR10, "tgz_md5", hashlib.md5((source / cifar10_files.ARCHIVE).read_bytes()).hexdigest()
    )
    cifar10_files.download(target)
    assert len(read(target)[1]) == 200
    (source / cifar10_files.ARCHIVE).unlink()
    cifar10_files.download(target)  # it is there: nothing is fetched
