"""The parts of the rehearsal, each by itself.

Schedule, settings, layout, channels, checkpoints, artefacts, clients, metrics and logs.
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import aws_services
import pytest

from sagemaker_rehearsal import settings
from sagemaker_rehearsal.api import clients
from sagemaker_rehearsal.api.access_keys import Key
from sagemaker_rehearsal.api.errors import Refused
from sagemaker_rehearsal.engines import bridge
from sagemaker_rehearsal.jobs import (
    artifacts,
    channels,
    checkpoint_sync,
    layout,
    logs,
    matcher,
    metrics,
    schedule,
)
from sagemaker_rehearsal.jobs.channels import JobFailed
from sagemaker_rehearsal.jobs.record import Saved
from sagemaker_rehearsal.jobs.schedule import Rule, Schedule, parse

ROLE = "arn:aws:iam::123456789012:role/rehearsal"
KEY = Key("id", "secret")
PAGE_SIZE = 7  # objects that moto lists at a time, where S3 lists 1,000
HANG_SECONDS = 30  # what is not done by then hangs


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    """moto's AWS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", str(PAGE_SIZE))
        with aws_services.moto(tmp_path_factory.mktemp("moto")) as url:
            yield url


@pytest.fixture(scope="module")
def s3_client(endpoint):
    """A client of S3."""
    return clients.client("s3", endpoint, "us-east-1", KEY)


@pytest.fixture
def s3(s3_client):
    """A client of S3, with an empty bucket: `bucket`."""
    s3_client.create_bucket(Bucket="bucket")
    yield s3_client
    if leftover_keys := keys(s3_client):
        s3_client.delete_objects(
            Bucket="bucket", Delete={"Objects": [{"Key": key} for key in leftover_keys]}
        )


def put_objects(s3, *names: str) -> None:
    """Put objects, each with its key as its content."""
    for name in names:
        s3.put_object(Bucket="bucket", Key=name, Body=name.encode())


def keys(s3, prefix: str = "") -> list[str]:
    """Return the keys in the bucket."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
    return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


def content(s3, key: str) -> bytes:
    """Return an object's content."""
    return s3.get_object(Bucket="bucket", Key=key)["Body"].read()


def file_texts(folder: Path) -> dict[str, str]:
    """Return the text of each file in a folder, by its path there."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_files(folder: Path, *names: str) -> None:
    """Write files, each with its name as its content; a name that ends with / is a folder."""
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(name)


# Schedule

RULES = {
    "at 40s": {"at": 40.0},
    "  at   1.5m  ": {"at": 90.0},
    "at 0s": {"at": 0.0},
    "at step 120": {"step": 120},
    "every 5m": {"every": 300.0, "times": None},
    "every ~2h": {"every": 7200.0, "about": True, "times": None},
    "every ~20s 100 times": {"every": 20.0, "about": True, "times": 100},
    "at 1s of algo-2": {"at": 1.0, "hosts": "algo-2"},
    "at 1s of algo-2,algo-10": {"at": 1.0, "hosts": "algo-2,algo-10"},
    "at step 3 of any": {"step": 3, "hosts": "any"},
    "every 1s of all unwarned": {"every": 1.0, "times": None, "warned": "unwarned"},
    "every 1s either": {"every": 1.0, "times": None, "warned": "either"},
    "every 1s 2 times of any warned gap 0.5h": {
        "every": 1.0,
        "times": 2,
        "hosts": "any",
        "gap": 1800.0,
    },
}


@pytest.mark.parametrize("rule_text", RULES)
def test_the_rule_that_a_text_is(rule_text):
    plain = {
        "at": None,
        "step": None,
        "every": None,
        "about": False,
        "times": 1,
        "hosts": "all",
        "warned": "warned",
    }
    assert parse(rule_text) == Rule(
        text=" ".join(rule_text.split()), **plain | {"gap": 0.0} | RULES[rule_text]
    )


@pytest.mark.parametrize(
    "rule_text",
    [
        "",
        "at",
        "at 40",
        "at -4s",
        "at 4d",
        "at step",
        "at step 1.5",
        "at ~5m",
        "at 5m 2 times",
        "every",
        "every 0s",
        "every ~0.0m",
        "every 5m 0 times",
        "every 5m -1 times",
        "every 5m times",
        "at 1s of algo",
        "at 1s of algo-1, algo-2",
        "at 1s of algo-1,",
        "at 1s warned of any",
        "at 1s gap 3s of any",
        "at 1s gap",
        "at 1s maybe",
        "AT 1s",
        "at 1s at 2s",
    ],
)
def test_a_text_that_is_no_rule(rule_text):
    with pytest.raises(ValueError, match=r"--interrupt: found '.*', expected "):
        parse(rule_text)


HOSTS = [f"algo-{number}" for number in range(1, 5)]


def make_schedule(*rules: str, seed: str = "0", hosts: list[str] = HOSTS) -> Schedule:
    """Return a job's schedule."""
    return Schedule([schedule.parse(rule) for rule in rules], hosts, seed)


def test_a_time_after_the_first_start_comes_once():
    """If it comes between two attempts, it is due as soon as the second one trains."""
    job_schedule = make_schedule("at 40s of algo-3,algo-1 unwarned gap 5s")
    assert job_schedule.next() is None and job_schedule.due(1000.0, None) is None
    job_schedule.begin(100.0, first=True)
    assert job_schedule.next() == 140.0 and job_schedule.due(139.9, None) is None
    job_schedule.begin(200.0, first=False)
    due = job_schedule.due(200.0, None)
    assert (due.hosts, due.warned, due.gap) == (["algo-3", "algo-1"], False, 5.0)
    assert due.why == "at 40s of algo-3,algo-1 unwarned gap 5s"
    job_schedule.begin(300.0, first=False)
    assert job_schedule.next() is None and job_schedule.due(1e9, 10**9) is None


def test_every_counts_from_each_start():
    job_schedule = make_schedule("every 10s 2 times")
    for start in (100.0, 115.0):
        job_schedule.begin(start, first=start == 100.0)
        assert job_schedule.next() == start + 10 and job_schedule.due(start + 9, None) is None
        assert job_schedule.due(start + 10, None).hosts == HOSTS
        assert job_schedule.due(start + 50, None) is None  # not before the next attempt
    job_schedule.begin(200.0, first=False)
    assert job_schedule.next() is None and job_schedule.due(1000.0, None) is None


def test_a_step_that_the_log_has_passed():
    job_schedule = make_schedule("at step 5", "at step 7")
    job_schedule.begin(0.0, first=True)
    assert (
        job_schedule.next() is None
        and job_schedule.due(1e9, None) is None
        and job_schedule.due(1e9, 4) is None
    )
    assert job_schedule.due(0.0, 5).why == "at step 5"
    assert job_schedule.due(0.0, 6) is None  # not again, although the job comes past it again
    assert job_schedule.due(0.0, 9).why == "at step 7"


def test_several_rules_are_one_schedule():
    job_schedule = make_schedule("at 30s", "every 20s", "at step 2")
    job_schedule.begin(0.0, first=True)
    assert job_schedule.next() == 20.0
    assert [job_schedule.due(30.0, 2).why for _ in range(3)] == ["at 30s", "every 20s", "at step 2"]
    assert job_schedule.due(30.0, 2) is None


def drawn_interruptions(seed: str, *rules: str) -> list:
    """Return the moment, the hosts and the warning of the interruption of ten attempts."""
    job_schedule = make_schedule(*rules, seed=seed)
    interruptions = []
    for _ in range(10):
        job_schedule.begin(0.0, first=False)
        moment = job_schedule.next()
        due = job_schedule.due(moment, None)
        interruptions.append((moment, tuple(due.hosts), due.warned))
    return interruptions


def test_what_is_drawn_comes_from_the_seed():
    rule = "every ~10s of any either"
    assert (
        drawn_interruptions("1", rule)
        == drawn_interruptions("1", rule)
        != drawn_interruptions("2", rule)
    )
    interruptions = [
        interruption for seed in range(40) for interruption in drawn_interruptions(str(seed), rule)
    ]
    moments, hosts, warned = zip(*interruptions, strict=True)
    assert len(set(moments)) == len(interruptions) and 7 < sum(moments) / len(interruptions) < 13
    assert {len(names) for names in hosts} == {1} and {names[0] for names in hosts} == set(HOSTS)
    assert 100 < sum(warned) < 300


def test_a_host_that_the_job_has_not():
    with pytest.raises(
        ValueError, match=r"'at 1s of algo-9,algo-1' is of algo-9; the job has algo-1, algo-2"
    ):
        make_schedule("at 1s of algo-9,algo-1", hosts=["algo-1", "algo-2"])


# Settings


def settings_of(*flags: str) -> settings.Settings:
    """Return the settings of these flags."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    settings.add_flags(parser)
    return settings.from_flags(parser.parse_args(flags))


def test_settings_by_default_and_by_flags(tmp_path):
    parsed = settings_of()
    assert (parsed.port, parsed.engine, parsed.grace, parsed.interrupt, parsed.seed) == (
        4571,
        "auto",
        120.0,
        [],
        0,
    )
    assert parsed.sync == settings.Sync(1.0, 0.0, 0.0, None, True, False, True, False)
    assert parsed.folder.is_absolute()
    flags = (
        "--port=0 --interrupt=every~5m --grace=0 --repairs=2 --price=3 --spot-price=1 "
        "--sync-every=0.1 --sync-lag=2"
    )
    flags += (
        " --sync-settle=3 --sync-stall-after=0 --sync-no-markers --sync-markers-uploaded "
        "--sync-keep-deleted"
    )
    flags = flags.replace("every~5m", "every\u00a0~5m").split(" ")
    parsed = settings_of(*flags, "--sync-flush", "--interrupt=at 3s", f"--folder={tmp_path}")
    assert (parsed.port, parsed.grace, parsed.repairs, parsed.price, parsed.spot_price) == (
        0,
        0.0,
        2,
        3.0,
        1.0,
    )
    assert [rule.text for rule in parsed.interrupt] == [
        "every ~5m",
        "at 3s",
    ] and parsed.folder == tmp_path
    assert parsed.sync == settings.Sync(0.1, 2.0, 3.0, 0.0, False, True, False, True)


@pytest.mark.parametrize(
    "flag",
    [
        "--port=-1",
        "--port=65536",
        "--grace=-1",
        "--grace=nan",
        "--grace=inf",
        "--repairs=-1",
        "--sync-every=0",
        "--sync-every=nan",
        "--sync-every=-1",
        "--sync-lag=-0.1",
        "--sync-settle=inf",
        "--sync-stall-after=-1",
        "--interrupt=at noon",
        "--interrupt=every 0s",
        "--fault=melt at 3s",
        "--hang-after=0",
        "--hang-after=nan",
        "--allow=/no/such",
        "--price=1",
        "--spot-price=1",
    ],
)
def test_a_wrong_flag_is_named(flag):
    name, _, value = flag.partition("=")
    with pytest.raises(ValueError, match=rf"{name}\b.*: found .*, expected ") as error:
        settings_of(flag)
    assert "price" in name or value.removesuffix(".0") in str(error.value)


def test_a_percentage():
    assert [settings.share(text) for text in ("0%", "90%", "99.5%", "100%")] == [0, 0.9, 0.995, 1]
    for text in ("0.9", "90", "101%", "-1%", "nan%", "%", "1e1%", "100.01%"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected 0% to 100%"):
            settings.share(text)


def test_the_folders_of_channels(tmp_path, monkeypatch):
    """The working folder, or the folders that flags name, wherever their links lead."""
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "link")
    assert settings_of().allow == [tmp_path]
    assert settings_of("--allow=/usr", "--allow=.").allow == [Path("/usr"), tmp_path]


@pytest.mark.parametrize(
    "flag", ["--port=x", "--grace=long", "--engine=podman", "--repairs=1.5", "--seed=x"]
)
def test_a_flag_of_the_wrong_type_is_named(flag):
    with pytest.raises(argparse.ArgumentError, match=flag.partition("=")[0]):
        settings_of(flag)


# Layout


def group(name: str, count: int, instance_type: str = "ml.m5.xlarge") -> dict:
    """Return an instance group."""
    return {"InstanceGroupName": name, "InstanceType": instance_type, "InstanceCount": count}


def channel(
    name: str, uri: str, *, sharded: bool = False, groups: list[str] | None = None, **more_fields
) -> dict:
    """Return a channel for InputDataConfig."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri} | (
        {"InstanceGroupNames": groups} if groups else {}
    )
    source |= {"S3DataDistributionType": "ShardedByS3Key"} if sharded else {}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}} | more_fields


def job(*inputs: dict, hosts: int = 1, groups: list[dict] | None = None, **more_fields) -> dict:
    """Return a request."""
    single = {"InstanceType": "ml.m5.xlarge", "InstanceCount": hosts}
    return {
        "TrainingJobName": "job",
        "RoleArn": ROLE,
        "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
        "ResourceConfig": {"InstanceGroups": groups} if groups else single,
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/output/"},
        "InputDataConfig": list(inputs),
    } | more_fields


def make_layouts(request: dict, folder: Path) -> dict[layout.Host, layout.Layout]:
    """Make the folders of each host, and return them."""
    path = layout.checkpoint_path(request)
    layouts = {host: layout.Layout(folder / host.name, path) for host in layout.hosts(request)}
    for host_layout in layouts.values():
        host_layout.make()
    return layouts


def test_hosts_are_numbered_over_the_groups(tmp_path):
    request = job(
        channel("all", "s3://bucket/a", groups=["big", "small"]),
        channel(
            "some",
            "s3://bucket/b",
            groups=["big"],
            sharded=True,
            InputMode="FastFile",
            ContentType="text/csv",
        ),
        groups=[group("small", 2), group("big", 9, "ml.p4d.24xlarge")],
        HyperParameters={"a": "1"},
    )
    hosts = layout.hosts(request)
    assert [host.name for host in hosts] == [f"algo-{number}" for number in range(1, 12)]
    assert [host.group for host in hosts] == ["small"] * 2 + ["big"] * 9
    assert {host.instance_type for host in hosts[2:]} == {"ml.p4d.24xlarge"}
    config = {}
    for host, folders in make_layouts(request, tmp_path).items():
        layout.write_config(folders, request, host, hosts, "eth0")
        paths = (folders.folder / "input/config").iterdir()
        config[host.name] = {path.stem: json.loads(path.read_text()) for path in paths}
    big_hosts = ["algo-10", "algo-11", *(f"algo-{number}" for number in range(3, 10))]
    assert config["algo-3"]["resourceconfig"] == {
        "current_group_name": "big",
        "current_host": "algo-3",
        "current_instance_type": "ml.p4d.24xlarge",
        "hosts": ["algo-1", "algo-10", "algo-11", *(f"algo-{number}" for number in range(2, 10))],
        "instance_groups": [
            {
                "instance_group_name": "small",
                "instance_type": "ml.m5.xlarge",
                "hosts": ["algo-1", "algo-2"],
            },
            {"instance_group_name": "big", "instance_type": "ml.p4d.24xlarge", "hosts": big_hosts},
        ],
        "network_interface_name": "eth0",
        "topology": None,
    }
    plain = {
        "TrainingInputMode": "File",
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
    }
    sharded = {
        "TrainingInputMode": "FastFile",
        "S3DistributionType": "ShardedByS3Key",
        "RecordWrapperType": "None",
    }
    assert config["algo-1"]["inputdataconfig"] == {"all": plain}
    assert config["algo-11"]["inputdataconfig"] == {
        "all": plain,
        "some": sharded | {"ContentType": "text/csv"},
    }
    assert config["algo-1"]["hyperparameters"] == {"a": "1"}
    assert set(config["algo-1"]) == {"hyperparameters", "resourceconfig", "inputdataconfig"}


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (None, None),
        ({"S3Uri": "s3://bucket/x"}, "/opt/ml/checkpoints"),
        ({"S3Uri": "s3://bucket/x", "LocalPath": "/opt/ml/a"}, "/opt/ml/a"),
    ],
)
def test_a_host_without_groups(tmp_path, config, path):
    request = job(CheckpointConfig=config, DebugHookConfig={"S3OutputPath": "s3://bucket/d"})
    ((host, folders),) = make_layouts(request, tmp_path).items()
    assert (host.name, host.group) == ("algo-1", "homogeneousCluster")
    assert set(folders.mounts.values()) == {
        "/opt/ml/input",
        "/opt/ml/model",
        "/opt/ml/output",
        path,
    } - {None}
    layout.write_config(folders, request, host, [host], "lo")
    written = {
        config_file.stem: json.loads(config_file.read_text())
        for config_file in (folders.folder / "input/config").iterdir()
    }
    assert written.get("checkpointconfig") == ({"LocalPath": path} if path else None)
    assert (
        written["debughookconfig"] == {"S3OutputPath": "s3://bucket/d"}
        and "profilerconfig" not in written
    )
    assert written["inputdataconfig"] == {} == written["hyperparameters"]


def test_what_a_failure_says(tmp_path):
    folders = make_layouts(job(), tmp_path)[
        layout.Host("algo-1", "ml.m5.xlarge", "homogeneousCluster")
    ]
    assert folders.failure() == ""
    path = folders.folder / "output/failure"
    path.write_bytes("ü".encode() * 2000 + b"\xff")
    assert folders.failure() == "ü" * 1024
    path.write_bytes(b"\xff!")
    assert folders.failure() == "\ufffd!"
    path.unlink()
    path.mkdir()
    assert folders.failure() == ""


# Channels

RELATIVE_NAMES = {
    ("data/train/a", "data/train"): "a",
    ("data/train/a", "data/train/"): "a",
    ("data/train/b/c", "data/train"): "b/c",
    ("data/train", "data/train"): "train",
    ("data/train-2/a", "data/train"): "train-2/a",
    ("data/train-2", "data/tr"): "train-2",
    ("a/b", ""): "a/b",
    ("a", "a"): "a",
    ("a//b", "a"): "b",
    ("a//b", "a/"): "b",
}


@pytest.mark.parametrize(("key", "prefix"), RELATIVE_NAMES)
def test_the_name_of_an_object_in_a_channel(key, prefix):
    assert channels.relative(key, prefix) == RELATIVE_NAMES[key, prefix]


@pytest.mark.parametrize("name", ["..", "../a", "a/../../b", "a/..", "/etc/passwd"])
def test_a_name_that_leads_out_of_the_channel(tmp_path, name):
    with pytest.raises(JobFailed, match="is no name of a file"):
        channels.inside(tmp_path, name)
    assert channels.inside(tmp_path, "a..b/...") == tmp_path / "a..b/..."


def fetch(s3, uri: str, folder: Path) -> dict[str, str]:
    """Fetch the files of an address, and return their texts."""
    names = channels.fetch(
        s3, {"S3Uri": uri}, folder, ROLE, [folder.parent, Path("/no")], lambda: None
    )
    fetched_files = file_texts(folder)
    assert sorted(names) == sorted(fetched_files)
    return fetched_files


def test_a_stop_ends_the_copying_of_a_folder(tmp_path):
    (tmp_path / "data").mkdir()
    for name in "abc":
        (tmp_path / "data" / name).touch()
    asked = []

    def go_on() -> None:
        asked.append(None)
        if len(asked) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        channels.fetch_files(tmp_path / "data", "file://", tmp_path / "copy", [tmp_path], go_on)
    assert len(list((tmp_path / "copy").iterdir())) == 1


@pytest.mark.slow
def test_what_an_address_stands_for(s3, tmp_path):
    put_objects(s3, "data/a", "data/b/c", "data/b/", "data-2/d", "data", "run#1/e?f", "other")
    below = {"a": "data/a", "b/c": "data/b/c"}
    assert fetch(s3, "s3://bucket/data/", tmp_path / "1") == below
    beside = {"data": "data", "data-2/d": "data-2/d"}
    assert fetch(s3, "s3://bucket/data", tmp_path / "3") == below | beside
    assert fetch(s3, "s3://bucket/data/a", tmp_path / "4") == {"a": "data/a"}
    assert fetch(s3, "s3://bucket/run#1/", tmp_path / "5") == {"e?f": "run#1/e?f"}
    assert fetch(s3, "s3://bucket/run#1/e?f", tmp_path / "6") == {"e?f": "run#1/e?f"}
    assert fetch(s3, "https://s3.us-east-1.amazonaws.com/bucket/other", tmp_path / "7") == {
        "other": "other"
    }
    with pytest.raises(JobFailed, match="Data download failed: s3://bucket: File exists"):
        fetch(s3, "s3://bucket", tmp_path / "8")  # `data` is a file, and a folder
    s3.delete_object(Bucket="bucket", Key="data")
    assert fetch(s3, "s3://bucket", tmp_path / "9")["data/b/c"] == "data/b/c"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        (
            "s3://bucket/none",
            rf'No S3 objects found under S3 URL "s3://bucket/none" .* the role "{ROLE}" has '
            r'"s3:List',
        ),
        (
            "s3://no-such-bucket/x",
            r' on bucket "no-such-bucket"\. Error message from S3: NoSuchBucket: ',
        ),
        (
            "s3://No Bucket!/x",
            r'on bucket "No Bucket!"\. Error message from S3: Parameter validation failed',
        ),
        ("s3://[x/y", r'on bucket "\[x"\. Error message from S3: Parameter validation failed'),
        (
            "file:///no/such/folder",
            "file:///no/such/folder is not a file, nor a folder with files in it",
        ),
    ],
)
def test_an_address_with_nothing_at_it(s3, tmp_path, uri, reason):
    with pytest.raises(JobFailed, match=f"^ClientError: Data download failed:.*{reason}"):
        fetch(s3, uri, tmp_path / "channel")


def test_a_key_that_leads_out_of_the_channel(s3, tmp_path):
    put_objects(s3, "data/../../out")
    with pytest.raises(JobFailed, match="is no name of a file"):
        fetch(s3, "s3://bucket/data", tmp_path / "a/b/channel")
    assert file_texts(tmp_path) == {}


def test_a_folder_of_this_machine(s3, tmp_path):
    write_files(tmp_path / "from/my data", "a", "b/c", "empty/")
    (tmp_path / "from/my data/link").symlink_to("a")
    uri = f"file://{tmp_path}/from/my%20data"
    assert fetch(s3, uri, tmp_path / "1") == {"a": "a", "b/c": "b/c", "link": "a"}
    assert fetch(s3, f"{uri}/b/c", tmp_path / "2") == {"c": "b/c"}
    os.mkfifo(tmp_path / "from/my data/pipe")
    assert "pipe" not in fetch(s3, uri, tmp_path / "3")


def test_a_file_that_cannot_be_read_fails_the_job(s3, tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    write_files(tmp_path / "from", "a")
    monkeypatch.setattr(channels.shutil, "copyfile", refused)
    with pytest.raises(
        JobFailed, match=r"^ClientError: Data download failed: file:///\S+/from: Permission denied$"
    ):
        fetch(s3, f"file://{tmp_path}/from", tmp_path / "channel")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["File", "FastFile"])
@pytest.mark.parametrize("source", ["S3", "here"])
def test_shards_are_all_of_it_once(s3, tmp_path, mode, source):
    names = [f"data/{number:02}" for number in range(2 * PAGE_SIZE + 3)]  # three pages
    put_objects(s3, *names)
    write_files(tmp_path, *names)
    uri = "s3://bucket/data" if source == "S3" else f"file://{tmp_path}/data"
    for hosts in [3] if source == "S3" else [1, 2, 3, 4, 5, 6, 7, 20]:
        request = job(channel("a", uri, sharded=True, InputMode=mode), hosts=hosts)
        layouts = make_layouts(request, tmp_path / f"{hosts}")
        stops = []
        shared = tmp_path / f"{hosts}/shared"
        channels.deliver(
            s3, request, layouts, shared, [tmp_path], lambda stops=stops: stops.append(1)
        )
        shards = [
            sorted(file_texts(host_layout.channel("a")).values())
            for host_layout in layouts.values()
        ]
        assert sorted(sum(shards, [])) == names
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
        assert len(stops) >= len(names)  # it can be stopped at each of them
        assert not (tmp_path / f"{hosts}/shared/a").exists()


def test_channels_of_groups_and_copies_of_their_own(s3, tmp_path):
    write_files(tmp_path / "from", "x", "y/z")
    uri = f"file://{tmp_path}/from"
    groups = [group("g", 1), group("h", 2)]
    request = job(
        channel("all", uri, groups=["g", "h"]),
        channel("some", uri, groups=["h"], sharded=True),
        channel("fast", uri, groups=["h"], InputMode="FastFile"),
        groups=groups,
    )
    layouts = make_layouts(request, tmp_path / "hosts")
    channels.deliver(s3, request, layouts, tmp_path / "shared", [tmp_path], lambda: None)
    first_host, second_host, third_host = layouts.values()
    assert [path.name for path in (first_host.folder / "input/data").iterdir()] == ["all"]
    assert file_texts(second_host.channel("some")) == {"x": "x"} and file_texts(
        third_host.channel("some")
    ) == {"y/z": "y/z"}
    (first_host.channel("all") / "x").write_text("changed")
    assert (second_host.channel("all") / "x").read_text() == "x"
    # There is one copy for both.
    assert (second_host.channel("fast") / "x").samefile(third_host.channel("fast") / "x")
    assert (tmp_path / "from/x").read_text() == "x"


# The copy of checkpoints


@pytest.fixture
def clock(monkeypatch):
    """The clock of an Uploader."""
    fake_clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(checkpoint_sync, "time", SimpleNamespace(monotonic=lambda: fake_clock.now))
    return fake_clock


def make_uploader(
    s3, folder: Path, uri: str = "s3://bucket/run", **more_settings
) -> checkpoint_sync.Uploader:
    """Return an Uploader that has not started; `notes` are its messages."""
    default_settings = {
        "lag": 0.0,
        "settle": 0.0,
        "stall_after": None,
        "deletions": True,
        "flush": False,
    }
    default_settings |= {"every": 0.01, "markers": False, "markers_uploaded": False}
    folder.mkdir(exist_ok=True)
    notes = []
    uploader = checkpoint_sync.Uploader(
        s3, uri, folder, settings.Sync(**default_settings | more_settings), notes.append
    )
    uploader.notes = notes
    return uploader


def wait_until(condition, *, expected: str = "it") -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{expected} has not come"
        time.sleep(0.02)


def test_a_copy_goes_with_the_folder(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path / "a")
    write_files(
        uploader.folder.root,
        "1",
        "sub/deep/2",
        ".hidden",
        "with space",
        "x.sagemaker-ignore",
        "sub/y.sagemaker-ignore",
    )
    (uploader.folder.root / "link").symlink_to("1")
    (uploader.folder.root / "nowhere").symlink_to("/no/such/file")
    (uploader.folder.root / "folder").symlink_to("sub")
    os.mkfifo(uploader.folder.root / "pipe")
    uploader._look()
    expected = ["run/.hidden", "run/1", "run/link", "run/sub/deep/2", "run/with space"]
    assert keys(s3) == expected and content(s3, "run/link") == b"1"
    put_objects(s3, "run/of another")
    (uploader.folder.root / "sub/deep/2").unlink()
    (uploader.folder.root / "1").write_text("changed")
    uploader._look()
    assert keys(s3) == ["run/.hidden", "run/1", "run/link", "run/of another", "run/with space"]
    assert content(s3, "run/1") == b"changed" == content(s3, "run/link") and uploader.notes == []


def test_a_checkpoint_is_told_as_saved_and_as_copied(s3, tmp_path, clock):
    """It is in S3 when all of its files are; what was restored is not saved again."""
    write_files(tmp_path / "a", "step-1/a")
    uploader = make_uploader(s3, tmp_path / "a", lag=5.0)
    told = []
    uploader.note_checkpoint = lambda *what: told.append(what)
    uploader._look()
    assert told == []
    write_files(uploader.folder.root, "step-9/a", "step-9/b", "other")
    uploader._look()
    assert set(told) == {(9, False)}
    told.clear()
    clock.now += 6
    uploader._look()
    assert told == [(9, False), (9, True)]
    told.clear()
    write_files(uploader.folder.root, "step-9/c")
    uploader._look()
    assert told == [(9, False)]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-000000044.ckpt", 44),
        ("epoch=3-step=120.ckpt", 120),
        ("checkpoint-500/model.safetensors", 500),
        ("run/step_7", 7),
        ("step0", 0),
        ("step-000000044.ckpt.sagemaker-uploaded", None),
        ("last.ckpt", None),
        ("journal-1.bin", None),
        ("footstep-3", None),
        (f"step-{'9' * 16}", None),
    ],
)
def test_the_step_in_the_name_of_a_checkpoint(name, step):
    assert checkpoint_sync.step_in(name) == step


@pytest.mark.parametrize(
    ("sync", "seconds", "why"),
    [
        ({}, 0, ""),
        ({"lag": 5.0}, 4, "its copy lags (--sync-lag=5)"),
        ({"settle": 5.0}, 4, "its copy waits for the last change (--sync-settle=5)"),
        ({"stall_after": 3.0}, 4, "nothing was copied any more (--sync-stall-after=3)"),
        ({"lag": 5.0}, 6, "its copy had not begun before the end of its host"),
    ],
)
def test_why_the_newest_checkpoint_is_not_in_s3(s3, tmp_path, clock, sync, seconds, why):
    uploader = make_uploader(s3, tmp_path / "a", **sync)
    own = ("step-000000009.ckpt", "step-000000010.ckpt")
    write_files(uploader.folder.root, *own, "best-step=12.ckpt", "other")
    if "stall_after" not in sync:  # it looks no more
        uploader._look()
    clock.now += seconds
    uploader.ended.set()
    assert uploader.newest() == Saved(10, {"step-000000010.ckpt": why})


def test_a_newest_checkpoint_that_the_copy_has_not_seen_or_is_cut_off(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path / "a")
    assert uploader.newest() is None
    write_files(uploader.folder.root, "step-9.ckpt")
    uploader._look()
    (uploader.folder.root / "step-9.ckpt").write_text("changed since")
    assert uploader.newest() == Saved(
        9, {"step-9.ckpt": "its copy had not begun before the end of its host"}
    )
    uploader._alive = lambda _: (_ for _ in ()).throw(checkpoint_sync.Cut)
    uploader._look()
    assert uploader.newest() == Saved(
        9, {"step-9.ckpt": "its copy was cut off by the end of its host"}
    )


def test_a_checkpoint_of_several_files(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path / "a")
    write_files(uploader.folder.root, "checkpoint-5/a", "checkpoint-5/b", "checkpoint-4/c")
    uploader._look()
    write_files(uploader.folder.root, "checkpoint-5/c")
    why = "its copy had not begun before the end of its host"
    assert uploader.newest() == Saved(
        5, {"checkpoint-5/a": "", "checkpoint-5/b": "", "checkpoint-5/c": why}
    )


def record_uploads(uploader: checkpoint_sync.Uploader) -> list[str]:
    """Record the names that an Uploader uploads from now on in the returned list."""
    uploaded = []
    real_upload = uploader._upload

    def upload_and_note(name: str) -> bool:
        uploaded.append(name)
        return real_upload(name)

    uploader._upload = upload_and_note
    return uploaded


def test_what_has_not_changed_is_not_uploaded_again(s3, tmp_path, clock):
    put_objects(s3, "run/old", "run/sub/older", "run-2/x", "run")
    assert checkpoint_sync.restore(s3, "s3://bucket/run", tmp_path) == (
        2,
        len("run/old" + "run/sub/older"),
    )
    assert file_texts(tmp_path) == {"old": "run/old", "sub/older": "run/sub/older"}
    uploader = make_uploader(s3, tmp_path)
    uploaded = record_uploads(uploader)
    uploader._look()
    assert uploaded == []
    write_files(tmp_path, "new")
    uploader._look()
    uploader._look()
    assert uploaded == ["new"]
    status_before = (tmp_path / "new").stat()
    (tmp_path / "other").write_text("NEW")  # another file of the same size and time
    os.utime(tmp_path / "other", ns=(status_before.st_mtime_ns, status_before.st_mtime_ns))
    (tmp_path / "other").replace(tmp_path / "new")
    uploader._look()
    assert uploaded == ["new", "new"] and content(s3, "run/new") == b"NEW"
    (tmp_path / "old").replace(tmp_path / "older")
    uploader._look()
    assert keys(s3, "run/") == ["run/new", "run/older", "run/sub/older"]
    assert keys(s3, "run-2/") == ["run-2/x"]


@pytest.mark.slow
def test_what_is_restored_from_nothing_and_from_no_bucket(s3, tmp_path):
    assert checkpoint_sync.restore(s3, "s3://bucket/run/", tmp_path) == (0, 0)
    put_objects(s3, *(f"run/{number}" for number in range(PAGE_SIZE + 1)))
    assert checkpoint_sync.restore(s3, "s3://bucket/run/", tmp_path)[0] == PAGE_SIZE + 1
    with pytest.raises(
        JobFailed, match="Checkpoint download failed: s3://no-such-bucket/x: NoSuchBucket"
    ):
        checkpoint_sync.restore(s3, "s3://no-such-bucket/x", tmp_path)
    put_objects(s3, "run/../../x")
    with pytest.raises(JobFailed, match="is no name of a file"):
        checkpoint_sync.restore(s3, "s3://bucket/run", tmp_path / "a")


@pytest.mark.parametrize(
    "uri", ["s3://bucket/run", "s3://bucket/run/", "s3://bucket", "s3://bucket/"]
)
def test_a_copy_and_its_restoration_are_one(s3, tmp_path, clock, uri):
    uploader = make_uploader(s3, tmp_path / "a", uri)
    write_files(uploader.folder.root, "1", "b/2")
    uploader._look()
    assert checkpoint_sync.restore(s3, uri, tmp_path / "b") == (2, 4)
    assert file_texts(tmp_path / "b") == file_texts(tmp_path / "a")


def test_a_lag_counts_from_the_change(s3, tmp_path, clock):
    """A file that grows all the time is uploaded half-written."""
    uploader = make_uploader(s3, tmp_path, lag=10.0)
    for second in range(11):
        assert keys(s3) == []
        (tmp_path / "a").write_text("x" * (second + 1))
        clock.now = 100.0 + second
        uploader._look()
    assert content(s3, "run/a") == b"x" * 11
    (tmp_path / "a").write_text("again")
    clock.now = 150.0
    uploader._look()
    assert content(s3, "run/a") == b"x" * 11
    clock.now = 160.0
    uploader._look()
    assert content(s3, "run/a") == b"again"


def test_a_file_that_has_not_settled_is_not_uploaded(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path, settle=3.0)
    for second in range(20):
        (tmp_path / "a").write_text("x" * (second + 1))
        clock.now = 100.0 + second
        uploader._look()
    clock.now = 121.9
    uploader._look()
    assert keys(s3) == []
    clock.now = 122.0
    uploader._look()
    assert content(s3, "run/a") == b"x" * 20


def test_a_deletion_that_is_not_passed_on(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path, deletions=False)
    write_files(tmp_path, "a")
    uploader._look()
    (tmp_path / "a").unlink()
    uploader._look()
    assert keys(s3) == ["run/a"]


def test_markers(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path, markers=True)
    write_files(tmp_path, "sub/a")
    uploader._look()
    beside = ["a", "a.sagemaker-uploaded", "a.sagemaker-uploading"]
    assert sorted(file_texts(tmp_path / "sub")) == beside
    uploader._look()
    assert keys(s3) == ["run/sub/a"]
    (tmp_path / "sub/a").unlink()
    uploader._look()
    assert file_texts(tmp_path / "sub") == {} and keys(s3) == []


def test_markers_that_are_uploaded(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path, markers=True, markers_uploaded=True)
    write_files(tmp_path, "a")
    uploader._look()
    uploader._look()
    assert sorted(file_texts(tmp_path)) == ["a", "a.sagemaker-uploaded", "a.sagemaker-uploading"]
    assert keys(s3) == ["run/a", "run/a.sagemaker-uploaded", "run/a.sagemaker-uploading"]
    (tmp_path / "a").unlink()
    uploader._look()
    uploader._look()
    assert file_texts(tmp_path) == {} and keys(s3) == []


def disturb_uploads(uploader: checkpoint_sync.Uploader, monkeypatch, disturb) -> None:
    """Call a function in the middle of each upload."""
    real_upload = uploader.s3.upload_fileobj

    def disturb_then_upload(file, bucket, key, **options):
        disturb(uploader.folder.root / key.removeprefix(uploader.prefix))
        return real_upload(file, bucket, key, **options)

    monkeypatch.setattr(uploader.s3, "upload_fileobj", disturb_then_upload)


@pytest.mark.parametrize("deleted", ["file", "folder", "a file in the folder's place"])
def test_what_is_deleted_during_its_upload(s3, tmp_path, clock, monkeypatch, deleted):
    """The copy continues, with and without the folder of the markers."""
    uploader = make_uploader(s3, tmp_path, markers=True)
    write_files(tmp_path, "sub/a")

    def delete(path: Path) -> None:
        if path.name == "a":
            path.unlink()
            if deleted != "file":
                path.with_name("a.sagemaker-uploading").unlink()
                path.parent.rmdir()
            if deleted.startswith("a file"):
                write_files(tmp_path, "sub")

    disturb_uploads(uploader, monkeypatch, delete)
    uploader._look()
    write_files(tmp_path, "b")
    uploader._look()
    uploader._look()
    assert keys(s3) == (["run/b", "run/sub"] if deleted.startswith("a file") else ["run/b"])
    assert uploader.notes == [] and not list(tmp_path.rglob("a.sagemaker*"))


def test_a_folder_that_is_deleted_after_an_upload_in_it(s3, tmp_path, clock, monkeypatch):
    uploader = make_uploader(s3, tmp_path, markers=True)
    write_files(tmp_path, "sub/a", "sub/b")
    real_upload = uploader.s3.upload_fileobj

    def upload_then_delete(*arguments, **options) -> None:
        real_upload(*arguments, **options)
        shutil.rmtree(tmp_path / "sub", ignore_errors=True)

    monkeypatch.setattr(uploader.s3, "upload_fileobj", upload_then_delete)
    uploader._look()
    assert len(keys(s3)) == 1
    uploader._look()
    assert keys(s3) == [] == uploader.notes and list(tmp_path.iterdir()) == []


def test_what_is_written_during_its_upload_is_uploaded_again(s3, tmp_path, clock, monkeypatch):
    uploader = make_uploader(s3, tmp_path)
    write_files(tmp_path, "a")
    disturbances = [lambda path: path.write_text("later"), lambda path: None]
    disturb_uploads(uploader, monkeypatch, lambda path: disturbances.pop(0)(path))
    uploader._look()
    uploader._look()
    assert content(s3, "run/a") == b"later" and disturbances == []


@pytest.mark.parametrize("no_bucket", [True, False])
def test_a_copy_that_fails_is_told_and_tried_again(s3, tmp_path, clock, monkeypatch, no_bucket):
    uploader = make_uploader(s3, tmp_path, "s3://bucket-2/run")
    write_files(tmp_path, "a")
    if no_bucket:
        uploader._look()
        (note,) = uploader.notes
        assert note.startswith("the copy of checkpoints to s3://bucket-2/run/ fails: ")
    else:

        def refuse(path: Path) -> None:
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            disturb_uploads(uploader, patch, refuse)
            uploader._look()
        assert uploader.notes == [
            "a checkpoint is not copied to S3: a container's root has written it for itself only"
        ]
    uploader.bucket = "bucket"
    uploader._look()
    assert keys(s3) == ["run/a"]


@pytest.mark.slow
def test_a_copy_that_stalls(s3, tmp_path, clock):
    uploader = make_uploader(s3, tmp_path, stall_after=10.0)
    waits = []
    real_wait = uploader.ended.wait
    uploader.ended.wait = lambda seconds: waits.append(seconds) or real_wait(seconds)
    clock.now = 109.9
    uploader.start()
    write_files(tmp_path, "a")
    wait_until(lambda: keys(s3) == ["run/a"])
    clock.now = 110.0
    uploaded = record_uploads(uploader)
    waits_before = len(waits)
    wait_until(lambda: len(waits) > waits_before + 1)
    write_files(tmp_path, "b")
    wait_until(lambda: len(waits) > waits_before + 20)
    uploader.finish()
    assert uploaded == [] and keys(s3) == ["run/a"]


@pytest.mark.parametrize("flush", [False, True])
def test_what_the_end_leaves(s3, tmp_path, flush):
    uploader = make_uploader(s3, tmp_path, flush=flush, lag=1000.0)
    uploader.start()
    write_files(tmp_path, "a")
    wait_until(lambda: "a" in uploader.seen)
    uploader.finish()
    assert keys(s3) == (["run/a"] if flush else []) and not uploader.is_alive()
    uploader.finish()  # once more, at the end of the attempt
    assert keys(s3) == (["run/a"] if flush else [])


@pytest.mark.slow
def test_the_end_cuts_an_upload(s3, tmp_path, monkeypatch):
    """Neither the file is there, nor an unfinished upload in parts."""
    uploader = make_uploader(s3, tmp_path)
    has_begun = threading.Event()
    real_alive = uploader._alive

    def wait_for_the_end(size: int) -> None:
        has_begun.set()
        assert uploader.ended.wait(HANG_SECONDS)
        real_alive(size)

    monkeypatch.setattr(uploader, "_alive", wait_for_the_end)
    for name, size in (("a", 1_000_000), ("b", 20_000_000)):
        (tmp_path / name).write_bytes(bytes(size))
    os.utime(tmp_path / "b", (1, 1))  # the oldest comes first
    uploader.start()
    assert has_begun.wait(HANG_SECONDS)
    uploader.finish()
    assert keys(s3) == [] and not s3.list_multipart_uploads(Bucket="bucket").get("Uploads")
    assert uploader.notes == [] and not uploader.seen["b"].uploaded


@pytest.mark.slow
def test_many_small_files(s3, tmp_path):
    uploader = make_uploader(s3, tmp_path, markers=True)
    uploader.start()
    write_files(tmp_path, *(f"{number % 7}/{number}" for number in range(200)))
    wait_until(
        lambda: (
            len(uploader.seen) == 200
            and all(file.uploaded for file in list(uploader.seen.values()))
        )
    )
    uploader.finish()
    assert keys(s3) == sorted(f"run/{number % 7}/{number}" for number in range(200))
    assert uploader.notes == []


# Artefacts


def make_outputs(tmp_path: Path, hosts: dict[str, list[str]]) -> dict[str, Path]:
    """Return the folders of hosts, each with files in its model."""
    for host, names in hosts.items():
        write_files(tmp_path / host / "model", *names)
        write_files(tmp_path / host / "output/data", "./")
    return {host: tmp_path / host for host in hosts}


def extract_archive(s3, key: str, folder: Path) -> dict[str, tarfile.TarInfo]:
    """Extract an archive, and return its members by name."""
    folder.mkdir(exist_ok=True)
    # With tar, which is safe; Python's tarfile is since 3.11.4, and Debian 12 has 3.11.2.
    subprocess.run(
        ["tar", "--extract", "--gzip", "--directory", folder], input=content(s3, key), check=True
    )
    with tarfile.open(fileobj=io.BytesIO(content(s3, key))) as tar:
        return {member.name: member for member in tar}


def test_what_all_hosts_leave_is_one_archive(s3, tmp_path):
    first_names = ["a b", "deep/c", "empty/", "same", "empty-2/"]
    second_names = ["same", "ü", "empty-2/x"]
    hosts = make_outputs(tmp_path, {"algo-1": first_names, "algo-2": second_names})
    (tmp_path / "algo-1/model/link").symlink_to("a b")
    (tmp_path / "algo-1/model/nowhere").symlink_to("not/there")
    (tmp_path / "algo-1/model/to-folder").symlink_to("deep")
    os.link(tmp_path / "algo-1/model/a b", tmp_path / "algo-1/model/twice")
    (tmp_path / "algo-2/model/same").write_text("of algo-2")
    write_files(tmp_path / "algo-2/output/data", "log")
    notes = []
    address, digests = artifacts.upload(s3, job(), hosts, tmp_path, notes.append)
    assert address == "s3://bucket/output/job/output/model.tar.gz"
    assert keys(s3) == ["output/job/output/model.tar.gz", "output/job/output/output.tar.gz"]
    members = extract_archive(s3, keys(s3)[0], tmp_path / "model")
    assert set(members) >= {
        "a b",
        "deep/c",
        "empty",
        "same",
        "ü",
        "link",
        "nowhere",
        "to-folder",
        "twice",
        "empty-2/x",
    }
    assert members["empty"].isdir() and members["nowhere"].issym() and members["to-folder"].issym()
    texts = file_texts(tmp_path / "model")
    assert (texts["same"], texts["link"], texts["twice"], texts["a b"]) == (
        "of algo-2",
        "a b",
        "a b",
        "a b",
    )
    assert digests["same"] == hashlib.sha256(b"of algo-2").hexdigest()
    assert digests["link"] == digests["a b"] == hashlib.sha256(b"a b").hexdigest()
    assert set(digests) == {"a b", "deep/c", "empty-2/x", "link", "same", "twice", "ü"}
    assert notes == [
        "model: same of algo-2 replaces that of algo-1; give each host names of its own"
    ]
    assert list(extract_archive(s3, keys(s3)[1], tmp_path / "output")) == ["log"]


def test_uncompressed_artefacts(s3, tmp_path):
    hosts = make_outputs(tmp_path, {"algo-1": ["a b", "deep/c", "empty/"], "algo-2": ["d"]})
    (tmp_path / "algo-1/model/link").symlink_to("a b")
    (tmp_path / "algo-1/model/nowhere").symlink_to("not/there")
    request = job(OutputDataConfig={"S3OutputPath": "s3://bucket", "CompressionType": "NONE"})
    assert (
        artifacts.upload(s3, request, hosts, tmp_path, lambda _: None)[0]
        == "s3://bucket/job/output/model/"
    )
    assert keys(s3) == [f"job/output/model/{name}" for name in ("a b", "d", "deep/c", "link")]
    assert content(s3, "job/output/model/link") == b"a b"


@pytest.mark.parametrize(
    "hosts", [{"algo-1": ["x"], "algo-2": ["x/y"]}, {"algo-1": ["x/y"], "algo-2": ["x"]}]
)
def test_a_file_where_another_host_has_a_folder(s3, tmp_path, hosts):
    """The archive can be extracted; the file in the folder is left out."""
    notes = []
    artifacts.upload(s3, job(), make_outputs(tmp_path, hosts), tmp_path, notes.append)
    extract_archive(s3, keys(s3)[0], tmp_path / "model")
    assert file_texts(tmp_path / "model") == {"x": "x"}
    assert (
        len(notes) == 1 and notes[0].startswith("model: x/y of algo-") and "is left out" in notes[0]
    )


def test_nothing_is_an_empty_archive(s3, tmp_path):
    artifacts.upload(s3, job(), make_outputs(tmp_path, {"algo-1": []}), tmp_path, lambda _: None)
    assert [extract_archive(s3, key, tmp_path / "x") for key in keys(s3)] == [{}, {}]


# The endpoint's clients


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
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("KEPT", "1")
    variables = clients.variables("http://127.0.0.1:4571", KEY)
    assert variables["AWS_ENDPOINT_URL"] == "http://127.0.0.1:4571"
    assert (variables["AWS_REGION"], variables["AWS_DEFAULT_REGION"], variables["KEPT"]) == (
        "eu-west-1",
        "eu-west-1",
        "1",
    )
    assert variables["AWS_ACCESS_KEY_ID"] == "id" and variables["AWS_CONFIG_FILE"] == os.devnull
    assert not {"AWS_PROFILE", "AWS_SESSION_TOKEN"} & set(variables)


# Docker's bridge

BRIDGE_CASES = {
    "as it is told": ([{"Subnet": "172.17.0.0/16", "Gateway": "172.17.0.9"}], {}, "172.17.0.9"),
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
    """Of a fresh Debian 12 (docker.io 20.10.24), which names no Gateway, and of others."""
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


# Metrics and logs


def test_metrics_of_log_lines():
    definitions = [
        {"Name": "loss", "Regex": r"loss=(\S+)"},
        {"Name": "count", "Regex": r"\d+"},
        {"Name": "maybe", "Regex": r"x(\d)?"},
    ]
    log_metrics = metrics.Metrics(definitions)
    for line in ("loss=0.5 loss=0.25", "loss=nan", "loss=inf", "loss=", "loss=none", "x"):
        log_metrics.line(line)
    assert {name: metric["Value"] for name, metric in log_metrics.found.items()} == {
        "loss": 0.25,
        "count": 25.0,
    }
    log_metrics.line("7 x3")
    assert {name: metric["Value"] for name, metric in log_metrics.found.items()} == {
        "loss": 0.25,
        "count": 3.0,
        "maybe": 3.0,
    }
    assert (
        log_metrics.found["loss"]["MetricName"] == "loss"
        and abs(log_metrics.found["loss"]["Timestamp"] - time.time()) < HANG_SECONDS
    )


def test_the_time_that_an_expression_may_take():
    metric = matcher.Metric("a", re.compile("a"))
    metric.earn(9.0)
    assert metric.left == 0.25
    metric.spend(0.2)
    assert metric.left == pytest.approx(0.05)
    metric.earn(0.1)
    assert metric.left == pytest.approx(0.15)
    metric.spend(9.0)
    assert metric.left == 0.001


@pytest.mark.parametrize(
    ("regex", "value"),
    [(r"a=(\S+)", 2.0), (r"\d+", 2.0), (r"b=(\S+)", None), ("a=(1)|b", 1.0), ("(c)?z", None)],
)
def test_the_last_number_of_a_line_is_its_value(regex, value):
    assert matcher._last_value(re.compile(regex), "a=1 a=2 a=nan a=inf b=none z") == value


@pytest.mark.parametrize("regex", ["(", "a{9999999999}", "[z-a]"])
def test_a_metric_that_cannot_be(regex):
    with pytest.raises(Refused, match="Invalid MetricDefinitions: the Regex of 'a': "):
        metrics.Metrics([{"Name": "a", "Regex": regex}])


def events(client, stream: str) -> list[str]:
    """Return the messages of a stream."""
    key = {"logGroupName": logs.LOG_GROUP, "logStreamName": stream, "startFromHead": True}
    messages = []
    page = client.get_log_events(**key)
    while page["events"]:
        messages += [event["message"] for event in page["events"]]
        page = client.get_log_events(**key, nextToken=page["nextForwardToken"])
    return messages


@pytest.mark.slow
def test_log_lines_go_to_the_file_the_stream_and_the_view(endpoint, tmp_path):
    client = clients.client("logs", endpoint, "us-east-1", KEY)
    job_logs = logs.Logs(client, "job", tmp_path)
    for host in ("algo-1", "algo-2", "algo-1"):  # algo-1 twice: it was restarted
        job_logs.open(host)

    def take(host: str, text: str):
        job_logs.write(host, text)
        return job_logs.line(host, text)

    point = take("algo-1", "step=3 loss=0.5")
    assert (point.step, point.values) == (3, {"step": 3.0, "loss": 0.5})
    assert take("algo-1", "") is None and take("algo-2", "ü" * 200_000) is None
    job_logs.send()
    for number in range(logs.MAX_BATCH_EVENTS + 1):
        take("algo-1", f"line {number}")
    job_logs.send()
    job_logs.send()
    streams = client.describe_log_streams(logGroupName=logs.LOG_GROUP, logStreamNamePrefix="job/")[
        "logStreams"
    ]
    first_stream, second_stream = (stream["logStreamName"] for stream in streams)
    assert first_stream == f"job/algo-1-{job_logs.made}"
    lines = [f"line {number}" for number in range(logs.MAX_BATCH_EVENTS + 1)]
    assert events(client, first_stream) == ["step=3 loss=0.5", *lines]
    (long_line,) = events(client, second_stream)
    assert (
        set(long_line) == {"ü"}
        and len(long_line.encode()) == logs.MAX_EVENT_BYTES - logs.MAX_EVENT_BYTES % 2
    )
    assert (tmp_path / "algo-1.log").read_text().splitlines() == ["step=3 loss=0.5", "", *lines]
    assert job_logs.shown() == {
        "algo-1": lines[-logs.SHOWN_LINES :],
        "algo-2": ["ü" * logs.SHOWN_CHARACTERS],
    }
    logs.Logs(client, "job-2", tmp_path / "2").open("algo-1")  # the log group exists already
