"""What jobs of the rehearsal read: objects of moto's S3, and requests with their folders."""

from collections.abc import Iterator
from pathlib import Path

import aws_services
import pytest

from sagemaker_rehearsal.aws import clients
from sagemaker_rehearsal.aws.access_keys import Key
from sagemaker_rehearsal.jobs import layout

ROLE = "arn:aws:iam::123456789012:role/rehearsal"
KEY = Key("id", "secret")
PAGE_SIZE = 7  # objects that moto lists at a time, where S3 lists 1,000
HANG_SECONDS = 30  # what is not done by then hangs


@pytest.fixture(scope="session")
def paged_aws(tmp_path_factory) -> Iterator[str]:
    """moto's AWS, whose lists have short pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", str(PAGE_SIZE))
        with aws_services.moto(tmp_path_factory.mktemp("moto")) as url:
            yield url


@pytest.fixture(name="s3")
def empty_bucket(paged_aws):
    client = clients.client("s3", paged_aws, "us-east-1", KEY)
    client.create_bucket(Bucket="bucket")
    yield client
    if leftover_keys := keys(client):
        client.delete_objects(
            Bucket="bucket", Delete={"Objects": [{"Key": key} for key in leftover_keys]}
        )


def put_objects(s3, *names: str) -> None:
    """Put objects, each with its key as its content."""
    for name in names:
        s3.put_object(Bucket="bucket", Key=name, Body=name.encode())


def keys(s3, prefix: str = "") -> list[str]:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
    return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


def content(s3, key: str) -> bytes:
    return s3.get_object(Bucket="bucket", Key=key)["Body"].read()


def file_texts(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_files(folder: Path, *names: str) -> None:
    """Write files, each with its name as its content; a name that ends with / is a folder."""
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(name)


def group(name: str, count: int, instance_type: str = "ml.m5.xlarge") -> dict:
    return {"InstanceGroupName": name, "InstanceType": instance_type, "InstanceCount": count}


def channel(
    name: str, uri: str, *, sharded: bool = False, groups: list[str] | None = None, **more_fields
) -> dict:
    """Return a channel for InputDataConfig."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri} | (
        {"InstanceGroupNames": groups} if groups else {}
    )
    source |= {"S3DataDistributionType": "ShardedByS3Key"} if sharded else {}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}} | more_fields


def job(*inputs: dict, hosts: int = 1, groups: list[dict] | None = None, **more_fields) -> dict:
    single = {"InstanceType": "ml.m5.xlarge", "InstanceCount": hosts}
    return {
        "TrainingJobName": "job",
        "RoleArn": ROLE,
        "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
        "ResourceConfig": {"InstanceGroups": groups} if groups else single,
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/output/"},
        "InputDataConfig": list(inputs),
    } | more_fields


def make_layouts(request: dict, folder: Path) -> dict[layout.Host, layout.Layout]:
    path = layout.checkpoint_path(request)
    layouts = {host: layout.Layout(folder / host.name, path) for host in layout.hosts(request)}
    for host_layout in layouts.values():
        host_layout.make()
    return layouts
