"""Commands for existing jobs: list them, print a log, stop, resume and follow one."""

import sys

from botocore.exceptions import ClientError

from sagemaker_lightning.contract.deadlines import SAGEMAKER_KILLS
from sagemaker_lightning.contract.errors import plain
from sagemaker_lightning.launcher import follower, job_request
from sagemaker_lightning.launcher.services import Job, Request, SageMaker
from sagemaker_lightning.launcher.sites import Site


def _sagemaker(site: Site) -> SageMaker:
    client: SageMaker = site.client("sagemaker")
    return client


def show_list(site: Site, count: int) -> None:
    """Print the newest jobs of a site, `count` at most: when they were made, status and name."""
    pages = _sagemaker(site).get_paginator("list_training_jobs")
    found = False
    for page in pages.paginate(
        SortBy="CreationTime", SortOrder="Descending", PaginationConfig={"MaxItems": count}
    ):
        for job in page["TrainingJobSummaries"]:
            found = True
            print(
                f"{job['CreationTime']:%Y-%m-%d %H:%M:%S}  {job['TrainingJobStatus']:10}  "
                f"{job['TrainingJobName']}"
            )
    if not found:
        print(f"there are no training jobs in {site.name}", file=sys.stderr)


def describe(site: Site, name: str) -> Job:
    """Return DescribeTrainingJob's answer; ValueError if there is no such job."""
    try:
        return _sagemaker(site).describe_training_job(TrainingJobName=name)
    except ClientError as error:
        if error.response["Error"].get("Code") != "ValidationException":
            raise
        raise ValueError(
            f"JOB: found {plain(name)}, expected a training job in {site.name}; the command list "
            "prints them"
        ) from None


def show_log(site: Site, name: str) -> None:
    """Print a job's log so far; ValueError if there is no such job."""
    describe(site, name)
    if not follower.Log(site, name).show():
        print(f"{name} has no log that can be shown", file=sys.stderr)


def follow(site: Site, name: str, seconds: float) -> int:
    """Follow a job, as follower.follow does it; ValueError if there is no such job."""
    describe(site, name)
    return follower.follow(site, name, seconds)


def stop(site: Site, name: str) -> None:
    """Stop a job; ValueError if there is none that runs."""
    status = describe(site, name)["TrainingJobStatus"]
    if status in follower.ENDED:
        raise ValueError(f"JOB: found {name}, which is {status}; expected a job that runs")
    _sagemaker(site).stop_training_job(TrainingJobName=name)
    print(
        f"{name} is stopping; SageMaker gives it {SAGEMAKER_KILLS:.0f} seconds to end by itself",
        file=sys.stderr,
    )


def describe_ended(site: Site, name: str) -> Job:
    """Return DescribeTrainingJob's answer for a job that has ended; ValueError if it has not."""
    job = describe(site, name)
    if job["TrainingJobStatus"] not in follower.ENDED:
        raise ValueError(
            f"JOB: found {name}, which is {job['TrainingJobStatus']}; expected a job that has "
            f"ended: {site.command('stop', name)}"
        )
    return job


def again(site: Site, job: Job) -> Request:
    """Return the request of a job that is described, under a new name."""
    pages = _sagemaker(site).get_paginator("list_tags")
    tags = [
        tag
        for page in pages.paginate(ResourceArn=job["TrainingJobArn"])
        for tag in page.get("Tags", [])
    ]
    return job_request.again(job, tags)


def to_resume(site: Site, name: str, max_run: int | None, max_wait: int | None) -> Request:
    """Return the request of a job that continues from another's checkpoints.

    It is that of the other job, under a new name.

    Args:
        site: Where both run.
        name: The name of the job that has ended.
        max_run: Seconds that it may run; None for as many as the other.
        max_wait: Seconds that a spot job may wait and run; None for as many as the other, or as
            `max_run` where these are fewer.

    Raises ValueError if the job cannot continue.
    """
    job = describe_ended(site, name)
    if job["TrainingJobStatus"] == "Completed":
        raise ValueError(f"JOB: found {name}, which is Completed; there is nothing to resume")
    request = again(site, job)
    if "CheckpointConfig" not in request:
        raise ValueError(
            f"JOB: found {name}, which has no checkpoints; start it again, with --checkpoints"
        )
    limits = request["StoppingCondition"] = request["StoppingCondition"].copy()
    is_spot = request.get("EnableManagedSpotTraining", False)
    if max_wait and not is_spot:
        raise ValueError(f"--max-wait: found {max_wait}, but only a spot job waits; leave it out")
    if max_run:
        limits["MaxRuntimeInSeconds"] = max_run
    if is_spot:
        limits["MaxWaitTimeInSeconds"] = max_wait or max(
            limits["MaxWaitTimeInSeconds"], limits["MaxRuntimeInSeconds"]
        )
        if limits["MaxWaitTimeInSeconds"] < limits["MaxRuntimeInSeconds"]:
            raise ValueError(
                f"--max-wait: found {max_wait}, expected --max-run "
                f"({limits['MaxRuntimeInSeconds']}) or more: waiting and running count"
            )
    return request


def start(site: Site, request: Request) -> str:
    """Start the job of a request; return its name."""
    _sagemaker(site).create_training_job(**request)
    name = request["TrainingJobName"]
    print(f"started {name} in {site.name}", flush=True)
    return name
