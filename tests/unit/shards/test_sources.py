"""What S3 does wrong: tried again where it passes, one line that names the object where not."""

import time
import tracemalloc
from contextlib import contextmanager

import pytest
import tar_shards

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.shards import sources


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """Serve a bucket with an object of ten bytes, with a fault."""
    folder = tmp_path / tar_shards.BUCKET / "train"
    folder.mkdir(parents=True)
    (folder / "a.tar").write_bytes(b"0123456789")
    monkeypatch.setattr(sources, "REQUEST_ATTEMPTS", 1)
    with tar_shards.on_s3(tmp_path, monkeypatch) as server:
        yield server


def read(start=2, stop=6, name="a.tar"):
    return sources.source(f"s3://{tar_shards.BUCKET}/train/").read(name, start, stop)


@contextmanager
def traced():
    """Yield a function that returns how many bytes Python has held at most in the block."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_range_is_read(s3):
    assert read() == b"2345" and read(8, 20) == b"89"
    assert sources.source(f"s3://{tar_shards.BUCKET}/train").sizes() == {"a.tar": 10}


def test_a_copy_holds_a_part_of_it_in_memory(s3, tmp_path, monkeypatch):
    """Also one whose connection is lost: it is copied from its beginning again."""
    content = bytes(range(256)) * 2**15
    (tmp_path / tar_shards.BUCKET / "train/b.tar").write_bytes(content)
    monkeypatch.setattr(sources, "CHUNK", 2**16)
    s3.fault = lambda key, number: 2**20 if number == 0 else None
    place = sources.source(f"s3://{tar_shards.BUCKET}/train")
    place.connect()
    with (tmp_path / "copy").open("wb") as file, traced() as peak:
        assert place.copy("b.tar", 0, len(content), file.fileno()) == len(content)
        assert peak() < len(content) / 4
    assert (tmp_path / "copy").read_bytes() == content


@pytest.mark.parametrize(
    "fault",
    [
        (503, "SlowDown"),
        (500, "InternalError"),
        (403, "ExpiredToken"),
        (400, "ExpiredToken"),
        (403, "AccessDenied"),
        3,  # bytes, after which the connection is lost
        0,
    ],
    ids=str,
)
def test_what_passes_is_tried_again(s3, fault):
    s3.fault = lambda key, number: fault if number in (0, 1) else None
    assert read() == b"2345" and s3.asked[f"{tar_shards.BUCKET}/train/a.tar"] == 3


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ((503, "SlowDown"), "S3 throttles; use fewer data workers"),
        ((403, "ExpiredToken"), "the credentials have expired"),
        ((403, "AccessDenied"), "give the job's role s3:GetObject"),
        ((301, "PermanentRedirect"), "the bucket is in another region; set AWS_REGION"),
        ((400, "AuthorizationHeaderMalformed"), "the bucket is in another region"),
        ((412, "PreconditionFailed"), "it was replaced while it was read"),
        ((418, "Teapot"), "look at the network, and at the job's role"),
        (2, "look at the network"),
    ],
    ids=str,
)
def test_what_stays_is_one_line_that_names_the_object(s3, fault, says):
    s3.fault = lambda key, number: fault
    with pytest.raises(UserError) as raised:
        read()
    line = str(raised.value)
    assert line.startswith("s3://data/train/a.tar: S3 says ") and says in line and "\n" not in line


def test_an_object_that_is_missing_or_short(s3):
    with pytest.raises(UserError, match=r"train/b.tar: S3 says .*NoSuchKey.* it is missing"):
        read(name="b.tar")
    with pytest.raises(UserError, match=r"train/a.tar: S3 says .*InvalidRange.* it is shorter"):
        read(10, 20)


def test_a_time_without_a_byte_is_tried_again(s3, monkeypatch):
    monkeypatch.setattr(sources, "READ_TIMEOUT", 0.2)
    s3.fault = lambda key, number: time.sleep(1) if number == 0 else None
    assert read() == b"2345" and s3.asked[f"{tar_shards.BUCKET}/train/a.tar"] == 2


def test_without_credentials_one_line_says_so(monkeypatch, tmp_path, s3):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    sources._client.cache_clear()
    with pytest.raises(UserError, match="a.tar: S3 says Unable to locate credentials"):
        read()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="No such file or directory, expected a folder of shards"):
        sources.source(str(tmp_path / "nothing")).sizes()
