"""What a job has cost, or costs so far, by the seconds that the service bills.

They are those of one instance, and spot's discount is in them: their price is that on demand
(DescribeTrainingJob in the API reference).
"""

import argparse
from datetime import datetime

from sagemaker_lightning.launcher import costs
from sagemaker_lightning.launcher.follower import ENDED
from sagemaker_lightning.launcher.services import Job, ResourceConfig


def describe(args: argparse.Namespace, job: Job, now: datetime) -> list[str]:
    """Return the lines to print of what a job has cost.

    Args:
        args: The flags of `costs.add_prices`.
        job: DescribeTrainingJob's answer.
        now: The time until which a job is billed that still runs.

    Raises ValueError if the price of one of its types is not known.
    """
    hour = costs.hour_of(args, _had(job.get("ResourceConfig", {})))
    if hour is None:
        raise ValueError(
            "--price: found none; give the price of an instance hour on demand, or a file with "
            "--prices"
        )
    name = f"{job['TrainingJobName']}: {job['TrainingJobStatus']}"
    has_ended = job["TrainingJobStatus"] in ENDED
    billed = _billed(job, has_ended, now)
    if billed is None:
        return [f"{name}, and no second of it is billed"]
    rows = [("billed" if has_ended else "so far", billed)]
    pool = job.get("WarmPoolStatus", {}).get("ResourceRetainedBillableTimeInSeconds")
    if pool:
        rows.append(("warm pool", pool))
    trained = job.get("TrainingTimeInSeconds")
    notes = [*hour.notes]
    if job.get("EnableManagedSpotTraining"):
        if trained and has_ended:
            rows.append(("on demand", trained))
        else:
            notes.append("spot's discount is known at the job's end: until then, it is the most")
    return [name, *costs.table([(name, hour.on_demand, each) for name, each in rows], hour), *notes]


def _had(resources: ResourceConfig) -> ResourceConfig:
    """Return what a job runs on: of InstancePreferences, what the service has chosen."""
    chosen = resources.get("SelectedInstanceType")
    if not chosen:
        return resources
    return {"InstanceType": chosen, "InstanceCount": resources["SelectedInstanceCount"]}


def _billed(job: Job, has_ended: bool, now: datetime) -> float | None:
    """Return the seconds of one instance that are billed; None if there is none."""
    if job.get("BillableTimeInSeconds"):
        return job["BillableTimeInSeconds"]
    start = job.get("TrainingStartTime")
    return None if has_ended or start is None else (now - start).total_seconds()
