"""The names that pages import from this package, and the flags that they write, exist."""

import importlib
import re
import sys
from importlib.util import find_spec

import pytest
from pages import FENCE, PAGES

from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.cli.mistakes import KnownFlags
from sagemaker_lightning.contract.environment import SageMakerEnvironment

from app.train import APPLICATION

IMPORT = re.compile(r"^ *from (sagemaker_lightning[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
GROUPS = r"(?:trainer|resume|checkpoint|logger|progress|system|divergence)"
FLAG = re.compile(
    rf"(?<![\w-])--(?P<flag>{GROUPS}\.\w+)"
    rf"|(?<![\w.-])(?P<hyperparameter>{GROUPS}\.\w+)(?==\S|\": )"
)
"""A flag of a group that does not depend on the user's classes; as a hyperparameter, too."""
OF_THE_TUTORIAL = "docs/from-the-tutorial.md"
"""It has flags of the past. test_from_the_tutorial.py checks them."""


class Parsed(CommandLine):
    """Parses flags and makes no objects."""

    def before_instantiate_classes(self) -> None:
        """Check nothing."""

    def instantiate_classes(self) -> None:
        """Make nothing."""


def imported(text: str) -> list[tuple[str, str]]:
    """Return each (module, name) that a block of code imports from this package."""
    return [
        (module, name.split()[0])
        for module, names in IMPORT.findall(text)
        for name in names.partition("#")[0].strip("() \n").split(",")
        if name.strip()
    ]


def exists(module: str, name: str) -> bool:
    """Return whether a module has a name, or a package has a module of that name."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, name):
        return True
    return hasattr(loaded, "__path__") and find_spec(f"{module}.{name}") is not None


def unknown_flags(text: str, known: set[str]) -> list[str]:
    """Return the flags in a text that are not known."""
    written = [match["flag"] or match["hyperparameter"] for match in FLAG.finditer(text)]
    return [flag for flag in written if f"--{flag}" not in known]


def test_what_pages_import_exists():
    names = {
        (page, module, name)
        for page, content in PAGES.items()
        for _, text in FENCE.findall(content)
        for module, name in imported(text)
    }
    assert len(names) > 10
    assert not [each for each in names if not exists(*each[1:])]


@pytest.fixture
def known(monkeypatch, tmp_path) -> set[str]:
    """Return the flags of the example's program."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)
    parser = Parsed(SageMakerEnvironment(), [], APPLICATION).parser
    return set(KnownFlags(parser).flags)


def test_the_flags_of_pages_exist(known):
    flags = {
        (page, flag)
        for page, content in PAGES.items()
        if page != OF_THE_TUTORIAL
        for flag in unknown_flags(content, known)
    }
    assert not flags


def test_a_name_or_a_flag_that_does_not_exist_is_found(known):
    block = "from sagemaker_lightning import (\n    ExactResume,\n    Nothing,\n)\n"
    assert [name for name in imported(block) if not exists(*name)] == [
        ("sagemaker_lightning", "Nothing")
    ]
    text = "`--resume.every_n_minutess=2` `--resume.keep` trainer.max_epoch=1 `trainer.fit`"
    assert unknown_flags(text, known) == ["resume.every_n_minutess", "trainer.max_epoch"]
