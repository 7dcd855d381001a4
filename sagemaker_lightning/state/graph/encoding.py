"""Encode the graph that is reached from roots: what is new in it, and what has changed.

A record is a text and a list of tensors on the CPU, which torch.load(weights_only=True) reads. The
text (text.py) has the nodes, which are lists of kind, path at the start (None for an
object that was made since), note, references and content (kinds/base.py). A reference is a scalar
itself, or a list: [number of a node], ["at", path at the start], ["by others", name of a tensor
that the checkpoint has besides], ["factory", name of a class of Python's], ["id", reference to
the object whose id it is], or an atom (atoms.py).
"""

import enum
import operator
import types
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.graph import atoms, fingerprints, scalars, text
from sagemaker_lightning.state.graph.atoms import SCALARS, TUPLE_OF_SCALARS
from sagemaker_lightning.state.graph.kinds.base import NotSaved, class_name, kind_text
from sagemaker_lightning.state.graph.kinds.code import NAMES_OF_FACTORIES
from sagemaker_lightning.state.graph.kinds.containers import (
    CONTAINERS,
    SetKind,
    loses_order,
    may_be_address,
)
from sagemaker_lightning.state.graph.kinds.objects import SPACES, ObjectKind, says_its_state
from sagemaker_lightning.state.graph.kinds.views import (
    ArrayViewKind,
    TensorViewKind,
    bases_of,
    bases_within,
    bytes_of,
    has_plain_memory,
    is_array_within,
    is_plain_view,
    is_tensor_within,
    memory_of,
    owner_of_array,
    place_across,
    place_in_array,
    place_in_tensor,
    span,
    tensor_of_array,
)
from sagemaker_lightning.state.graph.nodes import (
    ARRAY,
    CODE,
    FUNCTION,
    GENERATOR,
    KINDS,
    LIBRARYS,
    OBJECT,
    OPTIMIZER,
    POSITIONED_KINDS,
    TENSOR,
    Node,
    key_of,
    kind_of,
    scan,
)
from sagemaker_lightning.state.graph.packing import Pack
from sagemaker_lightning.state.graph.start import Start, collector_paused, size_of
from sagemaker_lightning.state.graph.text import Record
from sagemaker_lightning.state.object_graph import is_library_class, is_library_module, owner_of

MAX_SAVED = 1 << 26
"""Elements, at most, of a tensor or an array that is saved of objects that reflection enters."""
PACKED_FROM = 256
"""Tensors of one form, of which more than this many are written as one."""
TENSOR_VIEW = TensorViewKind()
ARRAY_VIEW = ArrayViewKind()
HOLDERS = {kind for kind in (*CONTAINERS.values(), ARRAY) if kind.fills}
"""Kinds of containers that get other elements in place."""
TUPLE = KINDS["tuple"]
CLOSING = FUNCTION, KINDS["method"], KINDS["cell"]
"""The kinds of what has variables of its own: what a function has closed over, and that."""
MADE_OF_TORCHS = tuple, Tensor, nn.Parameter, DTensor


class Unsaved(NamedTuple):
    """An attribute that has changed since the start, and is not in a record."""

    path: str
    """The path of the object that has it."""
    name: str
    """The attribute's name."""
    kind: str
    """What cannot be saved, such as the name of a class."""
    value: Any
    """The attribute's value."""
    is_part: bool
    """Whether it only holds what cannot be saved."""
    changes: bool
    """Whether it is an object of the start that has changed."""
    refused: Any
    """The object that cannot be saved."""
    is_first: bool
    """Whether the object of the start stays in its place."""
    loses: bool
    """Whether numbers, tensors or containers are lost with it, which could be saved without it."""


class Encoded(NamedTuple):
    """What `encode` returns."""

    record: Record
    """What is reached from the roots and differs from the start."""
    unsaved: list[Unsaved]
    """What the record lacks."""
    reordered: list[str]
    """The paths of sets whose elements come in another order, now or later, when made again."""
    recorded: dict[int, Any]
    """The objects that the record has, in its order, by what they are known: each new object; None
    for one of the start."""
    parted: list[str]
    """The paths of tensors that share memory with others, and do not when made again."""


class Draft(NamedTuple):
    """What is written of a node, with references to nodes that may yet turn out unsaveable."""

    path: str | None
    note: Any
    parts: list[Any]
    """What it refers to; of an object, also the attributes that are values of their own."""
    references: list[Any]
    content: Any


def encode(
    roots: Mapping[str, Any], start: Start, touched: Mapping[int, Any] = MappingProxyType({})
) -> Encoded:
    """Return a record of what is reached from roots and differs from the start, and what it lacks.

    Args:
        roots: The objects to start from, by name.
        start: What the program had made at its start.
        touched: Which objects of the start are written even if they are as then, by what they are
            known; of one with attributes, the names of these, or None for all.
    """
    start.include(roots)
    with collector_paused():
        encoder = Encoder(roots, start, touched)
        encoder.draft_all()
        encoder.refuse_holders()
        record = encoder.record()
        return Encoded(record, encoder.unsaved, encoder.reordered, encoder.recorded, encoder.parted)


def values_changed(roots: Mapping[str, Any], start: Start) -> dict[tuple[int, str], Any]:
    """Return what has changed since the start: by what its object is known and name, the value.

    The name is "" for a container or an array that has changed itself.

    Args:
        roots: The objects to start from, by name.
        start: What the program had made at its start.
    """
    start.include(roots)
    encoder = Encoder(roots, start, {})
    changes: dict[tuple[int, str], Any] = {}
    for key, node in encoder.nodes.items():
        before = start.nodes.get(key)
        if before is None or key in encoder.by_others or node.kind in (CODE, GENERATOR, LIBRARYS):
            continue
        if isinstance(node.kind, ObjectKind):
            found = node.kind.difference(before, node, encoder.is_same)
            note, parts = found or ({"names": []}, [])
            changes |= {(key, name): part for name, part in zip(note["names"], parts, strict=False)}
            if "elements" in note:
                changes[key, ""] = owner_of(node.value)
            continue
        mark = (node.mark or start.mark(node)) if before.mark else b""
        if mark != before.mark or not encoder.are_same(before, node):
            changes[key, ""] = node.value
    return changes


class Encoder:
    """Drafts what is written of each node, leaves out what cannot be, and makes the record.

    Args:
        roots: The objects to start from, by name.
        start: What the program had made at its start.
        touched: As in `encode`.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        start: Start,
        touched: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        self.start = start
        self.touched = touched
        self.nodes: dict[int, Node] = {}
        self.replaced: set[int] = set()
        self.nodes = scan(roots, start.skip, start.nodes)
        self.by_others: dict[int, str] = {}
        saved_by_others = start.saved_by_others()
        for name, value in saved_by_others.items():
            # A weight that was tied while training has two names: that of a start counts.
            if id(value) not in self.by_others or start.paths.get(id(value)) == name:
                self.by_others[id(value)] = name
        self.references: dict[int, list[Any]] = {}
        self.drafts: dict[int, Draft] = {}
        self.refused: dict[int, str] = {}
        """What cannot be saved, by id: what it is."""
        self.first_of: dict[int, int] = {}
        """For what cannot be saved because of a part of it: the id of that."""
        self.origins: set[int] = set()
        self.holders: dict[int, list[int]] = {}
        """For what drafts refer to: what they are drafts of, by what it is known."""
        self.says_state: dict[int, bool] = {}
        """Which objects were asked for their own state, and whether that is saved."""
        self.losing: set[int] = set()
        """What cannot be saved because of a part of it, and holds more than such parts."""
        self.unsaved: list[Unsaved] = []
        self.reordered: list[str] = []
        self.recorded: dict[int, Any] = {}
        self.parted: list[str] = []
        self.replaced = self._replaced(saved_by_others)
        self.kept: list[Any] = []  # keeps what was made here, whose ids are in use

    def _replaced(self, saved_by_others: Mapping[str, Tensor]) -> set[int]:
        """Return the objects of the start in whose place others come, as they cannot be filled.

        One that has got another class is such an object, too, if both classes are the program's.

        Args:
            saved_by_others: The tensors that a checkpoint has besides, by name.
        """
        fixed = {key: node for key, node in self.nodes.items() if not node.kind.fills}
        replaced = {
            key
            for key, node in fixed.items()
            if (before := self.start.nodes.get(key)) is not None
            and (
                before.note != node.note
                # A cycle is over a list of its own from its second round on. A tuple of a user's
                # class may have attributes.
                or (
                    (node.kind in POSITIONED_KINDS or type(node.note) is list)
                    and not all(map(operator.is_, before.parts, node.parts))
                )
            )
        }
        # A touched tuple is the start's own here; a resumed program makes one of other numbers.
        replaced |= {
            key
            for key in self.touched.keys() & fixed.keys()
            if fixed[key].kind is TUPLE and any(type(part) in SCALARS for part in fixed[key].parts)
        }
        # In the place of a module's parameter or buffer there is another one, and this one is kept
        # elsewhere: the module's own, which the start has made, gets the other one's values.
        replaced |= {
            key
            for key in self.start.of_modules.keys() & self.nodes.keys() - self.by_others.keys()
            if self.nodes[key].kind is TENSOR
            and any(name in saved_by_others for name in self.start.of_modules[key])
        }
        replaced |= {
            key
            for key, node in self.nodes.items()
            if node.kind is OBJECT
            and (before := self.start.nodes.get(key)) is not None
            and before.class_ is not node.class_
            and not is_library_class(before.class_)
            and not is_library_class(node.class_)
        }
        replaced |= self._changed_beside() | self._made_by_hooks()
        size = 0
        while len(replaced) > size:
            size = len(replaced)
            replaced |= {
                key
                for key, node in fixed.items()
                if key not in replaced and not replaced.isdisjoint(map(id, node.parts))
            }
        return replaced

    def _made_by_hooks(self) -> set[int]:
        """Return what hooks at the start have made that touched containers alone hold.

        Another start of the program may put one object into two places where this one has put two.
        What something else holds stays the start's own, and gets the values in place.
        """
        made = self.start.made_by_hooks.keys() & self.nodes.keys() & self.start.nodes.keys()
        if not made:
            return set()
        kept = {key for key in made if self.nodes[key].parent is None}
        waiting = [*(self.nodes.keys() - made), *kept]
        while waiting:
            node = self.nodes[waiting.pop()]
            if key_of(node.value) not in self.touched or node.kind not in HOLDERS:
                held = made.intersection(map(id, node.parts)) - kept
                kept |= held
                waiting += held
        return made - kept

    def _changed_beside(self) -> set[int]:
        """Return what `Start.without` has left out, and other objects hold, if it has changed.

        A program makes the next epoch's data of it, such as a sampler that it keeps.
        """
        held = {key: node for key, node in self.start.left_out.items() if key in self.nodes}
        changed = {key for key, before in held.items() if self._differs(before, self.nodes[key])}
        size = -1
        while changed and len(changed) > size:
            size = len(changed)
            changed |= {
                key for key in held if not changed.isdisjoint(map(id, self.nodes[key].parts))
            }
        return changed

    def _differs(self, before: Node, node: Node) -> bool:
        """Return whether an object itself has changed; not whether what it refers to has."""
        if isinstance(node.kind, ObjectKind):
            return node.kind.difference(before, node, self.is_same) is not None
        mark = (node.mark or self.start.mark(node)) if before.mark else b""
        return mark != before.mark or not self.are_same(before, node)

    def _is_new(self, key: int) -> bool:
        return key in self.replaced or key not in self.start.nodes

    # ---- what is written of each node --------------------------------------------------------

    def draft_all(self) -> None:
        """Draft what is written of each node that is new, or has changed."""
        self._draft_views()
        in_place = self._draft_replaced()
        for key, node in list(self.nodes.items()):
            if key in self.by_others or key in self.drafts or key in in_place:
                continue
            if key in NAMES_OF_FACTORIES:
                continue
            try:
                if self._is_new(key):
                    self.drafts[key] = self._of_new(node)
                elif draft := self._of_changed(key, self.start.nodes[key], node):
                    self.drafts[key] = draft
            except NotSaved as error:
                self.refused[key] = str(error)

    def _draft_replaced(self) -> set[int]:
        """Draft the metrics in whose places the start has others of their classes; return them.

        No record makes a metric. So the one of the start gets what this one has.
        """
        replaced: dict[int, Node] = {}
        for key, node in self.nodes.items():
            if self._is_new(key) and issubclass(type(node.value), Metric):
                first = self.start.by_path.get(node.path)
                is_gone = first is not None and key_of(first.value) not in self.nodes
                if first is not None and is_gone and type(first.value) is type(node.value):
                    replaced[key] = first
                    self.references[key] = ["at", self.start.paths[key_of(first.value)]]
        for key, first in replaced.items():
            if draft := self._of_changed(key, first, self.nodes[key]):
                self.drafts[key] = draft
        return set(replaced)

    def _of_new(self, node: Node) -> Draft:
        kind = node.kind
        if kind in self.start.refused_kinds:
            raise NotSaved(kind_text(node.value))
        note = kind.note_of_new(node.value, node.note)
        if kind in (OBJECT, OPTIMIZER, TENSOR, TUPLE):
            self._check_class(type(node.value))
        if node.pack:
            return self._of_pack(None, node, node.pack, note)
        parts = node.parts[:1] if kind.name == "method" else node.parts
        content = self._content(node)
        if type(content) is dict and "calculated" in content:
            content["calculated"] = node.path
        return Draft(None, note, *self._refer(parts), content)

    def _of_changed(self, key: int, before: Node, node: Node) -> Draft | None:
        """Return what is written of a node of the start; None if it has not changed."""
        kind = node.kind
        path = self.start.paths[key_of(before.value)]
        is_touched = key in self.touched
        if isinstance(kind, ObjectKind):
            names = self.touched[key] if is_touched else ()
            if names is None:
                names = [*node.note, ""] if len(node.parts) > len(node.note) else node.note
            changes = kind.difference(before, node, self.is_same, names)
            if changes is None:
                return None
            note, parts = changes
            if "gone" in note:  # such as the hooks of a lazy module, which are the library's matter
                held = before.attributes
                note["gone"] = [
                    name
                    for name in note["gone"]
                    if name.partition(" ")[0] in SPACES or not _is_librarys(held.get(name))
                ]
            return Draft(path, note, parts, self._refer(parts)[1], self._content(node))
        mark = (node.mark or self.start.mark(node)) if before.mark else b""
        if kind is LIBRARYS:
            if mark != before.mark or (
                owner_with_own_state(node) and fingerprints.hides_state(node.value)
            ):
                raise NotSaved(kind_text(node.value))
            return None
        is_same = mark == before.mark and self.are_same(before, node)
        if kind is CODE or not (is_touched or not is_same) or (is_touched and not kind.fills):
            return None
        if kind is GENERATOR and not self.start.generators:
            if not (before.parts or node.parts):
                return None
            return Draft(path, node.note, *self._refer(node.parts), None)  # its attributes alone
        if kind is ARRAY and not _can_be_written(node.value):
            if any(id(base) in self.nodes for base in bases_of(node.value)):
                return Draft(path, None, [], [], None)  # it is filled through that one
            if type(node.value) is np.ndarray:
                raise NotSaved("read-only array, whose memory is another object's")
        if node.pack:
            return self._of_pack(path, node, node.pack, node.note)
        return Draft(path, node.note, *self._refer(node.parts), self._content(node))

    def _content(self, node: Node) -> Any:
        """Return the content of a node.

        Raises:
            NotSaved: A record cannot hold it, or it is too large for one.
        """
        is_bounded = self.start.is_bounded and not isinstance(node.value, DTensor)
        if is_bounded and (size := size_of(node)) > MAX_SAVED:
            raise NotSaved(f"{node.kind.name} of {size:,} elements")
        return node.kind.content(node.value)

    def _of_pack(self, path: str | None, node: Node, pack: Pack, note: Any) -> Draft:
        """Return what is written of a container whose elements are packed."""
        for class_ in pack.classes:
            self._check_class(class_)
        return Draft(path, note, *self._refer(node.parts[: pack.first]), pack.content)

    def _refer(self, parts: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the parts that are not values of their own, and references to all parts.

        A number that is the `id` of an object, as of a layer whose values are kept in a dict by it,
        refers to the object; so does one in a tuple.
        """
        if SCALARS.issuperset(map(type, parts)) and not any(map(may_be_address, parts)):
            return [], parts
        held = []
        references = []
        for part in parts:
            class_ = type(part)
            if class_ in SCALARS and not (may_be_address(part) and part in self.nodes):
                references.append(part)
            elif class_ is int:
                held.append(value := owner_of(self.nodes[part].value))
                references.append(["id", self._reference(value)])
            elif class_ is tuple and SCALARS.issuperset(map(type, part)):
                of_tuple, elements = self._refer(list(part))
                held += of_tuple
                references.append([TUPLE_OF_SCALARS, *elements])
            else:
                held.append(part)
                try:
                    references.append(self._reference(part))
                except NotSaved as error:
                    references.append(None)
                    self.refused[id(part)] = str(error)
        return held, references

    def _reference(self, part: Any) -> Any:
        """Return a reference to an object; that to a new one gets its number later."""
        class_ = type(part)
        if class_ in SCALARS:
            return part
        key = id(part)
        if (reference := self.references.get(key)) is not None:
            return reference
        if key in self.by_others:
            reference = ["by others", self.by_others[key]]
        elif key in NAMES_OF_FACTORIES:
            reference = ["factory", NAMES_OF_FACTORIES[key]]
        elif key not in self.nodes:
            is_enum = isinstance(part, enum.Enum)
            if is_enum and atoms.library_enum(class_name(class_)) is not class_:
                self._check_class(class_)
            return atoms.encode(part)
        elif self._is_new(key):
            reference = [-1]
        else:
            reference = ["at", self.start.paths[key]]
        self.references[key] = reference
        return reference

    def _check_class(self, class_: type) -> None:
        """Refuse an object of a class that a resumed program could not find."""
        if (
            class_ not in MADE_OF_TORCHS
            and self.start.classes.get(class_name(class_)) is not class_
        ):
            raise NotSaved(class_name(class_))

    def are_same(self, before: Node, node: Node) -> bool:
        """Return whether a node refers to the same as before."""
        parts = node.parts
        if before.note != node.note or len(before.parts) != len(parts):
            return False
        if not self.replaced and all(map(operator.is_, before.parts, parts)):
            return True
        return all(map(self.is_same, before.parts, parts))

    def is_same(self, before: Any, now: Any) -> bool:
        """Return whether two parts are one object, or equal values without an identity."""
        if before is now:
            return id(now) not in self.replaced
        class_ = type(now)
        if type(before) is not class_:
            return False
        if class_ in SCALARS:
            return scalars.text(before) == scalars.text(now)
        if class_ is types.FunctionType and _wrap_the_same(before, now):
            return True
        if class_.__name__ == "method":
            return before == now and id(now) not in self.replaced
        if id(now) in self.nodes:
            return False
        try:
            return scalars.text(atoms.encode(before)) == scalars.text(atoms.encode(now))
        except NotSaved:
            return False

    # ---- views ---------------------------------------------------------------------------------

    def _draft_views(self) -> None:
        """Draft the new tensors and arrays that share their memory with others."""
        self._draft_between_libraries()
        bases: dict[Any, list[Any]] = {}
        for tensor in self.start.saved_by_others().values():
            bases.setdefault(memory_of(tensor), []).append(tensor)
        for key, node in self.nodes.items():
            if node.kind in (TENSOR, ARRAY) and not self._is_new(key):
                bases.setdefault(memory_of(node.value), []).append(node.value)
        bases.pop(None, None)
        groups: dict[Any, list[int]] = {}
        for key, node in self.nodes.items():
            if node.kind in (TENSOR, ARRAY) and self._is_new(key) and key not in self.by_others:
                memory = memory_of(node.value)
                if memory is not None and is_plain_view(node.value):
                    groups.setdefault(memory, []).append(key)
        for memory, keys in groups.items():
            found = bases_within([self.nodes[key].value for key in keys], bases.get(memory, []))
            within = {key: base for key, base in zip(keys, found, strict=True) if base is not None}
            rest = [key for key in keys if key not in within]
            if len(rest) > 1:
                base = span([self.nodes[key].value for key in rest])
                kind = TENSOR if isinstance(base, Tensor) else ARRAY
                self.kept.append(base)
                self.nodes[id(base)] = Node(base, kind, None, "")
                within |= dict.fromkeys(rest, base)
            for key, base in within.items():
                self._draft_view(key, base)
            if rest and memory in bases:  # they reach beyond what a program makes at its start
                self.parted += [self.nodes[key].path for key in rest]

    def _draft_between_libraries(self) -> None:
        """Draft the new arrays in the memory of tensors, and the new tensors in that of arrays."""
        arrays = {key: node for key, node in self.nodes.items() if node.kind is ARRAY}
        new = {key: node.value for key, node in self.nodes.items() if self._is_new(key)}
        of_tensors = {
            key: each
            for key, each in new.items()
            if key in arrays and is_plain_view(each) and each.size
            if tensor_of_array(each) is not None
        }
        if of_tensors:
            tensors = [node.value for node in self.nodes.values() if node.kind is TENSOR]
            tensors += self.start.saved_by_others().values()
            self._draft_within(of_tensors, list(filter(has_plain_memory, tensors)))
        of_arrays = {
            key: each
            for key, each in new.items()
            if self.nodes[key].kind is TENSOR and key not in self.by_others
            if is_plain_view(each) and has_plain_memory(each)
        }
        owners = [
            node.value
            for key, node in arrays.items()
            if key not in self.drafts and node.path not in self.parted
        ]
        if of_arrays and owners:
            self._draft_within(of_arrays, list(filter(has_plain_memory, owners)))

    def _draft_within(self, views: Mapping[int, Any], bases: list[Any]) -> None:
        """Draft arrays as views of tensors, or tensors as views of arrays, where they lie within.

        Args:
            views: The arrays or the tensors, by what they are known.
            bases: The others.
        """
        found = bases_within(list(views.values()), bases, bytes_of)
        for (key, value), base in zip(views.items(), found, strict=True):
            if base is None:
                continue
            place = place_across(value, base)
            if place is None:
                self.parted.append(self.nodes[key].path)
                continue
            node = self.nodes[key]
            node.kind = TENSOR_VIEW if isinstance(value, Tensor) else ARRAY_VIEW
            node.parts = [base]
            self.drafts[key] = Draft(None, place, [base], [self._reference(base)], None)

    def _draft_view(self, key: int, base: Any) -> None:
        node = self.nodes[key]
        value = node.value
        if isinstance(value, Tensor):
            place: Any = place_in_tensor(value, base)
            is_within = is_tensor_within(value, base)
        else:
            owner = base if id(base) in map(id, self.kept) else owner_of_array(base)
            assert owner is not None  # it has the memory
            place = place_in_array(value, owner)
            is_within = is_array_within(value, owner)
        if is_within:
            node.kind = TENSOR_VIEW if isinstance(value, Tensor) else ARRAY_VIEW
            node.parts = [base]
            self.drafts[key] = Draft(None, place, [base], [self._reference(base)], None)

    # ---- what cannot be saved ------------------------------------------------------------------

    def refuse_holders(self) -> None:
        """Leave out what refers to something that cannot be saved, and note its name."""
        if not self.refused:
            return
        self.origins = set(self.refused)
        self._note_holders(self.drafts)
        for key in [key for key in self.refused if not self._is_new(key) and key in self.nodes]:
            if not self._says_state(self.nodes[key]):
                self._note(self.nodes[key], None, key)
        waiting = deque(self.refused)
        while waiting:
            key = waiting.popleft()
            for holder in list(self.holders.get(key, ())):
                draft = self.drafts.get(holder)
                if draft is None or not (self._is_new(key) or key not in self.nodes):
                    continue
                node = self.nodes[holder]
                if self._says_state(node):
                    if self._leave_to_state(holder, key):
                        waiting.append(holder)
                    continue
                if self._keep_first(holder, key):
                    self._note(node, None, key, is_first=True)
                    continue
                if draft.path is not None and isinstance(node.kind, ObjectKind):
                    self._leave_out(holder, key)
                    continue
                del self.drafts[holder]
                if key in self.losing or self._has_lost_more(holder, draft):
                    self.losing.add(holder)
                self.first_of[holder] = self.first_of.get(key, key)
                is_users = node.kind is OBJECT and not is_library_class(type(node.value))
                self.refused[holder] = kind_text(node.value) if is_users else self.refused[key]
                if draft.path is None:
                    waiting.append(holder)
                else:
                    self._note(node, None, key, loses=holder in self.losing)

    def _note_holders(self, drafts: Iterable[int]) -> None:
        for key in drafts:
            for part in self.drafts[key].parts:
                if type(part) not in SCALARS:
                    self.holders.setdefault(id(part), []).append(key)

    def _says_state(self, node: Node) -> bool:
        """Draft what an object says of its own state, and return True, if that can be saved.

        Args:
            node: What cannot be saved, or holds such: the object, or what it leads to.
        """
        owner = owner_with_own_state(node)
        if owner is None:
            return False
        key = id(owner.value)
        if key not in self.says_state:
            self.says_state[key] = True  # what it leads to may lead back to it
            self.says_state[key] = self._draft_state(key, owner)
        return self.says_state[key]

    def _leave_to_state(self, holder: int, key: int) -> bool:
        """Leave out what a state has, or is to have; return whether its holder is refused, too.

        Args:
            holder: By what is known what leads to something that cannot be saved.
            key: By what that is known.
        """
        draft = self.drafts[holder]
        if key not in map(id, draft.parts):
            return False  # what it says of its state has taken the place of that
        del self.drafts[holder]
        if holder in self.says_state:
            self.says_state[holder] = False
            if draft.path is not None:
                self._note(self.nodes[holder], None, key)
        if draft.path is None:
            self.refused[holder] = self.refused[key]
        return draft.path is None

    def _draft_state(self, key: int, node: Node) -> bool:
        """Draft what an object's `__getstate__` returns; return whether that can be saved."""
        refused = dict(self.refused)
        found: dict[int, Node] = {}
        try:
            holder = [node.value.__getstate__()]
            found = scan({node.path: holder}, self.start.skip, self.start.nodes, self.nodes)
            self.nodes |= found
            drafts = {
                each: self._of_new(part)
                for each, part in found.items()
                if each not in self.by_others and each not in NAMES_OF_FACTORIES
            }
            parts = (part for draft in drafts.values() for part in draft.parts)
            if not self.refused.keys().isdisjoint(map(id, parts)) or self._leads_to_refused(holder):
                raise NotSaved(kind_text(node.value))
            is_new = self._is_new(key)
            note = node.kind.note_of_new(node.value, []) if is_new else {"names": []}
        except Exception:  # what code of the user's raises, or NotSaved: it is said as of others
            self.refused = refused
            for each in found:
                self.nodes.pop(each, None)
                self.references.pop(each, None)
            return False
        of_holder = drafts.pop(id(holder))
        path = None if is_new else self.start.paths[key]
        self.drafts |= drafts
        self.drafts[key] = Draft(
            path, note | {"state": True}, of_holder.parts, of_holder.references, None
        )
        self.kept.append(holder)
        self._note_holders([*drafts, key])
        return True

    def _leads_to_refused(self, holder: list[Any]) -> bool:
        """Return whether a state leads to something that cannot be saved.

        What another object leaves out of its own state, it does not lead to.
        """
        reached = scan({"": holder}, self.start.skip, self.start.nodes)
        return any(
            owner_with_own_state(reached[key]) is None or not self._says_state(reached[key])
            for key in self.refused.keys() & reached.keys()
        )

    def _keep_first(self, holder: int, key: int) -> bool:
        """Have a container hold what the program makes at that place, and return True if it does.

        Args:
            holder: By what the container is known.
            key: By what that is known which cannot be saved.
        """
        node, draft = self.nodes[holder], self.drafts[holder]
        part = self.nodes.get(key)
        if part is None or isinstance(node.kind, ObjectKind) or node.pack:
            return False
        path = self.start.paths.get(holder) or node.path
        places = [n for n, each in enumerate(node.parts) if id(each) == key]
        names = [f"{path}{node.kind.step(node.note, node.parts, n)}" for n in places]
        firsts = [self.start.by_path.get(name) for name in names]
        if not all(first and type(first.value) is type(part.value) for first in firsts):
            return False
        references = list(draft.references)
        for n, name in zip(places, names, strict=True):
            references[n] = ["at", name]
        self.drafts[holder] = draft._replace(references=references)
        return True

    def _has_lost_more(self, holder: int, draft: Draft) -> bool:
        """Return whether numbers, tensors or containers are lost with what cannot be saved.

        Text beside a writer, such as its folder, is given again by the code that makes the writer.
        """
        now = self._worth_saving(self.nodes[holder].parts)
        before = self._worth_saving(self.start.nodes[holder].parts) if draft.path else []
        return len(now) != len(before) or not all(map(self.is_same, before, now))

    def _worth_saving(self, parts: list[Any]) -> list[Any]:
        """Return the numbers, tensors and containers of the parts of an object."""
        return [
            part
            for part in parts
            if type(part) in (int, float, complex)
            or (
                (node := self.nodes.get(id(part))) is not None
                and node.kind not in (CODE, LIBRARYS)
                and id(part) not in self.refused
            )
        ]

    def _leave_out(self, holder: int, key: int) -> None:
        """Leave an attribute, or the elements of a user's container, out of a draft."""
        draft = self.drafts[holder]
        names = draft.note["names"]
        kept = [n for n, part in enumerate(draft.parts) if n >= len(names) or id(part) != key]
        for name, part in zip(names, draft.parts, strict=False):
            if id(part) == key:
                self._note(self.nodes[holder], name, key)
        note = draft.note | {"names": [names[n] for n in kept if n < len(names)]}
        if "gone" in note:  # such as None, in whose place a module has come
            left = {names[n].rpartition(" ")[2] for n in range(len(names)) if n not in kept}
            note["gone"] = [each for each in note["gone"] if each.rpartition(" ")[2] not in left]
        if any(n >= len(names) and id(draft.parts[n]) == key for n in kept):
            kept = [n for n in kept if n < len(names)]
            note.pop("elements")
            self._note(self.nodes[holder], None, key, is_first=not self._is_new(holder))
        self.drafts[holder] = draft._replace(
            note=note,
            parts=[draft.parts[n] for n in kept],
            references=[draft.references[n] for n in kept],
        )

    def _note(
        self,
        node: Node,
        name: str | None,
        key: int,
        is_first: bool = False,
        loses: bool = False,
    ) -> None:
        """Note what is not saved, by the user's object that has it and the attribute."""
        is_part = key not in self.origins or name is None
        # Elements are named by the attribute that has their container.
        is_closed_over = node.kind is not OBJECT
        while (node.kind is not OBJECT or name is None) and node.parent is not None:
            parent = node.parent
            is_closed_over = is_closed_over and parent.kind in CLOSING
            if parent.kind is OBJECT:
                is_object = node.value is self.nodes[key].value if key in self.nodes else False
                is_part = not is_object
                name = parent.kind.step(parent.note, parent.parts, node.index).lstrip(".")
            node = parent
        name = (name or "").rpartition(" ")[2]
        value = object_graph.namespace(owner_of(node.value)).get(name)
        if not is_part and key in self.nodes:
            value = self.nodes[key].value
        path = self.start.paths.get(key_of(node.value)) or node.path
        changes = key in self.start.nodes
        # What a function, such as a hook, has closed over is in a variable of its own.
        is_part = is_part and not (is_closed_over and not name and changes)
        first = self.nodes.get(self.first_of.get(key, key))
        refused = None if first is None else first.value
        kind = self.refused[key]
        loses = loses or key in self.losing
        self.unsaved.append(
            Unsaved(path, name, kind, value, is_part, changes, refused, is_first, loses)
        )

    def first_refused(self) -> tuple[str, str]:
        """Return where the first object is that cannot be saved itself, and what it is."""
        return next(
            (f"{node.path}{node.kind.step(node.note, node.parts, index)}", self.refused[id(part)])
            for node in self.nodes.values()
            for index, part in enumerate(node.parts)
            if id(part) in self.origins
        )

    # ---- the record ----------------------------------------------------------------------------

    def record(self) -> Record:
        """Return the record: what has changed of the start, and what is reached from there."""
        nodes: list[list[Any]] = []
        shared: dict[str, Tensor] = {}
        waiting = deque(key for key, draft in self.drafts.items() if draft.path is not None)
        numbered = dict.fromkeys(waiting)
        while waiting:
            key = waiting.popleft()
            draft = self.drafts[key]
            node = self.nodes[key]
            if draft.path is None:
                self.references[key][0] = len(nodes)
            content = draft.content
            if type(content) is dict and isinstance(content.get("values"), DTensor):
                path = draft.path or node.path
                shared[path] = content["values"]
                content = {**content, "shared": path}
                del content["values"]
            nodes.append([node.kind.name, draft.path, draft.note, draft.references, content])
            if isinstance(node.kind, SetKind) and loses_order(node.value, node.parts):
                self.reordered.append(draft.path or node.path)
            for part_key in map(id, draft.parts):
                if (
                    part_key not in numbered
                    and part_key in self.drafts
                    and self.references.get(part_key) == [-1]
                ):
                    numbered[part_key] = self.nodes[part_key].value
                    waiting.append(part_key)
        self.recorded = numbered
        blocks = _pack(nodes)
        record: Record = {"nodes": text.write(nodes, blocks), "tensors": blocks}
        if shared:
            record["shared"] = shared
        return record


def owner_with_own_state(node: Node) -> Node | None:
    """Return the object that says its own state and leads to an object, or is it."""
    each: Node | None = node
    while each is not None and not (each.kind is OBJECT and says_its_state(type(each.value))):
        each = each.parent
    return each


def _wrap_the_same(first: Any, second: Any) -> bool:
    """Return whether a library has put these functions around one function or method.

    So torchmetrics does with `update` and `compute` of each metric.
    """
    wrapped = [getattr(each, "__wrapped__", each) for each in (first, second)]
    functions = [getattr(each, "__func__", each) for each in wrapped]
    is_librarys = is_library_module(second.__globals__.get("__name__", ""))
    return second.__code__ is first.__code__ and functions[0] is functions[1] and is_librarys


def _is_librarys(value: Any) -> bool:
    """Return whether a value is an object of a library's class."""
    return kind_of(value) in (OBJECT, LIBRARYS) and is_library_class(type(value))


def _can_be_written(array: np.ndarray) -> bool:
    """Return whether an array's values can be restored in place."""
    is_plain = type(array) is np.ndarray
    return array.base is None or (is_plain and array.flags.writeable)


def _pack(nodes: Iterable[list[Any]]) -> list[Tensor]:
    """Return very many small tensors as few, and have the nodes refer to these.

    A file has each tensor as an entry of its own, which takes longer than most values.
    """
    alike: dict[Any, list[dict[str, Any]]] = {}
    for *_, content in nodes:
        values = content.get("values") if type(content) is dict else None
        if not isinstance(values, Tensor):
            continue
        if values.layout == torch.strided and not values.is_quantized:
            alike.setdefault((values.dtype, values.shape), []).append(content)
    blocks: list[Tensor] = []
    for contents in alike.values():
        if len(contents) > PACKED_FROM and contents[0]["values"].numel():
            block = torch.stack([content["values"] for content in contents])
            for row, content in enumerate(contents):
                content["values"] = [len(blocks), row]
            blocks.append(block)
    return blocks
