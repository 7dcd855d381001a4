"""Trains a model and writes it down: environment and flags -> fit -> test -> export.

    python app/train.py --data=CIFAR10DataModule --data.data_dir=DIR --trainer.max_epochs=5     on a desk
    docker run IMAGE train                                                                      as SageMaker does
    docker run IMAGE python app/train.py --help                                                 all flags

`app/train_multi_node.py` and `app/train_torchrun.py` start it on several nodes or devices. Without SageMaker's
variables everything goes below ./output.
"""

if __name__ == "__main__":  # before all else: what is imported takes seconds
    from app.imports import import_lightning
    from app.stop import leave_at_once

    leave_at_once()
    import_lightning()

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from pytorch_lightning.utilities.model_helpers import is_overridden

from app import artifacts, hyperparameters, lifeline, rendezvous
from app.cli import CLI
from app.environment import Environment, failure_file, place, watch
from app.failures import reported, write
from app.files import check_writable
from app.stop import Stop


def main(args: list[str] | None = None) -> None:
    """Train as `args` (sys.argv's if None) say; exits with a status above 0 if the model was not written."""
    lifeline.end_with_the_launcher(os.environ)
    line = lifeline.Lifeline(watch(), place())
    with reported(failure_file(), place(), tell=line.failed):
        environment = Environment.read()
        with Stop(environment.checkpoint_dir, partial(stopped, line)) as stop:
            rendezvous.forget_absent_interface(environment, os.environ)
            if args is None and environment.user_args == tuple(sys.argv[1:]):  # a job's own program that calls this one
                args = hyperparameters.flags(environment.hyperparameters)
            check_writable(environment.model_dir, "the model")
            cli = CLI(environment, args)
            cli.trainer.callbacks.append(line)
            resume = cli.config_init.resume
            resume.stop, stop.folder = stop, resume.folder.path
            if cli.trainer.is_global_zero and failure_file():
                warn_of_lost_folders(cli.config, environment)
            for folder in {str(cli.config_init.checkpoint.dirpath), str(stop.folder)}:
                if "://" not in folder:
                    check_writable(Path(folder), "checkpoints")
            logs = str(getattr(cli.trainer.logger, "save_dir", None) or "://")
            if "://" not in logs:
                check_writable(Path(logs), "logs")
            cli.trainer.fit(cli.model, cli.datamodule)
            if not cli.trainer.global_step:
                raise ValueError(
                    "--trainer: nothing was trained; allowed are limits (max_epochs, max_steps, ...) above 0"
                )
            export(cli, environment)
        line.done()


def warn_of_lost_folders(config: Mapping, environment: Environment) -> None:
    """Say which folders are relative to a job's working folder, of which SageMaker keeps nothing."""
    for flag in ("checkpoint.dirpath", "resume.dirpath", "logger.save_dir"):
        folder = str(config.get(flag) or "/")
        if "://" not in folder and not Path(folder).is_absolute():
            print(
                f"warning: --{flag}={folder} is {Path(folder).absolute()}, of which SageMaker keeps nothing; leave it "
                f"out, or give a folder below {environment.checkpoint_dir}",
                flush=True,
            )


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
    state, best = None, cli.config_init.checkpoint.best_model_path
    if best and cli.trainer.is_global_zero:  # on its host alone: hosts share no disk
        if Path(best).is_file() or "://" in best:
            state = torch.load(best, map_location="cpu", weights_only=True)["state_dict"]
        else:
            print(f"warning: {best}, the best model, is not there any more; the last one is written", flush=True)
    if state := cli.trainer.strategy.broadcast(state):
        cli.model.load_state_dict(state)
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    if is_overridden("test_step", cli.model) and is_overridden("test_dataloader", cli.datamodule):
        metrics |= cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]
    if cli.trainer.is_global_zero:
        config = cli.parser.dump(cli.config, skip_none=False)
        path = artifacts.save(environment.model_dir, cli.model, cli.datamodule, metrics, environment.revision, config)
        print(" ".join(f"{name}={value:.4f}" for name, value in metrics.items() if name.startswith("test")))
        print(f"model: {path}")
        print(f"logs: {environment.log_dir.parent}")
        print(f"checkpoints: {environment.checkpoint_dir}", flush=True)
    cli.trainer.strategy.barrier("artifacts")


if __name__ == "__main__":
    main()
