"""What S3 does wrong: tried again where it passes, one line that names the object where not."""

import json
import re
import time
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest
import tar_shards
from botocore.exceptions import EndpointConnectionError, FlexibleChecksumError
from botocore.utils import ContainerMetadataFetcher

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.shards import sources


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """Serve a bucket with an object of ten bytes, with a fault."""
    folder = tmp_path / tar_shards.BUCKET / "train"
    folder.mkdir(parents=True)
    (folder / "a.tar").write_bytes(b"0123456789")
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
        (429, "TooManyRequests"),
        (400, "RequestTimeout"),
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


def test_content_that_its_checksum_does_not_match_is_asked_for_again():
    error = FlexibleChecksumError(error_msg="Expected checksum x did not match")
    assert sources._judged(error) == ("", sources.PATIENCE)


@pytest.mark.parametrize("fault", [(429, ""), (503, "SlowDown"), 0], ids=str)
def test_what_lasts_for_most_of_a_minute_passes_and_a_line_says_so(s3, fault, capsys):
    s3.fault = lambda key, number: fault if sources.time.past < 50 else None
    assert read() == b"2345"
    (line,) = {line.split(":")[0] for line in capsys.readouterr().out.splitlines()}
    assert line == "warning"


def test_many_readers_say_once_that_they_try_again(s3, capsys):
    s3.fault = lambda key, number: 0 if sources.time.past < 20 else None
    for _ in range(3):
        assert read() == b"2345"
        sources.time.past = 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(
        r"warning: s3://data/train/a.tar: S3 says .*; it is tried again, for 60 s", line
    )


def test_an_address_that_nobody_answers_at_is_asked_again(s3, monkeypatch):
    chunks = sources.Bucket._chunks
    failures = [1, 1]

    def refused(self, *arguments):
        if failures:
            failures.pop()
            raise EndpointConnectionError(endpoint_url="http://s3", error=OSError("refused"))
        return chunks(self, *arguments)

    monkeypatch.setattr(sources.Bucket, "_chunks", refused)
    assert read() == b"2345"


@pytest.mark.parametrize(("status", "seconds"), [(503, 60), (403, 10)])
def test_a_fault_that_stays_ends_in_time(s3, status, seconds):
    s3.fault = lambda key, number: (status, "AccessDenied" if status == 403 else "SlowDown")
    says = r"s3://data/train/a.tar: S3 says [^:]* operation: refused, \d+ times in \d+ s;"
    with pytest.raises(UserError, match=says):
        read()
    assert sources.time.past == pytest.approx(seconds)
    assert s3.asked[f"{tar_shards.BUCKET}/train/a.tar"] < 20


def test_one_refusal_among_other_faults_is_not_the_end(s3):
    fault = {5: (403, "AccessDenied"), 6: (503, "SlowDown"), 7: (403, "AccessDenied")}
    s3.fault = lambda key, number: fault.get(number, (503, "SlowDown")) if number < 8 else None
    assert read() == b"2345" and sources.time.past > sources.REFUSED_PATIENCE


def test_a_file_that_cannot_be_written_is_not_read_again(s3):
    place = sources.source(f"s3://{tar_shards.BUCKET}/train")
    with Path("/dev/full").open("wb") as file, pytest.raises(OSError, match="No space left"):
        place.copy("a.tar", 0, 10, file.fileno())
    assert s3.asked[f"{tar_shards.BUCKET}/train/a.tar"] == 1


@pytest.mark.parametrize("asked_in_vain", [4, 10**9])
def test_an_endpoint_of_credentials_that_fails_is_asked_again(
    s3, tmp_path, monkeypatch, asked_in_vain
):
    """botocore itself asks three times, and gives up."""
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{s3.endpoint}/credentials")
    keys = {"AccessKeyId": "a", "SecretAccessKey": "b", "Token": "c"}
    keys["Expiration"] = "2126-11-29T00:00:00Z"
    (tmp_path / "credentials").write_text(json.dumps(keys))
    s3.fault = lambda key, number: (
        (500, "no") if key == "credentials" and number < asked_in_vain else None
    )
    if asked_in_vain == 4:
        assert read() == b"2345"
        return
    with pytest.raises(UserError, match=r"a.tar: S3 says Error when retrieving credentials.*times"):
        read()


def test_an_address_that_cannot_be_is_one_line_that_names_its_variable(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:99999")
    sources._client.cache_clear()
    with pytest.raises(UserError, match=r"^s3://.*a.tar: S3 says .*, and AWS_ENDPOINT_URL$"):
        read()


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_ENDPOINT_URL", "nonsense"), ("AWS_REGION", "no region")]
)
def test_a_setting_that_boto3_does_not_take_is_named(s3, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    sources._client.cache_clear()
    with pytest.raises(UserError, match=f"^{name}: found .*{value}.*, expected a setting"):
        read()


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


@pytest.mark.parametrize("fault", ["silence", "a byte now and then"])
def test_what_makes_no_progress_is_tried_again(s3, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(sources, "READ_TIMEOUT", 0.5)
    path = tmp_path / tar_shards.BUCKET / "train/a.tar"
    path.write_bytes(b"0123456789" * 100)
    answer = (lambda: time.sleep(2)) if fault == "silence" else lambda: 0.1
    s3.fault = lambda key, number: answer() if number == 0 else None
    assert read(0, 1000) == path.read_bytes()
    assert s3.asked[f"{tar_shards.BUCKET}/train/a.tar"] == 2


def test_what_never_makes_progress_is_one_line(s3, monkeypatch):
    monkeypatch.setattr(sources, "READ_TIMEOUT", 0.05)
    s3.fault = lambda key, number: 1.0
    with pytest.raises(
        UserError, match=r"a.tar: S3 has sent nothing, or less than 256 KiB, in 0 s"
    ):
        read()


def test_without_credentials_one_line_says_so(monkeypatch, tmp_path, s3):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    sources._client.cache_clear()
    with pytest.raises(UserError, match="a.tar: S3 says Unable to locate credentials"):
        read()
    assert sources.time.past == pytest.approx(10)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="No such file or directory, expected a folder of shards"):
        sources.source(str(tmp_path / "nothing")).sizes()
