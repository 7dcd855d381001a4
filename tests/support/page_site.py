"""The web page of the rehearsal with recorded jobs, and requests to it."""

import io
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from records import interrupted
from werkzeug.test import Client, TestResponse
from werkzeug.wrappers import Response

from sagemaker_rehearsal.api.gate import Closed
from sagemaker_rehearsal.api.service import Service, arn_of
from sagemaker_rehearsal.jobs.job import Control
from sagemaker_rehearsal.jobs.logs import Logs
from sagemaker_rehearsal.jobs.record import Checkpoint, Record, Transition
from sagemaker_rehearsal.web import access
from sagemaker_rehearsal.web.application import WebPage

TOKEN = "a-token-of-the-printed-address"
ORIGIN = "http://127.0.0.1:4571"
REGION = "us-east-1"


class Store:
    """A stand-in for S3."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], bytes] = {}

    def get_paginator(self, _: str) -> "Store":
        """Return what lists objects."""
        return self

    def paginate(self, *, Bucket: str, Prefix: str) -> list[dict]:  # noqa: N803
        found = [
            {"Key": key, "Size": len(content)}
            for (bucket, key), content in sorted(self.objects.items())
            if bucket == Bucket and key.startswith(Prefix)
        ]
        return [{"Contents": found}]

    def list_objects_v2(self, *, Bucket: str, Prefix: str, MaxKeys: int) -> dict:  # noqa: N803
        found = self.paginate(Bucket=Bucket, Prefix=Prefix)[0]["Contents"][:MaxKeys]
        return {"Contents": found} if found else {}

    def get_object(self, *, Bucket: str, Key: str) -> dict:  # noqa: N803
        content = self.objects[Bucket, Key]
        body = SimpleNamespace(iter_chunks=lambda size: iter(io.BytesIO(content).read, b""))
        return {"ContentLength": len(content), "Body": body}


def with_query(environ: dict) -> dict:
    """Return a request of werkzeug's client as a server has it: the address has the query."""
    path = environ["REQUEST_URI"].partition("?")[0]
    return environ | {"REQUEST_URI": f"{path}?{environ['QUERY_STRING']}"}


class Site:
    """A page with recorded jobs, as a WSGI application, and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store()
        self.service = Service(SimpleNamespace(price=72.0, spot_price=36.0), None)
        self.page = WebPage(self.service, TOKEN)
        self.client = Client(self, use_cookies=False)

    def __call__(self, environ: dict, start_response):
        """Answer as the endpoint does."""
        environ = with_query(environ)
        try:
            if not access.is_for_page(environ):
                raise Closed("found a request that is not the page's", status=418)
            answer = self.page.answer(environ)
        except Closed as closed:
            answer = Response(str(closed), status=closed.status, content_type="text/plain")
        return answer(environ, start_response)

    def add(self, record: Record, *log: str) -> str:
        """Add a job, and return its ARN."""
        record.request.setdefault("TrainingJobName", record.name)
        record.request.setdefault("OutputDataConfig", {"S3OutputPath": "s3://bucket/out"})
        names = {each.host for attempt in record.attempts for each in attempt.instances}
        logs = Logs(None, record.name, self.folder / f"{len(self.service.jobs)}/logs")
        arn = arn_of(record.name, REGION)
        self.service.jobs[arn] = SimpleNamespace(
            record=record,
            hosts=[SimpleNamespace(name=name) for name in sorted(names) or ["algo-1"]],
            logs=logs,
            control=Control(),
            place=SimpleNamespace(clients=lambda _: self.store),
        )
        for line in log:
            logs.write("algo-1", line)
        return arn

    def get(self, path: str = "/", *, headers=(), token=TOKEN, **query) -> TestResponse:
        """Send a request of a browser."""
        query = {"token": token} | query if token is not None else query
        headers = {"Accept": "text/html,*/*"} | dict(headers)
        return self.client.get(path, base_url=ORIGIN, query_string=query, headers=headers)

    def post(self, path: str, form: dict, *, headers=None, token=TOKEN, **query) -> TestResponse:
        """Send a form of a browser."""
        query = {"token": token} | query if token is not None else query
        headers = {"Origin": ORIGIN} if headers is None else headers
        return self.client.post(
            path, base_url=ORIGIN, query_string=query, data=form, headers=headers
        )


def running(name: str = "digits", hosts: int = 2) -> Record:
    """Return a job that was interrupted, and trains again."""
    record = interrupted(hosts)
    record.name = name
    record.status = "InProgress"
    record.request = {
        "EnableManagedSpotTraining": True,
        "CheckpointConfig": {"S3Uri": "s3://bucket/ck"},
    }
    record.transitions.append(Transition("Training", "in progress", 100.0))
    offset = time.time() - 170
    for moment in (*record.transitions, *record.interruptions):
        for field in ("start", "end", "time"):
            if getattr(moment, field, None) is not None:
                setattr(moment, field, getattr(moment, field) + offset)
    record.created += offset
    for attempt in record.attempts:
        for point in attempt.points:
            point.time += offset
            point.values |= {"train_loss": 1 / point.step, "val_loss": 2 / point.step}
        for instance in attempt.instances:
            for field in ("started", "training", "ended", "released"):
                setattr(instance, field, getattr(instance, field) + offset)
    for instance in record.attempts[-1].instances:
        instance.ended = instance.released = None
    record.attempts[0].instances[0].checkpoints = [
        Checkpoint(30, offset + 40, offset + 42),
        Checkpoint(40, offset + 50),
    ]
    return record


@pytest.fixture(name="site")
def site_of_jobs(tmp_path) -> Site:
    """A page without jobs."""
    return Site(tmp_path)
