"""Variables of the user's modules, classes and functions are compared by name."""

import torch
from torch.optim import Optimizer

from sagemaker_lightning.state.module_variables import changed_variables, variable_digests


class Lookahead(Optimizer):
    """Steps by another optimizer, and does not call its base class's __init__, as many such do."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults

    def step(self, closure=None, *, often=True):
        return self.base.step(closure)


class Counting:
    """Keeps a count in the defaults of a method."""

    def step(self, counts=[0]):  # noqa: B006
        counts[0] += 1


def test_a_wrapper_that_torch_puts_around_a_step_is_no_change():
    optimizer = Lookahead(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1))
    plain_step = Lookahead.step
    before = variable_digests({"optimizer": optimizer}, {})
    optimizer.zero_grad()
    assert Lookahead.step is not plain_step
    assert changed_variables(before, variable_digests({"optimizer": optimizer}, {})) == []


def test_a_default_that_a_method_changes_is_named():
    counting = Counting()
    before = variable_digests({"counting": counting}, {})
    counting.step()
    (name,) = changed_variables(before, variable_digests({"counting": counting}, {}))
    assert name.startswith("test_module_variables.Counting.step.")
