"""The state of a user's objects over a run: marked at the start, saved, restored, compared."""

import hashlib
import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sagemaker_lightning.compat.dtensors import local_part
from sagemaker_lightning.state.graph import fingerprints
from sagemaker_lightning.state.graph.atoms import TUPLE_OF_SCALARS, is_id
from sagemaker_lightning.state.graph.decoding import Restored, restore
from sagemaker_lightning.state.graph.encoding import Unsaved, encode, values_changed
from sagemaker_lightning.state.graph.kinds.base import refusing
from sagemaker_lightning.state.graph.kinds.objects import set_member
from sagemaker_lightning.state.graph.nodes import (
    ARRAY,
    CODE,
    KINDS,
    OBJECT,
    ORDERLESS_KINDS,
    TENSOR,
    Node,
    key_of,
    scan,
)
from sagemaker_lightning.state.graph.shared_memory import SharedMemory
from sagemaker_lightning.state.graph.start import Start
from sagemaker_lightning.state.graph.text import Record
from sagemaker_lightning.state.object_graph import is_of, once_at_one_moment, owner_of

ORDERLESS = {kind.name for kind in ORDERLESS_KINDS}
NUMBERS = int, float, np.number
MAX_NUMBERS = 1 << 16
"""Numbers, at most, of a list of which a hash is taken."""


class Trained(NamedTuple):
    """What a training has changed of the objects that are reached from its roots."""

    touched: dict[int, set[str] | None]
    """As in a GraphState."""
    made: dict[int, Any]
    """As in a GraphState."""
    objects: list[Any]
    """Those that were changed, which keep what they are known by."""


NOTHING_TRAINED = Trained({}, {}, [])


class GraphState:
    """The state of the objects that are reached from roots.

    Only what has changed since `mark` is saved: the program makes again what was there at the
    start, and a resumed run may rightly have another value there, such as the name of a folder.

    Args:
        roots: Returns the objects to start from, by name.
        skip: Classes whose objects are not entered.
        is_kept: Whether `return_to` is possible: the content at the start is kept.
        before: What an earlier training has changed: a resumed program does not do that again.
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, Any]],
        skip: tuple[type, ...] = (),
        is_kept: bool = False,
        before: Trained = NOTHING_TRAINED,
    ) -> None:
        self.roots = roots
        self.skip = skip
        self.is_kept = is_kept
        self.start: Start | None = None
        self.before = before
        self.made = {**before.made}
        """Objects that the program does not make again at its start, by what they are known."""
        self.touched = {**before.touched}
        """Objects, by what they are known, that count as changed, or which of their attributes."""
        self.unsaved: list[Unsaved] = []
        """What has changed, and is not in the newest record."""
        self.recorded: set[int] = set()
        """By what the objects are known that the newest record has."""
        self.new_objects: dict[int, Any] = {}
        """Those that were made since the start, by what they are known, if new roots come next."""
        self.reordered: set[str] = set()
        """Sets whose elements come in another order after a restart."""
        self.parted: set[str] = set()
        """Tensors that share memory with others, and do not after a restart."""
        self.restored: list[tuple[Mapping[str, Any], list[Any]]] = []
        """The records that were restored, each with the new objects that it has made."""

    def begin(self) -> Start:
        """Return the start; take the present state as it, if there is none."""
        if self.start is None:
            self.start = Start(
                self.roots(),
                self.skip,
                generators=False,
                is_kept=self.is_kept,
                made=self.made,
            )
        return self.start

    @once_at_one_moment
    def nodes(self) -> dict[int, Node]:
        """Return the nodes of the objects that are reached now, by what they are known."""
        return scan(self.roots(), self.skip, self.start.nodes if self.start else None)

    def nodes_of(
        self,
        *classes: type,
        skip: tuple[type, ...] = (),
        is_root: Callable[[str], bool] | None = None,
    ) -> Iterator[tuple[str, Node]]:
        """Yield path and node of each object of some classes that is reached now.

        An object of the start has the path by which it is known there, whatever else leads to it.

        Args:
            classes: The classes; `object` for all.
            skip: Classes whose objects are not entered.
            is_root: Returns whether to start from a root, by its name; None for all of them.
        """
        paths = self.start.paths if self.start else {}
        nodes = self.nodes()
        found = _of_classes(nodes, classes)
        if found and (is_root or (skip and _of_classes(nodes, skip))):
            roots = self.roots().items()
            nodes = scan({name: each for name, each in roots if not is_root or is_root(name)}, skip)
            found = _of_classes(nodes, classes)
        for key, node in found.items():
            path = paths.get(key)
            if path is None or (is_root and not is_root(path)):
                path = node.path
            yield path, node

    def reached(self, *classes: type) -> Iterator[tuple[str, Any]]:
        """Yield path and object of each object of some classes that is reached now."""
        return ((path, node.value) for path, node in self.nodes_of(*classes))

    def place_of(self, node: Node) -> tuple[str, str]:
        """Return where a node is: an object of the start, by its path, and the attribute."""
        start = self.begin()
        name = ""
        while (parent := node.parent) is not None:
            name = parent.kind.step(parent.note, parent.parts, node.index).lstrip(".")
            node = parent
            if node.kind is OBJECT and key_of(node.value) in start.paths:
                break
        return start.paths.get(key_of(node.value)) or node.path, name

    def mark(self) -> None:
        """Take the present state as the one at the start."""
        self.begin().mark_again(self.roots())

    def end_start(self) -> None:
        """Note that what the objects get from now on they get while training."""
        self.begin().is_over = True

    def include(self) -> None:
        """Take in roots that the program has just made again, such as loaders."""
        content, self.new_objects = self.new_objects, {}
        self.begin().include_anew(self.roots(), content)

    def changes(self) -> dict[tuple[int, str], Any]:
        """Return what has changed since `mark`: by what the object is known and name, the value."""
        return values_changed(self.roots(), self.begin())

    def touch(
        self, changes: Mapping[tuple[int, str], Any], before: Container[int] | None = None
    ) -> None:
        """Count values as changed from now on, with all that they hold.

        Args:
            changes: Some of what `changes` returned.
            before: By what objects are known that there were before the hooks that have changed
                these values; None if it were no hooks at the start.
        """
        for (key, name), value in changes.items():
            self._touch(key, name)
            for each, node in scan({"": value}).items():
                is_of_hooks = before is not None and each not in before
                if is_of_hooks:
                    self.begin().made_by_hooks[each] = node.value
                if is_of_hooks or node.kind is not OBJECT:
                    self.touched[each] = None

    def touch_shared(self, record: Record, of_ranks: Iterable[Collection[str]]) -> bool:
        """Count DTensors of the start as changed of which any rank's part has changed.

        Args:
            record: What `encode` has returned on this rank.
            of_ranks: The paths of the DTensors that each rank has in its record.

        Returns:
            Whether the record lacks such.
        """
        by_path = self.begin().by_path
        lacking = set().union(*of_ranks) - record.get("shared", {}).keys()
        found = [by_path[path].value for path in lacking if path in by_path]
        for value in found:
            self._touch(key_of(value), "")
        return bool(found)

    def _touch(self, key: int, name: str) -> None:
        """Count an object, or one of its attributes, as changed from now on."""
        names = self.touched.setdefault(key, set() if name else None)
        if name and names is not None:
            names.add(name)
        elif not name:
            self.touched[key] = None

    def touch_all(self) -> None:
        """Count all that has changed since `mark` as changed from now on."""
        known = self.begin().nodes
        nodes = scan(self.roots())
        self.made |= {key: node.value for key, node in nodes.items() if key not in known}
        for key, name in self.changes():
            self._touch(key, name)

    def trained(self) -> Trained:
        """Return what has changed since `mark`, or was touched."""
        self.touch_all()
        reached = scan(self.roots(), self.skip)  # what else there was may go
        touched = {key: names for key, names in self.touched.items() if key in reached}
        made = {key: value for key, value in self.made.items() if key in reached}
        return Trained(touched, made, [reached[key].value for key in touched])

    def encode(self, but: str = "", is_restored: bool = False) -> Record:
        """Return a record of what has changed since `mark`, or was touched.

        Args:
            but: How the names begin of roots in whose place new ones come next: what others have of
                them is written as if it was new. "" for none.
            is_restored: Whether this process is going to restore it: what is new stays the same.
        """
        roots, start = self.roots(), self.begin()
        if but:
            start.include(roots)
            roots = {name: root for name, root in roots.items() if not name.startswith(but)}
            start = start.without(but)
        encoded = encode(roots, start, self.touched)
        self.unsaved = encoded.unsaved
        self.recorded = set(encoded.recorded)
        # Without these, another object may be known by what one was known by that is gone.
        new = encoded.recorded.items() if but else ()
        self.new_objects = {key: each for key, each in new if each is not None}
        if is_restored:
            self.restored.append((encoded.record, [*encoded.recorded.values()]))
        self.reordered |= set(encoded.reordered)
        self.parted |= set(encoded.parted)
        return encoded.record

    def restore(
        self,
        record: Record,
        accept: Callable[[list[Any]], list[Any] | None] = lambda node: node,
    ) -> Restored:
        """Restore what `encode` returned; it counts as changed from now on.

        Args:
            record: The record. If it is restored again, its new objects stay the same.
            accept: Returns what is restored of a node of the start; None for nothing.
        """
        made = next((made for known, made in self.restored if known is record), [])
        restored = restore(self.roots(), self.begin(), record, accept, made)
        self.restored = [each for each in self.restored if each[0] is not record]
        self.restored.append((record, restored.made))
        self.made |= {key_of(each): each for each in restored.made if each is not None}
        for key, names in restored.filled.items():
            before = self.touched.get(key, set())
            self.touched[key] = None if names is None or before is None else before | set(names)
        self.reordered |= set(restored.reordered)
        return restored

    def without(self, record: Record, root: str) -> Record:
        """Return a record without the objects of the start whose paths begin like this.

        If it is restored, the new objects that the record has made stay the same.
        """
        rest = without(record, root)
        self.restored += [(rest, made) for known, made in self.restored if known is record]
        return rest

    def return_to(self, record: Record, keeps_unsaved: bool = False) -> None:
        """Bring the objects back to the state of which `encode` returned a record.

        Args:
            record: The record; it may be another process's, which has made the same objects.
            keeps_unsaved: Whether attributes stay as they are of which no record has the value,
                such as a generator. Else they get their values at the start.
        """
        unsaved = encode(self.roots(), self.begin(), self.touched).unsaved if keeps_unsaved else ()
        owners = [(self.begin().by_path.get(each.path), each) for each in unsaved]
        # A data worker that runs would see, in memory that it shares, what was there at the start.
        shared = SharedMemory()
        by_path = self.begin().by_path
        known = {id(by_path[path].value) for path in names_in(record) if path in by_path}
        self.begin().reset(lambda value: id(value) in known and shared.has(value))
        restore(self.roots(), self.begin(), record)
        for owner, each in owners:
            if owner is not None and owner.kind is OBJECT and not each.is_part:
                set_member(owner.value, each.name, each.value)

    def return_shared(self, record: Record) -> None:
        """Bring the content that processes share back to a state, and nothing else.

        Args:
            record: What `encode` returned in that state.
        """
        by_path = self.begin().by_path
        shared = SharedMemory()

        def accept(node: list[Any]) -> list[Any] | None:
            known = by_path.get(node[1])
            return node if known is not None and shared.has(known.value) else None

        restore(self.roots(), self.begin(), record, accept)

    def names_changed(self) -> list[str]:
        """Return the attributes that have changed since `mark`, each with its object's class.

        Content that processes share is left out: another process may have changed it.
        """
        nodes = self.begin().nodes
        shared = SharedMemory()
        return sorted(
            {
                _name_of_change(nodes[key], name)
                for key, name in self.changes()
                if not shared.has(nodes[key].value)
            }
        )

    def numbers(self, changed: Set[str], but: tuple[str, ...], alone: str = "") -> dict[str, bytes]:
        """Return a hash of the arrays and numbers of each attribute of the start that has some.

        The hash is the same in another process. Single numbers are left out, and so are objects
        that nothing leads to any more, such as of a sampler that the next epoch's loader lacks.

        Args:
            changed: The names of what has changed; attributes that hold such are left out.
            but: How the paths begin of which lists and tuples of numbers are left out, too.
            alone: How the names begin of roots of which what others hold, too, is left out, such as
                rows of a data module's of which each epoch's data are some. "" for none.
        """
        start = self.begin()
        saved_by_others = set(map(id, start.saved_by_others().values()))
        roots = self.roots().items() if alone else ()
        others = {name: root for name, root in roots if not name.startswith(alone)}
        held = scan(others, self.skip).keys()
        reached = self.nodes()
        marks: dict[str, list[bytes]] = {}
        left_out = set()
        for key, node in start.nodes.items():
            if key in saved_by_others or key not in reached:
                continue
            found = {}
            if isinstance(node.value, np.memmap):  # its file is as the interrupted run left it
                continue
            if node.kind in (TENSOR, ARRAY):
                found[""] = node.mark
            elif start.paths[key].startswith(but):
                continue
            elif rows := _numbers_in(node):
                found[""] = repr(rows).encode()
            elif node.kind is OBJECT:
                found = {
                    f".{name}": repr(part).encode()
                    for name, part in zip(node.note, node.parts, strict=False)
                    if type(part) is tuple and _are_numbers(part)
                }
            for name, mark in found.items():
                attribute = _attribute_of(node, start) + name
                if key in held and attribute.startswith(alone):
                    continue
                marks.setdefault(attribute, []).append(mark)
                # What has taken another object's place is known by another path than its place's.
                names = start.paths[key], attribute, _in_attribute(node).path + name
                if not changed.isdisjoint(names):
                    left_out.add(attribute)
        return {
            name: fingerprints.of_bytes(b" ".join(found))
            for name, found in marks.items()
            if name not in left_out and all(found)
        }


def _of_classes(nodes: Mapping[int, Node], classes: tuple[type, ...]) -> dict[int, Node]:
    """Return the nodes of objects of some classes, but for what is of the program itself."""
    return {
        key: node
        for key, node in nodes.items()
        if node.kind is not CODE and is_of(type(node.value), *classes)
    }


def _in_attribute(node: Node) -> Node:
    """Return the object that an attribute has, and in which a node is."""
    while node.kind is not OBJECT and node.parent is not None and node.parent.kind is not OBJECT:
        node = node.parent
    return node


def _attribute_of(node: Node, start: Start) -> str:
    """Return the path of the attribute in which an object is."""
    node = _in_attribute(node)
    return start.paths.get(key_of(node.value), node.path)


def _name_of_change(node: Node, name: str) -> str:
    """Return the attribute, with the class that has it, of what has changed in a node."""
    if not name:
        node = _in_attribute(node)
        if (parent := node.parent) is None:
            return node.path
        name = parent.kind.step(parent.note, parent.parts, node.index).lstrip(".")
        node = parent
    return f"{type(owner_of(node.value)).__qualname__}.{name}"


def _numbers_in(node: Node) -> list[Any]:
    """Return the numbers of a list of numbers, or of rows of such, or of a row in a list."""
    is_in_list = node.parent is not None and node.parent.kind is KINDS["list"]
    is_row = node.kind is KINDS["tuple"] and is_in_list
    if len(node.parts) > MAX_NUMBERS or not (is_row or node.kind is KINDS["list"]):
        return []
    found = [
        part
        for part in node.parts
        if isinstance(part, NUMBERS) or (type(part) is tuple and _are_numbers(part))
    ]
    return found if is_row or len(found) == len(node.parts) else []


def _are_numbers(values: Any) -> bool:
    return 0 < len(values) <= MAX_NUMBERS and all(isinstance(value, NUMBERS) for value in values)


def nodes_of(record: Record) -> list[list[Any]]:
    """Return the nodes of a record, with numbers in place of tensors."""
    with refusing():
        nodes: list[list[Any]] = json.loads(record["nodes"])
    return nodes


def without(record: Record, root: str) -> Record:
    """Return a record without the objects of the start whose paths begin like this."""
    # Others refer to nodes by their numbers.
    with refusing():
        nodes = [
            ["list", None, None, [], None] if (node[1] or "").startswith(root) else node
            for node in nodes_of(record)
        ]
    return {**record, "nodes": json.dumps(nodes)}


@refusing()
def names_in(record: Record) -> list[str]:
    """Return the paths of the objects of the start, and of their attributes, in a record."""
    names = []
    for _, path, note, *_ in nodes_of(record):
        if path is not None:
            names.append(path)
            if isinstance(note, dict):
                names += [f"{path}.{name}" for name in note.get("names", ())]
    return names


@refusing()
def digests(record: Record) -> dict[str, str]:
    """Return a digest of each value in a record, with all that it holds, by its path.

    The device of a tensor and the order of a set may differ where values are equal.
    """
    nodes = nodes_of(record)
    tensors = digests_of_tensors(record)
    found = {}
    for kind, path, note, references, content in nodes:
        if path is None:
            continue
        if isinstance(note, dict) and "names" in note:
            names = note["names"]
            for name, reference in zip(names, references, strict=False):
                found[f"{path}.{name}"] = digest([reference], None, None, nodes, tensors)
            if elements := references[len(names) :]:
                found[path] = digest(elements, None, None, nodes, tensors)
        else:
            parts = sorted(references, key=repr) if kind in ORDERLESS else references
            kept = None if kind in ORDERLESS else note
            found[path] = digest(parts, kept, content, nodes, tensors)
    return found


def digests_of_tensors(
    record: Record, of_tensor: Callable[[Tensor], bytes] = fingerprints.of_tensor
) -> dict[Any, str]:
    """Return a digest of each tensor of a record, by the number or path by which it is known."""
    # Where a checkpoint was read, DTensors are on the device of their mesh.
    parts = {path: local_part(tensor).cpu() for path, tensor in record.get("shared", {}).items()}
    tensors: dict[Any, Tensor] = {**dict(enumerate(record["tensors"])), **parts}
    return {key: of_tensor(tensor).hex() for key, tensor in tensors.items()}


def digest(
    references: list[Any], note: Any, content: Any, nodes: list[Any], tensors: Mapping[Any, str]
) -> str:
    """Return a digest of references, in which each new object has a number of its own."""
    hash_ = hashlib.blake2b(digest_size=8)
    numbers: dict[int, int] = {}
    waiting = [(references, note, content)]

    def described(reference: Any) -> Any:
        if type(reference) is list and reference[:1] == [TUPLE_OF_SCALARS]:
            return [TUPLE_OF_SCALARS, *map(described, reference[1:])]
        target = reference[1] if is_id(reference) else reference
        if type(target) is not list or not target or type(target[0]) is not int:
            return reference
        if target[0] not in numbers:
            numbers[target[0]] = len(numbers)
            kind, _, note_of, parts, content_of = nodes[target[0]]
            if kind in ORDERLESS:
                parts, note_of = sorted(parts, key=repr), None
            elif isinstance(note_of, dict) and "names" in note_of:  # attributes, in any order
                names = note_of["names"]
                order = sorted(range(len(names)), key=names.__getitem__)
                parts = [parts[index] for index in order] + parts[len(names) :]
                note_of = {**note_of, "names": sorted(names)}
            waiting.append((parts, [kind, note_of], content_of))
        return [numbers[target[0]], is_id(reference)]

    while waiting:
        references, note, content = waiting.pop()
        parts = [*map(described, references)]
        hash_.update(json.dumps([parts, note, _readable(content, tensors)]).encode())
    return hash_.hexdigest()


def _readable(content: Any, tensors: Mapping[Any, str]) -> Any:
    """Return content with digests in place of the numbers and paths of tensors."""
    if type(content) is list:
        return [_readable(element, tensors) for element in content]
    if type(content) is not dict:
        return content
    if content.keys() == {"tensor"}:
        return tensors[content["tensor"]]
    values = content.get("values")
    if type(values) is list:  # a row of a block
        content = content | {"values": [tensors[values[0]], values[1]]}
    return {
        name: value
        if name == "scalars"
        else tensors[value]
        if name == "shared"
        else _readable(value, tensors)
        for name, value in content.items()
        if name != "device"
    }


def is_table(value: Any) -> bool:
    """Return whether a value is a table, such as of pandas, polars or pyarrow."""
    return hasattr(type(value), "__dataframe__") or hasattr(type(value), "__arrow_c_stream__")
