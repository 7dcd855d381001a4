"""state/graph/kinds/views.py: arrays and tensors that get each other's memory while training."""

import numpy as np
import pytest
import torch
from graph_records import Net, Thing, through_a_file, train

from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.start import Start


def array_of_new_tensor(thing):
    thing.tensor = torch.arange(6.0)
    thing.array = thing.tensor.numpy()


def part_of_new_tensor(thing):
    thing.tensor = torch.arange(12.0).view(3, 4)
    thing.array = thing.tensor[1:, ::2].numpy()


def tensor_of_new_array(thing):
    thing.array = np.arange(6.0)
    thing.tensor = torch.from_numpy(thing.array)


def tensors_of_new_array(thing):
    thing.array = np.arange(6, dtype=np.int16)
    thing.other = torch.from_numpy(thing.array[::-1].copy())
    thing.tensor = torch.from_numpy(thing.array[2:4])
    thing.third = torch.from_numpy(thing.array)[1:]


def array_of_old_tensor(thing):
    thing.array = thing.old_tensor.numpy()
    thing.tensor = thing.old_tensor


def tensor_of_old_array(thing):
    thing.tensor = torch.as_tensor(thing.old_array)
    thing.array = thing.old_array


def array_of_old_tensors_part(thing):
    thing.tensor = thing.old_tensor[1:]
    thing.array = thing.tensor.numpy()[:1]


def things():
    return Thing(old_tensor=torch.zeros(3), old_array=np.zeros(3))


@pytest.mark.parametrize(
    "change",
    [
        array_of_new_tensor,
        part_of_new_tensor,
        tensor_of_new_array,
        tensors_of_new_array,
        array_of_old_tensor,
        tensor_of_old_array,
        array_of_old_tensors_part,
    ],
)
def test_an_array_and_a_tensor_share_their_memory_again(change):
    trained, resumed = train(things, change)
    for each in (trained, resumed):
        each.array += 1
        each.tensor[0] = 9
    for name, value in vars(trained).items():
        assert np.array_equal(vars(resumed)[name], value), name
        assert type(vars(resumed)[name]) is type(value)


@pytest.mark.parametrize("name", ["body.weight", "mean"])
def test_an_array_of_a_models_tensor_follows_it_again(name):
    def change(net):
        net.array = net.state_dict()[name].numpy()[:1]

    _, resumed = train(Net, change)
    tensor = resumed.state_dict()[name]
    tensor.fill_(7)
    assert (resumed.array == 7).all() and resumed.array.shape == tensor[:1].shape


def test_two_arrays_of_one_forgotten_tensor_share_its_memory():
    def change(thing):
        thing.array = torch.arange(6.0).numpy()
        thing.part = thing.array[2:]

    _, resumed = train(Thing, change)
    resumed.array[2] = 9
    assert resumed.part.tolist() == [9, 3, 4, 5]


def others(array):
    return array.view(np.int32)


def backwards(array):
    return array[::-1]


def uneven(array):
    return np.lib.stride_tricks.as_strided(array, (2,), (6,))


@pytest.mark.parametrize("view", [others, backwards, uneven])
def test_an_array_that_torch_cannot_make_of_a_tensor_is_named(view):
    def change(thing):
        thing.tensor = torch.arange(4.0)
        thing.array = view(thing.tensor.numpy())

    thing, resumed = Thing(), Thing()
    start = Start({"model": thing})
    change(thing)
    encoded = encode({"model": thing}, start)
    assert encoded.parted == ["model.array"] and encoded.unsaved == []
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(encoded.record))
    assert resumed.array.tolist() == thing.array.tolist()
