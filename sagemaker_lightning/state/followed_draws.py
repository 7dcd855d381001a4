"""Find what samplers and streams read while they draw, and training changes.

A resumed run draws an epoch's batches again, from its beginning. What a sampler reads then is as it
is now, and not as it was when each batch was drawn.
"""

import dis
import inspect
import re
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from sagemaker_lightning.state.caches import kept
from sagemaker_lightning.state.digests import digest
from sagemaker_lightning.state.graph import fingerprints
from sagemaker_lightning.state.graph.atoms import SCALARS
from sagemaker_lightning.state.object_graph import attributes, is_own_code, names_in_code

VARIABLE = re.compile("(LOAD|STORE)_(?:FAST|DEREF|CLOSURE)(?!_AND_CLEAR)")
"""In an instruction's name, what is done to a variable; since Python 3.13, some do it to two."""
READS = "LOAD_ATTR", "LOAD_METHOD"
"""Instructions that read an attribute (https://docs.python.org/3/library/dis.html)."""
CONTAINERS = list, tuple, dict, set, frozenset, deque, str, bytes
MAX_ELEMENTS = 1 << 12
"""Elements of a container that are compared, at most, with their number."""


def values_followed(drawers: Collection[Any]) -> dict[tuple[int, str], bytes]:
    """Return digests of the attributes that samplers and streams read while they draw.

    They are by the object's id and the attribute's name.

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
    """Return a digest of a value; of a container, of its length and its numbers and text."""
    if isinstance(value, Tensor):
        return fingerprints.of_tensor(value)
    if isinstance(value, np.ndarray):
        return fingerprints.of_array(value)
    if not isinstance(value, CONTAINERS):
        return digest(value)
    elements = value.values() if isinstance(value, dict) else value
    plain = [each for each in islice(elements, MAX_ELEMENTS) if type(each) in SCALARS]
    return digest([len(value), *plain])


def changed(
    drawers: Collection[Any], before: Mapping[tuple[int, str], bytes]
) -> dict[str, list[str]]:
    """Return the attributes that have changed since, by the class that draws.

    Args:
        drawers: Samplers and streams.
        before: What `values_followed` returned then.
    """
    names = {id(drawer): type(drawer).__qualname__ for drawer in drawers}
    now = values_followed(drawers)
    found: dict[str, list[str]] = {}
    for key, value in before.items():
        if now.get(key, value) != value:
            owner, name = key
            found.setdefault(names[owner], []).append(name)
    return found


@kept
def names_read_while_drawing(class_: type) -> frozenset[str]:
    """Return the attributes that a class of the user's reads between draws; none if none matters.

    They are those that a generator, its `__iter__`, reads from its first value on, and that methods
    which it calls read. What it reads before is as the epoch begins. And if nothing of it lasts
    from one value to the next, each value follows from what there is at that moment alone, as it
    does in a resumed run.
    """
    iter_ = getattr(class_, "__iter__", None)
    if not isinstance(iter_, types.FunctionType) or not is_own_code(iter_):
        return frozenset()
    instructions = _drawing_instructions(iter_)
    if not _keeps_something(instructions, iter_.__code__.co_varnames[:1]):
        return frozenset()
    found = {each.argval for each in instructions if each.opname in READS}
    waiting = list(found)
    while waiting:
        method = inspect.getattr_static(class_, waiting.pop(), None)
        if isinstance(method, types.FunctionType) and is_own_code(method):
            new = names_in_code(method.__code__) - found
            found |= new
            waiting += new
    return frozenset(found)


def _drawing_instructions(function: types.FunctionType) -> list[dis.Instruction]:
    """Return the instructions of a generator from its first value on, with all of its loop.

    None of another function.
    """
    instructions = list(dis.get_instructions(function))
    yields = [each.offset for each in instructions if each.opname == "YIELD_VALUE"]
    if not yields:  # it is not a generator, or reaches none
        return []
    first = min(yields)
    loops = [
        each.argval
        for each in instructions
        if "JUMP_BACKWARD" in each.opname and each.argval <= first <= each.offset
    ]
    begin = min([first, *loops])
    return [each for each in instructions if each.offset >= begin]


def _keeps_something(instructions: Sequence[dis.Instruction], arguments: Iterable[str]) -> bool:
    """Return whether something lasts from one value of a generator to the next.

    It is a variable that is read before it is set, or the place in a loop that does not give one
    value in each round.

    Args:
        instructions: Those of the generator, from its first value on.
        arguments: The generator's arguments: the object that draws.
    """
    known = {*arguments}
    for each in instructions:
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        for kind, name in zip(VARIABLE.findall(each.opname), names, strict=False):
            if kind == "LOAD" and name not in known:
                return True
            known.add(name)
    yields = [each.offset for each in instructions if each.opname == "YIELD_VALUE"]
    loops = [
        each.offset
        for each in instructions
        if each.opname == "FOR_ITER" and any(each.offset < place < each.argval for place in yields)
    ]
    asks = any("POP_JUMP" in each.opname and "IF" in each.opname for each in instructions)
    return any(offset > instructions[0].offset or asks for offset in loops)
