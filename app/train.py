"""Trains a model and writes it down: environment and flags -> fit -> test -> export.

    python app/train.py --data=CIFAR10DataModule --data.data_dir=DIR --trainer.max_epochs=5     on a desk
    docker run IMAGE train                                                                      as SageMaker does
    docker run IMAGE python app/train.py --help                                                 all flags

`app/train_multi_node.py` and `app/train_torchrun.py` start it on several nodes or devices. Without SageMaker's
variables everything goes below ./output.
"""

if __name__ == "__main__":  # before all else: what is imported takes seconds
    from app import starting
    from app.imports import import_lightning
    from app.stop import leave_at_once

    leave_at_once()
    starting.begin("importing torch and Lightning")
    import_lightning()

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from traceback import extract_tb

from app.imports import check_version

check_version()  # before what would fail to import with another version of Lightning

import torch
from jsonargparse import Namespace
from pytorch_lightning.utilities.model_helpers import is_overridden

from app import artifacts, hyperparameters, journal, launched, lifeline, mistakes, rendezvous, starting, threads
from app.cli import CLI
from app.drilled import Drilled
from app.environment import Environment, failure_file, place, watch
from app.errors import UserError
from app.failures import reported, write
from app.files import check_writable
from app.progress import StartProgress
from app.resume import Resume
from app.stop import Interrupted, Stop


def main(args: list[str] | None = None) -> None:
    """Train as `args` (sys.argv's if None) say; exits with a status above 0 if the model was not written."""
    starting.doing("reading flags and data")
    line = lifeline.Lifeline(watch(), place())
    known: list[Resume] = []  # one, when the flags are read
    told = reported(failure_file(), place(), tell=line.failed, also=partial(went_otherwise, known))
    with launched.bound(os.environ), told:
        environment = Environment.read()
        with Stop(environment.checkpoint_dir, partial(stopped, line)) as stop:
            rendezvous.forget_absent_interface(environment, os.environ)
            if args is None and environment.user_args == tuple(sys.argv[1:]):  # a job's own program that calls this one
                args = hyperparameters.flags(environment.hyperparameters)
            check_writable(environment.model_dir, "the model")
            logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(say_once)
            with wrong_if_it_leaves(printed_only if failure_file() else None):
                cli = CLI(environment, args)
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
                        "--trainer: nothing was trained; allowed are limits (max_epochs, max_steps, ...) above 0"
                    )
                export(cli, environment)
        line.done()


def went_otherwise(known: list[Resume]) -> str:
    """Return what has to be said of a run that fails and has not gone on, after an interruption, as it was before."""
    found = [one for resume in known for one in resume.resumes if one["identical"] is False]
    return f"resumed at step {found[0]['step']}: {found[0]['said'].partition(';')[0]}" if found else ""


def warn_of_lost_folders(config: Mapping, environment: Environment) -> None:
    """Say which folders are relative to a job's working folder, of which SageMaker keeps nothing."""
    given = config.get("trainer.logger")
    loggers = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, Namespace)]
    folders = [(flag, config.get(flag)) for flag in ("checkpoint.dirpath", "resume.dirpath", "logger.save_dir")]
    folders += [("trainer.logger.save_dir", one.get("init_args.save_dir")) for one in loggers]
    for flag, folder in folders:
        folder = str(folder or "/")
        if "://" not in folder and not Path(folder).is_absolute():
            print(
                f"warning: --{flag}={folder} is {Path(folder).absolute()}, of which SageMaker keeps nothing; leave it "
                f"out, or give a folder below {environment.checkpoint_dir}",
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
        "hyperparameters: found one that prints something and trains nothing (print_config, help, version, ...), so "
        "there is no model; leave it out, or run `docker run IMAGE python app/train.py` with that flag"
    )


def left_early(leaving: SystemExit) -> str:
    """Return where the code of a model, a data module or a callback has ended the program."""
    frames = [frame for frame in extract_tb(leaving.__traceback__) if not frame.filename.startswith("<")]
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
    return f"{place}: left by SystemExit with status 0 before the model was written; return instead, or raise an error"


def stopped(line: lifeline.Lifeline, why: str, loud: bool = True) -> None:
    """Say that this rank ends as it was told to, and from where to resume."""
    said = f"{why} [{place()}]"
    line.stopped(said)
    if not loud:
        return
    print(said, file=sys.stderr, flush=True)
    if file := failure_file():
        with suppress(OSError):
            write(file, said)


def export(cli: CLI, environment: Environment) -> None:
    """Test the best model and write it to the model directory; no rank returns before it is there."""
    state, best = None, ""
    if cli.trainer.is_global_zero:  # on its host alone: hosts share no disk
        best = cli.config_init.checkpoint.readable()
        state = torch.load(best, map_location="cpu", weights_only=True)["state_dict"] if best else None
    if state := cli.trainer.strategy.broadcast(state):
        cli.model.load_state_dict(state, strict=cli.model.strict_loading)
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    source = cli.model if cli.datamodule is None else cli.datamodule
    if is_overridden("test_step", cli.model) and is_overridden("test_dataloader", source):
        for found in cli.trainer.test(cli.model, cli.datamodule, verbose=False)[:1]:  # none with limit_test_batches=0
            metrics |= found
    superfluous = uploaded_checkpoints(cli, environment)
    if cli.trainer.is_global_zero:
        config = cli.parser.dump(cli.config, skip_none=False)
        about = environment.revision, config, Path(best).name
        resumes = cli.config_init.resume.resumes
        path = artifacts.save(environment.model_dir, cli.model, cli.datamodule, metrics, *about, resumes)
        print(" ".join(f"{name}={value:.4f}" for name, value in metrics.items() if name.startswith("test")))
        print(f"model: {path}")
        print(f"logs: {logs(cli, environment)}")
        removed = "removed, as the run is finished; with a checkpoint folder, they stay there"
        print(f"checkpoints: {removed if superfluous else environment.checkpoint_dir}", flush=True)
    cli.trainer.strategy.barrier("artifacts")
    if cli.trainer.local_rank == 0:
        for path in superfluous:
            path.unlink(missing_ok=True)
        if superfluous:
            with suppress(OSError):  # somebody else's files are in it
                environment.checkpoint_dir.rmdir()


def uploaded_checkpoints(cli: CLI, environment: Environment) -> list[Path]:
    """Return this run's checkpoints if they are in the folder of the job's output, which SageMaker uploads.

    There they are for a run that is interrupted or fails; of one that is finished, nobody needs them. On a desk they
    stay: they are why a run that is started again trains nothing.
    """
    folder, output = environment.checkpoint_dir, environment.output_data_dir
    if output == Environment.output_data_dir or folder != output / "checkpoints":
        return []
    files = [path for _, path in cli.config_init.resume.folder.named()] + cli.config_init.checkpoint.files()
    return [path for path in files + journal.files(folder) if path.parent.resolve() == folder.resolve()]


def say_once(record: logging.LogRecord) -> bool:
    """Return whether a line of Lightning's is to be said: that fitting stopped it says each time that it looks."""
    text = record.getMessage()
    new = text not in say_once.said
    if text.startswith("`Trainer.fit` stopped"):
        say_once.said.add(text)
    return new


say_once.said = set()


def logs(cli: CLI, environment: Environment) -> str:
    """Return where the logs are, S3 included: this host's are below it, and those of the others."""
    folder = str(getattr(cli.trainer.logger, "save_dir", None) or environment.log_dir)
    return str(environment.log_dir.parent) if folder == str(environment.log_dir) else folder


if __name__ == "__main__":
    main()
