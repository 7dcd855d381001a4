"""state/: plain values of users' objects are encoded, compared and restored.

And what of them has changed, for long values, too.
"""

import enum
import io
import sys
import time
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from types import BuiltinFunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, LambdaCallback
from torch.utils._pytree import tree_map
from torchmetrics import MeanMetric

from sagemaker_lightning.compat import metrics
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume import epoch_state, start_hooks
from sagemaker_lightning.state import generators, object_graph
from sagemaker_lightning.state.encoding import (
    PACKED_FROM,
    NotPlain,
    comparable,
    decode,
    encode,
    from_plain,
    to_plain,
)
from sagemaker_lightning.state.object_graph import MAX_MEMBERS, MAX_OBJECTS
from sagemaker_lightning.state.object_state import COMPARED_IN_FULL, PlainState

Step = namedtuple("Step", "state reward done")


class Elsewhere(torch.Tensor):
    """A tensor on a device that this machine lacks: it claims to be on "meta"."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device="meta")

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        arguments = tree_map(
            lambda value: value.held if isinstance(value, Elsewhere) else value, arguments
        )
        result = function(*arguments, **(named or {}))
        return result if "_to_copy" in str(function) else Elsewhere(result)


@pytest.fixture
def meta(monkeypatch):
    """Make the machine's accelerator one of the kind "meta"."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta")
    )


def round_trip(value):
    """Return the value as a file gives it back, and the size of the file."""
    file = io.BytesIO()
    torch.save(encode(value), file)
    file.seek(0)
    return decode(torch.load(file, weights_only=True)), len(file.getvalue())


def rows(row_type, size: int) -> list:
    return [row_type((np.full(4, k, np.float32), 0.5 * k, k % 3 == 0)) for k in range(size)]


@pytest.mark.parametrize("row_type", [tuple, Step._make], ids=["tuples", "named tuples"])
def test_a_long_list_of_steps_becomes_few_arrays(row_type):
    steps = deque(rows(row_type, 5000), maxlen=6000)
    restored, size = round_trip(steps)
    assert (
        type(restored) is deque
        and restored.maxlen == 6000
        and len(restored) == 5000
        and size < 200_000
    )
    for step, restored_step in zip(steps, restored, strict=True):
        assert type(step) is type(restored_step) and [type(field) for field in step] == [
            type(field) for field in restored_step
        ]
        assert (
            step[0].dtype == restored_step[0].dtype
            and (step[0] == restored_step[0]).all()
            and step[1:] == restored_step[1:]
        )


@pytest.mark.parametrize(
    "value",
    [
        [torch.full((2, 3), k) for k in range(PACKED_FROM + 1)],
        [np.float32(k) for k in range(PACKED_FROM + 1)],
        [np.zeros((0, 2)) for _ in range(PACKED_FROM + 1)],
        [(k, "text") for k in range(PACKED_FROM + 1)],
        tuple((k, None) for k in range(PACKED_FROM + 1)),
        [(k, (k, 0.5)) for k in range(PACKED_FROM + 1)],
        [{"a": k} for k in range(PACKED_FROM + 1)],
        [(k,) * (1 + k % 2) for k in range(PACKED_FROM + 1)],
        [np.zeros(1 + k % 2) for k in range(PACKED_FROM + 1)],
        [],
    ],
)
def test_long_lists_come_back_as_they_were(value):
    restored, _ = round_trip(value)
    assert (
        type(restored) is type(value)
        and str(restored) == str(value)
        and list(map(type, restored)) == list(map(type, value))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, change",
    [
        (lambda: list(range(COMPARED_IN_FULL + 1)), lambda value: value.reverse()),
        (lambda: list(range(COMPARED_IN_FULL + 1)), lambda value: value.append(0)),
        (
            lambda: list(map(str, range(COMPARED_IN_FULL + 1))),
            lambda value: value.__setitem__(77, "x"),
        ),
        (
            lambda: {k: str(k) for k in range(COMPARED_IN_FULL + 1)},
            lambda value: value.update({5: "y"}),
        ),
        (lambda: np.zeros(COMPARED_IN_FULL + 1), lambda value: value.__setitem__(slice(3, 7), 1)),
        (
            lambda: torch.zeros(COMPARED_IN_FULL + 1),
            lambda value: value[[4, 5]].add_(1) is None or value[4].add_(1),
        ),
        (lambda: np.arange(COMPARED_IN_FULL + 1), lambda value: value.__setitem__([3, 4], [4, 3])),
    ],
    ids=[
        "order",
        "length",
        "an element",
        "an entry",
        "some numbers",
        "one number of a tensor",
        "two numbers exchanged",
    ],
)
def test_a_long_value_is_kept_when_it_changes(make, change):
    owner = type("Mine", (), {})()
    owner.value = make()
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    assert state.encode_changes() == {}
    change(owner.value)
    changes = state.encode_changes()
    assert list(changes) == [("mine", "value")]
    expected = str(owner.value)
    owner.value = make()
    state.restore(changes)
    assert str(owner.value) == expected


def test_what_is_too_long_is_told(monkeypatch):
    monkeypatch.setattr("sagemaker_lightning.state.object_state.MAX_SAVED", COMPARED_IN_FULL + 1)
    owner = type("Mine", (), {})()
    owner.value = np.zeros(COMPARED_IN_FULL + 2)
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    assert state.encode_changes() == {} and state.unsaved == {}
    owner.value[5] = 1
    assert state.encode_changes() == {} and state.unsaved == {
        ("mine", "value"): "holds 65,538 elements"
    }


def on_two_devices() -> dict:
    """Return tensors on the CPU and elsewhere, some of them many."""
    return {
        "one": Elsewhere(torch.ones(2)),
        "few": (torch.zeros(1), [Elsewhere(torch.ones(2))]),
        "many": [Elsewhere(torch.full((2,), k)) for k in range(PACKED_FROM + 1)],
        "steps": [(Elsewhere(torch.ones(1)), k) for k in range(PACKED_FROM + 1)],
    }


def devices(value) -> list[str]:
    """Return the devices of the tensors."""
    return [
        value["one"].device.type,
        value["few"][0].device.type,
        value["few"][1][0].device.type,
        value["many"][7].device.type,
        value["steps"][7][0].device.type,
    ]


def test_tensors_come_back_on_the_device_they_were_on(meta):
    assert devices(round_trip(on_two_devices())[0]) == ["meta", "cpu", "meta", "meta", "meta"]


def test_on_a_machine_without_that_device_they_are_on_the_cpu():
    restored, _ = round_trip(on_two_devices())
    assert devices(restored) == ["cpu"] * 5 and torch.equal(
        restored["many"][7], torch.full((2,), 7)
    )


def test_a_tensor_that_is_the_same_elsewhere_is_the_same():
    held = {"a": [torch.ones(2)], "b": (1, None)}
    assert str(comparable(encode({"a": [Elsewhere(torch.ones(2))], "b": (1, None)}))) == str(
        encode(held)
    )


def test_what_a_hook_has_gathered_elsewhere_is_there_again(meta):
    """An empty list, an attribute that was None, and a tensor that a step has moved."""

    def made():
        owner = type("Mine", (), {})()
        owner.seen = []
        owner.last = None
        owner.weight = torch.zeros(2)
        return owner

    owner = made()
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    owner.seen.append(Elsewhere(torch.ones(2)))
    owner.last = owner.weight = Elsewhere(torch.ones(2))
    changes = state.encode_changes()
    owner = made()
    state.restore(changes)
    assert [tensor.device.type for tensor in (*owner.seen, owner.last, owner.weight)] == [
        "meta"
    ] * 3


def test_a_metric_stays_on_its_device():
    class Watching(Callback):
        def __init__(self):
            self.mean = MeanMetric()

    trainer = Trainer(
        accelerator="cpu", callbacks=[Watching()], logger=False, enable_checkpointing=False
    )
    trainer.strategy.connect(LightningModule())
    trainer.strategy._root_device = torch.device("meta")
    ((name, metric),) = epoch_state._of_kinds(trainer, MeanMetric)
    metric.update(3.0)
    known = {"buffers": {}, "metrics": {name: metrics.state_of(metric)}, "tracked": {}}
    metric.reset()
    epoch_state.restore_rank_state(trainer, epoch_state.copy_to_cpu(known), mid_epoch=False)
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
    assert hooks.computed() == {
        ("callbacks.0 Starts", name)
        for name in ("anchor", "baseline", "mean", "first_step", "largest")
    }
    assert start_hooks.StartHooks(trainer).computed() == set()


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
    return {name for _, name in hooks.computed()}


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
    assert hooks.computed() == set()


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
    state = PlainState(lambda: roots)
    state.mark()
    change()
    changes = state.encode_changes()
    assert state.unsaved == {}
    return [".".join(key) for key in changes]


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
        "callback.on_train_batch_end.self.batches"
    ]


@dataclass(slots=True, frozen=True)
class Transition:
    """A step in slots."""

    x: float
    y: list


@pytest.mark.parametrize(
    "value",
    [
        Transition(1.5, [2, 3]),
        np.array([(1.5, 2)], dtype=[("x", "f4"), ("y", "i8")]),
        np.array([(1, 2.5)], dtype=np.dtype([("x", "i1"), ("y", "f8")], align=True)),
        np.array([(1.5, 2)], dtype=[("x", "f4"), ("y", "i8")])[0],
        np.array([[1, 2], [3, None]], dtype=object),
        np.array(["2020-01-02"], dtype="M8[D]"),
        np.datetime64("2020-01-02"),
        Decimal("0.10"),
        Fraction(1, 3),
        array("d", [1.5, 2.5]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_come_back_as_they_were(value):
    restored, _ = round_trip(value)
    assert type(restored) is type(value) and str(restored) == str(value)
    assert getattr(restored, "dtype", None) == getattr(value, "dtype", None)


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


class Raising(enum.Enum):
    """What looks at it gets an error."""

    ONE = 1
    name = property(lambda self: 1 / 0)


class Library:
    """A C library, which has a function for each name that it is asked for (llvmlite has such)."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        return object()


def test_what_a_users_object_raises_is_no_matter_of_ours():
    """Its code does not run where it need not; else the object is one that cannot be saved."""
    restored, _ = round_trip(Item(3))
    assert type(restored) is Item and vars(restored) == {"_image": 3}
    for value in (Foreign(), Raising.ONE):
        with pytest.raises(NotPlain):
            encode([value])
    tracker = Tracker()
    tracker.function = Foreign()
    tracker.library = Library()
    assert changed_names(lambda: None, tracker=tracker) == []


class Kind(enum.Enum):
    """Names the entries of a cache (darts does so)."""

    PAST = "past"
    FUTURE = "future"


@pytest.mark.parametrize(
    "value",
    [
        {Kind.PAST: (0, 3), Kind.FUTURE: [torch.ones(1)]},
        OrderedDict({Kind.FUTURE: 1, Kind.PAST: 2, "n": 3}),
        defaultdict(int, {Kind.PAST: 1}),
        Counter([Kind.PAST, Kind.PAST]),
        {Transition(1.5, 2): 1, Decimal("0.1"): 2},
        {(Kind.PAST, 0): {frozenset({1, 2}): Kind.FUTURE}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_keys_of_a_dict_come_back_as_they_were(value):
    restored, _ = round_trip(value)
    assert type(restored) is type(value)
    assert list(restored.items()) == list(value.items())


class Level(int):
    """A number of a class of its own, which no checkpoint can hold (RDKit has such)."""


def test_of_what_cannot_be_saved_a_change_is_said():
    """Also where it is a key, or the last of a long list; what stays as it is needs no word."""
    tracker = Tracker()
    tracker.numbers = {Level(1): [0], "b": 2}
    tracker.tree = [{Level(2): {"a": torch.zeros(1)}}]
    tracker.long = [0] * 1000 + [object()]
    state = PlainState(lambda: {"tracker": tracker})
    assert state.encode_changes() and len(state.unsaved) == 3
    state.mark()
    assert state.encode_changes() == {} and state.unsaved == {}
    tracker.numbers[next(iter(tracker.numbers))].append(1)
    tracker.tree[0][Level(2)]["a"] += 1
    tracker.long[0] = 1
    state.encode_changes()
    assert state.unsaved == {
        ("tracker", "numbers"): f"holds a {__name__}.Level",
        ("tracker", "tree"): f"holds a {__name__}.Level",
        ("tracker", "long"): "holds a builtins.object",
    }


def test_an_array_of_lists_has_its_shape():
    values = np.empty(2, dtype=object)
    values[0], values[1] = [1, 2], [3, 4]
    restored, _ = round_trip(values)
    assert restored.shape == (2,) and restored[1] == [3, 4]


@pytest.mark.parametrize("size", [3, COMPARED_IN_FULL + 1])
def test_an_array_of_objects_is_saved_when_it_changes(size):
    owner = type("Mine", (), {})()
    owner.value = np.array(["a"] * size, dtype=object)
    assert changed_names(lambda: None, mine=owner) == []
    assert changed_names(lambda: owner.value.put(1, "b"), mine=owner) == ["mine.value"]


def test_an_array_of_a_class_that_cannot_be_saved_is_told_once_it_changes(tmp_path):
    """A memory map is in a file."""
    owner = type("Mine", (), {})()
    owner.value = np.ma.masked_array(np.zeros(3), mask=[0, 0, 1])
    owner.fields = np.zeros(2, dtype={"names": "ab", "formats": ["f4", "i4"], "offsets": [0, 0]})
    owner.mapped = np.memmap(tmp_path / "mapped", shape=(3,), mode="w+")
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    assert state.encode_changes() == {} and state.unsaved == {}
    owner.value[0] = owner.mapped[0] = owner.fields["a"][1] = 1
    assert state.encode_changes() == {} and state.unsaved == {
        ("mine", "value"): "is a numpy.ma.MaskedArray",
        ("mine", "fields"): "is a numpy.ndarray",
    }


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
        "mine.by_layer.Linear#0.batches",
        "mine.by_layer.Linear#1.batches",
        "mine.by_object.object#0.batches",
        "mine.by_object.object#1.batches",
        "mine.by_number.1.batches",
        "mine.by_number.1#1.batches",
    ]


def test_a_generator_in_a_librarys_object_is_found():
    engine = SimpleNamespace(rng=np.random.default_rng(0))
    assert generators.find({"engine": engine}) == {"engine.rng": engine.rng}


@pytest.mark.parametrize("removed", [0, 7, 25])
@pytest.mark.parametrize("number", [3, 19, 20, 33, 38, 500])
def test_a_set_of_numbers_has_its_order_again(number, removed):
    """The table of a set does not shrink when elements are removed."""

    def made():
        owner = type("Mine", (), {})()
        owner.pool = {3 * element for element in range(number)}
        return owner

    owner = made()
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    for element in list(owner.pool)[: min(removed, number - 1)]:
        owner.pool.remove(element)
    changes = state.encode_changes()
    order = list(owner.pool)
    owner = made()
    pool = owner.pool
    state.restore(changes)
    assert list(pool) == order and owner.pool is pool and state.reordered == set()


def test_a_set_whose_order_cannot_be_had_is_known():
    owner = type("Mine", (), {})()
    state = PlainState(lambda: {"mine": owner})
    owner.pool = {1, 2, 3}
    changes = state.encode_changes()
    assert list(changes) == [("mine", "pool")]
    changes["mine", "pool"]["value"].reverse()
    assert comparable(changes) == comparable(state.encode_changes())
    state.restore(changes)
    assert state.reordered == {("mine", "pool")}
    owner.pool = {"a", "b"}
    state.reordered.clear()
    state.restore(state.encode_changes())
    assert state.reordered == set()


def test_each_object_of_a_long_list_is_read():
    owner = type("Mine", (), {})()
    owner.trackers = [Tracker() for _ in range(1000)]
    assert changed_names(owner.trackers[999].update, mine=owner) == ["mine.trackers.999.batches"]


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_list_of_too_many_objects_is_told_once_they_change(is_nested):
    owner = type("Mine", (), {})()
    trackers = [Tracker() for _ in range(MAX_MEMBERS + 1)]
    owner.trackers = {"a": trackers} if is_nested else trackers
    owner.steps = deque([Transition(1.0, [])] * (MAX_MEMBERS + 1))  # is saved as a whole
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    assert state.encode_changes() == {} and state.unsaved == {}
    owner.steps.append(Transition(2.0, []))
    assert state.encode_changes().keys() == {("mine", "steps")} and state.unsaved == {}
    trackers[3].update()
    state.encode_changes()
    assert state.unsaved == {("mine", "trackers"): "holds too many objects that change"}


@pytest.mark.slow
def test_many_objects_of_one_attribute_take_nothing_from_another():
    owner = type("Mine", (), {})()
    owner.corpus = [[[index] for index in range(100)] for _ in range(1 + MAX_OBJECTS // 100)]
    owner.tracker = Tracker()
    assert changed_names(owner.tracker.update, mine=owner) == ["mine.tracker.batches"]
    owner.corpus[0].append(Tracker())
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    owner.corpus[0][-1].update()
    state.encode_changes()
    assert state.unsaved == {("mine", "corpus"): "holds too many objects that change"}


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


def test_a_function_or_method_that_another_took_the_place_of_comes_back():
    owner = Switching()
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    assert state.encode_changes() == {}
    owner.switch()
    file = io.BytesIO()
    torch.save(state.encode_changes(), file)
    changes = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    owner = Switching()
    state.restore(changes)
    assert owner.loss is torch.nn.functional.l1_loss and owner.act is torch.tanh
    assert owner.both == {"loss": torch.nn.functional.gelu} and owner.step == owner.reset
    assert state.encode_changes() == changes


def test_what_cannot_come_back_differs_after_a_resume():
    """A lambda, arguments, an object of another class: its attributes are not given to this one."""
    owner = Switching()
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    owner.switch_what_has_no_name()
    changes = state.encode_changes()
    owner = Switching()
    state.restore(changes)
    now = state.encode_changes()
    assert {".".join(key) for key in changes if now.get(key) != changes[key]} == {
        "mine.local",
        "mine.scaled",
        "mine.meter",
        "mine.meter.batches",
    }


@pytest.mark.parametrize(
    "names",
    [
        ("os", "system"),
        ("torch", "load"),
        ("builtins", "exec"),
        ("torch.hub", "load"),
        ("subprocess", "call"),
        ("pytest", "main"),
    ],
)
def test_a_checkpoint_names_no_function_that_may_do_anything(names):
    with pytest.raises(UserError, match="this program does not have"):
        decode({"#": ("function",), "value": names})
    with pytest.raises(NotPlain):
        encode(getattr(sys.modules[names[0]], names[1]))


class Image(torch.Tensor):
    """A tensor that says what it is, as torchvision's do."""


@pytest.mark.parametrize("attributes", [{}, {"size": (5, 5)}])
def test_a_tensor_of_a_users_class_comes_back_as_one(attributes):
    image = torch.ones(2).as_subclass(Image)
    vars(image).update(attributes)
    notes = {}
    file = io.BytesIO()
    torch.save(to_plain({"a": image}, notes, str), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for restored in (round_trip(image)[0], from_plain(state, notes)["a"]):
        assert type(restored) is Image and vars(restored) == attributes
        assert torch.equal(restored, image)


def test_a_tensor_of_a_class_that_no_module_has_is_named():
    image = torch.ones(2).as_subclass(type("Local", (Image,), {}))
    with pytest.raises(NotPlain, match="Local"):
        encode([image])
    owner = type("Mine", (), {})()
    owner.image = image
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    assert state.encode_changes() == {} and state.unsaved == {}
    image.add_(1)
    assert state.encode_changes() == {}
    assert state.unsaved == {("mine", "image"): f"is a {__name__}.Local"}


def restored_loss():
    """Return an owner whose loss, of a calculation, is restored."""
    owner = type("Mine", (), {})()
    owner.losses = [torch.zeros(1)]
    weight = torch.ones(1, requires_grad=True)
    state = PlainState(lambda: {"mine": owner})
    state.mark()
    owner.losses[0] = 2 * weight
    file = io.BytesIO()
    torch.save(state.encode_changes(), file)
    changes = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    owner.losses = [torch.zeros(1)]
    state.restore(changes)
    assert str(state.encode_changes()) == str(changes) and owner.losses[0].requires_grad
    return owner


def test_a_calculated_tensor_is_told_when_a_gradient_reaches_it(capsys):
    owner = restored_loss()
    (3 * owner.losses[0]).backward()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: mine.losses was calculated before the interruption")


def test_a_calculated_tensor_that_is_only_logged_is_not_told(capsys):
    owner = restored_loss()
    owner.losses[0] += torch.ones(1)
    (torch.ones(1, requires_grad=True) * owner.losses[0].detach()).backward()
    assert owner.losses[0].item() == 3 and capsys.readouterr().out == ""
