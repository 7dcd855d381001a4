"""The trainer's settings that a callback may change."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.object_graph import added_to

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run

SETTING_TYPES = int, float, bool, str, type(None)
CHANGED_BEFORE = object()
"""Stands for the start value of a setting that the interrupted run changed."""


class TrainerSettings(Part):
    """The plain attributes of the trainer that are others than at the start."""

    key = "trainer_settings"
    what = "the trainer's settings that callbacks have changed"
    moments = (Moment.TRAINING,)

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.at_start: dict[str, Any] = {}

    def mark_start(self) -> None:
        """Take the present settings as those at the start."""
        self.at_start = self._settings()

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the settings that have changed, by name."""
        return {
            name: value
            for name, value in self._settings().items()
            if self.at_start.get(name, value) != value
        }

    def restore(self, saved: Any, moment: Moment) -> None:
        """Set the settings; they count as changed from now on."""
        for name in saved.keys() & self._settings().keys():
            if type(saved[name]) in SETTING_TYPES:
                setattr(self.trainer, name, saved[name])
                self.at_start[name] = CHANGED_BEFORE

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each setting."""
        return {f"settings {name}": value for name, value in saved.items()}

    def _settings(self) -> dict[str, Any]:
        added = object_graph.attributes(added_to(self.trainer))
        return {
            name: value
            for name, value in vars(self.trainer).items()
            if name not in added
            and name[0] != "_"
            and type(value) in SETTING_TYPES
            and name != "should_stop"
        }
