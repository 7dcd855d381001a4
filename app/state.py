"""The plain state of a user's objects: counters, lists, numbers, arrays; what of it has changed, and giving it back."""

import functools
import hashlib
import pickle
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor, nn

from app.graph import FEW, GENERATORS, attributes, closure, walk
from app.plain import NotPlain, decoded, encoded

SMALL = 1 << 16  # elements of what a dataset may change; a longer one is its data


class State:
    """The plain state of what is reached from `roots`, by (path of an object, attribute).

    Only what has changed since `mark` is of interest: what was there from the beginning is made by the program, and
    may rightly be another in a run that goes on, such as the name of a folder.
    """

    def __init__(self, roots: Callable[[], Mapping[str, Any]], skip: tuple = ()) -> None:
        self.roots, self.skip = roots, skip
        self.marked: dict[tuple[str, str], bytes] = {}
        self.touched: set[tuple[str, str]] = set()

    def mark(self) -> None:
        """Take all that is there now for what was there from the beginning."""
        self.marked = {key: digest(value) for key, value in self._values().items()}

    def touch(self) -> None:
        """Keep all that has changed since `mark`, from now on."""
        self.touched |= {key for key, value in self._values().items() if self.marked.get(key) != digest(value)}

    def changed(self) -> dict[tuple[str, str], Any]:
        """Return what has changed since `mark`, encoded, and the names of what else there is."""
        found = {}
        for key, value in self._values().items():
            if key in self.touched or self.marked.get(key) != digest(value):
                try:
                    found[key] = encoded(value)
                except NotPlain:
                    continue
        return found

    def objects(self) -> set[tuple[str, str]]:
        """Return the attributes that there are and that are no plain values."""
        plain = self._values().keys()
        owners = [(path, one) for path, one in walk(self.roots(), self.skip, code=False) if not _container(one)]
        return {(path, name) for path, one in owners for name in attributes(one)} - plain

    def restore(self, saved: Mapping[tuple[str, str], Any]) -> None:
        """Give back what was `changed`."""
        owners = dict(walk(self.roots(), self.skip, code=False))
        held = _owned(owners.values())
        for (path, name), value in saved.items():
            owner = owners.get(path)
            if owner is not None and not (
                isinstance(owner, nn.Module) and name in (*owner._parameters, *owner._buffers)
            ):
                _set(owner, name, decoded(value), held)
        self.touched |= saved.keys()

    def _values(self) -> dict[tuple[str, str], Any]:
        """Return all plain values, by where they are."""
        found = {}
        owners = list(walk(self.roots(), self.skip, code=False))
        owned = _owned(owner for _, owner in owners)
        for path, owner in owners:
            if _container(owner) or isinstance(owner, (*GENERATORS, *self.skip, types.MethodType, type)):
                continue
            small = isinstance(owner, (torch.utils.data.Dataset, LightningDataModule, types.FunctionType))
            for name, value in attributes(owner).items():
                if _is_plain(value) and not (small and _size(value) > SMALL) and not _of_modules(value, owned):
                    found[path, name] = value
        return found


def _owned(owners: Iterable[Any]) -> set[int]:
    """Return the ids of the parameters and buffers of all modules among objects."""
    modules = [one for one in owners if isinstance(one, nn.Module)]
    return {id(one) for module in modules for one in (*module._parameters.values(), *module._buffers.values())}


def _of_modules(value: Any, owned: set[int]) -> bool:
    """Return whether a value is nothing but parameters and buffers that modules have, as an LSTM's list of its own."""
    if isinstance(value, Tensor):
        return id(value) in owned
    return isinstance(value, (list, tuple)) and bool(value) and all(_of_modules(one, owned) for one in value)


def _container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, deque, functools.partial))


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a value can be encoded, by a look at its first elements."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.parameter.UninitializedTensorMixin)
    if isinstance(value, (str, bytes, int, float, complex, bool, type(None), np.generic, torch.dtype, torch.device)):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufcSUmM"
    if depth > 8:
        return False
    if isinstance(value, dict):
        return all(_is_plain(one, depth + 1) for _, one in zip(range(FEW), value.values(), strict=False))
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return all(_is_plain(one, depth + 1) for _, one in zip(range(FEW), value, strict=False))
    try:
        encoded(value)
    except NotPlain:
        return False
    return True


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    return len(value) if isinstance(value, (list, tuple, dict, deque, set, frozenset, str, bytes)) else 1


def digest(value: Any) -> bytes:
    """Return what tells a plain value from another one."""
    try:
        held = encoded(value)
    except NotPlain:
        return b""
    hashed = hashlib.blake2b(digest_size=8)
    _feed(held, hashed.update)
    return hashed.digest()


def _feed(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, Tensor):
        update(repr((value.dtype, value.shape)).encode())
        if value.is_sparse or value.is_quantized or value.layout != torch.strided:
            value = value.to_dense()
        update(value.contiguous().view(-1).view(torch.uint8).numpy() if value.numel() else b"")
    elif isinstance(value, dict):
        for key, one in value.items():
            update(repr(key).encode())
            _feed(one, update)
    elif isinstance(value, (list, tuple)) and any(isinstance(one, (Tensor, dict, list, tuple)) for one in value):
        update(f"{type(value).__name__}{len(value)}".encode())
        for one in value:
            _feed(one, update)
    else:
        update(pickle.dumps(value) if isinstance(value, list) and len(value) > FEW else repr(value).encode())


@torch.no_grad()
def _same(now: Any, value: Any, held: set[int]) -> Any:
    """Return the tensor that is there with what `value` holds, as others may hold it, too; else `value`.

    What is in `held` belongs to a module, or was given a value already: it stays as it is.
    """
    if not isinstance(now, Tensor) or not isinstance(value, Tensor) or not now.is_leaf:
        return value
    if (now.shape, now.dtype, now.layout) != (value.shape, value.dtype, value.layout):
        return value
    if id(now) in held:
        return now if digest(now) == digest(value) else value
    held.add(id(now))
    return now.copy_(value)


@torch.no_grad()
def _set(owner: Any, name: str, value: Any, held: set[int]) -> None:
    """Set an attribute: in place where it can be, as others may hold the same list, array or tensor."""
    now = (closure(owner) if isinstance(owner, types.FunctionType) else getattr(owner, "__dict__", {})).get(name)
    if type(now) is type(value):
        if isinstance(now, (list, deque)) and getattr(now, "maxlen", None) == getattr(value, "maxlen", None):
            if len(now) == len(value):
                value = [_same(*both, held) for both in zip(now, value, strict=True)]
            now.clear()
            now.extend(value)
            return
        if isinstance(now, (dict, set)):
            if isinstance(now, dict):
                value = {key: _same(now.get(key), one, held) for key, one in value.items()}
            now.clear()
            now.update(value)
            return
        if (
            isinstance(now, np.ndarray)
            and now.shape == value.shape
            and now.dtype == value.dtype
            and now.flags.writeable
        ):
            now[...] = value
            return
    if isinstance(now, Tensor) and isinstance(value, Tensor):
        if _same(now, value, held) is now:
            return
        value = value.to(now.device)
    if isinstance(owner, types.FunctionType):
        owner.__closure__[owner.__code__.co_freevars.index(name)].cell_contents = value
    elif hasattr(owner, "__dict__"):
        owner.__dict__[name] = value
    else:
        object.__setattr__(owner, name, value)
