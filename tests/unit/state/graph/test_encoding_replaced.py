"""An object that gets another class, or other memory, while training."""

import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.encoding import Encoded, encode
from sagemaker_lightning.state.graph.start import Start


class Warm:
    """A state of a program, by its class."""

    calls = 0


class Main(Warm):
    """The state that comes after it."""


class Layer(nn.Module):
    """A layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.calls = 0


class OtherLayer(Layer):
    """A layer that computes something else."""


class Model(nn.Module):
    """Has each of them."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()
        self.state = Warm()
        self.states = [self.state]


def interrupted(change) -> tuple[nn.Module, Encoded]:
    """Return a model that has what a changed one had, and what was saved of that one."""
    trained, resumed = Model(), Model()
    start = Start({"model": trained})
    change(trained)
    encoded = encode({"model": trained}, start)
    restore({"model": resumed}, Start({"model": resumed}), encoded.record)
    return resumed, encoded


def test_an_object_has_the_class_again_that_it_got_under_all_its_names():
    def change(model):
        model.state.__class__ = Main
        model.state.calls = 3

    resumed, encoded = interrupted(change)
    assert type(resumed.state) is Main and resumed.state.calls == 3
    assert resumed.states[0] is resumed.state
    assert encoded.unsaved == []


def test_a_module_has_the_class_again_that_it_got_and_its_weights_stay():
    def change(model):
        model.layer.__class__ = OtherLayer
        model.layer.calls = 3

    resumed, encoded = interrupted(change)
    assert type(resumed.layer) is OtherLayer and resumed.layer.calls == 3
    assert list(resumed.state_dict()) == ["layer.weight"]
    assert encoded.unsaved == []


def test_a_class_that_a_resumed_program_cannot_find_is_named():
    def change(model):
        model.state.__class__ = type("Local", (Warm,), {})

    resumed, encoded = interrupted(change)
    assert type(resumed.state) is Warm
    assert any("Local" in each.kind for each in encoded.unsaved)


def test_a_tensor_that_reaches_beyond_a_weight_in_its_memory_is_named_and_saved():
    def change(model):
        model.vector = torch.arange(5.0)
        vector_to_parameters(model.vector, [model.layer.weight])
        model.within = model.layer.weight.detach()[1:]

    resumed, encoded = interrupted(change)
    assert resumed.vector.tolist() == [0, 1, 2, 3, 4]
    assert encoded.parted == ["model.vector"]
    with torch.no_grad():
        resumed.layer.weight.fill_(7)
    assert resumed.within.tolist() == [7] and resumed.vector.tolist() == [0, 1, 2, 3, 4]


def test_a_view_of_a_weight_lies_in_it_wherever_that_has_its_memory():
    def change(model):
        model.layer.weight.data = torch.arange(5.0)[3:]
        model.view = model.layer.weight.detach()[1:]

    resumed, encoded = interrupted(change)
    with torch.no_grad():
        resumed.layer.weight.copy_(torch.tensor([5.0, 6.0]))
    assert resumed.view.tolist() == [6]
    assert encoded.parted == []
