"""Runs of scripts/launch.py."""

import argparse
import json
import subprocess

import aws_services
import pytest
from aws_services import ACCOUNT, REGION, script
from botocore.exceptions import ClientError

from sagemaker_lightning.launcher import command
from sagemaker_lightning.launcher.sites import Site

IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/sagemaker-lightning:1.0"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/SageMaker"
NEEDED_FLAGS = (f"--image={IMAGE}", f"--role={ROLE}", "--output=s3://my-bucket/jobs")
UNCHECKED_FLAG = "--check-hyperparameters=no"


DATA_FLAG = "--channel=training=s3://my-bucket/cifar10/"


@pytest.fixture(name="launch")
def launch_script(tmp_path):
    """Return a function that runs launch.py in an empty folder.

    It runs offline and without credentials, unless an endpoint is given.
    """

    def run(
        *arguments: str, endpoint: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess:
        variables = {"AWS_REGION": REGION} | variables
        return script(
            "launch.py",
            *arguments,
            environment=aws_services.variables(endpoint, **variables),
            folder=tmp_path,
        )

    return run


def parsed(*flags: str) -> argparse.Namespace:
    """Return what the launcher reads from its flags."""
    return command.parser().parse_args([*NEEDED_FLAGS, "--job-name=a", *flags])


def site(client) -> Site:
    """Return the site of a client that stands for all services."""
    return Site("us-east-1", lambda service: client, "launch", "--region=us-east-1")


def refusal(code: str, message: str = "no\n way") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "GetLogEvents")


def request_of(completed: subprocess.CompletedProcess) -> dict:
    """Return the request that a dry run printed."""
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


# Following: a spot job of two instances; each look finds one more state and one more line.
CHANGES = [
    {"Status": "Starting", "StartTime": 1700000000, "StatusMessage": "Preparing the instances"},
    {
        "Status": "Training",
        "StartTime": 1700000100,
        "StatusMessage": "Training image download completed",
    },
]


COMPLETED_STATE = {
    "TrainingJobStatus": "Completed",
    "SecondaryStatus": "Completed",
    "SecondaryStatusTransitions": CHANGES,
    "TrainingTimeInSeconds": 400,
    "BillableTimeInSeconds": 122,
    "ModelArtifacts": {"S3ModelArtifacts": "s3://my-bucket/jobs/job-1/output/model.tar.gz"},
}
FAILED_STATE = COMPLETED_STATE | {
    "TrainingJobStatus": "Failed",
    "SecondaryStatus": "Failed",
    "FailureReason": "AlgorithmError: error: --data.batch_size: found 0",
}
