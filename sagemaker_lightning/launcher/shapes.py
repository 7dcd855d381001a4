"""Walks over values of a request and their shapes in botocore's model."""

from collections.abc import Iterator
from typing import Any

from botocore.model import Shape


def parts(value: Any, shape: Shape) -> Iterator[tuple[Any, Any, Shape]]:
    """Yield the parts of a value, each with its name in it and its shape.

    The name is that of a field of a structure, the number in a list from 0, or a key of a map.
    Fields that are null, or that the model does not have, are left out. A value that has no parts,
    or not the type of its shape, yields nothing.
    """
    if shape.type_name == "structure" and isinstance(value, dict):
        for name, member in shape.members.items():
            if value.get(name) is not None:
                yield name, value[name], member
    elif shape.type_name == "list" and isinstance(value, list):
        for number, item in enumerate(value):
            yield number, item, shape.member
    elif shape.type_name == "map" and isinstance(value, dict):
        for key, item in value.items():
            yield key, item, shape.value
