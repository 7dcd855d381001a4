"""state/digests.py: values are compared in full if they are small."""

import numpy as np
import pytest
import torch

from sagemaker_lightning.state.digests import COMPARED_IN_FULL, digest, is_small


@pytest.mark.parametrize("size", [COMPARED_IN_FULL, COMPARED_IN_FULL + 1])
@pytest.mark.parametrize(
    "make", [np.zeros, torch.zeros, lambda size: "a" * size, lambda size: "\u044f" * size]
)
def test_a_value_of_up_to_65_536_elements_is_small(make, size):
    assert is_small(make(size)) is (size == 65_536)


def test_sparse_tensors_of_other_values_have_other_digests():
    by_rows = [tensor.to_sparse_csr() for tensor in (torch.ones(2, 2), 2 * torch.ones(2, 2))]
    assert digest(by_rows[0]) != digest(by_rows[1])


def test_equal_texts_are_equal_whether_or_not_they_are_one_object():
    names = [f"class {number}" for number in range(3)]
    assert digest([names[k % 3] for k in range(300)]) == digest(
        [f"class {k % 3}" for k in range(300)]
    )


def test_whole_numbers_of_any_length_are_told_apart():
    long = 10**5000
    assert digest(long) != digest(long + 1) and digest([long]) != digest((long,))
    assert digest({"a": long}) == digest({"a": 10**5000})
