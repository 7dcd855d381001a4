"""Training that can be interrupted at any moment and ends with the weights it would have had.

States are taken where nothing is half done (resume/fit_loops.py); what a Lightning checkpoint leaves out is in
resume/epoch_state.py; what is random needs no state (data/seeding.py). All ranks agree on a stop by a small collective
on a group of its own: Lightning's handler of SIGTERM calls one by itself, in which ranks that are not in step hang
(Lightning issue 20806).
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
from sagemaker_lightning.data.seeding import Chance
from sagemaker_lightning.resume import best_model, checkpoint_file, fit_loops, run_settings
from sagemaker_lightning.resume.agreement import UNSURE, Agreement
from sagemaker_lightning.resume.checkpoint_dir import Folder, Writer
from sagemaker_lightning.resume.restore import Restart
from sagemaker_lightning.resume.snapshot import Snapshot
from sagemaker_lightning.resume.verification import Proof

SHARE = 0.01  # of the time, at most, training waits for checkpoints that only the clock asks for


class Resume(Callback):
    """Saves checkpoints, goes on from the newest one, and stops when a signal asks for it.

    A checkpoint is saved at the end of each epoch, and between by the clock or by steps.

    Args:
        dirpath: Folder of the checkpoints.
        every_n_minutes: Minutes between two checkpoints within an epoch; 0 for none. It takes longer where training
            would wait for them for more than a hundredth of the time.
        every_n_steps: Optimizer steps between two checkpoints; 0 for none.
        keep: Number of checkpoints that are kept.
        exact: Whether an interrupted run goes on where it was. If not, it is trained and saved as Lightning does, with
            any strategy, and begins anew.
        other_settings: Whether another learning rate, gradient clipping or precision may be given than before.
        strict: Whether a run that goes on otherwise than before it was interrupted is ended.
    """

    stop: Stop | None = None
    """What hears the signals, if anything does."""

    def __init__(
        self, dirpath: str, every_n_minutes: float = 0.5, every_n_steps: int = 0, keep: int = 3, exact: bool = True,
        other_settings: bool = False, strict: bool = False,
    ) -> None:  # fmt: skip
        for flag, value, least in (("every_n_minutes", every_n_minutes, 0), ("every_n_steps", every_n_steps, 0),
                                   ("keep", keep, 1)):  # fmt: skip
            if not value >= least:  # nan is not
                raise UserError(f"--resume.{flag}: found {value}, allowed is {least} or more")
        if "://" in dirpath:
            raise UserError(f"--resume.dirpath: found {dirpath}, allowed is a folder; SageMaker copies it to S3")
        self.folder = Folder(Path(dirpath), keep, started=time.time())
        self.writer = Writer(self.folder)
        self.exact, self.strict = exact, strict
        self.every_n_minutes, self.every_n_steps, self.other_settings = every_n_minutes, every_n_steps, other_settings
        self.before: dict[str, Any] | None = None  # the state before the validation that is running
        self.common: int | None = None  # batches of a validation that all ranks have
        self.stall = 0.0  # seconds that training waited for the last checkpoint
        self.why = ""  # why no run could go on within an epoch
        self.saved_step, self.due = 0, False  # of the last checkpoint, and whether one waits for the end of a step
        self.cut = False  # whether a limit has ended an epoch before its last batch
        self.proof: Proof | None = None  # what compares a run that goes on with what it was

    def attach(self, chance: Chance, host: str, flags: Mapping[str, object], torchrun: bool, enabled: bool) -> None:
        """Learn what is known before training.

        Args:
            chance: What knows the seed of all.
            host: Name of this host.
            flags: All settings by flag.
            torchrun: Whether torchrun started this process.
            enabled: Whether there are to be checkpoints.
        """
        self.chance, self.host, self.flags, self.torchrun = chance, host, flags, torchrun
        self.enabled = enabled and self.exact

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put this application's loops, files and handling of signals in place of Lightning's."""
        if stage != "fit":
            return
        self.trainer, self.loaded = trainer, False
        supported = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
        self.exact = self.exact and (supported or self.enabled)
        if not self.exact:
            self.chance.stand_aside(trainer)
            if trainer.is_global_zero:
                print("this run is trained and saved as Lightning does; interrupted, it begins anew", flush=True)
            return
        if not supported:
            raise UserError(
                f"--trainer.strategy: found {type(trainer.strategy).__name__}, whose runs cannot be resumed; allowed "
                "are ddp and its variants, or --resume.exact=false: it trains and saves as Lightning does"
            )
        torch_compile.of_their_own_shapes()
        self.agreement, self.divergence = Agreement(trainer), divergence.of(trainer)
        self.restart = Restart(trainer, self.folder, self.chance, self.agreement, self.other_settings)
        self.proof = Proof(trainer, self.folder, self.agreement.gather, self.strict)
        self.snapshot = Snapshot(trainer, self.agreement, self.chance, self.proof)
        fit_loops.install(trainer, self, self.restart)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = checkpoint_file.VerifiedIO()
        lightning_checkpoints.load_first(trainer, self._load)

    def _load(self) -> bool:
        """Load the newest checkpoint, and return whether there is any; else Lightning loads what a search has saved."""
        if self.trainer.state.fn != TrainerFn.FITTING or not self.enabled or self.loaded:
            return False
        self.loaded = True
        if not self.restart.load(self.host, self.flags):
            return False
        self.proof.told = list(self.restart.meta.get("resumes", ()))
        return True

    @property
    def resumes(self) -> list[dict[str, Any]]:
        """What came of each interruption of this run: of what was done again, what was as before."""
        return self.proof.resumes if self.proof else []

    @property
    def trains(self) -> bool:
        """Whether this is the training, and not a search before it, which has callbacks of its own."""
        return any(callback is self for callback in self.trainer.callbacks)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hear signals again, which Lightning has taken."""
        self._hear()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hear signals again, which Lightning has taken."""
        self._hear()

    def _hear(self) -> None:
        if self.stop and self.exact:
            self.stop.hear()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the optimizers ready for the state that Lightning gives them next."""
        if self.exact:
            self.restart.add_groups()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on, a signal is a wish."""
        self._hear()
        self.saved_at, self.saved_step = time.monotonic(), trainer.global_step
        if self.enabled:
            self.snapshot.run = (
                self.restart.meta["run"] if self.restart.meta else run_settings.described(trainer, self.flags)
            )
            if why := checkpoint_file.unreadable(self.snapshot.lightnings()[0]):
                raise UserError(f"a checkpoint of this run could not be read again: {why}")
            self.proof.start(self.restart.meta, self.flags, comparable=not self.other_settings)
        if self.stop and self.exact:
            self.stop.training = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the last checkpoint on the disk."""
        if self.exact:
            self.agreement.settle()
        if self.proof:
            self.proof.finish()
        self.writer.wait()
        self.writer.check("the training is done, and")
        best_model.age(trainer, keep=0)
        if self.stop:
            self.stop.training = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Have the last checkpoint on the disk."""
        self.writer.wait()
        if self.proof:
            self.proof.close()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Have the batch noted."""
        if self.enabled:
            self.proof.batch(batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Have the loss noted."""
        if self.enabled:
            self.proof.loss(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Have the step noted, and compared with that of before an interruption."""
        if self.enabled:
            self.proof.end(outputs)

    def batch_ended(self, done: bool, accumulates: bool) -> None:
        """Save if it is time; stop if it was asked for.

        Args:
            done: Whether a limit ends the training here, within an epoch: with more steps it goes on from here, and
                else this epoch is ended again.
            accumulates: Whether the gradients are to be added to; only a stop does not wait for their step.
        """
        step, self.cut = self.trainer.global_step, done
        stops = self._agree(now=done)
        self.due |= self.agreement.due
        self.due |= bool(self.every_n_steps) and step % self.every_n_steps == 0 and step != self.saved_step
        if done or ((stops or (self.due and not accumulates)) and not self.why):
            self.save("batch", last=stops or done)
        if stops and not done:
            self._interrupt("batch")

    def placed(self, why: str) -> None:
        """Learn, when an epoch begins, why no run could go on within it, on any rank."""
        before, self.why = self.why, next(filter(None, self.agreement.gather(why)), "")
        if self.why and not before and self.trainer.is_global_zero:
            print(f"{self.why}: checkpoints are saved at epochs' ends only, and a stop goes back there", flush=True)

    def epoch_ended(self, done: bool) -> None:
        """Save; stop if it was asked for and there is more to come."""
        stops = self._agree(now=True) and not done
        if not self.cut:
            self.save("epoch", last=stops or done)
        if stops:
            self._interrupt("epoch")

    def before_validation(self) -> None:
        """Keep a copy of the state: callbacks may exchange the weights for their average while it runs."""
        self.divergence.check(self.trainer)
        self.before = self.snapshot.take("validation") if self.enabled and not self.why else {}
        if self._agree():
            self._interrupt_validation()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn up to which batch all ranks validate: beyond, they would wait for each other."""
        self.validated = 0
        if trainer.state.fn != TrainerFn.FITTING or not self.exact:
            return
        if self.common is None and not trainer.sanity_checking:
            batches = sum(trainer.num_val_batches)
            self.common = min(self.agreement.gather(0 if batches == float("inf") else batches))

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop if it was asked for; the whole validation is run again."""
        self.validated += 1
        if self.before is not None and self.validated <= (self.common or 0) and self._agree():
            end_evaluation_mode(trainer)  # as the next batch would have it
            self._interrupt_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the state before."""
        self.before = None

    def _interrupt_validation(self) -> None:
        if not self.why:
            self.save("validation", last=True)
        self._interrupt("validation")

    def _agree(self, now: bool = False) -> bool:
        """Return whether any rank was told to stop."""
        minutes = (time.monotonic() - self.saved_at) / 60
        due = self.every_n_minutes and minutes >= max(self.every_n_minutes, self.stall / 60 / SHARE)
        if self.stop:
            self.stop.batch_ended()
        asked = (self.stop and self.stop.number) or 0
        due = bool(due) and not self.writer.busy
        self.agreement.agree(asked, due, self.divergence.found(), now, self.proof.doubt)
        if self.agreement.diverged:
            self.divergence.check(self.trainer)
        if self.proof.untold and self.proof.trained and self.agreement.doubt != UNSURE:
            self.proof.tell()
        return bool(self.agreement.asked)

    def _interrupt(self, kind: str) -> None:
        """Leave, all ranks alike."""
        self.proof.finish(kind)
        self.writer.wait()  # for the checkpoint before, if there is none of this step
        number, (whole, why) = self.agreement.asked, self.agreement.gather((self.folder.whole[-1:], self.writer.why))[0]
        step = whole[0] if whole else 0
        saved = f"{self.folder.file(step)} is whole" if whole else "there is no checkpoint"
        if why:
            saved += f", as that of step {self.trainer.global_step} could not be written ({why})"
        if self.why and step < self.trainer.global_step:
            saved += f"; {self.why}, so that it goes back to an epoch's end"
        child = self.trainer.local_rank > 0
        self.stop.tell(shutdown.words(step, f"{Signals(number).name}; {saved}"), not child)
        # Lightning, which started the other ranks of this node, takes a status of theirs for a crash and kills all.
        raise Interrupted(0 if child and not self.torchrun else shutdown.status(number))

    def save(self, kind: str, last: bool) -> None:
        """Save: in the background, or, if it is the last time, now. One rank of each host writes."""
        began = time.monotonic()
        if kind != "validation":  # of that, the state was looked at before
            self.divergence.check(self.trainer)
        if self.enabled:
            self.proof.check()
            state = self.snapshot.whole(self.before) if kind == "validation" else self.snapshot.take(kind)
            if self.stop:
                self.stop.writing = last
            if self.trainer.local_rank == 0:
                self.writer.write(state, state[checkpoint_file.KEY]["step"], state[checkpoint_file.KEY]["number"])
            self.proof.saved(kind)
            if last:
                self.writer.wait()
        best_model.age(self.trainer, self.folder.keep)
        self.saved_at, self.agreement.due = time.monotonic(), False
        self.saved_step, self.due = self.trainer.global_step, False
        self.stall = self.saved_at - began
