"""The objects that are reached from roots, each once, with the path by which it is reached first.

The order is that of distance, so that an object's path is a shortest one, and the same in each
process that makes the same objects.
"""

import copyreg
import ctypes
import io
import itertools
import multiprocessing.synchronize
import random
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Container, Mapping
from typing import Any, Generic

import numpy as np
from pytorch_lightning import Trainer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from sagemaker_lightning.compat.torch_data import ITERATOR_CLASS, index_iterator_of
from sagemaker_lightning.compat.torch_modules import COMPILER_MODULES, SHARDING_MODULES
from sagemaker_lightning.state.caches import kept
from sagemaker_lightning.state.graph import atoms, fingerprints
from sagemaker_lightning.state.graph.atoms import SCALARS
from sagemaker_lightning.state.graph.kinds.base import Kind
from sagemaker_lightning.state.graph.kinds.containers import CONTAINERS
from sagemaker_lightning.state.graph.kinds.draws import DrawsKind, how_begun
from sagemaker_lightning.state.graph.kinds.memory import ArrayKind, TensorKind, pointer_of
from sagemaker_lightning.state.graph.kinds.objects import (
    BASES,
    SCALAR_BASES,
    CellKind,
    FunctionKind,
    MethodKind,
    MethodOfCKind,
    ObjectKind,
    ReferenceKind,
    WeakReferenceKind,
)
from sagemaker_lightning.state.graph.kinds.optimizers import OPTIMIZERS, OptimizerKind
from sagemaker_lightning.state.graph.kinds.states import (
    BUFFERS,
    ITERATORS,
    JOINED,
    REVERSED,
    BytesKind,
    CountKind,
    CycleKind,
    FlagKind,
    GeneratorKind,
    IteratorKind,
    JoinedKind,
    ReadFileKind,
    ReversedKind,
    SeedKind,
    StreamKind,
    first_round,
    is_over_sequence,
    is_read,
    place_in_cycle,
    place_in_sequence,
)
from sagemaker_lightning.state.graph.packing import PACKED_FROM, Pack, packed
from sagemaker_lightning.state.object_graph import (
    ENTERED_CLASSES,
    GENERATORS,
    LIGHTNINGS,
    METHODS_OF_C,
    Added,
    Elsewhere,
    attributes,
    is_library_class,
    is_librarys_function,
    is_of,
    owner_of,
    owner_of_method,
)

OBJECT = ObjectKind()
TENSOR = TensorKind()
ARRAY = ArrayKind()
FUNCTION = FunctionKind()
GENERATOR = GeneratorKind()
OPTIMIZER = OptimizerKind()
CODE = ReferenceKind("class")
LIBRARYS = ReferenceKind("library")
MAYBE_OPTIMIZERS = OBJECT, LIBRARYS
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *CONTAINERS.values(),
        OBJECT,
        TENSOR,
        ARRAY,
        FUNCTION,
        GENERATOR,
        OPTIMIZER,
        BytesKind(),
        StreamKind(),
        ReadFileKind(),
        FlagKind(),
        SeedKind(),
        CountKind(),
        IteratorKind(),
        CycleKind(),
        ReversedKind(),
        JoinedKind(),
        DrawsKind(),
        MethodKind(),
        MethodOfCKind(),
        WeakReferenceKind("weak reference", weakref.ref),
        WeakReferenceKind("weak proxy", weakref.proxy),
        CellKind(),
    )
}
"""The kinds of which a record has nodes, by name."""
POSITIONED_KINDS = tuple(
    KINDS[name] for name in ("count", "iterator", "cycle", "reversed", "joined", "draws")
)
"""The kinds of iterators."""
ORDERLESS_KINDS = {CONTAINERS[set], CONTAINERS[frozenset]}
"""The kinds whose parts have another order in each process."""
FLAGS = threading.Event, multiprocessing.synchronize.Event
IMMUTABLE = 1 << 8
"""The flag of a class that nobody can change."""
WITHOUT_CONTENT = (
    object,
    Generic,
    types.SimpleNamespace,
    threading.local,
    *io.RawIOBase.__mro__,
    *io.BufferedIOBase.__mro__,
    *io.TextIOBase.__mro__,
    *BASES,
    defaultdict,
    *SCALAR_BASES,
)
"""Classes of C code of which a user's class may be one that is its attributes, or a container."""
METHODS_OF_BINDINGS = "instancemethod", "cython_function_or_method"
"""The names of the classes of methods that pybind11 and Cython make."""
# An object has the kind of the first of these that it is an instance of.
BY_CLASS: tuple[tuple[Any, Kind], ...] = (
    (Added, OBJECT),
    (Tensor, TENSOR),
    (np.ndarray, ARRAY),
    (random.SystemRandom, CODE),  # it has no state
    (GENERATORS, GENERATOR),
    (types.FunctionType, FUNCTION),
    (types.MethodType, KINDS["method"]),
    (types.CellType, KINDS["cell"]),
    (weakref.ReferenceType, KINDS["weak reference"]),
    (weakref.ProxyTypes, KINDS["weak proxy"]),
    # What connects the ranks has no state of the training.
    ((type, types.ModuleType, types.BuiltinFunctionType, ProcessGroup), CODE),
    (BUFFERS, KINDS["bytes"]),
    (np.random.SeedSequence, KINDS["seed"]),
    (itertools.count, KINDS["count"]),
    # A structure may have addresses, which are those of one process.
    ((Trainer, ctypes.Structure, ctypes.Union), LIBRARYS),
)


@kept
def kind_of_class(class_: type) -> Kind | None:
    """Return the kind of the objects of a class; None if they have no identity of their own."""
    if atoms.is_atom(class_):
        return None
    if class_ in CONTAINERS:
        return CONTAINERS[class_]
    if class_ in fingerprints.STREAMS:
        return KINDS["stream"]
    if class_ in FLAGS:
        return KINDS["flag"]
    for classes, kind in BY_CLASS:
        if issubclass(class_, classes):
            return kind
    if issubclass(class_, tuple):
        is_made_again = hasattr(class_, "_fields") or not is_library_class(class_)
        return CONTAINERS[tuple] if is_made_again else LIBRARYS
    if class_.__module__.startswith(COMPILER_MODULES):
        return CODE
    if class_.__module__.startswith(SHARDING_MODULES) and not issubclass(class_, nn.Module):
        return CODE
    is_librarys = is_library_class(class_)
    # What an object of C code holds is more than its attributes.
    if not is_librarys and (
        _is_derived_from_c(class_) or (fingerprints.is_shown(class_) and _has_methods_of_c(class_))
    ):
        return LIBRARYS
    if is_librarys and hasattr(class_, "__next__"):  # its position is more than its attributes
        return LIBRARYS
    is_entered = (
        not is_librarys
        or issubclass(class_, (*ENTERED_CLASSES, *BASES))
        or class_.__module__.startswith(("torchvision", "torch.utils"))
    )
    return OBJECT if is_entered else LIBRARYS


def _is_derived_from_c(class_: type) -> bool:
    """Return whether a user's class is derived from one of C code that holds something itself.

    Only classes of C code are immutable
    (https://docs.python.org/3/c-api/typeobj.html#c.Py_TPFLAGS_IMMUTABLETYPE).
    """
    return any(
        base.__flags__ & IMMUTABLE and base not in WITHOUT_CONTENT for base in class_.__mro__
    )


def _has_methods_of_c(class_: type) -> bool:
    """Return whether a class has methods of C code, and not those of Python's own classes alone."""
    return any(
        getattr(member, "__objclass__", None) is base
        if isinstance(member, types.MethodDescriptorType)
        else type(member).__name__ in METHODS_OF_BINDINGS
        for base in class_.__mro__[:-1]
        if not is_library_class(base)
        for member in vars(base).values()
    )


def kind_of(value: Any, known: Mapping[int, "Node"] | None = None) -> Kind | None:
    """Return the kind of an object; None if it has no identity of its own.

    Args:
        value: The object.
        known: The nodes of a start, by what they are known, if optimizers that are made later are
            kinds of their own. A library's object that was its attributes alone stays what it was.
    """
    class_ = type(value)
    if class_ in METHODS_OF_C and owner_of_method(value) is not None:
        return KINDS["method of C"]
    kind = kind_of_class(class_)
    if known is not None and kind in MAYBE_OPTIMIZERS and is_of(class_, *OPTIMIZERS):
        return kind if id(value) in known else OPTIMIZER
    if kind is LIBRARYS:
        was_entered = known is not None and id(value) in known and known[id(value)].kind is OBJECT
        return OBJECT if was_entered else _kind_of_librarys(value)
    return CODE if kind is FUNCTION and is_librarys_function(value) else kind


def _kind_of_librarys(value: Any) -> Kind:
    """Return the kind of a library's object: what its class alone does not tell."""
    class_ = type(value)
    if class_ is types.GeneratorType and how_begun(value) is not None:
        return KINDS["draws"]
    if class_ is ITERATOR_CLASS:
        return OBJECT if has_position(value) else LIBRARYS
    if class_ in ITERATORS and place_in_sequence(value):
        return KINDS["iterator"]
    if class_ is itertools.cycle and (
        place_in_cycle(value) or ((parts := first_round(value)) and has_position(parts[0]))
    ):
        return KINDS["cycle"]
    if class_ in REVERSED and is_over_sequence(value):
        return KINDS["reversed"]
    if class_ in JOINED and all(map(has_position, KINDS["joined"].take(value)[1])):
        return KINDS["joined"]
    if is_read(value):
        return KINDS["file"]
    return OBJECT if holds_values_alone(value) else LIBRARYS


_ARE_ATTRIBUTES: dict[type, bool] = {}
"""Whether the objects of a library's class are what their attributes are, as far as asked."""
MORE_THAN_VALUES = "__del__", "__next__", "__copy__", "__deepcopy__", "state_dict"
"""Names of methods by which objects end, continue, are copied or are saved in their own way."""
MAX_OF_VALUE = 1_000
"""Objects of those that a library's object holds, at most, that are looked at."""


def is_made_of_attributes(value: Any) -> bool:
    """Return whether a library's object is what its attributes are, by what its class says.

    Its class says so to `copy` and `pickle`: a copy is an empty object that gets the attributes
    (https://docs.python.org/3/library/pickle.html#object.__reduce__). What has a method for its
    end, or a `state_dict`, is more than that. The first object of a class is asked.
    """
    class_ = type(value)
    if class_ not in _ARE_ATTRIBUTES:
        _ARE_ATTRIBUTES[class_] = _copies_attributes(value)
    return _ARE_ATTRIBUTES[class_]


def may_be_of_values(class_: type) -> bool:
    """Return whether nothing in a library's class says that its objects are more than values."""
    is_handle = class_.__module__.partition(".")[0] in fingerprints.HANDLES
    if is_handle or not is_library_class(class_) or class_.__module__.startswith(LIGHTNINGS):
        return False
    return not issubclass(class_, (*BASES, tuple)) and not any(
        hasattr(class_, name) for name in MORE_THAN_VALUES
    )


def _copies_attributes(value: Any) -> bool:
    class_ = type(value)
    if not may_be_of_values(class_):
        return False
    try:
        make, arguments, state, *elements = value.__reduce_ex__(2)
    except Exception:  # what an object of any class says when it is copied
        return False
    states = state if isinstance(state, tuple) else (state,)
    copied: dict[str, Any] = {}
    for each in states:
        if isinstance(each, dict):
            copied |= each
        elif each is not None:
            return False
    return (
        make is copyreg.__newobj__  # type: ignore[attr-defined]  # the stubs lack it
        and arguments == (class_,)
        and all(each is None for each in elements)
        and all(
            name in copied and _is_copied(part, copied[name])
            for name, part in attributes(value).items()
        )
    )


def _is_copied(part: Any, copied: Any) -> bool:
    """Return whether an attribute of a copy is that of the object, or an array of its values."""
    return copied is part or (
        type(part) is type(copied) is np.ndarray
        and fingerprints.of_array(part) == fingerprints.of_array(copied) != b""
    )


def holds_values_alone(value: Any) -> bool:
    """Return whether a library's object, and what it holds of libraries, are their attributes.

    A lock, a handle and what code in C holds are more, such as in a client of a service.
    """
    waiting = [value]
    seen = {id(value)}
    while waiting:
        each = waiting.pop()
        kind = kind_of_class(type(each))
        if kind is LIBRARYS and not is_made_of_attributes(each):
            return False
        parts = [*attributes(each).values()] if kind is LIBRARYS else []
        if kind is not None and (kind is ARRAY or type(each) in CONTAINERS):
            _, parts = kind.take(each)
        if SCALARS.issuperset(map(type, parts)):
            continue
        found = {id(part): part for part in parts if id(part) not in seen}
        seen |= found.keys()
        if len(seen) > MAX_OF_VALUE:
            return True
        waiting += found.values()
    return True


def has_position(value: Any) -> bool:
    """Return whether an object is an iterator whose position a record has.

    That of a DataLoader has the position of the iterator by which it draws.
    """
    if type(value) is ITERATOR_CLASS:
        value = index_iterator_of(value)
    return kind_of(value) in POSITIONED_KINDS


def key_of(value: Any) -> int:
    """Return by what an object is known: its id.

    What was added to a tensor is known apart from the tensor, which is a node of its own.
    """
    if isinstance(value, Added):
        return -id(value.owner) if isinstance(value.owner, Tensor) else id(value.owner)
    return id(value)


class Node:
    """An object, with what it refers to at a moment.

    Args:
        value: The object, or what stands for what was added to it.
        kind: Its kind.
        parent: The node that refers to it first; None for a root.
        index: Which part of the parent it is; the name of a root.
    """

    __slots__ = (
        "class_",
        "content",
        "index",
        "is_unpacked",
        "kind",
        "mark",
        "note",
        "pack",
        "parent",
        "parts",
        "value",
    )

    def __init__(self, value: Any, kind: Kind, parent: "Node | None", index: Any) -> None:
        self.value = value
        self.class_ = type(owner_of(value))  # code may give an object another one
        self.kind = kind
        self.parent = parent
        self.index = index
        self.mark = b""
        self.content = None  # kept only by a start that can be gone back to
        self.pack: Pack | None = None  # the elements, if they are not nodes of their own
        self.is_unpacked = False  # whether they are, though they are many
        self.note, self.parts = kind.take(value)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes by name, if it is the node of an object that has such."""
        return dict(zip(self.note, self.parts, strict=False))

    @property
    def path(self) -> str:
        """The path by which the object is reached first."""
        steps = []
        node = self
        while node.parent is not None:
            parent = node.parent
            steps.append(parent.kind.step(parent.note, parent.parts, node.index))
            node = parent
        return "".join([node.index, *reversed(steps)])


def scan(
    roots: Mapping[str, Any],
    skip: tuple[type, ...] = (),
    known: Mapping[int, Node] | None = None,
    but: Container[int] = (),
) -> dict[int, Node]:
    """Return the nodes that are reached from `roots`, by what they are known.

    Args:
        roots: The objects to start from, by name.
        skip: Classes whose objects are nodes without parts.
        known: As in `kind_of`: of optimizers that are made later, groups and states are reached.
        but: What objects are known by that are not nodes, and through which none is reached.
    """
    nodes: dict[int, Node] = {}
    waiting: deque[Node] = deque()
    # What stands for what was added to an object comes first: it says which attributes are meant.
    # What is handled elsewhere is not entered, whatever else leads to it.
    marks = Elsewhere, Added
    for name, root in sorted(roots.items(), key=lambda item: not isinstance(item[1], marks)):
        if isinstance(root, Elsewhere):
            nodes[id(root.object_)] = Node(root.object_, CODE, None, name)
        elif (kind := kind_of(root)) is not None and key_of(root) not in nodes:
            nodes[key_of(root)] = node = Node(root, kind, None, name)
            waiting.append(node)
    packs: dict[int, Node] = {}
    orderless: deque[Node] = deque()
    while waiting or orderless or (packs and _unpack_shared(nodes, packs, waiting)):
        node = _next_node(waiting, orderless)
        parts = node.parts
        if skip and isinstance(owner_of(node.value), skip):
            node.note, node.parts = type(node.note)(), []
            continue
        if len(parts) >= PACKED_FROM:
            if SCALARS.issuperset(map(type, parts)):
                continue
            if not node.is_unpacked and (pack := _pack(node, nodes, packs)) is not None:
                parts = parts[: pack.first]
        for index, part in enumerate(parts):
            class_ = type(part)
            if class_ in SCALARS:
                continue
            key = id(part)
            if key in nodes or key in but:
                continue
            if class_ is tuple and SCALARS.issuperset(map(type, part)):
                continue
            if (kind := kind_of(part, known)) is None:
                continue
            if key in packs:
                waiting.append(_unpack(packs[key], packs))
            nodes[key] = child = Node(part, kind, node, index)
            waiting.append(child)
    return nodes


def _next_node(waiting: deque[Node], orderless: deque[Node]) -> Node:
    """Return the node whose parts come next: a set's after all others.

    Objects in a set have another order in each process, and so are known by other places first.
    """
    while waiting and waiting[0].kind in ORDERLESS_KINDS:
        orderless.append(waiting.popleft())
    return (waiting or orderless).popleft()


def _pack(node: Node, nodes: Mapping[int, Node], packs: dict[int, Node]) -> Pack | None:
    """Pack a node's elements, and return them, if nothing else is known to refer to them."""
    pack = packed(node.kind, node.parts, kind_of_class)
    if pack is None or not pack.ids.isdisjoint(nodes) or not pack.ids.isdisjoint(packs):
        node.is_unpacked = True
        return None
    node.pack = pack
    node.mark = pack.mark
    packs |= dict.fromkeys(pack.ids, node)
    return pack


def _unpack(node: Node, packs: dict[int, Node]) -> Node:
    """Have a node's elements be nodes of their own."""
    for key in node.pack.ids if node.pack else ():
        del packs[key]
    node.pack = None
    node.mark = b""
    node.is_unpacked = True
    return node


def _unpack_shared(nodes: Mapping[int, Node], packs: dict[int, Node], waiting: deque[Node]) -> bool:
    """Unpack what shares its memory with other tensors and arrays; return whether there is some."""
    by_pointer = {
        pointer: node
        for node in {id(n): n for n in packs.values()}.values()
        for pointer in (node.pack.pointers if node.pack else ())
    }
    shared = {}
    for node in nodes.values():
        if node.kind is TENSOR and by_pointer:
            holder = by_pointer.get(pointer_of(node.value))
        elif node.kind is ARRAY:
            holder = packs.get(id(node.value.base))
        else:
            continue
        if holder is not None:
            shared[id(holder)] = holder
    waiting.extend(_unpack(holder, packs) for holder in shared.values())
    return bool(shared)
