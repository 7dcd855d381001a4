"""docs/from-the-tutorial.md: each old flag's message is the page's; each new one parses.

The messages name folders.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from containers import ROOT

from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.cli.run import warn_of_lost_folders
from sagemaker_lightning.cli.suggestions import REPLACED
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError

from app.data import CIFAR10DataModule
from app.train import APPLICATION

PAGE = (ROOT / "docs/from-the-tutorial.md").read_text()
FLAGS = PAGE.partition("## Flags")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| `(--[\w.]+)` \| (.+) \|$", FLAGS, re.MULTILINE))
# The hyperparameters that the tutorial's run_sagemaker.py sends.
DEFAULT_HYPERPARAMS = {
    "data": "CIFAR10DataModule",
    "data.batch_size": 32,
    "optimizer": "Adam",
    "optimizer.lr": 1e-3,
    "trainer.accelerator": "gpu",
    "trainer.devices": -1,
    "trainer.max_epochs": 5,
    "logger.name": "tutorial",
}
# A value for each flag that the page gives without one, and the flags that it needs.
VALUES = {
    "--checkpoint.dirpath": ["x"],
    "--resume.dirpath": ["x"],
    "--trainer.devices": ["1"],
    "--progress.every_n_seconds": ["5"],
    "--trainer.enable_model_summary": ["false"],
    "--logger.flush_secs": ["9"],
    "--trainer.enable_checkpointing": ["true"],
    "--system.every_n_seconds": ["5"],
    "--data.batch_size": ["8"],
    "--optimizer": ["Adam"],
    "--optimizer.lr": ["0.1", "--optimizer=Adam"],
    "--trainer.max_epochs": ["2"],
    "--optimizer.weight_decay": ["0.1", "--optimizer=Adam"],
    "--optimizer.momentum": ["0.1", "--optimizer=SGD"],
    "--trainer.use_distributed_sampler": ["false"],
    "--trainer.callbacks.swa_lrs": ["0.1", "--trainer.callbacks=StochasticWeightAveraging"],
    "--trainer.callbacks": ["StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.1"],
}


class Parsed(CommandLine):
    """Parses flags and makes no objects: the machine may have no GPU."""

    def before_instantiate_classes(self) -> None:
        """Check nothing."""

    def instantiate_classes(self) -> None:
        """Make nothing."""


@pytest.fixture(autouse=True)
def no_flags_of_pytest(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)


def test_the_page_has_the_table_of_the_program():
    assert {
        flag.rpartition(".")[2].lstrip("-"): text.replace("`", "").replace("\\", "")
        for flag, text in ROWS.items()
    } == REPLACED


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "text"), ROWS.items(), ids=ROWS)
def test_what_replaced_an_old_flag_is_said(flag, text):
    with pytest.raises(UserError) as error:
        Parsed(SageMakerEnvironment(), [f"{flag}=1"], APPLICATION)
    text = text.replace("`", "").replace(chr(92), "")
    assert str(error.value) == f"{flag}: is not a flag here; {text}"


@pytest.mark.parametrize(
    "name", ["max_epochs", "deterministic", "batch_size", "val_split", "num_workers", "max_steps"]
)
def test_the_group_of_a_flag_without_one_is_suggested(name):
    says = rf"^--{name}: is not a flag here; did you mean --(trainer|data).{name}\?$"
    with pytest.raises(UserError, match=says):
        Parsed(SageMakerEnvironment(), [f"--{name}=1"], APPLICATION)


@pytest.mark.slow
def test_the_new_flags_parse():
    named = {
        flag for text in ROWS.values() for flag in re.findall(r"`(--[\w.]+(?:=[\w.-]+)?)`", text)
    }
    for flag in named:
        name, _, value = flag.partition("=")
        usual, *other_flags = VALUES.get(name, [value])
        flags = [f"{name}={usual if value in ('', 'N', 'NAME') else value}", *other_flags]
        flags.sort(key=lambda word: word.partition("=")[0])  # a class before its settings
        Parsed(SageMakerEnvironment(), flags, APPLICATION)
    assert len(named) > 20


def test_the_tutorials_command_and_hyperparameters_parse():
    (command,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    program, name, *flags = shlex.split(command.replace("\\\n", " "))
    assert (program, name) == (".venv/bin/python", "app/train.py")
    config = Parsed(SageMakerEnvironment(), flags, APPLICATION).config
    assert config.data.class_path == "app.data.CIFAR10DataModule"
    assert config.data.init_args.data_dir == ".cache"
    job = SageMakerEnvironment(channels={"training": Path("/opt/ml/input/data/training")})
    config = Parsed(
        job, [f"--{name}={value}" for name, value in DEFAULT_HYPERPARAMS.items()], APPLICATION
    ).config
    assert config.data.init_args.data_dir == "/opt/ml/input/data/training"
    assert config.optimizer.init_args.lr == 1e-3


@pytest.mark.slow
def test_the_strategies_that_were_accelerators():
    names = re.findall(
        r"`([\w=.-]+)`",
        FLAGS.rpartition("`--trainer.accelerator=ddp`")[2].partition(" are strategies")[0],
    )
    assert len(names) == 5
    for name in ("ddp", *names):
        says = f"--trainer.accelerator: found '{name}', .*use --trainer.strategy=ddp"
        with pytest.raises(UserError, match=says):
            Parsed(SageMakerEnvironment(), [f"--trainer.accelerator={name}"], APPLICATION)


def test_files_that_the_page_names_are_there():
    for name in re.findall(r"`((?:app|scripts)/[\w./]+)`", PAGE):
        assert (ROOT / name).exists() or name in ("app/train_multi_node_torchrun.py",), name


def test_a_relative_folder_of_data_is_named_as_it_was_resolved(tmp_path):
    says = f"--data.data_dir=data: {tmp_path}/data holds no CIFAR-10 .*no such folder"
    with pytest.raises(UserError, match=says):
        CIFAR10DataModule("data").load(train=True)


def test_folders_that_sagemaker_does_not_keep_are_warned_of(tmp_path, capsys):
    environment = SageMakerEnvironment(checkpoint_dir=Path("/opt/ml/checkpoints"))
    flags = [
        "--resume.dirpath=checkpoints",
        "--logger.save_dir=s3://bucket/logs",
        "--checkpoint.dirpath=/somewhere",
        "--trainer.logger=CSVLogger",
        "--trainer.logger.save_dir=logs",
    ]
    warn_of_lost_folders(Parsed(environment, flags, APPLICATION).config, environment)
    assert [line for line in capsys.readouterr().out.splitlines() if "warning" in line] == [
        f"warning: --{flag}: SageMaker keeps nothing of {tmp_path}/{flag.partition('=')[2]}; "
        "leave the flag out, or give a folder below /opt/ml/checkpoints"
        for flag in ("resume.dirpath=checkpoints", "trainer.logger.save_dir=logs")
    ]
    assert os.environ.get("SM_OUTPUT_DIR") is None
