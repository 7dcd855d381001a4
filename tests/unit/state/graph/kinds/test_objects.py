"""state/graph/kinds/objects.py: objects of users' classes that are containers of Python's, too."""

import copy
from collections import defaultdict, deque

import torch
from graph_records import Net, Thing, train
from torch import nn
from torchmetrics import MeanMetric

from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.start import Start
from sagemaker_lightning.state.graph.state import GraphState


class Window(deque):
    """The newest values, and how many there were."""

    def __init__(self, size: int) -> None:
        super().__init__(maxlen=size)
        self.count = 0

    def add(self, value):
        self.append(value)
        self.count += 1


class Tree(defaultdict):
    """Trees within it."""

    def __init__(self, name: str) -> None:
        super().__init__(list)
        self.name = name


def test_a_new_deque_of_a_users_class_is_as_long_at_most():
    def change(thing):
        thing.window = Window(3)
        for value in range(5):
            thing.window.add(value)

    trained, resumed = train(lambda: Thing(first=Window(1)), change)
    for each in (trained, resumed):
        each.window.add(5)
    assert resumed.window == trained.window == deque([3, 4, 5]) and resumed.window.count == 6
    assert type(resumed.window) is Window and resumed.window.maxlen == 3


def test_a_new_defaultdict_of_a_users_class_makes_what_it_lacks():
    def change(thing):
        thing.tree = Tree("root")
        thing.tree["a"].append(1)
        thing.old["b"].append(2)

    trained, resumed = train(lambda: Thing(old=Tree("old")), change)
    for each in (trained, resumed):
        each.tree["c"].append(3)
        each.old["d"].append(4)
    assert (resumed.tree, resumed.old) == (trained.tree, trained.old)
    assert (resumed.tree.name, resumed.old.name) == ("root", "old")


def test_an_attribute_stays_if_no_record_has_the_module_that_takes_its_place():
    class Measured(Net):
        def __init__(self):
            super().__init__()
            self.error = MeanMetric()
            self.copied = None

    def change(net):
        net.copied = copy.deepcopy(net.error)
        net.scale = 2.0

    trained, resumed = Measured(), Measured()
    start = Start({"model": trained})
    change(trained)
    encoded = encode({"model": trained}, start)
    restore({"model": resumed}, Start({"model": resumed}), encoded.record)
    assert [each.name for each in encoded.unsaved] == ["copied"]
    assert resumed.copied is None and resumed.scale == 2.0


class Proxy:
    """Says that it is what it stands for, as wrapt's do."""

    def __init__(self, value) -> None:
        self.value = value
        self.count = 0

    @property
    def __class__(self):
        return type(self.value)


def test_a_proxy_of_a_container_is_its_attributes():
    def change(thing):
        thing.proxy.count = 3
        thing.proxy.value.append(1)

    trained, resumed = train(lambda: Thing(proxy=Proxy([])), change)
    assert type(resumed.proxy) is Proxy and isinstance(resumed.proxy, list)
    assert vars(resumed.proxy) == vars(trained.proxy) == {"value": [1], "count": 3}


class Steps(nn.Module):
    """Two modules, and a buffer, in an order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Tanh()
        self.second = nn.Linear(1, 1)
        self.register_buffer("one", torch.zeros(1))
        self.register_buffer("two", torch.zeros(1))

    def put_the_first_last(self) -> None:
        first, one = self.first, self.one
        del self.first, self.one
        self.first = first
        self.register_buffer("one", one)


def test_the_order_of_a_modules_members_comes_back_each_time():
    trained = Steps()
    state = GraphState(lambda: {"model": trained})
    state.mark()
    trained.put_the_first_last()
    record = state.encode()
    for _ in range(2):
        resumed = Steps()
        state = GraphState(lambda resumed=resumed: {"model": resumed})
        state.mark()
        state.restore(record)
        assert [name for name, _ in resumed.named_children()] == ["second", "first"]
        assert [name for name, _ in resumed.named_buffers()] == ["two", "one"]
        state.mark()
        record = state.encode()


class Part:
    """Hashed in an order of its own, as objects are in each process."""

    def __init__(self, number: int, order: int) -> None:
        self.number = number
        self.order = order

    def __hash__(self) -> int:
        return self.order


def test_objects_of_a_set_are_known_by_the_other_places_that_have_them():
    def begin(orders):
        parts = [Part(number, order) for number, order in enumerate(orders)]
        return Thing(chosen={*parts}, within=Thing(deep=Thing(parts=parts)))

    trained = begin([0, 1, 2])
    start = Start({"model": trained})
    for part in trained.within.deep.parts:
        part.number += 100
    record, *_ = encode({"model": trained}, start)
    resumed = begin([2, 0, 1])
    restore({"model": resumed}, Start({"model": resumed}), record)
    assert [part.number for part in resumed.within.deep.parts] == [100, 101, 102]
