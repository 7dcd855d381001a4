"""Attacks on the endpoint by real requests: of a web page and a neighbour on the bridge."""

import io
import json
import re
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aws_services import client
from botocore.config import Config
from botocore.exceptions import ClientError
from containers import ROOT
from endpoint_requests import (
    BRIDGE,
    LOOPBACK,
    Endpoint,
    ask,
    check_nothing_revealed,
    check_refused,
    job,
    request_bytes,
    send,
    signed_headers,
    start_job,
)
from environments import python_of

pytestmark = pytest.mark.slow


CREATE_TARGET = "SageMaker.CreateTrainingJob"


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
    return ask(endpoint, "POST / HTTP/1.1", headers, body)


def test_a_signed_request_passes(endpoint):
    """Each attack below differs from this request in one thing, which is why it is refused."""
    for host in (endpoint.host, f"localhost:{endpoint.port}", f"LocalHost:{endpoint.port}"):
        status, headers, body = ask(
            endpoint, "GET / HTTP/1.1", signed_headers(endpoint.key, host=host)
        )
        assert (
            status == 200 and "<Name>rehearsal</Name>" in body and "access-control-" not in headers
        )
    host = f"{BRIDGE}:{endpoint.port}"
    assert (
        ask(endpoint, "GET / HTTP/1.1", signed_headers(endpoint.key, host=host), address=BRIDGE)[0]
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
    check_refused(
        endpoint,
        request_line,
        {"Host": f"{address}:{endpoint.port}"} | headers,
        b"{}",
        address=address,
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
def test_what_is_not_a_request_gets_no_version(endpoint, request_line):
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
    check_refused(endpoint, "GET / HTTP/1.1", headers)


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
    check_nothing_revealed(answer)
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
    check_refused(endpoint, f"{method} / HTTP/1.1", headers)


def test_no_page_may_read_even_what_a_bucket_allows(endpoint):
    rule = {"AllowedOrigins": ["*"], "AllowedMethods": ["GET"]}
    endpoint.s3.create_bucket(Bucket="open-to-all", ACL="public-read-write")
    endpoint.s3.put_bucket_cors(Bucket="open-to-all", CORSConfiguration={"CORSRules": [rule]})
    endpoint.s3.put_object(Bucket="open-to-all", Key="x", Body=b"treasure", ACL="public-read")
    host_header = {"Host": endpoint.host}
    check_refused(endpoint, "GET /open-to-all/x HTTP/1.1", host_header)
    status, headers, body = ask(
        endpoint,
        "GET /open-to-all/x HTTP/1.1",
        signed_headers(endpoint.key, "/open-to-all/x", host=endpoint.host),
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
    check_refused(endpoint, request_line, headers | forgery.get("headers", {}))


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
    check_refused(endpoint, "POST / HTTP/1.1", headers, body)


def test_a_signature_for_one_service_is_for_no_other(endpoint):
    target = {"X-Amz-Target": CREATE_TARGET}
    headers = signed_headers(
        endpoint.key, host=endpoint.host, method="POST", headers=target, body=b"{}"
    )
    jobs_before = call_sagemaker(endpoint, endpoint.key, "ListTrainingJobs", {})[2]
    ask(endpoint, "POST / HTTP/1.1", headers, b"{}")
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
    status, _, body = ask(
        endpoint, f"GET {path} HTTP/1.1", signed_headers(endpoint.key, path, host=endpoint.host)
    )
    assert status in (403, 404) and ("NoSuch" in body or "Signature" in body), body


def test_a_presigned_address(endpoint):
    s3 = client("s3", endpoint.endpoint, key=endpoint.key, config=Config(signature_version="s3v4"))
    url = s3.generate_presigned_url(
        "get_object", Params={"Bucket": "rehearsal", "Key": "secret"}, ExpiresIn=60
    )
    host_header = {"Host": endpoint.host}
    target = url.partition(str(endpoint.port))[2]
    assert ask(endpoint, f"GET {target} HTTP/1.1", host_header)[2] == "treasure"
    for forged_target in (
        target.replace("secret", "other"),
        target.replace("Expires=60", "Expires=6000"),
        target.replace("Expires=60", "Expires=-60"),
        target + "&x=y",
        target[:-1] + ("0" if target[-1] != "0" else "1"),
        target.partition("&X-Amz-Signature")[0],
    ):
        check_refused(endpoint, f"GET {forged_target} HTTP/1.1", host_header)
    check_refused(endpoint, f"DELETE {target} HTTP/1.1", host_header)
    check_refused(endpoint, f"GET {target} HTTP/1.1", host_header | {"Origin": "http://evil.com"})
    check_refused(endpoint, f"GET {target} HTTP/1.1", host_header | {"x-amz-date": "x"})
    expired_url = s3.generate_presigned_url(
        "get_object", Params={"Bucket": "rehearsal", "Key": "secret"}, ExpiresIn=0
    )
    time.sleep(1.1)
    check_refused(
        endpoint, f"GET {expired_url.partition(str(endpoint.port))[2]} HTTP/1.1", host_header
    )
    old_signer = client(
        "s3", endpoint.endpoint, key=endpoint.key, config=Config(signature_version="s3")
    )
    url = old_signer.generate_presigned_url(
        "get_object", Params={"Bucket": "rehearsal", "Key": "secret"}
    )
    status, _, body = ask(
        endpoint, f"GET {url.partition(str(endpoint.port))[2]} HTTP/1.1", host_header
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


def channel(uri: str) -> dict:
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
def test_a_channel_of_a_folder_that_is_not_allowed(endpoint, allowed_folder, path):
    (allowed_folder / "link").unlink(missing_ok=True)
    (allowed_folder / "link").symlink_to("/etc")
    (allowed_folder / "round").unlink(missing_ok=True)
    (allowed_folder / "round").symlink_to("round")
    with pytest.raises(
        ClientError,
        match=r"channel training: found file://.*, expected what is below .* --allow=FOLDER",
    ):
        endpoint.create("image", **channel(f"file://{path.format(allowed_folder)}"))


def test_a_link_out_of_an_allowed_folder(endpoint, allowed_folder, tmp_path):
    (tmp_path / "secret").write_text("treasure")
    (allowed_folder / "data").mkdir()
    (allowed_folder / "data/file").write_text("x")
    name, _ = start_job(endpoint, **channel(f"file://{allowed_folder}/data"))
    endpoint.sagemaker.stop_training_job(TrainingJobName=name)
    (allowed_folder / "data/file").unlink()
    (allowed_folder / "data/file").symlink_to(tmp_path / "secret")
    failed = endpoint.wait_until_ended(
        endpoint.create("image", **channel(f"file://{allowed_folder}/data"))
    )
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
        assert ask(endpoint, "POST /Rehearsal/interrupt HTTP/1.1", headers, body)[0] == 413
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
