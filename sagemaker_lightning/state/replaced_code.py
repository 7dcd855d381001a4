"""Find functions and classes that training puts in the place of others: no checkpoint names code.

What counts are the names by which a user's functions reach code: in their own module, in modules
that they mention, also a library's, and in classes there, as `functional.dropout` or
`nn.Linear.forward`; and all that a user's own classes have.
"""

import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sagemaker_lightning.state import object_graph

WRAPPERS = staticmethod, classmethod
CODE = types.FunctionType, types.BuiltinFunctionType, type, property, *WRAPPERS
OWNERS = types.ModuleType, type


class Place(NamedTuple):
    """A name that has code."""

    owner: Any
    """The module or the class."""
    name: str
    code: Any
    """What the name has had first."""


def places_of_function(function: types.FunctionType) -> Iterator[tuple[str, Place]]:
    """Yield the names by which a user's function reaches code, each with its place."""
    names = object_graph.names_in_code(function.__code__)
    module = sys.modules.get(function.__module__)
    owners: list[Any] = [sys.modules[name] for name in names if name in sys.modules]
    if module is not None and vars(module) is function.__globals__:
        owners.append(module)
    else:
        values = [function.__globals__[name] for name in names & function.__globals__.keys()]
        owners += [value for value in values if isinstance(value, OWNERS)]
    seen = set(map(id, owners))
    while owners:
        owner = owners.pop()
        variables = object_graph.namespace(owner)
        for name in names & variables.keys():
            value = variables[name]
            if isinstance(value, CODE) and not name.startswith("__"):
                yield f"{_name_of(owner)}.{name}", Place(owner, name, value)
            if isinstance(value, OWNERS) and id(value) not in seen:
                seen.add(id(value))
                owners.append(value)


def places_of_class(class_: type) -> Iterator[tuple[str, Place]]:
    """Yield the names of the code that a user's class has, each with its place."""
    for name, value in vars(class_).items():
        if isinstance(value, CODE):
            yield f"{_name_of(class_)}.{name}", Place(class_, name, value)


def replaced(places: Mapping[str, Place]) -> list[str]:
    """Return the names that have other code than first.

    What a library puts into its own modules and classes is left out.
    """
    found = []
    for name, (owner, own_name, first) in places.items():
        now = object_graph.namespace(owner).get(own_name)
        if now is not first and not _is_same(first, now):
            is_own = object_graph.is_own_module(_module_of(owner))
            if is_own or object_graph.is_own_module(_module_of(now)):
                found.append(name)
    return sorted(found)


def _module_of(value: Any) -> str:
    """Return the name of a module, or of that in which code was written, also a wrapper's."""
    while isinstance(value, WRAPPERS):
        value = value.__func__
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__", ""))
    return getattr(value, "__module__", None) or ""


def _name_of(owner: Any) -> str:
    is_class = isinstance(owner, type)
    return f"{owner.__module__}.{owner.__qualname__}" if is_class else str(owner.__name__)


def _is_same(first: Any, now: Any) -> bool:
    """Return whether code is the same, or a library has put a wrapper around it.

    So torch does with the `step` of an optimizer's class.
    """
    if now is first:
        return True
    if type(first) is not type(now):
        return False
    if isinstance(first, WRAPPERS):
        return _is_same(first.__func__, now.__func__)
    if isinstance(first, property):
        return all(_is_same(getattr(first, each), getattr(now, each)) for each in ("fget", "fset"))
    if not isinstance(first, types.FunctionType):
        return False
    if object_graph.is_library_module(now.__globals__.get("__name__", "")):
        return inspect.unwrap(now) is inspect.unwrap(first)
    # The same line may have made it again.
    return now.__code__ is first.__code__ and (now.__closure__ or ()) == (first.__closure__ or ())
