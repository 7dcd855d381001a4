"""ModelCheckpoint: its newest score, and the files that it writes again.

Lightning saves the score and does not load it. It gives a model another name (`-v1`) if there is a
file of its own already (`enable_version_counter`).
"""

from collections.abc import Mapping
from typing import Any

from sagemaker_lightning.resume.files import user_checkpoints
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class LastSaved(Part):
    """What each ModelCheckpoint of the user's has saved last: its step, and its file's name.

    A save may wait: what it monitors is logged by a validation that is still to come.
    """

    key = "last_saved"
    what = "what each ModelCheckpoint has saved last"
    place = Place.FIRST
    moments = (Moment.LOADING,)

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> dict[str, tuple[int, str, bool]]:
        """Return step and name, and whether a save waits, by the callbacks' state keys."""
        return user_checkpoints.last_saved(self.trainer)

    def restore(self, saved: Any, moment: Moment) -> None:
        """Let each callback know it: it saves no step twice, and writes no other last model."""
        user_checkpoints.set_last_saved(self.trainer, saved, self.resumed.step)


class ModelFiles(Part):
    """The names of the files that each ModelCheckpoint has in its folder."""

    key = "model_files"
    what = "which files each ModelCheckpoint had"
    place = Place.FIRST
    moments = (Moment.LOADING,)

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> dict[str, list[str]]:
        """Return the names by the callbacks' state keys."""
        return user_checkpoints.file_names(self.trainer)

    def restore(self, saved: Any, moment: Moment) -> None:
        """Let newer files be overwritten; give each callback its newest score."""
        states = self.resumed.checkpoint["callbacks"]
        for callback in self.trainer.checkpoint_callbacks:
            if hasattr(callback, "current_score"):
                callback.current_score = states.get(callback.state_key, {}).get("current_score")
        user_checkpoints.overwrite_later_files(self.trainer, saved)
