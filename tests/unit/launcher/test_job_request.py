"""Environment variables and durations as they are typed; what is taken from here is not shown."""

import argparse
import json

import pytest

from sagemaker_lightning.launcher import (
    account_checks,
    command,
    contradictions,
    drill,
    job_request,
    request_validation,
)

SECRET = "a-secret-of-the-environment"
FLAGS = [
    "--image=123456789012.dkr.ecr.us-east-1.amazonaws.com/x:1",
    "--role=arn:aws:iam::123456789012:role/x",
    "--output=s3://bucket/o",
]


def parsed(*flags: str) -> argparse.Namespace:
    return command.parser().parse_args([*FLAGS, *flags])


def test_a_variable_is_taken_from_the_environment_and_not_shown(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    args = parsed("--env=WANDB_API_KEY", "--env=A=b=c", "--dry-run")
    request = job_request.build(args)
    named = {"SAGEMAKER_LIGHTNING_HIDDEN_VARIABLES": "WANDB_API_KEY"}
    assert request["Environment"] == {"WANDB_API_KEY": SECRET, "A": "b=c"} | named
    assert command.run_request(None, request, args) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["Environment"] == {"WANDB_API_KEY": "******", "A": "b=c"} | named
    assert request["Environment"]["WANDB_API_KEY"] == SECRET  # what is sent


def test_a_secret_in_the_command_line_is_named(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    flags = [f"--env=WANDB_API_KEY={'k' * 40}", f"--env=ADDRESS=https://me:{'p' * 9}@host"]
    quiet = ["--env=HF_TOKEN", "--env=TOKENIZERS_PARALLELISM=false", f"--env=TEXT={'a b ' * 9}"]
    lines = job_request.open_secrets(job_request.build(parsed(*flags, *quiet)))
    assert [line.split()[0] for line in lines] == ["WANDB_API_KEY", "ADDRESS"]
    assert lines[0].endswith(
        "--env=WANDB_API_KEY takes it from your environment, and shows it nowhere"
    )
    assert job_request.open_secrets(job_request.build(parsed(*quiet))) == []


def test_a_request_without_variables_is_shown_as_it_is():
    request = job_request.build(parsed())
    assert job_request.without_values(request) == request and "Environment" not in request


def test_a_variable_that_is_not_set(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ValueError, match="--env: found 'NOT_SET', which is not set here"):
        job_request.build(parsed("--env=NOT_SET"))
    with pytest.raises(ValueError, match="--env: found A twice"):
        monkeypatch.setenv("A", "b")
        job_request.build(parsed("--env=A", "--env=A=c"))
    with pytest.raises(ValueError, match="expected KEY=VALUE"):
        job_request.build(parsed("--env="))


def test_a_mistake_in_a_hidden_value_does_not_show_it(monkeypatch):
    monkeypatch.setenv("LONG", SECRET * 40)
    args = parsed("--env=LONG")
    request = job_request.build(args)
    with pytest.raises(ValueError, match="--env LONG: found 1080 characters in its val") as caught:
        request_validation.validate(request)
    assert SECRET[:10] not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("90m", 5400), ("12h", 43200), ("2d", 172800), ("1.5h", 5400)],
)
def test_a_duration_is_read(text, seconds):
    args = parsed(f"--max-run={text}", f"--max-wait={text}", f"--keep-alive={text}")
    assert (args.max_run, args.max_wait, args.keep_alive) == (seconds, seconds, seconds)


@pytest.mark.parametrize("text", ["0", "0h", "-1", "12 h", "h", "1w", "1.5", "0.1s", "1e3", "٣"])
def test_a_wrong_duration_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="or a duration such as 90m, 12h or 2d"):
        command.duration(text)


NOTHING = dict.fromkeys(("instance_group", "instance_type", "instance_count", "keep_alive"))
NOTHING |= dict.fromkeys(("instance_preference", "volume_kms_key", "training_plan"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1}),
        ({"instance_count": 3}, {"InstanceType": "ml.g5.xlarge", "InstanceCount": 3}),
        (
            {"instance_type": "ml.m5.large", "keep_alive": 60},
            {
                "InstanceType": "ml.m5.large",
                "InstanceCount": 1,
                "KeepAlivePeriodInSeconds": 60,
            },
        ),
    ],
)
def test_the_resources_of_a_job(given, expected):
    args = argparse.Namespace(**NOTHING | {"volume_size": 30} | given)
    assert job_request.resources(args) == {"VolumeSizeInGB": 30} | expected


# Keys, plans, preferences, file systems, isolation


KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/my-plan"
VPC = ["--subnet=subnet-1", "--security-group=sg-1"]


def valid(*flags: str) -> dict:
    """Return the request of flags that contradict nothing, and that botocore's model allows."""
    args = parsed("--job-name=a", *flags)
    contradictions.check_flags(args)
    contradictions.check_places(args, "us-east-1")
    request = job_request.build(args)
    request_validation.validate(request)
    return request


def refused(*flags: str) -> str:
    with pytest.raises(ValueError) as caught:
        valid(*flags)
    return str(caught.value)


def test_keys_encrypt_the_output_and_the_volumes():
    request = valid(
        f"--output-kms-key={KEY}", "--volume-kms-key=1234abcd", "--instance-type=ml.m5.large"
    )
    assert request["OutputDataConfig"] == {"S3OutputPath": "s3://bucket/o/", "KmsKeyId": KEY}
    assert request["ResourceConfig"]["VolumeKmsKeyId"] == "1234abcd"
    assert valid("--output-kms-key=alias/x")["OutputDataConfig"]["KmsKeyId"] == "alias/x"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--volume-kms-key=alias/x"], "--volume-kms-key: found the alias 'alias/x', expected th"),
        (["--volume-kms-key=x"], "--volume-kms-key: not allowed with ml.g5.xlarge, whose own vol"),
        (
            ["--volume-kms-key=x", "--instance-group=a=ml.m5.large:1"]
            + ["--instance-group=b=ml.g4dn.xlarge:1"],
            "--volume-kms-key: not allowed with ml.g4dn.xlarge",
        ),
        (
            ["--volume-kms-key=x", "--instance-preference=ml.p4d.24xlarge"],
            "--volume-kms-key: not allowed with ml.p4d.24xlarge",
        ),
        (["--output-kms-key=a key"], "--output-kms-key: found 'a key', expected a key's ID, ali"),
        (
            [f"--output-kms-key={KEY.replace('us-east', 'eu-west')}"],
            "--output-kms-key: found arn:aws:kms:eu-west-1:123456789012:key/1234abcd-12ab-34cd-56e",
        ),
        (["--training-plan=my-plan"], "--training-plan: found 'my-plan', expected the ARN of a t"),
        (
            [f"--training-plan={PLAN.replace('us-east', 'eu-west')}"],
            "--training-plan: found arn:aws:sagemaker:eu-west-1:123456789012:training-plan/my-plan",
        ),
        (["--max-run=2419201"], "--max-run: found 2419201, expected 1 to 2419200"),
    ],
)
def test_a_wrong_key_or_plan_is_refused(flags, says):
    assert refused(*flags).startswith(says)


def test_a_key_in_another_regions_words_is_not_taken_for_an_arn():
    assert valid("--output-kms-key=arn")["OutputDataConfig"]["KmsKeyId"] == "arn"


def test_a_training_plan():
    resources = valid(f"--training-plan={PLAN}", "--instance-type=ml.p5.48xlarge")["ResourceConfig"]
    assert resources["TrainingPlanArn"] == PLAN


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--instance-preference=ml.p5.48xlarge", "--instance-preference=ml.p4d.24xlarge"],
            {
                "InstancePreferences": [
                    {"InstanceType": "ml.p5.48xlarge"},
                    {"InstanceType": "ml.p4d.24xlarge"},
                ],
                "InstanceCount": 1,
            },
        ),
        (
            ["--instance-preference=ml.p5.48xlarge", "--instance-count=3"],
            {"InstancePreferences": [{"InstanceType": "ml.p5.48xlarge"}], "InstanceCount": 3},
        ),
        (
            [
                f"--instance-preference=ml.p5.48xlarge:2,plan={PLAN}",
                "--instance-preference=ml.g5.xlarge:16",
            ],
            {
                "InstancePreferences": [
                    {
                        "InstanceType": "ml.p5.48xlarge",
                        "InstanceCount": 2,
                        "TrainingPlanArns": [PLAN],
                    },
                    {"InstanceType": "ml.g5.xlarge", "InstanceCount": 16},
                ],
            },
        ),
    ],
)
def test_types_of_instances_in_the_order_of_preference(flags, expected):
    assert valid(*flags)["ResourceConfig"] == {"VolumeSizeInGB": 30} | expected


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--instance-preference=ml.p5.48xlarge:0"], "found 'ml.p5.48xlarge:0', expected TYPE[:C"),
        (["--instance-preference=a=b"], "found 'a=b', expected TYPE[:COUNT][,plan=ARN]"),
        (["--instance-preference=ml.x"], "found 'ml.x', expected one of the "),
        (["--instance-preference=ml.g5.xlarge"] * 2, "found ml.g5.xlarge, ml.g5.xlarge, expected"),
        (
            ["--instance-preference=ml.g5.xlarge:2", "--instance-preference=ml.m5.large"],
            "found a COUNT for ml.g5.xlarge, expected one for all types",
        ),
        (
            ["--instance-preference=ml.g5.xlarge:2", "--instance-count=2"],
            "found a COUNT for ml.g5.xlarge, expected one for all types and no --instance-count",
        ),
        (
            [f"--instance-preference=ml.g5.{n}xlarge" for n in ("", "2", "4", "8", "12", "16")],
            "found 6 entries in its value, expected 1 to 5 entries",
        ),
        (["--instance-preference=ml.g5.xlarge", "--spot", "--yes"], "not allowed with --instance"),
        (
            ["--instance-preference=ml.g5.xlarge", "--instance-type=ml.g5.xlarge"],
            "not allowed with --instance-type",
        ),
        (
            ["--instance-preference=ml.g5.xlarge", "--instance-group=a=ml.g5.xlarge:1"],
            "not allowed with --instance-type, --instance-group or --spot",
        ),
        (
            [f"--instance-preference=ml.g5.xlarge,plan={PLAN.replace('us-east', 'eu-west')}"],
            "found arn:aws:sagemaker:eu-west-1:",
        ),
    ],
)
def test_wrong_preferences_are_refused(flags, says):
    line = refused(*flags)
    assert line.startswith("--instance-preference: ") and says in line


def test_a_plan_is_given_once():
    flags = [f"--instance-preference=ml.g5.xlarge,plan={PLAN}", f"--training-plan={PLAN}"]
    assert refused(*flags).startswith("--training-plan: not allowed with a plan in --instance-pref")


def test_what_the_service_has_chosen_is_in_no_request():
    """DescribeTrainingJob says it in ResourceConfig, and CreateTrainingJob does not accept it."""
    resources = {"InstancePreferences": [{"InstanceType": "ml.g5.xlarge"}], "InstanceCount": 2}
    chosen = {"SelectedInstanceType": "ml.g5.xlarge", "SelectedInstanceCount": 2}
    job = {"TrainingJobName": "a", "ResourceConfig": resources | chosen}
    assert job_request.again(job, [])["ResourceConfig"] == resources
    assert "ResourceConfig" not in job_request.again({"TrainingJobName": "a"}, [])


@pytest.mark.parametrize(
    ("text", "system"),
    [
        (
            "efs://fs-01234567/data",
            {
                "FileSystemId": "fs-01234567",
                "FileSystemAccessMode": "ro",
                "FileSystemType": "EFS",
                "DirectoryPath": "/data",
            },
        ),
        (
            "fsx://fs-0123456789abcdef0/mount/data,x,access=rw",
            {
                "FileSystemId": "fs-0123456789abcdef0",
                "FileSystemAccessMode": "rw",
                "FileSystemType": "FSxLustre",
                "DirectoryPath": "/mount/data,x",
            },
        ),
    ],
)
def test_a_channel_on_a_file_system(text, system):
    request = valid(*VPC, f"--channel=training={text}", "--channel=b=s3://bucket/b")
    assert request["InputDataConfig"][0] == {
        "ChannelName": "training",
        "InputMode": "File",
        "DataSource": {"FileSystemDataSource": system},
    }


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--channel=a=efs://fs-01234567/d"], "--channel: found a file system, which a job reache"),
        (
            [*VPC, "--channel=a=efs://fs-01234567"],
            "--channel a: found 'efs://fs-01234567', expected efs://fs-ID/FOLDER",
        ),
        ([*VPC, "--channel=a=efs://x/d"], "--channel: found 1 characters in its value (x), expec"),
        (
            [*VPC, "--channel=a=efs://fs-01234567/d,mode=FastFile"],
            "--channel a: found mode=FastFile, expected none, as a file system has only access=ro",
        ),
        (
            [*VPC, "--channel=a=efs://fs-01234567/d,access=w"],
            "--channel a: found access=w, expected one of ro, rw",
        ),
        (
            ["--channel=a=s3://bucket/d,access=ro"],
            "--channel a: found access=ro, expected none, as only a file system has it",
        ),
    ],
)
def test_a_wrong_file_system_is_refused(flags, says):
    assert refused(*flags).startswith(says)


def test_a_file_system_is_not_looked_at(monkeypatch):
    """Only its VPC sees it; a line says so."""
    monkeypatch.setattr(account_checks, "check_image", lambda *_: None)
    monkeypatch.setattr(account_checks, "check_bucket", lambda *_: None)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    request = valid(*VPC, "--channel=a=efs://fs-01234567/d")
    assert account_checks.check(request, "us-east-1", dry_run=False) == [
        "--channel a: only its VPC sees the file system fs-01234567:/d"
    ]
    with pytest.raises(ValueError, match="for the channel a, which is at fs-01234567:/d; give a="):
        drill.run(request, "local", {})


def test_network_isolation():
    assert valid("--network-isolation")["EnableNetworkIsolation"] is True
    assert "EnableNetworkIsolation" not in valid()
    line = refused("--network-isolation", "sagemaker_submit_directory=s3://bucket/x.tar.gz")
    assert line.startswith("--network-isolation: the job fetches no source from S3 then; give")
    valid("--network-isolation", "sagemaker_submit_directory=/opt/ml/input/data/code/x.tar.gz")


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("09", 9), ("0", 0), ("-1", 0), ("²", 0)])
def test_a_number_of_something_is_above_0(text, number):
    if number:
        assert command.positive(text) == number
        return
    with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number above 0"):
        command.positive(text)


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
