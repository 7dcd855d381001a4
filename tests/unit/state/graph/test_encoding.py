"""A user's state comes back as the graph that it was: each object once, under all its names."""

import collections
import dataclasses
import datetime as dt
import enum
import functools
import io
import itertools
import json
import multiprocessing
import random
import re
import threading
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torchmetrics import MeanMetric, Metric, MinMaxMetric

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph import encoding
from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.kinds.views import MAX_EXPANDED
from sagemaker_lightning.state.graph.start import Start
from sagemaker_lightning.state.graph.state import GraphState


class Thing:
    """An object of a user's."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def double(self, value):
        return 2 * value

    def triple(self, value):
        return 3 * value


class Slotted:
    """Has its attributes in slots."""

    __slots__ = ("first", "second")

    def __init__(self, first):
        self.first = first


@dataclasses.dataclass(frozen=True)
class Point:
    """A key."""

    x: int


class Phase(enum.Enum):
    """A phase of the training."""

    WARM_UP = 1
    TRAINING = 2


Row = collections.namedtuple("Row", "step loss")


class Registry(dict):
    """A user's dict with an attribute."""


class Net(torch.nn.Module):
    """A module of a user's."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.scale = 1.0


def nodes_of(record):
    """Return the nodes of a record."""
    return json.loads(record["nodes"])


def through_a_file(record):
    """Return a record as torch reads it without running code."""
    file = io.BytesIO()
    torch.save(record, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(make, change):
    """Return an object that was changed, and another one that was restored from its record.

    Args:
        make: What the program does at its start.
        change: What training does.
    """
    trained = make()
    start = Start({"model": trained})
    change(trained)
    record, unsaved, *_ = encode({"model": trained}, start)
    assert unsaved == []
    resumed = make()
    restored = restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert restored.missing == [] == restored.reordered
    # What is restored is saved again, and is the same.
    again, *_ = encode({"model": trained}, start)
    assert again["nodes"] == record["nodes"]
    return trained, resumed


def record_of(make, change):
    """Return the record of an object that was changed, and what it lacks."""
    trained = make()
    start = Start({"model": trained})
    change(trained)
    return encode({"model": trained}, start)[:2]


# ---- identity --------------------------------------------------------------------------------


def test_two_attributes_of_one_object_share_it_after_a_resume():
    def make():
        config = Thing(rate=2.0)
        return Thing(config=config, head=Thing(config=config))

    def change(model):
        model.config.rate = 0.5

    _, resumed = train(make, change)
    assert resumed.head.config is resumed.config and resumed.config.rate == 0.5


def test_an_attribute_points_to_the_element_of_a_list_that_it_had():
    def make():
        stages = [Thing(noise=0.0), Thing(noise=0.5)]
        return Thing(stages=stages, stage=stages[0])

    def change(model):
        model.stage = model.stages[1]

    _, resumed = train(make, change)
    assert resumed.stage is resumed.stages[1]


def test_a_list_that_a_dict_holds_too_is_one_list():
    def make():
        losses = []
        return Thing(losses=losses, logs={"loss": losses})

    _, resumed = train(make, lambda model: model.losses.append(1.5))
    assert resumed.logs["loss"] is resumed.losses == [1.5]


def test_two_new_names_of_a_new_object_share_it():
    def change(model):
        model.first = [1]
        model.both = {"first": model.first}

    _, resumed = train(Thing, change)
    assert resumed.both["first"] is resumed.first == [1]


@pytest.mark.parametrize(
    "make_value", [lambda: {"scale": 1.0}, lambda: torch.zeros(2), lambda: [1]]
)
def test_a_default_is_left_alone_when_its_name_is_bound_anew(make_value):
    def make():
        value = make_value()
        return Thing(now=value, default=value)

    def change(model):
        model.now = torch.ones(2) if isinstance(model.default, torch.Tensor) else ["another"]

    _, resumed = train(make, change)
    assert resumed.now is not resumed.default
    assert str(resumed.default) == str(make_value())
    assert str(resumed.now) == str(
        torch.ones(2) if isinstance(resumed.now, torch.Tensor) else ["another"]
    )


def test_parameters_as_keys_of_a_dict_are_the_resumed_models():
    def make():
        model = Net()
        model.shadow = {}
        return model

    def change(model):
        for parameter in model.parameters():
            model.shadow[parameter] = parameter.detach() + 1

    trained, resumed = train(make, change)
    assert list(map(id, resumed.shadow)) == list(map(id, resumed.parameters()))
    assert all(map(torch.equal, resumed.shadow.values(), trained.shadow.values()))


def test_a_weight_that_is_tied_to_another_one_is_tied_again():
    def make():
        return Thing(first=torch.nn.Linear(2, 2), second=torch.nn.Linear(2, 2))

    def change(model):
        model.second.weight = model.first.weight

    _, resumed = train(make, change)
    assert resumed.second.weight is resumed.first.weight


def test_what_was_removed_stays_so_after_each_resume():
    def make():
        return Thing(net=Net(), cache=[1], warm=True)

    model = make()
    start = Start({"model": model})
    del model.net.body, model.cache, model.warm
    record = encode({"model": model}, start).record
    for _ in range(2):
        model = make()
        state = GraphState(lambda model=model: {"model": model})
        state.begin()
        state.restore(through_a_file(record))
        assert not hasattr(model.net, "body")
        assert not hasattr(model, "cache") and not hasattr(model, "warm")
        state.mark()  # as a run that has just resumed does
        record = state.encode()


def test_a_state_dict_that_is_kept_is_still_a_view_of_the_weights():
    def change(model):
        model.best = model.state_dict()

    _, resumed = train(Net, change)
    with torch.no_grad():
        resumed.body.weight.add_(1)
    assert torch.equal(resumed.best["body.weight"], resumed.body.weight)
    assert resumed.best._metadata[""] == {"version": 1}


def test_an_alias_of_an_optimizers_state_is_the_optimizers():
    def make():
        model = Net()
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(model, optimizer):
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()

    model, optimizer = make()
    start = Start({"model": model, "optimizers.0": optimizer})
    step(model, optimizer)
    weight = model.body.weight
    model.momentum = optimizer.state[weight]["momentum_buffer"]
    record, unsaved, *_ = encode({"model": model, "optimizers.0": optimizer}, start)
    resumed, its_optimizer = make()
    start = Start({"model": resumed, "optimizers.0": its_optimizer})
    its_optimizer.load_state_dict(optimizer.state_dict())
    restore({"model": resumed, "optimizers.0": its_optimizer}, start, through_a_file(record))
    assert resumed.momentum is its_optimizer.state[resumed.body.weight]["momentum_buffer"]
    assert unsaved == []


def test_two_new_views_of_one_tensor_share_its_memory():
    def change(model):
        whole = torch.arange(6.0)
        model.left, model.right = whole[:4], whole[2:]

    _, resumed = train(Thing, change)
    resumed.left[2] = 9
    assert resumed.right.tolist() == [9, 3, 4, 5]


def test_a_view_of_a_tensor_of_the_start_is_one_again():
    def make():
        return Thing(table=torch.zeros(4, 2))

    def change(model):
        model.table[1] = 5
        model.row = model.table[1]

    _, resumed = train(make, change)
    resumed.row += 1
    assert resumed.table[1].tolist() == [6, 6]


def test_views_of_arrays_share_their_memory():
    def make():
        return Thing(table=np.zeros((4, 2)))

    def change(model):
        model.row = model.table[1]
        whole = np.arange(6)
        model.left, model.right = whole[:4], whole[2:]

    _, resumed = train(make, change)
    resumed.row += 1
    resumed.left[2] = 9
    assert resumed.table[1].tolist() == [1, 1]
    assert resumed.right.tolist() == [9, 3, 4, 5]


def test_what_is_expanded_follows_what_it_is_a_view_of():
    def make():
        return Thing(gain=torch.ones(1), row=np.ones(1))

    def change(model):
        model.wide = model.gain.expand(4)
        model.broad = np.broadcast_to(model.row, (4,))

    _, resumed = train(make, change)
    resumed.gain += 1
    resumed.row += 2
    assert resumed.wide.tolist() == [2] * 4 and resumed.broad.tolist() == [3] * 4


def test_what_is_expanded_very_far_is_a_value_of_its_own():
    def make():
        return Thing(gain=torch.ones(1))

    def change(model):
        model.wide = model.gain.expand(MAX_EXPANDED + 1)

    _, resumed = train(make, change)
    resumed.gain += 1
    assert len(resumed.wide) == MAX_EXPANDED + 1 and set(resumed.wide.tolist()) == {1}


class Measured(float):
    """A number of a user's with attributes."""

    def __float__(self):
        raise AssertionError


class Named(str):
    """A text of a user's."""

    def __str__(self):
        raise AssertionError


class Counted(int):
    """A whole number of a user's."""


class Pair(tuple):
    """A tuple of a user's."""


def test_numbers_and_texts_of_a_users_class_come_back_with_their_attributes():
    def change(model):
        model.values = [Measured(-0.0), Named("x"), Counted(10**5000), Pair((1, [2]))]
        for value in model.values:
            value.weight = model.values
        model.values[3].weight = 5
        model.by_value = {model.values[2]: 1}

    trained, resumed = train(Thing, change)
    assert list(map(type, resumed.values)) == [Measured, Named, Counted, Pair]
    number, name, count, pair = resumed.values
    assert float.hex(number) == "-0x0.0p+0" and name == "x" and count == 10**5000
    assert pair == (1, [2]) and pair.weight == 5
    assert number.weight is name.weight is resumed.values
    assert list(resumed.by_value) == [count] and list(resumed.by_value)[0] is count


@pytest.mark.parametrize("make_event", [threading.Event, multiprocessing.Event])
@pytest.mark.parametrize("is_set", [True, False])
def test_a_flag_is_set_again_or_cleared(make_event, is_set):
    def make():
        model = Thing(stop=make_event())
        if not is_set:
            model.stop.set()
        return model

    _, resumed = train(make, lambda model: model.stop.set() if is_set else model.stop.clear())
    assert resumed.stop.is_set() is is_set


@pytest.mark.parametrize("is_new", [False, True])
def test_containers_of_pythons_library_come_back(is_new):
    def make():
        return Thing(values=None if is_new else [ChainMap({}, {"k": 1}), UserDict(), UserList()])

    def change(model):
        if is_new:
            model.values = [ChainMap({}, {"k": 1}), UserDict(), UserList()]
        chain, by_name, values = model.values
        chain["k"] = by_name["k"] = 2
        values += [3]

    trained, resumed = train(make, change)
    assert resumed.values == trained.values and resumed.values[0].maps == [{"k": 2}, {"k": 1}]


def test_a_flag_that_training_has_made_comes_back():
    def change(model):
        model.stop = threading.Event()
        model.stop.set()

    _, resumed = train(Thing, change)
    assert resumed.stop.is_set()


class Waiting(threading.Thread):
    """A thread of a user's."""

    count = 0


def test_a_thread_that_ran_may_be_started_again():
    def change(model):
        model.thread.start()
        model.thread.join()
        model.thread.count = 3

    _, resumed = train(lambda: Thing(thread=Waiting()), change)
    assert resumed.thread.count == 3
    resumed.thread.start()
    resumed.thread.join()


def test_layers_of_torchs_come_back():
    def make():
        return Thing(net=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))

    def change(model):
        model.net[1] = torch.nn.LeakyReLU(0.3)

    trained, resumed = train(make, change)
    assert type(resumed.net[1]) is torch.nn.LeakyReLU and resumed.net[1].negative_slope == 0.3
    assert torch.equal(resumed.net[1](torch.tensor([-1.0])), trained.net[1](torch.tensor([-1.0])))


class Scaled(Metric):
    """A metric of a user's, with an attribute."""

    full_state_update = False

    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.add_state("total", torch.zeros(()))

    def update(self, value):
        self.total += value * self.scale

    def compute(self):
        return self.total


def test_a_metric_in_the_place_of_another_one_is_that_one_with_its_attributes():
    """What it has counted, another part of a checkpoint has."""

    def make():
        return Thing(mean=Scaled(1.0), both=[MinMaxMetric(Scaled(2.0))], named={"a": Scaled(3.0)})

    def change(model):
        model.mean = Scaled(0.5)
        model.both[0] = MinMaxMetric(Scaled(0.25))
        model.named = {"a": Scaled(3.0), "best": 1}

    _, resumed = train(make, change)
    assert resumed.mean.scale == 0.5 and resumed.named["a"].scale == 3
    assert resumed.named["best"] == 1 and len(resumed.both) == 1
    (metric,) = resumed.both[0].children()
    assert metric.scale == 0.25
    resumed.mean.update(2.0)
    assert resumed.mean.compute() == 1


@pytest.mark.parametrize("make_metric", [lambda: MeanMetric(), lambda: Scaled(2.0)])
def test_a_metric_beside_which_the_first_one_stays_is_named(make_metric):
    model = Thing(mean=Scaled(1.0), first=None)
    start = Start({"model": model})
    model.first = model.mean
    model.mean = make_metric()
    assert [each.name for each in encode({"model": model}, start)[1]] == ["mean"]


def test_what_a_scripted_module_counts_comes_back():
    def change(model):
        for _ in range(3):
            model.net(torch.zeros(1))

    trained, resumed = train(lambda: Thing(net=torch.jit.script(Scripted())), change)
    assert resumed.net.calls == 3 and resumed.net.losses == [0.0] * 3
    assert torch.equal(resumed.net.total, torch.full((1,), 3.0))
    assert torch.equal(resumed.net(torch.zeros(1)), trained.net(torch.zeros(1)))


class Scripted(torch.nn.Module):
    """Counts its calls."""

    calls: int
    losses: list[float]

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.losses = torch.jit.annotate(list[float], [])
        self.total = torch.zeros(1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.losses.append(0.0)
        self.total = self.total + 1
        return value + self.calls + len(self.losses) + self.total


def test_a_container_with_one_value_that_no_record_holds_keeps_the_rest():
    def make():
        return Thing(state={"steps": 0, "name": re.compile("a")}, others=[re.compile("c"), 1])

    trained = make()
    start = Start({"model": trained})
    trained.state = {"steps": 5, "name": re.compile("b")}
    trained.others[:] = [re.compile("d"), 2]
    record, unsaved, *_ = encode({"model": trained}, start)
    assert sorted((each.name, each.kind, each.is_first) for each in unsaved) == [
        ("others", "re.Pattern", True),
        ("state", "re.Pattern", True),
    ]
    resumed = make()
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert resumed.state == {"steps": 5, "name": re.compile("a")}
    assert resumed.others == [re.compile("c"), 2]


def test_what_is_lost_with_a_value_that_no_record_holds_is_noted():
    def lost(change):
        model = Thing(writers={}, steps=[1, 2])
        start = Start({"model": model})
        change(model)
        (unsaved,) = encode({"model": model}, start)[1]
        return unsaved.loses

    file = io.StringIO()
    assert not lost(lambda model: model.writers.update(log=file, folder="x"))
    assert not lost(lambda model: model.steps.append(file))
    assert not lost(lambda model: setattr(model, "writers", [file]))
    assert lost(lambda model: model.writers.update(log=file, count=1))
    assert lost(lambda model: setattr(model, "writers", {"log": file, "losses": [0.5]}))
    assert lost(lambda model: model.steps.__setitem__(slice(None), [1, 3, file]))
    assert lost(lambda model: setattr(model, "writer", Thing(file=file, count=0)))


def test_a_small_part_of_a_large_tensor_is_saved_alone():
    def change(model):
        model.last = torch.zeros(1_000_000)[:2]

    record, _ = record_of(Thing, change)
    (tensor,) = record["tensors"]
    assert tensor.untyped_storage().nbytes() == 8


def test_variables_that_functions_have_closed_over_come_back_for_all_of_them():
    def make():
        heat = 0.0

        def warm(step):
            nonlocal heat
            heat += step
            return heat

        def read():
            return heat

        return Thing(warm=warm, read=read)

    def change(model):
        model.warm(7)

    _, resumed = train(make, change)
    assert resumed.read() == 7 and resumed.warm(1) == 8 == resumed.read()


def test_attributes_and_defaults_of_a_function_come_back():
    def make():
        def seen(value, cache=[]):  # noqa: B006 (this is the claim)
            seen.calls += 1
            cache.append(value)
            return cache

        seen.calls = 0
        seen.__defaults__[0].clear()
        return Thing(seen=seen)

    _, resumed = train(make, lambda model: model.seen(3))
    assert resumed.seen.calls == 1 and resumed.seen(4) == [3, 4]


def test_graphs_with_cycles_come_back():
    def change(model):
        model.self = model
        model.children = [Thing(parent=model)]
        model.ring = []
        model.ring.append((model.ring, model.children))

    _, resumed = train(Thing, change)
    assert resumed.self is resumed and resumed.children[0].parent is resumed
    assert resumed.ring[0][0] is resumed.ring and resumed.ring[0][1] is resumed.children


def nested(kind):
    """Return a value within 10,000 others."""
    value = [1]
    for _ in range(10_000):
        value = kind(value)
    return value


@pytest.mark.parametrize(
    "kind", [lambda value: [value], lambda value: (value,), lambda value: Thing(inner=value)]
)
def test_ten_thousand_values_within_another_come_back(kind):
    def change(model):
        model.chain = nested(kind)

    _, resumed = train(Thing, change)
    value, depth = resumed.chain, 0
    while value != [1]:
        value, depth = value.inner if isinstance(value, Thing) else value[0], depth + 1
    assert depth == 10_000


def test_a_tensor_that_was_calculated_requires_gradients_and_is_told_if_one_reaches_it(capsys):
    def change(model):
        model.loss = 2 * torch.ones(1, requires_grad=True)

    _, resumed = train(Thing, change)
    assert resumed.loss.requires_grad and not resumed.loss.is_leaf
    (3 * resumed.loss).backward()
    (3 * resumed.loss).backward()
    assert capsys.readouterr().out.count("warning: model.loss was calculated before the inter") == 1


# ---- what is written -------------------------------------------------------------------------


def test_nothing_is_written_of_what_has_not_changed():
    def make():
        model = Net()
        model.table = {number: [number, torch.full((2,), number)] for number in range(9)}
        model.generator = np.random.default_rng(0)
        model.array = np.arange(4.0)
        model.not_a_number = float("nan")
        return model

    def change(model):
        model.not_a_number = float("nan")  # another object of the same value
        with torch.no_grad():
            model.body.weight.add_(1)  # the checkpoint has it besides

    assert record_of(make, change) == ({"nodes": "[]", "tensors": []}, [])


def test_of_an_object_the_changed_attributes_alone_are_written():
    def make():
        return Thing(folder="mine", step=0)

    record, _ = record_of(make, lambda model: setattr(model, "step", 3))
    assert nodes_of(record) == [["object", "model", {"names": ["step"]}, [3], None]]


def test_an_object_that_did_not_change_keeps_what_the_resumed_program_gave_it():
    trained = Thing(options={"folder": "a"}, step=0)
    start = Start({"model": trained})
    trained.step = 1
    record, *_ = encode({"model": trained}, start)
    resumed = Thing(options={"folder": "b"}, step=0)
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert vars(resumed) == {"options": {"folder": "b"}, "step": 1}


@pytest.mark.parametrize(("before", "now"), [(0.0, -0.0), (1, 1.0), (1, True), ("a", b"a")])
def test_values_that_are_equal_but_not_the_same_are_changes(before, now):
    def make():
        return Thing(value=before, values=[before], within={"it": before})

    def change(model):
        model.value = now
        model.values[0] = now
        model.within["it"] = now

    _, resumed = train(make, change)
    assert repr((resumed.value, resumed.values, resumed.within)) == repr((now, [now], {"it": now}))


def test_the_order_of_dicts_and_attributes_is_kept():
    def make():
        return Thing(first=1, second=2, third=3, table={"a": 1, "b": 2})

    def change(model):
        del model.first
        model.second = 0
        model.first = 1
        model.table["a"] = model.table.pop("a")

    _, resumed = train(make, change)
    assert list(vars(resumed)) == ["second", "third", "table", "first"]
    assert list(resumed.table) == ["b", "a"]


def test_an_attribute_that_was_removed_is_removed():
    def make():
        return Thing(first=1, second=2)

    _, resumed = train(make, lambda model: delattr(model, "first"))
    assert vars(resumed) == {"second": 2}


def test_a_long_table_of_plain_data_is_written_once_it_changes():
    def make():
        return Thing(rows=[[number, str(number)] for number in range(70_000)])

    assert record_of(make, lambda model: None)[0]["nodes"] == "[]"

    def change(model):
        model.rows[69_999][0] = -1

    _, resumed = train(make, change)
    assert resumed.rows[69_999] == [-1, "69999"] and resumed.rows[0] == [0, "0"]


def test_very_many_small_arrays_are_written_as_few():
    def change(model):
        model.buffer = deque(
            (np.full(3, step), torch.full((2,), step), step) for step in range(1_000)
        )

    record, _ = record_of(Thing, change)
    assert len(record["tensors"]) == 2
    _, resumed = train(Thing, change)
    array, tensor, step = resumed.buffer[-1]
    assert (array.tolist(), tensor.tolist(), step) == ([999] * 3, [999] * 2, 999)


# ---- kinds -----------------------------------------------------------------------------------

VALUES = [
    lambda: [1, 2.5, "text", b"bytes", None, True, 1j, 10**40, float("inf")],
    lambda: {"a": 1, 2: [3], (1, "b"): {4}, None: (5,)},
    lambda: OrderedDict(b=1, a=2),
    lambda: defaultdict(list, a=[1]),
    lambda: defaultdict(None, a=1),
    lambda: Counter("abba"),
    lambda: deque([1, [2]], maxlen=3),
    lambda: {3, 1, 70_000, -5},
    lambda: {"b"},
    lambda: frozenset({(1, 2)}),
    lambda: (1, [2], (3, (4,))),
    lambda: Row(1, [0.5]),
    lambda: range(2, 9, 3),
    lambda: slice(None, 4),
    lambda: dt.date(2026, 11, 25),
    lambda: dt.datetime(2026, 11, 25, 1, 2, 3, 4, fold=1),
    lambda: dt.datetime(2026, 11, 25, tzinfo=dt.timezone(dt.timedelta(hours=1))),
    lambda: dt.timedelta(days=-1, microseconds=3),
    lambda: dt.time(1, 2, tzinfo=dt.UTC),
    lambda: Fraction(1, 3),
    lambda: Decimal("0.10"),
    lambda: Path("a/b"),
    lambda: Phase.TRAINING,
    lambda: {Phase.WARM_UP: 1},
    lambda: torch.float16,
    lambda: torch.Size([2, 3]),
    lambda: torch.device("cpu"),
    lambda: np.float32(0.1),
    lambda: np.str_("text"),
    lambda: np.datetime64("2026-11-25"),
    lambda: np.dtype([("a", "<i4"), ("b", "<f8")]),
    lambda: bytearray(b"bytes"),
    lambda: Point(3),
]


@pytest.mark.parametrize("make_value", VALUES)
def test_a_value_of_each_kind_comes_back(make_value):
    def make():
        return Thing(example=Point(0), phase=Phase.WARM_UP, row=Row(0, 0), value=None)

    def change(model):
        model.value = make_value()

    _, resumed = train(make, change)
    value = make_value()
    assert (type(resumed.value), repr(resumed.value)) == (type(value), repr(value))
    assert resumed.value == value


ARRAYS = [
    lambda: np.arange(6).reshape(2, 3),
    lambda: np.zeros((0, 3), dtype=">f4"),
    lambda: np.array(3.5),
    lambda: np.array(["a", "bc"]),
    lambda: np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
    lambda: np.arange(6).reshape(2, 3).T,
    lambda: np.array([[1], None, "a"], dtype=object),
    lambda: torch.arange(6).reshape(2, 3).t(),
    lambda: torch.tensor(1.5, dtype=torch.bfloat16),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    lambda: torch.ones(2, requires_grad=True),
    lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    lambda: torch.zeros(1).expand(5),
]


@pytest.mark.parametrize("make_value", ARRAYS)
@pytest.mark.parametrize("is_new", [True, False])
def test_an_array_or_a_tensor_of_each_kind_comes_back(make_value, is_new):
    def make():
        return Thing(value=None if is_new else make_value())

    def change(model):
        if is_new:
            model.value = make_value()
        elif isinstance(model.value, torch.Tensor):
            model.value.data = model.value.data.clone()
        elif model.value.size and model.value.dtype.kind in "fi":
            model.value += 1

    trained, resumed = train(make, change)
    assert type(resumed.value) is type(trained.value)
    assert repr(resumed.value) == repr(trained.value)
    assert resumed.value.dtype == trained.value.dtype


def test_a_tensor_that_changes_in_place_stays_the_object_that_others_hold():
    def make():
        tensor = torch.zeros(2)
        array = np.zeros(2)
        return Thing(tensor=tensor, array=array, others=[tensor, array, bytearray(2)])

    def change(model):
        model.tensor += 1
        model.array += 1
        model.others[2][0] = 7

    trained = make()
    start = Start({"model": trained})
    change(trained)
    record, *_ = encode({"model": trained}, start)
    resumed = make()
    tensor, array, numbers = resumed.others
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert (tensor.tolist(), array.tolist(), bytes(numbers)) == ([1, 1], [1, 1], b"\7\0")
    assert resumed.tensor is tensor and resumed.array is array


GENERATORS = [
    lambda: random.Random(0),
    lambda: np.random.default_rng(0),
    lambda: np.random.Generator(np.random.MT19937(0)),
    lambda: np.random.Generator(np.random.Philox(0)),
    lambda: np.random.RandomState(0),
    lambda: torch.Generator().manual_seed(0),
]


def draw(generator):
    """Return the next number of a generator of any kind."""
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return generator.random()


@pytest.mark.parametrize("make_generator", GENERATORS)
@pytest.mark.parametrize("is_new", [True, False])
def test_a_generator_draws_on_where_it_was(make_generator, is_new):
    def make():
        return Thing(generator=None if is_new else make_generator())

    def change(model):
        model.generator = model.generator or make_generator()
        draw(model.generator)
        model.alias = model.generator

    trained, resumed = train(make, change)
    assert resumed.alias is resumed.generator
    assert draw(resumed.generator) == draw(trained.generator)


def test_a_count_that_two_objects_share_goes_on():
    def make():
        count = itertools.count(5)
        return Thing(count=count, other=Thing(pair=(count, "name")))

    def change(model):
        next(model.count)

    _, resumed = train(make, change)
    assert next(resumed.count) == 6 and resumed.other.pair[0] is resumed.count


SEQUENCES = {
    "list": lambda: [1, 2, 3],
    "tuple": lambda: (1, 2, 3),
    "text": lambda: "abc",
    "numbers": lambda: range(5, 8),
    "array": lambda: np.array([4.0, 5.0, 6.0]),
}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 3, 4, 8])
@pytest.mark.parametrize("make_sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_iterators_over_a_sequence_go_on_where_they_were(make_sequence, taken, is_new):
    def begin():
        sequence = make_sequence()
        return {"once": iter(sequence), "again": itertools.cycle(sequence)}

    def make():
        return Thing(**({} if is_new else begin()))

    def change(model):
        if is_new:
            vars(model).update(begin())
        for _ in range(taken):
            next(model.once, None)
            next(model.again)
        model.alias = model.once

    trained, resumed = train(make, change)
    assert resumed.alias is resumed.once
    for _ in range(7):
        assert next(resumed.once, None) == next(trained.once, None)
        assert next(resumed.again) == next(trained.again)


def test_a_buffer_that_a_module_gets_while_training_is_saved_by_it_or_not_as_before():
    def change(model):
        model.net.register_buffer("cos", torch.ones(2), persistent=False)
        model.net.register_buffer("seen", torch.ones(1))

    _, resumed = train(lambda: Thing(net=torch.nn.Linear(1, 1)), change)
    assert set(resumed.net.state_dict()) == {"weight", "bias", "seen"}
    assert resumed.net.cos.tolist() == [1, 1]


def test_an_iterator_over_a_list_that_grows_yields_what_comes_later():
    def make():
        return Thing(rows=[1, 2], place=None)

    def change(model):
        model.place = iter(model.rows)
        next(model.place)
        model.rows.append(3)

    _, resumed = train(make, change)
    resumed.rows.append(4)
    assert list(resumed.place) == [2, 3, 4]


def test_an_iterator_over_what_may_have_no_end_is_no_sequences():
    class Rows:
        def __getitem__(self, index):
            return index

    def change(model):
        model.rows = iter(Rows())

    _, unsaved = record_of(Thing, change)
    assert [each.name for each in unsaved] == ["rows"]


def test_a_number_shared_between_processes_comes_back():
    def make():
        return Thing(number=multiprocessing.Value("i", 1), numbers=multiprocessing.Array("d", 2))

    def change(model):
        model.number.value = 5
        model.numbers[1] = 0.5

    _, resumed = train(make, change)
    assert resumed.number.value == 5 and resumed.numbers[:] == [0, 0.5]


def test_a_partial_function_has_its_arguments_again():
    def make():
        def scaled(table, value, by=1):
            table.append(value * by)
            return table

        return Thing(function=functools.partial(scaled, [], by=2), plain=scaled)

    def change(model):
        model.function(3)
        model.other = functools.partial(model.plain, model.function.args[0], by=10)

    _, resumed = train(make, change)
    assert resumed.function(1) == [6, 2]
    assert resumed.other(1) == [6, 2, 10] and resumed.other.args[0] is resumed.function.args[0]


def test_slots_and_the_attributes_of_a_users_container_come_back():
    def make():
        return Thing(slotted=Slotted(1), registry=Registry())

    def change(model):
        model.slotted.second = [2]
        del model.slotted.first
        model.registry["a"] = 1
        model.registry.step = 3
        model.more = [Slotted(4), Registry(b=2)]

    _, resumed = train(make, change)
    assert resumed.slotted.second == [2] and not hasattr(resumed.slotted, "first")
    assert resumed.registry == {"a": 1} and resumed.registry.step == 3
    assert resumed.more[0].first == 4 and resumed.more[1] == {"b": 2}


def test_objects_as_keys_come_back():
    def make():
        return Thing(counts={}, example=Point(0), seen=set())

    def change(model):
        model.counts[Point(3)] = 1
        model.seen.add(Point(3))

    _, resumed = train(make, change)
    assert resumed.counts[Point(3)] == 1 and Point(3) in resumed.seen


def test_a_method_that_another_took_the_place_of_comes_back():
    def make():
        model = Thing()
        model.rule = model.double
        return model

    def change(model):
        model.rule = model.triple

    _, resumed = train(make, change)
    assert resumed.rule(5) == 15 and resumed.rule.__self__ is resumed


def test_a_function_that_the_start_has_comes_back_under_another_name():
    def make():
        return Thing(rules=[lambda: 1, lambda: 2], rule=None, classes={"a": Thing}, kind=None)

    def change(model):
        model.rule = model.rules[1]
        model.kind = model.classes["a"]

    _, resumed = train(make, change)
    assert resumed.rule is resumed.rules[1] and resumed.kind is Thing


def test_a_teacher_copied_while_training_comes_back():
    def make():
        return torch.nn.ModuleDict({"net": torch.nn.Sequential(Net(), torch.nn.BatchNorm1d(2))})

    def change(model):
        import copy

        model["teacher"] = copy.deepcopy(model["net"]).requires_grad_(False).eval()
        model["net"][0].scale = 2.0

    trained, resumed = train(make, change)
    teacher = resumed["teacher"]
    assert list(resumed) == ["net", "teacher"] and not teacher.training
    assert teacher[0].scale == 1.0 and resumed["net"][0].scale == 2.0
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert str(resumed) == str(trained)
    assert str(resumed.state_dict().keys()) == str(trained.state_dict().keys())
    batch = torch.ones(1, 3)
    with torch.no_grad():
        assert torch.equal(teacher[0].body(batch), trained["teacher"][0].body(batch))


def test_a_lazy_layer_keeps_its_hooks_until_its_first_batch():
    def change(model):
        model(torch.ones(1, 3))

    trained = torch.nn.Sequential(torch.nn.LazyLinear(2))
    start = Start({"model": trained})
    change(trained)
    record, *_ = encode({"model": trained}, start)
    resumed = torch.nn.Sequential(torch.nn.LazyLinear(2))
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    resumed.load_state_dict(trained.state_dict())
    assert torch.equal(resumed(torch.ones(1, 3)), trained(torch.ones(1, 3)))


def test_a_buffer_of_the_first_forward_comes_back():
    def change(model):
        model.register_buffer("late", torch.ones(2), persistent=True)

    _, resumed = train(Net, change)
    assert resumed.state_dict()["late"].tolist() == [1, 1]


# ---- what cannot be saved --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_value", "reason"),
    [
        (lambda: lambda: 1, "builtins.function"),
        (lambda: type("New", (), {})(), "New"),
        (lambda: io.StringIO(), "_io.StringIO"),
        (lambda: torch.optim.SGD, "builtins.type"),
        (lambda: itertools.cycle({1}), "itertools.cycle"),
        (lambda: torch.empty(2, device="meta"), "torch.Tensor without values"),
        (lambda: iter({1}), "set_iterator"),
        (lambda: dt.datetime.now(tz=__import__("zoneinfo").ZoneInfo("Europe/Berlin")), "ZoneInfo"),
    ],
)
def test_what_a_record_cannot_hold_is_named(make_value, reason):
    def make():
        return Thing(part=Thing(), values=[], kept=0)

    def change(model):
        model.part.value = make_value()
        model.values.append(make_value())
        model.part.nested = {"deep": [(make_value(),)]}
        model.kept = 1

    record, unsaved = record_of(make, change)
    assert {(each.path, each.name, each.is_part) for each in unsaved} == {
        ("model.part", "value", False),
        ("model.part", "nested", True),
        ("model", "values", True),
    }
    assert all(reason in each.kind for each in unsaved)
    resumed = make()
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert resumed.kept == 1 and resumed.values == [] and vars(resumed.part) == {}


@pytest.mark.parametrize(
    "make_value",
    [
        lambda: torch.nested.nested_tensor([torch.ones(1)]),
        lambda: torch.ones(1).to_mkldnn(),
        lambda: np.ma.masked_array(np.zeros(3), mask=[0, 0, 1]),
        lambda: np.zeros(2, dtype={"names": "ab", "formats": ["f4", "i4"], "offsets": [0, 0]}),
    ],
    ids=["nested", "mkldnn", "masked", "overlapping"],
)
def test_an_array_or_a_tensor_that_no_file_can_hold_is_named_once_it_is_there(make_value):
    def make():
        return Thing(kept=make_value(), value=None)

    assert record_of(make, lambda model: None)[1] == []

    def change(model):
        model.value = make_value()

    record, (unsaved,) = record_of(make, change)
    assert unsaved[:2] == ("model", "value") and record["tensors"] == []


@pytest.mark.parametrize("make_value", [lambda: np.zeros(4), lambda: torch.zeros(4)])
def test_an_array_of_too_many_elements_is_named(make_value, monkeypatch):
    assert encoding.MAX_SAVED == 2**26
    monkeypatch.setattr(encoding, "MAX_SAVED", 3)

    def make():
        return Thing(value=make_value())

    def change(model):
        model.value[0] = 1

    record, (unsaved,) = record_of(make, change)
    assert unsaved[:2] == ("model", "value") and unsaved.kind.endswith("of 4 elements")
    assert nodes_of(record) == []


def changed_pool(make, change=lambda pool: None):
    """Return a set, what it is after an interruption, and what is known to differ at which time."""
    trained = Thing(pool=set())
    start = Start({"model": trained})
    trained.pool = make()
    change(trained.pool)
    encoded = encode({"model": trained}, start)
    record, reordered = encoded.record, encoded.reordered
    resumed = Thing(pool=set())
    restored = restore({"model": resumed}, Start({"model": resumed}), record)
    assert resumed.pool == trained.pool
    return trained.pool, resumed.pool, reordered, restored.reordered


@pytest.mark.parametrize("number", [0, 3, 19, 20, 33, 38, 500])
@pytest.mark.parametrize("step", [3, 129, 0.5])
def test_a_set_of_numbers_has_its_order_again(number, step):
    numbers = [step * element for element in range(number)]
    trained, resumed, *known = changed_pool(set, lambda pool: pool.update(numbers))
    assert list(resumed) == list(trained) and known == [[], []]


def test_a_set_that_may_come_in_another_order_is_known_when_it_is_saved():
    """Its table does not shrink when elements are removed: the next ones have other places."""

    def remove(pool):
        for element in list(pool)[5:]:
            pool.remove(element)

    trained, resumed, *known = changed_pool(lambda: set(range(19)), remove)
    assert list(resumed) == list(trained) and known == [["model.pool"], []]
    for pool in (trained, resumed):
        pool.add(40)
        pool.add(10)
    assert list(resumed) != list(trained)


def test_a_copy_of_a_set_that_would_have_another_order_is_known():
    """Its table has another length than that of a set that has grown one by one."""
    first = set(range(0, 129 * 127, 129))
    trained, resumed, *known = changed_pool(lambda: set(first))
    assert list(resumed) != list(trained) and known == [["model.pool"], ["a set"]]


@pytest.mark.parametrize("make", [lambda: {"a", "b", 3}, lambda: {(1, 2), (3, 4)}])
def test_of_a_set_of_other_values_no_order_is_said(make):
    """That of text is another one in each process, also in two that nobody interrupts."""

    def remove(pool):
        pool.update(map(str, range(100)))
        pool.difference_update(map(str, range(100)))

    assert changed_pool(make, remove)[2:] == ([], [])


def test_a_set_whose_order_cannot_be_had_is_known():
    record, _ = record_of(Thing, lambda model: setattr(model, "pool", {1, 2, 3}))
    record["nodes"] = record["nodes"].replace("[1,2,3]", "[3,2,1]")
    resumed = Thing()
    restored = restore({"model": resumed}, Start({"model": resumed}), record)
    assert resumed.pool == {1, 2, 3} and restored.reordered == ["a set"]


def test_hyperparameters_that_change_while_training_come_back():
    class Module(LightningModule):
        def __init__(self, rate=0.1, parts=None):
            super().__init__()
            self.save_hyperparameters()

    module = Module(parts=[object()])
    start = Start({"model": module})
    module.hparams.rate = 0.2
    record, unsaved, *_ = encode({"model": module}, start)
    assert unsaved == []
    resumed = Module(parts=[3])
    hyperparameters = resumed.hparams
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert resumed.hparams is hyperparameters and hyperparameters == {"rate": 0.2, "parts": [3]}


def test_a_librarys_object_that_changes_is_named():
    text = io.StringIO()
    model = Thing(text=text, step=0)
    start = Start({"model": model})
    assert encode({"model": model}, start)[1] == []
    text.write("more")
    (unsaved,) = encode({"model": model}, start)[1]
    assert unsaved[:4] == ("model", "text", "_io.StringIO", text)
    assert unsaved.changes and not (unsaved.is_part or unsaved.is_first or unsaved.loses)


def test_a_reference_to_what_the_resumed_program_has_not_got_is_named():
    trained = Thing(parts=[Thing(), Thing()], part=None)
    start = Start({"model": trained})
    trained.part = trained.parts[1]
    record, *_ = encode({"model": trained}, start)
    resumed = Thing(parts=[Thing()], part=None)
    restored = restore({"model": resumed}, Start({"model": resumed}), record)
    assert restored.missing == ["model.parts[1]"]
    assert resumed.part is None


def test_a_class_that_the_resumed_program_has_not_got_is_refused():
    class Local:
        """No module has it."""

    trained = Thing(one=Local())
    start = Start({"model": trained})
    trained.two = Local()
    record, unsaved, *_ = encode({"model": trained}, start)
    assert unsaved == []
    resumed = Thing(one=None)
    with pytest.raises(UserError, match="Local, which this program does not have"):
        restore({"model": resumed}, Start({"model": resumed}), record)


@pytest.mark.parametrize("mode", ["w+", "r"])
def test_a_memory_map_that_training_writes_is_named(tmp_path, mode):
    """Its file is no part of a checkpoint. One that is only read stays as it is."""
    np.memmap(tmp_path / "map", np.float32, "w+", shape=(4,)).flush()
    model = Thing(scores=np.memmap(tmp_path / "map", np.float32, mode, shape=(4,)))
    start = Start({"model": model})
    np.memmap(tmp_path / "map", np.float32, "r+", shape=(4,))[0] = 1
    _, unsaved, *_ = encode({"model": model}, start)
    named = [(each.path, each.name, each.kind) for each in unsaved]
    assert named == ([("model", "scores", "numpy.memmap")] if mode == "w+" else [])
