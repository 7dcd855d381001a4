"""A spot job of two hosts by boto3 alone: it is created, followed to its end, and its model read.

    python examples/spot_two_hosts.py --image=IMAGE --role=ARN --bucket=BUCKET

Where AWS takes the instances away, SageMaker starts the job again with the checkpoints of its S3
folder, and it continues where it was. The rehearsal does the same on this machine: it prints the
address and the keys to set, as `AWS_ENDPOINT_URL=... AWS_ACCESS_KEY_ID=...`.
"""

import argparse
import io
import json
import tarfile
import time
from datetime import UTC, datetime
from urllib.parse import urlsplit

import boto3


def request(arguments: argparse.Namespace) -> dict:
    """Return the request for the job (CreateTrainingJob)."""
    name = f"digits-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder = f"s3://{arguments.bucket}/{name}"
    return {
        "TrainingJobName": name,
        "AlgorithmSpecification": {"TrainingImage": arguments.image, "TrainingInputMode": "File"},
        "RoleArn": arguments.role,
        "HyperParameters": {
            "trainer.max_epochs": str(arguments.epochs),
            "resume.every_n_minutes": "2",
        },
        "ResourceConfig": {
            "InstanceType": "ml.g4dn.xlarge",
            "InstanceCount": 2,
            "VolumeSizeInGB": 30,
        },
        "OutputDataConfig": {"S3OutputPath": f"{folder}/output/"},
        # Without it, a job that is interrupted begins again from nothing.
        "CheckpointConfig": {"S3Uri": f"{folder}/checkpoints/"},
        "EnableManagedSpotTraining": True,
        # The second number has the waiting for instances, too.
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
    }


def follow(sagemaker, name: str, seconds: float) -> dict:
    """Print each new status of a job until it has ended; return its description."""
    said = ""
    while True:
        job = sagemaker.describe_training_job(TrainingJobName=name)
        if job["SecondaryStatus"] != said:
            said = job["SecondaryStatus"]
            print(f"{name}: {said}", flush=True)
        if job["TrainingJobStatus"] in ("Completed", "Failed", "Stopped"):
            return job
        time.sleep(seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--image", "--role", "--bucket"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30, help="between two looks at the job")
    given = parser.parse_args()
    client = boto3.client("sagemaker")
    asked = request(given)
    client.create_training_job(**asked)
    ended = follow(client, asked["TrainingJobName"], given.seconds)
    if ended["TrainingJobStatus"] != "Completed":
        raise SystemExit(f"error: {ended.get('FailureReason', ended['SecondaryStatus'])}")
    where = urlsplit(ended["ModelArtifacts"]["S3ModelArtifacts"])
    packed = boto3.client("s3").get_object(Bucket=where.netloc, Key=where.path.lstrip("/"))["Body"]
    with tarfile.open(fileobj=io.BytesIO(packed.read())) as files:
        print(json.load(files.extractfile("model.json"))["metrics"])
