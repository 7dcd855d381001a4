"""cli/suggestions.py: which classes a flag may name, and why a path names none."""

import re
import sys
from abc import ABC, abstractmethod

import pytest
from command_lines import (  # noqa: F401  fixtures
    cli,
    no_flags_of_pytest,
    refused,
    without_classes_of_tests,
)

from sagemaker_lightning.cli import flags, suggestions
from sagemaker_lightning.contract.errors import UserError


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


def test_the_closest_name_is_suggested():
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
    assert message.startswith(f"{flag}: found 'Nonesuch', expected ")
    assert "the import path of a subclass of" in message
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
        says = rf"^--model: found '{name}' \({reason}\), expected .*ResNet18"
        with pytest.raises(UserError, match=says):
            cli(f"--model={name}")
