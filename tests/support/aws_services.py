"""AWS for the tests of scripts/: moto's HTTP server, and a stand-in for SageMaker.

moto's training jobs cannot do all that the tests need; the stand-in does the rest.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import warm
from containers import ROOT
from environments import python_of

from sagemaker_lightning.contract.rendezvous import free_port

REGION = "us-east-1"
ACCOUNT = "123456789012"  # moto's


LOOPBACK = "127.0.0.1"


def wait_for(host: str, port: int, process: subprocess.Popen, log: Path) -> None:
    """Wait until `process` listens on `port`."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as client:
            if client.connect_ex((host, port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"nothing listens on port {port}: {log.read_text()[-2000:]}")


@contextmanager
def served(command: list[str], port: int, log: Path, host: str = LOOPBACK) -> Iterator[None]:
    """Run a server while the block lasts."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_for(host, port, process, log)
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextmanager
def moto(folder: Path, host: str = LOOPBACK) -> Iterator[str]:
    """Serve moto's AWS at `host`, an address of this machine, and yield its URL."""
    port = free_port(host)
    server = python_of("rehearsal").with_name("moto_server")
    with served([str(server), f"--host={host}", f"--port={port}"], port, folder / "moto.log", host):
        yield f"http://{host}:{port}"


def variables(endpoint: str | None = None, **others: str) -> dict[str, str]:
    """Return an environment for the AWS at `endpoint`, without this machine's user's settings.

    Without an endpoint, the environment has no credentials either.
    """
    other_variables = {
        name: value for name, value in os.environ.items() if not name.startswith("AWS_")
    }
    nobody = {
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    somebody = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": REGION,
    }
    return (
        other_variables
        | nobody
        | {"PYTHON": sys.executable}
        | (somebody if endpoint else {})
        | others
    )


def client(
    service: str,
    endpoint: str,
    region: str = REGION,
    key=("test", "test"),
    token: str | None = None,
    **options,
):
    """Return a boto3 client of the AWS at `endpoint`."""
    keys = {
        "aws_access_key_id": key[0],
        "aws_secret_access_key": key[1],
        "aws_session_token": token,
    }
    return boto3.client(service, endpoint_url=endpoint, region_name=region, **keys, **options)


def script(
    name: str,
    *arguments: str,
    environment: dict[str, str],
    folder: Path | None = None,
    timeout: float = 300,
):
    """Run one of scripts/ and return its exit status, stdout and stderr, both apart."""
    path = ROOT / "scripts" / name
    if path.suffix == ".py":
        command = ["python", path, *arguments]
        return warm.run_apart(command, folder or Path.cwd(), environment, timeout)
    return subprocess.run(
        [str(path), *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


class SageMakerStandIn:
    """Stands in for SageMaker and CloudWatch Logs, in their JSON protocol, with one job.

    `states` are the answers of DescribeTrainingJob, one after the other; the last one is repeated.
    `lines` are the log lines of each host; each call of DescribeTrainingJob makes one more of them
    readable.
    """

    def __init__(self, states: list[dict], lines: dict[str, list[str]]) -> None:
        self.states = states
        self.lines = lines
        self.calls: list[tuple[str, dict]] = []
        self.described = 0

    def names(self) -> list[str]:
        """Return the names of the operations that were called."""
        return [name for name, _ in self.calls]

    def answer(self, operation: str, request: dict) -> dict:
        """Return the service's answer to a request."""
        self.calls.append((operation, request))
        return getattr(self, operation)(request)

    def CreateTrainingJob(self, request: dict) -> dict:  # noqa: N802 (the API's names)
        self.name = request["TrainingJobName"]
        return {"TrainingJobArn": f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{self.name}"}

    def DescribeTrainingJob(self, request: dict) -> dict:  # noqa: N802
        state = self.states[min(self.described, len(self.states) - 1)]
        self.described += 1
        created = self.calls[0][1]
        copied_fields = {
            key: created[key]
            for key in ("ResourceConfig", "EnableManagedSpotTraining")
            if key in created
        }
        return {"TrainingJobName": request["TrainingJobName"]} | copied_fields | state

    def StopTrainingJob(self, request: dict) -> dict:  # noqa: N802
        return {}

    def DescribeLogStreams(self, request: dict) -> dict:  # noqa: N802
        assert request["logGroupName"] == "/aws/sagemaker/TrainingJobs"
        names = [f"{self.name}/{host}-1700000000" for host in self.lines]
        return {
            "logStreams": [
                {"logStreamName": name}
                for name in names
                if name.startswith(request["logStreamNamePrefix"])
            ]
        }

    def GetLogEvents(self, request: dict) -> dict:  # noqa: N802
        host = request["logStreamName"].split("/")[1].rsplit("-", 1)[0]
        start = int(request.get("nextToken", 0))
        end = min(self.described, len(self.lines[host]))
        events = [
            {"timestamp": 0, "message": line, "ingestionTime": 0}
            for line in self.lines[host][start:end]
        ]
        return {"events": events, "nextForwardToken": str(end), "nextBackwardToken": str(start)}


@contextmanager
def served_here(answer: Callable[[str, dict], dict]) -> Iterator[str]:
    """Serve a JSON service from a thread and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 (http.server's name)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                status = 200
                content = answer(
                    self.headers["X-Amz-Target"].split(".")[1], json.loads(body or b"{}")
                )
            except PermissionError as error:
                status = 400
                content = {"__type": "AccessDeniedException", "message": str(error)}
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_) -> None:
            """Log nothing."""

    with served_from_a_thread(Handler) as address:
        yield address


@contextmanager
def served_forbidden_buckets() -> Iterator[str]:
    """Serve an S3 that refuses access to its buckets."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:  # noqa: N802 (http.server's name)
            self.send_response(403)
            self.end_headers()

        def log_message(self, *_) -> None:
            """Log nothing."""

    with served_from_a_thread(Handler) as address:
        yield address


@contextmanager
def served_from_a_thread(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve `handler` on a free port while the block lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
