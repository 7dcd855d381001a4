"""How torch's DataLoader makes iterators, asks for indices and fetches samples.

It has no public way to begin an epoch at a batch, nor to seed each sample; and a class of a user's
own, or torchdata's, may go through it in its own way. Two methods of DataLoader and one function,
by which all of them fetch, are the places to do it.

On an upgrade: compare `_get_iterator`, `_index_sampler` and `_DatasetKind` in dataloader.py, the
fetchers in _utils/fetch.py (`fetch`, `dataset_iter`), who calls `create_fetcher`, and
`_get_iterator` of torchdata's StatefulDataLoader.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, _DatasetKind

ITERATOR = "_iterator"
"""Where a DataLoader keeps an iterator whose workers stay from epoch to epoch."""


class MadeIterators(DataLoader):
    """A DataLoader whose iterators `make_iterator` makes; a base before its own class."""

    def make_iterator(self, make: Callable[[], Any]) -> Any:
        """Return `make()`, the DataLoader's own iterator; to be overridden."""
        return make()

    def _get_iterator(self) -> Any:
        return self.make_iterator(super()._get_iterator)


class GivenIndices(MadeIterators):
    """A DataLoader that goes through `indices`, as torch's own class does."""

    def indices(self) -> Iterable:
        """Return what takes the place of the sampler or batch sampler; to be overridden."""
        raise NotImplementedError

    @property
    def _index_sampler(self) -> Iterable:
        return self.indices()

    def _get_iterator(self) -> Any:
        return self.make_iterator(lambda: DataLoader._get_iterator(self))


def has_iterator(loader: Any) -> bool:
    """Return whether a loader keeps an iterator, with its data workers."""
    return getattr(loader, ITERATOR, None) is not None


def end_workers(loader: Any) -> None:
    """End a loader's workers, if it has any, and have it forget how far it is.

    Lightning ends those of torch's own iterators; torchdata's are another class. Left to Python's
    garbage collector, they are not told, and each is waited for for 5 s, in the midst of a step.
    """
    if hasattr(loader, ITERATOR):
        if hasattr(loader._iterator, "_shutdown_workers"):
            loader._iterator._shutdown_workers()
        loader._iterator = None


def fetcher_maker() -> Callable[..., Any]:
    """Return what makes the fetcher of an iteration, in the process that draws samples.

    Called with (kind, dataset, auto_collation, collate_fn, drop_last).
    """
    return _DatasetKind.create_fetcher


def make_fetchers_by(make: Callable[..., Any]) -> None:
    """Have `make` make the fetchers from now on, in this process."""
    _DatasetKind.create_fetcher = staticmethod(make)


def has_map(kind: int) -> bool:
    """Return whether a fetcher of this kind is of a dataset with indices.

    Such a one has `fetch`, that of an IterableDataset `dataset_iter`.
    """
    return kind == _DatasetKind.Map


def of_several_datasets(dataset: Any) -> bool:
    """Return whether a dataset of litdata's (0.2) is made of several others.

    Its CombinedStreamingDataset and ParallelStreamingDataset have no public name for them, and
    litdata is imported only by those who use it. On an upgrade: see litdata/streaming/combined.py.
    """
    return hasattr(dataset, "_datasets")
