"""Going on from a checkpoint: which one, whether it is of this run, and what in it Lightning does not restore."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pytorch_lightning import Trainer

from app import best, checkpoints, curves, intact, loops, partial, revive, same, written
from app.agreement import Agreement
from app.chance import Chance
from app.compat import lightning_checkpoints, lightning_loops
from app.errors import UserError
from app.exact import divided, position
from app.folder import Folder, choose
from app.held import Held
from app.keys import seed_all
from app.plain import plain, restored


class Restart:
    """The beginning of a run, which is the rest of an earlier one if that has left a checkpoint.

    Args:
        trainer: Lightning's trainer.
        folder: The folder of the checkpoints.
        chance: What knows the seed of all.
        agreement: What all ranks say to each other.
        other_settings: Whether the run may have another learning rate, gradient clipping or precision than before.
    """

    def __init__(
        self, trainer: Trainer, folder: Folder, chance: Chance, agreement: Agreement, other_settings: bool = False
    ) -> None:
        self.other_settings = other_settings
        self.trainer, self.folder, self.chance, self.agreement = trainer, folder, chance, agreement
        self.step = 0  # of the checkpoint that training goes on from; 0 if it starts
        self.meta: Mapping[str, Any] = {}  # what is ours in it
        self.kind = ""  # "batch", "validation" or "epoch": when it was taken; "" once training goes on
        self.within = False  # whether it was taken within an epoch, which has not come to its end yet
        self.saved: dict[str, int] = {}  # digests of what is in it
        self.loaded: dict[str, Any] | None = None  # the checkpoint, until training goes on
        self.later: dict[str, Any] = {}  # weights of parts of the model that a hook makes
        self.limits = revive.limits(trainer)  # as the flags have them
        self.added = [0, 0]  # epochs and steps that a callback had added to them
        self.taken, self.averaging = False, None  # whether the loaders' states were taken, and an average goes on

    def load(self, host: str, flags: Mapping[str, object]) -> bool:
        """Hand Lightning the newest checkpoint, and return whether there is any.

        UserError if it is of a run with other `flags`.
        """
        # Rank 0 alone writes the best model and reads it.
        callbacks = best.callbacks(self.trainer) if self.trainer.is_global_zero else []
        lacks = callbacks[0].lacks if callbacks else lambda path: ""
        path = choose(self.folder, host, self.agreement.gather, self.trainer.local_rank == 0, lacks)
        if path is None:
            return False
        checkpoint = checkpoints.read(path)
        self.meta = checkpoint.pop(checkpoints.KEY)
        to_come = revive.to_come(self.trainer)
        self.flags, self.name = flags, path.name
        self._is_the_same(same.differences(self.trainer, flags, self.meta["run"], self.other_settings, to_come))
        self.step, self.kind, self.chance.seed = self.meta["step"], self.meta["kind"], self.meta["seed"]
        if self.trainer.is_global_zero:
            how = "" if self._same_ranks else (
                f"; {self.meta['world_size']} ranks saved it, these are {self.trainer.world_size}: no sample is left "
                "out or taken twice, but the run is no longer bit-identical to one without an interruption"
            )  # fmt: skip
            print(f"resuming from step {self.step}: {path}{how}", flush=True)
        scaling = json.loads(self.meta["run"]["flags"]).get("--lr_scaling") == flags.get("--lr_scaling")
        self.same_rates = self._same_ranks and scaling and not self.other_settings
        own = self._known["own"] if self._same_ranks else {}  # of this rank, where it differs from the first one's
        self.saved = intact.fingerprint(checkpoint | own, self._known) if self._same_ranks else {}
        checkpoint = restored(checkpoint | own, self._known["notes"] if own else self.meta["notes"])
        checkpoint["loops"]["fit_loop"].pop("combined_loader", None)  # each rank has its own
        self.later = revive.take_out(checkpoint["state_dict"], self.trainer.lightning_module, to_come)
        revive.adapt(self.trainer.lightning_module, checkpoint["state_dict"])
        self.loaded = checkpoint
        revive.settle_searches(self.trainer, self.meta["searched"])
        if self.meta.get("limits") == self.limits:  # who gives others means these
            self.added = self.meta["added"]
            revive.add_to_limits(self.trainer, self.added)
        self.groups = [[{name: value for name, value in group.items() if name != "params"} for group in
                        state["param_groups"]] for state in checkpoint["optimizer_states"]]  # fmt: skip
        self.within = self.kind != "epoch"
        if not self.within:
            loops.begin_anew(checkpoint["loops"]["fit_loop"])
        for callback in self.trainer.checkpoint_callbacks:  # Lightning saves it, and does not load it
            if hasattr(callback, "current_score"):
                callback.current_score = checkpoint["callbacks"].get(callback.state_key, {}).get("current_score")
        if "files" in self.meta:
            written.write_again(self.trainer, self.meta["files"])
        self.trainer.should_stop = self.meta["should_stop"]
        lightning_checkpoints.give(self.trainer, checkpoint, str(path))
        return True

    def _is_the_same(self, differences: list[str]) -> None:
        """Raise UserError if anything differs between this run and that of the checkpoint."""
        if not differences:
            return
        more = f" (and {len(differences) - 4} more)" if len(differences) > 4 else ""
        raise UserError(
            f"--resume.dirpath={self.folder.path}: {self.name} is of another run: {'; '.join(differences[:4])}{more}; "
            "go on with the same settings, or give another folder, or move the checkpoints away to start anew; "
            "--resume.other_settings=true goes on with another learning rate, gradient clipping or precision"
        )

    @property
    def _same_ranks(self) -> bool:
        return self.meta["world_size"] == self.trainer.world_size

    @property
    def _known(self) -> Mapping[str, Any]:
        """Return what the checkpoint says of this rank; with other ranks than before, of one of these."""
        ranks = self.meta["ranks"]
        return ranks[self.trainer.global_rank if self._same_ranks else 0]

    @contextmanager
    def as_of_the_data(self, loop, snapshot) -> Iterator[None]:
        """Let the training data be made as it was: in its epoch, with its draws, and by what objects held."""
        epoch, made = self.trainer.current_epoch, self.meta.get("made", -1)
        every = self.trainer.reload_dataloaders_every_n_epochs
        if loop.loaders is not None:
            if lightning_loops.loaders_are_due(self.trainer):
                seed_all("data", self.chance.seed, epoch)
            yield
            return
        if made < 0:
            yield
            return
        held = self.meta.get("before_data")
        if anew := self.kind == "epoch" and bool(every) and epoch - made >= every:
            made, held = epoch, self._known["held"]  # the epoch that comes next has its data made
        if made:
            seed_all("data", self.chance.seed, made)
        if held and self._same_ranks:
            snapshot.held.restore_before_data(held)
            snapshot.before_data = {name: held[name] for name in ("plain", "generators")}
        snapshot.held.state.mark()
        progress = loop.epoch_progress.current
        now, progress.completed = progress.completed, made
        try:
            yield
        finally:
            progress.completed = now
        if anew:  # what was saved of the data before is of no use to this, and what objects hold, it may have changed
            told, known = snapshot.held.before_data(), self._known["held"]
            kept = {key: value for key, value in known["plain"].items() if not key[0].startswith("train.")}
            others = {".".join(key) for key in (known["plain"].keys() - kept.keys()) | told["plain"].keys()}
            others |= {f"generators {path}" for path in told["generators"]} | {"settings val_check_batch"}
            self.saved = {name: value for name, value in self.saved.items() if name not in others}
            known.update(plain=kept | told["plain"], generators=told["generators"])
            known["settings"].pop("val_check_batch", None)  # by the number of batches, which the new data has
            self.taken = True

    def place(self, loop) -> None:
        """Place the training data's loader in an epoch that another number of ranks began."""
        if self.meta:
            self._is_the_same(same.loaders_differ(self.trainer, self.flags, self.meta["run"]))
        if self.kind in ("", "epoch") or self._same_ranks:
            return
        loader = divided(self.trainer.train_dataloader)
        if loader is None or not loader.course or self.meta["reached"] is None:
            raise UserError(
                f"--resume.dirpath={self.folder.path}: step {self.step} was saved within an epoch by "
                f"{self.meta['world_size']} ranks, and its data cannot be shared out anew among "
                f"{self.trainer.world_size}; give as many devices and nodes as before"
            )
        epoch, _ = position(self.trainer)
        loader.course.begun = epoch, self.meta["reached"]
        done = loader.course.of_epoch(epoch)[1]
        progress = loop.epoch_loop.batch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = done

    def restore(self, held: Held, wholly: bool = True) -> None:
        """Give this rank what only the checkpoint knows; not wholly before the hooks that begin training."""
        if not self.meta:
            return
        if self.averaging is None:
            self.averaging = revive.go_on_averaging(self.trainer, self.groups, self.kind)
        if wholly and self.loaded:
            self._undo_hooks()
        partial.restore_job(self.trainer, self.meta["shown"])
        if self._same_ranks:
            partial.restore_rank(self.trainer, self._known, mid_epoch=self.kind != "epoch")
        partial.restore_gradients(self.trainer, self.meta["ranks"])
        held.restore(self._known["held"], wholly)

    def add_groups(self) -> None:
        """Add the optimizers' groups of parameters that a hook had added; Lightning restores their state next."""
        revive.add_groups(self.trainer, self.meta.get("groups", []))

    def _undo_hooks(self) -> None:
        """Give back what a hook that begins training has set, as it did in the run that this one goes on with."""
        # Lightning's WeightAveraging saves its average in the model's place, and the model beside it.
        saved = self.loaded.get("current_model_state", self.loaded["state_dict"])
        model, state = self.trainer.lightning_module, saved | self.later
        revive.prune_again(model, self.later)
        revive.adapt(model, state)
        if lacks := self.later.keys() - model.state_dict().keys():
            raise UserError(
                f"--resume.dirpath={self.folder.path}: step {self.step} is of another run: its model has {min(lacks)}, "
                "this one does not; give another folder, or move the checkpoints away to start anew"
            )
        model.load_state_dict(state, strict=False)
        revive.tickets(self.trainer, self.meta["tickets"])
        if self.same_rates:
            revive.restore_groups(self.trainer, self.groups)
        self.loaded, self.later = None, {}

    def lost(self, held: Held) -> list[str]:
        """Return the names of what the checkpoint knows and is not there again; all ranks call it."""
        if not self.saved:
            return []
        known = partial.of_rank(self.trainer, self.agreement.gather, held, loaders=False)
        now = intact.fingerprint(plain(intact.state_of(self.trainer), {}, str, copies=False), known)
        return intact.lost(self.saved, now)

    def go_on_logging(self) -> None:
        """Have the loggers forget what is going to be logged again; to be called when only that is to come."""
        trainer = self.trainer
        if not self.meta:
            curves.begin(trainer.loggers if trainer.is_global_zero else ())
        elif trainer.local_rank == 0:
            curves.go_on(trainer.loggers, self.meta["loggers"], self.meta["saved_at"], trainer.is_global_zero)

    def make_again(self, held: Held) -> None:
        """Run the hooks again that made what is no plain value, for an epoch that goes on."""
        if self.kind in ("batch", "validation"):
            revive.make_again(self.trainer, held.lacking(self._known["held"]))

    def give_back_to_loaders(self, loop) -> None:
        """Give the loaders' samplers and data back what they held at an epoch's end."""
        if self.meta and self.kind == "epoch" and not self.taken:
            loop.loaders.give_back(self._known["held"]["loaders"])

    def take_states(self) -> Mapping[str, Any] | None:
        """Return, once, what the loaders said of themselves."""
        if not self.meta or self.taken:
            return None
        self.taken = True
        return self._known["held"]["loaders"]

    def say_that_all_is_done(self) -> None:
        """Say why nothing is trained."""
        if self.trainer.is_global_zero:
            print(
                f"nothing is left to train: step {self.step} was the last one; to train anew, move "
                f"{self.folder.path} away or give another --resume.dirpath",
                flush=True,
            )

    def goes_on(self) -> bool:
        """Return, once, whether the epoch that comes first was begun before."""
        goes_on, self.kind = self.kind in ("batch", "validation"), self.kind.replace("batch", "")
        return goes_on

    def validates_first(self) -> bool:
        """Return, once, whether a validation was interrupted."""
        first, self.kind = self.kind == "validation", ""
        return first
