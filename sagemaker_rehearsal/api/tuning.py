"""Hyperparameter tuning jobs: each makes training jobs of its definition, and compares a metric.

Values are drawn at random (a grid's in order), whatever the strategy.
"""

import itertools
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from sagemaker_rehearsal.api.listing import without_none
from sagemaker_rehearsal.aws.errors import Refused, invalid
from sagemaker_rehearsal.jobs.job import Job
from sagemaker_rehearsal.jobs.record import ENDED, Status

# Fields of the definition that mean the same in CreateTrainingJob.
SAME_FIELDS = (
    "RoleArn",
    "InputDataConfig",
    "VpcConfig",
    "OutputDataConfig",
    "ResourceConfig",
    "StoppingCondition",
    "EnableNetworkIsolation",
    "EnableInterContainerTrafficEncryption",
    "EnableManagedSpotTraining",
    "RetryStrategy",
    "Environment",
)
REFUSED = ("WarmStartConfig", "TrainingJobDefinitions", "Autotune")
REFUSED_IN_DEFINITION = ("HyperParameterRanges",)
POLL_SECONDS = 0.2
COUNTED = {
    Status.COMPLETED: "Completed",
    Status.FAILED: "NonRetryableError",
    Status.STOPPED: "Stopped",
}


class Tuning(threading.Thread):
    """A tuning job, which runs until its training jobs have ended.

    Args:
        request: The request of CreateHyperParameterTuningJob.
        create: Starts a training job, and returns it; Refused if the request is wrong.
    """

    def __init__(self, request: dict, create: Callable[[dict], Job]) -> None:
        super().__init__(daemon=True, name=request["HyperParameterTuningJobName"])
        self.request = request
        self.create = create
        self.config = request["HyperParameterTuningJobConfig"]
        self.definition = request["TrainingJobDefinition"]
        self.created = time.time()
        self.ended: float | None = None
        self.status = "InProgress"
        self.failure: str | None = None
        self.jobs: list[Job] = []
        self.values = list(itertools.islice(drawn(self.config, self.name), self.count))

    @property
    def count(self) -> int | None:
        """The number of training jobs; None for as many as a grid has."""
        return self.config["ResourceLimits"].get("MaxNumberOfTrainingJobs")

    @property
    def metric(self) -> str | None:
        """The name of the metric that it compares."""
        return self.config.get("HyperParameterTuningJobObjective", {}).get("MetricName")

    def begin(self) -> None:
        """Start the first training job, and continue in the background.

        Raises Refused, the service's error, if it cannot be started.
        """
        self._start_next()
        self.start()

    def ask_to_stop(self) -> None:
        """Stop the training jobs that run, and start no more."""
        if self.status == "InProgress":
            self.status = "Stopping"

    def run(self) -> None:
        """Start the other training jobs, as many at a time as the request says."""
        most = self.config["ResourceLimits"].get("MaxParallelTrainingJobs", 1)
        while True:
            running = [job for job in self.jobs if job.record.status not in ENDED]
            is_stopping = self.status == "Stopping" or self.failure
            for job in running if is_stopping else ():
                job.control.ask_to_stop()
            if not running and (is_stopping or len(self.jobs) == len(self.values)):
                break
            if not is_stopping and len(running) < most and len(self.jobs) < len(self.values):
                try:
                    self._start_next()
                # OSError: for example, there is no place left for reports.
                except (Refused, OSError) as error:
                    self.failure = str(error)
            else:
                time.sleep(POLL_SECONDS)
        self.ended = time.time()
        failed = self.failure or all(job.record.status == Status.FAILED for job in self.jobs)
        self.failure = self.failure or ("All training jobs failed." if failed else None)
        stopped = "Stopped" if self.status == "Stopping" else "Completed"
        self.status = "Failed" if failed else stopped

    def describe(self) -> dict:
        """Return what DescribeHyperParameterTuningJob says, without the ARN."""
        statuses = [job.record.status for job in self.jobs]
        counters = dict.fromkeys(
            ("Completed", "InProgress", "RetryableError", "NonRetryableError", "Stopped"), 0
        )
        for status in statuses:
            counters[COUNTED.get(status, "InProgress")] += 1
        best = self.best
        succeeded = sum(self.value_of(job) is not None for job in self.jobs)
        ended = sum(status in ENDED for status in statuses)
        return without_none(
            {
                "HyperParameterTuningJobName": self.name,
                "HyperParameterTuningJobConfig": self.config,
                "TrainingJobDefinition": self.definition,
                "HyperParameterTuningJobStatus": self.status,
                "CreationTime": self.created,
                "HyperParameterTuningEndTime": self.ended,
                "LastModifiedTime": self.ended or time.time(),
                "TrainingJobStatusCounters": counters,
                "ObjectiveStatusCounters": {
                    "Succeeded": succeeded,
                    "Pending": len(statuses) - ended,
                    "Failed": ended - min(ended, succeeded),
                },
                "BestTrainingJob": self.summary(best) if best else None,
                "FailureReason": self.failure,
            }
        )

    @property
    def best(self) -> Job | None:
        """The ended training job with the best value of the metric; None if none has one."""
        values = {
            number: self.value_of(job)
            for number, job in enumerate(self.jobs)
            if job.record.status == Status.COMPLETED and self.value_of(job) is not None
        }
        if not values:
            return None
        is_minimum = self.config["HyperParameterTuningJobObjective"]["Type"] == "Minimize"
        choose = min if is_minimum else max
        return self.jobs[choose(values, key=values.__getitem__)]

    def value_of(self, job: Job) -> float | None:
        """Return the last value of the metric in a job's log; None if there is none."""
        found = job.metrics.found.get(self.metric)
        return found and found["Value"]

    def summary(self, job: Job) -> dict:
        """Return a job's entry in ListTrainingJobsForHyperParameterTuningJob."""
        record = job.record
        value = self.value_of(job)
        objective = None
        if value is not None:
            kind = self.config["HyperParameterTuningJobObjective"]["Type"]
            objective = {"Type": kind, "MetricName": self.metric, "Value": value}
        return without_none(
            {
                "TrainingJobName": record.name,
                "TrainingJobArn": job.place.variables["TRAINING_JOB_ARN"],
                "CreationTime": record.created,
                "TrainingStartTime": record.training_start,
                "TrainingEndTime": record.training_end,
                "TrainingJobStatus": record.status,
                "TunedHyperParameters": self.values[self.jobs.index(job)],
                "FailureReason": record.failure,
                "FinalHyperParameterTuningJobObjectiveMetric": objective,
                "ObjectiveStatus": "Succeeded" if objective else "Pending",
            }
        )

    def _start_next(self) -> None:
        number = len(self.jobs)
        self.jobs.append(self.create(self._training_request(number)))

    def _training_request(self, number: int) -> dict:
        """Return the request of one training job, the `number`th from 0."""
        definition = self.definition
        # As the service names them.
        name = f"{self.name}-{number + 1:03}-{uuid.uuid4().hex[:8]}"
        hyperparameters = definition.get("StaticHyperParameters", {}) | self.values[number]
        if self.metric:
            hyperparameters |= {"_tuning_objective_metric": self.metric}
        request = {key: definition[key] for key in SAME_FIELDS if key in definition}
        if resources := definition.get("HyperParameterTuningResourceConfig"):  # SDK 2's
            kept = ("InstanceType", "InstanceCount", "VolumeSizeInGB", "VolumeKmsKeyId")
            request["ResourceConfig"] = {key: resources[key] for key in kept if key in resources}
        if checkpoints := definition.get("CheckpointConfig"):
            # A folder for each, or one would resume another one's training.
            address = f"{checkpoints['S3Uri'].rstrip('/')}/{name}"
            request["CheckpointConfig"] = checkpoints | {"S3Uri": address}
        return request | {
            "TrainingJobName": name,
            "AlgorithmSpecification": definition["AlgorithmSpecification"],
            "HyperParameters": hyperparameters,
        }


def check(request: dict) -> None:
    """Raise Refused, with the field's name, for what the rehearsal does not emulate."""
    definition = request.get("TrainingJobDefinition")
    refused = [name for name in REFUSED if request.get(name)]
    refused += [name for name in REFUSED_IN_DEFINITION if definition and definition.get(name)]
    resources = (definition or {}).get("HyperParameterTuningResourceConfig", {})
    refused += [name for name in ("InstanceConfigs", "AllocationStrategy") if resources.get(name)]
    if refused:
        raise invalid(
            f"The rehearsal does not emulate {refused[0]} of CreateHyperParameterTuningJob"
        )
    if not definition:
        raise invalid("TrainingJobDefinition is required")
    if "HyperParameterTuningJobObjective" not in request["HyperParameterTuningJobConfig"]:
        raise invalid("HyperParameterTuningJobObjective is required")


def drawn(config: dict, name: str) -> Iterator[dict[str, str]]:
    """Yield the tuned hyperparameters of one training job after another.

    Args:
        config: HyperParameterTuningJobConfig.
        name: The tuning job's name: the same one draws the same values.
    """
    ranges = config.get("ParameterRanges", {})
    categories = {
        each["Name"]: each["Values"] for each in ranges.get("CategoricalParameterRanges", [])
    }
    if config["Strategy"] == "Grid":
        for values in itertools.product(*categories.values()):
            yield dict(zip(categories, values, strict=True))
        return
    generator = random.Random(config.get("RandomSeed", name))
    while True:
        values = {name: generator.choice(choices) for name, choices in categories.items()}
        for each in ranges.get("IntegerParameterRanges", []):
            values[each["Name"]] = str(round(_between(each, generator)))
        for each in ranges.get("ContinuousParameterRanges", []):
            values[each["Name"]] = repr(_between(each, generator))
        yield values


def _between(bounds: dict, generator: random.Random) -> float:
    """Draw a value of a range, on its scale."""
    low, high = float(bounds["MinValue"]), float(bounds["MaxValue"])
    if bounds.get("ScalingType") == "Logarithmic":
        return math.exp(generator.uniform(math.log(low), math.log(high)))
    return generator.uniform(low, high)
