"""state/graph/kinds/memory.py: tensors and arrays get other values in place."""

import numpy as np
import pytest
import torch
from graph_records import Thing, record_of, train

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.start import Start


@pytest.mark.parametrize(
    "make",
    [
        lambda number: (number * torch.eye(3)).to_sparse(),
        lambda number: torch.sparse_coo_tensor([[0]], [[float(number)]], (1, 1)),
        lambda number: torch.sparse_coo_tensor([[0, 0], [0, 1]], [1.0, number], (1, 2)),
        lambda number: (number * torch.eye(3)).to_sparse_csr(),
        lambda number: torch.full((1, 3), float(number)).expand(2, 3),
    ],
)
def test_a_tensor_of_the_start_gets_other_values(make):
    def change(thing):
        thing.tensor.copy_(make(2))

    if make(1).layout == torch.strided:

        def change(thing):  # noqa: F811 (an expanded tensor is written by its rows)
            thing.tensor[0].fill_(2)

    trained, resumed = train(lambda: Thing(tensor=make(1)), change)
    assert torch.equal(resumed.tensor.to_dense(), trained.tensor.to_dense())
    assert resumed.tensor.layout == trained.tensor.layout


class Measured(np.ndarray):
    """An array of a user's class, with a unit."""

    unit = ""


def measured(values, unit) -> Measured:
    array = np.asarray(values, float).view(Measured)
    array.unit = unit
    return array


def masked(values, mask) -> np.ma.MaskedArray:
    return np.ma.masked_array(np.asarray(values, float), mask)


@pytest.mark.parametrize("is_new", [False, True], ids=["in place", "another"])
def test_arrays_of_classes_of_their_own_come_back_with_their_attributes(is_new):
    def begin():
        return Thing(speed=measured([1, 2], "m/s"), window=masked([1, 2, 3], [1, 0, 1]))

    def trains(thing):
        if is_new:
            thing.speed, thing.window = measured([3, 4], "km/h"), masked([4, 5], [0, 1])
        else:
            thing.speed[0], thing.speed.unit = 5, "km/h"
            thing.window[0] = 7

    trained, resumed = train(begin, trains)
    assert type(resumed.speed) is Measured and resumed.speed.unit == "km/h"
    assert resumed.speed.tolist() == trained.speed.tolist()
    assert type(resumed.window) is np.ma.MaskedArray
    assert resumed.window.tolist() == trained.window.tolist()
    assert resumed.window.mean() == trained.window.mean()
    resumed.window.mask[:] = True
    assert resumed.window.count() == 0


def test_what_a_record_makes_of_an_array_of_a_class_is_an_array_of_a_class_of_the_program():
    record, _ = record_of(
        lambda: Thing(speed=measured([1], "m")),
        lambda thing: setattr(thing, "speed", measured([2], "s")),
    )
    for name in ("numpy.memmap", f"{__name__}.Thing", "builtins.dict"):
        forged = record | {"nodes": record["nodes"].replace(f"{__name__}.Measured", name)}
        model = Thing(speed=measured([1], "m"))
        with pytest.raises(UserError):
            restore({"model": model}, Start({"model": model}), forged)
