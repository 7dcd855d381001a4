"""state/graph/fingerprints.py: which change of a value is seen, and saved."""

import copy

import numpy as np
import pytest
import torch
from graph_records import Thing, changed, mine, state_of

from sagemaker_lightning.state.graph import fingerprints
from sagemaker_lightning.state.graph.packing import PACKED_FROM
from sagemaker_lightning.state.graph.state import GraphState, digests, names_in, nodes_of
from sagemaker_lightning.state.object_graph import at_one_moment


def digests_of(make_value):
    """Return the digests of a model that has got a value."""
    model = Thing()
    state = state_of(model)
    model.value = make_value()
    return digests(state.encode())


def test_a_new_object_has_one_digest_in_whatever_order_it_has_got_its_attributes():
    """What a restore gives it last, the program may give it first."""
    records = []
    for names in ("ab", "ba"):
        owner, state = mine(new=None)
        owner.new = Thing(**{name: [name] for name in names})
        records.append(state.encode())
    assert digests(records[0]) == digests(records[1])


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
        lambda: (10**5000, [10**5000]),
        lambda: (10**5000, [10**5000 + 1]),
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
    numbers = state_of(model).numbers(set(), ())
    assert {name: mark.hex()[-16:] for name, mark in numbers.items()} == {
        "model.array": "c61b82935dc37863",
        "model.pair": "096060e0d1271904",
        "model.numbers": "2b064a151dc19231",
        "model.row": "d7e09a0eae05bf8e",
        "model.tensor": "de30fb3db08bc6c6",
    }


@pytest.mark.parametrize(
    ("rows", "others"),
    [
        ([(1, 2.5), (3, 4.5)], [(1, 2.5), (3, 5.5)]),
        ([(torch.ones(1), 1), (torch.ones(1), 0)], [(torch.ones(1), 1), (torch.ones(1), 1)]),
    ],
)
def test_rows_of_other_numbers_have_another_hash(rows, others):
    first, second = (state_of(Thing(rows=each)).numbers(set(), ()) for each in (rows, others))
    assert first["model.rows"] != second["model.rows"]
    assert state_of(Thing(rows=rows)).numbers(set(), ()) == first
    texts = [("a", 1), ("b", 2)]  # which may rightly be others, with their numbers
    assert "model.rows" not in state_of(Thing(rows=texts)).numbers(set(), ())


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


def test_some_numbers_of_a_very_large_array_count(monkeypatch):
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


def test_few_of_many_arrays_are_kept(monkeypatch):
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
