"""Hashes of plain values, which are the same in each process."""

import hashlib
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sagemaker_lightning.compat.dtensors import local_part
from sagemaker_lightning.state.encoding import NotPlain, encode
from sagemaker_lightning.state.object_graph import MAX_ELEMENTS

COMPARED_IN_FULL = 1 << 16
"""Elements, at most, of a value that is compared in full."""


def is_small(value: Any) -> bool:
    """Return whether a value has so few elements that all of them can be read at any time."""
    return _size(value) <= COMPARED_IN_FULL


def _size(value: Any) -> int:
    """Return the number of elements of a value; 1 if it is no container."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    return (
        len(value)
        if isinstance(value, (list, tuple, dict, deque, set, frozenset, str, bytes))
        else 1
    )


def digest(value: Any) -> bytes:
    """Return bytes that identify a plain value; empty if it is not plain."""
    try:
        return _full_hash(encode(value))
    except NotPlain:
        return b""


def _full_hash(encoded_value: Any) -> bytes:
    """Return a hash of an encoded value, 8 bytes."""
    hash_ = hashlib.blake2b(digest_size=8)
    _update_hash(encoded_value, hash_.update)
    return hash_.digest()


def _update_hash(value: Any, update: Callable[[bytes], None]) -> None:
    """Pass an encoded value to a hash's `update`."""
    if isinstance(value, Tensor):
        value = local_part(value)
        update(repr((value.dtype, value.shape)).encode())
        value = value.to_dense()
        update(value.contiguous().view(-1).view(torch.uint8).numpy() if value.numel() else b"")
    elif isinstance(value, dict):
        for key, element in value.items():
            update(repr(key).encode())
            _update_hash(element, update)
    elif isinstance(value, (list, tuple)) and any(
        isinstance(element, (Tensor, dict, list, tuple)) for element in value
    ):
        update(f"{type(value).__name__}{len(value)}".encode())
        for element in value:
            _update_hash(element, update)
    else:
        # Pickle is faster for numbers. What it makes of text depends on which are one object.
        is_pickled = (
            isinstance(value, list)
            and len(value) > MAX_ELEMENTS
            and {int, float, bool}.issuperset(map(type, value))
        )
        update(pickle.dumps(value) if is_pickled else repr(value).encode())
