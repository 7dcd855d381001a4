"""compat/random_generators.py: what seeds a generator that got no seed."""

import random

import numpy
import pytest

from sagemaker_lightning.compat import random_generators


def test_generators_are_seeded_by_the_system_again_after_a_block():
    before = random.Random.seed, random.seed, numpy.random.bit_generator.randbits
    asked = []
    with (
        pytest.raises(ZeroDivisionError),
        random_generators.entropy_replaced(lambda bits: asked.append(bits) or 7),
    ):
        drawn = [random.Random().random(), random.Random(None).random(), random.Random(5).random()]
        assert numpy.random.default_rng().random() == numpy.random.default_rng().random()
        raise ZeroDivisionError
    assert asked[:2] == [128, 128] and drawn[0] == drawn[1] == random.Random(7).random()
    assert drawn[2] == random.Random(5).random()
    assert before == (random.Random.seed, random.seed, numpy.random.bit_generator.randbits)


def test_a_text_seeds_as_ever_while_entropy_is_replaced():
    with random_generators.entropy_replaced(lambda bits: 7):
        drawn = random.Random("text").random()
    assert drawn == random.Random("text").random()
