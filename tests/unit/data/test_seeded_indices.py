"""data/seeded_indices.py: when the generators of the user's objects are looked for."""

import pytest

from sagemaker_lightning.data import seeded_indices
from sagemaker_lightning.data.seeded_indices import UserGenerators, number_of


class Thing:
    """An object of a user's."""


@pytest.mark.parametrize(("batches", "searches"), [(3, 3), (62, 4), (64, 5), (127, 5), (128, 6)])
def test_generators_are_looked_for_after_the_first_batches_and_each_64th(
    monkeypatch, batches, searches
):
    found = []
    monkeypatch.setattr(seeded_indices.generators, "find", lambda roots: found.append(roots) or {})
    generators = UserGenerators({"model": Thing()})
    assert not any([generators.more() for _ in range(batches)])
    assert len(found) == searches


def test_an_attribute_that_is_added_or_replaced_has_them_looked_for(monkeypatch):
    found = {}
    monkeypatch.setattr(seeded_indices.generators, "find", lambda roots: dict(found))
    generators = UserGenerators({"model": (model := Thing())})
    for _ in range(10):
        generators.more()
    found["model.rng"] = 1
    assert not generators.more()
    model.rng = 1
    assert generators.more() and not generators.more()
    found["model.other"] = 2
    model.rng = 2.0
    assert generators.more()


def test_the_numbers_of_keys_stay_what_they_are():
    """A run that is resumed by a later version draws the same."""
    assert number_of("order", 7, 1) == 2783794320948527944
    assert number_of("sample", 0, 3, 2) == 624489107352743323
