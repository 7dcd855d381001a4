"""How a job's attempts follow each other: retries, repairs, waits and what their logs say."""

import math
import queue
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from records import interrupted

from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.faults import schedule
from sagemaker_rehearsal.faults.schedule import DueInterruption
from sagemaker_rehearsal.jobs.attempt import Outcome
from sagemaker_rehearsal.jobs.job import Ended, Job
from sagemaker_rehearsal.jobs.record import (
    MAX_RESTARTS,
    MAX_SKIPPED,
    Attempt,
    Record,
    Secondary,
    point,
)


def job_with(rule_of_retries: int | None = None, **options) -> Job:
    """Return a job of one instance whose thread does not run."""
    made = Job.__new__(Job)
    made.request = {}
    if rule_of_retries is not None:
        made.request["RetryStrategy"] = {"MaximumRetryAttempts": rule_of_retries}
    made.hosts = [SimpleNamespace(name="algo-1", instance_type=options.pop("type", "ml.m5.large"))]
    made.record = Record("job", made.request, 0.0)
    made.control = SimpleNamespace(stop=False)
    made.latest, made.repairs, made.settings = None, 0, SimpleNamespace(repairs=1)
    for name, value in options.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(("allowed", "lost"), [(None, 9), (2, 2), (2, 1)])
def test_as_many_retries_as_a_request_allows(allowed, lost):
    made = job_with(allowed)
    made.record.interruptions = [None] * lost
    outcome = Outcome(again=DueInterruption(["algo-1"], True, 0.0, "by hand"))
    assert made._check_retries(outcome) is outcome


def test_one_interruption_more_than_the_retries_fails_the_job():
    made = job_with(2)
    made.record.interruptions = [None] * 3
    ended = made._check_retries(Outcome(again=DueInterruption(["algo-1"], True, 0.0, "by hand")))
    says = "InternalServerError: instances were lost 3 times, MaximumRetryAttempts is 2"
    assert (ended.status, ended.failure, ended.again) == ("Failed", says, None)


@pytest.mark.parametrize(
    ("kind", "status", "again"),
    [
        ("ml.g5.xlarge", Secondary.FAILED, True),
        ("ml.p4d.24xlarge", Secondary.FAILED, True),
        ("ml.m5.large", Secondary.FAILED, False),
        ("ml.g5.xlarge", Secondary.COMPLETED, False),
    ],
)
def test_a_failure_on_a_gpu_is_repaired_as_often_as_asked(kind, status, again):
    made = job_with(type=kind)
    outcome = made._repair(Outcome(status, "AlgorithmError: x"))
    assert (outcome.again is not None) == again and len(made.record.interruptions) == again
    if again:
        assert outcome.again == DueInterruption(
            ["algo-1"], True, 0.0, "repair 1 after AlgorithmError: x"
        )
        assert made.record.secondary == "Restarting"
        second = Outcome(status, "AlgorithmError: x")
        assert made._repair(second) is second


def test_a_job_waits_no_longer_than_it_may(monkeypatch):
    made = job_with(latest=100.0)
    for moment in (99.0, 100.0):
        monkeypatch.setattr("time.time", lambda moment=moment: moment)
        with pytest.raises(Ended) if moment == 100.0 else nullcontext() as ended:
            made.check()
    assert ended.value.status == "MaxWaitTimeExceeded"
    made.latest = None
    made.check()
    made.control.stop = True
    with pytest.raises(Ended) as ended:
        made.check()
    assert ended.value.status == "Stopped"


@pytest.mark.parametrize(("latest", "waits"), [(None, [60.0]), (50.0, [50.0])])
def test_a_gap_without_capacity_is_waited_for(monkeypatch, latest, waits):
    clock = SimpleNamespace(now=40.0)
    monkeypatch.setattr("time.time", lambda: clock.now)
    made = job_with(latest=latest)
    waited = []

    def wait(until: float) -> None:
        waited.append(until)
        clock.now = until

    made.control.next = wait
    with pytest.raises(Ended) if latest else nullcontext():
        made._wait_for_capacity(DueInterruption(["algo-1"], True, 20.0, "by hand"))
    assert waited == waits


def test_a_record_keeps_the_first_begin_and_a_short_failure(monkeypatch):
    record = interrupted()
    for moment in (5.0, 7.0):
        monkeypatch.setattr("time.time", lambda moment=moment: moment)
        record.begin_training()
        record.attempts[1].instances[0].release()
    record.end_training("x" * 2000)
    assert (record.training_start, record.training_end, len(record.failure)) == (5.0, 7.0, 1024)
    assert record.attempts[1].instances[0].released == 160.0
    record.training_start = None
    record.end_training(None)
    assert (record.training_end, record.failure, record.step) == (None, None, 70)
    record.change(Secondary.STOPPING, "", is_final=False)
    assert (record.status, record.transitions[-2].end, record.transitions[-1].end) == (
        "Stopping", 7.0, None
    )  # fmt: skip
    record.change(Secondary.STOPPED, "", is_final=True)
    assert record.transitions[-1].end == record.modified == 7.0
    assert Record("job", {}, 0.0).step is None


@pytest.mark.parametrize(
    ("line", "resumed", "proved"),
    [
        ("resuming from step 30 of host", 30, ""),
        (f"resuming from step {'9' * 15}", 10**15 - 1, ""),
        (f"resuming from step {'9' * 16}", None, ""),
        ("resumed at step 30: exact", None, "exact"),
    ],
)
def test_what_a_line_says_of_a_resume(line, resumed, proved):
    first = Attempt(1)
    first.note_resume(line)
    first.note_resume("step=4")
    assert (first.resumed, first.proved) == (resumed, proved)


def test_which_checkpoint_a_log_says_it_resumed_from():
    attempt = Attempt(2)
    for line in (
        "warning: checkpoint /opt/ml/checkpoints/step-9.ckpt is damaged; it is skipped",
        "warning: checkpoint /opt/ml/checkpoints/step-9.ckpt is damaged; it is skipped",
        "resuming from step 4: /opt/ml/checkpoints/step-4.ckpt; 2 ranks saved it, now there are 1",
        "warning: something else; it is skipped",
    ):
        attempt.note_resume(line)
    assert (attempt.resumed, attempt.resumed_from) == (4, "step-4.ckpt")
    assert attempt.skipped == [
        "checkpoint /opt/ml/checkpoints/step-9.ckpt is damaged; it is skipped"
    ]
    for number in range(100):
        attempt.note_resume(f"warning: checkpoint {number} is damaged; it is skipped")
    assert len(attempt.skipped) == MAX_SKIPPED
    attempt.note_resume("resuming from step 5")
    assert (attempt.resumed, attempt.resumed_from) == (5, "")


def test_restarts_in_the_container_are_not_those_of_instances():
    attempt = Attempt(1)
    for line in (
        "resuming from step 4: /opt/ml/checkpoints/step-4.ckpt",
        "restart 1 in this container (at most 3 an hour), after step 17: a rank failed",
        "resuming from step 12: /opt/ml/checkpoints/step-12.ckpt",
        "restart 1: continued from step 12 after 9.3 s, 5 steps lost",
        "restart 2 in this container (at most 3 an hour): a rank failed",
    ):
        attempt.note_resume(line)
    assert (attempt.resumed, attempt.resumed_from) == (4, "step-4.ckpt")
    assert [each.words for each in attempt.restarts] == [
        "after step 17, continued from step 12 after 9.3 s, 5 steps lost",
        "before the first step",
    ]
    first, second = attempt.restarts
    assert (first.step, first.reached) == (12, 17) and first.time is not None
    assert (second.step, second.time) == (None, None)
    # The other host says it, too.
    attempt.note_resume("restart 2 in this container (at most 3 an hour), after step 20: x")
    assert attempt.restarts == [first, second]
    for number in range(2 * MAX_RESTARTS):
        attempt.note_resume(f"restart {number} in this container (at most 3 an hour): x")
    assert len(attempt.restarts) == MAX_RESTARTS


def test_the_values_of_a_line_of_progress():
    line = "epoch=1/10 step=45/450 loss=nan lr=1.5e-3 low=-inf images/s=12.5 left=0:01:23 a=1x"
    found = point(line, 3.0)
    assert (found.time, found.step) == (3.0, 45) and math.isnan(found.values.pop("loss"))
    values = {"epoch": 1, "step": 45, "lr": 0.0015, "low": -math.inf, "images/s": 12.5}
    assert found.values == values
    assert point("laststep=4 epoch=1", 3.0) is None and point(f"step={'9' * 16}", 3.0) is None


def test_an_order_at_the_border_of_a_gap():
    order = {"name": "job", "hosts": ["a", "b", "a"], "warned": False}
    for gap in (0, schedule.LONGEST_SECONDS):
        assert schedule.ordered(order | {"gap": gap}) == ("job", ["a", "b"], False, gap)
    for gap in (-0.1, schedule.LONGEST_SECONDS + 1, True, math.nan):
        with pytest.raises(ValueError, match="gap: found .*, expected seconds, 0 to 2419200"):
            schedule.ordered(order | {"gap": gap})
    assert schedule.parse("every 672h").every == schedule.LONGEST_SECONDS
    with pytest.raises(ValueError, match="expected times up to 672h"):
        schedule.parse("every 673h")


def test_what_can_be_interrupted_by_hand():
    made = job_with()
    made.control = SimpleNamespace(messages=queue.Queue())
    made.record.change(Secondary.DOWNLOADING, "", is_final=False)
    service = Service(None, None)
    service.jobs["arn"] = made
    order = {"name": "job", "hosts": [], "warned": False, "gap": 1.0}
    with pytest.raises(ValueError, match="^job is not a spot job; create it with EnableManagedSp"):
        service.interrupt(order)
    made.request["EnableManagedSpotTraining"] = True
    with pytest.raises(ValueError, match="^job is Downloading; an interruption is for a job in Tr"):
        service.interrupt(order)
    made.record.change(Secondary.TRAINING, "", is_final=False)
    for wrong, says in (
        ({"hosts": ["b"]}, "--host: found b, expected algo-1"),
        ({"name": "x"}, "JOB: found 'x', expected one of: job"),
    ):
        with pytest.raises(ValueError, match=says):
            service.interrupt(order | wrong)
    assert service.interrupt(order) == "algo-1 of job taken away, not warned"
    assert made.control.messages.get_nowait() == DueInterruption(["algo-1"], False, 1.0, "by hand")
    assert made.control.messages.empty()
