"""Which jobs leave their instances in a warm pool, which take them over, and what is billed."""

from pathlib import Path

import pytest
from rehearsed_jobs import Rehearsed, wait_until_ended

from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.jobs import warm_pools
from sagemaker_rehearsal.jobs.layout import Layout
from sagemaker_rehearsal.jobs.record import Attempt, Record, Secondary, Status, Transition, WarmPool

RESOURCES = {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30}
REQUEST = {"RoleArn": "arn:aws:iam::123456789012:role/r", "ResourceConfig": RESOURCES}
ENDED_AT = 1000.0
# What the request of a stand-in's job lacks.
REST = {
    "RoleArn": "arn:aws:iam::123456789012:role/r",
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
}


def record(keep_alive: int = 600, **fields) -> Record:
    """Return the record of a job that has completed at ENDED_AT."""
    resources = RESOURCES | {warm_pools.KEEP_ALIVE: keep_alive}
    made = Record("first", REQUEST | {"ResourceConfig": resources}, 0.0, Status.COMPLETED)
    made.transitions = [Transition(Secondary.COMPLETED, "", ENDED_AT)]
    made.attempts = [Attempt(1)]
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def test_a_pool_is_kept_for_its_time_and_billed_for_it():
    assert warm_pools.describe(record(), ENDED_AT + 200) == {
        "Status": "Available",
        "ResourceRetainedBillableTimeInSeconds": 200,
    }
    assert warm_pools.describe(record(), ENDED_AT + 900) == {
        "Status": "Terminated",
        "ResourceRetainedBillableTimeInSeconds": 600,
    }


STATES = {
    "runs": ({"status": Status.IN_PROGRESS}, "InUse"),
    "stopped": ({"status": Status.STOPPED}, "Available"),
    "its own mistake": ({"status": Status.FAILED, "failure": "AlgorithmError: x"}, "Available"),
    "the service's": ({"status": Status.FAILED, "failure": "InternalServerError: x"}, None),
    "never had instances": ({"status": Status.STOPPED, "attempts": []}, None),
}


@pytest.mark.parametrize(("fields", "status"), STATES.values(), ids=STATES)
def test_which_jobs_leave_a_pool(fields, status):
    assert warm_pools.status(record(**fields), ENDED_AT + 1) == status
    assert warm_pools.describe(record(keep_alive=0, **fields), ENDED_AT + 1) is None


def test_a_job_that_keeps_nothing_ends_the_pool_that_it_had():
    inherited = record(keep_alive=0, warm_pool=WarmPool(inherited_from="before"))
    assert warm_pools.describe(inherited, ENDED_AT + 1) == {
        "Status": "Terminated",
        "ResourceRetainedBillableTimeInSeconds": 0,
    }


OTHERS = {
    "the same": ({}, True),
    "another type": ({"ResourceConfig": RESOURCES | {"InstanceType": "ml.g5.2xlarge"}}, False),
    "fewer": ({"ResourceConfig": RESOURCES | {"InstanceCount": 1}}, False),
    "another role": ({"RoleArn": "arn:aws:iam::123456789012:role/other"}, False),
    "isolated": ({"EnableNetworkIsolation": True}, False),
    "not isolated, said": ({"EnableNetworkIsolation": False}, True),
    "another image": ({"AlgorithmSpecification": {"TrainingImage": "other"}}, True),
    "on spot": ({"EnableManagedSpotTraining": True}, False),
}


@pytest.mark.parametrize(("change", "matches"), OTHERS.values(), ids=OTHERS)
def test_who_takes_a_pool_over(monkeypatch, change, matches):
    monkeypatch.setattr("time.time", lambda: ENDED_AT + 5)
    first = record()
    second = Record("second", REQUEST | change, ENDED_AT + 5)
    line = "the job has the instances of first, from its warm pool"
    assert warm_pools.take_over(second, [first]) == [line] * matches
    assert second.warm_pool.inherited_from == "first" * matches
    if matches:
        assert warm_pools.describe(first, ENDED_AT + 60) == {
            "Status": "Reused",
            "ResourceRetainedBillableTimeInSeconds": 5,
            "ReusedByJob": "second",
        }
        assert not warm_pools.take_over(Record("third", REQUEST, ENDED_AT + 5), [first])


def test_a_pool_is_given_back_by_hand(monkeypatch):
    monkeypatch.setattr("time.time", lambda: ENDED_AT + 5)
    job = record()
    assert warm_pools.keep_for(job, 1200)
    assert warm_pools.status(job, ENDED_AT + 1199) == warm_pools.PoolStatus.AVAILABLE
    assert warm_pools.keep_for(job, 0)
    assert warm_pools.describe(job, ENDED_AT + 50) == {
        "Status": "Terminated",
        "ResourceRetainedBillableTimeInSeconds": 5,
    }
    assert not warm_pools.keep_for(job, 1200)


def test_a_job_that_runs_can_still_say_how_long_its_instances_are_kept():
    job = record(keep_alive=0, status=Status.IN_PROGRESS)
    assert warm_pools.status(job, ENDED_AT) is None
    assert warm_pools.keep_for(job, 60)
    assert warm_pools.status(job, ENDED_AT) == warm_pools.PoolStatus.IN_USE


def test_a_pools_cache_is_what_the_job_before_has_left(tmp_path):
    """It is empty for a job with new instances, also when these are replaced."""
    second = Record("second", REQUEST, 0.0, warm_pool=WarmPool(inherited_from="first"))
    for job, is_first, left in [
        (record(), True, None),
        (second, True, "first"),
        (second, False, None),
    ]:
        assert warm_pools.has_cache(job)
        warm_pools.make_cache(job, tmp_path, is_first)
        cache = warm_pools.cache_of(job.name, tmp_path)
        found = (cache / "algo-1/file").read_text() if (cache / "algo-1").exists() else None
        assert found == left
        (cache / "algo-1").mkdir(exist_ok=True)
        (cache / "algo-1/file").write_text(job.name)
    assert not warm_pools.cache_of("first", tmp_path).exists()
    assert not warm_pools.has_cache(record(keep_alive=0))


def test_a_container_finds_the_cache_where_the_service_has_it(tmp_path):
    mounts = Layout(tmp_path / "algo-1", None, tmp_path / "first.cache/algo-1").mounts
    assert mounts[tmp_path / "first.cache/algo-1"] == "/opt/ml/sagemaker/warmpoolcache"
    assert "/opt/ml/sagemaker/warmpoolcache" not in Layout(tmp_path, None).mounts.values()


@pytest.mark.slow
def test_jobs_of_a_pool_share_a_folder_until_one_leaves_no_pool(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    started = []
    start = rehearsed.engine.start
    rehearsed.engine.start = lambda *arguments: started.append(arguments[-1]) or start()
    without = rehearsed.job("before")
    rehearsed.container(0).end(0)
    wait_until_ended(without)
    service = Service(without.settings, lambda *_: without.place)
    for number, (name, seconds) in enumerate([("first", 600), ("second", 0)], start=1):
        resources = {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1}
        resources |= {warm_pools.KEEP_ALIVE: seconds} if seconds else {}
        fields = {"TrainingJobName": name, "ResourceConfig": resources, **REST}
        service.CreateTrainingJob(without.request | fields, "us-east-1")
        rehearsed.container(number)
        (job,) = (job for job in service.jobs.values() if job.record.name == name)
        folder = Path(started[number][warm_pools.CACHE_VARIABLE])
        assert [file.name for file in folder.iterdir()] == ["first"] * (name == "second")
        (folder / name).touch()
        rehearsed.container(number).end(0)
        wait_until_ended(job)
        assert folder.exists() == bool(seconds)
    assert warm_pools.CACHE_VARIABLE not in started[0]
