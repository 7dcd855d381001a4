"""cli/lightning_cli.py: the original's flags, precedence, classes, and mistakes.

The classes are other people's; each mistake is one line.
"""

import fractions
import logging
import re
import sys
import warnings
from abc import ABC, abstractmethod
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import EarlyStopping, TQDMProgressBar
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from sagemaker_lightning.cli import (
    default_data,
    flags,
    lightning_cli,
    mistakes,
    settings_check,
    smddp,
    suggestions,
)
from sagemaker_lightning.cli.application import Application
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.compat import jsonargparse_types
from sagemaker_lightning.contract import hyperparameters
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import divided
from sagemaker_lightning.process import allocator
from sagemaker_lightning.resume.files.best_model import BestModel
from sagemaker_lightning.state.object_graph import is_library_class

from app import train
from app.data import CIFAR10DataModule, DigitsDataModule
from app.model import ResNet18

ROOT = Path(__file__).resolve().parents[2]
TRAINER_YAML = yaml.safe_load((ROOT / "app/trainer.yaml").read_text())


@pytest.fixture(autouse=True)
def no_flags_of_pytest(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def only_installed_classes(monkeypatch):
    """Have the classes of other tests, which this process has imported, left out of lists."""
    is_made_by_flags = suggestions._is_made_by_flags
    monkeypatch.setattr(
        suggestions,
        "_is_made_by_flags",
        lambda kind: (
            is_made_by_flags(kind)
            or not (kind.__module__.startswith("app.") or is_library_class(kind))
        ),
    )


def cli(*flags: str, **environment) -> CommandLine:
    return CommandLine(SageMakerEnvironment(**environment), list(flags), train.APPLICATION)


class Parsed(CommandLine):
    """Reads and checks flags, and makes no objects of them."""

    def instantiate_classes(self) -> None:
        """Make nothing."""


def parsed(*flags: str, **environment) -> Parsed:
    """Return what the flags say, without the objects."""
    return Parsed(SageMakerEnvironment(**environment), list(flags), train.APPLICATION)


class Reader(CommandLine):
    """Reads one command line after another; to make its parser takes as long as to read them."""

    def setup_parser(self, *args) -> None:
        """Keep the parser that it has."""
        if not hasattr(self, "parser"):
            super().setup_parser(*args)
            self.callback_keys = list(self.parser.callback_keys)
        self.parser.callback_keys = list(self.callback_keys)


READER = Reader.__new__(Reader)
READER_WITHOUT_DEFAULTS = Reader.__new__(Reader)


def refused(*flags: str, has_defaults: bool = True) -> str:
    """Return the line with which the flags are refused."""
    reader, application = (
        (READER, train.APPLICATION) if has_defaults else (READER_WITHOUT_DEFAULTS, Application())
    )
    with pytest.raises(UserError) as error:
        reader.__init__(SageMakerEnvironment(), list(flags), application)
    # This application raises it: sagemaker_lightning/contract/failures.py shows only the line.
    assert error.value.__traceback__
    return str(error.value)


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
            "--config: found 'fast', which is no file in .*; expected a file$",
        ),
        (
            ["--trainer.max_epochs=3", "--lr=1"],
            "^--lr: is no flag here; .*; also --model: is needed, and not given$",
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


def test_the_flags_are_the_programs_if_nobody_gives_others(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--aaa=1", "--bbb=1"])
    with pytest.raises(UserError, match="^--aaa, --bbb: are no flags here"):
        READER.__init__(SageMakerEnvironment(), None, train.APPLICATION)


@pytest.mark.slow
def test_without_flags():
    command_line = cli()
    assert (
        type(command_line.model) is ResNet18 and type(command_line.datamodule) is DigitsDataModule
    )
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
    assert type(
        command_line.datamodule
    ) is CIFAR10DataModule and command_line.datamodule.data_dir == str(cifar)
    assert command_line.datamodule.batch_size == 64 and command_line.datamodule.num_workers == 4
    optimizer = command_line.model.configure_optimizers()
    assert type(optimizer) is torch.optim.Adam and optimizer.defaults["lr"] == 0.002
    assert command_line.trainer.max_epochs == 5 and command_line.trainer.num_devices == 1
    assert type(command_line.trainer.strategy).__name__ == "DDPStrategy"
    logger = command_line.trainer.logger
    assert (
        isinstance(logger, TensorBoardLogger)
        and logger.save_dir == "somewhere"
        and logger.name == "tutorial"
    )
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
    assert (datamodule.num_classes, datamodule.num_samples, datamodule.dims) == (
        10,
        40_000,
        (3, 32, 32),
    )


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
    assert (
        type(command_line.datamodule) is CIFAR10DataModule
        and command_line.datamodule.data_dir == "/channel"
    )
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
    assert (
        command_line.trainer.logger.save_dir == "/flag2"
        and command_line.trainer.logger._kwargs["flush_secs"] == 8
    )
    assert command_line.trainer.max_epochs == 3 and command_line.datamodule.data_dir == "/flag3"


@pytest.mark.slow
def test_the_channel_reaches_a_class_that_a_flag_names():
    command_line = cli(
        "--data=CIFAR10DataModule", "--data.batch_size=8", channels={"training": Path("/channel")}
    )
    assert (
        command_line.datamodule.data_dir == "/channel" and command_line.datamodule.batch_size == 8
    )


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
def test_a_class_is_told_what_sagemaker_says_as_far_as_it_asks(args, tmp_path):
    (tmp_path / "own.yaml").write_text("data: foreign.Data")
    (tmp_path / "settings.yaml").write_text("{class_path: foreign.Data, init_args: {size: 4}}")
    (tmp_path / "empty.yaml").touch()
    settings = {"data_dir": "/channel", "sharded": True, "size": 3}
    assert default_data.default_data(args, True, settings, train.APPLICATION) == {
        "class_path": "foreign.Data",
        "init_args": {"size": 3},
    }


ONE = Application(data=DigitsDataModule)
TWO = replace(ONE, channel_data=CIFAR10DataModule)


@pytest.mark.parametrize(
    ("application", "has_channels", "args", "name"),
    [
        (TWO, False, [], "DigitsDataModule"),
        (TWO, True, [], "CIFAR10DataModule"),
        (ONE, True, [], "DigitsDataModule"),
        (ONE, False, ["--data.data_dir=x"], "DigitsDataModule"),
        (TWO, False, ["--data.batch_size=3"], "DigitsDataModule"),
        (TWO, False, ["--data.data_dir", "x"], "CIFAR10DataModule"),
        (TWO, False, ["--data.init_args.data_dir=x"], "CIFAR10DataModule"),
        (TWO, False, ["--data={init_args: {data_dir: x}}"], "CIFAR10DataModule"),
        (TWO, False, ["--data={data_dir: x}"], "CIFAR10DataModule"),
        (Application(), True, [], None),
    ],
)
def test_the_data_without_a_class(application, has_channels, args, name):
    chosen = {"class_path": f"app.data.{name}"} if name else None
    assert default_data.default_data(args, has_channels, {}, application) == chosen
    settings = {"sharded": True}
    assert default_data.default_data(args, has_channels, settings, application) == (
        chosen and chosen | {"init_args": settings}
    )


def test_the_data_of_a_model():
    """A model with loaders of its own trains on them, and takes no settings of other data."""
    own, foreign = "--model=diverging.Diverging", "--model=foreign.Model"
    assert default_data.default_data([own], True, {}, TWO) is None
    digits = {"class_path": "app.data.DigitsDataModule"}
    assert default_data.default_data([foreign], False, {}, TWO) == digits
    assert default_data.default_data([own, "--data=DigitsDataModule"], True, {}, TWO) == (
        digits | {"init_args": {}}
    )
    with pytest.raises(UserError, match="^--data.batch_size: the model has a train_dataloader of"):
        default_data.default_data([own, "--data.batch_size=3", "--data.seed=1"], True, {}, TWO)


def test_a_class_is_told_that_its_host_has_a_part_of_the_data():
    settings = parsed(
        hosts=("a", "b"),
        current_host="a",
        channels={"training": Path("/channel")},
        sharded_channels=("training",),
    ).config.data.init_args
    assert settings.sharded and settings.data_dir == "/channel"


OWN = (
    "seed_everything: 3\ntrainer: {max_epochs: 5}\nmodel: null\n"
    "data: {class_path: x.Y, init_args: {shares: [1, 2]}}\n"
)
GIVEN = [
    (["--a", "-1", "--b=2", "--c"], [("--a", ["--a", "-1"]), ("--b", ["--b=2"]), ("--c", ["--c"])]),
    (["--a", "1", "stray"], [("--a", ["--a", "1"]), ("stray", ["stray"])]),
    (["--a", "-.5", "-x"], [("--a", ["--a", "-.5"]), ("-x", ["-x"])]),
    (["--trainer.callbacks+=X"], [("--trainer.callbacks", ["--trainer.callbacks+=X"])]),
    (["--data.init_args.size=3"], [("--data.size", ["--data.init_args.size=3"])]),
    (["--data.class_path", "x.Y"], [("--data", ["--data.class_path", "x.Y"])]),
    (["--help", "-h", "--print_config", "--model.help=X"], []),
    (
        ["--trainer", "{max_epochs: 3, zzz: null, name: x}"],
        [
            ("--trainer.max_epochs", ["--trainer.max_epochs=3"]),
            ("--trainer.zzz", ["--trainer.zzz=null"]),
            ("--trainer.name", ["--trainer.name=x"]),
        ],
    ),
    (
        ["--data={class_path: x.Y, init_args: {size: 3}}"],
        [("--data", ["--data=x.Y"]), ("--data.size", ["--data.size=3"])],
    ),
    (["--data={init_args: {size: 3}}"], [("--data.size", ["--data.size=3"])]),
    (["--data={class_path: x.Y, init_args: null}"], [("--data", ["--data=x.Y"])]),
    (
        ["--data={class_path: x.Y, size: 3}"],
        [("--data.class_path", ["--data.class_path=x.Y"]), ("--data.size", ["--data.size=3"])],
    ),
    (["--trainer={}"], [("--trainer", ["--trainer={}"])]),
    (["--trainer={broken"], [("--trainer", ["--trainer={broken"])]),
    (["--logger.name={x: 1}"], [("--logger.name", ["--logger.name={x: 1}"])]),
    (["--config=none.yaml"], [("--config", ["--config=none.yaml"])]),
]


@pytest.mark.parametrize(("args", "expected"), GIVEN, ids=[" ".join(args) for args, _ in GIVEN])
def test_a_command_line_is_split_into_its_settings(args, expected):
    assert list(flags.given(args)) == [(flag, words, "") for flag, words in expected]


@pytest.mark.parametrize("args", [["--config=own.yaml"], ["--config", "own.yaml"]])
def test_so_is_a_file_of_flags(args, tmp_path):
    (tmp_path / "own.yaml").write_text(OWN)
    assert list(flags.given(args)) == [
        (flag, [f"{flag}={value}"], " (in own.yaml)")
        for flag, value in (
            ("--seed_everything", "3"),
            ("--trainer.max_epochs", "5"),
            ("--data", "x.Y"),
            ("--data.shares", "[1, 2]"),
        )
    ]


def test_a_configuration_is_made_flat():
    assert dict(flags.flat({**yaml.safe_load(OWN), "optimizer": {}})) == {
        "--seed_everything": 3,
        "--trainer.max_epochs": 5,
        "--model": None,
        "--data": "x.Y",
        "--data.shares": [1, 2],
        "--optimizer": {},
    }


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--config=fast"], ["--config=/r/fast.yaml"]),
        (["--config", "fast", "fast"], ["--config", "/r/fast.yaml", "fast"]),
        (["--logger.name=fast", "--config=mine"], ["--logger.name=fast", "--config=mine"]),
        (["--config=", "--config"], ["--config=", "--config"]),
        (["--config=there", "--config", "there"], ["--config=there", "--config", "there"]),
    ],
)
def test_a_recipes_name_becomes_its_path_where_no_file_has_that_name(args, expected, tmp_path):
    (tmp_path / "there").touch()
    assert flags.recipes(args, {"fast": "/r/fast.yaml", "there": "/r/there.yaml"}) == expected


class Base:
    def __init__(self, a, *others, b=1, **more):
        """Take anything."""


class Passing(Base):
    def __init__(self, c, **more):
        """Pass the rest on."""


class Closed(Base):
    def __init__(self, d):
        """Take this only."""


class Unfinished(Base, ABC):
    @abstractmethod
    def finish(self):
        """Finish."""


class Finished(Unfinished):
    def finish(self):
        """Finish."""


class _Hidden(Base):
    """A class for nobody else."""


def test_the_settings_of_a_class_are_its_parents_as_far_as_it_passes_them_on():
    assert flags.settings(Passing) == ["c", "a", "b"]
    assert flags.settings(Closed) == ["d"]


def test_which_classes_may_be_chosen():
    path = f"{__name__}.Base"
    assert suggestions.choice("Finish", [path]) == (
        "Closed, Finished, Passing or the import path of a subclass of Base; did you mean Finished?"
    )
    assert suggestions.choice("x", [path, f"{__name__}.Unfinished"]) == (
        "Closed, Finished, Passing or the import path of a subclass of Base or Unfinished"
    )
    closed = suggestions.choice("x", [f"{__name__}.Closed"])
    assert closed == "the import path of a subclass of Closed"


def test_long_texts_and_lists_are_cut():
    assert suggestions.shortened("x" * 10, 10) == "x" * 10
    assert suggestions.shortened("x" * 11, 10) == "xxxxxxx..."
    assert suggestions.shown("x" * 60) == f"'{'x' * 60}'"
    assert suggestions.shown("x" * 61) == f"'{'x' * 57}...'"
    assert suggestions.first_line(ValueError("a\n  b")) == "a b"
    assert suggestions.first_line(ValueError(" ")) == "ValueError"
    assert suggestions.first_line(ValueError("x" * 151)) == f"{'x' * 147}..."
    assert suggestions.listed(["aa", "bb"], 6) == "aa, bb"
    assert suggestions.listed(["aa", "bb", "cc"], 5) == "aa and 2 more"
    assert suggestions.listed(["x" * 9], 8) == "xxxxx..."


def test_one_name_is_suggested():
    assert suggestions.closest("max_epoch", ["min_epochs", "max_epochs"]) == ["max_epochs"]
    assert suggestions.closest("x", ["min_epochs", "max_epochs"]) == []


def test_why_an_import_path_is_no_class(tmp_path, monkeypatch):
    (tmp_path / "mine_broken.py").write_text("x = (\n")
    (tmp_path / "mine_deep.py").write_text("import json\n\njson.loads('{')\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert suggestions.why_not("mine_broken.X") == " (No module named 'mine_broken')"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert suggestions.why_not("nowhere.X") == (
        f" (No module named 'nowhere', looked for in {tmp_path})"
    )
    assert suggestions.why_not("mine_broken.X").startswith(" ('(' was never closed (mine_broken.py")
    assert re.fullmatch(
        r" \(JSONDecodeError: Expecting .*, decoder.py line \d+\)",
        suggestions.why_not("mine_deep.X"),
    )
    for given in ("Adam", "a b.c", "/a/b.c", "json.JSONDecoder"):
        assert suggestions.why_not(given) == ""


@pytest.mark.slow
def test_other_peoples_classes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "support"))
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


def test_whole_numbers_of_other_peoples_classes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "support"))
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
def test_a_model_with_loaders_of_its_own_trains_on_them(channels, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "support"))
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
    with pytest.raises(
        UserError, match="--data.batch_size: the model has a train_dataloader of its own"
    ):
        cli("--model=diverging.Diverging", "--data.batch_size=3", channels=channels)
    assert (
        type(cli("--model=diverging.Diverging", "--data=DigitsDataModule").datamodule)
        is DigitsDataModule
    )


def test_equal_num_classes_are_no_contradiction():
    assert cli("--model.num_classes=10").model.hparams.num_classes == 10


@pytest.mark.slow
def test_all_settings_have_a_sentence(capsys):
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


@pytest.mark.slow
def test_the_number_of_nodes_is_the_jobs(capsys):
    hosts = {"hosts": ("algo-1", "algo-2"), "current_host": "algo-2"}
    assert (
        cli(**hosts).trainer.num_nodes == 2
        and cli("--trainer.num_nodes=2", **hosts).trainer.num_nodes == 2
    )
    assert "num_nodes" not in capsys.readouterr().out
    assert cli("--trainer.num_nodes=3", **hosts).trainer.num_nodes == 2
    assert "warning: --trainer.num_nodes=3 is ignored: the job has 2" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["--trainer.devices=-1", "--config=mine.yaml"])
def test_all_devices(how, tmp_path):
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
    """An output that is a terminal."""

    def isatty(self) -> bool:
        return True


def with_trainer(monkeypatch, environment=None, seed=True, **settings) -> SimpleNamespace:
    """Return a command line that has made its trainer, which is none."""
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


MISTAKES = [
    (
        ["--trainer.max_epoch=5"],
        "--trainer.max_epoch: is no flag here; did you mean --trainer.max_epochs?",
    ),
    (["--max_epochs=5"], "--max_epochs: is no flag here; did you mean --trainer.max_epochs?"),
    (["nonsense"], "unrecognized arguments: nonsense|nonsense: is no flag"),
    (["-k", "5"], "-k: is no flag here"),
    (["--trainer.max_epochs=five"], "--trainer.max_epochs: found 'five', expected int or null"),
    (["--trainer.max_epochs"], "--trainer.max_epochs: expected one argument"),
    (["--trainer.precision=13"], "--trainer.precision: found '13', expected .*bf16-mixed"),
    (["--trainer.accelerator=quantum"], "--trainer.accelerator: found 'quantum', .*cpu"),
    (["--trainer.strategy=nope"], "--trainer.strategy: found 'nope', .*ddp"),
    (["--trainer.devices=0"], "--trainer.devices: found '0', .*cpu"),
    (
        ["--data=CIFAR11DataModule"],
        "--data: found 'CIFAR11DataModule', .*did you mean CIFAR10DataModule",
    ),
    (["--data=my.nope.Data"], "--data: found 'my.nope.Data' .No module named 'my'"),
    (
        ["--data=json.JSONDecoder"],
        "--data: found 'json.JSONDecoder'.*subclass of LightningDataModule",
    ),
    (["--data.batch_sizes=3"], "--data.batch_sizes: .*did you mean --data.batch_size?"),
    (["--data.batch_size=0"], "--data.batch_size: found 0, expected 1 or more"),
    (["--data.shuffle=maybe"], "--data.shuffle: found 'maybe', expected bool"),
    (
        ["--data=CIFAR10DataModule", "--data.val_split=abc"],
        "--data.val_split: found 'abc', expected int or float",
    ),
    (
        ["--model.num_classes=5"],
        "--model.num_classes: found 5, but DigitsDataModule has 10 classes",
    ),
    (["--model=ResNet19"], "--model: found 'ResNet19'.*did you mean ResNet18"),
    (["--optimizer=Adamm"], "--optimizer: found 'Adamm'.*did you mean Adam"),
    (
        ["--optimizer.lr=1"],
        "^--optimizer.lr: belongs to a class that is not given; give --optimizer=NAME as well$",
    ),
    (
        ["--trainer.logger.save_dir=x"],  # the class of all loggers is abstract
        "^--trainer.logger.save_dir: belongs to a class that is not given; give --trainer.logger=",
    ),
    (
        ["--optimizer.lrr=0.1"],
        r"^--optimizer.lrr: no Optimizer has such a setting; did you mean --optimizer.lr\? ",
    ),
    (
        ["--lr_scheduler.gama=0.1"],
        r"^--lr_scheduler.gama: no .*Scheduler.* has such a setting; did you mean .*gamma\? give",
    ),
    (
        ["--optimizer.zzzzz=1"],
        "^--optimizer.zzzzz: belongs to a class that is not given; give --op",
    ),
    (["--optimizer.class_path=Adamm"], "--optimizer: found 'Adamm'.*did you mean Adam?"),
    (
        ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=x"],
        "^--lr_scheduler.step_size: found 'x', expected int$",
    ),
    (["--model=null"], "^--model: is needed, and not given$"),
    (["--optimizer=Adam", "--optimizer.lr=abc"], "--optimizer.lr: found 'abc', expected float"),
    (
        ["--optimizer=Adam", "--optimizer.learning_rate=1"],
        "--optimizer.learning_rate: Adam has no such setting",
    ),
    (["--config=/nope.yaml"], "--config: .*nope.yaml"),
    (
        ["--lr_scheduler=StepLR"],
        "--lr_scheduler: StepLR needs step_size; give --lr_scheduler.step_size",
    ),
    (
        ["--trainer max_epochs=1"],
        "--trainer max_epochs: is no flag here; did you mean --trainer.max_epochs?",
    ),
    (["--lr_scaling=linea"], "--lr_scaling: found 'linea', expected .*none.*linear.*sqrt"),
    (["--lr_scale=sqrt"], "--lr_scale: is no flag here; did you mean --lr_scaling?"),
    (
        ["--system.every_n_seconds=often"],
        "--system.every_n_seconds: found 'often', expected float",
    ),
    (
        ["--data=DigitsDataModule", "--data.sharded=true"],
        "--data.sharded: DigitsDataModule has no such setting",
    ),
    (
        ["--data=DigitsDataModule", "--data.data_dir=x"],
        "--data.data_dir: DigitsDataModule has no such setting",
    ),
    (
        ["--progress.every_n_seconds=-1"],
        "--progress.every_n_seconds: found -1.0, expected 0 or more",
    ),
    (["--system.every_n_seconds=-1"], "--system.every_n_seconds: found -1.0, expected 0 or more"),
    (["--resume.every_n_minutes=-1"], "--resume.every_n_minutes: found -1.0, expected 0 or more"),
    (
        ["--resume.every_n_minutes=.nan"],
        "--resume.every_n_minutes: found nan, expected 0 or more",
    ),
    (
        ["--trainer.log_every_n_steps=-1"],
        "--trainer.log_every_n_steps: found -1, expected 0 or more",
    ),
    (
        ["--trainer.check_val_every_n_epoch=0"],
        "--trainer.check_val_every_n_epoch: found 0, expected 1 or more",
    ),
    (
        ["--trainer.val_check_interval=0"],
        "--trainer.val_check_interval: found 0, expected a number of batches",
    ),
    (
        ["--trainer.min_epochs=3", "--trainer.max_epochs=2"],
        "--trainer.min_epochs: found 3, and --trainer.max_epochs=2 ends the training before; give",
    ),
    (["--trainer.min_epochs=21"], "--trainer.min_epochs: found 21, and --trainer.max_epochs=20 "),
    (
        ["--trainer.min_steps=3", "--trainer.max_steps=2"],
        "--trainer.min_steps: found 3, and --trainer.max_steps=2 ends the training before; give",
    ),
    *(
        ([f"--checkpoint.filename={name}"], "--checkpoint.filename: found '[^']*', which is no f")
        for name in ("{", "}", "{}", "{0}", "{val_loss:.3q}", "{val_loss:d}")
    ),
    (
        [f"--checkpoint.filename=a/{'x' * 3000}-{{epoch}}"],
        "--checkpoint.filename: found 'a/x*[.]{3}', which makes a name that no file can have, "
        "of 3013 ",
    ),
    (
        ["--trainer.val_check_interval=-1"],
        "--trainer.val_check_interval: found -1, which cannot be: .*",
    ),
    (
        ["--trainer.logger=MLFlowLogger", "--trainer.logger.tracking_uri=x"],
        "--trainer.logger: found MLFlowLogger, and mlflow is not installed here; name mlflow-s",
    ),
    (
        ["--trainer.logger=[WandbLogger,MLFlowLogger]"],
        "--trainer.logger: found WandbLogger, and wandb is .* build the image with LOGGERS=wandb",
    ),
    (["--checkpoint.mode=x"], "--checkpoint.mode: found 'x', which cannot be: `mode` can be m"),
    (
        ["--checkpoint.every_n_epochs=-1"],
        "--checkpoint.every_n_epochs: found -1, which cannot be: .*Must be >= 0",
    ),
    (
        ["--optimizer=SGD", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=0"],
        "--lr_scheduler: ZeroDivisionError: .*; found step_size=0, gamma=0.1, last_epoch=-1$",
    ),
    (
        ["--optimizer=SGD", "--optimizer.lr=-1"],
        "--optimizer: Invalid learning rate: -1.0; found lr=-1.0, momentum=0.0",
    ),
    (
        [
            "--trainer.callbacks=EarlyStopping",
            "--trainer.callbacks.monitor=x",
            "--trainer.callbacks.mode=x",
        ],
        "--trainer.callbacks: `mode` can be min, max, got x",
    ),
    (
        ["--trainer.accumulate_grad_batches=0"],
        "--trainer.accumulate_grad_batches: found 0, expected 1 or more",
    ),
    (
        ["--trainer.gradient_clip_val=-1"],
        "--trainer.gradient_clip_val: found -1, expected 0 or more",
    ),
    (
        ["--trainer.num_sanity_val_steps=-2"],
        "--trainer.num_sanity_val_steps: found -2, expected -1 or more",
    ),
    (["--data.num_workers=-1"], "--data.num_workers: found -1, expected 0 or more"),
    (["--data=foreign.Data"], "^--model.num_classes: not given, and Data does not say how many"),
    (
        ["--hosts=a", "--model_dir=b"],
        "^--hosts, --model_dir: are no flags here; leave it out: it is taken from the job$",
    ),
    (
        ["--data.num_workers=1000000"],
        "--data.num_workers: found 1000000, expected at most [0-9]+ on this machine",
    ),
    (["--logger.flush_secs=often"], "--logger.flush_secs: found 'often', expected int"),
    (["--logger.flush_secs=0"], "--logger.flush_secs: found 0, expected 1 or more"),
    (["--data.batch_size=null"], "--data.batch_size: found null, expected a value"),
    (
        ["--data.batch_size=null", "--seed_everything=-1"],
        "^--seed_everything: found -1, .*; also --data.batch_size: found null, expected a value",
    ),
    (["--data.batch_size.x=1"], "^--data.batch_size: found '1', expected int$"),
    (
        ["--data={class_path: DigitsDataModule, batch_size: 3}"],
        "^--data: found class_path beside settings; put these into init_args$",
    ),
    (["--logger={name: {x: 1}}"], r"""^--logger.name: found "{'x': 1}", expected str$"""),
    (
        ["--optimizer=Adam", "--optimizer.betas=[1,2,3]"],
        "--optimizer.betas: found .*, expected tuple with 2 elements",
    ),
    (
        ["--optimizer=Adam", "--optimizer.zzz=1"],
        "--optimizer.zzz: Adam has no such setting; it has .*betas, eps",
    ),
    (
        ["--trainer.zzz=1"],
        "--trainer.zzz: is no flag here; --trainer has accelerator, .*; see https://",
    ),
    (
        ["--zzz=1"],
        "^--zzz: is no flag here; flags are --config, .*; in groups: --trainer, --model, --data, "
        "--logger, --checkpoint, --resume, --progress, --system, --divergence$",
    ),
    (
        ["--dirpath=x"],
        "--dirpath: is no flag here; did you mean --checkpoint.dirpath or --resume.dirpath?",
    ),
    (["--batch-size=3"], "--batch-size: is no flag here; did you mean --data.batch_size?"),
    (["--data=null"], "--data: found null, but ResNet18 has no train_dataloader of its own; leave"),
    (
        ["--seed_everything=-1"],
        "--seed_everything: found -1, expected 0 to 4294967295, true or false",
    ),
    (
        ["--trainer.max_steps=9223372036854775808"],
        "--trainer.max_steps: found 9223372036854775808, expected whole ",
    ),
    (
        ["--data.batch_size=-9223372036854775809"],
        "--data.batch_size: found -92.*09, expected whole numbers of 64",
    ),
    (["--resume.every_n_minutes=1" + "0" * 400], "--resume.every_n_minutes: .*too large"),
    (
        ["--seed_everything=4294967296"],
        "--seed_everything: found 4294967296, expected 0 to 4294967295",
    ),
    (["--trainer=5"], "--trainer: found '5', expected its settings: --trainer.NAME=VALUE"),
    (['--trainer={"max_epochs":3,"zzz":1}'], "--trainer.zzz: is no flag here"),
    (
        ['--data={"class_path":"DigitsDataModule","init_args":{"batch_size":"x"}}'],
        "--data.batch_size: found 'x'",
    ),
    (["--trainer.callbacks=EarlyStopping"], "--trainer.callbacks: EarlyStopping needs monitor"),
    (
        ["--trainer.accelerator=ddp"],
        "--trainer.accelerator: found 'ddp'.*use --trainer.strategy=ddp",
    ),
    (["--zzz={}"], "--zzz: is no flag here"),
    (["--\x1b[31m={}"], r"--\\x1b\[31m: is no flag here"),
    (["--\x1b[31m=1"], r"--\\x1b\[31m: is no flag here"),
]


@pytest.mark.parametrize(
    ("flags", "says"), MISTAKES, ids=[" ".join(flags) for flags, _ in MISTAKES]
)
def test_a_mistake_is_one_line_that_names_the_flag(flags, says):
    line = refused(*flags)
    assert re.search(says, line), line
    assert "\n" not in line and len(line) < 600 and "--help" not in line


IN_A_FILE = [
    ("--trainer", "zzz: 1", "--trainer.zzz: is no flag here; --trainer has accelerator, "),
    ("--trainer", "max_epochs: x", "--trainer.max_epochs: found 'x', expected int or null"),
    (
        "--data",
        "{class_path: DigitsDataModule, init_args: {batch_size: x}}",
        "--data.batch_size: found 'x', expected int",
    ),
    (
        "--data",
        "{class_path: app.data.DigitsDataModule, init_args: {batch_size: x}}",
        "--data.batch_size: found 'x', expected int",
    ),
    (
        "--trainer.callbacks",
        "[{class_path: json.JSONDecoder}, {class_path: LearningRateMonitor}]",
        "--trainer.callbacks: found 'json.JSONDecoder', expected ",
    ),
    (
        "--trainer.callbacks",
        "[{class_path: EarlyStopping, init_args: {monitor: x, patience: y}}]",
        "--trainer.callbacks.patience: found 'y', expected int",
    ),
    ("--config", "config: others.yaml", "--zzz: is no flag here; flags are --config, "),
]


@pytest.mark.parametrize(
    ("flag", "text", "line"), IN_A_FILE, ids=[f"{flag} {text}" for flag, text, _ in IN_A_FILE]
)
def test_a_mistake_in_a_file_for_a_flag_is_named(tmp_path, flag, text, line):
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "others.yaml").write_text("zzz: 1")
    value = text if flag == "--trainer.callbacks" else "mine.yaml"
    assert refused(f"{flag}={value}").startswith(line)


# What a class may be, by the flag that chooses it.
WRONG_CLASSES = {
    "--data": ["CIFAR10DataModule", "DigitsDataModule"],
    "--model": ["ResNet18"],
    "--optimizer": ["Adam", "AdamW", "RMSprop", "SGD"],
    "--lr_scheduler": ["OneCycleLR", "StepLR", "Triangle"],
    "--trainer.logger": ["CSVLogger", "TensorBoardLogger"],
    "--trainer.callbacks": ["EarlyStopping", "LearningRateMonitor", "ModelCheckpoint"],
}


@pytest.mark.parametrize(("flag", "names"), WRONG_CLASSES.items(), ids=WRONG_CLASSES)
@pytest.mark.usefixtures("only_installed_classes")
def test_a_wrong_class_lists_those_that_are_allowed(flag, names):
    message = refused(f"{flag}=Nonesuch")
    assert (
        message.startswith(f"{flag}: found 'Nonesuch', expected ")
        and "the import path of a subclass of" in message
    )
    classes = re.split(r", | or ", message.partition("expected ")[2])
    assert set(names) <= set(classes)
    internal = {"ResidentDataModule", "ExactResume", "RankConsistency", "BestModel", "Logger"}
    assert not internal & set(classes) and not [name for name in classes if name.startswith("_")]


def test_no_class_of_ours_is_listed_that_no_flag_is_to_name():
    for path in ("loggers.logger.Logger", "callbacks.callback.Callback"):
        classes = suggestions.subclasses(f"pytorch_lightning.{path}")
        ours = {kind for kind in classes if kind.__module__.startswith("sagemaker_lightning.")}
        assert classes and not ours
    schedules = suggestions.subclasses("torch.optim.lr_scheduler.LRScheduler")
    assert "Triangle" in {kind.__name__ for kind in schedules}


@pytest.mark.slow
@pytest.mark.usefixtures("only_installed_classes")
def test_a_module_that_cannot_be_imported_says_where_it_fails(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_raises.py").write_text("\nraise RuntimeError('my bug')\n")
    (tmp_path / "mine_lacks.py").write_text("import numpy\n")
    for name, reason in {
        "mine_raises.Model": "RuntimeError: my bug, mine_raises.py line 2",
        "mine_lacks.Model": "module 'mine_lacks' has no attribute 'Model'",
        "mine_nowhere.Model": f"No module named 'mine_nowhere', looked for in {tmp_path}",
    }.items():
        with pytest.raises(
            UserError, match=rf"^--model: found '{name}' \({reason}\), expected .*ResNet18"
        ):
            cli(f"--model={name}")


def test_the_settings_are_not_printed_where_a_flag_is_wrong(capsys):
    """By the parsing that looks for what else is wrong."""
    line = refused("--trainer.max_epoch=2", "--print_config")
    assert line.startswith("--trainer.max_epoch: is no flag here")
    assert "seed_everything" not in capsys.readouterr().out


@pytest.mark.usefixtures("only_installed_classes")
def test_all_wrong_flags_are_named_at_once(tmp_path):
    line = refused(
        "--trainer.gpus=2",
        "--max_epochs=a",
        "--data=Nope",
        "--data.size=3",
        "--trainer.max_steps=b",
        "stray",
    )
    message = re.sub("expected .*? or the import path", "expected CLASSES or the import path", line)
    assert message == (  # the classes are all that this process has imported
        "--max_epochs: is no flag here; did you mean --trainer.max_epochs?; "
        "also --data: found 'Nope', expected CLASSES or the import path of a subclass "
        "of LightningDataModule; also stray: is no flag here; flags are --config, "
        "--seed_everything, --lr_scaling, --optimizer, --lr_scheduler; in groups: --trainer, "
        "--model, --data, --logger, --checkpoint, --resume, --progress, --system, --divergence; "
        "also --trainer.gpus: is no flag here; "
        "use --trainer.accelerator=gpu and --trainer.devices=N (-1: all); "
        "also --trainer.max_steps: found 'b', expected int"
    )


def test_an_error_that_names_no_flag_is_found_among_others():
    """jsonargparse only says that an int is too large to convert."""
    line = refused(
        "--trainer.max_epochs=3",
        "--zzz=1",
        f"--resume.every_n_minutes=1{'0' * 400}",
        "--trainer.max_steps=x",
        "--trainer.min_epochs=1",
    )
    assert re.search(
        "^--zzz: is no flag here; .*; also --resume.every_n_minutes: .*too large.*; "
        "also --trainer.max_steps: found 'x', expected int$",
        line,
    ), line


def test_a_class_that_lacks_what_was_wrong_is_not_named_beside_it():
    line = refused("--lr_scheduler=StepLR", "--lr_scheduler.step_size=x", "--trainer.max_steps=y")
    assert line == (
        "--lr_scheduler.step_size: found 'x', expected int; "
        "also --trainer.max_steps: found 'y', expected int"
    )


def test_a_wrong_class_is_named_and_not_a_setting_before_it():
    line = refused("--data.zzz=4", "--data=Nonesuch", "--trainer.max_steps=y")
    assert line.startswith("--data: found 'Nonesuch', ") and "zzz" not in line
    assert line.endswith("; also --trainer.max_steps: found 'y', expected int")


@pytest.fixture
def parsings(monkeypatch) -> list[int]:
    """How many settings were parsed each time that the search for mistakes parsed some."""
    parser_message = mistakes._parser_message
    numbers = []

    def count(parser, settings) -> tuple[str, bool]:
        numbers.append(len(settings))
        return parser_message(parser, settings)

    monkeypatch.setattr(mistakes, "_parser_message", count)
    return numbers


def test_thousands_of_unknown_names_are_not_parsed_one_by_one(parsings):
    names = [f"--{group}{number}=1" for number in range(1000) for group in ("a", "trainer.a")]
    line = refused(*names, "--trainer.max_steps=x", "stray")
    assert line.startswith("--a0, --a1, ") and "are no flags here" in line
    assert "--trainer.max_steps: found 'x', expected int" in line
    assert re.search(r"; also wrong: --trainer.a0, .* and 1981 more$", line), line
    assert parsings == [1, 0]


def test_the_search_for_mistakes_has_an_end(parsings):
    settings = [f"--optimizer.a{number}=1" for number in range(1000)]
    line = refused("--optimizer=Adam", *settings[:100])
    assert line.startswith("--optimizer.a0, --optimizer.a1, ") and len(line) < 960
    assert " more: Adam has no such setting; it has " in line
    assert line.endswith("; there may be more")
    assert len(parsings) == mistakes.MAX_EXPLAINED
    parsings.clear()
    assert refused("--optimizer=Adam", *settings).endswith("; there may be more")
    assert sum(parsings[:-1]) <= mistakes.MAX_PARSED < sum(parsings)


@pytest.mark.parametrize(
    ("value", "samples"), [("1e400", "inf"), (".nan", "nan"), ("1.5", "1.5"), ("-0.1", "-0.1")]
)
def test_a_fraction_for_validation_that_is_none(value, samples):
    datamodule = DigitsDataModule(**parsed(f"--data.val_split={value}").config.data.init_args)
    with pytest.raises(
        UserError,
        match=f"^--data.val_split: found {samples}, expected 1 to 99 of the 100 images",
    ):
        datamodule._splits(100)


def test_those_in_a_file_of_flags_too(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "trainer: {gpus: 2, max_steps: 3}\n"
        "data: {class_path: DigitsDataModule, init_args: {batch_size: x}}\n"
    )
    assert refused("--config=mine.yaml", "--trainer.max_epochs=a") == (
        "--trainer.gpus: is no flag here; use --trainer.accelerator=gpu and --trainer.devices=N "
        "(-1: all) (in mine.yaml); also --data.batch_size: found 'x', "
        "expected int (in mine.yaml); also --trainer.max_epochs: found 'a', "
        "expected int or null"
    )


def test_a_setting_of_a_wrong_class_is_not_named_beside_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {init_args: {zzz: 3}}")
    line = refused("--data=Nonesuch", "--config=mine.yaml", "--data.zzz=4")
    assert line.startswith("--data: found 'Nonesuch', ") and line.count("Nonesuch") == 1
    assert "also" not in line and "zzz" not in line


BROKEN_FILES = {
    "[": r"cannot be read .while parsing a flow node expected .* found .*line 1, column 2",
    "a: &a [*a]": "cannot be read .Circular",
    "a text": "has no flags",
    "": "has no flags",
    "- 1": "has no flags",
}


@pytest.mark.parametrize(("text", "reason"), BROKEN_FILES.items(), ids=BROKEN_FILES)
def test_a_broken_file_of_flags_is_named(tmp_path, text, reason):
    (tmp_path / "mine.yaml").write_text(text)
    assert re.match(
        rf"--config: 'mine.yaml' {reason}.* expected YAML.*; also --trainer.zzz: ",
        refused("--config=mine.yaml", "--trainer.zzz=3"),
    )


def test_a_file_of_flags_that_is_not_there_says_where_it_was_looked_for(tmp_path):
    line = f"--config: found 'mine.yaml', which is no file in {tmp_path}; expected a file, or one"
    assert refused("--config=mine.yaml").startswith(line)
    assert refused("--config", "mine.yaml").startswith(line)
    assert refused("--config=mine.yaml").endswith(" of accurate, cpu, fast, original")
    assert refused("--config").endswith("--config: expected one argument")
    assert re.match(
        "--config: found 'xxx.*, which is no file in", refused(f"--config={'x' * 5000}")
    )


@pytest.mark.slow
def test_any_number_of_mistakes_has_room_in_the_failure_file():
    wrong = [f"--wrong.number{number}={'x' * 2000}" for number in range(40)]
    wrong += [
        f"--{group}=Nonesuch"
        for group in ("data", "model", "optimizer", "lr_scheduler", "trainer.callbacks")
    ]
    wrong += [f"--trainer.max_epochs={'9' * 2000}x", f"--{'long' * 400}=1"]
    message = refused(*wrong)
    assert len(message) < 960 and "\n" not in message
    assert message.startswith("--data: found 'Nonesuch'") and re.search(
        r"also wrong: --\S.* and \d+ more$", message
    )


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["--a: 12345", "--b: 67890"], "--a: 12345; also --b: 67890"),
        (["--a: 12345", "--b: 678901", "--c: 3"], "--a: 12345; also --c: 3; also wrong: --b"),
        ([f"--a: {'x' * 15}"], f"--a: {'x' * 15}"),
        ([f"--a: {'x' * 16}", "--b: 1"], f"--a: {'x' * 12}...; also wrong: --b"),
    ],
)
def test_the_line_has_as_many_messages_as_there_is_room_for(monkeypatch, lines, text):
    monkeypatch.setattr(mistakes, "MAX_CHARACTERS", 120)  # 100 of them for the flags left out
    assert mistakes._join_lines(lines) == text


def numbers(**values) -> Namespace:
    """Return a configuration with these settings."""
    config = Namespace()
    config["trainer"] = Namespace(
        accelerator="cpu", logger=None, num_nodes=1, val_check_interval=None
    )
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
def test_one_of_two_channels_is_nobodys_guess(channels, chosen, data_dir, is_refused):
    environment = SageMakerEnvironment(channels=dict.fromkeys(["a", "b"][:channels], Path("/x")))
    data = chosen and Namespace(
        class_path=f"app.data.{chosen.__name__}", init_args=Namespace(data_dir=data_dir)
    )
    try:
        settings_check.check(numbers(data=data), environment, TWO)
        assert not is_refused
    except UserError as error:
        assert is_refused and str(error).startswith(
            "--data.data_dir: found the channels a, b; name"
        )


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


class Nullable:
    def __init__(
        self,
        required: int,
        either: int | None,
        other=3,
        anything: Any = 3,
        number: int = 3,
        none: int = None,
    ):
        """Take numbers."""


class Hinted:
    def __init__(self, number: "Unknown" = 3, **more):  # noqa: F821
        """Take what no module has."""


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [("required", True), ("either", True), ("other", True), ("anything", True), ("number", False)]
    + [("none", True), ("unheard_of", True)],
)
def test_where_null_is_allowed(name, is_allowed):
    config = Namespace(
        model=Namespace(class_path=f"{__name__}.Nullable", init_args=Namespace({name: None})),
        logger=Namespace(name=None),
        data=None,
    )
    assert mistakes.unwanted(config) == (
        ""
        if is_allowed
        else f"--model.{name}: found null, expected a value; leave it out for its default"
    )
    config.model.class_path = f"{__name__}.Hinted"
    assert mistakes.unwanted(config) == ""


@pytest.mark.parametrize("number", [0, 2**32 - 1, True, False, None])
def test_the_seeds_that_are_allowed(number):
    assert mistakes.unwanted(Namespace(seed_everything=number)) == ""


def test_the_largest_whole_numbers():
    for number in (2**63 - 1, -(2**63), 1e300):
        assert mistakes.unwanted(Namespace(model=Namespace(init_args=Namespace(a=number)))) == ""
    for number, text in ((2**63, str(2**63)), (10**99, f"1{'0' * 56}...")):
        assert mistakes.unwanted(Namespace(model=Namespace(init_args=Namespace(a=number)))) == (
            f"--model.a: found {text}, expected whole numbers of 64 bits"
        )


def frames(*names: str) -> list[tuple]:
    """Return stand-ins of the frames of modules with these names."""
    return [(SimpleNamespace(f_globals={"__name__": name}), 1) for name in names]


OURS = "sagemaker_lightning.cli.lr_schedules"


@pytest.mark.parametrize(
    ("names", "is_named"),
    [
        (["torch.optim.adam"], True),
        (["json", "jsonargparse", "lightning.fabric"], True),
        ([OURS, "torch.optim.adam"], True),
        (["sagemaker_lightning.compat.lightning_loops", "pytorch_lightning"], True),
        ([], False),
        (["torch.optim.adam", OURS], False),
        (["torch", "sagemaker_lightning.compat.lightning_loops"], False),
        (["mine", "torch.optim.adam"], False),
        (["torchmetrics", "torch"], False),
        (["sagemaker_lightning.resume.callback", "torch"], False),
    ],
)
def test_an_error_is_about_a_flag_if_no_code_of_a_user_is_in_its_way(names, is_named):
    error = ValueError("no luck")
    raised = mistakes.named("--x", {}, error, frames(*names))
    if is_named:
        assert type(raised) is UserError and str(raised) == "--x: no luck"
    else:
        assert raised is error
    own = UserError("ours")
    assert mistakes.named("--x", {}, own, frames(*names)) is own


LETTERS = {"a": 1, "b": [2], "c": "x", "d": 0.5, "e": None}
ERRORS = [
    (ValueError("no\n luck"), {}, "--x: no luck"),
    (MisconfigurationException("no luck"), {}, "--x: no luck"),
    (KeyError("k"), {}, "--x: KeyError: 'k'"),
    (ValueError(), {}, "--x: ValueError"),
    (TypeError("no luck"), LETTERS, "--x: TypeError: no luck; found a=1, c=x, d=0.5"),
    (ValueError("no"), {"class_path": "y", "init_args": {"a": 1}}, "--x: no; found a=1"),
    (ValueError("no"), {"class_path": "y", "init_args": {}}, "--x: no; found class_path=y"),
    (ValueError("`lr` is bad"), {"lr": -1, "l": 2}, "--x.lr: found -1, which cannot be: `lr` is b"),
    (ValueError("a b: lr = 3"), {"a": 1, "lr": 3}, "--x.lr: found 3, which cannot be: a b"),
    (ValueError("`a` of b"), {"a": 1, "b": "3"}, "--x.a: found 1, which cannot be: `a` of b"),
    (ValueError("mode is odd"), {"mode": "m"}, "--x.mode: found 'm', which cannot be: mode is odd"),
    (ValueError("a or b"), {"a": 1, "b": 3}, "--x: a or b; found a=1, b=3"),
    (ValueError("y" * 501), {}, f"--x: {'y' * 497}..."),
    (ValueError(f"a={'y' * 600}"), {"a": 1}, f"--x.a: found 1, which cannot be: a={'y' * 595}..."),
    (ValueError("no"), {"a": "y" * 198, "b": 1}, f"--x: no; found a={'y' * 198} and 1 more"),
]


@pytest.mark.parametrize(
    ("error", "settings", "line"), ERRORS, ids=[str(e[0])[:20] for e in ERRORS]
)
def test_an_error_about_settings_names_their_flag(error, settings, line):
    assert str(mistakes.named("--x", settings, error, frames("torch"))).startswith(line)


def test_an_error_of_code_that_does_more_is_left_without_the_flag():
    error = MisconfigurationException("no luck")
    settings = {"a": 1}
    line = mistakes.named("--x", settings, error, frames("torch"), mistakes.MISCONFIGURED)
    assert str(line) == "no luck"
    error = MisconfigurationException("`a` is bad")
    line = mistakes.named("--x", settings, error, frames("torch"), mistakes.MISCONFIGURED)
    assert str(line) == "--x.a: found 1, which cannot be: `a` is bad"


def test_the_frames_of_naming_itself_do_not_count():
    with (
        pytest.raises(UserError, match="^--x: Invalid literal for Fraction: 'y'"),
        mistakes.naming("--x", {}),
    ):
        fractions.Fraction("y")
    with (
        pytest.raises(ValueError, match="^Invalid literal"),
        mistakes.naming("--x", {}, mistakes.MISCONFIGURED),
    ):
        fractions.Fraction("y")


def test_an_error_of_somebodys_code_keeps_its_cause():
    cause = KeyError("k")
    with pytest.raises(ValueError, match="^mine$") as raised, mistakes.naming("--x", {}):
        raise ValueError("mine") from cause
    assert raised.value.__cause__ is cause


def test_an_error_that_is_about_no_flag_stays_as_it_is():
    """Whoever chose the settings has nothing to do with it."""
    try:
        fractions.Fraction("y")
    except ValueError as error:
        of_a_library = error.with_traceback(error.__traceback__.tb_next)
    assert mistakes.of_a_component(of_a_library, Namespace()) is of_a_library
    with pytest.raises(ModuleNotFoundError, match="comet"):
        cli("--trainer.logger=CometLogger")


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
def test_in_a_drill_the_folders_are_the_drills(tmp_path):
    drill = {"folder": str(tmp_path), "reached": str(tmp_path / "reached")}
    drill |= {"epochs": 1, "steps": 1, "moment": None, "workers": None}
    command_line = cli(
        *(f"--{name}=/mine" for name in ("checkpoint.dirpath", "logger.save_dir")),
        "--resume.dirpath=/mine",
        "--trainer.default_root_dir=/mine",
        drill=drill,
        checkpoint_dir=tmp_path / "c",
    )
    assert str(command_line.trainer.checkpoint_callback.dirpath) == str(tmp_path / "c")
    assert command_line.trainer.logger.save_dir == str(tmp_path / "c/tensorboard/localhost")
    assert str(command_line.resume.folder.path) == str(tmp_path / "c")
    assert command_line.trainer.default_root_dir == str(tmp_path)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["gpu", "cuda"])
def test_a_gpu_on_a_machine_without_one(name):
    line = refused(f"--trainer.accelerator={name}")
    assert line.startswith(f"--trainer.accelerator={name}: this machine has no GPU")


@pytest.mark.slow
def test_smddp_where_the_package_is_not_installed():
    with pytest.raises(
        UserError,
        match=r"^--trainer.strategy=smddp: the package smdistributed is not in this image .* use",
    ):
        cli("--trainer.strategy=smddp")


def test_smddp_where_it_is(tmp_path, monkeypatch):
    """A stand-in for AWS's package only records that it was imported.

    AWS's own package registers the backend when it is imported.
    """
    module = tmp_path / "packages/smdistributed/dataparallel/torch/torch_smddp"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("REGISTERED = True\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for name, value in (("WORLD_SIZE", "16"), ("RANK", "9"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    strategy = smddp.strategy()
    assert sys.modules["smdistributed.dataparallel.torch.torch_smddp"].REGISTERED
    assert strategy.process_group_backend == "smddp"
    assert (
        strategy.cluster_environment.world_size(),
        strategy.cluster_environment.global_rank(),
    ) == (16, 9)
    for name in [name for name in sys.modules if name.startswith("smdistributed")]:
        del sys.modules[name]
