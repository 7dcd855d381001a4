"""Checks that the job's data, buckets and image exist in AWS.

What is certainly wrong is a ValueError. What cannot be checked becomes a line of text, for example
for want of a permission: the job's role may be allowed what the person is not. Before a dry run the
same holds for missing credentials or network.
"""

from collections.abc import Callable
from functools import partial

from botocore.exceptions import ClientError, HTTPClientError, NoCredentialsError
from botocore.exceptions import ConnectionError as NoConnectionError

from sagemaker_lightning.launcher import aws, images, job_request
from sagemaker_lightning.launcher.services import S3, Registry, Request

FORBIDDEN = {"403", "AccessDenied", "AccessDeniedException", "UnauthorizedOperation"}
MISSING_BUCKET = {"404", "NoSuchBucket"}
MISSING_IMAGE = {"ImageNotFoundException", "RepositoryNotFoundException"}


def check(request: Request, region: str, dry_run: bool) -> list[str]:
    """Return a line for each thing that could not be checked.

    Args:
        request: The request of CreateTrainingJob.
        region: The job's region.
        dry_run: Whether missing credentials and an unreachable network are lines, too.

    Raises ValueError for what is missing or in another region.
    """
    if not aws.session().get_credentials():
        if dry_run:
            return [f"the data, the buckets and the image: {aws.NO_CREDENTIALS}"]
        raise NoCredentialsError
    s3: S3 = aws.client("s3", region)
    image = request["AlgorithmSpecification"]["TrainingImage"]
    checks: list[tuple[str, Callable[[], None]]] = []
    if aws.ECR.fullmatch(image):
        checks.append(("--image", partial(check_image, aws.client("ecr", region), image)))
    lines = []
    for channel in request.get("InputDataConfig", []):
        flag = f"--channel {channel['ChannelName']}"
        if "S3DataSource" in channel["DataSource"]:
            checks.append((flag, partial(check_data, s3, flag, job_request.address(channel))))
        else:
            lines.append(
                f"{flag}: only its VPC sees the file system {job_request.address(channel)}"
            )
    locations = {"--output": request["OutputDataConfig"]["S3OutputPath"]}
    if "CheckpointConfig" in request:
        locations["--checkpoints"] = request["CheckpointConfig"]["S3Uri"]
    checks += [(flag, partial(check_bucket, s3, flag, uri)) for flag, uri in locations.items()]
    for flag, check_one in checks:
        try:
            check_one()
        except ClientError as error:
            if error.response["Error"]["Code"] not in FORBIDDEN:
                raise
            lines.append(f"{flag}: {aws.explain(error)}")
        except (NoConnectionError, HTTPClientError) as error:
            if not dry_run:
                raise
            return [*lines, f"the data, the buckets and the image: {aws.explain(error)}"]
    return lines


def check_bucket(s3: S3, flag: str, uri: str) -> None:
    """Raise ValueError unless the bucket of `uri` exists in the job's region."""
    bucket, _ = aws.s3_location(flag, uri)
    try:
        bucket_region = s3.head_bucket(Bucket=bucket).get("BucketRegion")
    except ClientError as error:
        if error.response["Error"]["Code"] not in MISSING_BUCKET:
            raise
        raise ValueError(
            f"{flag}: found {uri}, but there is no bucket {bucket}; make it, or give another"
        ) from None
    if bucket_region and bucket_region != s3.meta.region_name:
        raise ValueError(
            f"{flag}: found a bucket in {bucket_region}, but the job is to run in "
            f"{s3.meta.region_name}; give a bucket there, or --region={bucket_region}"
        )


def check_data(s3: S3, flag: str, uri: str) -> None:
    """Raise ValueError unless something is stored at `uri`."""
    check_bucket(s3, flag, uri)
    bucket, prefix = aws.s3_location(flag, uri)
    if not s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("KeyCount"):
        raise ValueError(
            f"{flag}: found nothing stored at {uri}; upload the data there, or give another address"
        )


def check_image(ecr: Registry, uri: str) -> None:
    """Raise ValueError unless the image exists in its ECR registry."""
    image = aws.image_parts(uri)
    image_id = (
        {"imageDigest": image["digest"]}
        if image["digest"]
        else {"imageTag": image["tag"] or "latest"}
    )
    try:
        ecr.describe_images(
            registryId=image["account"], repositoryName=image["repository"], imageIds=[image_id]
        )
    except ClientError as error:
        if error.response["Error"]["Code"] not in MISSING_IMAGE:
            raise
        raise ValueError(
            f"--image: found no image {uri} ({error.response['Error']['Code']}); "
            f"{images.how_to_push(uri)}, or give one that is there"
        ) from None
