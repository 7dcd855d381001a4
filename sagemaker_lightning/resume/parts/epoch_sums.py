"""The sums over the batches of an epoch of which Lightning computes the epoch's metrics."""

from collections.abc import Mapping
from typing import Any

import torch

from sagemaker_lightning.compat import lightning_metrics
from sagemaker_lightning.resume.parts.copies import copy_to_cpu
from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.resume_point import ResumePoint


class EpochSums(Part):
    """What was logged within an epoch so far."""

    key = "epoch_sums"
    what = "sums of what was logged within the epoch"
    moments = (Moment.HOOKS, Moment.TRAINING)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> Any:
        """Return the sums, on the CPU."""
        return copy_to_cpu(lightning_metrics.epoch_sums(self.trainer))

    @torch.no_grad()
    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the sums, if training resumes within an epoch."""
        if self.resumed.saved_at is not ResumePoint.EPOCH:
            device = self.trainer.strategy.root_device
            own, everyone = self.resumed.of_data_ranks(self)
            lightning_metrics.restore_epoch_sums(self.trainer, own, everyone, device)
