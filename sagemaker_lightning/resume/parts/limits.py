"""The limits of training, in epochs and steps, and what callbacks have added to them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytorch_lightning import Trainer

from sagemaker_lightning.compat import lightning_loops
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run


class Limits(Part):
    """The limits as the flags set them, and what callbacks have added."""

    key = "limits"
    what = "the limits of epochs and steps, and what callbacks have added to them"
    place = Place.RUN
    moments = (Moment.LOADING,)

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.of_flags = limits(self.trainer)
        self.at_start = self.of_flags
        """The same, with what hooks at the start of training have added."""
        self.added_before = [0, 0]
        """Epochs and steps that callbacks of the interrupted run had added."""
        self.exceeded = ""
        """The limit of this training that the checkpoint is beyond."""

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> dict[str, list[int]]:
        """Return the limits that the flags set, and what was added to them."""
        pairs = zip(limits(self.trainer), self.at_start, strict=True)
        added = [limit - limit_before for limit, limit_before in pairs]
        return {"of_flags": self.of_flags, "added_limits": added}

    def restore(self, saved: Any, moment: Moment) -> None:
        """Change the limits as callbacks had done; other limits of the flags replace that."""
        if saved["of_flags"] == self.of_flags:
            self.added_before = saved["added_limits"]
            add_to_limits(self.trainer, self.added_before)

    @contextmanager
    def loading_loops(self) -> Iterator[None]:
        """Let Lightning load a checkpoint of an epoch beyond this training's limit.

        It refuses that. But a program that trains on, with a higher limit than at first, comes by
        its first training again when it is started again.
        """
        loop = self.trainer.fit_loop
        limit = loop.max_epochs
        saved = self.resumed.checkpoint["loops"]["fit_loop"]
        epoch = saved["epoch_progress"]["current"]["processed"]
        if limit not in (None, -1) and epoch > limit:
            loop.max_epochs = epoch
        yield
        loop.max_epochs = limit

    def loops_begin(self) -> None:
        """Note whether the checkpoint is beyond this training's limit."""
        loop = self.trainer.fit_loop
        if self.run.resumed and loop.max_epochs not in (None, -1):
            reached = lightning_loops.epoch_counts(self.trainer).processed + (
                self.resumed.epoch_is_open and not lightning_loops.epoch_is_done(self.trainer)
            )
            if reached > loop.max_epochs:
                self.exceeded = f"max_epochs={loop.max_epochs}"

    def mark_start(self) -> None:
        """Take the present limits as those at the start, but for what was added before."""
        pairs = zip(limits(self.trainer), self.added_before, strict=True)
        self.at_start = [limit - added for limit, added in pairs]


def limits(trainer: Trainer) -> list[int]:
    """Return the limits of training: epochs and steps; -1 for no limit."""
    epochs = trainer.fit_loop.max_epochs
    return [-1 if epochs is None else epochs, trainer.fit_loop.epoch_loop.max_steps]


def add_to_limits(trainer: Trainer, added: Sequence[int]) -> None:
    """Change the limits of training as a callback had done.

    Args:
        trainer: Lightning's trainer.
        added: Epochs and steps to add; negative ones shorten the training.
    """
    loop = trainer.fit_loop
    if added[0] and loop.max_epochs is not None:
        loop.max_epochs += added[0]
    if added[1]:
        loop.epoch_loop.max_steps += added[1]
