"""What a user's objects hold: generators of random numbers, and plain state. One walk over attributes and containers.

Nobody tells us of them: a dataset keeps `np.random.default_rng(0)`, a sampler counts its epochs, a callback collects
numbers in a list. The walk goes through attributes, lists, dicts, partial functions, closures and what a function
reads of its module; not into tensors, modules of Python, and the insides of libraries.
"""

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from sagemaker_lightning.compat.lightning_trainer import LINKS
from sagemaker_lightning.compat.torch_data import ITERATOR

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
LIMIT = 20_000  # objects that one walk looks at
FEW = 256  # elements of a container that are looked at: a longer one holds samples

LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, types.ModuleType, Tensor,
          np.ndarray, np.generic, np.dtype, torch.dtype, torch.device, torch.Size)  # fmt: skip
# Of these, classes say nothing that a user wrote, and functions read nothing that a user may change.
LIBRARIES = {"torch", "torchvision", "torchaudio", "torchdata", "torchmetrics", "numpy", "pandas", "pyarrow", "PIL",
             "pytorch_lightning", "lightning", "lightning_fabric", "lightning_utilities", "litdata", "datasets",
             "sagemaker_lightning", "transformers", "scipy", "sklearn", "h5py", "lmdb", "jsonargparse", "tensorboard",
             "fsspec", "cv2", "zmq", "builtins", *sys.stdlib_module_names}  # fmt: skip
ENTERED = (nn.Module, Callback, LightningDataModule, torch.utils.data.Dataset, torch.utils.data.Sampler,
           torch.utils.data.DataLoader)  # fmt: skip
# What the base class of optimizers deals with: state, groups, hooks.
OF_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
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


def _members(value: Any, code: bool) -> Iterator[tuple[str, Any]]:  # noqa: C901 (a branch for each kind of object)
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
        yield from (of_function(value) if code else attributes(value).items())
    elif isinstance(value, type):
        if code and not library(value):
            yield from ((name, one) for name, one in vars(value).items() if not name.startswith("__") or callable(one))
    elif not library(kind) or isinstance(value, ENTERED) or kind.__module__.startswith(("torchvision", "torch.utils")):
        yield from attributes(value).items()
        if isinstance(value, nn.Module):
            yield from nn.Module.named_children(value)
        if code:
            for one in kind.__mro__:
                if not library(one):
                    yield f"({one.__name__})", one


def attributes(value: Any) -> dict[str, Any]:
    """Return what an object of a user's holds, without what is a library's own; of a function, what it closed over."""
    own = _own(type(value))
    if isinstance(value, Metric):
        own = own | value.metric_state.keys()
    if isinstance(value, types.FunctionType):
        return {} if (value.__module__ or "").partition(".")[0] in LIBRARIES else closure(value)
    held = {name: one for name, one in getattr(value, "__dict__", {}).items()
            if name not in own or isinstance(one, types.FunctionType)}  # fmt: skip
    for kind in type(value).__mro__:
        for name in () if isinstance(slots := vars(kind).get("__slots__", ()), str) else slots:
            if name not in own and name not in ("__dict__", "__weakref__") and hasattr(value, name):
                held[name] = getattr(value, name)
    return held


@functools.cache
def _own(kind: type) -> frozenset[str]:
    """Return the names of attributes that the base classes' own code deals with."""
    names: set[str] = {*LINKS, ITERATOR}
    if issubclass(kind, torch.optim.Optimizer):
        names |= OF_OPTIMIZERS
    for base in kind.__mro__:
        whole = base in BASES or (issubclass(base, Callback) and library(base))
        if whole or (base.__module__ or "").startswith(("pytorch_lightning.", "lightning.")):
            for one in vars(base).values():
                function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
                if isinstance(function, types.FunctionType):
                    names |= set(function.__code__.co_names)
            names |= set(vars(base)) | set(getattr(base, "__annotations__", ()))
    return frozenset(names)


def closure(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function has closed over, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}  # without those not filled


def of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function has closed over, its defaults, and what it reads of its module."""
    yield from closure(function).items()
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
