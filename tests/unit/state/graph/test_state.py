"""A run's state of a user's objects: marked at the start, saved, restored, and saved again."""

import contextvars
import copy
import ctypes
import functools
import multiprocessing
import operator
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.digests import digest
from sagemaker_lightning.state.graph import fingerprints
from sagemaker_lightning.state.graph.packing import PACKED_FROM
from sagemaker_lightning.state.graph.state import (
    GraphState,
    digests,
    names_in,
    nodes_of,
    without,
)
from sagemaker_lightning.state.object_graph import at_one_moment


class Thing:
    """An object of a user's."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def state_of(model):
    """Return the state of a model that has just been made."""
    state = GraphState(lambda: {"model": model})
    state.mark()
    return state


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    distributed.destroy_process_group()


def test_a_dtensor_is_as_a_whole_in_no_record(mesh):
    """The ranks write their parts of it; where one has changed, all do."""
    average = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])
    trained = Thing(average=average, later=None)
    state = state_of(trained)
    assert not state.touch_shared(state.encode(), [[], []])
    assert state.touch_shared(state.encode(), [[], ["model.average"]])
    trained.later = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))
    record = state.encode()
    assert record["tensors"] == []
    assert record["shared"].keys() == {"model.average", "model.later"}
    with torch.no_grad():
        average += 2  # the record has a copy
    resumed = Thing(average=distribute_tensor(torch.ones(3), mesh, [Shard(0)]), later=None)
    of_resumed = state_of(resumed)
    of_resumed.restore(record)
    assert resumed.average.full_tensor().tolist() == [0, 0, 0]
    assert isinstance(resumed.later, nn.Parameter) and isinstance(resumed.later, DTensor)
    assert resumed.later.requires_grad and resumed.later.full_tensor().tolist() == [1, 1, 1]
    assert digests(of_resumed.encode()) == digests(record)
    assert digest({"average": resumed.average}) == digest({"average": average - 2})
    assert digest({"average": resumed.average}) != digest({"average": average})
    with torch.no_grad():
        resumed.later[0] = 5
    assert digests(of_resumed.encode()) != digests(record)


def test_a_dtensor_gets_what_was_a_whole_tensor_and_no_other_part(mesh):
    """As after a run with DDP; one that is shared out otherwise is refused."""
    trained = Thing(average=torch.zeros(3))
    state = state_of(trained)
    trained.average += 1
    resumed = Thing(average=distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
    state_of(resumed).restore(state.encode())
    assert isinstance(resumed.average, DTensor)
    assert resumed.average.full_tensor().tolist() == [1, 1, 1]
    shared = Thing(average=distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
    state = state_of(shared)
    shared.average += 1
    with pytest.raises(UserError, match="a DTensor beside the model that was shared out in anoth"):
        state_of(Thing(average=torch.zeros(3))).restore(state.encode())


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


def test_a_record_is_read_before_there_is_a_loader_that_has_made_objects():
    """Their class is known once there is a dataset that has one."""
    kind = type("World", (Thing,), {"__module__": "a_library"})
    dataset = Thing(world=kind(rank=0))
    roots = {"model": Thing(step=0), "loader": dataset}
    state = GraphState(lambda: roots)
    state.mark()
    roots["model"].step = 3
    dataset.of_workers = [kind(rank=5)]
    record = state.encode()
    resumed = {"model": Thing(step=0)}
    state = GraphState(lambda: resumed)
    state.restore(record)
    assert resumed["model"].step == 3
    resumed["loader"] = Thing(world=kind(rank=0))
    state.restore(record)
    assert resumed["loader"].of_workers[0].rank == 5


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


class Bag(list):
    """A list of a user's own."""


def test_a_list_of_ones_own_that_was_computed_is_saved_with_its_elements_and_attributes():
    def begin():
        model = Thing(bag=Bag())
        model.bag.label = None
        return model, state_of(model)

    trained, state = begin()
    trained.bag.append(1.5)
    trained.bag.label = "full"
    state.touch(state.changes())
    state.mark()
    resumed, other = begin()
    resumed.bag.append(0.5)
    other.mark()
    other.restore(state.encode())
    assert resumed.bag == [1.5] and resumed.bag.label == "full"


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


def test_an_object_has_one_path_whether_roots_come_at_once_or_in_turn():
    """As what an optimizer's program makes, when a hook that it has registered leads to it, too."""

    class Masks:
        def __init__(self):
            self.step = 0

        def hook(self):
            self.step += 1

    def begin(roots):
        model = Thing()
        roots["model"] = model
        state = GraphState(lambda: roots)
        state.begin()
        model.masks = Masks()
        roots["hooks.0"] = functools.partial(model.masks.hook)
        return state, model

    state, model = begin({})
    state.mark()
    model.masks.hook()
    record = state.encode()
    assert "model.masks.step" in names_in(record)
    resumed, model = begin({})
    resumed.restore(record)
    resumed.mark()
    assert model.masks.step == 1
    assert "model.masks.step" in names_in(resumed.encode())


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


# What has changed, however large it is ------------------------------------------------------------


class Slotted:
    """Has a number in a slot."""

    __slots__ = ("sum",)


def mine(**attributes):
    """Return an object with these attributes, and its state, marked."""
    owner = Thing(**attributes)
    state = GraphState(lambda: {"mine": owner}, is_kept=True)
    state.mark()
    return owner, state


def changed(state) -> set[str]:
    """Return the names of the attributes that have changed."""
    return {name.removeprefix("Thing.") for name in state.names_changed()}


@pytest.mark.parametrize("size", [513, PACKED_FROM + 1])
@pytest.mark.parametrize(
    "make, change",
    [
        (lambda size: list(range(size)), lambda value: value.reverse()),
        (lambda size: list(range(size)), lambda value: value.append(0)),
        (lambda size: list(map(str, range(size))), lambda value: value.__setitem__(77, "x")),
        (lambda size: {k: str(k) for k in range(size)}, lambda value: value.update({5: "y"})),
        (lambda size: {k: [k] for k in range(size)}, lambda value: value[0].append(1)),
        (np.zeros, lambda value: value.__setitem__(slice(3, 7), 1)),
        (torch.zeros, lambda value: value[4].add_(1)),
        (np.arange, lambda value: value.__setitem__([3, 4], [4, 3])),
    ],
    ids=[
        "order",
        "length",
        "an element",
        "an entry",
        "within the first entry",
        "some numbers",
        "one number of a tensor",
        "two numbers exchanged",
    ],
)
def test_a_long_value_is_saved_when_it_changes(make, change, size):
    owner, state = mine(value=make(size))
    assert changed(state) == set() and nodes_of(state.encode()) == []
    change(owner.value)
    assert changed(state) == {"value"}
    record = state.encode()
    expected = str(owner.value)
    resumed, state = mine(value=make(size))
    state.restore(record)
    assert str(resumed.value) == expected


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, lambda tensor: [{"a": tensor}]])
def test_the_last_bit_of_any_element_of_a_tensor_counts(wrap):
    tensor = torch.ones(2000)
    _, state = mine(value=wrap(tensor))
    tensor[1000] += torch.finfo(torch.float32).eps
    assert changed(state) == {"value"}


def test_a_list_of_a_models_own_weights_is_no_value_of_its_own():
    """An LSTM has one. It is what its state dict has, which a checkpoint holds once."""
    model = torch.nn.LSTM(2, 2)
    state = GraphState(lambda: {"model": model})
    state.mark()
    with torch.no_grad():
        model.weight_ih_l0 += 1
    model.others = [torch.ones(1)]
    record = state.encode()
    assert set(names_in(record)) == {"model", "model.others"} and len(record["tensors"]) == 1


@pytest.mark.parametrize("size", [fingerprints.HASHED_IN_FULL, fingerprints.HASHED_IN_FULL + 1])
@pytest.mark.parametrize(
    "make", [np.zeros, torch.zeros, lambda size: "a" * size, lambda size: "\u044f" * size]
)
def test_a_value_of_any_size_that_stays_as_it_is_is_not_saved(make, size):
    owner, state = mine(value=make(size))
    owner.value = copy.deepcopy(owner.value) if isinstance(owner.value, str) else owner.value
    assert changed(state) == set() and nodes_of(state.encode()) == []


def test_each_number_of_a_large_array_counts():
    """Also of one that is not in one piece, or not of numbers alone; and its shape does."""
    size = (2, 40_000)
    owner, state = mine(
        array=np.zeros(size, np.int8),
        tensor=torch.zeros(size, dtype=torch.int8),
        transposed=np.zeros(size, np.int8).T,
        columns=torch.zeros(size, dtype=torch.int8)[:, ::2],
        shape=torch.zeros(size, dtype=torch.int8),
        type=np.zeros(size, np.int8),
        same=torch.zeros(size, dtype=torch.int8),
        sparse=torch.zeros(300, 300).to_sparse(),
    )
    owner.array[1, 7] = owner.tensor[1, 7] = 1
    owner.transposed[7, 1] = owner.columns[1, 7] = 1
    owner.shape = owner.shape.T.contiguous()
    owner.type = owner.type.astype(np.uint8)
    assert changed(state) == {"array", "tensor", "transposed", "columns", "shape", "type"}


def test_of_a_very_large_array_some_numbers_count(monkeypatch):
    monkeypatch.setattr(fingerprints, "CHECKSUMMED", 2**17)
    values = {
        name: np.zeros(size, np.int8)
        for name, size in {"array": 2**17, "read": 2**17 + 1, "unread": 2**17 + 1}.items()
    }
    values |= {f"{name}_too": torch.from_numpy(value.copy()) for name, value in values.items()}
    owner, state = mine(**values)
    for name, value in vars(owner).items():
        value[0 if name.startswith("read") else 1] = 1
    assert changed(state) == {"array", "read", "array_too", "read_too"}


def test_values_that_look_alike_are_told_apart():
    """Another type, shape or key is another value."""
    pairs = {
        "kind": ([1, 2], (1, 2)),
        "nested": ([[1], [2, 3]], [[1, 2], [3]]),
        "type": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
        "key": ({"a": 1}, {"b": 1}),
        "order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        "number": (1, 1.0),
        "text": ("1", 1),
        "truth": (True, 1),
        "length": ([0] * 300, [0] * 301),
        "emptied": ([1], []),
        "sparse": (torch.ones(2).to_sparse(), torch.zeros(2).to_sparse()),
        "none": (torch.zeros(0, 2), torch.zeros(2, 0)),
        "with tensors": ([torch.zeros(1), 1], [torch.zeros(1), 2]),
    }
    owner, state = mine(**{name: before for name, (before, _) in pairs.items()})
    assert changed(state) == set()
    vars(owner).update({name: after for name, (_, after) in pairs.items()})
    assert changed(state) == set(pairs)
    vars(owner).update({name: before for name, (before, _) in pairs.items()})
    assert changed(state) == set()


def test_what_others_hold_too_is_restored_in_place():
    def made():
        owner, state = mine(
            numbers=[1, 2],
            last=deque([1], maxlen=3),
            array=np.zeros(2),
            frozen=np.zeros(2),
            tensor=torch.zeros(2),
            tensors=[torch.zeros(2), torch.zeros(2)],
            by_name={"a": torch.zeros(2), "b": 1},
            pool={1, 2},
            longer=[torch.zeros(2)],
            wider=torch.zeros(2),
            reshaped=[torch.zeros(2)],
            other_array=np.zeros(2),
            shorter=deque([1], maxlen=3),
        )
        owner.frozen.flags.writeable = False
        return owner, state

    owner, state = made()
    owner.numbers.append(3)
    owner.last.append(2)
    owner.array[:] = owner.tensor[:] = 1
    owner.frozen = np.ones(2)
    owner.tensors[1] += 1
    owner.by_name["a"] += 1
    del owner.by_name["b"]
    owner.pool.add(3)
    owner.longer.append(torch.ones(2))
    owner.wider = torch.ones(3)
    owner.reshaped[0] = torch.ones(3)
    owner.other_array = np.ones(2, np.float32)
    owner.shorter = deque([1, 2], maxlen=2)
    record = state.encode()
    expected = {name: str(value) for name, value in vars(owner).items()}
    owner, state = made()
    held = dict(vars(owner))
    inner = [*owner.tensors, owner.by_name["a"]]
    state.restore(record)
    assert {name: str(value) for name, value in vars(owner).items()} == expected
    assert {name for name, value in vars(owner).items() if value is not held[name]} == {
        "frozen",
        "wider",
        "other_array",
        "shorter",
    }
    assert all(map(operator.is_, [*owner.tensors, owner.by_name["a"]], inner))
    assert owner.other_array.dtype == np.float32 and owner.shorter.maxlen == 2


def test_a_value_of_another_kind_takes_the_place_of_the_present_one():
    def made():
        owner, state = mine(
            tensor=None,
            nothing=torch.zeros(2),
            expanded=torch.zeros(1).expand(2),
            listed=[torch.zeros(1).expand(2)],
            longer=torch.zeros(2),
            whole=torch.zeros(2),
        )
        with torch.inference_mode():
            owner.inferred = torch.zeros(2)
        state.mark()
        return owner, state

    owner, state = made()
    owner.tensor, owner.nothing = torch.ones(2), None
    owner.expanded = owner.inferred = torch.ones(2)
    owner.listed[0] = torch.ones(2)
    owner.longer, owner.whole = torch.ones(1), torch.ones(2, dtype=torch.int)
    record = state.encode()
    owner, state = made()
    state.restore(record)
    assert owner.nothing is None and owner.whole.dtype == torch.int
    assert owner.tensor.tolist() == owner.expanded.tolist() == owner.inferred.tolist() == [1, 1]
    assert owner.listed[0].tolist() == [1, 1] and owner.longer.tolist() == [1]


def test_a_tensor_of_two_names_gets_its_values_once():
    """A module's weights are in the checkpoint already."""
    model = torch.nn.Linear(2, 1)
    norm = torch.nn.BatchNorm1d(2)
    shared = torch.zeros(2)

    def made():
        return mine(
            model=model,
            norm=norm,
            first=shared,
            second=shared,
            weights=[model.weight, model.bias],
            bias=model.bias,
            mixed=[model.weight, torch.zeros(1)],
        )

    owner, state = made()
    norm(torch.ones(2, 2))
    with torch.no_grad():
        model.bias += 1
    assert changed(state) == set()
    owner.first += 1
    owner.mixed[1] += 1
    record = state.encode()
    assert len(record["tensors"]) == 2
    shared.zero_()
    owner, state = made()
    state.restore(record)
    assert owner.first is owner.second is shared and shared.tolist() == [1, 1]
    assert owner.mixed[0] is model.weight and owner.mixed[1].item() == 1


def test_what_a_function_has_closed_over_is_restored_in_place():
    seen = []

    def note() -> None:
        seen.append(1)

    state = GraphState(lambda: {"note": note})
    state.mark()
    note()
    record = state.encode()
    held = seen
    held.clear()
    state.restore(record)
    assert seen is held and held == [1]


def test_objects_of_skipped_classes_are_not_saved():
    for classes, expected in (((), {"number", "meter", "parts"}), ((Slotted,), {"number"})):
        owner = Thing(kind=Thing, meter=Slotted(), parts=[Slotted()], number=0)
        owner.meter.sum = owner.parts[0].sum = 0
        state = GraphState(lambda owner=owner: {"mine": owner}, classes)
        state.mark()
        owner.number = owner.meter.sum = owner.parts[0].sum = 1
        paths = {path.partition("mine.")[2].partition("[")[0] for path in names_in(state.encode())}
        assert {path.partition(".")[0] for path in paths} - {""} == expected


def array_of(value) -> np.ndarray:
    """Return an array that holds a value."""
    array_ = np.empty(1, dtype=object)
    array_[0] = value
    return array_


@pytest.mark.parametrize("make", [lambda inner: [inner], lambda inner: {"a": inner}, array_of])
@pytest.mark.parametrize("levels", [9, 10])
def test_what_is_within_many_containers_is_saved(make, levels):
    def nested(value):
        for _ in range(levels):
            value = make(value)
        return value

    owner, state = mine(value=nested(1))
    owner.value = nested(2)
    record = state.encode()
    resumed, state = mine(value=nested(1))
    state.restore(record)
    assert str(resumed.value) == str(nested(2))


def test_objects_return_to_the_state_of_a_moment():
    """Of the start, or of one in between; what a resumed iteration of a loader needs."""

    def made():
        return mine(
            numbers=[[1]],
            array=np.zeros((3, 4)).T,
            tensor=torch.zeros(4),
            objects=np.array([[0], None], dtype=object),
            levels={"a": 0},
            pair=(1, [2]),
            meter=Slotted(),
            part=Thing(steps=0),
            inner=None,
        )

    def change(owner) -> None:
        owner.numbers[0][0] += 1
        owner.array[0] += 1
        owner.tensor += 1
        owner.objects[0].append(owner.numbers[0][0])
        owner.levels[str(owner.part.steps)] = 1
        owner.pair[1].append(3)
        owner.meter.sum = owner.part.steps
        owner.part.steps += 1
        owner.part.more = [owner.part.steps]
        owner.inner = owner.part

    def described(value) -> str:
        if isinstance(value, Slotted):
            return str(getattr(value, "sum", None))
        if isinstance(value, Thing):
            return str({name: described(each) for name, each in sorted(vars(value).items())})
        return str(value)

    owner, state = made()
    held = dict(vars(owner))
    at_start, seen_at_start = state.encode(), described(owner)
    change(owner)
    between, seen_between = state.encode(), described(owner)
    change(owner)
    state.return_to(between)
    assert described(owner) == seen_between and owner.inner is owner.part
    state.return_to(at_start)
    assert described(owner) == seen_at_start and changed(state) == set()
    assert all(vars(owner)[name] is value for name, value in held.items())
    resumed, state = made()
    change(resumed), change(resumed)
    state.return_to(between)
    assert described(resumed) == seen_between


def test_a_tensor_of_a_class_that_no_module_has_is_named_when_it_changes():
    class Image(torch.Tensor):
        """A class within a function."""

    owner, state = mine(image=None)
    owner.image = torch.ones(2).as_subclass(Image)
    assert "mine.image" not in names_in(state.encode())
    assert [(each.name, each.kind.rpartition(".")[2]) for each in state.unsaved] == [
        ("image", "Image")
    ]


class TextSlotted:
    """Has a slot whose name is a text, as a user may write it."""

    __slots__ = "total"


class PrivatelySlotted(TextSlotted):
    """Has a slot with a private name besides."""

    __slots__ = ("__count",)

    def __init__(self):
        self.total = self.__count = 0

    def add(self):
        self.total += 1
        self.__count += 1


def test_slots_with_private_names_and_one_whose_name_is_a_text_come_back():
    trained = PrivatelySlotted()
    state = state_of(trained)
    trained.add()
    record = state.encode()
    assert set(names_in(record)) == {"model", "model.total", "model._PrivatelySlotted__count"}
    resumed = PrivatelySlotted()
    state_of(resumed).restore(record)
    assert resumed.total == resumed._PrivatelySlotted__count == 1


def test_of_many_arrays_few_are_kept(monkeypatch):
    """Else each start of a run would hold a dataset in memory twice."""
    monkeypatch.setattr("sagemaker_lightning.state.graph.start.MAX_KEPT_BYTES", 800)
    _, state = mine(images=[np.zeros(50) for _ in range(10)])
    contents = [node.content for node in state.begin().nodes.values()]
    assert sum(content is not None for content in contents) == 2


def test_what_two_states_share_is_hashed_once_at_one_moment(monkeypatch):
    """A dataset is what a loader has, and one of the user's objects."""
    images, labels = torch.zeros(3), np.zeros(3)
    states = [state_of(Thing(images=images, labels=labels)) for _ in range(2)]
    hashed = []

    def noting(hash_of):
        return lambda value: (hashed.append(value), hash_of(value))[1]

    for name in ("of_tensor", "of_array"):
        monkeypatch.setattr(fingerprints, name, noting(getattr(fingerprints, name)))
    with at_one_moment():
        assert [nodes_of(state.encode()) for state in states] == [[], []]
    assert list(map(id, hashed)) == [id(images), id(labels)]
    images += 1
    labels += 1
    with at_one_moment():
        assert [len(nodes_of(state.encode())) for state in states] == [2, 2]


def test_a_weak_reference_refers_to_the_object_that_it_did():
    def begin():
        model = Thing(stages=[Thing(), Thing()])
        model.now = weakref.ref(model.stages[0])
        return model, state_of(model)

    trained, state = begin()
    trained.now = weakref.ref(trained.stages[1])
    resumed, other = begin()
    other.restore(state.encode())
    assert resumed.now() is resumed.stages[1] and not state.unsaved


def test_a_weak_reference_to_nothing_is_not_saved():
    model = Thing(now=None)
    state = state_of(model)
    model.now = weakref.ref(Thing())
    assert "now" not in str(state.encode()) and [each.name for each in state.unsaved] == ["now"]


class Pair(ctypes.Structure):
    """A structure of a user's."""

    _fields_ = (("first", ctypes.c_int), ("second", ctypes.c_double))


HOLDERS = {
    "a queue": (queue.Queue, lambda held, key: held.put(1)),
    "a queue by priority": (queue.PriorityQueue, lambda held, key: held.put(1)),
    "a weak dictionary": (weakref.WeakKeyDictionary, lambda held, key: held.update({key: 1})),
    "a dictionary of weak values": (
        weakref.WeakValueDictionary,
        lambda held, key: held.update({1: key}),
    ),
    "a weak set": (weakref.WeakSet, lambda held, key: held.add(key)),
    "a thread's own": (threading.local, lambda held, key: setattr(held, "count", 1)),
    "a context variable": (lambda: contextvars.ContextVar("own"), lambda held, key: held.set(1)),
    "a structure of C": (Pair, lambda held, key: setattr(held, "first", 1)),
}


@pytest.mark.parametrize(("make", "change"), HOLDERS.values(), ids=HOLDERS)
def test_what_pythons_library_holds_values_in_is_named_if_it_changes(make, change):
    model = Thing(key=Thing(), held=make())
    state = state_of(model)
    state.encode()
    assert not state.unsaved
    change(model.held, model.key)
    state.encode()
    assert [(each.name, each.changes) for each in state.unsaved] == [("held", True)]


def test_a_pool_of_threads_and_what_waits_are_no_state():
    model = Thing(
        lock=threading.Lock(), condition=threading.Condition(), pool=ThreadPoolExecutor(1)
    )
    state = state_of(model)
    with model.lock, model.condition:
        pass
    model.pool.submit(str).result()
    state.encode()
    model.pool.shutdown()
    assert not state.unsaved


@pytest.mark.parametrize("make", [threading.Lock, threading.Semaphore, multiprocessing.Semaphore])
def test_what_code_takes_from_and_has_not_given_back_is_named(make):
    model = Thing(budget=make())
    state = state_of(model)
    state.encode()
    assert not state.unsaved
    model.budget.acquire()
    state.encode()
    assert [(each.name, each.changes) for each in state.unsaved] == [("budget", True)]


class Halving(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of a user's."""

    def get_lr(self):
        return [group["lr"] / 2 for group in self.optimizer.param_groups]


class Descent(torch.optim.SGD):
    """An optimizer of a user's that counts."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


def learning(model, steps):
    """Let a model train by what its first step makes."""
    for _ in range(steps):
        if model.optimizer is None:
            model.own = torch.ones(3, requires_grad=True)
            groups = [{"params": model.net.parameters()}, {"params": [model.own], "lr": 0.5}]
            model.optimizer = model.makes(groups, lr=0.25)
            model.schedule = model.schedules(model.optimizer)

        def closure():
            model.optimizer.zero_grad()
            error = (model.net(model.own) - 3).square().sum()
            error.backward()
            return error

        model.optimizer.step(closure)
        model.schedule.step()
    return [each.tolist() for each in (*model.net.parameters(), model.own)]


def with_none(makes, schedules):
    """Return a model that has made no optimizer yet."""
    torch.manual_seed(1)
    net = torch.nn.Linear(3, 1)
    return Thing(net=net, optimizer=None, makes=makes, schedules=schedules)


SGD = functools.partial(torch.optim.SGD, momentum=0.5)
StepLR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)


@pytest.mark.parametrize("schedules", [StepLR, Halving])
@pytest.mark.parametrize("makes", [SGD, torch.optim.Adam, torch.optim.ASGD, Descent])
def test_an_optimizer_that_is_made_on_first_use_comes_back(makes, schedules):
    model = with_none(makes, schedules)
    state = state_of(model)
    learning(model, 3)
    record = state.encode()
    assert not state.unsaved
    resumed = with_none(makes, schedules)
    resumed.net.load_state_dict(copy.deepcopy(model.net.state_dict()))
    state_of(resumed).restore(record)
    assert type(resumed.optimizer) is type(model.optimizer)
    assert resumed.optimizer.param_groups[1]["params"][0] is resumed.own
    assert resumed.optimizer.param_groups[0]["params"][0] is resumed.net.weight
    assert resumed.schedule.optimizer is resumed.optimizer
    assert learning(resumed, 3) == learning(model, 3)


def test_an_optimizer_that_comes_back_calls_hooks_again():
    model = with_none(torch.optim.Adamax, StepLR)
    state = state_of(model)
    learning(model, 1)
    resumed = with_none(torch.optim.Adamax, StepLR)
    state_of(resumed).restore(state.encode())
    calls = []
    resumed.optimizer.register_step_post_hook(lambda *arguments: calls.append(1))
    learning(resumed, 2)
    assert len(calls) == 2


def test_an_optimizer_with_a_function_of_its_own_does_not_come_back():
    model = with_none(SGD, StepLR)
    state = state_of(model)
    learning(model, 1)
    model.optimizer.register_step_post_hook(lambda *arguments: None)
    names = {each.name for each in (state.encode(), state.unsaved)[1]}
    assert names == {"optimizer", "schedule"}
