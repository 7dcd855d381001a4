"""state/: plain values of users' objects are encoded, compared and restored.

And what of them has changed, for long values, too.
"""

import random
import time
import warnings
import zlib
from collections import deque, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from types import BuiltinFunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, LambdaCallback
from torchmetrics import MeanMetric
from untrained import run_of

from sagemaker_lightning.resume.parts import start_hooks
from sagemaker_lightning.resume.parts.metrics import Metrics
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.parts.roots import of_kinds
from sagemaker_lightning.state import generators, object_graph
from sagemaker_lightning.state.digests import COMPARED_IN_FULL, digest, is_small
from sagemaker_lightning.state.graph.state import GraphState, nodes_of
from sagemaker_lightning.state.graph.values import decode, encode

Step = namedtuple("Step", "state reward done")


def test_a_metric_stays_on_its_device():
    class Watching(Callback):
        def __init__(self):
            self.mean = MeanMetric()

    trainer = Trainer(
        accelerator="cpu", callbacks=[Watching()], logger=False, enable_checkpointing=False
    )
    trainer.strategy.connect(LightningModule())
    trainer.strategy._root_device = torch.device("meta")
    ((_, metric),) = of_kinds(trainer, MeanMetric)
    metric.update(3.0)
    run = run_of(trainer)
    part = run.part(Metrics)
    saved = part.save(None, None)
    run.resumed = SimpleNamespace(of_data_ranks=lambda part: ([saved], [saved]))
    metric.reset()
    part.restore(saved, Moment.TRAINING)
    assert metric.mean_value.device.type == "cpu" and metric.compute() == 3.0


def test_what_hooks_compute_at_the_start_is_told_from_what_may_rightly_differ():
    class Starts(Callback):
        def on_fit_start(self, trainer, pl_module):
            self.anchor = {"weight": torch.ones(2)}
            self.baseline = 0.3
            self.mean = [1, None, np.float32(0.5)]
            self.folder = "/tmp"
            self.total_steps = 40
            self.first_step = trainer.global_step
            self.named = {"a": "b", "c": torch.ones(1)}
            self.data = torch.zeros((1 << 20) + 1)
            self.largest = torch.zeros(1 << 20)
            self.began = time.time()
            self.timer = {"began": time.monotonic(), "laps": 0}

    starts = Starts()
    trainer = SimpleNamespace(
        lightning_module=LightningModule(), callbacks=[starts], global_step=12, current_epoch=1
    )
    hooks = start_hooks.StartHooks(trainer)
    starts.on_fit_start(trainer, trainer.lightning_module)
    assert hooks.computed().keys() == {
        (id(starts), name) for name in ("anchor", "baseline", "mean", "first_step", "largest")
    }
    assert start_hooks.StartHooks(trainer).computed() == {}


@dataclass
class Bounds:
    """A penalty's bounds, and how many there are."""

    low: float
    number: int


class OnTrainStart(Callback):
    """Its hook sets what a test gives it."""

    def __init__(self, **values) -> None:
        self.values = (values,)

    def on_train_start(self, trainer, pl_module):
        vars(self).update(self.values[0])


def computed_by(trainer_values: dict, **values) -> set[str]:
    """Return the names of what counts as computed by hooks at the start."""
    callback = OnTrainStart(**values)
    trainer = SimpleNamespace(
        **{"lightning_module": LightningModule(), "global_step": 12, "current_epoch": 1}
        | {"callbacks": [callback]}
        | trainer_values
    )
    hooks = start_hooks.StartHooks(trainer)
    callback.on_train_start(trainer, trainer.lightning_module)
    # What is new has no name of its own there.
    return {name for _, name in hooks.computed() if name}


def test_which_numbers_follow_from_weights():
    values = {
        "complex": 1j,
        "scalar": np.float32(0.5),
        "set": {0.5, 3},
        "queue": deque([0.25]),
        "fields": Bounds(0.5, 3),
        "array": np.ones(2, np.int64),
        "mask": np.ones(2, bool),
        "epoch": 1,
        "step": 12,
    }
    others = {
        "flag": True,
        "count": 3,
        "counts": [1, 2],
        "nothing": [None],
        "empty": [],
        "text": np.array(["a"]),
        "with text": [0.5, "a"],
        "moment": np.array(["2026-01-01"], "datetime64[D]"),
    }
    assert computed_by({}, **values | others) == values.keys()


def test_of_a_long_list_the_first_elements_tell_what_it_is():
    values = [0.5] * object_graph.MAX_ELEMENTS
    assert computed_by({}, first=[*values, "a"], all=[*values[1:], "a"]) == {"first"}


def test_what_is_larger_than_the_weights_is_data(monkeypatch):
    """Some size is no data in any case."""
    monkeypatch.setattr(start_hooks, "MIN_ELEMENTS", 8)
    sizes = {f"of{size}": torch.zeros(size) for size in (8, 9, 12, 13)}
    sizes |= {"both": [np.zeros(4), torch.zeros(4)], "more": [np.zeros(5), torch.zeros(4)]}
    assert computed_by({}, **sizes) == {"of8", "both"}
    model = LightningModule()
    model.body = torch.nn.Linear(3, 3)
    assert computed_by({"lightning_module": model}, **sizes) == sizes.keys() - {"of13"}


@pytest.mark.parametrize("clock", ["time", "monotonic", "perf_counter", "process_time"])
def test_a_time_is_not_computed_from_weights(clock):
    class Starts(Callback):
        def on_fit_start(self, trainer, pl_module):
            now = getattr(time, clock)()
            self.began = now
            self.before = now - 1000.0
            self.later = now + 1000.0

    starts = Starts()
    trainer = SimpleNamespace(
        lightning_module=LightningModule(), callbacks=[starts], global_step=0, current_epoch=0
    )
    hooks = start_hooks.StartHooks(trainer)
    starts.on_fit_start(trainer, None)
    assert {name for _, name in hooks.computed()} == {"before", "later"}


def test_hooks_of_libraries_alone_compute_nothing():
    stopping = EarlyStopping("loss")
    trainer = SimpleNamespace(
        lightning_module=LightningModule(), callbacks=[stopping], global_step=0, current_epoch=0
    )
    hooks = start_hooks.StartHooks(trainer)
    trainer.lightning_module.anchor = torch.ones(2)
    assert hooks.computed() == {}


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


def test_what_a_users_object_raises_is_no_matter_of_ours():
    """Its code does not run where it need not; else the object is one that cannot be saved."""
    restored = decode(encode(Item(3)))
    assert type(restored) is Item and vars(restored) == {"_image": 3}
    tracker = Tracker()
    tracker.function = Foreign()
    tracker.library = Library()
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


def test_a_generator_in_a_librarys_object_is_found():
    engine = SimpleNamespace(rng=np.random.default_rng(0))
    assert generators.find({"engine": engine}) == {"engine.rng": engine.rng}


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


class Switching(Tracker):
    """Holds functions and objects that others can take the place of."""

    def __init__(self):
        super().__init__()
        self.loss = first_loss
        self.act = torch.relu
        self.both = {"loss": torch.nn.functional.mse_loss}
        self.step = self.update
        self.local = lambda output: output
        self.scaled = partial(first_loss, 2.0)
        self.meter = Slotted()

    def reset(self, *arguments):
        self.batches = 0

    def switch(self):
        self.loss = torch.nn.functional.l1_loss
        self.act = torch.tanh
        self.both["loss"] = torch.nn.functional.gelu
        self.step = self.reset

    def switch_what_has_no_name(self):
        self.local = lambda output: 2 * output
        self.scaled = partial(first_loss, 3.0)
        self.meter = Tracker()


GENERATOR = np.random.default_rng(0)
BY_TORCH = torch.Generator()
DRAWN = []


def shifted(samples, by=BY_TORCH):
    return [sample + GENERATOR.random() for sample in samples]


class Drawing(Tracker):
    """Draws from a generator of its class, and from one that a function reads."""

    generator = random.Random(0)
    parts = (Slotted, shifted)

    def __getitem__(self, index):
        return shifted([index])


class Reading:
    """Draws from a generator of the module."""

    def __getitem__(self, index):
        return GENERATOR.random()


def test_the_generators_that_code_draws_from_are_found():
    drawing = Drawing()
    drawing.own = {"a": [np.random.RandomState(0)], "process's": np.random.mtrand._rand}
    drawing.also = (torch.default_generator, random.random.__self__)
    assert generators.find({"data": drawing}) == {
        "data.own.a.0": drawing.own["a"][0],
        "data.(Drawing).generator": Drawing.generator,
        "data.(Drawing).parts.1.defaults.0": BY_TORCH,
        "data.(Drawing).parts.1.GENERATOR": GENERATOR,
    }
    assert generators.find({"data": drawing}, skip=(Tracker,)) == {}
    found = generators.find({"data": Reading()})
    assert found == {"data.(Reading).__getitem__.GENERATOR": GENERATOR}
    assert list(generators.find({"f": partial(shifted, by=3), "m": drawing.__getitem__})) == [
        "f.func.defaults.0",
        "f.func.GENERATOR",
        "m.self.own.a.0",
        "m.self.(Drawing).generator",
    ]


def test_a_librarys_own_generators_are_its_own():
    engine = type("Engine", (), {"__module__": "pytorch_lightning.engines"})()
    engine.rng = np.random.default_rng(0)
    assert generators.find({"engine": engine}) == {}
    library = type("Library", (), {"__module__": "scipy.stats", "rng": engine.rng})
    assert generators.find({"library": library}) == {}
    loader = torch.utils.data.DataLoader([1], generator=torch.Generator())
    assert generators.find({"loader": loader}) == {"loader.generator": loader.generator}


KINDS = {
    "random": random.Random,
    "RandomState": np.random.RandomState,
    "RandomState of PCG64": lambda seed=0: np.random.RandomState(np.random.PCG64(seed)),
    "torch": lambda seed=0: torch.Generator().manual_seed(seed),
    **{
        kind.__name__: lambda seed=0, kind=kind: np.random.Generator(kind(seed))
        for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    },
}


def drawn(generator) -> list[float]:
    """Return numbers from a generator of any kind."""
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    return [generator.random() for _ in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_draws_on_where_it_was(kind):
    generator, other = KINDS[kind](), KINDS[kind](1)
    drawn(generator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = decode(encode(generators.state_of(generator)))
    expected = drawn(generator)
    generators.restore(other, saved)
    assert drawn(other) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_each_generator_has_a_seed_of_its_own_that_a_number_decides(kind):
    """In another process, too."""
    found = {"a": KINDS[kind](), "b": KINDS[kind]()}
    number = 0x1234_5678_9ABC
    generators.reseed(found, number)
    expected_seeds = [number ^ zlib.crc32(path.encode()) for path in found]
    if kind == "RandomState":
        expected_seeds = [seed & 0xFFFFFFFF for seed in expected_seeds]
    first = [drawn(generator) for generator in found.values()]
    assert first == [drawn(KINDS[kind](seed)) for seed in expected_seeds]
    assert first[0] != first[1]


def test_so_many_objects_of_an_attribute_are_read():
    """20,000; and 1,024 of a list."""
    members = [object() for _ in range(1024)]
    assert len(list(object_graph.walk({"a": members}))) == 1025
    members.append(object())
    assert len(list(object_graph.walk({"a": members}))) == 1025
    parts = [[object() for _ in range(1000)] for _ in range(20)]
    assert len(list(object_graph.walk({"a": parts, "b": [[]]}))) == 20_002


def paths(**roots) -> list[str]:
    return [path for path, _ in object_graph.walk(roots, code=False)]


def test_what_a_walk_enters():
    owner = type("Mine", (), {})()
    owner.kind = Drawing
    owner.layers = torch.nn.Sequential(torch.nn.Linear(1, 1))
    owner.numbers = [1, "a", None, torch.zeros(1), np.zeros(1)]
    owner.same = owner.numbers
    owner.call = partial(first_loss, owner.numbers, key=owner.layers)
    owner.method = Switching.switch
    assert paths(mine=owner) == [
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
    loader = torch.utils.data.DataLoader([1, 2])
    assert object_graph.attributes(iter(loader)) == {}
    trainer = Trainer(logger=False, accelerator="cpu")
    trainer.seen = 1
    assert object_graph.attributes(trainer) == {}
    assert object_graph.attributes(object_graph.added_to(trainer)) == {"seen": 1}
    with (tmp_path / "file").open("w") as file:
        assert not object_graph.is_library_iterator(file)
    assert object_graph.is_library_iterator(iter([])) and not object_graph.is_library_iterator([])


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


def test_of_a_librarys_callback_only_the_functions_that_it_was_given_are_read():
    owner = LambdaCallback(on_fit_start=counter())
    owner.count = 1
    assert object_graph.attributes(owner) == {"on_fit_start": owner.on_fit_start}
    assert object_graph.has_place_for(owner, "on_fit_start", counter())
    owner.on_fit_end = partial(max, 1)
    assert object_graph.attributes(owner).keys() == {"on_fit_start", "on_fit_end"}
    for name, value in (("on_train_end", 1), ("count", 1), ("count", counter())):
        assert not object_graph.has_place_for(owner, name, value)


class Slots(Slotted):
    """Has more, of which one has no value yet."""

    __slots__ = ("__weakref__", "count", "unset")


def test_attributes_in_slots_are_read_and_set():
    owner = Slots()
    owner.count = 1
    assert object_graph.attributes(owner) == {"sum": 0.0, "count": 1}

    def change():
        owner.sum += 1
        owner.count += 1

    assert changed_names(change, mine=owner) == ["mine.count", "mine.sum"]


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
    add.__module__ = "torch.optim"
    assert object_graph.attributes(add) == {}
    add.__module__ = None
    assert object_graph.attributes(add) == {"count": 3}
    assert dict(object_graph.function_members(add)) == {
        "count": 3,
        "defaults": (),
        "kwdefaults": {},
    }


def test_of_the_globals_that_a_function_reads_librarys_classes_are_left_out():
    def reads(step=Step):
        return Decimal, Tracker, DRAWN, (lambda: KINDS)

    members = dict(object_graph.function_members(reads))
    assert members == {
        "defaults": (Step,),
        "kwdefaults": {},
        "DRAWN": DRAWN,
        "KINDS": KINDS,
        "Tracker": Tracker,
    }
    reads.__module__ = "torch.optim"
    assert dict(object_graph.function_members(reads)) == {"defaults": (Step,), "kwdefaults": {}}


@pytest.mark.parametrize("size", [COMPARED_IN_FULL, COMPARED_IN_FULL + 1])
@pytest.mark.parametrize(
    "make", [np.zeros, torch.zeros, lambda size: "a" * size, lambda size: "\u044f" * size]
)
def test_a_value_of_up_to_65_536_elements_is_small(make, size):
    assert is_small(make(size)) is (size == 65_536)


def test_sparse_tensors_of_other_values_have_other_digests():
    by_rows = [tensor.to_sparse_csr() for tensor in (torch.ones(2, 2), 2 * torch.ones(2, 2))]
    assert digest(by_rows[0]) != digest(by_rows[1])


def test_equal_texts_are_equal_whether_or_not_they_are_one_object():
    names = [f"class {number}" for number in range(3)]
    assert digest([names[k % 3] for k in range(300)]) == digest(
        [f"class {k % 3}" for k in range(300)]
    )


def nested(levels: int, value, make):
    return value if levels == 0 else make(nested(levels - 1, value, make))
