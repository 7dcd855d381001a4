"""Copies of what a checkpoint gets: training goes on while it is written."""

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn


def copy_to_cpu(data: Any) -> Any:
    """Return `data` with every tensor in it copied to the CPU."""
    return apply_to_collection(data, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))


def has_values(tensor: Tensor) -> bool:
    """Return whether a parameter or buffer is initialized; a lazy module's is not."""
    return not isinstance(tensor, nn.parameter.UninitializedTensorMixin)
