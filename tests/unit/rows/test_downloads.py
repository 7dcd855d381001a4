"""Downloads that continue, by botocore from a small S3 that loses connections."""

import fcntl
import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sagemaker_lightning.rows import downloads, merge

CONTENT = bytes(range(256)) * 12_000  # three pieces, and not a whole number of them


class S3(ThreadingHTTPServer):
    """An S3 with one object; a test says what is wrong with it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.etag = '"one"'
        self.region = "eu-central-1"
        # By GET, how many bytes come before the connection is lost; None for all.
        self.lengths: list[int | None] = []
        self.knows_ranges = True
        # What was asked: method, path, range, and the region that has signed.
        self.asked: list[tuple] = []


class Handler(BaseHTTPRequestHandler):
    """Answers as S3 does, as far as downloads ask."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def note(self) -> None:
        region = re.search(r"Credential=[^/]*/\d+/([^/]*)/", self.headers["Authorization"])[1]
        self.server.asked.append((self.command, self.path, self.headers["Range"], region))

    def do_HEAD(self) -> None:  # noqa: N802
        self.note()
        is_bucket = self.path.count("/") == 1 or self.path.endswith("/bucket/")
        found = "missing" not in self.path
        self.send_response((403 if "closed" in self.path and is_bucket else 200) if found else 404)
        self.send_header("x-amz-bucket-region", self.server.region)
        self.send_header("ETag", self.server.etag)
        self.send_header("Content-Length", "0" if is_bucket else str(len(self.server.content)))
        self.end_headers()

    def do_GET(self) -> None:  # noqa: N802
        self.note()
        server = self.server
        if self.headers["If-Match"] != server.etag:
            body = b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>"
            self.send_response(412)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        begin = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
        if not server.knows_ranges:
            begin = 0
        part = server.content[begin:]
        self.send_response(206 if server.knows_ranges else 200)
        if server.knows_ranges:
            last = len(server.content) - 1
            self.send_header("Content-Range", f"bytes {begin}-{last}/{last + 1}")
        self.send_header("ETag", server.etag)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        length = server.lengths.pop(0) if server.lengths else None
        self.wfile.write(part[:length])
        if length is not None:
            self.close_connection = True


@pytest.fixture
def s3(monkeypatch) -> Iterator[S3]:
    """The server, which botocore takes for AWS."""
    with S3() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "x")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setattr(downloads, "PAUSE_SECONDS", 0.0)
        yield server
        server.shutdown()


def ranges(s3: S3) -> list[str]:
    return [asked for command, _, asked, _ in s3.asked if command == "GET"]


def test_an_object_is_downloaded_once_from_the_buckets_region(s3, tmp_path):
    path = downloads.fetch("s3://bucket/a/model.tar.gz", tmp_path / "d")
    assert path.read_bytes() == CONTENT
    assert list((tmp_path / "d").iterdir()) == [path]
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    regions = [(command, region) for command, *_, region in s3.asked]
    assert regions == [
        ("HEAD", "us-east-1"),  # the bucket
        ("HEAD", "eu-central-1"),
        ("GET", "eu-central-1"),
    ]
    assert downloads.fetch("s3://bucket/a/model.tar.gz", tmp_path / "d") == path
    assert len(ranges(s3)) == 1


def test_a_bucket_that_may_not_be_looked_at_says_its_region(s3, tmp_path):
    downloads.fetch("s3://closed/k", tmp_path / "d")
    assert [region for *_, region in s3.asked] == ["us-east-1", "eu-central-1", "eu-central-1"]


def test_a_lost_connection_continues_where_it_was(s3, tmp_path, capsys):
    s3.lengths = [2**20 + 5, 0, 2**20]
    path = downloads.fetch("s3://bucket/k", tmp_path / "d")
    assert path.read_bytes() == CONTENT
    first, second, third, fourth = (int(asked[6:-1]) for asked in ranges(s3))
    assert first == 0 and 2**20 <= second <= 2**20 + 5 and third == second
    assert fourth >= third + 2**20 - 5
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.endswith("; it continues") for line in lines)


def test_a_download_that_brings_nothing_is_given_up_and_stays(s3, tmp_path):
    s3.lengths = [2**20 + 5] + [0] * downloads.TRIES
    with pytest.raises(ValueError, match="s3://bucket/k could not be fetched: "):
        downloads.fetch("s3://bucket/k", tmp_path / "d")
    (part,) = (tmp_path / "d").iterdir()
    assert part.suffix == ".part" and CONTENT.startswith(part.read_bytes())
    begin = part.stat().st_size
    assert begin >= 2**20
    path = downloads.fetch("s3://bucket/k", tmp_path / "d")
    assert path.read_bytes() == CONTENT and list((tmp_path / "d").iterdir()) == [path]
    assert ranges(s3)[-1] == f"bytes={begin}-"


def test_another_version_of_an_object_is_not_continued(s3, tmp_path):
    s3.lengths = [2**20] + [0] * downloads.TRIES
    with pytest.raises(ValueError, match="could not be fetched"):
        downloads.fetch("s3://bucket/k", tmp_path / "d")
    s3.content, s3.etag = CONTENT[::-1], '"two"'
    assert downloads.fetch("s3://bucket/k", tmp_path / "d").read_bytes() == CONTENT[::-1]


def test_an_object_that_changes_meanwhile_ends_the_download(s3, tmp_path, monkeypatch):
    def change(_) -> None:
        s3.etag = '"two"'

    s3.lengths = [2**20]
    monkeypatch.setattr(downloads.time, "sleep", change)
    with pytest.raises(ValueError, match="could not be fetched: it has changed meanwhile; start"):
        downloads.fetch("s3://bucket/k", tmp_path / "d")


def test_a_server_without_ranges_sends_all_of_it_again(s3, tmp_path):
    s3.lengths = [2**20 + 7]
    s3.knows_ranges = False
    assert downloads.fetch("s3://bucket/k", tmp_path / "d").read_bytes() == CONTENT


def test_a_part_that_is_too_long_begins_anew(s3, tmp_path):
    s3.lengths = [2**20] + [0] * downloads.TRIES
    with pytest.raises(ValueError, match="could not be fetched"):
        downloads.fetch("s3://bucket/k", tmp_path / "d")
    (part,) = (tmp_path / "d").iterdir()
    part.write_bytes(b"x" * (len(CONTENT) + 1))
    assert downloads.fetch("s3://bucket/k", tmp_path / "d").read_bytes() == CONTENT


def test_two_downloads_of_one_object_do_not_meet(s3, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    name = hashlib.blake2b(
        repr(("bucket", "k", s3.etag, len(CONTENT))).encode(), digest_size=16
    ).hexdigest()
    with (folder / f"{name}.part").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="--output: another process downloads into .*; wait"):
            downloads.fetch("s3://bucket/k", folder)


@pytest.mark.parametrize("key", ["../../x", "a/../b", "/etc/x", "a\nb", ".part", "x" * 900])
def test_no_key_becomes_a_path(s3, tmp_path, key):
    path = downloads.fetch(f"s3://bucket/{key}", tmp_path / "d")
    assert path.parent == tmp_path / "d" and re.fullmatch(r"[0-9a-f]{32}\.tar\.gz", path.name)
    assert [*tmp_path.iterdir()] == [tmp_path / "d"]


@pytest.mark.parametrize("address", ["s3://bucket", "s3://bucket/", "s3:///k"])
def test_an_address_of_no_object(tmp_path, address):
    with pytest.raises(ValueError, match="found no object's address, expected s3://BUCKET/KEY"):
        downloads.fetch(address, tmp_path / "d")


def test_an_object_that_is_not_there_leaves_nothing(s3, tmp_path):
    output = tmp_path / "merged"
    with pytest.raises(ValueError, match="s3://bucket/missing could not be fetched: .*404"):
        merge.merge(["s3://bucket/missing"], output)
    assert not output.exists()


def test_the_same_merge_continues_the_download(s3, tmp_path, monkeypatch, capsys):
    s3.lengths = [2**20] + [0] * downloads.TRIES
    monkeypatch.setattr("sys.argv", ["merge", "s3://bucket/k", f"--output={tmp_path / 'm'}"])
    with pytest.raises(SystemExit, match="error: s3://bucket/k could not be fetched"):
        merge.main()
    stays = f"what is downloaded stays in {tmp_path / 'm/.downloads'}; the same command continues"
    assert capsys.readouterr().err.splitlines()[-1] == stays
    with pytest.raises(SystemExit, match="error: s3://bucket/k is damaged or no archive"):
        merge.main()
    assert int(ranges(s3)[-1][6:-1]) >= 2**20 - 1
    # What is wrong with it may have come by the download.
    assert [*(tmp_path / "m").iterdir()] == []


def test_ctrl_c_leaves_what_is_downloaded(s3, tmp_path, monkeypatch, capsys):
    s3.lengths = [2**20]

    def interrupt(_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(downloads.time, "sleep", interrupt)
    monkeypatch.setattr("sys.argv", ["merge", "s3://bucket/k", f"--output={tmp_path / 'm'}"])
    with pytest.raises(SystemExit) as caught:
        merge.main()
    assert caught.value.code == 130
    assert "the same command continues" in capsys.readouterr().err
    (part,) = (tmp_path / "m/.downloads").iterdir()
    assert part.suffix == ".part"


def test_a_link_in_the_place_of_the_downloads_is_not_followed(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/.downloads").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"m holds .downloads already; expected a new or empty"):
        merge.merge(["s3://bucket/k"], tmp_path / "m")
