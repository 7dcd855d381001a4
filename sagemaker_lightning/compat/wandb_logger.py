"""When a WandbLogger makes its run, and with which arguments.

On an upgrade: compare loggers/wandb.py: when `wandb.init` is called, and with which arguments.
"""

from typing import Any

from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loggers.logger import rank_zero_experiment


class RunLogger(WandbLogger):
    """A WandbLogger that hands out a run that `take_run` has seen; a base before its own class."""

    def take_run(self, run: Any) -> None:
        """See the run before anything is logged to it; to be overridden.

        It is called whenever somebody asks for the run.
        """
        raise NotImplementedError

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run, made when it is first used."""
        run = super().experiment
        self.take_run(run)
        return run


def copies_tensorboard(logger: WandbLogger) -> bool:
    """Return whether the points come from TensorBoard's files, by `sync_tensorboard`."""
    return bool(logger._wandb_init.get("sync_tensorboard"))


def set_run_if_none(logger: WandbLogger, run_id: int | str) -> None:
    """Have a logger continue in a run, unless it has another."""
    if logger.version is None:
        logger._id = logger._wandb_init["id"] = run_id
