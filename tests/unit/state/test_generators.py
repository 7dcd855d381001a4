"""The states of random generators come back, and a forged one is refused."""

import random

import numpy as np
import pytest
import torch

from sagemaker_lightning.state import generators

MAKES = {
    "Python's": lambda: random.Random(1),
    "torch's": lambda: torch.Generator().manual_seed(1),
    "RandomState": lambda: np.random.RandomState(1),
    "RandomState of another engine": lambda: np.random.RandomState(np.random.PCG64(1)),
} | {
    name: lambda name=name: np.random.Generator(getattr(np.random, name)(1))
    for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return generator.random()


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("draws", [0, 1, 624, 625])
def test_a_state_comes_back(name, draws):
    generator, other = MAKES[name](), MAKES[name]()
    for _ in range(draws):
        draw(generator)
    generators.restore(other, generators.state_of(generator))
    assert [draw(generator) for _ in range(5)] == [draw(other) for _ in range(5)]


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_the_next_generator_that_is_spawned_is_another_one(name):
    generator, other = MAKES[name](), MAKES[name]()
    generator.spawn(3)
    generators.restore(other, generators.state_of(generator))
    assert draw(other.spawn(1)[0]) == draw(generator.spawn(1)[0])


def test_no_more_generators_are_spawned_than_a_training_has():
    generator = MAKES["PCG64"]()
    state = generators.state_of(generator) | {generators.SPAWNED: 10**12}
    with pytest.raises(ValueError, match="generators to spawn"):
        generators.restore(generator, state)


@pytest.mark.parametrize("place", [-(10**9), -1, 625, 10**9])
@pytest.mark.parametrize("name", ["MT19937", "Philox", "RandomState"])
def test_a_place_outside_of_an_engines_memory_is_refused(name, place):
    """numpy would read there."""
    generator = MAKES[name]()
    state = generators.state_of(generator)
    state["state"]["pos"] = state["buffer_pos"] = place
    with pytest.raises(ValueError, match="no state of a generator"):
        generators.restore(generator, state)


@pytest.mark.parametrize("name", ["MT19937", "RandomState"])
def test_a_state_of_numpys_old_form_is_refused(name):
    """It has a place, too."""
    key = np.zeros(624, np.uint32)
    with pytest.raises(ValueError, match="no state of a generator"):
        generators.restore(MAKES[name](), ("MT19937", key, 10**9, 0, 0.0))
