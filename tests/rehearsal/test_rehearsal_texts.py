"""Whatever text a job prints, leaves or is given: it harms no thread, report or other job."""

import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import hostile_texts
import pytest
from records import interrupted
from rehearsed_jobs import (
    HANG_SECONDS,
    SYNC_SETTINGS,
    Client,
    Container,
    Engine,
    Rehearsed,
    wait_until_ended,
)
from test_rehearsal_report import Page

from sagemaker_lightning.contract.atomic_files import json_text
from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.jobs import channels, checkpoint_sync, logs
from sagemaker_rehearsal.jobs.channels import JobFailed
from sagemaker_rehearsal.jobs.job import MAX_NOTE_CHARACTERS, JobContext
from sagemaker_rehearsal.jobs.masking import Mask
from sagemaker_rehearsal.jobs.record import MAX_PAIRS, point
from sagemaker_rehearsal.report import page


class HostileEngine(Engine):
    """An engine whose hosts leave hostile files, print hostile lines, and end."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw = draw

    def start(self, host, number, image, command, layout, *_) -> Container:
        """Start a host, which leaves files and prints."""
        draw = self.draw
        for below in ("checkpoints", "model", "output/data"):
            for _ in range(draw.randint(0, 3)):
                path = os.fsencode(layout.folder / below / hostile_texts.name(draw, 40))
                Path(os.fsdecode(path[:200])).write_text("x")
                moment = draw.choice((-(10**10), 0, 2**33, 2**40))
                os.utime(path[:200], (moment, moment))
        failure = hostile_texts.text(draw).encode(errors="surrogatepass")
        (layout.folder / "output/failure").write_bytes(failure + draw.randbytes(draw.randint(0, 9)))
        container = super().start()
        for _ in range(draw.randint(0, 30)):
            container.line_queue.put(
                hostile_texts.text(draw).encode().decode(errors="replace").replace("\n", " ")
            )
        container.end(draw.choice((0, 0, 1, 137)))
        return container


class Store(Client):
    """A client with hostile objects among the checkpoints, if it has any."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.keys = [f"ck/{hostile_texts.text(draw, 60)}" for _ in range(draw.choice((0, 0, 0, 2)))]

    def get_paginator(self, _: str) -> "Store":
        """Return what lists the objects."""
        return self

    def paginate(self, **_) -> list[dict]:
        """Return a page of objects."""
        return [{"Contents": [{"Key": key, "Size": 1} for key in self.keys]}]

    def download_file(self, bucket: str, key: str, path: str, **_) -> None:
        Path(path).write_text("x")


def hostile_request(draw: random.Random) -> dict:
    """Return a request with texts wherever the service's model lets a person put them."""

    def words(most: int) -> str:
        return hostile_texts.text(draw, most).replace("\n", " ").replace("\0", " ") or "x"

    return {
        "TrainingJobName": "hostile",
        "RoleArn": "arn:aws:iam::123456789012:role/rehearsal",
        "AlgorithmSpecification": {
            "TrainingImage": "image",
            "TrainingInputMode": "File",
            "ContainerArguments": [words(256) for _ in range(3)],
            "MetricDefinitions": [{"Name": "m", "Regex": draw.choice((r"=(\S+)", "(.*)", "x*"))}],
        },
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
        "CheckpointConfig": {"S3Uri": "s3://bucket/ck"},
        "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        "HyperParameters": {words(250): words(2500) for _ in range(3)},
        "Environment": {"A": words(500), "SECRET": words(500)},
        "Tags": [{"Key": draw.choice(("a", "token")), "Value": draw.choice(("b", "c=d"))}],
        words(3000): {"deep": words(3000)},
    }


def report(record, folder: Path) -> None:
    """Write a job's report, as a rehearsal does (session.py)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json_text(record.as_json()))
    page.write(record, folder / "report.html", price=1.0, spot_price=0.5)


def run_hostile_job(folder: Path, seed: int) -> None:
    """Run a job that does its worst beside another one, and check what is left of both."""
    draw = random.Random(seed)
    rehearsed = Rehearsed(folder)
    rehearsed.reported = report
    other = rehearsed.job("other")
    host = rehearsed.container()
    store = Store(draw)
    place = JobContext(HostileEngine(draw), lambda _: store, folder / "work", {}, report)
    service = Service(other.settings, lambda *_: place)
    service.jobs["other"] = other
    request = hostile_request(draw)
    service.answer("CreateTrainingJob", request, "us-east-1")
    (job,) = (job for job in service.jobs.values() if job is not other)
    record = wait_until_ended(job)
    assert "the rehearsal failed" not in (record.failure or ""), record.failure
    assert not any("could not be" in note for note in record.notes), record.notes
    text = (job.folder / "report.html").read_text()
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    Page(text)
    assert json.loads((job.folder / "job.json").read_text())["status"] == record.status
    service.answer("DescribeTrainingJob", {"TrainingJobName": "hostile"}, "us-east-1")
    host.line_queue.put("step=1")
    host.end(0)
    assert wait_until_ended(other).status == "Completed"


def test_a_failure_file_of_signs_is_reported(tmp_path):
    """The mask of 1,000 signs once recursed until Python gave up, and there was no report."""
    failure = "=" * 1000
    record = replace(interrupted(), failure=failure, status="Failed")
    report(record, tmp_path)
    assert failure in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "job.json").read_text())["failure"] == failure
    mask = Mask({})
    assert mask.text("a=" * 500 + "token=abcdefgh=x") == "a=" * 500 + "token=******"
    assert mask.text("x abcdefgh=x") == "x ******"


def test_control_characters_of_a_job_are_escaped_in_its_report(tmp_path):
    record = interrupted()
    text = "a\x1b[2Jb\0c\x9bd\u202ee\udc80f\ng"
    record.failure = text
    record.name = text
    record.notes = [text]
    record.attempts[1].proved = text
    record.request["HyperParameters"] = {text: text}
    report(record, tmp_path)
    written = (tmp_path / "report.html").read_text()
    assert written.count("a\\x1b[2Jb\\x00c\\x9bd\\u202ee\\udc80f\ng") >= 4
    assert all(letter.isprintable() or letter == "\n" for letter in written)


@pytest.mark.parametrize("key", ["ck/a\0b", "ck/\0", "ck/a/\0/b", "ck/../x", "ck/a/../../x"])
def test_an_s3_key_that_is_not_the_name_of_a_file_fails_its_job_with_a_line(tmp_path, key):
    store = Store(random.Random(0))
    store.keys = [key]
    with pytest.raises(JobFailed, match="the S3 key .* is not a name of a file"):
        checkpoint_sync.restore(store, "s3://bucket/ck", tmp_path / "checkpoints")
    source = {"S3Uri": "s3://bucket/ck/"}
    with pytest.raises(JobFailed, match="the S3 key .* is not a name of a file"):
        channels.fetch(store, source, tmp_path / "channel", "role", [], lambda: None)


def test_a_note_and_a_line_of_progress_have_their_limits(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    job = rehearsed.job()
    job.note("=" * 10**6)
    rehearsed.container().end(0)
    assert wait_until_ended(job).notes == ["=" * MAX_NOTE_CHARACTERS]
    progress = point("step=3 " + "".join(f"n{number}=1 " for number in range(1000)), 0.0)
    assert len(progress.values) == MAX_PAIRS
    assert set(point(f"step=3 {'x' * 1000}=1 loss=2", 0.0).values) == {"step", "loss"}


def test_long_lines_of_one_host_lose_no_lines_of_another(tmp_path):
    """A request of CloudWatch Logs has a limit: what is refused with it would be lost."""
    sent: list[list[dict]] = []

    class Limited(Client):
        def put_log_events(self, *, logEvents: list, **_) -> None:  # noqa: N803
            if len(json.dumps(logEvents)) > 8 * 2**20 or logEvents[0]["message"] == "bad":
                raise OSError("a fault")
            sent.append(logEvents)

    job_logs = logs.Logs(Limited(), "job", tmp_path)
    for host in ("algo-1", "algo-2"):
        job_logs.open(host)
    long_line = "\x01" * logs.MAX_EVENT_BYTES
    job_logs.line("algo-1", "bad")
    for _ in range(40):
        job_logs.line("algo-1", long_line)
    job_logs.line("algo-2", "mine")
    with pytest.raises(OSError, match="a fault"):
        job_logs.send()
    messages = [event["message"] for events in sent for event in events]
    assert messages.count(long_line) >= 37 and messages[-1] == "mine"
    assert all(len(line) <= logs.SHOWN_CHARACTERS for line in job_logs.shown()["algo-1"])


def test_a_fault_at_a_look_at_the_checkpoints_is_not_the_last_look(tmp_path):
    uploader = checkpoint_sync.Uploader(
        Client(), "s3://bucket/ck", tmp_path, SYNC_SETTINGS, (notes := []).append
    )
    looks = iter([RuntimeError("a fault"), None, None])
    done = threading.Event()

    def look() -> None:
        if error := next(looks, None):
            raise error
        done.set()

    uploader._look = look
    uploader.start()
    assert done.wait(HANG_SECONDS)
    uploader.finish()
    assert notes == ["the checkpoints could not be looked at: RuntimeError('a fault')"]


@pytest.fixture
def lost_threads(monkeypatch) -> list:
    """The errors that have ended a thread."""
    errors: list = []
    monkeypatch.setattr(threading, "excepthook", lambda error: errors.append(error.exc_value))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_hostile_job_is_reported_and_harms_no_other(tmp_path, seed, lost_threads, capsys):
    run_hostile_job(tmp_path, seed)
    assert lost_threads == [] and "Traceback" not in capsys.readouterr().err
