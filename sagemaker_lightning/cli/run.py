"""Runs a training, from environment and flags to the model: fit, test, export."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from traceback import extract_tb
from typing import Any

from sagemaker_lightning.contract.log import log
from sagemaker_lightning.process.lightning_import import check_version

# Before imports that fail with another version of Lightning.
check_version()

from jsonargparse import Namespace
from pytorch_lightning import LightningDataModule, LightningModule

from sagemaker_lightning.callbacks import heartbeat
from sagemaker_lightning.callbacks.progress import StartProgress
from sagemaker_lightning.cli import mistakes
from sagemaker_lightning.cli.application import Application
from sagemaker_lightning.cli.export import export
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.contract import hyperparameters, rendezvous, streams
from sagemaker_lightning.contract.atomic_files import check_writable
from sagemaker_lightning.contract.environment import (
    SageMakerEnvironment,
    failure_file,
    host_and_rank,
    watch,
)
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import reported
from sagemaker_lightning.contract.reporting import report_stop
from sagemaker_lightning.contract.shutdown import Interrupted, Stop
from sagemaker_lightning.process import parent_process, start_notice, threads
from sagemaker_lightning.resume.callback import ExactResume


class SageMakerCLI:
    """Trains as the command line says, and writes the model: a whole train.py in one call.

        if __name__ == "__main__":
            SageMakerCLI(MyModel, MyData)

    It has the flags of LightningCLI and more (`python train.py --help`), reads what SageMaker says
    about the job, tests and exports the model, and resumes exactly. See docs/your-model.md.

    Args:
        model: The model without --model; None if --model must be given.
        data: The data module without --data; None if the model has data of its own.
        settings: A YAML file of settings that differ from the classes' own; flags override it.
        args: The command line; None for sys.argv's.

    Exits with a status above 0 if the model was not written.
    """

    def __init__(
        self,
        model: type[LightningModule] | None = None,
        data: type[LightningDataModule] | None = None,
        settings: str | PathLike[str] | None = None,
        args: list[str] | None = None,
    ) -> None:
        path = None if settings is None else Path(settings)
        main(Application(model=model, data=data, settings=path), args)


def main(application: Application, args: list[str] | None = None) -> None:
    """Train what `args` and `application` say, and write the model.

    Args:
        application: The program's defaults.
        args: The command line; None for sys.argv's.

    Exits with a status above 0 if the model was not written.
    """
    streams.prepare()
    start_notice.set_activity("reading flags and data")
    rank_heartbeat = heartbeat.Heartbeat(watch(), host_and_rank())
    # Empty until the flags are read, then the run's one ExactResume callback.
    resumes: list[ExactResume] = []
    reporting = reported(
        failure_file(),
        host_and_rank(),
        tell=rank_heartbeat.failed,
        also=partial(went_otherwise, resumes),
    )
    with parent_process.bound_to_launcher(os.environ), reporting:
        environment = SageMakerEnvironment.read()
        home = environment.checkpoint_home(environment.checkpoint_dir)
        with Stop(home, partial(stopped, rank_heartbeat)) as stop:
            rendezvous.forget_absent_interface(environment, os.environ)
            # A job's own program calls this one, with the flags that the toolkit made of the
            # hyperparameters.
            if args is None and environment.user_args == tuple(sys.argv[1:]):
                args = hyperparameters.flags(environment.hyperparameters)
            check_writable(environment.model_dir, "the model")
            logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(say_once)
            with wrong_if_it_leaves(printed_only if failure_file() else None):
                cli = CommandLine(environment, args, application, stop)
            threads.divide_cpus(cli.trainer.num_devices, cli.trainer.strategy.root_device.type)
            callbacks_of(cli.trainer).extend([rank_heartbeat, StartProgress()])
            resumes.append(cli.resume)
            if cli.trainer.is_global_zero and failure_file():
                warn_of_lost_folders(cli.config, environment)
            for folder in {str(cli.config_init.checkpoint.dirpath), str(cli.resume.folder.path)}:
                if "://" not in folder:
                    check_writable(Path(folder), "checkpoints")
            log_dir = str(getattr(cli.trainer.logger, "save_dir", None) or "://")
            if "://" not in log_dir:
                check_writable(Path(log_dir), "logs")
            naming_trainer = mistakes.naming(
                "--trainer", vars(cli.config.trainer), mistakes.MISCONFIGURED
            )
            in_training = mistakes.found_in_training(cli.given)
            with wrong_if_it_leaves(left_early), naming_trainer, in_training:
                cli.trainer.fit(cli.model, cli.datamodule)
                if not cli.trainer.global_step:
                    raise UserError(
                        "--trainer: no step was trained; set max_epochs, max_steps and "
                        "limit_train_batches above 0"
                    )
                export(cli, environment)
        rank_heartbeat.done()


def went_otherwise(resume_callbacks: list[ExactResume]) -> str:
    """Return the line for a failed run that did not resume exactly.

    It is "" if the run continued as before, or was never resumed.
    """
    changed = [
        resumption
        for resume in resume_callbacks
        for resumption in resume.resumes
        if resumption["identical"] is False
    ]
    return (
        f"resumed at step {changed[0]['step']}: {changed[0]['said'].partition(';')[0]}"
        if changed
        else ""
    )


def warn_of_lost_folders(config: Mapping[str, Any], environment: SageMakerEnvironment) -> None:
    """Warn of relative folders: SageMaker does not keep a job's working folder."""
    trainer_logger = config.get("trainer.logger")
    loggers = [
        logger
        for logger in (trainer_logger if isinstance(trainer_logger, list) else [trainer_logger])
        if isinstance(logger, Namespace)
    ]
    folders = [
        (flag, config.get(flag))
        for flag in ("checkpoint.dirpath", "resume.dirpath", "logger.save_dir")
    ]
    folders += [("trainer.logger.save_dir", logger.get("init_args.save_dir")) for logger in loggers]
    for flag, folder in folders:
        folder = str(folder or "/")
        if "://" not in folder and not Path(folder).is_absolute():
            log.warning(
                f"--{flag}={folder}: SageMaker keeps nothing of "
                f"{Path(folder).absolute()}; leave the flag out, or give a folder below "
                f"{environment.checkpoint_dir}"
            )


@contextmanager
def wrong_if_it_leaves(why: Callable[[SystemExit], str] | None) -> Iterator[None]:
    """Turn an exit with status 0, before there is a model, into UserError.

    Args:
        why: Returns the message for a SystemExit; None to let it pass.

    An interruption, and an exit with another status, pass in any case.
    """
    try:
        yield
    except SystemExit as leaving:
        if leaving.code or isinstance(leaving, Interrupted) or not why:
            raise
        raise UserError(why(leaving)) from None


def printed_only(leaving: SystemExit) -> str:
    """Return the message for a job that printed its settings and exited."""
    return (
        "hyperparameters: found one that prints something and trains nothing (print_config, help, "
        "version, ...), so there is no model; leave it out, or run the program itself with that "
        "flag, outside of a job"
    )


def left_early(leaving: SystemExit) -> str:
    """Return the message that says where a user's code ended the program."""
    frames = [
        frame for frame in extract_tb(leaving.__traceback__) if not frame.filename.startswith("<")
    ]
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
    return (
        f"{place}: left by SystemExit with status 0 before the model was written; return instead, "
        "or raise an error"
    )


def stopped(line: heartbeat.Heartbeat, why: str, loud: bool = True) -> None:
    """Report that this rank stops because it was asked to, and where to resume.

    Args:
        line: The rank's heartbeat, which tells the other ranks.
        why: What happened, in one line.
        loud: Whether to print the line and write it to the failure file, too.
    """
    line.stopped(f"{why} [{host_and_rank()}]")
    report_stop(why, loud)


class _SayOnce:
    """A filter of the log that leaves out what Lightning repeats: "`Trainer.fit` stopped"."""

    def __init__(self) -> None:
        self.lines_before: set[str] = set()

    def __call__(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_new = text not in self.lines_before
        if text.startswith("`Trainer.fit` stopped"):
            self.lines_before.add(text)
        return is_new


say_once = _SayOnce()
