"""A job is compared with an uninterrupted run of its request: the model's bits, time and cost."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from records import interrupted, job
from rehearsed_jobs import SPOT_FIELDS, Rehearsed, wait_until_ended
from test_rehearsal_report import write_page
from waiting import wait_until

from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.jobs import schedule
from sagemaker_rehearsal.jobs.record import MAX_MODEL_FILES, Comparison, Record, Verdict
from sagemaker_rehearsal.report import goodput_data
from sagemaker_rehearsal.report.comparison import compare

SAME = {"model.pt": "a", "config.yaml": "b"}


def left_alone(files: dict[str, str], **fields) -> Record:
    """Return the record of an uninterrupted run with these files."""
    return replace(job(modified=50.0), name="job-left-alone", model_files=files, **fields)


@pytest.mark.parametrize(
    ("files", "other", "verdict", "explanation"),
    [
        (SAME, SAME, "same bits", "of model.pt"),
        (
            SAME,
            SAME | {"config.yaml": "c", "log": "d"},
            "same bits",
            "of model.pt; without weights, and different: config.yaml, log",
        ),
        (SAME, SAME | {"model.pt": "c"}, "other bits", "model.pt differs"),
        (
            {"a.bin": "1", "b.BIN": "2"},
            {"a.bin": "3", "b.BIN": "4"},
            "other bits",
            "a.bin, b.BIN differ",
        ),
        (SAME, {}, "other bits", "model.pt is not in that of job-left-alone"),
        ({}, SAME, "other bits", "model.pt is not in that of job"),
        ({"own": "1"}, {"own": "1"}, "same bits", "of own"),
        ({"own": "1"}, {"own": "2"}, "other bits", "own differs"),
        ({}, {}, "no verdict", "there is no file in either model artifact"),
        (
            {str(k): "a" for k in range(MAX_MODEL_FILES)},
            SAME,
            "no verdict",
            "a model artifact has 10,000 files or more",
        ),
    ],
)
def test_the_verdict_is_of_the_files_with_weights(files, other, verdict, explanation):
    record = replace(interrupted(), model_files=files)
    comparison = compare(record, left_alone(other))
    assert (comparison.verdict, comparison.explanation) == (verdict, explanation)


@pytest.mark.parametrize(
    ("fields", "other_fields", "explanation"),
    [
        ({"status": "Failed", "failure": "why"}, {}, "job ended as Failed: why"),
        ({}, {"status": "Stopped"}, "job-left-alone ended as Stopped"),
        (
            {},
            {"interruptions": interrupted().interruptions},
            "job-left-alone was interrupted or had a fault, too",
        ),
    ],
)
def test_without_two_complete_runs_there_is_no_verdict(fields, other_fields, explanation):
    record = replace(interrupted(), model_files=SAME, **fields)
    comparison = compare(record, replace(left_alone(SAME), **other_fields))
    assert (comparison.verdict, comparison.explanation) == ("no verdict", explanation)


def test_a_report_has_the_verdict_time_and_cost(tmp_path):
    comparison = Comparison("job-left-alone", Verdict.SAME_BITS, "of model.pt", 100.0, 200.0)
    record = interrupted()
    without = write_page(record, tmp_path).text
    assert "Comparison with" not in without and "Faults" not in without
    record = replace(record, comparison=comparison)
    page = write_page(record, tmp_path, price=36.0, spot_price=18.0)
    # 120 and 200 instance seconds
    for row in ("job2:402:001.200.60", "job-left-alone1:403:202.001.00"):
        assert row in page.text
    assert "same bits: of model.pt" in page.text
    data = goodput_data.describe(record)
    assert data["comparison"] == {
        "other": "job-left-alone",
        "verdict": "same bits",
        "explanation": "of model.pt",
        "seconds": 100.0,
        "instance_seconds": 200.0,
    }
    sentence = "same bits, compared with job-left-alone: of model.pt"
    assert Comparison(**data["comparison"]).sentence == sentence


# A comparison from its order to its end


class Compared(Rehearsed):
    """Jobs without an engine, of a service; what is reported is kept."""

    def __init__(self, folder: Path, **fields) -> None:
        super().__init__(folder)
        self.interrupt = [schedule.parse("at step 3 unwarned")]
        self.fields = fields
        self.reports: list[tuple[str, Comparison | None]] = []
        self.reported = lambda record, _: self.reports.append((record.name, record.comparison))

    def serve(self) -> tuple[Service, Record]:
        """Return a service, and the record of its only job, which has started."""
        self.first = self.job("first")
        settings = replace(self.first.settings, **self.fields)
        self.service = Service(settings, lambda *_: self.first.place)
        self.container(0).end(0)
        wait_until_ended(self.first)
        request = self.first.request | {"TrainingJobName": "job", **SPOT_FIELDS, **REST}
        self.service.CreateTrainingJob(request, "us-east-1")
        (self.arn,) = self.service.jobs
        return self.service, self.service.jobs[self.arn].record

    def end(self, number: int, content: str, *lines: str) -> None:
        """Let the host that was started as this number print lines, leave a model, and end."""
        container = self.container(number)
        names = [path for path in (self.folder / "work").glob("*/*/algo-1/model")]
        (model,) = names
        (model / "model.pt").write_text(content)
        for line in lines:
            container.line_queue.put(line)
        container.end(0)


REST = {
    "RoleArn": "arn:aws:iam::123456789012:role/rehearsal",
    "CheckpointConfig": {"S3Uri": "s3://bucket/a/ck/"},
    "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
}


@pytest.fixture(autouse=True)
def no_checkpoints(monkeypatch):
    """The stand-in for S3 has no objects."""
    monkeypatch.setattr("sagemaker_rehearsal.jobs.checkpoint_sync.restore", lambda *_: (0, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("other", "verdict"), [("x", "same bits"), ("y", "other bits")])
def test_each_interrupted_job_is_run_once_more_without_its_rules(tmp_path, other, verdict):
    compared = Compared(tmp_path, compare=True)
    service, record = compared.serve()
    compared.container(1).line_queue.put("step=3")  # its rule takes the instance
    compared.end(2, "x")
    wait_until(lambda: len(service.jobs) == 2, "the other run")
    assert record.status == "Completed" and not service.is_over(compared.arn)
    compared.end(3, other, "step=3")
    wait_until(lambda: service.is_over(compared.arn), "the comparison")
    other_record = list(service.jobs.values())[-1].record
    assert other_record.name == "job-left-alone" and not other_record.interruptions
    assert other_record.request["CheckpointConfig"]["S3Uri"] == "s3://bucket/a/job-left-alone/"
    assert record.request["CheckpointConfig"]["S3Uri"] == "s3://bucket/a/ck/"
    assert (record.comparison.other, record.comparison.verdict) == ("job-left-alone", verdict)
    assert compared.reports[-1] == ("job", record.comparison)
    # The run that was left alone is compared with nothing, though --compare is set.
    assert len(service.jobs) == 2 and not service.comparing


@pytest.mark.slow
def test_a_job_that_was_never_interrupted_is_compared_by_hand_alone(tmp_path):
    compared = Compared(tmp_path, compare=True)
    service, record = compared.serve()
    compared.end(1, "x")
    wait_until(lambda: service.is_over(compared.arn), "the end")
    assert len(service.jobs) == 1 and record.comparison is None
    assert service.compare({"name": "job"}) == "job-left-alone"
    with pytest.raises(ValueError, match="JOB: found job, which is compared already"):
        service.compare({"name": "job"})
    compared.end(2, "x")
    wait_until(lambda: service.is_over(compared.arn), "the comparison")
    assert record.comparison.verdict == Verdict.SAME_BITS
    with pytest.raises(ValueError, match="already exists"):
        service.compare({"name": "job"})


@pytest.mark.slow
def test_what_cannot_be_compared_is_refused(tmp_path):
    compared = Compared(tmp_path)
    service, _ = compared.serve()
    for order, words in (
        ({"name": "job"}, "found job, which is InProgress; expected one that has completed"),
        ({"name": "none"}, "found 'none', expected one of: job"),
        ({"name": 3}, "expected an object of name"),
        (["job"], "expected an object of name"),
    ):
        with pytest.raises(ValueError, match=words):
            service.compare(order)
    compared.container(1).end(0)


@pytest.mark.slow
def test_the_end_of_a_rehearsal_ends_a_comparison(tmp_path):
    """Then there is no verdict, and the report says so."""
    compared = Compared(tmp_path)
    service, record = compared.serve()
    compared.end(1, "x")
    wait_until_ended(service.jobs[compared.arn])
    service.compare({"name": "job"})
    container = compared.container(2)
    wait_until(lambda: list(service.jobs.values())[-1].record.secondary == "Training")
    container.on_signal = lambda name: container.end(143)
    service.close(threading.Event())
    assert (record.comparison.verdict, service.comparing) == (Verdict.NONE, {})
    assert compared.reports[-1] == ("job", record.comparison)
