"""A run's state of a user's objects: marked at the start, saved, restored, and saved again."""

import numpy as np
import pytest
import torch

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph.state import GraphState, digests, names_in, without


class Thing:
    """An object of a user's."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def state_of(model):
    """Return the state of a model that has just been made."""
    state = GraphState(lambda: {"model": model})
    state.mark()
    return state


def test_what_was_restored_is_saved_again_even_if_it_stays_as_it_is():
    """A resumed run marks its start when the state is restored already."""
    trained = Thing(step=0, parts=[])
    state = state_of(trained)
    trained.step = 3
    trained.parts.append(Thing(losses=[0.5]))
    record = state.encode()
    resumed = Thing(step=0, parts=[])
    state = GraphState(lambda: {"model": resumed})
    state.restore(record)
    state.mark()
    state.restore(record)
    assert state.encode() == record
    again = Thing(step=0, parts=[])
    state_of(again).restore(state.encode())
    assert again.step == 3 and again.parts[0].losses == [0.5]


def test_objects_made_of_a_record_stay_when_it_is_restored_again():
    """A hook at the start may have kept one."""
    trained = Thing(parts=[])
    state = state_of(trained)
    trained.parts.append(Thing(losses=[0.5]))
    record = state.encode()
    resumed = Thing(parts=[])
    state = state_of(resumed)
    state.restore(record)
    part = resumed.parts[0]
    part.losses.append(9)
    state.restore(record)
    assert resumed.parts == [part] and part.losses == [0.5]


def test_what_hooks_make_after_the_first_mark_is_of_the_start():
    def begin():
        model = Thing(table={}, other=None)
        state = GraphState(lambda: {"model": model})
        state.begin()
        model.table["made"] = Thing(count=0)
        return model, state

    trained, state = begin()
    state.mark()
    trained.table["made"].count = 2
    trained.other = trained.table["made"]
    record = state.encode()
    assert set(names_in(record)) == {
        "model",
        "model.other",
        "model.table['made']",
        "model.table['made'].count",
    }
    resumed, state = begin()
    state.mark()
    state.restore(record)
    assert resumed.other is resumed.table["made"] and resumed.other.count == 2


def test_an_object_in_whose_place_the_start_puts_another_leaves_it_its_path():
    def begin():
        model = Thing(part=Thing(count=0), kept=None)
        state = GraphState(lambda: {"model": model})
        state.begin()
        model.part = Thing(count=1)
        state.mark()
        return model, state

    trained, state = begin()
    trained.part.count = 5
    resumed, other = begin()
    other.restore(state.encode())
    assert resumed.part.count == 5


def test_values_that_were_computed_are_saved_with_all_that_they_hold():
    def begin():
        model = Thing(anchor=None)
        return model, state_of(model)

    trained, state = begin()
    trained.anchor = {"weight": torch.ones(2), "rows": [np.ones(2)]}
    changes = state.changes()
    assert [name for _, name in changes] == ["anchor"]
    state.touch(changes)
    state.mark()
    resumed, other = begin()
    resumed.anchor = {"weight": torch.zeros(2), "rows": [np.zeros(2)]}
    other.mark()
    other.restore(state.encode())
    assert resumed.anchor["weight"].tolist() == [1, 1]
    assert resumed.anchor["rows"][0].tolist() == [1, 1]


def test_what_a_check_before_training_changes_and_makes_is_saved():
    def begin():
        model = Thing(seen=[], last=None)
        return model, state_of(model)

    trained, state = begin()
    trained.seen.append(1)
    trained.last = Thing(loss=0.5)
    state.touch_all()
    state.mark()
    resumed, other = begin()
    other.restore(state.encode())
    assert resumed.seen == [1] and resumed.last.loss == 0.5


def test_loaders_that_are_made_anew_are_as_their_program_makes_them():
    roots = {"train": Thing(rows=list(range(5)), count=0)}
    state = GraphState(lambda: roots)
    state.mark()
    roots["train"] = Thing(rows=list(range(5)), count=0)
    state.include()
    roots["train"].count = 3
    assert list(names_in(state.encode())) == ["train", "train.count"]


def test_a_record_without_the_objects_of_a_root():
    roots = {"train": Thing(count=0), "model": Thing(count=0, part=None)}
    state = GraphState(lambda: roots)
    state.mark()
    roots["train"].count = roots["model"].count = 3
    roots["model"].part = Thing()
    rest = without(state.encode(), "train")
    assert list(names_in(rest)) == ["model", "model.count", "model.part"]
    roots["model"].count = roots["train"].count = 0
    state.restore(rest)
    assert roots["model"].count == 3 and roots["train"].count == 0


def digests_of(make_value):
    """Return the digests of a model that has got a value."""
    model = Thing()
    state = state_of(model)
    model.value = make_value()
    return digests(state.encode())


def test_equal_values_have_equal_digests_and_others_have_not():
    def cyclic(number):
        thing = Thing(number=number)
        thing.self = [thing]
        return thing

    values = [
        lambda: cyclic(1),
        lambda: cyclic(2),
        lambda: [[1], [2]],
        lambda: [[2], [1]],
        lambda: [shared := [1], shared],
        lambda: [[1], [1]],
        lambda: {"a": torch.ones(2)},
        lambda: {"a": torch.zeros(2)},
        lambda: np.ones(2),
        lambda: {1, 2, 70_000},
    ]
    found = [digests_of(make)["model.value"] for make in values]
    assert found == [digests_of(make)["model.value"] for make in values]
    assert len(set(found)) == len(values)
    # The order of a set may be another one.
    assert digests_of(lambda: {0, 8})["model.value"] == digests_of(lambda: {8, 0})["model.value"]


def test_the_hash_of_numbers_is_the_same_in_another_process_and_version():
    """A checkpoint has it, of what a resumed run makes again."""
    model = Thing(array=np.arange(3.0), tensor=torch.arange(3), text=["a"], one=3)
    vars(model).update(numbers=[1, 2.5], row=(1, 2))
    model.pair = (np.ones(2), torch.ones(2))
    numbers = state_of(model).numbers(())
    assert {name: mark.hex()[-16:] for name, mark in numbers.items()} == {
        "model.array": "c61b82935dc37863",
        "model.pair": "096060e0d1271904",
        "model.numbers": "2b064a151dc19231",
        "model.row": "d7e09a0eae05bf8e",
        "model.tensor": "de30fb3db08bc6c6",
    }


class Table(dict):
    """A dict of a user's class."""


def test_what_a_users_container_holds_is_saved_again_even_if_it_stays_as_it_is():
    trained = Thing(table=Table(size=4))
    state = state_of(trained)
    trained.table["size"] = 8
    record = state.encode()
    resumed = Thing(table=Table(size=4))
    state = GraphState(lambda: {"model": resumed})
    state.restore(record)
    state.mark()
    assert digests(state.encode()) == digests(record)
    state.touch_all()
    assert digests(state.encode()) == digests(record)


def test_what_is_kept_by_the_id_of_an_object_is_found_again():
    """As code does that keeps values of layers or parameters, in a process with other addresses."""

    def make():
        model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
        model.of_layers = {id(layer): torch.zeros(1) for layer in model}
        model.counts = {}
        model.last = 0
        return model

    trained = make()
    state = state_of(trained)
    for number, layer in enumerate(trained):
        trained.of_layers[id(layer)] += number + 1
        trained.counts[id(layer.weight)] = number
        trained.last = id(layer)
    record = state.encode()
    kept = make()  # so that no layer of the next model is where one was
    resumed = make()
    state = GraphState(lambda: {"model": resumed})
    state.restore(record)
    assert [resumed.of_layers[id(layer)].item() for layer in resumed] == [1, 2]
    assert [resumed.counts[id(layer.weight)] for layer in resumed] == [0, 1]
    assert resumed.last == id(resumed[1]) != id(kept[1])
    assert digests(state.encode()) == digests(record)


@pytest.mark.parametrize(
    "nodes",
    [
        5,
        "nodes",
        "5",
        "[5]",
        "[" * 2_000 + "]" * 2_000,
        '[["list", 5, null, [], {"values": [9, 9]}]]',
        '[["object", "model", {"names": ["a"]}, [["id"]], null]]',
        '[["object", "model", {"names": 5}, [[77]], null]]',
    ],
)
def test_a_forged_record_is_compared_with_nothing(nodes):
    with pytest.raises(UserError, match="a checkpoint holds something noted as"):
        digests({"nodes": nodes, "tensors": []})


def test_tuples_that_share_one_come_back():
    trained = Thing(value=None)
    state = state_of(trained)
    inner = ([1],)
    trained.value = (inner, (inner, 5))
    resumed = Thing(value=None)
    state_of(resumed).restore(state.encode())
    first, (second, _) = resumed.value
    assert first == ([1],) and first is second
