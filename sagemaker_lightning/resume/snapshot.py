"""Takes the state of a job, all that is needed to resume, as one checkpoint."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pytorch_lightning import Trainer

from sagemaker_lightning.callbacks import loggers as curves
from sagemaker_lightning.callbacks.rank_consistency import learning_rates
from sagemaker_lightning.compat import lightning_callbacks, lightning_checkpoints, lightning_loops
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import reached
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.resume import (
    checkpoint_file,
    epoch_state,
    fit_loops,
    model_changes,
    user_checkpoints,
)
from sagemaker_lightning.resume.agreement import Agreement
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.user_state import UserState
from sagemaker_lightning.resume.verification import Proof
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.encoding import RECREATED, NotPlain, to_plain
from sagemaker_lightning.state.object_state import digest

EQUAL_ON_ALL_RANKS = {
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "state_dict",
    "loops",
    "optimizer_states",
    "lr_schedulers",
    "hparams_name",
    "hyper_parameters",
    "hparams_type",
    "datamodule_hparams_name",
    "datamodule_hyper_parameters",
    "datamodule_hparams_type",
}
"""Keys of a Lightning checkpoint that are equal on all ranks, or rank 0's for all."""
LIGHTNING_KEYS = EQUAL_ON_ALL_RANKS | {"callbacks"}
"""Keys of a checkpoint that Lightning sets; the others are of on_save_checkpoint."""
HYPERPARAMETERS = (
    "hyper_parameters",
    "datamodule_hyper_parameters",
    "hparams",
    "datamodule_hparams",
)
OPTIMIZER_STATES = "optimizer_states"


class Snapshot:
    """Takes the state of a job.

    Args:
        trainer: Lightning's trainer.
        agreement: The communication between the ranks.
        seeding: Knows the seed of the whole run.
        proof: Knows the results of earlier interruptions.
    """

    def __init__(
        self, trainer: Trainer, agreement: Agreement, seeding: Seeding, proof: Proof
    ) -> None:
        self.trainer = trainer
        self.agreement = agreement
        self.seeding = seeding
        self.proof = proof
        self.user_state = UserState(trainer)
        # Epochs and steps, as the flags set them.
        self.limits_of_flags = model_changes.limits(trainer)
        # The same, with what hooks at the start of training have added.
        self.limits = self.limits_of_flags
        # The state of the user's objects before the training data was created again.
        self.state_before_data: Mapping[str, Any] | None = None
        self.run_description: Mapping[str, Any] = {}  # empty before training
        self.has_warned_of_rates = False

    @object_graph.at_one_moment()
    def take(self, point: ResumePoint) -> dict[str, Any]:
        """Return a copy of the state of the job; all ranks call it.

        A validation changes no optimizer, so that the state before one has the optimizers' states
        without copies. Pass such a state to `with_optimizer_states` before writing it.

        Args:
            point: When the state is taken.

        Raises:
            UserError: A part of the state cannot be saved.
        """
        trainer = self.trainer
        gather = self.agreement.gather
        is_rank_0 = trainer.is_global_zero
        values_of_rank_0 = (
            time.time_ns(),
            curves.save_states(trainer.loggers) if is_rank_0 else [],
            user_checkpoints.file_names(trainer) if is_rank_0 else {},
        )
        saved_at_ns, loggers, files = gather(values_of_rank_0)[0]
        state, notes = self.lightning_checkpoint(
            copies_optimizers=point is not ResumePoint.VALIDATION
        )
        rank_values = {
            name: value for name, value in state.items() if name not in EQUAL_ON_ALL_RANKS
        }
        digests_and_rates = gather((digest(rank_values), learning_rates(trainer)))
        if digests_and_rates[0][0] == digests_and_rates[trainer.global_rank][0]:
            rank_values = {}
        self._warn_of_different_rates([rates for _, rates in digests_and_rates])
        rank_state = epoch_state.rank_state(
            trainer, gather, self.user_state, point, state["state_dict"]
        ) | {
            "own": rank_values,
            "notes": notes if rank_values else {},
        }
        rank_state["gradients"] = epoch_state.gradients(trainer, gather)
        self.user_state.report_packages(rank_state["parts"])
        entries = {
            "step": trainer.global_step,
            "kind": point.value,
            "number": saved_at_ns,
            "seed": self.seeding.seed,
            "world_size": trainer.world_size,
            "should_stop": bool(trainer.should_stop),
            "ranks": gather(rank_state),
            "shown": epoch_state.newest_metrics(trainer),
            "run": self.run_description,
            "loggers": loggers,
            "files": files,
            "reached": reached(trainer) if point is not ResumePoint.EPOCH else None,
            "notes": notes,
            "made": lightning_loops.epoch_of_loaders(trainer),
            "validation_made": (
                lightning_loops.epoch_of_validation_loaders(trainer)
                if trainer.reload_dataloaders_every_n_epochs
                else None  # they stay as they are, whenever a run has made them
            ),
            "validation_batches": lightning_loops.validation_batches_seen(trainer),
            "searched": model_changes.search_results(trainer),
            "limits": self.limits_of_flags,
            "added": self._limits_added(),
            "tickets": model_changes.shared_original_weights(trainer),
            "groups": model_changes.parameter_groups(trainer),
            "before_data": self.state_before_data,
        }
        if point is ResumePoint.EPOCH:
            fit_loops.move_counters_to_epoch_end(state["loops"]["fit_loop"])
        return state | {
            checkpoint_file.ENTRIES_KEY: entries
            | {"journal": self.proof.run_id, "resumes": self.proof.results}
        }

    def set_run_description(self, description: Mapping[str, Any]) -> None:
        """Set what checkpoints say of this run.

        Args:
            description: What run_settings.describe returned when the run began.
        """
        self.run_description = description

    def set_state_before_data(self, state: Mapping[str, Any] | None) -> None:
        """Set the state of the user's objects from which the training data was created.

        Args:
            state: What `UserState.state_before_data` returned; None if it is not known.
        """
        self.state_before_data = state

    def mark_start(self, added: Sequence[int]) -> None:
        """Take the present state as the one that the run starts with.

        Args:
            added: Epochs and steps that callbacks of the interrupted run had added to the limits.
                They do not count as present at the start.
        """
        self.user_state.mark_start()
        self.limits = [
            limit - already_added
            for limit, already_added in zip(model_changes.limits(self.trainer), added, strict=True)
        ]

    def _limits_added(self) -> list[int]:
        """Return the epochs and steps that callbacks have added to the limits."""
        return [
            limit - limit_before
            for limit, limit_before in zip(
                model_changes.limits(self.trainer), self.limits, strict=True
            )
        ]

    def with_optimizer_states(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a validation with the optimizers' states copied, too."""
        return state | {
            OPTIMIZER_STATES: to_plain(
                state[OPTIMIZER_STATES],
                notes := state[checkpoint_file.ENTRIES_KEY]["notes"],
                partial(self._replace_or_refuse, notes),
                (OPTIMIZER_STATES,),
            )
        }

    def lightning_checkpoint(self, copies_optimizers: bool = True) -> tuple[dict[str, Any], dict]:
        """Return Lightning's checkpoint in plain values, and notes of original types.

        Programs other than this one can read the plain values. The notes are as state/encoding.py
        makes them, by path.

        Args:
            copies_optimizers: Whether to copy the optimizers' states. If not, they are as the
                optimizers have them.

        Raises:
            UserError: A part of the state cannot be saved.
        """
        notes: dict[tuple, tuple] = {}
        with lightning_callbacks.saving_pruning_masks(self.trainer):
            state = lightning_checkpoints.state_of(self.trainer)
        uncopied = {} if copies_optimizers else {OPTIMIZER_STATES: state.pop(OPTIMIZER_STATES)}
        return to_plain(state, notes, partial(self._replace_or_refuse, notes)) | uncopied, notes

    def _warn_of_different_rates(self, rates: Sequence[list[float]]) -> None:
        """Warn, once, if the ranks have different learning rates.

        Then they do not train one model any more, and a checkpoint has the weights of rank 0 only.
        """
        other_rank = next(
            (rank for rank, own_rates in enumerate(rates) if own_rates != rates[0]), 0
        )
        if other_rank and not self.has_warned_of_rates and self.trainer.is_global_zero:
            print(
                f"warning: the learning rates are {_formatted(rates[0])} on rank 0 and "
                f"{_formatted(rates[other_rank])} on rank {other_rank}, so their weights "
                "differ, too: after an interruption this run is not exact; set learning rates "
                "from values that all ranks have, such as self.log(..., sync_dist=True)",
                flush=True,
            )
        self.has_warned_of_rates = self.has_warned_of_rates or bool(other_rank)

    def _replace_or_refuse(self, notes: dict[tuple, tuple], error: NotPlain) -> Any:
        """Return a text in place of an object that cannot be saved and need not be.

        A run does not need its hyperparameters to resume. An object that the module has, too, such
        as a loss or a normalizer, is made by the program again; its state is saved with that of all
        the user's objects (user_state.py).

        Args:
            notes: Gets the name of the object, for a resumed run.
            error: Names the object and where it is.

        Raises:
            UserError: It is something else.
        """
        name = str(error.path[0])
        if name.startswith(HYPERPARAMETERS):
            return f"({error.kind})"
        if name not in LIGHTNING_KEYS and (own := self.user_state.name_in_module(error.value)):
            notes[error.path] = (RECREATED, own)
            return f"({error.kind})"
        model_class = type(self.trainer.lightning_module)
        model_name = f"{model_class.__module__}.{model_class.__qualname__}"
        owners = {
            "state_dict": "state_dict() of",
            "callbacks": "a callback of",
            "lr_schedulers": "a scheduler of",
            OPTIMIZER_STATES: "an optimizer of",
        }
        owner = owners.get(name, "on_save_checkpoint() or state_dict() of")
        raise UserError(
            f"a checkpoint of this run could not be read again: {error} ({owner} {model_name}); "
            "keep numbers, text, tensors, arrays, lists and dicts there"
        )


def _formatted(rates: list[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))
