"""Resume from a checkpoint: choose it, check that it is of this run, restore it.

Lightning loads the weights and the optimizers. This module restores what Lightning leaves out.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pytorch_lightning import Trainer

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.compat import (
    lightning_callbacks,
    lightning_checkpoints,
    lightning_loops,
)
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import divided, position
from sagemaker_lightning.data.seeded_indices import seed_all
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.resume import (
    best_model,
    checkpoint_file,
    epoch_state,
    fit_loops,
    model_changes,
    restore_check,
    run_settings,
    user_checkpoints,
)
from sagemaker_lightning.resume.agreement import Agreement
from sagemaker_lightning.resume.checkpoint_dir import Folder, choose
from sagemaker_lightning.resume.user_state import Held
from sagemaker_lightning.state.encoding import plain, restored


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
        folder: Folder,
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
        self.meta: Mapping[str, Any] = {}  # the checkpoint's entries of this package
        # When it was saved: "batch", "validation" or "epoch"; "" once training continues.
        self.kind = ""
        self.within = False  # whether it was saved within an epoch that has not ended yet
        self.saved: dict[str, int] = {}  # digests of the values in the checkpoint, by name
        self.loaded: dict[str, Any] | None = None  # the checkpoint, until training continues
        self.later: dict[str, Any] = {}  # weights of parts of the model that a hook creates
        self.limits = model_changes.limits(trainer)  # epochs and steps, as the flags set them
        self.added = [0, 0]  # epochs and steps that a callback had added to the limits
        self.optimizers: list[str] = []  # classes of the optimizers, before hooks change them
        self.optimizer_defaults: list[dict[str, str]] = []  # the numbers they were made with
        self.raised = 0  # epochs added to the limit while Lightning loads the checkpoint
        self.beyond = ""  # the limit of this training that the checkpoint is beyond
        self.taken = False  # whether the loaders' saved states were taken, or no longer apply
        # Whether StochasticWeightAveraging was continued; None before `restore` has tried.
        self.averaging = None

    def load(self, host: str, flags: Mapping[str, object], objects: Mapping[str, Any]) -> bool:
        """Hand Lightning the newest checkpoint, and return whether there is one.

        Args:
            host: Name of this host.
            flags: All settings by flag.
            objects: The objects that the module has, by name.

        Raises:
            UserError: The checkpoint is of a run with other `flags`.
        """
        # Rank 0 alone writes the best model and reads it.
        callbacks = best_model.callbacks(self.trainer) if self.trainer.is_global_zero else []
        missing_file = callbacks[0].lacks if callbacks else lambda path: ""
        path = choose(
            self.folder, host, self.agreement.gather, self.trainer.local_rank == 0, missing_file
        )
        if path is None:
            return False
        checkpoint = checkpoint_file.read(path)
        self.meta = checkpoint.pop(checkpoint_file.KEY)
        to_come = model_changes.to_come(self.trainer)
        self.flags = flags
        self.name = path.name
        self._refuse_another_run(
            run_settings.differences(
                self.trainer, flags, self.meta["run"], self.other_settings, to_come
            )
        )
        self.step = self.meta["step"]
        self.kind = self.meta["kind"]
        self.seeding.seed = self.meta["seed"]
        if self.trainer.is_global_zero:
            note = (
                ""
                if self._same_ranks
                else (
                    f"; {self.meta['world_size']} ranks saved it, these are "
                    f"{self.trainer.world_size}: no sample is left out or taken twice, but the run "
                    "is no longer bit-identical to one without an interruption"
                )
            )
            print(f"resuming from step {self.step}: {path}{note}", flush=True)
        scaling = json.loads(self.meta["run"]["flags"]).get("--lr_scaling") == flags.get(
            "--lr_scaling"
        )
        self.same_rates = self._same_ranks and scaling and not self.other_settings
        # Entries of this rank that differ from those of rank 0.
        rank_overrides = self._rank_state["own"] if self._same_ranks else {}
        self.saved = (
            restore_check.fingerprint(checkpoint | rank_overrides, self._rank_state)
            if self._same_ranks
            else {}
        )
        checkpoint = restored(
            checkpoint | rank_overrides,
            self._rank_state["notes"] if rank_overrides else self.meta["notes"],
            objects,
        )
        checkpoint["loops"]["fit_loop"].pop("combined_loader", None)  # each rank saved its own
        self.later = model_changes.take_out(
            checkpoint["state_dict"], self.trainer.lightning_module, to_come
        )
        model_changes.adapt(self.trainer.lightning_module, checkpoint["state_dict"])
        self.loaded = checkpoint
        model_changes.settle_searches(self.trainer, self.meta["searched"])
        # Other limits on the command line replace what callbacks had added.
        if self.meta.get("limits") == self.limits:
            self.added = self.meta["added"]
            model_changes.add_to_limits(self.trainer, self.added)
        self._pass_limit(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])
        self.groups = [
            [
                {name: value for name, value in group.items() if name != "params"}
                for group in state["param_groups"]
            ]
            for state in checkpoint["optimizer_states"]
        ]
        self.within = self.kind != "epoch"
        if not self.within:
            fit_loops.begin_anew(checkpoint["loops"]["fit_loop"])
        # Lightning saves the score and does not load it.
        for callback in self.trainer.checkpoint_callbacks:
            if hasattr(callback, "current_score"):
                callback.current_score = (
                    checkpoint["callbacks"].get(callback.state_key, {}).get("current_score")
                )
        if "files" in self.meta:
            user_checkpoints.write_again(self.trainer, self.meta["files"])
        self.trainer.should_stop = self.meta["should_stop"]
        lightning_checkpoints.give(self.trainer, checkpoint, str(path))
        return True

    def _pass_limit(self, epoch: int) -> None:
        """Let Lightning load a checkpoint of an epoch beyond this training's limit.

        It refuses that. But a program that trains on, with a higher limit than at first, comes by
        its first training again when it is started again. `keep_limit` undoes this.
        """
        limit = self.trainer.fit_loop.max_epochs
        if limit not in (None, -1) and epoch > limit:
            self.raised = epoch - limit
            self.trainer.fit_loop.max_epochs += self.raised

    def keep_limit(self) -> None:
        """Set the limit of epochs to what it is without `_pass_limit`.

        Hooks at the start of training may have changed it since, as StochasticWeightAveraging does.
        """
        loop = self.trainer.fit_loop
        if self.raised:
            loop.max_epochs -= self.raised
            self.raised = 0
        if self.meta and loop.max_epochs not in (None, -1):
            reached = loop.epoch_progress.current.processed + (
                self.within and not lightning_loops.epoch_is_done(self.trainer)
            )
            if reached > loop.max_epochs:
                self.beyond = f"max_epochs={loop.max_epochs}"

    def _refuse_another_run(self, differences: list[str]) -> None:
        """Raise UserError if anything differs between this run and the checkpoint's run."""
        if not differences:
            return
        allows = (
            "--resume.other_settings=true"
            if self.folder.name.startswith("--")
            else "ExactResume(other_settings=True)"
        )
        rest = f" (and {len(differences) - 4} more)" if len(differences) > 4 else ""
        raise UserError(
            f"{self.folder.label}: {self.name} is of another run: "
            f"{'; '.join(differences[:4])}{rest}; go on with the same settings, or give another "
            f"folder, or move the checkpoints away to start anew; {allows} "
            "goes on with another learning rate, gradient clipping or precision"
        )

    @property
    def _same_ranks(self) -> bool:
        """Whether this run has as many ranks as the run that saved the checkpoint."""
        return self.meta["world_size"] == self.trainer.world_size

    @property
    def _rank_state(self) -> Mapping[str, Any]:
        """Return what the checkpoint says of this rank.

        With another number of ranks than before, return what it says of rank 0.
        """
        ranks = self.meta["ranks"]
        return ranks[self.trainer.global_rank if self._same_ranks else 0]

    @contextmanager
    def as_of_the_data(self, loop, snapshot) -> Iterator[None]:
        """Let the training data be created as in the interrupted run.

        That means in the same epoch, with the same random draws and with the user's objects in the
        same state.

        The caller creates the data inside this context.

        Args:
            loop: The fit loop.
            snapshot: The Snapshot of this run.
        """
        epoch = self.trainer.current_epoch
        data_epoch = self.meta.get("made", -1)
        every = self.trainer.reload_dataloaders_every_n_epochs
        if loop.loaders is not None:
            if lightning_loops.loaders_are_due(self.trainer):
                seed_all("data", self.seeding.seed, epoch)
            yield
            return
        if data_epoch < 0:
            yield
            return
        objects = self.meta.get("before_data")
        if (
            epoch_needs_new_data := self.kind == "epoch"
            and bool(every)
            and epoch - data_epoch >= every
        ):
            data_epoch = epoch
            objects = self._rank_state["held"]
        if data_epoch:
            seed_all("data", self.seeding.seed, data_epoch)
        if objects and self._same_ranks:
            snapshot.held.restore_before_data(objects)
            snapshot.before_data = {name: objects[name] for name in ("plain", "generators")}
        snapshot.held.state.mark()
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
            new_state = snapshot.held.before_data()
            saved_state = self._rank_state["held"]
            plain_kept = {
                key: value
                for key, value in saved_state["plain"].items()
                if not key[0].startswith("train.")
            }
            outdated = {
                ".".join(key)
                for key in (saved_state["plain"].keys() - plain_kept.keys())
                | new_state["plain"].keys()
            }
            outdated |= {f"generators {path}" for path in new_state["generators"]} | {
                "settings val_check_batch"
            }
            self.saved = {
                name: value
                for name, value in self.saved.items()
                if name not in outdated and not name.startswith(restore_check.DATA)
            }
            saved_state.update(
                plain=plain_kept | new_state["plain"], generators=new_state["generators"]
            )
            # It follows from the number of batches of the new data.
            saved_state["settings"].pop("val_check_batch", None)
            self.taken = True

    def place(self, loop) -> None:
        """Place the data loader within an epoch that another number of ranks began.

        Raises:
            UserError: The loaders differ from those of the checkpoint's run, or the rest of the
                epoch cannot be divided among this number of ranks.
        """
        if self.meta:
            self._refuse_another_run(
                run_settings.loaders_differ(self.trainer, self.flags, self.meta["run"])
            )
        if self.kind in ("", "epoch") or self._same_ranks:
            return
        loader = divided(self.trainer.train_dataloader)
        if loader is None or not loader.course or self.meta["reached"] is None:
            raise UserError(
                f"{self.folder.label}: step {self.step} was saved within an epoch "
                f"by {self.meta['world_size']} ranks, and its data cannot be shared out anew among "
                f"{self.trainer.world_size}; give as many devices and nodes as before"
            )
        epoch, _ = position(self.trainer)
        loader.course.begun = epoch, self.meta["reached"]
        done = loader.course.of_epoch(epoch)[1]
        progress = loop.epoch_loop.batch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = done

    def restore(self, held: Held, wholly: bool = True) -> None:
        """Restore the state of this rank that only the checkpoint has.

        Before the hooks that begin training, call it with `wholly` False: then it leaves out the
        model's weights and of the user's objects restores plain values only.
        """
        if not self.meta:
            return
        if self.averaging is None:
            self.averaging = model_changes.go_on_averaging(self.trainer, self.groups, self.kind)
        if wholly and self.loaded:
            self._undo_hooks()
        epoch_state.restore_job(self.trainer, self.meta["shown"])
        if self._same_ranks:
            epoch_state.restore_rank(self.trainer, self._rank_state, mid_epoch=self.kind != "epoch")
        epoch_state.restore_gradients(self.trainer, self.meta["ranks"])
        held.restore(self._rank_state["held"], wholly)

    def add_groups(self) -> None:
        """Add the parameter groups that a hook had added to the optimizers.

        Lightning loads the state of the optimizers afterwards, which needs these groups.

        Raises:
            UserError: The optimizers are of other classes than those of the checkpoint's run. Their
                state would be loaded, and fail or be misread at the first step.
        """
        self.optimizers = run_settings.optimizers(self.trainer)
        before = self.meta.get("run", {}).get("optimizers", self.optimizers)
        if before != self.optimizers:
            words = [", ".join(names) or "none" for names in (before, self.optimizers)]
            self._refuse_another_run([f"the optimizer was {words[0]}, is {words[1]}"])
        self.optimizer_defaults = run_settings.optimizer_defaults(self.trainer)
        self._refuse_another_run(self._changed_defaults())
        model_changes.add_groups(self.trainer, self.meta.get("groups", []))

    def _changed_defaults(self) -> list[str]:
        """Return which numbers of the optimizers are others than in the checkpoint's run.

        Lightning would load those of the checkpoint, and the ones in the code would have no effect.
        The learning rate may depend on the number of ranks, and a search may have found it.
        """
        before = self.meta.get("run", {}).get("defaults", self.optimizer_defaults)
        free = self.other_settings or bool(self.meta and not self._same_ranks)
        free = free or any(map(lightning_callbacks.searches, self.trainer.callbacks))
        return [
            f"{name} of {class_name} was {numbers_before.get(name)}, is {numbers.get(name)}"
            for class_name, numbers_before, numbers in zip(
                self.optimizers, before, self.optimizer_defaults, strict=True
            )
            for name in sorted(numbers_before.keys() | numbers.keys())
            if numbers_before.get(name) != numbers.get(name) and not (free and name == "lr")
        ]

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
        saved = self.loaded.get("current_model_state", self.loaded["state_dict"])
        model = self.trainer.lightning_module
        state = saved | self.later
        model_changes.prune_again(model, self.later)
        model_changes.adapt(model, state)
        if missing := self.later.keys() - model.state_dict().keys():
            raise UserError(
                f"{self.folder.label}: step {self.step} is of another run: its "
                f"model has {min(missing)}, this one does not; give another folder, or move the "
                "checkpoints away to start anew"
            )
        model.load_state_dict(state, strict=False)
        model_changes.tickets(self.trainer, self.meta["tickets"])
        if self.same_rates:
            model_changes.restore_groups(self.trainer, self.groups)
        self.loaded = None
        self.later = {}

    def lost(self, held: Held) -> list[str]:
        """Return the names of saved values that are missing or different in this run.

        All ranks call it.
        """
        if not self.saved:
            return []
        rank_state = epoch_state.of_rank(self.trainer, self.agreement.gather, held, loaders=False)
        current = restore_check.fingerprint(
            plain(restore_check.state_of(self.trainer), {}, str, copies=False), rank_state
        )
        return restore_check.lost(self.saved, current)

    def go_on_logging(self) -> None:
        """Remove from the logs what this run is going to log again.

        Call it when all that is still to be logged comes after the checkpoint.
        """
        trainer = self.trainer
        if not self.meta:
            loggers.begin(trainer.loggers if trainer.is_global_zero else ())
        elif trainer.local_rank == 0:
            loggers.go_on(
                trainer.loggers, self.meta["loggers"], self.meta["saved_at"], trainer.is_global_zero
            )

    def make_again(self, held: Held) -> None:
        """Run again the hooks that created objects that no checkpoint can hold.

        This is needed only within an epoch, where Lightning does not run these hooks.
        """
        if self.kind in ("batch", "validation"):
            model_changes.make_again(self.trainer, held.lacking(self._rank_state["held"]))

    def give_back_to_loaders(self, loop) -> None:
        """Restore the loaders' samplers and data to their state at an epoch's end."""
        if self.meta and self.kind == "epoch" and not self.taken:
            loop.loaders.give_back(self._rank_state["held"]["loaders"])

    def take_states(self) -> Mapping[str, Any] | None:
        """Return the saved states of the loaders at the first call, None afterwards."""
        if not self.meta or self.taken:
            return None
        self.taken = True
        return self._rank_state["held"]["loaders"]

    def say_that_all_is_done(self) -> None:
        """Print why nothing is trained."""
        if self.trainer.is_global_zero:
            reached = (
                f"step {self.step} is beyond {self.beyond}, and the model has that step's weights"
                if self.beyond
                else f"step {self.step} was the last one"
            )
            print(
                f"nothing is left to train: {reached}; to train anew, move "
                f"{self.folder.path} away or give another {self.folder.name}",
                flush=True,
            )

    def goes_on(self) -> bool:
        """Return whether the first epoch was begun before the interruption.

        The second call returns False.
        """
        within_epoch = self.kind in ("batch", "validation")
        self.kind = self.kind.replace("batch", "")
        return within_epoch

    def validates_first(self) -> bool:
        """Return whether a validation was interrupted.

        The second call returns False.
        """
        was_interrupted = self.kind == "validation"
        self.kind = ""
        return was_interrupted
