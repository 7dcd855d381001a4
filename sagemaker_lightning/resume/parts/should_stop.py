"""Whether a callback has ended the training, as EarlyStopping does."""

from typing import Any

from sagemaker_lightning.resume.parts.part import Moment, Part, Place


class ShouldStop(Part):
    """Lightning's `Trainer.should_stop`."""

    key = "should_stop"
    what = "whether a callback has ended the training"
    place = Place.RUN
    moments = (Moment.LOADING,)

    def save(self, point: Any, state: Any) -> bool:
        """Return whether it has."""
        return bool(self.trainer.should_stop)

    def restore(self, saved: Any, moment: Moment) -> None:
        """End the training, too, if it had ended."""
        self.trainer.should_stop = saved
