"""Makes N ranks act as one machine: same settings, fair gradients, scaled rates.

All ranks compare their settings before training. Each sample has the same weight in the gradient.
The learning rate is scaled as N ranks need it.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from sagemaker_lightning.callbacks.gradient_weighting import (
    GradientWeighting,
    share_of_batch,
    weight_gradients,
)
from sagemaker_lightning.callbacks.lr_scaling import LearningRateScaling, scale_rates
from sagemaker_lightning.compat.lightning_loaders import flattened
from sagemaker_lightning.compat.lightning_trainer import callbacks_of, data_module_of, ddp_arguments
from sagemaker_lightning.compat.model_parallel import data_ranks
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.job_summary import masked
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.settings import differences
from sagemaker_lightning.data.batch_order import Batches
from sagemaker_lightning.data.deterministic import divided
from sagemaker_lightning.data.gather import gather

REMEDY = {
    "world size": "give all hosts the same --trainer.num_nodes and --trainer.devices",
    "hosts": "start all hosts as one job",
    "program version": "start all hosts from the same image",
    "dataset fingerprint": "give all hosts the same files, or the channel as ShardedByS3Key",
    "batches of an epoch": (
        "give all hosts as many samples, or set --trainer.limit_train_batches to a number all have"
    ),
}


class RankConsistency(Callback):
    """Makes several ranks train as one process would; does nothing with one rank.

    It does three things. Before the first step, all ranks compare their settings; a contradiction
    raises UserError on each of them. With loaders that ExactResume or Seeding shares out: if some
    ranks have one sample more than others in a batch, the gradient is the one that one process
    would compute, provided that the loss is the mean over a rank's samples. The learning rate is
    scaled with the number of ranks.

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[RankConsistency()])

    ExactResume has one of its own.

    Args:
        environment: What SageMaker has set on this host; None to read its variables.
        settings: What must be the same on all ranks, by name, as this rank has it.
        lr_scaling: What multiplies the learning rate: "none" (1), "linear" (world size) or "sqrt"
            (its square root).
        other_rate: Whether a resumed run takes its learning rate from its flags, not from the
            checkpoint.
    """

    state_key = "sagemaker_lightning.rank_consistency"  # its name in checkpoints, for ever

    def __init__(
        self,
        environment: SageMakerEnvironment | None = None,
        settings: Mapping[str, object] = MappingProxyType({}),
        lr_scaling: str = "none",
        other_rate: bool = False,
    ) -> None:
        self.other_rate = other_rate
        self.environment = environment or SageMakerEnvironment.read()
        self.settings = dict(settings)
        self.scaling = LearningRateScaling(lr_scaling)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the factor, and set DDP's arguments before it is made.

        Gradients are exchanged in place and in one order.

        Raises:
            UserError: The trainer has a callback that does a part of the same.
        """
        for callback in callbacks_of(trainer):
            if isinstance(callback, (GradientWeighting, LearningRateScaling)):
                raise UserError(
                    f"Trainer(callbacks=...): found {type(callback).__name__}, which "
                    "RankConsistency and ExactResume do themselves (lr_scaling=... is theirs, "
                    "too); leave it out"
                )
        self.scaling.setup(trainer, pl_module, stage)
        if isinstance(trainer.strategy, DDPStrategy):
            arguments = ddp_arguments(trainer.strategy)
            if arguments.get("static_graph") and trainer.is_global_zero:
                _warn_of_static_graph(trainer)
            if trainer.world_size > 2:
                # DDP reorders its buckets after the first step. A resumed run would add the
                # gradients of its own first step in another order. With two ranks, sums commute;
                # with more, the last bits differ.
                arguments.setdefault("find_unused_parameters", True)
            # It saves a copy of the gradients: two nodes were 1.42 instead of 1.38 times as fast as
            # one (benchmarks/scaling.py).
            arguments.setdefault("gradient_as_bucket_view", True)

    def state_dict(self) -> dict[str, Any]:
        """Return the factor that the checkpoint's learning rates contain."""
        return {"lr_factor": self.scaling.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore that factor.

        Lightning restores the optimizers themselves after on_fit_start.
        """
        self.scaling.load_state_dict({"factor": state_dict["lr_factor"]})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the settings of all ranks; raise UserError if two contradict."""
        self.initial_rates = _initial_rates(trainer)  # before Lightning restores the optimizers
        if trainer.world_size > 1:
            self._agree(self._settings_to_compare(trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the lengths of an epoch, scale the learning rates, and log that."""
        ranks = trainer.world_size
        _warn_of_a_batch_larger_than_the_data(trainer)
        _warn_of_shards_divided_again(trainer, self.environment)
        # A rank with one batch more would wait in it for the others' gradients for ever.
        if ranks > 1:
            self._agree({"batches of an epoch": trainer.num_training_batches})
        if self.other_rate:
            self._apply_rates_of_flags(trainer)
        rates_before = _rates(trainer, 1 / self.scaling.factor)
        self.scaling.on_train_start(trainer, pl_module)
        if ranks > 1 and trainer.is_global_zero:
            loader = trainer.train_dataloader
            accumulated = trainer.accumulate_grad_batches
            batch_size = getattr(loader, "batch_size", None) or getattr(
                data_module_of(trainer), "batch_size", None
            )
            shares = data_ranks(trainer)  # the ranks of tensor parallelism have the same samples
            of_ranks = f"{ranks} ranks" if shares == ranks else f"{shares} shares of {ranks} ranks"
            log.info(
                f"world_size={ranks} hosts={len(self.environment.hosts)} "
                f"lr_scaling={self.scaling.rule} lr={rates_before} -> {_rates(trainer)} "
                "effective_batch_size="
                f"{batch_size * shares * accumulated if batch_size else 'unknown'} "
                f"({batch_size or 'unknown'} x {of_ranks} x {accumulated} accumulated)"
            )

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Weight this rank's gradient by its share of the batch.

        DDP takes the mean over the ranks.
        """
        if trainer.world_size > 1:
            weight_gradients(loss, share_of_batch(trainer))

    def _apply_rates_of_flags(self, trainer: Trainer) -> None:
        """Scale the restored learning rates to the initial ones that the flags give.

        UserError if the optimizers' rates differ by several factors.
        """
        restored = _initial_rates(trainer)
        factors = [
            wanted * self.scaling.factor / restored_rate
            for wanted, restored_rate in zip(self.initial_rates, restored, strict=True)
            if restored_rate
        ]
        if factors and not math.isclose(min(factors), max(factors)):
            raise UserError(
                "--resume.other_settings: found learning rates that have changed by different "
                f"factors ({min(factors):g} to {max(factors):g}), expected one factor for all"
            )
        if factors and factors[0] != 1.0:
            scale_rates(trainer, factors[0])

    def _agree(self, settings: dict[str, object]) -> None:
        """Compare settings over all ranks; raise UserError if two contradict."""
        # Text only: hosts may have other versions of our classes.
        own_answer = (
            self.environment.current_host,
            _places(self.environment),
            {key: str(settings[key]) for key in settings},
        )
        refuse_contradictions(gather(own_answer))

    def _settings_to_compare(self, trainer: Trainer) -> dict[str, object]:
        """Return all that the ranks must agree on, by the user's name for it."""
        settings = {"world size": trainer.world_size, "hosts": ", ".join(self.environment.hosts)}
        settings |= {"program version": self.environment.revision} | dict(self.settings)
        fingerprint = getattr(data_module_of(trainer), "fingerprint", None)
        if fingerprint is not None and not getattr(data_module_of(trainer), "sharded", False):
            settings["dataset fingerprint"] = (
                fingerprint() if callable(fingerprint) else fingerprint
            )
        return settings


def _warn_of_a_batch_larger_than_the_data(trainer: Trainer) -> None:
    """Warn if an epoch is a single batch, smaller than the batch size asked for."""
    loader = divided(trainer.train_dataloader)
    epoch_plan = getattr(loader, "epoch_plan", None)  # None for a sampler without an end
    division = epoch_plan.division if epoch_plan else getattr(loader, "division", None)
    if division and division.batch_size * division.ranks > division.size and trainer.is_global_zero:
        log.warning(
            f"a batch size of {division.batch_size} on {division.ranks} rank(s) is more "
            f"than the {division.size} samples there are: each epoch is one step, with all of them"
        )


def _warn_of_shards_divided_again(trainer: Trainer, environment: SageMakerEnvironment) -> None:
    """Warn if hosts may have other samples and all ranks share the samples of a DataLoader.

    A host then trains only on the share of its own samples that its ranks get.
    """
    if len(environment.hosts) < 2 or not environment.sharded_channels:
        return
    shared = any(
        isinstance(batches := divided(loader), Batches) and batches.ranks > 1
        for loader in flattened(trainer.train_dataloader)
    )
    if shared and trainer.is_global_zero:
        channels = ", ".join(sorted(environment.sharded_channels))
        hosts = len(environment.hosts)
        log.warning(
            f"each host has other files of the channel {channels} (ShardedByS3Key), and "
            f"all {trainer.world_size} ranks share the samples of each DataLoader: in an epoch, a "
            f"host trains on about one in {hosts} of its own samples; give the channel as "
            "FullyReplicated, or the Trainer use_distributed_sampler=false and the DataLoader a "
            "sampler that shares a host's samples among its own ranks"
        )


def refuse_contradictions(answers: list[tuple[str, dict[str, str], dict[str, str]]]) -> None:
    """Raise UserError if two ranks contradict each other.

    A difference is not a contradiction if it comes from a host's name, or from a folder that
    SageMaker gave the host.

    Args:
        answers: Each rank's, in order: its host, the host's places, and its settings.
    """
    first_host, reference_places, reference = answers[0]
    for rank, (host, places, settings) in enumerate(answers):
        for key, reference_value, value in differences(reference, settings, missing="nothing"):
            if _without_places(reference_places, reference_value) != _without_places(places, value):
                raise UserError(
                    f"{key}: {first_host} (rank 0) has {masked(key, reference_value)}, {host} "
                    f"(rank {rank}) has {masked(key, value)}; "
                    f"{REMEDY.get(key, 'give all hosts the same flags')}"
                )


def _places(environment: SageMakerEnvironment) -> dict[str, str]:
    """Return the texts that settings may contain and that differ between hosts.

    They are the host's name and its folders, by what they mean.
    """
    places: dict[str, object] = {
        "training": environment.training_dir,
        "output": environment.output_data_dir,
    }
    places |= {"checkpoints": environment.checkpoint_dir, "host": environment.current_host}
    return {name: str(text) for name, text in places.items() if text}


def _without_places(places: Mapping[str, str], value: str) -> str:
    """Return a setting's value with the host's places replaced by their meaning."""
    # Longest first: a place may contain a shorter one.
    for name, text in sorted(places.items(), key=lambda place: -len(place[1])):
        value = value.replace(text, f"<{name}>")
    return value


def _initial_rates(trainer: Trainer) -> list[float]:
    """Return the learning rates that the optimizers' groups began with.

    A scheduler changes the current ones.
    """
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return [float(group.get("initial_lr", group["lr"])) for group in groups if "lr" in group]


def _rates(trainer: Trainer, factor: float = 1.0) -> str:
    """Return the distinct learning rates of all groups, times `factor`, as text."""
    rates = dict.fromkeys(f"{rate * factor:g}" for rate in learning_rates(trainer))
    return ",".join(rates) or "none"


def learning_rates(trainer: Trainer) -> list[float]:
    """Return the learning rate of each parameter group, of all optimizers."""
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return [float(group["lr"]) for group in groups if "lr" in group]


def _warn_of_static_graph(trainer: Trainer) -> None:
    """Warn of what cannot be resumed, or not exactly, with DDP's `static_graph`."""
    if trainer.world_size > 2:  # it reorders its buckets in any case
        log.warning(
            f"DDP with static_graph adds the gradients of {trainer.world_size} ranks in another "
            "order after the first step: after an interruption this run is not exact; leave it out"
        )
    if any(isinstance(each, GradientAccumulationScheduler) for each in callbacks_of(trainer)):
        # torch's reducer ends with an internal error ("expect_autograd_hooks_").
        log.warning(
            "DDP with static_graph has to exchange the gradients of the first batch of each start: "
            "this run cannot be resumed in an epoch in which a GradientAccumulationScheduler "
            "accumulates them; leave static_graph out"
        )
