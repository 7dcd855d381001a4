"""Find what a training changes in variables of installed packages, which no checkpoint has.

An example is a package that keeps the parameters of all models in a dict of its own, by name. What
counts are tensors that take gradients, as something trained does: the caches and counters that
packages keep there have none.
"""

import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sagemaker_lightning.compat.torch_modules import is_lazy
from sagemaker_lightning.state import batch_digest
from sagemaker_lightning.state.caches import kept
from sagemaker_lightning.state.object_graph import (
    INSTALLED,
    LEAVES,
    LIBRARIES,
    Elsewhere,
    is_library_class,
    is_own_module,
    names_in_code,
    namespace,
)

MAX_OBJECTS = 10_000  # objects that are looked at below one variable, at most
CODE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.ModuleType,
    classmethod,
    staticmethod,
    property,
)
NO_STATE = frozenset(CODE + LEAVES) - {Tensor, type}
"""Classes, but for those derived from them, of which no object leads to a tensor."""


TORCHES = {name for name in LIBRARIES if name.startswith(("torch", "lightning", "pytorch_"))} | {
    "transformers"
}
"""Packages that make tensors which take gradients; others use them."""


class Trained(NamedTuple):
    """A trained tensor that a variable leads to."""

    variable: str
    """The name of the variable."""
    value: Any
    """Its value."""
    name: str
    """The name of the tensor."""
    tensor: Tensor


class PackageVariables:
    """The trained tensors in variables of the packages that the user's code imports."""

    def __init__(self) -> None:
        self.tensors: list[Trained] = []
        self.first_digests: dict[str, int] = {}
        """By the tensor's name, of when it was first noted."""

    def find(self, objects: Iterable[Any], known: Iterable[Tensor]) -> dict[str, Elsewhere]:
        """Look for the tensors, and return the values of the variables, by name.

        Args:
            objects: Objects of the training, such as the model.
            known: Tensors that belong to the training; they are left out, and so is what shares
                their memory.
        """
        found = list(trained_tensors(objects))
        own = set(map(_memory, known)) if found else set()
        self.tensors = [each for each in found if _memory(each.tensor) not in own]
        return self.values()

    def values(self) -> dict[str, Elsewhere]:
        """Return the values of the variables that `find` has found last, by name."""
        return {each.variable: Elsewhere(each.value) for each in self.tensors}

    def note(self, forget: bool) -> None:
        """Note the values of the tensors that `find` has found.

        Args:
            forget: Whether to forget what was noted before. If not, it stays.
        """
        digests = {each.name: _digest(each.tensor) for each in self.tensors}
        self.first_digests = digests if forget else digests | self.first_digests

    def changed(self, saved: Any) -> dict[str, Any]:
        """Return the variables with a tensor that has changed and that is not saved, by name.

        Args:
            saved: What is saved of them: tensors in dicts and lists.
        """
        changed = [
            each
            for each in self.tensors
            if self.first_digests.setdefault(each.name, digest := _digest(each.tensor)) != digest
        ]
        saved_tensors = list(_tensors_in(saved)) if changed else []
        return {
            each.variable: each.value
            for each in changed
            if not any(_is_same(each.tensor, tensor) for tensor in saved_tensors)
        }


def trained_tensors(objects: Iterable[Any]) -> Iterator[Trained]:
    """Yield the leaf tensors with `requires_grad` that variables of packages lead to, once each.

    The packages are those that the user's modules import, or the modules in which the classes of
    `objects` are: as far as they are installed, use torch, and are not in object_graph.LIBRARIES.

    Args:
        objects: Objects of the training, such as the model.
    """
    packages = _imported_packages(objects)
    modules = {
        name: module
        for name, module in (list(sys.modules.items()) if packages else ())
        if _outermost(name) in packages and not is_own_module(name)
    }
    # To search the others, such as a client of a service, takes most of the time.
    packages = {_outermost(name) for name, module in modules.items() if _uses_torch(name, module)}
    modules = {name: each for name, each in modules.items() if _outermost(name) in packages}
    seen: set[int] = set()
    # A variable that others import has the name that it has in the outermost module.
    for module_name in sorted(modules, key=lambda name: (name.count("."), name)):
        for name, value in _with_state(namespace(modules[module_name])):
            variable = f"{module_name}.{name}"
            if issubclass(type(value), type):
                if value.__module__ == module_name:
                    for attribute, member in _with_state(vars(value)):
                        yield from _reached(f"{variable}.{attribute}", member, seen)
            else:
                yield from _reached(variable, value, seen)


def _with_state(variables: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return name and value of the variables that may lead to a tensor."""
    return [
        (name, value)
        for name, value in list(variables.items())
        if type(value) not in NO_STATE and not name.startswith("__")
    ]


def _imported_packages(objects: Iterable[Any]) -> set[str]:
    """Return the outermost names of what the user's code imports, but for LIBRARIES."""
    own = set(filter(_is_own, list(sys.modules)))
    importers = {class_.__module__ for object_ in objects for class_ in type(object_).__mro__}
    importers = {name for name in importers if _outermost(name) not in LIBRARIES}
    packages = set(map(_outermost, importers))
    mentioned: set[str] = set()
    for name in own | importers:
        owners, names = _used_by(name)
        packages |= owners
        mentioned |= names
    # A function may import something by itself.
    packages |= set(map(_outermost, mentioned & sys.modules.keys()))
    return packages - LIBRARIES - set(map(_outermost, own)) - {""}


_used: dict[str, tuple[list[int], set[str], set[str]]] = {}
"""What `_used_by` has returned for a module, and the ids of its variables then, by its name."""


def _used_by(name: str) -> tuple[set[str], set[str]]:
    """Return the packages that a module has something of, and the names in its functions' code."""
    variables = list(namespace(sys.modules.get(name)).values())
    ids = list(map(id, variables))
    if name not in _used or _used[name][0] != ids:
        names: set[str] = set()
        for value in variables:
            is_class = issubclass(type(value), type)
            for function in list(vars(value).values()) if is_class else (value,):
                if type(function) is types.FunctionType and function.__module__ == name:
                    names |= names_in_code(function.__code__)
        _used[name] = ids, {_outermost(_module_of(value)) for value in variables}, names
    return _used[name][1:]


_without_torch: dict[str, tuple[int, int]] = {}
"""Modules in which nothing is torch's: the id, and how many variables they had, by name."""


def _uses_torch(name: str, module: Any) -> bool:
    """Return whether a module has anything that is torch's, or of a package that is built on it."""
    variables = namespace(module)
    seen = id(module), len(variables)
    if _without_torch.get(name) == seen:
        return False
    if any(_outermost(_module_of(value)) in TORCHES for value in list(variables.values())):
        return True
    _without_torch[name] = seen
    return False


@functools.cache
def _is_own(name: str) -> bool:
    """Return whether the user has written a module.

    What has no file was made by a program, or is a folder of packages.
    """
    if _outermost(name) in LIBRARIES:
        return False
    file = namespace(sys.modules.get(name)).get("__file__") or ""
    # This answers for nearly all, in a tenth of the time.
    is_installed = any(f"/{folder}/" in file for folder in INSTALLED)
    return name == "__main__" or (bool(file) and not is_installed and is_own_module(name))


def _outermost(name: str) -> str:
    """Return the first part of a module's name."""
    return name.partition(".")[0]


def _module_of(value: Any) -> str:
    """Return the name of a module, or of the one that has defined a function or class.

    Only the class of any other object is asked: it may be one that imports what is asked for.
    """
    if issubclass(type(value), types.ModuleType):
        name = namespace(value).get("__name__")
    else:
        owner = value if issubclass(type(value), CODE) else type(value)
        name = getattr(owner, "__module__", None)
    return name if isinstance(name, str) else ""


Reached = tuple[Any, Any, "Reached | None"]
"""An object, its name, and what holds it; None for the value of a variable itself."""


def _reached(variable: str, value: Any, seen: set[int]) -> Iterator[Trained]:
    """Yield the trained tensors that a variable leads to, as `trained_tensors` does.

    Args:
        variable: The name of the variable.
        value: Its value.
        seen: The ids of objects that are left out, to which those that are reached are added.
    """
    # Few lead to a tensor, and names are made of these alone.
    stack: list[Reached] = [(value, None, None)]
    objects_left = MAX_OBJECTS
    while stack and objects_left:
        entry = stack.pop()
        object_ = entry[0]
        if id(object_) in seen:
            continue
        seen.add(id(object_))
        objects_left -= 1
        class_ = type(object_)
        if issubclass(class_, Tensor):
            if object_.requires_grad and object_.is_leaf and not is_lazy(object_):
                yield Trained(variable, value, _path(variable, entry), object_)
            continue
        if not (members := _members_of(class_)(object_)):
            continue
        stack += [
            (member, name, entry)
            for name, member in reversed(members)
            if type(member) not in NO_STATE
        ]


def _path(variable: str, entry: Reached) -> str:
    """Return the name of an object that `_reached` has reached."""
    names = []
    while (holder := entry[2]) is not None:
        names.append(str(entry[1]))
        entry = holder
    return ".".join([variable, *reversed(names)])


CONTAINERS: tuple[type[Collection[Any]], ...] = list, tuple, set, frozenset, deque
Members = list[tuple[Any, Any]]
"""Name and value of what an object holds that may lead to a tensor."""


@kept
def _members_of(class_: type) -> Callable[[Any], Members]:
    """Return the function that returns the members of objects of a class."""
    # Containers' own classes may do anything when they are asked.
    if issubclass(class_, dict):
        return _members_of_dict
    for base in CONTAINERS:
        if issubclass(class_, base):
            return functools.partial(_members_of_container, base)
    if issubclass(class_, nn.Module):
        return lambda module: list(module.named_parameters())
    if issubclass(class_, torch.optim.Optimizer):
        return lambda optimizer: list(enumerate(optimizer.param_groups))
    if issubclass(class_, CODE) or is_library_class(class_):
        return lambda _: []
    return lambda object_: list(namespace(object_).items())


def _members_of_dict(value: dict[Any, Any]) -> Members:
    """Return the values of a dict, and then its keys: a package may know its parameters by them."""
    keys = list(itertools.islice(dict.keys(value), MAX_OBJECTS))
    values = list(itertools.islice(dict.values(value), MAX_OBJECTS))
    members: Members = []
    if not NO_STATE.issuperset(map(type, values)):
        members = [
            (key if type(key) in (str, int) else f"{type(key).__name__}#{number}", member)
            for number, (key, member) in enumerate(zip(keys, values, strict=True))
        ]
    if not NO_STATE.issuperset(map(type, keys)):
        members += [(f"key#{number}", key) for number, key in enumerate(keys)]
    return members


def _members_of_container(base: type[Collection[Any]], value: Any) -> Members:
    """Return the elements of a list, tuple, set or deque, which is what `base` says."""
    elements = list(itertools.islice(base.__iter__(value), MAX_OBJECTS))
    return [] if NO_STATE.issuperset(map(type, elements)) else list(enumerate(elements))


def _memory(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share their memory."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, ValueError):  # such as a sparse one, or one of a lazy module
        return id(tensor)


def _digest(tensor: Tensor) -> int:
    """Return a number that changes with the values."""
    return batch_digest.combine(int(part) for part in batch_digest.leaf_digests(tensor))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in dicts and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)


@torch.no_grad()
def _is_same(tensor: Tensor, saved: Tensor) -> bool:
    """Return whether a saved tensor has the values of a tensor, which may be on a GPU."""
    return (
        (tensor.shape, tensor.dtype, tensor.layout) == (saved.shape, saved.dtype, saved.layout)
        and tensor.layout == torch.strided
        and _digest(tensor) == _digest(saved)
    )
