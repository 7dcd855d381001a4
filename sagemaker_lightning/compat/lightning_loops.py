"""Lightning's training loops, and what fetches their batches.

They are in pytorch_lightning/loops, and private since 2.0 (Lightning-AI/pytorch-lightning #16445).
Lightning's own checkpoints are taken in the middle of an epoch's bookkeeping: what was still to
come is lost or done twice (#14579, #19549, #19367). A run that resumes exactly needs to know when a
batch, a validation and an epoch are over with all that belongs to them: resume/moments.py derives
from the three loops here.

On an upgrade: compare fit_loop.py, training_epoch_loop.py, evaluation_loop.py and fetchers.py with
those of the version before, for each method that resume/moments.py overrides: the order of
counters, hooks and checkpoints in `advance`, `on_advance_end`, `on_run_start` and `reset`, and
where `setup_data` sets `_combined_loader`.
"""

import functools
from collections.abc import Mapping
from typing import Any, cast

from pytorch_lightning import Trainer
from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.loops.progress import _ProcessedTracker
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.utilities import CombinedLoader

BROADCAST = "_broadcast_sigterm_tensor"
"""The method of an epoch's loop in whose place we put another one."""
HAS_RUN = "_has_run"
"""The attribute of a validation's loop that says whether one has ended."""
CONNECTION = "of"
"""The attribute by which resume/moments.py connects a loop with its run."""


class _TakesLoaders:
    """A loop whose `take_loaders` gets its loaders before Lightning iterates.

    `setup_data` sets `_combined_loader` and continues with iter(), with no hook in between.
    """

    @property
    def _combined_loader(self) -> CombinedLoader | None:
        return vars(self).get("_combined_loader")

    @_combined_loader.setter
    def _combined_loader(self, loader: CombinedLoader | None) -> None:
        before = self._combined_loader
        vars(self)["_combined_loader"] = loader
        self.take_loaders(loader, before)

    @property
    def loaders(self) -> CombinedLoader | None:
        """The loaders, None until they are set up."""
        return self._combined_loader

    def take_loaders(self, loader: CombinedLoader | None, before: CombinedLoader | None) -> None:
        """Receive loaders that replace `before`; to be overridden."""


class FitLoop(_TakesLoaders, _FitLoop):
    """Lightning's loop over the epochs."""

    def forget_loaders(self) -> None:
        """Have the loaders set up again when they are needed next."""
        vars(self)["_combined_loader"] = None

    def unset_restarting(self) -> None:
        """Make Lightning treat this run as one that was not restarted.

        The setter of _FitLoop makes `restarting` True for any run with max_steps, so the setter of
        its base class is called.
        """
        restarting: Any = _Loop.restarting
        restarting.fset(self, False)


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch."""

    def profile(self, fetcher: Any) -> None:
        """Have the trainer's profiler measure how long `fetcher` takes, as Lightning does."""
        fetcher._start_profiler = self._on_before_fetch
        fetcher._stop_profiler = self._on_after_fetch


class ValidationLoop(_TakesLoaders, _EvaluationLoop):
    """Lightning's loop over the batches of a validation."""


def loops(trainer: Trainer) -> dict[str, _Loop]:
    """Return the loops of a training, by the name that a trainer's attributes give each."""
    return _loops_of(trainer.fit_loop)


def _loops_of(loop: _FitLoop) -> dict[str, _Loop]:
    within = loop.epoch_loop
    return {
        "fit_loop": loop,
        "fit_loop.epoch_loop": within,
        "fit_loop.epoch_loop.val_loop": within.val_loop,
        "fit_loop.epoch_loop.automatic_optimization": within.automatic_optimization,
        "fit_loop.epoch_loop.manual_optimization": within.manual_optimization,
    }


@functools.cache
def own_attributes() -> dict[str, frozenset[str]]:
    """Return the names of the attributes of these loops that Lightning has set, or we."""
    plain = _FitLoop(None)  # type: ignore[arg-type]  # it asks nothing of its trainer yet
    return {
        name: frozenset(vars(loop)) | {CONNECTION, BROADCAST}
        for name, loop in _loops_of(plain).items()
    }


def disable_signal_broadcast(trainer: Trainer) -> None:
    """Stop ranks from telling each other about SIGTERM before each batch.

    Lightning broadcasts a tensor for that, and waits for it (added by #20825; its cost: #21487).
    resume/agreement.py tells them while the next step is computed.
    """
    vars(trainer.fit_loop.epoch_loop)[BROADCAST] = lambda: None


def restore_lightning_classes(trainer: Trainer) -> tuple[_Loop, ...]:
    """Make a trainer's loops Lightning's own again, and return them."""
    loop = trainer.fit_loop
    loops = loop, loop.epoch_loop, loop.epoch_loop.val_loop
    for each, lightnings in zip(
        loops, (_FitLoop, _TrainingEpochLoop, _EvaluationLoop), strict=True
    ):
        each.__class__ = lightnings
    vars(loop.epoch_loop).pop(BROADCAST, None)
    return loops


def combined_loader(trainer: Trainer) -> CombinedLoader | None:
    """Return what combines the training loaders; None until they are set up.

    `trainer.train_dataloader` is what it was made of; data/loaders/several.py needs the object that
    Lightning iterates over.
    """
    return trainer.fit_loop._combined_loader


def fetcher(trainer: Trainer) -> Any:
    """Return what fetches the training batches; None before and after training."""
    return trainer.fit_loop._data_fetcher


def epoch_counts(trainer: Trainer) -> _ProcessedTracker:
    """Return the counters of the present epoch: how far it is."""
    return cast(_ProcessedTracker, trainer.fit_loop.epoch_progress.current)


def batch_counts(trainer: Trainer) -> _ProcessedTracker:
    """Return the counters of the batches of the present epoch."""
    return cast(_ProcessedTracker, trainer.fit_loop.epoch_loop.batch_progress.current)


def steps_draw_batches(fetcher: Any) -> bool:
    """Return whether `training_step` takes an iterator (`dataloader_iter`).

    It then draws the batches itself.
    """
    return isinstance(fetcher, _DataLoaderIterDataFetcher)


def is_within_step(trainer: Trainer) -> bool:
    """Return whether a batch's step has begun and has not ended."""
    batches = cast(_ProcessedTracker, trainer.fit_loop.epoch_loop.batch_progress.current)
    return batches.started > batches.processed


def batches_are_done(trainer: Trainer) -> bool:
    """Return whether the epoch has had its last batch."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def epoch_is_done(trainer: Trainer) -> bool:
    """Return whether the epoch has had its last batch, or max_steps is reached."""
    return trainer.fit_loop.epoch_loop._is_training_done


def training_is_over(trainer: Trainer) -> bool:
    """Return whether a limit, or a callback, lets no further epoch begin.

    The loop's own `done` logs which limit it is, and changes its counters.
    """
    loop = trainer.fit_loop
    limits = (
        (epoch_counts(trainer).processed, loop.max_epochs),
        (loop.epoch_loop.global_step, loop.epoch_loop.max_steps),
    )
    reached = any(limit not in (None, -1) and count >= limit for count, limit in limits)
    return reached or bool(trainer.should_stop)


def steps_done(trainer: Trainer) -> int:
    """Return how many steps the optimizers have done.

    `trainer.global_step` counts those of automatic or of manual optimization: of a module that
    switches between them, it may become smaller.
    """
    loop = trainer.fit_loop.epoch_loop
    automatic = loop.automatic_optimization.optim_progress.optimizer_steps
    return automatic + loop.manual_optimization.optim_step_progress.total.completed


def gradients_accumulate(trainer: Trainer) -> bool:
    """Return whether more gradients are to be added before the optimizer's next step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def loaders_are_due(trainer: Trainer) -> bool:
    """Return whether the training loaders have to be made again.

    Trainer(reload_dataloaders_every_n_epochs=...) decides it.
    """
    return bool(trainer.fit_loop._should_reload_train_dl)


def loaders_are_given(trainer: Trainer) -> bool:
    """Return whether `fit` was called with the training loaders: no hook makes them again."""
    return not trainer.fit_loop._data_source.is_module()


def epoch_of_loaders(trainer: Trainer) -> int | float:
    """Return the epoch in which the training loaders were made; -inf if none were.

    Trainer(reload_dataloaders_every_n_epochs=...) counts from it; no property has it.
    """
    return trainer.fit_loop._last_train_dl_reload_epoch


def epoch_of_validation_loaders(trainer: Trainer) -> int | float:
    """Return the epoch in which the validation loaders were made; -inf if none were."""
    return trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch


def validation_batches_seen(trainer: Trainer) -> dict[int, int]:
    """Return how many batches each validation loader has given, by its number.

    Lightning logs a validation's steps (`on_step`) over this number, and saves it nowhere.
    """
    return dict(trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader)


def set_validation_batches_seen(trainer: Trainer, seen: Mapping[int, int]) -> None:
    """Give Lightning back what `validation_batches_seen` returned."""
    trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader.update(seen)


def end_evaluation_mode(trainer: Trainer) -> None:
    """Give the modules the modes that they had before the validation.

    The end of the validation would do so.
    """
    trainer.fit_loop.epoch_loop.val_loop._on_evaluation_model_train()


def transfer_batch(trainer: Trainer, batch: Any) -> Any:
    """Return a batch as `training_step` gets it: on the device.

    `advance` does the same.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def take_sigterm(trainer: Trainer) -> bool:
    """Return whether Lightning's handler has received a SIGTERM, and have Lightning forget it.

    Lightning would end the program at the next hook, with exit status 0 (SIGTERMException).
    """
    connector = trainer._signal_connector
    received, connector.received_sigterm = connector.received_sigterm, False
    return received
