"""Lightning's loops, calling run.py at the moments of a training at which nothing is half done.

Lightning 2.6 takes its own checkpoints in the middle of things. What was to come is then lost or
done twice: the validation after a checkpoint in on_train_batch_end, the step of a
ReduceLROnPlateau, the epoch after one in on_train_epoch_start. Here a state is taken at the end of
a batch with all that belongs to it (validation, schedulers, logging), at the end of an epoch, and
before a validation. A resumed run continues at exactly that point.

A search before training, such as for a learning rate, runs the same loops without our callbacks.
For a search, these classes do what Lightning does.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pytorch_lightning import Trainer
from pytorch_lightning.core.hooks import DataHooks
from pytorch_lightning.utilities import CombinedLoader

from sagemaker_lightning.compat import lightning_checkpoints, lightning_loops
from sagemaker_lightning.compat.lightning_trainer import data_module_of
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.loaders.several import EndingLoaders, training_loaders
from sagemaker_lightning.state.object_graph import is_own_module

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run

TRANSFER_HOOKS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"


def install(trainer: Trainer, run: "Run") -> None:
    """Let the trainer's existing loops, and its loading of checkpoints, call a run.

    It also keeps Lightning from handling signals.

    Args:
        trainer: Lightning's trainer; the classes of its loops are replaced.
        run: The run.
    """
    lightning_loops.disable_signal_broadcast(trainer)
    lightning_checkpoints.replace_loading(trainer, run.load_newest, run.accept)
    loop = trainer.fit_loop
    for lightning_loop, loop_class in (
        (loop, FitLoop),
        (loop.epoch_loop, EpochLoop),
        (loop.epoch_loop.val_loop, ValidationLoop),
    ):
        own = type(lightning_loop)
        if is_own_module(own.__module__):
            log.warning(
                f"{printable(own.__qualname__)}, a loop of your own, is replaced by one that can "
                "be resumed, which calls none of its methods: this run is not that of plain "
                "Lightning; use hooks of the model or of a callback instead"
            )
        lightning_loop.__class__ = loop_class
        vars(lightning_loop)[lightning_loops.CONNECTION] = run


def remove(trainer: Trainer) -> None:
    """Undo `install`, and what a run's snapshot has done."""
    lightning_checkpoints.forget_files(trainer)
    for loop in lightning_loops.restore_lightning_classes(trainer):
        vars(loop).pop(lightning_loops.CONNECTION, None)


class _Connected:
    """Knows the run that a loop calls."""

    of: "Run"
    """The run, which `install` sets: Lightning has made the loop, and has a method `run`."""


class _Loaders(_Connected):
    """Prepares data loaders before Lightning begins to iterate over them."""

    kind = ""
    trainer: Trainer

    def take_loaders(self, loader: CombinedLoader | None, before: CombinedLoader | None) -> None:
        """Make new loaders begin where training is, and end the old loaders' workers.

        Args:
            loader: The new loaders; None if there are none.
            before: The loaders that they replace; None if there are none.
        """
        if loader is not None:
            self.of.seeding.together(self.trainer, loader, self.kind)
        if isinstance(before, EndingLoaders) and before is not loader:
            before.leave(loader)


class FitLoop(_Loaders, lightning_loops.FitLoop):
    """The loop over all epochs."""

    kind = "train"

    @property
    def done(self) -> bool:
        """Whether all is done.

        An epoch whose batches are all done, or that a limit has cut off, still has to be ended.
        """
        must_end_epoch = self.of.is_training and self.of.epoch_is_open
        must_end_epoch = must_end_epoch and (
            lightning_loops.epoch_is_done(self.trainer) or self.trainer.should_stop
        )
        return not must_end_epoch and super().done

    def setup_data(self) -> None:
        """Create the training data.

        A resumed run does so as of the epoch in which the interrupted run created it.

        Raises:
            UserError: The validation interval is longer than an epoch.
        """
        if self.of.misses_first_data(self):
            with self.of.first_data_needed(self):
                self._make_data()
            self.forget_loaders()
        with self.of.data_needed(self):
            self._make_data()

    def _make_data(self) -> None:
        try:
            super().setup_data()
        except ValueError:
            self._refuse_validation_interval()
            raise

    def _refuse_validation_interval(self) -> None:
        """Raise UserError if no validation would ever run.

        Lightning refuses this with a plain ValueError.
        """
        trainer = self.trainer
        interval = self.trainer.val_check_interval
        validates = trainer.limit_val_batches > 0 and trainer.check_val_every_n_epoch is not None
        if validates and isinstance(interval, int) and interval > self.max_batches:
            raise UserError(
                f"--trainer.val_check_interval: found {interval}, expected 1 to "
                f"{self.max_batches}, the batches of an epoch; or give "
                "--trainer.check_val_every_n_epoch=null, which counts batches across epochs"
            ) from None

    @property
    def skip(self) -> bool:
        """Whether neither the hooks at the start of training run nor those at its end.

        If all was trained before, both run: at the end, callbacks set the final weights, and use
        what they have made at the start.
        """
        return not (self.of.is_training and self.of.resumed) and super().skip

    def run(self) -> None:
        """Train what is left."""
        if self.of.is_training:
            self.of.loops_begin()
        super().run()

    def on_run_start(self) -> None:
        """Begin training, or resume it."""
        if not self.of.is_training:
            super().on_run_start()
            return
        self.of.start_hooks_run_next(self)
        super().on_run_start()
        self.of.training_begins()
        if super().done:
            self.of.only_end_is_left()

    def reset(self) -> None:
        """Reset the loop, except for what a resumed run continues.

        Of Lightning's own restart, only the knowledge remains that training is within an epoch. A
        run that begins with a checkpoint of Lightning's (`ckpt_path`) continues as Lightning does.
        """
        super().reset()
        if self.of.is_training and self.of.resumed:
            self.unset_restarting()

    def on_advance_start(self) -> None:
        """Begin an epoch."""
        if self.of.is_training:
            self.of.epoch_hooks_run_next()
        super().on_advance_start()

    def on_advance_end(self) -> None:
        """End an epoch."""
        super().on_advance_end()
        self.of.epoch_ended()
        if self.of.is_training:
            self.of.epoch_committed(self.done)


class EpochLoop(_Connected, lightning_loops.EpochLoop):
    """The loop over the batches of an epoch."""

    def reset(self) -> None:
        """Reset an epoch's counters, unless the epoch is being resumed."""
        if not self.of.is_training or not self.of.resumes_within_epoch:
            super().reset()

    def on_run_start(self, data_fetcher: Any) -> None:
        """Begin or resume an epoch; repeat the validation that was interrupted, if any."""
        training_loaders(self.trainer).seeds_batches = lightning_loops.steps_draw_batches(
            data_fetcher
        ) or _has_transfer_hooks(self.trainer)
        batches_done = self.of.epoch_begins(data_fetcher, self.batch_progress.current.ready)
        data_fetcher.fetched += batches_done  # the fetcher detects the last batch by this number
        self.profile(data_fetcher)
        if self.of.is_training and self.of.training_continues():
            self.on_advance_end(data_fetcher)

    def advance(self, data_fetcher: Any) -> None:
        """Train on a batch."""
        with self.of.training_on_batch():
            try:
                super().advance(data_fetcher)
            except StopIteration:
                is_within = lightning_loops.is_within_step(self.trainer)
                if is_within and not lightning_loops.steps_draw_batches(data_fetcher):
                    self.of.step_left_epoch()
                raise

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Let the schedulers set the next learning rates."""
        with self.of.schedulers_step():
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def on_advance_end(self, data_fetcher: Any) -> None:
        """End a batch and the validation that follows it."""
        super().on_advance_end(data_fetcher)
        if self.of.is_training and not lightning_loops.batches_are_done(self.trainer):
            self.of.batch_committed(self.done)


class ValidationLoop(_Loaders, lightning_loops.ValidationLoop):
    """The loop over the batches of a validation."""

    kind = "val"

    def setup_data(self) -> None:
        """Create the validation data."""
        trains = self.of.is_training
        if trains and self.trainer.sanity_checking and self.loaders is not None:
            # They are as old as those of the interrupted run: its next validation may make others,
            # of what training has changed, which is not restored yet.
            return
        with self.of.validation_data_needed(self) if trains else nullcontext():
            super().setup_data()

    def run(self) -> Any:  # Lightning's decorator takes the type away
        """Validate, and return what Lightning's loop returns."""
        if not self.of.is_training:
            return super().run()
        if not self.trainer.sanity_checking:
            self.of.validation_begins()
            return super().run()
        self.setup_data()  # the data are not a change
        with self.of.sanity_check():
            return super().run()


def _has_transfer_hooks(trainer: Trainer) -> bool:
    """Return whether code of the user's moves a batch to its device; it may draw."""
    return any(
        name in vars(owner) or getattr(type(owner), name) is not getattr(DataHooks, name)
        for owner in (trainer.lightning_module, data_module_of(trainer))
        if owner is not None
        for name in TRANSFER_HOOKS
    )


def next_batch(trainer: Trainer) -> Any:
    """Return the batch that would come next, as training_step would get it.

    Raises:
        StopIteration: There is none.
    """
    fetcher = lightning_loops.fetcher(trainer)
    if lightning_loops.steps_draw_batches(fetcher) or fetcher.done:
        raise StopIteration
    trainer.training = True
    batch, *_ = next(fetcher)
    return lightning_loops.transfer_batch(trainer, batch)
