"""resume/same_run/code_numbers.py: which numbers of a model and its callbacks are recorded."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import DeviceStatsMonitor, EarlyStopping, LearningRateMonitor
from pytorch_lightning.callbacks.progress import TQDMProgressBar
from pytorch_lightning.cli import SaveConfigCallback
from torch import nn

from sagemaker_lightning.callbacks.rank_consistency import RankConsistency
from sagemaker_lightning.resume.same_run import code_numbers


class Part:
    """A part of a model, with a number of its class."""

    width = 5

    def __init__(self) -> None:
        self.depth = 3


SHARED = Part()


class Model(LightningModule):
    """Has what it is given as attributes."""

    def __init__(self, **values) -> None:
        super().__init__()
        vars(self).update(values)

    def shared_depth(self) -> int:
        return SHARED.depth


class Patient(Callback):
    """Has a limit."""

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit


def described(model=None, *callbacks) -> dict[str, str] | None:
    return code_numbers.describe(
        SimpleNamespace(lightning_module=model or Model(), callbacks=list(callbacks))
    )


@pytest.mark.parametrize(
    ("value", "is_compared"),
    [
        (3, True),
        (True, True),
        (-0.5, True),
        (999_999_999, True),
        ({Part(): 1}, False),  # its text has an address
        (-999_999_999, True),
        (1e9, False),
        (-1e9, False),
        (math.inf, False),
        (math.nan, True),
        ("text", False),
        (None, False),
        (np.ones(2), False),
        ([1, 2], True),
        ((1, 0.5), True),
        ({"a": 1}, True),
        ([], False),
        ([1, "a"], False),
        ({"a": "b"}, False),
        ([1e9, 1], False),
        ([1] * 64, True),
        ([1] * 65, False),
    ],
)
def test_a_number_or_a_few_of_them_are_compared(value, is_compared):
    assert ("mine of model" in described(Model(mine=value))) is is_compared


@pytest.mark.parametrize(
    "name",
    ["num_workers", "prefetch", "pin_memory", "persistent", "verbose", "log_every", "start_time"]
    + ["clock", "pid", "rank"],
)
def test_what_changes_no_result_is_not_compared(name):
    assert described(Model(**{name: 3, "width": 4})) == {"width of model": "4"}


def test_the_numbers_of_parts_are_recorded():
    """Those of classes and of code are not, nor those of a library's objects other than layers."""
    model = Model(part=Part(), made_of=Part, parts=[Part()], of_library=SimpleNamespace(items=7))
    model.layer = nn.Dropout(0.3)
    model.loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    found = described(model)
    assert found["depth of model.part"] == found["depth of model.parts.0"] == "3"
    assert found["p of model.layer"] == "0.3" and found["label_smoothing of model.loss"] == "0.1"
    for part in ("width", "items", "training", "SHARED"):
        assert not any(part in name for name in found)


def test_the_numbers_of_callbacks_are_recorded():
    """Those that only show something have none that count, nor have ours."""
    shows = [TQDMProgressBar(), LearningRateMonitor(), DeviceStatsMonitor()]
    ours = object.__new__(RankConsistency)
    ours.number = 3
    writer = object.__new__(SaveConfigCallback)
    writer.number = 3
    stops = EarlyStopping("loss", patience=7)
    found = described(None, *shows, ours, writer, Patient(3), Patient(4), stops)
    assert found["limit of callback 0 (Patient)"] == "3"
    assert found["limit of callback 1 (Patient)"] == "4"
    assert found["patience of EarlyStopping"] == "7"
    owners = {name.rpartition(" of ")[2].partition(".")[0] for name in found}
    assert owners == {"callback 0 (Patient)", "callback 1 (Patient)", "EarlyStopping"}


def test_what_was_trained_before_is_not_known():
    """The process may have changed it."""
    model, used, unused = Model(width=3), Patient(3), Patient(4)
    code_numbers.note_used(SimpleNamespace(lightning_module=model, callbacks=[used]))
    assert described(model) is None
    assert described(Model(width=3), used, unused) == {
        "width of model": "3",
        "limit of Patient": "4",
    }


def test_what_both_runs_have_is_compared():
    before = {"a of model": "1", "b of model": "2", "old of model": "3"}
    now = {"a of model": "1", "b of model": "4", "new of model": "3"}
    assert code_numbers.differences(before, now) == ["b of model was 2, is 4"]


def test_what_another_package_counts_for_itself_is_not_compared():
    """What a user has set there is: such as the alpha of an adapter."""
    package = {"__module__": "yaml"}  # any that is installed
    adapter, storage = (type(name, (), package)() for name in ("Adapter", "Storage"))
    vars(adapter).update(alpha=8, _calls=3, _storage=storage)
    storage.trials = 5
    assert described(Model(adapter=adapter)) == {"alpha of model.adapter": "8"}
    assert described(Model(_drop=nn.Dropout(0.25)))["p of model._drop"] == "0.25"
