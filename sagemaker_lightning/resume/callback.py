"""ExactResume: an interrupted training ends with the weights of an uninterrupted one.

States are saved where nothing is half done (resume/moments.py). resume/parts/ has what a
checkpoint holds, more than Lightning's do. Random draws need no saved state (data/seeding.py). All
ranks agree on a stop with a small collective operation on a process group of its own. Lightning's
handler of SIGTERM instead calls a collective operation right away, in which ranks that are not at
the same step hang (Lightning issue 20806).
"""

import atexit
import copy
import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.callbacks.rank_consistency import RankConsistency
from sagemaker_lightning.compat.lightning_callbacks import EarlyCallback, is_search_only
from sagemaker_lightning.compat.lightning_loaders import prepare_data_within
from sagemaker_lightning.compat.lightning_trainer import callbacks_of, finds_hosts_by_variables
from sagemaker_lightning.compat.model_parallel import reshard
from sagemaker_lightning.contract import checkpoint_home, rendezvous
from sagemaker_lightning.contract.atomic_files import check_writable
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.restart import ContainerRestart
from sagemaker_lightning.contract.shutdown import Stop, status
from sagemaker_lightning.data.seeded_indices import draws_undone
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.process import parent_process
from sagemaker_lightning.resume import (
    arguments,
    first_draws,
    logs,
    memory_copies,
    moments,
    strategies,
)
from sagemaker_lightning.resume.container_restarts import ContainerRestarts
from sagemaker_lightning.resume.failed_fit import FailedFit
from sagemaker_lightning.resume.files import best_model, checkpoint_file, folder_lock
from sagemaker_lightning.resume.files.checkpoint_dir import CheckpointDir
from sagemaker_lightning.resume.files.entries import ResumeResult
from sagemaker_lightning.resume.files.first_start import FirstStart
from sagemaker_lightning.resume.parts.given_parts import Parts
from sagemaker_lightning.resume.parts.lightning_callbacks.searches import search_again
from sagemaker_lightning.resume.parts.roots import names_in_code
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.process_changes import process_changes, unoptimized_scripts
from sagemaker_lightning.resume.run import Options, Run
from sagemaker_lightning.resume.same_run import code_numbers, earlier_fits, run_settings
from sagemaker_lightning.resume.signals import Signals
from sagemaker_lightning.resume.stopping import Intervals
from sagemaker_lightning.state.graph.state import NOTHING_TRAINED


class ExactResume(EarlyCallback):
    """Ends an interrupted training with the very weights of one that was not interrupted.

        trainer = Trainer(max_epochs=5, callbacks=[ExactResume("checkpoints", seed=42)])
        trainer.fit(model)

    It saves checkpoints at the end of each epoch and, within it, by the clock or by steps; it
    resumes from the newest one. It seeds what a training draws, and makes the order of DataLoaders
    a function of seed and epoch (data/seeding.py). Several ranks share the batches of a DataLoader
    and train as one process would (callbacks/rank_consistency.py). On SIGTERM or Ctrl-C it stops at
    the end of the batch, with a checkpoint, by raising Interrupted, a SystemExit.

    `fit(ckpt_path=...)` is where a run begins that has no checkpoint in `dirpath` yet. A run that
    has one resumes from it and says that it does not load `ckpt_path`.

    In a job of several hosts, a run waits, before they connect, until their names resolve. Where
    nothing of ours has started the program, it has to call `join_hosts` before the Trainer is made.
    To make the callback has no effect but the seed, and a variable that names this process to ranks
    that Lightning starts before it calls any hook.

    Each training needs a folder of its own: a second model that is trained in one program with the
    same folder is refused.

    Args:
        dirpath: Folder of the checkpoints.
        seed: Decides all draws, beginning with those after this callback is made: a model that is
            made later begins with the same weights each time. None for another one in each run. A
            resumed run takes it from the checkpoint.
        every_n_minutes: Minutes between two checkpoints within an epoch; 0 for none. The interval
            gets longer where training would wait for checkpoints for more than a hundredth of the
            time.
        every_n_steps: Optimizer steps between two checkpoints; 0 for none.
        keep: Number of checkpoints that are kept.
        exact: Whether an interrupted run resumes where it was. If not, it is trained and saved as
            Lightning does, with any strategy, and starts from the beginning after an interruption.
        other_settings: Whether a resumed run may have another learning rate (all by one factor),
            gradient clipping or precision than before, and another schedule, which a line names.
        strict: Whether the job ends if a resumed run does something else than the interrupted one.
        lr_scaling: What multiplies the learning rate: "none" (1), "linear" (number of ranks) or
            "sqrt" (its square root).
        settings: What else identifies the run, by name, such as {"--width": 64}: a checkpoint of a
            run with others is refused, and all ranks must have the same.
        parts: State of your own, by name, such as {"env": env}: objects with `state_dict` and
            `load_state_dict` (resume/parts/given_parts.py says when they are called).
        saves: Whether checkpoints are saved and read.
        environment: What SageMaker says about the job, for a program whose hosts have found each
            other already. None: read SageMaker's variables and wait for the hosts.
        stop: What receives the signals; it is entered already. None to receive them from the
            beginning of each training to its end.

    Raises:
        UserError: An argument is of another type, a number is too small, or `dirpath` is a URL.
            From `fit`: a host's name does not resolve, or a host does not know which one it is,
            the checkpoint is of another run, the strategy is not one of one device, ddp and
            ModelParallelStrategy, or its mesh does not have as many ranks or shards not all
            weights, another process trains with the folder, or a part of the state cannot be saved.
    """

    def __init__(
        self,
        dirpath: str | PathLike[str],
        seed: int | None = None,
        every_n_minutes: float = 0.5,
        every_n_steps: int = 0,
        keep: int = 3,
        exact: bool = True,
        other_settings: bool = False,
        strict: bool = False,
        lr_scaling: str = "none",
        settings: Mapping[str, object] = MappingProxyType({}),
        parts: Mapping[str, Any] = MappingProxyType({}),
        saves: bool = True,
        environment: SageMakerEnvironment | None = None,
        stop: Stop | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        self.settings = dict(settings) if isinstance(settings, Mapping) else {}
        self.arguments: dict[str, Any] = given | {"settings": self.settings}
        """The arguments by name, to make a callback as this one."""
        arguments.check(given, self._name)
        self.parts = Parts(parts)
        self.environment = environment or SageMakerEnvironment.read()
        self.home = self.environment.checkpoint_home(Path(dirpath))
        self.folder = self._folder_of(self.home.folder)
        """The folder of the newest training's checkpoints."""
        self.container_restarts = ContainerRestarts(self.environment)
        self.intervals = Intervals(every_n_minutes, every_n_steps)
        self.signals = Signals(stop, self.home)
        self.seeding = Seeding(seed, names_in_code)
        self.rank_consistency = RankConsistency(
            self.environment, settings, lr_scaling, other_settings
        )
        self.before_others = _BeforeOtherCallbacks(self)
        self.joins_hosts = environment is None
        self.is_alone = stop is None
        """Whether this is a program of the user's own, and not the command line's."""
        if self.is_alone:
            parent_process.bind_to_launcher(os.environ)
        self.trainer: Trainer | None = None
        """The trainer of the newest training."""
        self.settings_of_run: dict[str, object] = {}
        """The settings that identify its run, by name."""
        self.saves = saves and exact
        """Whether its checkpoints are saved and read."""
        self.exact = exact
        """Whether it resumes where it was."""
        self.run: Run | None = None
        """The training, while there is one that resumes where it was."""
        self.fit = 1
        """Which of the trainings with its folder the newest one is."""
        self.trained = NOTHING_TRAINED
        """What the trainings of other trainers before have changed of the user's objects."""
        self.results: list[ResumeResult] = []
        """What `resumes` returns once the training has ended."""
        self.start_before: FirstStart | None = None
        self.failed: FailedFit | None = None
        """The training before, if it has failed."""
        self.changed = ExitStack()
        """Gives back what a run of the trainer has changed in this process."""
        self.seeds = seed is not None and self.is_alone  # the command line has seeded before
        if seed is not None and self.seeds:
            first_draws.seed_what_follows(seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExactResume":
        """Return a callback with the same arguments, which knows of no run."""
        kept = ("environment", "stop", "settings", "parts")
        arguments = {
            name: value if name in kept else copy.deepcopy(value, memo)
            for name, value in self.arguments.items()
        }
        return type(self)(**arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: a library may save the callbacks beside a model (darts does).

        Parts are left out: what is read from a file is no longer what the program trains with.
        """
        return _unpickle, (type(self), self.arguments | {"parts": {}})

    def _folder_of(self, path: Path) -> CheckpointDir:
        """Return a folder of checkpoints of one training."""
        copies = memory_copies.folder_of(self.environment.copies, path)
        home = replace(self.home, folder=path)
        return CheckpointDir(home, self.arguments["keep"], self._name("dirpath"), copies)

    def _name(self, argument: str) -> str:
        """Return how messages name an argument: the command line has a flag for it."""
        flag = f"--resume.{argument}"
        return flag if flag in self.settings else f"ExactResume({argument}=...)"

    @property
    def stop(self) -> Stop | None:
        """What receives the signals now; None if nothing of ours does."""
        return self.signals.stop

    @property
    def resumes(self) -> list[ResumeResult]:
        """The results of this run's interruptions: were repeated steps identical?"""
        return self.run.check.results if self.run else self.results

    @property
    def restarts(self) -> list[ContainerRestart]:
        """The restarts of this program in its container; the newest with what it has cost."""
        return self.container_restarts.all()

    def save_every(self, steps: int, minutes: float) -> None:
        """Save checkpoints within an epoch at other intervals than the arguments say.

        Args:
            steps: Optimizer steps between two checkpoints; 0 for none.
            minutes: Minutes between two checkpoints; 0 for none.
        """
        self.intervals.steps = steps
        self.intervals.minutes = minutes

    # Before and after a training ------------------------------------------------------------------

    def run_begins(self, trainer: Trainer) -> None:
        """Put our callbacks into the trainer's, and have its loggers continue their files.

        Before that, let the hosts of a job find each other: they connect next.

        Raises:
            UserError: The trainer has a callback that does the same, a host's name does not
                resolve, or this host does not know which one it is.
        """
        if self.joins_hosts and trainer.num_nodes > 1:
            if finds_hosts_by_variables(trainer.strategy):
                rendezvous.check_joined(self.environment, os.environ)
            rendezvous.join(self.environment, os.environ)
        self.saves = self.arguments["saves"] and self.arguments["exact"]
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning sets it from outside
            self.saves = False
        self.changed.close()
        if self.arguments["exact"]:
            self.changed.enter_context(process_changes())
        trains = trainer.state.fn == TrainerFn.FITTING
        if trains:
            self._join_callbacks(trainer)
            if trainer is not self.trainer:
                # Once for a trainer: callbacks change some of them while it trains.
                self.settings_of_run = self._settings_of_run(trainer)
            trains = not is_search_only(trainer)
        if trains:
            self.signals.note_unheeded(trainer)
            self._choose_folder(trainer)
            self.trainer = trainer
            self._forget_run()
            if self.arguments["exact"]:
                strategies.settle_mesh(trainer)
                # It often draws only where its files are missing, and on one rank of a host alone.
                prepare_data_within(trainer, draws_undone)
        folder = self.folder if self.saves else None
        self.start_before = logs.prepare(trainer, folder, trains, self.fit == 1)

    def _choose_folder(self, trainer: Trainer) -> None:
        """Give the training a folder: another training of one trainer has another one."""
        self.fit = earlier_fits.next_fit(self.home.folder, trainer)
        self.seeding.turn = (self.fit,) if self.fit > 1 else ()
        before, path = self.folder, checkpoint_home.folder_of(self.home.folder, self.fit)
        if path != before.path:
            self.folder = self._folder_of(path)
            self.trained = NOTHING_TRAINED  # the checkpoints of the one before have that

    def _join_callbacks(self, trainer: Trainer) -> None:
        """Put our callbacks into the trainer's.

        Raises:
            UserError: The trainer has a callback that does the same.
        """
        own = (self.seeding, self.before_others, self.rank_consistency)
        others = [each for each in callbacks_of(trainer) if not any(each is mine for mine in own)]
        if sum(callback is self for callback in others) > 1:
            raise UserError(
                "Trainer(callbacks=...): found one ExactResume twice; keep it in the list once"
            )
        for callback in others:
            if isinstance(callback, ExactResume) and callback is not self:
                raise UserError(
                    f"Trainer(callbacks=...): found two ExactResume, for {self.folder.path} and "
                    f"{callback.folder.path}; expected one"
                )
            if isinstance(callback, (Seeding, RankConsistency)):
                raise UserError(
                    f"Trainer(callbacks=...): found {type(callback).__name__} beside ExactResume, "
                    "which has one of its own; leave it out"
                )
        # Other callbacks draw random numbers in their hooks, so the seed is set first. Lightning
        # keeps callbacks that write checkpoints at the end.
        ends = [number for number, each in enumerate(others) if isinstance(each, Checkpoint)]
        end = min(ends, default=len(others))
        trainer.callbacks = [  # type: ignore[attr-defined]  # Lightning sets it from outside
            self.seeding,
            self.before_others,
            *others[:end],
            self.rank_consistency,
            *others[end:],
        ]

    def _settings_of_run(self, trainer: Trainer) -> dict[str, object]:
        """Return the settings that identify the run, by name."""
        settings = run_settings.trainer_settings(trainer)
        settings["--lr_scaling"] = self.arguments["lr_scaling"]
        if self.arguments["seed"] is not None and "--seed_everything" not in self.settings:
            settings[self._name("seed")] = self.arguments["seed"]
        return settings | dict(self.settings)

    def _forget_run(self) -> None:
        """Drop the run of the training before; its results stay until the next one begins."""
        self.run = None
        self.results = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's loops, checkpoint files and signal handling by ours.

        Raises:
            UserError: Runs with the trainer's strategy cannot be resumed, or the folder cannot be
                written to.
        """
        if self.is_alone:
            parent_process.end_with_launcher(os.environ)
        if stage != "fit" or is_search_only(trainer):
            return
        self.container_restarts.ranks_are_there(trainer)
        strategy = trainer.strategy
        supported = strategies.is_supported(strategy)
        self.exact = self.arguments["exact"] and (supported or self.saves)
        best_model.keep_retired(trainer, self.saves)
        if not self.exact:
            self.seeding.leave_loaders_to_lightning(trainer)
            if trainer.is_global_zero:
                log.info(
                    "this run is trained and saved as Lightning does; an interruption makes it "
                    "start over"
                )
            return
        if not supported:
            raise strategies.unsupported(strategy, "--trainer.strategy" in self.settings)
        host = self.environment.host_name(trainer.num_nodes, trainer.node_rank)
        strategies.prepare(strategy, host)
        self.parts.refuse_saved(trainer)
        if self.saves and trainer.local_rank == 0:
            check_writable(self.folder.path, "checkpoints")
        if self.saves and trainer.is_global_zero and self.folder.home.lost:
            log.warning(self.folder.home.notice)
        self.changed.callback(folder_lock.unlock, self.folder.path)
        if self.failed:
            self.failed.report(pl_module)
            self.failed = None
        reshard(trainer)  # after a test, say
        self.run = Run(
            trainer,
            self.folder.unread(),
            self.seeding,
            self.signals,
            Options(
                saves=self.saves,
                other_settings=self.arguments["other_settings"],
                strict=self.arguments["strict"],
                intervals=self.intervals,
                settings=self.settings_of_run,
                seed_name=self._name("seed") if self.seeds else "",
                environment=self.environment,
                trained=self.trained,
                start_before=self.start_before,
                first_folder=self.home.folder,
                fit=self.fit,
                later=self._later(),
            ),
        )
        self.changed.enter_context(self.run.part(UserObjects).reports.outside.watching_files())
        self.changed.enter_context(unoptimized_scripts(pl_module))
        moments.install(trainer, self.run)
        if type(strategy.checkpoint_io) is TorchCheckpointIO:
            # The command line reads its models without running code. In a program of the user's
            # own, the files of its ModelCheckpoints are for the program to read.
            reads = not self.is_alone or bool(best_model.callbacks(trainer))
            strategy.checkpoint_io = checkpoint_file.CheckedIO(plain_values=reads)

    def _later(self) -> CheckpointDir | None:
        """Return the newest folder of a later training that has checkpoints; None without any."""
        folders = checkpoint_home.folders_after(self.home.folder, self.fit)
        later = map(self._folder_of, folders)
        return next((each for each in later if each.with_copies()), None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the trainer's loops and the signals as they were before, and a rank to itself."""
        if stage == "fit" and self.is_alone:
            if self.run:
                self.trained = self.run.part(UserObjects).graph.trained()
                if self.saves:
                    number = self.run.saved_number
                    earlier_fits.note_finished(self.home.folder, trainer, self.fit, number)
            self.signals.leave()
            moments.remove(trainer)
            search_again(trainer)
        loggers.end_training(trainer.loggers)
        self.changed.close()
        if stage == "fit":
            self._drop_run()
        if self.is_alone:
            parent_process.launch_no_more(os.environ)
            parent_process.outlive_launcher(os.environ)
            trainer.strategy.barrier("until no rank ends with its launcher any more")

    def _drop_run(self) -> None:
        """Keep the results of the run alone: it holds the trainer, and all that was read."""
        if self.seeds and self.is_alone:
            first_draws.note_seed()
        self.results = self.resumes
        self.run = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            Interrupted: It is an error, and a stop was requested before it.
        """
        self.container_restarts.training_fails(exception)
        if self.run:
            self.run.fails()
            if isinstance(exception, AttributeError) and exception.name:
                self.run.part(UserObjects).explain_missing(exception.name)
        number = self.signals.number
        if self.is_alone:
            self.signals.leave()
            parent_process.launch_no_more(os.environ)
        loggers.end_training(trainer.loggers)
        # Lightning leaves it running, for hooks of other callbacks; one of torch's that runs at the
        # process's end may crash that.
        atexit.register(trainer.profiler.teardown, None)  # type: ignore[attr-defined]  # Lightning sets it from outside
        self.changed.close()
        run = self.run
        self._drop_run()
        if run and isinstance(exception, Exception) and not isinstance(exception, UserError):
            if number:
                run.stopping.exit_after(exception, number)
            if self.saves and self.is_alone and trainer.world_size == 1:  # others may wait for it
                self.failed = FailedFit(run)
        if isinstance(exception, SIGTERMException) and exception.code is None:
            # In a test or a prediction, Lightning ends the process with status 0.
            exception.code = status(signal.SIGTERM)

    # While it trains ------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Receive the signals; Lightning has just begun to."""
        self._receive_signals(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Receive the signals again; Lightning has just begun to."""
        if not self.is_alone:
            self._receive_signals(trainer)

    def _receive_signals(self, trainer: Trainer) -> None:
        if self.exact:
            self.signals.receive(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the optimizers for the state that Lightning loads next."""
        if self.run:
            self.run.optimizers_are_loaded_next()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let signals request a stop at a batch boundary from now on; begin the journal."""
        code_numbers.note_used(trainer)
        self.container_restarts.training_begins(trainer)
        if self.run:
            self.run.hooks_run()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the batch in the journal."""
        self.container_restarts.moves(trainer)
        if self.run:
            self.run.batch_begins(batch, batch_idx)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Record the loss in the journal."""
        if self.run and self.run.saves:
            self.run.check.record_loss(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step in the journal and compare it with the interrupted run."""
        self.container_restarts.batch_ended(trainer)
        if self.run and self.run.saves:
            self.run.check.end_batch(outputs)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn how many batches of this validation every rank has."""
        if self.run and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.run.validation_data_begin()

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop if a stop was requested; a resumed run repeats the whole validation."""
        self.container_restarts.moves(trainer)
        if self.run:
            self.run.validation_batch_committed()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the state before the validation."""
        if self.run:
            self.run.validation_ended()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait until the last checkpoint is on the disk."""
        self.container_restarts.training_ends(trainer)
        if self.run:
            self.run.ends()
        best_model.remove_outdated(trainer, keep=0)
        self.signals.leave_done()


def _unpickle(class_: type[ExactResume], arguments: dict[str, Any]) -> ExactResume:
    """Return a callback with the same arguments, which knows of no run and has seeded nothing."""
    with isolate_rng():
        return class_(**arguments)


class _BeforeOtherCallbacks(Callback):
    """Tells an ExactResume that training begins, before the hooks of other callbacks run.

    Args:
        resume: The ExactResume.
    """

    def __init__(self, resume: ExactResume) -> None:
        self.resume = resume

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the optimizers with those of the checkpoint's run."""
        if self.resume.run:
            self.resume.run.optimizers_made()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the state that the hooks of others find."""
        if self.resume.run:
            self.resume.run.hooks_begin()
