"""LearningRateFinder and BatchSizeFinder: what they have found; a resumed run does not search."""

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from pytorch_lightning.utilities.parsing import (
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
)

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.lightning_trainer import call_within, callbacks_of
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint

RESULT_ATTRIBUTES = "lr", "learning_rate"
"""Attributes in which a search stores its result."""


class SearchResults(Part):
    """The results of searches before training, by attribute of the model.

    What a callback has found besides, such as the losses of all rates, is by the callback's number.
    """

    key = "search_results"
    what = "what searches before training have found"
    place = Place.RUN
    moments = (Moment.LOADING,)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the results, which are numbers, and what else is plain."""
        model = self.trainer.lightning_module
        results = {name: lightning_getattr(model, name) for name in _searched_names(self.trainer)}
        numbers = {name: value for name, value in results.items() if type(value) in (int, float)}
        found = {
            name: lightning_callbacks.found_by_search(callback)
            for name, callback in _searches(self.trainer).items()
        }
        return numbers | {name: values for name, values in found.items() if is_plain(values)}

    def restore(self, saved: Any, moment: Moment) -> None:
        """Set the results, and keep the callbacks from searching again."""
        for name, callback in _searches(self.trainer).items():
            vars(callback)["on_fit_start"] = lambda *_: None
            if isinstance(found := saved.get(name), dict):
                lightning_callbacks.set_found_by_search(callback, found)
        for name in saved.keys() & set(_searched_names(self.trainer)):
            if isinstance(saved[name], (int, float)):
                lightning_setattr(self.trainer.lightning_module, name, saved[name])


def search_within(trainer: Trainer, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run each search before a training within a context."""
    for callback in _searches(trainer).values():
        call_within(callback, "on_fit_start", context)


def search_again(trainer: Trainer) -> None:
    """Let the callbacks search again in another training, if a resumed run has kept them."""
    for callback in _searches(trainer).values():
        vars(callback).pop("on_fit_start", None)


def is_plain(value: Any) -> bool:
    """Return whether a value is numbers, text and None in dicts and lists."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and is_plain(each) for name, each in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return type(value) in (int, float, str, type(None))


def _searches(trainer: Trainer) -> dict[str, LearningRateFinder | BatchSizeFinder]:
    """Return the callbacks that search, by name."""
    callbacks = filter(lightning_callbacks.is_search, callbacks_of(trainer))
    return {f"callback {number}": callback for number, callback in enumerate(callbacks)}


def _searched_names(trainer: Trainer) -> list[str]:
    """Return the names of the model's attributes in which searches store their results."""
    model = trainer.lightning_module
    names = []
    for callback in _searches(trainer).values():
        attribute = lightning_callbacks.searched_attribute(callback)
        candidates = [attribute] if attribute else RESULT_ATTRIBUTES
        present = (name for name in candidates if lightning_hasattr(model, name))
        names += list(itertools.islice(present, 1))
    return names
