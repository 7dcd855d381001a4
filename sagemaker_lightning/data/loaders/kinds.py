"""Which kind a loader is of: the table."""

from collections.abc import Callable, Iterator
from typing import Any

from sagemaker_lightning.data.deterministic import divided, is_strange, saves_between_epochs
from sagemaker_lightning.data.loaders.one_pass import OnePass
from sagemaker_lightning.data.loaders.positioned import Positioned
from sagemaker_lightning.data.loaders.redrawn import Redrawn
from sagemaker_lightning.data.loaders.resumable import ResumableLoader
from sagemaker_lightning.data.loaders.stateful import Stateful
from sagemaker_lightning.data.loaders.strange import Strange
from sagemaker_lightning.data.sample_seeding import has_state


def has_positions(loader: Any) -> bool:
    """Return whether a loader can begin at any batch."""
    return divided(loader) is not None


def cannot_begin_again(loader: Any) -> bool:
    """Return whether a loader is an iterator of Python's: all epochs together go through it."""
    return isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools")


def saves_itself(loader: Any) -> bool:
    """Return whether a loader saves, at any batch, where it is; `Stateful` proves it."""
    return has_state(loader) and not saves_between_epochs(loader)


KINDS: tuple[tuple[Callable[[Any], bool], type[ResumableLoader]], ...] = (
    (is_strange, Strange),
    (has_positions, Positioned),
    (cannot_begin_again, OnePass),
    (saves_itself, Stateful),
    (lambda loader: True, Redrawn),
)
"""What a loader is, and the class for it; the first that applies."""


def resumable(loader: Any, seed: tuple[Any, ...], mode: str) -> ResumableLoader:
    """Return a loader as one that begins where training is.

    Args:
        loader: The loader.
        seed: Decides what it draws.
        mode: How Lightning combines the loaders; "" if there is only one.
    """
    kind = next(kind for applies, kind in KINDS if applies(loader))
    return kind(loader, seed, mode)
