"""State of Lightning's own callbacks that they do not save, or cannot load; quicker calls of hooks.

On an upgrade: see in trainer/call.py what is done around each hook. Compare
callbacks/stochastic_weight_avg.py, pruning.py, lr_finder.py, batch_size_finder.py and spike.py
(pytorch_lightning), with utilities/spike.py (lightning_fabric): which attributes say how far a
callback has come, and which of them `state_dict` contains.
"""

import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from pytorch_lightning.callbacks.spike import SpikeDetection
from pytorch_lightning.loops import training_epoch_loop
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer import call
from pytorch_lightning.tuner.lr_finder import _LRFinder
from torch import nn
from torch.optim.swa_utils import SWALR

from sagemaker_lightning.compat.lightning_trainer import SET_ON_CALLBACKS, callbacks_of

# `load_state_dict` looks for this metric by another name than `__init__` gives it (#21752, open):
# no run could be resumed.
SpikeDetection.running = property(  # type: ignore[attr-defined]  # added on purpose
    lambda callback: callback.running_mean
)

HOOKS_OF_A_BATCH = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
)
"""Hooks that do nothing in Lightning's own base classes, and are called for each batch."""
EMPTY_HOOKS = {
    name: tuple(
        getattr(base, name) for base in (Callback, LightningModule, Strategy) if name in dir(base)
    )
    for name in HOOKS_OF_A_BATCH
}
"""The functions of the base classes, by hook."""


def _does_nothing(function: Any, hook: str) -> bool:
    """Return whether an object's hook is the empty one of Lightning's base class."""
    return getattr(function, "__func__", None) in EMPTY_HOOKS[hook]


@contextmanager
def calling_hooks_directly() -> Iterator[None]:
    """Have Lightning call hooks with nothing around them, and none of a batch that does nothing.

    Around each call, Lightning sets what the module's `log` needs through `nn.Module.__setattr__`,
    and asks the profiler to measure it: 5 to 10 us, for some 40 hooks in a step. It also reads the
    signature of `training_step` in each step: 25 us. With a profiler, or with debug messages of
    each call, all is as it was.
    """
    call_callbacks, call_module, call_strategy = (
        call._call_callback_hooks,
        call._call_lightning_module_hook,
        call._call_strategy_hook,
    )
    # Somebody else may have replaced them, such as to measure.
    are_lightnings = all(
        isinstance(function, types.FunctionType) and function.__code__.co_filename == call.__file__
        for function in (call_callbacks, call_module, call_strategy)
    )

    def direct(trainer: Trainer) -> bool:
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # Lightning sets it
        return (
            are_lightnings
            and type(profiler) is PassThroughProfiler
            and not call.log.isEnabledFor(logging.DEBUG)
        )

    def callbacks_hook(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> None:
        if hook_name not in EMPTY_HOOKS or not direct(trainer):
            call_callbacks(trainer, hook_name, *args, **kwargs)
            return
        module = trainer.lightning_module
        variables = vars(module)
        hook_before = module._current_fx_name
        for callback in callbacks_of(trainer):
            function = getattr(callback, hook_name)
            if callable(function) and not _does_nothing(function, hook_name):
                variables["_current_fx_name"] = hook_name
                function(trainer, module, *args, **kwargs)
        variables["_current_fx_name"] = hook_before

    def module_hook(
        trainer: Trainer,
        hook_name: str,
        *args: Any,
        pl_module: LightningModule | None = None,
        **kwargs: Any,
    ) -> Any:
        module = trainer.lightning_module if pl_module is None else pl_module
        if module is None or not direct(trainer):
            return call_module(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
        return _called(module, getattr(module, hook_name), hook_name, args, kwargs)

    def strategy_hook(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        if not direct(trainer):
            return call_strategy(trainer, hook_name, *args, **kwargs)
        function = getattr(trainer.strategy, hook_name)
        return _called(trainer.lightning_module, function, hook_name, args, kwargs)

    has_parameter = training_epoch_loop.is_param_in_hook_signature
    call._call_callback_hooks = callbacks_hook
    call._call_lightning_module_hook = module_hook
    call._call_strategy_hook = strategy_hook
    training_epoch_loop.is_param_in_hook_signature = _once_for_each_method(has_parameter)
    try:
        yield
    finally:
        call._call_callback_hooks = call_callbacks
        call._call_lightning_module_hook = call_module
        call._call_strategy_hook = call_strategy
        training_epoch_loop.is_param_in_hook_signature = has_parameter


def _called(
    module: LightningModule, function: Any, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a hook as Lightning does, unless it does nothing: `log` knows its name meanwhile."""
    if not callable(function) or (hook in EMPTY_HOOKS and _does_nothing(function, hook)):
        return None
    variables = vars(module)
    hook_before = module._current_fx_name
    variables["_current_fx_name"] = hook
    output = function(*args, **kwargs)
    variables["_current_fx_name"] = hook_before
    return output


def _once_for_each_method(has_parameter: Callable[..., bool]) -> Callable[..., bool]:
    """Return a function that reads the signature of a method once."""
    of_methods = functools.lru_cache(maxsize=8)(has_parameter)

    def known(hook: Callable[..., Any], *rest: Any, **options: Any) -> bool:
        is_method = isinstance(hook, types.MethodType)  # another callable may have no hash
        return (of_methods if is_method else has_parameter)(hook, *rest, **options)

    return known


class EarlyCallback(Callback):
    """A callback that is called at the very beginning of a run, before Lightning opens any file.

    Lightning's first hook, `setup`, comes after the loggers have opened their files, and after the
    list of callbacks is fixed for it. But when a run begins, Lightning gives each callback the
    module's `log` and `log_dict`, so that a callback can log.

    On an upgrade: see `_attach_model_logging_functions` in
    trainer/connectors/callback_connector.py, and what `Trainer._run` does before it.
    """

    def run_begins(self, trainer: Trainer) -> None:
        """Be called before the processes know each other; to be overridden."""

    @property
    def log(self) -> Callable[..., Any]:
        """The module's `log`."""
        return self.modules_log

    @log.setter
    def log(self, modules_log: Callable[..., Any]) -> None:
        self.modules_log = modules_log
        module: Any = getattr(modules_log, "__self__", None)
        self.run_begins(module.trainer)


def is_search_only(trainer: Trainer) -> bool:
    """Return whether this is the run of a Tuner.

    It ends after the search, and nothing is trained.
    """
    return any(is_search(callback) and callback._early_exit for callback in callbacks_of(trainer))


def without_lightnings(states: Mapping[str, Any], model: LightningModule) -> dict[str, Any]:
    """Return the states of callbacks without what Lightning has put into their attributes.

    A callback whose state is all of its attributes has methods of the module's there.

    Args:
        states: The states by the callbacks' state keys.
        model: The model.
    """
    put = [getattr(model, name) for name in SET_ON_CALLBACKS]
    return {
        key: {
            name: value
            for name, value in state.items()
            if type(value) is not types.MethodType or value not in put
        }
        if type(state) is dict
        else state
        for key, state in states.items()
    }


def is_search(callback: Callback) -> TypeGuard[LearningRateFinder | BatchSizeFinder]:
    """Return whether a callback searches for a setting of the model before training."""
    return isinstance(callback, (LearningRateFinder, BatchSizeFinder))


def searched_attribute(callback: LearningRateFinder | BatchSizeFinder) -> str:
    """Return the name of the model's attribute that is searched for.

    It is "" if a LearningRateFinder searches for one of the usual names.
    """
    return (
        callback._attr_name
        if isinstance(callback, LearningRateFinder)
        else callback._batch_arg_name
    ) or ""


def found_by_search(callback: LearningRateFinder | BatchSizeFinder) -> dict[str, Any]:
    """Return what a callback's search has found, besides the model's attribute; {} for nothing."""
    if isinstance(callback, BatchSizeFinder):
        return {"optimal_batch_size": callback.optimal_batch_size}
    return {} if callback.optimal_lr is None else {**vars(callback.optimal_lr)}


def set_found_by_search(
    callback: LearningRateFinder | BatchSizeFinder, found: Mapping[str, Any]
) -> None:
    """Give a callback what `found_by_search` has returned, as far as it is that."""
    if isinstance(callback, BatchSizeFinder):
        size = found.get("optimal_batch_size")
        callback.optimal_batch_size = size if type(size) is int else None
        return
    settings = callback._mode, callback._min_lr, callback._max_lr, callback._num_training_steps
    finder = _LRFinder(*settings)
    names = vars(finder).keys() | {"_optimal_idx"}  # `suggestion` sets this one
    results = found.get("results")
    if isinstance(results, dict):
        vars(finder).update({name: found[name] for name in names & found.keys()})
        callback.optimal_lr = finder


def throughput_counts(callback: ThroughputMonitor) -> dict[str, dict[Any, int]]:
    """Return a monitor's counts by attribute; each is by stage, and may be changed."""
    return {
        "batches": getattr(callback, "_batches", {}),  # Lightning 2.5 counts them otherwise
        "samples": getattr(callback, "_samples", {}),
        "lengths": callback._lengths,
    }


def accepted_state(callback: Callback, state: dict[str, Any]) -> dict[str, Any]:
    """Return what a callback of Lightning's may load of a state in a checkpoint, which is input.

    A SpikeDetection would write to the file that the state names: it gets its own instead.
    StochasticWeightAveraging would set each attribute of its schedule that the state names.
    """
    if isinstance(callback, SpikeDetection):
        return state | {"bad_batches_path": callback.exclude_batches_path}
    schedule = state.get("scheduler_state")
    if isinstance(callback, StochasticWeightAveraging) and isinstance(schedule, dict):
        kept = {
            name: value
            for name, value in schedule.items()
            if name != "optimizer" and not hasattr(SWALR, name)
        }
        return state | {"scheduler_state": kept}
    return state


def original_weights(callback: Callback) -> Iterator[tuple[int, nn.Module, nn.Module, str]]:
    """Yield the weights that a ModelPruning resets (the lottery ticket hypothesis).

    For each: its number among all pruned weights, the layer that is trained, the copy of that layer
    that is kept, and the name of the weight. Nothing is yielded for another callback. The
    callback's state dict contains none of them.
    """
    if not isinstance(callback, ModelPruning):
        return
    layers = getattr(callback, "_original_layers", None) or {}
    for layer in layers.values():
        for number, name in layer["names"]:
            yield number, callback._parameters_to_prune[number][0], layer["data"], name


@contextmanager
def saving_pruning_masks(trainer: Trainer) -> Iterator[None]:
    """Make ModelPruning save its masks, which permanent pruning leaves out.

    `make_pruning_permanent` is public as an argument only; `on_save_checkpoint` reads this
    attribute.
    """
    callbacks = [
        callback
        for callback in callbacks_of(trainer)
        if isinstance(callback, ModelPruning) and callback._make_pruning_permanent
    ]
    for callback in callbacks:
        callback._make_pruning_permanent = False
    try:
        yield
    finally:
        for callback in callbacks:
            callback._make_pruning_permanent = True


def resumes_averaging(callback: StochasticWeightAveraging) -> bool:
    """Return whether the callback was loaded from a checkpoint within its averaging."""
    return callback._scheduler_state is not None


def leaves_gradients(callback: Callback, epoch: int) -> bool:
    """Return whether a callback may have an optimizer use the gradients that an epoch leaves.

    After its last epoch, StochasticWeightAveraging adds one that only gathers the statistics of
    batch norm. Lightning computes no gradients in it, removes none, and steps at its end.
    """
    return isinstance(callback, StochasticWeightAveraging) and callback.swa_end <= epoch


def set_accumulation(callback: StochasticWeightAveraging, batches: int) -> None:
    """Set the accumulation that the trainer gets after batch norm's epoch.

    That is the epoch in which the statistics of batch norm are updated.

    The callback reads it from the trainer when that epoch begins. A run that is resumed within that
    epoch is past that.
    """
    callback._accumulate_grad_batches = batches


@contextmanager
def weights_averaged_in(callback: StochasticWeightAveraging, epoch: int) -> Iterator[None]:
    """Keep `on_train_epoch_start` from averaging the weights of an epoch again."""
    epoch_before = callback._latest_update_epoch
    callback._latest_update_epoch = epoch
    try:
        yield
    finally:
        callback._latest_update_epoch = epoch_before
