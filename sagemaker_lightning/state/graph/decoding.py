"""Restore a record: objects of the start get their content in place, others are made once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagemaker_lightning.compat.torch_unpickler import HashedParts
from sagemaker_lightning.contract.errors import printable
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.state.graph import atoms, scalars, text
from sagemaker_lightning.state.graph.atoms import SCALARS, TUPLE_OF_SCALARS, is_id
from sagemaker_lightning.state.graph.encoding import ARRAY_VIEW, TENSOR_VIEW
from sagemaker_lightning.state.graph.kinds.base import Kind, refusal, refusing
from sagemaker_lightning.state.graph.kinds.code import FACTORIES
from sagemaker_lightning.state.graph.kinds.containers import (
    CONTAINERS,
    DictKind,
    SetKind,
    has_order,
    hashed_in,
    hashed_of,
)
from sagemaker_lightning.state.graph.kinds.memory import size_of
from sagemaker_lightning.state.graph.kinds.objects import (
    ORDER,
    ObjectKind,
    base_of,
    says_its_state,
)
from sagemaker_lightning.state.graph.nodes import ARRAY, KINDS, OBJECT, key_of
from sagemaker_lightning.state.graph.packing import elements_of
from sagemaker_lightning.state.graph.start import Start, collector_paused
from sagemaker_lightning.state.graph.text import Record
from sagemaker_lightning.state.object_graph import owner_of

ALL_KINDS = KINDS | {kind.name: kind for kind in (TENSOR_VIEW, ARRAY_VIEW)}


class Restored(NamedTuple):
    """What `restore` has done."""

    missing: list[str]
    """The paths of objects that the record refers to and this program does not have."""
    made: list[Any]
    """The new object of each node; None for a node of the start."""
    filled: dict[int, Any]
    """The objects of the start that are in the record: by what each is known, the names of the
    attributes that were restored, or None."""
    reordered: list[str]
    """The paths of sets of numbers whose elements come in another order than before."""


def restore(
    roots: Mapping[str, Any],
    start: Start,
    record: Record,
    accept: Callable[[list[Any]], list[Any] | None] = lambda node: node,
    made: Sequence[Any] = (),
) -> Restored:
    """Restore what `encode` returned.

    Args:
        roots: The objects to start from, by name.
        start: What this program has made at its start.
        record: What `encode` returned.
        accept: Returns what is restored of a node of the start; None for nothing.
        made: The new objects of an earlier restoring of the same record, which are filled again.

    Raises:
        UserError: Encoding would not have written this, or this program does not have a class.
    """
    start.include(roots)
    with refusing(), collector_paused():
        decoder = _Decoder(start, record, accept, made)
        decoder.build_all()
        decoder.fill_all()
    with refusing(runs_users_code=True):
        decoder.set_states()
    return Restored(
        sorted(decoder.missing), decoder.new_objects(), decoder.filled, decoder.reordered
    )


class _Missing(Exception):
    """Raised for a reference to an object that this program does not have."""


class _Decoder:
    def __init__(
        self,
        start: Start,
        record: Record,
        accept: Callable[[list[Any]], list[Any] | None],
        made: Sequence[Any],
    ) -> None:
        self.start = start
        self.accept = accept
        self.made_before = made
        self.filled: dict[int, Any] = {}
        self.reordered: list[str] = []
        self.by_others = start.saved_by_others()
        self.ids_by_others = set(map(id, self.by_others.values()))
        self.tensors = record["tensors"]
        self.shared = dict(record.get("shared", {}))
        """The DTensors that are not values yet: each is one value's."""
        self.rows: set[tuple[int, int]] = set()
        """The rows of blocks that are values already."""
        self.missing: set[str] = set()
        self.kinds: list[Kind] = []
        self.entries = text.read(record["nodes"], self.tensors)
        self.hashed = HashedParts(len(record["nodes"]) + _bytes_of(self.tensors), hashed_of)
        self.wanted = self._find_wanted()
        self.made: list[Any] = []
        self.is_made: list[bool] = []
        for number, entry in enumerate(self.entries):
            self._begin(number, entry)

    def _made_before(self, number: int) -> Any:
        """Return the new object that an earlier restoring has made of a node; None for none."""
        return self.made_before[number] if number < len(self.made_before) else None

    def new_objects(self) -> list[Any]:
        """Return the new object of each node; None for a node of the start."""
        pairs = zip(self.made, self.entries, strict=True)
        return [made if entry[1] is None else None for made, entry in pairs]

    def _find_wanted(self) -> set[int]:
        """Return the new objects that the objects to be restored lead to.

        Others are not made. The program may not have their classes yet: what a dataset has made
        is in a record that is also read before there are loaders.
        """
        wanted: set[int] = set()
        waiting = [
            accepted[3]
            for entry in self.entries
            if entry[1] is not None
            and self.start.node_at(entry[1]) is not None
            and (accepted := self.accept(entry)) is not None
        ]
        while waiting:
            for number in self._referred_to(waiting.pop()):
                if number not in wanted and self.entries[number][1] is None:
                    wanted.add(number)
                    waiting.append(self.entries[number][3])
        return wanted

    def _referred_to(self, references: list[Any]) -> Iterator[int]:
        """Yield the numbers of the nodes that references refer to."""
        for reference in references:
            if type(reference) is list and reference[0] == TUPLE_OF_SCALARS:
                yield from self._referred_to([each for each in reference if is_id(each)])
                continue
            while is_id(reference):
                reference = reference[1]
            if type(reference) is list and type(reference[0]) is int and reference[0] >= 0:
                yield reference[0]

    def _begin(self, number: int, entry: list[Any]) -> None:
        """Find an object of the start, or make a new one that is filled later."""
        name, path, note, references, content = entry
        if name not in ALL_KINDS:
            raise refusal(name)
        kind = ALL_KINDS[name]
        self.kinds.append(kind)
        entry[4] = content = self._unpacked(content)
        if path is not None:
            node = self.start.node_at(path)
            if node is None or node.kind is not kind:
                self.missing.add(str(path))
            self.made.append(None if node is None else node.value)
            self.is_made.append(node is not None and node.kind is kind)
        elif kind.fills and self._made_before(number) is not None:
            self.made.append(self.made_before[number])
            self.is_made.append(True)
        elif kind.fills and number in self.wanted:
            if kind is ARRAY and content is None and size_of(note) != len(references):
                raise refusal(name)
            self.made.append(kind.make(note, content, self.start.classes))
            self.is_made.append(True)
            if isinstance(content, dict) and "calculated" in content:
                _report_backward(content["calculated"], self.made[-1])
        else:
            self.made.append(None)
            self.is_made.append(False)

    def _unpacked(self, content: Any) -> Any:
        if type(content) is dict and "shared" in content:
            return content | {"values": self.shared.pop(content["shared"])}
        if type(content) is dict and type(values := content.get("values")) is list:
            block, row = values
            if not type(block) is type(row) is int or min(values) < 0 or (block, row) in self.rows:
                raise refusal("a tensor")  # each is one value's, as of those in text.read
            self.rows.add((block, row))
            return content | {"values": self.tensors[block][row]}
        if type(content) is list and content[0] == "bytes":
            return scalars.scalar(content)
        return content

    def _awaited(self, references: list[Any]) -> Iterator[int]:
        """Yield the nodes that references refer to and that have yet to be built of their parts."""
        for number in self._referred_to(references):
            if not self.is_made[number] and self.entries[number][1] is None:
                yield number

    def build_all(self) -> None:
        """Build what cannot be filled, such as tuples, each after its parts."""
        for first in self._awaited([[number] for number in sorted(self.wanted)]):
            stack = [(first, self._awaited(self.entries[first][3]))]
            within = {first}
            while stack:
                number, awaited = stack[-1]
                if (part := next(awaited, None)) is not None:
                    if part in within:
                        raise refusal("a value within itself")
                    within.add(part)
                    stack.append((part, self._awaited(self.entries[part][3])))
                else:
                    stack.pop()
                    within.discard(number)
                    self._build(number)

    def _build(self, number: int) -> None:
        _, _, note, references, _ = self.entries[number]
        try:
            parts = [self.value(reference) for reference in references]
        except _Missing:
            self.entries[number][1] = ""  # no object of the start has this path
            return
        self._count_hashed(self.kinds[number], parts)
        self.made[number] = self.kinds[number].build(note, parts, self.start.classes)
        self.is_made[number] = True

    def _count_hashed(self, kind: Kind, parts: list[Any]) -> None:
        """Refuse keys of which Python would hash each part very often."""
        if self.hashed.are_too_many(hashed_in(kind, parts)):
            raise refusal("keys")

    def fill_all(self) -> None:
        """Fill all objects; first those that a dict or a set may have as keys."""
        pairs = zip(self.kinds, self.made, strict=True)
        hashing = [isinstance(_filled_as(kind, made), (DictKind, SetKind)) for kind, made in pairs]
        for is_hashing in (False, True):
            for number, kind in enumerate(self.kinds):
                if hashing[number] is is_hashing and self.is_made[number] and kind.fills:
                    self._fill(number, kind)
        # A scripted module has copies of lists and dicts: it gets them when they are filled.
        for number, kind in enumerate(self.kinds):
            if self.is_made[number] and isinstance(self.made[number], torch.jit.ScriptModule):
                self._fill(number, kind)

    def set_states(self) -> None:
        """Give objects the state that they have said themselves, those that others hold first."""
        for number, entry in reversed([*enumerate(self.entries)]):
            _, path, note, references, _ = entry
            if not isinstance(note, dict) or "state" not in note or not self.is_made[number]:
                continue
            if path is not None and self.accept(entry) is None:
                continue
            value = self.made[number]
            if self.kinds[number] is not OBJECT or not says_its_state(type(value)):
                raise refusal("a state")
            with suppress(_Missing):
                value.__setstate__(self.value(references[-1]))

    def _fill(self, number: int, kind: Kind) -> None:
        entry = self.entries[number]
        if entry[1] is not None and (entry := self.accept(entry)) is None:
            return
        _, path, note, references, content = entry
        if path is not None:
            names = None
            if isinstance(kind, ObjectKind):
                beside = [""] * ("elements" in note) + [ORDER] * ("order" in note)
                names = note["names"] + note.get("gone", []) + beside
            self.filled[key_of(self.made[number])] = names
        if isinstance(kind, ObjectKind):
            self._fill_object(number, kind, note, references)
            return
        try:
            parts = [
                reference if type(reference) in SCALARS else self.value(reference)
                for reference in references
            ]
        except _Missing:
            return
        made = self.made[number]
        if id(made) in self.ids_by_others and not _fits(made, content):
            raise refusal("a tensor")  # what has another form would be written beyond its memory
        if isinstance(content, dict) and "packed" in content:
            parts += elements_of(content, self.start.classes)
        self._count_hashed(kind, parts)
        is_new = path is None and self._made_before(number) is None
        is_filled = is_new and _is_filled(content)
        kind.fill(made, note, parts, None if is_filled else content)
        if type(made) is set and has_order(parts) and list(made) != parts:
            self.reordered.append(str(path or "a set that was made while training"))

    def _fill_object(self, number: int, kind: ObjectKind, note: Any, references: list[Any]) -> None:
        """Fill an object, without the attributes that this program has not got."""
        names, parts = [], []
        for name, reference in zip(note["names"], references, strict=False):
            try:
                parts.append(self.value(reference))
                names.append(name)
            except _Missing:
                continue
        try:
            elements = [self.value(reference) for reference in references[len(note["names"]) :]]
        except _Missing:
            elements = None
        note = note | {"names": names}
        if elements is None:
            note.pop("elements", None)
            note.pop("class", None)
        if elements:
            self._count_hashed(_filled_as(kind, self.made[number]), elements)
        kind.fill(self.made[number], note, parts + (elements or []), None)

    def value(self, reference: Any) -> Any:
        """Return what a reference refers to."""
        if type(reference) in SCALARS:
            return reference
        if type(reference) is not list:
            raise refusal(type(reference).__name__)
        first = reference[0]
        if type(first) is int:
            if first < 0 or not self.is_made[first]:
                raise _Missing
            return self.made[first]
        if first == "at":
            node = self.start.node_at(reference[1])
            if node is None:
                self.missing.add(str(reference[1]))
                raise _Missing
            return owner_of(node.value)
        if first == "by others":
            if reference[1] not in self.by_others:
                self.missing.add(str(reference[1]))
                raise _Missing
            return self.by_others[reference[1]]
        if first == "id":
            return id(self.value(reference[1]))
        if first == "factory":
            return FACTORIES[reference[1]]
        if first == TUPLE_OF_SCALARS:
            reference = [self.value(each) if is_id(each) else each for each in reference]
        return atoms.decode(reference, self.start.classes)


def _filled_as(kind: Kind, made: Any) -> Kind:
    """Return the kind of what an object holds: of a user's container, that of its base."""
    base = base_of(owner_of(made)) if isinstance(kind, ObjectKind) else None
    return CONTAINERS[base] if base else kind


def _bytes_of(tensors: list[Tensor]) -> int:
    return sum(
        tensor.untyped_storage().nbytes() for tensor in tensors if tensor.layout == torch.strided
    )


def _fits(tensor: Tensor, content: Any) -> bool:
    """Return whether content has the values of a tensor of the same shape and dtype."""
    values = content.get("values") if isinstance(content, dict) else None
    return isinstance(values, Tensor) and (values.shape, values.dtype) == (
        tensor.shape,
        tensor.dtype,
    )


def _is_filled(content: Any) -> bool:
    """Return whether a new object has got its content when it was made."""
    return isinstance(content, dict) and "values" in content


def _report_backward(name: str, tensor: Tensor) -> None:
    """Print once a gradient reaches a restored tensor, from where it would have continued.

    Most tensors that were calculated before are only logged, or are calculated again before that.

    Args:
        name: Where the tensor is.
        tensor: The tensor.
    """
    if not tensor.requires_grad:
        return

    def report(_gradient: torch.Tensor) -> None:
        handle.remove()
        log.warning(
            f"{printable(str(name))[:200]} was calculated before the interruption, and its "
            "graph of gradients cannot be saved: this step lacks its gradients, and the run may "
            "end with other weights; keep the batch there, and calculate from it in the step that "
            "uses it"
        )

    handle = tensor.register_hook(report)
