"""Hyperparameters in every client's encoding reach the CLI with their Python values."""

import json

import pytest
from command_lines import cli, no_flags_of_pytest  # noqa: F401  a fixture for each test

from sagemaker_lightning.contract.hyperparameters import flags, text


def sdk2_estimator(value: object) -> str:
    """SDK 2, Estimator(image_uri): str()."""
    return str(value)


def sdk2_source_dir(value: object) -> str:
    """SDK 2 with source_dir: JSON, strings with their quotes."""
    return json.dumps(value)


def sdk3(value: object) -> str:
    """SDK 3, ModelTrainer: JSON, strings bare."""
    return value if isinstance(value, str) else json.dumps(value)


ENCODINGS = [sdk2_estimator, sdk2_source_dir, sdk3, lambda value: value]
VALUES = [
    True,
    False,
    None,
    0,
    7,
    -3,
    1.5,
    -0.25,
    1e-3,
    1e-10,
    123456789012345678901234567890,
    "Adam",
    "a b",
    "it's",
    'say "x"',
    "a=b",
    "--flag",
    "s3://bucket/a b/c",
    "lr=0.1,momentum=0.9",
    "$HOME",
    "ü",
    "#x",
    "a: b",
    ["a", 1],
    [],
    [0.1, -2],
    [True, None],
    {"a": 1},
    {"a": {"b": [1, None]}},
    {"x": "it's"},
    [["a"], {"b": False}],
]


@pytest.mark.parametrize(
    "encode", ENCODINGS, ids=["sdk2 Estimator", "sdk2 source_dir", "sdk3", "JSON types"]
)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_encoding_of_a_value_gives_the_same_text(value, encode):
    expected = value if isinstance(value, str) else json.dumps(value)
    decoded = text(encode(value))
    if not isinstance(value, str):
        assert json.loads(decoded) == value and type(json.loads(decoded)) is type(value)
    else:
        assert decoded == expected


@pytest.mark.parametrize(
    "value",
    ["1.10", "007", "1e-3", "+5", "1_000", "2024-01-01", "{not json", "[a, b", "(", "True story"],
)
def test_text_that_looks_like_something_else_stays_as_it_is(value):
    assert text(value) == value


def test_sagemakers_own_are_left_out_and_names_keep_their_dots():
    hyperparameters_given = {
        "sagemaker_program": '"x.py"',
        "_tuning_objective_metric": "val_loss",
        "b.c": "1",
        "a": "x=y",
    }
    assert flags(hyperparameters_given) == ["--a=x=y", "--b.c=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "encode", ENCODINGS, ids=["sdk2 Estimator", "sdk2 source_dir", "sdk3", "JSON types"]
)
def test_through_the_real_command_line(encode):
    values = {
        "data": "CIFAR10DataModule",
        "data.normalize": False,
        "data.val_split": 0.5,
        "optimizer": "Adam",
        "optimizer.lr": 1e-3,
        "optimizer.betas": [0.8, 0.9],
        "optimizer.foreach": None,
        "trainer.devices": -1,
        "trainer.max_steps": -1,
        "trainer.limit_val_batches": 0.25,
        "trainer.logger": False,
        "logger.name": 'it\'s a=b "c" #1',
        "checkpoint.save_last": True,
        "checkpoint.mode": "min",
        "model": {"class_path": "app.model.ResNet18"},
    }
    config = cli(*flags({name: encode(value) for name, value in values.items()})).config
    assert config.data.init_args.normalize is False and config.data.init_args.val_split == 0.5
    optimizer = config.optimizer.init_args
    assert (
        optimizer.lr == 1e-3 and tuple(optimizer.betas) == (0.8, 0.9) and optimizer.foreach is None
    )
    assert config.trainer.max_steps == -1 and config.trainer.limit_val_batches == 0.25
    assert config.trainer.logger is False
    assert config.logger.name == 'it\'s a=b "c" #1'
    assert config.checkpoint.save_last is True and config.checkpoint.mode == "min"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["1.10", "true", "null", "007", "1e5", "[x]", "{a: b}", "a: b", "", " x ", "None of it"]
)
def test_a_string_stays_the_string_it_is_where_a_string_is_asked_for(name):
    """JSON-encoded, it is a string for certain; bare, it is one by the flag's type."""
    config = cli(*flags({"logger.name": json.dumps(name)})).config
    assert config.logger.name == name
