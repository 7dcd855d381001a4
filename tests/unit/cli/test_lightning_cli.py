"""cli/lightning_cli.py: the original's flags, their precedence, other people's classes."""

import logging
import re
import sys
import warnings
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from command_lines import (  # noqa: F401  fixtures
    READER,
    cli,
    no_flags_of_pytest,
    parsed,
    refused,
)
from containers import ROOT
from jsonargparse import Namespace
from pytorch_lightning.callbacks import EarlyStopping, TQDMProgressBar
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from sagemaker_lightning.cli import lightning_cli, smddp
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.compat import jsonargparse_types
from sagemaker_lightning.contract import hyperparameters
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import divided
from sagemaker_lightning.process import allocator
from sagemaker_lightning.resume.files.best_model import BestModel

from app import train
from app.data import CIFAR10DataModule, DigitsDataModule
from app.model import ResNet18

TRAINER_YAML = yaml.safe_load((ROOT / "app/trainer.yaml").read_text())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--model: is needed, and not given"),
        (
            ["--model=foreign.Model"],
            "--data: found null, but Model has no train_dataloader of its own",
        ),
        (
            ["--model=foreign.Model", "--config=fast"],
            "--config: found 'fast', which is not a file in .*; expected a file$",
        ),
        (
            ["--trainer.max_epochs=3", "--lr=1"],
            "^--lr: is not a flag here; .*; also --model: is needed, and not given$",
        ),
    ],
)
def test_a_program_without_defaults_says_what_it_needs(flags, says):
    line = refused(*flags, has_defaults=False)
    assert re.search(says, line), line


def test_the_settings_of_the_program_are_read_and_what_nobody_set_is_known_too():
    command_line = parsed()
    assert command_line.config.logger.flush_secs == TRAINER_YAML["logger"]["flush_secs"]
    assert command_line.given["--logger.flush_secs"] == TRAINER_YAML["logger"]["flush_secs"]
    assert command_line.given["--trainer.max_time"] is None


def test_the_process_is_prepared_before_the_flags_are_read(monkeypatch):
    prepared = []
    for module, name in (
        (lightning_cli, "_silence_warnings"),
        (jsonargparse_types, "keep_whole_numbers"),
        (allocator, "keep_freed_memory"),
    ):
        monkeypatch.setattr(module, name, lambda name=name: prepared.append(name))
    refused("--zzz=1")
    assert prepared == [
        "_silence_warnings",
        "keep_whole_numbers",
        "keep_freed_memory",
    ]


def test_the_flags_are_those_of_sys_argv_by_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--aaa=1", "--bbb=1"])
    with pytest.raises(UserError, match="^--aaa, --bbb: are not flags here"):
        READER.__init__(SageMakerEnvironment(), None, train.APPLICATION)


@pytest.mark.slow
def test_the_defaults_without_flags():
    command_line = cli()
    assert type(command_line.model) is ResNet18
    assert type(command_line.datamodule) is DigitsDataModule
    assert command_line.model.hparams.num_classes == 10
    assert command_line.trainer.max_epochs == TRAINER_YAML["trainer"]["max_epochs"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["{}={}", "{} {}"])
def test_every_flag_of_the_original(shape, cifar):
    flags = {
        "--data": "CIFAR10DataModule",
        "--data.data_dir": str(cifar),
        "--data.batch_size": "64",
        "--data.num_workers": "4",
        "--optimizer": "Adam",
        "--optimizer.lr": "0.002",
        "--trainer.accelerator": "cpu",
        "--trainer.devices": "-1",
        "--trainer.max_epochs": "5",
        "--trainer.strategy": "ddp",
        "--logger.save_dir": "somewhere",
        "--logger.name": "tutorial",
        "--logger.flush_secs": "7",
    }
    command_line = cli(*" ".join(shape.format(*flag) for flag in flags.items()).split())
    assert type(command_line.datamodule) is CIFAR10DataModule
    assert command_line.datamodule.data_dir == str(cifar)
    assert command_line.datamodule.batch_size == 64 and command_line.datamodule.num_workers == 4
    optimizer = command_line.model.configure_optimizers()
    assert type(optimizer) is torch.optim.Adam and optimizer.defaults["lr"] == 0.002
    assert command_line.trainer.max_epochs == 5 and command_line.trainer.num_devices == 1
    assert type(command_line.trainer.strategy).__name__ == "DDPStrategy"
    logger = command_line.trainer.logger
    assert isinstance(logger, TensorBoardLogger)
    assert logger.save_dir == "somewhere"
    assert logger.name == "tutorial"
    assert logger._kwargs["flush_secs"] == 7


def test_the_defaults_of_the_data_module_are_the_originals():
    """Except num_workers and pin_memory, which have no effect: None means that nobody set them."""
    datamodule = CIFAR10DataModule()
    expected = {
        "data_dir": None,
        "val_split": 10000,
        "num_workers": None,
        "normalize": True,
        "batch_size": 32,
    }
    expected |= {"seed": 42, "shuffle": True, "pin_memory": None, "drop_last": False}
    assert {name: getattr(datamodule, name) for name in expected} == expected
    assert datamodule.num_classes == 10
    assert datamodule.num_samples == 40_000
    assert datamodule.dims == (3, 32, 32)


@pytest.mark.slow
def test_the_order_of_precedence(tmp_path, monkeypatch):
    """Class default < SageMaker's directories < trainer.yaml < flags.

    Each is tested against the one below it.
    """
    directories = {
        "channels": {"training": Path("/channel")},
        "output_data_dir": Path("/logs"),
        "checkpoint_dir": Path("/checkpoints"),
        "hosts": ("a", "b"),
        "current_host": "a",
    }
    command_line = cli("--trainer.strategy=ddp", "--trainer.accelerator=cpu", **directories)
    # The class's own default is None.
    assert type(command_line.datamodule) is CIFAR10DataModule
    assert command_line.datamodule.data_dir == "/channel"
    assert command_line.trainer.num_nodes == 2  # class: 1
    assert command_line.trainer.logger.save_dir == "/checkpoints/tensorboard/a"
    assert str(command_line.trainer.checkpoint_callback.dirpath) == "/checkpoints"  # class: None
    assert (
        command_line.trainer.checkpoint_callback.monitor == "val_loss"
    )  # trainer.yaml; class: None
    # The class's own default is 120.
    assert command_line.trainer.logger._kwargs["flush_secs"] == TRAINER_YAML["logger"]["flush_secs"]

    config = TRAINER_YAML | {
        "checkpoint": {"dirpath": "/from/yaml"},
        "logger": {"save_dir": "/yaml", "flush_secs": 9},
    }
    (tmp_path / "trainer.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(
        train, "APPLICATION", replace(train.APPLICATION, settings=tmp_path / "trainer.yaml")
    )
    command_line = cli(**directories | {"hosts": ("a",)})
    assert str(command_line.trainer.checkpoint_callback.dirpath) == "/from/yaml"
    assert command_line.trainer.logger.save_dir == "/yaml"

    flags = [
        "--checkpoint.dirpath=/flag",
        "--logger.save_dir=/flag2",
        "--logger.flush_secs=8",
        "--trainer.max_epochs=3",
    ]
    command_line = cli(*flags, "--data.data_dir=/flag3", **directories | {"hosts": ("a",)})
    assert str(command_line.trainer.checkpoint_callback.dirpath) == "/flag"
    assert command_line.trainer.logger.save_dir == "/flag2"
    assert command_line.trainer.logger._kwargs["flush_secs"] == 8
    assert command_line.trainer.max_epochs == 3 and command_line.datamodule.data_dir == "/flag3"


@pytest.mark.slow
def test_the_channel_reaches_a_class_that_a_flag_names():
    command_line = cli(
        "--data=CIFAR10DataModule", "--data.batch_size=8", channels={"training": Path("/channel")}
    )
    assert command_line.datamodule.data_dir == "/channel"
    assert command_line.datamodule.batch_size == 8


@pytest.mark.slow
def test_flags_name_classes_of_other_packages():
    command_line = cli(
        "--model=foreign.Model", "--model.width=5", "--data=foreign.Data", "--data.size=16"
    )
    assert command_line.model.layers[0].out_features == 5 and command_line.datamodule.size == 16
    # The model's own optimizer, as no flag names another.
    assert type(command_line.model.configure_optimizers()) is torch.optim.SGD
    assert cli("--data=foreign.Data", "--model.num_classes=2").model.hparams.num_classes == 2


FRACTION_FLAGS = [
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "val_check_interval",
    "overfit_batches",
]
SENT_AND_READ = [(1, 1), ("1", 1), ('"1"', 1), (2, 2), (1.0, 1.0), ("1.0", 1.0), ("0.5", 0.5)]


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "number"), SENT_AND_READ, ids=repr)
def test_one_batch_is_not_all_batches(sent, number, tmp_path):
    """As a flag, as a hyperparameter of every client, and in a file.

    What is written of the value says the same.
    """
    command_line = cli(
        *hyperparameters.flags({f"trainer.{name}": sent for name in FRACTION_FLAGS[:-1]})
    )
    assert {repr(getattr(command_line.trainer, name)) for name in FRACTION_FLAGS[:-1]} == {
        repr(number)
    }
    command_line = cli(*hyperparameters.flags({f"trainer.{name}": sent for name in FRACTION_FLAGS}))
    (tmp_path / "written.yaml").write_text(
        command_line.parser.dump(command_line.config, skip_none=False)
    )
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump({"trainer": dict.fromkeys(FRACTION_FLAGS, number)})
    )
    for config in (
        command_line.config,
        *(cli(f"--config={name}.yaml").config for name in ("written", "own")),
    ):
        assert {repr(config.trainer[name]) for name in FRACTION_FLAGS} == {repr(number)}


def test_whole_numbers_stay_whole_in_classes_of_other_packages():
    flags = ["--model.share=1", "--model.shares=[1, 1.0, 2]", "--model.name=1", "--model.rate=1"]
    config = parsed("--data=foreign.Data", "--model=foreign.Shares", *flags).config.model.init_args
    assert (
        repr([config.share, config.shares, config.name, config.rate])
        == "[1, [1, 1.0, 2], '1', 1.0]"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "content"),
    [
        (["--data.data_dir=DIR"], {}),
        (["--data.data_dir", "DIR", "--data.batch_size=8"], {}),
        (["--config=own.yaml"], {"data": {"init_args": {"data_dir": "DIR"}}}),
        (["--data={data_dir: DIR}"], {}),
    ],
)
def test_a_folder_of_data_is_read_and_not_ignored(flags, content, cifar, tmp_path):
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content).replace("DIR", str(cifar)))
    command_line = cli(*(flag.replace("DIR", str(cifar)) for flag in flags))
    assert type(
        command_line.datamodule
    ) is CIFAR10DataModule and command_line.datamodule.data_dir == str(cifar)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [{}, {"training": Path("/channel")}])
def test_a_model_with_loaders_of_its_own_trains_on_them(channels, tmp_path):
    command_line = cli("--model=diverging.Diverging", "--model.how=", channels=channels)
    assert command_line.datamodule is None
    (tmp_path / "config.yaml").write_text(
        command_line.parser.dump(command_line.config, skip_none=False)
    )
    again = cli("--config=config.yaml", channels=channels)
    assert type(again.model) is type(command_line.model) and again.datamodule is None
    again.trainer.fit_loop.max_epochs = 1
    # A loader of this kind is as exact as a data module's, while the training lasts.
    shared_out = []
    again.model.on_train_epoch_end = lambda: shared_out.append(
        divided(again.trainer.train_dataloader)
    )
    again.trainer.fit(again.model)
    assert again.trainer.global_step == 8 and shared_out[0]


def test_num_classes_may_equal_those_of_the_data():
    assert cli("--model.num_classes=10").model.hparams.num_classes == 10


@pytest.mark.slow
def test_the_help_explains_each_setting(capsys):
    for flag in ("--help", "--data.help=CIFAR10DataModule", "--model.help=ResNet18"):
        with pytest.raises(SystemExit) as leaving:
            cli(flag)
        assert leaving.value.code == 0
    text = capsys.readouterr().out
    for name in (
        "val_split",
        "num_workers",
        "seed",
        "shuffle",
        "drop_last",
        "every_n_seconds",
        "flush_secs",
        "download",
        "sharded",
        "lr_scaling",
    ):
        help_text = text.partition(name)[2].partition("\n--")[0]
        assert len(help_text.split()) > 5, name


@pytest.mark.parametrize("how", ["--trainer.devices=-1", "--config=mine.yaml"])
def test_devices_of_minus_1_are_all_devices(how, tmp_path):
    """On a CPU, where Lightning refuses -1, too."""
    (tmp_path / "mine.yaml").write_text("trainer: {devices: -1}")
    assert parsed(how, "--trainer.accelerator=cpu").config.trainer.devices == "auto"


def test_a_strategy_that_copies_this_process_starts_the_program_for_each_rank():
    flags = ["--trainer.strategy=DDPStrategy", "--trainer.strategy.start_method=fork"]
    assert parsed(*flags).config.trainer.strategy.init_args.start_method == "popen"


def test_in_a_drill_the_folders_of_flags_are_the_drills(tmp_path):
    config = parsed(
        "--checkpoint.dirpath=/mine",
        "--logger.save_dir=/mine",
        "--trainer.default_root_dir=/mine",
        drill={"folder": "x"},
        checkpoint_dir=tmp_path,
    ).config
    assert config.checkpoint.dirpath == str(tmp_path)
    assert config.logger.save_dir == f"{tmp_path}/tensorboard/localhost"
    assert config.trainer.default_root_dir is None


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def with_trainer(monkeypatch, environment=None, seed=True, **settings) -> SimpleNamespace:
    """Return a command line that has made its trainer, a stand-in."""
    command_line = CommandLine.__new__(CommandLine)
    command_line.environment = environment or SageMakerEnvironment()
    command_line.stop, command_line.given, command_line.trainer_defaults = None, {"--a": 1}, {}
    command_line.config = Namespace(seed_everything=seed, lr_scaling="sqrt", trainer=Namespace())
    trainer = {"callbacks": None, "enable_checkpointing": None, "strategy": "auto", "logger": None}
    command_line.config_init = Namespace(
        trainer=Namespace(**trainer | settings, enable_progress_bar=None),
        logger="the logger",
        resume=Namespace(dirpath="/c"),
        checkpoint=BestModel(dirpath="/c"),
    )
    command_line.parser = SimpleNamespace(callback_keys=["checkpoint", "progress"])
    command_line.evaluating = []
    monkeypatch.setattr(
        lightning_cli.LightningCLI, "instantiate_trainer", lambda self, **settings: settings
    )
    monkeypatch.setattr(
        lightning_cli,
        "evaluate_everything_on_each_rank",
        lambda trainer: command_line.evaluating.append(trainer),
    )
    monkeypatch.setattr(
        lightning_cli, "ExactResume", lambda **settings: SimpleNamespace(**settings)
    )
    command_line.trainer = command_line.instantiate_trainer(max_epochs=3)
    return command_line


def test_the_trainer_resumes_exactly_and_evaluates_on_each_rank(monkeypatch):
    command_line = with_trainer(monkeypatch)
    assert command_line.trainer == {"max_epochs": 3}
    assert command_line.evaluating == [command_line.trainer]
    assert command_line.trainer_defaults["callbacks"] == [command_line.resume]
    assert vars(command_line.resume) == {
        "dirpath": "/c",
        "seed": None,
        "lr_scaling": "sqrt",
        "settings": {"--a": 1},
        "saves": True,
        "environment": command_line.environment,
        "stop": None,
    }
    for seed, number in ((0, 0), (7, 7), (False, None), (None, None)):
        assert with_trainer(monkeypatch, seed=seed).resume.seed == number


@pytest.mark.parametrize(
    ("output", "host", "callbacks", "has_bar", "has_lines"),
    [
        (StringIO(), "localhost", None, False, True),
        (StringIO(), "localhost", [EarlyStopping("x"), TQDMProgressBar()], True, True),
        (StringIO(), "localhost", TQDMProgressBar(), True, True),
        (Terminal(), "localhost", None, None, False),
        (Terminal(), "algo-1", None, False, True),
    ],
)
def test_a_terminal_has_a_progress_bar_and_a_log_has_lines(
    monkeypatch, output, host, callbacks, has_bar, has_lines
):
    """In a job, the terminal of SDK 2's local mode shows complete lines only."""
    environment = SageMakerEnvironment(hosts=(host,), current_host=host)
    monkeypatch.setattr(sys, "stdout", output)
    command_line = with_trainer(monkeypatch, environment, callbacks=callbacks)
    # None leaves it to Lightning, which has one.
    assert command_line.config_init.trainer.enable_progress_bar is has_bar
    assert ("progress" in command_line.parser.callback_keys) == has_lines


@pytest.mark.parametrize(("enabled", "saves"), [(None, True), (True, True), (False, False)])
def test_without_checkpoints_nothing_is_saved(monkeypatch, enabled, saves):
    command_line = with_trainer(monkeypatch, enable_checkpointing=enabled)
    assert command_line.resume.saves == saves
    assert ("checkpoint" in command_line.parser.callback_keys) == saves


@pytest.mark.parametrize(
    ("given", "logger"),
    [(None, "the logger"), (True, "the logger"), (False, False), (["another"], ["another"])],
)
def test_the_logger_is_ours_unless_a_flag_says_another(monkeypatch, given, logger):
    assert with_trainer(monkeypatch, logger=given).config_init.trainer.logger == logger


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ddp_spawn", "ddp"),
        ("ddp_fork_find_unused_parameters_true", "ddp_find_unused_parameters_true"),
        ("ddp_notebook", "ddp"),
        ("smddp", "the strategy of AWS"),
        ("fsdp", "fsdp"),
        (SingleDeviceStrategy(), None),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_strategy_of_the_trainer(monkeypatch, capsys, name, expected, rank):
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    monkeypatch.setattr(smddp, "strategy", lambda: "the strategy of AWS")
    command_line = with_trainer(monkeypatch, strategy=name)
    assert command_line.config_init.trainer.strategy == (expected or name)
    is_other = str(name).startswith("ddp_") and rank == 0
    line = f"--trainer.strategy={name}: runs as {expected}, which computes the same\n"
    assert capsys.readouterr().out == (line if is_other else "")


def test_torchruns_processes_are_the_devices():
    """A person starts them, on a CPU.

    Lightning's own default is one process there, which trains by itself.
    """
    config = parsed("--trainer.accelerator=cpu", torchrun=(2, 6)).config
    assert (config.trainer.devices, config.trainer.num_nodes) == (2, 3)


def test_warnings_that_a_user_cannot_act_on_are_not_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        lightning_cli._silence_warnings()
        for text in (
            "`Model.configure_optimizers` will be overridden by `Line.configure_optimizers`.",
            "LightningCLI's args parameter is intended to run from within Python",
            "`isinstance(treespec, LeafSpec)` is deprecated",
            "mine",
        ):
            warnings.warn(text, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["mine"]


@pytest.mark.slow
def test_lightnings_advice_and_its_warnings_about_us_are_not_shown(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--optimizer=SGD", "--config=cpu"])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        CommandLine(SageMakerEnvironment(), None, train.APPLICATION)
    texts = [str(warning.message) for warning in shown]
    assert not [text for text in texts if "overridden" in text or "args parameter" in text]
    logger = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    for text, is_shown in (("Tip: buy more", False), ("GPU available: False", True)):
        record = logging.LogRecord("x", logging.INFO, "", 0, text, None, None)
        assert bool(logger.filter(record)) == is_shown


@pytest.mark.slow
def test_what_was_given_is_known_with_what_was_not(tmp_path):
    command_line = cli(
        "--trainer.logger=true",
        "--seed_everything=false",
        "--logger.save_dir=mine",
        "--lr_scaling=sqrt",
        current_host="algo-2",
    )
    assert command_line.trainer.logger.save_dir == "mine"
    assert command_line.config.system.host == "algo-2"
    given = command_line.given
    assert given["--trainer.max_time"] is None and given["--seed_everything"] is False
    assert given["--data"] == "app.data.DigitsDataModule" and given["--data.batch_size"] == 32
    assert given["--lr_scaling"] == "sqrt" and given["--optimizer"] is None
