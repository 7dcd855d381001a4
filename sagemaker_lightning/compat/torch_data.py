"""How torch's DataLoader makes iterators, asks for indices and fetches samples.

It has no public way to begin an epoch at a batch, or to seed each sample. A class of the user's or
of torchdata may iterate over it in its own way. Two methods of DataLoader, and one function by
which all of these fetch samples, are the places to do both.

On an upgrade: compare `_get_iterator`, `_index_sampler` and `_DatasetKind` in dataloader.py, the
fetchers in _utils/fetch.py (`fetch`, `dataset_iter`), who calls `create_fetcher`, and
`_get_iterator` of torchdata's StatefulDataLoader.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

ITERATOR_ATTRIBUTE = "_iterator"
"""Where a DataLoader keeps an iterator whose workers stay from epoch to epoch."""
ITERATOR_CLASS = _SingleProcessDataLoaderIter
"""The class of a DataLoader's iterators without data workers."""


class CustomIteratorLoader(DataLoader[Any]):
    """A DataLoader whose iterators `make_iterator` makes; a base before its class."""

    def make_iterator(self, make: Callable[[], Any]) -> Any:
        """Return `make()`, the DataLoader's own iterator, or another; to be overridden."""
        raise NotImplementedError

    def _get_iterator(self) -> Any:
        return self.make_iterator(super()._get_iterator)


class CustomIndexLoader(CustomIteratorLoader):
    """A DataLoader that iterates over `indices_to_draw`, as torch's own class does.

    The user's class may have attributes of its own, such as `indices`.
    """

    def indices_to_draw(self) -> Iterable[Any]:
        """Return what takes the place of the sampler or batch sampler; to be overridden."""
        raise NotImplementedError

    @property
    def _index_sampler(self) -> Iterable[Any]:
        return self.indices_to_draw()

    def _get_iterator(self) -> Any:
        return self.make_iterator(lambda: DataLoader._get_iterator(self))


def has_iterator(loader: Any) -> bool:
    """Return whether a loader keeps an iterator, with its data workers."""
    return getattr(loader, ITERATOR_ATTRIBUTE, None) is not None


def keeps_iterator(loader: Any) -> bool:
    """Return whether a loader's class has made an iterator before anybody iterates over it.

    All its iterations continue with this one. What torch's class keeps by a name of its own, it
    starts over.
    """
    return bool(kept_iterators(loader))


def kept_iterators(loader: Any) -> list[Any]:
    """Return the iterators of DataLoaders that a loader keeps, or a DataLoader that it wraps."""
    kept = []
    for name, value in getattr(loader, "__dict__", {}).items():
        if isinstance(value, _BaseDataLoaderIter) and name != ITERATOR_ATTRIBUTE:
            kept.append(value)
        elif isinstance(value, DataLoader):
            kept += kept_iterators(value)
    return kept


def index_iterator_of(iterator: Any) -> Any:
    """Return the iterator over indices by which an iterator of a DataLoader draws."""
    return getattr(iterator, "_sampler_iter", None)


@contextmanager
def watching_draws(draw: Callable[[Any, Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Have `draw` draw the indices for all iterators of DataLoaders in the block.

    Args:
        draw: Called with the iterator over indices, what it goes over, and a function that
            draws once; returns what that returns.
    """
    before: Any = _BaseDataLoaderIter._next_index

    def next_index(self: Any) -> Any:
        return draw(self._sampler_iter, self._index_sampler, lambda: before(self))

    _BaseDataLoaderIter._next_index = next_index  # type: ignore[method-assign]  # replaced on purpose
    try:
        yield
    finally:
        if _BaseDataLoaderIter._next_index is next_index:
            _BaseDataLoaderIter._next_index = before  # type: ignore[method-assign]


def code_of_thread(thread: threading.Thread) -> str:
    """Return the name of the module whose code a thread runs."""
    runs = getattr(thread, "_target", None) or type(thread)
    return getattr(runs, "__module__", None) or type(runs).__module__


def end_workers(loader: Any) -> None:
    """End a loader's workers, if it has any, and make it forget its position.

    Lightning ends the workers of torch's own iterators; torchdata's iterators are another class. If
    Python's garbage collector ends them, they do not notice, and the process waits 5 s for each, in
    the middle of a step.
    """
    if hasattr(loader, ITERATOR_ATTRIBUTE):
        if hasattr(loader._iterator, "_shutdown_workers"):
            loader._iterator._shutdown_workers()
        loader._iterator = None


def copied(loader: Any) -> Any:
    """Return a copy of a loader that shares nothing with it; None if it cannot be copied.

    It has no data workers: it draws in this process.
    """
    iterator = getattr(loader, ITERATOR_ATTRIBUTE, None)
    try:
        copy_ = copy.deepcopy(loader, {id(iterator): None})
    except Exception:  # whatever the user's objects raise
        return None
    if isinstance(copy_, DataLoader):
        vars(copy_).update(num_workers=0, persistent_workers=False, timeout=0, pin_memory=False)
    return copy_


def fetcher_function() -> Callable[..., Any]:
    """Return the function that makes an iteration's fetcher, in the drawing process.

    It is called with (kind, dataset, auto_collation, collate_fn, drop_last).
    """
    return _DatasetKind.create_fetcher


def replace_fetcher_function(make: Callable[..., Any]) -> None:
    """Have `make` make the fetchers from now on, in this process."""
    _DatasetKind.create_fetcher = staticmethod(make)  # type: ignore[method-assign]  # replaced on purpose


def is_map_style(kind: int) -> bool:
    """Return whether a fetcher of this kind is for a dataset with indices.

    Such a fetcher has `fetch`; the fetcher of an IterableDataset has `dataset_iter`.
    """
    return kind == _DatasetKind.Map


def combines_datasets(dataset: Any) -> bool:
    """Return whether a dataset of litdata (0.2) is made of several others.

    CombinedStreamingDataset and ParallelStreamingDataset have no public name for them. litdata is
    imported only by its users. On an upgrade: see litdata/streaming/combined.py.
    """
    return hasattr(dataset, "_datasets")


def has_class_of(object_: Any, library: str) -> bool:
    """Return whether an object's class, or one of its bases, is of a library, such as "litdata"."""
    return any(base.__module__.startswith(f"{library}.") for base in type(object_).__mro__)


def iterations_begun(loader: Any) -> int | None:
    """Return how many iterations a library's loader has begun, by which it shuffles; None if none.

    litdata's loader counts them itself, MosaicML Streaming's dataset does it for its loader.
    """
    owner, name = _place_of_count(loader)
    return int(getattr(owner, name)) if name else None


def set_iterations_begun(loader: Any, number: int) -> None:
    """Have a loader begin its next iteration as if it had begun `number`; others are left alone."""
    owner, name = _place_of_count(loader)
    if name:
        setattr(owner, name, number)


def _place_of_count(loader: Any) -> tuple[Any, str]:
    """Return the object that counts a loader's iterations, and the attribute; "" if none does."""
    dataset = getattr(loader, "dataset", None)
    for owner, library, name in (
        (loader, "litdata", "current_epoch"),
        (dataset, "streaming", "next_epoch"),
    ):
        if has_class_of(owner, library) and hasattr(owner, name):
            return owner, name
    return None, ""


def is_of_nodes(loader: Any) -> bool:
    """Return whether a loader is torchdata's (0.11) of nodes."""
    return any(base.__module__ == "torchdata.nodes.loader" for base in type(loader).__mro__)


@contextmanager
def not_restarting(loader: Any) -> Iterator[None]:
    """Have a loader of nodes that gets the state of an end come to that end; others are as ever.

    It would begin its next iteration in the place of the one that it has the state of.
    """
    if not is_of_nodes(loader):
        yield
        return
    restarts = loader.restart_on_stop_iteration
    loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        loader.restart_on_stop_iteration = restarts


def lead_nodes(loader: Any, state: dict[str, Any], is_same: Callable[[Any, Any], bool]) -> None:
    """Have a loader of nodes begin its next iteration as the one that had a state would.

    Its own `load_state_dict` draws ahead when it is begun, and has it return that state from then
    on. A library's node counts an epoch if something was drawn after it was reset. A node of a
    user's class may count one when it has nothing more to give: it has done so.

    Args:
        loader: The loader.
        state: What its `state_dict` returned.
        is_same: Returns whether two states are the same.
    """
    iter(loader)  # else it may continue with an iterator that it has made for its state
    root = loader.root
    root.reset(state["root"])
    if state["num_yielded"]:
        next(root, None)
        if not is_same(root.state_dict(), state["root"]):
            root.reset(state["root"])


def state_after_end(loader: Any) -> dict[str, Any] | None:
    """Return the state of a loader whose workers stay after an iteration's end; None for others.

    It is for torchdata's StatefulDataLoader (0.11) of a dataset that has a state, and begins an
    iteration if it is given to it. What its own `state_dict` returns then is the state after the
    last batch, and a mark: given that, it begins an iteration, draws ahead from it, and begins
    another one in the same workers. What was drawn ahead is lost to a dataset that only starts over
    when it is asked for more.
    """
    iterator: Any = getattr(loader, ITERATOR_ATTRIBUTE, None)
    if not hasattr(iterator, "_worker_snapshots") or not loader.persistent_workers:
        return None
    states = {key: each.get_state() for key, each in iterator._worker_snapshots.items()}
    if any(each["dataset_state"] is None for each in states.values()):
        return None  # it draws an iteration again to get to its end
    of_none = {"dataset_iter_state": None, "fetcher_ended": False}
    states = {key: each | {"fetcher_state": of_none} for key, each in states.items()}
    state = without_mark_of_end(iterator.state_dict())
    snapshot = state[iterator._SNAPSHOT] | {iterator._WORKER_SNAPSHOTS: states}
    return state | {iterator._SNAPSHOT: snapshot}


def without_mark_of_end(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of torchdata's StatefulDataLoader without the mark of an end."""
    from torchdata.stateful_dataloader.stateful_dataloader import _ITERATOR_FINISHED

    return state | {_ITERATOR_FINISHED: False}
