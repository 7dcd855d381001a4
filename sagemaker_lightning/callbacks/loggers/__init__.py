"""Loggers in a resumed run: what the interrupted run logged is neither lost nor doubled.

This is for Lightning's own loggers, each in a file of its own. What was logged after a checkpoint
will be logged again by the resumed run, and what hooks log before training resumes was logged by
the interrupted run. Both are removed from files, and not sent again to servers.

To add a logger, write a subclass of base.Continuation, and name it in KINDS.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, Trainer

from sagemaker_lightning.callbacks.loggers.base import Continuation
from sagemaker_lightning.callbacks.loggers.csv_file import CSVContinuation
from sagemaker_lightning.callbacks.loggers.mlflow_points import MLflowContinuation
from sagemaker_lightning.callbacks.loggers.tensorboard_events import TensorBoardContinuation
from sagemaker_lightning.callbacks.loggers.wandb_rows import WandbContinuation
from sagemaker_lightning.compat.lightning_trainer import callbacks_of

KINDS: tuple[type[Continuation], ...] = (
    CSVContinuation,
    TensorBoardContinuation,
    MLflowContinuation,
    WandbContinuation,
)
"""The loggers that a resumed run continues."""


def continuation_of(logger: Any) -> Continuation:
    """Return the continuation of a logger, by its class."""
    return next((kind for kind in KINDS if isinstance(logger, kind.serves)), Continuation)(logger)


def prepare_files(
    loggers: Iterable[Any],
    states: Sequence[Mapping[str, Any]],
    folder: Path | None = None,
    trains: bool = True,
) -> None:
    """Make loggers continue the files and runs of the interrupted run.

    A logger that somebody has used before has chosen its version already: it stays there, and a
    line says so.

    Args:
        loggers: The loggers of this run.
        states: What `save_states` returned in the interrupted run.
        folder: The folder of the checkpoints; None if this run saves none.
        trains: Whether the training begins, and not another run of the trainer, such as a
            validation or a search.
    """
    continuations = [continuation_of(logger) for logger in loggers]
    for continuation in continuations:
        continuation.prepare(folder)
        if trains:
            continuation.begin_training()
    for continuation, state in _with_states(continuations, states):
        continuation.resume(state["version"], trains)


def well_formed(states: Any) -> list[Mapping[str, Any]]:
    """Return those of the states in a checkpoint, which is input, that `save_states` may return."""
    names = "kind", "name", "version"
    return [
        state
        for state in (states if isinstance(states, list) else ())
        if isinstance(state, dict)
        and all(isinstance(state.get(name), (int, str, type(None))) for name in names)
    ]


def end_training(loggers: Iterable[Any]) -> None:
    """Note that the training which the loggers were prepared for is over."""
    for logger in loggers:
        continuation_of(logger).end_training()


def save_states(loggers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return what a resumed run has to know about the loggers.

    All that was logged is written when this returns, or sent.
    """
    loggers = list(loggers)
    for logger in loggers:
        continuation_of(logger).save()
    return states(loggers)


def states(loggers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return what a resumed run has to know about loggers that have saved all."""
    return [_choice(each) | each.state() for each in map(continuation_of, loggers)]


def chosen(loggers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return which files or runs the loggers have chosen; asking makes none."""
    return [*map(_choice, map(continuation_of, loggers))]


def _choice(continuation: Continuation) -> dict[str, Any]:
    return {
        "kind": type(continuation.logger).__name__,
        "name": _plain_or_none(continuation.name),
        "version": _plain_or_none(continuation.version),
    }


def continue_files(
    loggers: Iterable[Any], states: Sequence[Mapping[str, Any]], step: int, first: bool
) -> None:
    """Remove what was logged after a checkpoint was taken, and continue the files.

    Every host does so with its own files. The files on S3 are left to the first one.

    Args:
        loggers: The loggers of this run.
        states: What `save_states` returned when the checkpoint was taken.
        step: The optimizer step of the checkpoint.
        first: Whether this is the first host.
    """
    loggers = list(loggers)
    for continuation, state in _with_states(map(continuation_of, loggers), states):
        # Else it writes to another folder, or this is not a state of such a logger.
        if state["version"] == continuation.version and continuation.takes(state):
            continuation.cut_back(state, step, first)
    begin_files(loggers if first else ())


def begin_files(loggers: Iterable[Any]) -> None:
    """Make the loggers that still wait start new files."""
    for logger in loggers:
        continuation_of(logger).begin_anew()


def _with_states(
    continuations: Iterable[Continuation], states: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Continuation, Mapping[str, Any]]]:
    """Yield each continuation with the state of a logger of the same class and name.

    If there are several of these, the first gets the first state, and so on.
    """
    states_left = list(states)
    for continuation in continuations:
        own = type(continuation.logger).__name__, _plain_or_none(continuation.name)
        for state in states_left:
            if (state.get("kind"), state.get("name")) == own:
                states_left.remove(state)
                yield continuation, state
                break


def _plain_or_none(name: Any) -> int | str | None:
    """Return a logger's name or version if it is an int or a str, else None.

    Somebody else's logger may have one of any type.
    """
    return name if isinstance(name, (int, str)) else None


def config_writers(trainer: Trainer) -> list[Callback]:
    """Return what writes the config.yaml of a LightningCLI: Lightning's SaveConfigCallbacks."""
    cli = sys.modules.get("pytorch_lightning.cli")  # programs without it need not import it
    return [
        callback
        for callback in callbacks_of(trainer)
        if cli and isinstance(callback, cli.SaveConfigCallback)
    ]


def write_config_again(trainer: Trainer) -> None:
    """Let a LightningCLI write its config.yaml, although the interrupted run has written one.

    It refuses to, unless asked to (`save_config_kwargs`), and a logger's folder is a new one
    in each run that resumes nothing.
    """
    for callback in config_writers(trainer):
        vars(callback)["overwrite"] = True
