"""state/: plain values of users' objects are encoded, compared and restored.

And what of them has changed, for long values, too.
"""

import enum
import io
import random
import sys
import time
import warnings
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, LambdaCallback
from torch.utils._pytree import tree_map
from torchmetrics import MeanMetric
from untrained import run_of

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.parts import start_hooks
from sagemaker_lightning.resume.parts.metrics import Metrics
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.parts.roots import of_kinds
from sagemaker_lightning.state import generators, object_graph
from sagemaker_lightning.state.digests import COMPARED_IN_FULL, digest, is_small
from sagemaker_lightning.state.encoding import (
    PACKED_FROM,
    RECREATED,
    NotPlain,
    comparable,
    decode,
    encode,
    from_plain,
    to_plain,
)
from sagemaker_lightning.state.graph.state import GraphState, nodes_of

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
        [np.zeros(1, "f4" if k % 2 else "f8") for k in range(PACKED_FROM + 1)],
        [torch.zeros(1, dtype=(torch.half, torch.double)[k % 2]) for k in range(PACKED_FROM + 1)],
        [np.datetime64("2020-01-02T03", "Dh"[k % 2]) for k in range(PACKED_FROM + 1)],
        [np.zeros(2) if k % 2 else 0.5 for k in range(PACKED_FROM + 1)],
        [(np.zeros(2) if k % 2 else 0.5, k) for k in range(PACKED_FROM + 1)],
        [torch.Size((1, k)) for k in range(PACKED_FROM + 1)],
        [() for _ in range(PACKED_FROM + 1)],
        [(torch.ones(1), torch.ones(1).to_sparse())[k % 2] for k in range(PACKED_FROM + 1)],
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


@pytest.mark.parametrize(
    "element",
    [
        lambda k: torch.full((2, 3), k),
        lambda k: np.float32(k),
        lambda k: np.full((2, 3), k),
        lambda k: (k, Step(k, torch.ones(1), (np.float64(k), "text"))),
    ],
    ids=["tensors", "numbers", "arrays", "rows"],
)
def test_long_lists_of_one_kind_take_little_room(element):
    """More than 256 elements, in few arrays; each is a value of its own again."""
    values = [element(k) for k in range(257)]
    assert type(encode(values[:256])) is list and type(encode(values)) is dict
    restored, size = round_trip(values)
    assert str(restored) == str(values) and size < 40_000
    if isinstance(restored[0], torch.Tensor):
        assert restored[0].untyped_storage().nbytes() == restored[0].nbytes


@pytest.mark.parametrize("number", [3, PACKED_FROM + 1])
def test_of_tensors_that_require_gradients_the_values_are_saved(number):
    """However many they are: such a one is no result of a calculation."""
    values = [torch.full((1,), k, dtype=torch.half, requires_grad=True) for k in range(number)]
    restored, _ = round_trip(values)
    assert [value.item() for value in restored] == list(range(number))
    assert not any(value.requires_grad for value in restored)


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


def test_on_a_machine_without_that_device_they_are_on_the_cpu(monkeypatch):
    """Torch may have been built for that kind of device all the same."""
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("meta"),
    )
    restored, _ = round_trip(on_two_devices())
    assert devices(restored) == ["cpu"] * 5 and torch.equal(
        restored["many"][7], torch.full((2,), 7)
    )


def test_a_tensor_that_is_the_same_elsewhere_is_the_same():
    held = {"a": [torch.ones(2)], "b": (1, None)}
    assert str(comparable(encode({"a": [Elsewhere(torch.ones(2))], "b": (1, None)}))) == str(
        encode(held)
    )


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
    part = run_of(trainer).part(Metrics)
    saved = part.save(None, None)
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


class Kind(enum.Enum):
    """Names the entries of a cache (darts does so)."""

    PAST = "past"
    FUTURE = "future"


class Mode(enum.Flag):
    """Flags, of which a value may be several or none."""

    READ = 1
    WRITE = 2


@dataclass
class Node:
    """A part of a tree that knows its parent."""

    depth: int
    parent: "Node | None" = None
    children: list = field(default_factory=list)


def test_what_has_itself_in_it_is_not_plain():
    root = Node(0)
    root.children.append(Node(1, root))
    itself: dict = {}
    itself["a"] = [itself]
    for value in (root, itself):
        with pytest.raises(NotPlain):
            encode({"x": value})
    refused, notes = [], {}
    value = {"x": [1, root], "y": deque([1])}
    plain = to_plain(value, notes, lambda error: refused.append(error.path))
    assert plain == {"x": [1, None], "y": [1]} and refused == [("x", 1)]
    assert list(notes) == [("y",)]
    assert changed_names(lambda: setattr(root.children[0], "depth", 5), root=root) == [
        "root.children[0].depth"
    ]


def test_an_enum_that_cannot_be_found_again_is_not_plain():
    local = enum.Enum("local", "A")
    for value in (local.A, enum.Flag("flags", "A B")(3)):
        with pytest.raises(NotPlain):
            encode(value)
    for kind, value in (("enum", "GONE"), ("flag", 1)):
        with pytest.raises(UserError, match="which this program does not have"):
            decode({"#": (kind, __name__, "Kind"), "value": value})


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
        np.array([1.5, 2.5], dtype=">f4"),
        np.array(1.5),
        np.array([[1, 2], [3, 4]], dtype=np.int16).T,
        np.array([1, 2], dtype=np.uint64),
        np.array([1 + 2j, 3]),
        np.array([1.5], dtype=np.longdouble),
        np.array(["a", "bc"]),
        np.array([b"a", b"bc"]),
        np.array([3], dtype="m8[s]"),
        np.zeros((0, 3), dtype=np.float32),
        np.str_("a"),
        np.bytes_(b"a"),
        np.bool_(True),
        np.float16(0.5),
        np.complex64(1 + 2j),
        np.timedelta64(3, "s"),
        range(1, 10, 2),
        slice(1, None, 2),
        Path("a/b"),
        Step(1, [2], {"a": np.float32(3)}),
        Kind.PAST,
        Mode.READ,
        Mode.READ | Mode.WRITE,
        Mode(0),
        np.longdouble(1.5),
        np.clongdouble(1 + 2j),
        np.void(b"ab"),
        {1: deque([1, 2], maxlen=2), "b": deque([])},
        defaultdict(None, {"a": 1}),
        defaultdict(list, {"a": [1]}),
        defaultdict(set, {"a": {1}}),
        Counter("aab"),
        OrderedDict(b=1, a=2),
        frozenset({3}),
        {(k, 2.5, (True, 3)) for k in range(20)},
        bytearray(b"ab"),
        torch.float16,
        torch.Size((1, 2)),
        [None, True, 2**70, 1j, "text", b"bytes"],
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_come_back_as_they_were(value):
    restored, _ = round_trip(value)
    assert type(restored) is type(value) and str(restored) == str(value)
    assert getattr(restored, "dtype", None) == getattr(value, "dtype", None)
    assert not isinstance(value, np.ndarray) or restored.flags.writeable
    notes = {}
    (restored,) = from_plain(to_plain([0, {"a": (value,)}], notes, str), notes)[1]["a"]
    assert type(restored) is type(value) and str(restored) == str(value)


def test_keys_come_back_as_they_were():
    value = {np.datetime64("2020-01-02"): 1, np.datetime64("2020-01-02", "ns"): 2, Mode(3): 3}
    for keys in (value, {np.longdouble(1.5): 1}, {np.float32(2.5): 2, np.str_("a"): 3}):
        restored, _ = round_trip(keys)
        assert restored == keys
        assert list(map(repr, restored))[:1] == [repr(next(iter(keys)))] or 2.5 in keys


@pytest.mark.parametrize(
    "make, change",
    [
        (lambda: torch.zeros(1), lambda value: value.add_(1)),
        (lambda: np.zeros(1), lambda value: value.put(0, 1)),
        (lambda: [1], lambda value: value.append(2)),
        (lambda: {"a": [1]}, lambda value: value["a"].append(2)),
        (lambda: {1, 2}, lambda value: value.add(3)),
        (lambda: bytearray(b"a"), lambda value: value.append(2)),
        (lambda: [torch.zeros(1) for _ in range(257)], lambda value: value[3].add_(1)),
    ],
    ids=["a tensor", "an array", "a list", "a dict", "a set", "bytes", "many tensors"],
)
def test_a_later_change_of_a_value_does_not_reach_what_was_saved(make, change):
    """Neither one of the value that was encoded, nor one of what was decoded."""
    value = make()
    encoded = encode(value)
    change(value)
    restored = decode(encoded)
    assert str(restored) == str(make())
    change(restored)
    assert str(decode(encoded)) == str(make())
    value, notes = make(), {}
    plain = to_plain(value, notes, str)
    change(value)
    assert str(from_plain(plain, notes)) == str(make())


def test_an_array_of_a_checkpoint_is_no_view_of_it():
    notes = {}
    plain = to_plain({"a": np.zeros(2)}, notes, str)
    from_plain(plain, notes)["a"][0] = 1
    assert plain["a"].tolist() == [0, 0]


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


@dataclass
class Other:
    """A user's data, too."""

    number: int


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


@pytest.mark.parametrize(
    "value",
    [
        {Kind.PAST: (0, 3), Kind.FUTURE: [torch.ones(1)]},
        OrderedDict({Kind.FUTURE: 1, Kind.PAST: 2, "n": 3}),
        defaultdict(int, {Kind.PAST: 1}),
        Counter([Kind.PAST, Kind.PAST]),
        {Transition(1.5, 2): 1, Decimal("0.1"): 2},
        {(Kind.PAST, 0): {frozenset({1, 2}): Kind.FUTURE}},
        {"#": ("deque", None), "value": [1]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_keys_of_a_dict_come_back_as_they_were(value):
    restored, _ = round_trip(value)
    assert type(restored) is type(value)
    assert list(restored.items()) == list(value.items())


class Pair(tuple):
    """A tuple of a class of its own, without names."""


class Inner:
    """Has classes and functions that are reached by its name."""

    Row = namedtuple("Row", "a b")
    Row.__qualname__ = "Inner.Row"


def local_classes() -> list:
    """Return values of classes that no module has."""
    row = namedtuple("Row", "a b")

    @dataclass
    class Result:
        loss: float

    return [row(1, 2), [row(k, 2) for k in range(PACKED_FROM + 1)], Result(0.5)]


@dataclass
class Samples(torch.utils.data.Dataset):
    """A dataset, which a program makes itself."""

    folder: str


@pytest.mark.parametrize(
    "value",
    [
        *local_classes(),
        Samples("a"),
        Pair((1, 2)),
        Tracker(),
        Tracker,
        defaultdict(lambda: 3, {"a": 1}),
        np.ma.masked_array([1.0], mask=[1]),
        np.zeros(1, dtype=[("a", "O")]),
        np.zeros(1, dtype=[("a", "O")])[0],
        torch.zeros(1, device="meta"),
        [torch.zeros(1, device="meta")] * (PACKED_FROM + 1),
        [torch.nested.nested_tensor([torch.ones(1)])] * (PACKED_FROM + 1),
        torch.compile,
        (k for k in ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_checkpoint_can_hold_is_named_with_its_place(value):
    with pytest.raises(NotPlain, match=r"^a\.1\.b(\.0)? is a ") as refused:
        encode({"a": [0, {"b": value}]})
    assert refused.value.path[:3] == ("a", 1, "b")
    refusals = []
    plain = to_plain({"a": (0, {"b": value})}, {}, lambda error: refusals.append(error) or "none")
    assert [error.path[:3] for error in refusals][:1] == [("a", 1, "b")]
    assert isinstance(value, list) or plain == {"a": (0, {"b": "none"})}


def test_a_class_within_a_class_is_found():
    assert round_trip(Inner.Row(1, 2))[0] == Inner.Row(1, 2)
    assert type(round_trip([Inner.Row(1, 2)])[0][0]) is Inner.Row


@pytest.mark.parametrize(
    "note, value",
    [
        (("enum", __name__, "Kinds"), "PAST"),
        (("enum", __name__, "Tracker"), "PAST"),
        (("named", __name__, "Step"), [1, 2]),
        (("named", __name__, "Kind"), [1, 2, 3]),
        (("named", __name__, "round_trip"), [1, 2, 3]),
        (("tensor", __name__, "Tracker"), torch.ones(1)),
        (("tensor", __name__, "round_trip"), torch.ones(1)),
        (("fields", __name__, "Tracker"), {"batches": 1}),
        (("fields", "no_such_module", "Tracker"), {"batches": 1}),
        (("other", __name__, "Step"), [1, 2, 3]),
        (("other", __name__, "Image"), torch.ones(1)),
        (("other", __name__, "Transition"), {"x": 1}),
        (("other", __name__, "Kind"), "PAST"),
    ],
)
def test_a_class_that_this_program_has_no_more_is_named(note, value):
    """Or that is another one now."""
    says = f"^a checkpoint holds a {note[1]}.{note[2]}, which this program does not have$"
    with pytest.raises(UserError, match=says):
        decode({"#": note, "value": value})


def test_an_object_has_the_attributes_that_it_had():
    """One in a slot may have no value yet; one that is no field is kept."""
    transition = object.__new__(Transition)
    object.__setattr__(transition, "y", [1])
    restored, _ = round_trip(transition)
    assert restored.y == [1] and not hasattr(restored, "x")
    other = Other(3)
    other.note = "kept"
    restored, _ = round_trip(other)
    assert type(restored) is Other and vars(restored) == {"number": 3, "note": "kept"}


def test_a_state_dict_for_other_programs_is_plain():
    notes = {}
    lazy = torch.nn.LazyLinear(2).weight
    weights = OrderedDict({np.int64(3): torch.ones(1), ("a", 1): lazy})
    weights._metadata = {"": {"version": 2}}
    counts = MappingProxyType({"a": 1})
    plain = to_plain({"weights": weights, "counts": counts}, notes, str)
    assert type(plain["weights"]) is OrderedDict and plain["weights"]._metadata == {
        "": {"version": 2}
    }
    assert list(plain["weights"]) == [3, ("a", 1)] and type(plain["counts"]) is dict
    assert type(next(iter(plain["weights"]))) is int and notes == {}
    assert plain["weights"]["a", 1].shape == (0,)
    assert to_plain(weights, {}, str, copies=False)[3] is weights[3]
    assert plain["weights"][3] is not weights[3]
    refusals = []
    assert to_plain({"a": {Kind.PAST: 1}}, {}, refusals.append) == {"a": None}
    assert [error.path for error in refusals] == [("a", Kind.PAST)]


def test_parts_of_a_state_that_are_plain_are_not_copied():
    state = {"a": [torch.ones(1)], "b": ({"c": [1, 2]}, [3]), "d": [{"e": 0}]}
    assert from_plain(state, {}) is state
    restored = from_plain(state, {("b", 0, "c"): ("deque", None)})
    assert restored["b"] == ({"c": deque([1, 2])}, [3])
    assert restored["a"] is state["a"] and restored["b"][1] is state["b"][1]
    assert restored["d"] is state["d"]


def test_an_object_that_the_program_makes_again_is_the_programs():
    scaler = Tracker()
    notes = {("a", 0): (RECREATED, "model.scaler")}
    assert from_plain({"a": [None]}, notes, {"model.scaler": scaler})["a"][0] is scaler
    with pytest.raises(UserError, match="^a checkpoint holds model.scaler, which this program"):
        from_plain({"a": [None]}, notes, {"model.other": scaler})


def test_equal_values_are_written_alike():
    """Text has another hash in each process, so that the order of a set differs."""
    assert encode({"b", "a", 3})["value"] == [3, "a", "b"]
    assert encode(frozenset({"b", "a"}))["value"] == ["a", "b"]
    assert encode({(1, "a"), (1, "B")}) == {"#": ("set",), "value": [(1, "B"), (1, "a")]}
    assert encode({2, 1}) == {"#": ("set",), "value": [1, 2]}
    assert type(encode(torch.ones(1, requires_grad=True))) is torch.Tensor


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


@pytest.mark.parametrize("number", [5, 127])
def test_a_set_of_numbers_that_has_grown_one_by_one_has_its_order_again(number):
    pool = {129 * element for element in range(number)}
    restored, _ = round_trip(pool)
    assert list(restored) == list(pool)


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
        saved, _ = round_trip(generators.state_of(generator))
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


@pytest.mark.parametrize(
    "names",
    [
        ("os", "system"),
        ("torch", "load"),
        ("builtins", "exec"),
        ("torch.hub", "load"),
        ("subprocess", "call"),
        ("pytest", "main"),
        ("torch", "compile"),
        (__name__, "Tracker"),
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
