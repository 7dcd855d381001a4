"""Find what samplers and streams read while they draw, and training changes.

A resumed run draws an epoch's batches again, from its beginning. What a sampler reads then is as it
is now, and not as it was when each batch was drawn.
"""

import dis
import inspect
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from sagemaker_lightning.state.caches import kept
from sagemaker_lightning.state.digests import digest
from sagemaker_lightning.state.graph import fingerprints
from sagemaker_lightning.state.object_graph import attributes, is_own_code, names_in_code

READS = "LOAD_ATTR", "LOAD_METHOD"
"""Instructions that read an attribute (https://docs.python.org/3/library/dis.html)."""
CONTAINERS = list, tuple, dict, set, frozenset, deque, str, bytes
MAX_ELEMENTS = 1 << 12
"""Elements of a container that are compared, at most; of a larger one, their number is."""


def values_followed(drawers: Iterable[Any]) -> dict[tuple[int, str], bytes]:
    """Return digests of what objects read of themselves while they draw: by id and attribute.

    Args:
        drawers: Samplers and streams.
    """
    return {
        (id(drawer), name): _digest(value)
        for drawer in drawers
        if (names := names_read_while_drawing(type(drawer)))
        for name, value in attributes(drawer).items()
        if name in names
    }


def _digest(value: Any) -> bytes:
    """Return a digest of a value; empty if it cannot be compared."""
    if isinstance(value, Tensor):
        return fingerprints.of_tensor(value)
    if isinstance(value, np.ndarray):
        return fingerprints.of_array(value)
    is_large = isinstance(value, CONTAINERS) and len(value) > MAX_ELEMENTS
    return digest(len(value) if is_large else value)


def changed(
    drawers: Iterable[Any], before: Mapping[tuple[int, str], bytes]
) -> dict[str, list[str]]:
    """Return the attributes that have changed since, by the class that draws.

    Args:
        drawers: Samplers and streams.
        before: What `values_followed` returned then.
    """
    now = values_followed(drawers)
    found: dict[str, list[str]] = {}
    for drawer in drawers:
        for (owner, name), value in before.items():
            if owner == id(drawer) and now.get((owner, name), value) != value:
                found.setdefault(type(drawer).__qualname__, []).append(name)
    return found


@kept
def names_read_while_drawing(class_: type) -> frozenset[str]:
    """Return the attributes that a class of the user's reads from its first draw on.

    What `__iter__` reads before is as the epoch begins. Methods that it calls read more.
    """
    next_ = getattr(class_, "__next__", None)
    iter_ = getattr(class_, "__iter__", None)
    if isinstance(next_, types.FunctionType) and is_own_code(next_):
        found = set(names_in_code(next_.__code__))
    elif isinstance(iter_, types.FunctionType) and is_own_code(iter_):
        found = _read_after_first_yield(iter_)
    else:
        return frozenset()
    waiting = list(found)
    while waiting:
        method = getattr(class_, waiting.pop(), None)
        if isinstance(method, types.FunctionType) and is_own_code(method):
            new = names_in_code(method.__code__) - found
            found |= new
            waiting += new
    return frozenset(found)


def _read_after_first_yield(function: types.FunctionType) -> set[str]:
    """Return the attributes that a generator reads after its first value, or in a loop with it."""
    if not inspect.isgeneratorfunction(function):
        return set()
    instructions = list(dis.get_instructions(function))
    yields = [each.offset for each in instructions if each.opname == "YIELD_VALUE"]
    if not yields:
        return set()
    first = min(yields)
    loops = [
        each.argval
        for each in instructions
        if each.opname.startswith("JUMP_BACKWARD") and each.argval <= first <= each.offset
    ]
    begin = min([first, *loops])
    return {each.argval for each in instructions if each.offset >= begin and each.opname in READS}
