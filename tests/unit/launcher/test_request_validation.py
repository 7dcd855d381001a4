"""SageMaker's limits on a request."""

import pytest
from launches import parsed

from sagemaker_lightning.launcher import job_request, request_validation


@pytest.mark.parametrize(("max_wait", "waits"), [(None, 200), (100, 100), (150, 150)])
def test_a_spot_job_waits_as_long_as_its_flag_says(max_wait, waits):
    flags = ["--spot", "--checkpoints=s3://bucket/c", "--max-run=100"]
    flags += [f"--max-wait={max_wait}"] if max_wait else []
    request = job_request.build(parsed(*flags))
    limits = {"MaxRuntimeInSeconds": 100, "MaxWaitTimeInSeconds": waits}
    assert request["StoppingCondition"] == limits and request["EnableManagedSpotTraining"]
    assert request["CheckpointConfig"] == {"S3Uri": "s3://bucket/c/"}
    request_validation.validate(request)


ALLOWED = [
    "--retries=1", "--retries=30", "--keep-alive=21600", f"--job-name={'x' * 63}",
    f"--env=A={'x' * 512}", "--volume-size=1", "--max-run=2419200",
    "--metric=loss=loss=(?:a|b)([0-9]+)",
]  # fmt: skip


REFUSED = {
    "--retries=31": "--retries: found 31, expected 1 to 30",
    "--keep-alive=21601": "--keep-alive: found 21601, expected 0 to 21600",
    f"--job-name={'x' * 64}": (
        f"--job-name: found 64 characters in its value ({'x' * 40}...), expected 1 to 63 char"
    ),
    "--tag=AWS:x=1": "--tag: found 'AWS:x', expected a key without aws: at its start",
    f"--env=A={'x' * 513}": "--env A: found 513 characters in its value (xxx",
    f"--env={'A' * 513}=x": "--env: found 513 characters in its name (AAA",
}


@pytest.mark.parametrize("flag", ALLOWED)
def test_a_limit_itself_is_allowed(flag):
    request_validation.validate(job_request.build(parsed(flag)))


@pytest.mark.parametrize(("flag", "says"), REFUSED.items())
def test_what_is_above_a_limit_is_not(flag, says):
    with pytest.raises(ValueError) as caught:
        request_validation.validate(job_request.build(parsed(flag)))
    assert str(caught.value).startswith(says)


def test_as_many_of_each_as_sagemaker_takes():
    many = [f"k{number}=1" for number in range(100)]
    request_validation.validate(job_request.build(parsed(*many)))
    with pytest.raises(ValueError, match="^hyperparameter: found 101 entries in its value, exp"):
        request_validation.validate(job_request.build(parsed(*many, "k=1")))


@pytest.mark.parametrize(
    ("allowed", "says"),
    [
        (["File", "Pipe"], "one of File, Pipe"),
        ([f"ml.m{number}" for number in range(10)], "one of ml.m0, ml.m1, "),
        (
            [*(f"ml.m{number}" for number in range(10)), "ml.g5.xlarge"],
            "one of the 11 that this boto3 knows, such as ml.g5.xlarge",
        ),
        (["x" * number for number in range(20, 31)], "one of the 11 that this boto3 knows; pip"),
    ],
)
def test_the_closest_of_many_choices_are_named(allowed, says):
    assert request_validation.choices("ml.g5.xlage", allowed).startswith(says)
