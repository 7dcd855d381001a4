"""Flags to objects: class defaults < SageMaker's directories < trainer.yaml < flags. Reads no environment variable."""

import json
import logging
import re
import sys
import warnings
from typing import Any, Literal

import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, instantiate_class
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.callbacks.divergence import Divergence
from sagemaker_lightning.callbacks.host_metrics import SystemMetrics
from sagemaker_lightning.callbacks.loggers import Logger
from sagemaker_lightning.callbacks.progress import LogProgress
from sagemaker_lightning.callbacks.rank_consistency import World
from sagemaker_lightning.cli import (
    default_data,
    flags,
    lr_schedules,
    mistakes,
    settings_check,
    smddp,
)
from sagemaker_lightning.cli.application import Application, class_path
from sagemaker_lightning.compat import jsonargparse_types, overhead
from sagemaker_lightning.contract.environment import Environment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.seeding import Chance
from sagemaker_lightning.drill import drilled_run
from sagemaker_lightning.process import allocator
from sagemaker_lightning.resume.best_model import BestModel
from sagemaker_lightning.resume.callback import Resume


def _quiet() -> None:
    """Leave out of the log what a person cannot act on."""
    # --optimizer is meant to override what the model would choose: no news to whoever gave it.
    warnings.filterwarnings("ignore", message=".*configure_optimizers` will be overridden")
    # a recipe, by its path
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    # Lightning 2.6 with torch 2.15, on itself.
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")
    # Lightning's advertisements.
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.msg
    )


def _in_processes_of_their_own(strategy: Any) -> Any:
    """Return the name of a strategy that starts the program for each rank, for one whose ranks would be its copies.

    What the ranks compute is the same. A copy has no signals, checkpoints and files of its own, and brings back weights
    and nothing else.
    """
    given = strategy if isinstance(strategy, str) else ""
    made = re.sub("^ddp_(spawn|fork|notebook)", "ddp", given)
    if made != given:
        if rank_zero_only.rank == 0:
            print(
                f"--trainer.strategy={given}: runs as {made}, which computes the same", flush=True
            )
        return made
    return strategy


class CLI(LightningCLI):
    """Parses `args` (sys.argv's if None) and makes `trainer`, `model` and `datamodule` of them.

    `application` has what the program trains where no flag says so.

    UserError says in one line which flag is wrong.
    """

    def __init__(
        self,
        environment: Environment,
        args: list[str] | None = None,
        application: Application | None = None,
    ) -> None:
        self.environment, self.application = environment, application or Application()
        _quiet()
        overhead.trim_lightning()
        jsonargparse_types.keep_whole_numbers()
        allocator.keep_freed()
        super().__init__(
            LightningModule,
            subclass_mode_model=True,
            parser_kwargs={
                "default_config_files": [str(self.application.settings)]
                if self.application.settings
                else [],
                "exit_on_error": False,  # raise instead of printing the usage and leaving
                # a misspelt flag is a mistake, not another flag's short name
                "allow_abbrev": False,
            },
            save_config_kwargs={"overwrite": True},
            # it puts objects into checkpoints that weights_only=True refuses
            load_from_checkpoint_support=False,
            run=False,
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add lr_scaling, namespaces of our own (logger, checkpoint, ...), and SageMaker's values as defaults."""
        parser.link_arguments(
            "data", "model.init_args.num_classes", self._num_classes, apply_on="instantiate"
        )
        parser.add_class_arguments(Logger, "logger")
        parser.add_lightning_class_args(BestModel, "checkpoint")
        parser.add_lightning_class_args(Resume, "resume")
        parser.add_lightning_class_args(LogProgress, "progress")
        parser.add_lightning_class_args(SystemMetrics, "system")
        parser.add_lightning_class_args(Divergence, "divergence")
        parser.add_argument(
            "--lr_scaling",
            type=Literal["none", "linear", "sqrt"],
            default="none",
            help=(
                "Whether to multiply the learning rate by the world size (linear) or by its square "
                "root (sqrt)."
            ),
        )
        if self.application.model:
            parser.set_defaults({"model": {"class_path": class_path(self.application.model)}})
        parser.set_defaults(
            {
                "trainer.num_nodes": self.environment.num_nodes,
                "logger.save_dir": str(self.environment.log_dir),
                "checkpoint.dirpath": str(self.environment.checkpoint_dir),
                "resume.dirpath": str(self.environment.checkpoint_dir),
                "system.host": self.environment.current_host,
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str] | None) -> None:
        """Parse `args`; the parser's many lines become one."""
        given = sys.argv[1:] if args is None else args
        application, has_channels = self.application, bool(self.environment.channels)
        found = flags.recipes(given, application.recipe_files)
        parser.set_defaults(
            {
                "data": default_data.default_data(
                    found, has_channels, self._data_settings, application
                )
            }
        )
        try:
            super().parse_arguments(parser, args if found == given else found)
        except mistakes.REFUSED as error:
            raise UserError(
                mistakes.explain_all(parser, found, application) or mistakes.explain(error, parser)
            ) from None
        if said := mistakes.unwanted(self.config):
            raise UserError(mistakes.explain_all(parser, found, application) or said)
        # Before a seed is drawn, another one on each host.
        given = json.loads(
            parser.dump(self.config, skip_none=False, skip_validation=True, format="json")
        )
        self.given = dict(flags.flat(given))

    @property
    def _data_settings(self) -> dict[str, Any]:
        """What SageMaker says of the data, by the name of a data module's parameter."""
        training_dir = self.environment.training_dir
        settings = {"data_dir": str(training_dir)} if training_dir else {}
        return settings | ({"sharded": True} if self.environment.training_is_sharded else {})

    def before_instantiate_classes(self) -> None:
        """Refuse what cannot be, and read -1 devices as all there are, on a CPU too."""
        settings_check.check(self.config, self.environment)
        if self.environment.drill:
            drilled_run.redirect(self.config, self.environment)
        name = self.config.model.class_path
        if self.config.data is None and not default_data.has_own_data(name):
            raise UserError(
                f"--data: found null, but {name.rpartition('.')[2]} has no train_dataloader of its "
                "own; leave the flag out, or give the name of a data module"
            )
        if self.config.trainer.devices in (-1, "-1"):
            self.config.trainer.devices = "auto"
        if self.environment.torchrun and self.config.trainer.devices == "auto":
            # On a CPU, Lightning's "auto" is one, and each of torchrun's processes would train for itself.
            self.config.trainer.devices = self.environment.torchrun[0]
        settings = self.config.get("trainer.strategy.init_args")
        if settings and settings.get("start_method") in ("spawn", "fork", "forkserver"):
            settings.start_method = "popen"  # as `_in_processes_of_their_own` has it
        self._try_the_optimizer()

    def instantiate_classes(self) -> None:
        """Make the objects; what a class has against its settings is raised with their flag."""
        try:
            super().instantiate_classes()
            return
        except Exception as error:
            first = mistakes.of_a_component(error, self.config)
        raise first

    def _try_the_optimizer(self) -> None:
        """Try out the flags' optimizer and scheduler, before they are the model's.

        The first step of most schedulers comes when the first epoch is over, and with it what they have against their
        settings.
        """
        chosen, scheduler = self.config.get("optimizer"), self.config.get("lr_scheduler")
        if chosen:
            with mistakes.naming("--optimizer", vars(chosen)):
                optimizer = instantiate_class([torch.nn.Parameter(torch.zeros(2, 2))], chosen)
            if scheduler:
                with mistakes.naming("--lr_scheduler", vars(scheduler)):
                    lr_schedules.step_once(instantiate_class(optimizer, scheduler))

    def _num_classes(self, datamodule: LightningDataModule | None) -> int | None:
        """Return what the data says, or else the flag; None, which goes nowhere, if the model has no such parameter."""
        settings = self.config.model.get("init_args", {})
        if "num_classes" not in settings:
            return None
        given = settings["num_classes"]
        found = getattr(datamodule, "num_classes", given)
        name = type(datamodule).__name__ if datamodule else "the model's own data"
        if found is None:
            raise UserError(
                f"--model.num_classes: not given, and {name} does not say how many classes it has"
            )
        if given not in (None, found):
            raise UserError(
                f"--model.num_classes: found {given}, but {name} has {found} classes; leave the "
                "flag out, it is taken from the data"
            )
        return found

    @staticmethod
    def configure_optimizers(
        lightning_module: LightningModule,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
    ) -> Any:
        """Return --optimizer and --lr_scheduler as Lightning wants them."""
        if isinstance(lr_scheduler, lr_schedules.PER_STEP):
            return lr_schedules.configured(lightning_module.trainer, optimizer, lr_scheduler)
        return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)

    def instantiate_trainer(self, **kwargs) -> Trainer:
        """Return the trainer with the logger of its own namespace, and either a progress bar or log lines."""
        trainer = self.config_init.trainer
        # In a job, the terminal that SDK 2's local mode gives shows whole lines only: of a bar, nothing at all.
        if sys.stdout.isatty() and self.environment.current_host == Environment.current_host:
            self.parser.callback_keys.remove("progress")
        else:
            given = (
                trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
            )
            trainer.enable_progress_bar = any(isinstance(one, ProgressBar) for one in given)
        if trainer.enable_checkpointing is False:
            self.parser.callback_keys.remove("checkpoint")
        if trainer.strategy == "smddp":
            trainer.strategy = smddp.strategy()
        trainer.strategy = _in_processes_of_their_own(trainer.strategy)
        resume = self.config_init.resume
        if trainer.logger in (None, True):
            trainer.logger = self.config_init.logger
        seed = self.config.seed_everything
        chance = Chance(seed if type(seed) is int else None, share=trainer.use_distributed_sampler)
        torchrun, saves = bool(self.environment.torchrun), trainer.enable_checkpointing is not False
        resume.attach(
            chance,
            self.environment.current_host,
            self.given,
            torchrun,
            saves and not trainer.fast_dev_run,
        )
        trainer.use_distributed_sampler = (
            False  # data/deterministic.py shares batches out, and repeats no sample for it
        )
        world = World(self.environment, self.given, self.config.lr_scaling, resume.other_settings)
        self.trainer_defaults["callbacks"] = [world, chance]
        with mistakes.naming("--trainer", vars(self.config.trainer)):
            made = super().instantiate_trainer(**kwargs)
        # what others draw in their hooks is seeded before
        made.callbacks.sort(key=lambda one: one is not chance)
        loggers.prepare(made.loggers, resume.folder.loggers() if resume.enabled else ())
        return made
