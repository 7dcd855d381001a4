"""The model's weights and buffers.

Lightning loads them. Before, the model gets what it had got while it was trained; after the hooks
that begin training, they are loaded again: in the interrupted run, these hooks ran before the
checkpoint, so that their effect is in it.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor, nn

from sagemaker_lightning.compat import lightning_checkpoints
from sagemaker_lightning.compat.dtensors import local_part
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.compat.model_parallel import reshard
from sagemaker_lightning.compat.torch_modules import (
    buffers,
    load_hooks,
    parameters,
    plain_name,
    rename_as_in,
    without_save_hooks,
)
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.parts import pruned_weights, start_hooks
from sagemaker_lightning.resume.parts.copies import has_values
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.parts.rank_buffers import RankBuffers
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.same_run.differences import first_of

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run

KEYS = "state_dict", "current_model_state", "averaging_state"
"""Entries of a checkpoint; the model may rightly have more or less of them than was saved."""

EXTRA_STATE = "_extra_state"
"""How the name ends by which a state dict has what `get_extra_state` returns
(torch/nn/modules/module.py)."""


class Weights(Part):
    """The model's state dict, pruned weights and those that hooks before training make."""

    key = "state_dict"
    what = "the model's weights and buffers"
    place = Place.LIGHTNING
    moments = (Moment.LOADING, Moment.TRAINING)

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.later: dict[str, Any] = {}
        """Weights of parts of the model that a hook creates."""
        self.trained: dict[str, Any] | None = None
        """The model's weights, if a hook of the user's has put others in the file."""
        self.at_start: dict[str, Tensor] | None = None
        """The weights and buffers that the program has made, until it has made its first data of
        them, by name: a model may have none. None if nothing more is made of them."""

    def restore(self, saved: Any, moment: Moment) -> None:
        """Prepare the model for its weights, or load them once more.

        Raises:
            UserError: The weights are not those of this model.
        """
        if moment is Moment.LOADING:
            if self.is_loaded_before_optimizers:
                self.at_start = values_of(self.trainer.lightning_module)
            # If a hook of the user's made those in the file, a hook of the user's reads them.
            loaded = [self.trained] if self.trained else [saved.get(key, {}) for key in KEYS]
            for weights in loaded:
                rename_as_in(self.trainer.lightning_module, weights)
            self._prepare(self.trained or saved["state_dict"])
        else:
            # Lightning's WeightAveraging saves its average as state_dict.
            own = saved.get("current_model_state", saved["state_dict"])
            self._load_again(self.trained or own)

    @property
    def is_loaded_before_optimizers(self) -> bool:
        """Whether Lightning loads the weights before it makes the optimizers."""
        return not self.trainer.strategy.restore_checkpoint_after_setup

    @contextmanager
    def first_weights(self) -> Iterator[None]:
        """Give the model its first weights while, within, the user's code makes things of them.

        Lightning has loaded the weights before. What `configure_optimizers` makes of them, such as
        a copy, or `train_dataloader`, such as a rollout, would be made of later ones than in the
        interrupted run.
        """
        if self.at_start is None:
            yield
            return
        reshard(self.trainer)  # a forward gathers them, such as a validation's before training
        model = self.trainer.lightning_module
        loaded = values_of(model)
        with self.run.part(UserObjects).grown.without_what_they_got():
            set_values(model, self.at_start)
            yield
            reshard(self.trainer)
        set_values(model, loaded)

    def forget_first_weights(self) -> None:
        """Let go of the first weights, of which nothing more is made."""
        self.at_start = None

    def _prepare(self, weights: dict[str, Any]) -> None:
        """Let the model have what the weights are of, before Lightning loads them.

        Args:
            weights: The saved state dict of the model; it is changed in place.
        """
        model = self.trainer.lightning_module
        self.run.part(UserObjects).restore_modules()
        to_come = start_hooks.names_in_start_hooks(self.trainer)
        self.later = take_later_weights(weights, model, to_come)
        resize_buffers(model, weights, self._keeps_forms)
        keep_removed(model, weights, self.run.part(UserObjects).removed_members())
        if loads_itself(self.trainer):
            return
        hooked = model.state_dict().keys()
        with without_save_hooks(model, start_hooks.is_of_library):
            loadable = model.state_dict()
        undo_save_hooks(weights, hooked, loadable)
        if other := other_weights(loadable.keys(), weights):
            raise UserError(
                f"{self.run.folder.label}: {self.resumed.file_name}: found {first_of(other)}; "
                "make what the model gets while it is trained in __init__() or configure_model(), "
                "or move the checkpoints away to start over"
            )

    def _load_again(self, weights: Mapping[str, Any]) -> None:
        """Load the weights, over what hooks at the start of training have set.

        Args:
            weights: The saved state dict of the model.
        """
        model = self.trainer.lightning_module
        state = {**weights, **self.later}
        pruned_weights.prune_again(model, self.later)
        resize_buffers(model, state, self._keeps_forms)
        if missing := self.later.keys() - model.state_dict().keys():
            raise UserError(
                f"{self.run.folder.label}: step {self.resumed.step} is of another run: its "
                f"model has {min(missing)}, this one does not; give another folder, or move the "
                "checkpoints away to start over"
            )
        with self.run.part(UserObjects).attributes_kept():
            model.load_state_dict(state, strict=False)
        self.later = {}
        self.trained = None

    @property
    def _keeps_forms(self) -> bool:
        """Whether weights have the dtypes and orders of axes that they were saved with.

        Training may change some; a run with other settings may have others on purpose.
        """
        return not self.run.same_run.other_settings

    def load_instead(self, weights: dict[str, Any]) -> None:
        """Load these weights; the user's `on_load_checkpoint` gets those of the file."""
        self.trained = weights
        lightning_checkpoints.load_weights(self.trainer, weights)

    def present(self) -> dict[str, Any]:
        """Return what Lightning would save now, with what its callbacks make of it.

        The user's code is not asked to save anything, because it may count how often it saves.
        """
        state = {"state_dict": self.trainer.strategy.lightning_module_state_dict()}
        for callback in callbacks_of(self.trainer):
            if lightning_checkpoints.is_lightnings(callback.on_save_checkpoint):
                callback.on_save_checkpoint(self.trainer, self.trainer.lightning_module, state)
        return state

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each weight and buffer, but for those of which this rank has its own.

        What a module's `get_extra_state` returns is rank 0's: the others have its attributes.
        """
        own = {name.removeprefix("model.") for name in others[RankBuffers.key]}
        is_first = self.trainer.is_global_zero
        return {
            f"{key}.{plain_name(name)}": value
            for key in KEYS
            for name, value in saved.get(key, {}).items()
            if plain_name(name) not in own and (is_first or not name.endswith(EXTRA_STATE))
        }

    def differing(self, before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
        """Return the names of what is there, and another one."""
        return [name for name, digest in before.items() if now.get(name, digest) != digest]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of what this rank has of a model's parameters and buffers, by name.

    Those without values, as of a model that is initialised on the meta device, are left out.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    parts = {name: local_part(each.detach()) for name, each in named if has_values(each)}
    return {name: part.clone() for name, part in parts.items() if not part.is_meta}


def set_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a model's parameters and buffers the values of those of the same name and shape."""
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        if (value := values.get(name)) is None:
            continue
        part = local_part(each.detach())
        # What is expanded takes no values, and has got no others.
        if value.shape == part.shape and (
            part.layout != torch.strided or not torch.equal(part, value.to(part))
        ):
            part.copy_(value)


def resize_buffers(model: nn.Module, state: Mapping[str, Any], exactly: bool = True) -> None:
    """Give the model weights and buffers of the saved forms, so that their values can be loaded.

    Buffers may have been added while the model was trained, and all may have changed their shape,
    their dtype, or the order of their axes in memory.

    Args:
        model: The model; it is changed in place.
        state: The saved state dict of the model.
        exactly: Whether they get the saved dtypes and orders, too.
    """
    present = model.state_dict()
    for name, value in state.items():
        path, _, last = name.rpartition(".")
        current = present.get(name)
        if not isinstance(value, Tensor) or (
            current is not None and (not has_values(current) or _is_alike(current, value, exactly))
        ):
            continue
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            continue
        if last in buffers(owner):
            buffers(owner)[last] = value.to(getattr(current, "device", "cpu"), copy=True)
        elif (parameter := parameters(owner).get(last)) is not None:
            parameter.data = value.to(parameter.device, copy=True)
        elif current is None and not hasattr(owner, last):
            owner.register_buffer(last, value.clone())


def _is_alike(tensor: Tensor, saved: Tensor, exactly: bool) -> bool:
    is_exact = tensor.dtype == saved.dtype and _order(tensor) == _order(saved)
    return tensor.shape == saved.shape and (is_exact or not exactly)


def _order(tensor: Tensor) -> list[int]:
    """Return the order in which a tensor's axes lie in memory: sums may follow it."""
    if tensor.layout != torch.strided:
        return []
    strides = tensor.stride()
    axes = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    return sorted(axes, key=lambda axis: -strides[axis])


def keep_removed(model: nn.Module, state: dict[str, Any], removed: set[str]) -> None:
    """Give a saved state dict what the model has of parts that it lost while it was trained.

    Args:
        model: The model that is going to load the state.
        state: The saved state dict of the model; it is changed in place.
        removed: The paths of these parts.
    """
    prefixes = tuple(f"{path}." for path in removed)
    for name, value in model.state_dict().items():
        if f"model.{plain_name(name)}.".startswith(prefixes):
            state.setdefault(name, value)


def loads_itself(trainer: Trainer) -> bool:
    """Return whether the user's code loads states itself: it may do so with others.

    A library's does so with those of its older versions.
    """
    model = trainer.lightning_module
    has_methods = not model.strict_loading or not all(
        start_hooks.is_of_library(function)
        for function in (
            *(
                getattr(type(module), name)
                for module in model.modules()
                for name in ("load_state_dict", "_load_from_state_dict")
            ),
            type(model).on_load_checkpoint,
            *(type(each).on_load_checkpoint for each in callbacks_of(trainer)),
        )
    )
    hooks = (hook for module in model.modules() for hook in load_hooks(module))
    return has_methods or not all(map(start_hooks.is_of_library, hooks))


def undo_save_hooks(
    state: dict[str, Any], hooked: Collection[str], loadable: Mapping[str, Any]
) -> None:
    """Give a saved state dict the names that the modules load, whatever hooks of the user's save.

    What hooks add, no module would load. What they leave out has its own part (rank_buffers.py).

    Args:
        state: The saved state dict; it is changed in place.
        hooked: The names of the model's state dict.
        loadable: The model's state dict without these hooks.
    """
    for name in (set(hooked) - loadable.keys()) & state.keys():
        del state[name]
    left_out = loadable.keys() - set(hooked) - state.keys()
    state |= {name: loadable[name] for name in left_out}


def other_weights(present: Collection[str], state: Mapping[str, Any]) -> list[str]:
    """Return what a saved state dict has that the model has not got, and the other way round.

    Args:
        present: The names that the model loads.
        state: The saved state dict of the model.
    """
    return [f"weights {name}, which the model lacks" for name in state if name not in present] + [
        f"no weights {name}, which the model has" for name in present if name not in state
    ]


def take_later_weights(state: dict[str, Any], model: nn.Module, names: set[str]) -> dict[str, Any]:
    """Remove from a state dict what the model does not have yet, and return it.

    These are the parts `names`, which hooks create, and what torch.nn.utils.prune makes of a
    weight: they are pruned again once the optimizers have their parameters.

    Args:
        state: The saved state dict of the model; it is changed in place.
        model: The model that is going to load the state.
        names: The names of the parts.
    """
    present = model.state_dict()
    taken = pruned_weights.take(state, present)
    later = [name for name in state if name not in present and name.partition(".")[0] in names]
    return taken | {name: state.pop(name) for name in later}
