"""One job from its creation to its end, without an engine.

Faults, interruptions, slow metrics, logs and secrets.
"""

import argparse
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from records import interrupted

from sagemaker_lightning.contract.job_summary import HIDDEN_VARIABLES
from sagemaker_rehearsal import settings
from sagemaker_rehearsal.api.errors import Refused
from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.engines import processes
from sagemaker_rehearsal.engines.processes import Process, Processes
from sagemaker_rehearsal.jobs import logs, schedule
from sagemaker_rehearsal.jobs.attempt import Outcome
from sagemaker_rehearsal.jobs.job import MAX_NOTES, Ended, Job, Place
from sagemaker_rehearsal.jobs.masking import Mask
from sagemaker_rehearsal.jobs.metrics import Metrics
from sagemaker_rehearsal.jobs.record import (
    ENDED,
    MAX_RESTARTS,
    MAX_RESULTS,
    MAX_SKIPPED,
    Attempt,
    Record,
    Secondary,
    point,
)
from sagemaker_rehearsal.jobs.schedule import Due
from sagemaker_rehearsal.report import page
from sagemaker_rehearsal.report.resumes import describe_resume

SPOT = {"EnableManagedSpotTraining": True}
HANG_SECONDS = 30  # what is not done by then hangs
SYNC_SETTINGS = settings.Sync(0.05, 0.0, 0.0, None, True, False, True, False)


def wait_until(condition: Callable, expected: str = "it") -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{expected} has not come"
        time.sleep(0.01)


class Container:
    """A stand-in for a host's container; a test decides what it prints and does."""

    def __init__(self) -> None:
        self.line_queue: queue.Queue = queue.Queue()
        self.signals: list[str] = []
        self.on_signal: Callable = lambda name: self.end(143 if name == "SIGTERM" else 137)

    def end(self, status: int) -> None:
        """End with a status."""
        self.line_queue.put(status)

    def lines(self) -> Iterator[str]:
        """Yield the lines that a test gives it, until its end."""
        while isinstance(line := self.line_queue.get(), str):
            yield line
        self.status = line

    def wait(self) -> int:
        """Return its exit status."""
        return self.status

    def signal(self, name: str) -> None:
        """Take a signal."""
        self.signals.append(name)
        self.on_signal(name)


class Engine:
    """A stand-in for the engine that starts the hosts, and for its network."""

    name = "fake"
    interface = "eth0"

    def __init__(self) -> None:
        self.containers: list[Container] = []
        self.faults: dict[str, Exception] = {}

    def _fault(self, name: str) -> None:
        if name in self.faults:
            raise self.faults[name]

    def network(self, *_) -> "Engine":
        """Return a network."""
        self._fault("network")
        return self

    def image(self, uri: str) -> str:
        """Return an image."""
        self._fault("image")
        return uri

    def start(self, *_) -> Container:
        """Start a host."""
        self._fault("start")
        self.containers.append(Container())
        return self.containers[-1]

    def close(self) -> None:
        """End what is there."""
        for container in self.containers:
            container.end(137)
        self._fault("close")


class Client:
    """A stand-in for S3 and CloudWatch Logs."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def put_log_events(self, *, logEvents: list, **_) -> None:  # noqa: N803
        """Keep log lines."""
        self.events += [event["message"] for event in logEvents]

    def upload_fileobj(self, *_, **__) -> None:
        """Take a file."""

    def create_log_group(self, **_) -> None:
        """Make a group."""

    create_log_stream = create_log_group


class Rehearsed:
    """Jobs without an engine; their files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = Engine()
        self.client = Client()
        self.sync = SYNC_SETTINGS
        self.interrupt: list = []
        self.settings: dict = {}
        self.reported: Callable = lambda record, job_folder: None

    def job(self, name: str = "job", metrics: list | None = None, **fields) -> Job:
        """Return a job that has started."""
        request = {
            "TrainingJobName": name,
            "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
            "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1},
            "OutputDataConfig": {"S3OutputPath": "s3://bucket"},
        } | fields
        parser = argparse.ArgumentParser()
        settings.add_flags(parser)
        job_settings = replace(
            settings.from_flags(parser.parse_args([])),
            folder=self.folder / "reports",
            interrupt=self.interrupt,
            grace=HANG_SECONDS,
            sync=self.sync,
            allow=[],
            **self.settings,
        )
        job_place = Place(
            self.engine,
            lambda _: self.client,
            self.folder / "work",
            {},
            lambda *arguments: self.reported(*arguments),
        )
        record = Record(name, request, time.time())
        job = Job(record, job_place, job_settings, Metrics(metrics or []))
        job.start()
        return job

    def container(self, number: int = 0) -> Container:
        """Return a host, as soon as it has started."""
        wait_until(lambda: len(self.engine.containers) > number, "a container")
        return self.engine.containers[number]


@pytest.fixture
def rehearsed(tmp_path) -> Rehearsed:
    """Jobs without an engine."""
    return Rehearsed(tmp_path)


def wait_until_ended(job: Job) -> Record:
    """Return a job's record when it has ended."""
    wait_until(lambda: job.record.status in ENDED, "the end")
    job.join(HANG_SECONDS)
    assert not job.is_alive()
    return job.record


# Faults


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
def test_a_line_that_is_no_progress(rehearsed, line):
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
        ({}, "step=4", "the job is no spot job (EnableManagedSpotTraining)"),
    ],
)
def test_a_rule_that_never_came_due_is_told_with_the_reason(rehearsed, fields, line, reason):
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


def test_a_rule_that_came_due_is_not_told_of(rehearsed):
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
    monkeypatch.setattr("sagemaker_rehearsal.api.service.HURRY_SECONDS", 0.2)
    job = rehearsed.job()
    container = rehearsed.container()
    container.on_signal = lambda _: None  # it cannot be killed
    service = Service(None, None)
    service.jobs["arn"] = job
    hurry = threading.Event()
    hurry.set()
    service.close(hurry)
    assert capsys.readouterr().out == "left without a report, as it does not end: job\n"
    assert job.is_alive()
    service.settings = job.settings
    service.place = lambda *_: job.place
    with pytest.raises(Refused, match="The rehearsal is ending"):
        service.CreateTrainingJob(job.request, "us-east-1")
    container.end(137)
    assert wait_until_ended(job).status == "Stopped"


# Interruptions

SPOT_FIELDS = {
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60},
}


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
    assert (
        job.record.secondary == "Interrupted" and job.record.attempts[0].instances[0].ended is None
    )
    container.end(0)
    rehearsed.container(1).end(0)
    record = wait_until_ended(job)
    assert [transition.status for transition in record.transitions].count("Interrupted") == 1
    assert record.status == "Completed" and len(record.interruptions) == 1


@pytest.mark.slow
def test_the_record_tells_why_a_job_did_not_go_on_from_its_newest_checkpoint(rehearsed):
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


# Metrics


SLOW_LINES = {
    "(a+)+$": "a" * 40 + "!",
    r"^(.*?,){25}P": ",".join(map(str, range(60))),
    "(?:a?){60}a{60}": "a" * 60,
}


@pytest.mark.slow
@pytest.mark.parametrize("regex", SLOW_LINES)
def test_a_metric_that_stalls(rehearsed, regex):
    """Its definition is left out with a note; the log and the other metrics continue."""
    loss_definition = {"Name": "loss", "Regex": r"loss=(\S+)"}
    epoch_definition = {"Name": "epoch", "Regex": r"epoch=(\S+)"}
    job = rehearsed.job(
        metrics=[loss_definition, {"Name": "slow", "Regex": regex}, epoch_definition]
    )
    container = rehearsed.container()
    for line in ("loss=1", SLOW_LINES[regex], "step=7 loss=0.5 epoch=3"):
        container.line_queue.put(line)
    container.end(0)
    record = wait_until_ended(job)
    assert {name: metric["Value"] for name, metric in job.metrics.found.items()} == {
        "loss": 0.5,
        "epoch": 3.0,
    }
    assert record.notes == [
        "MetricDefinitions: the Regex of slow is too slow for this log, and used no more"
    ]
    assert (job.folder / "logs/algo-1.log").read_text().splitlines()[2] == "step=7 loss=0.5 epoch=3"
    assert job.metrics.matcher.poll() is not None  # the process of the metrics has ended


def test_metrics_whose_process_is_killed():
    metrics = Metrics([{"Name": "x", "Regex": r"x=(\d)"}, {"Name": "x", "Regex": r"y=(\d)"}])
    assert metrics.line("x=1") is None and metrics.line("y=2 \udc80\ud800 ü\u2028\n x") is None
    assert metrics.found["x"]["Value"] == 2.0
    metrics.matcher.kill()
    metrics.matcher.wait()
    assert metrics.line("x=3").startswith("metrics are no longer looked for: ")
    assert metrics.line("x=3") is None and metrics.found["x"]["Value"] == 2.0
    metrics.close()
    Metrics([]).close()


# Logs


def test_lines_of_chunks():
    chunks = [b"a\r\nb", "ü".encode()[:1], "ü".encode()[1:], b"\n\n", b"\xff c"]
    assert list(logs.lines(chunks)) == ["a", "b\u00fc", "", "\ufffd c"]
    assert list(logs.lines([])) == [] == list(logs.lines([b""]))


def test_a_line_without_end_is_several():
    """It is split: neither kept as a whole, nor copied for each chunk."""
    size = 0
    for line in logs.lines(bytes(2**16) for _ in range(1000)):
        assert len(line) <= logs.MAX_EVENT_BYTES
        size += len(line)
    assert size == 1000 * 2**16


def test_logs_of_two_jobs_of_one_name(tmp_path):
    """The files of each earlier job of that name are kept aside."""
    for number in range(3):
        rehearsed = Rehearsed(tmp_path)
        job = rehearsed.job()
        rehearsed.container().line_queue.put(f"of run {number}")
        rehearsed.container().end(0)
        wait_until_ended(job)
        (job.folder / "report.html").write_text(f"{number}")
    for name, number in (("job", 2), ("job.1", 0), ("job.2", 1)):
        assert (tmp_path / "reports" / name / "logs/algo-1.log").read_text() == f"of run {number}\n"
        assert (tmp_path / "reports" / name / "report.html").read_text() == f"{number}"


# Secrets

PASSWORD = "hunter2-hunter2"
TOKEN = "hf_" + "x1Y2" * 8
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKC\n-----END RSA PRIVATE KEY-----"
SECRETS = [
    PASSWORD,
    TOKEN,
    "MIIEpAIBAAKC",
    "of-a-tag",
    "after-a-flag",
    "AKIAABCDEFGHIJKLMNOP",
    "user:pass",
    "of-more",
]
NO_SECRET = "learning-rate-0.1"


def secret_record() -> Record:
    """Return a record with secrets in all places where a user may put them."""
    request = {
        "TrainingJobName": "job",
        "HyperParameters": {
            "db_password": f'"{PASSWORD}"',
            "hub": TOKEN,
            "lr": NO_SECRET,
            "max_tokens": "3",
        },
        "Environment": {
            "API_KEY": "of-more",
            "PEM": PEM,
            "URL": "https://user:pass@host/x",
            "PLAIN": NO_SECRET,
        },
        "Tags": [{"Key": "secret", "Value": "of-a-tag"}, {"Key": "plain", "Value": NO_SECRET}],
        "AlgorithmSpecification": {
            "TrainingImage": "image:0123456789012345678901234567890123456789",
            "ContainerEntrypoint": [
                "bash",
                "-c",
                f"export TOKEN={TOKEN}; ./run --key AKIAABCDEFGHIJKLMNOP",
            ],
            "ContainerArguments": [
                "--api_key",
                "after-a-flag",
                f"--password={PASSWORD}",
                f"--lr={NO_SECRET}",
                "--token",
            ],
        },
        "NotInTheModel": {"Password": "of-more"},
    }
    message = (
        f"the password {PASSWORD} is wrong: see https://user:pass@host/x?a=b&token={TOKEN}, "
        f"exit code: 3\n{PEM}"
    )
    record = replace(interrupted(), request=request, failure=message, notes=[message])
    record.transitions[0].message = record.interruptions[0].why = message
    return record


def test_no_secret_in_a_report_or_record(tmp_path):
    record = secret_record()
    page.write(record, tmp_path / "report.html")
    for written_text in ((tmp_path / "report.html").read_text(), json.dumps(record.as_json())):
        assert not [secret for secret in SECRETS if secret in written_text]
        assert (
            written_text.count(NO_SECRET) >= 4
            and "image:0123456789012345678901234567890123456789" in written_text
        )
        assert "exit code: 3" in written_text and written_text.count("******") > 10
    assert record.request["HyperParameters"]["hub"] == TOKEN  # the job's own request is not changed


def test_a_secret_of_few_letters_leaves_texts_alone():
    mask = Mask({"HyperParameters": {"max_tokens": "3", "token": ""}})
    assert mask.text("exit code: 3, max_tokens=3") == "exit code: 3, max_tokens=******"
    assert mask.text("") == "" and Mask({}).text("a = b  c\n") == "a = b  c\n"


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


# What ends a job, without its threads


def job_with(rule_of_retries: int | None = None, **options) -> Job:
    """Return a job of one instance whose thread does not run."""
    made = Job.__new__(Job)
    made.request = {}
    if rule_of_retries is not None:
        made.request["RetryStrategy"] = {"MaximumRetryAttempts": rule_of_retries}
    made.hosts = [SimpleNamespace(name="algo-1", instance_type=options.pop("type", "ml.m5.large"))]
    made.record = Record("job", made.request, 0.0)
    made.wishes = SimpleNamespace(stop=False)
    made.latest, made.repairs, made.settings = None, 0, SimpleNamespace(repairs=1)
    for name, value in options.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(("allowed", "lost"), [(None, 9), (2, 2), (2, 1)])
def test_as_many_retries_as_a_request_allows(allowed, lost):
    made = job_with(allowed)
    made.record.interruptions = [None] * lost
    outcome = Outcome(again=Due(["algo-1"], True, 0.0, "by hand"))
    assert made._check_retries(outcome) is outcome


def test_one_interruption_more_than_the_retries_fails_the_job():
    made = job_with(2)
    made.record.interruptions = [None] * 3
    ended = made._check_retries(Outcome(again=Due(["algo-1"], True, 0.0, "by hand")))
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
def test_a_failure_on_a_gpu_is_repaired_as_often_as_told(kind, status, again):
    made = job_with(type=kind)
    outcome = made._repair(Outcome(status, "AlgorithmError: x"))
    assert (outcome.again is not None) == again and len(made.record.interruptions) == again
    if again:
        assert outcome.again == Due(["algo-1"], True, 0.0, "repair 1 after AlgorithmError: x")
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
    made.wishes.stop = True
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

    made.wishes.next = wait
    with pytest.raises(Ended) if latest else nullcontext():
        made._wait_for_capacity(Due(["algo-1"], True, 20.0, "by hand"))
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
        "restart 1: on from step 12 within 9.3 s, 5 steps lost",
        "restart 2 in this container (at most 3 an hour): a rank failed",
    ):
        attempt.note_resume(line)
    assert (attempt.resumed, attempt.resumed_from) == (4, "step-4.ckpt")
    assert attempt.restarts == [
        "after step 17, on from step 12 within 9.3 s, 5 steps lost",
        "before the first step",
    ]
    for _ in range(MAX_RESTARTS):
        attempt.note_resume("restart 1 in this container (at most 3 an hour): x")
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
    made.wishes = SimpleNamespace(messages=queue.Queue())
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
    assert made.wishes.messages.get_nowait() == Due(["algo-1"], False, 1.0, "by hand")
    assert made.wishes.messages.empty()


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


# Variables that the launcher has taken from its environment


def test_a_variable_whose_value_was_taken_from_an_environment_is_in_no_report(rehearsed):
    """Whatever its name and its value look like."""
    value = "plain words"
    listed = {HIDDEN_VARIABLES: "MY_WORDS,ELSEWHERE"}
    job = rehearsed.job(Environment={"MY_WORDS": value, "OTHER": "shown"} | listed)
    host = rehearsed.container()
    host.line_queue.put(f"it prints {value}")
    host.end(1)
    record = wait_until_ended(job)
    kept = record.masked()
    assert kept.request["Environment"] == {"MY_WORDS": "******", "OTHER": "shown"} | listed
    assert kept.log_end == ["it prints ******"]
    assert value not in json.dumps(record.as_json())
    assert value in json.dumps(record.request)  # what the job has had


@pytest.mark.parametrize("environment", [None, {}, {"A": "b"}, {"HIDDEN": ""}])
def test_a_job_without_hidden_variables(environment):
    if environment and "HIDDEN" in environment:
        environment = {HIDDEN_VARIABLES: "", "A": "b"}
    request = {"Environment": environment}
    assert Mask(request).request == request
