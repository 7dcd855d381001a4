"""Requests to the endpoint of a rehearsal whose jobs are threads, as their bytes."""

import datetime
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from rehearsals import Rehearsal

LOOPBACK = "127.0.0.1"
BRIDGE = "127.0.0.2"  # an address of the loopback in place of the bridge's


class Endpoint(Rehearsal):
    """A rehearsal whose jobs are threads."""

    program = ("tests/support/rehearsal_endpoint.py",)

    @property
    def port(self) -> int:
        return urlsplit(self.endpoint).port

    @property
    def host(self) -> str:
        """The value of the header Host."""
        return f"{LOOPBACK}:{self.port}"

    def page(self, path: str = "/", **query: str) -> str:
        """Return the target of a request for the page, with the printed address's token."""
        printed = urlsplit(re.search(r"^for a browser: (\S+)$", self.output, re.MULTILINE)[1])
        assert printed.netloc == self.host and printed.path == "/"
        return f"{path}?{printed.query}&{urlencode(query)}"


@pytest.fixture(scope="session")
def allowed_folder(tmp_path_factory) -> Path:
    """The one folder that file:// channels of the endpoint's jobs may be in."""
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory, allowed_folder) -> Iterator[Endpoint]:
    """The endpoint, with an object that an attacker may want."""
    flags = [f"--allow={allowed_folder}", "--grace=5"]
    with Endpoint(tmp_path_factory.mktemp("endpoint"), *flags) as server:
        server.s3.put_object(Bucket="rehearsal", Key="secret", Body=b"treasure")
        yield server


def send(endpoint: Endpoint, request: bytes, address: str = LOOPBACK) -> tuple[int, str, str]:
    """Send bytes; return the status, the headers and the body of the answer."""
    with socket.create_connection((address, endpoint.port), timeout=30) as connection:
        connection.sendall(request)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    headers, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    return int(headers.split()[1]), headers.lower(), body


def request_bytes(request_line: str, headers: dict, body: bytes = b"") -> bytes:
    """Return a request as the text that is sent."""
    header_lines = [
        request_line,
        *(f"{name}: {value}" for name, value in headers.items()),
        f"Content-Length: {len(body)}",
        "",
        "",
    ]
    return "\r\n".join(header_lines).encode() + body


def ask(
    endpoint: Endpoint, request_line: str, headers: dict, body: bytes = b"", address: str = LOOPBACK
) -> tuple[int, str, str]:
    """Send a request; return the status, the headers and the body of the answer."""
    return send(endpoint, request_bytes(request_line, headers, body), address)


def signed_headers(
    key, target="/", *, host, method="GET", service="s3", headers=(), body=b"", offset_seconds=None
) -> dict:
    """Return the headers of a request, with a valid signature for the host."""
    request = AWSRequest(
        method, f"http://{host}{target}", data=body, headers={"Host": host} | dict(headers)
    )
    signer_class = auth.S3SigV4Auth if service == "s3" else auth.SigV4Auth
    request_signer = signer_class(Credentials(*key), service, "us-east-1")
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=offset_seconds or 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "get_current_datetime", lambda: moment)
        request_signer.add_auth(request)
    return dict(request.headers.items())


def job(**fields) -> dict:
    """Return a job that the rehearsal accepts."""
    return {
        "TrainingJobName": f"job-{time.time_ns()}",
        "RoleArn": "arn:aws:iam::123456789012:role/rehearsal",
        "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
        "OutputDataConfig": {"S3OutputPath": "s3://rehearsal/output"},
        "ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
    } | fields


def check_nothing_revealed(answer: tuple[int, str, str], status: int = 403) -> None:
    """Check that an answer tells nothing to a client without the key."""
    assert answer[0] == status, answer
    assert "access-control-" not in answer[1]
    assert "server: rehearsal\r\n" in answer[1]
    assert answer[2].count("\n") <= 1
    for hint in ("werkzeug", "python/", "moto", "bucket", "treasure", "job-", "<html", "traceback"):
        assert hint not in (answer[1] + answer[2]).lower(), answer


def check_refused(endpoint: Endpoint, *request, **where) -> None:
    """Send a request, and check that the answer tells nothing."""
    check_nothing_revealed(ask(endpoint, *request, **where))


def start_job(endpoint: Endpoint, **fields) -> tuple[str, tuple[str, str]]:
    """Start a job; return its name, and the key that its host has printed."""
    name = endpoint.create("image", **fields)
    endpoint.wait_for_line(name, "AWS_SECRET_ACCESS_KEY=")
    variables = dict(line.partition("=")[::2] for line in endpoint.lines(name)["algo-1"])
    assert variables["AWS_ENDPOINT_URL"] == f"http://{BRIDGE}:{endpoint.port}"
    return name, (variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"])
