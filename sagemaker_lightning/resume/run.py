"""One training: what it saves, what it resumes from, and when it stops."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pytorch_lightning import Trainer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.seed import isolate_rng

from sagemaker_lightning.callbacks import divergence
from sagemaker_lightning.compat import lightning_checkpoints, lightning_loops
from sagemaker_lightning.compat.lightning_trainer import (
    callbacks_of,
    data_module_of,
    epochs_of_data,
)
from sagemaker_lightning.compat.model_parallel import data_ranks, mesh_of, reshard
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.loaders.resumable import digest_of
from sagemaker_lightning.data.loaders.several import training_loaders
from sagemaker_lightning.data.seeded_indices import seed_all
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.resume import loading, logs, memory_copies, sharded_weights
from sagemaker_lightning.resume.agreement import Agreement, common_reason, refuse_other_orders
from sagemaker_lightning.resume.check.restore_check import digests_of
from sagemaker_lightning.resume.check.verification import ResumeCheck
from sagemaker_lightning.resume.files import (
    acceptance,
    best_model,
    checkpoint_file,
    first_start,
    folder_lock,
    shards,
    user_checkpoints,
)
from sagemaker_lightning.resume.files.checkpoint_dir import (
    BackgroundWriter,
    CheckpointDir,
)
from sagemaker_lightning.resume.files.shards import ShardWriter
from sagemaker_lightning.resume.live_draws import LiveDraws
from sagemaker_lightning.resume.parts import PARTS
from sagemaker_lightning.resume.parts.counters import Counters
from sagemaker_lightning.resume.parts.data_epoch import DataEpoch
from sagemaker_lightning.resume.parts.data_identity import DataIdentity, Structure
from sagemaker_lightning.resume.parts.lightning_callbacks.searches import search_within
from sagemaker_lightning.resume.parts.limits import Limits
from sagemaker_lightning.resume.parts.loader_positions import LoaderPositions
from sagemaker_lightning.resume.parts.optimizers import Optimizers, Schedulers
from sagemaker_lightning.resume.parts.parameter_groups import ParameterGroups
from sagemaker_lightning.resume.parts.part import Moment, Part, Place, refusing
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.parts.weights import Weights
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.resumption import Resumption
from sagemaker_lightning.resume.same_run import earlier_fits
from sagemaker_lightning.resume.same_run.same_run import SameRun
from sagemaker_lightning.resume.signals import Signals
from sagemaker_lightning.resume.snapshot import OWN_SHARD, Snapshot
from sagemaker_lightning.resume.stopping import Intervals, Stopping
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.graph.kinds.base import class_name
from sagemaker_lightning.state.graph.state import Trained
from sagemaker_lightning.state.readable import readable

PartOfKind = TypeVar("PartOfKind", bound=Part)
LOCK_SECONDS = 10.0
"""Seconds to wait for another training in the folder: a killed one may take a moment to be gone."""


@dataclass(frozen=True)
class Options:
    """What the arguments of ExactResume say to a run.

    Args:
        saves: Whether checkpoints are saved and read.
        other_settings: Whether it may have another learning rate, gradient clipping or precision
            than the run that saved the checkpoint.
        strict: Whether the job ends if it does something else than the interrupted run.
        intervals: What lies between two checkpoints within an epoch.
        settings: The settings that identify it, by name.
        seed_name: How messages name the seed that was set for the model; "" if none was.
        environment: What SageMaker says about the job.
        trained: What earlier trainings of this program have changed.
        start_before: What a start found that was killed before its first checkpoint; None if there
            was none.
        first_folder: The folder of the checkpoints of the trainer's first training.
        fit: Which of its trainings it is, from 1.
        later: The folder of the newest later one that has checkpoints; None if there is none.
    """

    saves: bool
    other_settings: bool
    strict: bool
    intervals: Intervals
    settings: Mapping[str, object]
    seed_name: str
    environment: SageMakerEnvironment
    trained: Trained
    start_before: first_start.FirstStart | None
    first_folder: Path
    fit: int
    later: CheckpointDir | None


class Run:
    """One training: what it saves, what it resumes from, and when it stops.

    It begins when the trainer has its strategy and its model. All ranks make it, and call it at the
    same moments.

    Args:
        trainer: Lightning's trainer.
        folder: The folder of the checkpoints.
        seeding: Knows the seed of the whole run.
        signals: The signals that request a stop.
        options: What the arguments say.

    Raises:
        UserError: Another process trains with the folder.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: CheckpointDir,
        seeding: Seeding,
        signals: Signals,
        options: Options,
    ) -> None:
        self.trainer = trainer
        self.folder = folder
        self.seeding = seeding
        self.signals = signals
        self.saves = options.saves
        self.options = options
        self.environment = options.environment
        self.agreement = Agreement(trainer)
        if self.saves:
            self._lock_folder()
        self.host = options.environment.host_name(trainer.num_nodes, trainer.node_rank)
        """The name of this host, for messages."""
        is_sharded = self.saves and mesh_of(trainer) is not None
        self.shards = ShardWriter(self.host) if is_sharded else None
        self.writer = BackgroundWriter(folder, self.shards, writes=trainer.local_rank == 0)
        # A copy has no shards.
        has_copies = self.saves and not is_sharded
        self.copies = memory_copies.MemoryCopies(
            folder.copies if has_copies else None,
            trainer.num_nodes,
            trainer.local_rank == 0,
            [restart.at for restart in self.environment.restarts],
            on_cpu=trainer.strategy.root_device.type == "cpu",
        )
        self.divergence = divergence.divergence_of(trainer)
        self.live_draws = LiveDraws(trainer, self.agreement)
        gather = self.agreement.gather
        self.same_run = SameRun(trainer, folder, options.settings, options.other_settings, gather)
        self.check = ResumeCheck(trainer, folder, gather, options.strict)
        self.resumed: Resumption | None = None
        """The checkpoint that it resumes from; None if it starts over."""
        self.parts = [part(self) for part in PARTS]
        self.snapshot = Snapshot(self)
        self.stopping = Stopping(self, options.intervals)
        self.saved_number = 0
        """Number of the newest checkpoint; 0 if this run has saved none."""
        self.has_looked_for_checkpoint = False
        self.has_trained = False
        """Whether a batch was trained on."""
        self.made_at = first_start.now()
        self.has_compared_batches = False
        self.has_said_who_ends_epochs = False
        """Whether the first batches of the ranks were compared."""
        self.state_before_validation: dict[str, Any] = {}
        """Empty outside a validation, and if one is not stopped within."""
        self.ends_validations = False
        """Whether a stop waits for the end of a validation."""
        self.validated_batches = 0
        self.common_validation_batches = 0
        """Batches of a validation that every rank has: beyond, they would wait for each other."""

    def _lock_folder(self) -> None:
        """Lock the folder until the training ends.

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

    @property
    def is_training(self) -> bool:
        """Whether this is the training and not a search before it.

        A search, such as for a learning rate, has callbacks of its own.
        """
        return any(callback is self.seeding for callback in callbacks_of(self.trainer))

    @property
    def step(self) -> int:
        """How many steps the optimizers have done."""
        return lightning_loops.steps_done(self.trainer)

    @property
    def resumes_within_epoch(self) -> bool:
        """Whether the next epoch to train was begun before the interruption."""
        within = ResumePoint.BATCH, ResumePoint.VALIDATION
        return self.resumed is not None and self.resumed.point in within

    @property
    def epoch_is_open(self) -> bool:
        """Whether the epoch in which the checkpoint was saved has not ended yet."""
        return self.resumed is not None and self.resumed.epoch_is_open

    def part(self, kind: type[PartOfKind]) -> PartOfKind:
        """Return one of the run's parts."""
        return next(part for part in self.parts if type(part) is kind)

    def reached(self, *classes: type) -> Iterator[tuple[str, Any]]:
        """Yield path and object for each object of some classes that the user's objects hold."""
        return self.part(UserObjects).graph.reached(*classes)

    def restore(self, moment: Moment) -> None:
        """Restore the parts whose moment this is, in their order."""
        if self.resumed is None:
            return
        reshard(self.trainer)
        for part in self.parts:
            if moment in part.moments:
                with refusing(self, self.resumed.file_name, part.key):
                    part.restore(self.resumed.of(part), moment)

    def _refusing(self, what: str) -> AbstractContextManager[None]:
        """Return a context that refuses what the checkpoint has, if the run resumes from one."""
        return refusing(self, self.resumed.file_name, what) if self.resumed else nullcontext()

    def _loading(
        self, what: str, within: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return a context in which Lightning loads: another one, which refuses what is wrong."""

        @contextmanager
        def loading() -> Iterator[None]:
            with self._refusing(what), within():
                yield

        return loading

    # Loading a checkpoint -------------------------------------------------------------------------

    def load_newest(self, given_path: Any = None) -> bool:
        """Hand Lightning the newest checkpoint, and return whether there is one.

        Args:
            given_path: What Lightning loads if there is none: that which `fit(ckpt_path=...)` got,
                or what a search before training has saved.

        Raises:
            UserError: The newest checkpoint is of another run.
        """
        is_fitting = self.trainer.state.fn == TrainerFn.FITTING
        if not is_fitting or not self.saves or self.has_looked_for_checkpoint:
            return False
        self.has_looked_for_checkpoint = True
        loading.refuse_another_model(self)
        self.part(UserObjects).graph.begin()
        self.same_run.note_program()
        path = loading.choose(self)
        if path is None:
            loading.refuse_lost_training(self)
            search_within(self.trainer, self.part(UserObjects).searching)
            loading.warn_of_random_model(self)
            return self._begins_anew_without(given_path)
        with refusing(self, path.name, "entries"):
            self._begin_from(path, given_path)
        return True

    def _begins_anew_without(self, path: Any) -> bool:
        """Have Lightning load nothing, and say so, if the start before wrote what it is given.

        It may be a path of the program's, such as "last", or one that Lightning itself has chosen,
        as it does beside an OnExceptionCheckpoint. A run that is left alone does not find it.
        """
        start = self.options.start_before
        is_later = first_start.has_written_since(self.folder.path, path, self.made_at)
        if not self.agreement.gather(bool(start and is_later))[0]:
            return False
        if self.trainer.is_global_zero:
            log.warning(
                f"{printable(str(path))} is not loaded: the start that was interrupted wrote it, "
                "and this run starts from the beginning"
            )
        lightning_checkpoints.set_loaded_checkpoint(self.trainer, {}, None)
        return True

    def _begin_from(self, path: Path, given_path: Any) -> None:
        """Hand Lightning a checkpoint."""
        self.resumed = resumed = loading.read(self, path)
        loading.refuse_other_length(self, resumed)
        self.seeding.use_seed(resumed.entries["seed"])
        loading.announce(self, resumed, path, given_path)
        self.same_run.compare_numbers()
        if resumed.same_ranks:
            resumed.digests = self._digests(
                {part.key: resumed.saved(part) for part in self.parts}, resumed.rank_state
            )
        resumed.checkpoint = checkpoint = loading.decoded(self, resumed)
        self.restore(Moment.LOADING)
        lightning_checkpoints.set_loaded_checkpoint(self.trainer, checkpoint, str(path))
        load_within, loads = lightning_checkpoints.load_within, lightning_checkpoints.Loads
        noting = self.part(UserObjects).noting_replaced_numbers
        for what, of_what, context in (
            (loads.DATA_MODULE, "a data module", self.part(DataEpoch).data_module_loads),
            (loads.MODEL, "weights", noting),
            (loads.CALLBACKS, "callbacks", noting),
            (loads.LOOPS, "loops", self.part(Limits).loading_loops),
        ):
            load_within(self.trainer, what, self._loading(of_what, context))
        weights = self.part(Weights)
        if weights.is_loaded_before_optimizers:
            lightning_checkpoints.make_optimizers_within(self.trainer, weights.first_weights)
        self.check.continue_results(resumed.entries["resumes"])

    def accept(self, checkpoint: dict[str, Any]) -> None:
        """Remove from a checkpoint, before Lightning loads it, what nothing here would save.

        Raises:
            UserError: Its weights are in files of their own.
        """
        entries = checkpoint.get(checkpoint_file.ENTRIES_KEY)
        if isinstance(entries, dict) and shards.SHARDS_KEY in entries:
            raise UserError(
                f"fit(ckpt_path={printable(str(self.trainer.ckpt_path))}): found a checkpoint of a "
                "sharded model, whose weights are in files beside it; expected one whole file: "
                "ExactResume continues from its folder without ckpt_path"
            )
        acceptance.accept(self.trainer, checkpoint)

    # Before the first batch -----------------------------------------------------------------------

    def optimizers_made(self) -> None:
        """Compare the optimizers with those of the checkpoint's run, before any hook runs.

        Raises:
            UserError: Ranks would train weights of a sharded model apart, or others than its own.
        """
        sharded_weights.check_meshes(self.trainer)
        sharded_weights.check_optimizers(self.trainer)
        of_flags = self.part(Limits).of_flags
        same_limits = not self.resumed or self.resumed.of(Limits)["of_flags"] == of_flags
        with self.part(UserObjects).grown.without_what_they_got(), self._refusing("run"):
            self.same_run.compare_optimizers(same_limits)
        self.hooks_begin()

    def optimizers_are_loaded_next(self) -> None:
        """Prepare optimizers and schedulers right before Lightning loads their states.

        Hooks change them, or make others.
        """
        what = lightning_checkpoints.Loads.OPTIMIZERS_AND_SCHEDULERS
        lightning_checkpoints.load_within(self.trainer, what, self._optimizers_prepared)

    @contextmanager
    def _optimizers_prepared(self) -> Iterator[None]:
        with self.part(Schedulers).loading() if self.resumed else nullcontext():
            acceptance.accept_schedulers(self.trainer, lightning_checkpoints.loaded(self.trainer))
        self.restore(Moment.OPTIMIZERS)
        with self._refusing("optimizers"):
            yield

    def hooks_begin(self) -> None:
        """Note the state that the hooks of others find."""
        self.part(UserObjects).hooks_begin()
        self.part(ParameterGroups).hooks_begin()

    def loops_begin(self) -> None:
        """Receive the signals, and give the limit of epochs back its value."""
        self.part(Limits).loops_begin()
        self.signals.receive(self.trainer)

    def hooks_run(self) -> None:
        """Let signals request a stop at a batch boundary from now on; begin the journal."""
        self.stopping.training_begins()
        if self.saves:
            self._leave_save_hooks_alone()
            self.snapshot.describe_run(self.same_run.describe())
            self.check.start(
                self.resumed.entries if self.resumed else {},
                self.options.settings,
                comparable=not self.options.other_settings
                and (self.resumed is None or self.resumed.same_ranks)
                and self._was_interrupted(),
                lost=self.part(UserObjects).lost_on_ranks,
            )
        self.signals.begin()

    def _leave_save_hooks_alone(self) -> None:
        """Take no copies in memory if a state needs what hooks of the user's save.

        They may count their calls, and are called when a checkpoint is written alone.
        """
        hooks = lightning_checkpoints.save_hooks(self.trainer).read
        if hooks and not self.copies.problem:
            (owner, name), *_ = hooks
            says = f"{class_name(type(owner))}.{name} is called for checkpoints alone"
            self.copies.give_up(says if self.trainer.is_global_zero else "")

    def _was_interrupted(self) -> bool:
        """Return whether a training that did not come to its end has saved what this one resumes.

        If this program has ended that one, it may change what it likes before it trains on.
        """
        number = self.resumed.entries["number"] if self.resumed else None
        return not earlier_fits.has_saved(self.options.first_folder, self.options.fit, number)

    def misses_first_data(self, loop: lightning_loops.FitLoop) -> bool:
        """Return whether the interrupted run has made its training data more than once.

        A hook that makes them may change other objects, such as a pool of samples. What a
        checkpoint has differs from a start whose data were made, as each run makes them.

        Args:
            loop: The fit loop.
        """
        is_first = self.resumed is not None and self.is_training and loop.loaders is None
        data_epoch = self.part(DataEpoch)
        return is_first and data_epoch.next_epoch() > data_epoch.first()

    @contextmanager
    def first_data_needed(self, loop: lightning_loops.FitLoop) -> Iterator[None]:
        """Let the training data be made, inside this context, as a new run makes its first ones.

        Args:
            loop: The fit loop.
        """
        objects = self.part(UserObjects)
        objects.graph.begin()
        objects.hooks_ended()
        progress = loop.epoch_progress.current
        completed = progress.completed
        progress.completed = self.part(DataEpoch).first()
        try:
            with self.part(Weights).first_weights():
                yield
        finally:
            progress.completed = completed
        objects.graph.mark()

    @contextmanager
    def data_needed(self, loop: lightning_loops.FitLoop) -> Iterator[None]:
        """Let the training data be made, inside this context, as in the interrupted run.

        Args:
            loop: The fit loop.
        """
        loaders_before = loop.loaders
        objects = self.part(UserObjects)
        data_epoch = self.part(DataEpoch)
        objects.graph.begin()
        objects.hooks_ended()  # what follows are data
        are_due = loaders_before is not None and lightning_loops.loaders_are_due(self.trainer)
        before = data_epoch.state_of_objects() if are_due and self.is_training else None
        replaces = (
            self.is_training
            and epochs_of_data(self.trainer) == 1  # others are of weights of some epochs before
            and self.trainer.current_epoch > data_epoch.first()
        )
        watched = self.live_draws.data_made() if replaces else nullcontext()
        with data_epoch.recreating(loop), watched:
            yield
        self.part(Weights).forget_first_weights()
        objects.graph.include()
        if loaders_before not in (None, loop.loaders):
            data_epoch.data_made_anew(before)

    @contextmanager
    def validation_data_needed(self, loop: lightning_loops.ValidationLoop) -> Iterator[None]:
        """Let the validation data be made, inside this context, as in the interrupted run.

        What they draw depends only on the epoch in which they were first made, if they are made
        more than once: a resumed run makes them later than a new one, which needs them for its
        check before training.

        Args:
            loop: The validation loop.
        """
        self.part(UserObjects).hooks_ended()  # what follows are data
        data_epoch = self.part(DataEpoch)
        there_are_some = loop.loaders is not None
        epoch = data_epoch.epoch_of_validation_data(there_are_some)
        progress = self.trainer.fit_loop.epoch_progress.current
        completed = progress.completed
        progress.completed = epoch
        try:
            with isolate_rng():
                every = epochs_of_data(self.trainer)
                seed_all("val data", self.seeding.seed, epoch if every else 0)
                with data_epoch.making_validation_data(loop):
                    yield
        finally:
            progress.completed = completed
        if not there_are_some:
            data_epoch.validation_data_made()
            if self.resumed:
                with refusing(self, self.resumed.file_name, LoaderPositions.key):
                    self.part(LoaderPositions).validation_data_made()

    def start_hooks_run_next(self, loop: lightning_loops.FitLoop) -> None:
        """Restore what the hooks that begin training find.

        Args:
            loop: The fit loop.
        """
        self.same_run.compare_loaders()
        self.restore(Moment.HOOKS)
        if self.resumed:
            loading.announce_other_length(self, self.resumed)
        missing = self.trainer.enable_validation and self.trainer.val_dataloaders is None
        if missing and self._had_validation_data():
            # For the comparison: Lightning would make them for the first validation.
            self.trainer.validating = True
            loop.epoch_loop.val_loop.setup_data()
            self.trainer.training = True

    def _had_validation_data(self) -> bool:
        """Return whether the interrupted run had made its validation data, which are compared."""
        compared = self.resumed.digests.get(DataIdentity.key, ()) if self.resumed else ()
        return any(map(self.part(DataIdentity).is_of_validation, compared))

    @object_graph.at_one_moment()
    def mark_start(self) -> None:
        """Take the present state as the one that the run starts with."""
        reshard(self.trainer)
        self.part(UserObjects).hooks_ended()
        for owner in (self.trainer.lightning_module, data_module_of(self.trainer)):
            # Lightning makes them when they are asked for first, as a checkpoint does.
            getattr(owner, "hparams", None)
        for part in self.parts:
            part.mark_start()

    def training_begins(self) -> None:
        """Restore everything, once all hooks that begin training have run; check it.

        Raises:
            UserError: Ranks have other values of what they have in common of a sharded model.
        """
        start = self.options.start_before
        if start and start.model_files is not None:
            user_checkpoints.overwrite_later_files(self.trainer, start.model_files)
        self.mark_start()
        if self.resumed:
            self.part(UserObjects).recreate()
        self.restore(Moment.TRAINING)  # overwrite what hooks have reset
        if self.options.fit == 1:  # steps may differ between ranks in the last bits
            sharded_weights.check_replicas(self.trainer, self.agreement.gather)
        if self.resumed:
            self.resumed.forget_checkpoint()
        # A checkpoint of a later training of this program is of other data and other limits.
        self.check.check_restored({} if self.part(Limits).exceeded else self._differing())
        if not self.resumed:
            notes = self.options.saves and self.options.fit == 1
            logs.begin(self.trainer, self.folder if notes else None, start)
        # What is still to be logged comes after the checkpoint.
        self.restore(Moment.COMPARED)
        self.part(UserObjects).graph.end_start()

    def _digests(
        self, saved: Mapping[str, Any], of_rank: Mapping[str, Any]
    ) -> dict[str, dict[str, int]]:
        """Return the digests of all that is compared, by a part's key and name.

        Args:
            saved: What there is of each part, by key.
            of_rank: What there is of this rank's parts, by key.
        """
        return {
            part.key: digests_of(part.digest(saved[part.key], of_rank))
            for part in self.parts
            if part.key in saved
        }

    @object_graph.at_one_moment()
    def _differing(self) -> dict[str, str]:
        """Return what saved values are missing or different in this run, as messages name them.

        With each comes why it may be another one; "" if that is not known.
        """
        if not self.resumed or not self.resumed.digests:
            return {}
        of_rank = {part.key: part.present() for part in self.parts if part.place is Place.RANK}
        of_lightning = {
            part.key: readable(part.present(), copies=False)
            for part in self.parts
            if part.place is Place.LIGHTNING
        }
        now = self._digests(of_rank | of_lightning, of_rank)
        return {
            part.shown(name): part.why(name)
            for part in self.parts
            for name in part.differing(self.resumed.digests[part.key], now.get(part.key, {}))
        }

    def only_end_is_left(self) -> None:
        """Note that a resumed run has only to end the epoch: all its batches are done."""
        cut = not lightning_loops.batches_are_done(self.trainer)
        self.stopping.only_end_is_left(cut)
        self._print_nothing_left()

    def _print_nothing_left(self) -> None:
        """Print why nothing is trained."""
        if self.trainer.is_global_zero:
            step = self.resumed.step if self.resumed else 0
            limit = self.part(Limits).exceeded
            reached = (
                f"step {step} is beyond {limit}, and the model has that step's weights"
                if limit
                else f"step {step} was the last one"
            )
            log.info(
                f"nothing is left to train: {reached}; to train again, move "
                f"{self.folder.path} away or give another {self.folder.setting}"
            )

    def epoch_hooks_run_next(self) -> None:
        """Restore what the hooks that begin an epoch find."""
        self.part(Counters).show_last_epoch()

    def epoch_begins(self, fetcher: Any, batches_done: int) -> int:
        """Begin or resume an epoch; return after how many batches.

        Args:
            fetcher: Lightning's data fetcher.
            batches_done: Number of batches of the epoch that steps have had.

        Raises:
            UserError: A sampler draws other samples on another rank.
        """
        loader = training_loaders(self.trainer)
        epoch = lightning_loops.epoch_counts(self.trainer).processed
        states = self.part(LoaderPositions).take() if self.is_training else None
        saves = self.is_training and self.saves
        if states is not None:
            positions = self.part(LoaderPositions)
            with refusing(self, positions.resumed.file_name, LoaderPositions.key):
                batches_done = self.part(Counters).batches_done(batches_done, states)
        batches_done = loader.begin(fetcher, epoch, batches_done, states, proves=saves)
        if self.is_training:
            self.restore(Moment.EPOCH)
        if saves:
            why = loader.why or self.live_draws.why
            answers = self.agreement.gather((why, loader.shared_orders))
            refuse_other_orders(answers)
            self.stopping.save_only_epochs(common_reason(answers))
            if not self.has_trained:
                self.part(Structure).first_epoch_begins()
        return batches_done

    def training_continues(self) -> bool:
        """Note that the first epoch has begun or is resumed: later ones are as usual.

        Return whether a validation was interrupted, and is repeated now.
        """
        if self.resumed is None:
            return False
        repeats_validation = self.resumed.point is ResumePoint.VALIDATION
        self.resumed.training_continues()
        return repeats_validation

    # While it trains ------------------------------------------------------------------------------

    def batch_begins(self, batch: Any, number: int) -> None:
        """Record a batch in the journal.

        Args:
            batch: The batch, as training_step gets it.
            number: Its number in the epoch, from 0.
        """
        if self.saves:
            self.check.begin_batch(batch, number)
            self.live_draws.batch_begins(number, bool(self.stopping.why_only_epochs))
            if data_ranks(self.trainer) > 1 and not self.has_compared_batches:
                self._warn_of_equal_batches(batch)

    def _warn_of_equal_batches(self, batch: Any) -> None:
        """Warn, once, if all ranks train on the same samples.

        Our loaders share the samples of a dataset with indices. A stream has to do so itself.
        """
        self.has_compared_batches = True
        digests = self.agreement.gather(digest_of(batch))
        if len(set(digests)) == 1 and self.trainer.is_global_zero:
            log.warning(
                f"all {len(digests)} ranks train on the same batch: they share the "
                "samples of a dataset with indices, while an IterableDataset has to yield "
                "the samples of its own rank"
            )

    def training_on_batch(self) -> AbstractContextManager[None]:
        """Return a context in which a batch is trained on."""
        tries = self.resumed is not None and self.is_training
        return self.part(Optimizers).first_steps() if tries else nullcontext()

    def step_left_epoch(self) -> None:
        """Say, once, that a step has ended its epoch: Lightning trains on fewer batches."""
        if self.has_said_who_ends_epochs:
            return
        self.has_said_who_ends_epochs = True
        log.warning(
            f"epoch {self.trainer.current_epoch}: training_step, or what it calls, raised "
            "StopIteration: Lightning takes this for the end of the epoch's data and trains on no "
            "more of it; catch it where next() is called, or give next() a default"
        )

    def schedulers_step(self) -> AbstractContextManager[None]:
        """Return a context in which the schedulers set the next learning rates."""
        tries = self.resumed is not None and self.is_training
        return self.part(Schedulers).steps() if tries else nullcontext()

    def batch_committed(self, done: bool) -> None:
        """Save a checkpoint if one is due; stop if a stop was requested.

        Args:
            done: Whether a limit ends the training here, within an epoch.
        """
        if self.saves and not self.has_trained:
            self.has_trained = True
            for part in self.parts:
                part.first_batch_ended()
        if self.saves and self.live_draws.batch_ended():
            self.stopping.save_only_epochs(self.live_draws.why)
        self.stopping.batch_committed(done)

    def epoch_ended(self) -> None:
        """Note that the epoch in which the checkpoint was saved has ended."""
        if self.resumed:
            self.resumed.epoch_ended()

    def epoch_committed(self, done: bool) -> None:
        """Save a checkpoint; stop if a stop was requested and training is not done."""
        self.stopping.epoch_committed(done)

    def validation_begins(self) -> None:
        """Keep a copy of the state before a validation; stop if a stop was requested.

        Callbacks may replace the weights by their average while it runs. If the copy needed what
        the user's hooks save, they would have to be asked before each validation, and not only when
        a checkpoint is written: then a stop waits for the end of the validation.
        """
        self.divergence.check(self.trainer)
        saves = self.saves and not self.stopping.why_only_epochs
        self.ends_validations = saves and self.snapshot.asks_users_hooks
        keeps = saves and not self.ends_validations
        self.state_before_validation = self.snapshot.take(ResumePoint.VALIDATION) if keeps else {}
        self.stopping.validation_begins()

    def validation_data_begin(self) -> None:
        """Learn after how many batches of this validation every rank may stop."""
        self.validated_batches = 0
        batches = sum(self.trainer.num_val_batches)
        may_stop = batches != float("inf") and not self.ends_validations
        self.common_validation_batches = min(self.agreement.gather(int(batches) if may_stop else 0))

    def validation_batch_committed(self) -> None:
        """Stop if a stop was requested, up to the last batch that every rank has."""
        self.validated_batches += 1
        if self.validated_batches <= self.common_validation_batches:
            self.stopping.validation_batch_committed()

    def validation_ended(self) -> None:
        """Forget the state before the validation."""
        self.state_before_validation = {}
        self.common_validation_batches = 0

    @contextmanager
    def sanity_check(self) -> Iterator[None]:
        """Let a check before training run; what it changes is saved."""
        self.mark_start()
        yield
        self.part(UserObjects).graph.touch_all()

    def save(self, point: ResumePoint, last: bool) -> None:
        """Save a checkpoint; one rank of each host writes it.

        Args:
            point: When it is saved.
            last: Whether to wait until it is written. Otherwise it is written in the background.

        Raises:
            UserError: It is the first one, and could not be read again.
        """
        began = time.monotonic()
        if point is not ResumePoint.VALIDATION:  # validation_begins has checked that state
            self.divergence.check(self.trainer)
        if self.saves:
            self.check.report_difference()
            kept = self.state_before_validation if point is ResumePoint.VALIDATION else {}
            state = kept or self.snapshot.take(point)
            if not self.saved_number:
                _refuse_unreadable(state)
            if last:
                self.signals.save_last()
            self.learn_of_s3()
            entries = state[checkpoint_file.ENTRIES_KEY]
            self.saved_number = entries["number"]
            if self.trainer.local_rank == 0 or self.shards:
                parts = state.pop(OWN_SHARD, None)
                best = best_model.files_in(self.trainer, self.folder.path)
                self.writer.write(state, entries["step"], self.saved_number, best, parts)
            self.check.checkpoint_saved(point)
            if last:
                self.writer.wait()
        if not last:  # an older checkpoint may be what is in S3
            best_model.remove_outdated(self.trainer, self.folder.keep)
        self.stopping.checkpoint_saved(time.monotonic() - began)

    def learn_of_s3(self) -> None:
        """Learn of which checkpoints all hosts know that their shards are in S3."""
        if self.shards:
            known = set(self.folder.own_steps_in_s3()) if self.trainer.local_rank == 0 else None
            of_hosts = [steps for steps in self.agreement.gather(known) if steps is not None]
            self.folder.in_s3_of_all = frozenset(set.intersection(*of_hosts))

    def copy(self, point: ResumePoint) -> None:
        """Take a copy of the state in memory; one rank of each host writes it.

        Args:
            point: When it is taken.
        """
        began = time.monotonic()
        self.divergence.check(self.trainer)
        self.copies.wait()
        with self.part(UserObjects).reports.wait_for_checkpoint():
            state = self.snapshot.take(point)
        # Now all hosts have written the one before. And all ranks have this state: they train
        # together, so a copy costs what it takes the slowest.
        if any(self.agreement.gather(self.copies.problem)):
            self.copies.give_up("")
            return
        self.copies.write(state, began)

    # Its end --------------------------------------------------------------------------------------

    def ends(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self.agreement.receive()
        self.check.finish()
        self.writer.wait()
        self.writer.warn_of_problem("the training is done, and")
        self.copies.wait()
        self.copies.remove()

    def fails(self) -> None:
        """Wait until the last checkpoint is on the disk, without the other ranks."""
        self.writer.wait()
        self.copies.wait()
        self.check.close()


def _refuse_unreadable(state: Mapping[str, Any]) -> None:
    """Raise UserError if what the user's code has put into a checkpoint cannot be read again.

    The first checkpoint tells: to ask the hooks for another one would be a call too many.
    """
    ours = checkpoint_file.ENTRIES_KEY, OWN_SHARD
    own = {name: value for name, value in state.items() if name not in ours}
    if problem := checkpoint_file.why_unreadable(own):
        raise UserError(f"a checkpoint of this run could not be read again: {problem}")
