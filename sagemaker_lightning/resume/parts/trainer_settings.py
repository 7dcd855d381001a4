"""Lightning's own settings that a callback may change.

They are those of the trainer, its loops, the module, and the callbacks of Lightning's own.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

from sagemaker_lightning.compat import lightning_loops
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.parts.start_hooks import is_of_library
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.caches import kept
from sagemaker_lightning.state.object_graph import added_to

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run

SETTING_TYPES = int, float, bool, str, type(None)
OF_OTHER_PARTS = {"should_stop", "fit_loop.max_epochs", "fit_loop.epoch_loop.max_steps"}
OF_DATA = {"val_check_batch", "fit_loop.max_batches"}
"""What Lightning sets when it makes the training data: it follows from their number of batches."""
HAS_VALIDATED = f"fit_loop.epoch_loop.val_loop.{lightning_loops.HAS_RUN}"
"""Whether a validation has ended, which Lightning asks before it begins or saves something."""
OF_MODULES = "automatic_optimization", "strict_loading"
"""Lightning's own settings of a module."""


class TrainerSettings(Part):
    """The plain attributes of Lightning's objects that are others than at the start.

    Those of a loop have its name before them ("fit_loop.min_epochs"), the module's have "model". A
    callback's are those that it is made with, and have its number and class. What a user adds to
    these objects is among the user's objects, and what a callback's `state_dict` has, Lightning
    loads.
    """

    key = "trainer_settings"
    what = "settings of the trainer, its loops, the module and Lightning's callbacks, if changed"
    moments = (Moment.TRAINING,)

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.at_start: dict[str, Any] = {}
        """Empty until training begins."""
        self.always_saved = {HAS_VALIDATED}
        """With those that the interrupted run had changed: they count as changed from now on."""

    def mark_start(self) -> None:
        """Take the present settings as those at the start."""
        self.at_start = self._settings()

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the settings that have changed, by name."""
        return {
            name: value
            for name, value in self._settings().items()
            if name in self.always_saved or not _is_same(self.at_start.get(name, value), value)
        }

    def restore(self, saved: Any, moment: Moment) -> None:
        """Set the settings."""
        # Among another number of ranks, each has another part of the data.
        own = saved if self.resumed.same_ranks else _without_data(saved)
        self.always_saved |= self._set(own).keys()

    @property
    def has_begun(self) -> bool:
        """Whether training has begun, and with it, what the interrupted run had changed."""
        return bool(self.at_start)

    @contextmanager
    def as_saved(self, saved: Mapping[str, Any]) -> Iterator[None]:
        """Have the settings, inside this context, that there were when these were saved.

        Args:
            saved: What `save` has returned, in this run or in the interrupted one.
        """
        before = self._set(_without_data({**self.at_start, **saved}))
        try:
            yield
        finally:
            self._set(before)

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each setting."""
        return {f"settings {name}": value for name, value in saved.items()}

    def _places(self) -> dict[str, tuple[Any, str]]:
        """Return where each setting may be, an object and its attribute, by name."""
        trainer = self.trainer
        own_names = lightning_loops.own_attributes()
        places: dict[str, tuple[Any, str]] = {}
        added = object_graph.attributes(added_to(trainer))
        for name in vars(trainer):
            if name not in added:
                places[name] = trainer, name
        for loop_name, loop in lightning_loops.loops(trainer).items():
            for name in vars(loop):
                if name in own_names[loop_name]:
                    places[f"{loop_name}.{name}"] = loop, name
        for name in OF_MODULES:
            member = getattr_static(type(trainer.lightning_module), name, None)
            # A property of the user's own may be calculated.
            if member is not None and (not isinstance(member, property) or member.fset):
                places[f"model.{name}"] = trainer.lightning_module, name
        for number, callback in enumerate(callbacks_of(trainer)):
            made = made_with(type(callback))
            if not made or not is_of_library(type(callback).state_dict):
                continue  # a user's method is called as often as Lightning calls it
            prefix = f"callbacks.{number} {type(callback).__name__}"
            names = made - {*object_graph.attributes(callback), *callback.state_dict()}
            for name, value in object_graph.namespace(callback).items():
                # A text may be a path, which is that of one run.
                if name in names and not isinstance(value, str):
                    places[f"{prefix}.{name}"] = callback, name
        return {
            name: place
            for name, place in places.items()
            if (place[1][0] != "_" or name == HAS_VALIDATED) and name not in OF_OTHER_PARTS
        }

    def _settings(self) -> dict[str, Any]:
        """Return all settings, by name."""
        return _values(self._places())

    def _set(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Set settings; return what each of them was before, by name."""
        places = self._places()
        before = _values(places)
        names = [name for name in values if name in before and type(values[name]) in SETTING_TYPES]
        for name in names:
            setattr(*places[name], values[name])
        return {name: before[name] for name in names}


@kept
def made_with(class_: type) -> frozenset[str]:
    """Return the names of what libraries' callbacks, such as a user's class's base, are made with.

    What else they have, such as the numbers of a bar's tasks, is how far they have come.
    """
    bases = [base for base in class_.__mro__ if object_graph.is_librarys_callback(base)]
    made = [inspect.signature(vars(base)["__init__"]) for base in bases if "__init__" in vars(base)]
    return frozenset(name for signature in made for name in signature.parameters)


def _values(places: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return the values at some places that are settings', by name."""
    values = {name: getattr(*place) for name, place in places.items()}
    return {name: value for name, value in values.items() if type(value) in SETTING_TYPES}


def _is_same(before: Any, now: Any) -> bool:
    """Return whether two settings are equal: 1 is one batch, and 1.0 is all of them."""
    return type(before) is type(now) and bool(before == now)


def _without_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that follow from the data."""
    return {name: value for name, value in values.items() if name not in OF_DATA}
