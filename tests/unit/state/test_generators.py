"""The states of random generators come back, and a forged one is refused."""

import random
import sys
import types
import warnings
import zlib
from collections import ChainMap, UserDict, UserList, deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sagemaker_lightning.state import generators

MAKES = {
    "Python's": lambda seed=1: random.Random(seed),
    "torch's": lambda seed=1: torch.Generator().manual_seed(seed),
    "RandomState": lambda seed=1: np.random.RandomState(seed),
    "RandomState of another engine": lambda seed=1: np.random.RandomState(np.random.PCG64(seed)),
} | {
    name: lambda seed=1, name=name: np.random.Generator(getattr(np.random, name)(seed))
    for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
}
MAKES |= {
    f"the engine {name}": lambda seed=1, name=name: getattr(np.random, name)(seed)
    for name in ("MT19937", "PCG64", "Philox")
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    if isinstance(generator, np.random.BitGenerator):
        return generator.random_raw()
    return generator.random()


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("draws", [0, 1, 624, 625])
def test_a_state_comes_back(name, draws):
    generator, other = MAKES[name](), MAKES[name]()
    for _ in range(draws):
        draw(generator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = generators.state_of(generator)
    generators.restore(other, state)
    assert [draw(generator) for _ in range(5)] == [draw(other) for _ in range(5)]


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_the_next_generator_that_is_spawned_is_another_one(name):
    generator, other = MAKES[name](), MAKES[name]()
    generator.spawn(3)
    generators.restore(other, generators.state_of(generator))
    assert draw(other.spawn(1)[0]) == draw(generator.spawn(1)[0])


def test_to_count_children_spawns_none():
    generator = MAKES["PCG64"]()
    first = draw(MAKES["PCG64"]().spawn(1)[0])
    state = generators.state_of(generator) | {generators.SPAWNED: 10**9}
    generators.restore(generator, state)  # to spawn so many would take a day
    assert generators.state_of(generator) == state
    assert draw(generator.spawn(1)[0]) != first


def test_no_more_generators_are_spawned_than_a_seed_counts():
    generator = MAKES["PCG64"]()
    state = generators.state_of(generator) | {generators.SPAWNED: 10**12}
    with pytest.raises(ValueError, match="generators to spawn"):
        generators.restore(generator, state)


@pytest.mark.parametrize(
    "seed",
    [
        ([3], (-1,), 4),
        ([2.5], (), 4),
        ([3], (), 0),
        ([3], (), 10**9),
        ([1] * 10**5, (), 4),
        (3, (), 4),
    ],
)
def test_a_seed_that_no_generator_has_is_refused(seed):
    with pytest.raises((ValueError, TypeError)):
        generators.seed_sequence(*seed)


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


def test_a_generator_in_a_librarys_object_is_found():
    engine = SimpleNamespace(rng=np.random.default_rng(0))
    assert generators.find({"engine": engine}) == {"engine.rng": engine.rng}


class Simulator:
    """An object of a user's with a generator."""

    def __init__(self):
        self.rng = random.Random(0)


@pytest.mark.parametrize(
    ("hold", "path"),
    [
        (lambda each: SimpleNamespace(of=each), "of"),
        (lambda each: SimpleNamespace(all=[each]), "all.0"),
        (lambda each: ChainMap({}, {"of": each}), "maps.1.of"),
        (lambda each: UserDict(of=each), "data.of"),
        (lambda each: UserList([each]), "data.0"),
        (lambda each: np.array([each], object), "0"),
    ],
)
def test_a_generator_in_an_object_that_a_librarys_container_holds_is_found(hold, path):
    simulator = Simulator()
    found = generators.find({"model": [hold(simulator)]})
    assert found == {f"model.0.{path}.rng": simulator.rng}


GENERATOR = np.random.default_rng(0)
BY_TORCH = torch.Generator()


def shifted(samples, by=BY_TORCH):
    return [sample + GENERATOR.random() for sample in samples]


class Unread:
    """Draws nothing."""


class Drawing(Unread):
    """Draws from a generator of its class, and from one that a function reads."""

    generator = random.Random(0)
    parts = (Unread, shifted)

    def __getitem__(self, index):
        return shifted([index])


class Reading:
    """Draws from a generator of the module."""

    def __getitem__(self, index):
        return GENERATOR.random()


@pytest.mark.parametrize("base", [list, dict, deque, set])
def test_a_generator_that_a_container_of_a_users_class_has_is_found(base):
    container = type("Reservoir", (base,), {"__module__": "user"})()
    container.draws = random.Random(1)
    assert generators.find({"model": container}) == {"model.draws": container.draws}
    if base is dict:
        container["draws"] = "an element of that name"
        assert generators.find({"model": container}) == {"model.draws#": container.draws}


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
    assert generators.find({"data": drawing}, skip=(Unread,)) == {}
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


@pytest.mark.parametrize("kind", MAKES)
def test_each_generator_has_a_seed_of_its_own_that_a_number_decides(kind):
    """In another process, too."""
    found = {"a": MAKES[kind](), "b": MAKES[kind]()}
    number = 0x1234_5678_9ABC
    generators.reseed(found, number)
    expected_seeds = [number ^ zlib.crc32(path.encode()) for path in found]
    if kind == "RandomState":
        expected_seeds = [seed & 0xFFFFFFFF for seed in expected_seeds]
    first = [draw(generator) for generator in found.values()]
    assert first == [draw(MAKES[kind](seed)) for seed in expected_seeds]
    assert first[0] != first[1]


def test_the_operating_systems_random_numbers_have_no_state_to_keep():
    roots = {"callback": {"own": random.Random(1), "systems": random.SystemRandom()}}
    assert list(generators.find(roots)) == ["callback.own"]


class DrawingElsewhere:
    def step(self):
        return helper.draw(), helper.other  # noqa: F821 (the test below has it)


def test_generators_of_another_module_are_found(monkeypatch):
    """As `helper.draw()`, and not only as `from helper import draw`."""
    helper = types.ModuleType("helper_of_a_test")
    exec("def draw():\n    return RNG.random()", vars(helper))  # noqa: S102 (as in its file)
    helper.RNG = np.random.default_rng(0)
    helper.other = {"rng": random.Random(0), "draw": random.Random(1).random}
    monkeypatch.setitem(sys.modules, helper.__name__, helper)

    monkeypatch.setitem(globals(), "helper", helper)
    found = generators.find({"model": DrawingElsewhere()}).values()
    assert {type(each) for each in found} == {np.random.Generator, random.Random}
    assert len(found) == 3


class Noisy:
    """It has a generator by the name of a variable of this module."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def drawn(self):
        return self.rng.random()


def drawn_from_the_variable():
    def inner():
        return rng.random()  # noqa: F821 (the test below has it)

    return inner()


def test_an_attributes_name_is_not_taken_for_a_variables(monkeypatch):
    monkeypatch.setitem(globals(), "rng", np.random.default_rng(1))
    assert generators.find({"data": Noisy()}).keys() == {"data.rng"}
    assert list(generators.find({"draw": drawn_from_the_variable}).values()) == [globals()["rng"]]
