"""Where the loggers are: a resumed run continues their files, and logs nothing twice."""

from collections.abc import Mapping
from typing import Any

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class LoggerPositions(Part):
    """What each logger needs to continue: its version, and how far its files are.

    The newest checkpoint's are read once more when a run begins, before loggers open their files
    (files/checkpoint_dir.py).
    """

    key = "loggers"
    what = "where the loggers are, to continue their files"
    place = Place.FIRST
    moments = (Moment.COMPARED,)

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """Return a state for each logger."""
        return loggers.save_states(self.trainer.loggers)

    def restore(self, saved: Any, moment: Moment) -> None:
        """Remove from the logs what this run, or a later one of the trainer's, will log again."""
        if self.trainer.local_rank == 0:
            later = self.run.options.later
            own = loggers.well_formed(saved), self.resumed.step
            states, step = later.newest_loggers() if later else own
            first = self.trainer.is_global_zero
            loggers.continue_files(self.trainer.loggers, states, step, first)
