"""Commands for the jobs of a rehearsal that runs: list, logs, stop, report, rerun, resume.

They ask its endpoint, as any client does. Those that AWS has, too, are the launcher's.
"""

import json
import sys
from functools import partial
from pathlib import Path

from sagemaker_lightning.contract.errors import plain
from sagemaker_lightning.launcher import follower, jobs
from sagemaker_lightning.launcher.sites import Site
from sagemaker_rehearsal import owner
from sagemaker_rehearsal.api import clients
from sagemaker_rehearsal.jobs.record import Interruption
from sagemaker_rehearsal.report.summary import describe_interruption

POLL_SECONDS = 1.0
# A rehearsal that does not answer for so long has ended.
PATIENCE_SECONDS = 10.0


def site_of(endpoint: str, region: str) -> Site:
    """Return the rehearsal at an endpoint; ValueError if no rehearsal of this person's is there."""
    key = owner.key_of(clients.own(endpoint))
    return Site(
        name=f"{region} of the rehearsal at {endpoint}",
        client=partial(clients.client, endpoint=endpoint, region=region, key=key),
        program=f"{sys.executable} -m sagemaker_rehearsal",
        flag=f"--endpoint={endpoint} --region={region}",
        patience=PATIENCE_SECONDS,
    )


def show_report(site: Site, name: str, folder: Path) -> None:
    """Print what a job's report says first, and its path.

    Args:
        site: The rehearsal.
        name: The job's name.
        folder: The folder of all reports.

    Raises ValueError if the job has not ended, or has no report.
    """
    job = jobs.describe(site, name)
    if job["TrainingJobStatus"] not in follower.ENDED:
        raise ValueError(
            f"JOB: found {name}, which is {job['SecondaryStatus']}; its report is written at its "
            "end"
        )
    try:
        record = json.loads((folder / name / "job.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"JOB: the record of {name} cannot be read: {error}") from None
    follower.report(site, job)
    lines = [
        describe_interruption(record["created"], Interruption(**interruption))
        for interruption in record["interruptions"]
    ]
    lines += record["never_due"] + [f"note: {note}" for note in record["notes"]]
    for line in lines:
        print(plain(line))
    print(f"report: {folder / name / 'report.html'}", flush=True)


def rerun(site: Site, name: str) -> None:
    """Start a job once more, from its beginning, under a new name.

    Its checkpoints are beside those of the other, in a folder with its own name.
    """
    request = jobs.again(site, jobs.describe(site, name))
    if config := request.get("CheckpointConfig"):
        bucket, key = clients.split(config["S3Uri"])
        above = key.rstrip("/").rpartition("/")[0]
        config["S3Uri"] = "/".join(
            ["s3:/", bucket, *([above] if above else []), request["TrainingJobName"], ""]
        )
    _say_how_to_follow(site, jobs.start(site, request))


def resume(site: Site, name: str, max_run: int | None, max_wait: int | None) -> None:
    """Start a job that continues from another's checkpoints, as jobs.to_resume says."""
    _say_how_to_follow(site, jobs.start(site, jobs.to_resume(site, name, max_run, max_wait)))


def _say_how_to_follow(site: Site, name: str) -> None:
    print(f"to follow it: {site.command('logs', name)} --follow", file=sys.stderr)
