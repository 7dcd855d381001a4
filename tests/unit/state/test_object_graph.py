"""state/object_graph.py: what a walk reaches, and when it is walked again."""

import importlib
import logging
import sys
import types
from collections import namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from types import BuiltinFunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, Timer
from torchmetrics import MeanMetric

from sagemaker_lightning.state import generators, object_graph
from sagemaker_lightning.state.digests import COMPARED_IN_FULL
from sagemaker_lightning.state.graph.state import GraphState, nodes_of
from sagemaker_lightning.state.graph.values import decode, encode
from sagemaker_lightning.state.module_variables import changed_variables, variable_digests
from sagemaker_lightning.state.object_graph import (
    at_one_moment,
    once_at_one_moment,
    set_on_self,
    users_members,
    walk,
)


class Holder:
    """An object of a user's."""

    def __init__(self) -> None:
        self.parts: list = []


@pytest.fixture
def found() -> list:
    """The owners for which roots were asked."""
    return []


@pytest.fixture
def roots(found):
    """Return the roots of walks for an owner."""

    @once_at_one_moment
    def roots(owner: Holder) -> dict:
        found.append(owner)
        return {"holder": owner}

    return roots


def paths(roots: dict, **options) -> list[str]:
    return [path for path, _ in walk(roots, **options)]


def test_the_same_objects_are_walked_over_once_at_one_moment(roots, found):
    holder = Holder()
    with at_one_moment():
        before = paths(roots(holder), code=False)
        holder.parts.append(Holder())
        assert paths(roots(holder), code=False) == before
        with at_one_moment():  # the same moment
            assert paths(roots(holder), code=False) == before
        assert paths(roots(holder), skip=(list,), code=False) == before
        assert found == [holder]
    assert paths(roots(holder), code=False) == [*before, "holder.parts.0", "holder.parts.0.parts"]
    assert found == [holder, holder]


def test_other_roots_are_walked_over_as_they_are_at_one_moment(roots):
    first, second = Holder(), Holder()
    with at_one_moment():
        list(walk(roots(first), code=False))
        second.parts.append({})
        assert "holder.parts.0" in paths(roots(second), code=False)
        other = {"holder": first}
        first.parts.append({})
        assert "holder.parts.0" in paths(other, code=False)


def test_an_error_ends_the_moment(roots):
    holder = Holder()
    with pytest.raises(ZeroDivisionError), at_one_moment():
        list(walk(roots(holder)))
        raise ZeroDivisionError
    holder.parts.append({})
    assert "holder.parts.0" in paths(roots(holder), code=False)


@pytest.mark.parametrize("class_", [*object_graph.PLAIN_OBJECTS, Trainer])
def test_all_that_the_code_of_a_base_class_sets_on_its_objects_is_known(class_):
    """Its source is not read at a start: that of these classes takes a tenth of a second."""
    known = set().union(*map(object_graph._own_attributes, class_.__mro__))
    names = {name for name in set_on_self(class_) if not name.startswith("__")}
    # A function of LightningDataModule has a class within it.
    assert names - known <= {"available", "length"}


@pytest.mark.parametrize("make", [lambda: EarlyStopping("loss"), ModelCheckpoint, Timer])
def test_what_the_code_of_a_librarys_class_sets_on_its_objects_is_found(make):
    assert set_on_self(type(make())) >= vars(make()).keys()


def test_a_class_without_a_source_sets_nothing_that_is_known():
    class_ = type("Unknown", (), {"__module__": "no_module"})
    assert set_on_self(class_) == set()
    class_.__static_attributes__ = ("a",)  # as Python 3.13 has it
    assert set_on_self(class_) == {"a"}


def test_attributes_are_those_in_the_dict_and_in_slots():
    class Slotted:
        __slots__ = ("__hidden", "missing", "shown")

        def __init__(self) -> None:
            self.shown = 1
            self.__hidden = 2

    assert object_graph.attributes(Slotted()) == {"shown": 1, "_Slotted__hidden": 2}
    assert object_graph.attributes(SimpleNamespace(a=1)) == {"a": 1}


Step = namedtuple("Step", "state reward done")


class Counting(LightningModule):
    """A user's module that calls its state as Lightning's code calls methods of other objects."""

    def __init__(self):
        super().__init__()
        self.step = 0
        self.values = []
        self.data = {}
        self.save_hyperparameters()


class Tracker:
    """Counts batches; its method is a hook."""

    def __init__(self):
        self.batches = 0

    def update(self, *arguments):
        self.batches += 1


def changed_names(change, **roots) -> list[str]:
    """Return the names of what is saved once `change` has been called."""
    state = GraphState(lambda: roots)
    state.mark()
    change()
    nodes = nodes_of(state.encode())
    assert state.unsaved == []
    return [
        name
        for _, path, note, *_ in nodes
        for name in ([f"{path}.{each}" for each in note["names"]] if type(note) is dict else [path])
    ]


def test_an_attribute_may_have_the_name_of_a_librarys_method():
    model = Counting()

    def change():
        model.step += 1
        model.values.append(1.0)
        model.data["a"] = 1

    assert changed_names(change, model=model) == ["model.step", "model.values", "model.data"]


def test_what_lightning_sets_on_its_objects_is_no_state_of_the_user():
    model, stopping = Counting(), EarlyStopping("loss")

    def change():
        model.automatic_optimization = False
        model.eval()
        stopping.wait_count = 3

    assert changed_names(change, model=model, stopping=stopping) == []


def test_what_another_trainer_lets_a_callback_log_by_is_no_state_of_the_user():
    """A callback may hold one that a trainer within the training is given, with another model."""
    held = type("Held", (Callback,), {})()
    held.log, held.replaced = Counting().log, Counting().log
    assert object_graph.attributes(held).keys() == {"replaced"}


def test_the_object_whose_method_is_a_hook_is_reached():
    tracker = Tracker()
    callback = LambdaCallback(on_train_batch_end=tracker.update)
    assert changed_names(tracker.update, callback=callback) == [
        "callback.on_train_batch_end.__self__.batches"
    ]


@dataclass
class Node:
    """A part of a tree that knows its parent."""

    depth: int
    parent: "Node | None" = None
    children: list = field(default_factory=list)


class Checked:
    """A field's descriptor, which raises anything when it is read (anomalib has such)."""

    def __set__(self, instance: object, value: object) -> None:
        vars(instance)["_image"] = value

    def __get__(self, instance: object, owner: type) -> object:
        raise NameError("Callable")


@dataclass
class Item:
    """A user's data."""

    image: int


Item.image = Checked()


class Foreign:
    """A function of a C++ extension: it has no `__qualname__` (Boost.Python's)."""

    __class__ = property(lambda self: BuiltinFunctionType)
    __name__ = "f"


class Library:
    """A C library, which has a function for each name that it is asked for (llvmlite has such)."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        return object()


def test_what_a_users_object_raises_does_not_end_a_walk():
    """Its code does not run where it need not; else the object is one that cannot be saved."""
    restored = decode(encode(Item(3)))
    assert type(restored) is Item and vars(restored) == {"_image": 3}
    tracker = Tracker()
    tracker.function = Foreign()
    tracker.library = Library()
    assert changed_names(lambda: None, tracker=tracker) == []


class OfBoost:
    """Says, as functions of Boost.Python's do, that it is a function of C code."""

    __class__ = types.BuiltinFunctionType


def test_what_says_that_it_is_a_function_of_c_code_need_not_be_one():
    tracker = Tracker()
    tracker.function = OfBoost()
    assert isinstance(tracker.function, types.BuiltinFunctionType)
    assert changed_names(lambda: None, tracker=tracker) == []


@pytest.mark.parametrize("size", [3, COMPARED_IN_FULL + 1])
def test_an_array_of_objects_is_saved_when_it_changes(size):
    owner = type("Mine", (), {})()
    owner.value = np.array(["a"] * size, dtype=object)
    assert changed_names(lambda: None, mine=owner) == []
    assert changed_names(lambda: owner.value.put(1, "b"), mine=owner) == ["mine.value"]


def test_each_element_of_a_dict_has_a_path_of_its_own():
    """Layers of one size have one text, that of an object has its address."""
    owner = type("Mine", (), {})()
    owner.by_layer = {torch.nn.Linear(2, 2): Tracker() for _ in range(2)}
    owner.by_object = {object(): Tracker() for _ in range(2)}
    owner.by_number = {1: Tracker(), "1": Tracker()}
    trackers = [
        tracker
        for trackers in (owner.by_layer, owner.by_object, owner.by_number)
        for tracker in trackers.values()
    ]
    assert changed_names(lambda: [tracker.update() for tracker in trackers], mine=owner) == [
        "mine.by_layer[#0].batches",
        "mine.by_layer[#1].batches",
        "mine.by_object[#0].batches",
        "mine.by_object[#1].batches",
        "mine.by_number[1].batches",
        "mine.by_number['1'].batches",
    ]


def test_each_object_of_a_long_list_is_read():
    owner = type("Mine", (), {})()
    owner.trackers = [Tracker() for _ in range(1000)]
    assert changed_names(owner.trackers[999].update, mine=owner) == ["mine.trackers[999].batches"]


def test_many_objects_of_one_attribute_take_nothing_from_another(monkeypatch):
    """Neither those of a list, nor those that hold one another."""
    monkeypatch.setattr(object_graph, "MAX_OBJECTS", 20)
    owner = type("Mine", (), {})()
    owner.corpus = [[[index] for index in range(5)] for _ in range(5)]
    owner.chain = last = Node(0)
    for depth in range(1, 30):
        last.parent = last = Node(depth)
    owner.tracker = Tracker()
    assert dict(object_graph.walk({"mine": owner}))["mine.tracker"] is owner.tracker
    assert changed_names(owner.tracker.update, mine=owner) == ["mine.tracker.batches"]


class Slotted:
    """Has one attribute, in a slot."""

    __slots__ = ("sum",)

    def __init__(self):
        self.sum = 0.0


def first_loss(output):
    return output.square().mean()


def test_so_many_objects_of_an_attribute_are_read():
    """20,000; and 1,024 of a list."""
    members = [object() for _ in range(1024)]
    assert len(list(object_graph.walk({"a": members}))) == 1025
    members.append(object())
    assert len(list(object_graph.walk({"a": members}))) == 1025
    parts = [[object() for _ in range(1000)] for _ in range(20)]
    assert len(list(object_graph.walk({"a": parts, "b": [[]]}))) == 20_002


def test_what_a_walk_enters():
    owner = type("Mine", (), {})()
    owner.kind = Tracker
    owner.layers = torch.nn.Sequential(torch.nn.Linear(1, 1))
    owner.numbers = [1, "a", None, torch.zeros(1), np.zeros(1)]
    owner.same = owner.numbers
    owner.call = partial(first_loss, owner.numbers, key=owner.layers)
    owner.method = Tracker.update
    assert paths({"mine": owner}, code=False) == [
        "mine",
        "mine.kind",
        "mine.layers",
        "mine.layers.0",
        "mine.numbers",
        "mine.call",
        "mine.call.func",
        "mine.call.args",
        "mine.call.keywords",
        "mine.method",
    ]


def test_a_librarys_iterator_a_trainer_and_a_file_are_not_read(tmp_path):
    loader = torch.utils.data.DataLoader([1, 2], num_workers=1)
    assert object_graph.attributes(iter(loader)) == {}
    trainer = Trainer(logger=False, accelerator="cpu")
    trainer.seen = 1
    assert object_graph.attributes(trainer) == {}
    assert object_graph.attributes(object_graph.added_to(trainer)) == {"seen": 1}
    with (tmp_path / "file").open("w") as file:
        assert not object_graph.is_library_iterator(file)
    assert object_graph.is_library_iterator(iter([])) and not object_graph.is_library_iterator([])


DRAWN = []
SEEN = [0]


class OwnMetric(MeanMetric):
    """Counts its updates."""

    def __init__(self):
        super().__init__()
        self.seen = [0]


class OwnOptimizer(torch.optim.SGD):
    """Counts its steps."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.steps = 0


def test_what_a_librarys_base_class_keeps_is_no_state_of_the_user():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = OwnOptimizer([weight])
    assert object_graph.attributes(optimizer) == {"steps": 0}
    of_metric = object_graph.attributes(OwnMetric())
    assert "seen" in of_metric and of_metric.keys().isdisjoint({"mean_value", "weight"})
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.losses = [1.0]
    added = object_graph.added_to(optimizer)
    assert object_graph.attributes(added) == {"steps": 0, "losses": [1.0]}
    assert object_graph.owner_of(added) is optimizer and object_graph.owner_of(3) == 3
    loader = torch.utils.data.DataLoader([1], collate_fn=first_loss)
    setattr(loader, "__pl_saved_kwargs", {})
    loader.count = 1
    assert object_graph.attributes(object_graph.added_to(loader)) == {"count": 1}
    collating = object_graph.added_to(loader, but=("collate_fn",))
    assert object_graph.attributes(collating) == {"collate_fn": first_loss, "count": 1}


class OfUser(EarlyStopping):
    """A user's class of a library's: which sets `should_stop` on the trainer."""


def test_what_a_librarys_class_declares_or_sets_is_no_state_of_the_user():
    """What it calls, or sets on another object, may be the user's."""
    owner = OfUser("loss")
    owner.on_fit_start = partial(max, 1)
    owner.should_stop = owner.count = 1
    owner.mode_dict = {}
    owner.wait_count = 3
    assert object_graph.attributes(owner).keys() == {"on_fit_start", "should_stop", "count"}
    assert object_graph.has_place_for(owner, "count", 2)
    for name in ("wait_count", "mode_dict", "monitor"):
        assert not object_graph.has_place_for(owner, name, 2)


def test_functions_given_to_a_librarys_callback_and_what_is_added_to_it_are_read():
    owner = LambdaCallback(on_fit_start=counter())
    owner.count = 1
    assert object_graph.attributes(owner) == {"on_fit_start": owner.on_fit_start, "count": 1}
    assert object_graph.has_place_for(owner, "on_fit_start", counter())
    owner.on_fit_end = partial(max, 1)
    assert object_graph.attributes(owner).keys() == {"on_fit_start", "on_fit_end", "count"}
    assert object_graph.has_place_for(owner, "count", 2)
    assert not object_graph.has_place_for(owner, "on_train_end", 1)
    best = ModelCheckpoint("best")
    assert not object_graph.attributes(best)
    assert not object_graph.has_place_for(best, "dirpath", "/elsewhere")


def counter():
    """Return a function that has closed over its count, and a variable that has no value."""
    count = 0

    def add():
        nonlocal count
        count += 1
        return later if count < 0 else count

    if count:
        later = 1
    return add


def test_what_a_function_has_closed_over_is_there_again():
    add = counter()
    assert object_graph.closure(add) == {"count": 0}
    state = GraphState(lambda: {"add": add})
    state.mark()
    add(), add()
    record = state.encode()
    assert len(state.changes()) == 1
    add = counter()
    GraphState(lambda: {"add": add}).restore(record)
    assert add() == 3
    librarys = types.FunctionType(add.__code__, vars(torch.optim), "add", None, add.__closure__)
    assert object_graph.attributes(librarys) == {}
    add.__module__ = "torch.optim"  # as functools.wraps sets it
    assert object_graph.attributes(add) == {"count": 3}
    add.__module__ = None
    assert object_graph.attributes(add) == {"count": 3}
    assert dict(object_graph.function_members(add)) == {
        "count": 3,
        "defaults": (),
        "kwdefaults": {},
    }


def test_librarys_classes_are_left_out_of_the_globals_that_a_function_reads():
    def reads(step=Step):
        return Decimal, Tracker, DRAWN, (lambda: SEEN)

    members = dict(object_graph.function_members(reads))
    assert members == {
        "defaults": (Step,),
        "kwdefaults": {},
        "DRAWN": DRAWN,
        "SEEN": SEEN,
        "Tracker": Tracker,
    }
    variables = vars(torch.optim) | {"DRAWN": DRAWN}
    librarys = types.FunctionType(reads.__code__, variables, "reads", reads.__defaults__)
    assert dict(object_graph.function_members(librarys)) == {"defaults": (Step,), "kwdefaults": {}}
    reads.__module__ = "torch.optim"  # as functools.wraps sets it
    assert dict(object_graph.function_members(reads)) == members


@pytest.mark.parametrize("file", ["installed_{}.py", "package_{}/__init__.py", "own_{}.py"])
@pytest.mark.parametrize("where", ["target", "site-packages"])
def test_what_pip_installs_into_a_folder_is_not_the_users_own(tmp_path, monkeypatch, file, where):
    """`pip install --target` puts packages beside what a user may have written."""
    file = file.format(where.replace("-", "_"))
    folder = tmp_path / where
    for name, text in {
        file: "",
        "installed-1.0.dist-info/METADATA": "Name: installed",
        "installed-1.0.dist-info/RECORD": f"{file},,\n" if not file.startswith("own") else "",
        "own.egg-info/SOURCES.txt": f"{file}\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    name = file.partition(".")[0].partition("/")[0]
    monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    expected = where == "target" and file.startswith("own")
    assert object_graph.is_own_module(name) is expected


class SlottedAndMute:
    """An object of slots, one of them empty, that answers no other name."""

    __slots__ = ("empty", "steps")

    def __init__(self) -> None:
        self.steps = 3

    def __getattr__(self, name):
        raise KeyError(name)


def test_the_slots_of_an_object_are_read_without_its_own_code():
    assert object_graph.attributes(SlottedAndMute()) == {"steps": 3}
    assert not object_graph.has_namespace(SlottedAndMute()) and object_graph.has_namespace(Holder())


FUNCTIONS = 3_000
CODE_OF_PACKAGE = "\n".join(
    [
        "import random",
        "GENERATOR, TABLE, CALLS = random.Random(5), {'a': [1]}, 0",
        *(f"def call_{n}(): return call_{n + 1}" for n in range(FUNCTIONS)),
        f"def call_{FUNCTIONS}(): return None",
        "def draw(): return call_0, TABLE, CALLS, GENERATOR",
    ]
)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that is installed, whose functions call each other."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "drawing_package.py").write_text(CODE_OF_PACKAGE)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("drawing_package")
    del sys.modules["drawing_package"]


def test_a_generator_of_an_installed_package_is_found_in_what_its_functions_read(installed):
    found = generators.find({"transform": partial(installed.draw)})
    assert found == {"transform.func.GENERATOR": installed.GENERATOR}


def test_a_walk_enters_a_thousand_functions_of_an_installed_package(installed):
    """A package such as sympy has so many that a walk over all of them takes seconds."""
    entered = [each for _, each in walk({"f": installed.draw}) if type(each) is types.FunctionType]
    assert len(entered) == object_graph.MAX_OF_PACKAGE + 1 < FUNCTIONS  # one is not entered


def test_what_an_installed_package_counts_or_adds_to_a_table_is_a_change(installed):
    """What its tables hold is not compared: that takes as long as the rest of a checkpoint."""
    roots = {"transform": installed.draw}
    before = variable_digests(roots, {})
    installed.CALLS += 1
    assert changed_variables(before, variable_digests(roots, {})) == ["drawing_package.CALLS"]
    before = variable_digests(roots, {})
    installed.TABLE["a"].append(2)
    assert variable_digests(roots, {}) == before
    installed.TABLE["b"] = []
    assert changed_variables(before, variable_digests(roots, {})) == ["drawing_package.TABLE"]


def test_a_module_that_a_function_imports_itself_is_found(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("calls = 0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def counts() -> None:
        import imported_late

        imported_late.calls += 1

    assert object_graph.modules_in(counts) == {}
    counts()
    (found,) = object_graph.modules_in(counts).items()
    assert found[0].__name__ == "imported_late" and "calls" in found[1]
    del sys.modules["imported_late"]


class Logged(logging.Handler):
    """Counts what is logged."""


def test_handlers_of_a_users_class_lead_on_from_their_logger():
    """Those of other loggers do not, though each logger knows all of them."""
    logger, other = logging.Logger("a"), logging.getLogger("test_object_graph.other")
    handlers = [Logged(), logging.NullHandler(), Logged()]
    for each in handlers[:2]:
        logger.addHandler(each)
    other.addHandler(handlers[2])
    try:
        assert dict(users_members(logger)) == {"handlers.0": handlers[0]}
    finally:
        other.removeHandler(handlers[2])
