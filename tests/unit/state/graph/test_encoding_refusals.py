"""state/graph/encoding.py: what no record can hold is named."""

import datetime as dt
import io
import itertools
import threading

import numpy as np
import pytest
import torch
from graph_records import Thing, nodes_of, record_of, through_a_file
from pytorch_lightning import LightningModule

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph import encoding
from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.start import Start


def freed() -> torch.Tensor:
    """A tensor whose memory was freed, as FSDP2 does with whole weights."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make_value", "reason"),
    [
        (lambda: lambda: 1, "builtins.function"),
        (lambda: type("New", (), {})(), "New"),
        (lambda: io.TextIOWrapper(io.BytesIO()), "_io.TextIOWrapper"),
        (lambda: torch.optim.SGD, "builtins.type"),
        (lambda: itertools.cycle({1}), "itertools.cycle"),
        (lambda: torch.empty(2, device="meta"), "torch.Tensor without values"),
        (freed, "torch.Tensor without values"),
        (lambda: iter({1}), "set_iterator"),
        (lambda: dt.datetime.now(tz=__import__("zoneinfo").ZoneInfo("Europe/Berlin")), "ZoneInfo"),
    ],
)
def test_what_a_record_cannot_hold_is_named(make_value, reason):
    def make():
        return Thing(part=Thing(), values=[], kept=0)

    def change(model):
        model.part.value = make_value()
        model.values.append(make_value())
        model.part.nested = {"deep": [(make_value(),)]}
        model.kept = 1

    record, unsaved = record_of(make, change)
    assert {(each.path, each.name, each.is_part) for each in unsaved} == {
        ("model.part", "value", False),
        ("model.part", "nested", True),
        ("model", "values", True),
    }
    assert all(reason in each.kind for each in unsaved)
    resumed = make()
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert resumed.kept == 1 and resumed.values == [] and vars(resumed.part) == {}


@pytest.mark.parametrize(
    "make_value",
    [
        lambda: torch.nested.nested_tensor([torch.ones(1)]),
        lambda: torch.ones(1).to_mkldnn(),
        lambda: np.ma.masked_array(np.zeros(3), mask=[0, 0, 1]),
        lambda: np.zeros(2, dtype={"names": "ab", "formats": ["f4", "i4"], "offsets": [0, 0]}),
    ],
    ids=["nested", "mkldnn", "masked", "overlapping"],
)
def test_an_array_or_a_tensor_that_no_file_can_hold_is_named_once_it_is_there(make_value):
    def make():
        return Thing(kept=make_value(), value=None)

    assert record_of(make, lambda model: None)[1] == []

    def change(model):
        model.value = make_value()

    record, (unsaved,) = record_of(make, change)
    assert unsaved[:2] == ("model", "value") and record["tensors"] == []


@pytest.mark.parametrize("make_value", [lambda: np.zeros(4), lambda: torch.zeros(4)])
def test_an_array_of_too_many_elements_is_named(make_value, monkeypatch):
    assert encoding.MAX_SAVED == 2**26
    monkeypatch.setattr(encoding, "MAX_SAVED", 3)

    def make():
        return Thing(value=make_value())

    def change(model):
        model.value[0] = 1

    record, (unsaved,) = record_of(make, change)
    assert unsaved[:2] == ("model", "value") and unsaved.kind.endswith("of 4 elements")
    assert nodes_of(record) == []


MADE = "a set that was made while training"


def changed_pool(make, change=lambda pool: None):
    """Return a set, what it is after an interruption, and what is known to differ at which time."""
    trained = Thing(pool=set())
    start = Start({"model": trained})
    trained.pool = make()
    change(trained.pool)
    encoded = encode({"model": trained}, start)
    record, reordered = encoded.record, encoded.reordered
    resumed = Thing(pool=set())
    restored = restore({"model": resumed}, Start({"model": resumed}), record)
    assert resumed.pool == trained.pool
    return trained.pool, resumed.pool, reordered, restored.reordered


@pytest.mark.parametrize("number", [0, 3, 19, 20, 33, 38, 500])
@pytest.mark.parametrize("step", [3, 129, 0.5])
def test_a_set_of_numbers_has_its_order_again(number, step):
    numbers = [step * element for element in range(number)]
    trained, resumed, *known = changed_pool(set, lambda pool: pool.update(numbers))
    assert list(resumed) == list(trained) and known == [[], []]


def test_a_set_that_may_come_in_another_order_is_known_when_it_is_saved():
    """Its table does not shrink when elements are removed: the next ones have other places."""

    def remove(pool):
        for element in list(pool)[5:]:
            pool.remove(element)

    trained, resumed, *known = changed_pool(lambda: set(range(19)), remove)
    assert list(resumed) == list(trained) and known == [["model.pool"], []]
    for pool in (trained, resumed):
        pool.add(40)
        pool.add(10)
    assert list(resumed) != list(trained)


def test_a_copy_of_a_set_that_would_have_another_order_is_known():
    """Its table has another length than that of a set that has grown one by one."""
    first = set(range(0, 129 * 127, 129))
    trained, resumed, *known = changed_pool(lambda: set(first))
    assert list(resumed) != list(trained) and known == [["model.pool"], [MADE]]


def test_the_order_of_a_set_of_tuples_of_numbers_is_known():
    """Their hashes are the same in each process, and so is what was added and removed before."""
    trained, resumed, *known = changed_pool(
        lambda: {((a, b), a * b % 4) for a in range(9) for b in range(9)}
    )
    assert list(resumed) != list(trained) and known == [["model.pool"], [MADE]]


@pytest.mark.parametrize("make", [lambda: {"a", "b", 3}, lambda: {(1, "a"), (3, "b")}])
def test_nothing_is_said_of_the_order_of_a_set_of_other_values(make):
    """That of text is another one in each process, also in two that nobody interrupts."""

    def remove(pool):
        pool.update(map(str, range(100)))
        pool.difference_update(map(str, range(100)))

    assert changed_pool(make, remove)[2:] == ([], [])


def test_a_set_whose_order_cannot_be_had_is_known():
    record, _ = record_of(Thing, lambda model: setattr(model, "pool", {1, 2, 3}))
    record["nodes"] = record["nodes"].replace("[1,2,3]", "[3,2,1]")
    resumed = Thing()
    restored = restore({"model": resumed}, Start({"model": resumed}), record)
    assert resumed.pool == {1, 2, 3} and restored.reordered == [MADE]


def test_hyperparameters_that_change_while_training_come_back():
    class Module(LightningModule):
        def __init__(self, rate=0.1, parts=None):
            super().__init__()
            self.save_hyperparameters()

    module = Module(parts=[object()])
    start = Start({"model": module})
    module.hparams.rate = 0.2
    record, unsaved, *_ = encode({"model": module}, start)
    assert unsaved == []
    resumed = Module(parts=[3])
    hyperparameters = resumed.hparams
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert resumed.hparams is hyperparameters and hyperparameters == {"rate": 0.2, "parts": [3]}
    module.hparams.parts = torch.relu
    (unsaved,) = encode({"model": module}, start).unsaved
    assert unsaved[:2] == ("model", "_hparams") and unsaved.refused is torch.relu
    assert unsaved.is_first and unsaved.is_part


def test_a_librarys_object_that_changes_is_named():
    places = threading.Semaphore(2)
    model = Thing(places=places, step=0)
    start = Start({"model": model})
    assert encode({"model": model}, start)[1] == []
    places.acquire()
    (unsaved,) = encode({"model": model}, start)[1]
    assert unsaved[:4] == ("model", "places", "threading.Semaphore", places)
    assert unsaved.changes and not (unsaved.is_part or unsaved.is_first or unsaved.loses)


class Journal(io.StringIO):
    """A user's class of one of C code, which has no name for what it holds."""


class Delay(dt.timedelta):
    """As above; one never changes, and another takes its place."""


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Journal, lambda model: model.value.write("a line")),
        (lambda: Delay(1), lambda model: setattr(model, "value", Delay(2))),
    ],
    ids=["a file in memory", "a time"],
)
def test_what_a_users_class_of_c_code_holds_is_named(make, change):
    def begun():
        return Thing(value=make())

    assert record_of(begun, lambda model: None)[1] == []
    _, (unsaved,) = record_of(begun, change)
    assert unsaved[:2] == ("model", "value") and unsaved.kind.endswith(make().__class__.__name__)


def test_a_reference_to_what_the_resumed_program_has_not_got_is_named():
    trained = Thing(parts=[Thing(), Thing()], part=None)
    start = Start({"model": trained})
    trained.part = trained.parts[1]
    record, *_ = encode({"model": trained}, start)
    resumed = Thing(parts=[Thing()], part=None)
    restored = restore({"model": resumed}, Start({"model": resumed}), record)
    assert restored.missing == ["model.parts[1]"]
    assert resumed.part is None


def test_a_class_that_the_resumed_program_has_not_got_is_refused():
    class Local:
        """No module has it."""

    trained = Thing(one=Local())
    start = Start({"model": trained})
    trained.two = Local()
    record, unsaved, *_ = encode({"model": trained}, start)
    assert unsaved == []
    resumed = Thing(one=None)
    with pytest.raises(UserError, match="Local, which this program does not have"):
        restore({"model": resumed}, Start({"model": resumed}), record)


@pytest.mark.parametrize("mode", ["w+", "r"])
def test_a_memory_map_that_training_writes_is_named(tmp_path, mode):
    """Its file is not a part of a checkpoint. One that is only read stays as it is."""
    np.memmap(tmp_path / "map", np.float32, "w+", shape=(4,)).flush()
    model = Thing(scores=np.memmap(tmp_path / "map", np.float32, mode, shape=(4,)))
    start = Start({"model": model})
    np.memmap(tmp_path / "map", np.float32, "r+", shape=(4,))[0] = 1
    _, unsaved, *_ = encode({"model": model}, start)
    named = [(each.path, each.name, each.kind) for each in unsaved]
    assert named == ([("model", "scores", "numpy.memmap")] if mode == "w+" else [])
