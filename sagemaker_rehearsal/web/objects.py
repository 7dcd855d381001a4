"""What a job has left in S3: its artifacts and its checkpoints."""

from collections.abc import Iterator
from itertools import islice

from sagemaker_rehearsal.api import clients
from sagemaker_rehearsal.jobs import artifacts, checkpoint_sync

# Objects of a kind that are listed, at most.
MAX_OBJECTS = 1000
CHUNK_BYTES = 2**20


def places(request: dict) -> dict[str, tuple[str, str]]:
    """Return the bucket and the prefix of each kind of objects that a job leaves."""
    bucket, folder = artifacts.output_folder(request)
    found = {"artifacts": (bucket, f"{folder}/output/")}
    if config := request.get("CheckpointConfig"):
        found["checkpoints"] = checkpoint_sync.below(config["S3Uri"])
    return found


def listed(s3, bucket: str, prefix: str) -> list[tuple[str, int]]:
    """Return names below a prefix, and sizes in bytes: the first MAX_OBJECTS."""
    found = islice(clients.objects(s3, bucket, prefix), MAX_OBJECTS)
    return [(key.removeprefix(prefix), size) for key, size in found]


def content(s3, bucket: str, key: str) -> tuple[int, Iterator[bytes]] | None:
    """Return an object's size and bytes; None if S3 lists no object of exactly this key.

    A key is looked for in a list first: no part of it can mean another place there.
    """
    found = s3.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1).get("Contents", [])
    if [entry["Key"] for entry in found] != [key]:
        return None
    answer = s3.get_object(Bucket=bucket, Key=key)
    return answer["ContentLength"], answer["Body"].iter_chunks(CHUNK_BYTES)
