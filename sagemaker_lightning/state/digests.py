"""Hashes of values, which are the same in each process."""

import hashlib
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sagemaker_lightning.compat.dtensors import local_part
from sagemaker_lightning.compat.torch_modules import is_unreadable
from sagemaker_lightning.state.graph import scalars, values
from sagemaker_lightning.state.graph.atoms import SCALARS
from sagemaker_lightning.state.graph.kinds.base import NotSaved

COMPARED_IN_FULL = 1 << 16
"""Elements, at most, of a value that is compared in full."""


def is_small(value: Any) -> bool:
    """Return whether a value has so few elements that all of them can be read at any time."""
    return _size(value) <= COMPARED_IN_FULL


def _size(value: Any) -> int:
    """Return the number of elements of a value; 1 if it is not a container."""
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
    """Return bytes that identify a value, 8 of them; empty if it cannot be saved.

    They are the same in each process, and read all of it.
    """
    try:
        if _is_plain(value):
            return hashlib.blake2b(scalars.text(value).encode(), digest_size=8).digest()
        if type(value) is Tensor:
            return _of_tensor(value)
        return bytes.fromhex(values.digest(values.encode(value), _of_tensor))
    except (NotSaved, NotImplementedError, RuntimeError):  # such as a tensor without values
        return b""


def _is_plain(value: Any) -> bool:
    """Return whether a value's text says all of it: as defaults of functions mostly do."""
    if type(value) is dict:
        return all(type(each) in SCALARS for pair in value.items() for each in pair)
    if type(value) in (tuple, list):
        return all(type(each) in SCALARS for each in value)
    return type(value) in SCALARS


def _of_tensor(tensor: Tensor) -> bytes:
    """Return a hash of a tensor's dtype, shape and values."""
    tensor = local_part(tensor)
    if is_unreadable(tensor):
        return b""
    hash_ = hashlib.blake2b(repr((tensor.dtype, tensor.shape)).encode(), digest_size=8)
    dense = tensor.detach().cpu().to_dense().resolve_conj().resolve_neg()
    if dense.numel():
        hash_.update(dense.contiguous().view(-1).view(torch.uint8).numpy().data)
    return hash_.digest()
