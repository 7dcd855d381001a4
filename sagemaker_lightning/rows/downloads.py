"""Downloads objects of S3 so that they continue: after a lost connection, and in the next run.

What is not complete is in a file `NAME.part`. NAME is a digest of the object's address, size and
ETag: nothing of an address becomes a path, and what is there of another object, or of another
version of this one, is not continued.
"""

import fcntl
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from sagemaker_lightning.contract.s3_address import bucket_and_key
from sagemaker_lightning.rows.byte_progress import ByteProgress, say

# Connections in a row that bring no byte, before a download is given up, and seconds between them.
TRIES = 5
PAUSE_SECONDS = 2.0
PIECE_BYTES = 2**20


def fetch(address: str, folder: Path) -> Path:
    """Return the file with an object of S3, downloaded into `folder`, which is made if needed.

    Args:
        address: s3://BUCKET/KEY.
        folder: Where the file is, and what an earlier run has left of it.

    Raises ValueError if it cannot be downloaded; what is there of it stays.
    """
    bucket, key = bucket_and_key(address)
    if not bucket or not key:
        raise ValueError(f"{address}: found no object's address, expected s3://BUCKET/KEY")
    try:
        import boto3  # noqa: F401
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise ValueError(
            f"{address}: {sys.executable} has no boto3; pip install boto3, or give a file"
        ) from None
    try:
        s3 = _client_of(bucket)
        about = s3.head_object(Bucket=bucket, Key=key)
        etag, size = about["ETag"], about["ContentLength"]
        name = hashlib.blake2b(repr((bucket, key, etag, size)).encode(), digest_size=16).hexdigest()
        path = folder / f"{name}.tar.gz"
        if path.exists():
            return path
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / f"{name}.part").open("ab") as file:
            _lock(file, folder)
            source = {"Bucket": bucket, "Key": key, "IfMatch": etag}
            _complete(s3, source, size, file, address)
        (folder / f"{name}.part").rename(path)
    except ClientError as error:
        reason = str(error)
        if error.response["Error"]["Code"] in ("412", "PreconditionFailed"):
            reason = "it has changed meanwhile; start again"
        raise ValueError(f"{address} could not be fetched: {reason}") from None
    except BotoCoreError as error:
        raise ValueError(f"{address} could not be fetched: {error}") from None
    return path


def _client_of(bucket: str) -> Any:
    """Return a client of S3 in the region of a bucket."""
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=5, retries={"mode": "standard"})
    region = os.environ.get("AWS_REGION") or boto3.Session().region_name or "us-east-1"
    s3 = boto3.client("s3", region_name=region, config=config)
    found = _region_of(s3, bucket)
    return s3 if found in (None, region) else boto3.client("s3", region_name=found, config=config)


def _region_of(s3: Any, bucket: str) -> str | None:
    """Return the region of a bucket; None if S3 does not say it."""
    from botocore.exceptions import ClientError

    try:
        region: str | None = s3.head_bucket(Bucket=bucket).get("BucketRegion")
    # The refusal says the region, too.
    except ClientError as error:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region")
    return region


def _lock(file: BinaryIO, folder: Path) -> None:
    """Keep other processes from writing the file; ValueError if one does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"--output: another process downloads into {folder}; wait for it"
        ) from None


def _complete(s3: Any, source: dict[str, str], size: int, file: BinaryIO, address: str) -> None:
    """Append to a file what it lacks of an object.

    Args:
        s3: A client.
        source: The object, and the ETag that it must have, as arguments of GetObject.
        size: Its size in bytes.
        file: Has its beginning.
        address: Its address, for the progress.
    """
    from botocore.exceptions import BotoCoreError

    # A file system that has lost its end may have given it other bytes.
    if file.tell() > size:
        _empty(file)
    progress = ByteProgress(address, size, done=file.tell())
    tries = 0
    while (begin := file.tell()) < size:
        problem: object = "no more bytes came"
        tries += 1
        try:
            answer = s3.get_object(**source, Range=f"bytes={begin}-")
            if not answer.get("ContentRange", "").startswith(f"bytes {begin}-"):
                # The whole object, from a server that knows no ranges.
                _empty(file)
            body = answer["Body"]
            while piece := body.read(min(PIECE_BYTES, size - file.tell())):
                file.write(piece)
                progress.reach(file.tell())
                tries = 0
        except BotoCoreError as error:
            problem = error
        if tries == TRIES:
            raise ValueError(f"{address} could not be fetched: {problem}")
        if file.tell() < size:
            say(f"{address}: {problem}; it continues")
            time.sleep(PAUSE_SECONDS)


def _empty(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()
