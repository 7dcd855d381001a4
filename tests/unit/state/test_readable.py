"""Lightning's entries in a form that other programs read; what is not plain is put back."""

import enum
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from sagemaker_lightning.state.readable import readable, with_values

Step = namedtuple("Step", "state reward")


class Kind(enum.Enum):
    """A member is known by its name."""

    PAST = "past"


class Mode(enum.Flag):
    """Several flags have no one name."""

    READ = 1
    WRITE = 2


@dataclass
class Item:
    """A user's data."""

    number: int


class Image(torch.Tensor):
    """A tensor of a user's class."""


class Raising(enum.Enum):
    """What looks at it gets an error."""

    ONE = 1
    name = property(lambda self: 1 / 0)


def test_a_state_dict_for_other_programs_is_plain():
    others = {}
    lazy = torch.nn.LazyLinear(2).weight
    weights = OrderedDict({np.int64(3): torch.ones(1), ("a", 1): lazy})
    weights._metadata = {"": {"version": 2}}
    counts = MappingProxyType({"a": 1})
    plain = readable({"weights": weights, "counts": counts, "n": [1, None, "a"]}, others)
    assert type(plain["weights"]) is OrderedDict
    assert plain["weights"]._metadata == {"": {"version": 2}}
    assert list(plain["weights"]) == [3, ("a", 1)] and type(plain["counts"]) is dict
    assert type(next(iter(plain["weights"]))) is int and others == {}
    assert plain["weights"]["a", 1].shape == (0,)
    assert plain["weights"][3] is not weights[3] and plain["n"] == [1, None, "a"]
    assert readable(weights, copies=False)[3] is weights[3]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.str_("a"), "a"),
        (np.datetime64("2020-01-02"), "2020-01-02"),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([1, None], dtype=object), [1, None]),
        (deque([1]), [1]),
        ({2, 1}, [1, 2]),
        (defaultdict(list, {"a": [1]}), {"a": [1]}),
        (Counter("aa"), {"a": 2}),
        ({Kind.PAST: 1}, {"Kind.PAST": 1}),
        (Path("a/b"), "a/b"),
        (Decimal("0.1"), "0.1"),
        (Kind.PAST, "PAST"),
        (Mode.READ | Mode.WRITE, 3),
        (Step(1, deque([2])), [1, [2]]),
        (Item(3), {"number": 3}),
        (torch.ones(2).as_subclass(Image), torch.ones(2)),
        (range(3), "(builtins.range)"),
        (object(), "(builtins.object)"),
        (torch.zeros(1, device="meta"), "(torch.Tensor)"),
        (torch.nested.nested_tensor([torch.ones(1)]), "(torch.Tensor)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_there_by_its_content_or_its_name(value, expected):
    others = {}
    plain = readable({"a": (0, {"b": value})}, others)
    assert str(plain) == str({"a": (0, {"b": expected})})
    assert list(others) == [("a", 1, "b")] and others["a", 1, "b"] is value
    again = with_values(plain, others)
    assert again["a"][1]["b"] is value and type(again["a"]) is tuple


@pytest.mark.parametrize(
    "make", [np.zeros, lambda size: deque(range(size)), lambda size: Counter(range(size))]
)
def test_what_is_large_is_there_once(make):
    """A file that has nothing else has its content."""
    for size in (1024, 1025):
        others = {}
        plain = readable([value := make(size)], others)
        assert isinstance(plain[0], str) is (size == 1025) and others[(0,)] is value
        assert len(readable([value])[0]) == size


def test_a_tensor_of_several_places_has_one_copy():
    """As of the state that one optimizer has loaded of another one."""
    shared = torch.ones(2)
    plain = readable({"a": [shared], "b": {"c": shared, "d": torch.ones(2)}})
    assert plain["a"][0] is plain["b"]["c"] is not shared
    assert torch.equal(plain["b"]["d"], shared) and plain["b"]["d"] is not plain["b"]["c"]


def test_what_holds_itself_is_named():
    itself: dict = {"a": [1]}
    itself["a"].append(itself)
    others = {}
    plain = readable({"x": [1, itself], "y": deque([1])}, others)
    assert plain == {"x": [1, "(builtins.dict)"], "y": [1]}
    assert list(others) == [("x", 1), ("y",)]
    assert with_values(plain, others)["x"][1] is itself


def test_an_object_that_raises_when_it_is_looked_at_is_named():
    assert readable([Raising.ONE]) == [f"({__name__}.Raising)"]


def test_parts_of_a_state_that_are_plain_are_not_copied():
    state = {"a": [torch.ones(1)], "b": ({"c": [1, 2]}, [3]), "d": [{"e": 0}]}
    assert with_values(state, {}) is state
    restored = with_values(state, {("b", 0, "c"): 5, ("gone", 3): 6})
    assert restored["b"] == ({"c": 5}, [3])
    assert restored["a"] is state["a"] and restored["b"][1] is state["b"][1]
    assert restored["d"] is state["d"] and "gone" not in restored


def test_what_is_within_many_others_is_saved_beside():
    """Python copies, and torch pickles, by calls within calls, of which it allows a thousand."""
    deep = 1
    for _ in range(5_000):
        deep = [deep]
    others = {}
    plain = readable({"a": deep, "b": 2}, others)
    assert plain["b"] == 2 and len(others) == 1
    assert with_values(plain, others)["a"][0] == [deep[0][0]]
