"""Whether a callback has ended the training, as EarlyStopping does."""

from collections.abc import Mapping
from typing import Any

from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class ShouldStop(Part):
    """Lightning's `Trainer.should_stop`."""

    key = "should_stop"
    what = "whether a callback has ended the training"
    place = Place.RUN
    moments = (Moment.LOADING,)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> bool:
        """Return whether it has."""
        return bool(self.trainer.should_stop)

    def restore(self, saved: Any, moment: Moment) -> None:
        """End the training, too, if it had ended."""
        self.trainer.should_stop = saved
