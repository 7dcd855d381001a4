"""Resume from a checkpoint: choose it, check that it is of this run, restore it.

Lightning loads the weights and the optimizers. This module restores what Lightning leaves out.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import BatchSizeFinder

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.compat import (
    lightning_callbacks,
    lightning_checkpoints,
    lightning_loops,
)
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.data.deterministic import divided, position
from sagemaker_lightning.data.seeded_indices import seed_all
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.resume import (
    acceptance,
    best_model,
    checkpoint_file,
    code_numbers,
    epoch_state,
    fit_loops,
    model_changes,
    optimizer_arguments,
    restore_check,
    run_settings,
    user_checkpoints,
)
from sagemaker_lightning.resume.agreement import Agreement
from sagemaker_lightning.resume.checkpoint_dir import CheckpointDir, choose_checkpoint
from sagemaker_lightning.resume.parts import parts_of
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.snapshot import LIGHTNING_KEYS
from sagemaker_lightning.resume.user_state import CODE_ROOTS, UserState
from sagemaker_lightning.state.encoding import RECREATED, from_plain, to_plain
from sagemaker_lightning.state.graph.state import names_in, without

MAX_CHARACTERS = 400  # of a phrase that quotes a checkpoint


class Restart:
    """The start of a run; it resumes an earlier run that left a checkpoint.

    Args:
        trainer: Lightning's trainer.
        folder: The folder of the checkpoints.
        seeding: Knows the seed of the whole run.
        agreement: The communication between the ranks.
        other_settings: Whether the run may have another learning rate, gradient clipping or
            precision than the run that saved the checkpoint.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: CheckpointDir,
        seeding: Seeding,
        agreement: Agreement,
        other_settings: bool = False,
    ) -> None:
        self.other_settings = other_settings
        self.trainer = trainer
        self.folder = folder
        self.seeding = seeding
        self.agreement = agreement
        self.step = 0  # optimizer step of the checkpoint that was loaded; 0 if there is none
        self.entries: Mapping[str, Any] = {}  # the checkpoint's entries of this package
        # When it was saved; None if there is none, and once training continues.
        self.point: ResumePoint | None = None
        self.epoch_is_open = False  # whether it was saved within an epoch that has not ended yet
        self.saved_digests: dict[str, int] = {}  # digests of the values in the checkpoint, by name
        self.checkpoint: dict[str, Any] | None = None  # until training continues
        # The model's weights, if a hook of the user's has put others in the file; until then, too.
        self.trained_weights: dict[str, Any] | None = None
        self.later_weights: dict[str, Any] = {}  # weights of parts of the model that a hook creates
        # Epochs and steps, as the flags set them.
        self.limits_of_flags = model_changes.limits(trainer)
        self.limits_added = [0, 0]  # epochs and steps that a callback had added to the limits
        # What configure_optimizers has made, before hooks and the checkpoint change it.
        self.optimizer_arguments: Mapping[str, Any] = {}
        # The numbers that the code gives; None if they are not known.
        self.code_numbers: Mapping[str, str] | None = None
        self.raised_epochs = 0  # epochs added to the limit while Lightning loads the checkpoint
        self.limit_exceeded = ""  # the limit of this training that the checkpoint is beyond
        # Whether the loaders' saved states were taken, or no longer apply.
        self.loader_states_used = False
        self.has_continued_averaging = False  # whether StochasticWeightAveraging was continued

    def load(self, host: str, flags: Mapping[str, object], user_state: UserState) -> bool:
        """Hand Lightning the newest checkpoint, and return whether there is one.

        Args:
            host: Name of this host.
            flags: All settings by flag.
            user_state: The state of the user's objects.

        Raises:
            UserError: The checkpoint is of a run with other `flags`.
        """
        self.code_numbers = code_numbers.describe(self.trainer)
        # Rank 0 alone writes the best model and reads it.
        callbacks = best_model.callbacks(self.trainer) if self.trainer.is_global_zero else []
        missing_file = callbacks[0].missing_file if callbacks else lambda path: ""
        path = choose_checkpoint(
            self.folder, host, self.agreement.gather, self.trainer.local_rank == 0, missing_file
        )
        if path is None:
            return False
        checkpoint = checkpoint_file.read(path)
        self.entries = checkpoint.pop(checkpoint_file.ENTRIES_KEY)
        to_come = model_changes.names_in_start_hooks(self.trainer)
        self.flags = flags
        self.file_name = path.name
        self._refuse_another_run(
            run_settings.differences(
                self.trainer, flags, self.entries["run"], self.other_settings, to_come
            )
        )
        self._refuse_another_run(parts_of(self.trainer).differences(self._rank_state["parts"]))
        self.step = self.entries["step"]
        self.point = ResumePoint(self.entries["kind"])
        self.seeding.use_seed(self.entries["seed"])
        if self.trainer.is_global_zero:
            note = (
                ""
                if self._same_ranks
                else (
                    f"; {self.entries['world_size']} ranks saved it, now there are "
                    f"{self.trainer.world_size}: no sample is left out or taken twice, but the run "
                    "is no longer bit-identical to one without an interruption"
                )
            )
            print(f"resuming from step {self.step}: {path}{note}", flush=True)
        numbers = self.entries["run"]["numbers"]
        has_trained_before = self.code_numbers is None
        self.code_numbers = numbers if has_trained_before else self.code_numbers
        if self._same_ranks and not self.other_settings:
            self._warn_of_other_code(
                code_numbers.differences(numbers or {}, self.code_numbers or {})
            )
        scaling = json.loads(self.entries["run"]["flags"]).get("--lr_scaling") == flags.get(
            "--lr_scaling"
        )
        self.same_rates = self._same_ranks and scaling and not self.other_settings
        # Entries of this rank that differ from those of rank 0.
        rank_overrides = self._rank_state["own"] if self._same_ranks else {}
        self.saved_digests = (
            restore_check.fingerprint(
                checkpoint | rank_overrides,
                self._rank_state,
            )
            if self._same_ranks
            else {}
        )
        if has_trained_before:  # the program may have changed the model's arrays since
            own_arrays = tuple(f"the numbers in {root}" for root in CODE_ROOTS)
            self.saved_digests = {
                name: value
                for name, value in self.saved_digests.items()
                if not name.startswith(own_arrays)
            }
        checkpoint = from_plain(
            checkpoint | rank_overrides,
            _without_objects(
                self._rank_state["notes"] if rank_overrides else self.entries["notes"]
            ),
            user_state.objects_of_module(),
        )
        weights = self._undo_hooks_of_saving(checkpoint)
        acceptance.accept(self.trainer, checkpoint)
        checkpoint["loops"]["fit_loop"].pop("combined_loader", None)  # each rank saved its own
        self._prepare_weights(weights, user_state, to_come)
        self.checkpoint = checkpoint
        model_changes.apply_search_results(self.trainer, self.entries["searched"])
        # Other limits on the command line replace what callbacks had added.
        if self.entries["limits"] == self.limits_of_flags:
            self.limits_added = self.entries["added"]
            model_changes.add_to_limits(self.trainer, self.limits_added)
        self._raise_epoch_limit(
            checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        )
        self.saved_groups = [
            [
                {name: value for name, value in group.items() if name != "params"}
                for group in state.get("param_groups", ())  # without an optimizer, it is empty
            ]
            for state in checkpoint["optimizer_states"]
        ]
        self.epoch_is_open = self.point is not ResumePoint.EPOCH
        if not self.epoch_is_open:
            fit_loops.move_counters_past_epoch(checkpoint["loops"]["fit_loop"])
        self._restore_scores(checkpoint["callbacks"])
        user_checkpoints.overwrite_later_files(self.trainer, self.entries["files"])
        self.trainer.should_stop = self.entries["should_stop"]
        lightning_checkpoints.set_loaded_checkpoint(self.trainer, checkpoint, str(path))
        return True

    def _undo_hooks_of_saving(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Have training go on with what the user's `on_save_checkpoint` had replaced.

        Their `on_load_checkpoint` gets the weights that they have saved.

        Args:
            checkpoint: The checkpoint; it is changed in place.

        Returns:
            The weights that were trained.
        """
        replaced = checkpoint.pop(checkpoint_file.BEFORE_HOOKS)
        weights = replaced.pop("state_dict", None)
        checkpoint |= replaced
        if weights is None:
            return checkpoint["state_dict"]
        self.trained_weights = weights
        lightning_checkpoints.load_weights(self.trainer, weights)
        return weights

    def _prepare_weights(
        self, weights: dict[str, Any], user_state: UserState, to_come: set[str]
    ) -> None:
        """Let the model have what the saved weights are of, before Lightning loads them.

        Args:
            weights: The saved state dict of the model; it is changed in place.
            user_state: The state of the user's objects.
            to_come: The names of parts that hooks make before training.

        Raises:
            UserError: The weights are not those of this model.
        """
        model = self.trainer.lightning_module
        user_state.restore_modules(self._rank_state["held"])
        self.later_weights = model_changes.take_later_weights(weights, model, to_come)
        model_changes.resize_buffers(model, weights)
        if other := model_changes.other_weights(self.trainer, weights):
            raise UserError(
                f"{self.folder.label}: {self.file_name}: found {_first(other)}; make what the "
                "model gets while it is trained in __init__() or configure_model(), or move the "
                "checkpoints away to start anew"
            )

    def _restore_scores(self, states: Mapping[str, Any]) -> None:
        """Give each ModelCheckpoint its newest score: Lightning saves it and does not load it."""
        for callback in self.trainer.checkpoint_callbacks:
            if hasattr(callback, "current_score"):
                callback.current_score = states.get(callback.state_key, {}).get("current_score")

    def _raise_epoch_limit(self, epoch: int) -> None:
        """Let Lightning load a checkpoint of an epoch beyond this training's limit.

        It refuses that. But a program that trains on, with a higher limit than at first, comes by
        its first training again when it is started again. `restore_epoch_limit` undoes this.
        """
        limit = self.trainer.fit_loop.max_epochs
        if limit not in (None, -1) and epoch > limit:
            self.raised_epochs = epoch - limit
            self.trainer.fit_loop.max_epochs += self.raised_epochs

    def restore_epoch_limit(self) -> None:
        """Set the limit of epochs to what it is without `_raise_epoch_limit`.

        Hooks at the start of training may have changed it since, as StochasticWeightAveraging does.
        """
        loop = self.trainer.fit_loop
        if self.raised_epochs:
            loop.max_epochs -= self.raised_epochs
            self.raised_epochs = 0
        if self.entries and loop.max_epochs not in (None, -1):
            reached = loop.epoch_progress.current.processed + (
                self.epoch_is_open and not lightning_loops.epoch_is_done(self.trainer)
            )
            if reached > loop.max_epochs:
                self.limit_exceeded = f"max_epochs={loop.max_epochs}"

    def _refuse_another_run(self, differences: list[str]) -> None:
        """Raise UserError if anything differs between this run and the checkpoint's run."""
        if not differences:
            return
        allows = (
            "--resume.other_settings=true"
            if self.folder.setting.startswith("--")
            else "ExactResume(other_settings=True)"
        )
        raise UserError(
            f"{self.folder.label}: {self.file_name} is of another run: {_first(differences)}; "
            "continue with the same settings, or give another folder, or move the checkpoints away "
            f"to start anew; {allows} allows another learning rate, gradient clipping or precision"
        )

    def epoch_of_validation_data(self, there_are_some: bool) -> int:
        """Return the epoch as of which validation data are to be created if they are created now.

        That is the current epoch. But if a resumed run has none yet, and those of the interrupted
        run were to last longer, it is the epoch in which these were created.

        Args:
            there_are_some: Whether this run has created validation data before.
        """
        stay = not there_are_some and self._validation_data_stay()
        made = self.entries["validation_made"] if stay else None
        return self.trainer.current_epoch if made is None else made

    def validation_data_made(self) -> None:
        """Restore how many batches the validation loaders have given, once they are made."""
        if self._validation_data_stay():
            lightning_loops.set_validation_batches_seen(
                self.trainer, self.entries["validation_batches"]
            )

    def _validation_data_stay(self) -> bool:
        """Return whether the interrupted run would now have the validation data that it had."""
        if not self.entries:
            return False
        every = self.trainer.reload_dataloaders_every_n_epochs
        made = self.entries["validation_made"]
        return not every or (made is not None and self.trainer.current_epoch - made < every)

    @property
    def had_validation_data(self) -> bool:
        """Whether the interrupted run had made its validation data, which are compared."""
        return any(
            name.startswith(restore_check.VALIDATION_PREFIXES) for name in self.saved_digests
        )

    @property
    def _same_ranks(self) -> bool:
        """Whether this run has as many ranks as the run that saved the checkpoint."""
        return self.entries["world_size"] == self.trainer.world_size

    @property
    def _rank_state(self) -> Mapping[str, Any]:
        """Return what the checkpoint says of this rank.

        With another number of ranks than before, return what it says of rank 0.
        """
        ranks = self.entries["ranks"]
        return ranks[self.trainer.global_rank if self._same_ranks else 0]

    @contextmanager
    def recreating_data(self, loop, snapshot) -> Iterator[None]:
        """Let the training data be created, inside this context, as in the interrupted run.

        That means in the same epoch, with the same random draws and with the user's objects in the
        same state.

        Args:
            loop: The fit loop.
            snapshot: The Snapshot of this run.
        """
        epoch = self.trainer.current_epoch
        data_epoch = self.entries["made"] if self.entries else -1
        every = self.trainer.reload_dataloaders_every_n_epochs
        # Lightning makes the data after a search, which draws; a resumed run does not search.
        follows_search = any(map(lightning_callbacks.is_search, self.trainer.callbacks))
        if loop.loaders is not None:
            if lightning_loops.loaders_are_due(self.trainer):
                seed_all("data", self.seeding.seed, epoch)
            yield
            return
        if data_epoch < 0:
            if follows_search:
                seed_all("data", self.seeding.seed, 0)
            yield
            return
        objects = self.entries["before_data"]
        if (
            epoch_needs_new_data := self.point is ResumePoint.EPOCH
            and bool(every)
            and epoch - data_epoch >= every
        ):
            data_epoch = epoch
            objects = self._rank_state["held"]
        if data_epoch or follows_search:
            seed_all("data", self.seeding.seed, data_epoch)
        if objects and self._same_ranks:
            snapshot.user_state.restore_state_before_data(objects)
            snapshot.set_state_before_data(
                {name: objects[name] for name in ("graph", "generators")}
            )
        snapshot.user_state.state.mark()
        progress = loop.epoch_progress.current
        completed = progress.completed
        progress.completed = data_epoch
        try:
            yield
        finally:
            progress.completed = completed
        if epoch_needs_new_data:
            # The saved state of the old data does not fit the new data, and creating the new data
            # may have changed the state of other objects.
            new_state = snapshot.user_state.state_before_data()
            saved_state = self._rank_state["held"]
            outdated = {
                name for name in names_in(saved_state["graph"]) if name.startswith("train.")
            } | set(names_in(new_state["graph"]))
            outdated |= {f"generators {path}" for path in new_state["generators"]} | {
                "settings val_check_batch"
            }
            self.saved_digests = {
                name: value
                for name, value in self.saved_digests.items()
                if name not in outdated and not name.startswith(restore_check.DATA_PREFIXES)
            }
            saved_state["graph"] = without(saved_state["graph"], "train.")
            saved_state["newer graph"] = new_state["graph"]
            saved_state["generators"] = new_state["generators"]
            # It follows from the number of batches of the new data.
            saved_state["settings"].pop("val_check_batch", None)
            self.loader_states_used = True

    def redistribute_epoch(self, loop) -> None:
        """Divide the rest of an epoch that another number of ranks began among these ranks.

        Raises:
            UserError: The loaders differ from those of the checkpoint's run, or the rest of the
                epoch cannot be divided among this number of ranks.
        """
        if self.entries:
            self._refuse_another_run(
                run_settings.loader_differences(self.trainer, self.flags, self.entries["run"])
            )
        if not self.resumes_within_epoch or self._same_ranks:
            return
        loader = divided(self.trainer.train_dataloader)
        if loader is None or not loader.epoch_plan or self.entries["reached"] is None:
            raise UserError(
                f"{self.folder.label}: step {self.step} was saved within an epoch by "
                f"{self.entries['world_size']} ranks, and its data cannot be shared out anew among "
                f"{self.trainer.world_size}; give as many devices and nodes as before"
            )
        epoch, _ = position(self.trainer)
        loader.epoch_plan.continue_from(epoch, self.entries["reached"])
        done = loader.epoch_plan.of_epoch(epoch)[1]
        progress = loop.epoch_loop.batch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = done

    def restore(self, user_state: UserState, only_plain: bool = False) -> None:
        """Restore the state of this rank that only the checkpoint has.

        Args:
            user_state: The state of the user's objects.
            only_plain: Whether to leave out the model's weights, and to restore only plain values
                of the user's objects. That is for the call before the hooks that begin training.
        """
        if not self.entries:
            return
        if not self.has_continued_averaging:
            model_changes.continue_averaging(self.trainer, self.saved_groups, self.point)
            self.has_continued_averaging = True
        if self.checkpoint and not only_plain:
            self._undo_hooks()
        epoch_state.restore_newest_metrics(self.trainer, self.entries["shown"])
        if self._same_ranks:
            epoch_state.restore_rank_state(
                self.trainer, self._rank_state, mid_epoch=self.point is not ResumePoint.EPOCH
            )
        epoch_state.restore_gradients(self.trainer, self.entries["ranks"])
        user_state.restore(self._rank_state["held"], only_plain, self._same_ranks)
        if not only_plain:
            parts_of(self.trainer).restore(self._rank_state["parts"])

    def optimizers_made(self) -> None:
        """Compare what `configure_optimizers` has made with that of the checkpoint's run.

        Lightning would load what the checkpoint has, and the arguments in the code would have no
        effect. Call it before any hook changes the optimizers.

        Raises:
            UserError: An argument is another one, or a class, whose state would be misread.
        """
        self.optimizer_arguments = optimizer_arguments.describe(self.trainer)
        if not self.entries:
            return
        before = self.entries["run"]["optimizers"]
        self._refuse_another_run(
            optimizer_arguments.other_classes(before, self.optimizer_arguments)
        )
        searches = list(filter(lightning_callbacks.is_search, self.trainer.callbacks))
        # A schedule may be made for a number of steps, which these change.
        other_length = (
            self.other_settings
            or not self._same_ranks
            or self.entries["limits"] != self.limits_of_flags
            or any(isinstance(search, BatchSizeFinder) for search in searches)
        )
        other_rates = self.other_settings or not self._same_ranks or bool(searches)
        arguments, schedule = optimizer_arguments.differences(
            before, self.optimizer_arguments, other_rates
        )
        self._refuse_another_run(arguments + ([] if other_length else schedule))
        self._warn_of_other_code(schedule)

    def _warn_of_other_code(self, differences: list[str]) -> None:
        """Warn that the code gives other values, which do not identify the run, than before."""
        if differences and self.trainer.is_global_zero:
            print(
                f"warning: {_first(differences)}: this run goes on from its checkpoint, and may "
                "end with other weights than a run that begins with these settings",
                flush=True,
            )

    def restore_parameter_groups(self) -> None:
        """Give the optimizers the parameter groups that hooks had made in the interrupted run.

        Lightning loads the state of the optimizers afterwards, which needs these groups.
        """
        if self.entries:
            model_changes.restore_parameter_groups(self.trainer, self.entries["groups"])

    def _undo_hooks(self) -> None:
        """Restore what hooks at the start of training have overwritten.

        These are the model's weights and the values of the optimizers' parameter groups.

        In the interrupted run that hook ran before the checkpoint, so its effect is in the
        checkpoint.

        Raises:
            UserError: The checkpoint has weights that this model does not have.
        """
        # Lightning's WeightAveraging saves its average as state_dict and the model's own weights as
        # current_model_state.
        saved = self.trained_weights or self.checkpoint.get(
            "current_model_state", self.checkpoint["state_dict"]
        )
        model = self.trainer.lightning_module
        state = saved | self.later_weights
        model_changes.prune_again(model, self.later_weights)
        model_changes.resize_buffers(model, state)
        if missing := self.later_weights.keys() - model.state_dict().keys():
            raise UserError(
                f"{self.folder.label}: step {self.step} is of another run: its "
                f"model has {min(missing)}, this one does not; give another folder, or move the "
                "checkpoints away to start anew"
            )
        model.load_state_dict(state, strict=False)
        model_changes.share_original_weights(self.trainer, self.entries["tickets"])
        if self.same_rates:
            model_changes.restore_group_values(self.trainer, self.saved_groups)
        self.checkpoint = None
        self.trained_weights = None
        self.later_weights = {}

    def differing_values(self, user_state: UserState) -> list[str]:
        """Return the names of saved values that are missing or different in this run.

        All ranks call it.
        """
        if not self.saved_digests:
            return []
        rank_state = epoch_state.rank_state(self.trainer, self.agreement.gather, user_state)
        current = restore_check.fingerprint(
            to_plain(restore_check.present_state(self.trainer), {}, str, copies=False), rank_state
        )
        return restore_check.differing(self.saved_digests, current)

    def continue_logs(self) -> None:
        """Remove from the logs what this run is going to log again.

        Call it when all that is still to be logged comes after the checkpoint.
        """
        trainer = self.trainer
        if not self.entries:
            loggers.begin_files(trainer.loggers if trainer.is_global_zero else ())
        elif trainer.local_rank == 0:
            loggers.continue_files(
                trainer.loggers,
                loggers.well_formed(self.entries["loggers"]),
                self.step,
                trainer.is_global_zero,
            )

    def recreate_objects(self, user_state: UserState) -> None:
        """Run again the hooks that created objects that no checkpoint can hold.

        Within an epoch, Lightning does not run these hooks. At its end, the objects still have the
        epoch's state, which other hooks may use.
        """
        if self.entries:
            model_changes.run_creating_hooks(
                self.trainer, user_state.missing_attributes(self._rank_state["held"])
            )

    def restore_after_drawing(self, user_state: UserState) -> None:
        """Restore, within an epoch, what drawing its batches again has changed."""
        if self.resumes_within_epoch and self._same_ranks:
            user_state.restore_after_drawing(self._rank_state["held"])

    def restore_loaders(self, loop) -> None:
        """Restore the loaders' samplers and data to their state at an epoch's end."""
        if self.entries and self.point is ResumePoint.EPOCH and not self.loader_states_used:
            loop.loaders.give_back(self._rank_state["held"]["loaders"])

    def take_loader_states(self) -> Mapping[str, Any] | None:
        """Return the saved states of the loaders at the first call, None afterwards."""
        if not self.entries or self.loader_states_used:
            return None
        self.loader_states_used = True
        return self._rank_state["held"]["loaders"]

    def print_nothing_left(self) -> None:
        """Print why nothing is trained."""
        if self.trainer.is_global_zero:
            reached = (
                f"step {self.step} is beyond {self.limit_exceeded}, and the model has that step's "
                "weights"
                if self.limit_exceeded
                else f"step {self.step} was the last one"
            )
            print(
                f"nothing is left to train: {reached}; to train anew, move "
                f"{self.folder.path} away or give another {self.folder.setting}",
                flush=True,
            )

    @property
    def resumes_within_epoch(self) -> bool:
        """Whether the next epoch to train was begun before the interruption."""
        return self.point in (ResumePoint.BATCH, ResumePoint.VALIDATION)

    @property
    def resumes_in_validation(self) -> bool:
        """Whether a validation was interrupted that is not repeated yet."""
        return self.point is ResumePoint.VALIDATION

    def training_continues(self) -> None:
        """Note that the first epoch has begun or is resumed: later ones are as usual."""
        self.point = None

    def epoch_ended(self) -> None:
        """Note that the epoch in which the checkpoint was saved has ended."""
        self.epoch_is_open = False

    def discard_loader_states(self) -> None:
        """Forget the loaders' saved states: they are of loaders that do not exist any more."""
        self.loader_states_used = True


def _without_objects(notes: Mapping[tuple, tuple]) -> dict[tuple, tuple]:
    """Return the notes of a checkpoint; no entry of Lightning's is an object of the program's."""
    return {
        path: note
        for path, note in notes.items()
        if note[0] != RECREATED or path[0] not in LIGHTNING_KEYS
    }


def _first(phrases: list[str]) -> str:
    """Return the first few phrases as one text, and how many more there are.

    They quote a checkpoint, which may have any text.
    """
    rest = f" (and {len(phrases) - 4} more)" if len(phrases) > 4 else ""
    quoted = [printable(phrase)[:MAX_CHARACTERS] for phrase in phrases[:4]]
    return f"{'; '.join(quoted)}{rest}"
