"""What a job reaches by the endpoint, and what it does not."""

import datetime
import io
import json
import random
import urllib.request
from collections.abc import Iterator
from typing import Any

import hostile_texts
import pytest
from aws_services import client
from botocore.config import Config
from botocore.exceptions import ClientError
from endpoint_requests import (
    BRIDGE,
    ask,
    check_refused,
    job,
    request_bytes,
    send,
    signed_headers,
    start_job,
)

from sagemaker_rehearsal.api import gate
from sagemaker_rehearsal.aws.access_keys import Key

pytestmark = pytest.mark.slow


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
        with pytest.raises(ClientError, match="expected from a job's hosts") as refused:
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
    assert ask(endpoint, "POST /Rehearsal/interrupt HTTP/1.1", headers, order)[0] == 403
    assert endpoint.describe(name)["TrainingJobStatus"] == "InProgress"
    for stopped in (name, other):
        endpoint.sagemaker.stop_training_job(TrainingJobName=stopped)
        endpoint.wait_until_ended(stopped)
    # The key is valid as long as the job runs.
    with pytest.raises(ClientError, match="is not this rehearsal's"):
        s3.list_buckets()
    report_files = "".join(path.read_text() for path in (endpoint.folder / name).glob("*.*"))
    assert name in report_files
    assert not any(secret in report_files for secret in (*key, *endpoint.key))
    all_files = "".join(path.read_text() for path in endpoint.folder.rglob("*") if path.is_file())
    assert endpoint.key[1] not in all_files


def test_the_page_follows_a_job_and_stops_it(endpoint):
    name = endpoint.create("image", spot=True, Environment={"WORDS": "said by the job"})
    arn = endpoint.wait_for(name, "Training")["TrainingJobArn"]
    host_header = {"Host": endpoint.host}
    browser_headers = host_header | {"Accept": "text/html"}
    line = f"GET {endpoint.page()} HTTP/1.1"
    status, headers, body = ask(endpoint, line, browser_headers)
    assert status == 200 and name in body
    assert "content-security-policy: default-src 'none'" in headers
    bridge_headers = browser_headers | {"Host": f"{BRIDGE}:{endpoint.port}"}
    check_refused(endpoint, line, bridge_headers, address=BRIDGE)
    stream = urllib.request.urlopen(
        f"{endpoint.endpoint}{endpoint.page('/Rehearsal/page/stream', job=arn)}", timeout=60
    )
    with stream:
        assert any(b"said by the job" in line for line in stream)
        stop = f"POST {endpoint.page('/Rehearsal/page/stop', job=arn)} HTTP/1.1"
        check_refused(endpoint, stop, host_header)
        assert endpoint.describe(name)["TrainingJobStatus"] == "InProgress"
        own_headers = host_header | {"Origin": endpoint.endpoint}
        assert ask(endpoint, stop, own_headers)[0] == 303
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
    status, _, answer = ask(endpoint, f"{method} {target} HTTP/1.1", signed, body)
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
        answer = ask(endpoint, f"{method} {target} HTTP/1.1", headers, body)
        assert answer[0] < 500 and "SignatureDoesNotMatch" not in answer[2], answer
        assert "Traceback" not in endpoint.output, (method, target, headers, body)
    assert endpoint.describe(two_jobs[0])["TrainingJobStatus"] == "InProgress"


@pytest.mark.parametrize("content", [b"null", b'{"gap": NaN}', b"[" * 100000, b"{", b""])
def test_a_wrong_order_of_an_interruption_is_refused(endpoint, content):
    """test_rehearsal_job.py has what is wrong in an order that is JSON."""
    path = "/Rehearsal/interrupt"
    headers = signed_headers(
        endpoint.key, path, host=endpoint.host, method="POST", service="rehearsal", body=content
    )
    status, _, answer = ask(endpoint, f"POST {path} HTTP/1.1", headers, content)
    assert status == 409 and answer.startswith('{"error": '), answer
