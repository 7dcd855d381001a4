"""Weights that ModelPruning, or torch.nn.utils.prune, has pruned while training.

What pruning makes of a weight are a mask and the weight before it. A resumed run prunes again,
once its optimizers have their parameters. ModelPruning also keeps the first weights, to which it
may reset the model: Lightning 2.6 does not copy them if both are on one device, so that training
changes them, too.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from pytorch_lightning import Trainer
from torch import Tensor, nn
from torch.nn.utils import prune

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint

MASK = "_mask"
"""What torch.nn.utils.prune adds to a weight's name for its mask."""
ORIGINAL = "_orig"
"""What it adds for the weight before it was pruned."""


class SharedPrunedWeights(Part):
    """Which of the kept weights are the trained ones themselves."""

    key = "shared_pruned_weights"
    what = "which weights kept by ModelPruning are the trained ones"
    place = Place.RUN
    moments = (Moment.TRAINING,)

    def lightning_saves(self) -> AbstractContextManager[None]:
        """Return a context in which ModelPruning saves its masks, too."""
        return lightning_callbacks.saving_pruning_masks(self.trainer)

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> list[tuple[int, int]]:
        """Return (number of the callback, number of the layer) of each."""
        return [
            key
            for key, trained, original in _kept_weights(self.trainer)
            if original.data_ptr() == trained.data_ptr()
        ]

    def restore(self, saved: Any, moment: Moment) -> None:
        """Let these weights be the trained ones again."""
        for key, trained, original in _kept_weights(self.trainer):
            if key in saved:
                original.data = trained.data


def _kept_weights(trainer: Trainer) -> Iterator[tuple[tuple[int, int], Tensor, Tensor]]:
    """Yield the weights that ModelPruning keeps: key, trained weight and original weight."""
    for number, callback in enumerate(callbacks_of(trainer)):
        for layer_number, layer, original, name in lightning_callbacks.original_weights(callback):
            trained = getattr(layer, f"{name}{ORIGINAL}", None)
            if isinstance(trained, Tensor):
                yield (number, layer_number), trained, getattr(original, name)


def take(state: dict[str, Any], present: Collection[str]) -> dict[str, Any]:
    """Take the masks out of a state dict, and return what `prune_again` needs.

    Args:
        state: The saved state dict of the model; it is changed in place: weights are not pruned.
        present: The names that the model has now.
    """
    taken = {}
    for mask in _masks(state):
        if (weight := mask.removesuffix(MASK)) in present:
            taken[mask] = state.pop(mask)
            taken[f"{weight}{ORIGINAL}"] = state[weight] = state.pop(f"{weight}{ORIGINAL}")
    return taken


def prune_again(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Prune the weights for which `state` has masks.

    Args:
        model: The model; it is changed in place.
        state: A state dict with masks, as torch.nn.utils.prune names them.
    """
    present = model.state_dict()
    for name in _masks(state):
        if name not in present:
            path, _, last = name.removesuffix(MASK).rpartition(".")
            owner = model.get_submodule(path)
            prune.custom_from_mask(owner, last, state[name].to(getattr(owner, last).device))


def _masks(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the masks of pruned weights."""
    return [
        name
        for name in state
        if name.endswith(MASK) and f"{name.removesuffix(MASK)}{ORIGINAL}" in state
    ]


def without(node: list[Any]) -> list[Any]:
    """Return a record's node of the start without what pruning makes of weights."""
    kind, path, note, references, content = node
    pruned = members(note["names"]) if isinstance(note, dict) else set()
    if not pruned:
        return node
    names = note["names"]
    kept = [n for n, name in enumerate(names) if name not in pruned]
    note = note | {
        "names": [names[n] for n in kept],
        "gone": [name for name in note.get("gone", ()) if name not in pruned],
    }
    return [kind, path, note, [references[n] for n in kept] + references[len(names) :], content]


def members(names: Collection[str]) -> set[str]:
    """Return the names, as a record has them, of all that pruning makes of weights and replaces.

    Args:
        names: The names of members of a module that are not as at the start.
    """
    weights = [
        name.removeprefix("buffer ").removesuffix(MASK)
        for name in names
        if isinstance(name, str) and name.startswith("buffer ") and name.endswith(MASK)
    ]
    return {
        member
        for weight in weights
        if f"parameter {weight}{ORIGINAL}" in names
        for member in (
            f"buffer {weight}{MASK}",
            f"parameter {weight}{ORIGINAL}",
            f"parameter {weight}",
            weight,
        )
    }
