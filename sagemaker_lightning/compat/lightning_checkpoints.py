"""How Lightning makes and loads checkpoints, and its callback for the best model.

`trainer.save_checkpoint` and `fit(ckpt_path=...)` are public and not enough. The first writes on
one rank only, and the state of every rank is needed. The second wants a path before the ranks can
agree on one, and it reads a file that has already been read and checked.

On an upgrade: compare trainer/connectors/checkpoint_connector.py (what `resume_start` leaves for
the methods that restore, and when it is called) and callbacks/model_checkpoint.py (who calls the
four methods below, and with what).
"""

import enum
import functools
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn

from sagemaker_lightning.compat.dtensors import local_part
from sagemaker_lightning.compat.lightning_trainer import (
    call_within,
    callbacks_of,
    data_module_of,
)
from sagemaker_lightning.contract.errors import UserError

HYPERPARAMETERS = (
    "hyper_parameters",
    "datamodule_hyper_parameters",
    "hparams",
    "datamodule_hparams",
)
"""How the keys begin of what a run does not need to resume."""


EMPTY_LOADING = {
    Callback.on_load_checkpoint,
    Callback.load_state_dict,
    LightningModule.on_load_checkpoint,
    LightningDataModule.load_state_dict,
}
"""The functions of Lightning's base classes, which load nothing."""


def is_lightnings(function: Any) -> bool:
    """Return whether a function or a method is Lightning's or this package's."""
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return package in ("pytorch_lightning", "lightning", "sagemaker_lightning")


class SaveHooks(NamedTuple):
    """The functions of the user's that add to a checkpoint: each its owner and its name."""

    read: list[tuple[Any, str]]
    """Those of which something may load what they save."""
    unread: list[tuple[Any, str]]


def save_hooks(trainer: Trainer) -> SaveHooks:
    """Return the user's functions that Lightning calls when it saves a checkpoint.

    They are `on_save_checkpoint` of the module and the callbacks, and `state_dict` of the callbacks
    and the data module. An `on_load_checkpoint` gets the whole checkpoint, and so reads all of it.
    """
    module = trainer.lightning_module
    with_hooks: list[Any] = [module, *callbacks_of(trainer)]
    data_module = data_module_of(trainer)
    with_state = [*callbacks_of(trainer), *[data_module] * (data_module is not None)]
    loads_all = any(not is_lightnings(owner.on_load_checkpoint) for owner in with_hooks)
    found = SaveHooks([], [])
    for owners, save, load in (
        (with_hooks, "on_save_checkpoint", "on_load_checkpoint"),
        (with_state, "state_dict", "load_state_dict"),
    ):
        for owner in owners:
            if not is_lightnings(getattr(owner, save)):
                loading = getattr(owner, load)
                is_read = loads_all or getattr(loading, "__func__", loading) not in EMPTY_LOADING
                (found.read if is_read else found.unread).append((owner, save))
    return found


@contextmanager
def _silenced(hooks: Iterable[tuple[Any, str]]) -> Iterator[None]:
    """Have Lightning not call some functions while the block lasts.

    The `state_dict` of a callback that is a module is called: the model may have it as a part.
    """
    own = [
        (vars(owner), name, vars(owner).get(name))
        for owner, name in hooks
        if not (name == "state_dict" and isinstance(owner, nn.Module))
    ]
    for variables, name, _ in own:
        variables[name] = _save_nothing
    try:
        yield
    finally:
        for variables, name, function in own:
            if function is None:
                del variables[name]
            else:
                variables[name] = function


def _save_nothing(*_: Any) -> dict[str, Any]:
    return {}


def state_of(
    trainer: Trainer, file: "OfFile | None" = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint, as Lightning makes it, and what its hooks have replaced.

    Only those of the user's hooks are called whose additions something may load: the others would
    run more often than with Lightning alone, for nobody. An `on_save_checkpoint` may change the
    file: put an average in the weights' place, drop the optimizers' states, or rename what it has.
    All ranks may call this.

    Args:
        trainer: Lightning's trainer.
        file: A file of Lightning's of the same moment, in place of the user's hooks.

    Returns:
        The checkpoint, and the values as they were before the hooks, by key.
    """
    hooks = save_hooks(trainer)
    with _silenced(hooks.unread + hooks.read if file else hooks.unread):
        checkpoint, before = _dumped(trainer, weights_only=False)
    replaced = {
        key: value
        for key, value in before.items()
        if not (_is_same(checkpoint.get(key), value) or _has_weights_twice(checkpoint, key))
    }
    if file:
        _add_users(checkpoint, replaced, file)
    return checkpoint, replaced


def _dumped(trainer: Trainer, weights_only: bool | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what Lightning would write, and what it was before the user's hooks."""
    connector = trainer._checkpoint_connector
    first = _BeforeHooks()
    callbacks_of(trainer).insert(0, first)
    try:
        return type(connector).dump_checkpoint(connector, weights_only), first.checkpoint
    finally:
        callbacks_of(trainer).remove(first)


BETWEEN = (
    "on_validation_end",
    "on_validation_model_train",
    "on_train_epoch_end",
    "lr_scheduler_step",
)
"""Hooks that run when, or after, Lightning writes a file that belongs to no batch."""


class OfFile(NamedTuple):
    """What Lightning has written to a file of its own."""

    moment: tuple[int, int]
    """The optimizer step and the number of batches."""
    checkpoint: dict[str, Any]
    before: dict[str, Any]
    """What it was before the user's hooks."""


class NewestFile:
    """The newest checkpoint that Lightning has made for a file, at a validation's or epoch's end.

    Another checkpoint of that moment has the same of the user's hooks, if none of their code runs
    in between.

    Args:
        trainer: Lightning's trainer; it notes its checkpoints here from now on.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.newest: OfFile | None = None
        trainer._checkpoint_connector.dump_checkpoint = self.dump  # type: ignore[method-assign]  # of this one

    def dump(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what Lightning would write, and note it."""
        checkpoint, before = _dumped(self.trainer, weights_only)
        is_alike = not weights_only and self.trainer.lightning_module._current_fx_name in BETWEEN
        self.newest = OfFile(self.moment, checkpoint, before) if is_alike else None
        return checkpoint

    @property
    def moment(self) -> tuple[int, int]:
        """The optimizer step and the number of batches now."""
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed
        return self.trainer.global_step, batches

    def take(self) -> OfFile | None:
        """Return it, once, if it has what the user's hooks would save now; else None."""
        newest, self.newest = self.newest, None
        if newest is None or newest.moment != self.moment:
            return None
        callbacks = callbacks_of(self.trainer)
        owners = (self.trainer.lightning_module, *callbacks)
        is_users = any(
            not is_lightnings(getattr(owner, name))
            for owner in owners
            for name in BETWEEN
            if hasattr(owner, name)
        )
        changes_itself = any(
            is_lightnings(callback.on_save_checkpoint)
            and type(callback).on_save_checkpoint is not Callback.on_save_checkpoint
            for callback in callbacks
        )
        return None if is_users or changes_itself else newest


def forget_files(trainer: Trainer) -> None:
    """Undo what a NewestFile has done to a trainer."""
    vars(trainer._checkpoint_connector).pop("dump_checkpoint", None)


def _add_users(checkpoint: dict[str, Any], replaced: dict[str, Any], file: OfFile) -> None:
    """Add to a checkpoint what the user's hooks have done to a file of the same moment.

    Args:
        checkpoint: The checkpoint, for which no hook of the user's was called.
        replaced: Gets the values that they have replaced, by key.
        file: The file.
    """
    states = file.before["callbacks"]
    checkpoint["callbacks"] = {**states, **checkpoint["callbacks"]}
    for key in file.before.keys() - checkpoint.keys():  # the data module's state
        checkpoint[key] = file.before[key]
    for key in file.before.keys() - file.checkpoint.keys():
        replaced[key] = checkpoint.pop(key)
    for key, value in file.checkpoint.items():
        if key not in file.before:
            checkpoint.setdefault(key, value)
        elif not _is_same(value, file.before[key]):
            replaced[key] = checkpoint[key]
            checkpoint[key] = value


class _BeforeHooks(Callback):
    """A callback whose hook comes before those of the user's, and keeps what they may change."""

    def __init__(self) -> None:
        self.checkpoint: dict[str, Any] = {}  # of weights alone, Lightning asks no callback

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what the checkpoint has."""
        self.checkpoint = {
            key: _shallow(value)
            for key, value in checkpoint.items()
            if not key.startswith(HYPERPARAMETERS)
        }


def _shallow(value: Any) -> Any:
    """Return a copy of dicts and lists, with the same values in them."""
    if type(value) in (dict, OrderedDict):
        return {key: _shallow(element) for key, element in value.items()}
    return list(map(_shallow, value)) if type(value) is list else value


def _is_same(value: Any, before: Any) -> bool:
    """Return whether dicts and lists have the same objects, or equal values, in them."""
    if isinstance(value, dict) and isinstance(before, dict):
        return value.keys() == before.keys() and all(
            _is_same(element, before[key]) for key, element in value.items()
        )
    if type(value) is list and type(before) is list:
        return len(value) == len(before) and all(map(_is_same, value, before))
    if isinstance(value, Tensor) or isinstance(before, Tensor):
        # Each state_dict() detaches the tensors again.
        return (
            isinstance(value, Tensor)
            and isinstance(before, Tensor)
            and (value is before or (value.shape, value.dtype) == (before.shape, before.dtype))
            and _memory(value) == _memory(before)
        )
    try:
        return bool(value is before or value == before)
    except (RuntimeError, TypeError, ValueError):  # such as arrays
        return False


def _memory(tensor: Tensor) -> int:
    try:
        return local_part(tensor).data_ptr()
    except RuntimeError:  # a tensor that only wraps others
        return id(tensor)


def _has_weights_twice(checkpoint: dict[str, Any], key: str) -> bool:
    """Return whether it is the weights, which WeightAveraging saves beside their average."""
    return key == "state_dict" and "current_model_state" in checkpoint


def load_weights(trainer: Trainer, weights: dict[str, Any]) -> None:
    """Have Lightning load these weights in place of those that the next checkpoint has.

    Its hooks see that checkpoint as they have saved it.
    """
    strategy = trainer.strategy

    def load_model_state_dict(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        del strategy.load_model_state_dict
        strategy.load_model_state_dict({**checkpoint, "state_dict": weights}, strict=strict)

    strategy.load_model_state_dict = load_model_state_dict  # type: ignore[method-assign]  # of this one


def load_optimizers_within(
    trainer: Trainer, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Have Lightning load the optimizers' next states within a context."""
    strategy = trainer.strategy

    def load_optimizer_state_dict(checkpoint: Mapping[str, Any]) -> None:
        del strategy.load_optimizer_state_dict
        with context():
            strategy.load_optimizer_state_dict(checkpoint)

    strategy.load_optimizer_state_dict = load_optimizer_state_dict  # type: ignore[method-assign]  # of this one


class Loads(enum.StrEnum):
    """A part of a checkpoint that Lightning loads: the method of its connector that does it."""

    DATA_MODULE = "restore_datamodule"
    MODEL = "restore_model"
    CALLBACKS = "restore_callbacks"
    LOOPS = "restore_loops"
    OPTIMIZERS_AND_SCHEDULERS = "restore_optimizers_and_schedulers"
    SCHEDULERS = "restore_lr_schedulers"


def load_within(
    trainer: Trainer, what: Loads, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Have Lightning load a part of the next checkpoint within a context."""
    call_within(trainer._checkpoint_connector, what, context)


def make_optimizers_within(
    trainer: Trainer, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Have Lightning make the next optimizers within a context."""
    call_within(trainer.strategy, "setup_optimizers", context)


def replace_loading(
    trainer: Trainer, load: Callable[[Any], bool], accept: Callable[[dict[str, Any]], None]
) -> None:
    """Have `load` called, with the path that Lightning was given, when it loads a checkpoint.

    That is before the model is restored. If it returns False, Lightning loads the file that it was
    given: `fit(ckpt_path=...)`, or one that a search for a learning rate has saved. It does so
    without running code in the file, unless the caller of `fit` has chosen otherwise
    (`weights_only`, which Lightning has since 2.6). `accept` then gets what the file has, to remove
    from it what is not to be loaded.

    UserError if that file is not a checkpoint that a training can begin with.
    """
    connector = trainer._checkpoint_connector
    # Lightning's own, even if this was called before.
    resume_start_of_lightning = functools.partial(type(connector).resume_start, connector)
    has_choice = "weights_only" in inspect.signature(resume_start_of_lightning).parameters

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        if not load(checkpoint_path):
            safe = True if weights_only is None else weights_only
            options = {"weights_only": safe} if has_choice else {}
            with _refused(checkpoint_path):
                resume_start_of_lightning(checkpoint_path, **options)
            if checkpoint_path and trainer.state.fn == TrainerFn.FITTING:
                _check(connector._loaded_checkpoint, checkpoint_path)
                accept(connector._loaded_checkpoint)

    connector.resume_start = resume_start  # type: ignore[method-assign]  # of this one


@contextmanager
def _refused(path: Any) -> Iterator[None]:
    """Raise UserError if the block cannot read a file as a checkpoint of Lightning's.

    What the readers raise for a file of another kind may be anything, such as a KeyError: 101.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else ""
        if not reason:
            reason = f"{type(error).__name__}: {error}".split("\n")[0].split(". ")[0].rstrip(": ")
        advice = ""
        if "Weights only load failed" in reason:
            objects = re.search(r"WeightsUnpickler error: (.*)", str(error))
            reason = objects[1] if objects else reason
            advice = ", or weights_only=False if its objects are yours"
        raise UserError(
            f"fit(ckpt_path={path}): found no checkpoint that could be read ({reason}); expected "
            f"one that a Trainer has saved{advice}"
        ) from error


def _check(checkpoint: dict[str, Any], path: Any) -> None:
    """Raise UserError if a checkpoint lacks what a training begins with."""
    needed = ("state_dict", "optimizer_states", "lr_schedulers")
    if missing := [name for name in needed if name not in checkpoint]:
        raise UserError(
            f"fit(ckpt_path={path}): found no {' and no '.join(missing)} in it; expected a whole "
            "checkpoint that a Trainer has saved, without save_weights_only"
        )


def set_loaded_checkpoint(trainer: Trainer, checkpoint: dict[str, Any], path: str | None) -> None:
    """Give Lightning a checkpoint as if it had read it from `path`; {} and None for none.

    It is for the `load` of `replace_loading`.
    """
    trainer._checkpoint_connector._ckpt_path = path
    trainer._checkpoint_connector._loaded_checkpoint = checkpoint


def loaded(trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint that Lightning has read and not restored completely; {} if none."""
    return trainer._checkpoint_connector._loaded_checkpoint


WAITS = "_defer_save_until_validation"
"""The attribute of a ModelCheckpoint that is to save once a validation has logged what it monitors;
Lightning has it since 2.6."""


class NewestSaved(NamedTuple):
    """What a ModelCheckpoint has saved last."""

    step: int
    """The optimizer step; 0 before."""
    path: str
    """The path; "" before."""
    waits: bool
    """Whether a save waits for the validation."""


def newest_saved(callback: ModelCheckpoint) -> NewestSaved:
    """Return what a callback has saved last."""
    waits = vars(callback).get(WAITS) is True
    return NewestSaved(callback._last_global_step_saved, callback._last_checkpoint_saved, waits)


def set_newest_saved(callback: ModelCheckpoint, newest: NewestSaved) -> None:
    """Have a callback know what was saved last."""
    callback._last_global_step_saved = newest.step
    callback._last_checkpoint_saved = newest.path
    if WAITS in vars(callback):
        vars(callback)[WAITS] = newest.waits


def keep_files(callback: ModelCheckpoint, keeps: Callable[[str], bool]) -> None:
    """Have a ModelCheckpoint not remove the files for whose paths `keeps` returns True."""
    callback._remove_checkpoint = _Removal(callback, keeps).remove  # type: ignore[method-assign]  # of this one


class _Removal:
    """Removes files for a ModelCheckpoint, but for some."""

    def __init__(self, callback: ModelCheckpoint, keeps: Callable[[str], bool]) -> None:
        self.callback = callback
        self.keeps = keeps

    def remove(self, trainer: Trainer, filepath: str) -> None:
        """Do what the callback does by itself, unless the file is kept."""
        if not self.keeps(filepath):
            type(self.callback)._remove_checkpoint(self.callback, trainer, filepath)


class BestCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint; four of its steps can be overridden.

    Its public hooks are the trainer's, and decide nothing. Three cases have to be handled between
    the choice of a model and the removal of another one: a file that could not be written, a metric
    that is not a number, and a file that is still needed.
    """

    def keep_if_best(self, trainer: Trainer, candidates: dict[str, Tensor]) -> None:
        """Write a file if the newest model is one of the best, by `candidates`."""
        super()._save_topk_checkpoint(trainer, candidates)

    def write_ranked(self, value: Tensor, trainer: Trainer, candidates: dict[str, Tensor]) -> None:
        """Write a model whose metric is `value`, and discard the one that it replaces."""
        super()._update_best_and_save(value, trainer, candidates)

    def write(self, trainer: Trainer, path: str) -> None:
        """Write a file; all ranks call it."""
        super()._save_checkpoint(trainer, path)

    def discard(self, trainer: Trainer, path: str) -> None:
        """Remove a file that is no longer needed; all ranks call it."""
        trainer.strategy.remove_checkpoint(path)

    def _save_topk_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        self.keep_if_best(trainer, monitor_candidates)

    def _update_best_and_save(
        self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        self.write_ranked(current, trainer, monitor_candidates)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.write(trainer, filepath)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.discard(trainer, filepath)
