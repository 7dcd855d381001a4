"""scripts/launch.py with an AWS of moto's: what is missing there, and how a job is followed."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import aws_services
import pytest
from aws_services import REGION, SageMakerStandIn, client, served_forbidden_buckets, served_here
from containers import ROOT
from launches import (
    CHANGES,
    COMPLETED_STATE,
    DATA_FLAG,
    FAILED_STATE,
    IMAGE,
    NEEDED_FLAGS,
    UNCHECKED_FLAG,
    launch_script,  # noqa: F401  the fixture launch
    request_of,
)

from sagemaker_lightning.launcher import command, follower
from sagemaker_lightning.launcher.sites import Site

pytestmark = pytest.mark.slow


MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


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


def test_what_is_needed(launch):
    completed = launch("--dry-run")
    assert completed.returncode == 2
    assert completed.stderr == (
        "error: the following arguments are required: --image, --role, --output; --help lists "
        "all flags\n"
    )


@pytest.mark.parametrize("words", [["stopp", "job"], ["--region=us-east-1", "list"]])
def test_a_word_that_is_not_a_command_is_named(launch, words):
    completed = launch(*words)
    name = next(word for word in words if not word.startswith("-"))
    assert completed.returncode == 2
    assert completed.stderr == (
        f"error: found {name!r}, expected KEY=VALUE, or one of the commands list, logs, stop, "
        "resume, follow, cost, completion as the first word; --help lists all flags\n"
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
    assert completed.stderr.startswith("error: no AWS credentials found")
    assert completed.stderr.count("\n") == 1


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
    assert "moto-1: Completed" in completed.stdout
    assert "model: s3://my-bucket/jobs/moto-1/output/model.tar.gz" in completed.stdout
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
    said = completed.stderr.splitlines()
    assert said[0] == "not checked: the hyperparameters, as --check-hyperparameters=no says"
    assert said[1].split() == ["per", "hour", "hours", "cost", "USD"]
    assert said[-1].startswith("no line for spot: ")


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


def test_a_job_that_reached_its_limit_says_how_it_continues(capsys):
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
    cost = launch("cost", "spot-1", "--price=2", endpoint=aws)
    assert cost.returncode == 0, cost.stderr
    assert cost.stdout.startswith("spot-1: Completed, "), cost.stdout
    for words, says in (
        (("cost", "spot-1", "--prices=none"), "--prices: none cannot be read: "),
        (("stop", "spot-1"), "JOB: found spot-1, which is Completed; expected a job that runs"),
        (("resume", "spot-1"), "JOB: found spot-1, which is Completed; there is nothing to resume"),
        (("follow", "none"), "JOB: found none, expected a training job in us-east-1; "),
    ):
        completed = launch(*words, endpoint=aws)
        assert (completed.returncode, completed.stdout) == (1, "")
        assert completed.stderr.startswith(f"error: {says}") and completed.stderr.count("\n") == 1


@pytest.mark.parametrize("name", command.COMMANDS)
def test_the_help_of_a_command_has_an_example(launch, name):
    completed = launch(name, "--help")
    assert completed.returncode == 0
    example = command.EXAMPLES[name]
    assert f"\nexample: launch.py {example}\n" in completed.stdout and example.startswith(name)
    mistake = launch(name, "--no-such-flag")
    assert mistake.returncode == 2 and mistake.stderr.startswith("error: ")
    assert mistake.stderr.count("\n") == 1


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
        r"not checked: the hyperparameters: \S+ lacks the application's packages; .*",
        completed.stderr.splitlines()[0],
    )
    assert completed.stderr.count("not checked: ") == 1
