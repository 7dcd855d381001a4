"""A loader that is left as Lightning has it, because it cannot be resumed exactly."""

import threading
from collections.abc import Mapping
from typing import Any

from sagemaker_lightning.compat.torch_data import code_of_thread
from sagemaker_lightning.data.loaders.resumable import ResumableLoader
from sagemaker_lightning.state.object_graph import LIBRARIES

KEEPS = "keeps an iterator from one epoch to the next"


def why(name: str, reason: str) -> str:
    """Return what is said of a loader, for a reason that follows its name."""
    return (
        f"{name} {reason}, so it draws as without this callback, and a resumed run has other "
        "batches than one left alone"
    )


def users_threads(loader: Any) -> set[threading.Thread]:
    """Return the threads that may draw for a loader; none for one that a library iterates over.

    They run the code of no library: those of data workers, and by which a library reads files, draw
    nothing.
    """
    iter_method = getattr(type(loader), "__iter__", None)
    if _is_of_library(getattr(iter_method, "__module__", None) or ""):
        return set()
    return {
        thread for thread in threading.enumerate() if not _is_of_library(code_of_thread(thread))
    }


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


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
        seed: tuple[Any, ...],
        mode: str,
        reason: str = KEEPS,
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
