"""Find changes in a user's variables that no checkpoint has.

These are variables of modules, of classes, of functions and of some closures, what the user's
objects in them hold, and iterators.
"""

import builtins
import enum
import functools
import inspect
import operator
import pickle
import re
import sys
import types
import typing
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from pytorch_lightning import Callback, LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from sagemaker_lightning.compat.torch_modules import buffers, is_lazy, parameters
from sagemaker_lightning.state import object_graph, replaced_code
from sagemaker_lightning.state.caches import kept
from sagemaker_lightning.state.digests import digest, is_small
from sagemaker_lightning.state.graph.atoms import SCALARS
from sagemaker_lightning.state.graph.fingerprints import of_holder
from sagemaker_lightning.state.graph.kinds.containers import CONTAINERS
from sagemaker_lightning.state.graph.kinds.optimizers import OPTIMIZERS
from sagemaker_lightning.state.graph.nodes import (
    ARRAY,
    GENERATOR,
    KINDS,
    OBJECT,
    POSITIONED_KINDS,
    TENSOR,
    has_position,
    kind_of,
)
from sagemaker_lightning.state.object_graph import CODE

COUNTERS = ("builtins", "itertools")  # modules whose iterators can be asked for their position
MAX_REMAINING = 10_000  # an iterator with more elements left is not examined
SAMPLED = 4096  # elements of a larger list or array that are compared
VARIABLES = "variables."
"""How the names of variables begin, among those of the user's objects."""
WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    functools.partial,
    functools.cached_property,
    types.MethodType,
    type(functools.lru_cache(len)),
)
WRAPPED = "__func__", "__wrapped__", "func", "fget", "fset"
"""Attributes by which such refer to functions."""
DEFAULTS = "defaults", "kwdefaults"
REGISTRIES = ("_abc",)
"""Modules whose containers are, in variables, of all instances that are there at the moment.

That of `_abc` is of the classes of which an abstract class was asked.
"""
NUMBER = re.compile(r"#\d+$")
"""What a name ends with if other functions have the same, such as what a function wraps."""
HELD_KINDS = {*CONTAINERS.values()} | {
    TENSOR,
    ARRAY,
    GENERATOR,
    KINDS["bytes"],
    KINDS["stream"],
    KINDS["flag"],
    KINDS["seed"],
    *POSITIONED_KINDS,
}
"""Kinds of values, besides objects and those without an identity, that a checkpoint can have."""
OF_LIGHTNING = Callback, LightningDataModule, DataLoader
"""Classes whose objects, if they are libraries', Lightning and other parts continue."""
PYTHONS_OF_ENUMS = "_name_", "_sort_order_"
"""Attributes that each member of an enum has, besides its value."""
CACHE = type(functools.lru_cache(len))
IS_CACHE = " (functools.lru_cache)"
"""What follows the name of a function whose results are kept."""


class Mentioned(NamedTuple):
    """Which variables code of the user's can read and set."""

    of_modules: dict[str, set[str]]
    """The names that functions mention, by the module that may have them as variables."""
    classes: list[type]
    """The classes, all of whose variables are meant."""
    of_functions: dict[str, Any]
    """By name: cells that functions have closed over, mutable defaults, functions that keep the one
    object that they have made, what wrappers hold in the place of a function, and functions and
    members of enums, which may have attributes, as `object_graph.Added`."""
    of_code: dict[str, replaced_code.Place]
    """Where code is that the user's code reaches, by name."""
    names: dict[types.FunctionType, frozenset[str]]
    """The names that each function mentions."""


def mentioned_variables(roots: Mapping[str, Any]) -> Mentioned:
    """Return which variables the user's code mentions.

    Args:
        roots: The objects from which the code is reached, by name.
    """
    found = Mentioned(defaultdict(set), [], {}, {}, {})
    for _, object_ in _reached(roots):
        if isinstance(object_, types.FunctionType) and is_own(object_):
            found.of_code.update(replaced_code.places_of_function(object_))
            found.names[object_] = object_graph.names_in_code(object_.__code__)
            # What functools.wraps has wrapped names another function's module as its own.
            module = sys.modules.get(object_.__globals__.get("__name__", ""))
            if module is not None and vars(module) is object_.__globals__:
                found.of_modules[module.__name__] |= object_graph.names_read(object_)
            for other, others_names in object_graph.modules_in(object_).items():
                found.of_modules[other.__name__] |= others_names
        elif isinstance(object_, type) and is_own(object_) and not issubclass(object_, enum.Enum):
            found.classes.append(object_)
            found.of_code.update(replaced_code.places_of_class(object_))
        elif isinstance(object_, enum.EnumMeta) and is_own(object_):
            members: dict[str, enum.Enum] = dict(object_.__members__)
            for member in members.values():
                name = f"{object_.__module__}.{object_.__qualname__}.{member._name_}"
                found.of_functions[name] = object_graph.Added(member, PYTHONS_OF_ENUMS)
    numbers: dict[str, int] = defaultdict(int)
    for value, is_global in _kept_by_code(found):
        name = _numbered(_code_of(value), numbers)
        if isinstance(value, types.FunctionType):
            found.of_functions.update(_members_of(name, value, is_global))
        elif isinstance(value, CACHE):
            found.of_functions[f"{name}()"] = value
        else:
            found.of_functions[f"{name} (wrapped)"] = value
    return found


def _code_of(value: Any) -> Any:
    """Return what names a function, a partial function or an object: its code or its class."""
    while isinstance(value, functools.partial):
        value = value.func
    return value if isinstance(value, (types.FunctionType, CACHE, type)) else type(value)


def _numbered(code: Any, numbers: dict[str, int]) -> str:
    """Return the name of a function or a class, with a number if the same line has made others.

    Args:
        code: The function or the class.
        numbers: How many have got each name; this one is counted.
    """
    name = f"{code.__module__}.{code.__qualname__}"
    number = numbers[name]
    numbers[name] += 1
    return f"{name}#{number}" if number else name


def _kept_by_code(mentioned: Mentioned) -> Iterator[tuple[Any, bool]]:
    """Yield the user's functions that classes and modules have, and whether a module has each.

    Also functions that keep one object, as `functools.lru_cache` without arguments does, and what a
    wrapper such as `staticmethod` holds in the place of a function.
    """
    seen_ids = set()
    classes = sorted(mentioned.classes, key=lambda each: (each.__module__, each.__qualname__))
    waiting = [(member, False) for class_ in classes for member in vars(class_).values()]
    waiting += [
        (vars(sys.modules[module])[name], True)
        for module, names in sorted(mentioned.of_modules.items())
        if module in sys.modules
        for name in sorted(names & vars(sys.modules[module]).keys())
    ]
    waiting.reverse()
    while waiting:
        value, is_global = waiting.pop()
        if id(value) in seen_ids:
            continue
        seen_ids.add(id(value))
        if isinstance(value, types.FunctionType) and is_own(value):
            yield value, is_global
            within = [*object_graph.closure(value).values(), *vars(value).values()]
        elif isinstance(value, WRAPPERS):
            if isinstance(value, CACHE) and is_own(value) and not _takes_arguments(value):
                yield value, is_global
            within = [getattr(value, name, None) for name in WRAPPED]
            for each in within:
                if _is_held_object(each) and id(each) not in seen_ids:
                    yield each, False
        else:
            continue
        waiting += [(each, False) for each in reversed(within)]


def _members_of(name: str, function: types.FunctionType, is_global: bool) -> dict[str, Any]:
    """Return what a function keeps from one call to the next, by name."""
    variables = function.__code__.co_freevars
    found: dict[str, Any] = {
        f"{name}.{variable}": cell
        for variable, cell in zip(variables, function.__closure__ or (), strict=True)
        if variable != "__class__"
    }
    defaults = enumerate(function.__defaults__ or ())
    members = {f"defaults{n}": each for n, each in defaults} | (function.__kwdefaults__ or {})
    found |= {
        f"{name}.{member}": value for member, value in members.items() if _is_held_object(value)
    }
    if is_global or any(map(_is_held, vars(function).values())):
        found[name] = object_graph.Added(function, ())
    return found


def held_variables(mentioned: Mentioned) -> dict[str, Any]:
    """Return the variables that a checkpoint can have as it has attributes, by owner.

    They are those of modules, classes and functions that have numbers, text, containers, tensors,
    arrays or objects of the user's now.
    """
    modules = {name: sys.modules[name] for name in mentioned.of_modules if name in sys.modules}
    classes: dict[str, type] = {}
    numbers: dict[str, int] = defaultdict(int)
    for each in mentioned.classes:  # in the order in which code reaches them
        classes[_numbered(each, numbers)] = each
    held: dict[str, Any] = {}
    # Also those without a variable now: training may make one, or has removed the only one.
    for name, owner in sorted((modules | classes).items()):
        excluded: Container[str]
        if name in classes:
            excluded = NotOfClass(classes[name])
        else:
            excluded = object_graph.AllBut(_held_in(vars(owner), mentioned.of_modules[name]))
        held[f"{VARIABLES}{name}"] = object_graph.Added(owner, excluded)
    for name, member in mentioned.of_functions.items():
        if isinstance(member, object_graph.Added):
            attributes = object_graph.attributes(member)
            other = {each for each, value in attributes.items() if not _is_held(value)}
            assert isinstance(member.excluded, Collection)  # `_members_of` has listed them
            other.update(member.excluded)
            member = object_graph.Added(member.owner, other)
        elif isinstance(member, types.CellType) and not _is_held(object_graph.value_of(member)):
            continue
        elif isinstance(member, CACHE):
            if member.cache_info().currsize != 1:
                continue
            member = member()  # kept: the function does not run
            if not _is_held_object(member):
                continue
        held[f"{VARIABLES}{name}"] = member
    return held


def _held_in(variables: Mapping[str, Any], names: Collection[str]) -> set[str]:
    """Return those of some names that a module has as variables, or may get as such."""
    return {
        name
        for name in names
        if not name.startswith("__")
        and (name in variables or not hasattr(builtins, name))
        and _is_held(variables.get(name))
    }


class NotOfClass:
    """The names that no variable of a class can have, or whose value cannot be saved.

    A class may get, while training, what its bases have, as by `cls.total += 1`, or what none of
    them has.

    Args:
        class_: The class, of the user's.
    """

    __slots__ = ("of_libraries", "own")

    def __init__(self, class_: type) -> None:
        self.of_libraries = _names_in_libraries(class_)
        self.own: dict[str, bool] = {}
        """Whether a checkpoint can have the value, by name, of what the user's classes have."""
        for base in reversed(class_.__mro__):
            if is_own(base):
                self.own |= {name: _is_held(value) for name, value in vars(base).items()}

    def __contains__(self, name: Any) -> bool:
        return name.startswith("__") or not self.own.get(name, name not in self.of_libraries)


@kept
def _names_in_libraries(class_: type) -> frozenset[str]:
    """Return what the bases of a class have that are libraries'."""
    return frozenset(name for base in class_.__mro__ if not is_own(base) for name in vars(base))


def _is_held(value: Any) -> bool:
    """Return whether a checkpoint can have a variable's value as it has an attribute's."""
    if (owner := object_graph.owner_of_method(value)) is not None:
        return _is_held(owner)
    if isinstance(value, types.MethodType):
        return not isinstance(value.__self__, type) and _is_held(value.__self__)
    if object_graph.is_code(value):
        return False
    kind = kind_of(value)
    if kind is None or kind in HELD_KINDS or object_graph.is_of(type(value), *OPTIMIZERS):
        return True
    if object_graph.is_library_iterator(value) and not _is_counter(value):
        return True  # it is named as an attribute is, as nobody can tell where it is
    is_librarys = object_graph.is_library_class(type(value))
    return kind is OBJECT and not (is_librarys and isinstance(value, OF_LIGHTNING))


def _is_held_object(value: Any) -> bool:
    """Return whether a value is an object with an identity, and `_is_held`."""
    return kind_of(value) is not None and _is_held(value)


def variable_digests(roots: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, bytes]:
    """Return bytes by which values of variables can be compared, by their names.

    Variables whose values cannot be compared are left out.

    Args:
        roots: The objects from which the user's code is reached, by name. Variables are left out
            whose values they have as object_graph.Elsewhere.
        saved: Those of them for which a checkpoint has the variables that functions closed over.
    """
    held = {
        f"{NUMBER.sub('', name.removeprefix(VARIABLES))}.{attribute}"
        for name, root in saved.items()
        if isinstance(root, object_graph.Added) and object_graph.has_variables(root.owner)
        for attribute in object_graph.attributes(root)
    }
    saved_objects = [object_ for _, object_ in object_graph.walk(saved, code=False)]
    saved_ids = set(map(id, saved_objects))
    saved_ids |= {id(root) for name, root in saved.items() if name.startswith(VARIABLES)}
    elsewhere = _elsewhere(roots)
    variables, of_packages, digests = _variables_of_code(roots, saved_ids)
    left_out = saved_ids.union(id(mark.object_) for mark in elsewhere.values())
    # A variable and an attribute may have the same object, other than a number or text: then a
    # checkpoint has it. To look at all attributes takes time, and most variables are of no object.
    if any(map(_is_object, variables.values())):
        left_out |= {
            id(value)
            for each in saved_objects
            for value in object_graph.attributes(each).values()
            if _is_object(value)
        }
    variables = {
        f"{name}{IS_CACHE if isinstance(value, CACHE) else ''}": value
        for name, value in variables.items()
        if id(value) not in left_out and name not in held
    }
    digests |= {
        name: (_digest_of_package if name in of_packages else _digest_or_position)(value)
        for name, value in variables.items()
    }
    objects = {
        name: value
        for name, value in variables.items()
        if not digests[name] and not isinstance(value, (*CODE, Tensor, np.ndarray))
    }
    digests |= _digests_of_objects(elsewhere | objects, saved_ids)
    return {name: state for name, state in digests.items() if state}


def _variables_of_code(
    roots: Mapping[str, Any], saved_ids: set[int]
) -> tuple[dict[str, Any], set[str], dict[str, bytes]]:
    """Return variables by name, which of these installed packages have, and digests by name.

    The variables are those that code reaches. The digests are of what functions have themselves,
    such as defaults, and of iterators.

    Args:
        roots: The objects from which the code is reached, by name.
        saved_ids: Ids of the objects that a checkpoint has.
    """
    variables: dict[str, Any] = {}
    of_packages: set[str] = set()
    # Functions created by the same line have the same names.
    digests: dict[str, bytes] = defaultdict(bytes)
    seen_ids = set()
    for path, object_ in _reached(roots):
        if isinstance(object_, types.FunctionType):
            # A wrapper, which torch puts around an optimizer's step later, has the name of what it
            # wraps, and members of its own.
            label = f"{object_.__module__}.{object_.__qualname__}"
            label += " (wrapped)" if "__wrapped__" in vars(object_) else ""
            variables_closed_over = object_.__code__.co_freevars
            cells = dict(zip(variables_closed_over, object_.__closure__ or (), strict=True))
            for name, value in object_graph.function_members(object_):
                seen_ids.add(id(value))
                if name in DEFAULTS and not is_own(object_):
                    continue
                if name in cells and id(cells[name]) in saved_ids:
                    continue
                if name in DEFAULTS:
                    values = value.values() if name == "kwdefaults" else value
                    is_saved = id(object_) in saved_ids  # with what its defaults hold
                    value = [
                        each
                        for each in values
                        if id(each) not in saved_ids
                        and not isinstance(each, enum.Enum)  # its attributes are variables
                        and not (is_saved and _is_held_object(each))
                    ]
                    if not value:
                        continue
                if (
                    id(object_) in saved_ids
                    and name in variables_closed_over
                    and (not _is_counter(value) or has_position(value))
                ):
                    continue
                if name in object_.__globals__:
                    module = object_.__globals__.get("__name__") or ""
                    variables[f"{module}.{name}"] = value
                    of_packages |= set() if is_own(object_) else {f"{module}.{name}"}
                elif not _is_kept_by_class(value):
                    digests[f"{label}.{name}"] += _digest_or_position(value) or _digest_of_length(
                        value
                    )
            variables |= dict(object_graph.module_members(object_))
            # A library's function may have got all that it wraps has.
            if is_own(object_) and id(object_) not in saved_ids:
                variables |= _variables_of(object_)
        elif isinstance(object_, type):
            variables |= (of_class := _variables_of(object_))
            if not is_own(object_):
                of_packages |= of_class.keys()
        elif _is_counter(object_) and id(object_) not in seen_ids and not has_position(object_):
            digests[path] += _digest_or_position(object_)
    return variables, of_packages, digests


def results_kept(roots: Mapping[str, Any]) -> list[Any]:
    """Return the user's functions that keep results by their arguments (functools.lru_cache).

    One without arguments keeps the one object of a program, which is not the result of anything.

    Args:
        roots: The objects from which the user's code is reached, by name.
    """
    reached = (value for _, value in _reached(roots))
    found = {id(each): each for each in reached if isinstance(each, CACHE) and is_own(each)}
    return [each for each in found.values() if _takes_arguments(each)]


def _takes_arguments(function: Any) -> bool:
    """Return whether a function has parameters; also if nobody can tell."""
    try:
        return bool(inspect.signature(function).parameters)
    except ValueError:
        return True


def changed_variables(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Return the names of the variables whose values differ.

    Args:
        before: What `variable_digests` returned first.
        after: What `variable_digests` returned later.
    """
    return sorted(name for name, state in before.items() if after.get(name, state) != state)


def _reached(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield path and object of what code reaches; first, what is handled elsewhere."""
    return object_graph.walk({**_elsewhere(roots), **roots})


def _elsewhere(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return those roots that stand for objects that are handled elsewhere."""
    return {name: root for name, root in roots.items() if isinstance(root, object_graph.Elsewhere)}


def _variables_of(owner: type | types.FunctionType) -> dict[str, Any]:
    """Return the variables of a class or a function, by name.

    Python notes in those of an enum, of names that it reserves, which combinations of flags it has
    met.
    """
    is_enum = isinstance(owner, enum.EnumMeta)
    return {
        f"{owner.__module__}.{owner.__qualname__}.{name}": value
        for name, value in vars(owner).items()
        if not name.startswith("_" if is_enum and name.endswith("_") else "__")
    }


def _is_object(value: Any) -> bool:
    """Return whether it matters which object a value is, as it can be changed in place."""
    return not isinstance(value, CODE) and (
        type(value).__hash__ is None or object_graph.has_namespace(value)
    )


def is_own(code: Any) -> bool:
    """Return whether a function, a class or an object's class is the user's own."""
    while isinstance(code, functools.partial):
        code = code.func
    return object_graph.is_own_code(code)


def _digests_of_objects(objects: Mapping[str, Any], saved_ids: set[int]) -> dict[str, bytes]:
    """Return digests of what objects hold, by name: of the user's own, of modules and containers.

    Args:
        objects: The objects by name.
        saved_ids: Ids of the objects that a checkpoint has.
    """
    digests: dict[str, bytes] = {}
    for path, owner in object_graph.walk(objects, code=False):
        if id(owner) in saved_ids or isinstance(owner, CODE):
            continue
        values: dict[str, Any] = {}
        if isinstance(owner, (dict, list, deque)):
            # An attribute that can be compared in full has its digest already.
            digests[path] = digests.get(path) or digest(len(owner))
        elif isinstance(owner, Metric):
            digests[path] = digest(owner.update_count)
        elif isinstance(owner, nn.Module):
            # The small tensors of a network that is trained or averaged change, too.
            tensors = parameters(owner) | buffers(owner)
            values |= {
                name: each for name, each in tensors.items() if not is_lazy(each) and is_small(each)
            }
        if object_graph.is_own_module(type(owner).__module__):
            values |= object_graph.attributes(owner)
        digests |= {f"{path}.{name}": _digest_or_position(each) for name, each in values.items()}
    return digests


def _digest_or_position(value: Any) -> bytes:
    """Return bytes that identify a value; empty if it cannot be compared."""
    # A type such as dict[str, "Later"] notes what it has looked up.
    if isinstance(value, CODE) or typing.get_origin(value) is not None:
        return b""
    if isinstance(value, CACHE):
        return digest(value.cache_info().currsize)
    if not _is_counter(value):
        plain = digest(value if is_small(value) else _sample(value))
        return plain or (b"" if type(value).__module__ in REGISTRIES else of_holder(value))
    try:
        return pickle.dumps(value) if operator.length_hint(value) <= MAX_REMAINING else b""
    except Exception:  # its elements may be of any class, which may raise anything
        return b""


def _digest_of_package(value: Any) -> bytes:
    """Return bytes that identify what a variable of an installed package has.

    A package may have thousands of tables and objects, which it fills and nobody trains.
    """
    is_quick = isinstance(value, (*SCALARS, *object_graph.GENERATORS, Tensor, np.ndarray))
    is_read = is_quick or _is_counter(value)
    return _digest_or_position(value) if is_read else _digest_of_length(value)


def _is_kept_by_class(value: Any) -> bool:
    """Return whether a value keeps results by class, which are found again when they are gone."""
    is_weak = isinstance(value, weakref.WeakKeyDictionary)
    return is_weak and all(isinstance(key, type) for key in value)


def _digest_of_length(value: Any) -> bytes:
    """Return a digest of a container's length; empty for another value.

    It tells that a container has grown whose elements cannot be compared, such as the functions
    that functools.singledispatch chooses from.
    """
    return digest(len(value)) if isinstance(value, (dict, list, set)) else b""


def _sample(value: Any) -> Any:
    """Return some elements of a large list, tensor or array; of others, their length."""
    is_array = isinstance(value, np.ndarray)
    if is_array or (isinstance(value, Tensor) and value.layout == torch.strided):
        rows = value[:: 1 + len(value) // SAMPLED]
        return rows.reshape(len(rows), -1)[:, 0]
    return value[:: 1 + len(value) // SAMPLED] if isinstance(value, list) else len(value)


def _is_counter(value: Any) -> bool:
    """Return whether a value is an iterator that can be asked for its position."""
    is_generator = isinstance(value, types.GeneratorType)
    return type(value).__module__ in COUNTERS and isinstance(value, Iterator) and not is_generator
