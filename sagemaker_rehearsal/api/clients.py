"""Clients of the rehearsal's own endpoint only: they never reach AWS."""

import ipaddress
import os
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from sagemaker_lightning.contract.s3_address import bucket_and_key
from sagemaker_rehearsal.api.access_keys import Key

REGION = "us-east-1"
# Objects are moved in one piece, as far as S3 allows it: for each part that is asked for, moto
# copies the whole object.
ONE_PIECE_TRANSFER = TransferConfig(multipart_threshold=5 * 1024**3, use_threads=False)
# Checkpoints are copied all the time, within this process: the headers are signed, and no bytes are
# hashed for the way.
UNHASHED = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "s3": {"payload_signing_enabled": False},
}
PRIVATE_NETWORKS = [
    ipaddress.ip_network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
]


def client(service: str, endpoint: str, region: str, key: Key):
    """Return a boto3 client of the endpoint, with its key, which AWS would refuse."""
    return boto3.client(
        service,
        endpoint_url=own(endpoint),
        region_name=region,
        aws_access_key_id=key.id,
        aws_secret_access_key=key.secret,
        config=Config(
            retries={"mode": "standard"}, max_pool_connections=20, proxies={}, **UNHASHED
        ),
    )


class Clients:
    """The endpoint's clients, each made once.

    Threads may share a client of botocore, but must not make clients at the same time.
    """

    def __init__(self, endpoint: str, key: Key) -> None:
        self.endpoint = endpoint
        self.key = key
        self.made = {}
        self.lock = threading.Lock()

    def __call__(self, region: str, service: str):
        with self.lock:
            name = region, service
            if name not in self.made:
                self.made[name] = client(service, self.endpoint, region, self.key)
            return self.made[name]


def own(endpoint: str) -> str:
    """Return `endpoint`; ValueError unless it is a loopback or private address.

    Link-local addresses are refused: AWS's metadata service has one. A user name or a backslash is
    refused, because it hides the host from some readers of addresses.
    """
    try:
        host = urlsplit(endpoint).hostname or ""
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        is_local = address.is_loopback or any(address in network for network in PRIVATE_NETWORKS)
    except ValueError:
        is_local = False
    is_local = (
        is_local and endpoint.startswith(("http://", "https://")) and not set(endpoint) & set("@\\")
    )
    if not is_local:
        raise ValueError(
            f"--endpoint: found {endpoint!r}, expected a rehearsal's address, e.g. "
            "http://127.0.0.1:4571"
        )
    return endpoint


def own_region() -> str:
    """Return the region that this person's clients use."""
    return os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION") or REGION


def variables(endpoint: str, key: Key) -> dict[str, str]:
    """Return the environment of a client that reaches the endpoint only.

    It has none of the person's own AWS settings and credentials.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    region = own_region()
    endpoint_variables = {
        "AWS_ENDPOINT_URL": own(endpoint),
        "AWS_DEFAULT_REGION": region,
        "AWS_REGION": region,
    }
    no_proxy = dict.fromkeys(("no_proxy", "NO_PROXY"), urlsplit(endpoint).hostname)
    no_config_files = {
        name: os.devnull for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")
    }
    return (
        inherited
        | key.variables
        | endpoint_variables
        | no_proxy
        | no_config_files
        | {"AWS_EC2_METADATA_DISABLED": "true"}
    )


def beside(uri: str, name: str) -> str:
    """Return the address of the folder `name` beside the one at an address of S3."""
    bucket, key = split(uri)
    above = key.rstrip("/").rpartition("/")[0]
    return "/".join(["s3:/", bucket, *([above] if above else []), name, ""])


def split(uri: str) -> tuple[str, str]:
    """Return bucket and key of an address of S3; the key starts with no slash."""
    bucket, key = bucket_and_key(uri)
    return bucket, key.lstrip("/")


def texts(request: Any) -> Iterator[str]:
    """Yield the texts in the values of a request, in their order, however deep they are."""
    waiting = [request]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting += reversed(list(value.values()) if isinstance(value, dict) else value)
        elif isinstance(value, str):
            yield value


def objects(s3, bucket: str, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield key and size of each object whose key starts with `prefix`.

    Objects that stand for a folder (KEY/) are left out.
    """
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", []):
            if not entry["Key"].endswith("/"):
                yield entry["Key"], entry["Size"]


def reason(error: ClientError | BotoCoreError | OSError) -> str:
    """Return why a call failed, as S3, its client or this machine says it."""
    if not isinstance(error, ClientError):
        return getattr(error, "strerror", None) or str(error)
    details = error.response["Error"]
    return f"{details.get('Code')}: {details.get('Message')}"
