"""Tar shards for the tests: samples whose field `txt` is their number, and an index."""

import contextlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import local_s3
from sagemaker_lightning.shards import command, sources

BUCKET = "data"


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def write(folder: Path, shards: int = 4, each: int = 10, field: str = "txt") -> Path:
    """Write shards of `each` samples, numbered from 0, and their index; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as archive:
            for number in range(each * shard, each * shard + each):
                add(archive, f"{number:04}.{field}", str(number).encode())
                add(archive, f"{number:04}.x.bin", bytes([number % 256]) * (100 + number))
    command.index(folder)
    return folder


def number(sample: dict[str, bytes]) -> int:
    return int(sample["txt"])


class Clock:
    """The time between attempts, in seconds: a pause takes none of the test's."""

    def __init__(self) -> None:
        self.past = 0.0

    def monotonic(self) -> float:
        return self.past

    def sleep(self, seconds: float) -> None:
        self.past += seconds


@contextlib.contextmanager
def on_s3(folder: Path, monkeypatch: pytest.MonkeyPatch, **options) -> Iterator[local_s3.Server]:
    """Serve folder/BUCKET as a bucket for this process while the block lasts."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with local_s3.served(folder, **options) as server:
        for name, value in variables(server.endpoint).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sources, "time", Clock())
        monkeypatch.setattr(sources, "_said", -sources.SAY_EVERY)
        sources._client.cache_clear()
        yield server
        sources._client.cache_clear()


def variables(endpoint: str) -> dict[str, str]:
    """Return the environment of a process that reads from a local S3."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
