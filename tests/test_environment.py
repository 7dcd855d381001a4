"""app/environment.py: empty, full with every value different, and contradictory."""

import dataclasses
import json
from pathlib import Path

import pytest

from app.environment import Environment, failure_file

FULL = {
    "SM_HOSTS": '["algo-1", "algo-10", "algo-2"]',
    "SM_CURRENT_HOST": "algo-10",
    "SM_NUM_GPUS": "7",
    "SM_NETWORK_INTERFACE_NAME": "eth7",
    "SM_CHANNELS": '["my-data", "training", "code", "sm_drivers"]',
    "SM_CHANNEL_MY-DATA": "/a",
    "SM_CHANNEL_TRAINING": "/b",
    "SM_CHANNEL_CODE": "/c",
    "SM_CHANNEL_SM_DRIVERS": "/d",
    "SM_INPUT_DATA_CONFIG": '{"training": {"TrainingInputMode": "File", "S3DistributionType": "ShardedByS3Key"}, '
    '"my-data": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}, "code": {}}',
    "SM_MODEL_DIR": "/e",
    "SM_OUTPUT_DATA_DIR": "/f",
    "SM_CHECKPOINT_DIR": "/g",
    "SM_OUTPUT_DIR": "/h",
    "SAGEMAKER_LIGHTNING_REVISION": "abc",
    "SM_USER_ARGS": '["--i", "j"]',
}


def test_empty():
    assert Environment.read({}) == Environment()
    assert failure_file({}) is None
    assert Environment().training_dir is None
    assert Environment().checkpoint_dir.parent == Environment().output_data_dir


def test_full(tmp_path):
    (tmp_path / "hyperparameters.json").write_text('{"i": "j"}')
    environment = Environment.read(FULL | {"SM_INPUT_CONFIG_DIR": str(tmp_path)})
    assert environment == Environment(
        hosts=("algo-1", "algo-10", "algo-2"),
        current_host="algo-10",
        num_gpus=7,
        network_interface="eth7",
        channels={"my-data": Path("/a"), "training": Path("/b")},
        sharded_channels=frozenset({"training"}),
        model_dir=Path("/e"),
        output_data_dir=Path("/f"),
        checkpoint_dir=Path("/g"),
        revision="abc",
        user_args=("--i", "j"),
        hyperparameters={"i": "j"},
    )
    defaults = Environment()
    assert all(
        getattr(environment, field.name) != getattr(defaults, field.name) for field in dataclasses.fields(defaults)
    )
    assert environment.training_dir == Path("/b")
    assert failure_file(FULL) == Path("/h/failure")


def test_training_channel():
    one = {"SM_CHANNELS": '["anything", "code"]', "SM_CHANNEL_ANYTHING": "/x", "SM_CHANNEL_CODE": "/y"}
    assert Environment.read(one).training_dir == Path("/x")
    two = {"SM_CHANNELS": '["a", "b"]', "SM_CHANNEL_A": "/x", "SM_CHANNEL_B": "/y"}
    assert Environment.read(two).training_dir is None
    assert Environment.read({"SM_CHANNEL_TRAINING": "/z"}).training_dir == Path("/z")


def test_a_sharded_channel():
    """Only the training channel's counts, whatever its name, and only where another host may have the rest."""
    two = {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a", "SM_CHANNELS": '["mine"]', "SM_CHANNEL_MINE": "/x"}
    sharded = {"SM_INPUT_DATA_CONFIG": '{"mine": {"S3DistributionType": "ShardedByS3Key"}}'}
    assert Environment.read(FULL).training_is_sharded
    assert Environment.read(two | sharded).training_is_sharded
    assert not Environment.read(two | sharded | {"SM_HOSTS": '["a"]'}).training_is_sharded
    for config in ({}, {"SM_INPUT_DATA_CONFIG": "{}"}, {"SM_INPUT_DATA_CONFIG": '{"mine": {}}'}):
        assert not Environment.read(two | config).training_is_sharded
    replicated = {"SM_INPUT_DATA_CONFIG": '{"training": {}, "my-data": {"S3DistributionType": "ShardedByS3Key"}}'}
    assert not Environment.read(FULL | replicated).training_is_sharded


def test_checkpoint_dir(tmp_path):
    variables = {"SM_MODEL_DIR": str(tmp_path / "model"), "SM_INPUT_CONFIG_DIR": str(tmp_path)}
    assert Environment.read(variables | {"SM_OUTPUT_DATA_DIR": "/f"}).checkpoint_dir == Path("/f/checkpoints")
    (tmp_path / "checkpoints").mkdir()
    assert Environment.read(variables).checkpoint_dir == tmp_path / "checkpoints"
    (tmp_path / "checkpointconfig.json").write_text(json.dumps({"LocalPath": "/elsewhere"}))
    assert Environment.read(variables).checkpoint_dir == Path("/elsewhere")
    assert Environment.read(variables | {"SM_CHECKPOINT_DIR": "/g"}).checkpoint_dir == Path("/g")


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
    with pytest.raises(ValueError, match=names):
        Environment.read(FULL | change)


def test_a_checkpointconfig_without_a_path(tmp_path):
    (tmp_path / "checkpointconfig.json").write_text('{"S3Uri": "s3://bucket"}')
    with pytest.raises(ValueError, match="checkpointconfig.json.*LocalPath"):
        Environment.read({"SM_INPUT_CONFIG_DIR": str(tmp_path)})
