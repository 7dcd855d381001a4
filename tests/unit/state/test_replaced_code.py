"""Functions and classes that come in the place of others are found by name."""

import functools

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.nn import functional

from sagemaker_lightning.state.module_variables import mentioned_variables
from sagemaker_lightning.state.replaced_code import replaced

HERE = __name__


def half(value, *rest, **options):
    return value / 2


def double(value):
    return value * 2


class Block(nn.Module):
    """A layer of a user's."""

    rate = 1.0
    act = staticmethod(torch.relu)

    def forward(self, value):
        return value

    @property
    def scale(self):
        return 1

    @classmethod
    def make(cls):
        return cls()


class Model(LightningModule):
    """Reaches code by names of each kind."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def training_step(self, batch, batch_idx):
        import math

        torch.nn.functional.dropout(functional.relu(half(batch)), 0.1)
        return nn.Linear.forward, math.sin(1)


@pytest.mark.parametrize(
    ("owner", "name", "code", "said"),
    [
        (Block, "forward", lambda self, value: -value, f"{HERE}.Block.forward"),
        (Block, "act", staticmethod(torch.tanh), f"{HERE}.Block.act"),
        (Block, "scale", property(lambda self: 2), f"{HERE}.Block.scale"),
        (Block, "make", classmethod(lambda cls: None), f"{HERE}.Block.make"),
        (functional, "dropout", half, "torch.nn.functional.dropout"),
        (nn.Linear, "forward", half, "torch.nn.modules.linear.Linear.forward"),
    ],
)
def test_code_in_the_place_of_other_code_is_named(monkeypatch, owner, name, code, said):
    places = mentioned_variables({"model": Model()}).of_code
    assert replaced(places) == []
    monkeypatch.setattr(owner, name, code)
    assert replaced(places) == [said]


def test_a_function_of_the_module_that_is_another_one_is_named(monkeypatch):
    places = mentioned_variables({"model": Model()}).of_code
    monkeypatch.setitem(Model.training_step.__globals__, "half", double)
    assert replaced(places) == [f"{HERE}.half"]


def test_what_is_the_same_code_is_not_named(monkeypatch):
    def again():
        return lambda self, value: value

    monkeypatch.setattr(Block, "forward", again())
    places = mentioned_variables({"model": Model()}).of_code
    monkeypatch.setattr(Block, "act", staticmethod(torch.relu))
    monkeypatch.setattr(Block, "forward", again())
    assert replaced(places) == []


def test_what_a_library_wraps_or_replaces_itself_is_not_named(monkeypatch):
    places = mentioned_variables({"model": Model()}).of_code
    wrapped = torch.no_grad()(Block.forward)
    assert wrapped.__globals__["__name__"].startswith("torch.")
    monkeypatch.setattr(Block, "forward", wrapped)
    monkeypatch.setattr(functional, "dropout", functional.alpha_dropout)
    assert replaced(places) == []
    monkeypatch.setattr(functional, "dropout", functools.wraps(functional.dropout)(half))
    assert replaced(places) == ["torch.nn.functional.dropout"]
