"""scripts/launch.py: the requests that its flags make, and the mistakes that it refuses."""

import re
from collections.abc import Callable

import pytest
from aws_services import ACCOUNT
from launches import (
    DATA_FLAG,
    IMAGE,
    NEEDED_FLAGS,
    ROLE,
    UNCHECKED_FLAG,
    launch_script,  # noqa: F401  the fixture launch
    request_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def requested(launch) -> Callable[..., dict]:
    """A function that returns the request which flags make, beside those that are needed."""
    return lambda *flags: request_of(launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", *flags))


def test_the_smallest_request(requested):
    request = requested()
    assert re.fullmatch(
        r"sagemaker-lightning-\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d-\d{3}", request.pop("TrainingJobName")
    )
    assert len(request["AlgorithmSpecification"].pop("MetricDefinitions")) == 9
    assert request == {
        "AlgorithmSpecification": {"TrainingImage": IMAGE, "TrainingInputMode": "File"},
        "RoleArn": ROLE,
        "OutputDataConfig": {"S3OutputPath": "s3://my-bucket/jobs/"},
        "ResourceConfig": {
            "InstanceType": "ml.g5.xlarge",
            "InstanceCount": 1,
            "VolumeSizeInGB": 30,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
    }


def test_a_request_with_everything(requested):
    request = requested(
        "--job-name=job-1",
        "--instance-type=ml.g5.2xlarge",
        "--instance-count=2",
        "--channel=training=s3://my-bucket/a,b=c/,mode=FastFile,distribution=ShardedByS3Key",
        "--volume-size=50",
        "--channel=other=s3://my-bucket/x",
        "--checkpoints=s3://my-bucket/run-1",
        "--spot",
        "--max-run=100",
        "--max-wait=200",
        "--retries=3",
        "--subnet=subnet-1",
        "--subnet=subnet-2",
        "--security-group=sg-1",
        "--env=NCCL_DEBUG=INFO",
        "--env=A=b=c d",
        "--tag=team=vision",
        "--tag=cost centre=é",
        "--metric=f1=f1=(.*)",
    )
    assert request["TrainingJobName"] == "job-1"
    assert request["ResourceConfig"] == {
        "InstanceType": "ml.g5.2xlarge",
        "InstanceCount": 2,
        "VolumeSizeInGB": 50,
    }
    assert request["InputDataConfig"] == [
        {
            "ChannelName": "training",
            "InputMode": "FastFile",
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": "s3://my-bucket/a,b=c/",
                    "S3DataDistributionType": "ShardedByS3Key",
                }
            },
        },
        {
            "ChannelName": "other",
            "InputMode": "File",
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": "s3://my-bucket/x",
                    "S3DataDistributionType": "FullyReplicated",
                }
            },
        },
    ]
    assert request["CheckpointConfig"] == {"S3Uri": "s3://my-bucket/run-1/"}
    assert request["EnableManagedSpotTraining"] is True
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 100, "MaxWaitTimeInSeconds": 200}
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 3}
    assert request["VpcConfig"] == {
        "Subnets": ["subnet-1", "subnet-2"],
        "SecurityGroupIds": ["sg-1"],
    }
    assert request["Environment"] == {"NCCL_DEBUG": "INFO", "A": "b=c d"}
    assert request["Tags"] == [
        {"Key": "team", "Value": "vision"},
        {"Key": "cost centre", "Value": "é"},
    ]
    metrics = request["AlgorithmSpecification"]["MetricDefinitions"]
    assert {"Name": "f1", "Regex": "f1=(.*)"} in metrics


def test_the_cost_is_printed_before_and_a_budget_ends_the_job(launch):
    completed = launch(
        *(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", "--spot", "--yes", "--env=MY_TOKEN"),
        *("--price=2", "--spot-price=0.5", "--budget=6", "--max-run=2d", "--expect=10h"),
        MY_TOKEN="abc-of-here",
    )
    request = request_of(completed)
    assert request["StoppingCondition"]["MaxRuntimeInSeconds"] == 12 * 3600 - 120
    named = {"SAGEMAKER_LIGHTNING_HIDDEN_VARIABLES": "MY_TOKEN"}
    assert request["Environment"] == {"MY_TOKEN": "******"} | named
    assert re.search(r"^on demand +2\.00 +10\.00 +20\.00$", completed.stderr, re.MULTILINE)
    assert re.search(r"^on spot +0\.50 +10\.00 +5\.00$", completed.stderr, re.MULTILINE)
    assert "--budget=6 ends the training after 11.97 h" in completed.stderr
    assert "abc-of-here" not in completed.stdout + completed.stderr


def test_instance_groups_with_channels_of_their_own(requested):
    request = requested(
        "--instance-group=data=ml.c5.xlarge:2",
        "--instance-group=gpu=ml.g5.xlarge:1",
        "--channel=raw=s3://my-bucket/raw,group=data",
        "--channel=training=s3://my-bucket/x,group=data,group=gpu",
    )
    assert request["ResourceConfig"] == {
        "VolumeSizeInGB": 30,
        "InstanceGroups": [
            {"InstanceGroupName": "data", "InstanceType": "ml.c5.xlarge", "InstanceCount": 2},
            {"InstanceGroupName": "gpu", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
        ],
    }
    sources = [channel["DataSource"]["S3DataSource"] for channel in request["InputDataConfig"]]
    assert [source["InstanceGroupNames"] for source in sources] == [["data"], ["data", "gpu"]]


def test_an_image_in_a_registry_of_the_vpc(requested):
    vpc = ("--subnet=subnet-1", "--security-group=sg-1")
    algorithm = requested("--image=registry.example:5000/app", *vpc)["AlgorithmSpecification"]
    assert algorithm["TrainingImageConfig"] == {"TrainingRepositoryAccessMode": "Vpc"}


JOB_NAMES = {
    IMAGE: "sagemaker-lightning",
    f"host.example:5000/team/my_app.v2@sha256:{'0' * 64}": "my-app-v2",
    f"host.example/{'long-name-' * 9}": "long-name-long-name-long-name-long-name",
    "host.example/__": "job",
}


@pytest.mark.parametrize(("image", "name"), JOB_NAMES.items())
def test_a_job_is_named_after_its_image(image, name):
    from sagemaker_lightning.launcher import job_request

    job_name = job_request.job_name(image)
    assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", job_name)  # the API's pattern
    assert re.fullmatch(rf"{name}-\d{{4}}(-\d\d){{5}}-\d{{3}}", job_name)


HYPERPARAMETERS = {
    "a.equals": "x=1=2",
    "a.space": "two words",
    "a.quotes": 'it\'s "so"',
    "a.list": '["a", "b"]',
    "a.true": "true",
    "a.negative": "-1.5e-3",
    "a.empty": "",
    "a.null": "null",
    "a.decimal": "1.10",
    "a.dict": '{"b": true, "a": 1}',
    "a.digits": "007",
    "x": "1",
    "sagemaker_program": "app/train_torchrun.py",
}


def test_hyperparameters_go_out_as_they_were_typed(requested):
    request = requested(*(f"{key}={value}" for key, value in HYPERPARAMETERS.items()))
    assert request["HyperParameters"] == HYPERPARAMETERS


MISTAKES = {
    "no key": (["epochs"], "hyperparameter: found 'epochs', expected KEY=VALUE"),
    "a key twice": (["a=1", "a=2"], "hyperparameter: found a twice"),
    "a long value": (
        [f"a.b={'x' * 2501}"],
        "hyperparameter a.b: found 2501 characters in its value",
    ),
    "a line break": (
        ["a.b=1\n2"],
        "hyperparameter a.b: found '1\\n2', expected a value of one line that matches .*",
    ),
    "a dash too many": (["--trainer.max_epochs=2"], "a hyperparameter has no dashes: KEY=VALUE"),
    "a short wait": (
        ["--spot", "--checkpoints=s3://my-bucket/c", "--max-run=100", "--max-wait=99"],
        "--max-wait: found 99, expected --max-run (100) or more",
    ),
    "spot without checkpoints": (["--spot"], "--spot: needs --checkpoints=s3://BUCKET/PREFIX"),
    "a wait without spot": (["--max-wait=9"], "--max-wait: found 9, but only a --spot job waits"),
    "keep-alive of spot": (
        ["--spot", "--checkpoints=s3://my-bucket/c", "--keep-alive=9"],
        "--keep-alive: not allowed",
    ),
    "no instance": (
        ["--instance-count=0"],
        "--instance-count: found '0', expected a whole number above 0",
    ),
    "an instance type": (["--instance-type=ml.g5.xlrage"], "--instance-type: found 'ml.g5.xlrage'"),
    "a role": (
        [f"--role={ACCOUNT}/SageMaker"],
        "--role: found '123456789012/SageMaker', expected the ARN of a role, arn:aws:iam::",
    ),
    "a role's name": (["--role=Trainer"], "--role: found 'Trainer', expected the ARN of a role"),
    "an image elsewhere": (
        ["--region=eu-west-1"],
        "--image: found an image in us-east-1, but the job is to run in eu-west",
    ),
    "an image nowhere": (
        ["--image=sagemaker-lightning"],
        "--image: found 'sagemaker-lightning', expected an address",
    ),
    "an image in capitals": (
        [f"--image={IMAGE.replace('sagemaker', 'SageMaker')}"],
        "expected an address in Amazon ECR, ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG with",
    ),
    "a metric's expression": (
        ["--metric=loss=loss=([0-9"],
        "--metric loss: found 'loss=([0-9', which is not a regular expression (unterminated char",
    ),
    "a metric without a group": (
        ["--metric=loss=loss=[0-9.]+"],
        "--metric loss: found 'loss=[0-9.]+', which has no group; put the value into parentheses",
    ),
    "more than 32 bits": (
        ["--volume-size=2147483648"],
        "--volume-size: found 2147483648, expected 0 to 2147483647",
    ),
    "no address": (
        ["--channel=training=cifar10"],
        "--channel training: found 'cifar10', expected s3://BUCKET/PREFIX",
    ),
    "a channel's name": (["--channel=my data=s3://my-bucket/x"], "--channel: found 'my data'"),
    "a mode": (
        [f"{DATA_FLAG},mode=Pipe"],
        "--channel training: found mode=Pipe, expected one of File, FastFile",
    ),
    "FastFile of half a name": (
        ["--channel=training=s3://my-bucket/cif,mode=FastFile"],
        "end it with /",
    ),
    "a distribution": (
        [f"{DATA_FLAG},distribution=Sharded"],
        "found distribution=Sharded, expected one of FullyReplicated",
    ),
    "a group without groups": (
        [f"{DATA_FLAG},group=a"],
        "found group=a, expected none, as there is no --instance-group",
    ),
    "another group": (
        [f"{DATA_FLAG},group=b", "--instance-group=a=ml.g5.xlarge:1"],
        "found group=b, expected one of a",
    ),
    "a group for some": (
        [
            "--instance-group=a=ml.g5.xlarge:1",
            f"{DATA_FLAG},group=a",
            "--channel=b=s3://my-bucket/b",
        ],
        "expected a group for all channels or for none",
    ),
    "a group's type": (["--instance-group=a=ml.x:1"], "--instance-group: found 'ml.x'"),
    "only subnets": (["--subnet=subnet-1"], "--security-group: found none"),
    "only security groups": (["--security-group=sg-1"], "--subnet: found none"),
    "a variable's name": (["--env=MY-VAR=1"], "--env: found 'MY-VAR'"),
    "a tag's character": (["--tag=a=<b>"], "--tag: found '<b>'"),
    "a job name": (
        ["--job-name=my_job"],
        "--job-name: found 'my_job', expected up to 63 letters",
    ),
    "another flag": (
        ["--instance=ml.g5.xlarge"],
        "unrecognized arguments: --instance=ml.g5.xlarge",
    ),
}


@pytest.mark.parametrize(("arguments", "line"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_costs_nothing(launch, arguments, line):
    completed = launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", *arguments)
    assert completed.returncode in (1, 2)
    assert completed.stdout == ""
    assert completed.stderr.count("\n") == 1, completed.stderr
    assert completed.stderr.startswith("error: "), completed.stderr
    assert line in completed.stderr


def test_the_requests_shape_is_botocores_to_judge():
    """Flags cannot make a request with an unknown or a missing field.

    botocore's own check finds such a request.
    """
    from sagemaker_lightning.launcher import request_validation

    with pytest.raises(ValueError, match="Missing required parameter"):
        request_validation.validate({"TrainingJobName": "a"})


def test_help_is_the_manual(launch):
    completed = launch("--help")
    assert completed.returncode == 0
    assert "Launches one SageMaker training job" in completed.stdout
    assert "--max-wait DURATION" in completed.stdout
