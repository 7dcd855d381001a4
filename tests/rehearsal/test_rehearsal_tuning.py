"""Tuning jobs of the rehearsal: what they draw, start and report, with fast training jobs."""

import itertools
import time
from types import SimpleNamespace

import pytest

from sagemaker_rehearsal.api import tuning
from sagemaker_rehearsal.aws.errors import Refused
from sagemaker_rehearsal.jobs.record import Record, Status

RANGES = {
    "CategoricalParameterRanges": [
        {"Name": "kind", "Values": ["a", "b"]},
        {"Name": "other", "Values": ["1", "2"]},
    ]
}
NUMBERS = {
    "IntegerParameterRanges": [{"Name": "n", "MinValue": "2", "MaxValue": "4"}],
    "ContinuousParameterRanges": [
        {"Name": "lr", "MinValue": "1e-4", "MaxValue": "1e-2", "ScalingType": "Logarithmic"}
    ],
}
REQUEST = {
    "HyperParameterTuningJobName": "tuned",
    "HyperParameterTuningJobConfig": {
        "Strategy": "Grid",
        "HyperParameterTuningJobObjective": {"Type": "Minimize", "MetricName": "loss"},
        "ResourceLimits": {"MaxNumberOfTrainingJobs": 3, "MaxParallelTrainingJobs": 2},
        "ParameterRanges": RANGES,
    },
    "TrainingJobDefinition": {
        "StaticHyperParameters": {"fixed": "3"},
        "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
        "RoleArn": "role",
        "InputDataConfig": [{"ChannelName": "training"}, {"ChannelName": "sm_drivers"}],
        "Environment": {"A": "b"},
        "CheckpointConfig": {"S3Uri": "s3://b/c/", "LocalPath": "/here"},
        "OutputDataConfig": {"S3OutputPath": "s3://b/o"},
        "ResourceConfig": {"InstanceCount": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 9},
        "RetryStrategy": {"MaximumRetryAttempts": 2},
        "EnableManagedSpotTraining": True,
    },
}


def changed(**config) -> dict:
    """Return REQUEST with another configuration."""
    key = "HyperParameterTuningJobConfig"
    return REQUEST | {key: REQUEST[key] | config}


class Jobs:
    """Makes training jobs that end when they are asked to, and keeps their requests."""

    def __init__(self, refuses_after: int = 99, error: Exception | None = None) -> None:
        self.requests: list[dict] = []
        self.made: list[SimpleNamespace] = []
        self.most_at_once = 0
        self.refuses_after = refuses_after
        self.error = error

    def __call__(self, request: dict) -> SimpleNamespace:
        if len(self.requests) == self.refuses_after:
            raise self.error
        self.requests.append(request)
        record = Record(request["TrainingJobName"], request, 1.0)
        job = SimpleNamespace(
            record=record,
            metrics=SimpleNamespace(found={}),
            place=SimpleNamespace(variables={"TRAINING_JOB_ARN": f"arn/{record.name}"}),
            control=SimpleNamespace(ask_to_stop=lambda: record.finish(Status.STOPPED)),
        )
        self.made.append(job)
        running = sum(each.record.status == Status.IN_PROGRESS for each in self.made)
        self.most_at_once = max(self.most_at_once, running)
        return job

    def end(self, number: int, status: Status, loss: float | None = None) -> None:
        """End the `number`th job, once it is there."""
        deadline = time.monotonic() + 30
        while len(self.made) <= number:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if loss is not None:
            self.made[number].metrics.found["loss"] = {"Value": loss}
        self.made[number].record.finish(status)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(tuning, "POLL_SECONDS", 0.01)


def test_each_training_job_has_all_of_the_definition():
    jobs = Jobs()
    made = tuning.Tuning(REQUEST, jobs)
    made.begin()
    for number, loss in enumerate((0.5, 0.2, 0.3)):
        jobs.end(number, Status.COMPLETED, loss)
    made.join(30)
    assert jobs.most_at_once <= 2
    definition = REQUEST["TrainingJobDefinition"]
    for number, request in enumerate(jobs.requests):
        name = request.pop("TrainingJobName")
        assert name.startswith(f"tuned-00{number + 1}-") and len(name) == len("tuned-001-") + 8
        drawn = {"kind": "ab"[number // 2], "other": "12"[number % 2]}
        assert request.pop("HyperParameters") == drawn | {
            "fixed": "3",
            "_tuning_objective_metric": "loss",
        }
        # One that had another one's checkpoints would resume its training.
        address = {"S3Uri": f"s3://b/c/{name}", "LocalPath": "/here"}
        assert request.pop("CheckpointConfig") == address
        left_out = ("StaticHyperParameters", "CheckpointConfig")
        assert request == {key: definition[key] for key in definition if key not in left_out}
    described = made.describe()
    assert described["HyperParameterTuningJobStatus"] == "Completed"
    assert described["TrainingJobStatusCounters"]["Completed"] == 3
    assert described["ObjectiveStatusCounters"] == {"Succeeded": 3, "Pending": 0, "Failed": 0}
    best = described["BestTrainingJob"]
    assert best["TrainingJobName"] == jobs.made[1].record.name
    assert best["FinalHyperParameterTuningJobObjectiveMetric"]["Value"] == 0.2
    assert best["TunedHyperParameters"] == {"kind": "a", "other": "2"}


def test_the_instances_of_sdk_2():
    resources = {"InstanceType": "ml.m5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30}
    definition = dict(REQUEST["TrainingJobDefinition"])
    del definition["ResourceConfig"]
    definition["HyperParameterTuningResourceConfig"] = resources
    request = REQUEST | {"TrainingJobDefinition": definition}
    tuning.check(request)
    jobs = Jobs()
    made = tuning.Tuning(request, jobs)
    made.begin()
    made.ask_to_stop()
    made.join(30)
    assert jobs.requests[0]["ResourceConfig"] == resources
    resources["InstanceConfigs"] = [{}]
    with pytest.raises(Refused, match="InstanceConfigs"):
        tuning.check(request)


def test_a_stop_ends_those_that_run_and_starts_no_more():
    jobs = Jobs()
    made = tuning.Tuning(REQUEST, jobs)
    made.begin()
    made.ask_to_stop()
    made.join(30)
    described = made.describe()
    assert described["HyperParameterTuningJobStatus"] == "Stopped" and len(jobs.made) <= 2
    assert described["TrainingJobStatusCounters"]["Stopped"] == len(jobs.made)
    assert "BestTrainingJob" not in described


def test_where_all_fail_so_does_the_tuning_job():
    jobs = Jobs()
    made = tuning.Tuning(REQUEST, jobs)
    made.begin()
    for number in range(3):
        jobs.end(number, Status.FAILED)
    made.join(30)
    described = made.describe()
    assert described["FailureReason"] == "All training jobs failed."
    assert described["TrainingJobStatusCounters"]["NonRetryableError"] == 3


@pytest.mark.parametrize("error", [Refused("ValidationException", "no"), OSError("no")])
def test_a_request_that_is_refused_is_refused_at_once_or_ends_it(error):
    with pytest.raises(type(error)):
        tuning.Tuning(REQUEST, Jobs(refuses_after=0, error=error)).begin()
    jobs = Jobs(refuses_after=1, error=error)
    made = tuning.Tuning(REQUEST, jobs)
    made.begin()
    made.join(30)
    assert made.describe()["HyperParameterTuningJobStatus"] == "Failed"
    assert jobs.made[0].record.status == Status.STOPPED


def test_a_grid_has_each_combination_once():
    made = tuning.Tuning(changed(ResourceLimits={"MaxParallelTrainingJobs": 1}), Jobs())
    assert len(made.values) == len({tuple(each.values()) for each in made.values}) == 4


def test_what_is_drawn_is_within_its_range_and_the_same_again():
    config = changed(Strategy="Bayesian", ParameterRanges=RANGES | NUMBERS)
    config = config["HyperParameterTuningJobConfig"]
    values = list(itertools.islice(tuning.drawn(config, "x"), 200))
    assert {each["n"] for each in values} == {"2", "3", "4"}
    assert {each["kind"] for each in values} == {"a", "b"}
    rates = [float(each["lr"]) for each in values]
    assert 1e-4 <= min(rates) < 2e-4 and 5e-3 < max(rates) <= 1e-2
    assert values == list(itertools.islice(tuning.drawn(config, "x"), 200))
    assert values != list(itertools.islice(tuning.drawn(config | {"RandomSeed": 1}, "x"), 200))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"WarmStartConfig": {"a": 1}}, "WarmStartConfig"),
        ({"TrainingJobDefinition": None}, "TrainingJobDefinition"),
        ({"TrainingJobDefinitions": [{}]}, "TrainingJobDefinitions"),
        ({"HyperParameterTuningJobConfig": {}}, "HyperParameterTuningJobObjective"),
    ],
)
def test_what_is_not_emulated_is_refused_by_name(changes, names):
    with pytest.raises(Refused, match=names):
        tuning.check(REQUEST | changes)
    tuning.check(REQUEST)
