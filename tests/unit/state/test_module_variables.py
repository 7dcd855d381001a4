"""Variables of the user's modules, classes and functions are compared by name."""

import contextvars
import enum
import functools
import threading

import pytest
import torch
from torch.optim import Optimizer

from sagemaker_lightning.state.graph.state import GraphState
from sagemaker_lightning.state.module_variables import (
    changed_variables,
    held_variables,
    mentioned_variables,
    variable_digests,
)


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


class Task(enum.Enum):
    """A task, whose members count."""

    FIRST = "first"
    SECOND = "second"

    def __init__(self, name):
        self.seen = 0
        self.losses = []


class Multitask:
    """Mentions the members of an enum."""

    def step(self):
        Task.FIRST.seen += 1
        Task.SECOND.losses.append(0.5)


def test_what_members_of_an_enum_count_comes_back(monkeypatch):
    model = Multitask()
    state = GraphState(lambda: held_variables(mentioned_variables({"model": model})))
    state.mark()
    model.step()
    record = state.encode()
    Task.FIRST.seen = 0
    Task.SECOND.losses.clear()
    resumed = GraphState(lambda: held_variables(mentioned_variables({"model": model})))
    resumed.mark()
    resumed.restore(record)
    assert (Task.FIRST.seen, Task.SECOND.seen, Task.SECOND.losses) == (1, 0, [0.5])
    assert Task("first") is Task.FIRST and Task.FIRST.name == "FIRST"


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


# What functions keep ------------------------------------------------------------------------------


class Pool:
    """An object of a user's."""

    def __init__(self) -> None:
        self.samples: list[int] = []


def focal() -> int:
    """Count its calls in an attribute, which it makes itself."""
    vars(focal)["calls"] = vars(focal).get("calls", 0) + 1
    return focal.calls


def noted(function):
    """Return a function that counts the calls of another one."""
    calls = 0

    @functools.wraps(function)
    def wrapper(*arguments):
        nonlocal calls
        calls += 1
        return calls, function(*arguments)

    return wrapper


def program():
    """Return a model, as a program that starts makes it."""
    vars(focal).pop("calls", None)
    pool, count = Pool(), 0

    class Local:
        def step(self, seen=[], *, rows={}):  # noqa: B006
            nonlocal count
            count += 1
            pool.samples.append(count)
            seen.append(count)
            rows[count] = focal()
            return count, pool.samples, seen, rows

        @noted
        def first(self):
            return super().__hash__() and count

        @staticmethod
        @noted
        def second():
            return count

        @property
        def third(self):
            return pool.samples

    return Local()


def state_of(model) -> GraphState:
    """Return the state of a model and of the variables that its code uses."""

    def roots():
        return {"model": model} | held_variables(mentioned_variables({"model": model}))

    state = GraphState(roots)
    state.mark()
    state.end_start()
    return state


def used(model) -> list:
    """Let a model use all that its functions keep, and return that."""
    return [model.step(), model.first(), model.first(), model.second(), list(model.third)]


def test_what_functions_keep_comes_back():
    """Closed over, in defaults, and in attributes."""
    model = program()
    state = state_of(model)
    for _ in range(3):
        used(model)
    record = state.encode()
    assert not state.unsaved
    left_alone = used(model)
    resumed = program()
    state_of(resumed).restore(record)
    assert used(resumed) == left_alone


def test_what_comes_back_of_functions_is_not_named():
    model = program()

    def digests():
        held = held_variables(mentioned_variables({"model": model}))
        return variable_digests({"model": model}, {"model": model} | held)

    before = digests()
    used(model)
    assert changed_variables(before, digests()) == []


def test_a_library_s_iterator_that_a_function_keeps_is_named():
    pairs = zip([1, 2], [3, 4], strict=True)

    class Local:
        def step(self):
            return next(pairs)

    roots = {"model": Local()} | held_variables(mentioned_variables({"model": Local()}))
    before = variable_digests(roots, roots)
    next(pairs)
    (name,) = changed_variables(before, variable_digests(roots, roots))
    assert name.endswith("Local.step.pairs")


def counting():
    """Return a function that counts."""
    count = 0

    def step(self):
        nonlocal count
        count += 1
        return count

    return step


def test_functions_that_the_same_line_has_made_keep_their_own():
    def make():
        return type("Local", (), {"first": counting(), "second": counting()})()

    model = make()
    state = state_of(model)
    model.first(), model.first(), model.second()
    state_of(resumed := make()).restore(state.encode())
    assert (resumed.first(), resumed.second()) == (3, 2)
