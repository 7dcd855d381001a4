"""Flags to objects: class defaults < SageMaker's directories < trainer.yaml < flags. Reads no environment variable."""

import itertools
import json
import logging
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from app import data, flags, lean, memory, mistakes, model, schedule, smddp
from app.best import BestModel
from app.chance import Chance
from app.curves import Logger
from app.environment import Environment
from app.progress import LogProgress
from app.resume import Resume
from app.system import SystemMetrics
from app.world import World


def _quiet() -> None:
    """Leave out of the log what a person cannot act on."""
    # --optimizer is meant to override what the model would choose: no news to whoever gave it.
    warnings.filterwarnings("ignore", message=".*configure_optimizers` will be overridden")
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")  # a recipe, by its path
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
        lean.install()
        memory.keep_freed()
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
        parser.add_lightning_class_args(BestModel, "checkpoint")
        parser.add_lightning_class_args(Resume, "resume")
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
        self.settings = settings
        parser.set_defaults(
            {
                "model": {"class_path": f"{model.__name__}.ResNet18"},
                "data": datamodule | ({"init_args": settings} if settings else {}),
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
        found = flags.recipes(given)
        self._default_data(parser, found)
        try:
            super().parse_arguments(parser, args if found == given else found)
            mistakes.refuse_unwanted(self.config)
        except mistakes.REFUSED as error:
            raise ValueError(mistakes.explain_all(parser, found) or mistakes.explain(error, parser)) from None
        # Before a seed is drawn, another one on each host.
        given = json.loads(parser.dump(self.config, skip_none=False, skip_validation=True, format="json"))
        self.given = dict(flags.flat(given))

    def _default_data(self, parser: LightningArgumentParser, args: list[str]) -> None:
        """Make the data module that is chosen, if one is, the default, with no more than what SageMaker says of it.

        Else it would be given all settings of ours that it has a parameter for: our batch size, and not its own.
        """
        with suppress(Exception):  # the parser itself will say what is wrong
            chosen = [f"--data={after}" for word, after in itertools.pairwise(args) if word == "--data"]
            chosen += [word for word in args if word.startswith(("--data=", "--data.class_path="))]
            for word, after in itertools.pairwise([*args, ""]):
                if word.startswith("--config"):
                    given = yaml.safe_load(Path(word.partition("=")[2] or after).read_text()).get("data", {})
                    chosen[:0] = [f"--data={given['class_path']}"] if "class_path" in given else []
            alone = LightningArgumentParser(exit_on_error=False)
            alone.add_subclass_arguments(LightningDataModule, "data", required=False)
            name = alone.parse_args(chosen[-1:]).data.class_path
            if name != parser.get_defaults().data.class_path:
                known = flags.settings(name)
                settings = {key: value for key, value in self.settings.items() if key in known}
                parser.set_defaults({"data": {"class_path": name, "init_args": settings}})

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

    @staticmethod
    def configure_optimizers(
        lightning_module: LightningModule, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None
    ) -> Any:
        """Return --optimizer and --lr_scheduler as Lightning wants them."""
        if isinstance(lr_scheduler, schedule.PER_STEP):
            return schedule.configured(lightning_module.trainer, optimizer, lr_scheduler)
        return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)

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
        resume = self.config_init.resume
        if trainer.logger in (None, True):
            trainer.logger = self.config_init.logger
            before = resume.folder.version()
            if before is not None and self.config.logger.version is None:
                trainer.logger.go_on(before)
        seed = self.config.seed_everything
        chance = Chance(seed if type(seed) is int else None, share=trainer.use_distributed_sampler)
        torchrun, saves = bool(self.environment.torchrun), trainer.enable_checkpointing is not False
        resume.attach(chance, self.environment.current_host, self.given, torchrun, saves and not trainer.fast_dev_run)
        trainer.use_distributed_sampler = False  # app/exact.py shares batches out, and repeats no sample for it
        self.trainer_defaults["callbacks"] = [World(self.environment, self.given, self.config.lr_scaling), chance]
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise ValueError(f"--trainer: {error}") from None
