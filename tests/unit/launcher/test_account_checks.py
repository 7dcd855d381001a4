"""What is looked up in the account before a job is started."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError
from launches import IMAGE, refusal

from sagemaker_lightning.launcher import account_checks


def test_a_bucket_whose_region_is_unknown_is_accepted():
    """An older S3 does not tell it."""
    for told in ({}, {"BucketRegion": "us-east-1"}):
        s3 = SimpleNamespace(head_bucket=lambda Bucket, told=told: told)  # noqa: N803
        s3.meta = SimpleNamespace(region_name="us-east-1")
        account_checks.check_bucket(s3, "--output", "s3://bucket/x")
    s3.meta.region_name = "eu-west-1"
    says = "--output: found a bucket in us-east-1, but the job is to"
    with pytest.raises(ValueError, match=says):
        account_checks.check_bucket(s3, "--output", "s3://bucket/x")


@pytest.mark.parametrize(
    ("image", "asked"),
    [
        (IMAGE, {"imageTag": "1.0"}),
        (IMAGE.removesuffix(":1.0"), {"imageTag": "latest"}),
        (f"{IMAGE}@sha256:{'a' * 64}", {"imageDigest": f"sha256:{'a' * 64}"}),
    ],
)
def test_an_image_is_asked_for_by_its_tag_or_digest(image, asked):
    requests = []
    ecr = SimpleNamespace(describe_images=lambda **request: requests.append(request))
    account_checks.check_image(ecr, image)
    assert requests == [
        {"registryId": "123456789012", "repositoryName": "sagemaker-lightning", "imageIds": [asked]}
    ]


@pytest.mark.parametrize(
    ("check", "call"),
    [
        (lambda service: account_checks.check_image(service, IMAGE), "describe_images"),
        (lambda service: account_checks.check_bucket(service, "--o", "s3://abc/"), "head_bucket"),
    ],
)
def test_a_refusal_is_not_taken_for_what_is_missing(check, call):
    def refuse(**_) -> None:
        raise refusal("AccessDenied")

    with pytest.raises(ClientError):
        check(SimpleNamespace(**{call: refuse}))


class Buckets:
    """Stands for a client of S3 in us-east-1, with one bucket and one key."""

    meta = SimpleNamespace(region_name="us-east-1")

    def __init__(self, region: str = "us-east-1", code: str = "") -> None:
        self.region = region
        self.code = code

    def head_bucket(self, Bucket: str) -> dict:  # noqa: N803
        if self.code:
            raise ClientError({"Error": {"Code": self.code}}, "HeadBucket")
        return {"BucketRegion": self.region}

    def list_objects_v2(self, Bucket: str, Prefix: str, MaxKeys: int) -> dict:  # noqa: N803
        return {"KeyCount": 1 if "data/a".startswith(Prefix) else 0}


@pytest.mark.parametrize(
    ("buckets", "uri", "says"),
    [
        (Buckets(), "s3://bucket/data", ""),
        (Buckets(region=""), "s3://bucket/data", ""),
        (
            Buckets(),
            "s3://bucket/other",
            "^--channel x: found nothing stored at s3://bucket/other; upload",
        ),
        (
            Buckets("eu-west-1"),
            "s3://bucket/data",
            "--channel x: found a bucket in eu-west-1, but the",
        ),
        (
            Buckets(code="404"),
            "s3://bucket/data",
            "--channel x: found s3://bucket/data, but there is no bu",
        ),
    ],
)
def test_data_are_where_the_job_looks_for_them(buckets, uri, says):
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        account_checks.check_data(buckets, "--channel x", uri)


def test_a_bucket_that_may_not_be_looked_at_is_no_mistake_of_the_address():
    with pytest.raises(ClientError):
        account_checks.check_bucket(Buckets(code="403"), "--output", "s3://bucket/c")
