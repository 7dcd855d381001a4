"""same_run/optimizer_arguments.py: what of an optimizer and a schedule is recorded and compared."""

import functools
import math
import sys
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    SequentialLR,
    StepLR,
)

from sagemaker_lightning.resume.same_run import optimizer_arguments
from sagemaker_lightning.resume.same_run.optimizer_arguments import (
    as_texts,
    describe,
    differences,
    labelled,
    other_classes,
)
from sagemaker_lightning.state.digests import digest
from sagemaker_lightning.state.object_graph import MAX_ELEMENTS

FACTOR = 0.25


def described(model: nn.Module, optimizers, schedulers=(), **config) -> dict:
    settings = {
        "interval": "step",
        "frequency": 1,
        "monitor": None,
        "reduce_on_plateau": False,
    } | config
    configs = [SimpleNamespace(scheduler=each, **settings) for each in schedulers]
    return describe(
        SimpleNamespace(optimizers=optimizers, lr_scheduler_configs=configs, lightning_module=model)
    )


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_what_is_recorded_of_an_optimizer_and_its_schedule(model):
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    found = described(model, [optimizer], [StepLR(optimizer, 4, 0.5)], interval="epoch")
    arguments = found["arguments"]
    assert found["optimizers"] == ["SGD"] and found["schedulers"] == ["StepLR"]
    assert found["python"] == (sys.version_info.major << 8) + sys.version_info.minor
    assert arguments["momentum of SGD"] == "0.9" and arguments["lr of SGD"] == "0.1"
    assert arguments["nesterov of SGD"] == "False"
    assert arguments["number of parameter groups of SGD"] == "1"
    assert arguments["order of the parameters of SGD"] == str(
        [name for name, _ in model.named_parameters()]
    )
    assert arguments["interval of StepLR"] == "epoch" and arguments["frequency of StepLR"] == "1"
    assert arguments["monitor of StepLR"] == "None"
    assert arguments["reduce_on_plateau of StepLR"] == "False"
    for name in optimizer_arguments.KERNEL_ARGUMENTS | {"params"}:
        assert f"{name} of SGD" not in arguments | found["schedule"]
    assert found["schedule"]["step_size of StepLR"] == "4"
    assert found["schedule"]["gamma of StepLR"] == "0.5"
    assert found["schedule"]["initial_lr of SGD"] == "0.1"
    assert found["functions"] == {}


def test_each_group_of_parameters_is_recorded(model):
    """Also what its own keys are; the others are of the code that made the schedule."""
    groups = [
        {"params": [model[0].bias, model[0].weight], "layer": 1},
        {"params": [*model[1].parameters(), nn.Parameter(torch.zeros(1))], "lr": 0.2},
    ]
    found = described(model, [AdamW(groups, 0.1)])
    arguments = found["arguments"]
    assert arguments["number of parameter groups of AdamW"] == "2"
    parts = [f"parameter group {number} of AdamW" for number in (0, 1)]
    assert [arguments[f"lr of {part}"] for part in parts] == ["0.1", "0.2"]
    assert [arguments[f"order of the parameters of {part}"] for part in parts] == [
        "['0.bias', '0.weight']",
        "['1.weight', '1.bias', '']",
    ]
    assert found["schedule"] == {f"layer of {parts[0]}": "1"}


def test_the_rate_is_the_one_before_a_schedule_changed_it(model):
    optimizer = SGD(model.parameters(), 0.1)
    schedule = LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert described(model, [optimizer], [schedule])["arguments"]["lr of SGD"] == "0.1"


def test_only_the_defaults_of_what_was_used_before_are_known(model):
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = StepLR(optimizer, 4)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedule.step()
    found = described(model, [optimizer], [schedule])
    assert found["arguments"]["momentum of SGD"] == "0.9"
    assert "number of parameter groups of SGD" not in found["arguments"]
    assert found["arguments"]["interval of StepLR"] == "step" and found["schedule"] == {}


def test_the_parts_of_a_schedule_are_recorded(model):
    optimizer = SGD(model.parameters(), 0.1)
    chained = ChainedScheduler([ExponentialLR(optimizer, 0.9), ExponentialLR(optimizer, 0.8)])
    whole = SequentialLR(optimizer, [chained, StepLR(optimizer, 3)], [4])
    schedule = described(model, [optimizer], [whole])["schedule"]
    inner = "ChainedScheduler in SequentialLR"
    assert schedule[f"gamma of part 0 (ExponentialLR) in {inner}"] == "0.9"
    assert schedule[f"gamma of part 1 (ExponentialLR) in {inner}"] == "0.8"
    assert schedule["step_size of StepLR in SequentialLR"] == "3"
    assert schedule["_milestones of SequentialLR"] == "4"
    assert not any(name.startswith("_schedulers") for name in schedule)


class Texts(LRScheduler):
    """A schedule of a user's own: its texts may be anything, such as a folder."""

    def __init__(self, optimizer) -> None:
        self.folder = "/tmp"
        self.scale = 3
        super().__init__(optimizer)

    def get_lr(self):
        return [0.1]


def test_texts_count_in_a_librarys_schedule_alone(model):
    optimizer = SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
    assert described(model, [optimizer], [schedule])["schedule"]["mode of ReduceLROnPlateau"] == (
        "max"
    )
    found = described(model, [optimizer], [Texts(optimizer)])["schedule"]
    assert found["scale of Texts"] == "3" and "folder of Texts" not in found


def test_objects_of_one_class_have_numbers():
    assert labelled([], "x") == {}
    assert labelled([1, "a", 2], "value") == {"value 0 (int)": 1, "str": "a", "value 2 (int)": 2}


# Values as text -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (0.5, "0.5"),
        ((1, 2), "(1, 2)"),
        (deque([1, 2]), "(1, 2)"),
        ([3], "3"),
        ([], "()"),
        ([[[[1]]]], "1"),
        ([[[[[1]]]]], None),
        ({"a": 1, 2: [3, 4]}, "(a: 1, 2: (3, 4))"),
        ({"a": {"a": {"a": {"a": 1}}}}, "(a: (a: (a: (a: 1))))"),
        ({"a": {"a": {"a": {"a": {}}}}}, None),
        ({"a": object()}, None),
        ([1, object()], None),
        (object(), None),
        (np.float64(0.5), "0.5"),
        (np.arange(3), "(0, 1, 2)"),
        (torch.tensor(0.5), "0.5"),
        (torch.tensor([1, 2]), "(1, 2)"),
        ("text", None),
        ({1, 2}, None),
    ],
)
def test_a_value_as_text(value, text):
    assert as_texts({"name": value}, "X") == ({} if text is None else {"name of X": text})


def test_text_counts_if_it_is_asked_for():
    assert as_texts({"a": "b", "c": ["d", {"e": "f"}], "fused": True}, "X", strings=True) == {
        "a of X": "b",
        "c of X": "(d, (e: f))",
    }


def test_a_long_value_is_cut_off_and_still_unique():
    text = "x" * 60
    assert as_texts({"a": text}, "X", True) == {"a of X": text}
    first, second = (as_texts({"a": text + end}, "X", True)["a of X"] for end in "xy")
    assert first != second
    for each in (first, second):
        assert each.startswith("x" * 40 + "... (") and len(each) == 40 + len("... (12345678)")


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_the_digest_of_a_large_array_counts(make):
    few, many = make((2, MAX_ELEMENTS // 2)), make((2, MAX_ELEMENTS // 2 + 1))
    assert as_texts({"a": few}, "X")["a of X"].startswith("((0.0, 0.0, ")
    (text,) = as_texts({"a": many}, "X").values()
    assert text == digest(many).hex() or text.startswith(digest(many).hex()[:40])


# Functions ----------------------------------------------------------------------------------------


class Schedule:
    """A schedule of a user's own, that has something as its function."""

    def __init__(self, function) -> None:
        self.function = function


class Factor:
    """An object with numbers that can be called."""

    def __init__(self) -> None:
        self.second = 7
        self.first = 0.5

    def __call__(self, step):
        return self.half() * self.first

    def half(self):
        return 0.5

    def method(self, step):
        return step * self.second


def of_all_kinds(step, scale=0.5, *, offset=2.0):
    return step * scale * FACTOR + offset * (lambda: 3.0)()


def with_names(**names):
    return names


def wrapped(function, times: int = 1):
    """Return a function in a function, and so on."""

    def outer(step):
        return function(step)

    return wrapped(outer, times - 1) if times > 1 else outer


def scaled(factor: float):
    return lambda step: factor


def helped(step):
    return scaled(step)(step)


def compiled(source: str, name: str = "rate", module: str = __name__):
    """Return a function of a source."""
    variables = {"__name__": module}
    exec(source, variables)
    return variables[name]


def functions_of(function) -> dict:
    """Return what is recorded of a schedule with a function, but for its own method."""
    found = described(nn.Linear(1, 1), [], [Schedule(function)])
    del found["functions"]["__init__ of Schedule"]
    return found


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda step: step * 0.5, {}),
        (scaled(0.75), {"factor": "0.75"}),
        (of_all_kinds, {"FACTOR": "0.25", "scale": "0.5", "offset": "2.0"}),
        (
            functools.partial(of_all_kinds, 2, scale=0.75),
            {
                "argument 0": "2",
                "scale": "0.75",
                "FACTOR of function": "0.25",
                "scale of function": "0.5",
                "offset of function": "2.0",
            },
        ),
        (functools.partial(with_names, b=1, a=2), {"a": "2", "b": "1"}),
        (functools.partial(math.pow, 2), {"argument 0": "2"}),
        (Factor(), {"first": "0.5", "second": "7"}),
        (Factor().method, {}),
        (wrapped(scaled(0.5)), {"factor of function": "0.5"}),
        (wrapped(scaled(0.5), 3), {"factor of function of function of function": "0.5"}),
        (wrapped(scaled(0.5), 4), {}),
        ([wrapped(scaled(0.5), 2)], {"factor of function of function": "0.5"}),
        ([wrapped(scaled(0.5), 3)], {}),
        (functools.partial(scaled(0.5)), {"factor of function": "0.5"}),
        (scaled(Factor()), {"first of factor": "0.5", "second of factor": "7"}),
        ([3, 4], {}),
        (Factor, {}),
        (nn.Linear(1, 1), {}),
        (scaled(nn.Linear(1, 1)), {}),
        (3, {}),
    ],
)
def test_the_values_that_a_function_uses_are_recorded(function, values):
    found = functions_of(function)["schedule"]
    found.pop("function of Schedule", None)  # what is not a function is a value of the schedule
    assert found == {f"{name} of function of Schedule": text for name, text in values.items()}


def test_each_of_several_functions_has_a_name():
    found = functions_of([scaled(0.5), scaled(0.25)])
    names = [f"function of Schedule[{index}]" for index in (0, 1)]
    assert [found["schedule"][f"factor of {name}"] for name in names] == ["0.5", "0.25"]
    assert [name in found["functions"] for name in names] == [True, True]


SOURCE = "def rate(step):\n    return 0.5 if step in {1, 'a'} else 0.25\n"


@pytest.mark.parametrize(
    ("source", "is_same"),
    [
        (SOURCE, True),
        ("\n\n# a comment\n" + SOURCE.replace(" if", "  if"), True),
        (SOURCE.replace("step", "epoch"), True),
        (SOURCE.replace("):\n", "):\n    'What it is.'\n"), True),
        (SOURCE.replace("0.5", "0.75"), False),
        (SOURCE.replace("0.5", "'0.5'"), False),
        (SOURCE.replace("'a'", "'b'"), False),
        (SOURCE.replace(" in ", " not in "), False),
        (SOURCE.replace("(step)", "(step, other)"), False),
        (SOURCE.replace("0.5", "(lambda: 0.5)()"), False),
    ],
)
def test_a_functions_code_is_recorded_without_comments_layout_and_local_names(source, is_same):
    before, now = (
        functions_of(compiled(each))["functions"]["function of Schedule"]
        for each in (SOURCE, source)
    )
    assert (before == now) is is_same


def test_code_within_code_is_part_of_it():
    source = "def rate(step):\n    return sum(0.5 for _ in range(step))\n"
    first, second = (
        functions_of(compiled(each)) for each in (source, source.replace("0.5", "0.6"))
    )
    assert first["functions"] != second["functions"]


def test_constants_in_a_tuple_are_part_of_the_code():
    source = "def rate(step):\n    return (0.5, (0.25, {}))[step]\n"
    first, second = (functions_of(compiled(source.format(each))) for each in (0.1, 0.2))
    assert first["functions"] != second["functions"]


def test_what_a_set_of_constants_has_is_recorded_in_one_order():
    """The order of text in a set is another in each process."""
    source = "def rate(step):\n    return step in {%s}\n"
    letters = [repr(letter) for letter in "abcdefgh"]
    first, second = (
        functions_of(compiled(source % ", ".join(each))) for each in (letters, letters[::-1])
    )
    assert first["functions"] == second["functions"]


def test_a_function_that_has_run_often_has_the_same_code():
    """Python changes the code of such a function while it runs."""
    function = compiled(SOURCE)
    before = functions_of(function)["functions"]
    for step in range(10_000):
        function(step)
    assert functions_of(function)["functions"] == before


def test_the_code_of_what_a_function_calls_is_recorded():
    names = functions_of(helped)["functions"].keys()
    assert names == {"function of Schedule", "scaled of function of Schedule"}


def test_the_code_of_an_object_that_can_be_called_is_that_of_its_methods():
    names = functions_of(Factor())["functions"].keys()
    methods = "__init__", "__call__", "half", "method"
    assert names == {f"{name} of function of Schedule" for name in methods}


@pytest.mark.parametrize("module", ["torch.optim.lr_scheduler", "no_module"])
def test_only_what_a_librarys_function_was_given_is_recorded(module):
    """Another version of the library has other code, and other defaults."""
    source = "def make(factor):\n    return lambda step, scale=2: factor * scale * FACTOR\n"
    function = compiled(source + "FACTOR = 3\n", "make", module)(0.5)
    found = functions_of(function)
    assert bool(found["functions"]) is (module == "no_module")
    names = {"factor"} if not found["functions"] else {"factor", "scale", "FACTOR"}
    assert found["schedule"].keys() == {f"{name} of function of Schedule" for name in names}


class Halving(LRScheduler):
    """A schedule of a user's own."""

    def get_lr(self):
        return [0.5**self.last_epoch]


def test_the_methods_of_a_users_schedule_are_recorded(model):
    optimizer = SGD(model.parameters(), 0.1)
    assert described(model, [optimizer], [Halving(optimizer)])["functions"].keys() == {
        "get_lr of Halving"
    }


def test_functions_of_a_librarys_schedule_are_recorded(model):
    optimizer = SGD(model.parameters(), 0.1)
    found = described(model, [optimizer], [LambdaLR(optimizer, scaled(0.75))])
    assert found["schedule"]["factor of lr_lambdas of LambdaLR"] == "0.75"
    assert found["functions"].keys() == {"lr_lambdas of LambdaLR"}


# What differs -------------------------------------------------------------------------------------


def run_with(python: int = 780, **values: dict) -> dict:
    return {"arguments": {}, "schedule": {}, "functions": {}, "python": python} | values


def test_what_differs_is_named_once():
    """An argument gives several values; those with private names come last."""
    before = run_with(
        arguments={"lr of SGD": "0.1", "old of SGD": "1", "momentum of SGD": "0"},
        schedule={"_derived of S": "1", "base_lrs of S": "0.1", "total of S": "1"},
        functions={"f of S": "3", "old of S": "1"},
    )
    now = run_with(
        arguments={"lr of SGD": "0.2", "new of SGD": "1", "momentum of SGD": "0"},
        schedule={"_derived of S": "2", "base_lrs of S": "0.2", "total of S": "2"},
        functions={"f of S": "4", "new of S": "2"},
    )
    assert differences(before, now) == (
        ["lr of SGD was 0.1, is 0.2"],
        ["total of S was 1, is 2", "the code of f of S has changed"],
    )
    assert differences(before, before) == ([], [])
    assert differences(before, now | {"python": 781})[1] == ["total of S was 1, is 2"]


def test_other_rates_may_be_allowed():
    names = [
        "lr of parameter group 0 of SGD",
        "initial_lr of SGD",
        "base_lrs of S",
        "momentum of SGD",
    ]
    before, now = (
        run_with(arguments={name: f"{number}{name}" for name in names}) for number in (1, 2)
    )
    assert len(differences(before, now)[0]) == 4
    assert differences(before, now, other_rates=True)[0] == [
        "momentum of SGD was 1momentum of SGD, is 2momentum of SGD"
    ]


def test_other_classes_are_named():
    before = {"optimizers": ["SGD", "Adam"], "schedulers": ["StepLR"]}
    assert other_classes(before, before) == []
    assert other_classes(before, {"optimizers": ["SGD"], "schedulers": []}) == [
        "the optimizer was SGD, Adam, is SGD",
        "the scheduler was StepLR, is none",
    ]
    assert other_classes(before | {"schedulers": []}, before) == [
        "the scheduler was none, is StepLR"
    ]
