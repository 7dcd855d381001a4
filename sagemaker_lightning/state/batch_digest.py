"""A short digest of a batch of any structure, without waiting for a GPU.

It takes a few microseconds. A tensor is taken as a row of words. Up to some thousands of them, at
equal distances, are each multiplied by an odd number of its own and added modulo 2**64. If one of
these words differs, the sum differs, too, and so it does if their order differs. The same bytes
have the same digest on a CPU and on a GPU. There, the sum stays until somebody needs it.
"""

import functools
import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sagemaker_lightning.compat.dtensors import local_part
from sagemaker_lightning.state.caches import kept
from sagemaker_lightning.state.object_graph import namespace

MAX_WORDS = 8192  # words of a tensor that are read, at most: 64 KiB
MAX_MEMBERS = 32  # elements of a list or dict that are read, at equal distances
MAX_LEAVES = 128  # digests of a batch, at most
MASK = 2**64 - 1
FLOAT, INTEGER = struct.Struct("<d"), struct.Struct("<q")
WEIGHTS = np.frombuffer(hashlib.shake_128(b"weights").digest(8 * MAX_WORDS), dtype="<i8") | 1
TYPES = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
QUICK_DTYPES = torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8
"""Types that numpy has, too. On a CPU, numpy starts several times as fast as torch."""

LeafDigest = int | Tensor
"""The digest of a leaf: a number, or one that is still on a GPU, as an int64 tensor of shape ()."""


def leaf_digests(value: Any) -> list[LeafDigest]:
    """Return the digests of a batch's leaves, for `combine`.

    Leaves are tensors, arrays, numbers and text in containers and plain objects. Any other
    object counts by the name of its class. Nothing waits for a GPU, and `value` may change
    afterwards.
    """
    digests: list[LeafDigest] = []
    try:
        _add_digests(value, digests, 0)
    except Exception:  # an unforeseen kind of object must not end a job
        return digests
    return digests


def combine(digests: Iterable[int]) -> int:
    """Return one digest of several, 1 <= digest < 2**64; their order counts."""
    total = 0xCBF29CE484222325
    for part in digests:
        total = ((total ^ (part & MASK)) * 0x100000001B3) & MASK
    return total or 1


def float_bits(value: float | Tensor) -> LeafDigest:
    """Return the bits of a number as a float64.

    The mean of a tensor with several elements counts. A tensor on a GPU gives a tensor on the GPU,
    int64 of shape ().
    """
    if isinstance(value, Tensor):
        if value.is_cuda:  # it stays on the GPU, as a copy
            value = value.detach().to(torch.float64, copy=True)
            return (value if value.dim() == 0 else value.mean()).view(torch.int64)
        value = value.detach().double().mean().item() if value.numel() > 1 else value.item()
    bits: int
    (bits,) = INTEGER.unpack(FLOAT.pack(value))
    return bits


def _add_digests(value: Any, digests: list[LeafDigest], depth: int) -> None:
    """Add the digests of a value and of what it contains to a list of digests."""
    if len(digests) >= MAX_LEAVES:
        return
    value_class = type(value)
    if isinstance(value, Tensor) and value.is_nested:  # a jagged one has another shape each time
        _add_digests(list(value.unbind()), digests, depth)
    elif isinstance(value, Tensor):
        digests += _tensor_digests(value)
    elif value_class in (int, bool):
        digests.append(int(value))
    elif value_class is float:
        digests.append(float_bits(value))
    elif value_class in (str, bytes):
        digests.append(zlib.crc32(value.encode(errors="replace") if value_class is str else value))
    elif isinstance(value, (np.ndarray, np.generic)):
        digests += _array_digests(np.asarray(value))
    else:
        digests.append(_text_digest(value_class.__qualname__))
        if value is not None and depth < 8:
            _add_members(value, digests, depth + 1)


def _add_members(value: Any, digests: list[LeafDigest], depth: int) -> None:
    """Add the digests of some members of a container or object, and their number."""
    names: Sequence[Any] = ()
    members: Sequence[Any]
    if isinstance(value, (list, tuple)):
        members = value
    elif isinstance(value, Mapping):
        names = list(value)
        members = list(value.values())
    else:
        attributes = {} if isinstance(value, type) else namespace(value)
        # What an object keeps of its own answers is there or not, whatever the data are.
        cached = _cached_names(type(value)) if attributes else ()
        names = [name for name in attributes if name not in cached and "cache" not in name]
        members = [attributes[name] for name in names]
    stride = max(1, -(-len(members) // MAX_MEMBERS))
    digests.append(len(members))
    digests += [_text_digest(str(name)) for name in names[::stride]]
    for member in members[::stride]:
        _add_digests(member, digests, depth)


def _tensor_digests(value: Tensor) -> tuple[LeafDigest, ...]:
    """Return the digests of a tensor: of type and shape, and of its words if any.

    This rank's part of a tensor that is shared out counts.
    """
    if (
        type(value) is Tensor
        and value.dtype in QUICK_DTYPES
        and value.is_cpu
        and value.is_contiguous()
        and value.numel()
    ):
        value = value.detach() if value.requires_grad else value
        array = np.frombuffer(value.numpy(), _word_type(value.nbytes))
        return _shape_digest(value.dtype, value.shape), _weighted_sum(array)
    value = local_part(value)
    shape_digest = _shape_digest(value.dtype, value.shape)
    words = _words(value)
    if words is None:
        return (shape_digest,)
    if words.is_cpu:
        return shape_digest, _weighted_sum(words.numpy())
    return shape_digest, (_sample(words) * _weights_on(words.device)[: len(words)]).sum()


def _words(value: Tensor) -> Tensor | None:
    """Return a tensor's bytes as words, as wide as possible.

    The result is a tensor of one dimension; None if the tensor has no bytes that can be read.
    """
    if value.layout != torch.strided or value.is_quantized or value.is_meta or not value.numel():
        return None
    value = value.detach()
    if type(value) is not Tensor:
        value = value.as_subclass(Tensor)
    if not value.is_contiguous():
        # The order in memory.
        strides = value.stride()
        axes = sorted(range(value.dim()), key=lambda axis: -strides[axis])
        value = value.permute(axes).contiguous()
    width, word_type = next(type_ for type_ in TYPES if value.nbytes % type_[0] == 0)
    if value.storage_offset() * value.itemsize % width:
        value = value.clone()
    return value.view(-1).view(word_type)


def _sample(words: Any) -> Any:
    """Return MAX_WORDS of the words at equal distances, or all if there are fewer."""
    if len(words) <= MAX_WORDS:
        return words
    return words[:: max(1, len(words) // MAX_WORDS)][:MAX_WORDS]


def _weighted_sum(words: np.ndarray) -> int:
    """Return the weighted sum of an array of words, as `_words` describes them."""
    sample = _sample(words)
    return int(np.dot(sample.astype(np.int64, copy=False), WEIGHTS[: len(sample)]))


def _array_digests(value: np.ndarray) -> tuple[int, ...]:
    """Return the digests of an array: of type and shape, and of its words if any."""
    shape_digest = _shape_digest(value.dtype, value.shape)
    if value.dtype.hasobject or not value.size:
        return (shape_digest,)
    return shape_digest, _weighted_sum(
        np.ascontiguousarray(value).ravel().view(_word_type(value.nbytes))
    )


def _word_type(size: int) -> type[np.integer]:
    """Return the widest type of words that a number of bytes can be taken as."""
    if not size % 8:
        return np.int64
    if not size % 4:
        return np.int32
    return np.uint8 if size % 2 else np.int16


@functools.lru_cache(maxsize=1024)
def _shape_digest(dtype: torch.dtype | np.dtype, shape: tuple[int, ...]) -> int:
    name = dtype.str if isinstance(dtype, np.dtype) else str(dtype)
    return zlib.crc32(repr((name, tuple(shape))).encode())


@functools.lru_cache(maxsize=1024)
def _text_digest(text: str) -> int:
    return zlib.crc32(text.encode(errors="replace"))


@kept
def _cached_names(class_: type) -> frozenset[str]:
    """Return the names of a class's properties that are calculated once."""
    return frozenset(
        name
        for base in class_.__mro__
        for name, member in vars(base).items()
        if isinstance(member, functools.cached_property)
    )


@functools.cache
def _weights_on(device: torch.device) -> Tensor:
    """Return the weights on a device, int64 of shape (MAX_WORDS,)."""
    return torch.from_numpy(WEIGHTS.copy()).to(device)
