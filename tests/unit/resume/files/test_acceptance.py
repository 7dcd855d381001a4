"""resume/files/acceptance.py: of a state, only what its object would save is loaded."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR, StepLR

from sagemaker_lightning.resume.files.acceptance import saved_part

FORGED = {"optimizer": "forged", "step": "forged"}


class Rate:
    """Computes a rate, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0

    def step(self) -> None:
        raise AssertionError


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)


def test_methods_of_an_object_in_a_scheduler_are_not_replaced(optimizer):
    scheduler = LambdaLR(optimizer, Rate())
    state = scheduler.state_dict() | FORGED | {"lr_lambdas": [{"calls": 5} | FORGED]}
    accepted = saved_part(scheduler, state)
    assert "step" not in accepted and "optimizer" not in accepted
    assert accepted["lr_lambdas"] == [{"calls": 5, "optimizer": "forged"}]


def test_a_function_in_a_scheduler_has_no_state(optimizer):
    scheduler = LambdaLR(optimizer, [lambda step: 1.0])
    assert saved_part(scheduler, scheduler.state_dict()) == scheduler.state_dict()


def test_schedulers_of_a_scheduler_keep_their_optimizer(optimizer):
    parts = [ExponentialLR(optimizer, 0.9), StepLR(optimizer, 3)]
    scheduler = SequentialLR(optimizer, parts, [4])
    state = scheduler.state_dict()
    expected = saved_part(scheduler, state)
    state["_schedulers"] = [each | FORGED for each in state["_schedulers"]]
    assert saved_part(scheduler, state | FORGED) == expected
    assert [each["last_epoch"] for each in expected["_schedulers"]] == [0, -1]


@pytest.mark.parametrize("state", [[("last_epoch", 1)], (1, 2)])
def test_a_list_is_not_a_state(optimizer, state):
    with pytest.raises(TypeError, match="expected a dict"):
        saved_part(StepLR(optimizer, 3), state)


@pytest.mark.parametrize("forged", [{"last_epoch": "1"}, {"step_size": [3]}, {"_last_lr": {}}])
def test_a_librarys_state_keeps_its_form(optimizer, forged):
    scheduler = StepLR(optimizer, 3)
    with pytest.raises(TypeError, match="found a .*, expected a"):
        saved_part(scheduler, scheduler.state_dict() | forged)
