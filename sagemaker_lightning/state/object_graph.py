"""Walk over a user's objects to find their random generators and plain state.

Nobody tells us of these: a dataset keeps `np.random.default_rng(0)`, a sampler counts its epochs, a
callback collects numbers in a list. The walk goes through attributes, lists, dicts, partial
functions, closures and the globals that a function reads. It does not enter tensors, Python modules
and the insides of libraries.
"""

import argparse
import ast
import dis
import enum
import functools
import inspect
import io
import itertools
import logging
import random
import sys
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.core.mixins import HyperparametersMixin
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torchmetrics import Metric

from sagemaker_lightning.compat.lightning_trainer import (
    SET_BY_LIGHTNING,
    SET_ON_CALLBACKS,
    SET_ON_TRAINER,
)
from sagemaker_lightning.compat.torch_data import ITERATOR_ATTRIBUTE, ITERATOR_CLASS
from sagemaker_lightning.compat.torch_modules import members, unwrapped
from sagemaker_lightning.state.caches import kept

Found = TypeVar("Found")
GENERATORS = (
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    random.Random,
    torch.Generator,
)
LOADER_ATTRIBUTES = ("batch_plan", "planned")  # what data/deterministic.py gives a DataLoader
MAX_OBJECTS = 20_000  # objects that a walk yields of each attribute of a root, at most
MAX_MEMBERS = 1024  # elements of a container that a walk enters; a longer one holds samples
MAX_ELEMENTS = 256  # elements of a container by which its kind is judged

CONTAINERS = (dict, list, tuple, deque)
NAMESPACES = types.SimpleNamespace, argparse.Namespace, ChainMap, UserDict, UserList
"""Classes of Python's library whose objects are what their attributes are."""
LEAVES = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    type(None),
    range,
    slice,
    types.ModuleType,
    Tensor,
    np.ndarray,
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
    torch.Size,
)
NAMING = (str, bytes, int, float, np.generic, type(None), tuple, type, enum.Enum)
"""Classes of keys whose text names an element of a dict."""
# Classes of these packages have nothing that a user wrote. Their functions read no globals that a
# user may change.
LIBRARIES = {
    "torch",
    "torchvision",
    "torchaudio",
    "torchdata",
    "torchmetrics",
    "numpy",
    "pandas",
    "pyarrow",
    "PIL",
    "pytorch_lightning",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "litdata",
    "datasets",
    "sagemaker_lightning",
    "transformers",
    "scipy",
    "sklearn",
    "h5py",
    "lmdb",
    "jsonargparse",
    "tensorboard",
    "fsspec",
    "cv2",
    "llvmlite",
    "numba",
    "zmq",
    "builtins",
    *sys.stdlib_module_names,
}
OPEN = "torchvision", "torch.utils"
"""How the modules begin of those classes of libraries whose objects are entered as a user's."""
PIPELINES = {"datasets", "torchdata", "litdata", "logging"}
"""Those of them whose objects draw data, or log, by what a user gives them."""
MAX_OF_PIPELINE = 1_000
"""Parts of a pipeline, at most, that are looked at."""
MAX_OF_PACKAGE = 1_000
"""Functions and classes of an installed package, at most, that a walk enters: some have 50,000."""
INSTALLED = {"site-packages", "dist-packages"}  # folders of modules that the user has not written
LIGHTNINGS = ("pytorch_lightning.", "lightning.", "sagemaker_lightning.")


CODE = types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type

PLAIN = *CODE, type(None), bool, int, float, complex, str, bytes
"""Classes of variables that hold nothing that is drawn from, or lead to it by attributes."""

METHODS_OF_C = types.BuiltinFunctionType, types.MethodWrapperType
"""Methods of objects of C code, such as `[].append`, and functions of such code."""
FUNCTIONS = types.FunctionType, types.MethodType
"""What a user may put in the place of a method."""
BY_TEXT = {"getattr", "setattr", "vars", "__dict__", "globals", "attrgetter", "methodcaller"}
"""What code mentions that reads or sets variables whose names only a text has."""
HYPERPARAMETERS = "_hparams"
"""The attribute with the hyperparameters that Lightning saves; it restores no later changes."""


class AllBut:
    """All names but some.

    Args:
        names: These names.
    """

    __slots__ = ("names",)

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def __contains__(self, name: object) -> bool:
        return name not in self.names


class Added:
    """What a user has added to an object of a library's, such as a trainer or a parameter.

    It stands for variables, too, if the owner is a module, a class or a function of the user's.

    Args:
        owner: The object; what is set here is set there.
        excluded: Names of attributes that are not meant, such as the library's own.
    """

    __slots__ = ("excluded", "owner")

    def __init__(self, owner: Any, excluded: Container[str]) -> None:
        self.owner = owner
        self.excluded = excluded

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # nobody replaces it
        variables: dict[str, Any] = vars(self.owner)
        return variables


class Elsewhere:
    """Stands, among the roots of a walk, for an object whose state is handled elsewhere.

    The walk yields neither the object nor what only it leads to.

    Args:
        object_: The object.
    """

    __slots__ = ("object_",)

    def __init__(self, object_: Any) -> None:
        self.object_ = object_


def owner_of(value: Any) -> Any:
    """Return the object of which `Added` stands for a part; another value itself."""
    # isinstance asks a proxy for the class of its object, which may be gone.
    return value.owner if type(value) is Added else value


def has_variables(owner: Any) -> bool:
    """Return whether an object is a module, a class or a function, which have variables."""
    return isinstance(owner, (types.ModuleType, type, types.FunctionType))


PACKAGE = __name__.partition(".")[0]
ENTERED_CLASSES = (
    Added,
    nn.Module,
    Callback,
    LightningDataModule,
    torch.utils.data.Dataset,
    torch.utils.data.Sampler,
    torch.utils.data.DataLoader,
    *NAMESPACES,
)
OPTIMIZER_ATTRIBUTES = {"step", "_opt_called"}
"""Attributes that a learning-rate schedule sets on an optimizer."""


class _Measures(Metric):
    """A metric that has no more than the base class."""

    def update(self) -> None:
        """Do nothing."""

    def compute(self) -> None:
        """Do nothing."""


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter()])


PLAIN_OBJECTS: dict[type, Callable[[], Any]] = {
    nn.Module: nn.Module,
    LightningModule: LightningModule,
    LightningDataModule: LightningDataModule,
    Callback: Callback,
    ModelCheckpoint: ModelCheckpoint,  # each job has one
    Metric: _Measures,
    torch.utils.data.Dataset: torch.utils.data.Dataset,
    torch.utils.data.DataLoader: lambda: torch.utils.data.DataLoader([]),  # type: ignore[arg-type]  # a list has what it asks
    torch.optim.Optimizer: _optimizer,
    LightningOptimizer: lambda: LightningOptimizer(_optimizer()),
    Tensor: Tensor,
    nn.Parameter: nn.Parameter,
    threading.Thread: threading.Thread,
}
"""How an object of each of the libraries' base classes is made: its attributes are the library's.

It is so also of the bases of these classes.
"""
BASES = (
    nn.Module,
    LightningModule,
    LightningDataModule,
    Callback,
    Metric,
    torch.optim.Optimizer,
    torch.utils.data.Dataset,
    threading.Thread,
)


@kept
def is_leaf(class_: type) -> bool:
    """Return whether an object of a class leads to no other object of a user's."""
    return issubclass(class_, LEAVES)


def leads_on(value: Any) -> bool:
    """Return whether a value may lead to another object of a user's, as an array of objects may."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype.hasobject)
    return not is_leaf(type(value)) and not isinstance(value, LEAVES)


@kept
def is_of(class_: type, *bases: type) -> bool:
    """Return whether a class is one of some, or derived from one.

    An abstract one, such as Metric, would ask each of the hundred classes that are derived from it.
    """
    return not {*bases}.isdisjoint(class_.__mro__)


@kept
def is_own_module(name: str) -> bool:
    """Return whether the user has written a module, given by its name."""
    if is_library_module(name):  # most are, and to take a path apart takes time
        return False
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    if not INSTALLED.isdisjoint(file.parts):
        return False
    depth = name.count(".") + (file.stem == "__init__")
    outermost = name.partition(".")[0]
    return len(file.parents) <= depth or outermost not in _installed_in(file.parents[depth])


def is_own_code(code: Any) -> bool:
    """Return whether the user has written a function or a class."""
    return any(map(is_own_module, _modules_of(code)))


def is_librarys_function(function: types.FunctionType) -> bool:
    """Return whether a function is of LIBRARIES, and no wrapper that the user has written."""
    return is_library_class(function) and not is_own_code(function)


def _modules_of(code: Any) -> set[str]:
    """Return the names of the modules that a function or a class is of.

    What wraps a function has the name of that one's module (functools.wraps): a user's wrapper of a
    library's function, and a library's wrapper of a user's function, are the user's matter.
    """
    names = [getattr(code, "__module__", None)]
    if isinstance(code, types.FunctionType):
        names.append(code.__globals__.get("__name__"))
    return {name if isinstance(name, str) else "" for name in names}


@kept
def _installed_in(folder: Path) -> frozenset[str]:
    """Return the outermost names of what pip has installed into a folder of its own (--target)."""
    return frozenset(
        file.parts[0].removesuffix(".py")
        for found in folder.glob("*.dist-info")
        for file in metadata.Distribution.at(found).files or ()
    )


def is_library_module(name: str) -> bool:
    """Return whether a module, given by its name, is a library's."""
    return name.partition(".")[0] in LIBRARIES


def is_library_class(class_: type | Callable[..., Any]) -> bool:
    """Return whether a class, or a function, is a library's.

    What Cython has made for itself names no module, but an object that asks for its name.
    """
    module = class_.__module__ or ""
    return is_library_module(module) if isinstance(module, str) else True


@kept
def is_librarys_callback(class_: type) -> bool:
    """Return whether a class is that of a library's callback, from which no user derived it."""
    return is_library_class(class_) and issubclass(class_, Callback)


WITHOUT_POSITION = *weakref.ProxyTypes, type(iter(int, 1))
"""The classes of iterators that are at no place: a proxy, and what calls a function each time."""


def is_library_iterator(value: Any) -> bool:
    """Return whether a value is an iterator of a library's, and no file, that is at some place."""
    return _are_library_iterators(type(value)) and type(value) not in WITHOUT_POSITION


@kept
def _are_library_iterators(class_: type) -> bool:
    # To ask Iterator of a class without it asks all classes that are derived from Iterator.
    return (
        any("__next__" in vars(base) for base in class_.__mro__)
        and is_library_class(class_)
        and issubclass(class_, Iterator)
        and not issubclass(class_, io.IOBase)
    )


def _are_more_than_attributes(class_: type) -> bool:
    is_iterator = _are_library_iterators(class_) and class_ is not ITERATOR_CLASS
    return is_iterator or issubclass(class_, Trainer)


class _Moment(threading.local):
    """What this thread has found while nothing changes: see `at_one_moment`."""

    found: dict[tuple[Any, int], Any] | None = None
    walks: dict[tuple[int, tuple[type, ...], bool], list[tuple[str, Any]]]
    hashes: dict[tuple[Any, int], tuple[Any, bytes]]


_moment = _Moment()


@contextmanager
def at_one_moment() -> Iterator[None]:
    """Walk once over the same objects while the block lasts, in which nobody changes them.

    A walk over a model of a thousand modules takes ten milliseconds, and a checkpoint asks for a
    dozen. It asks for the hash of a dataset as one of the user's objects, and as what a loader has.
    """
    if _moment.found is not None:
        yield
        return
    _moment.found = {}
    _moment.walks = {}
    _moment.hashes = {}
    try:
        yield
    finally:
        _moment.found = None
        _moment.walks = {}
        _moment.hashes = {}


def once_at_one_moment(find: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """Decorate a function of one argument that searches objects, such as for roots of walks.

    It is called once for each argument at one moment; nobody changes what it returns.
    """

    @functools.wraps(find)
    def found(owner: Any) -> Found:
        if _moment.found is None:
            return find(owner)
        key = find, id(owner)
        if key not in _moment.found:
            _moment.found[key] = find(owner)
        return cast(Found, _moment.found[key])

    return found


def hash_at_one_moment(value: Any, hash_of: Callable[[Any], bytes]) -> bytes:
    """Return a hash of an object, which is taken once at one moment.

    Args:
        value: The object.
        hash_of: Returns its hash.
    """
    if _moment.found is None:
        return hash_of(value)
    key = hash_of, id(value)
    if key not in _moment.hashes:
        _moment.hashes[key] = value, hash_of(value)  # of a kept object, nobody else gets the id
    return _moment.hashes[key][1]


def walk(
    roots: Mapping[str, Any], skip: tuple[type, ...] = (), code: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the object for each object reached from `roots`, once each.

    Many objects in one attribute of a root, such as the sentences of a corpus, take nothing away
    from the others.

    Args:
        roots: The objects to start from, by name.
        skip: Classes whose objects are yielded but not entered.
        code: Whether to enter what functions and classes hold.
    """
    if not any(roots is each for each in (_moment.found or {}).values()):
        return _walked(roots, skip, code)
    key = id(roots), skip, code
    if key not in _moment.walks:
        _moment.walks[key] = list(_walked(roots, skip, code))
    return iter(_moment.walks[key])


def _walked(
    roots: Mapping[str, Any], skip: tuple[type, ...], code: bool
) -> Iterator[tuple[str, Any]]:
    """Yield what `walk` returns."""
    marks = [root for root in roots.values() if isinstance(root, Elsewhere)]
    seen = {id(object_) for mark in marks for object_ in (mark, mark.object_)}
    stack = [(path, root, 0) for path, root in reversed(list(roots.items())) if leads_on(root)]
    closed = (*GENERATORS, *skip)
    objects_left = MAX_OBJECTS
    code_left: dict[str, int] = defaultdict(lambda: MAX_OF_PACKAGE)
    while stack:
        path, value, depth = stack.pop()
        if id(value) in seen:
            continue
        if depth < 2:  # a root or an attribute of one
            objects_left = MAX_OBJECTS
        if not objects_left:
            continue
        seen.add(id(value))
        objects_left -= 1
        yield path, value
        is_container = isinstance(value, CONTAINERS)
        if code and (package := _installed_package(value)):
            code_left[package] -= 1
            if code_left[package] < 0:
                continue
        if not is_of(type(value), *closed):
            members = [each for each in _members(value, code) if leads_on(each[1])]
            member_depth = 2 if is_container else depth + 1
            stack += [
                (f"{path}.{name}", member, member_depth) for name, member in reversed(members)
            ]


def _installed_package(value: Any) -> str:
    """Return the package of an installed function or class, but for LIBRARIES; "" for another."""
    is_code = isinstance(value, (types.FunctionType, type))
    if not is_code or is_library_class(value) or is_own_code(value):
        return ""
    return (value.__module__ or "").partition(".")[0]


def _members(value: Any, code: bool) -> Iterator[tuple[str, Any]]:  # noqa: C901 (branches by type)
    """Yield name and value of what an object holds."""
    class_ = type(value)
    if isinstance(value, dict):
        names: set[str] = set()
        for index, (key, member) in enumerate(itertools.islice(value.items(), MAX_MEMBERS)):
            # The text of an object, such as a layer, may be that of others, or have an address.
            name = str(key) if isinstance(key, NAMING) else f"{type(key).__name__}#{index}"
            if name in names:  # the texts of 1 and "1" are equal
                name += f"#{index}"
            names.add(name)
            yield name, member
        yield from _attributes_beside(value, names)
    elif isinstance(value, CONTAINERS):
        for index, member in enumerate(itertools.islice(value, MAX_MEMBERS)):
            yield str(index), member
        yield from _attributes_beside(value, ())
    elif isinstance(value, np.ndarray):
        for index, member in enumerate(itertools.islice(value.flat, MAX_MEMBERS)):
            yield str(index), member
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif code and isinstance(value, (classmethod, staticmethod)):
        yield "func", value.__func__
    elif code and isinstance(value, property):
        yield from (("get", value.fget), ("set", value.fset), ("del", value.fdel))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "func", value.__func__
    elif class_ in METHODS_OF_C:
        if (owner := owner_of_method(value)) is not None:
            yield "self", owner
    elif isinstance(value, types.FunctionType):
        yield from (function_members(value) if code else attributes(value).items())
        yield from (module_members(value) if code else ())
    elif class_ is types.CellType:
        yield "value", value_of(value)
    elif isinstance(value, type):
        if code and not is_library_class(value):
            yield from (
                (name, member)
                for name, member in vars(value).items()
                if not name.startswith("__") or callable(member)
            )
            # Its bases, and a metaclass, which may keep the only instances.
            yield from (*_own_classes(value), *_own_classes(class_))
    elif not _are_library_iterators(class_) and (
        not is_library_class(class_)
        or isinstance(value, ENTERED_CLASSES)
        or class_.__module__.startswith(OPEN)
    ):
        yield from attributes(value).items()
        if isinstance(value, nn.Module):
            for name, child in nn.Module.named_children(value):
                yield name, unwrapped(child)
        if code:
            yield from _own_classes(class_)
    elif not class_.__module__.startswith(LIGHTNINGS):
        yield from users_members(value)


@kept
def is_of_pipeline(class_: type) -> bool:
    """Return whether a class is one of a library that draws data."""
    return class_.__module__.partition(".")[0] in PIPELINES


def users_members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of what is the user's in a library's object.

    That is a generator, such as the engine of a sequence of points, which a user has made for a
    model; a function, such as what `numpy.vectorize` calls; and in the parts of a pipeline of data,
    functions and objects of the user's, and torch's samplers and datasets, which may hold such. A
    logger has handlers and filters.
    """
    for name, member in namespace(value).items():
        is_function = isinstance(member, types.FunctionType) and is_own_code(member)
        if is_function or isinstance(member, GENERATORS):
            yield name, member
    if not is_of_pipeline(type(value)):
        return
    seen = {id(value)}
    waiting = deque([("", value)])
    while waiting and len(seen) < MAX_OF_PIPELINE:
        path, owner = waiting.popleft()
        for name, member in _parts_of_pipeline(owner):
            if id(member) in seen or is_leaf(type(member)):
                continue
            seen.add(id(member))
            code = member if isinstance(member, FUNCTIONS) else type(member)
            module = code.__module__ or ""
            if not isinstance(member, type) and (is_own_module(module) or module.startswith(OPEN)):
                yield f"{path}{name}", member
            else:
                waiting.append((f"{path}{name}.", member))


def _parts_of_pipeline(value: Any) -> Iterable[tuple[str, Any]]:
    """Return name and value of what leads on within a pipeline: its parts, containers, partials."""
    if isinstance(value, dict):
        return [(str(key), each) for key, each in itertools.islice(value.items(), MAX_MEMBERS)]
    if isinstance(value, (list, tuple)):
        return [(str(n), each) for n, each in enumerate(value[:MAX_MEMBERS])]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, logging.Logger):  # it knows all others
        return [("handlers", value.handlers), ("filters", value.filters)]
    return list(namespace(value).items()) if is_of_pipeline(type(value)) else ()


def _attributes_beside(value: Any, names: Container[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the attributes that a container of a user's class has.

    Args:
        value: The container.
        names: The names of its elements.
    """
    if not is_library_class(type(value)):
        for name, member in attributes(value).items():
            yield f"{name}#" if name in names else name, member


@kept
def _own_classes(class_: type) -> tuple[tuple[str, type], ...]:
    """Return name and class of each of a class's bases, and of itself, unless it is a library's."""
    return tuple(
        (f"({base.__name__})", base) for base in class_.__mro__ if not is_library_class(base)
    )


def namespace(value: Any) -> Mapping[str, Any]:
    """Return an object's `__dict__`; {} if it has none.

    An object without one may answer any name, as that of a C library does: it is not asked.
    """
    try:
        variables: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return variables


def has_namespace(value: Any) -> bool:
    """Return whether an object has a `__dict__`; like `namespace`, it does not ask the object."""
    try:
        object.__getattribute__(value, "__dict__")
    except AttributeError:
        return False
    return True


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a user's object by name.

    Those that a library's own code handles are left out. For a function, return the variables that
    it has closed over. A library's iterator has none: its position, and what its workers do, are
    more than its attributes, but for that of a DataLoader without workers. A trainer has none: what
    a user has added to it is a root of its own. A library's callback has only the functions that it
    was given, what replaces its methods, and what a user has added; one of this package has none.
    """
    class_ = type(value)
    if class_ is Added:
        return {
            name: member
            for name, member in vars(value.owner).items()
            # Lightning notes what a loader was made with, as __pl_saved_args.
            if name not in value.excluded and not name.startswith("__")
        }
    if _are_more_than_attributes(class_):
        return {}
    if is_librarys_callback(class_):
        if is_ours(value):
            return {}
        own = _set_by_libraries(class_, ())
        return {
            name: member
            for name, member in namespace(value).items()
            if (name not in own or type(member) is types.FunctionType or _is_method(class_, name))
            and not _is_foreign_method(value, name, member)
        }
    excluded = _handled_by_libraries(class_)
    if is_of(class_, Metric):
        excluded = excluded | value.metric_state.keys()
    if isinstance(value, types.FunctionType):
        return {} if is_librarys_function(value) else closure(value)
    values = {
        name: attribute
        for name, attribute in namespace(value).items()
        if (name not in excluded or type(attribute) in FUNCTIONS)
        and not _is_foreign_method(value, name, attribute)
    }
    for name in _slots(class_):
        if name not in excluded:
            with suppress(AttributeError):  # not set; the class's own __getattr__ may raise another
                values[name] = object.__getattribute__(value, name)
    return values


def _is_foreign_method(owner: Any, name: str, member: Any) -> bool:
    """Return whether a member is another's method, put there by this package or by Lightning."""
    return type(member) is types.MethodType and (
        is_ours(member.__self__) or (name in SET_ON_CALLBACKS and isinstance(owner, Callback))
    )


def is_ours(value: Any) -> bool:
    """Return whether a value is an object of a class of this package's."""
    return type(value).__module__.partition(".")[0] == PACKAGE


@kept
def _slots(class_: type) -> tuple[str, ...]:
    """Return the names of the attributes that a class and its bases have slots for."""
    names = []
    for base in class_.__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            is_private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{base.__name__.lstrip('_')}{slot}" if is_private else slot
            if name not in ("__dict__", "__weakref__"):
                names.append(name)
    return tuple(names)


def has_place_for(owner: Any, name: str, value: Any) -> bool:
    """Return whether `attributes` would have a value if the object had it by this name.

    If not, it is not a state of a user's: such as a folder that a library's callback writes to, a
    layer, or a number in place of a method. A checkpoint, which is input, sets no such attribute.

    Args:
        owner: The object; it need not have the attribute yet.
        name: The name of the attribute.
        value: The value.
    """
    if _are_more_than_attributes(type(owner)):
        return False
    if isinstance(owner, types.FunctionType):
        return name in owner.__code__.co_freevars and not is_librarys_function(owner)
    object_ = owner_of(owner)
    present = namespace(object_).get(name)
    if has_variables(object_) and (is_code(present) or is_code(value)):
        return False
    if isinstance(owner, Added):
        is_excluded = name in owner.excluded
    else:
        class_ = type(object_)
        is_excluded = (
            name in _set_by_libraries(class_, ())
            if is_librarys_callback(class_)
            else name in _handled_by_libraries(class_)
        )
    if is_excluded:
        is_in_place = present is None and _is_method(type(object_), name)
        return isinstance(value, FUNCTIONS) and (is_in_place or isinstance(present, FUNCTIONS))
    if name in ("__class__", "__dict__") or (isinstance(owner, Added) and name.startswith("__")):
        return False
    if isinstance(object_, nn.Module) and (
        name in members(object_)
        or (is_of(type(object_), Metric) and name in cast(Metric, object_).metric_state)
    ):
        return False
    return present is not None or not _is_method(type(object_), name) or callable(value)


def is_code(value: Any) -> bool:
    """Return whether a variable of a module or a class has a function, a class or a module."""
    if owner_of_method(value) is not None:
        return False
    if isinstance(value, functools.partial):  # from Python 3.13 on, it has `__get__`, too
        return False
    return isinstance(value, CODE) or hasattr(type(value), "__get__")


def _is_method(class_: type, name: str) -> bool:
    """Return whether the objects of a class have a method of that name."""
    member = next((vars(base)[name] for base in class_.__mro__ if name in vars(base)), None)
    return isinstance(member, (types.FunctionType, classmethod, staticmethod))


@kept
def _handled_by_libraries(class_: type) -> frozenset[str]:
    """Return the names of attributes that a library's base classes handle."""
    names: set[str] = {*SET_BY_LIGHTNING, ITERATOR_ATTRIBUTE, *LOADER_ATTRIBUTES}
    if issubclass(class_, torch.optim.Optimizer):
        names |= OPTIMIZER_ATTRIBUTES
    if issubclass(class_, HyperparametersMixin):
        names.add(HYPERPARAMETERS)
    callbacks = [
        base for base in class_.__mro__ if issubclass(base, Callback) and is_library_class(base)
    ]
    for base in class_.__mro__:
        is_excluded = base in BASES or any(issubclass(callback, base) for callback in callbacks)
        if is_excluded or (base.__module__ or "").startswith(LIGHTNINGS):
            names |= _own_attributes(base)
    return frozenset(names)


def added_to(owner: Any, but: tuple[str, ...] = ()) -> Added:
    """Return what a user, or a class of the user's, has added to an object of a library's class.

    Args:
        owner: The object.
        but: Names of attributes of the library's that are returned, too.
    """
    return Added(owner, _set_by_libraries(type(owner), but))


@kept
def _set_by_libraries(class_: type, but: tuple[str, ...]) -> frozenset[str]:
    """Return the names of attributes, but for some, that the libraries' bases have or set."""
    names = {*LOADER_ATTRIBUTES}
    # If data/deterministic.py has changed a loader's class, it is the class before.
    class_ = getattr(class_, "users_class", class_)
    if issubclass(class_, torch.optim.Optimizer):
        names |= OPTIMIZER_ATTRIBUTES
    names = names.union(*map(_own_attributes, filter(is_library_class, class_.__mro__)))
    return frozenset(names.difference(but))


@kept
def _own_attributes(base: type) -> set[str]:
    """Return the names of attributes that a library's class declares, or sets on its own objects.

    Names that its code has for other objects are not among them: a user's `self.step` is not a
    state of Lightning's because Lightning calls `optimizer.step()`. Its methods are not, either:
    what an object has in place of one, a user has put there.
    """
    names = {*getattr(base, "__annotations__", ())}
    for name, member in vars(base).items():
        if not isinstance(getattr(member, "__func__", member), types.FunctionType):
            names.add(name)
    if base in PLAIN_OBJECTS:
        made: dict[str, Any] = vars(PLAIN_OBJECTS[base]())
        return names | made.keys()
    if base is Trainer:  # to make one takes long
        return names | SET_ON_TRAINER
    is_base = any(base in class_.__mro__ for class_ in PLAIN_OBJECTS)
    # What an optimizer's own class keeps besides its state and groups is in no state_dict().
    if is_base or issubclass(base, torch.optim.Optimizer):
        return names
    return names | set_on_self(base)


def set_on_self(class_: type) -> set[str]:
    """Return the names of the attributes that the code of a class sets on its own objects.

    Python knows them since 3.13; before, the source is read. Without a source, there are none.
    """
    if (names := vars(class_).get("__static_attributes__")) is not None:
        return {*names}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[class_.__module__]))
    except (KeyError, OSError, TypeError):
        return set()
    return {
        node.attr
        for definition in ast.walk(tree)
        if isinstance(definition, ast.ClassDef) and definition.name == class_.__name__
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def value_of(cell: types.CellType) -> Any:
    """Return the value of a variable that functions have closed over; None if it has none yet."""
    return None if cell == types.CellType() else cell.cell_contents


def closure(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function has closed over, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    # Empty cells are left out.
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def function_members(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function has closed over, its defaults and the globals it reads."""
    yield from closure(function).items()
    yield "defaults", function.__defaults__ or ()
    yield "kwdefaults", function.__kwdefaults__ or {}
    if not is_librarys_function(function):
        for name in sorted(names_read(function)):
            if name in function.__globals__:
                global_value = function.__globals__[name]
                if not isinstance(global_value, type) or not is_library_class(global_value):
                    yield name, global_value


def module_members(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield name and value of what a function may read as `module.variable`, of the user's modules.

    The name begins with the module's.
    """
    for module, names in modules_in(function).items():
        variables = vars(module)
        for name in sorted(names & variables.keys()):
            yield f"{module.__name__}.{name}", variables[name]


def modules_in(function: types.FunctionType) -> dict[types.ModuleType, frozenset[str]]:
    """Return the user's modules that a function mentions, and the names it may read in each.

    They are the names in its code; all of the module's, if it may read one that a text has.
    """
    names = names_in_code(function.__code__)
    by_text = not BY_TEXT.isdisjoint(names)
    # One that the function imports itself is not a variable of its own module.
    found = (function.__globals__.get(name, sys.modules.get(name)) for name in sorted(names))
    return {
        module: names | names_of_variables(vars(module)) if by_text else names
        for module in found
        if isinstance(module, types.ModuleType) and is_own_module(module.__name__)
    }


def names_read(function: types.FunctionType) -> frozenset[str]:
    """Return the names of variables of its own module that a function may read.

    They are all of them if it takes names from texts. Some of the names in its code may be names of
    attributes only. They are left out if the module has an object by one: an attribute and a
    variable are often named alike, and what a sample reads is seeded.
    """
    names = names_in_code(function.__code__)
    variables = function.__globals__
    if "globals" in names:
        return names | names_of_variables(variables)
    found = (variables[name] for name in names if name in variables)
    if "__name__" in names or all(isinstance(value, PLAIN) for value in found):
        return names
    return global_names_in_code(function.__code__)


def names_of_variables(variables: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of a module's variables, but for those that Python sets."""
    return frozenset(name for name in variables if not name.startswith("__"))


def owner_of_method(value: Any) -> Any:
    """Return the object whose method of C code a value is; None for a function, or another value.

    A function of C code has its module in that place, and a class's method its class. Functions of
    Boost.Python's say that they are of the class, and have no such place.
    """
    owner = value.__self__ if type(value) in METHODS_OF_C else None
    return None if isinstance(owner, (types.ModuleType, type)) else owner


@functools.lru_cache(maxsize=1 << 14)
def global_names_in_code(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function's code, and the functions within it, mention as globals."""
    inner_functions = (
        constant for constant in code.co_consts if isinstance(constant, types.CodeType)
    )
    names = frozenset(
        each.argval
        for each in dis.get_instructions(code)
        if each.opname.endswith(("_GLOBAL", "_NAME", "_GLOBALS"))
    )
    return names.union(*map(global_names_in_code, inner_functions))


@functools.lru_cache(maxsize=1 << 14)
def names_in_code(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function's code and the functions within it mention."""
    inner_functions = (
        constant for constant in code.co_consts if isinstance(constant, types.CodeType)
    )
    return frozenset(code.co_names).union(*map(names_in_code, inner_functions))
