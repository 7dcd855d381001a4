"""Answers that are kept: of questions on classes, which never change."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


def kept(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    """Return a function that keeps its answers, as functools.cache does, and its types.

    Type checkers ask a class for the hash of its objects, and so believe that it has none.
    """
    return cast(Callable[Asked, Answer], functools.cache(function))
