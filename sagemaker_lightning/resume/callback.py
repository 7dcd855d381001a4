"""ExactResume: an interrupted training ends with the weights of an uninterrupted one.

States are saved where nothing is half done (resume/fit_loops.py). resume/epoch_state.py has what a
Lightning checkpoint leaves out. Random draws need no saved state (data/seeding.py). All ranks agree
on a stop with a small collective operation on a process group of its own. Lightning's handler of
SIGTERM instead calls a collective operation right away, in which ranks that are not at the same
step hang (Lightning issue 20806).
"""

import copy
import gc
import math
import os
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from signal import Signals
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from sagemaker_lightning.callbacks import divergence, loggers
from sagemaker_lightning.callbacks.rank_consistency import RankConsistency
from sagemaker_lightning.compat import lightning_checkpoints, torch_compile
from sagemaker_lightning.compat.lightning_callbacks import (
    EarlyCallback,
    calling_no_empty_hooks,
    is_search_only,
)
from sagemaker_lightning.compat.lightning_loops import end_evaluation_mode, gradients_accumulate
from sagemaker_lightning.compat.lightning_trainer import copies_this_process, end_failed_run
from sagemaker_lightning.compat.random_generators import entropy_replaced
from sagemaker_lightning.contract import deadlines, rendezvous, shutdown
from sagemaker_lightning.contract.atomic_files import check_writable
from sagemaker_lightning.contract.environment import SageMakerEnvironment, in_container
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import explain
from sagemaker_lightning.contract.reporting import report_stop
from sagemaker_lightning.contract.restart import ContainerRestart
from sagemaker_lightning.contract.shutdown import Interrupted, Stop, TrainingStop, loses_sigterm
from sagemaker_lightning.data.loaders.resumable import digest_of
from sagemaker_lightning.data.seeded_indices import number_of, seed_all, unseeded
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.nodes.rank_progress import ProgressFile
from sagemaker_lightning.process import parent_process
from sagemaker_lightning.resume import (
    acceptance,
    best_model,
    checkpoint_file,
    code_numbers,
    fit_loops,
    folder_lock,
    model_changes,
    run_settings,
)
from sagemaker_lightning.resume.agreement import Agreement, Comparison
from sagemaker_lightning.resume.checkpoint_dir import BackgroundWriter, CheckpointDir
from sagemaker_lightning.resume.parts import Parts
from sagemaker_lightning.resume.restore import Restart
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.snapshot import Snapshot
from sagemaker_lightning.resume.verification import Proof

# Share of the time, at most, that training waits for checkpoints saved by the clock.
MAX_SAVING_SHARE = 0.01
# torch's own first seed, which is random, is larger. Seeds of programs are not: numpy's have to be
# smaller.
MAX_SEED = 2**32
LOCK_SECONDS = 10.0
"""Seconds to wait for another training in the folder: a killed one may take a moment to be gone."""


class _Finished(NamedTuple):
    """A training that this process has brought to its end."""

    model: "weakref.ref[LightningModule]"
    number: int
    """The number of the newest checkpoint that this process has saved; 0 if there is none."""


_finished: dict[Path, _Finished] = {}
"""The newest training of this process that is done, by the folder of its checkpoints."""
_unseeded: "weakref.WeakSet[LightningModule]" = weakref.WeakSet()
"""The models of this process that were made by draws that no seed decides."""
_our_seeds: set[int] = set()
"""What torch has as its seed once a callback with a seed is made, or has trained to the end."""


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

    In a job of several hosts, it sets the variables of torch.distributed that are not set yet, as a
    Trainer reads them when it is made. When a run begins, before the hosts connect, it waits until
    their names resolve, and sets the variables of their network.

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
            Lightning does, with any strategy, and starts anew after an interruption.
        other_settings: Whether a resumed run may have another learning rate (all by one factor),
            gradient clipping or precision than before, and another schedule, which a line names.
        strict: Whether the job ends if a resumed run does something else than the interrupted one.
        lr_scaling: What multiplies the learning rate: "none" (1), "linear" (number of ranks) or
            "sqrt" (its square root).
        settings: What else identifies the run, by name, such as {"--width": 64}: a checkpoint of a
            run with others is refused, and all ranks must have the same.
        parts: State of your own, by name, such as {"env": env}: objects with `state_dict` and
            `load_state_dict` (resume/parts.py says when they are called).
        saves: Whether checkpoints are saved and read.
        environment: What SageMaker says about the job, if its hosts can find each other already;
            None to read its variables and to let them.
        stop: What receives the signals; it is entered already. None to receive them from the
            beginning of each training to its end.

    Raises:
        UserError: An argument is of another type, a number is too small, or `dirpath` is a URL.
            From `fit`: a host's name does not resolve, the checkpoint is of another run, the
            strategy is neither one device nor ddp, another process trains with the folder, or a
            part of the state cannot be saved.
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
        self.settings = dict(settings) if isinstance(settings, Mapping) else {}
        self.arguments = {
            "dirpath": dirpath,
            "seed": seed,
            "every_n_minutes": every_n_minutes,
            "every_n_steps": every_n_steps,
            "keep": keep,
            "exact": exact,
            "other_settings": other_settings,
            "strict": strict,
            "lr_scaling": lr_scaling,
            "settings": self.settings,
            "parts": parts,
            "saves": saves,
            "environment": environment,
            "stop": stop,
        }
        kinds = (
            ("dirpath", dirpath, (str, PathLike), "a folder"),
            ("seed", seed, (Integral, type(None)), "an integer"),
            ("every_n_minutes", every_n_minutes, Real, "a number"),
            ("every_n_steps", every_n_steps, Integral, "an integer"),
            ("keep", keep, Integral, "an integer"),
            ("settings", settings, Mapping, "a dict"),
        )
        for name, value, kind, words in kinds:
            if not isinstance(value, kind):
                raise UserError(f"{self._name(name)}: found {value!r}, allowed is {words}")
        minimums = (
            ("every_n_minutes", every_n_minutes, 0),
            ("every_n_steps", every_n_steps, 0),
            ("keep", keep, 1),
        )
        for name, value, minimum in minimums:
            if not value >= minimum:  # this refuses NaN, too
                raise UserError(f"{self._name(name)}: found {value}, allowed is {minimum} or more")
        self.parts = Parts(parts)
        self.progress = ProgressFile(None)  # of the newest training
        if "://" in str(dirpath):
            raise UserError(
                f"{self._name('dirpath')}: found {dirpath}, allowed is a folder; SageMaker copies "
                "it to S3"
            )
        self.environment = environment or SageMakerEnvironment.read()
        home = self.environment.checkpoint_home(Path(dirpath))
        self.folder = CheckpointDir(home, keep, self._name("dirpath"))
        self.every_n_minutes = every_n_minutes
        self.every_n_steps = every_n_steps
        self.other_settings = other_settings
        self.strict = strict
        self.seeding = Seeding(seed)
        self.rank_consistency = RankConsistency(
            self.environment, settings, lr_scaling, other_settings
        )
        self.before_others = _BeforeOtherCallbacks(self)
        self.stop = stop
        self.owns_stop = stop is None
        self.has_warned_of_signals = False  # whether a warning said that no signal comes here
        if stop:
            stop.name_checkpoints_in(home)
        self.joins_hosts = environment is None
        if self.joins_hosts:  # a Trainer reads where they are when it is made
            rendezvous.name_main_host(self.environment, os.environ)
        if self.owns_stop:
            parent_process.bind_to_launcher(os.environ)
        self.trainer: Trainer | None = None
        self.changed = ExitStack()
        """Gives back what a run of the trainer has changed in this process."""
        self.exact = exact
        self._forget_run()
        self.seeds = seed is not None and self.owns_stop  # the command line has seeded before
        if self.seeds:
            if torch.initial_seed() > MAX_SEED and torch.initial_seed() not in _our_seeds:
                _unseeded.update(
                    each for each in gc.get_objects() if issubclass(type(each), LightningModule)
                )
            _our_seeds.update((seed_all("made", seed), number_of("after", seed)))

    def _forget_run(self) -> None:
        """Set what belongs to one run to the values that it begins with."""
        self.folder = self.folder.unread()
        self.writer = BackgroundWriter(self.folder)
        self.has_looked_for_checkpoint = False  # whether the newest checkpoint was looked for
        self.state_before_validation: dict[str, Any] = {}  # empty outside a validation
        self.save_seconds = 0.0  # seconds that training waited for the last checkpoint
        self.saved_number = 0  # of the newest checkpoint; 0 if this run has saved none
        self.stop_agreed_at = math.inf  # when the ranks agreed on a stop, by time.monotonic()
        self.why_only_epochs = ""  # why a run cannot be resumed within an epoch; "" if it can
        self.checkpoint_due = False  # whether a checkpoint waits for the end of an optimizer step
        self.has_trained = False  # whether a batch was trained on
        self.has_compared_batches = False  # whether the first batches of the ranks were compared
        self.epoch_was_cut = False  # whether a limit ended the epoch before its last batch
        self.proof: Proof | None = None  # compares a resumed run with the interrupted one

    def __deepcopy__(self, memo: dict) -> "ExactResume":
        """Return a callback with the same arguments, which knows of no run."""
        kept = ("environment", "stop", "settings", "parts")
        arguments = {
            name: value if name in kept else copy.deepcopy(value, memo)
            for name, value in self.arguments.items()
        }
        return type(self)(**arguments)

    def __reduce__(self) -> tuple:
        """Pickle the arguments: a library may save the callbacks beside a model (darts does).

        Parts are left out: what is read from a file is no longer what the program trains with.
        """
        return _unpickle, (type(self), self.arguments | {"parts": {}})

    def _name(self, argument: str) -> str:
        """Return how messages name an argument: the command line has a flag for it."""
        flag = f"--resume.{argument}"
        return flag if flag in self.settings else f"ExactResume({argument}=...)"

    def save_every(self, steps: int, minutes: float) -> None:
        """Save checkpoints within an epoch at other intervals than the arguments say.

        Args:
            steps: Optimizer steps between two checkpoints; 0 for none.
            minutes: Minutes between two checkpoints; 0 for none.
        """
        self.every_n_steps = steps
        self.every_n_minutes = minutes

    def run_begins(self, trainer: Trainer) -> None:
        """Put our callbacks into the trainer's, and have its loggers continue their files.

        Before that, let the hosts of a job find each other: they connect next.

        Raises:
            UserError: The trainer has a callback that does the same, or a host's name does not
                resolve.
        """
        if self.joins_hosts:
            rendezvous.join(self.environment, os.environ)
        self.enabled = self.arguments["saves"] and self.arguments["exact"]
        self.enabled = self.enabled and not trainer.fast_dev_run
        self.changed.close()
        if self.arguments["exact"]:
            self.changed.enter_context(entropy_replaced(unseeded.bits))
            self.changed.enter_context(torch_compile.compile_each_shape())
            self.changed.enter_context(calling_no_empty_hooks())
        if trainer.state.fn != TrainerFn.FITTING:
            self._continue_logs(trainer, trains=False)
            return
        own = (self.seeding, self.before_others, self.rank_consistency)
        others = [each for each in trainer.callbacks if not any(each is mine for mine in own)]
        for callback in others:
            if isinstance(callback, ExactResume) and callback is not self:
                raise UserError(
                    f"Trainer(callbacks=...): found two ExactResume, for {self.folder.path} and "
                    f"{callback.folder.path}; allowed is one"
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
        trainer.callbacks = [
            self.seeding,
            self.before_others,
            *others[:end],
            self.rank_consistency,
            *others[end:],
        ]
        if trainer is not self.trainer:
            # Once for a trainer: callbacks change some of them while it trains.
            self.settings_of_run = self._settings_of_run(trainer)
        if is_search_only(trainer):
            self._continue_logs(trainer, trains=False)
            return
        self.trainer = trainer
        self._forget_run()
        self._continue_logs(trainer, trains=True)

    def _continue_logs(self, trainer: Trainer, trains: bool) -> None:
        if self.enabled:
            loggers.prepare_files(
                trainer.loggers, self.folder.logger_states(), self.folder.path, trains
            )
            if self.folder.checkpoints():
                loggers.write_config_again(trainer)
        else:
            loggers.prepare_files(trainer.loggers, (), None, trains)

    def _settings_of_run(self, trainer: Trainer) -> dict[str, object]:
        """Return the settings that identify the run, by name."""
        settings = run_settings.trainer_settings(trainer)
        settings["--lr_scaling"] = self.arguments["lr_scaling"]
        if self.arguments["seed"] is not None and "--seed_everything" not in self.settings:
            settings[self._name("seed")] = self.arguments["seed"]
        return settings | dict(self.settings)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's loops, checkpoint files and signal handling by ours.

        Raises:
            UserError: Runs with the trainer's strategy cannot be resumed, or the folder cannot be
                written to.
        """
        if self.owns_stop:
            parent_process.end_with_launcher(os.environ)
        if stage != "fit" or is_search_only(trainer):
            return
        strategy = trainer.strategy
        supported = isinstance(strategy, SingleDeviceStrategy) or (
            isinstance(strategy, DDPStrategy) and not copies_this_process(strategy)
        )
        self.exact = self.arguments["exact"] and (supported or self.enabled)
        best_model.keep_retired(trainer, self.enabled)
        if not self.exact:
            self.seeding.leave_loaders_to_lightning(trainer)
            if trainer.is_global_zero:
                print(
                    "this run is trained and saved as Lightning does; an interruption makes it "
                    "start anew",
                    flush=True,
                )
            return
        if not supported:
            raise self._unsupported(strategy)
        self.parts.refuse_saved(trainer)
        if self.enabled and trainer.local_rank == 0:
            check_writable(self.folder.path, "checkpoints")
        if self.enabled and trainer.is_global_zero and self.folder.home.lost:
            print(self.folder.home.notice, flush=True)
        self.agreement = Agreement(trainer)
        if self.enabled:
            self.changed.callback(folder_lock.unlock, self.folder.path)
            self._lock_folder()
        self.divergence = divergence.divergence_of(trainer)
        self.restart = Restart(
            trainer, self.folder, self.seeding, self.agreement, self.other_settings
        )
        self.proof = Proof(trainer, self.folder, self.agreement.gather, self.strict)
        self.snapshot = Snapshot(trainer, self.agreement, self.seeding, self.proof)
        fit_loops.install(trainer, self, self.restart)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            # The command line reads its models without running code. In a program of the user's
            # own, the files of its ModelCheckpoints are for the program to read.
            reads = not self.owns_stop or bool(best_model.callbacks(trainer))
            trainer.strategy.checkpoint_io = checkpoint_file.CheckedIO(plain_values=reads)
        accept = partial(acceptance.accept, trainer)
        lightning_checkpoints.replace_loading(trainer, self._load_newest, accept)

    def _lock_folder(self) -> None:
        """Lock the folder until the training ends; all ranks call it.

        Rank 0 does so for all: hosts may share the folder.

        Raises:
            UserError: Another process trains with the folder. All ranks raise it.
        """
        is_first = self.trainer.is_global_zero
        own_answer = folder_lock.lock(self.folder.path, LOCK_SECONDS) if is_first else ""
        if owner := self.agreement.gather(own_answer)[0]:
            raise UserError(
                f"{self.folder.label}: {owner} trains with these checkpoints now; end it first, or "
                "give each training a folder of its own"
            )

    def _unsupported(self, strategy: Any) -> UserError:
        """Return the error for a strategy whose runs cannot be resumed."""
        name = type(strategy).__name__
        if "--trainer.strategy" in self.settings:
            return UserError(
                f"--trainer.strategy: found {name}, whose runs cannot be resumed; allowed are ddp "
                "and its variants, or --resume.exact=false: it trains and saves as Lightning does"
            )
        copies = isinstance(strategy, DDPStrategy)
        return UserError(
            f"Trainer(strategy=...): found {name}{', which copies this process' if copies else ''},"
            " whose runs cannot be resumed; allowed are one device, or ddp and its variants in a "
            "program of its own"
        )

    def _load_newest(self, given_path: Any = None) -> bool:
        """Load the newest checkpoint, and return whether there is one.

        Args:
            given_path: What Lightning loads if there is none: that which `fit(ckpt_path=...)` got,
                or what a search before training has saved.
        """
        if (
            self.trainer.state.fn != TrainerFn.FITTING
            or not self.enabled
            or self.has_looked_for_checkpoint
        ):
            return False
        self.has_looked_for_checkpoint = True
        self._refuse_another_model()
        objects = self.snapshot.user_state.objects_of_module()
        if not self.restart.load(self.environment.current_host, self.settings_of_run, objects):
            is_unseeded = self.seeds and self.trainer.lightning_module in _unseeded
            if is_unseeded and self.trainer.is_global_zero:
                print(
                    f"warning: {self._name('seed')}: the model was made before this callback, and "
                    "nothing was seeded: what it has drawn, such as its first weights, is another "
                    "draw whenever the program begins anew; make the callback first",
                    flush=True,
                )
            return False
        if given_path and self.trainer.is_global_zero:
            print(
                f"ckpt_path={given_path} is not loaded: this run began before, and resumes from "
                f"its own newest checkpoint in {self.folder.path}",
                flush=True,
            )
        self.proof.continue_results(self.restart.entries["resumes"])
        return True

    def _refuse_another_model(self) -> None:
        """Raise UserError if this process has trained another model with this folder.

        It would get the weights of the other one.
        """
        finished = _finished.get(self.folder.path.resolve())
        is_another = finished and finished.model() is not self.trainer.lightning_module
        if is_another and self.folder.checkpoints():
            raise UserError(
                f"{self.folder.label}: this program has already trained another model to its end "
                "with these checkpoints; give each training a folder of its own"
            )

    def _was_interrupted(self) -> bool:
        """Return whether a training that did not come to its end has saved what this one resumes.

        If this program has ended that one, it may change what it likes before it trains on.
        """
        finished = _finished.get(self.folder.path.resolve())
        return not finished or finished.number != self.restart.entries.get("number")

    @property
    def resumes(self) -> list[dict[str, Any]]:
        """The results of this run's interruptions: were repeated steps identical?"""
        return self.proof.results if self.proof else []

    @property
    def is_training(self) -> bool:
        """Whether this is the training and not a search before it.

        A search, such as for a learning rate, has callbacks of its own.
        """
        return any(callback is self for callback in self.trainer.callbacks)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Receive the signals; Lightning has just begun to."""
        self.receive_signals()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Receive the signals again; Lightning has just begun to."""
        if not self.owns_stop:
            self.receive_signals()

    def receive_signals(self) -> None:
        """Install our signal handlers in place of Lightning's."""
        if not self.exact:
            return
        if self.stop:
            self.stop.install_handlers()
        elif threading.current_thread() is threading.main_thread():
            self.stop = TrainingStop(self.folder.home, report_stop)
            self.stop.__enter__()
            first = loses_sigterm() if in_container() else ""  # now: it may be this process
            if first and self.trainer.is_global_zero:
                self._warn_unheard(
                    f"SIGTERM does not reach this training: {first}, the container's first "
                    "process, does not pass it on. A job that is stopped is killed, and resumes "
                    "from its last checkpoint; docs/your-own-trainer.md says what to add"
                )
        else:
            self._warn_unheard(
                "fit is not called in the main thread, where Python handles signals: SIGTERM and "
                "Ctrl-C do not stop it with a checkpoint; those saved by time or steps are there"
            )

    def _warn_unheard(self, why: str) -> None:
        """Print, once, why no signal comes here."""
        if not self.has_warned_of_signals:
            self.has_warned_of_signals = True
            print(f"warning: {why}", flush=True)

    def _leave_signals(self) -> None:
        """Leave the signals to whom they were for before the training."""
        if self.owns_stop and self.stop:
            self.stop.__exit__()
            self.stop = None
        elif self.stop:
            self.stop.end()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the optimizers for the state that Lightning loads next."""
        if self.exact and not is_search_only(trainer):
            self.restart.restore_parameter_groups()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let signals request a stop at a batch boundary from now on.

        It also begins the journal.

        Raises:
            UserError: A checkpoint of this run could not be read again.
        """
        self.saved_at = time.monotonic()
        self.saved_step = trainer.global_step
        self.progress = ProgressFile(self.environment.watch)
        self.progress.begin(trainer.global_step)
        code_numbers.note_used(trainer)
        if self.enabled:
            self.snapshot.set_run_description(
                (
                    self.restart.entries
                    or {"run": run_settings.describe(trainer, self.settings_of_run)}
                )["run"]
                # Of this run: what it was allowed to change is compared with from now on.
                | {
                    "optimizers": self.restart.optimizer_arguments,
                    "numbers": self.restart.code_numbers,
                }
            )
            if problem := checkpoint_file.why_unreadable(self.snapshot.lightning_checkpoint()[0]):
                raise UserError(f"a checkpoint of this run could not be read again: {problem}")
            self.proof.start(
                self.restart.entries,
                self.settings_of_run,
                comparable=not self.other_settings and self._was_interrupted(),
            )
        if self.stop and self.exact:
            self.stop.begin()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait until the last checkpoint is on the disk."""
        self.progress.end(trainer.global_step)
        if self.exact:
            self.agreement.receive()
        if self.proof:
            self.proof.finish()
        self.writer.wait()
        self.writer.warn_of_problem("the training is done, and")
        best_model.remove_outdated(trainer, keep=0)
        self._leave_signals()
        if self.enabled and self.owns_stop:  # the program of the command line trains once
            path = self.folder.path.resolve()
            number = self.saved_number or (_finished[path].number if path in _finished else 0)
            _finished[path] = _Finished(weakref.ref(pl_module), number)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            Interrupted: It is an error, and a stop was requested before it. Who signals a whole
                group of processes ends other programs, too, on which the training may depend.
        """
        self.writer.wait()
        if self.proof:
            self.proof.close()
        number = self.stop.signal_number if self.stop else None
        if self.owns_stop:
            self._leave_signals()
            parent_process.launch_no_more(os.environ)
        loggers.end_training(trainer.loggers)
        self.changed.close()
        if number and isinstance(exception, Exception) and not isinstance(exception, UserError):
            traceback.print_exception(exception)
            end_failed_run(trainer)
            self._leave(
                number,
                self.folder.outlook().step,
                "this step was not completed, most likely because the signal has ended another "
                f"process, too: {explain(type(exception).__name__, str(exception))}",
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the trainer's loops and the signals as they were before, and a rank to itself."""
        if stage == "fit" and self.owns_stop:
            self._leave_signals()
            fit_loops.remove(trainer)
            model_changes.search_again(trainer)
        loggers.end_training(trainer.loggers)
        self.changed.close()
        if self.owns_stop:
            parent_process.launch_no_more(os.environ)
            parent_process.outlive_launcher(os.environ)
            trainer.strategy.barrier("until no rank ends with its launcher any more")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the batch in the journal."""
        self.progress.move(trainer.global_step)
        if self.enabled:
            self.proof.begin_batch(batch, batch_idx)
            if trainer.world_size > 1 and not self.has_compared_batches:
                self._warn_of_equal_batches(batch)

    def _warn_of_equal_batches(self, batch: Any) -> None:
        """Warn, once, if all ranks train on the same samples; all ranks call it.

        Our loaders share the samples of a dataset with indices. A stream has to do so itself.
        """
        self.has_compared_batches = True
        digests = self.agreement.gather(digest_of(batch))
        if len(set(digests)) == 1 and self.trainer.is_global_zero:
            print(
                f"warning: all {len(digests)} ranks train on the same batch: they share the "
                "samples of a dataset with indices, while an IterableDataset has to yield "
                "the samples of its own rank",
                flush=True,
            )

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Record the loss in the journal."""
        if self.enabled:
            self.proof.record_loss(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step in the journal and compare it with the interrupted run."""
        self._note_step()
        if self.enabled:
            self.proof.end_batch(outputs)

    @property
    def restarts(self) -> list[ContainerRestart]:
        """The restarts of this program in its container; the newest with what it has cost."""
        restarts = list(self.environment.restarts)
        if restarts and self.progress.first_step_at:
            first_step_at = self.progress.first_step_at / 1e9
            restarts[-1] = restarts[-1].continued(self.progress.began_with, first_step_at)
        return restarts

    def _note_step(self) -> None:
        """Note that a batch is done; after a restart in the container, print what it has cost."""
        is_first = not self.progress.first_step_at
        self.progress.batch_ended(self.trainer.global_step)
        if is_first and self.environment.restarts and self.trainer.is_global_zero:
            newest = self.restarts[-1]
            lost = "" if newest.lost_steps is None else f", {newest.lost_steps} steps lost"
            print(
                f"restart {len(self.restarts)}: on from step {newest.resumed_step} within "
                f"{newest.seconds:.1f} s{lost}",
                flush=True,
            )

    def batch_ended(self, done: bool) -> None:
        """Save a checkpoint if one is due; stop if a stop was requested.

        Where the next batch adds to the gradients, only a stop does not wait for the optimizer
        step.

        Args:
            done: Whether a limit ends the training here, within an epoch. A run with a higher limit
                resumes here; any other run ends this epoch again.
        """
        step = self.trainer.global_step
        if self.enabled and not self.has_trained:
            self.has_trained = True
            self.snapshot.user_state.first_batch_ended()
        self.epoch_was_cut = done
        stops = self._agree(now=done)
        self.checkpoint_due |= self.agreement.checkpoint_due
        self.checkpoint_due |= (
            bool(self.every_n_steps) and step % self.every_n_steps == 0 and step != self.saved_step
        )
        saves_now = (
            self.checkpoint_due
            and not self.agreement.uploading
            and not gradients_accumulate(self.trainer)
        )
        if done or ((stops or saves_now) and not self.why_only_epochs):
            self.save(ResumePoint.BATCH, last=stops or done)
        if stops and not done:
            self._exit_all_ranks(ResumePoint.BATCH)

    def epoch_begins(self, why: str, orders: Mapping[str, int]) -> None:
        """Learn, when an epoch begins, why any rank cannot be resumed within it.

        Args:
            why: The reason on this rank; "" if there is none.
            orders: What each loader that the ranks share draws first, as a hash, by sampler.

        Raises:
            UserError: A sampler draws other samples on another rank. It shares them out by itself,
                and sharing out what each rank has would leave samples out.
        """
        known_before = self.why_only_epochs
        reasons, orders_of_ranks = zip(*self.agreement.gather((why, orders)), strict=True)
        self.why_only_epochs = next(filter(None, reasons), "")
        for name, drawn in orders_of_ranks[0].items():
            if any(others.get(name) != drawn for others in orders_of_ranks):
                raise UserError(
                    f"Trainer(use_distributed_sampler=...): found True, and {name.split()[1]}, "
                    "which draws other samples on each rank; give use_distributed_sampler=False if "
                    "it shares the samples out itself, else the same order on all ranks"
                )
        if self.why_only_epochs and not known_before and self.trainer.is_global_zero:
            print(
                f"{self.why_only_epochs}: checkpoints are saved only at the end of an epoch, and a "
                "stopped run goes back to the last one",
                flush=True,
            )

    def only_end_is_left(self, cut: bool) -> None:
        """Note that a resumed run has only to end the epoch: all its batches are done.

        Args:
            cut: Whether a limit ended the epoch before its last batch.
        """
        self.epoch_was_cut = cut

    def epoch_ended(self, done: bool) -> None:
        """Save a checkpoint; stop if a stop was requested and training is not done."""
        stops = self._agree(now=True) and not done
        if not self.epoch_was_cut:
            if stops or done or not self.agreement.uploading:
                self.save(ResumePoint.EPOCH, last=stops or done)
            else:
                self.checkpoint_due = True
        if stops:
            self._exit_all_ranks(ResumePoint.EPOCH)

    def before_validation(self) -> None:
        """Keep a copy of the state before a validation.

        Callbacks may replace the weights by their average while it runs.
        """
        self.divergence.check(self.trainer)
        self.state_before_validation = (
            self.snapshot.take(ResumePoint.VALIDATION)
            if self.enabled and not self.why_only_epochs
            else {}
        )
        if self._agree():
            self._interrupt_validation()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn how many batches of this validation every rank has.

        Ranks agree on a stop only up to that batch: beyond it, they would wait for each other.
        """
        self.validated_batches = 0
        self.common_validation_batches = 0
        is_fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if is_fitting and self.exact:
            batches = sum(trainer.num_val_batches)
            self.common_validation_batches = min(
                self.agreement.gather(0 if batches == float("inf") else batches)
            )

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop if a stop was requested; a resumed run repeats the whole validation."""
        self.validated_batches += 1
        self.progress.move(trainer.global_step)
        if self.validated_batches <= self.common_validation_batches and self._agree():
            end_evaluation_mode(trainer)  # the state that the next training batch would have
            self._interrupt_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the state before the validation."""
        self.state_before_validation = {}

    def _interrupt_validation(self) -> None:
        if not self.why_only_epochs:
            self.save(ResumePoint.VALIDATION, last=True)
        self._exit_all_ranks(ResumePoint.VALIDATION)

    def _agree(self, now: bool = False) -> bool:
        """Return whether any rank was asked to stop.

        Args:
            now: Whether to wait for what the ranks say now, instead of using what they said the
                last time.
        """
        minutes = (time.monotonic() - self.saved_at) / 60
        due = self.every_n_minutes and minutes >= max(
            self.every_n_minutes, self.save_seconds / 60 / MAX_SAVING_SHARE
        )
        if self.stop:
            self.stop.batch_ended()
        signal_number = (self.stop and self.stop.signal_number) or 0
        due = bool(due) and not self.writer.is_writing
        self.agreement.agree(
            signal_number,
            due,
            self.divergence.poll(),
            now,
            self.proof.comparison,
            self.folder.is_uploading(),
        )
        if self.agreement.diverged:
            self.divergence.check(self.trainer)
        if (
            self.proof.is_open
            and self.proof.has_trained
            and self.agreement.comparison is not Comparison.OPEN
        ):
            self.proof.report()
        if self.agreement.signal_number:
            self.stop_agreed_at = min(self.stop_agreed_at, time.monotonic())
        return bool(self.agreement.signal_number)

    def _exit_all_ranks(self, point: ResumePoint) -> None:
        """End this process, as all ranks do.

        Args:
            point: Where training stops.
        """
        self.proof.finish(point)
        self.writer.wait()  # the previous checkpoint counts if there is none of this step
        number = self.agreement.signal_number
        if self.stop:
            self.stop.save_last()
        if self.trainer.is_global_zero:
            self.folder.wait_for_s3(self.stop_agreed_at + deadlines.CHECKPOINT_IS_COPIED)
        steps, outlook, problem = self.agreement.gather(
            (self.folder.intact_steps, self.folder.outlook(), self.writer.problem_text)
        )[0]
        saved = outlook.said
        if problem:
            saved += (
                f", as that of step {self.trainer.global_step} could not be written ({problem})"
            )
        if self.why_only_epochs and (steps or [0])[-1] < self.trainer.global_step:
            saved += f"; {self.why_only_epochs}, so the run goes back to the end of an epoch"
        self._leave(number, outlook.step, saved)

    def _leave(self, number: int, step: int, how: str) -> None:
        """End this process after signal `number`, as one of several ranks has to.

        Args:
            number: The signal.
            step: The step to resume from.
            how: What else there is to say about the end.
        """
        is_child = self.trainer.local_rank > 0
        why = shutdown.interruption_message(step, f"{Signals(number).name}; {how}")
        (self.stop.tell if self.stop else report_stop)(why, not is_child)
        # Lightning started the other ranks of this node. If one of them exits with a status other
        # than 0, Lightning takes that for a crash and kills all of them.
        by_lightning = is_child and not self.environment.torchrun
        raise Interrupted(0 if by_lightning else shutdown.status(number))

    def save(self, point: ResumePoint, last: bool) -> None:
        """Save a checkpoint; one rank of each host writes it.

        Args:
            point: When it is saved.
            last: Whether to wait until it is written. Otherwise it is written in the background.
        """
        started = time.monotonic()
        if point is not ResumePoint.VALIDATION:  # before_validation has checked that state
            self.divergence.check(self.trainer)
        if self.enabled:
            self.proof.report_difference()
            state = (
                self.snapshot.with_optimizer_states(self.state_before_validation)
                if point is ResumePoint.VALIDATION
                else self.snapshot.take(point)
            )
            if self.stop and last:
                self.stop.save_last()
            self.saved_number = state[checkpoint_file.ENTRIES_KEY]["number"]
            if self.trainer.local_rank == 0:
                self.writer.write(
                    state,
                    state[checkpoint_file.ENTRIES_KEY]["step"],
                    self.saved_number,
                    best_model.files_in(self.trainer, self.folder.path),
                )
            self.proof.checkpoint_saved(point)
            if last:
                self.writer.wait()
        if not last:  # an older checkpoint may be what is in S3
            best_model.remove_outdated(self.trainer, self.folder.keep)
        self.saved_at = time.monotonic()
        self.agreement.checkpoint_saved()
        self.saved_step = self.trainer.global_step
        self.checkpoint_due = False
        self.save_seconds = self.saved_at - started


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
        if self.resume.exact and not is_search_only(trainer):
            acceptance.accept_schedulers(trainer, lightning_checkpoints.loaded(trainer))
            self.resume.restart.optimizers_made()
            self.resume.snapshot.user_state.hooks_begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the state that the hooks of others find."""
        if self.resume.exact and not is_search_only(trainer):
            self.resume.snapshot.user_state.hooks_begin()
