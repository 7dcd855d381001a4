"""What a run does that drill/command.py drills: it is short, writes down its steps, and waits where it is interrupted.

Nothing is asked of the user's program: it is enough that it trains by cli/run.py.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from sagemaker_lightning.compat import lightning_loaders
from sagemaker_lightning.contract.environment import Environment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import has_state
from sagemaker_lightning.resume.user_state import roots
from sagemaker_lightning.state import module_variables
from sagemaker_lightning.state.object_state import digest

# steps, so that a kill within an epoch goes back to a checkpoint there, and does a step again
SAVED_EVERY = 2
VALIDATED = 3  # batches of a validation, and of the test
LONGEST = 60.0  # seconds that a run waits to be sent a signal
HEARD = 5.0  # seconds from then on in which it is heard, if it is


def records(folder: Path, rank: int) -> Path:
    """Return the file in which a rank writes down what it does."""
    return folder / f"steps-{rank}.jsonl"


def redirect(config: Any, environment: Environment) -> None:
    """Have checkpoints and logs go to the drill's folder, whatever the flags say, and checkpoints be taken by steps."""
    config.checkpoint.dirpath = config.resume.dirpath = str(environment.checkpoint_dir)
    config.logger.save_dir = str(environment.log_dir)
    config.trainer.default_root_dir = None  # the working folder, which is the drill's
    config.resume.every_n_minutes, config.resume.every_n_steps = 0, SAVED_EVERY


class Drilled(Callback):
    """Shortens a run, writes down its steps, and waits at a moment to be interrupted.

    Args:
        asked: "folder" is the run's, "reached" the file by which it says that it waits for a signal, and which is
            removed when that was sent; "epochs" and "steps" (of an epoch) are the limits; "moment" is a kind ("batch",
            "validation" or "epoch"), the epoch and the batch, None for no moment; "workers" is the number of data
            workers, None for the loaders' own.
        resume: The run's sagemaker_lightning.resume.callback.Resume.
    """

    def __init__(self, asked: Mapping[str, Any], resume: Any) -> None:
        self.folder, self.reached = Path(asked["folder"]), Path(asked["reached"])
        self.epochs, self.steps = asked["epochs"], asked["steps"]
        self.moment, self.workers, self.resume = asked["moment"], asked["workers"], resume
        self.found_workers: int | None = None  # of the loader for training, None if it takes none
        self.begun: dict[str, Any] = {}  # what is known of a step before it is done

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Limit the run, before its data is set up."""
        if stage == "fit":
            self._refuse_other_folders(trainer)
            self._limit(trainer)
            self._look_at_loaders(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write down from where this process goes on."""
        self.variables = module_variables.states(_objects(trainer), roots(trainer))
        self._write(trainer, "start", step=trainer.global_step, workers=self.found_workers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write down what has changed of what no checkpoint has."""
        now = module_variables.states(_objects(trainer), roots(trainer))
        self._write(trainer, "end", changed=module_variables.changed(self.variables, now))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the batch as the step gets it, and the learning rates with which it is done."""
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
        """Write the step down."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        bits = (
            float(loss.detach()).hex() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        )
        self._write(trainer, "batch", batch_idx, step=trainer.global_step, **self.begun, loss=bits)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        *_: int,
    ) -> None:
        """Write it down, outside of the check before training."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._write(trainer, "validation", done, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write it down."""
        self._write(trainer, "epoch")

    def _write(self, trainer: Trainer, kind: str, *place: int, **known: Any) -> None:
        """Write down what is done now, and wait if this is the moment."""
        at = [kind, trainer.current_epoch, *place]
        with records(self.folder, trainer.global_rank).open("a") as file:
            file.write(json.dumps({"at": at, **known}) + "\n")
        if at == self.moment and trainer.is_global_zero:
            self.moment = None
            self._wait()

    def _wait(self) -> None:
        """Wait for a signal, all checkpoints written: it is not by chance what a kill finds."""
        self.resume.writer.wait()
        self.reached.touch()
        end = time.monotonic() + LONGEST
        while not self.resume.stop.number and time.monotonic() < end:
            if not self.reached.exists():  # it was sent
                end = min(end, time.monotonic() + HEARD)
            time.sleep(0.01)

    def _refuse_other_folders(self, trainer: Trainer) -> None:
        """Raise UserError if something writes to a folder of the job's own."""
        named = [(callback, "dirpath") for callback in trainer.callbacks] + [
            (one, "save_dir") for one in trainer.loggers
        ]
        for owner, name in named:
            given = getattr(owner, name, None)
            if given and (
                "://" in str(given) or not Path(given).absolute().is_relative_to(self.folder)
            ):
                raise UserError(
                    f"{type(owner).__name__}: found {name}={given}, to which a drill would write, too; allowed "
                    "is a relative folder, or none"
                )

    def _limit(self, trainer: Trainer) -> None:
        """Have a few epochs of a few steps, and short validations."""
        loop, batches = trainer.fit_loop, self.steps * trainer.accumulate_grad_batches
        loop.max_epochs = (
            min(loop.max_epochs, self.epochs) if (loop.max_epochs or -1) > 0 else self.epochs
        )
        loop.min_epochs = min(loop.min_epochs or 0, loop.max_epochs)
        for name, most in (("train", batches), ("val", VALIDATED), ("test", VALIDATED)):
            given = getattr(trainer, f"limit_{name}_batches")
            least = min(given, most) if isinstance(given, int) else most
            setattr(trainer, f"limit_{name}_batches", least if given else given)
        # batches: it is given by whoever validates within an epoch
        if isinstance(trainer.val_check_interval, int):
            trainer.val_check_interval = min(trainer.val_check_interval, max(1, batches // 2))
        trainer.check_val_every_n_epoch = trainer.check_val_every_n_epoch and 1
        trainer.log_every_n_steps = 1

    def _look_at_loaders(self, trainer: Trainer) -> None:
        """Have each DataLoader of training and validation use `workers`, if any are asked for."""
        before = lightning_loaders.preparing(trainer)

        def prepared(dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
            takes = isinstance(dataloader, DataLoader) and not has_state(dataloader)
            if (
                takes
                and not isinstance(dataloader.dataset, IterableDataset)
                and mode != RunningStage.TESTING
            ):
                if self.workers is not None:
                    _set_workers(dataloader, self.workers)
                if mode == RunningStage.TRAINING:
                    self.found_workers = dataloader.num_workers
            return before(dataloader, shuffle, mode)

        lightning_loaders.prepare_by(trainer, prepared)


def _objects(trainer: Trainer) -> dict[str, Any]:
    """Return what of the user's code runs in a training, by name."""
    schedules = {
        f"schedule.{k}": vars(one.scheduler) for k, one in enumerate(trainer.lr_scheduler_configs)
    }
    loaders = lightning_loaders.flat(trainer.train_dataloader)
    names = ("sampler", "batch_sampler", "worker_init_fn")
    orders = {
        f"loader.{k}.{name}": getattr(one, name, None)
        for k, one in enumerate(loaders)
        for name in names
    }
    return roots(trainer) | schedules | orders


def _set_workers(loader: DataLoader, number: int) -> None:
    """Give a loader another number of workers than it was made with."""
    prefetched = (loader.prefetch_factor or 2) if number else None
    settings = {"num_workers": number, "prefetch_factor": prefetched}
    vars(loader).update(
        settings if number else settings | {"persistent_workers": False, "timeout": 0}
    )
