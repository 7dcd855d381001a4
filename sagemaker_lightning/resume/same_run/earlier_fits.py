"""The trainings that this process has brought to their end: is the next one another one?"""

import weakref
from pathlib import Path
from typing import NamedTuple

from pytorch_lightning import LightningModule


class _Finished(NamedTuple):
    """A training that this process has brought to its end."""

    model: "weakref.ref[LightningModule]"
    number: int
    """The number of the newest checkpoint that this process has saved; 0 if there is none."""


_finished: dict[Path, _Finished] = {}
"""The newest training of this process that is done, by the folder of its checkpoints."""


def note_finished(folder: Path, model: LightningModule, number: int) -> None:
    """Note that a training has come to its end.

    Args:
        folder: The folder of its checkpoints.
        model: Its model.
        number: The number of its newest checkpoint; 0 if it has saved none.
    """
    path = folder.resolve()
    number = number or (_finished[path].number if path in _finished else 0)
    _finished[path] = _Finished(weakref.ref(model), number)


def was_of_another_model(folder: Path, model: LightningModule) -> bool:
    """Return whether this process has trained another model to its end with a folder."""
    finished = _finished.get(folder.resolve())
    return finished is not None and finished.model() is not model


def has_saved(folder: Path, number: int | None) -> bool:
    """Return whether a training that has come to its end here has saved a checkpoint.

    Args:
        folder: The folder of the checkpoints.
        number: The number of the checkpoint.
    """
    finished = _finished.get(folder.resolve())
    return finished is not None and finished.number == number
