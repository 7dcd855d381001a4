"""S3 for the tests: moto's server in a process of its own, in place of AWS; containers reach it, too."""

import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import EndpointConnectionError
from containers import docker, no_engine
from environments import python_of


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
        self.client = client(endpoint)
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
        """Return the keys that start with `prefix`."""
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return [entry["Key"] for entry in found.get("Contents", [])]

    def download(self, key: str, path: Path) -> Path:
        """Write what is at a key to `path` and return it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.client.download_file(self.name, key, str(path))
        return path


def client(endpoint: str):
    """Return boto3's client of the server."""
    return boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="testing",
        aws_secret_access_key="testing", config=Config(retries={"total_max_attempts": 1}, connect_timeout=1),
    )  # fmt: skip


@contextmanager
def server() -> Iterator[str]:
    """Start moto's server and yield its address: the engine's bridge, which this machine and its containers reach."""
    format = "{{(index .IPAM.Config 0).Gateway}}"
    host = "127.0.0.1" if no_engine() else docker("network", "inspect", "bridge", "--format", format).stdout.strip()
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    program = python_of("aws").with_name("moto_server")
    process = subprocess.Popen(
        [program, "-H", host, "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        endpoint = f"http://{host}:{port}"
        _wait(process, endpoint)
        yield endpoint
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen, endpoint: str) -> None:
    for _ in range(120):
        assert process.poll() is None, "moto_server ended"
        try:
            client(endpoint).list_buckets()
            return
        except EndpointConnectionError:
            time.sleep(0.5)
    raise AssertionError(f"nothing answers at {endpoint}")
