"""What a hook has changed while it saved is undone, and what it has closed stays closed."""

from collections import deque

import torch
from graph_records import Net, Thing

from sagemaker_lightning.state.graph.state import GraphState


def state_of(**roots) -> GraphState:
    state = GraphState(lambda: roots)
    state.mark()
    return state


class Names(list):
    """A list that counts."""

    count = 0


def test_attributes_containers_and_modules_are_as_before():
    model = Net()
    model.kept = Thing(count=1, names=["a"], newest=deque([1], 2), table={"x": {}}, gone=2)
    model.own = Names(["a"])
    body, names = model.body, model.kept.names
    state = state_of(model=model)
    with state.kept():
        model.kept.count += 1
        model.kept.names.append("b")
        model.kept.newest.append(2)
        model.kept.table["x"][3] = 4
        del model.kept.gone
        model.kept.added = 5
        model.own.append("b")
        model.own.count = 1
        model.body = torch.nn.Identity()
        model.scale = torch.nn.Parameter(torch.ones(1))
    assert vars(model.kept) == {
        "count": 1,
        "names": ["a"],
        "newest": deque([1]),
        "table": {"x": {}},
        "gone": 2,
    }
    assert model.kept.names is names and model.body is body and not hasattr(model, "scale")
    assert model.own == ["a"] and "count" not in vars(model.own)


def test_what_was_undone_comes_back_where_a_load_hook_has_set_something_else():
    model = Thing(history=[1], count=1)
    state = state_of(model=model)
    with state.kept():
        model.history.append(2)
        model.count = 2
    record = state.encode()
    resumed = Thing(history=[1], count=1)
    other = state_of(model=resumed)
    resumed.history.append(2)
    resumed.count = 2
    other.restore(record)
    assert (resumed.history, resumed.count) == ([1], 1)


def test_a_file_in_the_place_of_another_one_stays(tmp_path):
    model = Thing(file=(tmp_path / "first").open("a"), lines=0)
    state = state_of(model=model)
    with state.kept():
        model.file.close()
        model.file = (tmp_path / "second").open("a")
        model.lines = 1
    with model.file as file:
        assert file.name.endswith("second") and model.lines == 0
