"""Plain values, as they are and as a checkpoint holds them; what of them has changed, also where they are long."""

import io
from collections import deque, namedtuple

import numpy as np
import pytest
import torch

from app.plain import MANY, decoded, encoded
from app.state import SMALL, State

Step = namedtuple("Step", "state reward done")


def again(value):
    """Return what a file would give back."""
    file = io.BytesIO()
    torch.save(encoded(value), file)
    file.seek(0)
    return decoded(torch.load(file, weights_only=True)), len(file.getvalue())


def rows(kind, size: int) -> list:
    return [kind((np.full(4, k, np.float32), 0.5 * k, k % 3 == 0)) for k in range(size)]


@pytest.mark.parametrize("kind", [tuple, Step._make], ids=["tuples", "named tuples"])
def test_a_long_list_of_steps_becomes_few_arrays(kind):
    given = deque(rows(kind, 5000), maxlen=6000)
    found, size = again(given)
    assert type(found) is deque and found.maxlen == 6000 and len(found) == 5000 and size < 200_000
    for one, other in zip(given, found, strict=True):
        assert type(one) is type(other) and [type(part) for part in one] == [type(part) for part in other]
        assert one[0].dtype == other[0].dtype and (one[0] == other[0]).all() and one[1:] == other[1:]


@pytest.mark.parametrize(
    "given",
    [
        [torch.full((2, 3), k) for k in range(MANY + 1)],
        [np.float32(k) for k in range(MANY + 1)],
        [np.zeros((0, 2)) for _ in range(MANY + 1)],
        [(k, "text") for k in range(MANY + 1)],
        tuple((k, None) for k in range(MANY + 1)),
        [(k, (k, 0.5)) for k in range(MANY + 1)],
        [{"a": k} for k in range(MANY + 1)],
        [(k,) * (1 + k % 2) for k in range(MANY + 1)],
        [np.zeros(1 + k % 2) for k in range(MANY + 1)],
        [],
    ],
)
def test_long_lists_come_back_as_they_were(given):
    found, _ = again(given)
    assert type(found) is type(given) and str(found) == str(given) and list(map(type, found)) == list(map(type, given))


@pytest.mark.parametrize(
    "make, change",
    [
        (lambda: list(range(SMALL + 1)), lambda one: one.reverse()),
        (lambda: list(range(SMALL + 1)), lambda one: one.append(0)),
        (lambda: list(map(str, range(SMALL + 1))), lambda one: one.__setitem__(77, "x")),
        (lambda: {k: str(k) for k in range(SMALL + 1)}, lambda one: one.update({5: "y"})),
        (lambda: np.zeros(SMALL + 1), lambda one: one.__setitem__(slice(3, 7), 1)),
        (lambda: torch.zeros(SMALL + 1), lambda one: one[[4, 5]].add_(1) is None or one[4].add_(1)),
        (lambda: np.arange(SMALL + 1), lambda one: one.__setitem__([3, 4], [4, 3])),
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
    state = State(lambda: {"mine": owner})
    state.mark()
    assert state.changed() == {}
    change(owner.value)
    kept = state.changed()
    assert list(kept) == [("mine", "value")]
    expected, owner.value = str(owner.value), make()
    state.restore(kept)
    assert str(owner.value) == expected


def test_what_is_too_long_is_told(monkeypatch):
    monkeypatch.setattr("app.state.HUGE", SMALL + 1)
    owner = type("Mine", (), {})()
    owner.value = np.zeros(SMALL + 2)
    state = State(lambda: {"mine": owner})
    state.mark()
    assert state.changed() == {} and state.unsaved == {}
    owner.value[5] = 1
    assert state.changed() == {} and state.unsaved == {("mine", "value"): "holds 65,538 elements"}
