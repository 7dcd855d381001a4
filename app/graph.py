"""What a user's objects hold: generators of random numbers, and plain state. One walk over attributes and containers.

Nobody tells us of them: a dataset keeps `np.random.default_rng(0)`, a sampler counts its epochs, a callback collects
numbers in a list. The walk goes through attributes, lists, dicts, partial functions, closures and what a function
reads of its module; not into tensors, modules of Python, and the insides of libraries.
"""

import functools
import hashlib
import pickle
import random
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from app.plain import NotPlain, decoded, encoded

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
LIMIT = 20_000  # objects that one walk looks at
FEW = 256  # elements of a container that are looked at: a longer one holds samples
SMALL = 1 << 16  # elements of what a dataset may change; a longer one is its data
LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, types.ModuleType, Tensor,
          np.ndarray, np.generic, np.dtype, torch.dtype, torch.device, torch.Size)  # fmt: skip
# Of these, classes say nothing that a user wrote, and functions read nothing that a user may change.
LIBRARIES = {"torch", "torchvision", "torchaudio", "torchdata", "torchmetrics", "numpy", "pandas", "pyarrow", "PIL",
             "pytorch_lightning", "lightning", "lightning_fabric", "lightning_utilities", "litdata", "datasets", "app",
             "transformers", "scipy", "sklearn", "h5py", "lmdb", "jsonargparse", "tensorboard", "fsspec", "cv2", "zmq",
             "builtins", *sys.stdlib_module_names}  # fmt: skip
ENTERED = (nn.Module, Callback, LightningDataModule, torch.utils.data.Dataset, torch.utils.data.Sampler,
           torch.utils.data.DataLoader)  # fmt: skip
BASES = (nn.Module, LightningModule, LightningDataModule, Callback, Metric, torch.utils.data.Dataset)


def library(kind: type) -> bool:
    """Return whether a class is a library's."""
    return (kind.__module__ or "").partition(".")[0] in LIBRARIES


def walk(roots: Mapping[str, Any], skip: tuple = (), code: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield each object that is reached from `roots`, by name, and the path to it; each once.

    Without `code`, what functions and classes hold is left out. Objects of the classes `skip` are not entered.
    """
    seen: set[int] = set()
    left, stack = LIMIT, [(path, root) for path, root in reversed(list(roots.items()))]
    while stack and left:
        path, value = stack.pop()
        if isinstance(value, LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        left -= 1
        yield path, value
        if not isinstance(value, (*GENERATORS, *skip)):
            stack += [(f"{path}.{name}", one) for name, one in reversed(list(_members(value, code)))]


def _members(value: Any, code: bool) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if isinstance(value, dict):
        for number, (key, one) in enumerate(value.items()):
            if number == FEW:
                return
            yield str(key), one
    elif isinstance(value, (list, tuple, deque)):
        for number, one in enumerate(value):
            if number == FEW:
                return
            yield str(number), one
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "func", value.__func__
    elif isinstance(value, types.FunctionType):
        if code:
            yield from _of_function(value)
    elif isinstance(value, type):
        if code and not library(value):
            yield from ((name, one) for name, one in vars(value).items() if not name.startswith("__") or callable(one))
    elif not library(kind) or isinstance(value, ENTERED) or kind.__module__.startswith(("torchvision", "torch.utils")):
        yield from attributes(value).items()
        if isinstance(value, nn.Module):
            yield from value._modules.items()
        if code:
            for one in kind.__mro__:
                if not library(one):
                    yield f"({one.__name__})", one


def attributes(value: Any) -> dict[str, Any]:
    """Return what an object of a user's holds, without what is a library's own."""
    own = _own(type(value))
    if isinstance(value, Metric):
        own = own | value._defaults.keys()  # its states
    held = {name: one for name, one in getattr(value, "__dict__", {}).items() if name not in own}
    for kind in type(value).__mro__:
        for name in () if isinstance(slots := vars(kind).get("__slots__", ()), str) else slots:
            if name not in own and name not in ("__dict__", "__weakref__") and hasattr(value, name):
                held[name] = getattr(value, name)
    return held


@functools.cache
def _own(kind: type) -> frozenset[str]:
    """Return the names of attributes that the base classes' own code deals with."""
    names: set[str] = {"trainer", "_trainer", "_iterator"}
    for base in kind.__mro__:
        whole = base in BASES or (issubclass(base, Callback) and library(base))
        if whole or (base.__module__ or "").startswith(("pytorch_lightning.", "lightning.")):
            for one in vars(base).values():
                function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
                if isinstance(function, types.FunctionType):
                    names |= set(function.__code__.co_names)
            names |= set(vars(base)) | set(getattr(base, "__annotations__", ()))
    return frozenset(names)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function has closed over, its defaults, and what it reads of its module."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield "defaults", function.__defaults__ or ()
    yield "kwdefaults", function.__kwdefaults__ or {}
    if (function.__module__ or "").partition(".")[0] not in LIBRARIES:
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                one = function.__globals__[name]
                if not isinstance(one, type) or not library(one):
                    yield name, one


def _names(code: types.CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


# Generators of random numbers -----------------------------------------------------------------------------------------


def generators(roots: Mapping[str, Any], skip: tuple = ()) -> dict[str, Any]:
    """Return the generators that are reached from `roots`, by their paths."""
    return {path: one for path, one in walk(roots, skip) if isinstance(one, GENERATORS) and not _global(one)}


def _global(generator: Any) -> bool:
    """Return whether it is one of those that belong to the process, which `seed_all` deals with."""
    return generator in (torch.default_generator, random._inst) or generator is np.random.mtrand._rand


def reseed(found: Mapping[str, Any], number: int) -> None:
    """Seed generators: each with another seed, which `number` and its path decide."""
    for path, generator in found.items():
        seed = number ^ zlib.crc32(path.encode())
        if isinstance(generator, random.Random):
            generator.seed(seed)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(seed & 0xFFFFFFFF)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        else:
            generator.bit_generator.state = type(generator.bit_generator)(seed).state


def state_of(generator: Any) -> Any:
    """Return the state of a generator as `encoded` can hold it."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.bit_generator.state


def restore(generator: Any, state: Any) -> None:
    """Give a generator its state back."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (np.random.RandomState, torch.Generator)):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


# Plain state ----------------------------------------------------------------------------------------------------------


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
        for (path, name), value in saved.items():
            if (owner := owners.get(path)) is not None:
                _set(owner, name, decoded(value))
        self.touched |= saved.keys()

    def _values(self) -> dict[tuple[str, str], Any]:
        """Return all plain values, by where they are."""
        found = {}
        for path, owner in walk(self.roots(), self.skip, code=False):
            if _container(owner) or isinstance(
                owner, (*GENERATORS, *self.skip, types.FunctionType, types.MethodType, type)
            ):
                continue
            small = isinstance(owner, (torch.utils.data.Dataset, LightningDataModule))
            for name, value in attributes(owner).items():
                if _is_plain(value) and not (small and _size(value) > SMALL):
                    found[path, name] = value
        return found


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
def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute: in place where it can be, as others may hold the same list, array or tensor."""
    now = getattr(owner, "__dict__", {}).get(name)
    if type(now) is type(value):
        if isinstance(now, (list, deque)) and getattr(now, "maxlen", None) == getattr(value, "maxlen", None):
            now.clear()
            now.extend(value)
            return
        if isinstance(now, (dict, set)):
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
        if now.shape == value.shape and now.dtype == value.dtype and now.layout == value.layout and not now.is_leaf:
            now = None
        elif now.shape == value.shape and now.dtype == value.dtype and now.layout == value.layout:
            now.copy_(value)
            return
        if now is not None:
            value = value.to(now.device)
    if hasattr(owner, "__dict__"):
        owner.__dict__[name] = value
    else:
        object.__setattr__(owner, name, value)
