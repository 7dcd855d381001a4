"""Progress as plain log lines, for CloudWatch and other places where a progress bar is noise."""

import time
from datetime import timedelta
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.data import extract_batch_size

from sagemaker_lightning.process import start_notice


class StartProgress(Callback):
    """Tells process/start_notice.py how far the start is, up to the first step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say that the training is being prepared: the data and all ranks are there."""
        start_notice.set_activity("preparing the training")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say that only the first step is missing."""
        start_notice.set_activity("the first step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say that the start is done."""
        start_notice.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Say that the start is over."""
        start_notice.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say that the start is over, if the run had nothing to train."""
        start_notice.end()


class LogProgress(Callback):
    """Prints a line every few seconds and after each validation, on rank 0.

    A line consists of `name=value` pairs, so that a metric definition can pick any of them by a
    regular expression:
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
        # inf if only time or the user ends the training.
        self.total_steps = trainer.estimated_stepping_batches
        self._start_interval()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the validation before this epoch out of the rate."""
        self.seen = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print a line if the interval is over."""
        self.images += extract_batch_size(batch) * trainer.world_size
        now = time.monotonic()
        self.seconds = self.seconds + now - self.seen
        self.seen = now
        if self.seconds >= self.every_n_seconds:
            self._print_line(trainer, _metrics(trainer, "train"))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the metrics of the validation.

        `trainer.validate` prints a table of them itself, so nothing is printed for it.
        """
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._print_line(trainer, _metrics(trainer, "train"), _metrics(trainer, "val"))

    def _start_interval(self) -> None:
        self.images = 0
        self.seconds = 0.0
        self.seen = time.monotonic()

    def _print_line(self, trainer: Trainer, *metrics: str) -> None:
        """Print a line on rank 0, and start the next interval.

        Its rate is the one since the last line.
        """
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
            print(*filter(None, parts), f"left={self._time_left(trainer)}", flush=True)
        self._start_interval()

    def _time_left(self, trainer: Trainer) -> str:
        """Return the time left as h:mm:ss, or "unknown".

        It assumes the rate since the start, with validations.
        """
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
