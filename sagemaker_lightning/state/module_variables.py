"""Find changes in a user's variables that no checkpoint has.

These are variables of modules, of classes and of some closures, and iterators.
"""

import operator
import pickle
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.object_state import digest, is_small

COUNTERS = ("builtins", "itertools")  # modules whose iterators can be asked for their position
MAX_REMAINING = 10_000  # an iterator with more elements left is not examined


def variable_digests(roots: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, bytes]:
    """Return bytes by which values of variables can be compared, by their names.

    Variables whose values cannot be compared are left out.

    Args:
        roots: The objects from which the user's code is reached, by name.
        saved: Those of them for which a checkpoint has the variables that functions closed over.
    """
    # Functions created by the same line have the same names.
    digests: dict[str, bytes] = defaultdict(bytes)
    saved_ids = {id(object_) for _, object_ in object_graph.walk(saved, code=False)}
    seen_ids = set()
    for path, object_ in object_graph.walk(roots):
        if isinstance(object_, types.FunctionType):
            for name, value in object_graph.function_members(object_):
                seen_ids.add(id(value))
                if (
                    id(object_) in saved_ids
                    and name in object_.__code__.co_freevars
                    and not _is_counter(value)
                ):
                    continue
                owner = (
                    object_.__module__
                    if name in object_.__globals__
                    else f"{object_.__module__}.{object_.__qualname__}"
                )
                digests[f"{owner}.{name}"] += _digest_or_position(value)
        elif isinstance(object_, type):
            for name, value in vars(object_).items():
                if not name.startswith("__"):
                    digests[f"{object_.__module__}.{object_.__qualname__}.{name}"] += (
                        _digest_or_position(value)
                    )
        elif _is_counter(object_) and id(object_) not in seen_ids:
            digests[path] += _digest_or_position(object_)
    return {name: state for name, state in digests.items() if state}


def changed_variables(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Return the names of the variables whose values differ.

    Args:
        before: What `variable_digests` returned first.
        after: What `variable_digests` returned later.
    """
    return sorted(name for name, state in before.items() if after.get(name, state) != state)


def _digest_or_position(value: Any) -> bytes:
    """Return bytes that identify a value; empty if it cannot be compared."""
    if not _is_counter(value):
        return digest(value) if is_small(value) else b""
    try:
        return pickle.dumps(value) if operator.length_hint(value, 0) <= MAX_REMAINING else b""
    except Exception:  # its elements may be of any class, which may raise anything
        return b""


def _is_counter(value: Any) -> bool:
    """Return whether a value is an iterator that can be asked for its position."""
    return isinstance(value, Iterator) and type(value).__module__ in COUNTERS
