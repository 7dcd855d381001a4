"""The optimizers' states: Lightning loads them; hooks at the start may change the groups again."""

import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from math import inf
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch import Tensor
from torch.optim import Optimizer

from sagemaker_lightning.compat import lightning_checkpoints
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.parts.part import (
    Moment,
    Part,
    Place,
    named_values,
    refusal,
    refusing,
)
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.graph.kinds.base import class_name

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run

FUSED_STATES = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
"""What the fused kernels of torch's optimizers read and write besides a parameter's gradient."""

LOADED = "param_groups", "state"
"""What an optimizer's `load_state_dict` makes again."""
MAX_REPEATED = 10**6
"""Steps of a schedule, at most, that are done again to learn whose error one is: half a minute."""
MAX_RATE = torch.finfo(torch.float32).max
"""The largest finite learning rate that a step of torch's optimizers can take."""


class Optimizers(Part):
    """The states of the optimizers, and the values of their parameter groups."""

    key = "optimizer_states"
    what = "the optimizers' states and learning rates"
    place = Place.LIGHTNING
    moments = (Moment.LOADING, Moment.OPTIMIZERS, Moment.TRAINING)

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.saved_groups: list[list[dict[str, Any]]] = []
        """The saved values of each optimizer's parameter groups, as `on_load_checkpoint` got."""
        self.saved_states: list[Mapping[str, Any]] = []
        """The saved states of the optimizers."""

    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the values of the groups, which hooks at the start of training may change.

        Before, have Lightning load the states into the groups that there are.
        """
        if moment is Moment.LOADING:
            self.saved_groups = [
                [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in state.get("param_groups", ())  # without an optimizer, it is empty
                ]
                for state in saved[self.key]
            ]
            # ZeroRedundancyOptimizer removes the states of other ranks' weights as it loads them.
            self.saved_states = [
                {**state, "state": dict(state["state"])} if "state" in state else state
                for state in saved[self.key]
            ]
        elif moment is Moment.OPTIMIZERS:
            lightning_checkpoints.load_optimizers_within(self.trainer, self._loading)
        elif self.run.same_run.has_same_rates:
            restore_group_values(self.trainer, self.saved_groups)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Let Lightning load the states in the block; optimizers keep their groups and states.

        Raises:
            UserError: The states are not these optimizers'.
        """
        with refusing(self.run, self.resumed.file_name, self.key):
            with (
                keeping_defaults(self.trainer.optimizers),
                sharing_groups(holders_of_groups(self.run)),
            ):
                yield
            for optimizer, saved in zip(self.trainer.optimizers, self.saved_states, strict=False):
                undo_conversions(optimizer, saved)
            self.saved_states = []
            for optimizer in self.trainer.optimizers:
                check(optimizer)

    @contextmanager
    def first_steps(self) -> Iterator[None]:
        """Let a batch be trained on in the block.

        Raises:
            UserError: An optimizer's first step cannot continue from the loaded state.
        """
        try:
            yield
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            resumed = self.run.resumed
            steps = self.run.step - resumed.step if resumed else 0
            is_first = steps < len(self.trainer.optimizers)
            if not resumed or not is_first or not is_of_torchs_optimizer(error):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise refusal(self.run, resumed.file_name, self.key, reason) from error

    def present(self) -> dict[str, Any]:
        """Return the optimizers' states now."""
        strategy = self.trainer.strategy
        states = [strategy.optimizer_state(optimizer) for optimizer in self.trainer.optimizers]
        return {self.key: states}

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each value of the states."""
        return named_values(self.key, saved[self.key])

    def differing(self, before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
        """Return the names of the values that are missing or different now.

        Lightning gives the state of an optimizer that the ranks share to rank 0 alone.
        """
        elsewhere = tuple(
            f"{self.key}.{number}."
            for number, optimizer in enumerate(self.trainer.optimizers)
            if self.trainer.global_rank and hasattr(optimizer, "consolidate_state_dict")
        )
        return [each for each in super().differing(before, now) if not each.startswith(elsewhere)]


class OptimizerClasses(Part):
    """The classes of the optimizers, which a program makes again as at its start."""

    key = "optimizer_classes"
    what = "the classes of the optimizers, to notice others that were put in their place"
    place = Place.RUN
    moments = (Moment.OPTIMIZERS,)

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.at_start: list[str] = []
        self.schedulers_at_start: list[str] = []
        self.reported: set[str] = set()

    def mark_start(self) -> None:
        """Note the classes of the optimizers that the program has made."""
        self.at_start = class_names(self.trainer.optimizers)
        self.schedulers_at_start = class_names(schedulers_of(self.trainer))

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> Any:
        """Return the classes; print, once, that they are others than at the start."""
        names = class_names(self.trainer.optimizers)
        if point:
            self._tell("optimizers", self.at_start, names, "cannot continue")
            schedulers = class_names(schedulers_of(self.trainer))
            self._tell("schedulers", self.schedulers_at_start, schedulers, "has other rates")
        return names

    def _tell(self, what: str, at_start: list[str], names: list[str], effect: str) -> None:
        """Print, once, that there are others than at the start."""
        if names != at_start and what not in self.reported:
            self.reported.add(what)
            if self.trainer.is_global_zero:
                log.warning(
                    f"the {what} were replaced while training ({', '.join(at_start)} by "
                    f"{', '.join(names)}), and a resumed run creates the original ones: after an "
                    f"interruption this run {effect}; return them from configure_optimizers()"
                )

    def restore(self, saved: Any, moment: Moment) -> None:
        """Refuse states of other optimizers.

        Raises:
            UserError: They were replaced while training.
        """
        names = class_names(self.trainer.optimizers)
        if names != saved:
            found = ", ".join(map(str, saved))
            raise UserError(
                f"{self.run.folder.label}: {self.resumed.file_name}: found states of the "
                f"optimizers {printable(found)[:200]}, expected {', '.join(names)}, as "
                "configure_optimizers() returns them; return those from it that training continues "
                "with, or move the checkpoints away to start over"
            )


def class_names(objects: Iterable[Any]) -> list[str]:
    """Return the name of the class of each object."""
    return [class_name(type(object_)) for object_ in objects]


def schedulers_of(trainer: Trainer) -> list[Any]:
    """Return the schedulers of learning rates that Lightning steps.

    Those that its StochasticWeightAveraging puts in their place are its own to put there again.
    """
    if any(isinstance(each, StochasticWeightAveraging) for each in callbacks_of(trainer)):
        return []
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def made_anew(trainer: Trainer) -> list[Any]:
    """Return schedulers as the program makes them at its start; the trainer keeps those it has."""
    strategy = trainer.strategy
    kept = strategy.optimizers, strategy.lr_scheduler_configs
    try:
        strategy.setup_optimizers(trainer)
        return [config.scheduler for config in strategy.lr_scheduler_configs]
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = kept


class Schedulers(Part):
    """The states of the learning-rate schedulers."""

    key = "lr_schedulers"
    what = "the schedulers' states"
    place = Place.LIGHTNING
    moments = (Moment.OPTIMIZERS,)

    def restore(self, saved: Any, moment: Moment) -> None:
        """Have Lightning load the states, or raise UserError for those that it cannot load."""
        what = lightning_checkpoints.Loads.SCHEDULERS
        lightning_checkpoints.load_within(self.trainer, what, self.loading)

    def loading(self) -> AbstractContextManager[None]:
        """Let the states be loaded in the block, or raise UserError."""
        return refusing(self.run, self.resumed.file_name, self.key)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Let the schedulers set the next rates in the block.

        Raises:
            UserError: A scheduler of torch's cannot continue from the loaded state.
        """
        file_name = self.resumed.file_name
        try:
            yield
        except (UserError, MemoryError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if not is_of_torchs_optimizer(error) or self._says_by_itself(reason):
                raise
            if not self.resumed.same_ranks:
                raise self._made_for_other_ranks(reason) from error
            raise refusal(self.run, file_name, self.key, reason) from error
        reason = rates_problem(self.trainer.optimizers)
        if reason and not self._says_by_itself(reason):
            raise refusal(self.run, file_name, self.key, reason)

    def _made_for_other_ranks(self, reason: str) -> UserError:
        """Return the error for a schedule that has fewer steps than the training has now."""
        return UserError(
            f"{self.run.folder.label}: a schedule cannot continue ({printable(reason)[:200]}): "
            f"{self.resumed.world_size} ranks saved {self.resumed.file_name}, now there are "
            f"{self.trainer.world_size}, and an epoch has another number of steps; continue with "
            "as many ranks, or with a batch size with which an epoch has as many steps as before"
        )

    def _says_by_itself(self, reason: str) -> bool:
        """Return whether the program's schedule comes to this without a checkpoint, too.

        Its schedulers are made again, and step as often: one whose steps are used up, such as a
        OneCycleLR, is the program's own error.

        Args:
            reason: An error of a step, or what is wrong with the rates that it has set.
        """
        steps = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if steps > MAX_REPEATED:
            return True
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")  # torch warns that no optimizer steps
            for scheduler in made_anew(self.trainer):
                for _ in range(steps):
                    said = ""
                    try:
                        scheduler.step()
                    except Exception as error:
                        said = f"{type(error).__name__}: {error}"
                    if reason in (said, rates_problem([scheduler.optimizer])):
                        return True
                    if said:
                        break
        return False

    def present(self) -> dict[str, Any]:
        """Return the schedulers' states now."""
        configs = self.trainer.lr_scheduler_configs
        return {self.key: [config.scheduler.state_dict() for config in configs]}

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each value of the states."""
        return named_values(self.key, saved[self.key])


def check(optimizer: Optimizer) -> None:
    """Raise an error if an optimizer has got a state that no training can continue from.

    All else is noticed by its next step. Fused kernels notice nothing: they would read and write
    what is beyond the memory of a state that is smaller than its parameter.
    """
    for group in optimizer.param_groups:
        float(group.get("lr", 0))
        for parameter in group["params"] if group.get("fused") else ():
            state = optimizer.state.get(parameter, {})
            for name in FUSED_STATES & state.keys():
                if isinstance(value := state[name], Tensor) and not fits(value, parameter):
                    raise ValueError(f"{name} is not a tensor of the shape {list(parameter.shape)}")


def undo_conversions(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimizer back what loading has made something else of.

    torch brings all tensors but `step` to their parameters' dtypes: of a float64 sum beside a
    float32 weight, half is lost. And it makes a generator of a str
    (torch.optim.Optimizer.load_state_dict).

    Args:
        optimizer: The optimizer, which has loaded its state.
        saved: The state, as `state_dict` returned it.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, entries in saved.get("state", {}).items():
        if type(number) is not int or number >= len(parameters):  # a sharded state has names
            continue
        state: dict[str, Any] = optimizer.state.get(parameters[number]) or {}
        for name, value in entries.items():
            loaded = state.get(name)
            if type(loaded) is type(value) is Tensor:
                if loaded.dtype != value.dtype and loaded.shape == value.shape:
                    state[name] = value.to(loaded.device, copy=True)
            elif type(value) is str and name in state:
                state[name] = value


def rates_problem(optimizers: Iterable[Optimizer]) -> str:
    """Return what is wrong with the learning rates of optimizers; "" if they can take them."""
    rates = (group.get("lr", 0) for optimizer in optimizers for group in optimizer.param_groups)
    return next((f"they set a learning rate to {rate}" for rate in rates if not is_rate(rate)), "")


def is_rate(value: Any) -> bool:
    """Return whether a value is a learning rate that an optimizer can take."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if not isinstance(value, Real):
        return False
    return not MAX_RATE < abs(value) < inf  # type: ignore[operator]  # Real has no types for it


def fits(value: Tensor, parameter: Tensor) -> bool:
    """Return whether a tensor has memory for each element of a parameter."""
    if value.shape != parameter.shape:
        return False
    end = int(value.storage_offset() + value.numel()) * value.itemsize
    # One of a class that wraps others, such as a sharded one, has no memory of its own.
    return type(value) is not Tensor or end <= value.untyped_storage().nbytes()


def is_of_torchs_optimizer(error: Exception) -> bool:
    """Return whether the code of an optimizer or scheduler of torch's has raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("torch.optim.")


def restore_group_values(
    trainer: Trainer, saved_groups: Sequence[Sequence[dict[str, Any]]]
) -> None:
    """Restore learning rates and other values of the optimizers' parameter groups.

    Args:
        trainer: Lightning's trainer.
        saved_groups: The saved values of each optimizer's parameter groups.
    """
    for optimizer, saved in zip(trainer.optimizers, saved_groups, strict=False):
        for group, values in zip(optimizer.param_groups, saved, strict=False):
            group.update(values)


@torch.no_grad()
def _in_place_of(before: Any, loaded: Any) -> Any:
    """Return a parameter's loaded state, in the tensors of the one that was there before, if any.

    The user's objects may have it under another name, and so the record of them: it has restored
    what shares memory with a weight, as SAM has it.
    """
    if isinstance(before, dict) and isinstance(loaded, dict):
        for name, value in loaded.items():
            kept = before.get(name)
            if (
                type(kept) is type(value) is Tensor
                and (kept.shape, kept.dtype, kept.device)
                == (value.shape, value.dtype, value.device)
                and not kept.requires_grad
                and 0 not in kept.stride()  # nothing can be written into an expanded one
            ):
                loaded[name] = kept.copy_(value)
    return loaded


@contextmanager
def keeping_defaults(optimizers: Iterable[Any]) -> Iterator[None]:
    """Let optimizers that load their states in the block keep their defaults.

    torch adds some as it loads (`Optimizer.__setstate__`), and a group that is added later would
    have more entries than in a run that was left alone.
    """
    kept = [(each.defaults, {*each.defaults}) for each in optimizers if isinstance(each, Optimizer)]
    yield
    for defaults, names in kept:
        for name in defaults.keys() - names:
            del defaults[name]


@contextmanager
def sharing_groups(objects: Iterable[Any]) -> Iterator[None]:
    """Let optimizers that load their states in the block keep their groups and states.

    `load_state_dict` makes new ones. A model may keep a group to change its values, and an
    optimizer that wraps another one, as SAM and Lookahead do, shares them: a schedule sets the
    rates of the one, and the other one steps. What has taken the new ones gets the first ones.

    Args:
        objects: The optimizers, and what may have taken their groups or states.
    """
    objects = list(objects)
    kept = [(each, _groups_and_state(each)) for each in objects]
    yield
    first_of: dict[int, tuple[Any, Any]] = {}
    """By its id, what was loaded, and what was there before."""
    for optimizer, first in kept:
        if (groups := first.get("param_groups")) is not None:
            loaded_groups = optimizer.param_groups
            for group, loaded in zip(groups, loaded_groups, strict=True):
                group.update({**loaded, "params": group["params"]})
                first_of[id(loaded)] = loaded, group
            first_of[id(loaded_groups)] = loaded_groups, groups
            optimizer.param_groups = groups
        if (state := first.get("state")) is not None and (loaded := optimizer.state) is not state:
            before = dict(state)
            state.clear()
            state.update(
                (owner, _in_place_of(before.get(owner), entries))
                for owner, entries in loaded.items()
            )
            first_of[id(loaded)] = loaded, state
            optimizer.state = state
    for holder in objects:
        variables = object_graph.namespace(holder)
        for name, value in list(variables.items()):
            if id(value) in first_of and isinstance(variables, dict):
                _, variables[name] = first_of[id(value)]


def holders_of_groups(run: "Run") -> list[Any]:
    """Return all objects that may have an optimizer's groups or state: it, and the user's."""
    return [*run.trainer.optimizers, *(each for _, each in run.reached(object))]


def _groups_and_state(owner: Any) -> dict[str, Any]:
    """Return what an optimizer has as attributes of its own, by name; {} of another object.

    A wrapper may have some as properties, and need not be of torch's class.
    """
    own = {name: each for name, each in object_graph.namespace(owner).items() if name in LOADED}
    is_wrapper = type(own.get("param_groups")) is list and hasattr(owner, "load_state_dict")
    return own if isinstance(owner, Optimizer) or is_wrapper else {}
