"""What the drill adds to a run: limits, a record of its steps, and waiting.

drill/command.py starts these runs. The user's program needs no change, as long as its Trainer has
an ExactResume: drill/hook.py adds this to each Trainer.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.loggers import MLFlowLogger, WandbLogger
from pytorch_lightning.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from sagemaker_lightning.compat import lightning_loaders
from sagemaker_lightning.compat.lightning_callbacks import EarlyCallback
from sagemaker_lightning.compat.lightning_loops import steps_done
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.resume.callback import ExactResume
from sagemaker_lightning.resume.parts.roots import user_objects
from sagemaker_lightning.state import module_variables
from sagemaker_lightning.state.digests import digest

# In steps: a kill within an epoch goes back to a checkpoint in that epoch, and repeats a step.
CHECKPOINT_EVERY_N_STEPS = 2
# Batches of a validation, and of the test.
EVALUATION_BATCHES = 3
# Seconds that a run waits for its signal.
SIGNAL_WAIT_SECONDS = 60.0
# Seconds that a run waits, after the signal was sent, for its handler to be called.
HANDLER_WAIT_SECONDS = 5.0

_has_trained: list[bool] = []
"""Not empty if this process has begun a training: their steps would have the same numbers."""


def records(folder: Path, rank: int) -> Path:
    """Return the file in which a rank records its steps."""
    return folder / f"steps-{rank}.jsonl"


class Drilled(EarlyCallback):
    """Shortens a run, records its steps, and waits at one moment to be interrupted.

    A Trainer without an ExactResume is left as it is.

    Args:
        asked: What the drill asks for. "folder" is the run's folder. "reached" is the file that the
            run creates when it waits for a signal; the drill removes it when the signal is sent.
            "epochs" and "steps" (of an epoch) are the limits. "moment" is a kind ("batch",
            "validation" or "epoch"), the epoch and the batch; None for no moment. "workers" is the
            number of data workers; None for the loaders' own.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.folder = Path(asked["folder"])
        self.reached = Path(asked["reached"])
        self.epochs = asked["epochs"]
        self.steps = asked["steps"]
        self.moment = asked["moment"]
        self.workers = asked["workers"]
        # Data workers of the loader for training; None if that loader takes no number.
        self.found_workers: int | None = None
        # What is known of a step before it is done.
        self.begun: dict[str, Any] = {}

    def run_begins(self, trainer: Trainer) -> None:
        """Be the last of the trainer's callbacks, and have checkpoints saved often.

        A record is of what all others have done.
        """
        callbacks = [each for each in callbacks_of(trainer) if each is not self]
        if resume := _exact_resume(trainer):
            callbacks.append(self)
            resume.save_every(steps=CHECKPOINT_EVERY_N_STEPS, minutes=0)
        trainer.callbacks = callbacks  # type: ignore[attr-defined]  # Lightning sets it from outside

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Limit the run, before Lightning sets up the data.

        Raises:
            UserError: The program trains for the second time, or writes outside of the drill.
        """
        if stage == "fit":
            if _has_trained:
                raise UserError(
                    "a drill compares one training: found a second one in this program; drill a "
                    "program that trains once"
                )
            self._refuse_other_folders(trainer)
            _has_trained.append(True)
            self._limit(trainer)
            self._replace_loader_preparation(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the step at which this process begins."""
        self.variables = module_variables.variable_digests(
            _user_objects(trainer), user_objects(trainer)
        )
        self._record(trainer, "start", step=steps_done(trainer), workers=self.found_workers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record which variables outside of the checkpoint have changed."""
        variables_now = module_variables.variable_digests(
            _user_objects(trainer), user_objects(trainer)
        )
        self._record(
            trainer,
            "end",
            changed=module_variables.changed_variables(self.variables, variables_now),
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the batch as the step gets it, and the learning rates of the step."""
        rates = [
            group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups
        ]
        self.begun = {
            "batch": digest(batch).hex(),
            "learning rate": [float(rate).hex() for rate in rates],
        }

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step with its batch, learning rates and loss."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        bits = (
            float(loss.detach()).hex() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        )
        self._record(trainer, "batch", batch_idx, step=steps_done(trainer), **self.begun, loss=bits)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        *_: int,
    ) -> None:
        """Record the validation batch, except in the sanity check before training."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._record(trainer, "validation", done, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the end of the epoch."""
        self._record(trainer, "epoch")

    def _record(self, trainer: Trainer, kind: str, *place: int, **known: Any) -> None:
        """Append a line to this rank's file; wait for the signal if this is the moment."""
        at = [kind, trainer.current_epoch, *place]
        with records(self.folder, trainer.global_rank).open("a") as file:
            file.write(json.dumps({"at": at, **known}) + "\n")
        resume = _exact_resume(trainer)
        if at == self.moment and trainer.is_global_zero and resume:
            self.moment = None
            self._wait_for_signal(resume)

    def _wait_for_signal(self, resume: ExactResume) -> None:
        """Wait for a signal, after all checkpoints are written: a kill always finds them."""
        assert resume.run and resume.stop  # the run trains
        resume.run.writer.wait()
        self.reached.touch()
        end = time.monotonic() + SIGNAL_WAIT_SECONDS
        while not resume.stop.signal_number and time.monotonic() < end:
            # The drill removes the file when it has sent the signal.
            if not self.reached.exists():
                end = min(end, time.monotonic() + HANDLER_WAIT_SECONDS)
            time.sleep(0.01)

    def _refuse_other_folders(self, trainer: Trainer) -> None:
        """Raise UserError if a callback or logger writes outside of the drill's folder."""
        for logger in trainer.loggers:
            if isinstance(logger, (MLFlowLogger, WandbLogger)):
                raise UserError(
                    f"{type(logger).__name__}: a drill would log to its server, too; expected "
                    "loggers of files; drill the program without it, as by --trainer.logger=true"
                )
        settings = [(callback, "dirpath") for callback in callbacks_of(trainer)] + [
            (logger, "save_dir") for logger in trainer.loggers
        ]
        for owner, name in settings:
            path = getattr(owner, name, None)
            if path and (
                "://" in str(path) or not Path(path).absolute().is_relative_to(self.folder)
            ):
                raise UserError(
                    f"{type(owner).__name__}: found {name}={path}, to which a drill would write, "
                    "too; expected a relative folder, or none"
                )

    def _limit(self, trainer: Trainer) -> None:
        """Limit the run to a few epochs of a few steps, with short validations."""
        loop = trainer.fit_loop
        batches = self.steps * trainer.accumulate_grad_batches
        loop.max_epochs = (
            min(loop.max_epochs, self.epochs) if (loop.max_epochs or 0) > 0 else self.epochs
        )
        loop.min_epochs = min(loop.min_epochs or 0, loop.max_epochs)
        for name, largest in (
            ("train", batches),
            ("val", EVALUATION_BATCHES),
            ("test", EVALUATION_BATCHES),
        ):
            limit = getattr(trainer, f"limit_{name}_batches")
            smaller = min(limit, largest) if isinstance(limit, int) else largest
            setattr(trainer, f"limit_{name}_batches", smaller if limit else limit)
        # An integer is a number of batches, set by users who validate within an epoch.
        if isinstance(trainer.val_check_interval, int):
            trainer.val_check_interval = min(trainer.val_check_interval, max(1, batches // 2))
        trainer.check_val_every_n_epoch = trainer.check_val_every_n_epoch and 1
        trainer.log_every_n_steps = 1  # type: ignore[attr-defined]  # Lightning sets it, too

    def _replace_loader_preparation(self, trainer: Trainer) -> None:
        """Set `self.workers`, unless None, in each DataLoader of training and validation."""
        prepare_before = lightning_loaders.preparation(trainer)

        def prepare(dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
            is_plain_loader = isinstance(dataloader, DataLoader) and not has_state(dataloader)
            if (
                is_plain_loader
                and not isinstance(dataloader.dataset, IterableDataset)
                and mode != RunningStage.TESTING
            ):
                if self.workers is not None:
                    _set_workers(dataloader, self.workers)
                if mode == RunningStage.TRAINING:
                    self.found_workers = dataloader.num_workers
            return prepare_before(dataloader, shuffle, mode)

        lightning_loaders.replace_preparation(trainer, prepare)


def _exact_resume(trainer: Trainer) -> ExactResume | None:
    """Return the trainer's ExactResume; None if it has none."""
    return next((each for each in callbacks_of(trainer) if isinstance(each, ExactResume)), None)


def _user_objects(trainer: Trainer) -> dict[str, Any]:
    """Return the objects of the user's code that run in a training, by name."""
    schedules = {
        f"schedule.{k}": vars(component.scheduler)
        for k, component in enumerate(trainer.lr_scheduler_configs)
    }
    loaders = lightning_loaders.flattened(trainer.train_dataloader)
    names = ("sampler", "batch_sampler", "worker_init_fn")
    data_order = {
        f"loader.{k}.{name}": getattr(component, name, None)
        for k, component in enumerate(loaders)
        for name in names
    }
    return user_objects(trainer) | schedules | data_order


def _set_workers(loader: DataLoader[Any], number: int) -> None:
    """Change the number of workers of a loader that exists."""
    prefetched = (loader.prefetch_factor or 2) if number else None
    settings = {"num_workers": number, "prefetch_factor": prefetched}
    vars(loader).update(
        settings if number else settings | {"persistent_workers": False, "timeout": 0}
    )
