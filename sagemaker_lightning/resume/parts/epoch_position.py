"""How far an epoch is for all ranks together: another number of ranks shares out the rest."""

from collections.abc import Mapping
from typing import Any

from sagemaker_lightning.compat import lightning_loops
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import divided, position, reached
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class EpochPosition(Part):
    """Which batches of an epoch were done, by all ranks."""

    key = "epoch_position"
    what = "which samples of the epoch all ranks have had"
    place = Place.RUN
    moments = (Moment.HOOKS,)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> Any:
        """Return it; None at an epoch's end."""
        return None if point is ResumePoint.EPOCH else reached(self.trainer)

    def present(self) -> None:
        """Return nothing: it is not compared."""

    def restore(self, saved: Any, moment: Moment) -> None:
        """Divide the rest of an epoch that another number of ranks began among these ranks.

        Raises:
            UserError: It cannot be divided among this number of ranks.
        """
        resumed = self.resumed
        if not self.run.resumes_within_epoch or resumed.same_ranks:
            return
        loader = divided(self.trainer.train_dataloader)
        if loader is None or not loader.epoch_plan or saved is None:
            raise UserError(
                f"{self.run.folder.label}: step {resumed.step} was saved within an epoch by "
                f"{resumed.world_size} ranks, and its data cannot be shared out again among "
                f"{self.trainer.world_size}; give as many devices and nodes as before"
            )
        epoch, _ = position(self.trainer)
        loader.epoch_plan.continue_from(epoch, saved)
        done = loader.epoch_plan.of_epoch(epoch)[1]
        progress = lightning_loops.batch_counts(self.trainer)
        progress.ready = progress.started = progress.processed = progress.completed = done
