"""ThroughputMonitor: how many batches and samples it has counted. Lightning saves none of it."""

from collections.abc import Mapping
from typing import Any

from pytorch_lightning.callbacks import ThroughputMonitor

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class ThroughputCounts(Part):
    """The counts of each ThroughputMonitor, in the order of the callbacks; times begin again."""

    key = "throughput"
    what = "the batches, samples and lengths that each ThroughputMonitor has counted"
    place = Place.RUN
    moments = (Moment.TRAINING,)

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> list[dict[str, dict[str, int]]]:
        """Return the counts of each, by attribute and stage."""
        return [
            {
                name: {str(stage.value): count for stage, count in counts.items()}
                for name, counts in lightning_callbacks.throughput_counts(callback).items()
            }
            for callback in self._monitors()
        ]

    def restore(self, saved: Any, moment: Moment) -> None:
        """Set the counts."""
        for callback, of_callback in zip(self._monitors(), saved, strict=False):
            for name, counts in lightning_callbacks.throughput_counts(callback).items():
                for stage in counts:
                    count = of_callback.get(name, {}).get(str(stage.value))
                    if type(count) is int and count >= 0:
                        counts[stage] = count

    def _monitors(self) -> list[ThroughputMonitor]:
        return [each for each in callbacks_of(self.trainer) if isinstance(each, ThroughputMonitor)]
