"""Undoes what code has changed of objects that were scanned before it ran."""

import operator
from collections.abc import Iterable
from typing import Any

from sagemaker_lightning.state.graph.kinds.containers import CONTAINERS
from sagemaker_lightning.state.graph.kinds.objects import base_of, remove, set_member
from sagemaker_lightning.state.graph.nodes import LIBRARYS, OBJECT, Node, key_of, kind_of
from sagemaker_lightning.state.object_graph import owner_of

ABSENT = object()
FILLED = {kind for kind in CONTAINERS.values() if kind.fills}


def undo(nodes: Iterable[Node]) -> dict[tuple[int, str], Any]:
    """Give objects of users' classes their attributes back, and containers what they held.

    What a tensor or an array has stays as it is, and so does an attribute that had or has got a
    library's object that is more than values, such as a file that was closed for another one.

    Args:
        nodes: The nodes of the objects, as they were scanned.

    Returns:
        What was changed, by what the object is known and the attribute's name, "" for what a
        container holds: the value that it has again, None if it had none.
    """
    undone: dict[tuple[int, str], Any] = {}
    for node in nodes:
        if node.kind is OBJECT:
            undone |= {(key_of(node.value), name): value for name, value in _of_object(node)}
        elif node.kind in FILLED:
            note, parts = node.kind.take(node.value)
            if note != node.note or not _are_same(parts, node.parts):
                node.kind.fill(node.value, node.note, node.parts, None)
                undone[key_of(node.value), ""] = node.value
    return undone


def _of_object(node: Node) -> list[tuple[str, Any]]:
    """Undo what was changed of an object; return the names and the values that it has again."""
    names, parts = node.kind.take(node.value)
    if names == node.note and _are_same(parts, node.parts):
        return []
    before, now = node.attributes, dict(zip(names, parts, strict=False))
    undone = []
    for name in {**before, **now}:
        values = before.get(name, ABSENT), now.get(name, ABSENT)
        if values[0] is values[1] or LIBRARYS in map(kind_of, values):
            continue
        if values[0] is ABSENT:
            remove(node.value, [name])
        else:
            set_member(node.value, name, values[0])
        undone.append((name, None if values[0] is ABSENT else values[0]))
    content = node.parts[len(node.note) :]
    if (base := base_of(owner_of(node.value))) and not _are_same(parts[len(names) :], content):
        CONTAINERS[base].fill(owner_of(node.value), None, content, None)
        undone.append(("", node.value))
    return undone


def _are_same(some: list[Any], others: list[Any]) -> bool:
    """Return whether two lists have the same objects in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
