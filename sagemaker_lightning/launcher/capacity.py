"""Starts a job again while AWS has no instances for it, and on demand if it is spot that has none.

The statuses are those of SecondaryStatusTransition in the API reference of SageMaker.
"""

import sys
import time
from datetime import UTC, datetime

from botocore.exceptions import ClientError

from sagemaker_lightning.contract.errors import plain
from sagemaker_lightning.launcher import follower, job_request, jobs
from sagemaker_lightning.launcher.services import Job, Request
from sagemaker_lightning.launcher.sites import Site

# How FailureReason begins where there were no instances: "CapacityError: Unable to provision
# requested ML compute capacity due to InsufficientInstanceCapacity error."
REASONS = ("CapacityError", "InsufficientCapacityError")
# Seconds from such a failure to the next start.
PAUSE_SECONDS = 120.0
# Statuses of a job that has no instances yet, or no longer. A start of some minutes is among them.
WAITING = {"Interrupted", "LaunchingMLInstances", "Pending", "Restarting", "Starting"}


def check(request: Request, wait: float, on_demand_after: float, is_followed: bool) -> None:
    """Raise ValueError if a job cannot be started again as the flags say.

    Args:
        request: The request of CreateTrainingJob.
        wait: Seconds of --capacity-wait; 0 without it.
        on_demand_after: Seconds of --on-demand-after; 0 without it.
        is_followed: Whether this command stays until the job has ended.
    """
    if (wait or on_demand_after) and not is_followed:
        raise ValueError(
            f"{'--capacity-wait' if wait else '--on-demand-after'}: not allowed with --no-follow, "
            "as nobody would start the job again; leave one of them out"
        )
    if not on_demand_after:
        return
    if not request.get("EnableManagedSpotTraining"):
        raise ValueError("--on-demand-after: needs a job on spot instances; leave it out")
    if "CheckpointConfig" not in request:
        raise ValueError(
            "--on-demand-after: needs --checkpoints=s3://BUCKET/PREFIX, or the job on demand would "
            "start over"
        )
    longest = request["StoppingCondition"]["MaxWaitTimeInSeconds"]
    if on_demand_after >= longest:
        raise ValueError(
            f"--on-demand-after: found {on_demand_after:.0f}, expected less than --max-wait "
            f"({longest}), after which the job ends"
        )


def follow(
    site: Site, request: Request, seconds: float, wait: float, on_demand_after: float
) -> int:
    """Start the job of a request and follow it; start it again for want of instances.

    Each start has a name of its own. What ended because there were no instances has trained
    nothing, and costs nothing. A spot job that has waited for too long is stopped, and a job on
    demand continues from its checkpoints.

    Args:
        site: Where it runs.
        request: The request of CreateTrainingJob, which `check` has accepted.
        seconds: Seconds between two looks.
        wait: Seconds after the first start, and after the first one on demand, in which it is
            started again.
        on_demand_after: Seconds that a spot job waits for instances, all its waits together; 0 for
            as long as its request says.

    Returns the exit status of the last job that was followed, as follower.follow does.
    """
    until = time.monotonic() + wait
    while True:
        spot = SpotWaits(site, on_demand_after)
        status = follower.follow(site, jobs.start(site, request), seconds, spot.look)
        name = request["TrainingJobName"]
        if (
            status == 1
            and spot.over
            and (job := jobs.describe(site, name))["TrainingJobStatus"] == "Stopped"
        ):
            request = on_demand(request, job.get("TrainingTimeInSeconds", 0))
            on_demand_after = 0
            until = time.monotonic() + wait
            print("it continues on demand", file=sys.stderr, flush=True)
        # 1 is a job that failed, or that cannot be followed any longer.
        elif status != 1 or not wait or not _lacked_capacity(site, name):
            return status
        elif time.monotonic() + PAUSE_SECONDS > until:
            print(f"error: found no instances for {wait:.0f} s (--capacity-wait)", file=sys.stderr)
            return status
        else:
            print(
                f"AWS has no instances for it: the job starts again in {PAUSE_SECONDS:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(PAUSE_SECONDS)
        request = {**request, "TrainingJobName": job_request.renamed(name)}


class SpotWaits:
    """Stops a spot job once its waits for instances are too long, all of them together.

    Args:
        site: Where it runs.
        limit: Seconds of waiting; 0 if it is never stopped.
    """

    def __init__(self, site: Site, limit: float) -> None:
        self.site = site
        self.limit = limit
        self.over = False
        """Whether it has been stopped."""

    def look(self, job: Job) -> None:
        """Look at DescribeTrainingJob's answer, and stop the job if it is time."""
        if self.over or not self.limit or job["TrainingJobStatus"] in follower.ENDED:
            return
        if seconds_waited(job, datetime.now(UTC)) > self.limit:
            self.over = True
            print(
                f"it has waited for spot instances for {self.limit:.0f} s (--on-demand-after)",
                file=sys.stderr,
            )
            try:
                stop = self.site.client("sagemaker").stop_training_job
                stop(TrainingJobName=job["TrainingJobName"])
            except ClientError as error:
                if error.response["Error"].get("Code") != "ValidationException":
                    raise  # else it has ended since that answer


def seconds_waited(job: Job, now: datetime) -> float:
    """Return the seconds that a job has had no instances, by DescribeTrainingJob's answer."""
    return sum(
        (change.get("EndTime", now) - change["StartTime"]).total_seconds()
        for change in job.get("SecondaryStatusTransitions", [])
        if change["Status"] in WAITING
    )


def on_demand(request: Request, trained: int) -> Request:
    """Return the request of the job that continues a spot job on demand.

    Args:
        request: That of the spot job.
        trained: Seconds that the spot job has trained; the other may run so much less.
    """
    longest = request["StoppingCondition"]["MaxRuntimeInSeconds"]
    changed: Request = {
        **request,
        "StoppingCondition": {"MaxRuntimeInSeconds": max(1, longest - trained)},
    }
    del changed["EnableManagedSpotTraining"]
    return changed


def _lacked_capacity(site: Site, name: str) -> bool:
    """Return whether a job has failed because there were no instances for it."""
    reason = plain(jobs.describe(site, name).get("FailureReason", ""))
    return reason.startswith(REASONS)
