"""Nothing left to chance: what is random in a step is a function of (seed, epoch, position), for any DataLoader.

So there is nothing to save of workers and random number generators, and a run that was interrupted draws what it would
have drawn. torch's DataLoader draws the order of an epoch, and each worker's seed, from the generators of its process,
which a new process has in another state. The DataLoader stays what it is, with the dataset and the sampler that it was
given: it is the row of indices which goes to its workers that seeds, sample by sample, as it is gone through.
"""

import copy
import functools
from typing import Any

from pytorch_lightning import Trainer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from app.keys import start_worker
from app.order import Batches
from app.resident import ResidentLoader


def position(trainer: Trainer) -> tuple[int, int]:
    """Return the epoch that training is in, and how many of its batches are done."""
    loop = trainer.fit_loop
    return loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.processed


def exact(loader: Any, *seed: object, rank: int = 0, world_size: int = 1) -> tuple[Any, str]:
    """Have the order and the samples of `loader` be functions of `seed`, epoch and position; or say why they cannot be.

    `rank` of `world_size` ranks gets its share of each batch of all ranks, each sample once, unless the loader has a
    DistributedSampler already. Workers live on when a signal comes to all processes: their own process ends them.
    """
    if isinstance(loader, (ResidentLoader, Exact)):
        return loader, ""
    own = getattr(type(loader), "__iter__", None) is not DataLoader.__iter__
    sampler = getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader):
        return loader, f"{type(loader).__name__} goes through its samples in a way of its own"
    given = loader.worker_init_fn
    started = functools.partial(start_worker, given, loader.collate_fn)
    if isinstance(given, functools.partial) and given.func is start_worker:
        started = given
    if isinstance(loader.dataset, IterableDataset):
        loader.worker_init_fn = started
        return loader, "an IterableDataset has no positions"
    stateful = [one for one in (loader.dataset, sampler, loader.batch_sampler) if hasattr(one, "load_state_dict")]
    if own and (not type(loader).__module__.startswith("torchdata.") or stateful):
        if world_size > 1 and not isinstance(sampler, DistributedSampler):
            raise ValueError(
                f"--data: a {type(loader).__name__} cannot be shared out among {world_size} ranks; allowed is a "
                "torch.utils.data.DataLoader, or one with a DistributedSampler"
            )
        loader.worker_init_fn = started
        return loader, f"{type(loader).__name__} goes through its samples in a way of its own"
    if isinstance(sampler, DistributedSampler):
        rank, world_size = 0, 1
    batches = Batches(loader, seed, rank, world_size)
    loader.__class__ = of_class(ExactInPlaces if own else Exact, type(loader))
    vars(loader)["exactly"] = batches
    return loader, ""


def divided(loader: Any) -> "ResidentLoader | Batches | None":
    """Return what knows how the ranks divide the batches of a loader, if anything does."""
    return loader if isinstance(loader, ResidentLoader) else getattr(loader, "exactly", None)


def reached(trainer: Trainer) -> int | None:
    """Return the position in the epoch that training has reached, None where it is not the same on all nodes."""
    loader = divided(trainer.train_dataloader)
    return loader.course.reached(*position(trainer)) if loader is not None and loader.course else None


def has_state(loader: Any) -> bool:
    """Return whether a loader saves and loads its own state, and needs to."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def drawn_from(loader: Any) -> dict[str, Any]:
    """Return the objects from which an epoch is drawn."""
    if not isinstance(loader, DataLoader):
        return {} if isinstance(loader, ResidentLoader) or has_state(loader) else {"loader": loader}
    names = (
        ("sampler", "batch_sampler")
        if divided(loader) is not None
        else ("sampler", "batch_sampler", "dataset", "collate_fn")
    )
    return {} if has_state(loader) else {name: getattr(loader, name, None) for name in names}


class Exact(DataLoader):
    """What an exact DataLoader's own class has before its class. See `exact`."""

    exactly: Batches

    @property
    def _index_sampler(self) -> Any:
        return self.exactly

    def _get_iterator(self) -> Any:
        return DataLoader._get_iterator(_as_for_workers(self))


class ExactInPlaces(Exact):
    """A DataLoader whose class would go through it in a way of its own only to save its state."""

    __iter__ = DataLoader.__iter__
    state_dict = load_state_dict = None


@functools.cache
def of_class(mixin: type, kind: type) -> type:
    """Return the class `kind` with what `mixin` does otherwise, by the same name."""
    if mixin.__base__ is kind:
        return type(kind.__name__, (mixin,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _as_for_workers(loader: DataLoader) -> DataLoader:
    """Return the loader as its workers are to see it."""
    if not loader.num_workers:
        return loader
    view = copy.copy(loader)
    vars(view)["in_order"] = True  # else the clock would decide which batch comes next
    vars(view)["worker_init_fn"] = functools.partial(start_worker, loader.worker_init_fn, loader.collate_fn)
    return view
