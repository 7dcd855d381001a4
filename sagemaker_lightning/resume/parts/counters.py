"""How far the training is: the counters of Lightning's loops."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sagemaker_lightning.compat.lightning_loops import batch_counts
from sagemaker_lightning.resume.parts.part import Moment, Part, Place, refusal
from sagemaker_lightning.resume.resume_point import ResumePoint

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run

MAX_BATCHES = 1 << 16
"""Batches for each optimizer step, and draws for each batch, at most: far more than any run has."""


class Counters(Part):
    """Lightning's counters of epochs, batches and steps."""

    key = "loops"
    what = "counters of epochs, batches and steps"
    place = Place.LIGHTNING
    moments = (Moment.LOADING,)

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.of_last_epoch: dict[str, Any] = {}
        """The counts of batches of the epoch at whose end the checkpoint was saved."""

    def restore(self, saved: Any, moment: Moment) -> None:
        """Let Lightning load counters of after an epoch, if it was saved at its end."""
        loop = saved["loops"]["fit_loop"]
        loop.pop("combined_loader", None)  # each rank saved its own
        if self.resumed.saved_at is ResumePoint.EPOCH:
            self.of_last_epoch = move_counters_past_epoch(loop)

    def show_last_epoch(self) -> None:
        """Let the hooks that begin the first epoch find the counts that the last one has left."""
        counts = vars(batch_counts(self.trainer))
        found = {name: count for name, count in self.of_last_epoch.items() if type(count) is int}
        counts.update((name, found[name]) for name in counts.keys() & found.keys())
        self.of_last_epoch = {}

    def batches_done(self, done: int, states: Mapping[str, Any]) -> int:
        """Return how many batches of the epoch steps have had.

        A loader is drawn to that number, and a stream may have no end: there, the numbers of a
        checkpoint have to agree with each other, and with its steps.

        Args:
            done: The number that Lightning has loaded.
            states: What is saved of the training loaders.

        Raises:
            UserError: The numbers disagree.
        """
        loop = self.trainer.fit_loop
        total = loop.epoch_loop.batch_progress.total.ready
        drawn = max([states["drawn"], *(each["given"] for each in states["loaders"])])
        step = self.resumed.step
        is_endless = loop.max_batches == float("inf")
        is_automatic = self.trainer.lightning_module.automatic_optimization
        if (
            (is_endless and done > total)
            or drawn > MAX_BATCHES * (total + 1)
            or (is_automatic and total > MAX_BATCHES * (step + 1))
        ):
            found = f"{done} batches of {total}, {drawn} drawn, at step {step}"
            raise refusal(self.run, self.resumed.file_name, self.key, found)
        return int(min(done, loop.max_batches))


def move_counters_past_epoch(loop: dict[str, Any]) -> dict[str, Any]:
    """Turn a fit loop's counters saved at an epoch's end into those after it.

    Args:
        loop: The saved state of the fit loop; it is changed in place.

    Returns:
        The counts of the epoch's batches.
    """
    for progress in loop["epoch_progress"].values():
        progress["completed"] = progress["processed"]
    current = loop["epoch_loop.batch_progress"]["current"]
    counts = {**current}
    current.update(dict.fromkeys(current, 0))
    return counts


def move_counters_to_epoch_end(loop: dict[str, Any]) -> None:
    """Turn a fit loop's counters after an epoch into those at its end.

    The latter are what Lightning saves and can resume from.

    Args:
        loop: The state of the fit loop; it is changed in place.
    """
    loop["epoch_progress"] = {name: dict(counts) for name, counts in loop["epoch_progress"].items()}
    for progress in loop["epoch_progress"].values():
        progress["completed"] -= 1
