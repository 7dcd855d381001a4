"""Training that ends with the same weights even if it is interrupted.

States are saved where nothing is half done (resume/fit_loops.py). resume/epoch_state.py has what a
Lightning checkpoint leaves out. Random draws need no saved state (data/seeding.py). All ranks agree
on a stop with a small collective operation on a process group of its own. Lightning's handler of
SIGTERM instead calls a collective operation right away, in which ranks that are not at the same
step hang (Lightning issue 20806).
"""

import time
from collections.abc import Mapping
from pathlib import Path
from signal import Signals
from typing import Any

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from sagemaker_lightning.callbacks import divergence
from sagemaker_lightning.compat import lightning_checkpoints, torch_compile
from sagemaker_lightning.compat.lightning_loops import end_evaluation_mode
from sagemaker_lightning.contract import shutdown
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.shutdown import Interrupted, Stop
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.resume import best_model, checkpoint_file, fit_loops, run_settings
from sagemaker_lightning.resume.agreement import UNSURE, Agreement
from sagemaker_lightning.resume.checkpoint_dir import Folder, Writer
from sagemaker_lightning.resume.restore import Restart
from sagemaker_lightning.resume.snapshot import Snapshot
from sagemaker_lightning.resume.verification import Proof

SHARE = 0.01  # share of the time, at most, that training waits for checkpoints saved by the clock


class ExactResume(Callback):
    """Saves checkpoints, resumes from the newest one, stops on a signal.

    A checkpoint is saved at the end of each epoch, and within it by the clock or by steps.

    Args:
        dirpath: Folder of the checkpoints.
        every_n_minutes: Minutes between two checkpoints within an epoch; 0 for none. The interval
            gets longer where training would wait for checkpoints for more than a hundredth of the
            time.
        every_n_steps: Optimizer steps between two checkpoints; 0 for none.
        keep: Number of checkpoints that are kept.
        exact: Whether an interrupted run resumes where it was. If not, it is trained and saved as
            Lightning does, with any strategy, and starts anew after an interruption.
        other_settings: Whether a resumed run may have another learning rate, gradient clipping or
            precision than before.
        strict: Whether the job ends if a resumed run does something else than the interrupted one.

    Raises:
        UserError: A number is too small, or `dirpath` is a URL.
    """

    stop: Stop | None = None
    """Receives the signals; None if nothing does."""

    def __init__(
        self,
        dirpath: str,
        every_n_minutes: float = 0.5,
        every_n_steps: int = 0,
        keep: int = 3,
        exact: bool = True,
        other_settings: bool = False,
        strict: bool = False,
    ) -> None:
        minimums = (
            ("every_n_minutes", every_n_minutes, 0),
            ("every_n_steps", every_n_steps, 0),
            ("keep", keep, 1),
        )
        for flag, value, minimum in minimums:
            if not value >= minimum:  # this refuses NaN, too
                raise UserError(f"--resume.{flag}: found {value}, allowed is {minimum} or more")
        if "://" in dirpath:
            raise UserError(
                f"--resume.dirpath: found {dirpath}, allowed is a folder; SageMaker copies it to S3"
            )
        self.folder = Folder(Path(dirpath), keep, started=time.time())
        self.writer = Writer(self.folder)
        self.exact = exact
        self.strict = strict
        self.every_n_minutes = every_n_minutes
        self.every_n_steps = every_n_steps
        self.other_settings = other_settings
        self.before: dict[str, Any] | None = None  # the state before the current validation
        self.common: int | None = None  # validation batches that every rank has
        self.stall = 0.0  # seconds that training waited for the last checkpoint
        self.why = ""  # why a run cannot be resumed within an epoch; "" if it can
        self.saved_step = 0  # optimizer step of the last checkpoint
        self.due = False  # whether a checkpoint waits for the end of an optimizer step
        self.cut = False  # whether a limit ended the epoch before its last batch
        self.proof: Proof | None = None  # compares a resumed run with the interrupted one

    def attach(
        self,
        seeding: Seeding,
        host: str,
        flags: Mapping[str, object],
        torchrun: bool,
        enabled: bool,
    ) -> None:
        """Set what becomes known between construction and training.

        Args:
            seeding: Knows the seed of the whole run.
            host: Name of this host.
            flags: All settings by flag.
            torchrun: Whether torchrun started this process.
            enabled: Whether checkpoints are saved.
        """
        self.seeding = seeding
        self.host = host
        self.flags = flags
        self.torchrun = torchrun
        self.enabled = enabled and self.exact

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's loops, checkpoint files and signal handling by ours.

        Raises:
            UserError: Runs with the trainer's strategy cannot be resumed.
        """
        if stage != "fit":
            return
        self.trainer = trainer
        self.loaded = False
        supported = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
        self.exact = self.exact and (supported or self.enabled)
        if not self.exact:
            self.seeding.stand_aside(trainer)
            if trainer.is_global_zero:
                print(
                    "this run is trained and saved as Lightning does; interrupted, it begins anew",
                    flush=True,
                )
            return
        if not supported:
            raise UserError(
                f"--trainer.strategy: found {type(trainer.strategy).__name__}, whose runs cannot "
                "be resumed; allowed are ddp and its variants, or --resume.exact=false: it trains "
                "and saves as Lightning does"
            )
        torch_compile.of_their_own_shapes()
        self.agreement = Agreement(trainer)
        self.divergence = divergence.of(trainer)
        self.restart = Restart(
            trainer, self.folder, self.seeding, self.agreement, self.other_settings
        )
        self.proof = Proof(trainer, self.folder, self.agreement.gather, self.strict)
        self.snapshot = Snapshot(trainer, self.agreement, self.seeding, self.proof)
        fit_loops.install(trainer, self, self.restart)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = checkpoint_file.VerifiedIO()
        lightning_checkpoints.load_first(trainer, self._load_newest)

    def _load_newest(self) -> bool:
        """Load the newest checkpoint, and return whether there is one.

        If it returns False, Lightning loads what a search before training has saved.
        """
        if self.trainer.state.fn != TrainerFn.FITTING or not self.enabled or self.loaded:
            return False
        self.loaded = True
        if not self.restart.load(self.host, self.flags):
            return False
        self.proof.told = list(self.restart.meta.get("resumes", ()))
        return True

    @property
    def resumes(self) -> list[dict[str, Any]]:
        """The results of this run's interruptions: were repeated steps identical?"""
        return self.proof.resumes if self.proof else []

    @property
    def trains(self) -> bool:
        """Whether this is the training and not a search before it.

        A search, such as for a learning rate, has callbacks of its own.
        """
        return any(callback is self for callback in self.trainer.callbacks)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers again, which Lightning has replaced."""
        self._reinstall_signal_handlers()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers again, which Lightning has replaced."""
        self._reinstall_signal_handlers()

    def _reinstall_signal_handlers(self) -> None:
        if self.stop and self.exact:
            self.stop.hear()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the optimizers for the state that Lightning loads next."""
        if self.exact:
            self.restart.add_groups()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let signals request a stop at a batch boundary from now on.

        It also begins the journal.

        Raises:
            UserError: A checkpoint of this run could not be read again.
        """
        self._reinstall_signal_handlers()
        self.saved_at = time.monotonic()
        self.saved_step = trainer.global_step
        if self.enabled:
            self.snapshot.run = (
                self.restart.meta["run"]
                if self.restart.meta
                else run_settings.described(trainer, self.flags)
            )
            if problem := checkpoint_file.unreadable(self.snapshot.lightnings()[0]):
                raise UserError(f"a checkpoint of this run could not be read again: {problem}")
            self.proof.start(self.restart.meta, self.flags, comparable=not self.other_settings)
        if self.stop and self.exact:
            self.stop.training = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait until the last checkpoint is on the disk."""
        if self.exact:
            self.agreement.settle()
        if self.proof:
            self.proof.finish()
        self.writer.wait()
        self.writer.check("the training is done, and")
        best_model.age(trainer, keep=0)
        if self.stop:
            self.stop.training = False

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Wait until the last checkpoint is on the disk."""
        self.writer.wait()
        if self.proof:
            self.proof.close()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the batch in the journal."""
        if self.enabled:
            self.proof.batch(batch, batch_idx)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Record the loss in the journal."""
        if self.enabled:
            self.proof.loss(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step in the journal and compare it with the interrupted run."""
        if self.enabled:
            self.proof.end(outputs)

    def batch_ended(self, done: bool, accumulates: bool) -> None:
        """Save a checkpoint if one is due; stop if a stop was requested.

        Args:
            done: Whether a limit ends the training here, within an epoch. A run with a higher limit
                resumes here; any other run ends this epoch again.
            accumulates: Whether the next batch adds to the gradients. Only a stop does not wait for
                the optimizer step.
        """
        step = self.trainer.global_step
        self.cut = done
        stops = self._agree(now=done)
        self.due |= self.agreement.due
        self.due |= (
            bool(self.every_n_steps) and step % self.every_n_steps == 0 and step != self.saved_step
        )
        if done or ((stops or (self.due and not accumulates)) and not self.why):
            self.save("batch", last=stops or done)
        if stops and not done:
            self._exit_all_ranks("batch")

    def placed(self, why: str) -> None:
        """Learn, when an epoch begins, why any rank cannot be resumed within it.

        Args:
            why: The reason on this rank; "" if there is none.
        """
        known_before = self.why
        self.why = next(filter(None, self.agreement.gather(why)), "")
        if self.why and not known_before and self.trainer.is_global_zero:
            print(
                f"{self.why}: checkpoints are saved at epochs' ends only, and a stop goes back "
                "there",
                flush=True,
            )

    def epoch_ended(self, done: bool) -> None:
        """Save a checkpoint; stop if a stop was requested and training is not done."""
        stops = self._agree(now=True) and not done
        if not self.cut:
            self.save("epoch", last=stops or done)
        if stops:
            self._exit_all_ranks("epoch")

    def before_validation(self) -> None:
        """Keep a copy of the state before a validation.

        Callbacks may replace the weights by their average while it runs.
        """
        self.divergence.check(self.trainer)
        self.before = self.snapshot.take("validation") if self.enabled and not self.why else {}
        if self._agree():
            self._interrupt_validation()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn how many validation batches every rank has.

        Ranks agree on a stop only up to that batch: beyond it, they would wait for each other.
        """
        self.validated = 0
        if trainer.state.fn != TrainerFn.FITTING or not self.exact:
            return
        if self.common is None and not trainer.sanity_checking:
            batches = sum(trainer.num_val_batches)
            self.common = min(self.agreement.gather(0 if batches == float("inf") else batches))

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop if a stop was requested; a resumed run repeats the whole validation."""
        self.validated += 1
        if self.before is not None and self.validated <= (self.common or 0) and self._agree():
            end_evaluation_mode(trainer)  # the state that the next training batch would have
            self._interrupt_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the state before the validation."""
        self.before = None

    def _interrupt_validation(self) -> None:
        if not self.why:
            self.save("validation", last=True)
        self._exit_all_ranks("validation")

    def _agree(self, now: bool = False) -> bool:
        """Return whether any rank was asked to stop.

        Args:
            now: Whether to wait for what the ranks say now, instead of using what they said the
                last time.
        """
        minutes = (time.monotonic() - self.saved_at) / 60
        due = self.every_n_minutes and minutes >= max(self.every_n_minutes, self.stall / 60 / SHARE)
        if self.stop:
            self.stop.batch_ended()
        signal_number = (self.stop and self.stop.number) or 0
        due = bool(due) and not self.writer.busy
        self.agreement.agree(signal_number, due, self.divergence.found(), now, self.proof.doubt)
        if self.agreement.diverged:
            self.divergence.check(self.trainer)
        if self.proof.untold and self.proof.trained and self.agreement.doubt != UNSURE:
            self.proof.tell()
        return bool(self.agreement.asked)

    def _exit_all_ranks(self, kind: str) -> None:
        """End this process, as all ranks do.

        Args:
            kind: Where training stops: "batch", "validation" or "epoch".
        """
        self.proof.finish(kind)
        self.writer.wait()  # the previous checkpoint counts if there is none of this step
        number = self.agreement.asked
        steps, problem = self.agreement.gather((self.folder.whole[-1:], self.writer.why))[0]
        step = steps[0] if steps else 0
        saved = f"{self.folder.file(step)} is whole" if steps else "there is no checkpoint"
        if problem:
            saved += (
                f", as that of step {self.trainer.global_step} could not be written ({problem})"
            )
        if self.why and step < self.trainer.global_step:
            saved += f"; {self.why}, so that it goes back to an epoch's end"
        is_child = self.trainer.local_rank > 0
        self.stop.tell(shutdown.words(step, f"{Signals(number).name}; {saved}"), not is_child)
        # Lightning started the other ranks of this node. If one of them exits with a status other
        # than 0, Lightning takes that for a crash and kills all of them.
        raise Interrupted(0 if is_child and not self.torchrun else shutdown.status(number))

    def save(self, kind: str, last: bool) -> None:
        """Save a checkpoint; one rank of each host writes it.

        Args:
            kind: When it is saved: "batch", "validation" or "epoch".
            last: Whether to wait until it is written. Otherwise it is written in the background.
        """
        started = time.monotonic()
        if kind != "validation":  # before_validation has checked that state
            self.divergence.check(self.trainer)
        if self.enabled:
            self.proof.check()
            state = (
                self.snapshot.whole(self.before)
                if kind == "validation"
                else self.snapshot.take(kind)
            )
            if self.stop:
                self.stop.writing = last
            if self.trainer.local_rank == 0:
                self.writer.write(
                    state, state[checkpoint_file.KEY]["step"], state[checkpoint_file.KEY]["number"]
                )
            self.proof.saved(kind)
            if last:
                self.writer.wait()
        best_model.age(self.trainer, self.folder.keep)
        self.saved_at = time.monotonic()
        self.agreement.due = False
        self.saved_step = self.trainer.global_step
        self.due = False
        self.stall = self.saved_at - started
