"""Variables of the user's modules, classes and functions are compared by name."""

import contextvars
import threading

import pytest
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


history: list[float] = []
count = 0
local = threading.local()
temperature = contextvars.ContextVar("temperature")


class Model:
    """Has an attribute with the name of a variable, and reads some."""

    def __init__(self, history: list[float]) -> None:
        self.history = history
        self.same_number = count

    def step(self) -> None:
        self.history.append(0.5)
        return count, local, temperature


def test_a_variable_that_is_an_attribute_too_is_no_change():
    model = Model(history)
    before = variable_digests({"model": model}, {"model": model})
    model.step()
    assert changed_variables(before, variable_digests({"model": model}, {"model": model})) == []


def test_a_variable_that_is_another_list_than_the_attribute_is_named():
    model = Model([])
    before = variable_digests({"model": model}, {"model": model})
    history.append(1.5)
    after = variable_digests({"model": model}, {"model": model})
    assert changed_variables(before, after) == ["test_module_variables.history"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: setattr(local, "steps", 3), "local"),
        (lambda: temperature.set(0.5), "temperature"),
        (lambda: globals().update(count=1), "count"),
    ],
)
def test_what_a_thread_or_a_context_has_is_named(change, name):
    model = Model([])
    before = variable_digests({"model": model}, {"model": model})
    change()
    after = variable_digests({"model": model}, {"model": model})
    assert changed_variables(before, after) == [f"test_module_variables.{name}"]
