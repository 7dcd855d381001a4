"""Where shards are: a folder, such as a channel, or a place on S3. Both are read by byte range."""

import functools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.contract.s3_address import SCHEME, bucket_and_key

ATTEMPTS = 4
"""How often a range is asked for; each time, botocore itself tries again as REQUEST_ATTEMPTS."""
REQUEST_ATTEMPTS = 4  # with up to 20 s between two of them, where S3 throttles
READ_TIMEOUT = 20  # seconds without a byte
POOL = 32  # connections of a process
CHUNK = 2**20  # bytes that a connection holds in memory while it copies
ADVICE = {
    "NoSuchKey": "it is missing; upload it again, or make the index anew",
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "give the job's role s3:GetObject of it and, for its bucket, s3:ListBucket",
    "InvalidAccessKeyId": "the credentials are no one's; give the job's role",
    "ExpiredToken": "the credentials have expired; give ones that are renewed, as a job's role has",
    "PreconditionFailed": "it was replaced while it was read; do not change a channel in use",
    "InvalidRange": "it is shorter than its index says; upload it again, or make the index anew",
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
    "503": "SlowDown",
    "RequestExpired": "ExpiredToken",
    "TokenRefreshRequired": "ExpiredToken",
    "ServiceUnavailable": "SlowDown",
}
REFUSALS = ("ExpiredToken", "AccessDenied")
"""What may pass, as faults of the service do: credentials are renewed."""


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
        """Make this process's client."""
        _client(os.getpid())

    def sizes(self) -> dict[str, int]:
        """Return the size of each object, in bytes, by its name below the prefix."""
        prefix = f"{self.prefix}/" if self.prefix else ""

        def listed(client: Any) -> dict[str, int]:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=prefix, Delimiter="/"
            )
            return {
                entry["Key"].removeprefix(prefix): entry["Size"]
                for page in pages
                for entry in page.get("Contents", [])
            }

        sizes: dict[str, int] = self._tried("", listed)
        return sizes

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes of an object from `start` to `stop`.

        A connection that is lost, or a time without a byte, is tried again.
        """

        def answered(client: Any) -> bytes:
            content: bytes = self._body(client, name, start, stop).read()
            return content

        read: bytes = self._tried(name, answered)
        return read

    def copy(self, name: str, start: int, stop: int, descriptor: int) -> int:
        """Write the bytes of an object to the same place of a file, CHUNK by CHUNK."""

        def answered(client: Any) -> int:
            place = start
            for data in self._body(client, name, start, stop).iter_chunks(CHUNK):
                place += os.pwrite(descriptor, data, place)
            return place - start

        copied: int = self._tried(name, answered)
        return copied

    def _body(self, client: Any, name: str, start: int, stop: int) -> Any:
        key = f"{self.prefix}/{name}" if self.prefix else name
        answer = client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={start}-{stop - 1}")
        return answer["Body"]

    def _tried(self, name: str, ask: Callable[[Any], Any]) -> Any:
        """Return what `ask` returns for a client, tried again where the error may pass."""
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            HTTPClientError,
            IncompleteReadError,
            ResponseStreamingError,
        )

        for left in reversed(range(ATTEMPTS)):
            try:
                return ask(_client(os.getpid()))
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code", "")
                code = SAME_CODES.get(code, code)
                status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
                if not left or (code not in REFUSALS and status < 500):
                    raise UserError(self._line(name, code, error)) from None
                if code in REFUSALS:
                    _client.cache_clear()  # a new one takes new credentials
            except (HTTPClientError, IncompleteReadError, ResponseStreamingError) as error:
                if not left:
                    raise UserError(self._line(name, "", error)) from None
            except BotoCoreError as error:
                raise UserError(self._line(name, "", error)) from None
            time.sleep(_pause(ATTEMPTS - left))
        return None

    def _line(self, name: str, code: str, error: Exception) -> str:
        advice = ADVICE.get(code, "look at the network, and at the job's role")
        return f"{self.name_of(name)}: S3 says {printable(str(error))[:300]}; {advice}"


def _pause(attempt: int) -> float:
    """Return the seconds before another attempt."""
    return 0.2 * 4.0**attempt / 4


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
        retries={"mode": "standard", "total_max_attempts": REQUEST_ATTEMPTS},
    )
    session = botocore.session.get_session()
    session.register_component("data_loader", _service_files())
    region = os.environ.get("AWS_REGION")
    return boto3.session.Session(botocore_session=session, region_name=region).client(
        "s3", config=config
    )


@functools.lru_cache(maxsize=1)
def _service_files() -> Any:
    """Return what keeps botocore's description of S3, once read: data workers are forked with it.

    Each client would read it anew, in 60 to 100 ms.
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
