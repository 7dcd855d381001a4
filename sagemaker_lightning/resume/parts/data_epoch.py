"""When the data were made: a resumed run makes them as of the same epoch.

That means with the same random draws, and with the user's objects in the same state.
"""

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from pytorch_lightning import Trainer
from torch import nn

from sagemaker_lightning.compat import lightning_callbacks, lightning_loops
from sagemaker_lightning.compat.lightning_trainer import (
    callbacks_of,
    data_module_of,
    epochs_of_data,
)
from sagemaker_lightning.data.seeded_indices import seed_all
from sagemaker_lightning.resume.parts.data_identity import DataIdentity
from sagemaker_lightning.resume.parts.generators import Generators
from sagemaker_lightning.resume.parts.loader_positions import LoaderPositions
from sagemaker_lightning.resume.parts.part import Part, refusing
from sagemaker_lightning.resume.parts.roots import prefix_of_replaced
from sagemaker_lightning.resume.parts.trainer_settings import OF_DATA, TrainerSettings
from sagemaker_lightning.resume.parts.user_objects import UserObjects, before_hooks
from sagemaker_lightning.resume.parts.weights import Weights
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state.graph.start import Start
from sagemaker_lightning.state.graph.state import names_in

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run


class DataEpoch(Part):
    """In which epochs the data were made, and from which state of the user's objects.

    `recreating` and its like restore it, when Lightning sets up the data.
    """

    key = "data_epoch"
    what = "in which epoch the data were made, and from which state of the user's objects"
    when = "when Lightning sets up the data"

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.at_start = self.trainer.current_epoch
        self.objects_before: Mapping[str, Any] | None = None
        """The state of the user's objects before the training data was made again."""
        self.validation_settings: Mapping[str, Any] = {}
        """The changed settings of the trainer with which the validation data were made."""

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the epochs, the state, and how many batches validation loaders have given."""
        trainer = self.trainer
        return {
            "first": self.first(),
            "made": lightning_loops.epoch_of_loaders(trainer),
            "objects_before": self.objects_before,
            "validation_made": (
                lightning_loops.epoch_of_validation_loaders(trainer)
                if epochs_of_data(trainer)
                else None  # they stay as they are, whenever a run has made them
            ),
            "validation_batches": lightning_loops.validation_batches_seen(trainer),
            "validation_settings": self.validation_settings,
        }

    def present(self) -> None:
        """Return nothing: it is not compared."""

    def first(self) -> int:
        """Return the epoch with which this training began; a trainer may train several times."""
        return int(self._epoch("first")) if self.run.resumed else self.at_start

    def next_epoch(self) -> float:
        """Return the epoch as of which a resumed run makes its training data.

        It is the one of the interrupted run's data, or the next one, if there is one and these
        data end before it.
        """
        made = self._epoch("made")
        every = epochs_of_data(self.trainer)
        epoch = self.trainer.current_epoch
        at_epochs_end = self.resumed.saved_at is ResumePoint.EPOCH
        if not at_epochs_end or lightning_loops.training_is_over(self.trainer):
            return made
        return epoch if every and epoch - made >= every else made

    @contextmanager
    def data_module_loads(self) -> Iterator[None]:
        """Undo what the data module's own `load_state_dict` does in this context.

        The interrupted run has made its data before anything was loaded. Once they are made, what
        has changed in the data module comes back with the user's objects; but for what these
        cannot hold, which stays as it is loaded.
        """
        resumed = self.resumed
        data_module = data_module_of(self.trainer)
        start = Start({"datamodule": data_module}, (Trainer, nn.Module), is_kept=True)
        yield
        with refusing(self.run, resumed.file_name, UserObjects.key):
            unsaved = resumed.of(UserObjects)["unsaved"]
            attributes = getattr(data_module, "__dict__", {})
            loaded = {
                name: attributes[name] for name in attributes if f"datamodule.{name}" in unsaved
            }
        start.reset()
        attributes.update(loaded)

    @contextmanager
    def recreating(self, loop: lightning_loops.FitLoop) -> Iterator[None]:
        """Let the training data be made, inside this context, as in the interrupted run.

        Args:
            loop: The fit loop.
        """
        seed = self.run.seeding.seed
        epoch = self.trainer.current_epoch
        # A search between two epochs has data of its own, and then Lightning makes those it had.
        is_first = self.run.resumed is not None and self.run.resumed.point is not None
        data_epoch = self._epoch("made") if is_first else -1
        # Lightning makes the data after a search, which draws; a resumed run does not search.
        follows_search = any(map(lightning_callbacks.is_search, callbacks_of(self.trainer)))
        if loop.loaders is not None:
            if lightning_loops.loaders_are_due(self.trainer):
                seed_all("data", seed, epoch)
            yield
            return
        if data_epoch < 0:
            if follows_search:
                seed_all("data", seed, self.first())
            yield
            return
        needs_new_data = self.next_epoch() != data_epoch
        if needs_new_data:
            data_epoch = epoch
        if data_epoch != self.first() or follows_search:
            seed_all("data", seed, data_epoch)
        settings = self._restore_objects_before(needs_new_data)
        self.run.part(UserObjects).graph.mark()
        progress = loop.epoch_progress.current
        completed = progress.completed
        progress.completed = int(data_epoch)
        made_of_first = not needs_new_data and data_epoch == self.first()
        weights = self.run.part(Weights).first_weights() if made_of_first else nullcontext()
        try:
            with self.run.part(TrainerSettings).as_saved(settings), weights:
                yield
        finally:
            progress.completed = completed
        if needs_new_data:
            self._forget_old_data()

    def _epoch(self, name: str) -> float:
        """Return an epoch that the checkpoint has; a negative one stands for none."""
        resumed = self.resumed
        with refusing(self.run, resumed.file_name, self.key):
            epoch = resumed.of(self)[name]
            return epoch if epoch < 0 else operator.index(epoch)

    def _validation_made(self) -> float | None:
        """Return in which epoch the validation data were made; None if that does not matter."""
        is_known = self.resumed.of(self).get("validation_made") is not None
        return self._epoch("validation_made") if is_known else None

    def _restore_objects_before(self, needs_new_data: bool) -> Mapping[str, Any]:
        """Restore the objects as they were before the data were made, if that is known.

        Return which settings of the trainer were changed then.
        """
        resumed = self.resumed
        with refusing(self.run, resumed.file_name, self.key):
            objects = resumed.of(self)["objects_before"]
            if needs_new_data:
                objects = {
                    "graph": resumed.of(UserObjects)["graph"],
                    "generators": dict(resumed.of(Generators)),  # _forget_old_data changes it
                    "settings": dict(resumed.of(TrainerSettings)),  # and this
                }
            if not objects:
                return {}
            if resumed.same_ranks:
                self.restore_objects(objects)
                self.objects_before = objects
            return {**objects["settings"]}

    def _forget_old_data(self) -> None:
        """Forget the saved state of the data that the interrupted run would have no more.

        It does not fit the new data, and to make these may have changed the state of other objects.
        """
        resumed = self.resumed
        outdated = {f"settings {name}" for name in OF_DATA}
        for name in OF_DATA:
            resumed.of(TrainerSettings).pop(name, None)
        if old := prefix_of_replaced(self.trainer):
            new = self.state_of_objects(is_restored=True)
            saved = resumed.of(UserObjects)
            outdated |= {name for name in names_in(saved["graph"]) if name.startswith(old)}
            outdated.update(names_in(new["graph"]))
            outdated |= {f"generators {path}" for path in new["generators"]}
            saved["graph"] = self.run.part(UserObjects).graph.without(saved["graph"], old)
            saved["newer graph"] = new["graph"]
            generators = resumed.of(Generators)
            generators.clear()
            generators.update(new["generators"])
        for part in (UserObjects, Generators, TrainerSettings):
            resumed.forget_digests(part, outdated.__contains__)
        resumed.forget_digests(DataIdentity, lambda name: True)
        self.run.part(LoaderPositions).discard()

    def state_of_objects(self, is_restored: bool = False) -> dict[str, Any]:
        """Return, encoded, the state that the data created next may depend on.

        Args:
            is_restored: Whether this process is going to restore it.
        """
        return {
            "graph": self.run.part(UserObjects).graph.encode(
                prefix_of_replaced(self.trainer), is_restored
            ),
            "generators": self.run.part(Generators).present(),
            "settings": self.run.part(TrainerSettings).present(),
        }

    def restore_objects(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_of_objects` returned."""
        self.run.part(UserObjects).graph.restore(saved["graph"], before_hooks)
        self.run.part(Generators).restore_all(saved["generators"])

    def data_made_anew(self, objects: Mapping[str, Any] | None) -> None:
        """Note that training data were made in place of others.

        Args:
            objects: What `state_of_objects` returned before; None if it is not known.
        """
        self.objects_before = objects
        self.run.part(LoaderPositions).discard()

    def epoch_of_validation_data(self, there_are_some: bool) -> int:
        """Return the epoch as of which validation data are to be created if they are created now.

        That is the current epoch. But if a resumed run has none yet, and those of the interrupted
        run were to last longer, it is the epoch in which these were created.

        Args:
            there_are_some: Whether this run has created validation data before.
        """
        stay = not there_are_some and self._validation_data_stay()
        made = self._validation_made() if stay else None
        return self.trainer.current_epoch if made is None or made < 0 else int(made)

    @contextmanager
    def making_validation_data(self, loop: lightning_loops.ValidationLoop) -> Iterator[None]:
        """Let validation data be made, inside this context, with the settings of when they were.

        Args:
            loop: The validation loop.
        """
        settings = self.run.part(TrainerSettings)
        before = loop.loaders
        saved: Mapping[str, Any] | None = None
        if self.run.resumed and before is None:
            with refusing(self.run, self.resumed.file_name, self.key):
                if self._validation_data_stay():
                    saved = {**self.resumed.of(self)["validation_settings"]}
        with nullcontext() if saved is None else settings.as_saved(saved):
            yield
        if loop.loaders is not before:
            self.validation_settings = settings.present() if saved is None else saved

    def validation_data_made(self) -> None:
        """Restore how many batches the validation loaders have given, once they are made."""
        if self._validation_data_stay():
            lightning_loops.set_validation_batches_seen(
                self.trainer, self.resumed.of(self)["validation_batches"]
            )

    def _validation_data_stay(self) -> bool:
        """Return whether validation data that are made now are those the interrupted run had.

        Before training begins, they are compared with these. Then they may be due to be made again.
        """
        if not self.run.resumed:
            return False
        every = epochs_of_data(self.trainer)
        made = self._validation_made()
        if not every:
            return True
        if made is None or made < 0:
            return False
        has_begun = self.run.part(TrainerSettings).has_begun
        return not has_begun or self.trainer.current_epoch - made < every
