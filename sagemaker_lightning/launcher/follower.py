"""Follows a training job: status changes and log lines, then duration and cost."""

import sys
import time
from pathlib import Path

from sagemaker_lightning.launcher import aws

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
ENDED = {"Completed", "Failed", "Stopped"}
# How often to look after the end, at most: CloudWatch Logs gets the last lines some seconds late.
MAX_LAST_LOOKS = 3


def follow(name: str, region: str, seconds: float) -> int:
    """Print what happens to a job until it ends; return the exit status.

    Args:
        name: The job's name.
        region: Its region.
        seconds: Seconds between two looks.

    Returns 0 if the job completed, 1 if it failed or cannot be followed, 130 after Ctrl-C.
    """
    sagemaker = aws.client("sagemaker", region)
    log = Log(name, region)
    shown = 0
    try:
        while True:
            job = sagemaker.describe_training_job(TrainingJobName=name)
            shown = show_status(job, shown)
            log.show()
            if job["TrainingJobStatus"] in ENDED:
                break
            time.sleep(seconds)
        for _ in range(MAX_LAST_LOOKS):
            time.sleep(seconds)
            if not log.show():
                break
        return report(job)
    except KeyboardInterrupt:
        print(
            f"\nno longer following; the job goes on. To stop it: {stop_command(name, region)}",
            file=sys.stderr,
        )
        return 130
    except (aws.ClientError, aws.BotoCoreError) as error:
        print(
            f"error: the job cannot be followed any longer, but goes on: {aws.explain(error)}",
            file=sys.stderr,
        )
        return 1


def stop_command(name: str, region: str) -> str:
    """Return the command that stops the job."""
    return f"{sys.executable} {Path(__file__).with_name('aws.py')} stop {name} --region={region}"


def show_status(job: dict, shown: int) -> int:
    """Print the status changes from number `shown` on; return how many there are now."""
    changes = job.get("SecondaryStatusTransitions", [])
    for change in changes[shown:]:
        print(
            f"[{change['StartTime']:%H:%M:%S}] {change['Status']}: "
            f"{change.get('StatusMessage', '')}",
            flush=True,
        )
    return len(changes)


def report(job: dict) -> int:
    """Print how the job ended; return the exit status, 0 if it completed."""
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
        groups = resources.get("InstanceGroups") or [resources]
        instances = sum(group.get("InstanceCount", 1) for group in groups)
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
    print(f"error: {job.get('FailureReason') or f'the job ended as {status}'}", file=sys.stderr)
    if status == "Stopped":
        print(_how_to_go_on(job), file=sys.stderr)
    return 1


def _how_to_go_on(job: dict) -> str:
    """Return the line that says how a job that was stopped goes on."""
    checkpoints = job.get("CheckpointConfig", {}).get("S3Uri")
    if not checkpoints:
        return "it cannot go on: it had no --checkpoints; start it again with one"
    more = {
        "MaxRuntimeExceeded": " and a larger --max-run",
        "MaxWaitTimeExceeded": " and a larger --max-wait",
    }.get(job.get("SecondaryStatus"), "")
    return f"to go on where it was, start it again with --checkpoints={checkpoints}{more}"


class Log:
    """The log of a job: a stream of lines for each instance. Each line is shown once."""

    def __init__(self, name: str, region: str) -> None:
        self.name = name
        self.logs = aws.client("logs", region)
        self.tokens: dict[str, str] = {}
        self.readable = True

    def show(self) -> bool:
        """Print the new lines; return whether there were any."""
        if not self.readable:
            return False
        try:
            return any([self._show_stream(stream) for stream in self._streams()])
        except self.logs.exceptions.ResourceNotFoundException:
            # No job in this account and region has logged yet.
            return False
        except aws.ClientError as error:
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

    def _show_stream(self, stream: str) -> bool:
        """Print the new lines of a stream, with its host; return whether there were any."""
        host = stream.removeprefix(f"{self.name}/").rsplit("-", 1)[0]
        printed_any = False
        while True:
            token = {"nextToken": self.tokens[stream]} if stream in self.tokens else {}
            page = self.logs.get_log_events(
                logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **token
            )
            for event in page["events"]:
                print(f"{host}: {event['message']}", flush=True)
            printed_any = printed_any or bool(page["events"])
            # The same token again means the end of the stream, for now.
            if page["nextForwardToken"] == self.tokens.get(stream):
                return printed_any
            self.tokens[stream] = page["nextForwardToken"]
