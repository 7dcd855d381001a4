"""Long containers of rows that are alike come back from a few columns."""

import dataclasses
import json
from collections import OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph import packing
from sagemaker_lightning.state.graph.state import GraphState, digests

ROWS = packing.PACKED_FROM

Transition = namedtuple("Transition", "state action next_state reward")


@dataclasses.dataclass
class Step:
    """A step of an agent."""

    state: np.ndarray
    done: bool


class Thing:
    """An object of a user's."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def saved(model, change):
    """Return the record of a model that is changed after its start."""
    state = GraphState(lambda: {"model": model})
    state.begin()
    change(model)
    return state.encode()


def restored(record, **attributes):
    """Return a model of another process, with what a record has."""
    model = Thing(**attributes)
    GraphState(lambda: {"model": model}).restore(record)
    return model


def is_packed(record):
    return '"packed"' in record["nodes"]


def array(number):
    return np.full(3, number, np.float32)


def transitions():
    states = [torch.full((2,), float(n)) for n in range(ROWS + 1)]
    return [
        Transition(states[n], n % 3, states[n + 1] if n % 7 else None, 0.5 * n) for n in range(ROWS)
    ]


MEMORIES = {
    "tuples": lambda: [(array(n), 0.5, n % 2 == 0) for n in range(ROWS)],
    "named tuples": transitions,
    "dicts": lambda: [{"state": array(n), "text": str(n)} for n in range(ROWS)],
    "objects": lambda: [Step(array(n), n % 2 == 0) for n in range(ROWS)],
    "lists of many lengths": lambda: [[n] * (n % 5) for n in range(ROWS)],
    "arrays": lambda: [array(n) for n in range(ROWS)],
    "arrays of two forms": lambda: [np.arange(2 + n % 2) for n in range(ROWS)],
    "tuples within tuples": lambda: [(n, (array(n), b"\xff")) for n in range(ROWS)],
    "long numbers": lambda: [(1 << 70, n) for n in range(ROWS)],
    "one twice": lambda: [{"a": [n]} for n in range(ROWS)] + [{"a": [ROWS]}] * 2,
}


def described(value):
    """Return a value with lists in place of arrays, and with the classes of all it holds."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [described(element) for element in value]
    if isinstance(value, dict):
        return type(value).__name__, [described(pair) for pair in value.items()]
    if isinstance(value, Step):
        return "Step", described(vars(value))
    return type(value).__name__, value


@pytest.mark.parametrize("name", MEMORIES)
def test_rows_come_back(name):
    memory = MEMORIES[name]()
    record = saved(Thing(memory=[]), lambda model: model.memory.extend(memory))
    assert is_packed(record)
    model = restored(record, memory=[])
    assert described(model.memory) == described(memory)
    if name == "one twice":
        assert model.memory[-1] is model.memory[-2]


def test_the_next_state_of_a_row_is_the_state_of_the_following_one():
    record = saved(Thing(memory=[]), lambda model: model.memory.extend(transitions()))
    memory = restored(record, memory=[]).memory
    assert memory[1].next_state is memory[2].state
    assert memory[0].next_state is None


@pytest.mark.parametrize("class_", [dict, OrderedDict, lambda: defaultdict(list)])
def test_dicts_of_rows_come_back(class_):
    def fill(model):
        for number in range(ROWS):
            model.memory[str(number), number] = [number, array(number)]

    trained = Thing(memory=class_())
    record = saved(trained, fill)
    assert is_packed(record)
    model = restored(record, memory=class_())
    assert described(model.memory) == described(trained.memory)
    assert getattr(model.memory, "default_factory", list) is list


def test_a_deque_that_drops_its_oldest_rows_is_filled_in_place():
    trained = Thing(memory=deque([(array(n), n) for n in range(ROWS)], ROWS))
    record = saved(trained, lambda model: model.memory.append((array(-1), -1)))
    memory = deque([(array(n), n) for n in range(ROWS)], ROWS)
    model = restored(record, memory=memory)
    assert model.memory is memory and memory.maxlen == ROWS
    assert described(memory) == described(trained.memory)


def test_rows_that_do_not_change_are_not_written():
    model = Thing(memory=MEMORIES["tuples"](), count=0)
    assert digests(saved(model, lambda model: setattr(model, "count", 1))).keys() == {"model.count"}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tuples", lambda model: model.memory[5][0].fill(9)),
        ("dicts", lambda model: model.memory[5].update(text="other")),
    ],
)
def test_what_is_changed_in_place_is_written(name, change):
    trained = Thing(memory=MEMORIES[name]())
    found = restored(saved(trained, change), memory=MEMORIES[name]()).memory
    assert described(found) == described(trained.memory) != described(MEMORIES[name]())


def nested(number: int, depth: int):
    """Return tuples within each other, in one of which is None."""
    return None if number == depth else (nested(number, depth - 1),) if depth else number


@pytest.mark.parametrize("depth", [1, packing.MAX_DEPTH])
def test_rows_that_are_nested_as_deep_as_they_are_packed_come_back(depth):
    rows = [(nested(number, depth),) for number in range(ROWS)]
    record = saved(Thing(memory=[]), lambda model: model.memory.extend(rows))
    assert is_packed(record)
    assert restored(record, memory=[]).memory == rows


@pytest.mark.parametrize("row", [{"a": 1}, [1], (2, 3), Step(array(1), True)], ids=str)
def test_one_row_among_none_comes_back(row):
    rows = [(row if number == 5 else None, number) for number in range(ROWS)]
    record = saved(Thing(memory=[]), lambda model: model.memory.extend(rows))
    assert is_packed(record)
    assert described(restored(record, memory=[]).memory) == described(rows)


def share_row(model):
    model.best = model.memory[7]


def share_array(model):
    model.best = model.memory[7]["state"]


def share_memory(model):
    model.best = model.memory[7]["state"][1:]


@pytest.mark.parametrize("share", [share_row, share_array, share_memory])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_what_others_refer_to_stays_shared(share, is_tensor):
    """Then the rows are objects of the graph like any others."""

    def change(model):
        for number in range(ROWS):
            state = array(number)
            state = torch.from_numpy(state).clone() if is_tensor else state
            model.memory.append({"state": state})
        share(model)

    record = saved(Thing(memory=[], best=None), change)
    assert not is_packed(record)
    model = restored(record, memory=[], best=None)
    model.memory[7]["state"][2] = -1
    best = model.best["state"] if isinstance(model.best, dict) else model.best
    assert float(best[-1]) == -1


def test_rows_of_two_containers_stay_the_same_objects():
    def change(model):
        model.first.extend({"n": [number]} for number in range(ROWS))
        model.second.extend(reversed(model.first))

    model = restored(saved(Thing(first=[], second=[]), change), first=[], second=[])
    assert all(one is other for one, other in zip(model.first, reversed(model.second), strict=True))


def test_a_digest_tells_whether_rows_differ():
    def record(number):
        rows = MEMORIES["dicts"]()
        rows[5]["state"][0] = number
        return digests(saved(Thing(memory=[]), lambda model: model.memory.extend(rows)))

    assert record(1) == record(1) != record(2)


@pytest.mark.parametrize(
    "forgery",
    [
        ('"kind":"tuple"', '"kind":"set"'),
        ('"kind":"tuple"', '"kind":"object"'),
        ('"note":""', '"note":"os.terminal_size"'),
        ('"packed":[', '"packed":[{"block":[0],"row":[0]},'),
        ('"shape":[', '"shape":[9,'),
    ],
)
def test_forged_text_of_rows_is_refused(forgery):
    record = saved(Thing(memory=[]), lambda model: model.memory.extend(MEMORIES["tuples"]()))
    assert forgery[0] in record["nodes"]
    with pytest.raises(UserError, match="a checkpoint holds"):
        restored(record | {"nodes": record["nodes"].replace(*forgery)}, memory=[])


def test_dicts_with_keys_that_json_lacks_come_back():
    rows = [{b"state": array(n), 1j: n, 1 << 70: n} for n in range(ROWS)]
    record = saved(Thing(memory=[]), lambda model: model.memory.extend(rows))
    assert is_packed(record)
    assert described(restored(record, memory=[]).memory) == described(rows)


SCALARS = {"scalars": [1, 2]}
LISTS = {"kind": "list", "note": None, "columns": [SCALARS]}
LINEAR = {"class": "torch.nn.modules.linear.Linear", "names": []}
THING = {"class": "test_packing.Thing", "names": []}
NUMBER = {"tensor": 0}
FORGERIES = {
    "None beyond the end": ({"absent": NUMBER, "present": SCALARS}, [5]),
    "None before the start": ({"absent": NUMBER, "present": SCALARS}, [-1]),
    "None at places with a fraction": ({"absent": NUMBER, "present": SCALARS}, [0.5]),
    "a row beyond the end": ({"index": NUMBER, "rows": LISTS}, [2]),
    "a row before the start": ({"index": NUMBER, "rows": LISTS}, [-1]),
    "rows longer than there is": (LISTS | {"lengths": NUMBER}, [1, 2]),
    "rows shorter than there is": (LISTS | {"lengths": NUMBER}, [1]),
    "rows of a negative length": (LISTS | {"lengths": NUMBER}, [3, -1]),
    "rows by bytes": (LISTS | {"lengths": NUMBER}, torch.zeros(2, dtype=torch.uint8)),
    "numbers within numbers": ({"numbers": NUMBER}, [[1, 2]]),
    "numbers by bytes": ({"numbers": NUMBER}, torch.zeros(2, dtype=torch.uint8)),
    "one number many times": ({"numbers": NUMBER}, torch.ones(1).double().expand(10**7)),
    "a column twice": (LISTS | {"columns": [{"numbers": NUMBER}] * 2}, [1, 2]),
    "values that are not scalars": ({"scalars": [NUMBER]}, [1]),
    "modules": ({"kind": "object", "note": LINEAR, "columns": [SCALARS]}, [1]),
    "what would be done for each object": (
        {"kind": "object", "note": THING | {"names": ["a"], "order": []}, "columns": [SCALARS]},
        [1],
    ),
    "objects with values without names": (
        {"kind": "object", "note": THING, "columns": [SCALARS]},
        [1],
    ),
}


def restore_column(column, *tensors, blocks=()):
    content = {"packed": [column], "blocks": list(blocks)}
    nodes = json.dumps([["list", "model.memory", None, [], content]])
    model = Thing(memory=[], linear=torch.nn.Linear(1, 1))
    tensors = [each if torch.is_tensor(each) else torch.tensor(each) for each in tensors]
    GraphState(lambda: {"model": model}).restore({"nodes": nodes, "tensors": tensors})
    return model.memory


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_columns_are_refused(name):
    column, tensor = FORGERIES[name]
    with pytest.raises(UserError, match="a checkpoint holds something noted as"):
        restore_column(column, tensor)


def test_a_column_of_rows_comes_back():
    assert restore_column(LISTS | {"lengths": NUMBER}, [2, 0]) == [[1, 2], []]


@pytest.mark.parametrize(
    "block",
    [
        {"tensors": {"tensor": 2}},
        {"dtype": "'<f8'", "shape": [10**12, 0], "values": {"tensor": 2}},
    ],
)
def test_a_block_has_no_rows_of_nothing(block):
    """There may be any number of them."""
    places = {"block": NUMBER, "row": {"tensor": 1}}
    empty = torch.zeros(0).expand(10**12, 0) if "tensors" in block else torch.zeros(0)
    with pytest.raises(UserError, match="a checkpoint holds something noted as 'a block'"):
        restore_column(places, [0], [0], empty, blocks=[block])
