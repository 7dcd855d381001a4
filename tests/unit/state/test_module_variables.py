"""Variables of the user's modules, classes and functions are compared by name."""

import contextlib
import contextvars
import enum
import functools
import itertools
import threading
import types
import weakref
from collections import deque
from typing import ClassVar

import numpy as np
import pytest
import records
import torch
import torchmetrics
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from sagemaker_lightning.state import module_variables
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


def test_a_wrapper_that_torch_puts_around_a_step_is_not_a_change():
    optimizer = Lookahead(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1))
    plain_step = Lookahead.step
    before = variable_digests({"optimizer": optimizer}, {})
    optimizer.zero_grad()
    assert Lookahead.step is not plain_step
    assert changed_variables(before, variable_digests({"optimizer": optimizer}, {})) == []


def made_class():
    class Made:
        total = 0

    return Made


FIRST_MADE, OTHER_MADE = made_class(), made_class()


def uses_both():
    return FIRST_MADE, OTHER_MADE


def test_classes_that_the_same_line_has_made_keep_their_own_variables():
    mentioned = module_variables.mentioned_variables({"function": uses_both})
    held = module_variables.held_variables(mentioned)
    owners = {name: each.owner for name, each in held.items() if "Made" in name}
    name = f"variables.{__name__}.made_class.<locals>.Made"
    assert owners == {name: FIRST_MADE, f"{name}#1": OTHER_MADE}


class Noise(enum.Flag):
    """Flags of a user's."""

    NONE = 0
    SOME = 1


def noisy(noise=Noise.NONE, amount=1):
    return noise


def test_a_member_of_an_enum_that_is_a_default_is_no_change():
    holder = Meter()
    holder.noise = Noise.NONE
    before = variable_digests({"noisy": noisy}, {"holder": holder})
    holder.noise |= Noise.SOME
    after = variable_digests({"noisy": noisy}, {"holder": holder})
    assert changed_variables(before, after) == []


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


def tallied(function):
    """Return a function that does the same, and counts in an attribute and a round."""
    rounds = itertools.cycle([1, 2])

    @functools.wraps(function)
    def counting():
        counting.calls += next(rounds)
        return function()

    counting.calls = 0
    return counting


@tallied
def scored():
    """Do nothing."""


def test_what_a_wrapped_function_counts_is_saved_and_not_said():
    roots = {"score": lambda: scored()}
    saved = held_variables(mentioned_variables(roots))
    before = variable_digests(roots, saved)
    scored()
    assert changed_variables(before, variable_digests(roots, saved)) == []
    unsaved = variable_digests(roots, {})
    scored()
    assert changed_variables(unsaved, variable_digests(roots, {}))


class Seen(enum.Flag):
    """What was seen."""

    FIRST = 1
    SECOND = 2


class Readable(IterableDataset):
    """An abstract class, as torch's is."""

    def __iter__(self):
        return iter(())


def test_what_python_notes_of_flags_and_abstract_classes_is_no_change():
    roots = {"seen": lambda: Seen.FIRST, "data": Readable()}
    before = variable_digests(roots, {})
    assert Seen.FIRST | Seen.SECOND in Seen._value2member_map_.values()
    assert not isinstance(before, Readable)
    assert changed_variables(before, variable_digests(roots, {})) == []


@functools.singledispatch
def to_number(value):
    return value


def test_a_case_that_is_added_to_a_function_of_functools_is_named_and_one_that_is_found_is_not():
    before = variable_digests({"to_number": to_number}, {})
    assert to_number(3) == 3
    found = variable_digests({"to_number": to_number}, {})
    assert changed_variables(before, found) == []
    to_number.register(str, len)
    added = variable_digests({"to_number": to_number}, {})
    registry = "functools.singledispatch.<locals>.dispatch.registry"
    assert changed_variables(before, added) == [registry]


class Tallied:
    """Counts for the class that is asked."""

    total = 0

    @classmethod
    def tally(cls):
        cls.total += 1


class Scored(Tallied):
    """Has no count yet."""


def test_what_a_class_counts_of_its_own_beside_its_bases_comes_back(monkeypatch):
    monkeypatch.setattr(Tallied, "total", 0)
    state = GraphState(lambda: held_variables(mentioned_variables({"model": Scored()})))
    state.mark()
    Scored.tally(), Scored.tally(), Tallied.tally()
    record = state.encode()
    del Scored.total
    Tallied.total = 0
    resumed = GraphState(lambda: held_variables(mentioned_variables({"model": Scored()})))
    resumed.mark()
    resumed.restore(record)
    assert (vars(Scored)["total"], Tallied.total) == (2, 1)
    del Scored.total


warm_up = 3


class Mixed:
    """Has a variable that steps remove, and gets one that no class has; it has no other.

    They remove one of the module, too.
    """

    penalty = 0.5

    def step(self):
        global warm_up
        with contextlib.suppress(NameError):
            del warm_up
        type(self).steps = getattr(type(self), "steps", 0) + 1
        if hasattr(type(self), "penalty"):
            del type(self).penalty


def test_a_variable_that_is_removed_is_removed_again_and_one_that_is_made_comes_back():
    state = GraphState(lambda: held_variables(mentioned_variables({"model": Mixed()})))
    state.mark()
    Mixed().step()
    record = state.encode()
    Mixed.penalty = 0.5
    del Mixed.steps
    globals()["warm_up"] = 3
    resumed = GraphState(lambda: held_variables(mentioned_variables({"model": Mixed()})))
    resumed.mark()
    resumed.restore(record)
    assert Mixed.steps == 1 and not hasattr(Mixed, "penalty") and "warm_up" not in globals()
    record = resumed.encode()
    Mixed.penalty = 0.5
    resumed.restore(record)
    assert not hasattr(Mixed, "penalty")
    del Mixed.steps


class Scaled(Counting):
    """Has a number."""

    scale = 1


def test_a_number_that_gives_way_to_a_function_is_not_removed(monkeypatch):
    monkeypatch.setattr(Scaled, "scale", 1)
    state = GraphState(lambda: held_variables(mentioned_variables({"model": Scaled()})))
    state.mark()
    Scaled.scale = Counting.step
    record = state.encode()
    Scaled.scale = 1
    state.restore(record)
    assert Scaled.scale == 1


def test_a_forged_record_puts_no_number_in_the_place_of_a_method(monkeypatch):
    monkeypatch.setattr(Scaled, "scale", 1)
    state = GraphState(lambda: held_variables(mentioned_variables({"model": Scaled()})))
    state.mark()
    Scaled.scale = 2
    record = state.encode()
    state.restore(record | {"nodes": record["nodes"].replace('"scale"', '"step"')})
    assert Scaled.step is Counting.step and "step" not in vars(Scaled)


history: list[float] = []
count = 0
local = threading.local()
temperature = contextvars.ContextVar("temperature")
living: weakref.WeakSet = weakref.WeakSet()


class Model:
    """Has an attribute with the name of a variable, and reads some."""

    def __init__(self, history: list[float]) -> None:
        self.history = history
        self.same_number = count

    def step(self) -> None:
        self.history.append(0.5)
        return count, local, temperature, living, history


def test_a_variable_that_is_an_attribute_too_is_not_a_change():
    model = Model(history)
    before = variable_digests({"model": model}, {"model": model})
    model.step()
    assert changed_variables(before, variable_digests({"model": model}, {"model": model})) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: history.append(1.5), "history"),  # another list than the model's attribute
        (lambda: setattr(local, "steps", 3), "local"),
        (lambda: temperature.set(0.5), "temperature"),
        (lambda: globals().update(count=1), "count"),
        (lambda: living.add(noted), "living"),
    ],
)
def test_what_a_list_a_thread_or_a_context_has_is_named(change, name):
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
        def __init__(self):
            self.total = lambda total=[0]: total  # noqa: B006

        def step(self, seen=[], *, rows={}):  # noqa: B006
            nonlocal count
            count += 1
            self.total()[0] += count
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
    results = [model.step(), model.first(), model.first(), model.second(), list(model.third)]
    return [*results, *model.total()]


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
    pairs = map(max, [1, 2], [3, 4])

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


SEEN = 0


def counted(samples):
    """Count in a variable of the module."""
    global SEEN
    SEEN += len(samples)
    return samples


def made_of(iterator):
    """Return a function that counts by an iterator."""
    return lambda: next(iterator)


def test_variables_that_change_are_named():
    objects = {
        "collate_fn": counted,
        "count": made_of(itertools.count()),
        "still": made_of(iter([1, 2])),
    }
    objects |= {"endless": made_of(item for item in [1, 2]), "long": made_of(iter(range(10**9)))}
    digests_before = [variable_digests(objects, saved) for saved in ({}, objects)]
    counted([1, 2])
    for name in ("count", "endless", "long"):
        objects[name]()
    named = [
        "test_module_variables.SEEN",
        "test_module_variables.made_of.<locals>.<lambda>.iterator",
    ]
    assert changed_variables(digests_before[0], variable_digests(objects, {})) == named
    # The position of an iterator that a saved function has closed over is saved.
    assert changed_variables(digests_before[1], variable_digests(objects, objects)) == named[:1]


class Meter:
    """A sum of losses, as in PyTorch's ImageNet example; other such sums follow."""

    instances = []

    def __init__(self) -> None:
        self.sum = 0.0
        self.instances.append(self)


METER = Meter()
BANK = torch.zeros(100_000, 2)
SCORES = [0] * 100_000
FRIEND = torch.nn.BatchNorm1d(2)
MODEL = Meter()
MODELS = [MODEL]


@functools.lru_cache
def projection(size):
    return torch.randn(size)


@functools.lru_cache
def squares(size):
    return torch.arange(size) ** 2


def remembers(number):
    """Change all of these."""
    remembers.calls += 1
    METER.sum += number
    BANK[:] = number
    SCORES[0] = number
    FRIEND(torch.ones(2, 2) * number)
    records.limit = number
    MODELS[0].sum += number
    projection(number), squares(number)


remembers.calls = 0


def test_objects_in_variables_that_change_are_named(monkeypatch):
    """What a checkpoint has is not named."""
    monkeypatch.setattr(records, "limit", 0, raising=False)
    digests = lambda: variable_digests(  # noqa: E731
        {"collate_fn": remembers, "model": MODEL}, {"model": MODEL}
    )
    before = digests()
    assert digests() == before
    assert not [name for name in before if name.startswith("torch.") or name.endswith("__")]
    remembers(3)
    changed = changed_variables(before, digests())
    assert [name for name in changed if "FRIEND.running" not in name] == [
        "records.limit",
        "test_module_variables.BANK",
        "test_module_variables.FRIEND.num_batches_tracked",
        "test_module_variables.METER.sum",
        "test_module_variables.SCORES",
        "test_module_variables.projection (functools.lru_cache)",
        "test_module_variables.remembers.calls",
        "test_module_variables.squares (functools.lru_cache)",
    ]
    Meter()
    assert "test_module_variables.Meter.instances" in changed_variables(before, digests())


def test_what_a_function_has_closed_over_is_named_where_no_checkpoint_has_it():
    total = 0

    def add():
        nonlocal total
        total += 1

    digests_before = [variable_digests({"add": add}, saved) for saved in ({}, {"add": add})]
    add()
    digests_after = [variable_digests({"add": add}, saved) for saved in ({}, {"add": add})]
    assert changed_variables(digests_before[0], digests_after[0]) == [
        f"test_module_variables.{add.__qualname__}.total"
    ]
    assert changed_variables(digests_before[1], digests_after[1]) == []


class Holder:
    """Has containers, modules and metrics, which a checkpoint does not have."""

    def __init__(self) -> None:
        self.objects = [object()]
        self.waiting = deque([object()])
        self.by_name = {"a": object()}
        self.mean = torchmetrics.MeanMetric()
        self.layer = torch.nn.Linear(1, 1)
        self.counts = [0]
        self.large = torch.nn.Embedding(70_000, 1)
        self.lazy = torch.nn.LazyLinear(1)
        self.numbers = np.zeros(70_000)
        self.rows = torch.zeros(5_000, 20)
        self.sparse = torch.zeros(300, 300).to_sparse()
        self.text = {str(key): key for key in range(70_000)}
        self.position = itertools.count()
        self.limit = 3

    def change(self) -> None:
        self.objects.append(object())
        self.waiting.append(object())
        self.by_name["b"] = object()
        self.counts[0] += 1
        self.mean.update(1.0)
        with torch.no_grad():
            for tensor in (self.layer.bias, self.large.weight, self.rows):
                tensor += 1
        self.numbers[0] = 1
        self.text["a"] = 1
        next(self.position)


HOLDER = Holder()


def holds(samples):
    return HOLDER, samples


def test_what_the_objects_in_variables_hold_is_compared():
    """The weights of a large module are not: the model's are in the checkpoint."""
    digests = functools.partial(variable_digests, {"collate_fn": holds}, {})
    before = digests()
    assert digests() == before
    HOLDER.change()
    name = "test_module_variables.HOLDER"
    assert {
        changed.removeprefix(f"{name}.")
        for changed in changed_variables(before, digests())
        if changed.startswith(name)
    } == {
        "objects",
        "waiting",
        "by_name",
        "counts",
        "mean",
        "layer.bias",
        "numbers",
        "rows",
        "text",
        "position",
    }
    saved = variable_digests({"collate_fn": holds}, {"holder": HOLDER})
    assert not any(key.startswith(f"{name}.") and "position" not in key for key in saved)


def test_the_position_of_an_iterator_with_up_to_ten_thousand_elements_is_known():
    owner = Meter()
    owner.short, owner.long = itertools.repeat(0, 10_000), itertools.repeat(0, 10_001)
    owner.functions = itertools.repeat(lambda: 0, 1)
    digests = variable_digests({"data": owner}, {"data": owner})
    assert {name for name in digests if name.startswith("data.")} == {"data.short"}
    next(owner.short)
    digests_after = variable_digests({"data": owner}, {"data": owner})
    assert changed_variables(digests, digests_after) == ["data.short"]


HELPERS = types.ModuleType("a_users_helpers")
exec("CALLS = [0]\ndef count():\n    CALLS[0] += 1\n", vars(HELPERS))


def calls_a_helper(samples):
    HELPERS.count()
    return samples


def test_variables_of_other_modules_whose_functions_are_called_are_compared():
    roots = {"collate_fn": calls_a_helper}
    before = variable_digests(roots, {})
    calls_a_helper([])
    after = variable_digests(roots, {})
    assert changed_variables(before, after) == ["a_users_helpers.CALLS"]


def calls_by_a_name(samples, name="count"):
    getattr(HELPERS, name)()
    return samples


def reads_by_a_name(name="HELPERS"):
    return globals()[name]


def test_variables_that_only_a_text_names_are_found():
    roots = {"collate_fn": calls_by_a_name}
    before = variable_digests(roots, {})
    calls_by_a_name([])
    after = variable_digests(roots, {})
    assert changed_variables(before, after) == ["a_users_helpers.CALLS"]
    mentioned = module_variables.mentioned_variables(roots)
    assert mentioned.of_modules["a_users_helpers"] >= {"CALLS", "count"}
    mentioned = module_variables.mentioned_variables({"function": reads_by_a_name})
    assert mentioned.of_modules[__name__] >= {"HOLDER", "calls_a_helper"}


def test_modules_whose_functions_call_each_other_are_read_once(monkeypatch):
    modules = {name: types.ModuleType(f"a_users_{name}") for name in ("one", "other")}
    for name, called in (("one", "other"), ("other", "one")):
        vars(modules[name])[called] = modules[called]
        exec(f"def call(calls=[]):\n    {called}.call()", vars(modules[name]))
    walks = []

    def walk(*arguments, **options):
        walks.append(arguments)
        assert len(walks) < 20
        return walk_once(*arguments, **options)

    walk_once = module_variables.object_graph.walk
    monkeypatch.setattr(module_variables.object_graph, "walk", walk)
    digests = variable_digests({"collate_fn": modules["one"].call}, {})
    assert {"a_users_one.call.defaults", "a_users_other.call.defaults"} <= digests.keys()


@pytest.mark.parametrize("make", [np.arange, torch.arange, lambda size: list(range(size))])
def test_4096_elements_of_a_large_value_are_compared(make, monkeypatch):
    samples = make(65_537)
    monkeypatch.setattr(METER, "samples", samples, raising=False)
    digests = functools.partial(variable_digests, {"collate_fn": remembers}, {})
    before = digests()
    for index, is_noticed in ((16, False), (17, True), (18, False), (34, True)):
        samples[index] += 1
        assert (digests() != before) is is_noticed
        samples[index] -= 1
    assert digests() == before


def test_code_of_the_users_own_is_distinguished_from_a_librarys():
    assert module_variables.is_own(counted) and module_variables.is_own(Meter)
    assert module_variables.is_own(functools.partial(functools.partial(counted, 1), 2))
    assert not module_variables.is_own(functools.partial(torch.relu, 1))
    assert not module_variables.is_own(torch.nn.Linear)


def test_what_torch_compiles_while_training_is_no_change():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(1, 1)
            self.compiled = torch.compile(self.head, backend="eager")

    model = Model()
    before = variable_digests({"model": model}, {"model": model})
    state = GraphState(lambda: {"model": model})
    state.mark()
    model.compiled(torch.ones(2, 1)).sum().backward()
    with torch.no_grad():
        model.head.weight += 1
    after = variable_digests({"model": model}, {"model": model})
    assert changed_variables(before, after) == []
    state.encode()
    assert state.unsaved == []


class Singleton(type):
    """Keeps the only object of each of its classes."""

    instances: ClassVar[dict[type, object]] = {}

    def __call__(cls):
        if cls not in cls.instances:
            cls.instances[cls] = super().__call__()
        return cls.instances[cls]


class Only(metaclass=Singleton):
    """Has one object."""


class Sharing:
    shared: ClassVar = {}


class Board(Sharing):
    """An object of it lives as long as a step."""


class Asking:
    def step(self):
        return Only(), Board()


def test_a_metaclass_and_bases_are_among_the_classes_that_the_code_mentions():
    mentioned = mentioned_variables({"model": Asking()})
    assert {Singleton, Only, Board, Sharing} <= {*mentioned.classes}
