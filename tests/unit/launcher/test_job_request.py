"""Environment variables and durations as they are typed; what is taken from here is not shown."""

import argparse
import json

import pytest

from sagemaker_lightning.launcher import command, job_request, request_validation

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
    assert request["Environment"] == {"WANDB_API_KEY": SECRET, "A": "b=c"}
    hidden = job_request.taken_variables(args)
    assert command.run_request(None, request, args, hidden) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["Environment"] == {"WANDB_API_KEY": "******", "A": "b=c"}
    assert request["Environment"]["WANDB_API_KEY"] == SECRET  # what is sent


def test_a_request_without_variables_is_shown_as_it_is():
    request = job_request.build(parsed())
    assert job_request.without_values(request, set()) == request and "Environment" not in request


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
        request_validation.validate(request, job_request.taken_variables(args))
    assert SECRET[:10] not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("90m", 5400), ("12h", 43200), ("2d", 172800), ("1.5h", 5400)],
)
def test_a_duration(text, seconds):
    args = parsed(f"--max-run={text}", f"--max-wait={text}", f"--keep-alive={text}")
    assert (args.max_run, args.max_wait, args.keep_alive) == (seconds, seconds, seconds)


@pytest.mark.parametrize("text", ["0", "0h", "-1", "12 h", "h", "1w", "1.5", "0.1s", "1e3", "٣"])
def test_a_text_that_is_no_duration(text):
    with pytest.raises(argparse.ArgumentTypeError, match="or a duration such as 90m, 12h or 2d"):
        command.duration(text)


NOTHING = dict.fromkeys(("instance_group", "instance_type", "instance_count", "keep_alive"))


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
