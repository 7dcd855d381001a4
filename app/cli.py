"""Flags to objects: class defaults < SageMaker's directories < trainer.yaml < flags. Reads no environment variable."""

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Literal

import torch
from jsonargparse import ArgumentError
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from app import data, flags, model, smddp
from app.environment import Environment
from app.progress import LogProgress
from app.system import SystemMetrics
from app.world import World


class Logger(TensorBoardLogger):
    """TensorBoard, with the flags that people set.

    Args:
        save_dir: Folder or s3:// address of the logs.
        name: Sub-folder of this experiment.
        version: Sub-folder of this run; the next free number if it is not given.
        flush_secs: Seconds after which what was logged is written.
    """

    def __init__(
        self, save_dir: str, name: str = "lightning_logs", version: int | str | None = None, flush_secs: int = 120
    ) -> None:
        super().__init__(save_dir, name=name, version=version, flush_secs=flush_secs)
        self.every, self.due = flush_secs, 0.0

    def save(self) -> None:
        """Write what was logged, every flush_secs; Lightning asks for it at every logged step.

        On S3 it is all that was ever logged, as a new object, for which the training waits.
        """
        if time.monotonic() >= self.due:
            super().save()
            self.due = time.monotonic() + self.every


def _quiet() -> None:
    """Leave out of the log what a person cannot act on."""
    # --optimizer is meant to override what the model would choose: no news to whoever gave it.
    warnings.filterwarnings("ignore", message=".*configure_optimizers` will be overridden")
    # Lightning 2.6 with torch 2.15, on itself.
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")
    # Lightning's advertisements.
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(lambda record: "Tip:" not in record.msg)


class CLI(LightningCLI):
    """Parses `args` (sys.argv's if None) and makes `trainer`, `model` and `datamodule` of them.

    ValueError says in one line which flag is wrong.
    """

    def __init__(self, environment: Environment, args: list[str] | None = None) -> None:
        self.environment = environment
        _quiet()
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_kwargs={
                "default_config_files": [str(Path(__file__).with_name("trainer.yaml"))],
                "exit_on_error": False,  # raise instead of printing the usage and leaving
                "allow_abbrev": False,  # a misspelt flag is a mistake, not another flag's short name
            },
            save_config_kwargs={"overwrite": True},
            load_from_checkpoint_support=False,  # it puts objects into checkpoints that weights_only=True refuses
            run=False,
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add lr_scaling, namespaces of our own (logger, checkpoint, ...), and SageMaker's values as defaults."""
        parser.link_arguments("data", "model.init_args.num_classes", self._num_classes, apply_on="instantiate")
        parser.add_class_arguments(Logger, "logger")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(LogProgress, "progress")
        parser.add_lightning_class_args(SystemMetrics, "system")
        parser.add_argument(
            "--lr_scaling",
            type=Literal["none", "linear", "sqrt"],
            default="none",
            help="Whether to multiply the learning rate by the world size (linear) or by its square root (sqrt).",
        )
        channels, training_dir = self.environment.channels, self.environment.training_dir
        datamodule = {"class_path": f"{data.__name__}.{'CIFAR10' if channels else 'Digits'}DataModule"}
        settings = {"data_dir": str(training_dir)} if training_dir else {}
        settings |= {"sharded": True} if self.environment.training_is_sharded else {}
        parser.set_defaults(
            {
                "model": {"class_path": f"{model.__name__}.ResNet18"},
                "data": datamodule | ({"init_args": settings} if settings else {}),
                "trainer.num_nodes": self.environment.num_nodes,
                "logger.save_dir": str(self.environment.log_dir),
                "checkpoint.dirpath": str(self.environment.checkpoint_dir),
                "system.host": self.environment.current_host,
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str] | None) -> None:
        """Parse `args`; the parser's many lines become one."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            raise ValueError(flags.explain(error, parser)) from None
        # Before a seed is drawn, another one on each host.
        given = json.loads(parser.dump(self.config, skip_none=False, skip_validation=True, format="json"))
        self.given = dict(flags.flat(given))

    def before_instantiate_classes(self) -> None:
        """Refuse what this machine cannot do, and read -1 devices as all there are, on a CPU too."""
        accelerator = self.config.trainer.accelerator
        if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
            raise ValueError(
                f"--trainer.accelerator={accelerator}: this machine has no GPU; allowed here are cpu and auto; or "
                "start it where there is a GPU"
            )
        channels, chosen = self.environment.channels, self.config.data
        if len(channels) > 1 and chosen.class_path.endswith("CIFAR10DataModule") and not chosen.init_args.data_dir:
            raise ValueError(
                f"--data.data_dir: channels found are {', '.join(channels)}; call the one with the training data "
                "`training`, or give its folder"
            )
        nodes, known = self.config.trainer.num_nodes, self.environment.num_nodes
        if nodes != known:
            print(f"warning: --trainer.num_nodes={nodes} is ignored: there are {known}, as the job says", flush=True)
            self.config.trainer.num_nodes = known
        if self.config.trainer.devices in (-1, "-1"):
            self.config.trainer.devices = "auto"
        if self.environment.torchrun and self.config.trainer.devices == "auto":
            # On a CPU, Lightning's "auto" is one, and each of torchrun's processes would train for itself.
            self.config.trainer.devices = self.environment.torchrun[0]

    def instantiate_classes(self) -> None:
        """Make the objects; what a class's code has against a flag is raised as it was, not as the parser tells it."""
        try:
            super().instantiate_classes()
            return
        except ValueError as error:
            first = error
            while cause := first.__cause__ or (None if first.__suppress_context__ else first.__context__):
                first = cause
        raise first

    def _num_classes(self, datamodule: LightningDataModule) -> int | None:
        """Return what the data says, or else the flag; None, which goes nowhere, if the model has no such parameter."""
        settings = self.config.model.get("init_args", {})
        if "num_classes" not in settings:
            return None
        given = settings["num_classes"]
        found = getattr(datamodule, "num_classes", given)
        name = type(datamodule).__name__
        if found is None:
            raise ValueError(f"--model.num_classes: not given, and {name} does not say how many classes it has")
        if given not in (None, found):
            raise ValueError(
                f"--model.num_classes: found {given}, but {name} has {found} classes; leave the flag out, it is taken "
                "from the data"
            )
        return found

    def instantiate_trainer(self, **kwargs) -> Trainer:
        """Return the trainer with the logger of its own namespace, and either a progress bar or log lines."""
        trainer = self.config_init.trainer
        # In a job, the terminal that SDK 2's local mode gives shows whole lines only: of a bar, nothing at all.
        if sys.stdout.isatty() and self.environment.current_host == Environment.current_host:
            self.parser.callback_keys.remove("progress")
        else:
            trainer.enable_progress_bar = False
        if trainer.enable_checkpointing is False:
            self.parser.callback_keys.remove("checkpoint")
        if trainer.strategy == "smddp":
            trainer.strategy = smddp.strategy()
        if trainer.logger in (None, True):
            trainer.logger = self.config_init.logger
        self.trainer_defaults["callbacks"] = [World(self.environment, self.given, self.config.lr_scaling)]
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise ValueError(f"--trainer: {error}") from None
