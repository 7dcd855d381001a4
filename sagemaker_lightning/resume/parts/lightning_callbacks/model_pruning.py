"""ModelPruning: the first weights that it keeps and may reset the model to.

Lightning 2.6 does not copy them if both are on one device, so that training changes them, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pytorch_lightning import Trainer
from torch import Tensor

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class SharedPrunedWeights(Part):
    """Which of the kept weights are the trained ones themselves.

    Masks are weights (parts/weights.py prunes again), and Lightning saves them while
    `compat.lightning_callbacks.saving_pruning_masks` lasts.
    """

    key = "shared_pruned_weights"
    what = "which weights kept by ModelPruning are the trained ones"
    place = Place.RUN
    moments = (Moment.TRAINING,)

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> list[tuple[int, int]]:
        """Return (number of the callback, number of the layer) of each."""
        return [
            key
            for key, trained, original in _kept_weights(self.trainer)
            if original.data_ptr() == trained.data_ptr()
        ]

    def restore(self, saved: Any, moment: Moment) -> None:
        """Let these weights be the trained ones again."""
        for key, trained, original in _kept_weights(self.trainer):
            if key in saved:
                original.data = trained.data


def _kept_weights(trainer: Trainer) -> Iterator[tuple[tuple[int, int], Tensor, Tensor]]:
    """Yield the weights that ModelPruning keeps: key, trained weight and original weight."""
    for number, callback in enumerate(callbacks_of(trainer)):
        for layer_number, layer, original, name in lightning_callbacks.original_weights(callback):
            trained = getattr(layer, f"{name}_orig", None)
            if isinstance(trained, Tensor):
                yield (number, layer_number), trained, getattr(original, name)
