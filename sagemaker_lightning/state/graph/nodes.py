"""The objects that are reached from roots, each once, with the path by which it is reached first.

The order is that of distance, so that an object's path is a shortest one, and the same in each
process that makes the same objects.
"""

import argparse
import ctypes
import functools
import itertools
import multiprocessing.sharedctypes
import types
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from pytorch_lightning import Trainer
from torch import Tensor

from sagemaker_lightning.state.graph import atoms, fingerprints
from sagemaker_lightning.state.graph.atoms import SCALARS
from sagemaker_lightning.state.graph.kinds.base import Kind
from sagemaker_lightning.state.graph.kinds.containers import CONTAINERS
from sagemaker_lightning.state.graph.kinds.memory import ArrayKind, TensorKind
from sagemaker_lightning.state.graph.kinds.objects import (
    BASES,
    CellKind,
    FunctionKind,
    MethodKind,
    ObjectKind,
    ReferenceKind,
)
from sagemaker_lightning.state.graph.kinds.states import BytesKind, CountKind, GeneratorKind
from sagemaker_lightning.state.object_graph import (
    ENTERED_CLASSES,
    GENERATORS,
    LIBRARIES,
    Added,
    Elsewhere,
    is_library_class,
    owner_of,
)

LONG = 1 << 16
"""Elements of a container of plain data beyond which its elements are no nodes of the start."""

OBJECT = ObjectKind()
TENSOR = TensorKind()
ARRAY = ArrayKind()
FUNCTION = FunctionKind()
GENERATOR = GeneratorKind()
CODE = ReferenceKind("class")
LIBRARYS = ReferenceKind("library")
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *CONTAINERS.values(),
        OBJECT,
        TENSOR,
        ARRAY,
        FUNCTION,
        GENERATOR,
        BytesKind(),
        CountKind(),
        MethodKind(),
        CellKind(),
    )
}
"""The kinds of which a record has nodes, by name."""
NAMESPACES = types.SimpleNamespace, argparse.Namespace
# Of the first of these that an object is of, it has the kind.
BY_CLASS: tuple[tuple[Any, Kind], ...] = (
    (Added, OBJECT),
    (Tensor, TENSOR),
    (np.ndarray, ARRAY),
    (GENERATORS, GENERATOR),
    (types.FunctionType, FUNCTION),
    (types.MethodType, KINDS["method"]),
    (types.CellType, KINDS["cell"]),
    ((type, types.ModuleType, types.BuiltinFunctionType), CODE),
    (
        (
            bytearray,
            array,
            multiprocessing.sharedctypes.SynchronizedBase,
            ctypes._SimpleCData,  # noqa: SLF001 (the base of all numbers has no public name)
            ctypes.Array,
        ),
        KINDS["bytes"],
    ),
    (itertools.count, KINDS["count"]),
    (Trainer, LIBRARYS),
    (NAMESPACES, OBJECT),
)


@functools.cache
def kind_of_class(class_: type) -> Kind | None:
    """Return the kind of the objects of a class; None if they have no identity of their own."""
    if atoms.is_atom(class_):
        return None
    if class_ in CONTAINERS:
        return CONTAINERS[class_]
    for classes, kind in BY_CLASS:
        if issubclass(class_, classes):
            return kind
    if issubclass(class_, tuple):
        return CONTAINERS[tuple] if hasattr(class_, "_fields") else LIBRARYS
    is_librarys = is_library_class(class_)
    if is_librarys and hasattr(class_, "__next__"):  # its position is more than its attributes
        return LIBRARYS
    is_entered = (
        not is_librarys
        or issubclass(class_, (*ENTERED_CLASSES, *BASES))
        or class_.__module__.startswith(("torchvision", "torch.utils"))
    )
    return OBJECT if is_entered else LIBRARYS


def kind_of(value: Any) -> Kind | None:
    """Return the kind of an object; None if it has no identity of its own."""
    kind = kind_of_class(type(value))
    is_librarys = kind is FUNCTION and (value.__module__ or "").partition(".")[0] in LIBRARIES
    return CODE if is_librarys else kind


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

    __slots__ = ("content", "index", "kind", "mark", "note", "parent", "parts", "value")

    def __init__(self, value: Any, kind: Kind, parent: "Node | None", index: Any) -> None:
        self.value = value
        self.kind = kind
        self.parent = parent
        self.index = index
        self.mark = b""
        self.content = None  # kept only by a start that can be gone back to
        self.note, self.parts = kind.take(value)

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
    skip: tuple = (),
    is_settled: Callable[[int, Node], bool] | None = None,
) -> dict[int, Node]:
    """Return the nodes that are reached from `roots`, by what they are known.

    Args:
        roots: The objects to start from, by name.
        skip: Classes whose objects are nodes without parts.
        is_settled: Returns whether what a node of a long container of plain data refers to is not
            needed; by default, it never is.
    """
    nodes: dict[int, Node] = {}
    waiting: deque = deque()
    # What stands for what was added to an object comes first: it says which attributes are meant.
    # Nor is what is handled elsewhere entered, whatever else leads to it.
    marks = Elsewhere, Added
    for name, root in sorted(roots.items(), key=lambda item: not isinstance(item[1], marks)):
        if isinstance(root, Elsewhere):
            nodes[id(root.object_)] = Node(root.object_, CODE, None, name)
        elif (kind := kind_of(root)) is not None and key_of(root) not in nodes:
            nodes[key_of(root)] = node = Node(root, kind, None, name)
            waiting.append(node)
    while waiting:
        node = waiting.popleft()
        parts = node.parts
        if skip and isinstance(owner_of(node.value), skip):
            node.note, node.parts = type(node.note)(), []
            continue
        if len(parts) > LONG:
            if SCALARS.issuperset(map(type, parts)):
                continue
            node.mark = (
                fingerprints.of_plain_data(node.value) if type(node.value) in CONTAINERS else b""
            )
            if node.mark and (is_settled is None or is_settled(key_of(node.value), node)):
                continue
        for index, part in enumerate(parts):
            class_ = type(part)
            if class_ in SCALARS:
                continue
            key = id(part)
            if key in nodes:
                continue
            if class_ is tuple and SCALARS.issuperset(map(type, part)):
                continue
            if (kind := kind_of(part)) is None:
                continue
            nodes[key] = child = Node(part, kind, node, index)
            waiting.append(child)
    return nodes
