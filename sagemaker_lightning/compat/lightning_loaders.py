"""How Lightning prepares loaders and combines several of them.

On an upgrade: compare utilities/combined_loader.py (what iter() and next() do in each mode, and
which attributes say where an iterator is) and `_process_dataloader` and `prepare_data` of
trainer/connectors/data_connector.py.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.combined_loader import _SUPPORTED_MODES, _MaxSizeCycle
from torch.utils.data import DataLoader

from sagemaker_lightning.compat.lightning_trainer import call_within


class PositionedLoader(CombinedLoader):
    """A CombinedLoader that can begin at any batch; Lightning saves no state of it.

    CombinedLoader always begins at the first batch, and makes the iterator that combines its
    loaders in its `__iter__`.
    """

    @property
    def mode(self) -> str:
        """How the loaders are combined, such as "max_size_cycle"."""
        return self._mode

    def combine(self, iterables: Sequence[Iterable[Any]]) -> None:
        """Make the iterator over `iterables`, which has a length.

        No iterable begins yet.
        """
        self._iterator = _SUPPORTED_MODES[self._mode]["iterator"](list(iterables), self._limits)

    def continue_with(self, batch: int, iterators: list[Iterator[Any]], ended: list[bool]) -> None:
        """Make the iterator that `combine` made continue with `iterators`.

        Args:
            batch: Number of the next batch.
            iterators: One iterator of each iterable; they have begun already.
            ended: For each iterable, whether it has ended before; in "max_size_cycle" it began
                again.
        """
        assert self._iterator is not None  # `combine` has made it
        self._iterator._idx = batch
        self._iterator.iterators = iterators
        if isinstance(self._iterator, _MaxSizeCycle):
            self._iterator._consumed = ended

    def forget_iterators(self) -> None:
        """Drop the loaders' iterators, if there are any."""
        if self._iterator is not None:
            self._iterator.reset()

    def _state_dicts(self) -> list[dict[str, Any]]:
        return []  # Lightning would save the first rank's states for all ranks


def flattened(loaders: Any) -> list[Any]:
    """Return each loader in `trainer.train_dataloader` or `trainer.val_dataloaders`."""
    return [] if loaders is None else CombinedLoader(loaders).flattened


def preparation(trainer: Trainer) -> Callable[..., Any]:
    """Return the function that prepares each loader now.

    It takes (dataloader, shuffle, mode), and returns the loader that is used.
    """
    return trainer._data_connector._prepare_dataloader


def prepare_as_lightning(trainer: Trainer, dataloader: Any, shuffle: bool, mode: Any) -> Any:
    """Prepare a loader by Lightning's own function, whatever has replaced it.

    It adds a DistributedSampler where one is needed.
    """
    connector = trainer._data_connector
    return type(connector)._prepare_dataloader(connector, dataloader, shuffle, mode)


def replace_preparation(trainer: Trainer, prepare: Callable[..., Any]) -> None:
    """Have `prepare` called for each loader instead of the function before it.

    Strategy.process_dataloader, which is public, does not get the stage that the loader is for. The
    trainer's state does not say it either: code of a validation may ask for
    `trainer.num_training_batches`, which sets up the training loaders.
    """
    trainer._data_connector._prepare_dataloader = prepare  # type: ignore[method-assign]  # of this one


def restore_preparation(trainer: Trainer) -> None:
    """Undo `replace_preparation`."""
    vars(trainer._data_connector).pop("_prepare_dataloader", None)


def prepare_data_within(
    trainer: Trainer, context: Callable[[], AbstractContextManager[None]]
) -> None:
    """Have the next `prepare_data` run within a context.

    No hook of a callback comes between it and the data module's `setup`.
    """
    call_within(trainer._data_connector, "prepare_data", context)


def shares_loaders(trainer: Trainer) -> bool:
    """Return what Trainer(use_distributed_sampler=...) was given.

    It says whether the ranks share the samples of loaders whose own samplers do not do that.
    """
    return trainer._accelerator_connector.use_distributed_sampler


def replaces_loader(trainer: Trainer, dataloader: Any) -> bool:
    """Return whether Lightning would put a loader with a sampler for each rank in one's place."""
    return isinstance(
        dataloader, DataLoader
    ) and trainer._data_connector._requires_distributed_sampler(dataloader)


def prepare_without_sampler(trainer: Trainer, dataloader: Any, shuffle: bool, mode: Any) -> Any:
    """Prepare a loader as Lightning does, but add no DistributedSampler to it.

    Args:
        trainer: Lightning's trainer.
        dataloader: The loader.
        shuffle: Whether a sampler that Lightning adds would shuffle.
        mode: The RunningStage that uses the loader.
    """
    connector = trainer._accelerator_connector
    shares = connector.use_distributed_sampler
    connector.use_distributed_sampler = False
    try:
        return prepare_as_lightning(trainer, dataloader, shuffle, mode)
    finally:
        connector.use_distributed_sampler = shares


def evaluate_everything_on_each_rank(trainer: Trainer) -> None:
    """Have each rank evaluate all samples, without a training before it.

    Then what the ranks log is the same, and no sample counts twice. A training prepares its loaders
    in another way (data/seeding.py).
    """
    replace_preparation(trainer, functools.partial(prepare_without_sampler, trainer))
