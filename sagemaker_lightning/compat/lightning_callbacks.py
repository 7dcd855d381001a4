"""What Lightning's own callbacks keep in attributes, and do not save, or save and cannot load.

On an upgrade: compare callbacks/stochastic_weight_avg.py, pruning.py, lr_finder.py,
batch_size_finder.py and spike.py (pytorch_lightning), with utilities/spike.py (lightning_fabric):
which attributes say how far a callback has come, and what `state_dict` has of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from pytorch_lightning.callbacks.spike import SpikeDetection
from torch import nn

# `load_state_dict` looks for this metric by another name than `__init__` gives it (#21752, open):
# no run could go on.
SpikeDetection.running = property(lambda callback: callback.running_mean)


def searches(callback: Callback) -> bool:
    """Return whether a callback searches for a setting of the model before training."""
    return isinstance(callback, (LearningRateFinder, BatchSizeFinder))


def searched_attribute(callback: LearningRateFinder | BatchSizeFinder) -> str:
    """Return the name of the model's attribute that is searched for; "" for a usual one."""
    return (
        callback._attr_name
        if isinstance(callback, LearningRateFinder)
        else callback._batch_arg_name
    ) or ""


def pruned(callback: Callback) -> Iterator[tuple[int, nn.Module, nn.Module, str]]:
    """Yield the weights that a ModelPruning resets (the lottery ticket hypothesis).

    Each as its number among all that are pruned, the layer that is trained, the copy of it that is
    kept, and the name of the weight. Nothing of another callback. The state dict of the callback
    has none of them.
    """
    layers = (
        (getattr(callback, "_original_layers", None) or {})
        if isinstance(callback, ModelPruning)
        else {}
    )
    for layer in layers.values():
        for number, name in layer["names"]:
            yield number, callback._parameters_to_prune[number][0], layer["data"], name


@contextmanager
def pruned_as_it_is(trainer: Trainer) -> Iterator[None]:
    """Have ModelPruning save a state with its masks, which it leaves out for others.

    `make_pruning_permanent` is public as an argument only; `on_save_checkpoint` reads this
    attribute.
    """
    callbacks = [
        one
        for one in trainer.callbacks
        if isinstance(one, ModelPruning) and one._make_pruning_permanent
    ]
    for callback in callbacks:
        callback._make_pruning_permanent = False
    try:
        yield
    finally:
        for callback in callbacks:
            callback._make_pruning_permanent = True


def averages(callback: StochasticWeightAveraging) -> bool:
    """Return whether the callback was loaded from a checkpoint within its averaging."""
    return callback._scheduler_state is not None


def accumulate_as(callback: StochasticWeightAveraging, batches: int) -> None:
    """Set what the trainer gets back after the epoch of batch norm's statistics.

    The callback reads that from the trainer as that epoch begins, which a run that goes on within
    it has behind it.
    """
    callback._accumulate_grad_batches = batches


@contextmanager
def average_counts(callback: StochasticWeightAveraging, epoch: int) -> Iterator[None]:
    """Have `on_train_epoch_start` not average the weights of an epoch once more."""
    updated = callback._latest_update_epoch
    callback._latest_update_epoch = epoch
    yield
    callback._latest_update_epoch = updated
