"""Lightning's fit loop, which asks callback.py and restore.py at the moments at which nothing is half done.

Lightning 2.6's own checkpoints are taken in the middle of things, and what was to come is lost or done twice: the
validation after a checkpoint in on_train_batch_end, the step of a ReduceLROnPlateau, the epoch after one in
on_train_epoch_start. Here a state is taken when a batch is over with all that belongs to it (validation, schedulers,
logging), when an epoch is, and before a validation; and a resumed run goes on at exactly that point.

A search before training, such as for a learning rate, runs the same loops, without our callbacks: it is left alone.
"""

from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities import CombinedLoader

from sagemaker_lightning.compat import lightning_loops
from sagemaker_lightning.contract.errors import UserError


def install(trainer: Trainer, resume, restart) -> None:
    """Have the trainer's fit loop, as it is, ask `resume` and, where it begins, `restart`; no signal is Lightning's."""
    lightning_loops.ignore_signals_of_others(trainer)
    loop = trainer.fit_loop
    for part, kind in ((loop, FitLoop), (loop.epoch_loop, EpochLoop), (loop.epoch_loop.val_loop, ValidationLoop)):
        part.__class__ = kind
        part.resume, part.restart = resume, restart


class _Loaders:
    """What sets loaders up: they are made to begin where training is before Lightning begins them."""

    kind = ""

    def take_loaders(self, loader: CombinedLoader | None, before: CombinedLoader | None) -> None:
        """Make them so; the workers of those before end."""
        if loader is not None:
            self.restart.chance.together(self.trainer, loader, self.kind)
        if before not in (None, loader):
            before.leave(loader)


class FitLoop(_Loaders, lightning_loops.FitLoop):
    """All epochs."""

    kind = "train"

    @property
    def done(self) -> bool:
        """Whether all is done: an epoch of which all batches are, or that a limit has cut off, is still to be ended."""
        ends = self.resume.trains and self.restart.within
        ends = ends and (lightning_loops.epoch_is_done(self.trainer) or self.trainer.should_stop)
        return not ends and super().done

    def setup_data(self) -> None:
        """Have the training data made, in a run that goes on as of the epoch that it was made in."""
        before, snapshot = self.loaders, self.resume.snapshot
        held = snapshot.held.before_data() if before is not None and self.resume.trains else None
        with self.restart.as_of_the_data(self, snapshot):
            try:
                super().setup_data()
            except ValueError:
                self._check_validation_interval()
                raise
        if before not in (None, self.loaders):
            snapshot.before_data = held
            self.restart.taken = True  # what was saved was said by loaders that are no more

    def _check_validation_interval(self) -> None:
        """Raise UserError where no validation would ever come, which Lightning refuses by a plain ValueError."""
        trainer, interval = self.trainer, self.trainer.val_check_interval
        validates = trainer.limit_val_batches > 0 and trainer.check_val_every_n_epoch is not None
        if validates and isinstance(interval, int) and interval > self.max_batches:
            raise UserError(
                f"--trainer.val_check_interval: found {interval}, allowed are 1 to {self.max_batches}, the batches of "
                "an epoch; or give --trainer.check_val_every_n_epoch=null, which counts them on through the epochs"
            ) from None

    def run(self) -> None:
        """Train; if all was trained before, do only what comes at the end."""
        self.begun = False
        super().run()
        if not self.begun and self.resume.trains and self.restart.meta:
            self.restart.restore(self.resume.snapshot.held)
            self.restart.go_on_logging()
            self.restart.say_that_all_is_done()
            self.on_run_end()

    def on_run_start(self) -> None:
        """Begin, or go on."""
        self.begun = True
        if not self.resume.trains:
            super().on_run_start()
            return
        self.restart.place(self)
        self.restart.restore(self.resume.snapshot.held, wholly=False)
        super().on_run_start()
        self.resume.snapshot.begin(self.restart.added)
        self.restart.make_again(self.resume.snapshot.held)
        self.restart.restore(self.resume.snapshot.held)  # what hooks have begun anew goes on
        self.restart.give_back_to_loaders(self)
        self.resume.proof.look_at(self.restart.lost(self.resume.snapshot.held))
        self.restart.go_on_logging()
        if super().done:  # what is left is the end of an epoch
            self.resume.cut = not lightning_loops.batches_are_done(self.trainer)
            self.restart.say_that_all_is_done()

    def reset(self) -> None:
        """Reset nothing that goes on: what remains of Lightning's own restart is that it knows it is in an epoch."""
        super().reset()
        self.leave_restart()

    def on_advance_end(self) -> None:
        """End an epoch."""
        super().on_advance_end()
        self.restart.within = False
        if self.resume.trains:
            self.resume.epoch_ended(self.done)


class EpochLoop(lightning_loops.EpochLoop):
    """The batches of an epoch."""

    def reset(self) -> None:
        """Begin an epoch's counters, or leave them as they were."""
        if not self.resume.trains or not self.restart.goes_on():
            super().reset()

    def on_run_start(self, data_fetcher) -> None:
        """Begin an epoch, with the validation that was interrupted if there was one."""
        done = self.batch_progress.current.ready
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        states = self.restart.take_states() if self.resume.trains else None
        trains = self.resume.trains and self.resume.enabled
        loader = self.trainer.fit_loop.loaders
        done = loader.begin(data_fetcher, epoch, done, states, proves=trains)
        if trains:
            self.resume.placed(loader.why)
        data_fetcher.fetched += done  # it tells by this which batch is the last one
        self.profile(data_fetcher)
        if self.resume.trains and self.restart.validates_first():
            self.on_advance_end(data_fetcher)

    def on_advance_end(self, data_fetcher) -> None:
        """End a batch, with the validation that comes after it."""
        super().on_advance_end(data_fetcher)
        if self.resume.trains and not lightning_loops.batches_are_done(self.trainer):
            self.resume.batch_ended(self.done, lightning_loops.accumulates(self.trainer))


class ValidationLoop(_Loaders, lightning_loops.ValidationLoop):
    """A validation."""

    kind = "val"

    def run(self) -> list:
        """Validate; the check before training, which a run that goes on does not have, may change what objects hold."""
        if not self.resume.trains:
            return super().run()
        if not self.trainer.sanity_checking:
            self.resume.before_validation()
            return super().run()
        held = self.resume.snapshot.held
        held.mark()
        found = super().run()
        held.state.touch()
        return found


def next_batch(trainer: Trainer) -> Any:
    """Return the batch that would come next, as training_step would get it; StopIteration if there is none."""
    fetcher = lightning_loops.fetcher(trainer)
    if lightning_loops.is_drawn_by_steps(fetcher) or fetcher.done:
        raise StopIteration
    trainer.training = True
    batch, *_ = next(fetcher)
    return lightning_loops.transferred(trainer, batch)


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
