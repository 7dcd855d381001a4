"""Lightning's fit loop, which asks app/resume.py and app/restart.py at the moments at which nothing is half done.

Lightning 2.6's own checkpoints are taken in the middle of things, and what was to come is lost or done twice: the
validation after a checkpoint in on_train_batch_end, the step of a ReduceLROnPlateau, the epoch after one in
on_train_epoch_start. Here a state is taken when a batch is over with all that belongs to it (validation, schedulers,
logging), when an epoch is, and before a validation; and a resumed run goes on at exactly that point.
"""

from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop


def install(trainer: Trainer, resume, restart) -> None:
    """Have the trainer's fit loop, as it is, ask `resume` and, where it begins, `restart`; no signal is Lightning's."""
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    loop = trainer.fit_loop
    for part, kind in ((loop, FitLoop), (loop.epoch_loop, EpochLoop), (loop.epoch_loop.val_loop, ValidationLoop)):
        part.__class__ = kind
        part.resume, part.restart = resume, restart


class FitLoop(_FitLoop):
    """All epochs."""

    def setup_data(self) -> None:
        """Make the training data's loader; tell it where an epoch ends that other ranks began."""
        absent = self._combined_loader is None
        super().setup_data()
        if absent and self._combined_loader is not None:
            self.restart.place(self)

    def run(self) -> None:
        """Train; if all was trained before, do only what comes at the end."""
        self.begun = False
        super().run()
        if not self.begun and self.restart.step:
            self.restart.restore()
            self.restart.say_that_all_is_done()
            self.on_run_end()

    def on_run_start(self) -> None:
        """Begin, or go on."""
        self.begun = True
        self.restart.restore()
        super().on_run_start()

    def reset(self) -> None:
        """Reset nothing that goes on: what remains of Lightning's own restart is that it knows it is in an epoch."""
        super().reset()
        self.restarting = False

    def on_advance_end(self) -> None:
        """End an epoch."""
        super().on_advance_end()
        self.resume.epoch_ended(self.done)


class EpochLoop(_TrainingEpochLoop):
    """The batches of an epoch."""

    def reset(self) -> None:
        """Begin an epoch's counters, or leave them as they were."""
        if not self.restart.goes_on():
            super().reset()

    def on_run_start(self, data_fetcher) -> None:
        """Begin an epoch, with the validation that was interrupted if there was one."""
        super().on_run_start(data_fetcher)
        if self.restart.validates_first():
            self.on_advance_end(data_fetcher)

    def on_advance_end(self, data_fetcher) -> None:
        """End a batch, with the validation that comes after it."""
        super().on_advance_end(data_fetcher)
        if not self._should_accumulate() and not self._num_ready_batches_reached():
            self.resume.batch_ended()


class ValidationLoop(_EvaluationLoop):
    """A validation."""

    def run(self) -> list:
        """Validate."""
        if not self.trainer.sanity_checking:
            self.resume.before_validation()
        return super().run()


def begin_anew(loop: dict[str, Any]) -> None:
    """Turn the saved counters of a fit loop at an epoch's end into those after it."""
    for progress in loop["epoch_progress"].values():
        progress["completed"] = progress["processed"]
    current = loop["epoch_loop.batch_progress"]["current"]
    current.update(dict.fromkeys(current, 0))


def end_as_lightning_does(loop: dict[str, Any]) -> None:
    """Turn the counters of a fit loop after an epoch into those that Lightning saves at its end, and can go on from."""
    loop["epoch_progress"] = {name: dict(counts) for name, counts in loop["epoch_progress"].items()}
    for progress in loop["epoch_progress"].values():
        progress["completed"] -= 1
