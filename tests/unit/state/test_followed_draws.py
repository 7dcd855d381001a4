"""What samplers and streams read while they draw."""

import pytest
from torch.utils.data import Sampler

from sagemaker_lightning.state.followed_draws import (
    changed,
    names_read_while_drawing,
    values_followed,
)


class Ordered(Sampler):
    def __iter__(self):
        for index in sorted(self.losses):
            yield index + 1


class Hard(Sampler):
    def __iter__(self):
        order = self.order
        for _ in order:
            worst = max(self.losses)
            yield worst
        self.mean = self.total


class Endless(Sampler):
    def __iter__(self):
        yield 0
        while self.is_open:
            yield 1


class ByMethod(Sampler):
    def __iter__(self):
        for _ in range(3):
            yield self.draw()

    def draw(self):
        return self.losses


class OwnIterator(Sampler):
    def __iter__(self):
        return self

    def __next__(self):
        return self.losses


class Given(Sampler):
    def __iter__(self):
        return iter(self.losses)


class Delegating(Sampler):
    def __iter__(self):
        yield from self.losses


@pytest.mark.parametrize(
    ("class_", "names"),
    [
        (Ordered, set()),
        (Hard, {"losses", "total"}),
        (Endless, {"is_open"}),
        (ByMethod, {"draw", "losses"}),
        (OwnIterator, {"losses"}),
        (Given, set()),
        (Delegating, set()),
        (type(None), set()),
        (Sampler, set()),
    ],
)
def test_what_is_read_before_the_first_draw_is_as_the_epoch_begins(class_, names):
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
