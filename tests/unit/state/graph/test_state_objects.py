"""state/graph/kinds: objects that come back, and those that are named as they change."""

import contextvars
import copy
import ctypes
import functools
import hashlib
import mmap
import multiprocessing
import queue
import sqlite3
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import graph_records
import pytest
import torch
from graph_records import mine, state_of
from sklearn.neighbors import KDTree

from sagemaker_lightning.state.graph.nodes import is_made_of_attributes
from sagemaker_lightning.state.graph.state import GraphState, digests, names_in


class Thing(graph_records.Thing):
    """An object of this module, from whose classes what training makes comes back."""


def test_a_tensor_of_a_class_that_no_module_has_is_named_when_it_changes():
    class Image(torch.Tensor):
        """A class within a function."""

    owner, state = mine(image=None)
    owner.image = torch.ones(2).as_subclass(Image)
    assert "mine.image" not in names_in(state.encode())
    assert [(each.name, each.kind.rpartition(".")[2]) for each in state.unsaved] == [
        ("image", "Image")
    ]


class TextSlotted:
    """Has a slot whose name is a text, as a user may write it."""

    __slots__ = "total"


class PrivatelySlotted(TextSlotted):
    """Has a slot with a private name besides."""

    __slots__ = ("__count",)

    def __init__(self):
        self.total = self.__count = 0

    def add(self):
        self.total += 1
        self.__count += 1


def test_slots_with_private_names_and_one_whose_name_is_a_text_come_back():
    trained = PrivatelySlotted()
    state = state_of(trained)
    trained.add()
    record = state.encode()
    assert set(names_in(record)) == {"model", "model.total", "model._PrivatelySlotted__count"}
    resumed = PrivatelySlotted()
    state_of(resumed).restore(record)
    assert resumed.total == resumed._PrivatelySlotted__count == 1


def test_a_weak_reference_refers_to_the_object_that_it_did():
    def begin():
        model = Thing(stages=[Thing(), Thing()])
        model.now = weakref.ref(model.stages[0])
        return model, state_of(model)

    trained, state = begin()
    trained.now = weakref.ref(trained.stages[1])
    resumed, other = begin()
    other.restore(state.encode())
    assert resumed.now() is resumed.stages[1] and not state.unsaved


def test_a_proxy_stands_for_the_object_that_it_did():
    def begin():
        model = Thing(stages=[Thing(number=1), Thing(number=2)])
        model.now = weakref.proxy(model.stages[0])
        return model, state_of(model)

    trained, state = begin()
    assert "now" not in str(state.encode())
    trained.now = weakref.proxy(trained.stages[1])
    resumed, other = begin()
    other.restore(state.encode())
    resumed.stages[1].number = 3
    assert resumed.now.number == 3 and not state.unsaved


def test_an_object_that_says_its_state_as_arrays_is_not_made_of_attributes():
    assert not is_made_of_attributes(KDTree(torch.rand(9, 2).numpy()))


def test_a_proxy_of_nothing_is_not_saved():
    model = Thing(now=None)
    state = state_of(model)
    model.now = weakref.proxy(Thing())
    assert "now" not in str(state.encode()["nodes"])
    assert [each.name for each in state.unsaved] == ["now"]


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_weak_reference_to_what_is_gone_refers_to_nothing(is_freed):
    """As an RNN's to weights that FSDP2 has gathered, whose memory is freed."""
    whole = torch.ones(1000)
    model = Thing(now=None)
    state = state_of(model)
    model.now = weakref.ref(whole if is_freed else Thing())
    whole.untyped_storage().resize_(0)
    resumed = Thing(now=None)
    state_of(resumed).restore(state.encode())
    assert resumed.now() is None and not state.unsaved


class Pair(ctypes.Structure):
    """A structure of a user's."""

    _fields_ = (("first", ctypes.c_int), ("second", ctypes.c_double))


def simple_queue() -> queue.SimpleQueue:
    """Return a queue with an item: an empty one shows nothing, from Python 3.13 on."""
    made: queue.SimpleQueue = queue.SimpleQueue()
    made.put(0)
    return made


HOLDERS = {
    "a queue": (queue.Queue, lambda held, key: held.put(1)),
    "a queue by priority": (queue.PriorityQueue, lambda held, key: held.put(1)),
    "a weak dictionary": (weakref.WeakKeyDictionary, lambda held, key: held.update({key: 1})),
    "a dictionary of weak values": (
        weakref.WeakValueDictionary,
        lambda held, key: held.update({1: key}),
    ),
    "a weak set": (weakref.WeakSet, lambda held, key: held.add(key)),
    "a thread's own": (threading.local, lambda held, key: setattr(held, "count", 1)),
    "a context variable": (lambda: contextvars.ContextVar("own"), lambda held, key: held.set(1)),
    "a structure of C": (Pair, lambda held, key: setattr(held, "first", 1)),
    "a lock that is taken": (threading.Lock, lambda held, key: held.acquire()),
    "a budget of which is taken": (threading.Semaphore, lambda held, key: held.acquire()),
    "a simple queue": (simple_queue, lambda held, key: held.put(1)),
    "a database in memory": (
        lambda: sqlite3.connect(":memory:"),
        lambda held, key: held.executescript("create table t (n); insert into t values (1)"),
    ),
    "a map of memory": (lambda: mmap.mmap(-1, 8), lambda held, key: held.write(b"1")),
    "results that are kept": (
        lambda: functools.lru_cache(lambda number: number),
        lambda held, key: held(1),
    ),
    "a list behind a proxy": (
        lambda: types.MappingProxyType({"held": []}),
        lambda held, key: held["held"].append(1),
    ),
    "one between processes": (multiprocessing.Semaphore, lambda held, key: held.acquire()),
}


@pytest.mark.parametrize(("make", "change"), HOLDERS.values(), ids=HOLDERS)
def test_what_pythons_library_holds_values_in_is_named_if_it_changes(make, change):
    model = Thing(key=Thing(), held=make())
    state = state_of(model)
    state.encode()
    assert not state.unsaved
    change(model.held, model.key)
    state.encode()
    assert [(each.name, each.changes) for each in state.unsaved] == [("held", True)]


def test_a_view_of_bytes_that_are_saved_is_as_they_are():
    def begin():
        model = Thing(memory=bytearray(4))
        model.view = memoryview(model.memory)
        return model, state_of(model)

    trained, state = begin()
    trained.view[0] = 1
    resumed, other = begin()
    other.restore(state.encode())
    assert resumed.view[0] == 1 and not state.unsaved


def test_a_pool_of_threads_what_waits_and_what_is_only_read_are_no_state(tmp_path):
    model = Thing(
        lock=threading.Lock(),
        condition=threading.Condition(),
        pool=ThreadPoolExecutor(1),
        database=sqlite3.connect(":memory:"),
        text=(tmp_path / "text").open("a"),
    )
    state = state_of(model)
    with model.lock, model.condition:
        pass
    model.pool.submit(str).result()
    model.database.execute("select 1")
    model.text.write("1")
    state.encode()
    model.pool.shutdown()
    assert not state.unsaved


class Halving(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of a user's."""

    def get_lr(self):
        return [group["lr"] / 2 for group in self.optimizer.param_groups]


class Descent(torch.optim.SGD):
    """An optimizer of a user's that counts."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


def learning(model, steps):
    """Let a model train by what its first step makes."""
    for _ in range(steps):
        if model.optimizer is None:
            model.own = torch.ones(3, requires_grad=True)
            groups = [{"params": model.net.parameters()}, {"params": [model.own], "lr": 0.5}]
            model.optimizer = model.makes(groups, lr=0.25)
            model.schedule = model.schedules(model.optimizer)

        def closure():
            model.optimizer.zero_grad()
            error = (model.net(model.own) - 3).square().sum()
            error.backward()
            return error

        model.optimizer.step(closure)
        model.schedule.step()
    return [each.tolist() for each in (*model.net.parameters(), model.own)]


def with_none(makes, schedules):
    """Return a model that has made no optimizer yet."""
    torch.manual_seed(1)
    net = torch.nn.Linear(3, 1)
    return Thing(net=net, optimizer=None, makes=makes, schedules=schedules)


SGD = functools.partial(torch.optim.SGD, momentum=0.5)
StepLR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)


@pytest.mark.parametrize("schedules", [StepLR, Halving])
@pytest.mark.parametrize("makes", [SGD, torch.optim.Adam, torch.optim.ASGD, Descent])
def test_an_optimizer_that_is_made_on_first_use_comes_back(makes, schedules):
    model = with_none(makes, schedules)
    state = state_of(model)
    learning(model, 3)
    record = state.encode()
    assert not state.unsaved
    resumed = with_none(makes, schedules)
    resumed.net.load_state_dict(copy.deepcopy(model.net.state_dict()))
    state_of(resumed).restore(record)
    assert type(resumed.optimizer) is type(model.optimizer)
    assert resumed.optimizer.param_groups[1]["params"][0] is resumed.own
    assert resumed.optimizer.param_groups[0]["params"][0] is resumed.net.weight
    assert resumed.schedule.optimizer is resumed.optimizer
    assert learning(resumed, 3) == learning(model, 3)


def test_an_optimizer_that_comes_back_calls_hooks_again():
    model = with_none(torch.optim.Adamax, StepLR)
    state = state_of(model)
    learning(model, 1)
    resumed = with_none(torch.optim.Adamax, StepLR)
    state_of(resumed).restore(state.encode())
    calls = []
    resumed.optimizer.register_step_post_hook(lambda *arguments: calls.append(1))
    learning(resumed, 2)
    assert len(calls) == 2


def test_an_optimizer_with_a_function_of_its_own_does_not_come_back():
    model = with_none(SGD, StepLR)
    state = state_of(model)
    learning(model, 1)
    model.optimizer.register_step_post_hook(lambda *arguments: None)
    names = {each.name for each in (state.encode(), state.unsaved)[1]}
    assert names == {"optimizer", "schedule"}


def test_a_buffer_that_training_has_made_is_in_no_state_dict_after_any_resume():
    trained = torch.nn.Linear(1, 1)
    state = state_of(trained)
    trained.register_buffer("hidden", torch.ones(1), persistent=False)
    for _ in range(2):
        record = state.encode()
        resumed = torch.nn.Linear(1, 1)
        state = GraphState(lambda model=resumed: {"model": model})
        state.restore(record)
        state.mark()
        state.restore(record)
        assert "hidden" in dict(resumed.named_buffers()) and "hidden" not in resumed.state_dict()


class Store:
    """Losses in a database in memory, with a hash of them."""

    asked = 0
    """How often an object of the class was asked for its state."""

    def __init__(self, losses=()):
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table losses (loss)")
        self.put(losses)

    def put(self, losses):
        self.database.executemany("insert into losses values (?)", [(each,) for each in losses])

    def losses(self):
        return [loss for (loss,) in self.database.execute("select loss from losses")]

    def __getstate__(self):
        Store.asked += 1
        return {"losses": self.losses()}

    def __setstate__(self, state):
        vars(self).clear()
        self.__init__(state["losses"])


class Hashed(Store):
    """Keeps a hash in place of losses."""

    def __init__(self, losses=()):
        self.hash = hashlib.sha256()
        self.put(losses)

    def put(self, losses):
        self.seen = [*getattr(self, "seen", ()), *losses]
        self.hash.update(str(losses).encode())

    def losses(self):
        return self.seen


class Unsaid(Store):
    """Says something that cannot be saved."""

    def __getstate__(self):
        return vars(self)


class Keeper:
    """Leaves a lock out of its state, and has objects that others change."""

    def __init__(self):
        self.lock = threading.Lock()
        self.kept = Thing(trials=[])

    def __getstate__(self):
        return {"kept": self.kept}


def test_a_state_that_leads_to_what_no_checkpoint_can_hold_is_not_used():
    model, state = mine(keeper=Keeper())
    model.keeper.kept.trials.append(threading.Lock())
    state.encode()
    assert [(each.path, each.name) for each in state.unsaved] == [("mine.keeper.kept", "trials")]


@pytest.mark.parametrize("class_", [Store, Hashed])
def test_an_object_that_says_its_state_comes_back_by_that(class_):
    def begin():
        model = Thing(store=class_([0.5]), again=[])
        model.again.append(model.store)
        return model, state_of(model)

    trained, state = begin()
    trained.store.put([0.25, 2])
    record = state.encode()
    assert not state.unsaved
    resumed, other = begin()
    for _ in range(2):
        other.restore(record)
        assert resumed.store is resumed.again[0]
        assert resumed.store.losses() == [0.5, 0.25, 2]
    assert digests(other.encode()) == digests(record) and not other.unsaved


def test_a_new_object_that_says_its_state_comes_back_by_that():
    trained, state = mine(store=None, kept=Store())
    trained.store = [Store([1, 2])]
    record = state.encode()
    assert not state.unsaved
    resumed, other = mine(store=None, kept=Store())
    other.restore(record)
    assert resumed.store[0].losses() == [1, 2]


def test_an_object_is_not_asked_for_its_state_where_nothing_needs_it():
    model = Thing(store=Store(), counts=[])
    state = state_of(model)
    asked = Store.asked
    model.counts.append(1)
    model.store.name = "another"
    state.encode()
    assert Store.asked == asked and not state.unsaved


def test_a_state_that_no_checkpoint_can_hold_is_named():
    model = Thing(store=Unsaid(), new=None)
    state = state_of(model)
    model.store.put([1])
    model.new = Unsaid()
    state.encode()
    assert [(each.path, each.name) for each in state.unsaved] == [
        ("model.store", "database"),
        ("model", "new"),
    ]
