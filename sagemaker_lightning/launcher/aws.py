"""The few AWS calls that the shell scripts make, and what all scripts share.

    python scripts/aws.py account                      prints the account's number, from STS
    python scripts/aws.py region                       prints the configured region
    python scripts/aws.py create-repository NAME       makes an ECR repository, unless it exists
    python scripts/aws.py ecr-password                 prints the password for
                                                     `docker login --username AWS --password-stdin`
    python scripts/aws.py upload FILE s3://BUCKET/KEY

All take --region. boto3 finds the credentials in its usual places: AWS_PROFILE, AWS_ACCESS_KEY_ID
and so on. boto3 is the only package needed; `make env` installs it, with the rest, into .venv.
"""

import argparse
import base64
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from sagemaker_lightning.contract.command_line import Parser
from sagemaker_lightning.contract.s3_address import SCHEME, bucket_and_key

BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""What a bucket may be called (S3 user guide, "General purpose bucket naming rules")."""

NO_CREDENTIALS = (
    "no AWS credentials found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "fill ~/.aws/credentials"
)
# An ECR address. The suffix differs from partition to partition, and AWS's newer names for the same
# registry differ, too.
ECR = re.compile(
    r"(?P<account>\d{12})\.dkr[.-]ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.[a-z0-9.-]+"
    r"/(?P<repository>[a-z0-9][a-z0-9._/-]*)(:(?P<tag>[\w][\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)


def image_parts(uri: str) -> re.Match[str]:
    """Return the groups of ECR in an image's address; ValueError if it is not one of Amazon ECR."""
    match = ECR.fullmatch(uri)
    if match is None:
        raise ValueError(f"--image: found {uri!r}, expected an address in Amazon ECR")
    return match


def region(region_flag: str | None, otherwise: str | None = None) -> str:
    """Return --region, or the environment's or the profile's region, or `otherwise`.

    Raises ValueError if there is none, or if it is not a region's name.
    """
    name = region_flag or os.environ.get("AWS_REGION") or session().region_name or otherwise
    if not name:
        raise ValueError(
            "--region: found none, neither in AWS_REGION, AWS_DEFAULT_REGION nor in the AWS "
            "profile; give one, e.g. --region=us-east-1"
        )
    if not re.fullmatch(r"[a-z]{2,}(-[a-z]+)+-\d+", name):
        raise ValueError(
            f"--region: found {name!r}, expected the name of an AWS region, e.g. us-east-1"
        )
    return name


def use_profile(name: str | None) -> None:
    """Use a profile of the AWS configuration from now on; None leaves all as it is.

    Its keys come before those of the environment.

    Raises botocore's ProfileNotFound if there is none of this name.
    """
    if name:
        boto3.setup_default_session(profile_name=name)


def session() -> boto3.Session:
    """Return the session of `use_profile`, or one of the environment."""
    return boto3.DEFAULT_SESSION or boto3.Session()


def client(service: str, region_name: str) -> Any:
    """Return a boto3 client that gives up on an unreachable service within a minute.

    boto3 makes its class when it runs; services.py has what the launcher uses of it.
    """
    return boto3.client(
        service,
        region_name=region_name,
        config=Config(connect_timeout=5, retries={"mode": "standard"}),
    )


def explain(error: Exception) -> str:
    """Return the message of `error` in one line."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return NO_CREDENTIALS
    if isinstance(error, ClientError):
        details = error.response.get("Error", {})
        return (
            f"{error.operation_name}: {details.get('Code')}: "
            f"{' '.join(str(details.get('Message')).split())}"
        )
    return " ".join(str(error).split())


@contextmanager
def reported() -> Iterator[None]:
    """Print an expected error as one line on stderr, and exit with status 1.

    Expected are a user's mistake (ValueError), and what AWS or the operating system refuses. Ctrl-C
    exits with status 130.
    """
    try:
        yield
    except (ValueError, OSError, BotoCoreError, Boto3Error, ClientError) as error:
        sys.exit(f"error: {explain(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


def account(region_name: str) -> None:
    """Print the number of the account that the credentials belong to."""
    print(client("sts", region_name).get_caller_identity()["Account"])


def print_region(region_name: str) -> None:
    """Print the configured region."""
    print(region_name)


def create_repository(region_name: str, name: str) -> None:
    """Create ECR repository `name` unless it exists."""
    ecr = client("ecr", region_name)
    try:
        ecr.create_repository(repositoryName=name)
        print(f"created the ECR repository {name} in {region_name}", file=sys.stderr)
    except ecr.exceptions.RepositoryAlreadyExistsException:
        pass


def ecr_password(region_name: str) -> None:
    """Print the password for the account's ECR registry, valid for 12 hours."""
    token = client("ecr", region_name).get_authorization_token()["authorizationData"][0][
        "authorizationToken"
    ]
    print(base64.b64decode(token).decode().removeprefix("AWS:"))


def upload(region_name: str, file: str, uri: str) -> None:
    """Copy `file` to the S3 address `uri`."""
    bucket, key = s3_location("s3://BUCKET/KEY", uri)
    client("s3", region_name).upload_file(str(Path(file)), bucket, key)


def s3_location(name: str, uri: str) -> tuple[str, str]:
    """Split an s3:// address into bucket and key; ValueError names the flag `name`."""
    bucket, key = bucket_and_key(uri)
    if not uri.startswith(SCHEME) or not BUCKET.fullmatch(bucket):
        raise ValueError(
            f"{name}: found {uri!r}, expected s3://BUCKET/PREFIX, BUCKET of 3 to 63 lower-case "
            "letters, digits, dots and dashes"
        )
    return bucket, key


COMMANDS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "account": (account, ()),
    "region": (print_region, ()),
    "create-repository": (create_repository, ("name",)),
    "ecr-password": (ecr_password, ()),
    "upload": (upload, ("file", "uri")),
}


def main() -> None:
    """Run the command that the command line names."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__)
        command.add_argument("--region")
        for argument in arguments:
            command.add_argument(argument)
    args = vars(parser.parse_args())
    name = args.pop("command")
    region_flag = args.pop("region")
    with reported():
        COMMANDS[name][0](region(region_flag), **args)


if __name__ == "__main__":
    main()
