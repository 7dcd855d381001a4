"""Generators of random numbers are saved wherever the graph of the user's objects has them."""

import enum
import functools
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from untrained import run_of
from user_state import Holding, Model, trainer_of

from sagemaker_lightning.resume.parts.generators import Generators
from sagemaker_lightning.resume.parts.part import Moment

RNG = random.Random(3)
"""A variable that `draw_by_variable` reads."""


class Drawing:
    """Something of a user's that draws by its own generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)


def draw_by_variable() -> float:
    """Return a number drawn by a variable of this module."""
    return RNG.random()


def frozen(drawing: Drawing) -> Holding:
    return Holding(members=frozenset([drawing]))


def as_key(drawing: Drawing) -> Holding:
    return Holding(counts={drawing: 1})


def in_cycle(drawing: Drawing) -> Holding:
    return Holding(turns=itertools.cycle([drawing]))


def far_in_list(drawing: Drawing) -> Holding:
    return Holding(rows=[*([i] for i in range(2_000)), drawing])


def in_array(drawing: Drawing) -> Holding:
    return Holding(rows=np.array([None, drawing], dtype=object))


def by_default(drawing: Drawing) -> Holding:
    def draw(source=drawing) -> float:
        return source.rng.random()

    return Holding(space=SimpleNamespace(draw=draw))


@pytest.mark.parametrize("hold", [frozen, as_key, in_cycle, far_in_list, in_array, by_default])
def test_a_generator_comes_back_wherever_the_graph_reaches_it(hold):
    drawing = Drawing()
    part = run_of(trainer_of(Model(), hold(drawing))).part(Generators)
    drawing.rng.random()
    saved = part.save(None, None)
    expected = drawing.rng.random()
    other = Drawing()
    part = run_of(trainer_of(Model(), hold(other))).part(Generators)
    part.restore(saved, Moment.TRAINING)
    assert other.rng.random() == expected


def test_a_generator_in_a_variable_comes_back():
    class Reading(Model):
        def training_step(self, batch, batch_idx):
            return draw_by_variable()

    part = run_of(trainer_of(Reading())).part(Generators)
    saved = part.save(None, None)
    expected = draw_by_variable()
    part.restore(saved, Moment.TRAINING)
    assert draw_by_variable() == expected


def test_a_generator_keeps_the_name_by_which_it_was_known_first():
    """Training may give it a shorter one, which a resumed program does not have yet."""
    model = Model(helper=SimpleNamespace(inner=SimpleNamespace(rng=torch.Generator())))
    run = run_of(trainer_of(model))
    run.mark_start()
    before = run.part(Generators).save(None, None).keys()
    model.also = model.helper.inner.rng
    assert run.part(Generators).save(None, None).keys() == before


def test_those_of_the_process_are_not_saved():
    run = run_of(trainer_of(Model(own=torch.default_generator, other=random.SystemRandom())))
    assert run.part(Generators).save(None, None) == {}


class Source(enum.Enum):
    """A registry of things that draw, as members of an enum."""

    ONLY = Drawing()


@functools.lru_cache
def the_drawing() -> Drawing:
    """Return the one object of the program."""
    return Drawing()


def in_enum() -> Drawing:
    return Source.ONLY.value


@pytest.mark.parametrize("get", [in_enum, the_drawing], ids=["enum", "lru_cache"])
def test_a_generator_of_an_object_that_the_program_has_once_comes_back(get):
    class Reading(Model):
        def training_step(self, batch, batch_idx):
            return in_enum().rng.random() + the_drawing().rng.random()

    the_drawing()
    part = run_of(trainer_of(Reading())).part(Generators)
    saved = part.save(None, None)
    expected = get().rng.random()
    part.restore(saved, Moment.TRAINING)
    assert get().rng.random() == expected


def test_an_object_that_a_function_keeps_is_made_by_nobody_but_the_program():
    calls = []

    @functools.lru_cache
    def make():
        calls.append(1)
        return Drawing()

    class Reading(Model):
        def training_step(self, batch, batch_idx):
            return make().rng.random()

    run = run_of(trainer_of(Reading()))
    assert run.part(Generators).save(None, None) == {} and not calls


def drawn(drawing: Drawing) -> float:
    return drawing.rng.random()


def test_what_a_class_wraps_comes_back():
    class Reading(Model):
        by_partial = staticmethod(functools.partial(drawn, Drawing()))

        def training_step(self, batch, batch_idx):
            return self.by_partial()

    run = run_of(trainer_of(model := Reading()))
    saved = run.part(Generators).save(None, None)
    expected = model.by_partial()
    run.part(Generators).restore(saved, Moment.TRAINING)
    assert model.by_partial() == expected
