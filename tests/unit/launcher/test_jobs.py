"""Commands for existing jobs, with SageMaker's answers given by botocore's stub."""

import json
import re
from datetime import UTC, datetime
from types import SimpleNamespace

import boto3
import pytest
from botocore.stub import Stubber

from sagemaker_lightning.contract.job_summary import HIDDEN_VARIABLES
from sagemaker_lightning.launcher import (
    command,
    jobs,
    request_validation,
)
from sagemaker_lightning.launcher.sites import Site

ARN = "arn:aws:sagemaker:us-east-1:123456789012:training-job/job-1"
REQUEST = {
    "AlgorithmSpecification": {
        "TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/x:1",
        "TrainingInputMode": "File",
    },
    "RoleArn": "arn:aws:iam::123456789012:role/SageMaker",
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/jobs/"},
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30},
    "HyperParameters": {"trainer.max_epochs": "20"},
    "Environment": {"SECRET": "x"},
    "CheckpointConfig": {"S3Uri": "s3://bucket/checkpoints/run-1/"},
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxRuntimeInSeconds": 100, "MaxWaitTimeInSeconds": 200},
}
# What DescribeTrainingJob says besides, and no request may have.
MORE = {
    "TrainingJobName": "job-1",
    "TrainingJobArn": ARN,
    "TrainingJobStatus": "Stopped",
    "SecondaryStatus": "MaxRuntimeExceeded",
    "CreationTime": datetime(2026, 1, 2, tzinfo=UTC),
    "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/jobs/job-1/output/model.tar.gz"},
    "BillableTimeInSeconds": 50,
}
TAGS = [{"Key": "team", "Value": "vision"}, {"Key": "aws:by", "Value": "x"}]


@pytest.fixture
def stub():
    """SageMaker, which gives the answers that a test tells it."""
    sagemaker = boto3.client(
        "sagemaker",
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
    )
    with Stubber(sagemaker) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


@pytest.fixture
def site(stub) -> Site:
    """The site of this SageMaker."""
    return Site("us-east-1", lambda service: stub.client, "launch", "--region=us-east-1")


def described(stub, **changes) -> None:
    """Have the job described, with changes; None removes a field."""
    job = {name: value for name, value in (REQUEST | MORE | changes).items() if value is not None}
    stub.add_response("describe_training_job", job, {"TrainingJobName": "job-1"})


def tagged(stub) -> None:
    """Have its tags listed."""
    stub.add_response("list_tags", {"Tags": TAGS}, {"ResourceArn": ARN})


@pytest.mark.parametrize(
    ("max_run", "max_wait", "limits"),
    [
        (None, None, (100, 200)),
        (150, None, (150, 200)),
        (300, None, (300, 300)),
        (50, 60, (50, 60)),
    ],
)
def test_a_job_is_resumed_by_its_request_under_a_new_name(stub, site, max_run, max_wait, limits):
    """After MaxRuntime, too."""
    described(stub)
    tagged(stub)
    request = jobs.to_resume(site, "job-1", max_run, max_wait)
    name = request.pop("TrainingJobName")
    assert re.fullmatch(r"job-1-\d{4}(-\d\d){5}-\d{3}", name)
    conditions = dict(zip(REQUEST["StoppingCondition"], limits, strict=True))
    assert request == REQUEST | {"Tags": TAGS[:1], "StoppingCondition": conditions}


def test_newer_members_of_a_request_are_passed_through(stub, site):
    """What DescribeTrainingJob says of them; it does not say SessionChainingConfig."""
    account = "arn:aws:sagemaker:us-east-1:123456789012"
    newer = {
        "InfraCheckConfig": {"EnableInfraCheck": True},
        "MlflowConfig": {"MlflowResourceArn": f"{account}:mlflow-app/a"},
        "ModelPackageConfig": {"ModelPackageGroupArn": f"{account}:model-package-group/a"},
        "ServerlessJobConfig": {
            "BaseModelArn": f"{account}:hub-content/hub/Model/a",
            "JobType": "FineTuning",
        },
    }
    described(stub, **newer)
    tagged(stub)
    request = jobs.to_resume(site, "job-1", None, None)
    assert {name: request[name] for name in newer} == newer
    request_validation.validate(request)


def test_a_request_that_is_printed_hides_what_was_taken_from_an_environment(stub, site, capsys):
    """The job's description has the value, and the names of those that are hidden."""
    described(stub, Environment={"A": "hidden", "B": "b", HIDDEN_VARIABLES: "A"})
    tagged(stub)
    request = jobs.to_resume(site, "job-1", None, None)
    assert request["Environment"]["A"] == "hidden"
    args = command.command_parser().parse_args(["resume", "job-1", "--dry-run"])
    assert command.run_request(site, request, args) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["Environment"] == {"A": "******", "B": "b", HIDDEN_VARIABLES: "A"}


def test_what_is_resumed_again_has_one_time_in_its_name(stub, site):
    described(stub, TrainingJobName="job-1-2026-01-02-03-04-05-678", EnableManagedSpotTraining=None)
    tagged(stub)
    request = jobs.to_resume(site, "job-1", None, None)
    assert re.fullmatch(r"job-1-\d{4}(-\d\d){5}-\d{3}", request["TrainingJobName"])
    assert request["TrainingJobName"] != "job-1-2026-01-02-03-04-05-678"


@pytest.mark.parametrize(
    ("changes", "max_wait", "says"),
    [
        ({"TrainingJobStatus": "InProgress"}, None, "which is InProgress; expected a job that h"),
        ({"TrainingJobStatus": "Completed"}, None, "which is Completed; there is nothing to res"),
        ({"CheckpointConfig": None}, None, "which has no checkpoints; start it again"),
        ({"EnableManagedSpotTraining": None}, 9, "--max-wait: found 9, but only a spot job waits"),
        ({}, 99, r"--max-wait: found 99, expected --max-run \(100\) or more"),
    ],
)
def test_what_cannot_be_resumed(stub, site, changes, max_wait, says):
    described(stub, **changes)
    if changes.get("TrainingJobStatus", "Stopped") == "Stopped":
        tagged(stub)
    with pytest.raises(ValueError, match=says):
        jobs.to_resume(site, "job-1", None, max_wait)


@pytest.mark.parametrize("does", [jobs.show_log, jobs.stop, jobs.describe_ended])
def test_a_job_that_is_not_there(stub, site, does):
    stub.add_client_error(
        "describe_training_job", "ValidationException", "Requested resource not found."
    )
    with pytest.raises(ValueError, match="JOB: found job-1, expected a training job in us-"):
        does(site, "job-1")


def test_the_newest_jobs_are_listed(stub, site, capsys):
    entry = {"TrainingJobArn": ARN, "CreationTime": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)}
    entries = [
        entry | {"TrainingJobName": name, "TrainingJobStatus": status}
        for name, status in (("job-2", "InProgress"), ("job-1", "Failed"))
    ]
    order = {"SortBy": "CreationTime", "SortOrder": "Descending"}
    stub.add_response("list_training_jobs", {"TrainingJobSummaries": entries}, order)
    jobs.show_list(site, 20)
    assert capsys.readouterr().out.splitlines() == [
        "2026-01-02 03:04:05  InProgress  job-2",
        "2026-01-02 03:04:05  Failed      job-1",
    ]
    stub.add_response("list_training_jobs", {"TrainingJobSummaries": []}, order)
    jobs.show_list(site, 20)
    assert capsys.readouterr().err == "there are no training jobs in us-east-1\n"


def test_only_a_job_that_runs_is_stopped(stub, site):
    described(stub)
    with pytest.raises(ValueError, match="JOB: found job-1, which is Stopped; expected a job th"):
        jobs.stop(site, "job-1")


@pytest.mark.parametrize(
    "flag",
    ["env", "metric", "tag", "channel", "instance-group", "subnet", "security-group", "drill-data"],
)
def test_a_flag_that_may_be_repeated(flag):
    needed = ["--image=x", "--role=x", "--output=x"]
    name = flag.replace("-", "_")
    assert getattr(command.parser().parse_args(needed), name) == []
    args = command.parser().parse_args([*needed, f"--{flag}=a", f"--{flag}=b"])
    assert getattr(args, name) == ["a", "b"]


def test_stopping_a_job_says_how_long_it_has(capsys):
    stopped = []
    stopping = SimpleNamespace(stop_training_job=lambda **names: stopped.append(names))
    stopping.describe_training_job = lambda **_: {"TrainingJobStatus": "InProgress"}
    jobs.stop(Site("us-east-1", lambda service: stopping, "launch", ""), "job-1")
    assert stopped == [{"TrainingJobName": "job-1"}]
    assert capsys.readouterr().err == (
        "job-1 is stopping; SageMaker gives it 120 seconds to end by itself\n"
    )
