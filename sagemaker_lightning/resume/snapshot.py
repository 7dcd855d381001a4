"""Takes the state of a job, all that is needed to resume, as one checkpoint."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pytorch_lightning import Trainer

from sagemaker_lightning.callbacks.rank_consistency import learning_rates
from sagemaker_lightning.compat import lightning_callbacks, lightning_checkpoints
from sagemaker_lightning.compat.model_parallel import mesh_of, mesh_sizes, reshard
from sagemaker_lightning.compat.torch_modules import named_parameters
from sagemaker_lightning.contract.errors import UserError, with_article
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.files import checkpoint_file, shards
from sagemaker_lightning.resume.files.entries import Entries, RankOverrides, RunDescription
from sagemaker_lightning.resume.parts import counters
from sagemaker_lightning.resume.parts.copies import has_values
from sagemaker_lightning.resume.parts.given_parts import GivenParts
from sagemaker_lightning.resume.parts.part import Place
from sagemaker_lightning.resume.parts.roots import objects_of_module
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.same_run.differences import first_of
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.digests import digest
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.kinds.base import NotSaved, class_name
from sagemaker_lightning.state.graph.text import Record
from sagemaker_lightning.state.readable import readable

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run


SCHEDULERS = "lr_schedulers"
EQUAL_ON_ALL_RANKS = {
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "state_dict",
    "loops",
    "optimizer_states",
    checkpoint_file.BEFORE_HOOKS,
    "hparams_name",
    "hyper_parameters",
    "hparams_type",
    "datamodule_hparams_name",
    "datamodule_hyper_parameters",
    "datamodule_hparams_type",
}
"""Keys of a Lightning checkpoint that are equal on all ranks, or rank 0's for all."""
LIGHTNING_KEYS = EQUAL_ON_ALL_RANKS | {"callbacks", SCHEDULERS}
"""Keys of a checkpoint that Lightning sets; the others are of on_save_checkpoint."""
OPTIMIZER_STATES = "optimizer_states"
OF_MODEL = "state_dict", OPTIMIZER_STATES, checkpoint_file.BEFORE_HOOKS
"""Those of them that each rank has of its own if the ranks do not train one model."""
MOST_OF_RANKS = 1 << 30
"""Bytes, at most, that a checkpoint has of the models of all ranks, beyond rank 0's."""
OPTIMIZERS = "optimizer "
"""How the names of tensors begin that are an optimizer's."""
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The type of the bits of a number, by its bytes."""
OWN_SHARD = "own_shard"
"""The key of what this rank's shard gets; it is not written to the checkpoint itself."""


class Snapshot:
    """Takes the state of a job.

    Args:
        run: The run.
    """

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.trainer = run.trainer
        self.description: RunDescription | None = None
        """What checkpoints say of the run; None before training."""
        self.has_warned_of_ranks = False
        """Whether a line has said that the ranks do not train one model; all ranks agree on it."""
        self.lightnings_file = lightning_checkpoints.NewestFile(self.trainer)

    @object_graph.at_one_moment()
    def take(self, point: ResumePoint) -> dict[str, Any]:
        """Return a copy of the state of the job; all ranks call it.

        Args:
            point: When the state is taken.

        Raises:
            UserError: A part of the state cannot be saved.
        """
        run = self.run
        gather = run.agreement.gather
        reshard(self.trainer)
        shared = shards.SharedOut()
        is_first = self.trainer.is_global_zero
        number, of_first = gather(
            (time.time_ns(), self._saved(Place.FIRST, point, None) if is_first else {})
        )[0]
        # Lightning alone would not have called the hooks that save: what they count is undone.
        objects = run.part(UserObjects)
        with objects.keeping_numbers() if self.asks_users_hooks else nullcontext():
            state, exact_values = self.lightning_checkpoint(shared)
        overrides = self._rank_overrides(state, exact_values)
        before_hooks = state | state[checkpoint_file.BEFORE_HOOKS]
        of_rank = shared.take(self._saved(Place.RANK, point, before_hooks), shards.RANKS_KEY)
        reports = run.part(UserObjects).reports
        reports.report_packages(of_rank[GivenParts.key])
        of_ranks = gather((of_rank | {"rank_overrides": overrides}, reports.take_lines()))
        reports.say_of_ranks(lines for _, lines in of_ranks)
        assert run.seeding.seed is not None  # the ranks have agreed on one
        assert self.description is not None  # training has begun
        entries: Entries = {
            "step": run.step,
            "resume_point": point.value,
            "number": number,
            "seed": run.seeding.seed,
            "world_size": self.trainer.world_size,
            "run": self.description,
            "journal": run.check.run_id,
            "resumes": run.check.results,
            "exact_values": exact_values,
            "parts": shared.take(of_first | self._saved(Place.RUN, point, state), shards.PARTS_KEY),
            "ranks": [state for state, _ in of_ranks],
        }
        if isinstance(batches := self.trainer.num_training_batches, int):  # not an endless stream's
            entries["epoch_batches"] = batches
        if mesh_of(self.trainer) is not None:
            entries["mesh"] = mesh_sizes(self.trainer)
            entries["shards"] = shared.described(gather)
            state[OWN_SHARD] = shared.parts
        elif shared.parts:
            raise UserError(
                f"a checkpoint of this run could not be read again: {min(shared.parts)} is a "
                "DTensor; share tensors out with strategy=ModelParallelStrategy(...), or keep what "
                "full_tensor() makes of it"
            )
        if point is ResumePoint.EPOCH:
            counters.move_counters_to_epoch_end(before_hooks["loops"]["fit_loop"])
        return state | {checkpoint_file.ENTRIES_KEY: entries}

    def _saved(
        self, place: Place, point: ResumePoint, state: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return what the parts of a place save, by key."""
        return {part.key: part.save(point, state) for part in self.run.parts if part.place is place}

    def _rank_overrides(
        self, state: Mapping[str, Any], exact_values: Mapping[str, Record]
    ) -> RankOverrides:
        """Return those of Lightning's entries that are others on this rank than on rank 0.

        Args:
            state: Lightning's checkpoint.
            exact_values: Those of its values that are not plain.
        """
        entries = {name: value for name, value in state.items() if name not in EQUAL_ON_ALL_RANKS}
        exact = "".join(map(values.digest, exact_values.values()))
        has_copies = self.trainer.world_size > 1 and mesh_of(self.trainer) is None
        tensors = trained_tensors(self.trainer) if has_copies else {}
        own = OfRank(
            digest(entries) + exact.encode(), learning_rates(self.trainer), sums_of_bits(tensors)
        )
        ranks = self.run.agreement.gather(own)
        size = sum(each.nbytes for each in tensors.values()) * (len(ranks) - 1)
        self._warn_of_different_models(ranks, size)
        if own == ranks[0]:
            return {"entries": {}, "exact_values": {}}
        if (own.rates, own.sums) != (ranks[0].rates, ranks[0].sums) and size <= MOST_OF_RANKS:
            entries |= {name: state[name] for name in OF_MODEL if name in state}
        return {"entries": entries, "exact_values": exact_values}

    @property
    def asks_users_hooks(self) -> bool:
        """Whether a state has what hooks of the user's save, because something may load it."""
        return bool(lightning_checkpoints.save_hooks(self.trainer).read)

    def describe_run(self, description: RunDescription) -> None:
        """Set what checkpoints say of the run.

        Args:
            description: What SameRun.describe returned when the run began.
        """
        self.description = description

    def lightning_checkpoint(
        self, shared: shards.SharedOut
    ) -> tuple[dict[str, Any], dict[str, Record]]:
        """Return Lightning's checkpoint in plain values, and what of it is not plain, as it is.

        Programs other than this one can read the plain values (state/readable.py). The others are
        records, one of Lightning's entries and one of the user's. What hooks of the user's have
        replaced in the checkpoint is there as it was, too.

        Args:
            shared: Gets the tensors that are shared out.

        Raises:
            UserError: A part of the state cannot be saved.
        """
        with ExitStack() as saving:
            for part in self.run.parts:
                saving.enter_context(part.lightning_saves())
            file = self.lightnings_file.take()
            state, before_hooks = lightning_checkpoints.state_of(self.trainer, file)
        if "callbacks" in state:  # a hook of the user's may have removed them
            model = self.trainer.lightning_module
            state["callbacks"] = lightning_callbacks.without_lightnings(state["callbacks"], model)
        state[checkpoint_file.BEFORE_HOOKS] = before_hooks
        state = shared.take(state)
        others: dict[tuple[Any, ...], Any] = {}
        plain = readable(state, others)
        of_users = {path: each for path, each in others.items() if may_have_users_objects(path)}
        of_lightning = {path: each for path, each in others.items() if path not in of_users}
        known = objects_of_module(self.trainer) if of_users else {}
        return plain, {
            "lightnings": self._record(of_lightning, {}),
            "users": self._record(of_users, known),
        }

    def _record(self, others: Mapping[tuple[Any, ...], Any], known: Mapping[str, Any]) -> Record:
        """Return a record of values by path.

        A run does not need its hyperparameters to resume: those that cannot be saved are left out.

        Args:
            others: The values.
            known: Objects of the module, by name: the program makes them again, and their state is
                saved with that of all the user's objects (parts/user_objects.py).

        Raises:
            UserError: A value cannot be saved.
        """
        try:
            return _encoded(others, known)
        except NotSaved:
            kept = {}
        for path, value in others.items():
            try:
                _encoded(value, known)
                kept[path] = value
            except NotSaved as error:
                if not str(path[0]).startswith(lightning_checkpoints.HYPERPARAMETERS):
                    raise self._refusal(path, error) from None
        return _encoded(kept, known)

    def _warn_of_different_models(self, ranks: Sequence["OfRank"], size: int) -> None:
        """Warn, once, if the ranks do not train one model.

        Args:
            ranks: What the ranks have.
            size: Bytes of the models of the other ranks.
        """
        first = ranks[0]
        for rank, other in enumerate(ranks):
            names = [name for name in first.sums if other.sums.get(name) != first.sums[name]]
            weights = [name for name in names if not name.startswith(OPTIMIZERS)]
            if other.rates != first.rates:
                what = (
                    f"the learning rates are {_formatted(first.rates)} on rank 0 and "
                    f"{_formatted(other.rates)} on rank {rank}"
                )
                why = (
                    "learning rates may be set from values that all ranks have, such as "
                    "self.log(..., sync_dist=True)"
                )
            elif names:
                of_what = f"weights {first_of(weights)}" if weights else "states of the optimizers"
                what = f"the {of_what} differ on rank 0 and rank {rank}"
                why = (
                    "DDP does not average gradients of parameters that were frozen at the start, "
                    "that it ignores, or that no_sync() leaves out"
                )
            else:
                continue
            outcome = (
                "an interrupted run continues with those of each rank, and the models that are "
                "saved for use are rank 0's"
                if size <= MOST_OF_RANKS
                else f"after an interruption this run is not exact, as {size:,} bytes of the other "
                "ranks are too many for a checkpoint"
            )
            if not self.has_warned_of_ranks and self.trainer.is_global_zero:
                log.warning(f"{what}, so the ranks do not train one model: {outcome}; {why}")
            self.has_warned_of_ranks = True

    def _refusal(self, path: tuple[Any, ...], error: NotSaved) -> UserError:
        """Return the error for an object that cannot be saved.

        Args:
            path: Where the value is in the checkpoint.
            error: Names the object and where it is in the value.
        """
        model_name = class_name(type(self.trainer.lightning_module))
        owners = {
            "state_dict": "state_dict() of",
            "callbacks": "a callback of",
            SCHEDULERS: "a scheduler of",
            OPTIMIZER_STATES: "an optimizer of",
        }
        owner = owners.get(path[0], "on_save_checkpoint() or state_dict() of")
        where = f"{'.'.join(map(str, path))}{error.path}"
        return UserError(
            f"a checkpoint of this run could not be read again: {where} is "
            f"{with_article(error.kind)} ({owner} {model_name}); keep numbers, text, tensors, "
            "arrays, lists and dicts there"
        )


def may_have_users_objects(path: tuple[Any, ...]) -> bool:
    """Return whether a value of a checkpoint may be an object that the program's module has.

    A schedule that keeps the model has it in its state, by torch's own `state_dict`.

    Args:
        path: The path of the value; its first element is the entry's key.
    """
    return path[0] not in LIGHTNING_KEYS or path[0] == SCHEDULERS


class OfRank(NamedTuple):
    """What a rank has of what all ranks have alike, unless they do not train one model."""

    others: bytes
    """A digest of Lightning's other entries, which may be each rank's own."""
    rates: list[float]
    """The learning rates."""
    sums: dict[str, int]
    """What `sums_of_bits` returns of the weights and the optimizers."""


def trained_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the model's weights and the states of its optimizers, by name.

    An optimizer whose states the ranks share has another part of them on each.
    """
    found = {
        name: parameter.detach() for name, parameter in named_parameters(trainer.lightning_module)
    }
    for number, optimizer in enumerate(trainer.optimizers):
        if hasattr(optimizer, "consolidate_state_dict"):
            continue
        trained = (weight for group in optimizer.param_groups for weight in group["params"])
        for position, weight in enumerate(trained):
            for key, value in optimizer.state.get(weight, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{OPTIMIZERS}{number}.{position}.{key}"] = value.detach()
    return found


def sums_of_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return a sum of the bits of each tensor, by name: equal ones have equal sums.

    Unlike a sum of the values, it is the same on each machine.
    """
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if has_values(tensor) and tensor.layout == torch.strided and tensor.itemsize in BITS:
            is_whole = tensor.is_contiguous() and tensor.nbytes % 8 == 0  # a twelfth of the time
            numbers = tensor.view(-1).view(torch.int64) if is_whole else tensor
            bits = numbers.view(BITS[numbers.itemsize]).sum(dtype=torch.int64)
            by_device.setdefault(tensor.device, {})[name] = bits
    return {
        name: number
        for sums in by_device.values()  # a device is waited for once
        for name, number in zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)
    }


def _encoded(value: Any, known: Mapping[str, Any]) -> Record:
    """Return a record of a value without DTensors, as all ranks have one of rank 0's."""
    record = values.encode(value, known)
    if "shared" in record:
        raise NotSaved("DTensor in an object of its own")
    return record


def _formatted(rates: list[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))
