"""A training that has failed, and that its program tries again: what changed in between is lost.

The program that is started again resumes within its first call of `fit`, which does not fail again.
So what it has done after the failure, such as to halve a batch size, is not done.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.state.graph.state import digests

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run

OF_THE_PROGRAM = "model.", "datamodule."
"""How the names of what a program may change begin."""


class FailedFit:
    """The state of the user's objects when a training failed.

    Args:
        run: The training's run.
    """

    def __init__(self, run: "Run") -> None:
        self.trainer = run.trainer
        self.model = run.trainer.lightning_module
        self.graph = run.part(UserObjects).graph
        self.digests = self._changes()

    def _changes(self) -> dict[str, Any]:
        """Return what has changed since the training began, by name, to be compared."""
        with suppress(Exception):  # another error has ended the training, and it counts
            changed = digests(self.graph.encode())
            return {name: each for name, each in changed.items() if name.startswith(OF_THE_PROGRAM)}
        return {}

    def report(self, model: object) -> None:
        """Print what has changed since, if the same model is trained again.

        Args:
            model: The model that is trained now.
        """
        if model is not self.model or not self.trainer.is_global_zero:
            return
        now = self._changes()
        both = now | self.digests
        changed = sorted(name for name in both if now.get(name) != self.digests.get(name))
        if changed:
            names = ", ".join(changed[:5]) + (", ..." if changed[5:] else "")
            log.warning(
                f"{names}: changed between the fit() that failed and this one; a program that is "
                "started again resumes within its first fit(), and does not repeat that change: "
                "after an interruption this run is not exact"
            )
