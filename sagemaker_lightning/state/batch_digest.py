"""A short digest of a batch, whatever its structure: a few microseconds, and nobody waits for a GPU.

A tensor is taken as a row of words. The sum of some thousands of them, at equal distances, each times an odd number of
its own, modulo 2**64, tells it from another one: one word that differs always shows, and so does another order. The
same bytes have the same digest on a CPU and on a GPU, where the sum stays until somebody needs it.
"""

import contextlib
import functools
import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORDS = 8192  # of a tensor that are looked at: 64 KiB at most
FEW = 32  # elements of a list or dict that are looked at, at equal distances
PARTS = 128  # of a batch, at most
MASK = 2**64 - 1
WEIGHTS = np.frombuffer(hashlib.shake_128(b"weights").digest(8 * WORDS), dtype="<i8") | 1
TYPES = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
QUICK = torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8
"""What numpy has, too: on a CPU, it is several times as quick to begin as torch."""

Part = int | Tensor
"""What is known of a leaf: a number, or one that is still on a GPU, int64 without a dimension."""


def parts(value: Any) -> list[Part]:
    """Return what `folded` makes a digest of: tensors, arrays, numbers and text in containers and plain objects.

    Of anything else the name of its class counts. Nothing is waited for, and `value` may change afterwards.
    """
    found: list[Part] = []
    with contextlib.suppress(Exception):  # of an object that nobody has thought of: no job is to fail for that
        _add(value, found, 0)
    return found


def folded(found: Iterable[int]) -> int:
    """Return the digest of parts, below 2**64 and never 0; their order counts."""
    total = 0xCBF29CE484222325
    for part in found:
        total = ((total ^ (part & MASK)) * 0x100000001B3) & MASK
    return total or 1


def bits(value: float | Tensor) -> Part:
    """Return the bits of a number, as those of a float64; of a tensor with several elements, of their mean."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.is_cuda:  # it stays there, as a copy
            value = value.to(torch.float64, copy=True)
            return (value if value.dim() == 0 else value.mean()).view(torch.int64)
        value = value.double().mean().item() if value.numel() > 1 else value.item()
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _add(value: Any, found: list[Part], depth: int) -> None:
    if len(found) >= PARTS:
        return
    kind = type(value)
    if isinstance(value, Tensor):
        found += _of_tensor(value)
    elif kind in (int, bool):
        found.append(int(value))
    elif kind is float:
        found.append(bits(value))
    elif kind in (str, bytes):
        found.append(zlib.crc32(value.encode(errors="replace") if kind is str else value))
    elif isinstance(value, (np.ndarray, np.generic)):
        found += _of_array(np.asarray(value))
    else:
        found.append(_of_text(kind.__qualname__))
        if value is not None and depth < 8:
            _add_members(value, found, depth + 1)


def _add_members(value: Any, found: list[Part], depth: int) -> None:
    if isinstance(value, (list, tuple)):
        names, members = (), value
    elif isinstance(value, Mapping):
        names, members = list(value), list(value.values())
    else:
        held = {} if isinstance(value, type) else getattr(value, "__dict__", {})
        names, members = list(held), list(held.values())
    every = max(1, -(-len(members) // FEW))
    found.append(len(members))
    found += [_of_text(str(name)) for name in names[::every]]
    for one in members[::every]:
        _add(one, found, depth)


def _of_tensor(value: Tensor) -> tuple[Part, ...]:
    about = _of_shape(str(value.dtype), tuple(value.shape))
    if type(value) is Tensor and value.dtype in QUICK and value.is_cpu and value.is_contiguous() and value.numel():
        return about, _sum(_words_of(value.detach().numpy()))
    words = _words(value)
    if words is None:
        return (about,)
    if words.is_cpu:
        return about, _sum(words.numpy())
    return about, (_some(words) * _weights(words.device)[: len(words)]).sum()


def _words(value: Tensor) -> Tensor | None:
    """Return a tensor's bytes as words, as wide as they can be; None if there are none that can be looked at."""
    if value.layout != torch.strided or value.is_quantized or value.is_meta or not value.numel():
        return None
    value = value.detach()
    if type(value) is not Tensor:
        value = value.as_subclass(Tensor)
    if not value.is_contiguous():
        order = sorted(range(value.dim()), key=lambda axis: -value.stride(axis))  # as it lies in memory
        value = value.permute(order).contiguous()
    width, kind = next(one for one in TYPES if value.nbytes % one[0] == 0)
    if value.storage_offset() * value.itemsize % width:
        value = value.clone()
    return value.view(-1).view(kind)


def _some(words: Any) -> Any:
    """Return WORDS of the words, or all if there are fewer."""
    return words[:: len(words) // WORDS][:WORDS] if len(words) > WORDS else words


def _sum(words: np.ndarray) -> int:
    some = _some(words)
    return int(np.dot(some.astype(np.int64, copy=False), WEIGHTS[: len(some)]))


def _of_array(value: np.ndarray) -> tuple[int, ...]:
    about = _of_shape(value.dtype.str, value.shape)
    if value.dtype.hasobject or not value.size:
        return (about,)
    return about, _sum(_words_of(np.ascontiguousarray(value)))


def _words_of(value: np.ndarray) -> np.ndarray:
    size = value.nbytes
    kind = np.int64 if not size % 8 else np.int32 if not size % 4 else np.int16 if not size % 2 else np.uint8
    return value.reshape(-1).view(kind)


@functools.lru_cache(maxsize=1024)
def _of_shape(kind: str, shape: tuple) -> int:
    return zlib.crc32(repr((kind, shape)).encode())


@functools.lru_cache(maxsize=1024)
def _of_text(text: str) -> int:
    return zlib.crc32(text.encode(errors="replace"))


@functools.cache
def _weights(device: torch.device) -> Tensor:
    return torch.from_numpy(WEIGHTS.copy()).to(device)
