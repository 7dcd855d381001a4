"""Makes the trainer, model and data module from flags.

Each overrides the one before: class defaults, SageMaker's directories, trainer.yaml, flags. This
module reads no environment variable.
"""

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

from sagemaker_lightning.callbacks.divergence import Divergence
from sagemaker_lightning.callbacks.host_metrics import HostMetrics
from sagemaker_lightning.callbacks.loggers.tensorboard_events import Logger
from sagemaker_lightning.callbacks.progress import LogProgress
from sagemaker_lightning.cli import (
    default_data,
    flags,
    lr_schedules,
    mistakes,
    settings_check,
    smddp,
)
from sagemaker_lightning.cli.application import Application, class_path
from sagemaker_lightning.compat import jsonargparse_types
from sagemaker_lightning.compat.lightning_loaders import evaluate_everything_on_each_rank
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.shutdown import Stop
from sagemaker_lightning.drill import causes
from sagemaker_lightning.process import allocator
from sagemaker_lightning.resume.callback import ExactResume
from sagemaker_lightning.resume.files.best_model import BestModel

# Parameters of ExactResume that no flag sets.
NOT_OF_FLAGS = ("seed", "lr_scaling", "settings", "parts", "saves", "environment", "stop")


def _silence_warnings() -> None:
    """Hide warnings and log lines that a user cannot act on."""
    # --optimizer is meant to override what the model would choose; whoever gave it knows that.
    warnings.filterwarnings("ignore", message=".*configure_optimizers` will be overridden")
    # The parser gets the words of the command line, with a path in place of a recipe's name.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    # Lightning 2.6 with torch 2.15 warns about its own code.
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")
    # Lightning's advertisements.
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.msg
    )


def _start_program_per_rank(strategy: Any) -> Any:
    """Replace a strategy that copies this process by the one that starts the program.

    Applies to the names of spawn, fork and notebook strategies; other values are returned as they
    are. The ranks compute the same either way. A copy of this process would have no signals,
    checkpoints and files of its own, and would bring back weights and nothing else.
    """
    name = strategy if isinstance(strategy, str) else ""
    starting_name = re.sub("^ddp_(spawn|fork|notebook)", "ddp", name)
    if starting_name != name:
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # Lightning sets it
            log.info(f"--trainer.strategy={name}: runs as {starting_name}, which computes the same")
        return starting_name
    return strategy


class CommandLine(LightningCLI):
    """Parses flags and makes `trainer`, `model`, `datamodule` and `resume` from them.

    Args:
        environment: What SageMaker says about the job.
        args: The command line; None for sys.argv's.
        application: What the program trains where no flag says so.
        stop: What receives the signals; None if nothing does before the training.

    Raises UserError that says in one line which flag is wrong.
    """

    def __init__(
        self,
        environment: SageMakerEnvironment,
        args: list[str] | None = None,
        application: Application | None = None,
        stop: Stop | None = None,
    ) -> None:
        self.environment = environment
        self.stop = stop
        self.application = application or Application()
        _silence_warnings()
        jsonargparse_types.keep_whole_numbers()
        allocator.keep_freed_memory()
        super().__init__(
            LightningModule,
            subclass_mode_model=True,
            parser_kwargs={
                "default_config_files": [str(self.application.settings)]
                if self.application.settings
                else [],
                # The parser raises, instead of printing the usage and exiting.
                "exit_on_error": False,
                # A misspelt flag is a mistake, and not the short name of another flag.
                "allow_abbrev": False,
            },
            save_config_kwargs={"overwrite": True},
            # The callback for it puts objects into checkpoints that weights_only=True refuses.
            load_from_checkpoint_support=False,
            run=False,
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add lr_scaling, our groups of flags (logger, ...), and SageMaker's defaults."""
        parser.link_arguments(
            "data", "model.init_args.num_classes", self._find_num_classes, apply_on="instantiate"
        )
        parser.add_class_arguments(Logger, "logger")
        parser.add_lightning_class_args(BestModel, "checkpoint")
        parser.add_class_arguments(ExactResume, "resume", skip=set(NOT_OF_FLAGS), instantiate=False)
        parser.add_lightning_class_args(LogProgress, "progress")
        parser.add_lightning_class_args(HostMetrics, "system")
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

    def parse_arguments(  # type: ignore[override]  # nobody gives a dict or a Namespace
        self, parser: LightningArgumentParser, args: list[str] | None
    ) -> None:
        """Parse `args`; UserError reports all mistakes in one line."""
        application = self.application
        has_channels = bool(self.environment.channels)
        words = flags.recipes(sys.argv[1:] if args is None else args, application.recipe_files)
        parser.set_defaults(
            {
                "data": default_data.default_data(
                    words, has_channels, self._sagemaker_data_settings, application
                )
            }
        )
        try:
            super().parse_arguments(parser, words)
        except mistakes.REFUSED as error:
            raise UserError(
                mistakes.explain_all(parser, words, application) or mistakes.explain(error, parser)
            ) from None
        if line := mistakes.unwanted(self.config) or mistakes.lacking_settings(self.config, parser):
            raise UserError(mistakes.explain_all(parser, words, application) or line)
        # Taken before a seed is drawn, which differs from host to host.
        dumped = parser.dump(self.config, skip_none=False, skip_validation=True, format="json")
        self.given = dict(flags.flat(json.loads(dumped)))

    @property
    def _sagemaker_data_settings(self) -> dict[str, Any]:
        """What SageMaker says about the data, by the names of a data module's parameters."""
        training_dir = self.environment.training_dir
        settings = {"data_dir": str(training_dir)} if training_dir else {}
        return settings | ({"sharded": True} if self.environment.training_is_sharded else {})

    def before_instantiate_classes(self) -> None:
        """Refuse impossible settings, and adapt those for devices, processes and a drill.

        Devices of -1 means all, on a CPU, too.
        """
        settings_check.check(self.config, self.environment, self.application)
        if self.environment.drill:
            # The drill's folders, instead of those that flags name. ExactResume does the same with
            # its own. With None, Lightning uses the working folder, which is the drill's.
            self.config.checkpoint.dirpath = str(self.environment.checkpoint_dir)
            self.config.logger.save_dir = str(self.environment.log_dir)
            self.config.trainer.default_root_dir = None
        name = self.config.model.class_path
        if self.config.data is None and not default_data.has_own_data(name):
            raise UserError(
                f"--data: found null, but {name.rpartition('.')[2]} has no train_dataloader of its "
                "own; leave the flag out, or give the name of a data module"
            )
        if self.config.trainer.devices in (-1, "-1"):
            self.config.trainer.devices = "auto"
        if self.environment.torchrun and self.config.trainer.devices == "auto":
            # On a CPU, Lightning's "auto" is one device, and each of torchrun's processes would
            # train for itself.
            self.config.trainer.devices = self.environment.torchrun[0]
        settings = self.config.get("trainer.strategy.init_args")
        if settings and settings.get("start_method") in ("spawn", "fork", "forkserver"):
            # Each rank starts the program, as `_start_program_per_rank` does for names.
            settings.start_method = "popen"
        self._check_optimizer()

    def instantiate_classes(self) -> None:
        """Make the objects; a class's error about its settings names their flag."""
        try:
            super().instantiate_classes()
            return
        except Exception as error:
            user_error = mistakes.of_a_component(error, self.config)
        raise user_error

    def _check_optimizer(self) -> None:
        """Make the flags' optimizer, for a dummy parameter, and step its scheduler once.

        Most schedulers take their first step after the first epoch; without this check, their
        complaints about settings would come only then.
        """
        optimizer_settings = self.config.get("optimizer")
        scheduler_settings = self.config.get("lr_scheduler")
        if optimizer_settings:
            with mistakes.naming("--optimizer", vars(optimizer_settings)):
                optimizer = instantiate_class(
                    [torch.nn.Parameter(torch.zeros(2, 2))], optimizer_settings
                )
            if scheduler_settings:
                with mistakes.naming("--lr_scheduler", vars(scheduler_settings)):
                    lr_schedules.step_once(instantiate_class(optimizer, scheduler_settings))

    def _find_num_classes(self, datamodule: LightningDataModule | None) -> int | None:
        """Return the number of classes for the model: the data's, or else the flag's.

        Returns None, which is given to no parameter, if the model has no `num_classes`. Raises
        UserError if neither says how many, or if the two contradict each other.
        """
        settings = self.config.model.get("init_args", {})
        if "num_classes" not in settings:
            return None
        flag_value = settings["num_classes"]
        num_classes: int | None = getattr(datamodule, "num_classes", flag_value)
        name = type(datamodule).__name__ if datamodule else "the model's own data"
        if num_classes is None:
            raise UserError(
                f"--model.num_classes: not given, and {name} does not say how many classes it has"
            )
        if flag_value not in (None, num_classes):
            raise UserError(
                f"--model.num_classes: found {flag_value}, but {name} has {num_classes} classes; "
                "leave the flag out, it is taken from the data"
            )
        return num_classes

    @staticmethod
    def configure_optimizers(
        lightning_module: LightningModule,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
    ) -> Any:
        """Return --optimizer and --lr_scheduler in the form that Lightning expects."""
        if isinstance(lr_scheduler, lr_schedules.PER_STEP):
            return lr_schedules.configured(lightning_module.trainer, optimizer, lr_scheduler)
        return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the trainer with our callbacks and logger, a progress bar or log lines."""
        trainer = self.config_init.trainer
        # In a job, the terminal of SDK 2's local mode shows only complete lines, and so nothing of
        # a progress bar.
        if (
            sys.stdout.isatty()
            and self.environment.current_host == SageMakerEnvironment.current_host
        ):
            self.parser.callback_keys.remove("progress")
        else:
            callbacks = (
                trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
            )
            trainer.enable_progress_bar = any(
                isinstance(callback, ProgressBar) for callback in callbacks
            )
        if trainer.enable_checkpointing is False:
            self.parser.callback_keys.remove("checkpoint")
        else:
            settings_check.check_file_name(self.config_init.checkpoint)
        if trainer.strategy == "smddp":
            trainer.strategy = smddp.strategy()
        trainer.strategy = _start_program_per_rank(trainer.strategy)
        if trainer.logger in (None, True):
            trainer.logger = self.config_init.logger
        seed = self.config.seed_everything
        causes.register()
        self.resume = ExactResume(
            **vars(self.config_init.resume),
            seed=seed if type(seed) is int else None,
            lr_scaling=self.config.lr_scaling,
            settings=self.given,
            saves=trainer.enable_checkpointing is not False,
            environment=self.environment,
            stop=self.stop,
        )
        self.trainer_defaults["callbacks"] = [self.resume]
        with mistakes.naming("--trainer", vars(self.config.trainer)):
            new_trainer = super().instantiate_trainer(**kwargs)
        evaluate_everything_on_each_rank(new_trainer)
        return new_trainer
