"""Metrics and logs of a job, from its lines."""

import re
import time

import pytest
from rehearsed_inputs import HANG_SECONDS, KEY

from sagemaker_rehearsal.aws import clients
from sagemaker_rehearsal.aws.errors import Refused
from sagemaker_rehearsal.jobs import logs, matcher, metrics


def test_metrics_of_log_lines():
    definitions = [
        {"Name": "loss", "Regex": r"loss=(\S+)"},
        {"Name": "count", "Regex": r"\d+"},
        {"Name": "maybe", "Regex": r"x(\d)?"},
    ]
    log_metrics = metrics.Metrics(definitions)
    for line in ("loss=0.5 loss=0.25", "loss=nan", "loss=inf", "loss=", "loss=none", "x"):
        log_metrics.line(line)
    assert {name: metric["Value"] for name, metric in log_metrics.found.items()} == {
        "loss": 0.25,
        "count": 25.0,
    }
    log_metrics.line("7 x3")
    assert {name: metric["Value"] for name, metric in log_metrics.found.items()} == {
        "loss": 0.25,
        "count": 3.0,
        "maybe": 3.0,
    }
    assert log_metrics.found["loss"]["MetricName"] == "loss"
    assert abs(log_metrics.found["loss"]["Timestamp"] - time.time()) < HANG_SECONDS


def test_the_time_that_an_expression_may_take():
    metric = matcher.Metric("a", re.compile("a"))
    metric.earn(9.0)
    assert metric.left == 0.25
    metric.spend(0.2)
    assert metric.left == pytest.approx(0.05)
    metric.earn(0.1)
    assert metric.left == pytest.approx(0.15)
    metric.spend(9.0)
    assert metric.left == 0.001


@pytest.mark.parametrize(
    ("regex", "value"),
    [(r"a=(\S+)", 2.0), (r"\d+", 2.0), (r"b=(\S+)", None), ("a=(1)|b", 1.0), ("(c)?z", None)],
)
def test_the_last_number_of_a_line_is_its_value(regex, value):
    assert matcher._last_value(re.compile(regex), "a=1 a=2 a=nan a=inf b=none z") == value


@pytest.mark.parametrize("regex", ["(", "a{9999999999}", "[z-a]"])
def test_a_wrong_expression_of_a_metric_is_refused(regex):
    with pytest.raises(Refused, match="Invalid MetricDefinitions: the Regex of 'a': "):
        metrics.Metrics([{"Name": "a", "Regex": regex}])


def events(client, stream: str) -> list[str]:
    key = {"logGroupName": logs.LOG_GROUP, "logStreamName": stream, "startFromHead": True}
    messages = []
    page = client.get_log_events(**key)
    while page["events"]:
        messages += [event["message"] for event in page["events"]]
        page = client.get_log_events(**key, nextToken=page["nextForwardToken"])
    return messages


@pytest.mark.slow
def test_log_lines_go_to_the_file_the_stream_and_the_view(paged_aws, tmp_path):
    client = clients.client("logs", paged_aws, "us-east-1", KEY)
    job_logs = logs.Logs(client, "job", tmp_path)
    for host in ("algo-1", "algo-2", "algo-1"):  # algo-1 twice: it was restarted
        job_logs.open(host)

    def take(host: str, text: str):
        job_logs.write(host, text)
        return job_logs.line(host, text)

    point = take("algo-1", "step=3 loss=0.5")
    assert (point.step, point.values) == (3, {"step": 3.0, "loss": 0.5})
    assert take("algo-1", "") is None and take("algo-2", "ü" * 200_000) is None
    job_logs.send()
    for number in range(logs.MAX_BATCH_EVENTS + 1):
        take("algo-1", f"line {number}")
    job_logs.send()
    job_logs.send()
    streams = client.describe_log_streams(logGroupName=logs.LOG_GROUP, logStreamNamePrefix="job/")[
        "logStreams"
    ]
    first_stream, second_stream = (stream["logStreamName"] for stream in streams)
    assert first_stream == f"job/algo-1-{job_logs.made}"
    lines = [f"line {number}" for number in range(logs.MAX_BATCH_EVENTS + 1)]
    assert events(client, first_stream) == ["step=3 loss=0.5", *lines]
    (long_line,) = events(client, second_stream)
    assert set(long_line) == {"ü"}
    assert len(long_line.encode()) == logs.MAX_EVENT_BYTES - logs.MAX_EVENT_BYTES % 2
    assert (tmp_path / "algo-1.log").read_text().splitlines() == ["step=3 loss=0.5", "", *lines]
    assert job_logs.shown() == {
        "algo-1": lines[-logs.SHOWN_LINES :],
        "algo-2": ["ü" * logs.SHOWN_CHARACTERS],
    }
    logs.Logs(client, "job-2", tmp_path / "2").open("algo-1")  # the log group exists already
