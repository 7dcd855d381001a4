"""Slow metrics and long lines end no job, and no report has a secret."""

import json
from dataclasses import replace

import pytest
from records import interrupted
from rehearsed_jobs import (
    Rehearsed,
    jobs_without_engine,  # noqa: F401  the fixture rehearsed
    wait_until_ended,
)

from sagemaker_lightning.contract.job_summary import HIDDEN_VARIABLES
from sagemaker_rehearsal.jobs import logs
from sagemaker_rehearsal.jobs.masking import Mask
from sagemaker_rehearsal.jobs.metrics import Metrics
from sagemaker_rehearsal.jobs.record import Record
from sagemaker_rehearsal.report import page

SLOW_LINES = {
    "(a+)+$": "a" * 40 + "!",
    r"^(.*?,){25}P": ",".join(map(str, range(60))),
    "(?:a?){60}a{60}": "a" * 60,
}


@pytest.mark.slow
@pytest.mark.parametrize("regex", SLOW_LINES)
def test_a_metric_that_stalls(rehearsed, regex):
    """Its definition is left out with a note; the log and the other metrics continue."""
    loss_definition = {"Name": "loss", "Regex": r"loss=(\S+)"}
    epoch_definition = {"Name": "epoch", "Regex": r"epoch=(\S+)"}
    job = rehearsed.job(
        metrics=[loss_definition, {"Name": "slow", "Regex": regex}, epoch_definition]
    )
    container = rehearsed.container()
    for line in ("loss=1", SLOW_LINES[regex], "step=7 loss=0.5 epoch=3"):
        container.line_queue.put(line)
    container.end(0)
    record = wait_until_ended(job)
    assert {name: metric["Value"] for name, metric in job.metrics.found.items()} == {
        "loss": 0.5,
        "epoch": 3.0,
    }
    assert record.notes == [
        "MetricDefinitions: the Regex of slow is too slow for this log, and used no more"
    ]
    assert (job.folder / "logs/algo-1.log").read_text().splitlines()[2] == "step=7 loss=0.5 epoch=3"
    assert job.metrics.matcher.poll() is not None  # the process of the metrics has ended


def test_metrics_whose_process_is_killed():
    metrics = Metrics([{"Name": "x", "Regex": r"x=(\d)"}, {"Name": "x", "Regex": r"y=(\d)"}])
    assert metrics.line("x=1") is None and metrics.line("y=2 \udc80\ud800 ü\u2028\n x") is None
    assert metrics.found["x"]["Value"] == 2.0
    metrics.matcher.kill()
    metrics.matcher.wait()
    assert metrics.line("x=3").startswith("metrics are no longer looked for: ")
    assert metrics.line("x=3") is None and metrics.found["x"]["Value"] == 2.0
    metrics.close()
    Metrics([]).close()


# Logs


def test_lines_of_chunks():
    chunks = [b"a\r\nb", "ü".encode()[:1], "ü".encode()[1:], b"\n\n", b"\xff c"]
    assert list(logs.lines(chunks)) == ["a", "b\u00fc", "", "\ufffd c"]
    assert list(logs.lines([])) == [] == list(logs.lines([b""]))


def test_a_line_without_end_is_several():
    """It is split: neither kept as a whole, nor copied for each chunk."""
    size = 0
    for line in logs.lines(bytes(2**16) for _ in range(1000)):
        assert len(line) <= logs.MAX_EVENT_BYTES
        size += len(line)
    assert size == 1000 * 2**16


def test_logs_of_two_jobs_of_one_name(tmp_path):
    """The files of each earlier job of that name are kept aside."""
    for number in range(3):
        rehearsed = Rehearsed(tmp_path)
        job = rehearsed.job()
        rehearsed.container().line_queue.put(f"of run {number}")
        rehearsed.container().end(0)
        wait_until_ended(job)
        (job.folder / "report.html").write_text(f"{number}")
    for name, number in (("job", 2), ("job.1", 0), ("job.2", 1)):
        assert (tmp_path / "reports" / name / "logs/algo-1.log").read_text() == f"of run {number}\n"
        assert (tmp_path / "reports" / name / "report.html").read_text() == f"{number}"


# Secrets

PASSWORD = "hunter2-hunter2"
TOKEN = "hf_" + "x1Y2" * 8
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKC\n-----END RSA PRIVATE KEY-----"
SECRETS = [
    PASSWORD,
    TOKEN,
    "MIIEpAIBAAKC",
    "of-a-tag",
    "after-a-flag",
    "AKIAABCDEFGHIJKLMNOP",
    "user:pass",
    "of-more",
]
NO_SECRET = "learning-rate-0.1"


def secret_record() -> Record:
    """Return a record with secrets in all places where a user may put them."""
    request = {
        "TrainingJobName": "job",
        "HyperParameters": {
            "db_password": f'"{PASSWORD}"',
            "hub": TOKEN,
            "lr": NO_SECRET,
            "max_tokens": "3",
        },
        "Environment": {
            "API_KEY": "of-more",
            "PEM": PEM,
            "URL": "https://user:pass@host/x",
            "PLAIN": NO_SECRET,
        },
        "Tags": [{"Key": "secret", "Value": "of-a-tag"}, {"Key": "plain", "Value": NO_SECRET}],
        "AlgorithmSpecification": {
            "TrainingImage": "image:0123456789012345678901234567890123456789",
            "ContainerEntrypoint": [
                "bash",
                "-c",
                f"export TOKEN={TOKEN}; ./run --key AKIAABCDEFGHIJKLMNOP",
            ],
            "ContainerArguments": [
                "--api_key",
                "after-a-flag",
                f"--password={PASSWORD}",
                f"--lr={NO_SECRET}",
                "--token",
            ],
        },
        "NotInTheModel": {"Password": "of-more"},
    }
    message = (
        f"the password {PASSWORD} is wrong: see https://user:pass@host/x?a=b&token={TOKEN}, "
        f"exit code: 3\n{PEM}"
    )
    record = replace(interrupted(), request=request, failure=message, notes=[message])
    record.transitions[0].message = record.interruptions[0].why = message
    return record


def test_no_secret_in_a_report_or_record(tmp_path):
    record = secret_record()
    page.write(record, tmp_path / "report.html")
    for written_text in ((tmp_path / "report.html").read_text(), json.dumps(record.as_json())):
        assert not [secret for secret in SECRETS if secret in written_text]
        assert written_text.count(NO_SECRET) >= 4
        assert "image:0123456789012345678901234567890123456789" in written_text
        assert "exit code: 3" in written_text and written_text.count("******") > 10
    assert record.request["HyperParameters"]["hub"] == TOKEN  # the job's own request is not changed


def test_a_secret_of_few_letters_leaves_texts_alone():
    mask = Mask({"HyperParameters": {"max_tokens": "3", "token": ""}})
    assert mask.text("exit code: 3, max_tokens=3") == "exit code: 3, max_tokens=******"
    assert mask.text("") == "" and Mask({}).text("a = b  c\n") == "a = b  c\n"


# Variables that the launcher has taken from its environment


def test_a_variable_whose_value_was_taken_from_an_environment_is_in_no_report(rehearsed):
    """Whatever its name and its value look like."""
    value = "plain words"
    listed = {HIDDEN_VARIABLES: "MY_WORDS,ELSEWHERE"}
    job = rehearsed.job(Environment={"MY_WORDS": value, "OTHER": "shown"} | listed)
    host = rehearsed.container()
    host.line_queue.put(f"it prints {value}")
    host.end(1)
    record = wait_until_ended(job)
    kept = record.masked()
    assert kept.request["Environment"] == {"MY_WORDS": "******", "OTHER": "shown"} | listed
    assert kept.log_end == ["it prints ******"]
    assert value not in json.dumps(record.as_json())
    assert value in json.dumps(record.request)  # what the job has had


@pytest.mark.parametrize("environment", [None, {}, {"A": "b"}, {"HIDDEN": ""}])
def test_a_job_without_hidden_variables(environment):
    if environment and "HIDDEN" in environment:
        environment = {HIDDEN_VARIABLES: "", "A": "b"}
    request = {"Environment": environment}
    assert Mask(request).request == request
