"""cli/default_data.py: which data a program without `--data` trains on."""

from pathlib import Path

import pytest
from command_lines import (  # noqa: F401  fixtures
    DIGITS,
    DIGITS_OR_CIFAR,
    no_flags_of_pytest,
    parsed,
)

from sagemaker_lightning.cli import default_data
from sagemaker_lightning.cli.application import Application
from sagemaker_lightning.contract.errors import UserError

from app import train


@pytest.mark.parametrize(
    "args",
    [
        ["--data=foreign.Data"],
        ["--data", "foreign.Data"],
        ["--data.class_path=foreign.Data"],
        ["--data={class_path: foreign.Data}"],
        ["--data=CIFAR10DataModule", "--data=foreign.Data", "--data.size=4"],
        ["--data=foreign.Data", "--data={init_args: {size: 4}}"],
        ["--config=own.yaml"],
        ["--config", "own.yaml"],
        ["--config=empty.yaml", "--config=own.yaml"],
        ["--data=settings.yaml"],
    ],
    ids=" ".join,
)
def test_a_data_module_gets_those_settings_of_sagemaker_that_it_takes(args, tmp_path):
    (tmp_path / "own.yaml").write_text("data: foreign.Data")
    (tmp_path / "settings.yaml").write_text("{class_path: foreign.Data, init_args: {size: 4}}")
    (tmp_path / "empty.yaml").touch()
    settings = {"data_dir": "/channel", "sharded": True, "size": 3}
    assert default_data.default_data(args, True, settings, train.APPLICATION) == {
        "class_path": "foreign.Data",
        "init_args": {"size": 3},
    }


@pytest.mark.parametrize(
    ("application", "has_channels", "args", "name"),
    [
        (DIGITS_OR_CIFAR, False, [], "DigitsDataModule"),
        (DIGITS_OR_CIFAR, True, [], "CIFAR10DataModule"),
        (DIGITS, True, [], "DigitsDataModule"),
        (DIGITS, False, ["--data.data_dir=x"], "DigitsDataModule"),
        (DIGITS_OR_CIFAR, False, ["--data.batch_size=3"], "DigitsDataModule"),
        (DIGITS_OR_CIFAR, False, ["--data.data_dir", "x"], "CIFAR10DataModule"),
        (DIGITS_OR_CIFAR, False, ["--data.init_args.data_dir=x"], "CIFAR10DataModule"),
        (DIGITS_OR_CIFAR, False, ["--data={init_args: {data_dir: x}}"], "CIFAR10DataModule"),
        (DIGITS_OR_CIFAR, False, ["--data={data_dir: x}"], "CIFAR10DataModule"),
        (Application(), True, [], None),
    ],
)
def test_the_default_data_if_no_flag_names_a_class(application, has_channels, args, name):
    chosen = {"class_path": f"app.data.{name}"} if name else None
    assert default_data.default_data(args, has_channels, {}, application) == chosen
    settings = {"sharded": True}
    assert default_data.default_data(args, has_channels, settings, application) == (
        chosen and chosen | {"init_args": settings}
    )


def test_a_model_with_its_own_loaders_has_no_default_data():
    """A model with loaders of its own trains on them, and takes no settings of other data."""
    own, foreign = "--model=diverging.Diverging", "--model=foreign.Model"
    assert default_data.default_data([own], True, {}, DIGITS_OR_CIFAR) is None
    digits = {"class_path": "app.data.DigitsDataModule"}
    assert default_data.default_data([foreign], False, {}, DIGITS_OR_CIFAR) == digits
    assert default_data.default_data(
        [own, "--data=DigitsDataModule"], True, {}, DIGITS_OR_CIFAR
    ) == (digits | {"init_args": {}})
    with pytest.raises(UserError, match="^--data.batch_size: the model has a train_dataloader of"):
        default_data.default_data(
            [own, "--data.batch_size=3", "--data.seed=1"], True, {}, DIGITS_OR_CIFAR
        )


def test_a_data_module_learns_that_its_channel_is_sharded():
    settings = parsed(
        hosts=("a", "b"),
        current_host="a",
        channels={"training": Path("/channel")},
        sharded_channels=("training",),
    ).config.data.init_args
    assert settings.sharded and settings.data_dir == "/channel"
