"""A run from environment and flags to the model in its folder: fit -> test -> export."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from traceback import extract_tb

from sagemaker_lightning.process.lightning_import import check_version

check_version()  # before what would fail to import with another version of Lightning

from jsonargparse import Namespace

from sagemaker_lightning.callbacks import heartbeat
from sagemaker_lightning.callbacks.progress import StartProgress
from sagemaker_lightning.cli import mistakes
from sagemaker_lightning.cli.application import Application
from sagemaker_lightning.cli.export import export
from sagemaker_lightning.cli.lightning_cli import CLI
from sagemaker_lightning.contract import hyperparameters, rendezvous
from sagemaker_lightning.contract.atomic_files import check_writable
from sagemaker_lightning.contract.environment import Environment, failure_file, place, watch
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import reported, write
from sagemaker_lightning.contract.shutdown import Interrupted, Stop
from sagemaker_lightning.drill.drilled_run import Drilled
from sagemaker_lightning.process import parent_process, start_notice, threads
from sagemaker_lightning.resume.callback import Resume


def main(application: Application, args: list[str] | None = None) -> None:
    """Train as `args` (sys.argv's if None) say, and where they do not, as `application` does.

    Exits with a status above 0 if the model was not written.
    """
    start_notice.doing("reading flags and data")
    line = heartbeat.Lifeline(watch(), place())
    known: list[Resume] = []  # one, when the flags are read
    told = reported(failure_file(), place(), tell=line.failed, also=partial(went_otherwise, known))
    with parent_process.bound(os.environ), told:
        environment = Environment.read()
        with Stop(environment.checkpoint_dir, partial(stopped, line)) as stop:
            rendezvous.forget_absent_interface(environment, os.environ)
            # a job's own program that calls this one
            if args is None and environment.user_args == tuple(sys.argv[1:]):
                args = hyperparameters.flags(environment.hyperparameters)
            check_writable(environment.model_dir, "the model")
            logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(say_once)
            with wrong_if_it_leaves(printed_only if failure_file() else None):
                cli = CLI(environment, args, application)
            threads.share(cli.trainer.num_devices, cli.trainer.strategy.root_device.type)
            cli.trainer.callbacks += [line, StartProgress()]
            resume = cli.config_init.resume
            resume.stop, stop.folder = stop, resume.folder.path
            known.append(resume)
            if environment.drill:
                cli.trainer.callbacks.append(Drilled(environment.drill, resume))
            if cli.trainer.is_global_zero and failure_file():
                warn_of_lost_folders(cli.config, environment)
            for folder in {str(cli.config_init.checkpoint.dirpath), str(stop.folder)}:
                if "://" not in folder:
                    check_writable(Path(folder), "checkpoints")
            log_dir = str(getattr(cli.trainer.logger, "save_dir", None) or "://")
            if "://" not in log_dir:
                check_writable(Path(log_dir), "logs")
            refused = mistakes.naming("--trainer", vars(cli.config.trainer), mistakes.MISCONFIGURED)
            with wrong_if_it_leaves(left_early), refused:
                cli.trainer.fit(cli.model, cli.datamodule)
                if not cli.trainer.global_step:
                    raise UserError(
                        "--trainer: nothing was trained; allowed are limits (max_epochs, "
                        "max_steps, ...) above 0"
                    )
                export(cli, environment)
        line.done()


def went_otherwise(known: list[Resume]) -> str:
    """Return what has to be said of a run that fails and has not gone on, after an interruption, as it was before."""
    found = [one for resume in known for one in resume.resumes if one["identical"] is False]
    return (
        f"resumed at step {found[0]['step']}: {found[0]['said'].partition(';')[0]}" if found else ""
    )


def warn_of_lost_folders(config: Mapping, environment: Environment) -> None:
    """Say which folders are relative to a job's working folder, of which SageMaker keeps nothing."""
    given = config.get("trainer.logger")
    loggers = [
        one for one in (given if isinstance(given, list) else [given]) if isinstance(one, Namespace)
    ]
    folders = [
        (flag, config.get(flag))
        for flag in ("checkpoint.dirpath", "resume.dirpath", "logger.save_dir")
    ]
    folders += [("trainer.logger.save_dir", one.get("init_args.save_dir")) for one in loggers]
    for flag, folder in folders:
        folder = str(folder or "/")
        if "://" not in folder and not Path(folder).is_absolute():
            print(
                f"warning: --{flag}={folder} is {Path(folder).absolute()}, of which SageMaker "
                f"keeps nothing; leave it out, or give a folder below {environment.checkpoint_dir}",
                flush=True,
            )


@contextmanager
def wrong_if_it_leaves(why: Callable[[SystemExit], str] | None) -> Iterator[None]:
    """Turn SystemExit with status 0, before there is a model, into UserError that says `why`; with None, let it be."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code or isinstance(leaving, Interrupted) or not why:
            raise
        raise UserError(why(leaving)) from None


def printed_only(leaving: SystemExit) -> str:
    """Return what is wrong with a job that prints its settings."""
    return (
        "hyperparameters: found one that prints something and trains nothing (print_config, help, "
        "version, ...), so there is no model; leave it out, or run the program itself with that "
        "flag, outside of a job"
    )


def left_early(leaving: SystemExit) -> str:
    """Return where the code of a model, a data module or a callback has ended the program."""
    frames = [
        frame for frame in extract_tb(leaving.__traceback__) if not frame.filename.startswith("<")
    ]
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
    return (
        f"{place}: left by SystemExit with status 0 before the model was written; return instead, "
        "or raise an error"
    )


def stopped(line: heartbeat.Lifeline, why: str, loud: bool = True) -> None:
    """Say that this rank ends as it was told to, and from where to resume."""
    said = f"{why} [{place()}]"
    line.stopped(said)
    if not loud:
        return
    print(said, file=sys.stderr, flush=True)
    if file := failure_file():
        with suppress(OSError):
            write(file, said)


def say_once(record: logging.LogRecord) -> bool:
    """Return whether a line of Lightning's is to be said: that fitting stopped it says each time that it looks."""
    text = record.getMessage()
    new = text not in say_once.said
    if text.startswith("`Trainer.fit` stopped"):
        say_once.said.add(text)
    return new


say_once.said = set()
