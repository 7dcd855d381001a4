"""A value comes back as it was, or is refused with its place; what is forged is refused."""

import datetime as dt
import enum
import io
import random
import re
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import BuiltinFunctionType, SimpleNamespace

import numpy as np
import pytest
import torch

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph import encoding, values
from sagemaker_lightning.state.graph.kinds.base import NotSaved
from sagemaker_lightning.state.graph.values import decode, encode

Step = namedtuple("Step", "state reward done")
MANY = 5000


def round_trip(value):
    """Return the value as a file gives it back, and the size of the file."""
    file = io.BytesIO()
    torch.save(encode(value), file)
    file.seek(0)
    return decode(torch.load(file, weights_only=True)), len(file.getvalue())


class Kind(enum.Enum):
    """Names the entries of a cache (darts does so)."""

    PAST = "past"
    FUTURE = "future"


class Named(enum.Enum):
    """Has a name of its own, which raises anything."""

    ONE = 1
    name = property(lambda self: 1 / 0)


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


@dataclass(slots=True, frozen=True)
class Transition:
    """A step in slots."""

    x: float
    y: list


class Inner:
    """Has classes that are reached by its name."""

    Row = namedtuple("Row", "a b")
    Row.__qualname__ = "Inner.Row"


class Image(torch.Tensor):
    """A tensor that says what it is, as torchvision's do."""


@pytest.mark.parametrize(
    "value",
    [
        1,
        None,
        "text",
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
        re.compile("a(b)+", re.IGNORECASE | re.VERBOSE),
        Step(1, [2], {"a": np.float32(3)}),
        Kind.PAST,
        Named.ONE,
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
        torch.ones(2, 2),
        torch.eye(3).to_sparse(),
        [None, True, 2**70, 1j, "text", b"bytes"],
        [torch.full((2, 3), k) for k in range(MANY)],
        [np.float32(k) for k in range(MANY)],
        [(k, "text") for k in range(MANY)],
        [{"a": k} for k in range(MANY)],
        [np.zeros(1 + k % 2) for k in range(MANY)],
        [torch.zeros(1, dtype=(torch.half, torch.double)[k % 2]) for k in range(MANY)],
        [np.zeros(2) if k % 2 else 0.5 for k in range(MANY)],
        [(torch.ones(1), torch.ones(1).to_sparse())[k % 2] for k in range(300)],
        Inner.Row(1, 2),
        [Inner.Row(1, 2)],
        {"a": 1, 2: [3], (1, "b"): {4}, None: (5,)},
        dt.date(2026, 11, 25),
        dt.datetime(2026, 11, 25, 1, 2, 3, 4, fold=1),
        dt.datetime(2026, 11, 25, tzinfo=dt.timezone(dt.timedelta(hours=1))),
        dt.datetime(2026, 11, 25, tzinfo=dt.timezone(dt.timedelta(hours=1)), fold=1),
        dt.time(1, 2, fold=1),
        dt.timedelta(days=-1, microseconds=3),
        dt.time(1, 2, tzinfo=dt.UTC),
        torch.device("cpu"),
        float("inf"),
        10**40,
        np.dtype([("a", "<i4"), ("b", "<f8")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_as_it_was(value):
    restored, _ = round_trip(value)
    assert type(restored) is type(value) and str(restored) == str(value)
    for name in ("dtype", "fold"):  # datetimes that differ in their fold alone are equal
        assert getattr(restored, name, None) == getattr(value, name, None)
    assert not isinstance(value, np.ndarray) or restored.flags.writeable


def test_whole_numbers_of_any_length_come_back():
    """Python writes none of more than 4,300 digits as a text of these."""
    long = 10**5000
    value = [Fraction(-long, 3), *({"a": long + k, (1, long): k} for k in range(MANY))]
    assert round_trip(value)[0] == value


@pytest.mark.parametrize("row_type", [tuple, Step._make], ids=["tuples", "named tuples"])
def test_a_long_list_of_steps_takes_little_room(row_type):
    rows = [row_type((np.full(4, k, np.float32), 0.5 * k, k % 3 == 0)) for k in range(MANY)]
    steps = deque(rows, maxlen=6000)
    restored, size = round_trip(steps)
    assert type(restored) is deque and restored.maxlen == 6000 and size < 300_000
    for step, again in zip(steps, restored, strict=True):
        assert list(map(type, step)) == list(map(type, again)) and type(step) is type(again)
        assert step[0].dtype == again[0].dtype
        assert (step[0] == again[0]).all() and step[1:] == again[1:]


def test_one_object_is_one_again():
    """Also what holds itself, and what shares its memory."""
    shared = [1]
    root = Node(0)
    root.children.append(Node(1, root))
    array_ = np.zeros(3)
    value = {"a": shared, "b": [shared], "root": root, "array": array_, "view": array_[1:]}
    restored, _ = round_trip(value)
    assert restored["a"] is restored["b"][0]
    assert restored["root"].children[0].parent is restored["root"]
    restored["array"][1] = 5
    assert restored["view"].tolist() == [5, 0]


def test_what_takes_gradients_takes_them_again():
    leaf = torch.ones(1, requires_grad=True)
    restored, _ = round_trip([leaf, leaf * 2, torch.nn.Parameter(leaf)])
    assert all(each.requires_grad for each in restored)
    assert [type(each) for each in restored] == [torch.Tensor, torch.Tensor, torch.nn.Parameter]
    assert restored[0].is_leaf and not restored[1].is_leaf


@pytest.mark.parametrize(
    "value",
    [
        {Kind.PAST: (0, 3), Kind.FUTURE: [torch.ones(1)]},
        OrderedDict({Kind.FUTURE: 1, Kind.PAST: 2, "n": 3}),
        defaultdict(int, {Kind.PAST: 1}),
        Counter([Kind.PAST, Kind.PAST]),
        {Decimal("0.1"): 2},
        {(Kind.PAST, 0): {frozenset({1, 2}): Kind.FUTURE}},
        {np.datetime64("2020-01-02"): 1, np.datetime64("2020-01-02", "ns"): 2, Mode(3): 3},
        {np.longdouble(1.5): 1},
        {np.float32(2.5): 2, np.str_("a"): 3},
    ],
    ids=lambda value: type(value).__name__,
)
def test_keys_of_a_dict_come_back_as_they_were(value):
    restored, _ = round_trip(value)
    assert type(restored) is type(value) and list(map(repr, restored)) == list(map(repr, value))
    assert list(restored.items()) == list(value.items())


@pytest.mark.parametrize(
    "make, change",
    [
        (lambda: torch.zeros(1), lambda value: value.add_(1)),
        (lambda: np.zeros(1), lambda value: value.put(0, 1)),
        (lambda: [1], lambda value: value.append(2)),
        (lambda: {"a": [1]}, lambda value: value["a"].append(2)),
        (lambda: {1, 2}, lambda value: value.add(3)),
        (lambda: bytearray(b"a"), lambda value: value.append(2)),
        (lambda: [torch.zeros(1) for _ in range(300)], lambda value: value[3].add_(1)),
    ],
    ids=["a tensor", "an array", "a list", "a dict", "a set", "bytes", "many tensors"],
)
def test_a_later_change_of_a_value_does_not_reach_what_was_saved(make, change):
    """Neither one of the value that was encoded, nor one of what was decoded."""
    value = make()
    record = encode(value)
    change(value)
    restored = decode(record)
    assert str(restored) == str(make())
    change(restored)
    assert str(decode(record)) == str(make())


@pytest.mark.parametrize("attributes", [{}, {"size": (5, 5)}])
def test_a_tensor_of_a_users_class_comes_back_as_one(attributes):
    image = torch.ones(2).as_subclass(Image)
    vars(image).update(attributes)
    restored, _ = round_trip(image)
    assert type(restored) is Image and vars(restored) == attributes
    assert torch.equal(restored, image)


def test_a_dataclass_has_the_attributes_that_it_had():
    """One in a slot may have no value yet; one that is not a field is kept."""
    transition = object.__new__(Transition)
    object.__setattr__(transition, "y", [1])
    restored, _ = round_trip(transition)
    assert restored.y == [1] and not hasattr(restored, "x")
    node = Node(3)
    node.note = "kept"
    restored, _ = round_trip(node)
    assert type(restored) is Node and vars(restored) == vars(node)


class Plain:
    """An object of a user's, with attributes."""

    def __init__(self):
        self.count = 1


class Unread(torch.Tensor):
    """A tensor of which nobody may read the values."""

    def to(self, *_, **__):
        raise AssertionError


class Pair(tuple):
    """A tuple of a class of its own, without names."""


class Foreign:
    """A function of a C++ extension: it has no `__qualname__` (Boost.Python's)."""

    __class__ = property(lambda self: BuiltinFunctionType)
    __name__ = "f"


def local_classes() -> list:
    """Return values of classes that no module has."""
    row = namedtuple("Row", "a b")

    @dataclass
    class Result:
        loss: float

    return [
        row(1, 2),
        Result(0.5),
        enum.Enum("local", "A").A,
        enum.Flag("flags", "A B")(3),
        torch.ones(2).as_subclass(type("Local", (Image,), {})),
    ]


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
        Plain(),
        Plain,
        SimpleNamespace(a=1),
        Foreign(),
        random.Random(1),
        np.random.default_rng(1),
        torch.nn.Linear(1, 1),
        defaultdict(lambda: 3, {"a": 1}),
        np.ma.masked_array([1.0], mask=[1]),
        np.zeros(1, dtype=[("a", "O")]),
        torch.zeros(1, device="meta"),
        torch.nested.nested_tensor([torch.ones(1)]),
        torch.compile,
        sys,
        (k for k in ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_checkpoint_can_hold_is_named_with_its_place(value):
    with pytest.raises(NotSaved) as refused:
        encode({"a": [0, {"b": value}]})
    assert refused.value.path.startswith("['a'][1]['b']")
    assert refused.value.kind == str(refused.value) != ""
    with pytest.raises(NotSaved) as refused:
        encode(value)
    assert not refused.value.path.startswith("[0]")


def test_a_value_may_be_larger_than_what_reflection_saves(monkeypatch):
    monkeypatch.setattr(encoding, "MAX_SAVED", 3)
    assert round_trip([torch.ones(4), np.ones(4)])[0][1].tolist() == [1] * 4


def test_a_record_refers_to_objects_that_the_program_makes_again():
    """By name, if they are not values, whatever they hold."""
    known = {"model.plain": Plain(), "model.list": [1], "model.node": Node(1)}
    known["model.plain"].stream = (k for k in ())
    known["model.plain"].all = known
    known["model.plain"].weight = Unread(torch.ones(1))
    value = {"a": [known["model.plain"]], "b": known["model.list"], "c": known["model.node"]}
    record = encode(value, known)
    other = {"model.plain": Plain(), "model.list": [2], "model.node": Node(2)}
    restored = decode(record, other)
    assert restored["a"][0] is other["model.plain"]
    assert restored["b"] == [1] and restored["c"].depth == 1
    with pytest.raises(UserError, match="holds model.plain, which this program does not have"):
        decode(record, {})
    with pytest.raises(NotSaved):
        encode(value)


def changed(record, *pairs):
    nodes = record["nodes"]
    for old, new in pairs:
        assert old in nodes
        nodes = nodes.replace(old, new)
    return record | {"nodes": nodes}


@pytest.mark.parametrize("name", ["Gone", "Plain", "Samples", "round_trip", "Kind"])
@pytest.mark.parametrize("value", [Node(1), Step(1, 2, 3), torch.ones(1).as_subclass(Image)])
def test_a_class_that_this_program_has_no_more_is_named(value, name):
    """Or that is another one now."""
    record = changed(encode(value), (type(value).__qualname__, name))
    with pytest.raises(UserError, match="^a checkpoint holds "):
        decode(record)


def test_an_enum_has_no_other_members():
    for old, new in (("PAST", "GONE"), (f"{__name__}.Kind", f"{__name__}.Gone")):
        with pytest.raises(UserError, match="^a checkpoint holds "):
            decode(changed(encode(Kind.PAST), (old, new)))


@pytest.mark.parametrize(
    "record",
    [
        None,
        5,
        [],
        {},
        {"nodes": "[]", "tensors": []},
        {"nodes": '[["list","value",null,[],null]]', "tensors": []},
        {"nodes": '[["list","value",null,[1,2],null]]', "tensors": []},
        {"nodes": '[["list","other",null,[1],null]]', "tensors": []},
        {"nodes": '[["dict","value",null,[1,2],null]]', "tensors": []},
        {"nodes": '[["list",null,null,[1],null]]', "tensors": []},
        {"nodes": '[["list","value",null,[[1]],null]]', "tensors": []},
        {"nodes": '[["list","value",null,[["at","value"]],null]]', "tensors": []},
        {"nodes": '[["list","value",null,[["by others","weight"]],null]]', "tensors": []},
        {"nodes": '[["list","value",null,[["enum","os.path","x"]],null]]', "tensors": []},
    ],
)
def test_what_is_not_a_record_of_a_value_is_refused(record):
    """Or is harmless: a list that holds itself."""
    if '["at","value"]' in str(record):
        assert decode(record)[0] is not None
        return
    with pytest.raises(UserError, match="^a checkpoint holds "):
        decode(record)


def test_equal_values_have_equal_digests():
    """The order of a set, and which texts are one object, differ where values are equal."""
    names = [f"class {number}" for number in range(3)]
    assert values.digest(encode({"b", "a", 3})) == values.digest(encode({3, "a", "b"}))
    assert values.digest(encode([names[k % 3] for k in range(300)])) == values.digest(
        encode([f"class {k % 3}" for k in range(300)])
    )
    different = [[1], (1,), {1}, {"a": 1}, 1, 1.0, "1", torch.ones(1), np.ones(1), [[1]]]
    assert len({values.digest(encode(each)) for each in different}) == len(different)


def test_what_is_in_dicts_has_digests_of_its_own():
    shared = {"x": 1}
    state = {"env": {"at": 1.5, "w": [1, 2]}, "a": shared, "b": shared, 5: {}, "none": {}}
    found = values.digests(encode({"state": state, "other": {5: 1}}))
    assert list(found) == [".state", ".other"]
    del state[5]
    found = values.digests(encode(state))
    assert list(found) == [".env.at", ".env.w", ".a.x", ".b", ".none"]
    changed_state = state | {"env": {"at": 1.5, "w": [1, 3]}}
    other = values.digests(encode(changed_state))
    assert [name for name in found if found[name] != other[name]] == [".env.w"]
    assert list(values.digests(encode(3))) == [""]


def test_a_pattern_that_was_made_with_an_output_of_its_parts_is_made_without(capsys):
    made = re.compile("ab", re.DEBUG)
    capsys.readouterr()
    assert round_trip(made)[0] == re.compile("ab")
    assert capsys.readouterr().out == ""
