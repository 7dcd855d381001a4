"""Training that can be interrupted at any moment and ends with the weights it would have had.

States are taken where nothing is half done (app/loops.py); what a Lightning checkpoint leaves out is in app/partial.py;
what is random needs no state (app/chance.py). All ranks agree on a stop by a small collective on a group of its own:
Lightning's handler of SIGTERM calls one by itself, in which ranks that are not in step hang (Lightning issue 20806).
"""

import time
from collections.abc import Mapping
from functools import partial as bound
from pathlib import Path
from signal import Signals
from typing import Any

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from pytorch_lightning.trainer.states import TrainerFn

from app import best, checkpoints, curves, divergence, loops, partial, same, stop
from app.agreement import Agreement
from app.chance import Chance
from app.exact import reached
from app.folder import Folder, Writer
from app.restart import Restart
from app.stop import Interrupted, Stop

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
        other_settings: Whether another learning rate, gradient clipping or precision may be given than before.
    """

    stop: Stop | None = None
    """What hears the signals, if anything does."""

    def __init__(
        self, dirpath: str, every_n_minutes: float = 0.5, every_n_steps: int = 0, keep: int = 3,
        other_settings: bool = False,
    ) -> None:  # fmt: skip
        for flag, value, least in (("every_n_minutes", every_n_minutes, 0), ("every_n_steps", every_n_steps, 0),
                                   ("keep", keep, 1)):  # fmt: skip
            if not value >= least:  # nan is not
                raise ValueError(f"--resume.{flag}: found {value}, allowed is {least} or more")
        if "://" in dirpath:
            raise ValueError(f"--resume.dirpath: found {dirpath}, allowed is a folder; SageMaker copies it to S3")
        self.folder = Folder(Path(dirpath), keep, started=time.time())
        self.writer = Writer(self.folder)
        self.every_n_minutes, self.every_n_steps, self.other_settings = every_n_minutes, every_n_steps, other_settings
        self.before: dict[str, Any] | None = None  # the state before the validation that is running
        self.common: int | None = None  # batches of a validation that all ranks have
        self.stall = 0.0  # seconds that training waited for the last checkpoint

    def attach(self, chance: Chance, host: str, flags: Mapping[str, object], torchrun: bool, enabled: bool) -> None:
        """Learn what is known before training.

        Args:
            chance: What knows the seed of all.
            host: Name of this host.
            flags: All settings by flag.
            torchrun: Whether torchrun started this process.
            enabled: Whether there are to be checkpoints.
        """
        self.chance, self.host, self.flags, self.torchrun, self.enabled = chance, host, flags, torchrun, enabled

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put this application's loops, files and handling of signals in place of Lightning's."""
        if stage != "fit":
            return
        self.trainer = trainer
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ValueError(
                f"--trainer.strategy: found {type(trainer.strategy).__name__}, whose runs cannot be resumed; allowed "
                "are ddp and its variants"
            )
        self.agreement, self.divergence = Agreement(trainer), divergence.of(trainer)
        self.restart = Restart(trainer, self.folder, self.chance, self.agreement, self.other_settings)
        loops.install(trainer, self, self.restart)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = checkpoints.VerifiedIO()
        connector = trainer._checkpoint_connector
        connector.resume_start = bound(self._load, connector.resume_start)

    def _load(self, lightnings, path=None, weights_only=None) -> None:
        """Load the newest checkpoint: in place of Lightning's `resume_start`, when all is set up to compare."""
        if self.trainer.state.fn == TrainerFn.FITTING and self.enabled:
            self.restart.load(self.host, self.flags)
        else:
            lightnings(path, weights_only=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on, a signal is a wish."""
        if self.enabled:
            checkpoints.check_readable(trainer._checkpoint_connector.dump_checkpoint(False))
        self.run, self.saved_at = same.described(trainer, self.flags), time.monotonic()
        if self.stop:
            self.stop.training = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the last checkpoint on the disk."""
        self.writer.wait()
        self.writer.check("the training is done, and")
        best.age(trainer, keep=0)
        if self.stop:
            self.stop.training = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Have the last checkpoint on the disk."""
        self.writer.wait()

    def batch_ended(self) -> None:
        """Save if it is time; stop if it was asked for."""
        stops = self._agree()
        if stops or self.agreement.due or (self.every_n_steps and self.trainer.global_step % self.every_n_steps == 0):
            self._save(self._state("batch"), last=stops)
        if stops:
            self._interrupt()

    def epoch_ended(self, done: bool) -> None:
        """Save; stop if it was asked for and there is more to come."""
        stops = self._agree(now=True) and not done
        self._save(self._state("epoch"), last=stops or done)
        if stops:
            self._interrupt()

    def before_validation(self) -> None:
        """Keep a copy of the state: callbacks may exchange the weights for their average while it runs."""
        self.before = None
        if self.trainer.fit_loop.epoch_loop._should_accumulate():
            return  # half of a step's gradients: a stop waits for its end
        state = self._state("validation")
        optimizers = state.pop("optimizer_states", [])  # no validation changes these
        self.before = partial.copied(state) | {"optimizer_states": optimizers}
        if self._agree():
            self._interrupt_validation()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn up to which batch all ranks validate: beyond, they would wait for each other."""
        if self.common is None and not trainer.sanity_checking:
            batches = sum(trainer.num_val_batches)
            self.common = min(self.agreement.gather(0 if batches == float("inf") else batches))
        self.validated = 0

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop if it was asked for; the whole validation is run again."""
        self.validated += 1
        if self.before is not None and self.validated <= (self.common or 0) and self._agree():
            self._interrupt_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the state before."""
        self.before = None

    def _interrupt_validation(self) -> None:
        self._save(self.before, last=True)
        self._interrupt()

    def _agree(self, now: bool = False) -> bool:
        """Return whether any rank was told to stop."""
        minutes = (time.monotonic() - self.saved_at) / 60
        due = self.every_n_minutes and minutes >= max(self.every_n_minutes, self.stall / 60 / SHARE)
        asked = (self.stop and self.stop.number) or 0
        self.agreement.agree(asked, bool(due) and not self.writer.busy, self.divergence.found(), now)
        if self.agreement.diverged:
            self.divergence.check(self.trainer)
        return bool(self.agreement.asked)

    def _interrupt(self) -> None:
        """Leave, all ranks alike."""
        number, step = self.agreement.asked, self.agreement.gather((self.folder.whole or [0])[-1])[0]
        saved = f"{self.folder.file(step)} is whole" if step else "there is no checkpoint"
        child = self.trainer.local_rank > 0
        self.stop.tell(stop.words(step, f"{Signals(number).name}; {saved}"), not child)
        # Lightning, which started the other ranks of this node, takes a status of theirs for a crash and kills all.
        raise Interrupted(0 if child and not self.torchrun else stop.status(number))

    def _state(self, kind: str) -> dict[str, Any]:
        """Return the state of the job, all that is needed to go on from here; {} where there are no checkpoints."""
        trainer, gather = self.trainer, self.agreement.gather
        self.divergence.check(trainer)
        if not self.enabled:
            return {}
        for logger in trainer.loggers if trainer.is_global_zero else ():
            curves.flush(logger)
        moment = gather(time.time_ns())[0]
        ours = {
            "step": trainer.global_step, "kind": kind, "number": moment, "saved_at": moment / 1e9,
            "seed": self.chance.seed, "world_size": trainer.world_size, "should_stop": bool(trainer.should_stop),
            "ranks": gather(partial.of_rank(trainer, gather)), "shown": partial.of_job(trainer),
            "run": self.run, "version": getattr(trainer.logger, "version", None),
            "reached": reached(trainer) if kind != "epoch" else None,
        }  # fmt: skip
        state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if kind == "epoch":
            loops.end_as_lightning_does(state["loops"]["fit_loop"])
        return state | {checkpoints.KEY: ours}

    def _save(self, state: dict[str, Any], last: bool) -> None:
        """Write a state: in the background, or, if it is the last one, now. One rank of each host writes."""
        began = time.monotonic()
        if self.enabled and self.trainer.local_rank == 0:
            if self.stop:
                self.stop.writing = last
            self.writer.write(partial.copied(state), state[checkpoints.KEY]["step"], state[checkpoints.KEY]["number"])
            if last:
                self.writer.wait()
        best.age(self.trainer, self.folder.keep)
        self.saved_at, self.agreement.due = time.monotonic(), False
        self.stall = self.saved_at - began
