"""The trainings that this process has brought to their end: is the next one another one?

One Trainer may train several times, and each of its trainings has a folder of its own. A program
that is started again calls `fit` for each: the earlier ones train nothing, and end as they did.
"""

import weakref
from pathlib import Path
from typing import NamedTuple

from pytorch_lightning import LightningModule, Trainer


class _Finished(NamedTuple):
    """A training that this process has brought to its end."""

    trainer: "weakref.ref[Trainer]"
    model: "weakref.ref[LightningModule]"
    fit: int
    """Which of its trainings it was, from 1."""
    number: int
    """The number of the newest checkpoint that this process has saved; 0 if there is none."""


_finished: dict[Path, _Finished] = {}
"""The newest training of this process that is done, by the folder of the first one."""


def note_finished(folder: Path, trainer: Trainer, fit: int, number: int) -> None:
    """Note that a training has come to its end.

    Args:
        folder: The folder of the checkpoints of the trainer's first training.
        trainer: The trainer.
        fit: Which of its trainings it was, from 1.
        number: The number of its newest checkpoint; 0 if it has saved none.
    """
    path = folder.resolve()
    before = _finished.get(path)
    if before and before.fit == fit:
        number = number or before.number
    model = weakref.ref(trainer.lightning_module)
    _finished[path] = _Finished(weakref.ref(trainer), model, fit, number)


def next_fit(folder: Path, trainer: Trainer) -> int:
    """Return which training with a folder begins, from 1.

    Another trainer continues the newest training of the one before.

    Args:
        folder: The folder of the checkpoints of the first one.
        trainer: The trainer.
    """
    finished = _finished.get(folder.resolve())
    return finished.fit + (finished.trainer() is trainer) if finished else 1


def was_of_another_model(folder: Path, model: LightningModule) -> bool:
    """Return whether this process has trained another model to its end with a folder."""
    finished = _finished.get(folder.resolve())
    return finished is not None and finished.model() is not model


def has_saved(folder: Path, fit: int, number: int | None) -> bool:
    """Return whether a training that has come to its end here has saved a checkpoint.

    Args:
        folder: The folder of the checkpoints of the first training.
        fit: Which training saved it.
        number: The number of the checkpoint.
    """
    finished = _finished.get(folder.resolve())
    return finished is not None and (finished.fit, finished.number) == (fit, number)
