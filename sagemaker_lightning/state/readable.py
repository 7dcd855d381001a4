"""A form of Lightning's entries in a checkpoint that any other program can read.

It has numbers, text, tensors, lists, tuples and dicts, which torch.load(weights_only=True) reads
without any class of the user's. What is of another class is there by its plain content, or by the
name of its class. A run does not resume from that: the checkpoint has such values beside, as they
are (graph/values.py), and `with_values` puts them back.
"""

import enum
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sagemaker_lightning.compat.torch_modules import is_lazy, keep_metadata
from sagemaker_lightning.state.graph.atoms import SCALARS
from sagemaker_lightning.state.graph.kinds.base import class_name
from sagemaker_lightning.state.graph.kinds.memory import is_own_tensor

PLAIN = SCALARS | {torch.dtype, torch.device, torch.Size}
"""Classes whose values a checkpoint has as they are."""
TEXTS = PurePath, Decimal, Fraction
LISTS = deque, set, frozenset, array
MAX_DEPTH = 100
"""How often a plain value is within another one, at most; torch's reader knows no limit."""
MAX_TWICE = 1 << 10
"""Elements, at most, of what a checkpoint has in both forms."""

Place = tuple[Any, ...]
"""The keys and numbers by which containers lead to a value."""
Copies = dict[int, tuple[Tensor, Tensor]] | None
"""Tensors with their copies so far, by the tensors' ids; None if tensors are not copied."""


class _HoldsItself(Exception):
    """Raised with the id of an object that is part of itself."""


class _Other(Exception):
    """Raised for a value that is not plain."""


def readable(value: Any, others: dict[Place, Any] | None = None, copies: bool = True) -> Any:
    """Return a copy of a value in plain values.

    Args:
        value: The value.
        others: Gets what is not plain, by its path, to be saved, too. The copy has
            no more of a large one than the name of its class.
        copies: Whether tensors are copied to the CPU. If not, they are left as they are.
            A tensor of several places has one copy.
    """
    return _readable(value, (), others, {} if copies else None, frozenset())


def _readable(
    value: Any, path: Place, others: dict[Place, Any] | None, copied: Copies, within: frozenset[int]
) -> Any:
    if type(value) in PLAIN:
        return value
    if id(value) in within:
        raise _HoldsItself(id(value))
    found: dict[Place, Any] | None = None if others is None else {}
    try:
        plain = _plain(value, path, found, copied, within | {id(value)})
        if others is not None and found:
            others |= found
        return plain
    except _Other:
        pass
    except _HoldsItself as error:
        if error.args != (id(value),):
            raise
    if others is not None:
        others[path] = value
    try:
        if others is not None and _is_large(value):
            raise _Other
        return _readable(_content(value), path, None, copied, within | {id(value)})
    except Exception:  # an object of any class may raise anything when it is looked at
        return f"({class_name(type(value))})"


def _plain(
    value: Any, path: Place, others: dict[Place, Any] | None, copied: Copies, within: frozenset[int]
) -> Any:
    """Return a copy of a value that is plain itself; _Other for another one."""
    class_ = type(value)
    if class_ is bytearray:
        return bytearray(value)
    if isinstance(value, Tensor) and not is_own_tensor(class_):
        if copied is None:
            return value
        if id(value) not in copied:
            copied[id(value)] = value, _on_cpu(value)
        return copied[id(value)][1]
    if class_ is list and SCALARS.issuperset(map(type, value)):  # fast for long lists
        return value.copy()
    if len(path) > MAX_DEPTH:
        raise _Other
    if class_ in (list, tuple):
        return class_(
            _readable(element, (*path, index), others, copied, within)
            for index, element in enumerate(value)
        )
    if isinstance(value, Mapping) and class_ not in (defaultdict, Counter):
        copy: dict[Any, Any] = OrderedDict() if class_ is OrderedDict else {}
        for key, element in value.items():
            copy[_plain_key(key)] = _readable(element, (*path, key), others, copied, within)
        keep_metadata(copy, value)
        return copy
    raise _Other


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU; an empty one for a lazy tensor, which has no values."""
    if is_lazy(tensor):
        return torch.empty(0, dtype=tensor.dtype)
    if tensor.is_nested:
        raise _Other
    try:
        return tensor.detach().to("cpu", copy=True)
    except NotImplementedError:  # such as on "meta"
        raise _Other from None


def _plain_key(key: Any) -> Any:
    """Return the key of a dict as a plain value; _Other if it has none, such as an Enum's member.

    A number or a text of numpy's is as good a key as Python's.
    """
    if type(key) in SCALARS:
        return key
    if isinstance(key, np.generic) and type(key.item()) in SCALARS and key.dtype.kind in "biufcSU":
        return key.item()
    if type(key) is tuple:
        return tuple(map(_plain_key, key))
    raise _Other


def _is_large(value: Any) -> bool:
    """Return whether an array or a container is too large to be in a checkpoint twice."""
    if isinstance(value, np.ndarray):
        return value.size > MAX_TWICE
    return isinstance(value, (Mapping, *LISTS)) and len(value) > MAX_TWICE


def _content(value: Any) -> Any:
    """Return what an object holds, as far as others can read it; _Other if that is nothing."""
    class_ = type(value)
    if isinstance(value, np.generic):
        item = value.item()
        return item if type(item) in SCALARS else str(value)
    if class_ is np.ndarray:
        is_number = value.dtype.kind in "biufc" and value.dtype.isnative
        return torch.from_numpy(value.copy()) if is_number else value.tolist()
    if isinstance(value, Mapping):
        return {str(key): element for key, element in value.items()}
    if isinstance(value, TEXTS):
        return str(value)
    if isinstance(value, LISTS):
        return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value, enum.Flag) else value.name
    if isinstance(value, Tensor) and is_own_tensor(class_):
        return value.as_subclass(Tensor)
    if isinstance(value, tuple) and hasattr(class_, "_fields"):
        return list(value)
    if is_dataclass(class_):
        return dict(vars(value))
    raise _Other


def with_values(value: Any, others: Mapping[Place, Any]) -> Any:
    """Return what `readable` was given; parts that hold none of the others are not copied.

    Args:
        value: What `readable` returned.
        others: The values that are not plain, by path.
    """
    holders = {path[:length] for path in others for length in range(len(path))}
    return _with_values(value, others, holders, ())


def _with_values(
    value: Any, others: Mapping[Place, Any], holders: Collection[Place], path: Place
) -> Any:
    if path in others:
        return others[path]
    if path not in holders:
        return value
    class_ = type(value)
    if class_ in (dict, OrderedDict):
        return class_(
            (key, _with_values(element, others, holders, (*path, key)))
            for key, element in value.items()
        )
    if class_ in (list, tuple):
        return class_(
            _with_values(element, others, holders, (*path, index))
            for index, element in enumerate(value)
        )
    return value
