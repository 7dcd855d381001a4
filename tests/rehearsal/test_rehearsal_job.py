"""One job from its creation to its end, without an engine: faults, interruptions, its report."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rehearsed_jobs import (
    SPOT_FIELDS,
    SYNC_SETTINGS,
    Container,
    jobs_without_engine,  # noqa: F401  the fixture rehearsed
    wait_until_ended,
)
from waiting import wait_until

from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.aws.errors import Refused
from sagemaker_rehearsal.engines import processes
from sagemaker_rehearsal.engines.processes import Process, Processes
from sagemaker_rehearsal.faults import schedule
from sagemaker_rehearsal.jobs.job import MAX_NOTES, Job
from sagemaker_rehearsal.jobs.record import MAX_RESULTS, Record
from sagemaker_rehearsal.report import page
from sagemaker_rehearsal.report.resumes import describe_resume

SPOT = {"EnableManagedSpotTraining": True}


def test_a_report_that_fails(rehearsed):
    def fail(*_) -> None:
        raise TypeError("a fault")

    rehearsed.reported = fail
    job = rehearsed.job()
    rehearsed.container().end(0)
    record = wait_until_ended(job)
    assert (record.status, record.secondary, record.failure) == ("Completed", "Completed", None)
    assert record.notes == ["its report could not be written: TypeError: a fault"]


def test_a_log_that_cannot_be_written(rehearsed):
    """The job continues, as its container is well."""
    job = rehearsed.job()
    host = rehearsed.container()
    (file_name,) = job.logs.last
    (job.folder / "logs" / f"{file_name}.log").mkdir()
    host.line_queue.put("step=3")
    host.line_queue.put("step=4")
    host.end(0)
    record = wait_until_ended(job)
    assert (record.status, record.step) == ("Completed", 4)
    assert record.notes == [f"the log of {file_name} could not be written: Is a directory"]


@pytest.mark.parametrize("faulty_step", ["network", "image", "start"])
def test_a_fault_at_a_start(rehearsed, faulty_step):
    rehearsed.engine.faults[faulty_step] = KeyError("x" * 5000)
    record = wait_until_ended(rehearsed.job())
    assert record.status == "Failed" and len(record.failure) == 1024
    assert record.failure.startswith("InternalServerError: the rehearsal failed: KeyError: 'xxx")
    assert not (rehearsed.folder / "work/job").exists()
    assert all(instance.released for attempt in record.attempts for instance in attempt.instances)


def test_a_fault_at_an_attempts_end(rehearsed):
    rehearsed.engine.faults["close"] = RuntimeError("a fault")
    job = rehearsed.job()
    rehearsed.container().end(0)
    record = wait_until_ended(job)
    assert (record.status, record.failure) == ("Completed", None)
    assert record.notes == ["what an attempt has left could not be removed: RuntimeError: a fault"]
    assert not (rehearsed.folder / "work/job").exists()


def test_a_fault_at_the_log(rehearsed, monkeypatch):
    monkeypatch.setattr(rehearsed.client, "put_log_events", lambda **_: 1 / 0)
    job = rehearsed.job()
    rehearsed.container().line_queue.put("a line")
    rehearsed.container().end(0)
    record = wait_until_ended(job)
    assert record.status == "Completed"
    assert record.notes == ["log lines were lost: ZeroDivisionError: division by zero"]


def test_a_thread_that_cannot_start(rehearsed, monkeypatch):
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread._target and thread._target.__name__ == "_send":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    record = wait_until_ended(rehearsed.job())
    assert record.status == "Failed" and "can't start new thread" in record.failure


def test_a_job_whose_own_thread_cannot_start(rehearsed, monkeypatch):
    """Whoever waits for its end sees a failure with a reason.

    There is a report, and no files are left.
    """

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reported = []
    rehearsed.reported = lambda record, folder: reported.append(record.status)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    record = rehearsed.job().record
    assert (record.status, record.secondary, reported) == ("Failed", "Failed", ["Failed"])
    assert (
        record.failure
        == "InternalServerError: the rehearsal failed: RuntimeError: can't start new thread"
    )
    assert not (rehearsed.folder / "work/job").exists()


@pytest.mark.parametrize(
    "line", ["resuming from step " + "1" * 5000, "step=" + "9" * 5000, "a=" + "1" * 100_000 + "x"]
)
def test_a_line_without_progress(rehearsed, line):
    job = rehearsed.job()
    rehearsed.container().line_queue.put(f" {line}")
    rehearsed.container().end(0)
    assert wait_until_ended(job).status == "Completed"


def test_notes_without_end(rehearsed):
    job = rehearsed.job()
    for number in range(2 * MAX_NOTES):
        job.note(f"note {number}")
    rehearsed.container().end(0)
    notes = wait_until_ended(job).notes
    assert len(notes) == MAX_NOTES + 1 and notes[-2:] == [
        f"note {MAX_NOTES - 1}",
        "more notes are left out",
    ]


@pytest.mark.parametrize(
    ("fields", "line", "reason"),
    [
        (SPOT, "step=4", "the job's training ended after 0 s, at step 4"),
        (SPOT, "loss=4", "the job's training ended after 0 s, without a line with step="),
        ({}, "step=4", "the job is not a spot job (EnableManagedSpotTraining)"),
    ],
)
def test_a_rule_that_never_came_due_is_reported_with_the_reason(rehearsed, fields, line, reason):
    texts = ["at step 5", "at 1h of any unwarned"]
    rehearsed.interrupt = [schedule.parse(text) for text in texts]
    reported = []
    rehearsed.reported = lambda record, folder: reported.append(record.never_due)
    job = rehearsed.job(**fields)
    rehearsed.container().line_queue.put(line)
    rehearsed.container().end(0)
    record = wait_until_ended(job)
    told = [f"--interrupt={text!r} never came due: {reason}" for text in texts]
    assert record.never_due == told and reported == [told]


def test_a_rule_that_came_due_is_not_reported(rehearsed):
    rehearsed.interrupt = [schedule.parse("at step 3"), schedule.parse("at step 99")]
    job = rehearsed.job(**SPOT)
    rehearsed.container().line_queue.put("step=3")
    rehearsed.container(1).end(0)
    told = wait_until_ended(job).never_due
    assert len(told) == 1 and told[0].startswith("--interrupt='at step 99' never came due: ")


def test_a_job_that_failed_before_its_training_had_no_rule_due(rehearsed):
    rehearsed.interrupt = [schedule.parse("at step 3")]
    rehearsed.engine.faults["start"] = KeyError("x")
    (told,) = wait_until_ended(rehearsed.job(**SPOT)).never_due
    assert told.endswith("never came due: the job ended before its training began")


@pytest.mark.slow
def test_a_job_that_does_not_end_is_left_and_none_starts(rehearsed, monkeypatch, capsys):
    monkeypatch.setattr("sagemaker_rehearsal.api.service.KILL_SECONDS", 0.2)
    job = rehearsed.job()
    container = rehearsed.container()
    container.on_signal = lambda _: None  # it cannot be killed
    service = Service(None, None)
    service.jobs["arn"] = job
    immediately = threading.Event()
    immediately.set()
    service.close(immediately)
    assert capsys.readouterr().out == "left without a report, as it does not end: job\n"
    assert job.is_alive()
    service.settings = job.settings
    service.place = lambda *_: job.place
    with pytest.raises(Refused, match="The rehearsal is ending"):
        service.CreateTrainingJob(job.request, "us-east-1")
    container.end(137)
    assert wait_until_ended(job).status == "Stopped"


def interrupt_by_hand(job: Job, **order) -> str:
    """Take instances of a job away by hand."""
    service = Service(None, None)
    service.jobs["arn"] = job
    return service.interrupt({"name": "job", "hosts": [], "warned": True, "gap": 0.0} | order)


@pytest.mark.slow
def test_an_interruption_is_recorded_when_the_instance_is_taken(rehearsed):
    """The program may end two minutes later, which does not count."""
    job = rehearsed.job(**SPOT_FIELDS)
    container = rehearsed.container()
    wait_until(lambda: job.record.secondary == "Training")
    container.on_signal = lambda _: None  # it does not end at once
    time_before = time.time()
    assert interrupt_by_hand(job, gap=0.25) == "algo-1 of job taken away, warned"
    wait_until(lambda: container.signals == ["SIGTERM"])
    (interruption,) = job.record.interruptions
    assert time_before <= interruption.time <= time.time() and (
        interruption.hosts,
        interruption.warned,
        interruption.gap,
    ) == (
        ["algo-1"],
        True,
        0.25,
    )
    assert job.record.secondary == "Interrupted"
    assert job.record.attempts[0].instances[0].ended is None
    container.end(0)
    rehearsed.container(1).end(0)
    record = wait_until_ended(job)
    assert [transition.status for transition in record.transitions].count("Interrupted") == 1
    assert record.status == "Completed" and len(record.interruptions) == 1


@pytest.mark.slow
def test_the_record_tells_why_a_job_did_not_continue_from_its_newest_checkpoint(rehearsed):
    layouts = []
    start = rehearsed.engine.start

    def start_and_note(host, number, image, command, layout, *_) -> Container:
        layouts.append(layout)
        return start()

    rehearsed.engine.start = start_and_note
    rehearsed.client.get_paginator = lambda _: SimpleNamespace(paginate=lambda **_: [{}])
    rehearsed.sync = replace(SYNC_SETTINGS, lag=60.0)
    job = rehearsed.job(**SPOT_FIELDS, CheckpointConfig={"S3Uri": "s3://bucket/ck"})
    container = rehearsed.container()
    (layouts[0].folder / "checkpoints/step-000000044.ckpt").write_text("x")
    wait_until(lambda: job.record.secondary == "Training")
    interrupt_by_hand(job)
    container = rehearsed.container(1)
    container.line_queue.put("resuming from step 20: /opt/ml/checkpoints/step-000000020.ckpt")
    container.end(0)
    record = wait_until_ended(job)
    origin, _, why_not = describe_resume(record, 1).partition("; not from step 44: ")
    assert origin == "step 20, step-000000020.ckpt"
    assert why_not.startswith("step-000000044.ckpt was not in S3: its copy ")
    attempts = record.as_json()["attempts"]
    assert attempts[1]["resumed_from"] == "step-000000020.ckpt"
    assert attempts[0]["instances"][0]["saved"]["step"] == 44


WRONG_ORDERS = [
    None,
    [],
    "x",
    1,
    {},
    {"name": "job"},
    {"hosts": "algo-1"},
    {"hosts": [1]},
    {"hosts": None},
    {"hosts": [["a"]]},
    {"hosts": ["algo-9"]},
    {"gap": "x"},
    {"gap": math.nan},
    {"gap": -1},
    {"gap": math.inf},
    {"gap": True},
    {"gap": None},
    {"gap": 10**400},
    {"gap": 1e300},
    {"warned": "no"},
    {"warned": 1},
    {"warned": None},
    {"name": 1},
    {"name": ["job"]},
    {"name": "a\nb"},
    {"more": 1},
    {"name": None},
    {"name": "\udc80" * 10},
]


@pytest.mark.parametrize("wrong", WRONG_ORDERS, ids=ascii)
def test_a_wrong_order_is_refused(rehearsed, wrong):
    job = rehearsed.job(**SPOT_FIELDS)
    container = rehearsed.container()
    wait_until(lambda: job.record.secondary == "Training")
    service = Service(None, None)
    service.jobs["arn"] = job
    order = {"name": "job", "hosts": [], "warned": True, "gap": 0.0}
    is_a_change = isinstance(wrong, dict) and wrong not in ({}, {"name": "job"})
    with pytest.raises(ValueError, match="found .*, expected ") as refused:
        service.interrupt(order | wrong if is_a_change else wrong)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
    container.end(0)
    assert wait_until_ended(job).interruptions == []


@pytest.mark.parametrize(
    "rule", ["at 1s gap 99999999999h", "at 99999999999h", "every 9999999999999h"]
)
def test_a_rule_of_a_time_that_never_comes(rule):
    with pytest.raises(ValueError, match="--interrupt: found .*, expected times up to 672h"):
        schedule.parse(rule)


def test_a_stop_after_a_time_that_no_timer_has(rehearsed):
    job = rehearsed.job(StoppingCondition={"MaxRuntimeInSeconds": 2**62})
    rehearsed.container().end(0)
    assert wait_until_ended(job).status == "Completed"


# Processes

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="a PID namespace needs root"
)


@pytest.fixture
def start_process(monkeypatch) -> Iterator[Callable]:
    """Start a command line as a host's first process."""
    monkeypatch.setattr(processes.bridge, "possible", lambda: False)
    engine = Processes(Path(sys.executable), "owner", lambda _: None)
    started_processes = []

    def start(*command: str) -> Process:
        streams = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        started_processes.append(Process(subprocess.Popen([*engine.unshare, *command], **streams)))
        return started_processes[-1]

    yield start
    for process in started_processes:
        process.remove()
        process.outer.stdout.close()


@needs_namespaces
@pytest.mark.parametrize("status", [0, 3, 137])
def test_the_exit_status_of_a_process(start_process, status):
    process = start_process(
        "bash", "-c", f"echo $$ $(ls /proc | grep -c '^[0-9]*$'); exit {status}"
    )
    lines = list(process.lines())
    assert lines[0].split()[0] == "1" and int(lines[0].split()[1]) < 8 and len(lines) == 1
    assert process.wait() == status


@needs_namespaces
def test_a_process_that_is_killed(start_process):
    """Its status is a shell's for SIGKILL, and no message about it is in its log."""
    process = start_process(
        "bash", "-c", "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done"
    )
    lines = process.lines()
    assert next(lines) == "ready"
    process.signal("SIGTERM")
    assert next(lines) == "heard"
    process.signal("SIGKILL")
    assert list(lines) == [] and process.wait() == 137


@needs_namespaces
def test_a_host_ends_with_a_rehearsal_that_is_killed(start_process):
    """Without an end of its own: who writes to a log that nobody reads ends anyway."""
    number = f"{1e5 + time.time() % 1e4:.4f}"  # of seconds, and the name by which it is found
    command = start_process("true").outer.args[:-1]
    starting = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)"
    rehearsal = subprocess.Popen([sys.executable, "-c", starting, *command, "sleep", number])
    find = ["pgrep", "--full", "--exact", f"sleep {number}"]
    try:
        wait_until(lambda: subprocess.run(find, capture_output=True).stdout, "the host")
        rehearsal.kill()
        wait_until(lambda: not subprocess.run(find, capture_output=True).stdout, "its end")
    finally:
        rehearsal.kill()
        for pid in subprocess.run(find, capture_output=True).stdout.split():
            os.kill(int(pid), signal.SIGKILL)


# Capacity


def test_without_capacity_an_on_demand_job_fails_as_on_aws(rehearsed):
    rehearsed.settings = {"no_capacity": ["ml.p5.48xlarge", "ml.m5.large"]}
    record = wait_until_ended(rehearsed.job())
    assert record.status == "Failed" and not record.attempts
    assert record.failure.startswith("CapacityError: Unable to provision requested ML compute cap")
    assert record.failure.endswith("error: ml.m5.large")


def test_without_capacity_a_spot_job_waits_for_its_longest_time(rehearsed):
    rehearsed.settings = {"no_capacity": ["ml.m5.large"]}
    stopping = {"StoppingCondition": {"MaxRuntimeInSeconds": 1, "MaxWaitTimeInSeconds": 1}}
    record = wait_until_ended(rehearsed.job(**SPOT, **stopping))
    assert record.secondary == "MaxWaitTimeExceeded" and not record.attempts


def test_a_job_runs_on_the_type_that_was_chosen(rehearsed):
    resources = {"InstancePreferences": [{"InstanceType": "ml.g5.xlarge", "InstanceCount": 2}]}
    resources |= {"SelectedInstanceType": "ml.g5.xlarge", "SelectedInstanceCount": 2}
    job = rehearsed.job(ResourceConfig=resources)
    for number in range(2):
        rehearsed.container(number).end(0)
    record = wait_until_ended(job)
    assert [(host.host, host.instance_type) for host in record.attempts[0].instances] == [
        ("algo-1", "ml.g5.xlarge"),
        ("algo-2", "ml.g5.xlarge"),
    ]


# Results, and the end of the log


def test_what_the_test_has_found_is_in_the_report(rehearsed, tmp_path):
    job = rehearsed.job(CheckpointConfig=None, OutputDataConfig={"S3OutputPath": "s3://bucket/o"})
    host = rehearsed.container()
    for line in ("step=1 loss=2", "test_loss=0.5 test_acc=0.25", "test_acc=0.875 x=1", "a test"):
        host.line_queue.put(line)
    host.end(0)
    record = wait_until_ended(job)
    assert record.results == {"test_loss": 0.5, "test_acc": 0.875} and record.log_end == []
    sections = page.make_sections(replace(record, request=record.request | CHECKPOINTS).masked())
    cells = [cell.text for cell in sections["results"].iter("td")]
    assert dict(zip(cells[::2], cells[1::2], strict=True)) == {
        "test_acc": "0.875",
        "test_loss": "0.5",
        "model": "s3://bucket/o/job/output/model.tar.gz",
        "output": "s3://bucket/o/job/output/output.tar.gz",
        "checkpoints": "s3://bucket/ck",
    }
    figures = [text for text in sections["figures"].itertext()]
    assert figures[figures.index("test_acc") + 1] == "0.875"


CHECKPOINTS = {"CheckpointConfig": {"S3Uri": "s3://bucket/ck"}}


def test_a_report_without_results(rehearsed):
    rehearsed.settings = {"no_capacity": ["ml.m5.large"]}
    sections = page.make_sections(wait_until_ended(rehearsed.job()))
    assert len(sections["results"]) == len(sections["log-end"]) == 0


def test_results_have_a_limit():
    record = Record("job", {}, 0.0)
    for number in range(MAX_RESULTS + 9):
        record.note_results(f"test{number}=1")
    record.note_results("test1=2 tests latest=3 untested=4 test_nan=nan")
    assert len(record.results) == MAX_RESULTS and record.results["test1"] == 2


def test_the_end_of_the_log_of_the_host_that_failed_first(rehearsed):
    job = rehearsed.job(
        ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 2},
        Environment={"API_TOKEN": "very-secret-word"},
    )
    first, second = rehearsed.container(0), rehearsed.container(1)
    first.line_queue.put("of algo-1")
    for number in range(60):
        second.line_queue.put(f"line {number} \x1b[2Jvery-secret-word")
    second.end(3)
    record = wait_until_ended(job)
    assert record.failed_host == "algo-2" and len(record.log_end) == 50
    assert record.log_end[-1] == "line 59 very-secret-word"  # no control sequence
    kept = record.masked()
    assert kept.log_end[-1] == "line 59 ******"
    section = page.make_sections(kept)["log-end"]
    title, lines = section
    assert title.text == "End of the log of algo-2, which failed first"
    assert lines.text.splitlines()[-1] == "line 59 ******" and len(lines.text.splitlines()) == 50
    assert "very-secret-word" not in json.dumps(record.as_json())
