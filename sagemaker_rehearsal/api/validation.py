"""Validates a request against botocore's model, with the service's own messages.

The messages are those of AWS's answers as users quote them, e.g. aws/amazon-sagemaker-examples#869
and aws-samples/sagemaker-ml-workflow-with-apache-airflow#3; for a wrong type, those of AWS's JSON
services in general.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import botocore.session
from botocore.model import Shape, StructureShape

from sagemaker_lightning.launcher.shapes import parts
from sagemaker_rehearsal.api.errors import Refused, invalid

PYTHON_TYPES = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "long": int,
    "timestamp": (int, float),
    "list": list,
    "map": dict,
    "structure": dict,
}
# In place of the value of a field that the model does not have.
LEFT_OUT = "left out: the service's model does not have it"
# Characters of such a field's name, at most.
MAX_NAME_CHARACTERS = 100
# Bits of a number without its sign.
BITS = {"integer": 31, "long": 63}
# Characters that JSON can contain, but no environment variable, argument or text file.
UNWRITABLE = re.compile(r"[\x00\ud800-\udfff]")
WRITABLE = "Member must be text without NUL characters and lone surrogates"
JSON_WORDS = {str: "STRING_VALUE", bool: "TRUE_VALUE", int: "NUMBER_VALUE", float: "DECIMAL_VALUE"}
# Java's \p{Z}, which has neither tabs nor line ends.
SEPARATORS = " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
TARGETS = {
    "string": "a String",
    "boolean": "a Boolean",
    "integer": "an Integer",
    "long": "a Long",
    "timestamp": "a Date",
}


@cache
def input_shape(operation: str) -> StructureShape | None:
    """Return the shape of an operation's request; None if there is no such operation."""
    model = botocore.session.get_session().get_service_model("sagemaker")
    return (
        model.operation_model(operation).input_shape if operation in model.operation_names else None
    )


def pruned(value: Any, shape: Shape) -> Any:
    """Return a copy of a value that has no more than its shape, and no nulls in structures.

    So it is no deeper and has no more text than the model allows, once `validate` accepts it. The
    name of a field that the model does not have stays, to be noted.
    """
    type_name = shape.type_name
    if type_name == "structure" and isinstance(value, dict):
        fields = {}
        for name, part in value.items():
            if name not in shape.members and part:
                fields[name[:MAX_NAME_CHARACTERS]] = LEFT_OUT
            elif name in shape.members and part is not None:
                fields[name] = pruned(part, shape.members[name])
        return fields
    if type_name == "list" and isinstance(value, list):
        return [pruned(item, shape.member) for item in value]
    if type_name == "map" and isinstance(value, dict):
        return {key: pruned(item, shape.value) for key, item in value.items()}
    return value


def validate(request: dict, operation: str) -> None:
    """Raise Refused with all fields that the model forbids, as the service does."""
    shape = input_shape(operation)
    check_types(request, shape)
    problems = list(violations(request, shape, ""))
    if problems:
        raise invalid(
            f"{len(problems)} validation error{'s' if len(problems) > 1 else ''} detected: "
            f"{'; '.join(problems)}"
        )


def check_types(value, shape: Shape) -> None:
    """Raise Refused if a value has a type that its field cannot take.

    Unknown fields pass, as in the service.
    """
    type_name = shape.type_name
    fits = isinstance(value, PYTHON_TYPES[type_name]) and (
        type_name == "boolean" or not isinstance(value, bool)
    )
    if not fits or (
        type_name in BITS and not -(2 ** BITS[type_name]) <= value < 2 ** BITS[type_name]
    ):
        raise Refused("SerializationException", mismatch(value, type_name))
    for _, part, part_shape in parts(value, shape):
        check_types(part, part_shape)


def mismatch(value, type_name: str) -> str:
    """Return the service's message for a value of the wrong JSON type."""
    if isinstance(value, dict):
        return "Start of structure or map found where not expected."
    if isinstance(value, list):
        return "Start of list found where not expected"
    if type_name in ("list", "map", "structure"):
        return f"Expected {type_name if type_name != 'structure' else 'structure or map'} or null"
    word = (
        "NULL_VALUE"
        if value is None
        else "FALSE_VALUE"
        if value is False
        else JSON_WORDS[type(value)]
    )
    return f"{word} can not be converted to {TARGETS[type_name]}"


def violations(value, shape: Shape, path: str) -> Iterator[str]:
    """Yield the service's message for each limit of `shape` that `value` breaks."""
    type_name = shape.type_name
    if type_name == "structure":
        fields = {name: (part, part_shape) for name, part, part_shape in parts(value, shape)}
        for name in shape.members:
            inner = f"{path}.{name[0].lower()}{name[1:]}".lstrip(".")
            if name in fields:
                yield from violations(*fields[name], inner)
            elif name in shape.required_members:
                yield (
                    f"Value null at '{inner}' failed to satisfy constraint: Member must not be null"
                )
        return
    for broken in constraints(value, shape):
        yield f"Value {quoted(value)} at '{path}' failed to satisfy constraint: {broken}"
    if type_name == "list" and shape.member.type_name == "structure":
        for number, item, item_shape in parts(value, shape):
            yield from violations(item, item_shape, f"{path}.{number + 1}.member")
        return
    groups = [("Member", shape.member, value)] if type_name == "list" else []
    if type_name == "map":
        groups = [("Map key", shape.key, value.keys()), ("Map value", shape.value, value.values())]
    for word, group_shape, items in groups:
        if broken := {rule for item in items for rule in constraints(item, group_shape)}:
            rules = ", ".join([*all_constraints(group_shape), *(broken & {WRITABLE})])
            broken = f"{word} must satisfy constraint: [{rules}]"
            yield f"Value {quoted(value)} at '{path}' failed to satisfy constraint: {broken}"


def constraints(value, shape: Shape) -> Iterator[str]:
    """Yield the constraints of `shape` itself that `value` breaks."""
    smallest = shape.metadata.get("min")
    largest = shape.metadata.get("max")
    number = shape.type_name in ("integer", "long")
    size, word = (
        (value, "value") if number else (len(value) if hasattr(value, "__len__") else 0, "length")
    )
    if largest is not None and size > largest:
        yield f"Member must have {word} less than or equal to {largest}"
    if smallest is not None and size < smallest:
        yield f"Member must have {word} greater than or equal to {smallest}"
    if (allowed := shape.metadata.get("enum")) and value not in allowed:
        yield f"Member must satisfy enum value set: [{', '.join(allowed)}]"
    pattern = shape.metadata.get("pattern")
    if pattern and isinstance(value, str) and not re.fullmatch(in_python(pattern), value):
        yield f"Member must satisfy regular expression pattern: {pattern}"
    if isinstance(value, str) and UNWRITABLE.search(value):
        # Our own message: the service's is not documented.
        yield WRITABLE


def all_constraints(shape: Shape) -> Iterator[str]:
    """Yield all constraints of a list's member, or of a map's key or value.

    If one of them is broken, the service lists all.
    """
    if (largest := shape.metadata.get("max")) is not None:
        yield f"Member must have length less than or equal to {largest}"
    if (smallest := shape.metadata.get("min")) is not None:
        yield f"Member must have length greater than or equal to {smallest}"
    if allowed := shape.metadata.get("enum"):
        yield f"Member must satisfy enum value set: [{', '.join(allowed)}]"
    if pattern := shape.metadata.get("pattern"):
        yield f"Member must satisfy regular expression pattern: {pattern}"


def quoted(value) -> str:
    """Return a value as the service shows it: formatted as in Java, and shortened."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}={item}" for key, item in value.items()) + "}"
    else:
        text = "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
    text = UNWRITABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return f"'{text if len(text) <= 300 else text[:297] + '...'}'"


def in_python(pattern: str) -> str:
    r"""Return a pattern of the model as Python writes Java's \p{...} classes.

    In the result, \d and \w match ASCII only.
    """
    if r"\p{L}\p{Z}\p{N}" in pattern:
        return pattern.replace(r"\p{L}\p{Z}\p{N}", r"\w" + SEPARATORS)
    return "(?a)" + pattern.replace(r"\p{Alnum}", "a-zA-Z0-9")
