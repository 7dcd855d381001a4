"""Copies of what a checkpoint gets: training continues while it is written."""

from typing import TypeVar

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from sagemaker_lightning.compat.torch_modules import is_lazy

Data = TypeVar("Data")


def copy_to_cpu(data: Data) -> Data:
    """Return `data` with every tensor in it copied to the CPU."""
    copied: Data = apply_to_collection(
        data, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True)
    )
    return copied


def has_values(tensor: Tensor) -> bool:
    """Return whether a parameter or buffer is initialized; a lazy module's is not."""
    return not is_lazy(tensor)
