"""What samplers and streams read while they draw."""

import numpy as np
import pytest
import torch
from torch.utils.data import Sampler

from sagemaker_lightning.state.followed_draws import (
    changed,
    names_read_while_drawing,
    values_followed,
)


class Ordered(Sampler):
    """Reads nothing of itself after its first value."""

    def __iter__(self):
        for index in sorted(self.losses):
            yield index + 1


class Hard(Sampler):
    def __iter__(self):
        order = self.order
        for _ in order:
            worst = max(self.losses)
            yield worst + len(order)
        self.mean = self.total


class Patient(Sampler):
    def __iter__(self):
        stale = 0
        while self.is_open:
            stale += self.loss
            yield stale


class ByMethod(Sampler):
    def __iter__(self):
        first = self.first
        for _ in range(3):
            yield first + self.draw()

    def draw(self):
        return self.losses


class Memoryless(Sampler):
    """Each value follows from what there is at that moment."""

    def __iter__(self):
        for index in range(3):
            loss = self.losses[index]
            yield [number + loss for number in range(index)]


class Skipping(Sampler):
    """The place in its loop lasts, and is not that of its values."""

    def __iter__(self):
        for index in self.order:
            if self.losses[index]:
                yield index


class Passing(Sampler):
    """The place in its inner loop lasts."""

    def __iter__(self):
        while True:
            yield from ()
            for index in self.order:
                yield index + 1


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield self.losses[0]


class OwnIterator(Sampler):
    def __iter__(self):
        return self

    def __next__(self):
        return self.losses


class Empty(Sampler):
    def __iter__(self):
        return
        yield self.losses


class Delegating(Sampler):
    def __iter__(self):
        yield from self.losses


@pytest.mark.parametrize(
    ("class_", "names"),
    [
        (Ordered, set()),
        (Hard, {"losses", "total"}),
        (Patient, {"is_open", "loss"}),
        (ByMethod, {"draw", "losses"}),
        (Memoryless, set()),
        (Endless, set()),
        (Skipping, {"losses"}),
        (Passing, {"order"}),
        (OwnIterator, set()),
        (Delegating, set()),
        (Empty, set()),
        (type(None), set()),
        (Sampler, set()),
    ],
)
def test_what_is_read_between_draws_counts_where_variables_last(class_, names):
    assert names_read_while_drawing(class_) == names


def test_an_attribute_that_is_read_between_draws_is_named_when_it_changes():
    hard, ordered = Hard(), Ordered()
    for sampler in (hard, ordered):
        sampler.losses, sampler.order, sampler.total = [1.0, 2.0], [0, 1], 0
    before = values_followed([hard, ordered, None])
    assert changed([hard, ordered, None], before) == {}
    for sampler in (hard, ordered):
        sampler.losses[0], sampler.order = 3.0, [1]
    assert changed([hard, ordered, None], before) == {"Hard": ["losses"]}


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (np.zeros(100_000), lambda array: array.__setitem__(70_001, 1.0)),
        (torch.zeros(100_000), lambda tensor: tensor[70_001].fill_(1.0)),
        ([0] * 5_000, lambda values: values.append(0)),
        ({"a": 1}, lambda values: values.update(a=2)),
        (0.5, None),
    ],
)
def test_large_values_are_compared_too(value, change):
    sampler = Hard()
    sampler.losses, sampler.total = value, 0
    before = values_followed([sampler])
    assert changed([sampler], before) == {}
    if change:
        change(value)
    else:
        sampler.losses = value + 1
    assert changed([sampler], before) == {"Hard": ["losses"]}
