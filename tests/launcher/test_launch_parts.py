"""The parts of scripts/launch.py: waiting times, limits, what a job cost, and its log.

Some waiting times contradict the run's limit.
"""

import argparse
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    ReadTimeoutError,
)

from sagemaker_lightning.launcher import (
    account_checks,
    aws,
    command,
    contradictions,
    drill,
    follower,
    hyperparameter_check,
    job_request,
    jobs,
    request_validation,
)
from sagemaker_lightning.launcher.sites import Site

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/x:1"
FLAGS = {
    "image": IMAGE,
    "spot": True,
    "checkpoints": "s3://b/c",
    "max_run": 100,
    "keep_alive": None,
    "subnet": None,
}
FLAGS |= {
    "instance_group": None,
    "instance_type": None,
    "instance_count": None,
    "security_group": None,
    "drill": False,
}
FLAGS |= {"drill_data": [], "channel": [], "hyperparameters": []}
FLAGS |= {"instance_preference": [], "network_isolation": False}
FLAGS |= {"volume_kms_key": None, "output_kms_key": None, "training_plan": None}


@pytest.mark.parametrize("max_wait", [None, 100, 101, 200])
def test_a_wait_as_long_as_the_run_is_allowed(max_wait):
    contradictions.check_flags(argparse.Namespace(**FLAGS, max_wait=max_wait))


def site(client) -> Site:
    return Site("us-east-1", lambda service: client, "launch", "--region=us-east-1")


# what each look finds (the last look of a running job included), and how many looks there are
LOG_ANSWERS = {
    "nothing more": ([True, False], 2),
    "a late line": ([False, True, False, True], 3),
    "lines without an end": ([True] * 9, 4),
}


@pytest.mark.parametrize(("found", "looks"), LOG_ANSWERS.values(), ids=LOG_ANSWERS)
def test_the_last_lines_are_waited_for(monkeypatch, capsys, found, looks):
    """CloudWatch Logs gets the last lines some seconds after the job's end."""
    did = []
    job = {"TrainingJobStatus": "Completed", "TrainingJobName": "job-1"}
    log = SimpleNamespace(show=lambda: (did.append("look"), found.pop(0))[1])
    client = SimpleNamespace(describe_training_job=lambda TrainingJobName: job)  # noqa: N803
    monkeypatch.setattr(follower, "Log", lambda site, name: log)
    monkeypatch.setattr(follower, "time", SimpleNamespace(sleep=did.append))
    assert follower.follow(site(client), "job-1", 5.0) == 0
    assert did == ["look"] + [5.0, "look"] * (looks - 1)
    assert capsys.readouterr().out.startswith("job-1: Completed\n")


# What a job says of itself ------------------------------------------------------------------------

ENDED = {"TrainingJobName": "job-1", "TrainingJobStatus": "Completed"}
ENDED |= {"TrainingTimeInSeconds": 400, "BillableTimeInSeconds": 100}
REPORTS = {
    "one instance": ({"ResourceConfig": {"InstanceCount": 1}}, ", 100 s billable"),
    "nothing is known of the instances": ({}, ", 100 s billable"),
    "two instances": (
        {"ResourceConfig": {"InstanceCount": 2}},
        ", 100 s billable on each of 2 instances",
    ),
    "groups": (
        {"ResourceConfig": {"InstanceGroups": [{"InstanceCount": 3}, {"InstanceCount": 2}]}},
        ", 100 s billable on each of 5 instances",
    ),
    "spot": ({"EnableManagedSpotTraining": True}, ", 100 s billable, 75.0 % saved by spot"),
    "nothing saved": (
        {"EnableManagedSpotTraining": True, "BillableTimeInSeconds": 400},
        ", 400 s billable, 0.0 % saved by spot",
    ),
    "nothing billed": (
        {"EnableManagedSpotTraining": True, "BillableTimeInSeconds": 0},
        ", 0 s billable, 100.0 % saved by spot",
    ),
}


@pytest.mark.parametrize(("job", "says"), REPORTS.values(), ids=REPORTS)
def test_what_a_job_cost(capsys, job, says):
    assert follower.report(site(None), ENDED | job) == 0
    first = f"job-1: Completed, 400 s of training{says}\n"
    assert capsys.readouterr().out == f"{first}model: None\n"


def test_a_job_that_never_trained_cost_nothing(capsys):
    job = {"TrainingJobName": "job-1", "TrainingJobStatus": "Stopped"}
    job |= {"EnableManagedSpotTraining": True, "SecondaryStatus": "MaxWaitTimeExceeded"}
    assert follower.report(site(None), job) == 1
    unbilled = {"TrainingTimeInSeconds": 0, "BillableTimeInSeconds": 0}
    assert follower.report(site(None), job | unbilled) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "job-1: Stopped (MaxWaitTimeExceeded)",
        "job-1: Stopped (MaxWaitTimeExceeded), 0 s of training, 0 s billable",
    ]
    says = (
        "error: the job ended as Stopped\n"
        "it cannot continue: it had no --checkpoints; start it again with one\n"
    )
    assert printed.err == says * 2


def test_each_change_of_the_status_is_shown_once(capsys):
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    changes = [{"StartTime": moment, "Status": status} for status in ("Starting", "Training")]
    shown = follower.show_status({}, 0)
    shown = follower.show_status({"SecondaryStatusTransitions": changes[:1]}, shown)
    assert follower.show_status({"SecondaryStatusTransitions": changes}, shown) == 2
    assert capsys.readouterr().out == "[03:04:05] Starting: \n[03:04:05] Training: \n"


def refusal(code: str, message: str = "no\n way") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "GetLogEvents")


class Logs:
    """CloudWatch Logs: pages of streams, and pages of the lines of each."""

    exceptions = SimpleNamespace(ResourceNotFoundException=KeyError)

    def __init__(self, **lines: list[list[str]]) -> None:
        self.lines = {f"job-1/{name.replace('_', '-')}-17": pages for name, pages in lines.items()}
        self.error: Exception | None = None
        self.asked = 0

    def get_paginator(self, name: str) -> "Logs":
        assert name == "describe_log_streams"
        return self

    def paginate(self, **names: str) -> list[dict]:
        self.asked += 1
        if self.error:
            raise self.error
        assert names["logStreamNamePrefix"] == "job-1/"
        return [{"logStreams": [{"logStreamName": name}]} for name in self.lines]

    def get_log_events(self, **request: object) -> dict:
        assert request["startFromHead"] is True
        pages = self.lines[request["logStreamName"]]
        page = int(request.get("nextToken", 0))
        events = [{"message": line} for line in (pages[page] if page < len(pages) else ())]
        return {"events": events, "nextForwardToken": str(min(page + 1, len(pages)))}


def test_all_pages_of_all_streams_are_shown_once(capsys):
    logs = Logs(algo_1=[["a"], [], ["b"]], algo_2=[["c"]])
    log = follower.Log(site(logs), "job-1")
    assert log.show() is True
    assert capsys.readouterr().out.split("\n") == ["algo-1: a", "algo-1: b", "algo-2: c", ""]
    assert log.show() is False
    logs.lines["job-1/algo-2-17"].append(["d"])
    assert log.show() is True
    assert capsys.readouterr().out == "algo-2: d\n"


@pytest.mark.parametrize(("hosts", "seconds"), [(10, 0.0), (64, 12.8)])
def test_many_hosts_stay_below_the_accounts_quota(monkeypatch, hosts, seconds):
    """Each stream is asked twice: for its line, and whether there are more."""
    slept: list[float] = []
    monkeypatch.setattr(follower, "time", SimpleNamespace(sleep=slept.append))
    logs = Logs(**{f"algo_{number}": [["a"]] for number in range(hosts)})
    assert follower.Log(site(logs), "job-1").show() is True
    assert sum(slept) == pytest.approx(seconds)


def test_a_line_of_the_log_gives_the_terminal_no_order(capsys):
    lines = ["\x1b[31mred\x1b[0m", "10 %\r20 %\r", "a\x1b]0;title\x07b\tc\x9b2J\u202ed\x00"]
    follower.Log(site(Logs(algo_1=[lines])), "job-1").show()
    assert capsys.readouterr().out == "algo-1: red\nalgo-1: 20 %\nalgo-1: ab c 2J d \n"


def test_a_log_that_is_not_there_yet_or_may_not_be_read(capsys):
    logs = Logs(algo_1=[["a"]])
    log = follower.Log(site(logs), "job-1")
    logs.error = KeyError()
    assert not log.show() and not log.show() and logs.asked == 2
    logs.error = refusal("ThrottlingException")
    with pytest.raises(ClientError):
        log.show()
    logs.error = refusal("AccessDeniedException")
    assert not log.show() and not log.show() and logs.asked == 4
    printed = capsys.readouterr()
    says = "the log cannot be shown: GetLogEvents: AccessDeniedException: no way\n"
    assert (printed.out, printed.err) == ("", says)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (KeyboardInterrupt(), 130, "no longer following; the job continues. To stop it: "),
        (
            refusal("ExpiredTokenException"),
            1,
            "error: the job cannot be followed any longer, but continues: Get",
        ),
    ],
)
def test_who_stops_following_leaves_the_job(capsys, error, status, says):
    def refuse(TrainingJobName: str) -> dict:  # noqa: N803
        raise error

    client = SimpleNamespace(describe_training_job=refuse)
    assert follower.follow(site(client), "job-1", 5.0) == status
    printed = capsys.readouterr().err
    assert printed.lstrip().startswith(says)
    assert "to follow it again: launch logs job-1 --region=us-east-1 --follow\n" in printed


UNREACHABLE = EndpointConnectionError(endpoint_url="https://x")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (refusal("Throttling"), "no answer (GetLogEvents: Throttling: no way); "),
        (UNREACHABLE, "no answer (Could not connect to the endpoint URL: "),
        (ReadTimeoutError(endpoint_url="https://x"), "no answer (Read timeout on endpoint URL: "),
        (
            ClientError(
                {"Error": {"Code": "Odd"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "X"
            ),
            "no answer (X: Odd: None); ",
        ),
    ],
    ids=["throttled", "no network", "a timeout", "a fault of AWS"],
)
def test_an_answer_that_does_not_come_ends_no_following(monkeypatch, capsys, error, says):
    """It is asked again, ever less often, and one line says so."""
    failures = [error] * 6
    slept = []
    monkeypatch.setattr(follower, "time", SimpleNamespace(sleep=slept.append))

    def describe(TrainingJobName: str) -> dict:  # noqa: N803
        if failures:
            raise failures.pop()
        return ENDED

    client = Logs(algo_1=[["a"]])
    client.describe_training_job = describe
    assert follower.follow(site(client), "job-1", 5.0) == 0
    assert slept[:6] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    first, second, *others = capsys.readouterr().err.splitlines()
    assert first.startswith(says) and second == "answered again" and not others


def test_a_site_may_have_an_end_of_its_patience(monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(follower, "time", SimpleNamespace(sleep=slept.append))

    def refuse(TrainingJobName: str) -> dict:  # noqa: N803
        raise UNREACHABLE

    client = SimpleNamespace(describe_training_job=refuse)
    assert follower.follow(replace(site(client), patience=10.0), "job-1", 1.0) == 1
    assert slept == [1.0, 2.0, 4.0, 8.0]
    assert "error: the job cannot be followed any longer" in capsys.readouterr().err


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_wait", "waits"), [(None, 200), (100, 100), (150, 150)])
def test_a_spot_job_waits_as_long_as_its_flag_says(max_wait, waits):
    flags = ["--spot", "--checkpoints=s3://bucket/c", "--max-run=100"]
    flags += [f"--max-wait={max_wait}"] if max_wait else []
    request = job_request.build(parsed(*flags))
    limits = {"MaxRuntimeInSeconds": 100, "MaxWaitTimeInSeconds": waits}
    assert request["StoppingCondition"] == limits and request["EnableManagedSpotTraining"]
    assert request["CheckpointConfig"] == {"S3Uri": "s3://bucket/c/"}
    request_validation.validate(request)


def parsed(*flags: str) -> argparse.Namespace:
    role = "--role=arn:aws:iam::123456789012:role/x"
    return command.parser().parse_args(
        [f"--image={IMAGE}", role, "--output=s3://bucket/o", "--job-name=a", *flags]
    )


ALLOWED = [
    "--retries=1", "--retries=30", "--keep-alive=21600", f"--job-name={'x' * 63}",
    f"--env=A={'x' * 512}", "--volume-size=1", "--max-run=2419200",
    "--metric=loss=loss=(?:a|b)([0-9]+)",
]  # fmt: skip
REFUSED = {
    "--retries=31": "--retries: found 31, expected 1 to 30",
    "--keep-alive=21601": "--keep-alive: found 21601, expected 0 to 21600",
    f"--job-name={'x' * 64}": (
        f"--job-name: found 64 characters in its value ({'x' * 40}...), expected 1 to 63 char"
    ),
    "--tag=AWS:x=1": "--tag: found 'AWS:x', expected a key without aws: at its start",
    f"--env=A={'x' * 513}": "--env A: found 513 characters in its value (xxx",
    f"--env={'A' * 513}=x": "--env: found 513 characters in its name (AAA",
}


@pytest.mark.parametrize("flag", ALLOWED)
def test_a_limit_itself_is_allowed(flag):
    request_validation.validate(job_request.build(parsed(flag)))


@pytest.mark.parametrize(("flag", "says"), REFUSED.items())
def test_what_is_above_a_limit_is_not(flag, says):
    with pytest.raises(ValueError) as caught:
        request_validation.validate(job_request.build(parsed(flag)))
    assert str(caught.value).startswith(says)


def test_as_many_of_each_as_sagemaker_takes():
    many = [f"k{number}=1" for number in range(100)]
    request_validation.validate(job_request.build(parsed(*many)))
    with pytest.raises(ValueError, match="^hyperparameter: found 101 entries in its value, exp"):
        request_validation.validate(job_request.build(parsed(*many, "k=1")))


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("09", 9), ("0", 0), ("-1", 0), ("²", 0)])
def test_a_number_of_something_is_above_0(text, number):
    if number:
        assert command.positive(text) == number
        return
    with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number above 0"):
        command.positive(text)


@pytest.mark.parametrize(
    ("uri", "location"),
    [
        ("s3://abc", ("abc", "")),
        (f"s3://{'a' * 63}/x/y", ("a" * 63, "x/y")),
        ("s3://ab/x", None),
        (f"s3://{'a' * 64}/x", None),
        ("s3://-bc/x", None),
        ("s3://ab-/x", None),
        ("http://abc/x", None),
    ],
)
def test_the_name_of_a_bucket(uri, location):
    if location:
        assert aws.s3_location("--output", uri) == location
        return
    with pytest.raises(ValueError, match=f"--output: found '{uri}', expected s3://BUCKET/PREF"):
        aws.s3_location("--output", uri)


@pytest.mark.parametrize("name", ["us-east-1", "us-gov-west-1", "ap-southeast-12"])
def test_the_name_of_a_region(monkeypatch, name):
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert aws.region(name) == aws.region(name, "mars") == name
    assert aws.region(None, name) == "eu-west-1"
    for wrong in (f"{name}x", f"1{name[1:]}", "us-east", "useast1"):
        with pytest.raises(ValueError, match="--region: found"):
            aws.region(wrong)


def test_a_service_that_cannot_be_reached_is_given_up_soon():
    config = aws.client("sts", "us-east-1").meta.config
    assert config.connect_timeout == 5 and config.retries["mode"] == "standard"


def test_stopping_a_job_says_how_long_it_has(capsys):
    stopped = []
    stopping = SimpleNamespace(stop_training_job=lambda **names: stopped.append(names))
    stopping.describe_training_job = lambda **_: {"TrainingJobStatus": "InProgress"}
    jobs.stop(site(stopping), "job-1")
    assert stopped == [{"TrainingJobName": "job-1"}]
    assert capsys.readouterr().err == (
        "job-1 is stopping; SageMaker gives it 120 seconds to end by itself\n"
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--keep-alive=9", "--instance-group=a=ml.x:1"], "--keep-alive: not allowed with --inst"),
        (["--instance-group=a=ml.x:1", "--instance-count=1"], "--instance-group: not allowed with"),
        (
            ["--instance-group=a=ml.x:1", "--instance-type=ml.x"],
            "--instance-group: not allowed with",
        ),
        (["--drill-data=a=."], "--drill-data: found without --drill"),
        (["--drill-data=a=.", "--drill"], ""),
        (["--keep-alive=9"], ""),
        (["--subnet=a", "--security-group=b"], ""),
    ],
)
def test_flags_that_exclude_each_other(flags, says):
    if not says:
        contradictions.check_flags(parsed(*flags))
        return
    with pytest.raises(ValueError, match=f"^{says}"):
        contradictions.check_flags(parsed(*flags))


def test_a_role_may_be_a_name():
    """What is no ARN is the request's to judge; a part of one, too."""
    for role in ("SageMaker", "arn:aws", "arn:aws:iam::123456789012:role/x"):
        args = argparse.Namespace(**FLAGS | {"image": IMAGE}, role=role)
        contradictions.check_places(args, "us-east-1")
    china = argparse.Namespace(**FLAGS | {"image": "x"}, role="arn:aws:iam::123456789012:role/x")
    with pytest.raises(ValueError, match="found a role in aws, but region cn-north-1 is in aws-cn"):
        contradictions.check_places(china, "cn-north-1")


def test_the_options_of_a_channel():
    flags = ["--instance-group=a=ml.g5.xlarge:1", "--instance-group=b=ml.g5.xlarge:2"]
    text = "--channel=x=s3://bucket/a,b/,group=b,mode=FastFile,group=a,distribution=ShardedByS3Key"
    (channel,) = job_request.channels(parsed(*flags, text))
    assert channel["InputMode"] == "FastFile"
    assert channel["DataSource"]["S3DataSource"] == {
        "S3DataType": "S3Prefix",
        "S3Uri": "s3://bucket/a,b/",
        "S3DataDistributionType": "ShardedByS3Key",
        "InstanceGroupNames": ["b", "a"],
    }
    for wrong in ("a=ml.x:0", "a=ml.x:01", "=ml.x:1", "a=:1", "a=ml.x"):
        with pytest.raises(ValueError, match="--instance-group: found"):
            job_request.group(wrong)
    for wrong in ("=x", "a"):
        with pytest.raises(ValueError, match="--tag: found '.*', expected KEY=VALUE"):
            job_request.pairs("--tag", [wrong])


# What is looked up --------------------------------------------------------------------------------


def test_a_bucket_whose_region_is_unknown_is_accepted():
    """An older S3 does not tell it."""
    for told in ({}, {"BucketRegion": "us-east-1"}):
        s3 = SimpleNamespace(head_bucket=lambda Bucket, told=told: told)  # noqa: N803
        s3.meta = SimpleNamespace(region_name="us-east-1")
        account_checks.check_bucket(s3, "--output", "s3://bucket/x")
    s3.meta.region_name = "eu-west-1"
    says = "--output: found a bucket in us-east-1, but the job is to"
    with pytest.raises(ValueError, match=says):
        account_checks.check_bucket(s3, "--output", "s3://bucket/x")


@pytest.mark.parametrize(
    ("image", "asked"),
    [
        (IMAGE, {"imageTag": "1"}),
        (IMAGE.removesuffix(":1"), {"imageTag": "latest"}),
        (f"{IMAGE}@sha256:{'a' * 64}", {"imageDigest": f"sha256:{'a' * 64}"}),
    ],
)
def test_an_image_is_asked_for_by_its_tag_or_digest(image, asked):
    requests = []
    ecr = SimpleNamespace(describe_images=lambda **request: requests.append(request))
    account_checks.check_image(ecr, image)
    assert requests == [{"registryId": "123456789012", "repositoryName": "x", "imageIds": [asked]}]


@pytest.mark.parametrize(
    ("check", "call"),
    [
        (lambda service: account_checks.check_image(service, IMAGE), "describe_images"),
        (lambda service: account_checks.check_bucket(service, "--o", "s3://abc/"), "head_bucket"),
    ],
)
def test_a_refusal_is_not_taken_for_what_is_missing(check, call):
    def refuse(**_) -> None:
        raise refusal("AccessDenied")

    with pytest.raises(ClientError):
        check(SimpleNamespace(**{call: refuse}))


def test_the_parser_that_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(
        hyperparameter_check, "ask", lambda command, *_: asked.append(command) or ["asked"]
    )
    request = {"HyperParameters": {"sagemaker_program": "mine.py"}}
    assert hyperparameter_check.check(request, "no") == [
        "the hyperparameters, as --check-hyperparameters=no says"
    ]
    own = ["the hyperparameters: they are for a program of the job's own, mine.py"]
    assert hyperparameter_check.check(request, "local") == own
    request = {"Environment": {"SAGEMAKER_PROGRAM": "mine.py"}}
    assert hyperparameter_check.check(request, "image") == own and not asked
    for program in sorted(hyperparameter_check.LAUNCHERS):
        request = {"Environment": {"SAGEMAKER_PROGRAM": program}}
        assert hyperparameter_check.check(request, "local") == ["asked"]
    monkeypatch.setattr(hyperparameter_check, "find_spec", lambda name: None)
    monkeypatch.setattr(hyperparameter_check, "ROOT", hyperparameter_check.ROOT / "none")
    assert "lacks the application's packages" in hyperparameter_check.check(request, "local")[0]


def test_without_a_checkout_one_line_says_what_it_has(monkeypatch):
    """As in the wheel, which has neither app/ nor .venv."""
    for module in (hyperparameter_check, drill):
        monkeypatch.setattr(module, "IS_CHECKOUT", False)
    (line,) = hyperparameter_check.check({}, "local")
    assert "app/train.py, is in a checkout" in line and "--check-hyperparameters=image" in line
    with pytest.raises(ValueError, match="--drill: the application to drill is in a checkout"):
        drill.run({}, "local", {})


def test_the_channels_decide_what_the_parser_expects():
    request = {"InputDataConfig": [{"ChannelName": "My-Data"}]}
    assert hyperparameter_check.channel_variables({}) == {}
    assert hyperparameter_check.channel_variables(request) == {
        "SM_CHANNELS": '["My-Data"]', "SM_CHANNEL_MY-DATA": "/opt/ml/input/data/My-Data"
    }  # fmt: skip


def test_what_a_drill_cannot_have(tmp_path):
    (tmp_path / "file").touch()
    source = {"S3DataSource": {"S3Uri": "s3://bucket/x"}}
    request = {"InputDataConfig": [{"ChannelName": "a", "DataSource": source}]}
    for data, says in (
        ({}, "found none for the channel a, which is at s3://bucket/x"),
        ({"a": str(tmp_path / "file")}, "found .*file for the channel a"),
        ({"a": str(tmp_path), "b": "."}, "found b, expected the channels: a$"),
    ):
        with pytest.raises(ValueError, match=f"--drill-data: {says}"):
            drill.run(request, "image", data)
    with pytest.raises(ValueError, match="--drill-data: found b, expected the channels: none"):
        drill.run({}, "image", {"b": "."})
    for text in ("a\nb", "a\rb"):
        image = {"AlgorithmSpecification": {"TrainingImage": IMAGE}, "Environment": {"KEY": text}}
        with pytest.raises(ValueError, match="found a line break in the variable KEY"):
            drill.run(image, "image", {})


# What AWS has of a job ----------------------------------------------------------------------------


class Buckets:
    """Stands for a client of S3 in us-east-1, with one bucket and one key."""

    meta = SimpleNamespace(region_name="us-east-1")

    def __init__(self, region: str = "us-east-1", code: str = "") -> None:
        self.region = region
        self.code = code

    def head_bucket(self, Bucket: str) -> dict:  # noqa: N803
        if self.code:
            raise ClientError({"Error": {"Code": self.code}}, "HeadBucket")
        return {"BucketRegion": self.region}

    def list_objects_v2(self, Bucket: str, Prefix: str, MaxKeys: int) -> dict:  # noqa: N803
        return {"KeyCount": 1 if "data/a".startswith(Prefix) else 0}


@pytest.mark.parametrize(
    ("buckets", "uri", "says"),
    [
        (Buckets(), "s3://bucket/data", ""),
        (Buckets(region=""), "s3://bucket/data", ""),
        (
            Buckets(),
            "s3://bucket/other",
            "^--channel x: found nothing stored at s3://bucket/other; upload",
        ),
        (
            Buckets("eu-west-1"),
            "s3://bucket/data",
            "--channel x: found a bucket in eu-west-1, but the",
        ),
        (
            Buckets(code="404"),
            "s3://bucket/data",
            "--channel x: found s3://bucket/data, but there is no bu",
        ),
    ],
)
def test_data_are_where_the_job_looks_for_them(buckets, uri, says):
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        account_checks.check_data(buckets, "--channel x", uri)


def test_a_bucket_that_may_not_be_looked_at_is_no_mistake_of_the_address():
    with pytest.raises(ClientError):
        account_checks.check_bucket(Buckets(code="403"), "--output", "s3://bucket/c")


@pytest.mark.parametrize(
    ("allowed", "says"),
    [
        (["File", "Pipe"], "one of File, Pipe"),
        ([f"ml.m{number}" for number in range(10)], "one of ml.m0, ml.m1, "),
        (
            [*(f"ml.m{number}" for number in range(10)), "ml.g5.xlarge"],
            "one of the 11 that this boto3 knows, such as ml.g5.xlarge",
        ),
        (["x" * number for number in range(20, 31)], "one of the 11 that this boto3 knows; pip"),
    ],
)
def test_the_closest_of_many_choices_are_named(allowed, says):
    assert request_validation.choices("ml.g5.xlage", allowed).startswith(says)
