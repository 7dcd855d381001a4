"""state/batch_digest.py: different batches have different digests, and nothing fails it.

The digest of a batch is the same on each device.
"""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sagemaker_lightning.state import batch_digest
from sagemaker_lightning.state.batch_digest import MAX_WORDS, combine, leaf_digests


def of(value: object) -> int:
    return combine(int(part) for part in leaf_digests(value))


@dataclass
class Sample:
    image: torch.Tensor
    label: str


class Plain:
    """A batch of the kind that torch's documentation of pin_memory has."""

    def __init__(self, inputs) -> None:
        self.inputs = inputs


Pair = namedtuple("Pair", ["one", "other"])
X = torch.arange(12.0).reshape(3, 4)
VALUES = {
    "a tensor": X,
    "float64": X.double(),
    "half": X.half(),
    "bfloat16": X.bfloat16(),
    "whole numbers": X.long(),
    "bytes": X.byte(),
    "truths": X > 3,
    "complex": torch.complex(X, X),
    "odd": torch.arange(7, dtype=torch.uint8),
    "transposed": X.T,
    "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "a slice": torch.arange(20.0)[1:8],
    "every second": torch.arange(20.0)[::2],
    "expanded": torch.ones(1, 4).expand(3, 4),
    "none": torch.zeros(0, 3),
    "one": torch.tensor(3.0),
    "with a gradient": (X + 1).requires_grad_(),
    "sparse": X.to_sparse(),
    "a pair": (X, torch.ones(3)),
    "a dict": {"x": X, "y": [1, 2.5, "three", b"four", None, True]},
    "named": Pair(X, X + 1),
    "a dataclass": Sample(X, "cat"),
    "an object": Plain(X),
    "of a library": UserDict(x=X),
    "an array": np.arange(6.0),
    "an array of text": np.array(["a", "b"]),
    "an array of objects": np.array([object()]),
    "a numpy scalar": np.float32(3),
    "empty": [[], {}, ()],
    "a set": {1, 2},
    "a function": len,
    "a class": Sample,
    "text": ["a"] * 100,
    "nothing": None,
}


def test_each_is_another_one():
    found = {name: of(value) for name, value in VALUES.items()}
    assert len(set(found.values())) == len(found)
    assert found == {name: of(value) for name, value in VALUES.items()}
    assert all(0 < one < 2**64 for one in found.values())


@pytest.mark.parametrize(
    "name", [name for name, value in VALUES.items() if isinstance(value, torch.Tensor)]
)
def test_a_gpu_has_the_same(name, monkeypatch):
    """On a GPU, torch does the work of numpy here, and the sum stays a tensor."""

    class There(torch.Tensor):
        is_cpu = False

    words = batch_digest._words(VALUES[name])
    here = leaf_digests(VALUES[name])
    monkeypatch.setattr(batch_digest, "QUICK", ())
    monkeypatch.setattr(
        batch_digest, "_words", lambda value: None if words is None else words.as_subclass(There)
    )
    there = leaf_digests(VALUES[name])
    assert words is None or isinstance(there[1], torch.Tensor)
    assert combine(map(int, here)) == combine(map(int, there))


@pytest.mark.parametrize("size", [5, 8, 1000, 2 * MAX_WORDS, 10 * MAX_WORDS + 3])
def test_one_that_differs_shows(size):
    """Any element where there are few, any region where there are many; and another order."""
    first = torch.arange(size, dtype=torch.int64)
    for place in range(0, size, max(1, size // 50)):
        other = first.clone()
        other[place : place + 1 + size // MAX_WORDS] += 1
        assert of(other) != of(first)
    assert of(first.flip(0)) != of(first)
    assert of(first[None]) != of(first) != of(first.double())


def test_what_is_in_it_counts():
    batch = {"x": X, "y": [1, 2.5, "three"], "z": Sample(X, "cat")}
    for other in (
        {**batch, "x": X + 1},
        {**batch, "y": [1, 2.5, "four"]},
        {**batch, "y": [1, 2.25, "three"]},
        {**batch, "z": Sample(X, "dog")},
        {**batch, "w": 1},
        list(batch.values()),
    ):
        assert of(other) != of(batch)


def test_nothing_makes_it_fail_or_take_long():
    endless: list = []
    endless.append(endless)

    class Hostile:
        @property
        def __dict__(self):
            raise RuntimeError

    many = [{"x": torch.ones(2), "y": torch.ones(2)} for _ in range(10_000)]
    assert (
        len(leaf_digests(many)) <= batch_digest.MAX_LEAVES + 80 and len(leaf_digests(endless)) < 100
    )
    assert of([X, Hostile(), X]) and of({"a": endless})
    assert of(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_of_what_may_change_the_digest_is_taken_at_once():
    value = X.clone()
    found = leaf_digests(value)
    value.zero_()
    assert combine(map(int, found)) == of(X)


def test_bits():
    assert (
        batch_digest.float_bits(0.1)
        == batch_digest.float_bits(torch.tensor(0.1, dtype=torch.float64))
        != batch_digest.float_bits(torch.tensor(0.1))
    )
    assert batch_digest.float_bits(torch.tensor(1.0)) != batch_digest.float_bits(
        torch.tensor(1.0 + 2**-23)
    )
    assert batch_digest.float_bits(float("nan")) and batch_digest.float_bits(
        torch.tensor([1.0, 3.0])
    ) == batch_digest.float_bits(2.0)
