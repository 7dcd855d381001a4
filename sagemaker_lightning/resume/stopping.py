"""When a checkpoint is saved and when training stops: the decision, and what is done then."""

import math
import time
import traceback
from dataclasses import dataclass
from signal import Signals
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from sagemaker_lightning.compat.lightning_loops import end_evaluation_mode, gradients_accumulate
from sagemaker_lightning.compat.lightning_trainer import end_failed_run
from sagemaker_lightning.contract import deadlines, shutdown
from sagemaker_lightning.contract.failures import explain
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.shutdown import Interrupted
from sagemaker_lightning.resume.resume_point import ResumePoint

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run

MAX_SAVING_SHARE = 0.01
"""Share of the time, at most, that training waits for checkpoints saved by the clock."""


@dataclass
class Intervals:
    """What lies between two checkpoints within an epoch.

    Args:
        minutes: Minutes; 0 for no checkpoints by the clock.
        steps: Optimizer steps; 0 for none by steps.
    """

    minutes: float
    steps: int

    def has_passed(self, seconds: float, seconds_of_last: float) -> bool:
        """Return whether a checkpoint is due by the clock.

        The interval is longer than `minutes` where training would wait too long for checkpoints.

        Args:
            seconds: Seconds since the last checkpoint.
            seconds_of_last: Seconds that training has waited for it.
        """
        shortest = max(60 * self.minutes, seconds_of_last / MAX_SAVING_SHARE)
        return bool(self.minutes) and seconds >= shortest

    def ends_at(self, step: int) -> bool:
        """Return whether a checkpoint is due after an optimizer step, by steps."""
        return bool(self.steps) and step % self.steps == 0


class Circumstances(NamedTuple):
    """What decides whether a checkpoint is saved, and whether training stops."""

    stops: bool = False
    """Whether all ranks have agreed to stop."""
    is_done: bool = False
    """Whether all is trained, or a limit ends the training here."""
    is_due: bool = False
    """Whether a checkpoint is due, by the clock or by steps."""
    is_uploading: bool = False
    """Whether the checkpoint before is on its way to S3; the next one waits for it."""
    accumulates: bool = False
    """Whether the next batch adds to the gradients; only a stop does not wait for the step."""
    only_epochs: bool = False
    """Whether no run can be resumed within an epoch."""
    epoch_was_cut: bool = False
    """Whether a limit has ended the epoch before its last batch; the state is saved already."""
    copy_is_due: bool = False
    """Whether a copy in memory is due."""


class Action(NamedTuple):
    """What is done."""

    saves: bool = False
    """Whether a checkpoint is saved."""
    waits: bool = False
    """Whether training waits until it is written; otherwise it is written in the background."""
    postpones: bool = False
    """Whether a checkpoint is due from now on, at the next moment that allows one."""
    exits: bool = False
    """Whether this process ends."""
    copies: bool = False
    """Whether a copy is taken in memory."""


def decide(point: ResumePoint, now: Circumstances) -> Action:
    """Return what is done at a point at which nothing is half done."""
    exits = now.stops and not (now.is_done and point is not ResumePoint.VALIDATION)
    if point is ResumePoint.BATCH:
        may_save = now.is_due and not now.is_uploading and not now.accumulates
        saves = now.is_done or ((now.stops or may_save) and not now.only_epochs)
        may_copy = now.copy_is_due and not now.accumulates and not now.only_epochs
        copies = may_copy and not saves and not exits
        return Action(saves, saves and (now.stops or now.is_done), exits=exits, copies=copies)
    if point is ResumePoint.VALIDATION:
        saves = now.stops and not now.only_epochs
        return Action(saves, saves, exits=exits)
    if now.epoch_was_cut:
        return Action(exits=exits)
    waits = now.stops or now.is_done
    saves = waits or not now.is_uploading
    return Action(saves, saves and waits, postpones=not saves, exits=exits)


class Stopping:
    """Saves the checkpoints of a run, and ends its process when a stop was requested.

    Args:
        run: The run.
        intervals: What lies between two checkpoints within an epoch.
    """

    def __init__(self, run: "Run", intervals: Intervals) -> None:
        self.run = run
        self.intervals = intervals
        self.saved_at = time.monotonic()
        self.saved_step = -1
        self.save_seconds = 0.0
        """Seconds that training waited for the last checkpoint."""
        self.checkpoint_due = False
        """Whether a checkpoint waits for a moment that allows one."""
        self.epoch_was_cut = False
        """Whether a limit has ended the epoch before its last batch."""
        self.why_only_epochs = ""
        """Why a run cannot be resumed within an epoch; "" if it can."""
        self.stop_agreed_at = math.inf
        """When the ranks agreed on a stop, in seconds of time.monotonic()."""

    def training_begins(self) -> None:
        """Count time and steps from now on."""
        self.saved_at = time.monotonic()
        self.saved_step = self.run.step
        self.state_saved()

    def checkpoint_saved(self, seconds: float) -> None:
        """Note that a checkpoint is saved, for which training has waited some seconds."""
        self.saved_at = time.monotonic()
        self.saved_step = self.run.step
        self.save_seconds = seconds
        self.checkpoint_due = False
        self.run.agreement.checkpoint_saved()
        self.state_saved()

    def state_saved(self) -> None:
        """Note that the present state is saved: a copy in memory would be the same."""
        self.run.agreement.copy_taken()
        self.run.copies.state_saved()

    def save_only_epochs(self, why_only_epochs: str) -> None:
        """Save at epochs' ends alone, for this reason; within epochs, too, if it is ""."""
        if why_only_epochs and not self.why_only_epochs and self.run.trainer.is_global_zero:
            log.warning(
                f"{why_only_epochs}: checkpoints are saved only at the end of an epoch, and a "
                "stopped run goes back to the last one"
            )
        self.why_only_epochs = why_only_epochs

    def only_end_is_left(self, cut: bool) -> None:
        """Note that a resumed run has only to end the epoch: all its batches are done.

        Args:
            cut: Whether a limit ended the epoch before its last batch.
        """
        self.epoch_was_cut = cut

    def batch_committed(self, done: bool) -> None:
        """Save a checkpoint if one is due; stop if a stop was requested.

        Args:
            done: Whether a limit ends the training here, within an epoch. A run with a higher limit
                resumes here; any other run ends this epoch again.
        """
        self.epoch_was_cut = done
        stops = self.agree(now=done)
        step = self.run.step
        is_due = self.intervals.ends_at(step) and step != self.saved_step
        self.checkpoint_due |= self.run.agreement.checkpoint_due or is_due
        self._do(ResumePoint.BATCH, stops, done)

    def epoch_committed(self, done: bool) -> None:
        """Save a checkpoint; stop if a stop was requested and training is not done."""
        self._do(ResumePoint.EPOCH, self.agree(now=True), done)

    def validation_begins(self) -> None:
        """Stop if a stop was requested; the state of before the validation is saved."""
        self._do(ResumePoint.VALIDATION, self.agree())

    def validation_batch_committed(self) -> None:
        """Stop if a stop was requested; a resumed run repeats the whole validation."""
        if self.agree():
            end_evaluation_mode(self.run.trainer)  # as the next training batch would find it
            self._do(ResumePoint.VALIDATION, stops=True)

    def _do(self, point: ResumePoint, stops: bool, done: bool = False) -> None:
        """Do what is decided."""
        copy_due = self.run.agreement.copy_due
        action = decide(
            point,
            Circumstances(
                stops,
                done,
                self.checkpoint_due,
                self.run.agreement.uploading,
                (self.checkpoint_due or copy_due) and gradients_accumulate(self.run.trainer),
                bool(self.why_only_epochs),
                self.epoch_was_cut,
                copy_due,
            ),
        )
        self.checkpoint_due |= action.postpones
        if action.saves:
            self.run.save(point, last=action.waits)
        elif action.copies:
            self.run.copy(point)
            self.state_saved()
        if action.exits:
            self.exit_all_ranks(point)

    def agree(self, now: bool = False) -> bool:
        """Return whether any rank was asked to stop; all ranks call it.

        Args:
            now: Whether to wait for what the ranks say now, instead of using what they said the
                last time.
        """
        run = self.run
        is_due = self.intervals.has_passed(time.monotonic() - self.saved_at, self.save_seconds)
        run.signals.batch_ended()
        run.agreement.agree(
            run.signals.number,
            is_due and not run.writer.is_writing,
            run.divergence.poll(),
            now,
            run.check.comparison,
            run.folder.is_uploading(),
            run.copies.ask(),
        )
        if run.agreement.diverged:
            run.divergence.check(run.trainer)
        run.check.report_if_decided(run.agreement.comparison)
        if run.agreement.signal_number:
            self.stop_agreed_at = min(self.stop_agreed_at, time.monotonic())
        return bool(run.agreement.signal_number)

    def exit_all_ranks(self, point: ResumePoint) -> NoReturn:
        """End this process, as all ranks do.

        Args:
            point: Where training stops.
        """
        run = self.run
        run.check.finish(point)
        run.writer.wait()  # the previous checkpoint counts if there is none of this step
        run.signals.save_last()
        if run.trainer.is_global_zero or (run.shards and run.trainer.local_rank == 0):
            run.folder.wait_for_s3(self.stop_agreed_at + deadlines.CHECKPOINT_IS_COPIED)
        run.learn_of_s3()
        steps, outlook, problem = run.agreement.gather(
            (run.folder.intact_steps, run.folder.outlook(), run.writer.problem_text)
        )[0]
        saved = outlook.said
        if problem:
            saved += f", as that of step {run.step} could not be written ({problem})"
        if self.why_only_epochs and (steps or [0])[-1] < run.step:
            saved += f"; {self.why_only_epochs}, so the run goes back to the end of an epoch"
        self.exit(run.agreement.signal_number, outlook.step, saved)

    def exit_after(self, exception: Exception, number: int) -> NoReturn:
        """End this process after an error that came when a stop was requested.

        Who signals a whole group of processes ends other programs, too, on which the training may
        depend.

        Args:
            exception: The error.
            number: The signal that has requested the stop.
        """
        traceback.print_exception(exception)
        end_failed_run(self.run.trainer)
        self.exit(
            number,
            self.run.folder.outlook().step,
            "this step was not completed, most likely because the signal has ended another "
            f"process, too: {explain(type(exception).__name__, str(exception))}",
        )

    def exit(self, number: int, step: int, how: str) -> NoReturn:
        """End this process after signal `number`, as one of several ranks has to.

        Args:
            number: The signal.
            step: The step to resume from.
            how: What else there is to say about the end.
        """
        is_child = self.run.trainer.local_rank > 0
        why = shutdown.interruption_message(step, f"{Signals(number).name}; {how}")
        self.run.signals.tell(why, not is_child)
        # Lightning started the other ranks of this node. If one of them exits with a status other
        # than 0, Lightning takes that for a crash and kills all of them.
        by_lightning = is_child and not self.run.environment.torchrun
        raise Interrupted(0 if by_lightning else shutdown.status(number))
