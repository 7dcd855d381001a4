"""Follows a training job: status changes and log lines, then duration and cost."""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NoConnectionError

from sagemaker_lightning.contract.errors import plain
from sagemaker_lightning.launcher import aws
from sagemaker_lightning.launcher.services import (
    InstanceGroup,
    Job,
    Logs,
    ResourceConfig,
    SageMaker,
)
from sagemaker_lightning.launcher.sites import Site

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
ENDED = {"Completed", "Failed", "Stopped"}
# How often to look after the end, at most: CloudWatch Logs gets the last lines some seconds late.
MAX_LAST_LOOKS = 3
# Seconds between two looks, at most, while nobody answers.
LONGEST_WAIT_SECONDS = 60.0
# Seconds between two requests for lines, if a job has more streams than FEW. An account has 25 of
# these requests a second in most regions, and others read logs, too.
FEW = 10
PAUSE_SECONDS = 0.1
# What AWS answers to a request that it would take later. A status of 429 or 500 and above says so,
# too.
TEMPORARY = {
    "InternalFailure",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}

Answer = TypeVar("Answer")


def follow(
    site: Site, name: str, seconds: float, look: Callable[[Job], None] = lambda _: None
) -> int:
    """Print what happens to a job until it ends; return the exit status.

    Throttling and a network that is away end nothing: a line says so.

    Args:
        site: Where the job runs.
        name: The job's name.
        seconds: Seconds between two looks.
        look: Called with DescribeTrainingJob's answer, at each look.

    Returns 0 if the job completed, 1 if it failed or cannot be followed, 130 after Ctrl-C.
    """
    sagemaker: SageMaker = site.client("sagemaker")
    log = Log(site, name)
    shown = 0
    again = f"to follow it again: {site.command('logs', name)} --follow"
    ask = partial(patiently, seconds=seconds, patience=site.patience)
    try:
        while True:
            job = ask(partial(sagemaker.describe_training_job, TrainingJobName=name))
            shown = show_status(job, shown)
            look(job)
            ask(log.show)
            if job["TrainingJobStatus"] in ENDED:
                break
            time.sleep(seconds)
        for _ in range(MAX_LAST_LOOKS):
            time.sleep(seconds)
            if not ask(log.show):
                break
        return report(site, job)
    except KeyboardInterrupt:
        print(
            f"\nno longer following; the job continues. To stop it: {site.command('stop', name)}\n"
            f"{again}",
            file=sys.stderr,
        )
        return 130
    except (ClientError, BotoCoreError) as error:
        print(
            f"error: the job cannot be followed any longer, but continues: {aws.explain(error)}; "
            f"{again}",
            file=sys.stderr,
        )
        return 1


def patiently(ask: Callable[[], Answer], seconds: float, patience: float) -> Answer:
    """Return what `ask` returns; while nobody answers, ask again, and say so once.

    Args:
        ask: Asks AWS. It may be called again where it has failed.
        seconds: Seconds until it is asked again; each time twice as many, LONGEST_WAIT_SECONDS at
            most.
        patience: Seconds of waiting after which an error is raised after all.
    """
    waited = 0.0
    while True:
        try:
            answer = ask()
        except (ClientError, BotoCoreError) as error:
            if not is_temporary(error) or waited >= patience:
                raise
            if not waited:
                print(
                    f"no answer ({aws.explain(error)}); the job continues; trying again",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(seconds)
            waited += seconds
            seconds = max(seconds, min(2 * seconds, LONGEST_WAIT_SECONDS))
        else:
            if waited:
                print("answered again", file=sys.stderr, flush=True)
            return answer


def is_temporary(error: Exception) -> bool:
    """Return whether the same request may be answered later."""
    if not isinstance(error, ClientError):
        return isinstance(error, HTTPClientError | NoConnectionError)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return error.response["Error"].get("Code") in TEMPORARY or status == 429 or status >= 500


def show_status(job: Job, shown: int) -> int:
    """Print the status changes from number `shown` on; return how many there are now."""
    changes = job.get("SecondaryStatusTransitions", [])
    for change in changes[shown:]:
        print(
            f"[{change['StartTime']:%H:%M:%S}] {change['Status']}: "
            f"{plain(change.get('StatusMessage', ''))}",
            flush=True,
        )
    return len(changes)


def report(site: Site, job: Job) -> int:
    """Print how a job of a site ended; return the exit status, 0 if it completed."""
    status = job["TrainingJobStatus"]
    name = job["TrainingJobName"]
    seconds = job.get("TrainingTimeInSeconds")
    billable = job.get("BillableTimeInSeconds")
    line = f"{name}: {status}"
    if job.get("SecondaryStatus") not in (None, status):
        line += f" ({job['SecondaryStatus']})"
    if seconds is not None:
        line += f", {seconds} s of training"
    if billable is not None:
        resources = job.get("ResourceConfig", {})
        groups: Sequence[InstanceGroup | ResourceConfig]
        groups = resources.get("InstanceGroups") or [resources]
        instances = resources.get("SelectedInstanceCount") or sum(
            group.get("InstanceCount", 1) for group in groups
        )
        line += (
            f", {billable} s billable on each of {instances} instances"
            if instances > 1
            else f", {billable} s billable"
        )
        if job.get("EnableManagedSpotTraining") and seconds:
            line += f", {100 * (1 - billable / seconds):.1f} % saved by spot"
    print(line, flush=True)
    if status == "Completed":
        print(f"model: {job.get('ModelArtifacts', {}).get('S3ModelArtifacts')}", flush=True)
        return 0
    reason = plain(job.get("FailureReason") or f"the job ended as {status}")
    print(f"error: {reason}", file=sys.stderr)
    if status == "Stopped":
        print(_how_to_continue(site, job), file=sys.stderr)
    return 1


def _how_to_continue(site: Site, job: Job) -> str:
    """Return the line that says how a job that was stopped continues."""
    if "CheckpointConfig" not in job:
        return "it cannot continue: it had no --checkpoints; start it again with one"
    more = " --max-wait=SECONDS" if job.get("SecondaryStatus") == "MaxWaitTimeExceeded" else ""
    return f"to continue where it was: {site.command('resume', job['TrainingJobName'])}{more}"


class Log:
    """The log of a job: a stream of lines for each instance. Each line is shown once."""

    def __init__(self, site: Site, name: str) -> None:
        self.name = name
        self.logs: Logs = site.client("logs")
        self.tokens: dict[str, str] = {}
        self.readable = True

    def show(self) -> bool:
        """Print the new lines; return whether there were any."""
        if not self.readable:
            return False
        try:
            streams = self._streams()
            pause = PAUSE_SECONDS if len(streams) > FEW else 0.0
            return any([self._show_stream(stream, pause) for stream in streams])
        except self.logs.exceptions.ResourceNotFoundException:
            # No job in this account and region has logged yet.
            return False
        except ClientError as error:
            if error.response["Error"]["Code"] != "AccessDeniedException":
                raise
            self.readable = False
            print(f"the log cannot be shown: {aws.explain(error)}", file=sys.stderr)
            return False

    def _streams(self) -> list[str]:
        """Return the names of the streams so far: JOB/algo-1-1234567890, JOB/algo-2-..."""
        pages = self.logs.get_paginator("describe_log_streams").paginate(
            logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self.name}/"
        )
        return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]

    def _show_stream(self, stream: str, pause: float) -> bool:
        """Print the new lines of a stream, with its host; return whether there were any."""
        host = stream.removeprefix(f"{self.name}/").rsplit("-", 1)[0]
        printed_any = False
        while True:
            token = {"nextToken": self.tokens[stream]} if stream in self.tokens else {}
            page = self.logs.get_log_events(
                logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **token
            )
            if pause:
                time.sleep(pause)
            for event in page["events"]:
                print(f"{host}: {plain(event['message'])}", flush=True)
            printed_any = printed_any or bool(page["events"])
            # The same token again means the end of the stream, for now.
            if page["nextForwardToken"] == self.tokens.get(stream):
                return printed_any
            self.tokens[stream] = page["nextForwardToken"]
