"""What a user's code keeps where no checkpoint looks: variables of modules, of some closures, iterators."""

import operator
import pickle
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.object_state import digest

COUNTERS = ("builtins", "itertools")  # the modules whose iterators tell where they are
LONG = 10_000  # elements that an iterator has before it; one that goes through more is not looked at


def states(roots: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, bytes]:
    """Return what tells the value of each variable from another one, by its name; what cannot be told is left out.

    Args:
        roots: The objects from which a user's code is reached, by name.
        saved: Those of them of which a checkpoint has what functions have closed over.
    """
    found: dict[str, bytes] = defaultdict(bytes)  # functions that are made by one line have the same names
    known = {id(one) for _, one in object_graph.walk(saved, code=False)}
    held = set()
    for path, one in object_graph.walk(roots):
        if isinstance(one, types.FunctionType):
            for name, value in object_graph.of_function(one):
                held.add(id(value))
                if id(one) in known and name in one.__code__.co_freevars and not _is_counter(value):
                    continue
                owner = one.__module__ if name in one.__globals__ else f"{one.__module__}.{one.__qualname__}"
                found[f"{owner}.{name}"] += _state(value)
        elif _is_counter(one) and id(one) not in held:
            found[path] += _state(one)
    return {name: state for name, state in found.items() if state}


def changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Return the names of the variables that are not what they were."""
    return sorted(name for name, state in before.items() if after.get(name, state) != state)


def _state(value: Any) -> bytes:
    if not _is_counter(value):
        return digest(value)
    try:
        return pickle.dumps(value) if operator.length_hint(value, 0) <= LONG else b""
    except Exception:  # of whatever class what it goes through is
        return b""


def _is_counter(value: Any) -> bool:
    return isinstance(value, Iterator) and type(value).__module__ in COUNTERS
