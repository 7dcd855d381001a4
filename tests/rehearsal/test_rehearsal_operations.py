"""Other operations than CreateTrainingJob: lists, descriptions, and the seconds that are billed."""

import base64
from types import SimpleNamespace

import pytest
from checked_requests import ARN, Checked, answer
from records import attempt, interrupted
from records import job as ended_job

from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.aws import rules
from sagemaker_rehearsal.aws.errors import Refused
from sagemaker_rehearsal.jobs.record import Record, Transition

OTHER_OPERATIONS = [
    (
        "ListTrainingJobs",
        {"MaxResults": 0},
        "Value '0' at 'maxResults' failed .* greater than or equal to 1$",
    ),
    (
        "ListTrainingJobs",
        {"MaxResults": 101},
        "Value '101' at 'maxResults' failed .* less than or equal to 100$",
    ),
    ("ListTrainingJobs", {"MaxResults": "10"}, "STRING_VALUE can not be converted to an Integer"),
    ("ListTrainingJobs", {"NextToken": "nonsense"}, "Invalid NextToken"),
    ("ListTrainingJobs", {"NextToken": "ä"}, "Invalid NextToken"),
    ("ListTrainingJobs", {"NextToken": base64.b64encode(b"-5").decode()}, "Invalid NextToken"),
    (
        "ListTrainingJobs",
        {"NextToken": "x" * 8193},
        "at 'nextToken' .* less than or equal to 8192$",
    ),
    (
        "ListTrainingJobs",
        {"SortBy": "Colour"},
        r"at 'sortBy' .*enum value set: \[Name, CreationTime, Status\]",
    ),
    (
        "ListTrainingJobs",
        {"NameContains": "a" * 64},
        "at 'nameContains' .* less than or equal to 63",
    ),
    (
        "ListTrainingJobs",
        {"CreationTimeAfter": "yesterday"},
        "STRING_VALUE can not be converted to a Date",
    ),
    ("DescribeTrainingJob", {}, "^1 validation error detected: Value null at 'trainingJobName'"),
    ("DescribeTrainingJob", {"TrainingJobName": "a" * 64}, "less than or equal to 63"),
    ("DescribeTrainingJob", {"TrainingJobName": "a" * 63}, "^Requested resource not found.$"),
    ("StopTrainingJob", {"TrainingJobName": ""}, "greater than or equal to 1"),
    ("StopTrainingJob", {"TrainingJobName": "none"}, "^Requested resource not found.$"),
    ("AddTags", {"ResourceArn": f"{ARN}:training-job/none"}, "Value null at 'tags'"),
    ("AddTags", {"ResourceArn": "nonsense", "Tags": []}, "at 'resourceArn' .*regular expression"),
    (
        "AddTags",
        {"ResourceArn": f"{ARN}:model/a", "Tags": []},
        "tags of anything but jobs",
    ),
    (
        "DeleteTags",
        {"ResourceArn": f"{ARN}:training-job/none", "TagKeys": []},
        "at 'tagKeys' .* or equal to 1$",
    ),
    (
        "DeleteTags",
        {"ResourceArn": f"{ARN}:training-job/none", "TagKeys": ["a!"]},
        "^1 .*'tagKeys'.*must satisfy",
    ),
    ("ListTags", {"ResourceArn": f"{ARN}:training-job/none"}, "does not exist"),
    ("CreateModel", {}, "The rehearsal does not emulate CreateModel; it runs training jobs only"),
    ("Nonsense", {}, "The rehearsal knows no operation Nonsense"),
    ("answer", {}, "knows no operation"),
]


@pytest.mark.parametrize(("operation", "request_", "refused"), OTHER_OPERATIONS)
def test_other_operations(operation, request_, refused):
    with pytest.raises(Refused, match=refused):
        answer(request_, operation)


@pytest.fixture
def service() -> Service:
    """A service with 25 jobs of one region, one second apart, and one of another region."""
    checked_service = Checked(None, None)
    status = ["InProgress", "Completed", "Failed"]
    for number in range(26):
        record = Record(
            f"job-{number * 7 % 26:02}",
            {},
            1000.0 + number,
            status[number % 3],
            modified=2000.0 + number,
        )
        record.transitions.append(Transition("Training", "", 0.0))
        region = "us-east-1" if number < 25 else "eu-west-1"
        arn = f"arn:aws:sagemaker:{region}:123456789012:training-job/{record.name}"
        checked_service.jobs[arn] = SimpleNamespace(record=record)
    return checked_service


def listed_names(service: Service, **request) -> list[str]:
    """Return the names on all pages; each page has the size that the request asks for."""
    names = []
    size = request.get("MaxResults", 10)
    while True:
        page = service.answer("ListTrainingJobs", request, "us-east-1")
        names += [summary["TrainingJobName"] for summary in page["TrainingJobSummaries"]]
        if "NextToken" not in page:
            assert len(page["TrainingJobSummaries"]) <= size
            return names
        assert len(page["TrainingJobSummaries"]) == size
        request["NextToken"] = page["NextToken"]


def test_lists_of_jobs(service):
    records = [job.record for job in service.jobs.values()][:25]
    names = [record.name for record in records]
    assert (
        listed_names(service)
        == names[::-1]
        == listed_names(service, MaxResults=5, NameContains=None)
    )
    assert listed_names(service, MaxResults=100, SortOrder="Ascending") == names
    for size in (1, 5, 7, 24, 25, 26):
        assert listed_names(
            service, MaxResults=size, SortBy="Name", SortOrder="Ascending"
        ) == sorted(names)
    page = service.answer("ListTrainingJobs", {"MaxResults": 25}, "us-east-1")
    assert len(page["TrainingJobSummaries"]) == 25 and "NextToken" not in page  # no page is empty
    assert listed_names(service, SortBy="Name") == sorted(names, reverse=True)
    failed = [record.name for record in records if record.status == "Failed"]
    assert listed_names(service, StatusEquals="Failed", SortOrder="Ascending") == failed
    order = [record.status for record in records]
    by_status = {record.name: record.status for record in records}
    assert [
        by_status[name] for name in listed_names(service, SortBy="Status", SortOrder="Ascending")
    ] == sorted(order)
    tens = [name for name in sorted(names) if "-1" in name]
    assert listed_names(service, NameContains="-1", SortBy="Name", SortOrder="Ascending") == tens
    assert len(tens) > 5
    assert (
        listed_names(service, CreationTimeAfter=1003, CreationTimeBefore=1005.5) == names[3:6][::-1]
    )
    assert listed_names(service, LastModifiedTimeAfter=2024) == names[24:]
    assert listed_names(service, CreationTimeAfter=5000) == []


def test_a_filter_includes_its_bounds(service):
    names = [job.record.name for job in service.jobs.values()][:25]
    assert (
        listed_names(service, CreationTimeAfter=1003, CreationTimeBefore=1005) == names[3:6][::-1]
    )
    for number in (-1, "x"):
        token = base64.b64encode(str(number).encode()).decode()
        with pytest.raises(Refused, match="Invalid NextToken"):
            service.answer("ListTrainingJobs", {"NextToken": token}, "us-east-1")


def described(record: Record, longest: int = 9) -> dict:
    """Return what DescribeTrainingJob says of a job."""
    described_service = Service(None, None)
    job = SimpleNamespace(record=record, longest=longest, metrics=SimpleNamespace(found={}))
    arn = f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{record.name}"
    described_service.jobs[arn] = job
    request = {"TrainingJobName": record.name}
    return described_service.answer("DescribeTrainingJob", request, "us-east-1")


BILLS = {
    "two attempts": (interrupted(), 120),
    "less than half a second": (ended_job(attempt(1, 0.0, 0.4, [])), 1),
    "more than a half": (ended_job(attempt(1, 0.0, 7.6, [])), 8),
    "never started": (ended_job(status="Failed"), 0),
}


@pytest.mark.parametrize(("record", "seconds"), BILLS.values(), ids=BILLS)
def test_the_seconds_that_are_billed(record, seconds):
    record.transitions = record.transitions or [Transition("Starting", "", 0.0)]
    description = described(record)
    assert description["BillableTimeInSeconds"] == seconds
    assert "TrainingTimeInSeconds" not in description
    record.status = "InProgress"
    assert "BillableTimeInSeconds" not in described(record)


def test_the_seconds_of_training_are_those_so_far(monkeypatch):
    record = interrupted()
    record.training_start, record.training_end = 10.0, 99.6
    assert described(record)["TrainingTimeInSeconds"] == 90
    record.training_end = None
    monkeypatch.setattr("time.time", lambda: 31.0)
    assert described(record)["TrainingTimeInSeconds"] == 21
    assert "TrainingEndTime" not in described(record)


def test_what_a_description_has_of_the_request():
    record = interrupted()
    record.request |= {"Tags": [{"Key": "a", "Value": "b"}], "Environment": None}
    description = described(record)
    assert "Tags" not in description and "Environment" not in description
    assert description["StoppingCondition"] == {"MaxRuntimeInSeconds": 9}
    assert description["EnableManagedSpotTraining"] is True
    assert description["EnableNetworkIsolation"] is False
    assert "ModelArtifacts" not in description and "FinalMetricDataList" not in description
    record.artifacts = "s3://b/model.tar.gz"
    record.request["StoppingCondition"] = {"MaxRuntimeInSeconds": 7}
    description = described(record)
    assert description["ModelArtifacts"] == {"S3ModelArtifacts": "s3://b/model.tar.gz"}
    assert description["StoppingCondition"] == {"MaxRuntimeInSeconds": 7}
    assert [change.get("EndTime") for change in description["SecondaryStatusTransitions"]] == [
        55.0, None
    ]  # fmt: skip


def test_the_longest_training_is_a_day_by_default():
    assert rules.longest({}) == rules.longest({"StoppingCondition": None}) == 86400
    assert rules.longest({"StoppingCondition": {"MaxRuntimeInSeconds": 5}}) == 5
