"""Tensors and arrays made while training that share their memory with others."""

import bisect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sagemaker_lightning.state.graph.kinds.base import Kind, refusal
from sagemaker_lightning.state.graph.kinds.memory import dtype_of, dtype_text, pointer_of

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
    """Return the array that has the memory of an array; None if it is not a plain array's.

    If a tensor has the memory, it is the array that was made of the tensor.
    """
    for base in bases_of(array):
        if isinstance(base, Tensor):
            break
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
    """A view of another tensor, such as a weight, or of an array; its note says where it lies."""

    name = "view"
    fills = False

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Tensor:
        """Return the view."""
        (base,) = parts
        base = torch.from_numpy(base) if isinstance(base, np.ndarray) else base
        offset, shape, stride = note
        if not isinstance(base, Tensor) or base.layout != torch.strided:
            raise refusal(self.name)
        offset += base.storage_offset()
        view = base.detach().as_subclass(Tensor).as_strided(shape, stride, offset)
        if not is_tensor_within(view, base):
            raise refusal(self.name)
        return view


class ArrayViewKind(Kind):
    """A view of another array, or of a tensor; its note says where it lies."""

    name = "array view"
    fills = False

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> np.ndarray:
        """Return the view."""
        (base,) = parts
        if isinstance(base, Tensor):
            # Where the tensor is on another device now, the array has memory of its own.
            return TensorViewKind().build(note, parts, classes).cpu().numpy()
        owner = owner_of_array(base) if isinstance(base, np.ndarray) else None
        dtype = dtype_of(note["dtype"])
        if owner is None or dtype.hasobject:
            raise refusal(self.name)
        memory = owner.reshape(-1).view(np.uint8)
        view = np.ndarray(note["shape"], dtype, memory, note["offset"], note["strides"])
        if not is_array_within(view, owner):
            raise refusal(self.name)
        return view


def tensor_of_array(array: np.ndarray) -> Tensor | None:
    """Return the tensor that has the memory of an array; None if none has."""
    last = deque(bases_of(array), maxlen=1)
    return last[0] if last and isinstance(last[0], Tensor) else None


def bytes_of(value: Tensor | np.ndarray) -> tuple[int, int]:
    """Return the address of the first byte of a tensor or an array, and the one after its last."""
    if isinstance(value, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(value)
        return int(low), int(high)
    return value.data_ptr(), value.data_ptr() + _reach(value) * value.itemsize


def _reach(tensor: Tensor) -> int:
    """Return how many elements lie from a tensor's first to its last one in memory."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def place_across(value: Tensor | np.ndarray, base: Tensor | np.ndarray) -> list[Any] | None:
    """Return where a tensor lies in an array, or an array in a tensor, as `place_in_tensor` does.

    It is None if no view of the one can be made in the other.
    """
    (begin, end), (low, high) = bytes_of(value), bytes_of(base)
    offset, rest = divmod(begin - low, value.itemsize)
    if begin < low or high < end or rest or _dtype(value) != _dtype(base):
        return None
    if isinstance(value, Tensor):
        strides = list(value.stride())
    elif any(step < 0 or step % value.itemsize for step in value.strides):
        return None  # torch has no such
    else:
        strides = [step // value.itemsize for step in value.strides]
    size = math.prod(value.shape) * value.itemsize
    is_within = size <= max(high - low, MAX_EXPANDED)
    return [offset, list(value.shape), strides] if is_within else None


def _dtype(value: Tensor | np.ndarray) -> torch.dtype | None:
    """Return the dtype as torch has it; None if it has no such."""
    if isinstance(value, Tensor):
        return value.dtype
    try:
        return torch.from_numpy(np.empty(0, value.dtype)).dtype
    except TypeError:
        return None


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


def memory_of(value: Tensor | np.ndarray) -> Any:
    """Return by what the memory of a tensor or an array is known; None if it has none to share."""
    if isinstance(value, Tensor):
        pointer = pointer_of(value)
        return (str(value.device), value.dtype, pointer) if pointer else None
    owner = owner_of_array(value)
    return ("array", address(owner)) if owner is not None and value.nbytes else None


def is_plain_view(value: Tensor | np.ndarray) -> bool:
    """Return whether a tensor or an array may be made again as a view."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and not value.requires_grad
    return type(value) is np.ndarray and not value.dtype.hasobject


def has_plain_memory(value: Tensor | np.ndarray) -> bool:
    """Return whether a view of the other kind can be made of a tensor or an array.

    One without elements has no memory.
    """
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu"
        return is_plain and value.numel() > 0 and pointer_of(value) != 0
    is_plain = type(value) is np.ndarray and not value.dtype.hasobject
    return is_plain and value.size > 0 and value.flags.c_contiguous and value.flags.writeable


def _extent(value: Tensor | np.ndarray) -> tuple[int, int]:
    """Return where a tensor's elements begin in its storage, and where they end.

    An array's memory is that of its owner, of which each start makes all: 0 and 0.
    """
    if not isinstance(value, Tensor):
        return 0, 0
    begin = int(value.storage_offset())
    return begin, begin + _reach(value)


def bases_within(
    views: list[Any], bases: list[Any], extent: Callable[[Any], tuple[int, int]] = _extent
) -> list[Any]:
    """Return for each view a base that it lies within; None if there is none.

    Another start makes no memory beyond that. There may be many of both.

    Args:
        views: The views.
        bases: The bases.
        extent: Returns where one begins and ends: by default, in the one memory that all are of.
    """
    rows = sorted((*extent(base), number) for number, base in enumerate(bases))
    begins = [begin for begin, *_ in rows]
    longest: list[tuple[int, int, int]] = []  # of those that begin no later, the one that ends last
    for row in rows:
        longest.append(row if not longest or row[1] > longest[-1][1] else longest[-1])
    found = []
    for view in views:
        begin, end = extent(view)
        place = bisect.bisect_right(begins, begin) - 1
        is_within = place >= 0 and end <= longest[place][1]
        found.append(bases[longest[place][2]] if is_within else None)
    return found


def span(values: list[Any]) -> Any:
    """Return a tensor or an array of the memory that all of some views lie in."""
    if isinstance(values[0], Tensor):
        extents = [_extent(value) for value in values]
        low = min(begin for begin, _ in extents)
        high = max(end for _, end in extents)
        return values[0].detach().as_strided((high - low,), (1,), low)
    owner = owner_of_array(values[0])
    assert owner is not None  # they are views of it
    bounds = [np.lib.array_utils.byte_bounds(value) for value in values]
    first = min(low for low, _ in bounds) - address(owner)
    last = max(high for _, high in bounds) - address(owner)
    return owner.reshape(-1).view(np.uint8)[first:last]
