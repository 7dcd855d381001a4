"""Refuses settings that are impossible on this machine, in this job, or at all."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch
from jsonargparse import Namespace
from pytorch_lightning.callbacks import ModelCheckpoint

from sagemaker_lightning.cli.application import Application, class_path
from sagemaker_lightning.cli.suggestions import shown
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.process.threads import usable_cpus
from sagemaker_lightning.resume.files.best_model import metrics_in
from sagemaker_lightning.resume.strategies import unsupported_flag

LEAST_VALUES = {
    "trainer.log_every_n_steps": 0,
    "trainer.check_val_every_n_epoch": 1,
    "trainer.accumulate_grad_batches": 1,
    "trainer.num_sanity_val_steps": -1,
    "trainer.gradient_clip_val": 0,
    "progress.every_n_seconds": 0,
    "system.every_n_seconds": 0,
    "data.init_args.batch_size": 1,
    "data.init_args.num_workers": 0,
}
"""The smallest value of settings for which Lightning, or a user's data module, takes any number."""

# How many workers a data loader may have: more would only fill the memory.
WORKERS_PER_CPU = 8
ALWAYS_ALLOWED_WORKERS = 64
UNSUPPORTED = "fsdp", "deepspeed"
"""How the names of strategies begin whose runs cannot be resumed, and that need a GPU."""
LONGEST_FILE_NAME = 220  # bytes; the file system allows 255


LOGGERS = {"MLFlowLogger": "mlflow", "WandbLogger": "wandb"}
"""Lightning's loggers whose package is not in every image, and that package."""
BROUGHT_BY = {"mlflow": "mlflow-skinny and sagemaker-mlflow", "wandb": "wandb"}


def check(config: Namespace, environment: SageMakerEnvironment, application: Application) -> None:
    """Raise UserError for an impossible setting; set the number of nodes to the job's."""
    for key, smallest in LEAST_VALUES.items():
        value = config.get(key)
        # `not >=` refuses nan, too.
        if isinstance(value, (int, float)) and not value >= smallest:
            raise UserError(
                f"--{key.replace('.init_args', '')}: found {value}, expected {smallest} or more"
            )
    workers = config.get("data.init_args.num_workers")
    largest = max(ALWAYS_ALLOWED_WORKERS, WORKERS_PER_CPU * usable_cpus())
    if isinstance(workers, int) and workers > largest:
        raise UserError(
            f"--data.num_workers: found {workers}, expected at most {largest} on this machine: "
            "each is a process of its own"
        )
    for what in ("epochs", "steps"):
        least, most = config.get(f"trainer.min_{what}"), config.get(f"trainer.max_{what}")
        if least is not None and most not in (None, -1) and least > most:
            raise UserError(
                f"--trainer.min_{what}: found {least}, and --trainer.max_{what}={most} ends the "
                f"training before; give a smaller number, or a larger --trainer.max_{what}"
            )
    if config.trainer.val_check_interval == 0:
        raise UserError(
            "--trainer.val_check_interval: found 0, expected a number of batches or a fraction "
            "of an epoch; for no validation, --trainer.limit_val_batches=0"
        )
    strategy = config.trainer.strategy
    saves = config.resume.exact and config.trainer.enable_checkpointing is not False
    if saves and isinstance(strategy, str) and strategy.startswith(UNSUPPORTED):
        raise unsupported_flag(strategy)  # Lightning would ask for a GPU first
    accelerator = config.trainer.accelerator
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"--trainer.accelerator={accelerator}: this machine has no GPU; expected cpu or "
            "auto; or start it where there is a GPU"
        )
    _check_loggers(config.trainer.logger)
    channels = environment.channels
    reads_channel = application.channel_data and class_path(application.channel_data)
    chosen = config.data
    # Nobody can guess which of several channels has the data. A user's data module may know their
    # names.
    if (
        len(channels) > 1
        and chosen is not None
        and chosen.class_path == reads_channel
        and not chosen.init_args.get("data_dir", "unknown")
    ):
        raise UserError(
            f"--data.data_dir: found the channels {', '.join(channels)}; name the one with the "
            "training data `training`, or set this flag to its folder"
        )
    nodes = config.trainer.num_nodes
    nodes_of_job = environment.num_nodes
    if nodes != nodes_of_job:
        log.warning(f"--trainer.num_nodes={nodes} is ignored: the job has {nodes_of_job}")
        config.trainer.num_nodes = nodes_of_job


def check_file_name(callback: ModelCheckpoint) -> None:
    """Raise UserError if no file can have a name such as --checkpoint.filename says.

    Which metrics there are is not known before they are logged.
    """
    values = dict.fromkeys(metrics_in(callback.filename), torch.tensor(0.5))
    values |= {"epoch": torch.tensor(1), "step": torch.tensor(1)}
    try:
        path = Path(callback.format_checkpoint_name(values))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"which is not a format ({type(error).__name__}: {error})"
    else:
        # While it is written, the name has an end; SageMaker's marks have another.
        if len(os.fsencode(path.name)) <= LONGEST_FILE_NAME and "\0" not in str(path):
            return
        problem = f"which makes a name that no file can have, of {len(path.name)} characters"
    raise UserError(
        f"--checkpoint.filename: found {shown(str(callback.filename))}, {problem}; expected a "
        "name, with metrics, epoch and step in braces, e.g. best-{epoch}-{val_loss:.3f}"
    )


def _check_loggers(loggers: object) -> None:
    """Raise UserError if a logger's package is not installed."""
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        name = logger.class_path.rpartition(".")[2] if isinstance(logger, Namespace) else ""
        package = LOGGERS.get(name)
        if package and not find_spec(package):
            raise UserError(
                f"--trainer.logger: found {name}, and {package} is not installed here; name "
                f"{BROUGHT_BY[package]} in the requirements.txt of the job's source, or build the "
                f"image with LOGGERS={package}"
            )
