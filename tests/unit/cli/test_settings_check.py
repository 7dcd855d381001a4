"""cli/settings_check.py: numbers, channels and nodes that do not fit are refused."""

from pathlib import Path

import pytest
from command_lines import DIGITS_OR_CIFAR, no_flags_of_pytest  # noqa: F401  a fixture for each test
from jsonargparse import Namespace

from sagemaker_lightning.cli import settings_check
from sagemaker_lightning.cli.application import Application
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError

from app.data import CIFAR10DataModule, DigitsDataModule


def numbers(**values) -> Namespace:
    """Return a configuration with these settings."""
    config = Namespace()
    config["trainer"] = Namespace(
        accelerator="cpu",
        logger=None,
        num_nodes=1,
        val_check_interval=None,
        strategy="auto",
        enable_checkpointing=None,
    )
    config["resume"] = Namespace(exact=True)
    config["data"] = None
    for name, value in values.items():
        config[name] = value
    return config


SMALLEST = {
    "trainer.log_every_n_steps": 0,
    "trainer.check_val_every_n_epoch": 1,
    "trainer.accumulate_grad_batches": 1,
    "trainer.num_sanity_val_steps": -1,
    "trainer.gradient_clip_val": 0.0,
    "progress.every_n_seconds": 0.0,
    "system.every_n_seconds": 0.0,
    "data.init_args.batch_size": 1,
    "data.init_args.num_workers": 0,
}


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_number_is_allowed_and_a_smaller_one_is_not(name):
    environment = SageMakerEnvironment()
    settings_check.check(numbers(**{name: SMALLEST[name]}), environment, Application())
    for value in (SMALLEST[name] - 1, float("nan")):
        with pytest.raises(UserError, match=f"found {value}, expected {SMALLEST[name]:g} or more"):
            settings_check.check(numbers(**{name: value}), environment, Application())


@pytest.mark.parametrize("name", ["fsdp", "deepspeed_stage_2"])
def test_a_strategy_whose_runs_cannot_be_resumed_is_refused_before_it_asks_for_a_gpu(name):
    environment = SageMakerEnvironment()
    with pytest.raises(UserError, match=f"found {name}, whose runs cannot be resumed.*FSDP2"):
        settings_check.check(numbers(**{"trainer.strategy": name}), environment, Application())
    for without in ({"resume.exact": False}, {"trainer.enable_checkpointing": False}):
        config = numbers(**{"trainer.strategy": name}, **without)
        settings_check.check(config, environment, Application())


@pytest.mark.parametrize(("cpus", "most"), [(1, 64), (8, 64), (9, 72), (100, 800)])
def test_how_many_workers_are_allowed(monkeypatch, cpus, most):
    monkeypatch.setattr(settings_check, "usable_cpus", lambda: cpus)
    environment = SageMakerEnvironment()
    name = "data.init_args.num_workers"
    settings_check.check(numbers(**{name: most}), environment, Application())
    with pytest.raises(UserError, match=f"found {most + 1}, expected at most {most} on this ma"):
        settings_check.check(numbers(**{name: most + 1}), environment, Application())


@pytest.mark.parametrize(
    ("channels", "chosen", "data_dir", "is_refused"),
    [
        (2, CIFAR10DataModule, None, True),
        (2, CIFAR10DataModule, "x", False),
        (1, CIFAR10DataModule, None, False),
        (2, DigitsDataModule, None, False),
        (2, None, None, False),
    ],
)
def test_two_channels_without_a_data_dir_are_refused(channels, chosen, data_dir, is_refused):
    environment = SageMakerEnvironment(channels=dict.fromkeys(["a", "b"][:channels], Path("/x")))
    data = chosen and Namespace(
        class_path=f"app.data.{chosen.__name__}", init_args=Namespace(data_dir=data_dir)
    )
    try:
        settings_check.check(numbers(data=data), environment, DIGITS_OR_CIFAR)
        assert not is_refused
    except UserError as error:
        assert is_refused
        assert str(error).startswith("--data.data_dir: found the channels a, b; name")


def test_the_number_of_nodes_is_set_to_the_jobs(capsys):
    environment = SageMakerEnvironment(hosts=("a", "b"))
    for given, warning in (
        (2, ""),
        (3, "warning: --trainer.num_nodes=3 is ignored: the job has 2\n"),
    ):
        config = numbers()
        config.trainer.num_nodes = given
        settings_check.check(config, environment, Application())
        assert config.trainer.num_nodes == 2 and capsys.readouterr().out == warning
