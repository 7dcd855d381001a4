"""How far the training is: the counters of Lightning's loops."""

from typing import Any

from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class Counters(Part):
    """Lightning's counters of epochs, batches and steps."""

    key = "loops"
    what = "counters of epochs, batches and steps"
    place = Place.LIGHTNING
    moments = (Moment.LOADING,)

    def restore(self, saved: Any, moment: Moment) -> None:
        """Let Lightning load counters of after an epoch, if it was saved at its end."""
        loop = saved["loops"]["fit_loop"]
        loop.pop("combined_loader", None)  # each rank saved its own
        if self.run.resumed.saved_at is ResumePoint.EPOCH:
            move_counters_past_epoch(loop)


def move_counters_past_epoch(loop: dict[str, Any]) -> None:
    """Turn a fit loop's counters saved at an epoch's end into those after it.

    Args:
        loop: The saved state of the fit loop; it is changed in place.
    """
    for progress in loop["epoch_progress"].values():
        progress["completed"] = progress["processed"]
    current = loop["epoch_loop.batch_progress"]["current"]
    current.update(dict.fromkeys(current, 0))


def move_counters_to_epoch_end(loop: dict[str, Any]) -> None:
    """Turn a fit loop's counters after an epoch into those at its end.

    The latter are what Lightning saves and can resume from.

    Args:
        loop: The state of the fit loop; it is changed in place.
    """
    loop["epoch_progress"] = {name: dict(counts) for name, counts in loop["epoch_progress"].items()}
    for progress in loop["epoch_progress"].values():
        progress["completed"] -= 1
