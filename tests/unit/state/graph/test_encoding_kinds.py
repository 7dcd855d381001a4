"""state/graph/kinds: a value of each kind comes back, with its attributes."""

import array
import collections
import dataclasses
import functools
import io
import itertools
import multiprocessing
import operator
import random
import threading
from collections import ChainMap, UserDict, UserList
from decimal import Decimal

import graph_records
import numpy as np
import pytest
import torch
from graph_records import record_of, through_a_file, train
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torchmetrics import MeanMetric, Metric, MinMaxMetric

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.nodes import LIBRARYS, kind_of
from sagemaker_lightning.state.graph.start import Start
from sagemaker_lightning.state.graph.state import digests


class Thing(graph_records.Thing):
    """An object of this module, from whose classes what training makes comes back."""


class Slotted:
    """Has its attributes in slots."""

    __slots__ = ("first", "second")

    def __init__(self, first):
        self.first = first


@dataclasses.dataclass(frozen=True)
class Point:
    """A key."""

    x: int


class Registry(dict):
    """A user's dict with an attribute."""


class Measured(float):
    """A number of a user's with attributes."""

    def __float__(self):
        raise AssertionError


class Named(str):
    """A text of a user's."""

    def __str__(self):
        raise AssertionError


class Counted(int):
    """A whole number of a user's."""


class Pair(tuple):
    """A tuple of a user's."""


def test_numbers_and_texts_of_a_users_class_come_back_with_their_attributes():
    def change(model):
        model.values = [Measured(-0.0), Named("x"), Counted(10**5000), Pair((1, [2]))]
        for value in model.values:
            value.weight = model.values
        model.values[3].weight = 5
        model.by_value = {model.values[2]: 1}

    trained, resumed = train(Thing, change)
    assert list(map(type, resumed.values)) == [Measured, Named, Counted, Pair]
    number, name, count, pair = resumed.values
    assert float.hex(number) == "-0x0.0p+0" and name == "x" and count == 10**5000
    assert pair == (1, [2]) and pair.weight == 5
    assert number.weight is name.weight is resumed.values
    assert list(resumed.by_value) == [count] and list(resumed.by_value)[0] is count


@pytest.mark.parametrize("base", [dict, collections.OrderedDict, list, set, collections.deque])
def test_containers_that_show_something_else_come_back(base, monkeypatch):
    """A table may have as its length the number of its rows, and give these."""

    class Shown(base):
        def __len__(self):
            return 7

        def __iter__(self):
            return iter("shown")

        __qualname__ = "Shown"
        keys = values = items = __iter__

    monkeypatch.setitem(globals(), "Shown", Shown)
    is_dict = issubclass(base, dict)
    content = {"a": 1, "b": 2} if is_dict else ["a", "b"]
    _, resumed = train(
        lambda: Thing(table=Shown(), later=None),
        lambda model: [
            model.table.__init__(content),
            setattr(model, "later", Shown(content)),
        ],
    )
    for table in (resumed.table, resumed.later):
        found = dict(dict.items(table)) if is_dict else sorted(base.__iter__(table))
        assert type(table) is Shown and found == content


@pytest.mark.parametrize("make_event", [threading.Event, multiprocessing.Event])
@pytest.mark.parametrize("is_set", [True, False])
def test_a_flag_is_set_again_or_cleared(make_event, is_set):
    def make():
        model = Thing(stop=make_event())
        if not is_set:
            model.stop.set()
        return model

    _, resumed = train(make, lambda model: model.stop.set() if is_set else model.stop.clear())
    assert resumed.stop.is_set() is is_set


@pytest.mark.parametrize("is_new", [False, True])
def test_containers_of_pythons_library_come_back(is_new):
    def make():
        return Thing(values=None if is_new else [ChainMap({}, {"k": 1}), UserDict(), UserList()])

    def change(model):
        if is_new:
            model.values = [ChainMap({}, {"k": 1}), UserDict(), UserList()]
        chain, by_name, values = model.values
        chain["k"] = by_name["k"] = 2
        values += [3]

    trained, resumed = train(make, change)
    assert resumed.values == trained.values and resumed.values[0].maps == [{"k": 2}, {"k": 1}]


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("entropy", [7, [1, 2**70], None])
def test_a_seed_of_numpys_spawns_its_next_children(is_new, entropy):
    entropy = entropy or np.random.SeedSequence().entropy

    def make():
        return Thing(seed=None if is_new else np.random.SeedSequence(entropy, pool_size=8))

    def change(model):
        if is_new:
            model.seed = np.random.SeedSequence(entropy, spawn_key=(3,))
        model.seed.spawn(2)

    trained, resumed = train(make, change)
    states = [each.seed.spawn(1)[0].generate_state(4).tolist() for each in (trained, resumed)]
    assert states[0] == states[1] and resumed.seed.n_children_spawned == 3


def test_a_flag_that_training_has_made_comes_back():
    def change(model):
        model.stop = threading.Event()
        model.stop.set()

    _, resumed = train(Thing, change)
    assert resumed.stop.is_set()


class Waiting(threading.Thread):
    """A thread of a user's."""

    count = 0


def test_a_thread_that_ran_may_be_started_again():
    def change(model):
        model.thread.start()
        model.thread.join()
        model.thread.count = 3

    _, resumed = train(lambda: Thing(thread=Waiting()), change)
    assert resumed.thread.count == 3
    resumed.thread.start()
    resumed.thread.join()


class Scaled(Metric):
    """A metric of a user's, with an attribute."""

    full_state_update = False

    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.add_state("total", torch.zeros(()))

    def update(self, value):
        self.total += value * self.scale

    def compute(self):
        return self.total


def test_a_metric_in_the_place_of_another_one_is_that_one_with_its_attributes():
    """What it has counted, another part of a checkpoint has."""

    def make():
        return Thing(mean=Scaled(1.0), both=[MinMaxMetric(Scaled(2.0))], named={"a": Scaled(3.0)})

    def change(model):
        model.mean = Scaled(0.5)
        model.both[0] = MinMaxMetric(Scaled(0.25))
        model.named = {"a": Scaled(3.0), "best": 1}

    _, resumed = train(make, change)
    assert resumed.mean.scale == 0.5 and resumed.named["a"].scale == 3
    assert resumed.named["best"] == 1 and len(resumed.both) == 1
    (metric,) = resumed.both[0].children()
    assert metric.scale == 0.25
    resumed.mean.update(2.0)
    assert resumed.mean.compute() == 1


@pytest.mark.parametrize("make_metric", [lambda: MeanMetric(), lambda: Scaled(2.0)])
def test_a_metric_beside_which_the_first_one_stays_is_named(make_metric):
    model = Thing(mean=Scaled(1.0), first=None)
    start = Start({"model": model})
    model.first = model.mean
    model.mean = make_metric()
    assert [each.name for each in encode({"model": model}, start)[1]] == ["mean"]


def test_a_container_with_one_value_that_no_record_holds_keeps_the_rest():
    def make():
        return Thing(state={"steps": 0, "name": first}, others=[third, 1])

    first, second, third, fourth = map(operator.itemgetter, "abcd")
    trained = make()
    start = Start({"model": trained})
    trained.state = {"steps": 5, "name": second}
    trained.others[:] = [fourth, 2]
    record, unsaved, *_ = encode({"model": trained}, start)
    assert sorted((each.name, each.kind, each.is_first) for each in unsaved) == [
        ("others", "operator.itemgetter", True),
        ("state", "operator.itemgetter", True),
    ]
    resumed = make()
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert resumed.state == {"steps": 5, "name": first}
    assert resumed.others == [third, 2]


def test_what_is_lost_with_a_value_that_no_record_holds_is_noted():
    def lost(change):
        model = Thing(writers={}, steps=[1, 2])
        start = Start({"model": model})
        change(model)
        (unsaved,) = encode({"model": model}, start)[1]
        return unsaved.loses

    file = io.TextIOWrapper(io.BytesIO())
    assert not lost(lambda model: model.writers.update(log=file, folder="x"))
    assert not lost(lambda model: model.steps.append(file))
    assert not lost(lambda model: setattr(model, "writers", [file]))
    assert lost(lambda model: model.writers.update(log=file, count=1))
    assert lost(lambda model: setattr(model, "writers", {"log": file, "losses": [0.5]}))
    assert lost(lambda model: model.steps.__setitem__(slice(None), [1, 3, file]))
    assert lost(lambda model: setattr(model, "writer", Thing(file=file, count=0)))


def test_a_small_part_of_a_large_tensor_is_saved_alone():
    def change(model):
        model.last = torch.zeros(1_000_000)[:2]

    record, _ = record_of(Thing, change)
    (tensor,) = record["tensors"]
    assert tensor.untyped_storage().nbytes() == 8


ARRAYS = [
    lambda: np.arange(6).reshape(2, 3),
    lambda: np.zeros((0, 3), dtype=">f4"),
    lambda: np.array(3.5),
    lambda: np.array(["a", "bc"]),
    lambda: np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
    lambda: np.arange(6).reshape(2, 3).T,
    lambda: np.array([[1], None, "a"], dtype=object),
    lambda: torch.arange(6).reshape(2, 3).t(),
    lambda: torch.tensor(1.5, dtype=torch.bfloat16),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.eye(3).to_sparse_csr(),
    lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    lambda: torch.ones(2, requires_grad=True),
    lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    lambda: torch.zeros(1).expand(5),
]


@pytest.mark.parametrize("make_value", ARRAYS)
@pytest.mark.parametrize("is_new", [True, False])
def test_an_array_or_a_tensor_of_each_kind_comes_back(make_value, is_new):
    def make():
        return Thing(value=None if is_new else make_value())

    def change(model):
        if is_new:
            model.value = make_value()
        elif isinstance(model.value, torch.Tensor):
            model.value.data = model.value.data.clone()
        elif model.value.size and model.value.dtype.kind in "fi":
            model.value += 1

    trained, resumed = train(make, change)
    assert type(resumed.value) is type(trained.value)
    assert repr(resumed.value) == repr(trained.value)
    assert resumed.value.dtype == trained.value.dtype


def test_a_tensor_that_changes_in_place_stays_the_object_that_others_hold():
    def make():
        tensor = torch.zeros(2)
        array = np.zeros(2)
        return Thing(tensor=tensor, array=array, others=[tensor, array, bytearray(2)])

    def change(model):
        model.tensor += 1
        model.array += 1
        model.others[2][0] = 7

    trained = make()
    start = Start({"model": trained})
    change(trained)
    record, *_ = encode({"model": trained}, start)
    resumed = make()
    tensor, array, numbers = resumed.others
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert (tensor.tolist(), array.tolist(), bytes(numbers)) == ([1, 1], [1, 1], b"\7\0")
    assert resumed.tensor is tensor and resumed.array is array


GENERATORS = [
    lambda: random.Random(0),
    lambda: np.random.default_rng(0),
    lambda: np.random.Generator(np.random.MT19937(0)),
    lambda: np.random.Generator(np.random.Philox(0)),
    lambda: np.random.RandomState(0),
    lambda: torch.Generator().manual_seed(0),
]


def draw(generator):
    """Return the next number of a generator of any kind."""
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return generator.random()


@pytest.mark.parametrize("make_generator", GENERATORS)
@pytest.mark.parametrize("is_new", [True, False])
def test_a_generator_draws_on_where_it_was(make_generator, is_new):
    def make():
        return Thing(generator=None if is_new else make_generator())

    def change(model):
        model.generator = model.generator or make_generator()
        draw(model.generator)
        model.alias = model.generator

    trained, resumed = train(make, change)
    assert resumed.alias is resumed.generator
    assert draw(resumed.generator) == draw(trained.generator)


class Dice(random.Random):
    """May have attributes."""


class OldDice(np.random.RandomState):
    """May have attributes."""


class Numbers(array.array):
    """May have attributes."""


class Text(bytearray):
    """May have attributes."""


class Place(tuple):
    """May have attributes; all have this one."""

    number = 0


class Price(Decimal):
    """May have attributes, of which Python's own copies know nothing."""


WITH_ATTRIBUTES = {
    "a generator": lambda: Dice(3),
    "a generator of numpy's": lambda: OldDice(3),
    "an array": lambda: Numbers("i", [1]),
    "bytes": lambda: Text(b"1"),
    "a tuple": lambda: Place((1, 2)),
    "a tensor": lambda: torch.zeros(1),
}


@pytest.mark.parametrize("make", WITH_ATTRIBUTES.values(), ids=WITH_ATTRIBUTES)
def test_what_a_program_has_added_to_an_object_with_a_state_comes_back(make):
    def made():
        value = make()
        value.thrown, value.number, value.first = [], 0, 1
        return Thing(value=value)

    def change(model):
        model.value.thrown.append(3)
        model.thrown = model.value.thrown
        model.value.number += 1
        model.value.last = model.thrown[-1]
        del model.value.first

    trained, resumed = train(made, change)
    added = {"number": 1, "thrown": [3], "last": 3}
    assert vars(resumed.value) | added == vars(resumed.value)
    assert resumed.thrown is resumed.value.thrown and vars(resumed.value) == vars(trained.value)


def test_what_a_program_has_added_to_an_object_of_c_code_is_named():
    thing = Thing(price=Price(1))
    thing.price.count = 0
    start = Start({"model": thing})
    thing.price.count += 1
    _, unsaved, *_ = encode({"model": thing}, start)
    assert "Price" in str(unsaved)


@pytest.mark.parametrize("seed", [0, [3, 2**70], np.arange(3), None])
def test_a_generator_that_training_has_spawned_spawns_the_same_ones(seed):
    def change(model):
        (model.generator,) = np.random.default_rng(seed).spawn(1)
        model.generator.spawn(3)

    trained, resumed = train(Thing, change)
    assert draw(resumed.generator.spawn(1)[0]) == draw(trained.generator.spawn(1)[0])


def written(stream, text):
    """Write text to a stream, or as bytes."""
    stream.write(text if isinstance(stream, io.StringIO) else text.encode())


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(
    "make_stream", [io.StringIO, io.BytesIO, functools.partial(io.StringIO, newline="\r\n")]
)
def test_a_file_in_memory_continues_where_it_was(make_stream, is_new):
    def make():
        return Thing(file=None if is_new else make_stream())

    def change(model):
        model.file = model.file or make_stream()
        written(model.file, "first\nsecond \ud800"[: 13 - isinstance(model.file, io.BytesIO)])
        model.file.seek(3)

    trained, resumed = train(make, change)
    for model in (trained, resumed):
        written(model.file, "x\n")
        assert type(model.file) is type(make_stream())
    assert resumed.file.getvalue() == trained.file.getvalue()
    assert resumed.file.tell() == trained.file.tell()


def test_a_count_that_two_objects_share_continues():
    def make():
        count = itertools.count(5)
        return Thing(count=count, other=Thing(pair=(count, "name")))

    def change(model):
        next(model.count)

    _, resumed = train(make, change)
    assert next(resumed.count) == 6 and resumed.other.pair[0] is resumed.count


SEQUENCES = {
    "list": lambda: [1, 2, 3],
    "tuple": lambda: (1, 2, 3),
    "text": lambda: "abc",
    "numbers": lambda: range(5, 8),
    "array": lambda: np.array([4.0, 5.0, 6.0]),
}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 3, 4, 8])
@pytest.mark.parametrize("make_sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_iterators_over_a_sequence_continue_where_they_were(make_sequence, taken, is_new):
    def begin():
        sequence = make_sequence()
        return {
            "once": iter(sequence),
            "again": itertools.cycle(sequence),
            "back": reversed(sequence),
            "numbered": enumerate(sequence, 5),
            "pairs": zip(reversed(sequence), enumerate(iter(sequence)), strict=True),
        }

    def make():
        return Thing(**({} if is_new else begin()))

    def change(model):
        if is_new:
            vars(model).update(begin())
        for _ in range(taken):
            for name in ("once", "again", "back", "numbered", "pairs"):
                next(getattr(model, name), None)
        model.alias = model.once

    trained, resumed = train(make, change)
    assert resumed.alias is resumed.once
    for _ in range(7):
        for name in ("once", "again", "back", "numbered", "pairs"):
            came, comes = (next(getattr(each, name), None) for each in (trained, resumed))
            assert came == comes


def test_a_cycle_that_has_come_round_is_saved_as_one_that_was_restored():
    """Its first element is next, as at the start; but it has a list of its own by now."""
    trained = Thing(rows=itertools.cycle([[1], [2]]))
    start = Start({"model": trained})
    for _ in range(4):
        next(trained.rows)
    record = encode({"model": trained}, start).record
    resumed = Thing(rows=itertools.cycle([[1], [2]]))
    start = Start({"model": resumed})
    restore({"model": resumed}, start, through_a_file(record))
    assert digests(record) == digests(encode({"model": resumed}, start).record) != {}


def test_a_zip_of_what_others_draw_from_draws_from_it():
    def make():
        model = Thing(rows=iter("abcdef"))
        model.pairs = zip(model.rows, model.rows, strict=True)
        return model

    _, resumed = train(make, lambda model: (next(model.pairs), next(model.rows)))
    assert next(resumed.pairs) == ("d", "e") and next(resumed.rows) == "f"


def test_a_zip_of_what_has_no_position_is_not_entered():
    rows = (row for row in "abc")
    assert kind_of(zip("abc", rows, strict=True)) is kind_of(enumerate(rows)) is LIBRARYS


def test_a_buffer_that_a_module_gets_while_training_is_saved_by_it_or_not_as_before():
    def change(model):
        model.net.register_buffer("cos", torch.ones(2), persistent=False)
        model.net.register_buffer("seen", torch.ones(1))

    _, resumed = train(lambda: Thing(net=torch.nn.Linear(1, 1)), change)
    assert set(resumed.net.state_dict()) == {"weight", "bias", "seen"}
    assert resumed.net.cos.tolist() == [1, 1]


def test_an_iterator_over_a_list_that_grows_yields_what_comes_later():
    def make():
        return Thing(rows=[1, 2], place=None)

    def change(model):
        model.place = iter(model.rows)
        next(model.place)
        model.rows.append(3)

    _, resumed = train(make, change)
    resumed.rows.append(4)
    assert list(resumed.place) == [2, 3, 4]


def test_an_iterator_over_what_may_have_no_end_is_no_sequences():
    class Rows:
        def __getitem__(self, index):
            return index

    def change(model):
        model.rows = iter(Rows())

    _, unsaved = record_of(Thing, change)
    assert [each.name for each in unsaved] == ["rows"]


def test_a_number_shared_between_processes_comes_back():
    def make():
        return Thing(number=multiprocessing.Value("i", 1), numbers=multiprocessing.Array("d", 2))

    def change(model):
        model.number.value = 5
        model.numbers[1] = 0.5

    _, resumed = train(make, change)
    assert resumed.number.value == 5 and resumed.numbers[:] == [0, 0.5]


class Row(array.array):
    """A user's array of numbers."""


class Bits(bytearray):
    """A user's array of bytes."""


def test_an_array_of_a_users_class_comes_back_at_another_length():
    def change(model):
        model.row.extend([1.0, 0.5])
        model.bits += b"ab"

    _, resumed = train(lambda: Thing(row=Row("d", [2.0]), bits=Bits()), change)
    assert (resumed.row.tolist(), bytes(resumed.bits)) == ([2.0, 1.0, 0.5], b"ab")


def test_a_partial_function_has_its_arguments_again():
    def make():
        def scaled(table, value, by=1):
            table.append(value * by)
            return table

        return Thing(function=functools.partial(scaled, [], by=2), plain=scaled)

    def change(model):
        model.function(3)
        model.other = functools.partial(model.plain, model.function.args[0], by=10)

    _, resumed = train(make, change)
    assert resumed.function(1) == [6, 2]
    assert resumed.other(1) == [6, 2, 10] and resumed.other.args[0] is resumed.function.args[0]


def test_slots_and_the_attributes_of_a_users_container_come_back():
    def make():
        return Thing(slotted=Slotted(1), registry=Registry())

    def change(model):
        model.slotted.second = [2]
        del model.slotted.first
        model.registry["a"] = 1
        model.registry.step = 3
        model.more = [Slotted(4), Registry(b=2)]

    _, resumed = train(make, change)
    assert resumed.slotted.second == [2] and not hasattr(resumed.slotted, "first")
    assert resumed.registry == {"a": 1} and resumed.registry.step == 3
    assert resumed.more[0].first == 4 and resumed.more[1] == {"b": 2}


def test_objects_as_keys_come_back():
    def make():
        return Thing(counts={}, example=Point(0), seen=set())

    def change(model):
        model.counts[Point(3)] = 1
        model.seen.add(Point(3))

    _, resumed = train(make, change)
    assert resumed.counts[Point(3)] == 1 and Point(3) in resumed.seen


def test_a_method_that_another_took_the_place_of_comes_back():
    def make():
        model = Thing()
        model.rule = model.double
        return model

    def change(model):
        model.rule = model.triple

    _, resumed = train(make, change)
    assert resumed.rule(5) == 15 and resumed.rule.__self__ is resumed


def test_a_function_that_the_start_has_comes_back_under_another_name():
    def make():
        return Thing(rules=[lambda: 1, lambda: 2], rule=None, classes={"a": Thing}, kind=None)

    def change(model):
        model.rule = model.rules[1]
        model.kind = model.classes["a"]

    _, resumed = train(make, change)
    assert resumed.rule is resumed.rules[1] and resumed.kind is Thing


def test_the_operating_systems_random_numbers_harm_no_checkpoint():
    thing = Thing(systems=random.SystemRandom(), count=0)
    _, unsaved = record_of(lambda: thing, lambda trained: setattr(trained, "count", 1))
    assert not unsaved


@pytest.mark.parametrize("is_new", [False, True])
def test_methods_of_code_in_c_lead_to_their_objects(is_new):
    def methods():
        return {"push": [].append, "add": set().add, "ticket": itertools.count(1).__next__}

    def make():
        return Thing(**({} if is_new else methods()))

    def change(model):
        if is_new:
            vars(model).update(methods())
        model.push(model.ticket())
        model.add("x")

    trained, resumed = train(make, change)
    for model in (trained, resumed):
        assert (model.push.__self__, model.add.__self__, model.ticket()) == ([1], {"x"}, 2)


def test_a_method_that_no_container_has_is_refused():
    record, _ = record_of(Thing, lambda model: setattr(model, "push", [].append))
    for name in ('"__class__"', '"nothing"', "3"):
        forged = record | {"nodes": record["nodes"].replace('"append"', name)}
        with pytest.raises(UserError, match="damaged or forged"):
            restore({"model": (model := Thing())}, Start({"model": model}), forged)


def test_a_file_in_memory_that_is_only_read_goes_back_to_where_it_was():
    file = io.StringIO("first\nsecond\n")
    start = Start({"model": Thing(file=file)}, is_kept=True)
    file.readline()
    start.reset()
    assert file.tell() == 0 and file.read() == "first\nsecond\n"


def test_what_averages_the_models_of_ranks_counts_on():
    """It holds the group of the ranks, which each start makes again."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        _, resumed = train(
            lambda: Thing(averager=PeriodicModelAverager(period=4)),
            lambda model: setattr(model.averager, "step", 3),
        )
        assert resumed.averager.step == 3
        assert resumed.averager.process_group is torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()
