"""Command lines of the example, read as its program reads them."""

import sys
from dataclasses import replace

import pytest

from sagemaker_lightning.cli import suggestions
from sagemaker_lightning.cli.application import Application
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.object_graph import is_library_class

from app import train
from app.data import CIFAR10DataModule, DigitsDataModule


@pytest.fixture(autouse=True)
def no_flags_of_pytest(monkeypatch, tmp_path):
    """Have the command line of pytest read by no test, and files written in its own folder."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)


@pytest.fixture(name="only_installed_classes")
def without_classes_of_tests(monkeypatch):
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


DIGITS = Application(data=DigitsDataModule)
DIGITS_OR_CIFAR = replace(DIGITS, channel_data=CIFAR10DataModule)
