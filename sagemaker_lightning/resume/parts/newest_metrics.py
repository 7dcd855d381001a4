"""The newest value of each metric, as callbacks and progress bars read it."""

from collections.abc import Mapping
from typing import Any

from sagemaker_lightning.compat import lightning_metrics
from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.text import Record


class NewestMetrics(Part):
    """The newest value of each metric, by where Lightning shows it.

    What is logged without `sync_dist` is each rank's own.
    """

    key = "newest_metrics"
    what = "the newest value of each logged metric"
    moments = (Moment.HOOKS, Moment.TRAINING)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> Record:
        """Return the values, as a record."""
        return values.encode(lightning_metrics.newest_values(self.trainer))

    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the values."""
        lightning_metrics.set_newest_values(self.trainer, values.decode(saved))
