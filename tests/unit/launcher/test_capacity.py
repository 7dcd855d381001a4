"""A job that AWS has no instances for is started again, for as long as the flags say."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError

from sagemaker_lightning.launcher import capacity, command, drill, follower, job_request, jobs

LACKING = "CapacityError: Unable to provision requested ML compute capacity due to Insufficient"


class World:
    """Jobs that end as they are asked to, and a clock; nothing waits."""

    def __init__(self, monkeypatch, *ends: tuple[int, str]) -> None:
        self.ends = [*ends]
        self.now = 0.0
        self.started: list[str] = []
        self.reasons: dict[str, str] = {}
        monkeypatch.setattr(jobs, "start", self.start)
        monkeypatch.setattr(jobs, "describe", self.describe)
        monkeypatch.setattr(follower, "follow", self.follow)
        time = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(capacity, "time", time)
        # In reality, each name has the time.
        monkeypatch.setattr(job_request, "renamed", lambda name: f"{name[0]}-{len(self.started)}")

    def start(self, site, request: dict) -> str:
        self.started.append(request["TrainingJobName"])
        return self.started[-1]

    def follow(self, site, name: str, seconds: float, look) -> int:
        status, self.reasons[name] = self.ends.pop(0)
        return status

    def describe(self, site, name: str) -> dict:
        return {"FailureReason": self.reasons[name]} if self.reasons[name] else {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_job_is_started_again_under_other_names(monkeypatch, capsys):
    world = World(monkeypatch, (1, LACKING), (1, LACKING), (0, ""))
    assert capacity.follow(None, {"TrainingJobName": "a"}, 1.0, 3600.0, 0) == 0
    assert world.started == ["a", "a-1", "a-2"]
    assert world.now == 2 * capacity.PAUSE_SECONDS
    assert capsys.readouterr().err.count("no instances for it: the job starts again in 120 s") == 2


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (1, "AlgorithmError: no CapacityError of its own, exit code: 1"),
        (1, ""),  # it was stopped
        (130, LACKING),  # Ctrl-C
        (0, ""),
    ],
)
def test_what_ended_otherwise_is_not_started_again(monkeypatch, status, reason):
    world = World(monkeypatch, (status, reason))
    assert capacity.follow(None, {"TrainingJobName": "a"}, 1.0, 3600.0, 0) == status
    assert world.started == ["a"]


def test_without_a_wait_a_job_is_started_once(monkeypatch):
    world = World(monkeypatch, (1, LACKING))
    assert capacity.follow(None, {"TrainingJobName": "a"}, 1.0, 0, 0) == 1
    assert world.started == ["a"]


def test_no_start_is_later_than_the_wait(monkeypatch, capsys):
    world = World(monkeypatch, *[(1, LACKING)] * 9)
    assert capacity.follow(None, {"TrainingJobName": "a"}, 1.0, 300.0, 0) == 1
    assert world.started == ["a", "a-1", "a-2"]  # after 0, 120 and 240 s
    assert capsys.readouterr().err.endswith("found no instances for 300 s (--capacity-wait)\n")


# Spot jobs that continue on demand

SPOT = {
    "TrainingJobName": "a",
    "EnableManagedSpotTraining": True,
    "CheckpointConfig": {"S3Uri": "s3://b/p"},
    "StoppingCondition": {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 14400},
}
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def changes(*phases: tuple[str, float | None]) -> list[dict]:
    """Return SecondaryStatusTransitions of phases one after the other; the last has no end."""
    listed = []
    moment = BEGAN
    for status, seconds in phases:
        listed.append({"Status": status, "StartTime": moment})
        if seconds is not None:
            moment += timedelta(seconds=seconds)
            listed[-1]["EndTime"] = moment
    return listed


def test_only_the_time_without_instances_counts():
    phases = ("Starting", 100.0), ("Downloading", 40.0), ("Training", 900.0), ("Interrupted", None)
    job = {"SecondaryStatusTransitions": changes(*phases)}
    assert capacity.seconds_waited(job, BEGAN + timedelta(seconds=1090)) == 150.0
    assert capacity.seconds_waited({}, BEGAN) == 0.0


class SpotJob:
    """A spot job that waits for ever, and is stopped by StopTrainingJob, if it answers so."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.stops = 0
        began = datetime.now(UTC) - timedelta(hours=1)
        self.description = {
            "TrainingJobName": "a",
            "TrainingJobStatus": "InProgress",
            "SecondaryStatusTransitions": [{"Status": "Starting", "StartTime": began}],
        }

    def client(self, service: str) -> SimpleNamespace:
        return SimpleNamespace(stop_training_job=self.stop)

    def stop(self, TrainingJobName: str) -> None:  # noqa: N803
        self.stops += 1
        if self.refusal:
            error = {"Error": {"Code": self.refusal, "Message": ""}}
            raise ClientError(error, "StopTrainingJob")


@pytest.mark.parametrize(("limit", "stops"), [(3000.0, 1), (4000.0, 0), (0, 0)])
def test_a_spot_job_that_has_waited_for_too_long_is_stopped_once(limit, stops):
    job = SpotJob()
    waits = capacity.SpotWaits(job, limit)
    for _ in range(2):
        waits.look(job.description)
    assert (job.stops, waits.over) == (stops, bool(stops))


def test_a_job_that_ends_meanwhile_is_not_stopped():
    job = SpotJob("ValidationException")
    capacity.SpotWaits(job, 60.0).look(job.description)
    job.description["TrainingJobStatus"] = "Completed"
    waits = capacity.SpotWaits(job, 60.0)
    waits.look(job.description)
    assert not waits.over
    refusing = SpotJob("AccessDeniedException")
    with pytest.raises(ClientError):
        capacity.SpotWaits(refusing, 60.0).look(refusing.description)


def test_the_job_on_demand_has_the_rest_of_the_time():
    request = capacity.on_demand(SPOT, 2000)
    assert request == {
        "TrainingJobName": "a",
        "CheckpointConfig": {"S3Uri": "s3://b/p"},
        "StoppingCondition": {"MaxRuntimeInSeconds": 5200},
    }
    assert capacity.on_demand(SPOT, 9000)["StoppingCondition"] == {"MaxRuntimeInSeconds": 1}


WRONG = {
    "a job on demand": ({"EnableManagedSpotTraining": False}, 60, True, "needs a job on spot"),
    "no checkpoints": ({"CheckpointConfig": None}, 60, True, "needs --checkpoints=s3://"),
    "the end comes first": ({}, 14400, True, r"found 14400, expected less than --max-wait \(14400"),
    "nobody stays": ({}, 60, False, "--on-demand-after: not allowed with --no-follow"),
}


@pytest.mark.parametrize(("change", "seconds", "is_followed", "line"), WRONG.values(), ids=WRONG)
def test_a_job_that_cannot_continue_on_demand_is_refused(change, seconds, is_followed, line):
    request = {name: value for name, value in (SPOT | change).items() if value is not None}
    with pytest.raises(ValueError, match=line):
        capacity.check(request, 0, seconds, is_followed)
    with pytest.raises(ValueError, match="--capacity-wait: not allowed with --no-follow"):
        capacity.check(SPOT, 60, 0, is_followed=False)
    capacity.check(SPOT, 60, 14399, is_followed=True)


@pytest.mark.parametrize("flag", ["--on-demand-after=1h", "--capacity-wait=1h"])
def test_flags_that_do_not_fit_are_refused_before_the_drill(monkeypatch, flag):
    monkeypatch.setattr(drill, "run", lambda *_: pytest.fail("the drill runs"))
    image = "--image=123456789012.dkr.ecr.us-east-1.amazonaws.com/image:1"
    role = "--role=arn:aws:iam::123456789012:role/r"
    places = ["--output=s3://bucket/output", "--checkpoints=s3://bucket/checkpoints"]
    more = ["--spot", "--drill", "--no-follow"]
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr("sys.argv", ["launch", image, role, *places, *more, flag])
    with pytest.raises(SystemExit, match=f"{flag.partition('=')[0]}: not allowed with --no-follow"):
        command.main()
