"""What hooks at the start of training make: its names are read in them."""

import functools
import time
from collections import deque, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import EarlyStopping, StochasticWeightAveraging
from short_trainings import At, Line, equal, fit, interrupted, press_ctrl_c
from torch import nn
from untrained import in_epoch_5

from sagemaker_lightning.resume.parts import start_hooks
from sagemaker_lightning.state import object_graph


def trainer_of(model=None, *callbacks: Callback):
    """Return a trainer that has a model and callbacks."""
    return in_epoch_5(lightning_module=model or LightningModule(), callbacks=list(callbacks))


def make_late(module):
    module.late = nn.Linear(1, 1)


class Making(LightningModule):
    """Makes parts of it in hooks, and in what they call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1)

    def on_fit_start(self):
        self.make()

    def make(self):
        self.head = nn.Linear(1, 1)
        make_late(self)

    def on_train_start(self):
        self.tail = nn.Linear(1, 1)

    def on_train_epoch_start(self):
        self.epochs = 1

    def unused(self):
        self.other = 1


class Adding(Callback):
    def on_train_start(self, trainer, pl_module):
        pl_module.extra = nn.Linear(1, 1)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        return function(*arguments)

    return wrapper


class Decorated(LightningModule):
    @decorated
    def on_fit_start(self):
        self.head = nn.Linear(1, 1)


def test_names_that_hooks_at_the_start_mention():
    names = start_hooks.names_in_start_hooks(
        trainer_of(Making(), Adding(), StochasticWeightAveraging(0.1))
    )
    assert {"head", "late", "tail", "extra"} <= names
    assert not {"epochs", "other", "_average_model"} & names
    assert "head" in start_hooks.names_in_start_hooks(trainer_of(Decorated()))
    assert start_hooks.names_in_start_hooks(trainer_of()) == set()


class AttrDict(dict):
    """A dict whose elements are attributes; it raises KeyError for any other one."""

    __getattr__ = dict.__getitem__


settings = AttrDict(rate=0.1)


class Configured(LightningModule):
    def configure_optimizers(self):
        return torch.optim.SGD([nn.Parameter(torch.ones(1))], settings.rate)


def test_an_object_that_answers_no_name_is_asked_for_none():
    assert "settings" in start_hooks.names_in_start_hooks(trainer_of(Configured()))


Move = namedtuple("Move", "before after value is_last")


class Seen:
    """An object of a user's class that a hook makes."""

    def __init__(self, *values) -> None:
        self.values = values


class Played(Line):
    """A memory of what the first weights did, which a hook fills; a step adds to it.

    The array after a move is the one before the next, but for an episode's end, which the weights
    decide.
    """

    def __init__(self, memory, add) -> None:
        super().__init__()
        self.memory, self.add = memory, add
        self.state = np.zeros(2)

    def on_fit_start(self):
        for number in range(4):
            self.play(number)

    def on_train_batch_start(self, batch, batch_idx):
        self.play(4 + batch_idx)

    def play(self, number):
        weight = float(self.line.weight.detach())
        is_last = number == (2 if weight == 0.5 else 1)
        before, self.state = self.state, np.full(2, weight)
        self.add(self.memory, number, Move(before, self.state, weight, np.bool_(is_last)))
        if is_last:
            self.state = np.zeros(2)


def set_element(memory, number, move):
    memory[number] = move


def values_of(memory):
    """Return what a memory has, and which of its arrays are one."""
    moves = [each.values if isinstance(each, Seen) else each for each in memory]
    arrays = [part for move in moves if move for part in move if isinstance(part, np.ndarray)]
    return repr(moves), [[one is other for one in arrays] for other in arrays]


@pytest.mark.parametrize(
    ("memory", "add"),
    [
        (list, lambda memory, number, move: memory.append(move)),
        (list, lambda memory, number, move: memory.append(Seen(*move))),
        (partial(deque, maxlen=20), lambda memory, number, move: memory.append((*move,))),
        (partial(np.zeros, 20, dtype=object), set_element),
    ],
)
def test_records_of_arrays_and_numbers_that_a_hook_computes_come_back(tmp_path, memory, add):
    alone = fit(tmp_path / "alone", model=Played(memory(), add))
    with interrupted():
        fit(tmp_path / "stopped", At("batch 3", press_ctrl_c), model=Played(memory(), add))
    resumed = fit(tmp_path / "stopped", model=Played(memory(), add))
    assert values_of(resumed.memory) == values_of(alone.memory) and equal(resumed, alone)


def test_what_hooks_compute_at_the_start_is_distinguished_from_what_may_differ():
    class Starts(Callback):
        def on_fit_start(self, trainer, pl_module):
            self.anchor = {"weight": torch.ones(2)}
            self.baseline = 0.3
            self.mean = [1, None, np.float32(0.5)]
            self.folder = "/tmp"
            self.total_steps = 40
            self.first_step = trainer.global_step
            self.named = {"a": "b", "c": torch.ones(1)}
            self.data = torch.zeros((1 << 20) + 1)
            self.largest = torch.zeros(1 << 20)
            self.began = time.time()
            self.timer = {"began": time.monotonic(), "laps": 0}

    starts = Starts()
    trainer = SimpleNamespace(
        lightning_module=LightningModule(), callbacks=[starts], global_step=12, current_epoch=1
    )
    hooks = start_hooks.StartHooks(trainer)
    starts.on_fit_start(trainer, trainer.lightning_module)
    assert hooks.computed().keys() == {
        (id(starts), name) for name in ("anchor", "baseline", "mean", "first_step", "largest")
    }
    assert start_hooks.StartHooks(trainer).computed() == {}


@dataclass
class Bounds:
    """A penalty's bounds, and how many there are."""

    low: float
    number: int


class OnTrainStart(Callback):
    """Its hook sets what a test gives it."""

    def __init__(self, **values) -> None:
        self.values = (values,)

    def on_train_start(self, trainer, pl_module):
        vars(self).update(self.values[0])


def computed_by(trainer_values: dict, **values) -> set[str]:
    """Return the names of what counts as computed by hooks at the start."""
    callback = OnTrainStart(**values)
    trainer = SimpleNamespace(
        **{"lightning_module": LightningModule(), "global_step": 12, "current_epoch": 1}
        | {"callbacks": [callback]}
        | trainer_values
    )
    hooks = start_hooks.StartHooks(trainer)
    callback.on_train_start(trainer, trainer.lightning_module)
    # What is new has no name of its own there.
    return {name for _, name in hooks.computed() if name}


def test_which_numbers_follow_from_weights():
    values = {
        "complex": 1j,
        "scalar": np.float32(0.5),
        "set": {0.5, 3},
        "queue": deque([0.25]),
        "fields": Bounds(0.5, 3),
        "array": np.ones(2, np.int64),
        "mask": np.ones(2, bool),
        "epoch": 1,
        "step": 12,
    }
    others = {
        "flag": True,
        "count": 3,
        "counts": [1, 2],
        "nothing": [None],
        "empty": [],
        "text": np.array(["a"]),
        "with text": [0.5, "a"],
        "moment": np.array(["2026-01-01"], "datetime64[D]"),
    }
    assert computed_by({}, **values | others) == values.keys()


def test_the_first_elements_of_a_long_list_show_what_it_is():
    values = [0.5] * object_graph.MAX_ELEMENTS
    assert computed_by({}, first=[*values, "a"], all=[*values[1:], "a"]) == {"first"}


def test_what_is_larger_than_the_weights_is_data(monkeypatch):
    """Up to a minimum size, nothing counts as data."""
    monkeypatch.setattr(start_hooks, "MIN_ELEMENTS", 8)
    sizes = {f"of{size}": torch.zeros(size) for size in (8, 9, 12, 13)}
    sizes |= {"both": [np.zeros(4), torch.zeros(4)], "more": [np.zeros(5), torch.zeros(4)]}
    assert computed_by({}, **sizes) == {"of8", "both"}
    model = LightningModule()
    model.body = torch.nn.Linear(3, 3)
    assert computed_by({"lightning_module": model}, **sizes) == sizes.keys() - {"of13"}


@pytest.mark.parametrize("clock", ["time", "monotonic", "perf_counter", "process_time"])
def test_a_time_is_not_computed_from_weights(clock):
    class Starts(Callback):
        def on_fit_start(self, trainer, pl_module):
            now = getattr(time, clock)()
            self.began = now
            self.before = now - 1000.0
            self.later = now + 1000.0

    starts = Starts()
    trainer = SimpleNamespace(
        lightning_module=LightningModule(), callbacks=[starts], global_step=0, current_epoch=0
    )
    hooks = start_hooks.StartHooks(trainer)
    starts.on_fit_start(trainer, None)
    assert {name for _, name in hooks.computed()} == {"before", "later"}


def test_hooks_of_libraries_alone_compute_nothing():
    stopping = EarlyStopping("loss")
    trainer = SimpleNamespace(
        lightning_module=LightningModule(), callbacks=[stopping], global_step=0, current_epoch=0
    )
    hooks = start_hooks.StartHooks(trainer)
    trainer.lightning_module.anchor = torch.ones(2)
    assert hooks.computed() == {}
