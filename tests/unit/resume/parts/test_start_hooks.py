"""What hooks at the start of training make: its names are read in them."""

import functools

from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch import nn
from untrained import in_epoch_5

from sagemaker_lightning.resume.parts import start_hooks


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
