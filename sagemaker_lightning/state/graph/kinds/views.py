"""Tensors and arrays made while training that share their memory with others."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sagemaker_lightning.state.graph.kinds.base import Kind, refusal
from sagemaker_lightning.state.graph.kinds.memory import dtype_of, dtype_text

MAX_EXPANDED = 1 << 22
"""Bytes, at most, of a view in which one element of its base comes often, as after `expand`."""


def bases_of(array: np.ndarray) -> Iterator[Any]:
    """Yield what an array has its memory from, step by step.

    numpy.lib.stride_tricks puts an object of its own between an array and a view of it.
    """
    base = array.base
    while base is not None:
        if type(base).__name__ != "DummyArray":
            yield base
        base = getattr(base, "base", None)


def owner_of_array(array: np.ndarray) -> np.ndarray | None:
    """Return the array that has the memory of an array; None if it is no plain array's."""
    for base in bases_of(array):
        if not isinstance(base, np.ndarray):
            return None
        array = base
    is_plain = type(array) is np.ndarray and array.flags.c_contiguous and not array.dtype.hasobject
    return array if is_plain else None


def address(array: np.ndarray) -> int:
    """Return the address of an array's first element."""
    pointer: int = array.__array_interface__["data"][0]
    return pointer


class TensorViewKind(Kind):
    """A view of another tensor, such as a weight; its note says where it lies."""

    name = "view"
    fills = False

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Tensor:
        """Return the view."""
        (base,) = parts
        offset, shape, stride = note
        if not isinstance(base, Tensor) or base.layout != torch.strided:
            raise refusal(self.name)
        offset += base.storage_offset()
        view = base.detach().as_subclass(Tensor).as_strided(shape, stride, offset)
        if not is_tensor_within(view, base):
            raise refusal(self.name)
        return view


class ArrayViewKind(Kind):
    """A view of another array; its note says where it lies."""

    name = "array view"
    fills = False

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> np.ndarray:
        """Return the view."""
        (base,) = parts
        owner = owner_of_array(base) if isinstance(base, np.ndarray) else None
        dtype = dtype_of(note["dtype"])
        if owner is None or dtype.hasobject:
            raise refusal(self.name)
        memory = owner.reshape(-1).view(np.uint8)
        view = np.ndarray(note["shape"], dtype, memory, note["offset"], note["strides"])
        if not is_array_within(view, owner):
            raise refusal(self.name)
        return view


def is_tensor_within(view: Tensor, base: Tensor) -> bool:
    """Return whether a view is no larger than its base, or not very large."""
    return view.numel() * view.itemsize <= max(base.untyped_storage().nbytes(), MAX_EXPANDED)


def is_array_within(view: np.ndarray, owner: np.ndarray) -> bool:
    """Return whether a view is no larger than the array of its memory, or not very large."""
    size = max(view.size, view.nbytes)  # text of no characters has no bytes
    return size <= max(owner.nbytes, MAX_EXPANDED)


def place_in_tensor(tensor: Tensor, base: Tensor) -> list[Any]:
    """Return where a view lies in its base: offset in elements, shape and stride."""
    offset = tensor.storage_offset() - base.storage_offset()
    return [offset, list(tensor.shape), list(tensor.stride())]


def place_in_array(array: np.ndarray, owner: np.ndarray) -> dict[str, Any]:
    """Return where a view lies in the array that has its memory."""
    return {
        "dtype": dtype_text(array.dtype),
        "offset": address(array) - address(owner),
        "shape": list(array.shape),
        "strides": list(array.strides),
    }
