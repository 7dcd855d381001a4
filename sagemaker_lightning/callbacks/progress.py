"""Progress as plain log lines, for CloudWatch and other places where a progress bar is noise."""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.data import extract_batch_size

from sagemaker_lightning.compat.model_parallel import data_ranks
from sagemaker_lightning.contract.errors import printable
from sagemaker_lightning.contract.log import log
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
    """Prints a line every few seconds, after each validation and at the end, on rank 0.

    A line consists of `name=value` pairs, so that a metric definition can pick any of them by a
    regular expression:
        `epoch=1/10 step=45/450 train_loss=0.431207 train_acc=0.875 images/s=1203.4 left=0:01:23`

    It has all that was logged, by any name, with six significant digits. What a validation has
    logged is in its own line alone.

    Args:
        every_n_seconds: Seconds between two lines of training.
    """

    def __init__(self, every_n_seconds: float = 10.0) -> None:
        self.every_n_seconds = every_n_seconds

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks."""
        self.restored = dict(trainer.callback_metrics)  # values that a resumed run has from before
        self.before_validation: dict[str, Any] = {}  # values before the newest validation
        self.validated: dict[str, str] = {}  # the texts of what the newest validation has logged
        self.printed: dict[str, str] = {}  # the last text of each metric
        self.epoch = trainer.current_epoch + 1
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
        self.images += extract_batch_size(batch) * data_ranks(trainer)
        self.epoch = trainer.current_epoch + 1
        now = time.monotonic()
        self.seconds += now - self.seen
        self.seen = now
        if self.seconds >= self.every_n_seconds:
            self._print_line(trainer, self._new_texts(trainer))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the values that are not of this validation."""
        self.before_validation = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the metrics of the validation.

        `trainer.validate` prints a table of them itself, so nothing is printed for it.
        """
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            values = dict(trainer.callback_metrics)
            shown = texts(values)
            self._print_line(trainer, shown)
            # Lightning makes a new tensor of each value that the stage under way has logged.
            self.validated = {
                printable(name): shown[printable(name)]
                for name, value in values.items()
                if value is not self.before_validation.get(name)
            }

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what the last epoch has logged at its end, or in its last steps."""
        new = self._new_texts(trainer)
        if not new.items() <= self.printed.items():
            self._print_line(trainer, new)

    def _new_texts(self, trainer: Trainer) -> dict[str, str]:
        """Return what this training has logged, without what a line of a validation has said."""
        new = {
            name: value
            for name, value in trainer.callback_metrics.items()
            if value is not self.restored.get(name)
        }
        return {name: text for name, text in texts(new).items() if self.validated.get(name) != text}

    def _start_interval(self) -> None:
        self.images = 0
        self.seconds = 0.0
        self.seen = time.monotonic()

    def _print_line(self, trainer: Trainer, shown: Mapping[str, str]) -> None:
        """Print a line with the texts of metrics on rank 0, and start the next interval.

        Its rate is the one since the last line.
        """
        epochs = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        steps = "" if self.total_steps == float("inf") else f"/{self.total_steps}"
        rate = {"images/s": self.images / self.seconds} if self.seconds else {}
        parts = [
            f"epoch={self.epoch}{epochs}",
            f"step={trainer.global_step}{steps}",
            *(f"{name}={text}" for name, text in {**shown, **texts(rate)}.items()),
        ]
        self.printed |= shown
        if trainer.is_global_zero:
            log.info(" ".join([*filter(None, parts), f"left={self._time_left(trainer)}"]))
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


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return metrics as a log line has them, with six significant digits."""
    return {printable(name): f"{float(value):.6g}" for name, value in values.items()}
