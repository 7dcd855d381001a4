"""Progress as plain log lines, for CloudWatch and other places where a progress bar is noise."""

import time
from datetime import timedelta
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.data import extract_batch_size

from sagemaker_lightning.process import start_notice


class StartProgress(Callback):
    """Tells process/start_notice.py how far the start has come, to the end of the first step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The data is there, and all ranks are."""
        start_notice.doing("preparing the training")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Only the first step is missing."""
        start_notice.doing("the first step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The start is done."""
        start_notice.done()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The start is done, too."""
        start_notice.done()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Of a run that had nothing to train."""
        start_notice.done()


class LogProgress(Callback):
    """Prints a line every few seconds and after each validation, on rank 0.

    A line is `name=value` pairs, so that a metric definition can pick any of them by a regular expression:
    `epoch=1/10 step=45/450 train_loss=0.4312 train_acc=0.8750 images/s=1203.4 left=0:01:23`

    Args:
        every_n_seconds: Seconds between two lines of training.
    """

    def __init__(self, every_n_seconds: float = 10.0) -> None:
        self.every_n_seconds = every_n_seconds

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks."""
        self.first_step = trainer.global_step
        self.started = time.monotonic()
        self.total_steps = (
            trainer.estimated_stepping_batches
        )  # inf where only time or the user ends the training
        self._start_interval()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the validation before this epoch out of the rate."""
        self.seen = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print a line if it is time for one."""
        self.images += extract_batch_size(batch) * trainer.world_size
        now = time.monotonic()
        self.seconds = self.seconds + now - self.seen
        self.seen = now
        if self.seconds >= self.every_n_seconds:
            self._line(trainer, _metrics(trainer, "train"))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what validation found; `trainer.validate` alone prints a table of it."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._line(trainer, _metrics(trainer, "train"), _metrics(trainer, "val"))

    def _start_interval(self) -> None:
        self.images = 0
        self.seconds = 0.0
        self.seen = time.monotonic()

    def _line(self, trainer: Trainer, *metrics: str) -> None:
        """Print a line on rank 0, with the rate since the last one, and start the next interval."""
        epochs = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        steps = "" if self.total_steps == float("inf") else f"/{self.total_steps}"
        rate = [f"images/s={self.images / self.seconds:.1f}"] if self.seconds else []
        parts = [
            f"epoch={trainer.current_epoch + 1}{epochs}",
            f"step={trainer.global_step}{steps}",
            *metrics,
            *rate,
        ]
        if trainer.is_global_zero:
            print(*filter(None, parts), f"left={self._left(trainer)}", flush=True)
        self._start_interval()

    def _left(self, trainer: Trainer) -> str:
        """Return the time left as h:mm:ss at the rate since the start, validations included."""
        done = trainer.global_step - self.first_step
        if not done or self.total_steps == float("inf"):
            return "unknown"
        seconds = (
            (time.monotonic() - self.started) / done * (self.total_steps - trainer.global_step)
        )
        return str(timedelta(seconds=round(max(0.0, seconds))))


def _metrics(trainer: Trainer, stage: str) -> str:
    """Return the newest values of a stage's metrics as `name=value` pairs."""
    values = (
        (name, value) for name, value in trainer.callback_metrics.items() if name.startswith(stage)
    )
    return " ".join(f"{name}={float(value):.4f}" for name, value in values)
