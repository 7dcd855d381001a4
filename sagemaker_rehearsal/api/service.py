"""SageMaker's operations on training jobs, as in its API reference."""

import copy
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sagemaker_rehearsal.api import listing, tuning
from sagemaker_rehearsal.api.listing import without_none
from sagemaker_rehearsal.aws import clients, rules
from sagemaker_rehearsal.aws.errors import Refused, invalid
from sagemaker_rehearsal.aws.validation import input_shape, pruned, validate
from sagemaker_rehearsal.faults.rules import parse as parse_fault
from sagemaker_rehearsal.faults.schedule import DueInterruption, named, ordered
from sagemaker_rehearsal.jobs import channels, layout, warm_pools
from sagemaker_rehearsal.jobs.job import Job, JobContext
from sagemaker_rehearsal.jobs.metrics import Metrics
from sagemaker_rehearsal.jobs.record import ENDED, Record, Secondary, Status
from sagemaker_rehearsal.report.comparison import compare
from sagemaker_rehearsal.settings import Settings, describe_prices

# The longest time in seconds that jobs get to end by themselves after they were killed.
KILL_SECONDS = 30.0
# The account number that moto uses.
ACCOUNT = "123456789012"
# The name of a job that is run once more without interruptions gets this end.
LEFT_ALONE = "-left-alone"
MAX_NAME_CHARACTERS = 63


class Service:
    """All jobs of this rehearsal.

    Args:
        settings: The rehearsal's settings.
        place: Returns a job's surroundings, given its region and ARN.
    """

    def __init__(self, settings: Settings, place: Callable[[str, str], JobContext]) -> None:
        self.settings = settings
        self.place = place
        # By ARN.
        self.jobs: dict[str, Job] = {}
        self.tags: dict[str, dict[str, str]] = {}
        self.tunings: dict[str, tuning.Tuning] = {}
        self.lock = threading.Lock()
        self.is_closing = False
        # The comparisons that wait for a run, by the ARN of the job that is compared.
        self.comparing: dict[str, threading.Thread] = {}

    def answer(self, operation: str, request: dict, region: str) -> dict:
        """Answer one of SageMaker's operations; Refused is the service's error."""
        shape = input_shape(operation)
        if shape is None:
            raise Refused(
                "UnknownOperationException", f"The rehearsal knows no operation {operation}"
            )
        if not hasattr(self, operation):
            raise invalid(f"The rehearsal does not emulate {operation}; it runs training jobs only")
        request = pruned(request, shape)
        validate(checked(request, operation), operation)
        return getattr(self, operation)(request, region)

    def CreateTrainingJob(self, request: dict, region: str) -> dict:  # noqa: N802 (the API's names)
        """Start a job."""
        arn = self._create(request, region, self.settings)
        if self.settings.compare:
            self._start_comparison(arn, region)
        return {"TrainingJobArn": arn}

    def _create(self, request: dict, region: str, settings: Settings) -> str:
        """Start a job with settings of its own; return its ARN."""
        notes = rules.check(request)
        request = rules.with_chosen(request, settings.no_capacity)
        if problem := channels.outside(request, self.settings.allow):
            raise invalid(problem)
        notes += describe_prices(settings, {host.instance_type for host in layout.hosts(request)})
        name = request["TrainingJobName"]
        arn = arn_of(name, region)
        place = self.place(region, arn, name)
        if place.engine.name == "processes":
            notes += place.engine.refuse(len(layout.hosts(request)), request)
        record = Record(name, copy.deepcopy(request), time.time())
        metrics = Metrics(request["AlgorithmSpecification"].get("MetricDefinitions") or [])
        with self.lock:
            if self.is_closing:
                raise Refused("ResourceLimitExceeded", "The rehearsal is ending")
            if any(
                job.record.name == name
                for job in self.jobs.values()
                if job.record.status not in ENDED
            ) or (arn in self.jobs):
                raise Refused(
                    "ResourceInUse",
                    "Training job names must be unique within an AWS account and region, and a "
                    f"training job with this name already exists ({arn})",
                )
            # The folder of its reports may be another rehearsal's.
            job = Job(record, place, settings, metrics)
            notes += warm_pools.take_over(record, self._records_of(region).values())
            self.jobs[arn] = job
            for note in notes:
                job.note(note)
            self.tags[arn] = {tag["Key"]: tag["Value"] for tag in request.get("Tags") or []}
            # `close` waits for the jobs that run.
            job.start()
        return arn

    def DescribeTrainingJob(self, request: dict, region: str) -> dict:  # noqa: N802
        """Return the description of a job."""
        job = self._find_job(request, region)
        record = job.record
        moment = time.time()
        description = {
            key: value
            for key, value in record.request.items()
            if key != "Tags" and value is not None
        }
        description.setdefault("StoppingCondition", {"MaxRuntimeInSeconds": job.longest})
        known = {
            "TrainingJobArn": arn_of(record.name, region),
            "TrainingJobStatus": record.status,
            "SecondaryStatus": record.secondary,
            "CreationTime": record.created,
            "LastModifiedTime": record.modified,
            "TrainingStartTime": record.training_start,
            "TrainingEndTime": record.training_end,
            "FailureReason": record.failure,
            "SecondaryStatusTransitions": [
                {
                    "Status": transition.status,
                    "StatusMessage": transition.message,
                    "StartTime": transition.start,
                    "EndTime": transition.end,
                }
                for transition in record.transitions
            ],
            "FinalMetricDataList": list(job.metrics.found.values()) or None,
            "ModelArtifacts": {"S3ModelArtifacts": record.artifacts} if record.artifacts else None,
            "WarmPoolStatus": warm_pools.describe(record, moment),
        }
        for flag in (
            "EnableNetworkIsolation",
            "EnableInterContainerTrafficEncryption",
            "EnableManagedSpotTraining",
        ):
            known[flag] = bool(record.request.get(flag))
        if record.training_start:
            known["TrainingTimeInSeconds"] = round(
                (record.training_end or moment) - record.training_start
            )
        if record.status in ENDED:
            known["BillableTimeInSeconds"] = (
                max(1, round(record.billable(moment))) if record.attempts else 0
            )
        return description | without_none(known)

    def StopTrainingJob(self, request: dict, region: str) -> dict:  # noqa: N802
        """Ask a job to stop."""
        job = self._find_job(request, region)
        if job.record.status in ENDED:
            raise invalid(
                "The request was rejected because the training job is in status "
                f"{job.record.status}. You can only stop a training job in status InProgress."
            )
        job.control.ask_to_stop()
        return {}

    def UpdateTrainingJob(self, request: dict, region: str) -> dict:  # noqa: N802
        """Change how long a job's instances are kept; nothing else can be changed here."""
        if others := request.keys() - {"TrainingJobName", "ResourceConfig"}:
            raise invalid(
                f"The rehearsal does not emulate {', '.join(sorted(others))} of UpdateTrainingJob"
            )
        record = self._find_job(request, region).record
        seconds = request["ResourceConfig"][warm_pools.KEEP_ALIVE]
        if not warm_pools.keep_for(record, seconds):
            raise invalid(
                "The request was rejected because the training job is in status "
                f"{record.status} and has no warm pool that is Available"
            )
        return {"TrainingJobArn": arn_of(record.name, region)}

    def ListTrainingJobs(self, request: dict, region: str) -> dict:  # noqa: N802
        """Return the jobs that pass the request's filters, one page at a time."""
        return listing.page(self._records_of(region), request)

    def _records_of(self, region: str) -> dict[str, Record]:
        """Return the records of a region's jobs, by the jobs' ARNs."""
        records = [(arn, job.record) for arn, job in list(self.jobs.items())]
        return {arn: record for arn, record in records if arn == arn_of(record.name, region)}

    def CreateHyperParameterTuningJob(self, request: dict, region: str) -> dict:  # noqa: N802
        """Start a tuning job."""
        tuning.check(request)
        name = request["HyperParameterTuningJobName"]
        arn = tuning_arn_of(name, region)

        def create(training_request: dict) -> Job:
            training_request = pruned(training_request, input_shape("CreateTrainingJob"))
            validate(s3_for_files(training_request), "CreateTrainingJob")
            answer = self.CreateTrainingJob(training_request, region)
            return self.jobs[answer["TrainingJobArn"]]

        with self.lock:
            if arn in self.tunings:
                raise Refused("ResourceInUse", f"A tuning job of this name exists ({arn})")
            made = self.tunings[arn] = tuning.Tuning(copy.deepcopy(request), create)
        try:
            made.begin()
        except (Refused, OSError):
            del self.tunings[arn]
            raise
        self.tags[arn] = {tag["Key"]: tag["Value"] for tag in request.get("Tags") or []}
        return {"HyperParameterTuningJobArn": arn}

    def DescribeHyperParameterTuningJob(self, request: dict, region: str) -> dict:  # noqa: N802
        """Return the description of a tuning job."""
        arn = tuning_arn_of(request["HyperParameterTuningJobName"], region)
        return self._find_tuning(arn).describe() | {"HyperParameterTuningJobArn": arn}

    def StopHyperParameterTuningJob(self, request: dict, region: str) -> dict:  # noqa: N802
        """Ask a tuning job to stop."""
        arn = tuning_arn_of(request["HyperParameterTuningJobName"], region)
        self._find_tuning(arn).ask_to_stop()
        return {}

    def ListTrainingJobsForHyperParameterTuningJob(  # noqa: N802
        self, request: dict, region: str
    ) -> dict:
        """Return the training jobs of a tuning job, all on one page."""
        arn = tuning_arn_of(request["HyperParameterTuningJobName"], region)
        made = self._find_tuning(arn)
        return {"TrainingJobSummaries": [made.summary(job) for job in list(made.jobs)]}

    def AddTags(self, request: dict, region: str) -> dict:  # noqa: N802
        """Add tags to a job."""
        tags = self._tags_of(request)
        tags |= {tag["Key"]: tag["Value"] for tag in request["Tags"]}
        return {"Tags": listed(tags)}

    def DeleteTags(self, request: dict, region: str) -> dict:  # noqa: N802
        """Remove tags from a job."""
        tags = self._tags_of(request)
        for key in request["TagKeys"]:
            tags.pop(key, None)
        return {}

    def ListTags(self, request: dict, region: str) -> dict:  # noqa: N802
        """Return a job's tags."""
        return {"Tags": listed(self._tags_of(request))}

    def interrupt(self, order: object) -> str:
        """Take spot instances away on a person's order; return a line about it.

        Raises ValueError if that is not possible, with the reason.
        """
        name, hosts, warned, gap = ordered(order)
        job = self.jobs[self._arn_of_newest(name)]
        host_names = [host.name for host in job.hosts]
        if unknown := set(hosts) - set(host_names):
            raise ValueError(
                f"--host: found {', '.join(sorted(unknown))}, expected {', '.join(host_names)}"
            )
        if not job.record.spot:
            raise ValueError(f"{name} is not a spot job; create it with EnableManagedSpotTraining")
        if job.record.secondary != Secondary.TRAINING:
            raise ValueError(
                f"{name} is {job.record.secondary}; an interruption is for a job in Training"
            )
        job.control.messages.put(DueInterruption(hosts or host_names, warned, gap, "by hand"))
        return (
            f"{', '.join(hosts or host_names)} of {name} taken away, "
            f"{'warned' if warned else 'not warned'}"
        )

    def inject(self, order: object) -> str:
        """Let a fault happen on a person's order; return a line about it.

        Raises ValueError if that is not possible, with the reason. The effect of the fault is in
        the job's record.
        """
        names = ["fault", "name"]
        if not (
            isinstance(order, dict)
            and sorted(order) == names
            and all(isinstance(value, str) for value in order.values())
        ):
            raise ValueError(
                f"fault: found {ascii(order)[:100]}, expected an object of {', '.join(names)}"
            )
        fault = parse_fault(order["fault"], by_hand=True)
        job = self.jobs[self._arn_of_newest(order["name"])]
        host_names = [host.name for host in job.hosts]
        if unknown := set(named(fault.hosts)) - set(host_names):
            raise ValueError(
                f"FAULT: found {', '.join(sorted(unknown))}, expected {', '.join(host_names)}"
            )
        if job.record.secondary != Secondary.TRAINING:
            raise ValueError(
                f"{job.record.name} is {job.record.secondary}; a fault is for a job in Training"
            )
        job.control.messages.put(fault)
        return f"{fault.text} in {job.record.name}"

    def compare(self, order: object) -> str:
        """Run a job's request once more, without interruptions, on a person's order.

        Returns the name of that run. Once it has ended, the job's record and report have the
        comparison. Raises ValueError if that is not possible, with the reason.
        """
        if not (
            isinstance(order, dict) and [*order] == ["name"] and isinstance(order["name"], str)
        ):
            raise ValueError(f"compare: found {ascii(order)[:100]}, expected an object of name")
        arn = self._arn_of_newest(order["name"])
        record = self.jobs[arn].record
        if record.status != Status.COMPLETED:
            raise ValueError(
                f"JOB: found {record.name}, which is {record.status}; expected one that has "
                "completed, as the others have no model to compare"
            )
        if arn in self.comparing:
            raise ValueError(f"JOB: found {record.name}, which is compared already")
        try:
            left_alone = self._leave_alone(record, arn.split(":")[3])
        except Refused as refused:
            raise ValueError(str(refused)) from None
        self._start_comparison(arn, arn.split(":")[3], left_alone)
        return self.jobs[left_alone].record.name

    def is_over(self, arn: str) -> bool:
        """Return whether a job has ended, and nothing is compared with it any more."""
        return self.jobs[arn].record.status in ENDED and arn not in self.comparing

    def wait_for_comparisons(self, ended: threading.Event) -> None:
        """Wait until all comparisons are made, or `ended` is set."""
        while self.comparing and not ended.wait(0.2):
            pass

    def _leave_alone(self, record: Record, region: str) -> str:
        """Start a run of a job's request that no rule takes anything from; return its ARN."""
        request = rules.without_chosen(copy.deepcopy(record.request))
        stem = request["TrainingJobName"][: MAX_NAME_CHARACTERS - len(LEFT_ALONE)].rstrip("-")
        request["TrainingJobName"] = name = f"{stem}{LEFT_ALONE}"
        if config := request.get("CheckpointConfig"):
            config["S3Uri"] = clients.beside(config["S3Uri"], name)
        alone = replace(self.settings, interrupt=[], faults=[], compare=False)
        return self._create(request, region, alone)

    def _start_comparison(self, arn: str, region: str, left_alone: str | None = None) -> None:
        """Compare a job, once it has ended, with `left_alone`, or with a run that begins then."""
        thread = threading.Thread(
            target=self._compare, args=(arn, region, left_alone), name=f"comparison of {arn}"
        )
        self.comparing[arn] = thread
        thread.daemon = True
        thread.start()

    def _compare(self, arn: str, region: str, left_alone: str | None) -> None:
        job = self.jobs[arn]
        try:
            _wait_for_end(job)
            if left_alone is None:
                if job.record.status != Status.COMPLETED or not job.record.disturbed:
                    return
                left_alone = self._leave_alone(job.record, region)
            other = self.jobs[left_alone]
            _wait_for_end(other)
            job.record.set_comparison(compare(job.record, other.record))
            job.last("its report could not be written", job.place.report, job.record, job.folder)
        # The job itself has ended well.
        except Refused as refused:
            job.note(f"the job could not be compared: {refused}")
        finally:
            del self.comparing[arn]

    def _arn_of_newest(self, name: str) -> str:
        """Return the ARN of the newest job of a name; ValueError if there is none.

        A name may be used again, in another region, once its job has ended.
        """
        jobs = list(self.jobs.items())
        for arn, job in reversed(jobs):
            if job.record.name == name:
                return arn
        job_names = ", ".join(job.record.name for _, job in jobs)
        raise ValueError(
            f"JOB: found {name!r}, expected one of: {job_names or 'none, as there are no jobs'}"
        )

    def shown(self) -> list[tuple[Record, dict[str, list[str]]]]:
        """Return each job's record and its last log lines by host, for the live view."""
        return [(job.record, job.logs.shown()) for job in list(self.jobs.values())]

    def close(self, immediately: threading.Event) -> None:
        """Stop all jobs and wait for their ends; once `immediately` is set, with SIGKILL.

        No job starts any more. A job may be copying data or pulling an image, which nothing ends:
        KILL_SECONDS after `immediately`, what still runs is left, with a line.
        """
        with self.lock:
            self.is_closing = True
        until = math.inf
        while running := [job for job in self.jobs.values() if job.is_alive()]:
            if immediately.is_set():
                until = min(until, time.monotonic() + KILL_SECONDS)
            if time.monotonic() >= until:
                names = ", ".join(job.record.name for job in running)
                print(f"left without a report, as it does not end: {names}", flush=True)
                return
            for job in running:
                if not job.control.stop or immediately.is_set():
                    job.control.ask_to_stop(immediately.is_set())
            running[0].join(timeout=0.5)
        # They write reports.
        for thread in list(self.comparing.values()):
            thread.join(KILL_SECONDS)

    def _find_tuning(self, arn: str) -> tuning.Tuning:
        try:
            return self.tunings[arn]
        except KeyError:
            raise invalid("Requested resource not found.") from None

    def _find_job(self, request: dict, region: str) -> Job:
        try:
            return self.jobs[arn_of(request["TrainingJobName"], region)]
        except KeyError:
            raise invalid("Requested resource not found.") from None

    def _tags_of(self, request: dict) -> dict[str, str]:
        arn = request["ResourceArn"]
        if ":training-job/" not in arn and ":hyper-parameter-tuning-job/" not in arn:
            raise invalid("The rehearsal does not emulate tags of anything but jobs")
        if arn not in self.tags:
            raise Refused("ResourceNotFound", f"Resource {arn} does not exist")
        return self.tags[arn]


def _wait_for_end(job: Job) -> None:
    """Wait until a job has ended; one whose thread could not start has."""
    while job.record.status not in ENDED:
        time.sleep(0.1)


def checked(request: dict, operation: str) -> dict:
    """Return what is validated of a request: with s3:// addresses in place of file:// ones."""
    if operation == "CreateHyperParameterTuningJob" and isinstance(request, dict):
        definition = s3_for_files(request.get("TrainingJobDefinition"))
        return request if definition is None else request | {"TrainingJobDefinition": definition}
    return s3_for_files(request) if operation == "CreateTrainingJob" else request


def s3_for_files(request: dict) -> dict:
    """Return the request with s3:// addresses in place of file:// ones.

    Only the rehearsal accepts file://; the service's model does not.
    """
    input_channels = request.get("InputDataConfig") if isinstance(request, dict) else None
    if not isinstance(input_channels, list):
        return request
    return request | {"InputDataConfig": [_with_s3_address(channel) for channel in input_channels]}


def _with_s3_address(channel: Any) -> Any:
    try:
        source = channel["DataSource"]["S3DataSource"]
        address = re.sub(r"^file:///", "s3://file/", source["S3Uri"])
        s3_source = {"S3DataSource": source | {"S3Uri": address}}
        return channel | {"DataSource": channel["DataSource"] | s3_source}
    # The validation will say what is wrong with this channel.
    except (TypeError, KeyError):
        return channel


def arn_of(name: str, region: str) -> str:
    """Return the ARN of a job."""
    return f"arn:aws:sagemaker:{region}:{ACCOUNT}:training-job/{name}"


def tuning_arn_of(name: str, region: str) -> str:
    """Return the ARN of a tuning job."""
    return f"arn:aws:sagemaker:{region}:{ACCOUNT}:hyper-parameter-tuning-job/{name}"


def listed(tags: dict[str, str]) -> list[dict]:
    """Return tags in the form of the API."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]
