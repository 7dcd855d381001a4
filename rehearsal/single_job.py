"""One job from a file, from its creation to its end: `make rehearsal FLAGS="--run=examples/spot.json"`."""

import json
import threading
import time
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from rehearsal.api import clients
from rehearsal.api.access_keys import Key
from rehearsal.jobs.masking import Mask
from rehearsal.jobs.record import ENDED


def read(path: Path) -> dict:
    """Return a CreateTrainingJob request; ValueError says what is wrong with the file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--run: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"--run: found {type(found).__name__} in {path}, allowed is CreateTrainingJob's JSON"
        )
    return found | {
        "TrainingJobName": f"{found.get('TrainingJobName', path.stem)}-{time.strftime('%H-%M-%S')}"
    }


def buckets(request) -> set[str]:
    """Return the buckets that a request names; in a rehearsal for one job, nobody else has made them."""
    if isinstance(request, dict | list):
        return set().union(
            *map(buckets, request.values() if isinstance(request, dict) else request)
        )
    return (
        {clients.split(request)[0]}
        if isinstance(request, str) and request.startswith("s3://")
        else set()
    )


def run(endpoint: str, key: Key, request: dict, ended: threading.Event) -> str | None:
    """Run the job, and return what is wrong at its end, if something is; `ended` stops it."""
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
                said = Mask(request).text(
                    job.get("FailureReason") or f"the job ended as {job['SecondaryStatus']}"
                )
                return None if job["TrainingJobStatus"] == "Completed" else said
    except (ClientError, BotoCoreError) as error:
        return f"--run: {error}"
    return "the job was stopped by Ctrl-C"
