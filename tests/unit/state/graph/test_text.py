"""state/graph/text.py: nodes as JSON, and what JSON lacks."""

import pytest
import torch

from sagemaker_lightning.state.graph import scalars, text

LONG = 10**5000


NUMBERS = {"long": LONG, "negative": -LONG, "short": 5, "of the limit": text.LONG_NUMBER}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_number_too_long_for_json_comes_back(number):
    """Beside it, all else is written as ever, and each tensor once."""
    tensors = [torch.zeros(1)]
    nodes = [["a", {"b": [number, 7], "c": torch.ones(2)}, LONG, b"\xff", 1j, None]]
    written = text.write(nodes, tensors)
    assert [tensor.tolist() for tensor in tensors] == [[0.0], [1.0, 1.0]]
    ((name, values, long, *others),) = text.read(written, tensors)
    assert name == "a" and scalars.scalar(long) == LONG
    assert list(map(scalars.scalar, values["b"])) == [number, 7] and values["c"] is tensors[1]
    assert list(map(scalars.scalar, others)) == [b"\xff", 1j, None]
