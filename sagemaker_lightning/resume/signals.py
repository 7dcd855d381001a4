"""Who receives SIGTERM and Ctrl-C while a training runs."""

import signal
import threading

from pytorch_lightning import Trainer

from sagemaker_lightning.compat import lightning_loops
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.environment import in_container
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.reporting import report_stop
from sagemaker_lightning.contract.shutdown import Stop, TrainingStop, loses_sigterm

_unheeded: set[int] = set()
"""SIGTERM, if a training of this process had nothing left to stop when it came."""


class Signals:
    """The signals that request a stop: our handlers, in place of Lightning's.

    Args:
        stop: What receives the signals; it is entered already. None to receive them from the
            beginning of each training to its end.
        home: The folder of the checkpoints, which the last line of a stopped training names.
    """

    def __init__(self, stop: Stop | None, home: CheckpointHome) -> None:
        self.stop = stop
        self.is_of_program = stop is not None
        """Whether the program receives them all the time, as the command line does."""
        self.home = home
        self.has_warned = False
        """Whether a warning said that no signal comes here."""
        if stop:
            stop.name_checkpoints_in(home)

    @property
    def number(self) -> int:
        """The number of the signal that this process has received; 0 if there is none."""
        return (self.stop and self.stop.signal_number) or 0

    def receive(self, trainer: Trainer) -> None:
        """Install our signal handlers in place of Lightning's.

        A SIGTERM that Lightning's have received in between is ours: they would end
        the program with exit status 0. One that came as an earlier training ended stops this one.

        Args:
            trainer: Lightning's trainer.
        """
        self._install_handlers(trainer.is_global_zero)
        came_before = lightning_loops.take_sigterm(trainer) or _unheeded
        if self.stop and came_before and not self.number:
            _unheeded.clear()
            signal.raise_signal(signal.SIGTERM)

    def _install_handlers(self, is_first: bool) -> None:
        if self.stop:
            self.stop.install_handlers()
        elif threading.current_thread() is threading.main_thread():
            self.stop = TrainingStop(self.home, report_stop)
            self.stop.__enter__()
            first = loses_sigterm() if in_container() else ""  # now: it may be this process
            if first and is_first:
                self._warn(
                    f"SIGTERM does not reach this training: {first}, the container's first "
                    "process, does not pass it on. A job that is stopped is killed, and resumes "
                    "from its last checkpoint; make the script the first process (exec), or, "
                    "where that is bash, set BASH_ENV to launch/bash_env.sh of this package"
                )
        else:
            self._warn(
                "fit is not called in the main thread, where Python handles signals: SIGTERM and "
                "Ctrl-C do not stop it with a checkpoint; periodic checkpoints are still written"
            )

    def begin(self) -> None:
        """Let signals request a stop at a batch boundary from now on."""
        if self.stop:
            self.stop.begin()

    def batch_ended(self) -> None:
        """Note that a batch has ended."""
        if self.stop:
            self.stop.batch_ended()

    def save_last(self) -> None:
        """Note that the last checkpoint is written from now on."""
        if self.stop:
            self.stop.save_last()

    def tell(self, why: str, shows: bool) -> None:
        """Say why this process ends.

        Args:
            why: The reason.
            shows: Whether this process is the one that says it.
        """
        (self.stop.tell if self.stop else report_stop)(why, shows)

    def note_unheeded(self, trainer: Trainer) -> None:
        """Note whether a signal has come since nothing of the training before was left to stop.

        Args:
            trainer: Lightning's trainer. Its handlers have had the signals since.
        """
        if not self.is_of_program and lightning_loops.take_sigterm(trainer):
            _unheeded.add(signal.SIGTERM)

    def leave_done(self) -> None:
        """Leave the signals; what came too late to stop this training stops the next one."""
        if not self.is_of_program:
            _unheeded.update({self.number} & {signal.SIGTERM})
        self.leave()

    def leave(self) -> None:
        """Leave the signals to whom they were for before the training."""
        if self.stop and self.is_of_program:
            self.stop.end()
        elif self.stop:
            self.stop.__exit__()
            self.stop = None

    def _warn(self, why: str) -> None:
        """Print, once, why no signal comes here."""
        if not self.has_warned:
            self.has_warned = True
            log.warning(why)
