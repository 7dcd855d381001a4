"""Attacks on the endpoint by real requests, and its clients.

A web page attacks it, a neighbour on Docker's bridge, and a job.
"""

import argparse
import datetime
import io
import json
import os
import random
import re
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import hostile_texts
import pytest
from aws_services import client
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from containers import ROOT
from environments import python_of
from rehearsals import HANG_SECONDS, ROLE, Rehearsal, run, run_command
from test_rehearsal_clients import Person

from sagemaker_rehearsal import settings
from sagemaker_rehearsal.api import gate
from sagemaker_rehearsal.api.access_keys import Key

pytestmark = pytest.mark.slow

LOOPBACK = "127.0.0.1"
BRIDGE = "127.0.0.2"  # an address of the loopback in place of the bridge's
CREATE_TARGET = "SageMaker.CreateTrainingJob"


class Endpoint(Rehearsal):
    """A rehearsal whose jobs are threads."""

    program = ("tests/support/rehearsal_endpoint.py",)

    @property
    def port(self) -> int:
        """Its port."""
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The one folder that file:// channels may be in."""
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory, folder):
    """The endpoint, with an object that an attacker may want."""
    with Endpoint(tmp_path_factory.mktemp("endpoint"), f"--allow={folder}", "--grace=5") as server:
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


def call_sagemaker(
    endpoint: Endpoint, key, operation: str, content: dict | bytes, **options
) -> tuple[int, str, str]:
    """Call an operation of SageMaker with a signature."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    host = endpoint.host
    target_headers = {
        "X-Amz-Target": f"SageMaker.{operation}",
        "Content-Type": "application/x-amz-json-1.1",
    }
    headers = signed_headers(
        key,
        host=host,
        method="POST",
        service="sagemaker",
        headers=target_headers,
        body=body,
        **options,
    )
    return send(endpoint, request_bytes("POST / HTTP/1.1", headers, body))


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


def check_nothing_told(answer: tuple[int, str, str], status: int = 403) -> None:
    """Check that an answer tells nothing to a client without the key."""
    assert answer[0] == status, answer
    assert (
        "access-control-" not in answer[1]
        and "server: rehearsal\r\n" in answer[1]
        and answer[2].count("\n") <= 1
    )
    for hint in ("werkzeug", "python/", "moto", "bucket", "treasure", "job-", "<html", "traceback"):
        assert hint not in (answer[1] + answer[2]).lower(), answer


def test_a_signed_request_passes(endpoint):
    """A signed request passes.

    Each attack below differs from this request in one thing, which is why it is refused.
    """
    for host in (endpoint.host, f"localhost:{endpoint.port}", f"LocalHost:{endpoint.port}"):
        status, headers, body = send(
            endpoint, request_bytes("GET / HTTP/1.1", signed_headers(endpoint.key, host=host))
        )
        assert (
            status == 200 and "<Name>rehearsal</Name>" in body and "access-control-" not in headers
        )
    host = f"{BRIDGE}:{endpoint.port}"
    assert (
        send(
            endpoint,
            request_bytes("GET / HTTP/1.1", signed_headers(endpoint.key, host=host)),
            BRIDGE,
        )[0]
        == 200
    )
    assert call_sagemaker(endpoint, endpoint.key, "ListTrainingJobs", {})[0] == 200


STRANGERS_REQUESTS = {
    "a list of buckets": ("GET / HTTP/1.1", {}),
    "an object": ("GET /rehearsal/secret HTTP/1.1", {}),
    "a list of objects": ("GET /rehearsal?list-type=2 HTTP/1.1", {}),
    "a head": ("HEAD /rehearsal/secret HTTP/1.1", {}),
    "an upload": ("PUT /rehearsal/x HTTP/1.1", {}),
    "a job": ("POST / HTTP/1.1", {"X-Amz-Target": CREATE_TARGET}),
    "a job in plain text": (
        "POST / HTTP/1.1",
        {"x-amz-target": CREATE_TARGET, "Content-Type": "text/plain"},
    ),
    "another service": ("POST / HTTP/1.1", {"X-Amz-Target": "AWSLambda.ListFunctions"}),
    "credentials in a body": ("POST /?Action=AssumeRoleWithWebIdentity HTTP/1.1", {}),
    "our own": ("GET /Rehearsal/ HTTP/1.1", {}),
    "our own, a change": ("POST /Rehearsal/interrupt HTTP/1.1", {"Content-Type": "text/plain"}),
    "the page": ("GET / HTTP/1.1", {"Accept": "text/html"}),
    "the page, a wrong token": ("GET /?token=x HTTP/1.1", {"Accept": "text/html"}),
    "the page's stream": ("GET /Rehearsal/page/stream HTTP/1.1", {}),
    "an order of the page": ("POST /Rehearsal/page/stop HTTP/1.1", {}),
    "moto's page": ("GET /moto-api/ HTTP/1.1", {}),
    "moto's page, two slashes": ("GET //moto-api/ HTTP/1.1", {}),
    "moto's page, in code": ("GET /%6doto-api/data.json HTTP/1.1", {}),
    "moto's page, by dots": ("GET /rehearsal/../moto-api/ HTTP/1.1", {}),
    "moto's page, by dots in code": ("GET /x/%2e%2e/moto-api/ HTTP/1.1", {}),
    "moto's reset": ("POST /moto-api/reset HTTP/1.1", {}),
    "moto's icon": ("GET /favicon.ico HTTP/1.1", {}),
    "moto's own requests": ("GET /s3_us-east-1/ HTTP/1.1", {}),
    "metadata": ("GET /latest/meta-data/iam/security-credentials/default-role HTTP/1.1", {}),
    "keys of users": ("GET /us-east-1_x/.well-known/jwks.json HTTP/1.1", {}),
    "the old dummy key": (
        "GET / HTTP/1.1",
        {
            "Authorization": "AWS4-HMAC-SHA256 "
            "Credential=rehearsal/20260101/us-east-1/s3/aws4_request, "
            f"SignedHeaders=host, Signature={'0' * 64}",
            "X-Amz-Date": "20260101T000000Z",
        },
    ),
    "no signature": ("GET / HTTP/1.1", {"Authorization": "AWS test:test"}),
    "a password": ("GET / HTTP/1.1", {"Authorization": "Basic dGVzdDp0ZXN0"}),
    "no method": ("FOO / HTTP/1.1", {}),
    "an upload by a page's form": (
        "POST /rehearsal HTTP/1.1",
        {"Content-Type": "multipart/form-data; boundary=x"},
    ),
}


@pytest.mark.parametrize("address", [LOOPBACK, BRIDGE])
@pytest.mark.parametrize("case", STRANGERS_REQUESTS)
def test_a_stranger_gets_nothing(endpoint, case, address):
    request_line, headers = STRANGERS_REQUESTS[case]
    check_nothing_told(
        send(
            endpoint,
            request_bytes(request_line, {"Host": f"{address}:{endpoint.port}"} | headers, b"{}"),
            address,
        )
    )


@pytest.mark.parametrize(
    "request_line",
    [
        "",
        "GET",
        "GET /",
        "GET / HTTP/9.9",
        "GET http://[ HTTP/1.1",
        "GET / HTTP/1.1\r\nno header",
        "\x16\x03\x01",
    ],
)
def test_what_is_no_request_gets_no_version(endpoint, request_line):
    with socket.create_connection((LOOPBACK, endpoint.port), timeout=30) as connection:
        connection.sendall(f"{request_line}\r\n\r\n".encode())
        answer = connection.recv(65536).decode().lower()
    assert "python" not in answer and "werkzeug" not in answer and "200 ok" not in answer
    assert "Traceback" not in endpoint.output


HOST_HEADERS = {
    "another": "evil.com",
    "another at the port": "evil.com:{port}",
    "one that begins with it": "127.0.0.1:{port}.evil.com",
    "one that begins with its name": "localhost.evil.com:{port}",
    "a name of its address": "127.0.0.1.nip.io:{port}",
    "no port": "127.0.0.1",
    "another port": "127.0.0.1:80",
    "the bridge's at the loopback": f"{BRIDGE}:{{port}}",
    "all addresses": "0.0.0.0:{port}",
    "another way to write it": "127.1:{port}",
    "in IPv6": "[::ffff:127.0.0.1]:{port}",
    "a dot at its end": "localhost.:{port}",
    "a user before it": "evil@127.0.0.1:{port}",
    "AWS's": "s3.amazonaws.com",
    "a bucket before it": "rehearsal.localhost:{port}",
}


@pytest.mark.parametrize("host", HOST_HEADERS)
def test_another_host_is_refused_whatever_its_signature(endpoint, host):
    """DNS rebinding: the page's host is the name of another host, with our address."""
    headers = signed_headers(endpoint.key, host=endpoint.host) | {
        "Host": HOST_HEADERS[host].format(port=endpoint.port)
    }
    if "@" not in headers["Host"]:
        headers = signed_headers(endpoint.key, host=headers["Host"]) | {"Host": headers["Host"]}
    check_nothing_told(send(endpoint, request_bytes("GET / HTTP/1.1", headers)))


@pytest.mark.parametrize(
    "case", ["two", "two, the other way", "none", "none in HTTP/1.0", "in the target", "in both"]
)
def test_a_host_is_said_once_and_in_its_header(endpoint, case):
    headers = signed_headers(endpoint.key, host=endpoint.host)
    header_lines = [f"{name}: {value}" for name, value in headers.items() if name != "Host"]
    request_line = "GET / HTTP/1.1"
    if case.startswith("two"):
        hosts = [f"Host: {endpoint.host}", "Host: evil.com"]
        header_lines = [*(hosts if case == "two" else reversed(hosts)), *header_lines]
    elif case == "none in HTTP/1.0":
        request_line = "GET / HTTP/1.0"
    elif case.startswith("in"):
        request_line = (
            f"GET http://{'evil.com' if case == 'in the target' else endpoint.host}/ HTTP/1.1"
        )
        header_lines = [f"Host: {endpoint.host}", *header_lines]
    answer = send(endpoint, "\r\n".join([request_line, *header_lines, "", ""]).encode())
    check_nothing_told(answer)
    assert answer[2].startswith("found a request for ")  # refused before the signature is looked at


PAGE_REQUESTS = {
    "an origin": ("GET", {"Origin": "http://evil.com"}),
    "no origin, as a file has": ("GET", {"Origin": "null"}),
    "its own": ("GET", {"Origin": "http://127.0.0.1:{port}"}),
    "an empty one": ("GET", {"Origin": ""}),
    "in small letters": ("GET", {"origin": "http://evil.com"}),
    "from another site": ("GET", {"Sec-Fetch-Site": "cross-site"}),
    "from another port": ("GET", {"Sec-Fetch-Site": "same-site"}),
    "a preflight": ("OPTIONS", {}),
    "a preflight of a page": (
        "OPTIONS",
        {
            "Origin": "http://evil.com",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-amz-target,content-type,authorization",
            "Access-Control-Request-Private-Network": "true",
        },
    ),
    "a preflight in small letters": ("options", {}),
}


@pytest.mark.parametrize("page", PAGE_REQUESTS)
def test_a_page_is_refused_whatever_its_signature(endpoint, page):
    method, page_headers = PAGE_REQUESTS[page]
    headers = signed_headers(endpoint.key, host=endpoint.host, method=method) | {
        name: value.format(port=endpoint.port) for name, value in page_headers.items()
    }
    check_nothing_told(send(endpoint, request_bytes(f"{method} / HTTP/1.1", headers)))


def test_no_page_may_read_even_what_a_bucket_allows(endpoint):
    rule = {"AllowedOrigins": ["*"], "AllowedMethods": ["GET"]}
    endpoint.s3.create_bucket(Bucket="open-to-all", ACL="public-read-write")
    endpoint.s3.put_bucket_cors(Bucket="open-to-all", CORSConfiguration={"CORSRules": [rule]})
    endpoint.s3.put_object(Bucket="open-to-all", Key="x", Body=b"treasure", ACL="public-read")
    host_header = {"Host": endpoint.host}
    check_nothing_told(send(endpoint, request_bytes("GET /open-to-all/x HTTP/1.1", host_header)))
    status, headers, body = send(
        endpoint,
        request_bytes(
            "GET /open-to-all/x HTTP/1.1",
            signed_headers(endpoint.key, "/open-to-all/x", host=endpoint.host),
        ),
    )
    assert (status, body) == (200, "treasure") and "access-control-" not in headers


FORGERIES = {
    "another secret": {"secret": "x"},
    "another path": {"line": "GET /rehearsal/other HTTP/1.1"},
    "another query": {"line": "GET /rehearsal/secret?versionId=1 HTTP/1.1"},
    "another method": {"line": "DELETE /rehearsal/secret HTTP/1.1"},
    "a header of AWS's more": {"headers": {"X-Amz-Copy-Source": "/rehearsal/secret"}},
    "an old one": {"when": -16 * 60},
    "one of tomorrow": {"when": 24 * 3600},
    "two": {"headers": {"authorization": "x"}},
}


@pytest.mark.parametrize("forged", FORGERIES)
def test_a_signature_is_of_one_request_and_now(endpoint, forged):
    forgery = FORGERIES[forged]
    key = endpoint.key[0], forgery.get("secret", endpoint.key[1])
    headers = signed_headers(
        key, "/rehearsal/secret", host=endpoint.host, offset_seconds=forgery.get("when")
    )
    request_line = forgery.get("line", "GET /rehearsal/secret HTTP/1.1")
    check_nothing_told(
        send(endpoint, request_bytes(request_line, headers | forgery.get("headers", {})))
    )


@pytest.mark.parametrize("forged", ["body", "target", "unsigned target", "date"])
def test_a_signature_is_of_one_order(endpoint, forged):
    """Whoever has seen one of our requests cannot make another one of it."""
    host = endpoint.host
    target = {"X-Amz-Target": "SageMaker.ListTrainingJobs"}
    signed_target = {} if forged == "unsigned target" else target
    headers = signed_headers(
        endpoint.key,
        host=host,
        method="POST",
        service="sagemaker",
        headers=signed_target,
        body=b"{}",
    )
    body = json.dumps(job()).encode() if forged == "body" else b"{}"
    headers |= {"X-Amz-Target": CREATE_TARGET} if "target" in forged else {}
    headers |= {"X-Amz-Date": "20260101T000000Z"} if forged == "date" else {}
    check_nothing_told(send(endpoint, request_bytes("POST / HTTP/1.1", headers, body)))


def test_a_signature_for_one_service_is_for_no_other(endpoint):
    target = {"X-Amz-Target": CREATE_TARGET}
    headers = signed_headers(
        endpoint.key, host=endpoint.host, method="POST", headers=target, body=b"{}"
    )
    jobs_before = call_sagemaker(endpoint, endpoint.key, "ListTrainingJobs", {})[2]
    send(endpoint, request_bytes("POST / HTTP/1.1", headers, b"{}"))
    assert call_sagemaker(endpoint, endpoint.key, "ListTrainingJobs", {})[2] == jobs_before


@pytest.mark.parametrize("service", ["lambda", "batch", "ssm", "secretsmanager", "codebuild"])
def test_what_runs_programs_in_moto_is_not_there(endpoint, service):
    operations = {
        "lambda": "list_functions",
        "ssm": "describe_parameters",
        "secretsmanager": "list_secrets",
    }
    operations |= {"batch": "describe_job_queues", "codebuild": "list_projects"}
    with pytest.raises(ClientError, match=f"does not emulate {service}"):
        getattr(client(service, endpoint.endpoint, key=endpoint.key), operations[service])()


@pytest.mark.parametrize(
    "path", ["/moto-api/data.json", "//moto-api/data.json", "/%6doto-api/data.json", "/favicon.ico"]
)
def test_motos_own_page_is_closed_even_to_the_person(endpoint, path):
    status, _, body = send(
        endpoint,
        request_bytes(
            f"GET {path} HTTP/1.1", signed_headers(endpoint.key, path, host=endpoint.host)
        ),
    )
    assert status in (403, 404) and ("NoSuch" in body or "Signature" in body), body


def test_a_presigned_address(endpoint):
    s3 = client("s3", endpoint.endpoint, key=endpoint.key, config=Config(signature_version="s3v4"))
    url = s3.generate_presigned_url(
        "get_object", Params={"Bucket": "rehearsal", "Key": "secret"}, ExpiresIn=60
    )
    host_header = {"Host": endpoint.host}
    target = url.partition(str(endpoint.port))[2]
    assert send(endpoint, request_bytes(f"GET {target} HTTP/1.1", host_header))[2] == "treasure"
    for forged_target in (
        target.replace("secret", "other"),
        target.replace("Expires=60", "Expires=6000"),
        target.replace("Expires=60", "Expires=-60"),
        target + "&x=y",
        target[:-1] + ("0" if target[-1] != "0" else "1"),
        target.partition("&X-Amz-Signature")[0],
    ):
        check_nothing_told(
            send(endpoint, request_bytes(f"GET {forged_target} HTTP/1.1", host_header))
        )
    check_nothing_told(send(endpoint, request_bytes(f"DELETE {target} HTTP/1.1", host_header)))
    check_nothing_told(
        send(
            endpoint,
            request_bytes(f"GET {target} HTTP/1.1", host_header | {"Origin": "http://evil.com"}),
        )
    )
    check_nothing_told(
        send(endpoint, request_bytes(f"GET {target} HTTP/1.1", host_header | {"x-amz-date": "x"}))
    )
    expired_url = s3.generate_presigned_url(
        "get_object", Params={"Bucket": "rehearsal", "Key": "secret"}, ExpiresIn=0
    )
    time.sleep(1.1)
    check_nothing_told(
        send(
            endpoint,
            request_bytes(
                f"GET {expired_url.partition(str(endpoint.port))[2]} HTTP/1.1", host_header
            ),
        )
    )
    old_signer = client(
        "s3", endpoint.endpoint, key=endpoint.key, config=Config(signature_version="s3")
    )
    url = old_signer.generate_presigned_url(
        "get_object", Params={"Bucket": "rehearsal", "Key": "secret"}
    )
    status, _, body = send(
        endpoint, request_bytes(f"GET {url.partition(str(endpoint.port))[2]} HTTP/1.1", host_header)
    )
    assert status == 403 and "signature_version='s3v4'" in body


def test_what_a_client_signs(endpoint):
    """Names with all sorts of characters, headers with spaces, an upload in parts."""
    for name in (
        "a b/ü+~%(x)'!*",
        "//x",
        "a//b/",
        "a/../b",
        "%2e%2e/x",
        "moto-api/x",
        "Rehearsal/",
        "q?a=b&c#d",
        "=;,",
    ):
        metadata = {"my_key": "a   b", "other-key": " c "}
        endpoint.s3.put_object(
            Bucket="rehearsal", Key=f"odd/{name}", Body=name.encode(), Metadata=metadata
        )
        stored = endpoint.s3.get_object(Bucket="rehearsal", Key=f"odd/{name}")
        assert stored["Body"].read() == name.encode() and set(stored["Metadata"]) == {
            "my_key",
            "other-key",
        }
        assert (
            endpoint.s3.list_objects_v2(Bucket="rehearsal", Prefix=f"odd/{name}")["KeyCount"] == 1
        )
    content = bytes(20 * 2**20)
    endpoint.s3.upload_fileobj(io.BytesIO(content), "rehearsal", "big")
    assert endpoint.s3.head_object(Bucket="rehearsal", Key="big")["ContentLength"] == len(content)
    endpoint.s3.delete_objects(Bucket="rehearsal", Delete={"Objects": [{"Key": "big"}]})
    assumed = client("sts", endpoint.endpoint, key=endpoint.key).assume_role(
        RoleArn="arn:aws:iam::123456789012:role/rehearsal", RoleSessionName="mine"
    )["Credentials"]
    assert (assumed["AccessKeyId"], assumed["SecretAccessKey"]) == endpoint.key
    token = client("s3", endpoint.endpoint, key=endpoint.key, token=assumed["SessionToken"])
    assert token.list_objects_v2(Bucket="rehearsal", Prefix="secret")["KeyCount"] == 1


# Jobs


def start_job(endpoint: Endpoint, **fields) -> tuple[str, tuple[str, str]]:
    """Start a job; return its name, and the key that its host has printed."""
    name = endpoint.create("image", **fields)
    endpoint.wait_for_line(name, "AWS_SECRET_ACCESS_KEY=")
    variables = dict(line.partition("=")[::2] for line in endpoint.lines(name)["algo-1"])
    assert variables["AWS_ENDPOINT_URL"] == f"http://{BRIDGE}:{endpoint.port}"
    return name, (variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"])


def test_what_a_job_may_do(endpoint):
    other = endpoint.create("image", Environment={"API_KEY": "of-another-job"})
    other_arn = endpoint.describe(other)["TrainingJobArn"]
    name, key = start_job(endpoint, spot=True)
    assert key != endpoint.key
    s3, sts, logs, sagemaker, iam, ecr = (
        client(service, f"http://{BRIDGE}:{endpoint.port}", key=key)
        for service in ("s3", "sts", "logs", "sagemaker", "iam", "ecr")
    )
    s3.put_object(Bucket="rehearsal", Key=f"output/{name}/mine", Body=b"x")
    assert sts.get_caller_identity()["Account"]
    arn = sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobArn"]
    assert sagemaker.list_tags(ResourceArn=arn)["Tags"] == []
    role = {"RoleArn": "arn:aws:iam::123456789012:role/rehearsal", "RoleSessionName": "mine"}
    assert sts.assume_role(**role)["Credentials"]["AccessKeyId"] == key[0]
    log_group = {"logGroupName": "/aws/sagemaker/TrainingJobs"}
    forbidden_calls = [
        lambda: sagemaker.describe_training_job(TrainingJobName=other),
        lambda: sagemaker.list_training_jobs(),
        lambda: sagemaker.list_tags(ResourceArn=other_arn),
        lambda: logs.describe_log_streams(**log_group),
        lambda: logs.filter_log_events(**log_group),
        lambda: sagemaker.create_training_job(**job()),
        lambda: sagemaker.stop_training_job(TrainingJobName=name),
        lambda: sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "a", "Value": "b"}]),
        lambda: iam.create_role(RoleName="x", AssumeRolePolicyDocument="{}"),
        lambda: ecr.create_repository(repositoryName="repository"),
    ]
    for forbidden_call in forbidden_calls:
        with pytest.raises(ClientError, match="allowed to a job's hosts is") as refused:
            forbidden_call()
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    order = json.dumps({"name": name, "hosts": [], "warned": False, "gap": 0}).encode()
    headers = signed_headers(
        key,
        "/Rehearsal/interrupt",
        host=endpoint.host,
        method="POST",
        service="rehearsal",
        body=order,
    )
    assert (
        send(endpoint, request_bytes("POST /Rehearsal/interrupt HTTP/1.1", headers, order))[0]
        == 403
    )
    assert endpoint.describe(name)["TrainingJobStatus"] == "InProgress"
    for stopped in (name, other):
        endpoint.sagemaker.stop_training_job(TrainingJobName=stopped)
        endpoint.wait_until_ended(stopped)
    # The key is valid as long as the job runs.
    with pytest.raises(ClientError, match="is not this rehearsal's"):
        s3.list_buckets()
    report_files = "".join(path.read_text() for path in (endpoint.folder / name).glob("*.*"))
    assert name in report_files and not any(
        secret in report_files for secret in (*key, *endpoint.key)
    )
    all_files = "".join(path.read_text() for path in endpoint.folder.rglob("*") if path.is_file())
    assert endpoint.key[1] not in all_files


def test_the_page_follows_a_job_and_stops_it(endpoint):
    name = endpoint.create("image", spot=True, Environment={"WORDS": "said by the job"})
    arn = endpoint.wait_for(name, "Training")["TrainingJobArn"]
    host_header = {"Host": endpoint.host}
    browser_headers = host_header | {"Accept": "text/html"}
    line = f"GET {endpoint.page()} HTTP/1.1"
    status, headers, body = send(endpoint, request_bytes(line, browser_headers))
    assert status == 200 and name in body
    assert "content-security-policy: default-src 'none'" in headers
    bridge_headers = browser_headers | {"Host": f"{BRIDGE}:{endpoint.port}"}
    check_nothing_told(send(endpoint, request_bytes(line, bridge_headers), BRIDGE))
    stream = urllib.request.urlopen(
        f"{endpoint.endpoint}{endpoint.page('/Rehearsal/page/stream', job=arn)}", timeout=60
    )
    with stream:
        assert any(b"said by the job" in line for line in stream)
        stop = f"POST {endpoint.page('/Rehearsal/page/stop', job=arn)} HTTP/1.1"
        check_nothing_told(send(endpoint, request_bytes(stop, host_header)))
        assert endpoint.describe(name)["TrainingJobStatus"] == "InProgress"
        own_headers = host_header | {"Origin": endpoint.endpoint}
        assert send(endpoint, request_bytes(stop, own_headers))[0] == 303
        # It ends with the job.
        assert b"event: end\n" in list(stream)
    assert endpoint.describe(name)["SecondaryStatus"] == "Stopped"
    key = f"output/{name}/output/model.tar.gz"
    target = endpoint.page("/Rehearsal/page/file", job=arn, kind="artifacts", name="model.tar.gz")
    stored = endpoint.s3.get_object(Bucket="rehearsal", Key=key)["Body"].read()
    with urllib.request.urlopen(f"{endpoint.endpoint}{target}", timeout=60) as answer:
        assert answer.read() == stored
        assert answer.headers["Content-Disposition"] == "attachment; filename*=UTF-8''model.tar.gz"


@pytest.fixture(scope="module")
def two_jobs(endpoint) -> Iterator[tuple[str, Any, str]]:
    """A job, S3 as its hosts use it, and another job; all that they have is in one bucket."""
    data = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://rehearsal/data/mine"}}
    kept = ("data/mine/x", "data/other/x", "ck/mine/x", "ck/mine-2/x", "source/mine", "source/2")
    for stored in kept:
        endpoint.s3.put_object(Bucket="rehearsal", Key=stored, Body=stored.encode())
    name, key = start_job(
        endpoint,
        InputDataConfig=[{"ChannelName": "training", "DataSource": data}],
        CheckpointConfig={"S3Uri": "s3://rehearsal/ck/mine"},
        HyperParameters={
            "sagemaker_submit_directory": '"s3://rehearsal/source/mine"',
            "logger.save_dir": "s3://rehearsal/logs/mine",
            "bucket": "s3://rehearsal/",
        },
    )
    other = endpoint.create("image", CheckpointConfig={"S3Uri": "s3://rehearsal/ck/mine-2"})
    endpoint.s3.put_object(Bucket="rehearsal", Key=f"output/{other}/x", Body=b"x")
    yield name, client("s3", f"http://{BRIDGE}:{endpoint.port}", key=key), other
    for stopped in (name, other):
        endpoint.sagemaker.stop_training_job(TrainingJobName=stopped)
        endpoint.wait_until_ended(stopped)


def test_a_job_reaches_its_own_prefixes(endpoint, two_jobs):
    name, s3, _ = two_jobs
    for mine in ("data/mine/x", "ck/mine/x", "source/mine"):
        assert s3.get_object(Bucket="rehearsal", Key=mine)["Body"].read() == mine.encode()
        assert s3.head_object(Bucket="rehearsal", Key=mine)["ContentLength"] == len(mine)
    for prefix in ("data/mine", "data/mine/", "ck/mine/"):
        for listing in (s3.list_objects, s3.list_objects_v2):
            answer = listing(Bucket="rehearsal", Prefix=prefix, Delimiter="/", MaxKeys=9)
            assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket="rehearsal", Prefix="ck/mine/", PaginationConfig={"PageSize": 1}
    )
    assert [entry["Key"] for page in pages for entry in page["Contents"]] == ["ck/mine/x"]
    s3.head_bucket(Bucket="rehearsal")
    s3.get_bucket_location(Bucket="rehearsal")
    odd_name = "a b/ü+~%(x)'!*?#&=;,//.\r/"
    # What begins like it is another job's.
    for prefix in ("ck/mine", "ck/mine/"):
        assert [entry["Key"] for entry in _all_objects(s3, prefix)] == ["ck/mine/x"]
    for folder_name in (f"output/{name}", "ck/mine", "logs/mine"):
        written = f"{folder_name}/{odd_name}"
        s3.put_object(Bucket="rehearsal", Key=written, Body=b"x", Metadata={"my_key": "a"})
        assert written in [entry["Key"] for entry in _all_objects(s3, f"{folder_name}/")]
        assert endpoint.s3.get_object(Bucket="rehearsal", Key=written)["Body"].read() == b"x"
        s3.copy_object(
            Bucket="rehearsal",
            Key=f"{folder_name}/copy",
            CopySource={"Bucket": "rehearsal", "Key": written},
        )
        content = bytes(9 * 2**20)  # in two parts
        s3.upload_fileobj(io.BytesIO(content), "rehearsal", f"{folder_name}/big")
        assert s3.head_object(Bucket="rehearsal", Key=f"{folder_name}/big")["ContentLength"] == len(
            content
        )
        s3.delete_object(Bucket="rehearsal", Key=f"{folder_name}/copy")
        objects = [{"Key": written}, {"Key": f"{folder_name}/big"}]
        s3.delete_objects(Bucket="rehearsal", Delete={"Objects": objects})
        kept_keys = [entry["Key"] for entry in _all_objects(endpoint.s3, f"{folder_name}/")]
        assert kept_keys == (["ck/mine/x"] if folder_name == "ck/mine" else [])
    signer = client(
        "s3",
        f"http://{BRIDGE}:{endpoint.port}",
        key=key_of(s3),
        config=Config(signature_version="s3v4"),
    )
    host_header = {"Host": f"{BRIDGE}:{endpoint.port}"}
    for key, status in (("ck/mine/x", 200), ("ck/mine-2/x", 403)):
        url = signer.generate_presigned_url("get_object", {"Bucket": "rehearsal", "Key": key})
        request = request_bytes(f"GET {url.partition(str(endpoint.port))[2]} HTTP/1.1", host_header)
        assert send(endpoint, request, BRIDGE)[0] == status


def key_of(s3) -> tuple[str, str]:
    """Return the key of a client."""
    credentials = s3._request_signer._credentials
    return credentials.access_key, credentials.secret_key


def _all_objects(s3, prefix: str) -> list[dict]:
    return s3.list_objects_v2(Bucket="rehearsal", Prefix=prefix).get("Contents", [])


POLICY = json.dumps({"Version": "2012-10-17", "Statement": []})
# What a job's hosts may not ask S3 for; {} is the name of another job.
FORBIDDEN_IN_S3 = {
    "other data": ("get_object", {"Key": "data/other/x"}),
    "its data, to write": ("put_object", {"Key": "data/mine/x"}),
    "its data, to delete": ("delete_object", {"Key": "data/mine/x"}),
    "its source, to write": ("put_object", {"Key": "source/mine"}),
    "a source that begins like it": ("get_object", {"Key": "source/2"}),
    "checkpoints of another job": ("get_object", {"Key": "ck/mine-2/x"}),
    "checkpoints of another job, to write": ("put_object", {"Key": "ck/mine-2/x"}),
    "checkpoints of another job, to delete": ("delete_object", {"Key": "ck/mine-2/x"}),
    "the head of one": ("head_object", {"Key": "ck/mine-2/x"}),
    "the output of another job": ("get_object", {"Key": "output/{}/x"}),
    "the output of another job, to write": ("put_object", {"Key": "output/{}/x"}),
    "an upload to it": ("create_multipart_upload", {"Key": "output/{}/x"}),
    "a part of one": (
        "upload_part",
        {"Key": "output/{}/x", "UploadId": "x", "PartNumber": 1, "Body": b""},
    ),
    "a copy of it": ("copy_object", {"Key": "ck/mine/y", "CopySource": "rehearsal/ck/mine-2/x"}),
    "a copy, in code": (
        "copy_object",
        {"Key": "ck/mine/y", "CopySource": "/rehearsal%2Fck/mine-2%2Fx"},
    ),
    "a copy of a part": (
        "upload_part_copy",
        {
            "Key": "ck/mine/y",
            "CopySource": "rehearsal/ck/mine-2/x",
            "UploadId": "x",
            "PartNumber": 1,
        },
    ),
    "a copy to it": (
        "copy_object",
        {"Key": "ck/mine-2/x", "CopySource": "rehearsal/ck/mine/x"},
    ),
    "two deletions": (
        "delete_objects",
        {"Delete": {"Objects": [{"Key": "ck/mine/x"}, {"Key": "ck/mine-2/x"}]}},
    ),
    "its attributes": ("get_object_acl", {"Key": "ck/mine/x"}),
    "its tags": ("get_object_tagging", {"Key": "ck/mine-2/x"}),
    "a list": ("list_objects_v2", {}),
    "a list, the old way": ("list_objects", {}),
    "a list of a folder": ("list_objects_v2", {"Prefix": "ck/"}),
    "a list of what it begins like": ("list_objects_v2", {"Prefix": "ck/min"}),
    "versions": ("list_object_versions", {"Prefix": "ck/mine/"}),
    "uploads": ("list_multipart_uploads", {}),
    "a bucket's policy": ("get_bucket_policy", {}),
    "a new policy": ("put_bucket_policy", {"Policy": POLICY}),
    "the end of a bucket": ("delete_bucket", {}),
    "another bucket": ("head_bucket", {"Bucket": "open"}),
    "an object of another bucket": ("get_object", {"Bucket": "open", "Key": "ck/mine/x"}),
    "a new bucket": ("create_bucket", {"Bucket": "of-a-job"}),
}


@pytest.mark.parametrize("case", FORBIDDEN_IN_S3)
def test_a_job_reaches_nothing_else_in_s3(endpoint, two_jobs, case):
    _, s3, other = two_jobs
    objects_before = {entry["Key"]: entry["ETag"] for entry in _all_objects(endpoint.s3, "")}
    operation, arguments = FORBIDDEN_IN_S3[case]
    arguments = {
        name: value.format(other) if name == "Key" else value for name, value in arguments.items()
    }
    with pytest.raises(ClientError) as refused:
        getattr(s3, operation)(**{"Bucket": "rehearsal"} | arguments)
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    if not operation.startswith("head"):  # which has no body
        assert "may write what begins with s3://rehearsal/output/job-" in str(refused.value)
    assert objects_before == {
        entry["Key"]: entry["ETag"] for entry in _all_objects(endpoint.s3, "")
    }


def test_a_job_lists_no_buckets(two_jobs):
    with pytest.raises(ClientError, match="found GET of s3:///"):
        two_jobs[1].list_buckets()


TWISTED_REQUESTS = [
    ("GET", "/rehearsal%2Fck%2Fmine-2%2Fx", {}, b""),
    ("GET", "/rehearsal?prefix=ck%2Fmine%2F&prefix=", {}, b""),
    ("GET", "/rehearsal?prefix=&prefix=ck%2Fmine%2F", {}, b""),
    ("GET", "/rehearsal?list-type=2&Prefix=ck%2Fmine%2F", {}, b""),
    ("GET", "/rehearsal?list-type=2&prefix=%ff", {}, b""),
    ("GET", "/rehearsal/%ff", {}, b""),
    ("PUT", "/rehearsal/ck/mine/x?acl", {}, b""),
    ("PUT", "/rehearsal/ck/mine/x?renameObject", {"X-Amz-Rename-Source": "/ck/mine-2/x"}, b""),
    ("PUT", "/rehearsal/ck/mine/y", {"X-Amz-Copy-Source": "//x/rehearsal/ck/mine-2/x"}, b""),
    ("PUT", "/rehearsal/ck/mine/y", {"X-Amz-Copy-Source": "x:rehearsal/ck/mine-2/x"}, b""),
    ("POST", "/rehearsal", {}, b""),
    (
        "POST",
        "/rehearsal",
        {"Content-Type": "application/x-www-form-urlencoded"},
        b"key=ck/mine-2/x&file=x",
    ),
    (
        "POST",
        "/rehearsal?delete",
        {"Content-Type": "multipart/form-data; boundary=b"},
        b'--b\r\nContent-Disposition: form-data; name="key"\r\n\r\nck/mine-2/x\r\n--b--\r\n',
    ),
    (
        "POST",
        "/rehearsal?delete",
        {},
        b"<Delete xmlns='x'><Object><Key>ck/mine-2/x</Key></Object></Delete>",
    ),
    (
        "POST",
        "/rehearsal?delete",
        {},
        b"<Delete><Object><Key>ck/mine/y</Key></Object><Object><Key/></Object></Delete>",
    ),
    ("POST", "/rehearsal?delete", {}, b"<Delete><Object><Key>&k;</Key></Object></Delete>"),
    ("POST", "/rehearsal?delete", {}, b"nothing"),
    ("DELETE", "/rehearsal/ck/mine-2/x?uploadId=x", {}, b""),
]


def signed_as_it_is(key: tuple[str, str], method: str, target: str, headers: dict) -> dict:
    """Return the headers of a request with a valid signature, whatever its target looks like."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    headers |= {"X-Amz-Date": now, "X-Amz-Content-Sha256": "UNSIGNED-PAYLOAD"}
    names = sorted(name.lower() for name in headers)
    query = gate.pairs(target.partition("?")[2])
    claim = gate.Claim(key[0], now[:8], "us-east-1", "s3", names, "", now, 0, query)
    environ = {"REQUEST_METHOD": method, "REQUEST_URI": target}
    environ |= {gate.variable(name): value for name, value in headers.items()}
    signature = gate.signature(environ, claim, Key(*key), "UNSIGNED-PAYLOAD")
    scope = f"{key[0]}/{now[:8]}/us-east-1/s3/aws4_request"
    return headers | {
        "Authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders={';'.join(names)}, "
        f"Signature={signature}"
    }


@pytest.mark.parametrize("twisted", TWISTED_REQUESTS)
def test_no_way_to_write_it_reaches_another_jobs_objects(endpoint, two_jobs, twisted):
    method, target, headers, body = twisted
    objects_before = {entry["Key"]: entry["ETag"] for entry in _all_objects(endpoint.s3, "")}
    signed = signed_as_it_is(key_of(two_jobs[1]), method, target, {"Host": endpoint.host} | headers)
    status, _, answer = send(endpoint, request_bytes(f"{method} {target} HTTP/1.1", signed, body))
    assert status == 403 and "may write what begins with" in answer
    objects = {entry["Key"]: entry["ETag"] for entry in _all_objects(endpoint.s3, "")}
    assert objects == objects_before


JSON_TARGETS = {
    "sagemaker": ["SageMaker.CreateTrainingJob", "SageMaker.DescribeTrainingJob", "SageMaker.X"],
    "logs": ["Logs_20140328.PutLogEvents", "Logs_20140328.DescribeLogStreams"],
    "ecr": ["AmazonEC2ContainerRegistry_V20150921.DescribeImages"],
    "iam": [None],
    "sts": [None],
}
S3_PATHS = ["", "/ck/mine/hostile", "/ck/mine/%00", "/%ff"]
S3_QUERIES = ["acl", "tagging", "delete", "uploads", "uploadId=x", "partNumber=a", "max-keys=a"]
S3_QUERIES += [
    "list-type=2",
    "prefix=%00",
    "delimiter=%ff",
    "policy",
    "cors",
    "lifecycle",
    "select",
]
S3_HEADERS = [
    {},
    {"X-Amz-Copy-Source": "/"},
    {"X-Amz-Copy-Source": "%ff/x"},
    {"X-Amz-Tagging": "=&=&"},
    {"X-Amz-Decoded-Content-Length": "999999999999999"},
    {"X-Amz-Decoded-Content-Length": "-1"},
    {"Range": "bytes=a-b"},
    {"Content-Type": "multipart/form-data; boundary=x"},
]


def hostile_body(draw: random.Random) -> bytes:
    """Return the body of a request that is wrong in some way."""
    depth = draw.choice((10, 300, 900, 950, 5000))
    field_names = ["TrainingJobName", "repositoryName", "imageIds", "logEvents", "logGroupName"]
    values = [None, 1, [], {}, "x", [None], [{"imageTag": "\0"}], hostile_texts.text(draw, 300)]
    bodies = [
        b"[" * depth,
        b'{"TrainingJobName":' * depth + b"1" + b"}" * depth,
        b'{"a":' + b"9" * 5000 + b"}",
        b"NaN",
        json.dumps({name: draw.choice(values) for name in draw.sample(field_names, 3)}).encode(),
        hostile_texts.text(draw, 2000).encode(errors="replace"),
        draw.randbytes(30),
        b"Action=GetRole&RoleName=" + draw.choice((b"", b"%00", b"%1b", b"a/b")),
        b"Action=AssumeRole&RoleArn=" + hostile_texts.text(draw, 99).encode(errors="replace"),
    ]
    return draw.choice(bodies)


@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_an_internal_error(endpoint, two_jobs, seed):
    """None of a person and none of a job, to whatever service, ends with status 500."""
    draw = random.Random(seed)
    # moto keeps a bucket's policy as it is, and fails at it later.
    endpoint.s3.create_bucket(Bucket="hostile")
    for _ in range(100):
        key = draw.choice((endpoint.key, key_of(two_jobs[1])))
        service = draw.choice(["s3", "s3", *JSON_TARGETS])
        body = hostile_body(draw)
        method = "POST"
        if service == "s3":
            method = draw.choice(["GET", "HEAD", "PUT", "POST", "DELETE", "PATCH"])
            queries = "&".join(draw.choices(S3_QUERIES, k=draw.randint(0, 3)))
            bucket = "hostile" if key == endpoint.key else "rehearsal"
            target = draw.choice(("/", f"/{bucket}{draw.choice(S3_PATHS)}")) + f"?{queries}"
            headers = {"Host": endpoint.host} | draw.choice(S3_HEADERS)
            headers = signed_as_it_is(key, method, target, headers)
        else:
            target = "/"
            json_target = draw.choice(JSON_TARGETS[service])
            headers = {"X-Amz-Target": json_target} if json_target else {}
            options = {"host": endpoint.host, "method": method, "service": service}
            headers = signed_headers(key, headers=headers, body=body, **options)
        answer = send(endpoint, request_bytes(f"{method} {target} HTTP/1.1", headers, body))
        assert answer[0] < 500 and "SignatureDoesNotMatch" not in answer[2], answer
        assert "Traceback" not in endpoint.output, (method, target, headers, body)
    assert endpoint.describe(two_jobs[0])["TrainingJobStatus"] == "InProgress"


INTERRUPTION_ORDER = {"name": "no-such-job", "hosts": [], "warned": True, "gap": 0}
WRONG_ORDERS = [
    {},
    [],
    "x",
    None,
    {"name": "x"},
    INTERRUPTION_ORDER,
    INTERRUPTION_ORDER | {"more": 1},
    INTERRUPTION_ORDER | {"name": 1},
]
WRONG_ORDERS += [INTERRUPTION_ORDER | {"hosts": hosts} for hosts in ("algo-1", [[]], None)] + [
    INTERRUPTION_ORDER | {"warned": "no"}
]
WRONG_ORDERS += [
    INTERRUPTION_ORDER | {"gap": gap} for gap in ("1", True, -1, float("inf"), float("nan"), None)
]


@pytest.mark.parametrize(
    "content", [*(json.dumps(order).encode() for order in WRONG_ORDERS), b"[" * 100000, b"{", b""]
)
def test_what_is_no_interruption(endpoint, content):
    path = "/Rehearsal/interrupt"
    headers = signed_headers(
        endpoint.key, path, host=endpoint.host, method="POST", service="rehearsal", body=content
    )
    status, _, answer = send(endpoint, request_bytes(f"POST {path} HTTP/1.1", headers, content))
    assert status == 409 and answer.startswith('{"error": '), answer


def channel(uri: str) -> dict:
    """Return a channel of a job."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri}
    return {
        "InputDataConfig": [{"ChannelName": "training", "DataSource": {"S3DataSource": source}}]
    }


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/",
        "/etc",
        "{}/..",
        "{}/../../etc",
        "{}/%2e%2e/%2e%2e",
        "//etc",
        "/proc/self/environ",
        "{}/link",
        "{}-2",
        "{}/round",
        "{}/%00",
        "/x/../{}/../..",
    ],
)
def test_a_channel_of_a_folder_that_is_not_allowed(endpoint, folder, path):
    (folder / "link").unlink(missing_ok=True)
    (folder / "link").symlink_to("/etc")
    (folder / "round").unlink(missing_ok=True)
    (folder / "round").symlink_to("round")
    with pytest.raises(
        ClientError,
        match=r"channel training: found file://.*, expected what is below .* --allow=FOLDER",
    ):
        endpoint.create("image", **channel(f"file://{path.format(folder)}"))


def test_a_link_out_of_an_allowed_folder(endpoint, folder, tmp_path):
    (tmp_path / "secret").write_text("treasure")
    (folder / "data").mkdir()
    (folder / "data/file").write_text("x")
    name, _ = start_job(endpoint, **channel(f"file://{folder}/data"))
    endpoint.sagemaker.stop_training_job(TrainingJobName=name)
    (folder / "data/file").unlink()
    (folder / "data/file").symlink_to(tmp_path / "secret")
    failed = endpoint.wait_until_ended(endpoint.create("image", **channel(f"file://{folder}/data")))
    assert failed["TrainingJobStatus"] == "Failed"
    assert re.search(
        r"found \S+/data/file, a link out of it, expected .* --allow=FOLDER",
        failed["FailureReason"],
    )


# Limits


@pytest.mark.parametrize("sent_as", ["length", "chunks", "control"])
def test_a_request_that_is_too_large(endpoint, sent_as):
    body = b'{"NameContains": "' + b"x" * 2**20 + b'"}'
    host = endpoint.host
    if sent_as == "control":
        headers = signed_headers(
            endpoint.key,
            "/Rehearsal/interrupt",
            host=host,
            method="POST",
            service="rehearsal",
            body=body,
        )
        assert (
            send(endpoint, request_bytes("POST /Rehearsal/interrupt HTTP/1.1", headers, body))[0]
            == 413
        )
        return
    target = {"X-Amz-Target": "SageMaker.ListTrainingJobs"}
    headers = signed_headers(
        endpoint.key, host=host, method="POST", service="sagemaker", headers=target, body=body
    )
    request = request_bytes("POST / HTTP/1.1", headers, body)
    if sent_as == "chunks":
        header_lines = ["POST / HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        request_head = "\r\n".join([*header_lines, "Transfer-Encoding: chunked", "", ""]).encode()
        request = request_head + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    assert send(endpoint, request)[0] == 413


def test_chunks_are_read(endpoint):
    headers = signed_headers(
        endpoint.key,
        host=endpoint.host,
        method="POST",
        service="sagemaker",
        headers={"X-Amz-Target": "SageMaker.ListTrainingJobs"},
        body=b"{}",
    )
    header_lines = ["POST / HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    request_head = "\r\n".join([*header_lines, "Transfer-Encoding: chunked", "", ""]).encode()
    assert send(endpoint, request_head + b"2\r\n{}\r\n0\r\n\r\n")[0] == 200


def test_a_strangers_upload_is_not_waited_for(endpoint):
    """The stranger announces a terabyte, and sends a byte now and then."""
    request_head = request_bytes("PUT /rehearsal/x HTTP/1.1", {"Host": endpoint.host})
    assert is_closed(
        endpoint, request_head.replace(b"Content-Length: 0", b"Content-Length: 1000000000000")
    )


@pytest.mark.parametrize(
    "begin", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "]
)
def test_a_slow_stranger_is_sent_away(endpoint, begin):
    assert is_closed(endpoint, begin)


def is_closed(endpoint: Endpoint, first_bytes: bytes) -> bool:
    """Return whether the endpoint closes a connection that gets a byte now and then."""
    deadline = time.monotonic() + 20
    with socket.create_connection((LOOPBACK, endpoint.port)) as connection:
        connection.sendall(first_bytes)
        connection.settimeout(0.2)
        while time.monotonic() < deadline:
            try:
                connection.sendall(b"x")
                if not connection.recv(65536):
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
    return False


def test_many_strangers(endpoint):
    """Many strangers get a limited number of threads.

    When they are gone, the endpoint answers its user again.
    """
    status = Path(f"/proc/{endpoint.process.pid}/status")
    count_threads = lambda: int(re.search(r"Threads:\s+(\d+)", status.read_text())[1])  # noqa: E731
    threads_before = count_threads()
    most_threads = 0
    connections = [socket.create_connection((LOOPBACK, endpoint.port)) for _ in range(60)]
    for _ in range(10):
        most_threads = max(most_threads, count_threads())
        time.sleep(0.05)
    # Connections on the bridge are counted separately.
    bridge = client("s3", f"http://{BRIDGE}:{endpoint.port}", key=endpoint.key)
    assert bridge.get_object(Bucket="rehearsal", Key="secret")["Body"].read() == b"treasure"
    for connection in connections:
        connection.close()
    assert endpoint.s3.get_object(Bucket="rehearsal", Key="secret")["Body"].read() == b"treasure"
    assert 8 <= most_threads - threads_before <= 16


def test_nobody_waits_for_a_slow_upload(endpoint):
    """A host's upload may stop in the middle."""
    key = {"Bucket": "rehearsal", "Key": "slow"}
    s3 = client(
        "s3",
        endpoint.endpoint,
        key=endpoint.key,
        config=Config(signature_version="s3v4", read_timeout=10, retries={"total_max_attempts": 1}),
    )
    url = urlsplit(s3.generate_presigned_url("put_object", key))
    request = request_bytes(f"PUT {url.path}?{url.query} HTTP/1.1", {"Host": endpoint.host})
    with socket.create_connection((LOOPBACK, endpoint.port)) as connection:
        connection.sendall(request.replace(b"Content-Length: 0", b"Content-Length: 1000") + b"x")
        time.sleep(0.3)  # it is being read
        s3.put_object(**key, Body=b"y")
        connection.sendall(b"x" * 999)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert s3.get_object(**key)["Body"].read() == b"x" * 1000


WITHOUT_THREADS = """
import threading
from sagemaker_rehearsal.api import sockets

sockets.MAX_CONNECTIONS = 1
sockets.QUEUE_SECONDS = 0.1
server = sockets.Server("127.0.0.1", 0, None, sockets.Handler)


def fail(thread):
    raise RuntimeError("can't start new thread")


threading.Thread.start = fail
for _ in range(2):
    try:
        server.process_request(None, None)
    except RuntimeError as error:
        print(error)
"""


def test_a_machine_without_threads_frees_the_places_of_requests():
    command = [python_of("rehearsal"), "-c", WITHOUT_THREADS]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert printed == "can't start new thread\n" * 2


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["serve", "--help"]])
def test_help_lists_all_flags(words):
    """`make rehearsal FLAGS=--help` gives no command."""
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", *words]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    parser = argparse.ArgumentParser(add_help=False)
    settings.add_flags(parser)
    flags = [action.option_strings[0] for action in parser._actions]
    assert len(flags) > 15 and [flag for flag in flags if f"  {flag}" not in printed] == []
    assert "'every ~20s 100 times'" in printed


def test_an_error_hands_no_control_sequence_to_the_terminal():
    """It may be what a job's program has written."""
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", "--run=\x1b[2Jü"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr
    assert printed.startswith("error: --run: \\x1b[2Jü cannot be read")


@pytest.mark.parametrize("levels", [900, 100_000])
def test_a_request_in_a_file_that_is_too_deep_is_told_without_a_traceback(tmp_path, levels):
    file = tmp_path / "request.json"
    file.write_text('{"InputDataConfig": ' + "[" * levels + "]" * levels + "}")
    command = [python_of("rehearsal"), *Endpoint.program, "--port=0"]
    completed = subprocess.run(
        [*command, f"--folder={tmp_path}/reports", f"--run={file}"],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert completed.returncode == 1 and completed.stderr.startswith("error: --run: ")
    assert "Traceback" not in completed.stderr


def test_a_terminal_of_few_letters_ends_no_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:strict")
    with Endpoint(tmp_path / "ü", "--grace=5") as endpoint:
        assert f"reports: {ascii(str(endpoint.folder))[1:-1]}\n" in endpoint.output
        name = endpoint.create("image", Environment={"LEAVE": "ü"})
        endpoint.wait_until_ended(name)
    assert f"{name} Completed after " in endpoint.output


# Clients, unmodified

SDK_2_JOB = {
    "image_uri": "image",
    "role": ROLE,
    "instance_type": "ml.m5.xlarge",
    "instance_count": 1,
    "job_name": "by-sdk-2",
    "input_path": "s3://rehearsal/secret",
    "output_path": "s3://rehearsal/output",
    "environment": {"LEAVE": "1"},
}
SDK_3_JOB = {
    "training_image": "image",
    "role": ROLE,
    "base_job_name": "by-sdk-3",
    "environment": {"LEAVE": "1"},
    "compute": {"instance_type": "ml.m5.xlarge", "instance_count": 1},
    "stopping": {"max_runtime_in_seconds": 600},
    "output": "s3://rehearsal/output",
    "checkpoints": "s3://rehearsal/checkpoints",
    "inputs": {"training": "s3://rehearsal/secret"},
}


@pytest.mark.parametrize("sdk", ["sdk2", "sdk3"])
def test_an_sdk(endpoint, tmp_path, sdk):
    job_arguments = SDK_2_JOB if sdk == "sdk2" else SDK_3_JOB
    completed = Person(sdk, tmp_path, endpoint).run(f"{sdk}_session.py", [job_arguments])
    assert completed.returncode == 0 and re.search(
        "model: s3://rehearsal/output/.*/output/model.tar.gz", completed.stdout
    ), completed.stdout
    if sdk == "sdk2":  # SDK 3 may look when the job is over, and shows no log then
        assert "AWS_ENDPOINT_URL=" in completed.stdout


def test_launch(endpoint, tmp_path):
    command = [
        sys.executable,
        ROOT / "scripts/launch.py",
        "--image=123456789012.dkr.ecr.us-east-1.amazonaws.com/image:1",
    ]
    command += [
        f"--role={ROLE}",
        "--poll=1",
        "--output=s3://rehearsal/output",
        "--channel=training=s3://rehearsal/secret",
    ]
    completed = subprocess.run(
        [*map(str, command), "--env=LEAVE=1"],
        env=Person("launch", tmp_path, endpoint).variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANG_SECONDS,
    )
    assert completed.returncode == 0 and "AWS_ENDPOINT_URL=" in completed.stdout, completed.stdout


def test_a_spot_job_without_instances_continues_on_demand(tmp_path):
    with Endpoint(tmp_path, "--interrupt=at 0.5s gap 1000s") as endpoint:
        command = [
            sys.executable,
            ROOT / "scripts/launch.py",
            "--image=123456789012.dkr.ecr.us-east-1.amazonaws.com/image:1",
            f"--role={ROLE}",
            "--output=s3://rehearsal/output",
            "--spot",
            "--checkpoints=s3://rehearsal/checkpoints",
            "--max-run=600",
            "--poll=1",
            "--on-demand-after=2",
        ]
        launcher = subprocess.Popen(
            [*map(str, command)],
            env=Person("launch", tmp_path, endpoint).variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + HANG_SECONDS
            while len(jobs := endpoint.sagemaker.list_training_jobs()["TrainingJobSummaries"]) < 2:
                assert time.monotonic() < deadline and launcher.poll() is None
                time.sleep(0.1)
            on_demand, spot = (endpoint.describe(job["TrainingJobName"]) for job in jobs)
            endpoint.sagemaker.stop_training_job(TrainingJobName=on_demand["TrainingJobName"])
            output, _ = launcher.communicate(timeout=HANG_SECONDS)
        finally:
            launcher.kill()
    assert spot["EnableManagedSpotTraining"] and spot["TrainingJobStatus"] == "Stopped"
    assert not on_demand["EnableManagedSpotTraining"]
    assert on_demand["CheckpointConfig"] == spot["CheckpointConfig"]
    assert 590 <= on_demand["StoppingCondition"]["MaxRuntimeInSeconds"] <= 600
    assert "it has waited for spot instances for 2 s" in output, output
    assert "it continues on demand" in output


def test_the_aws_cli(endpoint, tmp_path):
    aws = python_of("cli").with_name("aws")
    person = Person("aws", tmp_path, endpoint)
    (tmp_path / "request.json").write_text(
        json.dumps(job(TrainingJobName="by-the-cli", Environment={"LEAVE": "1"}))
    )
    for arguments in (
        ["sagemaker", "create-training-job", "--cli-input-json", f"file://{tmp_path}/request.json"],
        ["s3", "cp", "--recursive", str(ROOT / "examples"), "s3://rehearsal/examples"],
        ["s3", "ls", "s3://rehearsal/examples/"],
        ["sts", "get-caller-identity"],
    ):
        completed = subprocess.run(
            [aws, *arguments],
            env=person.variables,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert completed.returncode == 0, completed.stderr
    assert endpoint.wait_until_ended("by-the-cli")["TrainingJobStatus"] == "Completed"


# The key


def test_the_key_of_a_rehearsal(endpoint, tmp_path):
    (file,) = endpoint.cache.glob("*/*/key")
    assert (
        stat.S_IMODE(file.stat().st_mode) == 0o600
        and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    )
    assert len(endpoint.key[1]) >= 40 and endpoint.key[1] in file.read_text()
    code = "import os; print(os.environ['AWS_ACCESS_KEY_ID'], os.environ['AWS_SECRET_ACCESS_KEY'])"
    completed = run(endpoint, python_of("rehearsal"), "-c", code)
    assert completed.stdout.split() == list(endpoint.key)
    completed = run_command(endpoint, "interrupt", "no-such-job")
    assert completed.stdout.startswith("error: JOB: found 'no-such-job', expected ")
    command = [
        python_of("rehearsal"),
        "-m",
        "sagemaker_rehearsal",
        "exec",
        f"--endpoint={endpoint.endpoint}",
        "--",
        "true",
    ]
    completed = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANG_SECONDS,
    )
    assert (completed.returncode, completed.stdout.count("\n")) == (1, 1)
    assert "as this user" in completed.stdout


def test_each_rehearsal_has_a_key_of_its_own(endpoint, tmp_path):
    with Endpoint(tmp_path) as another_endpoint:
        assert (
            another_endpoint.key[0] != endpoint.key[0]
            and another_endpoint.key[1] != endpoint.key[1]
        )
        with pytest.raises(ClientError, match="is not this rehearsal's"):
            client("s3", another_endpoint.endpoint, key=endpoint.key).list_buckets()


def test_a_warm_pool_goes_from_job_to_job(endpoint):
    resources = {
        "InstanceType": "ml.g5.xlarge",
        "InstanceCount": 1,
        "VolumeSizeInGB": 1,
        "KeepAlivePeriodInSeconds": 600,
    }
    leave = {"ResourceConfig": resources, "Environment": {"LEAVE": "1"}}
    names = []
    for _ in range(2):
        names.append(endpoint.create("image", **leave))
        endpoint.wait_until_ended(names[-1])
    first, second = (endpoint.describe(name)["WarmPoolStatus"] for name in names)
    assert (first["Status"], first["ReusedByJob"]) == ("Reused", names[1])
    assert second["Status"] == "Available"
    listed = endpoint.sagemaker.list_training_jobs(WarmPoolStatusEquals="Available")
    assert [job["TrainingJobName"] for job in listed["TrainingJobSummaries"]] == names[1:]
    give_back = {"KeepAlivePeriodInSeconds": 0}
    endpoint.sagemaker.update_training_job(TrainingJobName=names[1], ResourceConfig=give_back)
    assert endpoint.describe(names[1])["WarmPoolStatus"]["Status"] == "Terminated"
    with pytest.raises(ClientError, match="has no warm pool that is Available"):
        endpoint.sagemaker.update_training_job(TrainingJobName=names[1], ResourceConfig=give_back)
    with pytest.raises(ClientError, match="does not emulate RemoteDebugConfig of UpdateTraining"):
        endpoint.sagemaker.update_training_job(
            TrainingJobName=names[1], RemoteDebugConfig={"EnableRemoteDebug": True}
        )
    with pytest.raises(ClientError, match="KeepAlivePeriodInSeconds cannot be given together"):
        endpoint.create(
            "image",
            **leave,
            EnableManagedSpotTraining=True,
            StoppingCondition={"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60},
        )


def test_a_client_sees_which_of_the_preferred_types_was_chosen(tmp_path):
    """And the launcher's commands start the same request again."""
    preferred = [
        {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 1},
        {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
    ]
    with Endpoint(tmp_path, "--no-capacity=ml.p5.48xlarge") as endpoint:
        resources = {"InstancePreferences": preferred, "VolumeSizeInGB": 1}
        name = endpoint.create("image", ResourceConfig=resources, Environment={"LEAVE": "1"})
        job = endpoint.wait_until_ended(name)
        assert job["TrainingJobStatus"] == "Completed"
        chosen = {"SelectedInstanceType": "ml.g5.xlarge", "SelectedInstanceCount": 2}
        assert job["ResourceConfig"] == resources | chosen
        completed = run_command(endpoint, "rerun", name)
        assert completed.returncode == 0, completed.stdout
        (again, _) = endpoint.sagemaker.list_training_jobs()["TrainingJobSummaries"]
        endpoint.wait_until_ended(again["TrainingJobName"])
        with pytest.raises(ClientError, match="does not emulate ResourceConfig.SelectedInstanceT"):
            endpoint.create("image", ResourceConfig=resources | chosen)
        completed = run_command(endpoint, "compare", name)
        assert f"{name}-left-alone runs without interruptions" in completed.stdout
