"""state/graph/state.py: the state of a user's objects is marked, saved and restored."""

import functools
import operator
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from graph_records import Thing, changed, mine, state_of

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph.state import GraphState, digests, names_in, without


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


def test_rows_of_which_some_are_taken_are_not_compared_by_who_has_taken_them():
    held = Thing(rows=[[1, 2], [3, 4]])
    roots = {"held": held}
    state = GraphState(lambda: roots)
    state.mark()
    roots["data"] = [held.rows[0]]
    state.mark()
    assert {"held.rows", "data"} == state.numbers(set(), ()).keys()
    assert {"held.rows"} == state.numbers(set(), (), alone="data").keys()


def test_numbers_that_nothing_leads_to_any_more_are_not_compared():
    """The next epoch's loader may have a sampler of another class, without weights."""
    roots = {"sampler": Thing(weights=np.ones(3))}
    state = GraphState(lambda: roots)
    state.mark()
    assert state.numbers(set(), ()).keys() == {"sampler.weights"}
    roots["sampler"] = Thing(order=np.arange(3))
    state.include()
    assert state.numbers(set(), ()).keys() == {"sampler.order"}


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
        model.errors = {}
        model.last = 0
        return model

    trained = make()
    state = state_of(trained)
    for number, layer in enumerate(trained):
        trained.of_layers[id(layer)] += number + 1
        trained.counts[id(layer.weight)] = number
        trained.errors["sum", id(layer.weight)] = [number]
        trained.last = id(layer)
    record = state.encode()
    kept = make()  # so that no layer of the next model is where one was
    resumed = make()
    state = GraphState(lambda: {"model": resumed})
    state.restore(record)
    assert [resumed.of_layers[id(layer)].item() for layer in resumed] == [1, 2]
    assert [resumed.counts[id(layer.weight)] for layer in resumed] == [0, 1]
    assert resumed.errors == {
        ("sum", id(layer.weight)): [number] for number, layer in enumerate(resumed)
    }
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
    """The start, or a moment in between; what a resumed iteration of a loader needs."""

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


def test_what_an_earlier_training_has_dropped_is_not_kept():
    owner, state = mine(parts=[])
    for _ in range(3):
        owner.parts = [Thing()]
        dropped = weakref.ref(owner.parts[0])
        state = GraphState(state.roots, before=state.trained())
        state.mark()
        assert len(state.before.objects) == len(state.touched)
        owner.parts = []
        state = GraphState(state.roots, before=state.trained())
        assert dropped() is None
