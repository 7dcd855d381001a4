"""A job that AWS has no instances for is started again, for as long as is told."""

from types import SimpleNamespace

import pytest

from sagemaker_lightning.launcher import capacity, follower, job_request, jobs

LACKING = "CapacityError: Unable to provision requested ML compute capacity due to Insufficient"


class World:
    """Jobs that end as they are told, and a clock; nothing waits."""

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

    def follow(self, site, name: str, seconds: float) -> int:
        status, self.reasons[name] = self.ends.pop(0)
        return status

    def describe(self, site, name: str) -> dict:
        return {"FailureReason": self.reasons[name]} if self.reasons[name] else {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_job_is_started_again_under_other_names(monkeypatch, capsys):
    world = World(monkeypatch, (1, LACKING), (1, LACKING), (0, ""))
    assert capacity.follow(None, {"TrainingJobName": "a"}, 1.0, 3600.0) == 0
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
    assert capacity.follow(None, {"TrainingJobName": "a"}, 1.0, 3600.0) == status
    assert world.started == ["a"]


def test_it_is_started_once_without_a_wait(monkeypatch):
    world = World(monkeypatch, (1, LACKING))
    assert capacity.follow(None, {"TrainingJobName": "a"}, 1.0, 0) == 1
    assert world.started == ["a"]


def test_no_start_is_later_than_the_wait(monkeypatch, capsys):
    world = World(monkeypatch, *[(1, LACKING)] * 9)
    assert capacity.follow(None, {"TrainingJobName": "a"}, 1.0, 300.0) == 1
    assert world.started == ["a", "a-1", "a-2"]  # after 0, 120 and 240 s
    assert capsys.readouterr().err.endswith("found no instances for 300 s (--capacity-wait)\n")
