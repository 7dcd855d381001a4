"""state/object_graph.py: what a walk reaches, and when it is walked again."""

from types import SimpleNamespace

import pytest
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, Timer

from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.object_graph import (
    at_one_moment,
    roots_at_one_moment,
    set_on_self,
    walk,
)


class Holder:
    """An object of a user's."""

    def __init__(self) -> None:
        self.parts: list = []


@pytest.fixture
def found() -> list:
    """The owners for which roots were asked."""
    return []


@pytest.fixture
def roots(found):
    """Return the roots of walks for an owner."""

    @roots_at_one_moment
    def roots(owner: Holder) -> dict:
        found.append(owner)
        return {"holder": owner}

    return roots


def paths(roots: dict, **options) -> list[str]:
    return [path for path, _ in walk(roots, **options)]


def test_the_same_objects_are_walked_over_once_at_one_moment(roots, found):
    holder = Holder()
    with at_one_moment():
        before = paths(roots(holder), code=False)
        holder.parts.append(Holder())
        assert paths(roots(holder), code=False) == before
        with at_one_moment():  # the same moment
            assert paths(roots(holder), code=False) == before
        assert paths(roots(holder), skip=(list,), code=False) == before
        assert found == [holder]
    assert paths(roots(holder), code=False) == [*before, "holder.parts.0", "holder.parts.0.parts"]
    assert found == [holder, holder]


def test_other_roots_are_walked_over_as_they_are_at_one_moment(roots):
    first, second = Holder(), Holder()
    with at_one_moment():
        list(walk(roots(first), code=False))
        second.parts.append({})
        assert "holder.parts.0" in paths(roots(second), code=False)
        other = {"holder": first}
        first.parts.append({})
        assert "holder.parts.0" in paths(other, code=False)


def test_an_error_ends_the_moment(roots):
    holder = Holder()
    with pytest.raises(ZeroDivisionError), at_one_moment():
        list(walk(roots(holder)))
        raise ZeroDivisionError
    holder.parts.append({})
    assert "holder.parts.0" in paths(roots(holder), code=False)


@pytest.mark.parametrize("class_", [*object_graph.PLAIN_OBJECTS, Trainer])
def test_all_that_the_code_of_a_base_class_sets_on_its_objects_is_known(class_):
    """Its source is not read at a start: that of these classes takes a tenth of a second."""
    known = set().union(*map(object_graph._own_attributes, class_.__mro__))
    names = {name for name in set_on_self(class_) if not name.startswith("__")}
    # A function of LightningDataModule has a class within it.
    assert names - known <= {"available", "length"}


@pytest.mark.parametrize("make", [lambda: EarlyStopping("loss"), ModelCheckpoint, Timer])
def test_what_the_code_of_a_librarys_class_sets_on_its_objects_is_found(make):
    assert set_on_self(type(make())) >= vars(make()).keys()


def test_a_class_without_a_source_sets_nothing_that_is_known():
    class_ = type("Unknown", (), {"__module__": "no_module"})
    assert set_on_self(class_) == set()
    class_.__static_attributes__ = ("a",)  # as Python 3.13 has it
    assert set_on_self(class_) == {"a"}


def test_attributes_are_those_in_the_dict_and_in_slots():
    class Slotted:
        __slots__ = ("__hidden", "missing", "shown")

        def __init__(self) -> None:
            self.shown = 1
            self.__hidden = 2

    assert object_graph.attributes(Slotted()) == {"shown": 1, "_Slotted__hidden": 2}
    assert object_graph.attributes(SimpleNamespace(a=1)) == {"a": 1}
