"""S3 for the tests: moto's server in a process of its own, in place of AWS."""

import json
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

import aws_services
from containers import docker, no_engine

from sagemaker_rehearsal.engines import bridge


class Bucket:
    """A new bucket of the server at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self.name = f"tests-{uuid.uuid4().hex[:8]}"
        self.variables = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.client = aws_services.client("s3", endpoint)
        self.client.create_bucket(Bucket=self.name)

    def uri(self, key: str) -> str:
        """Return the s3:// address of a key."""
        return f"s3://{self.name}/{key}"

    def upload(self, folder: Path, prefix: str) -> str:
        """Put all files of a folder below `prefix` and return its s3:// address."""
        for path in filter(Path.is_file, folder.rglob("*")):
            self.client.upload_file(str(path), self.name, f"{prefix}/{path.relative_to(folder)}")
        return self.uri(prefix)

    def keys(self, prefix: str = "") -> list[str]:
        listing = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return [entry["Key"] for entry in listing.get("Contents", [])]

    def download(self, key: str, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.client.download_file(self.name, key, str(path))
        return path


def server(folder: Path) -> AbstractContextManager[str]:
    """Run moto's server at the engine's bridge, with its log in `folder`; return its URL.

    This machine and its containers can reach the address.
    """
    if no_engine():
        return aws_services.moto(folder)
    (network,) = json.loads(docker("network", "inspect", "bridge").stdout)
    return aws_services.moto(folder, bridge.of_docker(network))
