"""Objects that training has changed: their records and states."""

import io
import json

import torch

from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.start import Start
from sagemaker_lightning.state.graph.state import GraphState


class Thing:
    """An object of a user's."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def double(self, value):
        return 2 * value

    def triple(self, value):
        return 3 * value


class Net(torch.nn.Module):
    """A module of a user's."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.scale = 1.0


def nodes_of(record):
    return json.loads(record["nodes"])


def through_a_file(record):
    """Return a record as torch reads it without running code."""
    file = io.BytesIO()
    torch.save(record, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(make, change):
    """Return an object that was changed, and another one that was restored from its record.

    Args:
        make: What the program does at its start.
        change: What training does.
    """
    trained = make()
    start = Start({"model": trained})
    change(trained)
    record, unsaved, *_ = encode({"model": trained}, start)
    assert unsaved == []
    resumed = make()
    restored = restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert restored.missing == [] == restored.reordered
    # What is restored is saved again, and is the same.
    again, *_ = encode({"model": trained}, start)
    assert again["nodes"] == record["nodes"]
    return trained, resumed


def record_of(make, change):
    """Return the record of an object that was changed, and what it lacks."""
    trained = make()
    start = Start({"model": trained})
    change(trained)
    return encode({"model": trained}, start)[:2]


def state_of(model):
    """Return the state of a model that has just been made."""
    state = GraphState(lambda: {"model": model})
    state.mark()
    return state


def mine(**attributes):
    """Return an object with these attributes, and its state, marked."""
    owner = Thing(**attributes)
    state = GraphState(lambda: {"mine": owner}, is_kept=True)
    state.mark()
    return owner, state


def changed(state) -> set[str]:
    """Return the names of the attributes that have changed."""
    return {name.removeprefix("Thing.") for name in state.names_changed()}
