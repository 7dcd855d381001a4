"""Which endpoints are this machine's, what an S3 address names, and Docker's bridge."""

import os

import pytest
from rehearsed_inputs import (
    KEY,
    PAGE_SIZE,
    empty_bucket,  # noqa: F401  the fixture s3
    put_objects,
)

from sagemaker_rehearsal.aws import clients
from sagemaker_rehearsal.engines import bridge


@pytest.mark.parametrize(
    "endpoint_",
    [
        "http://127.0.0.1:4571",
        "http://localhost:1",
        "http://[::1]:5/",
        "http://172.17.0.1:4571",
        "https://10.1.2.3",
        "http://192.168.1.1",
        "HTTP://127.1.2.3:5".lower(),
    ],
)
def test_an_address_of_this_machine(endpoint_):
    assert clients.own(endpoint_) == endpoint_


@pytest.mark.parametrize(
    "endpoint_",
    [
        "https://api.sagemaker.us-east-1.amazonaws.com",
        "http://8.8.8.8",
        "http://localhost.evil.com",
        "nonsense",
        "",
        "http://127.0.0.1@evil.com",
        "http://evil.com@127.0.0.1",
        "http://evil.com\\@127.0.0.1",
        "http://169.254.169.254",
        "http://[fd00:ec2::254]",
        "http://[fe80::1]",
        "http://0.0.0.0:4571",
        "http://127.0.0.1.nip.io",
        "http://172.32.0.1",
        "http://[::ffff:8.8.8.8]",
        "http://2130706433",
        "http://[",
        "127.0.0.1:4571",
        "//127.0.0.1",
        "ftp://127.0.0.1",
        "file://127.0.0.1/etc",
        "http://100.64.0.1",
        "http://evil.com/127.0.0.1",
        "http://evil.com#127.0.0.1",
    ],
)
def test_an_address_of_another_machine(endpoint_):
    with pytest.raises(ValueError, match="--endpoint: found"):
        clients.own(endpoint_)
    with pytest.raises(ValueError, match="--endpoint: found"):
        clients.client("s3", endpoint_, "us-east-1", KEY)
    with pytest.raises(ValueError, match="--endpoint: found"):
        clients.variables(endpoint_, KEY)


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://bucket/a/b/", ("bucket", "a/b/")),
        ("s3://bucket/a b%20?c#d", ("bucket", "a b%20?c#d")),
        ("s3://bucket//a", ("bucket", "a")),
        ("s3://[x/y", ("[x", "y")),
        ("https://s3.us-east-1.amazonaws.com/bucket/a/b", ("bucket", "a/b")),
        ("https://s3.us-east-1.amazonaws.com/bucket", ("bucket", "")),
        ("https://s3.us-east-1.amazonaws.com", ("", "")),
    ],
)
def test_bucket_and_key(uri, parts):
    assert clients.split(uri) == parts


@pytest.mark.slow
def test_all_pages_of_a_list(s3):
    names = [f"x/{number:02}" for number in range(3 * PAGE_SIZE)]
    put_objects(s3, *names, "x/", "x/folder/", "y")
    assert list(clients.objects(s3, "bucket", "x/")) == [(name, 4) for name in names]
    assert len(list(clients.objects(s3, "bucket", ""))) == 3 * PAGE_SIZE + 1


def test_a_client_has_nothing_of_the_persons_aws(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "mine")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("KEPT", "1")
    variables = clients.variables("http://127.0.0.1:4571", KEY)
    assert variables["AWS_ENDPOINT_URL"] == "http://127.0.0.1:4571"
    assert variables["AWS_REGION"] == "eu-west-1"
    assert variables["AWS_DEFAULT_REGION"] == "eu-west-1"
    assert variables["KEPT"] == "1"
    assert variables["AWS_ACCESS_KEY_ID"] == "id" and variables["AWS_CONFIG_FILE"] == os.devnull
    assert "mine" not in variables.values()


# Docker's bridge

BRIDGE_CASES = {
    "as docker says it": ([{"Subnet": "172.17.0.0/16", "Gateway": "172.17.0.9"}], {}, "172.17.0.9"),
    "after that of IPv6": (
        [{"Subnet": "fd00::/64"}, {"Subnet": "10.1.0.0/16", "Gateway": "10.1.0.1"}],
        {},
        "10.1.0.1",
    ),
    "as the interface has it": (
        [{"Subnet": "172.17.0.0/16"}],
        {"com.docker.network.bridge.name": "lo"},
        "127.0.0.1",
    ),
    "the first of an engine elsewhere": (
        [{"Subnet": "172.18.0.0/16"}],
        {"com.docker.network.bridge.name": "no-such"},
        "172.18.0.1",
    ),
    "nothing but the interface": (None, {"com.docker.network.bridge.name": "lo"}, "127.0.0.1"),
}


@pytest.mark.parametrize("case", BRIDGE_CASES)
def test_the_address_on_dockers_bridge(case):
    """That of a fresh Debian 12 (docker.io 20.10.24), which names no Gateway, and others."""
    config, options, address = BRIDGE_CASES[case]
    assert (
        bridge.of_docker({"IPAM": {"Driver": "default", "Config": config}, "Options": options})
        == address
    )


def test_no_address_on_dockers_bridge():
    with pytest.raises(ValueError, match="found no address of no-such"):
        bridge.of_docker(
            {"IPAM": {"Config": []}, "Options": {"com.docker.network.bridge.name": "no-such"}}
        )
