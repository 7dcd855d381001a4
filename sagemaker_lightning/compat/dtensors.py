"""Tensors of which each rank has a part: torch's DTensors.

On an upgrade: see `DTensor.__create_chunk_list__` in torch/distributed/tensor/_api.py, which the
distributed checkpoints of torch use.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import tensor as dtensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from sagemaker_lightning.compat.torch_modules import keep_metadata

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a tensor begins, and its shape."""


SHARDED = re.compile(r"S\((\d{1,9})(?:,(\d{1,9}))?\)")


def word_of(placement: Placement) -> str:
    """Return how a tensor is shared out over a dimension of a mesh; "" if no word says it."""
    if placement.is_replicate():
        return "R"
    if type(placement) is Shard:
        return f"S({placement.dim})"
    # What is sharded over two dimensions of a mesh is so over one of them by turns.
    if type(placement) is _StridedShard:
        return f"S({placement.dim},{placement.split_factor})"
    return ""


def placement_of(word: str) -> Placement:
    """Return what `word_of` has a word for; a whole tensor for any other word."""
    match = SHARDED.fullmatch(word)
    if match is None:
        return Replicate()
    dimension, factor = match.groups()
    if factor:
        return _StridedShard(int(dimension), split_factor=int(factor))
    return Shard(int(dimension))


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: all of it, or its part, which shares its memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # four times as fast as detach()
        return tensor.to_local()


def has_partial_sums(tensor: Tensor) -> bool:
    """Return whether each rank has a part of the sums that a tensor's values are.

    So are gradients of weights that tensor parallelism applies to other positions on each rank.
    """
    return isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor.placements)


def reduced(tensor: Tensor) -> Tensor:
    """Return a tensor with its partial sums added over the ranks; any other tensor as it is.

    All ranks of its mesh have to call it.
    """
    if not isinstance(tensor, DTensor) or not has_partial_sums(tensor):
        return tensor
    placements = [Replicate() if each.is_partial() else each for each in tensor.placements]
    with torch.no_grad():
        return tensor.redistribute(placements=placements)


def mapped(
    value: Any, change: Callable[[tuple[Any, ...], DTensor], Any], path: tuple[Any, ...] = ()
) -> Any:
    """Return dicts, lists and tuples within each other with changed DTensors.

    Args:
        value: They are copied; other values are not.
        change: Returns what takes the place of a tensor, given the keys that lead to it.
        path: The keys that lead to the value.
    """
    class_ = type(value)
    if class_ in (dict, OrderedDict):
        changed = class_((key, mapped(each, change, (*path, key))) for key, each in value.items())
        keep_metadata(changed, value)
        return changed
    if class_ in (list, tuple):
        return class_(mapped(each, change, (*path, index)) for index, each in enumerate(value))
    return change(path, value) if isinstance(value, DTensor) else value


def chunk_of(tensor: DTensor) -> Chunk:
    """Return which part of a tensor this rank has."""
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def empty(
    shape: Sequence[int], dtype: torch.dtype, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """Return a tensor without values; each rank makes its part."""
    return dtensors.empty(tuple(shape), dtype=dtype, device_mesh=mesh, placements=placements)


@torch.no_grad()
def placed_like(value: Any, like: Any) -> Any:
    """Return a whole tensor shared out as another one; any other value as it is.

    Each rank takes its part by itself, of a tensor that all have.
    """
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not is_whole or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    placed = empty(value.shape, value.dtype, like.device_mesh, like.placements)
    offsets, sizes = chunk_of(placed)
    local_part(placed).copy_(value[within(offsets, sizes)])
    return placed


def within(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a part."""
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def whole(value: Any, keeps: bool) -> Any:
    """Return dicts and lists within each other with whole tensors, on the CPU; all ranks call it.

    Only one tensor at a time is whole on a device.

    Args:
        value: What has tensors of which each rank has a part.
        keeps: Whether this rank gets them; if not, it gets None in their place.
    """

    def gathered(path: tuple[Any, ...], tensor: DTensor) -> Tensor | None:
        full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor, too
        return full.to("cpu", copy=True) if keeps else None

    return mapped(value, gathered)
