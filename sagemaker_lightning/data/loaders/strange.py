"""A loader that is left as Lightning has it, because it cannot be resumed exactly."""

from collections.abc import Mapping
from typing import Any

from sagemaker_lightning.data.loaders.resumable import ResumableLoader


def why(name: str, reason: str) -> str:
    """Return what is said of a loader, for a reason that follows its name."""
    return (
        f"{name} {reason}, so it draws as without this callback, and a resumed run has other "
        "batches than one left alone"
    )


class Strange(ResumableLoader):
    """A loader that keeps an iterator, or draws in a thread.

    Args:
        loader: The loader.
        seed: Seeds nothing.
        mode: How Lightning combines the loaders; "" if there is only one.
        reason: Why it is left alone.
    """

    def __init__(
        self,
        loader: Any,
        seed: tuple,
        mode: str,
        reason: str = "keeps an iterator from one epoch to the next",
    ) -> None:
        super().__init__(loader, seed, mode, own=True)
        self.why = why(self.name, reason)

    def give_back(self, saved: Mapping[str, Any], data: str = "now") -> None:
        """Restore nothing."""

    def go_to(self, done: int) -> None:
        """Begin the next iteration."""
        self.begin(0)

    def begin(self, turn: int, start: int = 0) -> None:
        """Begin the next iteration."""
        self._begin_turn(turn)
        self.iterator = iter(self.loader)
