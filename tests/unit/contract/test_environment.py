"""contract/environment.py: empty, contradictory, and full with every value different."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagemaker_lightning.contract import environment as environment_module
from sagemaker_lightning.contract import job_summary
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.environment import (
    SageMakerEnvironment,
    drilled,
    failure_file,
    in_container,
    variables_of,
)
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.restart import ContainerRestart

ALL_VARIABLES = {
    "SM_HOSTS": '["algo-1", "algo-10", "algo-2"]',
    "SM_CURRENT_HOST": "algo-10",
    "SM_NUM_GPUS": "7",
    "SM_NETWORK_INTERFACE_NAME": "eth7",
    "SM_CHANNELS": '["my-data", "training", "code", "sm_drivers"]',
    "SM_CHANNEL_MY-DATA": "/a",
    "SM_CHANNEL_TRAINING": "/b",
    "SM_CHANNEL_CODE": "/c",
    "SM_CHANNEL_SM_DRIVERS": "/d",
    "SM_INPUT_DATA_CONFIG": (
        '{"training": {"TrainingInputMode": "File", "S3DistributionType": "ShardedByS3Key"}, '
        '"my-data": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}, '
        '"code": {}}'
    ),
    "SM_MODEL_DIR": "/e",
    "SM_OUTPUT_DATA_DIR": "/f",
    "SM_CHECKPOINT_DIR": "/g",
    "SM_OUTPUT_DIR": "/h",
    "TRAINING_JOB_NAME": "o",
    "SAGEMAKER_LIGHTNING_REVISION": "abc",
    "SM_USER_ARGS": '["--i", "j"]',
    "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT": "11",
    "SAGEMAKER_LIGHTNING_PEER_TIMEOUT": "12.5",
    "SAGEMAKER_LIGHTNING_HANG_TIMEOUT": "13",
    "SAGEMAKER_LIGHTNING_BATCH_TIMEOUT": "14",
    "SAGEMAKER_LIGHTNING_WATCH": "/l",
    "SAGEMAKER_LIGHTNING_DRILL": '{"m": 1}',
    "SAGEMAKER_LIGHTNING_RESTARTS": '[{"why": "x", "step": null, "at": 0.5}]',
    "SAGEMAKER_LIGHTNING_COPIES": "/o",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "8",
    "SM_INSTANCE_GROUPS_DICT": '{"g": {"hosts": ["algo-1", "algo-10", "algo-2"]}}',
}


def test_hosts_that_nobody_names_have_numbers(monkeypatch):
    monkeypatch.setattr(environment_module.socket, "gethostname", lambda: "box")
    nobodys = SageMakerEnvironment()
    assert [nobodys.host_name(2, node) for node in (0, 1)] == ["node 0 (box)", "node 1 (box)"]
    assert nobodys.host_name(1, 0) == "localhost"
    named = SageMakerEnvironment(hosts=("algo-1", "algo-2"), current_host="algo-2")
    assert named.host_name(2, 0) == "algo-2"


def test_empty():
    assert SageMakerEnvironment.read({}) == SageMakerEnvironment()
    assert failure_file({}) is None
    assert SageMakerEnvironment().training_dir is None
    assert SageMakerEnvironment().checkpoint_dir.parent == SageMakerEnvironment().output_data_dir


def test_full(tmp_path):
    (tmp_path / "hyperparameters.json").write_text('{"i": "j"}')
    (tmp_path / "checkpointconfig.json").write_text('{"LocalPath": "/n"}')
    environment = SageMakerEnvironment.read(ALL_VARIABLES | {"SM_INPUT_CONFIG_DIR": str(tmp_path)})
    assert environment == SageMakerEnvironment(
        hosts=("algo-1", "algo-10", "algo-2"),
        groups={"g": ("algo-1", "algo-10", "algo-2")},
        current_host="algo-10",
        num_gpus=7,
        network_interface="eth7",
        channels={"my-data": Path("/a"), "training": Path("/b")},
        sharded_channels=frozenset({"training"}),
        model_dir=Path("/e"),
        output_data_dir=Path("/f"),
        checkpoint_dir=Path("/g"),
        copied_dir=Path("/n"),
        is_job=True,
        revision="abc",
        user_args=("--i", "j"),
        hyperparameters={"i": "j"},
        rendezvous_timeout=11.0,
        peer_timeout=12.5,
        hang_timeout=13.0,
        batch_timeout=14.0,
        torchrun=(2, 8),
        watch=Path("/l"),
        restarts=(ContainerRestart("x", None, 0.5),),
        copies=Path("/o"),
        drill={"m": 1},
    )
    defaults = SageMakerEnvironment()
    assert all(
        getattr(environment, field.name) != getattr(defaults, field.name)
        for field in dataclasses.fields(defaults)
    )
    assert environment.training_dir == Path("/b")
    assert environment.num_nodes == 4  # as torchrun says: 8 ranks, 2 on each node
    with pytest.raises(dataclasses.FrozenInstanceError):
        environment.num_gpus = 8
    assert failure_file(ALL_VARIABLES) == Path("/h/failure")


def test_a_job_that_the_toolkit_does_not_run(tmp_path):
    """SDK 3's own two channels are not data."""
    files = {
        "resourceconfig": {"current_host": "algo-2", "hosts": ["algo-2", "algo-1"]},
        "inputdataconfig": dict.fromkeys(("train-set", "code", "sm_drivers"), {}),
        "hyperparameters": {"lr": "0.1"},
    }
    (tmp_path / "input/config").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / f"input/config/{name}.json").write_text(json.dumps(content))
    here = SageMakerEnvironment.read(variables_of(tmp_path, gpus=3))
    assert (here.current_host, here.hosts) == ("algo-2", ("algo-1", "algo-2"))
    assert here.channels == {"train-set": tmp_path / "input/data/train-set"}
    assert (here.hyperparameters, here.num_gpus) == ({"lr": "0.1"}, 3)
    folders = tmp_path / "model", tmp_path / "output/data"
    assert (here.model_dir, here.output_data_dir) == folders


def test_training_channel():
    one_channel = {
        "SM_CHANNELS": '["anything", "code"]',
        "SM_CHANNEL_ANYTHING": "/x",
        "SM_CHANNEL_CODE": "/y",
    }
    assert SageMakerEnvironment.read(one_channel).training_dir == Path("/x")
    two_channels = {"SM_CHANNELS": '["a", "b"]', "SM_CHANNEL_A": "/x", "SM_CHANNEL_B": "/y"}
    assert SageMakerEnvironment.read(two_channels).training_dir is None
    assert SageMakerEnvironment.read({"SM_CHANNEL_TRAINING": "/z"}).training_dir == Path("/z")


def test_a_sharded_channel():
    """Only the training channel counts, whatever its name.

    It counts only if another host may have the rest.
    """
    two_hosts = {
        "SM_HOSTS": '["a", "b"]',
        "SM_CURRENT_HOST": "a",
        "SM_CHANNELS": '["mine"]',
        "SM_CHANNEL_MINE": "/x",
    }
    sharded = {"SM_INPUT_DATA_CONFIG": '{"mine": {"S3DistributionType": "ShardedByS3Key"}}'}
    assert SageMakerEnvironment.read(ALL_VARIABLES).training_is_sharded
    assert SageMakerEnvironment.read(two_hosts | sharded).training_is_sharded
    assert not SageMakerEnvironment.read(
        two_hosts | sharded | {"SM_HOSTS": '["a"]'}
    ).training_is_sharded
    for config in ({}, {"SM_INPUT_DATA_CONFIG": "{}"}, {"SM_INPUT_DATA_CONFIG": '{"mine": {}}'}):
        assert not SageMakerEnvironment.read(two_hosts | config).training_is_sharded
    replicated = {
        "SM_INPUT_DATA_CONFIG": (
            '{"training": {}, "my-data": {"S3DistributionType": "ShardedByS3Key"}}'
        )
    }
    assert not SageMakerEnvironment.read(ALL_VARIABLES | replicated).training_is_sharded


def test_checkpoint_dir(tmp_path):
    variables = {"SM_MODEL_DIR": str(tmp_path / "model"), "SM_INPUT_CONFIG_DIR": str(tmp_path)}
    assert SageMakerEnvironment.read(
        variables | {"SM_OUTPUT_DATA_DIR": "/f"}
    ).checkpoint_dir == Path("/f/checkpoints")
    (tmp_path / "checkpoints").mkdir()
    assert SageMakerEnvironment.read(variables).checkpoint_dir == tmp_path / "checkpoints"
    (tmp_path / "checkpointconfig.json").write_text(json.dumps({"LocalPath": "/elsewhere"}))
    assert SageMakerEnvironment.read(variables).checkpoint_dir == Path("/elsewhere")
    assert SageMakerEnvironment.read(
        variables | {"SM_CHECKPOINT_DIR": "/g"}
    ).checkpoint_dir == Path("/g")


def test_what_becomes_of_a_checkpoint_folder(tmp_path, monkeypatch):
    """A job's comes back from S3 or not at all; a container's own files end with it."""
    layers = []
    monkeypatch.setattr(environment_module, "ends_with_container", layers.__contains__)
    read = SageMakerEnvironment.read
    folder = tmp_path / "checkpoints"
    assert read({}).checkpoint_home(folder) == CheckpointHome(folder)
    layers.append(folder)
    home = read({}).checkpoint_home(folder)
    assert home.notice == (
        f"an interruption makes this run start over: {folder} ends with this container; mount a "
        "folder at /opt/ml/checkpoints"
    )
    job = {"TRAINING_JOB_NAME": "mine", "SM_INPUT_CONFIG_DIR": str(tmp_path)}
    assert read(job).checkpoint_home(folder).lost == "the job has no CheckpointConfig"
    (tmp_path / "checkpointconfig.json").write_text(json.dumps({"LocalPath": str(folder)}))
    assert read(job).checkpoint_home(folder) == CheckpointHome(folder, is_copied=True)
    assert read(job).checkpoint_home(folder / "mine").is_copied
    lost = read(job).checkpoint_home(tmp_path).lost
    assert lost == f"{tmp_path} is not below {folder}, which SageMaker copies"
    second = job | {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
    assert not read(second).checkpoint_home(folder).is_main_host


def test_a_drill_has_folders_of_its_own(tmp_path):
    """A drill inside a job does not use the job's folders."""
    moved = drilled(ALL_VARIABLES, tmp_path, {"steps": 4})
    environment = SageMakerEnvironment.read(moved)
    folders = (
        environment.model_dir,
        environment.output_data_dir,
        environment.checkpoint_dir,
        environment.log_dir,
    )
    assert all(folder.is_relative_to(tmp_path) for folder in folders)
    assert failure_file(moved) is None
    assert environment.watch is None
    assert environment.drill == {"steps": 4}
    assert environment.channels == SageMakerEnvironment.read(ALL_VARIABLES).channels
    assert moved["SAGEMAKER_BASE_DIR"] == str(tmp_path)


def test_the_number_of_nodes_without_torchrun():
    assert SageMakerEnvironment().num_nodes == 1
    assert SageMakerEnvironment(hosts=("a", "b", "c"), current_host="a").num_nodes == 3
    assert SageMakerEnvironment.read({"LOCAL_WORLD_SIZE": "1"}).torchrun == (1, 1)


def test_logs_are_where_they_survive_interruptions():
    """In the job's checkpoint folder if there is one, else among the outputs."""
    with_a_folder = SageMakerEnvironment(checkpoint_dir=Path("/c"), current_host="algo-2")
    assert with_a_folder.log_dir == Path("/c/tensorboard/algo-2")
    assert SageMakerEnvironment().log_dir == Path("output/data/tensorboard/localhost")


def test_only_a_jobs_container_counts_as_one():
    assert in_container({"SM_OUTPUT_DIR": "/opt/ml/output"})
    assert not in_container({}) and not in_container({"SM_OUTPUT_DIR": "/tmp/job/output"})


@pytest.mark.parametrize("seconds", ["1", "999999"])
def test_the_least_and_the_largest_number_of_seconds(seconds):
    variables = {"SAGEMAKER_LIGHTNING_PEER_TIMEOUT": seconds}
    assert SageMakerEnvironment.read(variables).peer_timeout == float(seconds)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"SM_HOSTS": "algo-1"}, "SM_HOSTS"),
        ({"SM_HOSTS": "[]"}, "SM_HOSTS"),
        ({"SM_HOSTS": '{"a": 1}'}, "SM_HOSTS"),
        ({"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST"),
        ({"SM_CURRENT_HOST": ""}, "SM_CURRENT_HOST"),
        ({"SM_CHANNELS": '["lost"]'}, "SM_CHANNEL_LOST"),
        ({"SM_NUM_GPUS": "many"}, "SM_NUM_GPUS"),
        ({"SM_INPUT_DATA_CONFIG": "[]"}, "SM_INPUT_DATA_CONFIG"),
    ],
)
def test_a_contradiction_is_an_error_that_names_the_variable(change, names):
    with pytest.raises(UserError, match=names):
        SageMakerEnvironment.read(ALL_VARIABLES | change)


def test_a_checkpointconfig_without_a_path(tmp_path):
    (tmp_path / "checkpointconfig.json").write_text('{"S3Uri": "s3://bucket"}')
    with pytest.raises(UserError, match="checkpointconfig.json.*LocalPath"):
        SageMakerEnvironment.read({"SM_INPUT_CONFIG_DIR": str(tmp_path)})


# What the toolkit exports for a heterogeneous job.
GROUPS = {
    "SM_HOSTS": '["algo-1", "algo-2", "algo-3", "algo-4"]',
    "SM_CURRENT_HOST": "algo-1",
    "SM_INSTANCE_GROUPS_DICT": json.dumps(
        {
            "data": {
                "instance_group_name": "data",
                "instance_type": "ml.c5.xlarge",
                "hosts": ["algo-1"],
            },
            "train": {
                "instance_group_name": "train",
                "instance_type": "ml.g5.xlarge",
                "hosts": ["algo-4", "algo-2"],
            },
            "more": {
                "instance_group_name": "more",
                "instance_type": "ml.g5.xlarge",
                "hosts": ["algo-3"],
            },
        }
    ),
}


@pytest.mark.parametrize(
    ("named", "hosts"),
    [
        (["train"], ("algo-2", "algo-4")),
        ("train", ("algo-2", "algo-4")),
        (["more", "train"], ("algo-2", "algo-3", "algo-4")),
        (None, ("algo-1", "algo-2", "algo-3", "algo-4")),
    ],
)
def test_the_groups_of_the_distribution_train(named, hosts):
    parameters = {"sagemaker_distribution_instance_groups": named} if named else {}
    environment = SageMakerEnvironment.read(
        GROUPS | {"SM_FRAMEWORK_PARAMS": json.dumps(parameters)}
    )
    assert environment.hosts == hosts and environment.current_host == "algo-1"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            GROUPS
            | {"SM_FRAMEWORK_PARAMS": '{"sagemaker_distribution_instance_groups": ["gpus"]}'},
            "sagemaker_distribution_instance_groups: found 'gpus', "
            "expected the groups: data, train, more",
        ),
        (
            {"SAGEMAKER_LIGHTNING_PEER_TIMEOUT": "soon"},
            "SAGEMAKER_LIGHTNING_PEER_TIMEOUT: found 'soon', expected a",
        ),
        (
            {"SAGEMAKER_LIGHTNING_PEER_TIMEOUT": "0"},
            "found '0', expected a number of seconds, 1 or more",
        ),
        (
            {"SAGEMAKER_LIGHTNING_PEER_TIMEOUT": "1000000"},
            "found '1000000', expected a number of seconds, 1 or more",
        ),
        (
            {"SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT": "nan"},
            "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT: found 'nan'",
        ),
    ],
)
def test_impossible_variables_are_refused(variables, message):
    with pytest.raises(UserError, match=message):
        SageMakerEnvironment.read(variables)


def test_the_summary_of_a_job(tmp_path, monkeypatch):
    """Its hosts, devices, channels, program and hyperparameters; no secret, none of the SDK's."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "one").write_text("12345")
    (tmp_path / "deep/two").write_text("123")
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    environment = SageMakerEnvironment(
        hosts=("algo-1", "algo-2"),
        current_host="algo-2",
        num_gpus=7,
        channels={"training": tmp_path},
    )
    hyperparameters = {
        "sagemaker_program": "x.py",
        "lr": 0.1,
        "api_key": "k",
        "note": "hf_" + "a1" * 9,
    }
    assert list(job_summary.lines(environment, "x.py, torchrun", hyperparameters)) == [
        "hosts: algo-1, algo-2 (this one)",
        "devices: 7 GPUs, 16 CPUs",
        f"channel training: {tmp_path}, 2 files, 8 bytes",
        "program: x.py, torchrun",
        "hyperparameter api_key: ******",
        "hyperparameter lr: 0.1",
        "hyperparameter note: ******",
    ]
    assert "channels: none" in list(job_summary.lines(SageMakerEnvironment(), "x.py", {}))


def test_a_channel_of_very_many_files_is_not_counted_to_its_end(monkeypatch):
    """It may be a bucket. The files are pretended: there are 100,001 of them."""
    names = iter(["x"] * 100_001 + [None])
    monkeypatch.setattr("os.walk", lambda folder: [(str(folder), [], names)])
    monkeypatch.setattr("os.path.join", lambda *_: "/")
    monkeypatch.setattr("os.lstat", lambda _: SimpleNamespace(st_size=1))
    environment = SageMakerEnvironment(channels={"training": Path("/bucket")})
    lines = list(job_summary.lines(environment, "x.py", {}))
    monkeypatch.undo()
    assert "channel training: /bucket, more than 100000 files" in lines
    assert list(names) == [None]
