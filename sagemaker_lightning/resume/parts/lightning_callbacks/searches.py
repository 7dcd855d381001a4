"""LearningRateFinder and BatchSizeFinder: what they have found; a resumed run does not search."""

import itertools
from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities.parsing import (
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
)

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint

RESULT_ATTRIBUTES = "lr", "learning_rate"
"""Attributes in which a search stores its result."""


class SearchResults(Part):
    """The results of searches before training, by attribute of the model."""

    key = "search_results"
    what = "what searches before training have found"
    place = Place.RUN
    moments = (Moment.LOADING,)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the results, which are numbers."""
        model = self.trainer.lightning_module
        results = {name: lightning_getattr(model, name) for name in _searched_names(self.trainer)}
        return {name: value for name, value in results.items() if type(value) in (int, float)}

    def restore(self, saved: Any, moment: Moment) -> None:
        """Set the results, and keep the callbacks from searching again."""
        for callback in callbacks_of(self.trainer):
            if lightning_callbacks.is_search(callback):
                vars(callback)["on_fit_start"] = lambda *_: None
        for name in saved.keys() & set(_searched_names(self.trainer)):
            if isinstance(saved[name], (int, float)):
                lightning_setattr(self.trainer.lightning_module, name, saved[name])


def search_again(trainer: Trainer) -> None:
    """Let the callbacks search again in another training, if a resumed run has kept them."""
    for callback in callbacks_of(trainer):
        if lightning_callbacks.is_search(callback):
            vars(callback).pop("on_fit_start", None)


def _searched_names(trainer: Trainer) -> list[str]:
    """Return the names of the model's attributes in which searches store their results."""
    model = trainer.lightning_module
    names = []
    for callback in callbacks_of(trainer):
        if lightning_callbacks.is_search(callback):
            attribute = lightning_callbacks.searched_attribute(callback)
            candidates = [attribute] if attribute else RESULT_ATTRIBUTES
            present = (name for name in candidates if lightning_hasattr(model, name))
            names += list(itertools.islice(present, 1))
    return names
