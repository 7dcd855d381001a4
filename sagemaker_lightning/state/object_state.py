"""The plain state of a user's objects: counters, lists, numbers, arrays; what of it has changed, and giving it back."""

import contextlib
import copy
import functools
import hashlib
import pickle
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from pytorch_lightning.core.mixins import HyperparametersMixin
from torch import Tensor, nn

from sagemaker_lightning.compat.torch_modules import buffers, parameters
from sagemaker_lightning.state.encoding import NotPlain, decoded, encoded
from sagemaker_lightning.state.object_graph import FEW, GENERATORS, attributes, closure, walk

HYPER = "_hparams"  # which Lightning saves, and does not give back to who has changed them while it trained
SMALL = 1 << 16  # elements of what is compared in whole; of a longer one, which is mostly data, some
LONG = 1 << 20  # elements of what is kept from an epoch's beginning
HUGE = 1 << 26  # elements of what is saved
WHOLE = 1 << 28  # bytes of an array that is read from its beginning to its end


class State:
    """The plain state of what is reached from `roots`, by (path of an object, attribute).

    Only what has changed since `mark` is of interest: what was there from the beginning is made by the program, and
    may rightly be another in a run that goes on, such as the name of a folder.
    """

    def __init__(self, roots: Callable[[], Mapping[str, Any]], skip: tuple = ()) -> None:
        self.roots, self.skip = roots, skip
        self.marked: dict[tuple[str, str], bytes] = {}
        self.touched: set[tuple[str, str]] = set()
        self.unsaved: dict[tuple[str, str], str] = {}
        """What has changed and cannot be saved, and why; of a container, as what others hold is made anew by them."""

    def mark(self) -> None:
        """Take all that is there now for what was there from the beginning."""
        self.marked = {key: _look(value) for key, value in self._values().items()}

    def touch(self) -> None:
        """Keep all that has changed since `mark`, from now on."""
        self.touched |= {key for key, value in self._values().items() if self.marked.get(key) != _look(value)}

    def kept(self) -> dict[tuple[str, str], Any]:
        """Return all plain values as they are now, for `changed`; of what is very long, no copies of its elements."""
        return {key: _kept(value) for key, value in self._values().items() if _size(value) <= LONG}

    def all(self, kept: Mapping[tuple[str, str], Any] | None = None) -> dict[tuple[str, str], Any]:
        """Return all plain values, encoded: those that were `kept`, or are there now."""
        found = {}
        for key, value in (self._values() if kept is None else kept).items():
            with contextlib.suppress(NotPlain):
                found[key] = encoded(value)
        return found

    def changed(self, kept: Mapping[tuple[str, str], Any] | None = None) -> dict[tuple[str, str], Any]:
        """Return what has changed since `mark`, encoded; of what was `kept`, or now."""
        found = {}
        for key, value in (self._values() if kept is None else kept).items():
            try:
                large = _size(value) > SMALL
                held = None if large else encoded(value)
                if key in self.touched or self.marked.get(key) != (_glance(value) if large else _hashed(held)):
                    if _size(value) > HUGE:
                        self.unsaved[key] = f"holds {_size(value):,} elements"
                    else:
                        found[key] = encoded(value) if large else held
            except NotPlain as error:
                if isinstance(value, CONTAINERS):
                    self.unsaved[key] = f"holds a {error.kind}"
        return found

    def objects(self) -> set[tuple[str, str]]:
        """Return the attributes that there are and that are no plain values."""
        plain = self._values().keys()
        owners = [(path, one) for path, one in walk(self.roots(), self.skip, code=False) if not _container(one)]
        return {(path, name) for path, one in owners for name in attributes(one)} - plain

    def boxes(self) -> dict[tuple[str, str], tuple]:
        """Return the lists and the like that hold what is not plain, by what tells whether they change."""
        plain, found = self._values().keys(), {}
        for path, owner in walk(self.roots(), self.skip, code=False):
            for name, value in {} if _container(owner) else attributes(owner).items():
                if isinstance(value, CONTAINERS) and (path, name) not in plain:
                    held = value.values() if isinstance(value, dict) else value
                    found[path, name] = value, len(value), hash(tuple(map(id, held)))
        return found

    def restore(self, saved: Mapping[tuple[str, str], Any], touch: bool = True) -> None:
        """Give back what was `changed`; with `touch`, it has changed from now on, whatever is there at a `mark`."""
        owners = dict(walk(self.roots(), self.skip, code=False))
        held = _owned(owners.values())
        for (path, name), value in saved.items():
            owner = owners.get(path)
            if owner is not None and not (
                isinstance(owner, nn.Module) and (name in parameters(owner) or name in buffers(owner))
            ):
                _set(owner, name, decoded(value), held)
        if touch:
            self.touched |= saved.keys()

    def _values(self) -> dict[tuple[str, str], Any]:
        """Return all plain values, by where they are."""
        found = {}
        owners = list(walk(self.roots(), self.skip, code=False))
        owned = _owned(owner for _, owner in owners)
        for path, owner in owners:
            if _container(owner) or isinstance(owner, (*GENERATORS, *self.skip, types.MethodType, type)):
                continue
            for name, value in (attributes(owner) | _hyperparameters(owner)).items():
                if _is_plain(value) and not _of_modules(value, owned):
                    found[path, name] = value
        return found


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if _size(value) > FEW and not isinstance(value, np.ndarray):
        return copy.copy(value)
    with contextlib.suppress(NotPlain):
        return decoded(encoded(value))
    return value


CONTAINERS = (list, tuple, dict, deque, set)


def _owned(owners: Iterable[Any]) -> set[int]:
    """Return the ids of the parameters and buffers of all modules among objects."""
    modules = [one for one in owners if isinstance(one, nn.Module)]
    return {id(one) for module in modules for one in (*parameters(module).values(), *buffers(module).values())}


def _of_modules(value: Any, owned: set[int]) -> bool:
    """Return whether a value is nothing but parameters and buffers that modules have, as an LSTM's list of its own."""
    if isinstance(value, Tensor):
        return id(value) in owned
    return isinstance(value, (list, tuple)) and bool(value) and all(_of_modules(one, owned) for one in value)


def _hyperparameters(owner: Any) -> dict[str, Any]:
    """Return those hyperparameters of a module or data module that are plain, as its one attribute."""
    held = getattr(owner, "__dict__", {}).get(HYPER) if isinstance(owner, HyperparametersMixin) else None
    return {} if held is None else {HYPER: {key: one for key, one in held.items() if _is_plain(one)}}


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
        return _hashed(encoded(value))
    except NotPlain:
        return b""


def _look(value: Any) -> bytes:
    """Return what tells a plain value from what it becomes, in this process."""
    try:
        return _glance(value) if _size(value) > SMALL else digest(value)
    except NotPlain:
        return b""


def _glance(value: Any) -> bytes:
    """Return what tells a large value from what it becomes: its length, some of its elements, and of a list which
    objects they are, of an array the checksum of all, a second for two gigabytes."""
    step = 1 + _size(value) // FEW
    more: Any = 0
    if isinstance(value, (Tensor, np.ndarray)):
        flat = value.detach() if isinstance(value, Tensor) else value
        if isinstance(flat, Tensor) and flat.layout == torch.strided and not flat.is_quantized and flat.is_contiguous():
            some, whole = flat.view(-1)[::step].cpu(), flat.view(-1).view(torch.uint8)
            if not flat.is_cuda and len(whole) <= WHOLE:
                more = zlib.crc32(whole.numpy())
        elif type(flat) is np.ndarray and flat.flags.c_contiguous:
            some = flat.reshape(-1)[::step].copy()
            more = zlib.crc32(flat.reshape(-1).view(np.uint8)) if flat.nbytes <= WHOLE else 0
        else:
            return _hashed(encoded(value))
        return _hashed(encoded([some, list(value.shape), more]))
    if isinstance(value, (str, bytes)):
        return _hashed(value)
    items = list(value.items() if isinstance(value, dict) else value)
    which = hash(tuple(map(id, value.values() if isinstance(value, dict) else items)))
    return _hashed(encoded([items[::step], len(items), which]))


def _hashed(held: Any) -> bytes:
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

    What was on a GPU is not put into a tensor that is not there yet. What is in `held` belongs to a module, or was
    given a value already: it stays as it is.
    """
    if not isinstance(now, Tensor) or not isinstance(value, Tensor) or not now.is_leaf:
        return value
    if (now.shape, now.dtype, now.layout) != (value.shape, value.dtype, value.layout):
        return value
    if value.device not in (now.device, torch.device("cpu")):
        return value
    if id(now) in held:
        return now if digest(now) == digest(value) else value
    held.add(id(now))
    return now.copy_(value)


@torch.no_grad()
def _set(owner: Any, name: str, value: Any, held: set[int]) -> None:
    """Set an attribute: in place where it can be, as others may hold the same list, array or tensor."""
    now = (closure(owner) if isinstance(owner, types.FunctionType) else getattr(owner, "__dict__", {})).get(name)
    if name == HYPER and isinstance(now, dict):
        now.update(value)
        return
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
        value = value.to(now.device) if value.is_cpu else value
    if isinstance(owner, types.FunctionType):
        owner.__closure__[owner.__code__.co_freevars.index(name)].cell_contents = value
    elif hasattr(owner, "__dict__"):
        owner.__dict__[name] = value
    else:
        object.__setattr__(owner, name, value)
