"""How a job is followed: its log, its status and its end."""

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError
from launches import refusal, site

from sagemaker_lightning.launcher import follower

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
