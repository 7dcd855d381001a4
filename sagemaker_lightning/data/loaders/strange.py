"""A loader that is left as Lightning has it, because it cannot be resumed exactly."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.dummy import DummyProcess
from multiprocessing.pool import ThreadPool
from types import GeneratorType
from typing import Any

from pytorch_lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader, Sampler

from sagemaker_lightning.compat.torch_data import code_of_thread
from sagemaker_lightning.data.loaders.resumable import ResumableLoader
from sagemaker_lightning.state import generators, object_graph
from sagemaker_lightning.state.graph.kinds.base import refusal

POOL = ThreadPoolExecutor, ThreadPool
TORCHS = DataLoader, Sampler
KEEPS = "keeps an iterator from one epoch to the next"
IN_THREAD = "draws in a thread of its own"


def why(name: str, reason: str) -> str:
    """Return what is said of a loader, for a reason that follows its name."""
    return (
        f"{name} {reason}, so it draws as with Lightning alone, and a resumed run may "
        "have other batches than one left alone"
    )


def users_threads(loader: Any) -> set[threading.Thread]:
    """Return the threads that may draw for a loader; none for one that a library iterates over.

    They run the code of no library: those of data workers, and by which a library reads files, draw
    nothing. Those of a pool run what they are given: see `draws_in_pool`.
    """
    iter_method = getattr(type(loader), "__iter__", None)
    if _is_of_library(getattr(iter_method, "__module__", None) or ""):
        return set()
    may_draw = _has_generator(loader)
    return {
        thread
        for thread in threading.enumerate()
        if not _is_of_library(code_of_thread(thread)) or (may_draw and _is_of_pool(thread))
    }


def nodes_draw_ahead() -> bool:
    """Return whether a thread of torchdata's nodes runs."""
    return any(code_of_thread(each).startswith("torchdata.") for each in threading.enumerate())


def draws_in_pool(loader: Any) -> bool:
    """Return whether a loader holds a pool of threads, and a generator from which these may draw.

    A loader of torch's within it, or a sampler, draws in the thread that iterates over it.
    """
    return _has_generator(loader) and bool(pools(loader))


def pools(loader: Any) -> set[int]:
    """Return the ids of the pools of threads that a loader holds."""
    held = object_graph.walk(_members_of(loader), TORCHS)
    return {id(object_) for _, object_ in held if isinstance(object_, POOL)}


def holds_python_generator(loader: Any) -> bool:
    """Return whether a loader holds a Python generator, which nobody can set to a position.

    All iterations of such a loader draw from it.
    """
    held = object_graph.walk(_members_of(loader), (Sampler, nn.Module, Trainer))
    return any(isinstance(object_, GeneratorType) for _, object_ in held)


def _has_generator(loader: Any) -> bool:
    return bool(generators.find(_members_of(loader), TORCHS))


def _members_of(loader: Any) -> dict[str, Any]:
    """Return what a loader has that torch has not made, by name."""
    if not isinstance(loader, DataLoader):
        return {"loader": loader}
    parts = {name: getattr(loader, name, None) for name in ("dataset", "collate_fn")}
    return parts | {"loader": object_graph.added_to(loader)}


def _is_of_pool(thread: threading.Thread) -> bool:
    """Return whether a thread is one of a pool's, and not of asyncio's, which looks up names."""
    is_executors = code_of_thread(thread) == ThreadPoolExecutor.__module__
    return isinstance(thread, DummyProcess) or (
        is_executors and not thread.name.startswith("asyncio")
    )


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in object_graph.LIBRARIES


def known_reason(saved: Mapping[str, Any] | None) -> str:
    """Return why an interrupted run has left a loader alone; "" if it has not.

    Args:
        saved: What a checkpoint has of the loader.
    """
    reason = saved["strange"] if saved else ""
    if reason not in ("", KEEPS, IN_THREAD):
        raise refusal(reason)
    return reason


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
        self.reason = reason
        self.why = why(self.name, reason)

    def states(self, within: bool) -> dict[str, Any]:
        """Return what `prepare` takes as `saved`."""
        return super().states(within) | {"strange": self.reason}

    def give_back(self, saved: Mapping[str, Any], data: str = "now") -> None:
        """Restore nothing."""

    def go_to(self, done: int) -> None:
        """Begin the next iteration."""
        self.begin(0)

    def begin(self, turn: int, start: int = 0) -> None:
        """Begin the next iteration."""
        self._begin_turn(turn)
        self.iterator = iter(self.loader)
