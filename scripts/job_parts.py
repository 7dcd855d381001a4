"""The parts of a job as SageMaker leaves them: model.tar.gz, local or on S3, or a folder; read as untrusted input."""

import json
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from app.parts import header


class Model:
    """The files of one MODEL."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path

    def files(self) -> Iterator[tuple[str, BinaryIO]]:
        """Yield each file's name and content, which is to be read before the next one."""
        if self.path.is_dir():
            for path in sorted(self.path.rglob("*")):
                if path.is_file():
                    with path.open("rb") as file:
                        yield path.name, file
            return
        try:
            with tarfile.open(self.path, "r|*") as archive:
                for member in archive:
                    if member.isreg():
                        yield Path(member.name).name, archive.extractfile(member)
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise ValueError(f"{self.name} is damaged or no archive ({error}); copy it again") from None


def opened(name: str, folder: Path) -> Model:
    """Return a MODEL, fetched into `folder` if it is on S3."""
    if not name.startswith("s3://"):
        if not Path(name).exists():
            raise ValueError(f"{name}: found no such file; allowed are model.tar.gz, s3://BUCKET/KEY and a folder")
        return Model(name, Path(name))
    import aws
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, key = name.removeprefix("s3://").partition("/")
    path = Path(tempfile.mkstemp(dir=folder)[1])
    try:
        aws.client("s3", aws.region(None, "us-east-1")).download_file(bucket, key, str(path))
    except (BotoCoreError, ClientError) as error:
        raise ValueError(f"{name} could not be fetched: {error}") from None
    return Model(name, path)


def manifests(models: list[Model]) -> list[dict[str, Any]]:
    """Return the manifests of all parts, each with the name of its MODEL."""
    found = []
    for model in models:
        before = len(found)
        for name, file in model.files():
            if name.startswith("manifest-") and name.endswith(".json"):
                try:
                    found.append(_checked(json.load(file)) | {"model": model.name, "manifest": name})
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"{model.name}: {name} is damaged ({error!r}); copy it again") from None
        if len(found) == before:
            raise ValueError(f"{model.name} has no part: no manifest-*.json is in it")
    return found


def _checked(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest; ValueError, KeyError, TypeError or AttributeError if it is none."""
    first, last = map(int, manifest["rows"])
    if not 0 <= first <= last:
        raise ValueError(f"rows {first} to {last}")
    {**manifest["settings"], **manifest["files"]}
    {key: manifest[key] for key in ("total", "source", "host", "hosts")}
    for array in manifest["arrays"].values():
        header(np.dtype(array["dtype"]), tuple(map(int, array["shape"])))
        (array["file"] + array["blake2b"]).encode()
    return manifest
