"""What makes N ranks one big machine: they were told the same, weigh each sample alike, step as far as N should."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from app import schedule
from app.compat.lightning_trainer import ddp_arguments
from app.compat.torch_modules import LAST_RATES, inner_schedulers
from app.environment import Environment
from app.errors import UserError
from app.exact import divided
from app.summary import masked

# Every learning rate that an optimizer's group or a scheduler of torch.optim keeps, CyclicLR and SWALR included.
GROUP = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
SCHEDULER = ("base_lrs", LAST_RATES, "max_lrs", "min_lrs", "default_min_lr", "eta_min")

REMEDY = {
    "world size": "give all hosts the same --trainer.num_nodes and --trainer.devices",
    "hosts": "start all hosts as one job",
    "program version": "start all hosts from the same image",
    "dataset fingerprint": "give all hosts the same files, or the channel as ShardedByS3Key",
    "batches of an epoch": "give all hosts as many samples, or set --trainer.limit_train_batches to a number all have",
}


class World(Callback):
    """Does nothing with one rank; with more, three things.

    Before the first step, all ranks compare what they were told: a contradiction is a UserError on each of them.
    A batch of which some ranks have one sample more than others gets the gradient that one process would compute,
    where the loss is the mean over a rank's samples. The learning rate is scaled with the number of ranks.

    Args:
        environment: What this host was told by SageMaker.
        flags: All settings by flag, as this rank parsed them.
        lr_scaling: By what the learning rate is multiplied: "none", "linear" (world size) or "sqrt" (its square root).
        other_rate: Whether a run that is resumed takes its learning rate from its flags, not from the checkpoint.
    """

    def __init__(
        self, environment: Environment, flags: Mapping[str, object], lr_scaling: str = "none", other_rate: bool = False
    ) -> None:
        self.other_rate = other_rate
        self.environment, self.flags, self.lr_scaling = environment, flags, lr_scaling
        self.lr_factor = 1.0  # what the optimizers' learning rates have been multiplied by

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the trainer: optimizers that nothing was done to, gradients exchanged in place and in one order."""
        if stage == "fit":
            self.lr_factor = 1.0
        if isinstance(trainer.strategy, DDPStrategy):
            arguments = ddp_arguments(trainer.strategy)
            if trainer.world_size > 2:
                # DDP orders its buckets anew after the first step, so that a resumed run would add the gradients of its
                # own first step in another order: of two ranks, sums commute; of more, the last bits differ.
                arguments.setdefault("find_unused_parameters", True)
                if arguments.get("static_graph") and trainer.is_global_zero:  # then it does so in any case
                    print(
                        f"warning: DDP with static_graph adds the gradients of {trainer.world_size} ranks in another "
                        "order after the first step: once it is interrupted, this run is not exact; leave it out",
                        flush=True,
                    )
            # Without a copy of them: two nodes were 1.42 instead of 1.38 times as fast as one (benchmarks/scaling.py).
            arguments.setdefault("gradient_as_bucket_view", True)

    def state_dict(self) -> dict[str, Any]:
        """Say in a checkpoint by what the learning rates in it have been multiplied."""
        return {"lr_factor": self.lr_factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Learn it from a checkpoint, whose optimizers Lightning restores after on_fit_start."""
        self.lr_factor = state_dict["lr_factor"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare what the ranks were told."""
        self.given = _initial_rates(trainer)  # before Lightning restores the optimizers
        if trainer.world_size > 1:
            self._agree(self._told(trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the lengths of an epoch, scale the learning rates, and say so in the log."""
        ranks = trainer.world_size
        _warn_of_a_batch_larger_than_the_data(trainer)
        if ranks > 1:  # a rank with a batch more would wait in it for the others' gradients, for ever
            self._agree({"batches of an epoch": trainer.num_training_batches})
        factor = {"none": 1.0, "linear": float(ranks), "sqrt": math.sqrt(ranks)}[self.lr_scaling]
        if self.other_rate:
            self._take_given_rates(trainer)
        before = _rates(trainer, 1 / self.lr_factor)
        if factor != self.lr_factor:  # else it comes from a checkpoint, and stays as it is to the last bit
            scale(trainer, factor / self.lr_factor)
            self.lr_factor = factor
        if ranks > 1 and trainer.is_global_zero:
            loader, each = trainer.train_dataloader, trainer.accumulate_grad_batches
            size = getattr(loader, "batch_size", None) or getattr(trainer.datamodule, "batch_size", None)
            print(
                f"world_size={ranks} hosts={len(self.environment.hosts)} lr_scaling={self.lr_scaling} "
                f"lr={before} -> {_rates(trainer)} effective_batch_size={size * ranks * each if size else 'unknown'} "
                f"({size or 'unknown'} x {ranks} ranks x {each} accumulated)",
                flush=True,
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Weigh this rank's gradient by its share of the batch, as DDP takes the mean over the ranks."""
        loader = divided(trainer.train_dataloader)
        if trainer.world_size == 1 or loader is None or not loss.requires_grad:
            return
        sizes = loader.sizes(trainer.current_epoch, trainer.fit_loop.batch_idx)
        if len(sizes) != trainer.world_size:
            return  # a sampler of the user's own shares the data out: its slices are known to nobody
        weight = sizes[trainer.global_rank] * len(sizes) / sum(sizes)
        if weight != 1:
            loss.register_hook(lambda gradient: gradient * weight)

    def _take_given_rates(self, trainer: Trainer) -> None:
        """Multiply the restored learning rates by what makes their initial ones those of the flags."""
        restored = _initial_rates(trainer)
        factors = [new * self.lr_factor / old for new, old in zip(self.given, restored, strict=True) if old]
        if factors and not math.isclose(min(factors), max(factors)):
            raise UserError(
                "--resume.other_settings: the learning rates of the optimizers are other ones by several factors "
                f"({min(factors):g} to {max(factors):g}), allowed is one for all"
            )
        if factors and factors[0] != 1.0:
            scale(trainer, factors[0])

    def _agree(self, told: dict[str, object]) -> None:
        """Compare `told` over all ranks."""
        everyone: list = [None] * torch.distributed.get_world_size()
        # Text only: hosts may have other versions of our classes.
        own = self.environment.current_host, _places(self.environment), {key: str(told[key]) for key in told}
        torch.distributed.all_gather_object(everyone, own)
        compare(everyone)

    def _told(self, trainer: Trainer) -> dict[str, object]:
        """Return all that the ranks must agree on, by what a user would call it."""
        told = {"world size": trainer.world_size, "hosts": ", ".join(self.environment.hosts)}
        told |= {"program version": self.environment.revision} | self.flags
        fingerprint = getattr(trainer.datamodule, "fingerprint", None)
        if fingerprint is not None and not getattr(trainer.datamodule, "sharded", False):
            told["dataset fingerprint"] = fingerprint() if callable(fingerprint) else fingerprint
        return told


def _warn_of_a_batch_larger_than_the_data(trainer: Trainer) -> None:
    """Say so where an epoch is a single batch, smaller than what was asked for."""
    loader = divided(trainer.train_dataloader)
    course = getattr(loader, "course", None)  # of a sampler without an end there is none
    division = course.division if course else getattr(loader, "division", None)
    if division and division.batch_size * division.ranks > division.size and trainer.is_global_zero:
        print(
            f"warning: a batch size of {division.batch_size} on {division.ranks} rank(s) is more than the "
            f"{division.size} samples there are: each epoch is one step, with all of them",
            flush=True,
        )


def compare(everyone: list[tuple[str, dict[str, str], dict[str, str]]]) -> None:
    """Raise UserError if two of the ranks contradict each other; each says its host, places, and what it was told.

    What differs because it names the host, or a folder that SageMaker gave it, is no contradiction.
    """
    first, reference_places, reference = everyone[0]
    for rank, (host, places, told) in enumerate(everyone):
        for key in reference | told:
            here, there = reference.get(key, "nothing"), told.get(key, "nothing")
            if here != there and _without(reference_places, here) != _without(places, there):
                raise UserError(
                    f"{key}: {first} (rank 0) has {masked(key, here)}, {host} (rank {rank}) has {masked(key, there)}; "
                    f"{REMEDY.get(key, 'give all hosts the same flags')}"
                )


def _places(environment: Environment) -> dict[str, str]:
    """Return what a setting may rightly contain that is another text on each host: its names, by what it means."""
    places = {"training": environment.training_dir, "output": environment.output_data_dir}
    places |= {"checkpoints": environment.checkpoint_dir, "host": environment.current_host}
    return {name: str(text) for name, text in places.items() if text}


def _without(places: Mapping[str, str], value: str) -> str:
    """Return a setting's value with the names of a host's places taken out."""
    for name, text in sorted(places.items(), key=lambda place: -len(place[1])):  # one may contain a shorter one
        value = value.replace(text, f"<{name}>")
    return value


def scale(trainer: Trainer, factor: float) -> None:
    """Multiply by `factor` every learning rate of the trainer's optimizers and schedulers, nested ones included."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group.update({key: group[key] * factor for key in GROUP if key in group})
    for scheduler in _schedulers(config.scheduler for config in trainer.lr_scheduler_configs):
        for name, value in vars(scheduler).items():
            if name in SCHEDULER and value is not None:
                scaled = [rate * factor for rate in value] if isinstance(value, list) else value * factor
                setattr(scheduler, name, scaled)


def _schedulers(schedulers) -> Iterator[object]:
    """Yield schedulers and, of SequentialLR and ChainedScheduler, those that they are made of."""
    for scheduler in schedulers:
        yield scheduler
        yield from _schedulers(inner_schedulers(scheduler))


def _initial_rates(trainer: Trainer) -> list[float]:
    """Return the learning rates that the optimizers' groups began with; a scheduler changes them."""
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return [float(group.get("initial_lr", group["lr"])) for group in groups if "lr" in group]


def _rates(trainer: Trainer, factor: float = 1.0) -> str:
    """Return the learning rates of all groups of parameters, times `factor`, each one once."""
    return ",".join(dict.fromkeys(f"{rate * factor:g}" for rate in schedule.rates(trainer))) or "none"
