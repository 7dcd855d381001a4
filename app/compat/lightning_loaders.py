"""How Lightning prepares loaders and combines several of them.

On an upgrade: compare utilities/combined_loader.py (what iter() and next() do in each mode, and
which attributes say where an iterator is) and `_process_dataloader` of
trainer/connectors/data_connector.py.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.combined_loader import _SUPPORTED_MODES, _MaxSizeCycle


class PlaceableLoader(CombinedLoader):
    """A CombinedLoader that can begin at any batch, and has no state for Lightning to save.

    CombinedLoader always begins at the first batch, and what combines its loaders is made in its
    `__iter__`.
    """

    @property
    def mode(self) -> str:
        """How the loaders are combined, such as "max_size_cycle"."""
        return self._mode

    def combine(self, iterables: list[Iterable]) -> None:
        """Make what iterates over `iterables`, which has a length; none of them begins yet."""
        self._iterator = _SUPPORTED_MODES[self._mode]["iterator"](iterables, self._limits)

    def go_on(self, batch: int, iterators: list[Iterator], ended: list[bool]) -> None:
        """Have what `combine` made go on with `iterators`.

        Args:
            batch: The number of the batch that comes next.
            iterators: One of each iterable, which are there already.
            ended: Of each iterable, whether it has ended before; in "max_size_cycle" it began again.
        """
        self._iterator._idx = batch
        self._iterator.iterators = iterators
        if isinstance(self._iterator, _MaxSizeCycle):
            self._iterator._consumed = ended

    def forget_iterators(self) -> None:
        """Let go of the loaders' iterators, if there are any."""
        if self._iterator is not None:
            self._iterator.reset()

    def _state_dicts(self) -> list[dict[str, Any]]:
        return []  # Lightning would save the first rank's for all of them


def flat(loaders: Any) -> list[Any]:
    """Return each loader in `trainer.train_dataloader` or `trainer.val_dataloaders`."""
    return [] if loaders is None else CombinedLoader(loaders).flattened


def preparing(trainer: Trainer) -> Callable[..., Any]:
    """Return what prepares each loader now: (loader, shuffle, stage) -> the loader that is used."""
    return trainer._data_connector._prepare_dataloader


def lightnings_preparing(trainer: Trainer) -> Callable[..., Any]:
    """Return Lightning's own function for it, which adds a DistributedSampler if one is needed."""
    connector = trainer._data_connector
    return functools.partial(type(connector)._prepare_dataloader, connector)


def prepare_by(trainer: Trainer, prepare: Callable[..., Any]) -> None:
    """Have `prepare` called for each loader in the place of what did so before.

    Strategy.process_dataloader, which is public, is not told for which stage the loader is, and
    the trainer's state does not say it either: code of a validation may ask for
    `trainer.num_training_batches`, which sets up those of training.
    """
    trainer._data_connector._prepare_dataloader = prepare


def prepare_by_lightning(trainer: Trainer) -> bool:
    """Undo `prepare_by`, and return whether it had been called."""
    return vars(trainer._data_connector).pop("_prepare_dataloader", None) is not None


def share_by_sampler(trainer: Trainer, share: bool) -> None:
    """Set what Trainer(use_distributed_sampler=...) sets, in a trainer that is made already."""
    trainer._accelerator_connector.use_distributed_sampler = share
