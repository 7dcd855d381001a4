"""The arguments of ExactResume: which are allowed."""

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from os import PathLike
from typing import Any

from sagemaker_lightning.contract.errors import UserError

KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "dirpath": ((str, PathLike), "a folder"),
    "seed": ((Integral, type(None)), "an integer"),
    "every_n_minutes": (Real, "a number"),
    "every_n_steps": (Integral, "an integer"),
    "keep": (Integral, "an integer"),
    "settings": (Mapping, "a dict"),
}
"""The types of arguments, and how messages name them."""
MINIMUMS = {"every_n_minutes": 0, "every_n_steps": 0, "keep": 1}


def check(arguments: Mapping[str, Any], name: Callable[[str], str]) -> None:
    """Raise UserError if an argument of ExactResume is not allowed.

    Args:
        arguments: The arguments by name.
        name: Returns how messages name an argument.
    """
    for argument, (kind, words) in KINDS.items():
        value = arguments[argument]
        if not isinstance(value, kind):
            raise UserError(f"{name(argument)}: found {value!r}, expected {words}")
    for argument, minimum in MINIMUMS.items():
        value = arguments[argument]
        if not value >= minimum:  # this refuses NaN, too
            raise UserError(f"{name(argument)}: found {value}, expected {minimum} or more")
    if not str(arguments["dirpath"]):
        raise UserError(
            f"{name('dirpath')}: found an empty text, expected a folder, such as 'checkpoints'"
        )
    if "://" in str(arguments["dirpath"]):
        raise UserError(
            f"{name('dirpath')}: found {arguments['dirpath']}, expected a folder; SageMaker "
            "copies it to S3"
        )
