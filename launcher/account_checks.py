"""What the job needs to find in AWS: its data, its buckets, its image.

What surely is wrong is a ValueError; what cannot be looked at, for want of a permission or (before a dry run) of
credentials or a network, is a line: the job's role may be allowed to what the person is not.
"""

from botocore.exceptions import ClientError, HTTPClientError, NoCredentialsError
from botocore.exceptions import ConnectionError as NoConnectionError

from launcher import aws

FORBIDDEN = {"403", "AccessDenied", "AccessDeniedException", "UnauthorizedOperation"}
MISSING_BUCKET = {"404", "NoSuchBucket"}
MISSING_IMAGE = {"ImageNotFoundException", "RepositoryNotFoundException"}


def check(request: dict, region: str, dry_run: bool) -> list[str]:
    """Return a line for each thing that could not be looked at; ValueError for what is missing or elsewhere."""
    if not aws.boto3.Session().get_credentials():
        if dry_run:
            return [f"the data, the buckets and the image: {aws.NO_CREDENTIALS}"]
        raise NoCredentialsError
    s3 = aws.client("s3", region)
    image = request["AlgorithmSpecification"]["TrainingImage"]
    looks = [(check_image, (aws.client("ecr", region), image))] if aws.ECR.fullmatch(image) else []
    for channel in request.get("InputDataConfig", []):
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        looks.append((check_data, (s3, f"--channel {channel['ChannelName']}", uri)))
    places = {"--output": request["OutputDataConfig"]["S3OutputPath"]}
    if "CheckpointConfig" in request:
        places["--checkpoints"] = request["CheckpointConfig"]["S3Uri"]
    looks += [(check_bucket, (s3, flag, uri)) for flag, uri in places.items()]
    lines = []
    for look, arguments in looks:
        try:
            look(*arguments)
        except ClientError as error:
            if error.response["Error"]["Code"] not in FORBIDDEN:
                raise
            lines.append(
                f"{arguments[-2] if look is not check_image else '--image'}: {aws.explain(error)}"
            )
        except (NoConnectionError, HTTPClientError) as error:
            if not dry_run:
                raise
            return [*lines, f"the data, the buckets and the image: {aws.explain(error)}"]
    return lines


def check_bucket(s3, flag: str, uri: str) -> None:
    """Raise ValueError unless the bucket of `uri` is there, in the region of the job."""
    bucket, _ = aws.s3_location(flag, uri)
    try:
        found = s3.head_bucket(Bucket=bucket).get("BucketRegion")
    except ClientError as error:
        if error.response["Error"]["Code"] not in MISSING_BUCKET:
            raise
        raise ValueError(
            f"{flag}: found {uri}, but there is no bucket {bucket}; make it, or give another"
        ) from None
    if found and found != s3.meta.region_name:
        raise ValueError(
            f"{flag}: found a bucket in {found}, but the job is to run in {s3.meta.region_name}; "
            f"give a bucket there, or --region={found}"
        )


def check_data(s3, flag: str, uri: str) -> None:
    """Raise ValueError unless something is stored at `uri`."""
    check_bucket(s3, flag, uri)
    bucket, prefix = aws.s3_location(flag, uri)
    if not s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("KeyCount"):
        raise ValueError(
            f"{flag}: found nothing stored at {uri}; upload the data there, or give another address"
        )


def check_image(ecr, uri: str) -> None:
    """Raise ValueError unless the image is in the registry."""
    image = aws.ECR.fullmatch(uri)
    wanted = (
        {"imageDigest": image["digest"]}
        if image["digest"]
        else {"imageTag": image["tag"] or "latest"}
    )
    try:
        ecr.describe_images(
            registryId=image["account"], repositoryName=image["repository"], imageIds=[wanted]
        )
    except ClientError as error:
        if error.response["Error"]["Code"] not in MISSING_IMAGE:
            raise
        raise ValueError(
            f"--image: found no image {uri} ({error.response['Error']['Code']}); push it with "
            "scripts/push_image.sh, or give one that is there"
        ) from None
