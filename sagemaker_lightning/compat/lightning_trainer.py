"""Private attributes of Lightning's strategies and modules that have no public way."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning_fabric.plugins.environments import LightningEnvironment
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy, Strategy
from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector

SET_BY_LIGHTNING = {"trainer", "_trainer", "_hparams_initial"}
"""Attributes that Lightning sets on modules, data modules and callbacks from outside.

These are their trainer, and the hyperparameters as they were first. This is not their state. On
an upgrade: see LightningModule.__init__ in core/module.py and save_hyperparameters in
utilities/parsing.py.
"""

SET_ON_CALLBACKS = {"log", "log_dict"}
"""Attributes that Lightning sets on each callback when a run begins: methods of the module.

On an upgrade: see `_attach_model_logging_functions` in
trainer/connectors/callback_connector.py.
"""

SET_ON_TRAINER = {
    "_accelerator_connector",
    "_callback_connector",
    "_checkpoint_connector",
    "_data_connector",
    "_default_root_dir",
    "_detect_anomaly",
    "_last_val_time",
    "_logger_connector",
    "_loggers",
    "_model_registry",
    "_signal_connector",
    "_val_check_time_interval",
    "accumulate_grad_batches",
    "barebones",
    "callbacks",
    "check_val_every_n_epoch",
    "datamodule",
    "enable_autolog_hparams",
    "fast_dev_run",
    "fit_loop",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_predict_batches",
    "limit_test_batches",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "num_sanity_val_steps",
    "overfit_batches",
    "predict_loop",
    "profiler",
    "reload_dataloaders_every_n_epochs",
    "should_stop",
    "state",
    "test_loop",
    "val_check_batch",
    "val_check_interval",
    "validate_loop",
}
"""Attributes that Lightning, its connectors and its loops set on a trainer.

They are not among those that a user has added. On an upgrade, test_compat.py names those that
are missing here.
"""


@contextmanager
def leaving_signals(are_taken: Callable[[], bool]) -> Iterator[None]:
    """Have other trainers, within this context, install no signal handlers where ours are.

    A hook may train or validate something by a trainer of its own. Its handler for SIGTERM would
    end the program with exit status 0, in the middle of a hook.

    Args:
        are_taken: Returns whether SIGTERM stops the training to which the hook belongs.
    """
    register = _SignalConnector.register_signal_handlers

    def register_or_leave(connector: _SignalConnector) -> None:
        if not are_taken():
            register(connector)

    _SignalConnector.register_signal_handlers = register_or_leave  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _SignalConnector.register_signal_handlers = register  # type: ignore[method-assign]


def ddp_arguments(strategy: DDPStrategy) -> dict[str, Any]:
    """Return the arguments that a strategy will give DistributedDataParallel.

    They can be added to. DDPStrategy(...) takes them, and is public. But what they have to be
    depends on the number of ranks, which is known only when the trainer, with its strategy, has
    been made; and a user may have made the strategy. On an upgrade: see `_setup_model` in
    strategies/ddp.py.
    """
    return strategy._ddp_kwargs


def copies_this_process(strategy: Strategy) -> bool:
    """Return whether the ranks are copies of this process: spawn, fork and notebook strategies.

    The others start this program again. On an upgrade: see `_configure_launcher` in
    strategies/ddp.py.
    """
    return isinstance(strategy, DDPStrategy) and strategy._start_method != "popen"


def finds_hosts_by_variables(strategy: Strategy) -> bool:
    """Return whether Lightning itself reads where a host is: no launcher and no plugin says it."""
    return isinstance(strategy, ParallelStrategy) and isinstance(
        strategy.cluster_environment, LightningEnvironment
    )


def end_failed_run(trainer: Trainer) -> None:
    """Do what Lightning does after an error, for an `on_exception` that raises another one.

    On an upgrade: see `_call_and_handle_interrupt` in trainer/call.py.
    """
    trainer._teardown()
    trainer.state.stage = None


def was_compiled(model: LightningModule) -> bool:
    """Return whether a module was given to torch.compile.

    Lightning trains the module within it. On an upgrade: see `from_compiled` in
    utilities/compile.py.
    """
    return bool(getattr(model, "_compiler_ctx", None))


# Lightning's connectors set these attributes from outside, and its class has no types for them.


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return a trainer's callbacks."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # see above
    return callbacks


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    """Set a trainer's callbacks."""
    trainer.callbacks = callbacks  # type: ignore[attr-defined]  # see above


def data_module_of(trainer: Trainer) -> LightningDataModule | None:
    """Return a trainer's data module; None without one."""
    data_module: LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    return data_module


def epochs_of_data(trainer: Trainer) -> int:
    """Return after how many epochs the loaders are made again; 0 for never."""
    epochs: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    return epochs


def call_within(owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Have a method be called within a context, once."""

    def method(*arguments: Any) -> None:
        delattr(owner, name)
        with context():
            getattr(owner, name)(*arguments)

    setattr(owner, name, method)


def averager_variables(strategy: Strategy) -> dict[str, Any]:
    """Return the variables of DDPStrategy's model averager, which counts steps; {} if it has none.

    On an upgrade: see `_enable_model_averaging` in strategies/ddp.py.
    """
    averager = getattr(strategy, "_model_averager", None)
    return {} if averager is None else vars(averager)
