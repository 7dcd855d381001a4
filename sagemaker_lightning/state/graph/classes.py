"""The classes that a program has, of which a record may have new objects."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from inspect import getattr_static
from typing import Any

from torch import Tensor, nn

from sagemaker_lightning.compat import namespaces
from sagemaker_lightning.compat.torch_data import ITERATOR_CLASS
from sagemaker_lightning.state.graph.fingerprints import PYTHONS
from sagemaker_lightning.state.graph.kinds.base import class_name
from sagemaker_lightning.state.graph.kinds.code import LAYERS
from sagemaker_lightning.state.graph.kinds.memory import is_own_tensor
from sagemaker_lightning.state.graph.kinds.optimizers import CLASSES_OF_TORCH
from sagemaker_lightning.state.graph.nodes import may_be_of_values
from sagemaker_lightning.state.object_graph import (
    LIGHTNINGS,
    NAMESPACES,
    is_library_class,
    is_own_module,
    namespace,
)

OF_LIBRARIES = {**CLASSES_OF_TORCH, **LAYERS} | {
    class_name(class_): class_ for class_ in (*NAMESPACES, ITERATOR_CLASS)
}
"""Classes of which a record may have new objects in any program, by name."""


class Classes(Mapping[str, type]):
    """The classes of which a record may have new objects, by name.

    They are those of the objects of the start, and those that the modules have by name in which
    these are defined: in a module of the user's own all; in all other modules of these packages,
    such as the views of a graph, those whose objects do nothing at their end.
    Libraries have those whose objects may be values, such as an estimator, or modules of a net;
    Python's own library has those of them that the user's modules have by name.

    Args:
        of_objects: The classes of the objects of the start.
        modules: The names of the modules that were imported at the start. One that is imported
            later is not there yet when a resumed program asks.
    """

    def __init__(self, of_objects: Iterable[type], modules: frozenset[str]) -> None:
        self.modules = modules
        self.found = {**OF_LIBRARIES}
        names: set[str] = set()
        for class_ in of_objects:
            self.found[class_name(class_)] = class_
            names |= {base.__module__ for base in class_.__mro__ if not is_library_class(base)}
        self.packages = {name.partition(".")[0] for name in names}
        for name in sorted(names):
            there = namespace(sys.modules.get(name))
            is_own = is_own_module(name)
            package = name.partition(".")[0]
            self.found = {
                path: class_
                for path, class_ in _classes_of_module(there).items()
                if is_own or (path.partition(".")[0] == package and not hasattr(class_, "__del__"))
            } | self.found
            if is_own:
                self.found |= {
                    class_name(value): value
                    for value in there.values()
                    if isinstance(value, type) and _may_be_made(value)
                }

    def __getitem__(self, name: str) -> type:
        if name in self.found:
            return self.found[name]
        class_ = imported(name)
        if not isinstance(class_, type) or class_.__module__ not in self.modules:
            raise KeyError(name)
        package = class_.__module__.partition(".")[0]
        if package in self.packages and not hasattr(class_, "__del__"):
            return class_
        if package in PYTHONS or not _may_be_made(class_):
            raise KeyError(name)
        return class_

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


def _may_be_made(class_: type) -> bool:
    """Return whether a library's class has objects that may be values, or modules of a net."""
    if issubclass(class_, tuple):  # a named one: the code of its class does not run
        return is_library_class(class_) and hasattr(class_, "_fields")
    if issubclass(class_, Tensor):  # it is made as a plain tensor is
        return is_own_tensor(class_) and not hasattr(class_, "__del__")
    if class_.__new__ is not vars(object)["__new__"]:
        return False
    if not issubclass(class_, nn.Module):
        return may_be_of_values(class_)
    # Those of torch's own that are not LAYERS have code in C++, or change what they are part of.
    is_plain = not class_.__module__.startswith((*LIGHTNINGS, "torch."))
    return is_library_class(class_) and is_plain and not hasattr(class_, "__del__")


def _classes_of_module(names: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes, by name, that a module has, and those within these; no library's."""
    classes: dict[str, type] = {}
    stack = [value for value in names.values() if isinstance(value, type)]
    while stack:
        class_ = stack.pop()
        name = class_name(class_)
        if name not in classes and not is_library_class(class_):
            classes[name] = class_
            stack += [value for value in vars(class_).values() if isinstance(value, type)]
    return classes


@lru_cache(1)
def imported_modules(_count: int) -> frozenset[str]:
    """Return the names of the modules that are imported, when there are so many of them."""
    return frozenset(sys.modules)


def imported(name: str) -> Any:
    """Return what has a name in a module that is imported, or in a class of one; None for nothing.

    A checkpoint may have been written with the other distribution of Lightning.
    """
    parts = name.split(".")
    for size in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:size])
        found: Any = sys.modules.get(module) or sys.modules.get(namespaces.first_name(module))
        if found is None:
            continue
        # A module may import what is asked for, and a class run code: neither is asked.
        for part in parts[size:]:
            is_class = isinstance(found, type)
            found = getattr_static(found, part, None) if is_class else namespace(found).get(part)
        return found
    return None
