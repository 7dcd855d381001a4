"""state/object_graph.py: what a walk reaches, and when it is walked again."""

import dis
import inspect
import itertools
import types
from types import SimpleNamespace

import pytest
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader

from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.object_graph import at_one_moment, roots_at_one_moment, walk


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


def methods(class_: type) -> list[types.FunctionType]:
    return [
        function
        for base in class_.__mro__
        for member in vars(base).values()
        if isinstance(function := getattr(member, "__func__", member), types.FunctionType)
    ]


class ManyNames:
    """Its method has more names than one byte can number."""

    exec(
        "def fill(self, other):\n"
        + "".join(f"    other.name_{n} = {n}\n" for n in range(300))
        + "    self.last = self.name_1 = other.mine = 3\n"
    )


@pytest.mark.parametrize("class_", [Trainer, LightningModule, DataLoader, Adam, nn.LSTM, ManyNames])
def test_the_attributes_that_a_method_sets_on_its_object_are_found(class_):
    """`dis` tells what each instruction does, and takes long."""
    sets_any = False
    for function in methods(class_):
        code = inspect.unwrap(function).__code__
        instructions = [
            each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"
        ]
        expected = {
            instruction.argval
            for previous, instruction in itertools.pairwise(instructions)
            if instruction.opname == "STORE_ATTR"
            and previous.argrepr.rpartition(", ")[2] == (*code.co_varnames, "")[0]
        }
        assert object_graph._set_on_self(function) == expected, function
        sets_any |= bool(expected)
    assert sets_any


def test_attributes_are_those_in_the_dict_and_in_slots():
    class Slotted:
        __slots__ = ("__hidden", "missing", "shown")

        def __init__(self) -> None:
            self.shown = 1
            self.__hidden = 2

    assert object_graph.attributes(Slotted()) == {"shown": 1, "_Slotted__hidden": 2}
    assert object_graph.attributes(SimpleNamespace(a=1)) == {"a": 1}
