"""What the user's `on_save_checkpoint` has replaced in a checkpoint: training continues with it.

A hook may put an average in the weights' place, drop the optimizers' states, or rename what there
is. The file has what it has made, and beside it what was trained.
"""

from typing import Any

from sagemaker_lightning.resume.files.checkpoint_file import BEFORE_HOOKS
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.parts.weights import Weights


class BeforeHooks(Part):
    """The replaced entries, by key; `compat.lightning_checkpoints.state_of` finds them."""

    key = BEFORE_HOOKS
    what = "weights, optimizers and schedulers that `on_save_checkpoint` has replaced"
    place = Place.LIGHTNING
    moments = (Moment.LOADING,)

    def restore(self, saved: Any, moment: Moment) -> None:
        """Have Lightning load what was trained.

        The user's `on_load_checkpoint` gets the weights that they have saved.
        """
        replaced = saved.pop(BEFORE_HOOKS)
        weights = replaced.pop("state_dict", None)
        saved |= replaced
        self.run.accept(saved)
        if weights is not None:
            self.run.part(Weights).load_instead(weights)
