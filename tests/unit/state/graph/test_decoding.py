"""A record is input: a forged one decides values, and only those that encoding would have saved."""

import json
import os
import types
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from graph_records import Thing

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.kinds.containers import MAX_ALIKE, check_hashes
from sagemaker_lightning.state.graph.start import Start


class Made:
    """Has code that runs when it is made."""

    made = []

    def __new__(cls):
        cls.made.append("new")
        return super().__new__(cls)

    def __init__(self):
        self.made.append("init")

    def __setstate__(self, state):
        self.made.append("state")


def forged(model, *nodes, tensors=()):
    """Restore forged nodes into a model."""
    record = {"nodes": json.dumps(list(nodes)), "tensors": list(tensors)}
    return restore({"model": model}, Start({"model": model}), record).missing


def sets(name, reference):
    """Return a node that sets an attribute of the model."""
    return ["object", "model", {"names": [name]}, [reference], None]


@pytest.mark.parametrize(
    "reference",
    [
        ["builtins.eval", "text"],
        ["enum", "os.PathLike", "x"],
        ["enum", "graph_records.Thing", "x"],
        ["factory", "object"],
        ["factory", "os.system"],
        ["factory", "torch.relu"],
        ["factory", "torch.nn.modules.activation.GELU"],
        ["torch.dtype", "nn"],
        ["range", [0, "x", 1]],
        ["builtins.range", [0, 10, 0]],
        ["()", ["at", "model"]],
        ["scalar", "<U4", 5],
        ["scalar", "O", 5],
        ["item", "'O'", ["bytes", "12345678"]],
        ["item", "__import__('os')", ["bytes", ""]],
        ["numpy.dtype", "[" * 10_000],
        ["fractions.Fraction", "1e999999999"],
        ["datetime.timedelta", [1e99, 0, 0]],
        ["re.Pattern", ["a(", 32]],
        ["re.Pattern", ["a", 128]],
        ["re.Pattern", [["at", "model"], 32]],
        ["re.Pattern", "a"],
        [7],
        [],
        {"a": 1},
        ["at", ["model"]],
        ["by others", {}],
        [["at", "model"]],
        ["bytes", 5],
    ],
)
def test_a_reference_that_no_encoding_writes_is_refused_in_one_line(reference):
    model = Thing(value=0)
    with pytest.raises(UserError, match=r"^a checkpoint holds .*") as refusal:
        forged(model, sets("value", reference))
    assert "\n" not in str(refusal.value) and model.value == 0


class Alike:
    """Has the hash of all others."""

    def __hash__(self):
        return 1


@pytest.mark.parametrize("number", [MAX_ALIKE, MAX_ALIKE + 1])
def test_how_many_keys_of_one_hash_a_checkpoint_may_hold(number):
    keys = [*(Alike() for _ in range(number)), "another"]
    with pytest.raises(UserError) if number > MAX_ALIKE else nullcontext():
        check_hashes(keys)


@pytest.mark.parametrize(
    "node",
    [
        ["class", None, "os", [], None],
        ["object", None, {"class": "os._wrap_close", "names": []}, [], None],
        ["object", None, {"class": "subprocess.Popen", "names": []}, [], None],
        ["object", None, {"class": "pytorch_lightning.Trainer", "names": []}, [], None],
        ["object", None, {"names": []}, [], None],
        ["object", None, "text", [], None],
        ["function", None, {"names": []}, [], None],
        ["cell", None, None, [1], None],
        ["method", None, "__init__", [["at", "model"]], None],
        ["method", None, "double", [5], None],
        ["weak reference", None, None, [5], None],
        ["weak reference", None, None, [], None],
        ["tuple", None, "os.terminal_size", [1], None],
        ["tuple", None, "", [[0]], None],
        ["list", None, None, 5, None],
        ["dict", None, None, [1], None],
        ["dict", None, None, [[0], 1], None],
        ["deque", None, -1, [], None],
        ["set", None, None, [[0]], None],
        ["generator", None, "os", [], None],
        ["generator", None, "PCG64", [], {"dict": {"bit_generator": "PCG64"}}],
        ["generator", None, "Random", [], {"tuple": [3, 4, 5]}],
        ["generator", None, "Random", [], {"array": {"tensor": 0}, "dtype": "<U100000000"}],
        ["bytes", None, "q", [], ["bytes", "abc"]],
        ["bytes", None, "bytearray", [], 10**12],
        ["count", None, ["a", 1], [], None],
        ["seed", None, [[1], [], 4], [], None],
        ["seed", None, [[-1], [], 4, 0], [], None],
        ["seed", None, [[1], [], 10**9, 0], [], None],
        ["seed", None, [[1], [], 4, 1 << 32], [], None],
        ["seed", None, "text", [], None],
        ["array", None, [10**12], [], None],
        ["array", None, None, [], {"dtype": "'<f8'", "shape": [10**12], "values": {"tensor": 0}}],
        ["array", None, None, [], {"dtype": "'O'", "shape": [1], "values": {"tensor": 0}}],
        ["array", None, None, [], {"dtype": "'<U9'", "shape": [10**9], "values": {"tensor": 1}}],
        ["tensor", None, ["torch.Tensor"], [], {"values": 5}],
        ["tensor", None, ["os.stat"], [], {"values": {"tensor": 0}}],
        ["tensor", None, ["torch.Tensor"], [], {"values": {"tensor": 9}}],
        ["view", None, [0, [10**12], [0]], [["at", "model.weights"]], None],
        ["view", None, [0, [3], [1]], [["at", "model.weights"]], None],
        ["view", None, [0, [1], [1]], [["at", "model"]], None],
        ["array", None, [1 << 26], [], None],
        [
            "array",
            None,
            None,
            [],
            {"dtype": "'V0'", "shape": [1 << 32] * 2, "values": {"tensor": 1}},
        ],
        ["array view", None, {"dtype": "'V0'", "shape": [10**9], "offset": 0, "strides": [0]}]
        + [[["at", "model.array"]], None],
        ["tensor", None, ["torch.Tensor"], [], {"values": {"tensor": -1}}],
        ["tensor", None, ["torch.Tensor"], [], {"values": [0, [0] * 9]}],
        ["tensor", None, ["torch.Tensor"], [], {"values": [-2, 0]}],
        ["array view", None, {"dtype": "'<f8'"}, [["at", "model.weights"]], None],
        ["partial", None, None, [5, [], {}, {}], None],
        ["OrderedDict", None, None, [], None],
        ["defaultdict", None, None, [["at", "model"], None], None],
        ["list", None],
        "text",
        5,
    ],
)
def test_a_node_that_no_encoding_writes_is_refused_in_one_line(node):
    model = Thing(value=0, weights=torch.zeros(2), array=np.zeros(2))
    tensors = [torch.zeros(1), torch.zeros(0)]
    with pytest.raises(UserError, match=r"^a checkpoint holds .*") as refusal:
        forged(model, node, sets("value", [0]), tensors=tensors)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "5", "null", 5, None])
def test_a_text_that_is_not_a_list_of_nodes_is_refused(text):
    with pytest.raises(UserError, match=r"^a checkpoint holds "):
        restore({}, Start({}), {"nodes": text, "tensors": []})


@pytest.mark.parametrize("values", [{"tensor": 0}, [0, 0]])
def test_a_tensor_is_the_values_of_one_node(values):
    """Else a text would make as many copies of it as it names it."""
    node = ["tensor", None, ["torch.Tensor"], [], {"values": values}]
    tensors = [torch.zeros(2, 3)]
    forged(Thing(value=0), node, sets("value", [0]), tensors=tensors)
    with pytest.raises(UserError, match="a checkpoint holds something noted as 'a tensor'"):
        forged(Thing(value=0), node, node, sets("value", [0]), tensors=tensors)


def test_bytes_that_cannot_have_another_length_are_refused_in_one_line():
    model = Thing(value=bytearray(b"abc"))
    model.view = memoryview(model.value)
    with pytest.raises(UserError, match="a checkpoint holds something noted as 'BufferError'"):
        forged(model, ["bytes", "model.value", None, [], ["bytes", "abcd"]])


class Marked(torch.Tensor):
    """A tensor of a user's class."""


def test_a_tensor_gets_attributes_by_their_names():
    model = Thing(value=torch.ones(2).as_subclass(Marked))
    names = [5, "__class__", "__dict__", "mark"]
    content = {"values": {"tensor": 0}}
    forged(model, ["tensor", "model.value", names, [1, 2, 3, 4], content], tensors=[torch.ones(2)])
    assert vars(model.value) == {"mark": 4}


def test_no_code_of_a_class_runs_when_an_object_is_made():
    model = Thing(example=Made(), value=None)
    Made.made.clear()
    forged(
        model,
        sets("value", [1]),
        ["object", None, {"class": "test_decoding.Made", "names": ["x"]}, [5], None],
    )
    assert type(model.value) is Made and model.value.x == 5 and Made.made == []


@pytest.mark.parametrize("name", ["__class__", "__dict__", "act", "_modules", "training"])
def test_an_attribute_that_is_not_saved_is_not_set(name):
    class Module(torch.nn.Module):
        def act(self):
            return "acts"

    model = Module()
    before = dict(vars(model))
    forged(model, sets(name, 5))
    assert vars(model) == before and model.act() == "acts"


def test_the_own_places_of_a_module_take_what_belongs_there():
    model = torch.nn.Linear(1, 1)
    weight = model.weight
    names = ["module a.b", "module forward", "module a", "parameter b", "buffer c", "other d"]
    forged(model, ["object", "model", {"names": names}, [["at", "model"], 1, 2, 3, 4, 5], None])
    assert model.weight is weight and list(model.children()) == []
    assert {"a", "b", "c"}.isdisjoint(dir(model))


@pytest.mark.parametrize(
    "note",
    [
        {"class": "graph_records.Thing", "names": []},
        {"class": "torch.nn.modules.linear.Linear", "names": []},
        {"class": "torch.optim.optimizer.Optimizer", "names": ["step"]},
        {"class": "torch.optim.adam.Adam", "names": ["__class__"]},
        {"class": "torch.optim.adam.Adam", "names": [3]},
    ],
)
def test_an_optimizer_is_one_and_keeps_its_methods(note):
    model = Thing(net=torch.nn.Linear(1, 1))
    optimizer = ["optimizer", None, note, [1] * len(note["names"]), None]
    with pytest.raises(UserError, match="a checkpoint holds"):
        forged(model, sets("value", [1]), optimizer)


def test_no_optimizer_is_made_as_an_object_with_attributes():
    made = {"class": "torch.optim.lr_scheduler.StepLR", "names": []}
    with pytest.raises(UserError, match="a checkpoint holds"):
        forged(Thing(), sets("value", [1]), ["object", None, made, [], None])


def test_functions_and_modules_are_not_reached_by_a_path_of_their_code():
    model = Thing(function=lambda: os.name)
    missing = forged(model, sets("value", ["at", "model.function.__globals__['os']"]))
    assert missing == ["model.function.__globals__['os']"] and not hasattr(model, "value")


def test_an_object_of_the_start_that_is_of_another_kind_stays():
    model = Thing(value=[1])
    assert forged(model, ["dict", "model.value", None, ["a", 1], None]) == ["model.value"]
    assert model.value == [1]


def test_a_cell_keeps_its_function():
    count = 1

    def read():
        return count

    model = Thing(read=read)
    forged(model, ["cell", "model.read.count", None, [5], None])
    assert model.read() == 5 and isinstance(read, types.FunctionType)


@pytest.mark.parametrize("values", [torch.ones(1), torch.ones(2, dtype=torch.int8)])
def test_a_weight_gets_no_values_of_another_form(values):
    """An optimizer's kernel would read and write beyond the memory of what belongs to it."""
    model = torch.nn.Linear(2, 1, bias=False)
    path = next(path for path in Start({"model": model}).by_path if path.endswith("weight"))
    node = ["tensor", path, [], [], {"values": {"tensor": 0}}]
    with pytest.raises(UserError, match="^a checkpoint holds something noted as 'a tensor'"):
        forged(model, node, tensors=[values.view(1, -1)])
    forged(model, node, tensors=[torch.full((1, 2), 3.0)])
    assert model.weight.tolist() == [[3.0, 3.0]]


ALIKE = [number * (2**61 - 1) for number in range(MAX_ALIKE + 1)]
"""Numbers with one hash."""


def in_turn(keys: list) -> list:
    return [each for key in keys for each in (key, 0)]


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        *((kind, in_turn(ALIKE)) for kind in ("dict", "Counter")),
        *((kind, [None, None, *in_turn(ALIKE)]) for kind in ("OrderedDict", "defaultdict")),
        *((kind, ALIKE) for kind in ("set", "frozenset")),
    ],
)
def test_very_many_keys_with_one_hash_are_refused(kind, parts):
    """Python would compare each with all others: those of a megabyte for minutes."""
    assert len(set(map(hash, ALIKE))) == 1
    model = Thing(value=0)
    with pytest.raises(UserError, match="^a checkpoint holds something noted as 'keys', which"):
        forged(model, sets("value", [1]), [kind, None, None, parts, None])
    fewer = parts[: -2 if 0 in parts[1:] else -1]
    forged(model, sets("value", [1]), [kind, None, None, fewer, None])
    assert len(model.value) == MAX_ALIKE


@dataclass(frozen=True)
class Pair:
    """What Python hashes with its parts."""

    first: object
    second: object


PAIR = {"class": "test_decoding.Pair", "names": ["first", "second"]}


@pytest.mark.parametrize(
    "node",
    [
        ["dict", None, None, [[2], 1], None],
        ["OrderedDict", None, None, [None, None, [2], 1], None],
        ["set", None, None, [[2]], None],
        ["frozenset", None, None, [[2]], None],
        ["object", None, {"class": "test_decoding.Keys", "names": []}, [[2], 1], None],
    ],
)
@pytest.mark.parametrize(("kind", "note"), [("tuple", ""), ("object", PAIR)])
def test_no_key_is_hashed_for_ever(node, kind, note):
    """Each of 60 values has the next one twice; a program's dataclass is hashed as a tuple is."""
    nodes = [[kind, None, note, [[3 + n], [3 + n]], None] for n in range(60)]
    last = [kind, None, note, [0, ["builtins.range", [0, 1, 1]]], None]
    model = Thing(value=0, pair=Pair(1, 2), keys=Keys())
    with pytest.raises(UserError, match="^a checkpoint holds something noted as"):
        forged(model, sets("value", [1]), node, *nodes, last)


class Keys(dict):
    """A dict of a user's."""


def test_a_users_dict_has_keys_that_hash_their_attributes():
    """What it has as keys is filled before."""
    keys = {"class": "test_decoding.Keys", "names": [], "elements": 2}
    node = ["object", None, keys, [[2], 1], None]
    model = Thing(value=0, pair=Pair(1, 2), keys=Keys())
    forged(model, sets("value", [1]), node, ["object", None, PAIR, [3, 4], None])
    assert type(model.value) is Keys and model.value == {Pair(3, 4): 1}


def test_keys_may_be_within_each_other():
    """The last ones are in many keys, as the rest of a path may be."""
    nodes = [["tuple", None, "", [[n + 3], n], None] for n in range(50)]
    nodes += [["tuple", None, "", [["builtins.range", [0, 1, 1]]], None]]
    keys = [[n + 2] for n in range(50)]
    forged(model := Thing(value=0), sets("value", [1]), ["set", None, None, keys, None], *nodes)
    assert len(model.value) == 50


def test_an_array_has_no_thousands_of_dimensions():
    """To multiply these would take a minute."""
    model = Thing(value=0)
    with pytest.raises(UserError, match="^a checkpoint holds something noted as 'array', which"):
        forged(model, sets("value", [1]), ["array", None, [10**4000] * 2000, [], None])


def test_a_cycle_through_a_range_takes_no_memory():
    numbers = ["builtins.range", [0, 10**18, 1]]
    forged(model := Thing(value=0), sets("value", [1]), ["cycle", None, [3], [numbers], None])
    assert [next(model.value) for _ in range(2)] == [3, 4]
    forged(model, sets("value", [1]), ["cycle", None, [1], [["builtins.range", [0, 2, 1]]], None])
    assert [next(model.value) for _ in range(4)] == [1, 0, 1, 0]


def test_many_keys_come_back():
    keys = list(range(-(10**5), 10**5))
    forged(model := Thing(value=0), sets("value", [1]), ["set", None, None, keys, None])
    assert model.value == {*keys}


@pytest.mark.parametrize("kind", ["iterator", "cycle", "reversed"])
@pytest.mark.parametrize(
    ("note", "sequence"),
    [
        ([-1], ["list", None, None, [1], None]),
        ([1 << 40], ["list", None, None, [1], None]),
        (["1"], ["list", None, None, [1], None]),
        ([], ["list", None, None, [1], None]),
        ([0], ["dict", None, None, [], None]),
        ([0], ["object", "model", {"names": []}, [], None]),
    ],
)
def test_an_iterator_is_over_a_sequence_and_within_it(kind, note, sequence):
    model = Thing(rows=None)
    with pytest.raises(UserError, match=r"^a checkpoint holds "):
        forged(model, sets("rows", [1]), [kind, None, note, [[2]], None], sequence)
    assert model.rows is None


@pytest.mark.parametrize("note", [["zip", False], ["enumerate", 0], ["enumerate", "0"], ["map", 0]])
def test_what_joins_iterators_asks_no_object_for_one(note):
    """To ask it would call a method of the program's."""
    model = Thing(rows=None)
    with pytest.raises(UserError, match=r"^a checkpoint holds "):
        forged(model, sets("rows", [1]), ["joined", None, note, [["at", "model"]], None])
    assert model.rows is None
