"""Faults of a job from their order to the verdict, without an engine."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from page_site import Store
from records import interrupted, job
from rehearsed_jobs import SPOT_FIELDS, Engine, Rehearsed, wait_until_ended
from test_rehearsal_report import write_page
from waiting import wait_until

from sagemaker_lightning.contract.process_stat import process_stat
from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.faults.containers import process_of_container
from sagemaker_rehearsal.faults.errors import CannotInject
from sagemaker_rehearsal.faults.rules import parse
from sagemaker_rehearsal.jobs.layout import Layout
from sagemaker_rehearsal.jobs.record import Comparison, Fault, Record, Verdict
from sagemaker_rehearsal.report import goodput_data
from sagemaker_rehearsal.report.fault_verdict import describe_injection, judge

CHECKPOINTS = {"CheckpointConfig": {"S3Uri": "s3://bucket/ck"}}


class Processes(Engine):
    """An engine whose hosts have a process each: `sleep`."""

    def start(self, *_):
        container = super().start()
        container.process = subprocess.Popen(["sleep", "60"])
        container.first_process = lambda: container.process.pid
        container.on_signal = self._on_signal(container)
        return container

    def _on_signal(self, container):
        def take(name: str) -> None:
            container.process.kill()
            container.process.wait()
            container.end(143 if name == "SIGTERM" else 137)

        return take


class Injected(Rehearsed):
    """Jobs with these faults; their checkpoints are in a stand-in for S3."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.engine = Processes()
        self.store = Store()
        self.store.put_object = self._put
        self.store.upload_fileobj = lambda *_, **__: None
        self.client.get_object = lambda *, Bucket, Key: {
            "Body": Body(self.store.objects[Bucket, Key])
        }
        self.client.put_object = self._put
        self.client.get_paginator = self.store.get_paginator

    def _put(self, *, Bucket: str, Key: str, Body: bytes) -> None:  # noqa: N803
        self.store.objects[Bucket, Key] = Body


@pytest.fixture
def injected(tmp_path, monkeypatch) -> Iterator[Injected]:
    """Jobs with faults."""
    monkeypatch.setattr("sagemaker_rehearsal.jobs.checkpoint_sync.restore", lambda *_: (0, 0))
    made = Injected(tmp_path)
    yield made
    for container in made.engine.containers:
        container.process.kill()
        container.process.wait()


class Body:
    """The content of an object."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def read(self) -> bytes:
        return self.content


def with_faults(injected: Injected, *texts: str, **settings) -> Record:
    """Return the record of a job with faults by rule, which has started, and its job."""
    injected.settings = {"faults": [parse(text) for text in texts], **settings}
    return injected.job(**SPOT_FIELDS, **CHECKPOINTS)


def state_of(injected: Injected, number: int = 0) -> str:
    return process_stat(injected.engine.containers[number].process.pid)[0]


@pytest.mark.slow
def test_a_rank_is_frozen_for_a_time_at_a_step(injected):
    rehearsed = with_faults(injected, "freeze rank 0 at step 3 for 0.3s")
    container = injected.container()
    container.line_queue.put("step=2")
    wait_until(lambda: rehearsed.record.step == 2)
    assert not rehearsed.record.faults
    container.line_queue.put("step=3")
    wait_until(lambda: state_of(injected) == "T", "the fault")
    (fault,) = rehearsed.record.faults
    assert (fault.kind, fault.host, fault.target) == ("freeze rank", "algo-1", "rank 0")
    assert (fault.step, fault.failed) == (3, "")
    assert fault.why == "freeze rank 0 at step 3 for 0.3s"
    wait_until(lambda: fault.ended is not None, "its end")
    assert state_of(injected) != "T" and fault.ended - fault.time >= 0.3
    container.end(0)
    record = wait_until_ended(rehearsed)
    assert judge(record) == "completed, not compared" and record.never_due == []


@pytest.mark.slow
def test_a_fault_that_never_came_due_is_reported(injected):
    rehearsed = with_faults(injected, "kill rank at step 9", "kill rank at 3s of algo-7")
    injected.container().end(0)
    record = wait_until_ended(rehearsed)
    assert record.never_due[0].startswith("--fault='kill rank at step 9' never came due: ")
    assert "--fault='kill rank at 3s of algo-7' is not for this job, whose hosts are algo-1" in (
        record.notes
    )
    assert judge(record) is None


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "left"), [("halve", b"ab"), ("flip", None)])
def test_the_newest_checkpoint_in_s3_is_damaged(injected, kind, left):
    objects = injected.store.objects
    for name in ("step-000000002.ckpt", "step-000000010.ckpt", "step-000000010.ckpt.json", "last"):
        objects["bucket", f"ck/{name}"] = b"abcd" if name.endswith("10.ckpt") else b"x"
    objects["bucket", "ck/best-epoch=2-step=12.ckpt"] = b"newer, but nothing continues from it"
    before = dict(objects)
    rehearsed = with_faults(injected, f"{kind} checkpoint at step 3")
    injected.container().line_queue.put("step=3")
    wait_until(lambda: rehearsed.record.faults, "the fault")
    (fault,) = rehearsed.record.faults
    assert (fault.target, fault.failed) == ("step-000000010.ckpt", "")
    changed = objects["bucket", "ck/step-000000010.ckpt"]
    if left is None:
        bits = int.from_bytes(changed, "big") ^ int.from_bytes(b"abcd", "big")
        assert bits.bit_count() == 1 and len(changed) == 4
    else:
        assert changed == left
    assert {**objects, ("bucket", "ck/step-000000010.ckpt"): b"abcd"} == before
    injected.container().end(0)
    wait_until_ended(rehearsed)


@pytest.mark.slow
def test_what_is_not_possible_is_reported_and_the_job_continues(injected):
    rehearsed = with_faults(
        injected,
        "halve checkpoint at step 1",
        "kill rank 7 at step 1",
        "cut network at step 1",
    )
    injected.container().line_queue.put("step=1")
    wait_until(lambda: len(rehearsed.record.faults) == 3, "the faults")
    reasons = [fault.failed for fault in rehearsed.record.faults]
    assert reasons[0] == "S3 has no checkpoint yet"
    assert reasons[1] == "found no rank 7 on algo-1; its ranks: 0"
    assert reasons[2] in ("the host has no network of its own, but this machine's", "it needs root")
    injected.engine.containers[0].first_process = lambda: None
    service_of(rehearsed).inject({"name": "job", "fault": "kill rank"})
    wait_until(lambda: len(rehearsed.record.faults) == 4, "the fault by hand")
    assert rehearsed.record.faults[3].failed == "no process of algo-1 is on this machine"
    injected.container().end(0)
    record = wait_until_ended(rehearsed)
    assert judge(record) is None and not record.disturbed


@pytest.mark.slow
def test_a_fault_that_is_drawn_is_one_that_is_possible(injected):
    rehearsed = with_faults(injected, "any at step 1")
    injected.container().line_queue.put("step=1")
    wait_until(lambda: rehearsed.record.faults, "the fault")
    (fault,) = rehearsed.record.faults
    assert fault.applied and fault.kind in ("kill rank", "freeze rank", "slow rank")
    injected.container().end(0)
    wait_until_ended(rehearsed)


def service_of(rehearsed) -> Service:
    service = Service(rehearsed.settings, None)
    service.jobs["arn"] = rehearsed
    return service


@pytest.mark.slow
def test_a_fault_by_hand(injected):
    rehearsed = with_faults(injected)
    container = injected.container()
    wait_until(lambda: rehearsed.record.secondary == "Training")
    service = service_of(rehearsed)
    said = service.inject({"name": "job", "fault": "kill rank 0 of algo-1"})
    assert said == "kill rank 0 of algo-1 in job"
    assert container.process.wait() == -signal.SIGKILL
    (fault,) = rehearsed.record.faults
    assert (fault.why, fault.target) == ("by hand", "rank 0")
    container.end(1)
    record = wait_until_ended(rehearsed)
    assert judge(record) == "failed without a reason"
    for order, words in (
        ({"name": "job", "fault": "kill rank"}, "job is Failed; a fault is for a job in Training"),
        ({"name": "job", "fault": "kill rank of algo-3"}, "found algo-3, expected algo-1"),
        ({"name": "none", "fault": "kill rank"}, "found 'none', expected one of: job"),
        ({"name": "job", "fault": "melt"}, "FAULT: found 'melt'"),
        ({"name": "job"}, "expected an object of fault, name"),
        ({"name": "job", "fault": 3}, "expected an object of fault, name"),
        ([], "expected an object of fault, name"),
    ):
        with pytest.raises(ValueError, match=words):
            service.inject(order)


@pytest.mark.slow
def test_a_job_that_does_not_move_after_a_fault_hangs(injected):
    rehearsed = with_faults(injected, "freeze rank at step 3", hang_after=0.5)
    container = injected.container()
    container.line_queue.put("step=3")
    wait_until(lambda: rehearsed.record.faults, "the fault")
    container.line_queue.put("step=3 it is said once more, and there is no new step")
    record = wait_until_ended(rehearsed)
    assert record.hung and judge(record) == "hung" and record.status == "Failed"
    assert "no new step for 0.5 s (--hang-after)" in record.failure
    assert container.signals == ["SIGKILL"]
    moved = max(record.faults[0].time, record.attempts[0].points[0].time)
    assert record.training_end - moved >= 0.5


@pytest.mark.slow
def test_without_a_fault_nothing_hangs(injected):
    rehearsed = with_faults(injected, hang_after=0.05)
    injected.container().line_queue.put("step=3")
    time.sleep(0.3)
    injected.container().end(0)
    assert wait_until_ended(rehearsed).status == "Completed"


@pytest.mark.slow
def test_what_lasts_ends_with_its_attempt(injected):
    """A thread slows the rank: it ends, too."""
    rehearsed = with_faults(injected, "slow rank at step 3")
    injected.container().line_queue.put("step=3")
    wait_until(lambda: rehearsed.record.faults, "the fault")
    injected.container().end(0)
    record = wait_until_ended(rehearsed)
    assert record.faults[0].ended is None
    wait_until(lambda: state_of(injected) != "T")


# The verdict


def hit(**fields) -> Record:
    """Return a record with a fault that happened, and one that did not."""
    faults = [
        Fault(20.0, "algo-1", "freeze rank", "rank 1", 10, "freeze rank at step 10", 25.0),
        Fault(30.0, "algo-1", "cut network", "", None, "by hand", failed="it needs root"),
    ]
    return replace(interrupted(), faults=faults, **fields)


def compared(verdict: Verdict) -> Comparison:
    return Comparison("job-left-alone", verdict, "of model.pt", 1.0, 1.0, {})


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "completed, not compared"),
        ({"comparison": compared(Verdict.NONE)}, "completed, not compared"),
        ({"comparison": compared(Verdict.SAME_BITS)}, "same bits"),
        ({"comparison": compared(Verdict.OTHER_BITS)}, "other bits"),
        (
            {"status": "Failed", "failure": "AlgorithmError: no loss, exit code: 1"},
            "failed with a reason",
        ),
        (
            {"status": "Failed", "failure": "AlgorithmError: , exit code: 137"},
            "failed without a reason",
        ),
        ({"status": "Failed", "failure": "InternalServerError: x", "hung": True}, "hung"),
        ({"status": "Stopped"}, "stopped"),
        ({"status": "InProgress"}, None),
    ],
)
def test_the_verdict_on_a_job_that_had_faults(tmp_path, fields, verdict):
    record = hit(**fields)
    assert judge(record) == goodput_data.describe(record)["verdict"] == verdict
    text = write_page(record, tmp_path).text
    assert (f"After them: {verdict}" in text) == (verdict is not None)


def test_faults_are_in_the_report_and_said_in_words(tmp_path):
    text = write_page(hit(), tmp_path).text
    assert "+20 sfreeze rankalgo-1rank 1105 sfreeze rank at step 10" in text
    assert "+30 scut networkalgo-1––did not happen: it needs rootby hand" in text
    # The timeline has the first one, drawn and in its table.
    assert len(write_page(hit(), tmp_path).having("line", "fault")) == 1
    assert "+20 salgo-1fault, freeze rank, rank 1, freeze rank at step 105 s" in text
    assert "fault, cut network" not in text
    first, second = (describe_injection(0.0, fault) for fault in hit().faults)
    assert first == (
        "fault after 20 s at step 10: freeze rank of algo-1, rank 1, freeze rank at step 10"
    )
    assert second == (
        "fault after 30 s: cut network of algo-1, by hand; it did not happen: it needs root"
    )
    assert judge(replace(job(), faults=hit().faults[1:])) is None


# Containers


@pytest.mark.parametrize(("name", "is_here"), [("0123abcd", True), ("another", False)])
def test_a_containers_first_process_is_one_of_this_machine(monkeypatch, name, is_here):
    """An engine may be on another machine, where the same number is another process's."""
    groups = "0::/system.slice/docker-0123abcd.scope\n"
    monkeypatch.setattr(Path, "read_text", lambda path: {"/proc/77/cgroup": groups}[str(path)])
    assert process_of_container(77, name) == (77 if is_here else None)


def test_a_container_that_has_ended_has_no_process():
    assert process_of_container(0, "x") is None


@pytest.fixture
def library(monkeypatch, tmp_path) -> Path:
    """A stand-in for the library of libfaketime, which is not needed itself."""
    (tmp_path / "libfaketime/vendor/libfaketime/src").mkdir(parents=True)
    (tmp_path / "libfaketime/__init__.py").touch()
    file = tmp_path / "libfaketime/vendor/libfaketime/src/libfaketime.so.1"
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "libfaketime", raising=False)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", ["processes", "docker"])
def test_the_clock_of_a_host_is_shifted_for_a_time(injected, library, name):
    """A container has the file and the library in a folder of its own."""
    started = []
    start = injected.engine.start
    injected.engine.name = name
    injected.engine.check_clock = lambda *_: None
    injected.engine.start = lambda *arguments: started.append(arguments[-1]) or start()
    rehearsed = with_faults(injected, "shift clock at step 3 for 0.3s")
    container = injected.container()
    file = injected.folder / "work/job/1/algo-1/clock/shift"
    in_container = name == "docker"
    assert started[0]["FAKETIME_TIMESTAMP_FILE"] == (
        "/opt/rehearsal-clock/shift" if in_container else str(file)
    )
    assert started[0]["LD_PRELOAD"] == (
        "/opt/rehearsal-clock/libfaketime.so.1" if in_container else str(library)
    )
    assert file.with_name("libfaketime.so.1").exists() == in_container
    host = Layout(injected.folder / "work/job/1/algo-1", None)
    assert host.mounts[file.parent] == "/opt/rehearsal-clock"
    assert file.read_text() == "+0\n"
    container.line_queue.put("step=3")
    wait_until(lambda: rehearsed.record.faults, "the fault")
    (fault,) = rehearsed.record.faults
    assert (fault.target, fault.failed) == ("3600 s ahead", "")
    wait_until(lambda: fault.ended is not None, "its end")
    assert file.read_text() == "+0\n"
    container.end(0)
    wait_until_ended(rehearsed)


@pytest.mark.slow
def test_the_fault_says_why_an_image_has_no_other_clock(injected, library):
    def check(*_):
        raise CannotInject("libfaketime does not shift the clock of this image: no date")

    injected.engine.name = "docker"
    injected.engine.check_clock = check
    started = []
    start = injected.engine.start
    injected.engine.start = lambda *arguments: started.append(arguments[-1]) or start()
    resources = {"ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 2}}
    injected.settings = {"faults": [parse("shift clock at step 3 of algo-2")]}
    rehearsed = injected.job(**resources)
    container = injected.container(1)
    container.line_queue.put("step=3")
    wait_until(lambda: rehearsed.record.faults, "the fault")
    (fault,) = rehearsed.record.faults
    assert fault.failed == "libfaketime does not shift the clock of this image: no date"
    assert [variables.get("LD_PRELOAD") for variables in started] == [None, None]
    for each in injected.engine.containers:
        each.end(0)
    wait_until_ended(rehearsed)


@pytest.mark.slow
def test_without_libfaketime_a_clock_is_not_shifted(injected, monkeypatch):
    monkeypatch.setitem(sys.modules, "libfaketime", None)
    rehearsed = with_faults(injected, "shift clock at step 3")
    container = injected.container()
    container.line_queue.put("step=3")
    wait_until(lambda: rehearsed.record.faults, "the fault")
    (fault,) = rehearsed.record.faults
    assert fault.failed == "it needs libfaketime (the extra `clock`), which is not here"
    container.end(0)
    assert judge(wait_until_ended(rehearsed)) is None
