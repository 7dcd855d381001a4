"""Whether DDP gives all ranks the buffers of rank 0 in the next forward pass.

It does so after a pass whose gradients it reduces (torch/nn/parallel/distributed.py,
`_post_forward`), and in the first pass of a process. So it does not after a validation, nor where
gradients are accumulated, nor with manual optimization.
"""

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.resume_point import ResumePoint


class BufferSync(Part):
    """Whether the next forward pass begins with the buffers of rank 0."""

    key = "buffer_sync"
    what = "whether DDP gives all ranks the buffers of rank 0 next"
    moments = (Moment.TRAINING,)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> bool:
        """Return whether DDP begins its next pass so; True without DDP."""
        model = self.trainer.strategy.model
        return not isinstance(model, DistributedDataParallel) or model.require_forward_param_sync

    def restore(self, saved: Any, moment: Moment) -> None:
        """Let DDP begin its next pass as it would have in the run that was saved."""
        model = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            model.require_forward_param_sync = bool(saved)
