"""Runs one job from a file: `make rehearsal FLAGS="--run=examples/spot.json"`."""

import json
import threading
import time
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from sagemaker_lightning.launcher import aws
from sagemaker_rehearsal.aws import clients
from sagemaker_rehearsal.aws.access_keys import Key
from sagemaker_rehearsal.jobs.masking import Mask
from sagemaker_rehearsal.jobs.record import ENDED, Status


def read(path: Path) -> dict:
    """Return a CreateTrainingJob request from a JSON file; its name gets the time.

    Raises ValueError that says what is wrong with the file.
    """
    try:
        request = json.loads(path.read_text())
    # RecursionError: the JSON is nested too deeply.
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--run: {path} cannot be read: {error}") from error
    if not isinstance(request, dict):
        raise ValueError(
            f"--run: found {type(request).__name__} in {path}, expected CreateTrainingJob's JSON"
        )
    return request | {
        "TrainingJobName": (
            f"{request.get('TrainingJobName', path.stem)}-{time.strftime('%H-%M-%S')}"
        )
    }


def buckets(request) -> set[str]:
    """Return the buckets that a request names.

    In a rehearsal of one job, nobody else has created them.
    """
    return {clients.split(text)[0] for text in clients.texts(request) if text.startswith("s3://")}


def run(endpoint: str, key: Key, request: dict, ended: threading.Event) -> str | None:
    """Run a job to its end; return why it did not complete, None if it did.

    Args:
        endpoint: The rehearsal's address.
        key: The person's key.
        request: The request of CreateTrainingJob.
        ended: Stops waiting for the job.
    """
    s3, sagemaker = (
        clients.client(name, endpoint, clients.REGION, key) for name in ("s3", "sagemaker")
    )
    try:
        for bucket in buckets(request):
            s3.create_bucket(Bucket=bucket)
        sagemaker.create_training_job(**request)
        while not ended.wait(0.5):
            job = sagemaker.describe_training_job(TrainingJobName=request["TrainingJobName"])
            if job["TrainingJobStatus"] in ENDED:
                reason = Mask(request).text(
                    job.get("FailureReason") or f"the job ended as {job['SecondaryStatus']}"
                )
                return None if job["TrainingJobStatus"] == Status.COMPLETED else reason
    except (ClientError, BotoCoreError, RecursionError) as error:
        return f"--run: {aws.explain(error)}"
    return "the job was stopped by Ctrl-C"
