"""A value as a record of its own, such as what a `state_dict` returns, or a batch.

It is the graph of one root. The program makes nothing of it again at its start: each object in it
is new, and each tensor is copied.
"""

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.state.graph import fingerprints, state
from sagemaker_lightning.state.graph.classes import imported
from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.encoding import Encoder
from sagemaker_lightning.state.graph.kinds.base import NotSaved, class_name, refusal, refusing
from sagemaker_lightning.state.graph.kinds.containers import pairs
from sagemaker_lightning.state.graph.nodes import GENERATOR, LIBRARYS, OBJECT, Node, kind_of
from sagemaker_lightning.state.graph.start import Start, collector_paused
from sagemaker_lightning.state.graph.state import nodes_of
from sagemaker_lightning.state.graph.text import Record
from sagemaker_lightning.state.object_graph import Elsewhere, is_own_module

ROOT = "value"
"""The path of the list whose one element is the value."""
NAMED_KINDS = OBJECT, LIBRARYS
"""Kinds of what may be no value, but an object of its own."""
DATA_CLASSES = Dataset, Sampler, DataLoader, nn.Module
"""Classes of which no object is a value."""


def encode(value: Any, known: Mapping[str, Any] = MappingProxyType({})) -> Record:
    """Return a record of a value, which torch.load(weights_only=True) reads.

    Args:
        value: The value.
        known: Objects that the program makes again, by name: a record refers to them.

    Raises:
        NotSaved: No checkpoint can hold it, or a part of it; with the place of the part.
    """
    holder: list[Any] = []
    start = _NoStart({ROOT: holder})
    start.refer_to(known)
    holder.append(value)
    # What is known is not entered: it may lead to the whole model.
    marks = {path: Elsewhere(start.nodes[key].value) for key, path in start.paths.items()}
    with collector_paused():
        encoder = Encoder(marks | {ROOT: holder}, start)
        encoder.draft_all()
        encoder.refuse_holders()
        if id(holder) not in encoder.drafts:
            path, kind = encoder.first_refused()
            raise NotSaved(kind, path.removeprefix(f"{ROOT}[0]"))
        return encoder.record()


def decode(record: Record, known: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return the value that `encode` was given.

    Args:
        record: What `encode` returned.
        known: The objects to which it may refer, by name.

    Raises:
        UserError: `encode` returned no such record: it is of a forged checkpoint, or of one whose
            classes or objects this program does not have.
    """
    holder: list[Any] = []
    start = _NoStart({ROOT: holder})
    start.refer_to(known)
    restored = restore({ROOT: holder}, start, record)
    if restored.missing:
        raise UserError(
            f"a checkpoint holds {printable(restored.missing[0])[:200]}, which this program does "
            "not have"
        )
    if restored.filled.keys() != {id(holder)} or len(holder) != 1:
        raise refusal("a value")
    return holder[0]


def digest(record: Record, of_tensor: Callable[[Tensor], bytes] = fingerprints.of_tensor) -> str:
    """Return a digest of the value in a record, 16 digits.

    The device of a tensor and the order of a set may differ where values are equal.

    Args:
        record: The record.
        of_tensor: Returns the digest of a tensor; by default, that by which a graph is compared.
    """
    with refusing():
        nodes = nodes_of(record)
        tensors = state.digests_of_tensors(record, of_tensor)
        return state.digest(nodes[0][3], None, None, nodes, tensors)


def digests(record: Record) -> dict[str, str]:
    """Return a digest of each value that is in dicts only, by its path in the value."""
    with refusing():
        nodes = nodes_of(record)
        tensors = state.digests_of_tensors(record)
        found: dict[str, str] = {}
        entered: set[int] = set()
        waiting = [("", nodes[0][3][0])]
        while waiting:
            path, reference = waiting.pop()
            number: Any = reference[0] if type(reference) is list else None
            entry: list[Any] = nodes[number] if type(number) is int else [""] * 5
            kind, _, _, parts, content = entry
            is_entered = kind == "dict" and content is None and parts and number not in entered
            if is_entered and all(type(key) is str for key in parts[::2]):
                entered.add(number)
                waiting += [(f"{path}.{key}", part) for key, part in pairs(parts)][::-1]
            else:
                found[path] = state.digest([reference], None, None, nodes, tensors)
        return found


class _Imported(Mapping[str, type]):
    """The classes of which a value may have objects, by name, if the program has imported them.

    They are named tuples, enums, and the user's dataclasses and tensors. What else has a class of
    the user's is an object, which a `state_dict` has no place for: it names what is in it.
    """

    def __getitem__(self, name: str) -> type:
        class_ = imported(name)
        if not isinstance(class_, type) or issubclass(class_, DATA_CLASSES):
            raise KeyError(name)
        is_row = issubclass(class_, tuple) and hasattr(class_, "_fields")
        is_plain = is_dataclass(class_) or issubclass(class_, Tensor)
        if not (is_row or issubclass(class_, enum.Enum)) and not (
            is_plain and is_own_module(class_.__module__)
        ):
            raise KeyError(name)
        return class_

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _NoStart(Start):
    """A start at which there is nothing but the list that gets the value, and what is known."""

    is_bounded = False
    refused_kinds = (GENERATOR,)  # a checkpoint has those that the user's objects and code reach
    classes = _Imported()

    def refer_to(self, known: Mapping[str, Any]) -> None:
        """Refer to objects by name, if they are not values."""
        for name, value in known.items():
            kind = kind_of(value)
            is_value = class_name(type(value)) in self.classes
            if kind in NAMED_KINDS and not is_value and id(value) not in self.nodes:
                self.nodes[id(value)] = Node(value, kind, None, name)
                self.paths[id(value)] = name
