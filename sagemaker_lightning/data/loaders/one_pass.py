"""An iterator that cannot begin again, such as a generator: all epochs go through it once."""

import operator
from typing import Any

from sagemaker_lightning.data.loaders.redrawn import Redrawn
from sagemaker_lightning.state.graph.kinds.base import refusing


class OnePass(Redrawn):
    """An iterator in place of a loader; it is drawn to its position from its beginning."""

    def __init__(self, loader: Any, seed: tuple[Any, ...], mode: str) -> None:
        super().__init__(loader, seed, mode)
        self.batches_given = 0  # in this process

    def states(self, within: bool) -> dict[str, Any]:
        """Return what `prepare` takes as `saved`."""
        return super().states(within) | {"given": self.batches_given}

    def go_to(self, done: int) -> None:
        """Draw all batches again that were drawn since its beginning, and throw them away."""
        with refusing():
            given = operator.index(self.saved["given"]) if self.saved else 0
        self.begin(0)
        self._skip(given)

    def begin(self, turn: int, start: int = 0) -> None:
        """Go on where the iteration before has ended."""
        self._begin_turn(turn)
        self.iterator = self._iterate_seeded(self.batches_given)

    def _key(self) -> tuple[Any, ...]:
        return ("once",)

    def _batch_is_given(self) -> None:
        self.batches_given += 1
