"""The profile of the AWS configuration that a person names."""

import boto3
import pytest
from botocore.exceptions import (
    ProfileNotFound,
)

from sagemaker_lightning.launcher import (
    aws,
    sites,
)


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    """A configuration with a profile, and other keys in the environment."""
    (tmp_path / "config").write_text("[profile mine]\nregion = eu-west-3\n")
    (tmp_path / "credentials").write_text(
        "[mine]\naws_access_key_id = of-mine\naws_secret_access_key = x\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)


def keys_of(client) -> str:
    return client._request_signer._credentials.access_key


def test_a_profile_has_region_and_keys(configuration):
    aws.use_profile("mine")
    region = aws.region(None)
    assert region == "eu-west-3"
    assert keys_of(aws.client("sts", region)) == "of-mine"
    assert aws.session().get_credentials().access_key == "of-mine"


def test_without_a_profile_all_is_as_it_was(configuration):
    aws.use_profile(None)
    assert keys_of(aws.client("sts", "us-east-1")) == "of-the-environment"


def test_a_profile_that_is_not_there(configuration):
    with pytest.raises(ProfileNotFound, match=r"config profile \(yours\) could not be found"):
        aws.use_profile("yours")
        aws.region(None)


def test_commands_that_are_printed_have_the_profile():
    command = sites.of_region("eu-west-3", "mine").command("resume", "job-1")
    assert command.endswith("resume job-1 --region=eu-west-3 --profile=mine")
    assert "--profile" not in sites.of_region("eu-west-3").command("resume", "job-1")


@pytest.mark.parametrize(
    ("uri", "location"),
    [
        ("s3://abc", ("abc", "")),
        (f"s3://{'a' * 63}/x/y", ("a" * 63, "x/y")),
        ("s3://ab/x", None),
        (f"s3://{'a' * 64}/x", None),
        ("s3://-bc/x", None),
        ("s3://ab-/x", None),
        ("http://abc/x", None),
    ],
)
def test_the_name_of_a_bucket(uri, location):
    if location:
        assert aws.s3_location("--output", uri) == location
        return
    with pytest.raises(ValueError, match=f"--output: found '{uri}', expected s3://BUCKET/PREF"):
        aws.s3_location("--output", uri)


@pytest.mark.parametrize("name", ["us-east-1", "us-gov-west-1", "ap-southeast-12"])
def test_the_name_of_a_region(monkeypatch, name):
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert aws.region(name) == aws.region(name, "mars") == name
    assert aws.region(None, name) == "eu-west-1"
    for wrong in (f"{name}x", f"1{name[1:]}", "us-east", "useast1"):
        with pytest.raises(ValueError, match="--region: found"):
            aws.region(wrong)


def test_a_service_that_cannot_be_reached_is_given_up_soon():
    config = aws.client("sts", "us-east-1").meta.config
    assert config.connect_timeout == 5 and config.retries["mode"] == "standard"
