"""state/graph/kinds/memory.py: tensors get other values in place."""

import numpy as np
import pytest
import torch
from graph_records import Thing, train


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


def test_an_array_whose_shape_was_changed_in_place_has_that_shape_again():
    def change(thing):
        thing.array.shape = (2, 2)
        thing.array[1] = 5

    trained, resumed = train(lambda: Thing(array=np.zeros(4)), change)
    assert resumed.array.tolist() == trained.array.tolist() == [[0, 0], [5, 5]]
