"""Where shards are: a folder, such as a channel, or a place on S3. Both are read by byte range."""

import functools
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.s3_address import SCHEME, bucket_and_key
from sagemaker_lightning.shards.threads import Attempt, Overdue

PATIENCE = 60.0
"""Seconds from the first failure of a request on, in which it is tried again."""
REFUSED_PATIENCE = 10.0
"""The same where S3 refuses: credentials may be renewed, but most often nothing changes."""
LONGEST_PAUSE = 8.0  # seconds between two attempts
SAY_AFTER = 10.0  # seconds from the first failure on
SAY_EVERY = 30.0  # seconds between two such lines of a process
READ_TIMEOUT = 20.0  # seconds without CHUNK bytes, or without the end
CHUNK = 2**18  # bytes; a connection holds as many in memory while it copies
POOL = 32  # connections of a process
ADVICE = {
    "NoSuchKey": "it is missing; upload it again, or make the index again",
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "give the job's role s3:GetObject of it and, for its bucket, s3:ListBucket",
    "InvalidAccessKeyId": "the access key is unknown; give the job's role",
    "ExpiredToken": "the credentials have expired; give ones that are renewed, as a job's role has",
    "PreconditionFailed": "it was replaced while it was read; do not change a channel in use",
    "InvalidRange": "it is shorter than its index says; upload it again, or make the index again",
    "SlowDown": "S3 throttles; use fewer data workers, or spread the shards over more prefixes",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION to it",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION to it",
}
SAME_CODES = {
    "404": "NoSuchKey",
    "403": "AccessDenied",
    "301": "PermanentRedirect",
    "400": "ExpiredToken",  # what a HEAD request says of them
    "412": "PreconditionFailed",
    "416": "InvalidRange",
    "429": "SlowDown",
    "503": "SlowDown",
    "RequestExpired": "ExpiredToken",
    "TokenRefreshRequired": "ExpiredToken",
    "ServiceUnavailable": "SlowDown",
    "TooManyRequests": "SlowDown",
    "Throttling": "SlowDown",
    "ThrottlingException": "SlowDown",
    "RequestLimitExceeded": "SlowDown",
}
REFUSALS = ("ExpiredToken", "AccessDenied")
"""What passes where credentials are renewed."""
PASSING = ("SlowDown", "RequestTimeout")
"""What passes, whatever its status, as any answer of a status from 500 on."""


class Source(ABC):
    """A place with shards.

    Args:
        location: Its path or s3:// address.
    """

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")

    def name_of(self, name: str) -> str:
        """Return the path or the address of a file there, for a message."""
        return f"{self.location}/{name}"

    def connect(self) -> None:  # noqa: B027 (a folder needs none)
        """Make what reading needs: threads that read at once would make one each."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return the size of each file that is there, in bytes, by name.

        Raises UserError if that cannot be found out.
        """

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes of a file from `start` to `stop`, fewer if it ends before.

        Raises UserError, which names the file, if it cannot be read.
        """

    def copy(self, name: str, start: int, stop: int, descriptor: int) -> int:
        """Write the bytes of a file from `start` to `stop` to the same place of another one.

        Returns how many there were. Raises UserError if it cannot be read; OSError.
        """
        return os.pwrite(descriptor, self.read(name, start, stop), start)


class Folder(Source):
    """A folder, such as a channel in File or FastFile mode."""

    def sizes(self) -> dict[str, int]:
        """Return the size of each file, in bytes, by name."""
        try:
            with os.scandir(self.location) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except OSError as error:
            raise UserError(
                f"{self.location}: found {error.strerror}, expected a folder of shards; give the "
                "channel, or the folder"
            ) from None

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes of a file from `start` to `stop`."""
        try:
            return pread(self.name_of(name), start, stop)
        except OSError as error:
            raise UserError(
                f"{self.name_of(name)} cannot be read ({error.strerror}); give the channel again"
            ) from None


class Bucket(Source):
    """A prefix of a bucket."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.bucket, self.prefix = bucket_and_key(self.location)

    def connect(self) -> None:
        """Make this process's client; UserError if there can be none."""
        self._tried("", lambda client, attempt: None)

    def sizes(self) -> dict[str, int]:
        """Return the size of each object, in bytes, by its name below the prefix."""
        prefix = f"{self.prefix}/" if self.prefix else ""

        def listed(client: Any, attempt: Attempt) -> dict[str, int]:
            sizes = {}
            pages = client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=prefix, Delimiter="/"):
                with attempt.step():
                    for entry in page.get("Contents", []):
                        sizes[entry["Key"].removeprefix(prefix)] = entry["Size"]
            return sizes

        sizes: dict[str, int] = self._tried("", listed)
        return sizes

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes of an object from `start` to `stop`."""

        def answered(client: Any, attempt: Attempt) -> bytes:
            chunks = []
            for chunk in self._chunks(client, name, start, stop):
                with attempt.step():
                    chunks.append(chunk)
            return b"".join(chunks)

        read: bytes = self._tried(name, answered)
        return read

    def copy(self, name: str, start: int, stop: int, descriptor: int) -> int:
        """Write the bytes of an object to the same place of a file, CHUNK by CHUNK."""

        def answered(client: Any, attempt: Attempt) -> int:
            place = start
            for chunk in self._chunks(client, name, start, stop):
                with attempt.step():
                    place += os.pwrite(descriptor, chunk, place)
            return place - start

        copied: int = self._tried(name, answered)
        return copied

    def _chunks(self, client: Any, name: str, start: int, stop: int) -> Iterator[bytes]:
        key = f"{self.prefix}/{name}" if self.prefix else name
        answer = client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={start}-{stop - 1}")
        chunks: Iterator[bytes] = answer["Body"].iter_chunks(CHUNK)
        return chunks

    def _tried(self, name: str, ask: Callable[[Any, Attempt], Any]) -> Any:
        """Return what `ask` returns for a client and an attempt, tried again where that may help.

        An attempt ends after READ_TIMEOUT without progress. The last one begins PATIENCE after the
        first one's end.
        """
        since: dict[float, float] = {}  # when each patience began
        number = 0
        while True:
            number += 1
            try:
                client = _client(os.getpid())  # it takes long on a busy machine: no fault of S3's
                return Attempt(functools.partial(ask, client)).result(READ_TIMEOUT)
            except Exception as error:
                code, patience = _judged(error)
                if patience is None:
                    raise
                problem = self._problem(name, error)
            now = time.monotonic()
            first = since.setdefault(PATIENCE, now)
            since.setdefault(patience, now)
            if patience > REFUSED_PATIENCE:
                since.pop(REFUSED_PATIENCE, None)  # S3 does not refuse any more
            left = min(begun + seconds for seconds, begun in since.items()) - now
            if left <= 0:
                times = f", {number} times in {now - first:.0f} s" if number > 1 else ""
                advice = ADVICE.get(code) or _advice(problem)
                raise UserError(f"{problem}{times}; {advice}")
            if code in REFUSALS:
                _client.cache_clear()  # a new one takes new credentials
            if now > first + SAY_AFTER:
                _say_retried(f"{problem}; it is tried again, for {patience:.0f} s in all")
            time.sleep(min(_pause(number), left))

    def _problem(self, name: str, error: Exception) -> str:
        # It is asked again by `_tried`, which counts.
        text = str(error).replace(" (reached max retries: 0)", "")
        what = f"S3 says {printable(text)[:300]}"
        if isinstance(error, Overdue):
            what = f"S3 has sent nothing, or less than {CHUNK >> 10} KiB, in {READ_TIMEOUT:.0f} s"
        return f"{self.name_of(name) if name else self.location}: {what}"


def _judged(error: Exception) -> tuple[str, float | None]:
    """Return an error's code and how long it is worth trying again; None if it is not S3's."""
    from botocore import exceptions
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, exceptions.ClientError):
        code = error.response.get("Error", {}).get("Code", "")
        code = SAME_CODES.get(code, code)
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in REFUSALS:
            return code, REFUSED_PATIENCE
        return code, PATIENCE if status >= 500 or status == 429 or code in PASSING else 0.0
    if isinstance(error, exceptions.NoCredentialsError):  # also where their endpoint has failed
        return "", REFUSED_PATIENCE
    passing = (
        *(exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError),
        *(exceptions.CredentialRetrievalError, exceptions.MetadataRetrievalError),
        # An answer that is not S3's, such as a proxy's; what botocore gives no class of its own
        *(ResponseParserError, HTTPError, Overdue, exceptions.FlexibleChecksumError),
    )
    if isinstance(error, passing):
        return "", PATIENCE
    return "", 0.0 if isinstance(error, exceptions.BotoCoreError) else None


def _pause(attempt: int) -> float:
    """Return the seconds before another attempt; its share that is drawn parts many readers."""
    longest: float = min(LONGEST_PAUSE, 0.2 * 2.0**attempt)
    return longest * _draw.uniform(0.5, 1)


_draw = random.SystemRandom()
"""Not the generators of the training; and forked data workers do not draw the same."""

_said = -SAY_EVERY


def _say_retried(line: str) -> None:
    """Warn that a request is tried again for long, unless this process has just said so."""
    global _said
    if time.monotonic() >= _said + SAY_EVERY:
        _said = time.monotonic()
        log.warning(line)


@functools.lru_cache(maxsize=1)
def _client(process: int) -> Any:
    """Return this process's client of S3; a forked process may not use its parent's."""
    import boto3.session
    import botocore.session
    from botocore.config import Config

    config = Config(
        connect_timeout=5,
        read_timeout=READ_TIMEOUT,
        max_pool_connections=POOL,
        retries={"mode": "standard", "total_max_attempts": 1},  # `_tried` does so
    )
    session = botocore.session.get_session()
    session.register_component("data_loader", _service_files())
    region = os.environ.get("AWS_REGION")
    try:
        return boto3.session.Session(botocore_session=session, region_name=region).client(
            "s3", config=config
        )
    except ValueError as error:  # of a setting
        text = printable(str(error))[:300]
        raise UserError(
            f"{' or '.join(_variables_in(text)) or '~/.aws/config'}: found {text}, expected a "
            "setting that boto3 takes for S3; correct it, or leave it out"
        ) from None


def _advice(problem: str) -> str:
    """Return what to do about a problem that has no advice of its own."""
    return ", and ".join(["look at the network, and at the job's role", *_variables_in(problem)])


def _variables_in(text: str) -> list[str]:
    """Return the names of AWS's variables whose values a text has."""
    return [
        name
        for name, value in sorted(os.environ.items())
        if name.startswith("AWS_") and len(value) > 4 and value in text
    ]


@functools.lru_cache(maxsize=1)
def _service_files() -> Any:
    """Return what keeps botocore's description of S3, once read: data workers are forked with it.

    Each client would read it again, in 60 to 100 ms.
    """
    import botocore.session

    return botocore.session.get_session().get_component("data_loader")


def pread(path: str, start: int, stop: int) -> bytes:
    """Return the bytes of a file from `start` to `stop`, fewer if it ends before; OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, stop - start, start)
    finally:
        os.close(descriptor)


@functools.lru_cache(maxsize=8)
def source(location: str) -> Source:
    """Return the place of a path or an s3:// address."""
    if not location.startswith(SCHEME):
        return Folder(location)
    try:
        import boto3  # noqa: F401
    except ImportError:
        raise UserError(
            f"{location}: this Python has no boto3; install the extra `s3-shards`, or give a folder"
        ) from None
    return Bucket(location)
