"""Jobs of the rehearsal without an engine: a test decides what their hosts print and do."""

import argparse
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import wait_until

from sagemaker_rehearsal import settings
from sagemaker_rehearsal.jobs import checkpoint_sync
from sagemaker_rehearsal.jobs.job import Job, JobContext
from sagemaker_rehearsal.jobs.metrics import Metrics
from sagemaker_rehearsal.jobs.record import ENDED, Record

HANG_SECONDS = 30  # what is not done by then hangs
SYNC_SETTINGS = settings.Sync(0.05, 0.0, 0.0, None, True, False, True, False)


def make_uploader(
    s3, folder: Path, uri: str = "s3://bucket/run", **more_settings
) -> checkpoint_sync.Uploader:
    """Return an Uploader of checkpoints that has not started; `notes` are its messages."""
    folder.mkdir(exist_ok=True)
    notes: list[str] = []
    sync = replace(SYNC_SETTINGS, **{"every": 0.01, "markers": False} | more_settings)
    uploader = checkpoint_sync.Uploader(s3, uri, folder, sync, notes.append)
    uploader.notes = notes
    return uploader


class Container:
    """A stand-in for a host's container; a test decides what it prints and does."""

    def __init__(self) -> None:
        self.line_queue: queue.Queue = queue.Queue()
        self.signals: list[str] = []
        self.on_signal: Callable = lambda name: self.end(143 if name == "SIGTERM" else 137)

    def end(self, status: int) -> None:
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
        self._fault("network")
        return self

    def image(self, uri: str) -> str:
        self._fault("image")
        return uri

    def start(self, *_) -> Container:
        self._fault("start")
        self.containers.append(Container())
        return self.containers[-1]

    def close(self) -> None:
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
        job_place = JobContext(
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


@pytest.fixture(name="rehearsed")
def jobs_without_engine(tmp_path) -> Rehearsed:
    return Rehearsed(tmp_path)


def wait_until_ended(job: Job) -> Record:
    """Return a job's record when it has ended."""
    wait_until(lambda: job.record.status in ENDED, "the end")
    job.join(HANG_SECONDS)
    assert not job.is_alive()
    return job.record


SPOT_FIELDS = {
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60},
}
