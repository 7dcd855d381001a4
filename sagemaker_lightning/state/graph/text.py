"""The nodes of a record as JSON, which Python reads and writes in C.

torch's reader without code is written in Python: of 100,000 lists in a dict, it would take three
seconds. A text of JSON has neither references nor repetitions, so that what is read is as large as
the text. What JSON lacks are lists of a word and what JSON has: bytes, complex and very long whole
numbers. Tensors are numbers of a list beside the text.
"""

import json
from typing import Any, NotRequired, TypedDict

from torch import Tensor

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph.kinds.base import refusal


class Record(TypedDict):
    """The graph of some objects, as a checkpoint has it; one that is read may be forged."""

    nodes: str
    """What `write` has returned."""
    tensors: list[Tensor]
    """The tensors to which the nodes refer by number."""
    shared: NotRequired[dict[str, Tensor]]
    """The DTensors, if any, of which each rank has a part, by the path to which nodes refer."""


LONG_NUMBER = 10**4000
"""Python writes and reads no whole number of more than 4,300 digits as a text of these."""


def write(nodes: list[Any], tensors: list[Tensor]) -> str:
    """Return nodes as a text.

    Args:
        nodes: Lists, dicts with text keys, scalars and tensors.
        tensors: Gets the tensors, after those that the nodes refer to by number.
    """

    def other(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if isinstance(value, bytes):
            return ["bytes", value.decode("latin-1")]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        raise TypeError(type(value))

    count = len(tensors)
    try:
        return json.dumps(nodes, default=other, check_circular=False, separators=(",", ":"))
    except ValueError:  # a number is too long
        del tensors[count:]
        return json.dumps(_with_short_numbers(nodes), default=other, check_circular=False)


def _with_short_numbers(value: Any) -> Any:
    if type(value) is list:
        return [_with_short_numbers(element) for element in value]
    if type(value) is dict:
        return {key: _with_short_numbers(element) for key, element in value.items()}
    is_long = type(value) is int and abs(value) > LONG_NUMBER
    return ["int", hex(value)] if is_long else value


def read(text: Any, tensors: list[Tensor]) -> list[Any]:
    """Return the nodes that `write` was given.

    Args:
        text: What `write` returned.
        tensors: The tensors. Each is one value's: a short text that names one often would make as
            many copies of it.
    """
    taken: set[int] = set()

    def other(value: dict[str, Any]) -> Any:
        if value.keys() != {"tensor"}:
            return value
        number = value["tensor"]
        if type(number) is not int or number < 0 or number in taken:
            raise refusal("a tensor")
        taken.add(number)
        return tensors[number]

    try:
        nodes: list[Any] = json.loads(text, object_hook=other)
    except RecursionError:
        raise UserError("a checkpoint holds a value within too many others") from None
    return nodes
