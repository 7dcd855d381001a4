"""Lightning's fit loop, calling callback.py and restore.py at safe points.

A point is safe if nothing is half done there.

Lightning 2.6 takes its own checkpoints in the middle of things. What was to come is then lost or
done twice: the validation after a checkpoint in on_train_batch_end, the step of a
ReduceLROnPlateau, the epoch after one in on_train_epoch_start. Here a state is taken at the end of
a batch with all that belongs to it (validation, schedulers, logging), at the end of an epoch, and
before a validation. A resumed run continues at exactly that point.

A search before training, such as for a learning rate, runs the same loops without our callbacks.
For a search, these classes do what Lightning does.
"""

from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.core.hooks import DataHooks
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.seed import isolate_rng

from sagemaker_lightning.compat import lightning_loops
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.seeded_indices import seed_all

TRANSFER_HOOKS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"


def install(trainer: Trainer, resume, restart) -> None:
    """Let the trainer's existing fit loop call `resume` and `restart`.

    It also keeps Lightning from handling signals.

    Args:
        trainer: Lightning's trainer; the classes of its loops are replaced.
        resume: The ExactResume callback.
        restart: The Restart; it is called where the loops begin.
    """
    lightning_loops.disable_signal_broadcast(trainer)
    loop = trainer.fit_loop
    for lightning_loop, loop_class in (
        (loop, FitLoop),
        (loop.epoch_loop, EpochLoop),
        (loop.epoch_loop.val_loop, ValidationLoop),
    ):
        lightning_loop.__class__ = loop_class
        lightning_loop.connect(resume, restart)


def remove(trainer: Trainer) -> None:
    """Undo `install`."""
    for loop in lightning_loops.restore_lightning_classes(trainer):
        vars(loop).pop("resume", None)
        vars(loop).pop("restart", None)


class _Connected:
    """Knows the callback and the Restart that a loop calls."""

    def connect(self, resume, restart) -> None:
        """Set them; Lightning has made the loop without them.

        Args:
            resume: The ExactResume callback.
            restart: The Restart.
        """
        self.resume = resume
        self.restart = restart


class _Loaders(_Connected):
    """Prepares data loaders before Lightning begins to iterate over them."""

    kind = ""

    def take_loaders(self, loader: CombinedLoader | None, before: CombinedLoader | None) -> None:
        """Make new loaders begin where training is, and end the old loaders' workers.

        Args:
            loader: The new loaders; None if there are none.
            before: The loaders that they replace; None if there are none.
        """
        if loader is not None:
            self.restart.seeding.together(self.trainer, loader, self.kind)
        if before not in (None, loader):
            before.leave(loader)


class FitLoop(_Loaders, lightning_loops.FitLoop):
    """The loop over all epochs."""

    kind = "train"

    @property
    def done(self) -> bool:
        """Whether all is done.

        An epoch whose batches are all done, or that a limit has cut off, still has to be ended.
        """
        must_end_epoch = self.resume.is_training and self.restart.epoch_is_open
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
        loaders_before = self.loaders
        snapshot = self.resume.snapshot
        snapshot.user_state.hooks_ended()  # what follows are data
        objects_before = (
            snapshot.user_state.state_before_data()
            if loaders_before is not None
            and self.resume.is_training
            and lightning_loops.loaders_are_due(self.trainer)
            else None
        )
        with self.restart.recreating_data(self, snapshot):
            try:
                super().setup_data()
            except ValueError:
                self._refuse_validation_interval()
                raise
        if loaders_before not in (None, self.loaders):
            snapshot.set_state_before_data(objects_before)
            self.restart.discard_loader_states()

    def _refuse_validation_interval(self) -> None:
        """Raise UserError if no validation would ever run.

        Lightning refuses this with a plain ValueError.
        """
        trainer = self.trainer
        interval = self.trainer.val_check_interval
        validates = trainer.limit_val_batches > 0 and trainer.check_val_every_n_epoch is not None
        if validates and isinstance(interval, int) and interval > self.max_batches:
            raise UserError(
                f"--trainer.val_check_interval: found {interval}, allowed are 1 to "
                f"{self.max_batches}, the batches of an epoch; or give "
                "--trainer.check_val_every_n_epoch=null, which counts them on through the epochs"
            ) from None

    @property
    def skip(self) -> bool:
        """Whether neither the hooks at the start of training run nor those at its end.

        If all was trained before, both run: at the end, callbacks set the final weights, and use
        what they have made at the start.
        """
        return not (self.resume.is_training and self.restart.entries) and super().skip

    def run(self) -> None:
        """Train what is left."""
        if self.resume.is_training:
            self.restart.restore_epoch_limit()
            self.resume.receive_signals()
        super().run()

    def on_run_start(self) -> None:
        """Begin training, or resume it."""
        if not self.resume.is_training:
            super().on_run_start()
            return
        self.restart.redistribute_epoch(self)
        self.restart.restore(self.resume.snapshot.user_state, only_plain=True)
        if self.trainer.val_dataloaders is None and self.restart.had_validation_data:
            # For the comparison: Lightning would make them for the first validation.
            self.trainer.validating = True
            self.epoch_loop.val_loop.setup_data()
            self.trainer.training = True
        super().on_run_start()
        self.resume.snapshot.mark_start(self.restart.limits_added)
        self.restart.recreate_objects(self.resume.snapshot.user_state)
        self.restart.restore(self.resume.snapshot.user_state)  # overwrite what hooks have reset
        self.restart.restore_loaders(self)
        only_end_is_left = super().done
        differing = self.restart.differing_values(self.resume.snapshot.user_state)
        self.resume.proof.check_restored(differing)
        self.restart.continue_logs()
        if only_end_is_left:
            self.resume.only_end_is_left(cut=not lightning_loops.batches_are_done(self.trainer))
            self.restart.print_nothing_left()

    def reset(self) -> None:
        """Reset the loop, except for what a resumed run continues.

        Of Lightning's own restart, only the knowledge remains that training is within an epoch. A
        run that begins with a checkpoint of Lightning's (`ckpt_path`) continues as Lightning does.
        """
        super().reset()
        if self.restart.entries:
            self.unset_restarting()

    def on_advance_end(self) -> None:
        """End an epoch."""
        super().on_advance_end()
        self.restart.epoch_ended()
        if self.resume.is_training:
            self.resume.epoch_ended(self.done)


class EpochLoop(_Connected, lightning_loops.EpochLoop):
    """The loop over the batches of an epoch."""

    def reset(self) -> None:
        """Reset an epoch's counters, unless the epoch is being resumed."""
        if not self.resume.is_training or not self.restart.resumes_within_epoch:
            super().reset()

    def on_run_start(self, data_fetcher) -> None:
        """Begin or resume an epoch; repeat the validation that was interrupted, if any."""
        batches_done = self.batch_progress.current.ready
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        states = self.restart.take_loader_states() if self.resume.is_training else None
        saves_checkpoints = self.resume.is_training and self.resume.enabled
        loader = self.trainer.fit_loop.loaders
        loader.seeds_batches = lightning_loops.steps_draw_batches(
            data_fetcher
        ) or _has_transfer_hooks(self.trainer)
        batches_done = loader.begin(
            data_fetcher, epoch, batches_done, states, proves=saves_checkpoints
        )
        if self.resume.is_training:
            self.restart.restore_samplers(self.resume.snapshot.user_state)
        if saves_checkpoints:
            self.resume.epoch_begins(loader.why, loader.shared_orders)
        data_fetcher.fetched += batches_done  # the fetcher detects the last batch by this number
        self.profile(data_fetcher)
        if self.resume.is_training:
            repeats_validation = self.restart.resumes_in_validation
            self.restart.training_continues()
            if repeats_validation:
                self.on_advance_end(data_fetcher)

    def on_advance_end(self, data_fetcher) -> None:
        """End a batch and the validation that follows it."""
        super().on_advance_end(data_fetcher)
        if self.resume.is_training and not lightning_loops.batches_are_done(self.trainer):
            self.resume.batch_ended(self.done)


class ValidationLoop(_Loaders, lightning_loops.ValidationLoop):
    """The loop over the batches of a validation."""

    kind = "val"

    def setup_data(self) -> None:
        """Create the validation data.

        What they draw depends only on the epoch in which they were first created, if they are
        created more than once: a resumed run creates them later than a new one, which needs them
        for its check before training.
        """
        if not self.resume.is_training:
            super().setup_data()
            return
        self.resume.snapshot.user_state.hooks_ended()  # what follows are data
        there_are_some = self.loaders is not None
        epoch = self.restart.epoch_of_validation_data(there_are_some)
        progress = self.trainer.fit_loop.epoch_progress.current
        completed = progress.completed
        progress.completed = epoch
        try:
            with isolate_rng():
                every = self.trainer.reload_dataloaders_every_n_epochs
                seed_all("val data", self.restart.seeding.seed, epoch if every else 0)
                super().setup_data()
        finally:
            progress.completed = completed
        if not there_are_some:
            self.restart.validation_data_made()

    def run(self) -> list:
        """Validate, and return what Lightning's loop returns.

        The check before training (sanity check) may change the state of the user's objects. A
        resumed run does not have this check, so that the changes are saved.
        """
        if not self.resume.is_training:
            return super().run()
        if not self.trainer.sanity_checking:
            self.resume.before_validation()
            return super().run()
        objects = self.resume.snapshot.user_state
        self.setup_data()  # the data are no change
        objects.mark_start()
        results = super().run()
        objects.state.touch()
        return results


def _has_transfer_hooks(trainer: Trainer) -> bool:
    """Return whether code of the user's moves a batch to its device; it may draw."""
    return any(
        name in vars(owner) or getattr(type(owner), name) is not getattr(DataHooks, name)
        for owner in (trainer.lightning_module, trainer.datamodule)
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
