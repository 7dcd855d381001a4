"""LearningRateMonitor: the rates that it has noted. Lightning saves none of them."""

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning.callbacks import LearningRateMonitor
from torch import Tensor

from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class NotedRates(Part):
    """The rates that each LearningRateMonitor has noted, in the order of the callbacks."""

    key = "noted_rates"
    what = "the learning rates that each LearningRateMonitor has noted"
    place = Place.RUN
    moments = (Moment.HOOKS, Moment.TRAINING)

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> list[dict[str, Tensor]]:
        """Return the rates of each by name, float64 [number of times]."""
        return [
            {name: torch.tensor(rates, dtype=torch.float64) for name, rates in each.lrs.items()}
            for each in self._monitors()
        ]

    def restore(self, saved: Any, moment: Moment) -> None:
        """Set the rates: twice, as the hooks that begin training set the names.

        A start with nothing left to train has none of these hooks.
        """
        for callback, of_callback in zip(self._monitors(), saved, strict=False):
            names = of_callback.keys()
            # Names are added while training, as by StochasticWeightAveraging; those of a training
            # before this one are not its.
            if moment is Moment.TRAINING and not callback.lrs.keys() <= names:
                names &= callback.lrs.keys()
            callback.lrs |= {name: of_callback[name].flatten().tolist() for name in names}

    def _monitors(self) -> list[LearningRateMonitor]:
        return [
            each for each in callbacks_of(self.trainer) if isinstance(each, LearningRateMonitor)
        ]
