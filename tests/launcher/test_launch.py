"""scripts/launch.py: its requests, what it refuses, and how it follows a job.

It refuses what is wrong before anything costs money.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import aws_services
import pytest
import warm
from aws_services import (
    ACCOUNT,
    REGION,
    SageMakerStandIn,
    client,
    script,
    served_forbidden_buckets,
    served_here,
)
from containers import DOCKER, ROOT, docker

from sagemaker_lightning.launcher import follower
from sagemaker_lightning.launcher.sites import Site

pytestmark = pytest.mark.slow

IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/sagemaker-lightning:1.0"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/SageMaker"
NEEDED_FLAGS = (f"--image={IMAGE}", f"--role={ROLE}", "--output=s3://my-bucket/jobs")
UNCHECKED_FLAG = "--check-hyperparameters=no"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DATA_FLAG = "--channel=training=s3://my-bucket/cifar10/"


@pytest.fixture(scope="module")
def aws(tmp_path_factory) -> str:
    """A moto server with data, a bucket in another region, and the image in its registry."""
    with aws_services.moto(tmp_path_factory.mktemp("moto")) as endpoint:
        s3 = client("s3", endpoint)
        s3.create_bucket(Bucket="my-bucket")
        s3.put_object(Bucket="my-bucket", Key="cifar10/cifar-10-python.tar.gz", Body=b"x")
        client("s3", endpoint, "eu-west-1").create_bucket(
            Bucket="far-bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
        ecr = client("ecr", endpoint)
        ecr.create_repository(repositoryName="sagemaker-lightning")
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"digest": f"sha256:{'0' * 64}"},
            "layers": [],
        }
        ecr.put_image(
            repositoryName="sagemaker-lightning", imageManifest=json.dumps(manifest), imageTag="1.0"
        )
        yield endpoint


@pytest.fixture
def launch(tmp_path):
    """Return a function that runs launch.py in an empty folder.

    It runs offline and without credentials, unless an endpoint is given.
    """

    def run(
        *arguments: str, endpoint: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess:
        variables = {"AWS_REGION": REGION} | variables
        return script(
            "launch.py",
            *arguments,
            environment=aws_services.variables(endpoint, **variables),
            folder=tmp_path,
        )

    return run


def request_of(completed: subprocess.CompletedProcess) -> dict:
    """Return the request that a dry run printed."""
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def test_the_smallest_request(launch):
    request = request_of(launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run"))
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


def test_a_request_with_everything(launch):
    completed = launch(
        *(
            *NEEDED_FLAGS,
            UNCHECKED_FLAG,
            "--dry-run",
            "--job-name=job-1",
            "--instance-type=ml.g5.2xlarge",
            "--instance-count=2",
        ),
        *(
            "--channel=training=s3://my-bucket/a,b=c/,mode=FastFile,distribution=ShardedByS3Key",
            "--volume-size=50",
        ),
        *(
            "--channel=other=s3://my-bucket/x",
            "--checkpoints=s3://my-bucket/run-1",
            "--spot",
            "--max-run=100",
        ),
        *(
            "--max-wait=200",
            "--retries=3",
            "--subnet=subnet-1",
            "--subnet=subnet-2",
            "--security-group=sg-1",
        ),
        *(
            "--env=NCCL_DEBUG=INFO",
            "--env=A=b=c d",
            "--tag=team=vision",
            "--tag=cost centre=é",
            "--metric=f1=f1=(.*)",
        ),
    )
    request = request_of(completed)
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
    assert {"Name": "f1", "Regex": "f1=(.*)"} in request["AlgorithmSpecification"][
        "MetricDefinitions"
    ]


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


def test_instance_groups_with_channels_of_their_own(launch):
    completed = launch(
        *(
            *NEEDED_FLAGS,
            UNCHECKED_FLAG,
            "--dry-run",
            "--instance-group=data=ml.c5.xlarge:2",
            "--instance-group=gpu=ml.g5.xlarge:1",
        ),
        *(
            "--channel=raw=s3://my-bucket/raw,group=data",
            "--channel=training=s3://my-bucket/x,group=data,group=gpu",
        ),
    )
    request = request_of(completed)
    assert request["ResourceConfig"] == {
        "VolumeSizeInGB": 30,
        "InstanceGroups": [
            {"InstanceGroupName": "data", "InstanceType": "ml.c5.xlarge", "InstanceCount": 2},
            {"InstanceGroupName": "gpu", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
        ],
    }
    sources = [channel["DataSource"]["S3DataSource"] for channel in request["InputDataConfig"]]
    assert [source["InstanceGroupNames"] for source in sources] == [["data"], ["data", "gpu"]]


def test_keep_alive_and_a_spot_jobs_default_wait(launch):
    assert (
        request_of(launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", "--keep-alive=600"))[
            "ResourceConfig"
        ]["KeepAlivePeriodInSeconds"]
        == 600
    )
    spot = request_of(
        launch(
            *NEEDED_FLAGS,
            UNCHECKED_FLAG,
            "--dry-run",
            "--spot",
            "--checkpoints=s3://my-bucket/c",
            "--max-run=50",
        )
    )
    assert spot["StoppingCondition"] == {"MaxRuntimeInSeconds": 50, "MaxWaitTimeInSeconds": 100}


def test_an_image_in_a_registry_of_the_vpc(launch):
    completed = launch(
        *(
            "--image=registry.example:5000/app",
            *NEEDED_FLAGS[1:],
            "--subnet=subnet-1",
            "--security-group=sg-1",
        ),
        *(UNCHECKED_FLAG, "--dry-run"),
    )
    algorithm = request_of(completed)["AlgorithmSpecification"]
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


def test_hyperparameters_go_out_as_they_were_typed(launch):
    completed = launch(
        *NEEDED_FLAGS,
        UNCHECKED_FLAG,
        "--dry-run",
        *(f"{key}={value}" for key, value in HYPERPARAMETERS.items()),
    )
    assert request_of(completed)["HyperParameters"] == HYPERPARAMETERS


MISTAKES = {
    "no key": (["epochs"], "hyperparameter: found 'epochs', expected KEY=VALUE"),
    "a key twice": (["a=1", "a=2"], "hyperparameter: found a twice"),
    "101 hyperparameters": (
        [f"k{k}=1" for k in range(101)],
        "101 entries in its value, expected 0 to 100 entries",
    ),
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
    "a long keep-alive": (
        ["--keep-alive=21601"],
        "--keep-alive: found 21601, expected 0 to 21600",
    ),
    "31 retries": (["--retries=31"], "--retries: found 31, expected 1 to 30"),
    "an instance type": (["--instance-type=ml.g5.xlrage"], "--instance-type: found 'ml.g5.xlrage'"),
    "no instance": (
        ["--instance-count=0"],
        "--instance-count: found '0', expected a whole number above 0",
    ),
    "a role": (
        [f"--role={ACCOUNT}/SageMaker"],
        "--role: found '123456789012/SageMaker', expected the ARN of a role, arn:aws:iam::",
    ),
    "a role's name": (["--role=Trainer"], "--role: found 'Trainer', expected the ARN of a role"),
    "a role elsewhere": (
        [f"--role=arn:aws-cn:iam::{ACCOUNT}:role/x"],
        "--role: found a role in aws-cn",
    ),
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
    "a region": (["--region=mars"], "--region: found 'mars'"),
    "a bucket's name of one letter": (
        ["--output=s3://b/jobs"],
        "--output: found 's3://b/jobs', expected s3://BUCKET/PREFIX, BUCKET of 3 to 63 lower-cas",
    ),
    "a metric's expression": (
        ["--metric=loss=loss=([0-9"],
        "--metric loss: found 'loss=([0-9', which is no regular expression (unterminated char",
    ),
    "a metric without a group": (
        ["--metric=loss=loss=[0-9.]+"],
        "--metric loss: found 'loss=[0-9.]+', which has no group; put the value into parentheses",
    ),
    "three years": (["--max-run=99999999"], "--max-run: found 99999999, expected 1 to 2419200"),
    "more than 32 bits": (
        ["--volume-size=2147483648"],
        "--volume-size: found 2147483648, expected 0 to 2147483647",
    ),
    "a group of none": (
        ["--instance-group=a=ml.g5.xlarge:0"],
        "found 'a=ml.g5.xlarge:0', expected NAME=TYPE:COUNT with a COUNT above 0",
    ),
    "a bucket's name": (
        ["--output=s3://My_Bucket/x"],
        "--output: found 's3://My_Bucket/x', expected s3://BUCKET/PREFIX",
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
    "a group's form": (["--instance-group=ml.g5.xlarge:1"], "expected NAME=TYPE:COUNT"),
    "groups and a type": (
        ["--instance-group=a=ml.g5.xlarge:1", "--instance-type=ml.g5.xlarge"],
        "--instance-group: not allowed with --instance-type",
    ),
    "only subnets": (["--subnet=subnet-1"], "--security-group: found none"),
    "only security groups": (["--security-group=sg-1"], "--subnet: found none"),
    "a variable's name": (["--env=MY-VAR=1"], "--env: found 'MY-VAR'"),
    "a tag's character": (["--tag=a=<b>"], "--tag: found '<b>'"),
    "a long job name": ([f"--job-name={'x' * 64}"], "--job-name: found 64 characters in its value"),
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
    assert completed.stderr.count("\n") == 1 and completed.stderr.startswith("error: "), (
        completed.stderr
    )
    assert line in completed.stderr


def test_what_is_needed(launch):
    completed = launch("--dry-run")
    assert completed.returncode == 2
    assert completed.stderr == (
        "error: the following arguments are required: --image, --role, --output; --help lists "
        "all flags\n"
    )


def test_the_region_is_the_environments_or_else_the_images(launch):
    elsewhere = launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", AWS_REGION="eu-west-1")
    assert "but the job is to run in eu-west-1" in elsewhere.stderr
    assert request_of(launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", AWS_REGION=""))
    vpc = (
        "--image=registry.example/app",
        *NEEDED_FLAGS[1:],
        "--subnet=subnet-1",
        "--security-group=sg-1",
    )
    completed = launch(*vpc, UNCHECKED_FLAG, "--dry-run", AWS_REGION="")
    assert (completed.returncode, completed.stderr.count("\n")) == (1, 1)
    assert completed.stderr.startswith("error: --region: found none")


def test_a_wrong_image_is_named_also_where_no_region_is(launch):
    completed = launch("--image=sagemaker-lightning", *NEEDED_FLAGS[1:], "--dry-run", AWS_REGION="")
    assert completed.stderr.startswith("error: --image: found 'sagemaker-lightning', expected an")


def test_without_credentials_a_dry_run_says_what_it_did_not_check_and_a_job_is_not_started(launch):
    assert (
        "not checked: the data, the buckets and the image: no AWS"
        in launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run").stderr
    )
    completed = launch(*NEEDED_FLAGS, UNCHECKED_FLAG)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert (
        completed.stderr.startswith("error: no AWS credentials found")
        and completed.stderr.count("\n") == 1
    )


MISSING_IN_AWS = {
    "nothing stored": (
        ["--channel=training=s3://my-bucket/nothing/"],
        "--channel training: found nothing stored at s3://",
    ),
    "no bucket": (
        ["--channel=training=s3://no-such-bucket/x"],
        "there is no bucket no-such-bucket",
    ),
    "no bucket to write": (
        ["--output=s3://no-such-bucket/x"],
        "--output: found s3://no-such-bucket/x/, but there is no",
    ),
    "a bucket elsewhere": (
        ["--checkpoints=s3://far-bucket/c"],
        "--checkpoints: found a bucket in eu-west-1",
    ),
    "no tag": (
        [f"--image={IMAGE}.1"],
        "(ImageNotFoundException); push it with scripts/push_image.sh",
    ),
    "no repository": (
        [f"--image={IMAGE.replace('sagemaker-lightning', 'other')}"],
        "(RepositoryNotFoundException); push it with scripts/push_image.sh",
    ),
}


@pytest.mark.parametrize(("arguments", "line"), MISSING_IN_AWS.values(), ids=MISSING_IN_AWS)
def test_what_is_missing_in_aws_is_one_line(aws, launch, arguments, line):
    completed = launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", *arguments, endpoint=aws)
    assert (completed.returncode, completed.stdout) == (1, "")
    lines = completed.stderr.splitlines()
    assert [line.startswith("error: ") for line in lines] == [True], completed.stderr
    assert line in completed.stderr


def test_an_unreachable_aws_does_not_stop_a_dry_run(launch):
    closed = f"http://127.0.0.1:{aws_services.free_port()}"
    completed = launch(*NEEDED_FLAGS, DATA_FLAG, UNCHECKED_FLAG, "--dry-run", endpoint=closed)
    assert request_of(completed)
    assert "not checked: the data, the buckets and the image: Could not connect" in completed.stderr


def test_what_may_not_be_looked_at_is_said_and_does_not_stop_the_job(launch):
    def forbid(*_) -> dict:
        raise PermissionError("not authorized to perform ecr:DescribeImages")

    stand_in = SageMakerStandIn([], {})
    with (
        served_here(forbid) as ecr,
        served_here(stand_in.answer) as sagemaker,
        served_forbidden_buckets() as s3,
    ):
        completed = launch(
            *(*NEEDED_FLAGS, UNCHECKED_FLAG, "--no-follow"),
            endpoint=sagemaker,
            AWS_ENDPOINT_URL_ECR=ecr,
            AWS_ENDPOINT_URL_S3=s3,
        )
    assert completed.returncode == 0, completed.stderr
    assert (
        "not checked: --image: DescribeImages: AccessDeniedException: not authorized"
        in completed.stderr
    )
    assert "not checked: --output: HeadBucket: 403" in completed.stderr
    assert stand_in.names() == ["CreateTrainingJob"]


def test_a_job_in_moto(aws, launch):
    completed = launch(
        *(
            *NEEDED_FLAGS,
            DATA_FLAG,
            UNCHECKED_FLAG,
            "--job-name=moto-1",
            "--tag=team=vision",
            "--poll=1",
            "trainer.max_epochs=2",
        ),
        endpoint=aws,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(f"started moto-1 in {REGION}\n")
    assert (
        "moto-1: Completed" in completed.stdout
        and "model: s3://my-bucket/jobs/moto-1/output/model.tar.gz" in completed.stdout
    )
    sagemaker = client("sagemaker", aws)
    job = sagemaker.describe_training_job(TrainingJobName="moto-1")
    assert job["HyperParameters"] == {"trainer.max_epochs": "2"}
    assert sagemaker.list_tags(ResourceArn=job["TrainingJobArn"])["Tags"] == [
        {"Key": "team", "Value": "vision"}
    ]


def test_a_refusal_of_sagemakers_is_one_line(aws, launch):
    def refuse(*_) -> dict:
        raise PermissionError("not authorized to perform\nsagemaker:CreateTrainingJob")

    with served_here(refuse) as sagemaker:
        completed = launch(
            *NEEDED_FLAGS, UNCHECKED_FLAG, endpoint=aws, AWS_ENDPOINT_URL_SAGEMAKER=sagemaker
        )
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr.splitlines()[-1] == (
        "error: CreateTrainingJob: AccessDeniedException: not authorized to perform "
        "sagemaker:CreateTrainingJob"
    )


# Following: a spot job of two instances; each look finds one more state and one more line.
CHANGES = [
    {"Status": "Starting", "StartTime": 1700000000, "StatusMessage": "Preparing the instances"},
    {
        "Status": "Training",
        "StartTime": 1700000100,
        "StatusMessage": "Training image download completed",
    },
]
RUNNING_STATES = [
    {
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": "Starting",
        "SecondaryStatusTransitions": CHANGES[:1],
    },
    {
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": "Training",
        "SecondaryStatusTransitions": CHANGES,
    },
]
COMPLETED_STATE = {
    "TrainingJobStatus": "Completed",
    "SecondaryStatus": "Completed",
    "SecondaryStatusTransitions": CHANGES,
    "TrainingTimeInSeconds": 400,
    "BillableTimeInSeconds": 122,
    "ModelArtifacts": {"S3ModelArtifacts": "s3://my-bucket/jobs/job-1/output/model.tar.gz"},
}
FAILED_STATE = COMPLETED_STATE | {
    "TrainingJobStatus": "Failed",
    "SecondaryStatus": "Failed",
    "FailureReason": "AlgorithmError: error: --data.batch_size: found 0",
}
STOPPED_STATE = COMPLETED_STATE | {
    "TrainingJobStatus": "Stopped",
    "SecondaryStatus": "MaxRuntimeExceeded",
}
LOG_LINES = {"algo-1": ["one", "two", "three", "last"], "algo-2": ["uno"]}
SPOT_FLAGS = (
    "--spot",
    "--checkpoints=s3://my-bucket/c",
    "--instance-count=2",
    "--job-name=job-1",
    "--poll=1",
)


def follow(aws: str, launch, *arguments: str, states: list[dict], lines=LOG_LINES):
    """Launch a job in the stand-in; return what was printed, and the stand-in."""
    stand_in = SageMakerStandIn(states, lines)
    with served_here(stand_in.answer) as address:
        completed = launch(
            *(*NEEDED_FLAGS, UNCHECKED_FLAG, *arguments),
            endpoint=aws,
            AWS_ENDPOINT_URL_SAGEMAKER=address,
            AWS_ENDPOINT_URL_CLOUDWATCH_LOGS=address,
        )
    return completed, stand_in


def test_following_a_job_to_its_end(aws, launch):
    completed, _ = follow(aws, launch, *SPOT_FLAGS, states=[*RUNNING_STATES, COMPLETED_STATE])
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    logged = [line for line in lines if line.startswith("algo-")]
    assert sorted(logged) == ["algo-1: one", "algo-1: three", "algo-1: two", "algo-2: uno"]
    changes = [line for line in lines if line.startswith("[")]
    assert [line.split("] ")[1] for line in changes] == [
        "Starting: Preparing the instances",
        "Training: Training image download completed",
    ]
    assert lines[-2:] == [
        "job-1: Completed, 400 s of training, 122 s billable on each of 2 instances, 69.5 % "
        "saved by spot",
        "model: s3://my-bucket/jobs/job-1/output/model.tar.gz",
    ]
    assert completed.stderr.splitlines() == [
        "not checked: the hyperparameters, as --check-hyperparameters=no says"
    ]


def test_a_failed_job_says_why(aws, launch):
    completed, _ = follow(
        aws, launch, "--job-name=job-1", "--poll=1", states=[RUNNING_STATES[0], FAILED_STATE]
    )
    assert completed.returncode == 1
    assert completed.stdout.splitlines()[-1] == "job-1: Failed, 400 s of training, 122 s billable"
    assert (
        completed.stderr.splitlines()[-1]
        == "error: AlgorithmError: error: --data.batch_size: found 0"
    )


def test_a_stopped_job_did_not_complete(aws, launch):
    completed, _ = follow(aws, launch, "--job-name=job-1", "--poll=1", states=[STOPPED_STATE])
    assert completed.returncode == 1
    assert "job-1: Stopped (MaxRuntimeExceeded), 400 s of training" in completed.stdout
    assert completed.stderr.splitlines()[-2:] == [
        "error: the job ended as Stopped",
        "it cannot continue: it had no --checkpoints; start it again with one",
    ]


def test_a_job_that_reached_its_limit_says_how_it_goes_on(capsys):
    site = Site(REGION, None, "launch", f"--region={REGION}")
    more = " --max-wait=SECONDS"
    for secondary, says in (("MaxRuntimeExceeded", ""), ("MaxWaitTimeExceeded", more)):
        state = STOPPED_STATE | {"TrainingJobName": "job-1", "SecondaryStatus": secondary}
        state |= {"CheckpointConfig": {"S3Uri": "s3://my-bucket/c"}}
        assert follower.report(site, state) == 1
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"to continue where it was: launch resume job-1 --region={REGION}{says}"
        )


def test_ctrl_c_stops_following_and_leaves_the_job_alone(aws, tmp_path):
    stand_in = SageMakerStandIn(RUNNING_STATES, LOG_LINES)
    with served_here(stand_in.answer) as address:
        endpoints = {
            "AWS_ENDPOINT_URL_SAGEMAKER": address,
            "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": address,
        }
        process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "scripts/launch.py"),
                *NEEDED_FLAGS,
                UNCHECKED_FLAG,
                "--job-name=job-1",
                "--poll=1",
            ],
            env=aws_services.variables(aws, **endpoints),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while stand_in.described < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "StopTrainingJob" not in stand_in.names()
        command = re.search(r"the job continues. To stop it: (.*)\n", output)[1]
        environment = aws_services.variables(aws, **endpoints)
        subprocess.run(command, shell=True, env=environment, check=True, capture_output=True)
        assert stand_in.calls[-1] == ("StopTrainingJob", {"TrainingJobName": "job-1"})


def test_commands_for_a_job_that_is_there(aws, launch):
    """tests/unit/launcher/test_jobs.py has more of each; moto's jobs are completed at once."""
    flags = (*SPOT_FLAGS, "--job-name=spot-1", "--no-follow")
    assert launch(*NEEDED_FLAGS, UNCHECKED_FLAG, *flags, endpoint=aws).returncode == 0
    listed = launch("list", endpoint=aws)
    assert listed.returncode == 0 and "  Completed   spot-1\n" in listed.stdout, listed.stderr
    followed = launch("follow", "spot-1", "--poll=1", endpoint=aws)
    assert followed.returncode == 0 and "spot-1: Completed" in followed.stdout, followed.stderr
    logs = launch("logs", "spot-1", endpoint=aws)
    assert (logs.returncode, logs.stderr) == (0, "spot-1 has no log that can be shown\n")
    for words, says in (
        (("stop", "spot-1"), "JOB: found spot-1, which is Completed; expected a job that runs"),
        (("resume", "spot-1"), "JOB: found spot-1, which is Completed; there is nothing to resume"),
        (("follow", "none"), "JOB: found none, expected a training job in us-east-1; "),
    ):
        completed = launch(*words, endpoint=aws)
        assert (completed.returncode, completed.stdout) == (1, "")
        assert completed.stderr.startswith(f"error: {says}") and completed.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["list", "logs", "stop", "resume", "follow"])
def test_the_help_of_a_command_has_an_example(launch, name):
    completed = launch(name, "--help")
    assert completed.returncode == 0 and f"example: launch.py {name}" in completed.stdout
    mistake = launch(name, "--no-such-flag")
    assert mistake.returncode == 2 and mistake.stderr.startswith("error: ")
    assert mistake.stderr.count("\n") == 1


def test_no_follow_leaves_after_the_start(aws, launch):
    completed, stand_in = follow(aws, launch, "--no-follow", states=RUNNING_STATES)
    assert completed.returncode == 0
    assert stand_in.names() == ["CreateTrainingJob"]


def test_a_log_that_may_not_be_read_does_not_end_the_following(aws, launch):
    class Silent(SageMakerStandIn):
        def DescribeLogStreams(self, request: dict) -> dict:  # noqa: N802
            raise PermissionError("no logs:DescribeLogStreams")

    stand_in = Silent([*RUNNING_STATES, COMPLETED_STATE], LOG_LINES)
    with served_here(stand_in.answer) as address:
        endpoints = {
            "AWS_ENDPOINT_URL_SAGEMAKER": address,
            "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": address,
        }
        completed = launch(
            *NEEDED_FLAGS, UNCHECKED_FLAG, "--job-name=job-1", "--poll=1", endpoint=aws, **endpoints
        )
    assert completed.returncode == 0
    assert (
        completed.stderr.count("the log cannot be shown: DescribeLogStreams: AccessDeniedException")
        == 1
    )


def test_hyperparameters_are_checked_by_the_applications_parser(launch):
    right = launch(
        *NEEDED_FLAGS,
        "--dry-run",
        DATA_FLAG,
        "trainer.max_epochs=2",
        "optimizer=Adam",
        "optimizer.lr=1e-3",
    )
    assert request_of(right)["HyperParameters"]["optimizer.lr"] == "1e-3"
    assert "hyperparameters" not in right.stderr
    wrong = launch(*NEEDED_FLAGS, "--dry-run", "trainer.max_epoch=2")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (1, "", 1)
    assert wrong.stderr.startswith(
        "error: the application refuses a hyperparameter: --trainer.max_epoch"
    )


def test_a_model_in_a_source_archive_is_not_checked_if_told_so(launch):
    """docs/clients.md has these hyperparameters: the check has no module of the archive."""
    source = (
        "sagemaker_submit_directory=s3://my-bucket/sourcedir.tar.gz",
        "model=mine.Model",
    )
    checked = launch(*NEEDED_FLAGS, "--dry-run", *source)
    assert checked.returncode == 1 and "No module named 'mine'" in checked.stderr
    unchecked = launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", *source)
    assert request_of(unchecked)["HyperParameters"] == dict(pair.split("=") for pair in source)


def test_the_data_module_that_is_asked_is_that_of_the_channels(launch):
    """Ask the data module of the channels which flags there are.

    CIFAR10DataModule, the default where there is a channel, has a flag that DigitsDataModule lacks.
    """
    with_channel = launch(*NEEDED_FLAGS, "--dry-run", DATA_FLAG, "data.download=false")
    assert with_channel.returncode == 0, with_channel.stderr
    without = launch(*NEEDED_FLAGS, "--dry-run", "data.download=false")
    assert without.returncode == 1 and "--data.download" in without.stderr


def test_hyperparameters_that_cannot_be_checked_are_said_to_be_so(launch, tmp_path):
    own = launch(*NEEDED_FLAGS, "--dry-run", "--env=SAGEMAKER_PROGRAM=mine.py", "anything=1")
    assert own.returncode == 0
    assert (
        "not checked: the hyperparameters: they are for a program of the job's own, mine.py"
        in own.stderr
    )
    absent = launch(
        *NEEDED_FLAGS,
        "--dry-run",
        "--check-hyperparameters=image",
        "anything=1",
        DOCKER="no-docker-here",
    )
    assert absent.returncode == 0
    assert (
        "not checked: the hyperparameters: " in absent.stderr and "no-docker-here" in absent.stderr
    )


def test_without_the_applications_packages_one_line_says_so(aws, tmp_path):
    """Without Lightning, launch.py says so in one line.

    moto's environment has boto3 and no Lightning; a copy of the checkout has no .venv beside it.
    """
    from environments import python_of

    for folder in ("app", "sagemaker_lightning", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    completed = subprocess.run(
        [
            str(python_of("rehearsal")),
            str(tmp_path / "scripts/launch.py"),
            *NEEDED_FLAGS,
            "--dry-run",
            "anything=1",
        ],
        env=aws_services.variables(aws),
        capture_output=True,
        text=True,
    )
    assert request_of(completed)["HyperParameters"] == {"anything": "1"}
    assert re.fullmatch(
        r"not checked: the hyperparameters: \S+ lacks the application's packages; .*\n",
        completed.stderr,
    )


@pytest.mark.docker
def test_an_image_that_cannot_be_had_is_said_to_be_so(launch):
    port = aws_services.free_port()
    image = f"--image=127.0.0.1:{port}/app:1"
    network = ("--subnet=subnet-1", "--security-group=sg-1")
    completed = launch(
        image,
        *NEEDED_FLAGS[1:],
        *network,
        "--dry-run",
        "--check-hyperparameters=image",
        DOCKER=DOCKER,
    )
    assert completed.returncode == 0
    line = completed.stderr.splitlines()[0]
    assert (
        line.startswith("not checked: the hyperparameters: docker: ")
        and f"127.0.0.1:{port}" in line
    ), completed.stderr


@pytest.mark.thorough  # by this checkout's, above
@pytest.mark.docker
def test_hyperparameters_are_checked_by_the_images_parser(launch, image):
    assert docker("tag", image, IMAGE).returncode == 0
    try:
        arguments = (*NEEDED_FLAGS, "--dry-run", "--check-hyperparameters=image")
        right = launch(*arguments, DATA_FLAG, "data.batch_size=64", DOCKER=DOCKER)
        assert request_of(right) and "hyperparameters" not in right.stderr
        wrong = launch(*arguments, DATA_FLAG, "data.batch_size=many", DOCKER=DOCKER)
        assert wrong.returncode == 1
        assert wrong.stderr.startswith(
            "error: the application refuses a hyperparameter: --data.batch_size"
        )
    finally:
        docker("rmi", IMAGE)


DOCKER_STAND_IN = """#!/bin/sh
echo "$@" >>"$RECORD"
for word in "$@"; do
    case "$word" in
        *:/opt/ml/input/config:ro) cat "${word%%:*}/hyperparameters.json" >>"$RECORD"; echo >>"$RECORD" ;;
        --env-file=*) cat "${word#*=}" >>"$RECORD" ;;
    esac
done
case "$*" in *sagemaker_lightning.drill*) exit "$DRILLED";; esac
"""  # noqa: E501


@pytest.mark.parametrize("drilled", [0, 1])
def test_a_job_is_drilled_before_it_is_started(launch, tmp_path, drilled):
    """The drill runs in the image, with what is sent to the job and stand-ins for its data."""
    stub = tmp_path / "docker"
    stub.write_text(DOCKER_STAND_IN)
    stub.chmod(0o755)
    (tmp_path / "some").mkdir()
    variables = {"DOCKER": str(stub), "RECORD": str(tmp_path / "record"), "DRILLED": str(drilled)}
    flags = [
        "--check-hyperparameters=image",
        "--env=TOKEN=secret value",
        DATA_FLAG,
        "--drill",
        "--drill-data=training=some",
    ]
    completed = launch(*NEEDED_FLAGS, *flags, "--dry-run", "trainer.max_epochs=3", **variables)
    line, sent, sent_variables = (tmp_path / "record").read_text().splitlines()[-3:]
    assert f"--volume {tmp_path}/some:/opt/ml/input/data/training:ro --env-file=" in line
    assert line.endswith(f" {IMAGE} python -m sagemaker_lightning.drill -- train")
    assert line.startswith("run --rm ") and json.loads(sent) == {"trainer.max_epochs": "3"}
    # Others can read a command line, and a log is kept.
    assert sent_variables == "TOKEN=secret value"
    assert "secret" not in line + completed.stderr
    if drilled:
        assert (
            completed.returncode == 1
            and "the job is not exact, or cannot be drilled" in completed.stderr
            and not completed.stdout
        )
    else:
        assert request_of(completed)["HyperParameters"] == {"trainer.max_epochs": "3"}


def test_a_drill_needs_the_data_here(launch):
    completed = launch(
        *NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", DATA_FLAG, "--drill", "--drill-data=other=."
    )
    assert (
        completed.returncode == 1
        and "--drill-data: found none for the channel training, which is at s3://"
        in completed.stderr
    )
    completed = launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", "--drill-data=training=.")
    assert completed.returncode == 1 and "--drill-data: found without --drill" in completed.stderr


def test_a_job_that_fails_is_drilled_in_this_checkout(launch):
    """The toolkit starts the drill, as it would start the job."""
    completed = launch(
        *NEEDED_FLAGS,
        UNCHECKED_FLAG,
        "--dry-run",
        "--drill",
        "trainer.max_steps=0",
        "trainer.accelerator=cpu",
    )
    assert completed.returncode == 1 and not completed.stdout
    assert (
        "the command, left alone, fails with exit status 1: error: --trainer" in completed.stderr
    ), completed.stderr


def test_each_metric_is_found_in_the_log_of_a_real_training(launch, tmp_path):
    flags = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=3"]
    flags += ["--trainer.limit_val_batches=1", "--trainer.limit_test_batches=1"]
    flags += ["--trainer.accelerator=cpu", "--progress.every_n_seconds=0"]
    training = warm.run(["python", ROOT / "app/train.py", *flags], tmp_path)
    assert training.returncode == 0, training.stdout
    request = request_of(launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run"))
    values = {
        metric["Name"]: [float(value) for value in re.findall(metric["Regex"], training.stdout)]
        for metric in request["AlgorithmSpecification"]["MetricDefinitions"]
    }
    assert all(values.values()), values
    assert [len(values[name]) for name in ("val_loss", "val_acc", "test_loss", "test_acc")] == [
        1,
        1,
        1,
        1,
    ]
    assert values["epoch"] == [1.0] * len(values["epoch"]) and values["step"][:2] == [1.0, 2.0]
    assert (
        0 <= min(values["train_acc"]) <= max(values["train_acc"]) <= 1
        and min(values["images_per_second"]) > 0
    )


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
    assert (
        "Launches one SageMaker training job" in completed.stdout
        and "--max-wait DURATION" in completed.stdout
    )
