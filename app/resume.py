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

from app import best, checkpoints, curves, graph, loops, partial, same, stop
from app.agreement import Agreement
from app.chance import Chance
from app.checkpoints import VerifiedIO
from app.exact import reached
from app.folder import Folder, Writer
from app.plain import NotPlain, encoded, plain
from app.restart import Restart
from app.stop import Interrupted, Stop

COMMON = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "optimizer_states",
          "lr_schedulers", "hparams_name", "hyper_parameters", "hparams_type", "datamodule_hparams_name",
          "datamodule_hyper_parameters", "datamodule_hparams_type"}  # fmt: skip
"""What is the same on all ranks in a Lightning checkpoint, or of the first one for all."""
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
        exact: Whether a run that was interrupted goes on where it was, and ends as if it had not been. If not, it is
            trained and saved as Lightning does, with any strategy; a run that is started again begins anew.
    """

    stop: Stop | None = None
    """What hears the signals, if anything does."""

    def __init__(self, dirpath: str, every_n_minutes: float = 0.5, every_n_steps: int = 0, keep: int = 3,
                 exact: bool = True) -> None:  # fmt: skip
        for flag, value, least in (("every_n_minutes", every_n_minutes, 0), ("every_n_steps", every_n_steps, 0),
                                   ("keep", keep, 1)):  # fmt: skip
            if value < least:
                raise ValueError(f"--resume.{flag}: found {value}, allowed is {least} or more")
        if "://" in dirpath:
            raise ValueError(f"--resume.dirpath: found {dirpath}, allowed is a folder; SageMaker copies it to S3")
        self.folder = Folder(Path(dirpath), keep, started=time.time())
        self.writer = Writer(self.folder)
        self.exact = exact
        self.every_n_minutes, self.every_n_steps = every_n_minutes, every_n_steps
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
        self.loaded = self.within = False
        supported = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
        if not supported and not self.enabled:
            self.exact = False
        if not self.exact:
            if trainer.is_global_zero:
                print("--resume.exact=false: this run is trained and saved as Lightning does; if it is interrupted, it "
                      "begins anew", flush=True)  # fmt: skip
            return
        if not supported:
            raise ValueError(
                f"--trainer.strategy: found {type(trainer.strategy).__name__}, whose runs cannot be resumed; allowed "
                "are ddp and its variants, or --resume.exact=false: it trains and saves as Lightning does"
            )
        trainer._signal_connector.register_signal_handlers = lambda: None
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self.agreement = Agreement(trainer)
        self.restart = Restart(trainer, self.folder, self.chance, self.agreement)
        self.held = partial.Held(trainer)
        loops.install(trainer, self, self.restart)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = VerifiedIO()
        connector = trainer._checkpoint_connector
        connector.resume_start = bound(self._load, connector.resume_start)

    def _load(self, lightnings, path=None, weights_only=None) -> None:
        """Load the newest checkpoint: in place of Lightning's `resume_start`, when all is set up to compare.

        A search before training loads again what it has saved itself: that is Lightning's.
        """
        if self.trainer.state.fn == TrainerFn.FITTING and self.enabled and not self.loaded:
            self.loaded = True
            if self.restart.load(self.host, self.flags):
                return
        lightnings(path, weights_only=True)

    @property
    def trains(self) -> bool:
        """Whether this is the training, and not a search before it, which has callbacks of its own."""
        return any(callback is self for callback in self.trainer.callbacks)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take note of what is there: a run that goes on has no such check."""
        if self.exact:
            self.held.mark()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what the check has changed."""
        if self.exact:
            self.held.state.touch()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on, a signal is a wish."""
        self.saved_at = time.monotonic()
        if self.enabled:
            self.run = self.restart.meta["run"] if self.restart.step else same.described(trainer, self.flags)
            state, _ = self._lightnings()
            if why := checkpoints.unreadable(state):
                raise ValueError(f"a checkpoint of this run could not be read again: {why}")
        if self.stop:
            self.stop.training = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the last checkpoint on the disk."""
        if self.exact:
            self.agreement.settle()
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
        self.within = True
        stops = self._agree()
        due = bool(self.every_n_steps) and self.trainer.global_step % self.every_n_steps == 0
        if stops or due or self.agreement.due:
            self._save(self._state("batch"), last=stops)
        if stops:
            self._interrupt()

    def epoch_ended(self, done: bool) -> None:
        """Save; stop if it was asked for and there is more to come."""
        self.within = False
        stops = self._agree(now=True) and not done
        self._save(self._state("epoch"), last=stops or done)
        if stops:
            self._interrupt()

    def before_validation(self) -> None:
        """Keep a copy of the state: callbacks may exchange the weights for their average while it runs."""
        self.before = None
        if self.trainer.fit_loop.epoch_loop._should_accumulate():
            return  # half of a step's gradients: a stop waits for its end
        self.within = True
        self.before = self._state("validation")
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
        if self.before:
            notes, name = self.before[checkpoints.KEY]["notes"], "optimizer_states"
            self.before[name] = plain(self.before[name], notes, self._cannot_be_saved, (name,))
        self._save(self.before, last=True)
        self._interrupt()

    def _agree(self, now: bool = False) -> bool:
        """Return whether any rank was told to stop."""
        minutes = (time.monotonic() - self.saved_at) / 60
        due = self.every_n_minutes and minutes >= max(self.every_n_minutes, self.stall / 60 / SHARE)
        asked = (self.stop and self.stop.number) or 0
        self.agreement.agree(asked, bool(due) and not self.writer.busy, now)
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
        if not self.enabled:
            return {}
        for logger in trainer.loggers if trainer.is_global_zero else ():
            curves.flush(logger)
        moment = gather(time.time_ns())[0]
        state, notes = self._lightnings(kind)
        own = {name: encoded(value) for name, value in state.items() if name not in COMMON}
        said = gather(graph.digest(own))
        if said[0] == said[trainer.global_rank]:
            own = {}
        known = partial.of_rank(trainer, gather, self.held) | {"own": own}
        ours = {
            "step": trainer.global_step, "kind": kind, "number": moment, "saved_at": moment / 1e9,
            "seed": self.chance.seed, "world_size": trainer.world_size, "should_stop": bool(trainer.should_stop),
            "ranks": gather(known), "shown": partial.of_job(trainer),
            "run": self.run, "version": getattr(trainer.logger, "version", None),
            "reached": reached(trainer) if kind != "epoch" else None, "notes": notes,
            "made": trainer.fit_loop._last_train_dl_reload_epoch, "searched": partial.searched(trainer),
        }  # fmt: skip
        if kind == "epoch":
            loops.end_as_lightning_does(state["loops"]["fit_loop"])
        return state | {checkpoints.KEY: ours}

    def _lightnings(self, kind: str = "") -> tuple[dict[str, Any], dict]:
        """Return what Lightning saves, copied, as others can read it too; and what of it was of another type.

        Optimizers, which no validation changes, are not copied for one that may not be interrupted.
        """
        notes: dict[tuple, tuple] = {}
        state = self.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        later = state.pop("optimizer_states") if kind == "validation" else None
        made = plain(state, notes, self._cannot_be_saved)
        return made if later is None else made | {"optimizer_states": later}, notes

    def _cannot_be_saved(self, found: NotPlain) -> Any:
        """Return the text that stands for a hyperparameter, which no run needs to go on; else ValueError."""
        name = str(found.path[0])
        if name.startswith(("hyper_parameters", "datamodule_hyper_parameters", "hparams", "datamodule_hparams")):
            return f"({found.kind})"
        kind = type(self.trainer.lightning_module)
        model = f"{kind.__module__}.{kind.__qualname__}"
        whose = {"state_dict": "state_dict() of", "callbacks": "a callback of", "lr_schedulers": "a scheduler of",
                 "optimizer_states": "an optimizer of"}  # fmt: skip
        of = whose.get(name, "on_save_checkpoint() or state_dict() of")
        raise ValueError(
            f"a checkpoint of this run could not be read again: {found} ({of} {model}); "
            "keep numbers, text, tensors, arrays, lists and dicts there"
        )

    def _save(self, state: dict[str, Any], last: bool) -> None:
        """Write a state: in the background, or, if it is the last one, now. One rank of each host writes."""
        began = time.monotonic()
        if self.enabled and self.trainer.local_rank == 0:
            if self.stop:
                self.stop.writing = last
            self.writer.write(state, state[checkpoints.KEY]["step"], state[checkpoints.KEY]["number"])
            if last:
                self.writer.wait()
        best.age(self.trainer, self.folder.keep)
        self.saved_at, self.agreement.due = time.monotonic(), False
        self.stall = self.saved_at - began
