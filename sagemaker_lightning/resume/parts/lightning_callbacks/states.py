"""The states of all callbacks: Lightning saves and loads them."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.resume.parts.part import Part, Place, named_values


class Callbacks(Part):
    """The states of the callbacks; files/acceptance.py says what of them is loaded."""

    key = "callbacks"
    what = "the callbacks' states"
    when = "Lightning loads it"
    place = Place.LIGHTNING

    def present(self) -> dict[str, Any]:
        """Return what the callbacks would save now."""
        callbacks = callbacks_of(self.trainer)
        return {self.key: {callback.state_key: callback.state_dict() for callback in callbacks}}

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each tensor of numbers with a fraction: the rest may be a time, or a path."""
        values = named_values(self.key, saved.get(self.key, {}))
        # ModelCheckpoint names its scores by file, in a folder that may have moved.
        return {
            re.sub(r"(?<=\.best_k_models\.).*/", "", name): value
            for name, value in values.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
