"""Find what a training changes in variables of installed packages, which no checkpoint has.

An example is a package that keeps the parameters of all models in a dict of its own, by name. What
counts are tensors that take gradients, as something trained does: the caches and counters that
packages keep there have none.
"""

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sagemaker_lightning.state import batch_digest
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

    def note(self, anew: bool) -> None:
        """Note the values of the tensors that `find` has found.

        Args:
            anew: Whether to forget what was noted before. If not, it stays.
        """
        digests = {each.name: _digest(each.tensor) for each in self.tensors}
        self.first_digests = digests if anew else digests | self.first_digests

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
    `objects` are: as far as they are installed, and are none of object_graph.LIBRARIES.

    Args:
        objects: Objects of the training, such as the model.
    """
    packages = _imported_packages(objects)
    modules = {
        name: module
        for name, module in (list(sys.modules.items()) if packages else ())
        if _outermost(name) in packages and not is_own_module(name)
    }
    seen: set[int] = set()
    # A variable that others import has the name that it has in the outermost module.
    for module_name in sorted(modules, key=lambda name: (name.count("."), name)):
        for name, value in list(namespace(modules[module_name]).items()):
            if type(value) in NO_STATE or name.startswith("__"):
                continue
            variable = f"{module_name}.{name}"
            if issubclass(type(value), type):
                if value.__module__ == module_name:
                    for attribute, member in list(vars(value).items()):
                        if type(member) not in NO_STATE and not attribute.startswith("__"):
                            yield from _reached(f"{variable}.{attribute}", member, seen)
            else:
                yield from _reached(variable, value, seen)


def _imported_packages(objects: Iterable[Any]) -> set[str]:
    """Return the outermost names of what the user's code imports, but for LIBRARIES."""
    own = set(filter(_is_own, list(sys.modules)))
    importers = {class_.__module__ for object_ in objects for class_ in type(object_).__mro__}
    importers = {name for name in importers if _outermost(name) not in LIBRARIES}
    packages = set(map(_outermost, importers))
    for name in own | importers:
        for value in list(namespace(sys.modules.get(name)).values()):
            packages.add(_outermost(_module_of(value)))
            # A function may import something by itself.
            is_class = issubclass(type(value), type)
            for function in list(vars(value).values()) if is_class else (value,):
                if type(function) is types.FunctionType and function.__module__ == name:
                    names = names_in_code(function.__code__) & sys.modules.keys()
                    packages |= set(map(_outermost, names))
    return packages - LIBRARIES - set(map(_outermost, own)) - {""}


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


def _reached(variable: str, value: Any, seen: set[int]) -> Iterator[Trained]:
    """Yield the trained tensors that a variable leads to, as `trained_tensors` does.

    Args:
        variable: The name of the variable.
        value: Its value.
        seen: The ids of objects that are left out, to which those that are reached are added.
    """
    stack = [(variable, value)]
    objects_left = MAX_OBJECTS
    while stack and objects_left:
        path, object_ = stack.pop()
        if id(object_) in seen:
            continue
        seen.add(id(object_))
        objects_left -= 1
        if issubclass(type(object_), Tensor):
            is_empty = isinstance(object_, nn.parameter.UninitializedTensorMixin)
            if object_.requires_grad and object_.is_leaf and not is_empty:
                yield Trained(variable, value, path, object_)
            continue
        stack += [
            (f"{path}.{name}", member)
            for name, member in reversed(_members(object_))
            if type(member) not in NO_STATE
        ]


def _members(value: Any) -> list[tuple[Any, Any]]:
    """Return name and value of what an object holds that may lead to a tensor."""
    class_ = type(value)
    # Containers' own classes may do anything when they are asked.
    if issubclass(class_, dict):
        items = list(dict.items(value))[:MAX_OBJECTS]
        named = [
            (key if type(key) in (str, int) else f"{type(key).__name__}#{number}", member)
            for number, (key, member) in enumerate(items)
        ]
        # A package may know its parameters by themselves.
        return named + [(f"key#{number}", key) for number, (key, _) in enumerate(items)]
    for base in (list, tuple, set, frozenset, deque):
        if issubclass(class_, base):
            return list(enumerate(base.__iter__(value)))[:MAX_OBJECTS]
    if issubclass(class_, nn.Module):
        return list(value.named_parameters())
    if issubclass(class_, torch.optim.Optimizer):
        return list(enumerate(value.param_groups))
    is_entered = not issubclass(class_, CODE) and not is_library_class(class_)
    return list(namespace(value).items()) if is_entered else []


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
