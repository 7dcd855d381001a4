"""Where the training loaders are, and the states of those that save one (data/loaders)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sagemaker_lightning.compat.lightning_loaders import flattened
from sagemaker_lightning.compat.lightning_loops import fetcher
from sagemaker_lightning.compat.lightning_trainer import epochs_of_data
from sagemaker_lightning.compat.torch_data import iterations_begun, set_iterations_begun
from sagemaker_lightning.data.loaders.several import training_loaders
from sagemaker_lightning.resume.parts.generators import generators_of, set_states, states_of
from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.parts.roots import TRAINING
from sagemaker_lightning.resume.resume_point import ResumePoint

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run


class LoaderPositions(Part):
    """The states of the training loaders, their samplers and datasets."""

    key = "loader_positions"
    what = "where the loaders are, and the states of loaders, samplers and datasets"
    moments = (Moment.TRAINING,)

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.are_used = False
        """Whether the saved states were taken, or no longer apply."""

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> Any:
        """Return the states; at an epoch's end, also those of the loaders' generators.

        Within an epoch, these are seeded as the batches are drawn again.
        """
        within = point is not ResumePoint.EPOCH
        states = {} if within else states_of(self._generators())
        loaders = training_loaders(self.trainer).states(fetcher(self.trainer), within)
        draws = [getattr(plan, "samples_draw", None) for plan in self._validation_plans()]
        begun = [iterations_begun(each) for each in flattened(self.trainer.val_dataloaders)]
        of_validation = {"validation draws": draws, "validation iterations": begun}
        return {**loaders, "generators": states, **of_validation}

    def present(self) -> None:
        """Return nothing: they are not compared, and the loaders have not begun."""

    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the samplers and data to their state at an epoch's end.

        Loaders know values alone. What they share with others is one object again afterwards.
        """
        if self.resumed.saved_at is ResumePoint.EPOCH and not self.are_used:
            training_loaders(self.trainer).give_back(saved)
            set_states(self._generators(), saved["generators"])
        if not epochs_of_data(self.trainer):
            self._set_iterations_of_validation()  # also after a check before training

    def validation_data_made(self) -> None:
        """Tell the first validation loaders what the interrupted run knew of them.

        It is how many iterations they have begun, and whether samples draw. That is found out by
        drawing a batch again, which a dataset may count.
        """
        if not epochs_of_data(self.trainer):
            draws = self.resumed.of(self)["validation draws"]
            for plan, draw in zip(self._validation_plans(), draws, strict=False):
                if plan is not None and type(draw) is bool:
                    plan.samples_draw = draw
            self._set_iterations_of_validation()

    def _set_iterations_of_validation(self) -> None:
        """Have validation loaders begin the iterations that come next."""
        begun = self.resumed.of(self)["validation iterations"]
        loaders = flattened(self.trainer.val_dataloaders)
        for loader, number in zip(loaders, begun, strict=False):
            if type(number) is int:
                set_iterations_begun(loader, number)

    def _validation_plans(self) -> list[Any]:
        """Return how the samples of each validation loader are drawn; None for other loaders."""
        loaders = flattened(self.trainer.val_dataloaders)
        return [getattr(each, "planned", None) for each in loaders]

    def _generators(self) -> dict[str, Any]:
        """Return the generators of the training loaders, by path."""
        return generators_of(self.run, lambda root: root.startswith(TRAINING))

    def take(self) -> Mapping[str, Any] | None:
        """Return the saved states for the epoch that begins; None if there are none for it."""
        if not self.run.resumed or self.are_used:
            return None
        self.are_used = True
        states: Mapping[str, Any] = self.resumed.of(self)
        return states

    def discard(self) -> None:
        """Forget the saved states: they are of loaders that do not exist any more."""
        self.are_used = True
