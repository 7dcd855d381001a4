"""Starts a job again while AWS has no instances for it."""

import sys
import time

from sagemaker_lightning.contract.errors import plain
from sagemaker_lightning.launcher import follower, job_request, jobs
from sagemaker_lightning.launcher.services import Request
from sagemaker_lightning.launcher.sites import Site

# How FailureReason begins where there were no instances: "CapacityError: Unable to provision
# requested ML compute capacity due to InsufficientInstanceCapacity error."
REASONS = ("CapacityError", "InsufficientCapacityError")
# Seconds from such a failure to the next start.
PAUSE_SECONDS = 120.0


def follow(site: Site, request: Request, seconds: float, wait: float) -> int:
    """Start the job of a request and follow it; start it again while there is no capacity.

    Each start has a name of its own. What ended for want of instances has trained nothing, and
    costs nothing.

    Args:
        site: Where it runs.
        request: The request of CreateTrainingJob.
        seconds: Seconds between two looks.
        wait: Seconds after the first start in which it is started again.

    Returns the exit status of the last job that was followed, as follower.follow does.
    """
    until = time.monotonic() + wait
    while True:
        status = follower.follow(site, jobs.start(site, request), seconds)
        # 1 is a job that failed, or that cannot be followed any longer.
        if status != 1 or not wait or not _lacked_capacity(site, request["TrainingJobName"]):
            return status
        if time.monotonic() + PAUSE_SECONDS > until:
            print(f"error: found no instances for {wait:.0f} s (--capacity-wait)", file=sys.stderr)
            return status
        print(
            f"AWS has no instances for it: the job starts again in {PAUSE_SECONDS:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(PAUSE_SECONDS)
        name = job_request.renamed(request["TrainingJobName"])
        request = {**request, "TrainingJobName": name}


def _lacked_capacity(site: Site, name: str) -> bool:
    """Return whether a job has failed because there were no instances for it."""
    reason = plain(jobs.describe(site, name).get("FailureReason", ""))
    return reason.startswith(REASONS)
