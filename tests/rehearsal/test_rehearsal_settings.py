"""The flags of the rehearsal, and the groups, channels and hosts of a request."""

import argparse
import json
from pathlib import Path

import pytest
from rehearsed_inputs import channel, group, job, make_layouts

from sagemaker_rehearsal import settings
from sagemaker_rehearsal.jobs import layout


def settings_of(*flags: str) -> settings.Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    settings.add_flags(parser)
    return settings.from_flags(parser.parse_args(flags))


def test_settings_by_default_and_by_flags(tmp_path):
    parsed = settings_of()
    assert parsed.port == 4571
    assert parsed.engine == "auto"
    assert parsed.grace == 120.0
    assert parsed.interrupt == []
    assert parsed.seed == 0
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
    assert parsed.port == 0
    assert parsed.grace == 0.0
    assert parsed.repairs == 2
    assert parsed.price == 3.0
    assert parsed.spot_price == 1.0
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
        "--no-capacity=foo",
    ],
)
def test_a_wrong_flag_is_named(flag):
    name, _, value = flag.partition("=")
    with pytest.raises(ValueError, match=rf"{name}\b.*: found .*, expected ") as error:
        settings_of(flag)
    assert "price" in name or value.removesuffix(".0") in str(error.value)


def test_a_percentage_is_read():
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
    assert written["debughookconfig"] == {"S3OutputPath": "s3://bucket/d"}
    assert "profilerconfig" not in written
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
