"""state/graph/encoding.py: a user's state comes back as the graph that it was.

Each object comes back once, under all its names, and what has not changed is not written.
"""

import numpy as np
import pytest
import torch
from graph_records import Net, Thing, nodes_of, record_of, through_a_file, train

from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.kinds.views import MAX_EXPANDED
from sagemaker_lightning.state.graph.start import Start

SHARED = {
    "an object's attributes": (
        lambda: Thing(config=(config := Thing(rate=2.0)), head=Thing(config=config)),
        lambda model: setattr(model.config, "rate", 0.5),
        lambda model: (model.head.config, model.config, model.config.rate == 0.5),
    ),
    "an attribute and an element": (
        lambda: Thing(stages=(stages := [Thing(noise=0.0), Thing(noise=0.5)]), stage=stages[0]),
        lambda model: setattr(model, "stage", model.stages[1]),
        lambda model: (model.stage, model.stages[1], model.stage.noise == 0.5),
    ),
    "a list and a dict": (
        lambda: Thing(losses=(losses := []), logs={"loss": losses}),
        lambda model: model.losses.append(1.5),
        lambda model: (model.logs["loss"], model.losses, model.losses == [1.5]),
    ),
    "two new names": (
        Thing,
        lambda model: vars(model).update(first=(first := [1]), both={"first": first}),
        lambda model: (model.both["first"], model.first, model.first == [1]),
    ),
    "weights that are tied": (
        lambda: Thing(first=torch.nn.Linear(2, 2), second=torch.nn.Linear(2, 2)),
        lambda model: setattr(model.second, "weight", model.first.weight),
        lambda model: (model.second.weight, model.first.weight, True),
    ),
}


@pytest.mark.parametrize(("make", "change", "found"), SHARED.values(), ids=SHARED)
def test_two_names_of_one_object_share_it_after_a_resume(make, change, found):
    first, second, is_changed = found(train(make, change)[1])
    assert first is second and is_changed


@pytest.mark.parametrize(
    "make_value", [lambda: {"scale": 1.0}, lambda: torch.zeros(2), lambda: [1]]
)
def test_a_default_is_left_alone_when_its_name_is_bound_anew(make_value):
    def make():
        value = make_value()
        return Thing(now=value, default=value)

    def change(model):
        model.now = torch.ones(2) if isinstance(model.default, torch.Tensor) else ["another"]

    _, resumed = train(make, change)
    assert resumed.now is not resumed.default
    assert str(resumed.default) == str(make_value())
    assert str(resumed.now) == str(
        torch.ones(2) if isinstance(resumed.now, torch.Tensor) else ["another"]
    )


def test_parameters_as_keys_of_a_dict_are_the_resumed_models():
    def make():
        model = Net()
        model.shadow = {}
        return model

    def change(model):
        for parameter in model.parameters():
            model.shadow[parameter] = parameter.detach() + 1

    trained, resumed = train(make, change)
    assert list(map(id, resumed.shadow)) == list(map(id, resumed.parameters()))
    assert all(map(torch.equal, resumed.shadow.values(), trained.shadow.values()))


def test_a_state_dict_that_is_kept_is_still_a_view_of_the_weights():
    def change(model):
        model.best = model.state_dict()

    _, resumed = train(Net, change)
    with torch.no_grad():
        resumed.body.weight.add_(1)
    assert torch.equal(resumed.best["body.weight"], resumed.body.weight)
    assert resumed.best._metadata[""] == {"version": 1}


def test_an_alias_of_an_optimizers_state_is_the_optimizers():
    def make():
        model = Net()
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(model, optimizer):
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()

    model, optimizer = make()
    start = Start({"model": model, "optimizers.0": optimizer})
    step(model, optimizer)
    weight = model.body.weight
    model.momentum = optimizer.state[weight]["momentum_buffer"]
    record, unsaved, *_ = encode({"model": model, "optimizers.0": optimizer}, start)
    resumed, its_optimizer = make()
    start = Start({"model": resumed, "optimizers.0": its_optimizer})
    its_optimizer.load_state_dict(optimizer.state_dict())
    restore({"model": resumed, "optimizers.0": its_optimizer}, start, through_a_file(record))
    assert resumed.momentum is its_optimizer.state[resumed.body.weight]["momentum_buffer"]
    assert unsaved == []


def test_two_new_views_of_one_tensor_share_its_memory():
    def change(model):
        whole = torch.arange(6.0)
        model.left, model.right = whole[:4], whole[2:]

    _, resumed = train(Thing, change)
    resumed.left[2] = 9
    assert resumed.right.tolist() == [9, 3, 4, 5]


def test_a_view_of_a_tensor_of_the_start_is_one_again():
    def make():
        return Thing(table=torch.zeros(4, 2))

    def change(model):
        model.table[1] = 5
        model.row = model.table[1]

    _, resumed = train(make, change)
    resumed.row += 1
    assert resumed.table[1].tolist() == [6, 6]


def test_views_of_arrays_share_their_memory():
    def make():
        return Thing(table=np.zeros((4, 2)))

    def change(model):
        model.row = model.table[1]
        whole = np.arange(6)
        model.left, model.right = whole[:4], whole[2:]

    _, resumed = train(make, change)
    resumed.row += 1
    resumed.left[2] = 9
    assert resumed.table[1].tolist() == [1, 1]
    assert resumed.right.tolist() == [9, 3, 4, 5]


def test_what_is_expanded_follows_what_it_is_a_view_of():
    def make():
        return Thing(gain=torch.ones(1), row=np.ones(1))

    def change(model):
        model.wide = model.gain.expand(4)
        model.broad = np.broadcast_to(model.row, (4,))

    _, resumed = train(make, change)
    resumed.gain += 1
    resumed.row += 2
    assert resumed.wide.tolist() == [2] * 4 and resumed.broad.tolist() == [3] * 4


def test_what_is_expanded_very_far_is_a_value_of_its_own():
    def make():
        return Thing(gain=torch.ones(1))

    def change(model):
        model.wide = model.gain.expand(MAX_EXPANDED + 1)

    _, resumed = train(make, change)
    resumed.gain += 1
    assert len(resumed.wide) == MAX_EXPANDED + 1 and set(resumed.wide.tolist()) == {1}


def test_graphs_with_cycles_come_back():
    def change(model):
        model.self = model
        model.children = [Thing(parent=model)]
        model.ring = []
        model.ring.append((model.ring, model.children))

    _, resumed = train(Thing, change)
    assert resumed.self is resumed and resumed.children[0].parent is resumed
    assert resumed.ring[0][0] is resumed.ring and resumed.ring[0][1] is resumed.children


def nested(kind):
    """Return a value within 10,000 others."""
    value = [1]
    for _ in range(10_000):
        value = kind(value)
    return value


@pytest.mark.parametrize(
    "kind", [lambda value: [value], lambda value: (value,), lambda value: Thing(inner=value)]
)
def test_ten_thousand_values_within_another_come_back(kind):
    def change(model):
        model.chain = nested(kind)

    _, resumed = train(Thing, change)
    value, depth = resumed.chain, 0
    while value != [1]:
        value, depth = value.inner if isinstance(value, Thing) else value[0], depth + 1
    assert depth == 10_000


def test_a_tensor_that_was_calculated_requires_gradients_and_is_reported_if_one_reaches_it(capsys):
    def change(model):
        model.loss = 2 * torch.ones(1, requires_grad=True)

    _, resumed = train(Thing, change)
    assert resumed.loss.requires_grad and not resumed.loss.is_leaf
    (3 * resumed.loss).backward()
    (3 * resumed.loss).backward()
    assert capsys.readouterr().out.count("warning: model.loss was calculated before the inter") == 1


def test_a_view_that_nobody_may_ask_for_its_gradient_comes_back():
    """It was made without gradients, and its base was then written in place with them."""

    def change(model):
        base = torch.ones(3, requires_grad=True).clone()
        with torch.no_grad():
            model.seen = base[:2]
        base.mul_(2)
        with pytest.raises(RuntimeError, match="created in no_grad mode"):
            model.seen.grad_fn  # noqa: B018

    _, resumed = train(Thing, change)
    assert resumed.seen.tolist() == [2, 2]


# ---- what is written -------------------------------------------------------------------------


def test_nothing_is_written_of_what_has_not_changed():
    def make():
        model = Net()
        model.table = {number: [number, torch.full((2,), number)] for number in range(9)}
        model.generator = np.random.default_rng(0)
        model.array = np.arange(4.0)
        model.not_a_number = float("nan")
        return model

    def change(model):
        model.not_a_number = float("nan")  # another object of the same value
        with torch.no_grad():
            model.body.weight.add_(1)  # the checkpoint has it besides

    assert record_of(make, change) == ({"nodes": "[]", "tensors": []}, [])


def test_only_changed_attributes_of_an_object_are_written():
    def make():
        return Thing(folder="mine", step=0)

    record, _ = record_of(make, lambda model: setattr(model, "step", 3))
    assert nodes_of(record) == [["object", "model", {"names": ["step"]}, [3], None]]


def test_an_object_that_did_not_change_keeps_what_the_resumed_program_gave_it():
    trained = Thing(options={"folder": "a"}, step=0)
    start = Start({"model": trained})
    trained.step = 1
    record, *_ = encode({"model": trained}, start)
    resumed = Thing(options={"folder": "b"}, step=0)
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert vars(resumed) == {"options": {"folder": "b"}, "step": 1}


@pytest.mark.parametrize(("before", "now"), [(0.0, -0.0), (1, 1.0), (1, True), ("a", b"a")])
def test_values_that_are_equal_but_not_the_same_are_changes(before, now):
    def make():
        return Thing(value=before, values=[before], within={"it": before})

    def change(model):
        model.value = now
        model.values[0] = now
        model.within["it"] = now

    _, resumed = train(make, change)
    assert repr((resumed.value, resumed.values, resumed.within)) == repr((now, [now], {"it": now}))


def test_the_order_of_dicts_and_attributes_is_kept():
    def make():
        return Thing(first=1, second=2, third=3, table={"a": 1, "b": 2})

    def change(model):
        del model.first
        model.second = 0
        model.first = 1
        model.table["a"] = model.table.pop("a")

    _, resumed = train(make, change)
    assert list(vars(resumed)) == ["second", "third", "table", "first"]
    assert list(resumed.table) == ["b", "a"]


def test_an_attribute_that_was_removed_is_removed():
    def make():
        return Thing(first=1, second=2)

    _, resumed = train(make, lambda model: delattr(model, "first"))
    assert vars(resumed) == {"second": 2}
