"""Nothing left to chance: what is random in a step is a function of (seed, epoch, position), for any DataLoader.

So there is nothing to save of workers and random number generators, and a run that was interrupted draws what it would
have drawn. torch's DataLoader draws the order of an epoch, and each worker's seed, from the generators of its process,
which a new process has in another state. The DataLoader stays what it is, with the dataset and the sampler that it was
given: it is the row of indices which goes to its workers that seeds, sample by sample, as it is gone through.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from sagemaker_lightning.compat.lightning_loops import combined_loader, fetcher, is_drawn_by_steps
from sagemaker_lightning.compat.torch_data import GivenIndices, MadeIterators, of_several_datasets
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.batch_order import Batches
from sagemaker_lightning.data.partition import PartitionedLoader
from sagemaker_lightning.data.sample_seeding import DrawnWithState, Plan, drawing, has_state


def position(trainer: Trainer) -> tuple[int, int]:
    """Return the epoch that training is in, and how many of its batches are done, or drawn by steps that draw."""
    loop = trainer.fit_loop
    drawn = is_drawn_by_steps(fetcher(trainer))
    done = (
        combined_loader(trainer).drawn
        if drawn
        else loop.epoch_loop.batch_progress.current.processed
    )
    return loop.epoch_progress.current.processed, done


def exact(loader: Any, *seed: object, rank: int = 0, world_size: int = 1) -> tuple[Any, str]:
    """Have the order and the samples of `loader` be functions of `seed`, epoch and position; or say why they cannot be.

    `rank` of `world_size` ranks gets its share of each batch of all ranks, each sample once, unless the loader has a
    DistributedSampler already. Workers live on when a signal comes to all processes: their own process ends them.
    """
    if isinstance(loader, (PartitionedLoader, Exact, Streamed)):
        return loader, ""
    iterates = getattr(type(loader), "__iter__", None)
    own = iterates is not DataLoader.__iter__
    sampler = getattr(loader, "sampler", None)
    other = f"{type(loader).__name__} goes through its samples in a way of its own"
    if not isinstance(loader, DataLoader):
        return loader, other
    stateful = [
        one
        for one in (loader.dataset, sampler, loader.batch_sampler)
        if hasattr(one, "load_state_dict")
    ]
    iterable = isinstance(loader.dataset, IterableDataset)
    if iterable or (own and (stateful or not (iterates.__module__ or "").startswith("torchdata."))):
        if not iterable and world_size > 1 and not isinstance(sampler, DistributedSampler):
            raise UserError(
                f"--data: a {type(loader).__name__} cannot be shared out among {world_size} ranks; allowed is a "
                "torch.utils.data.DataLoader, or one with a DistributedSampler"
            )
        loader.__class__ = of_class(Streamed, type(loader))
        vars(loader)["planned"] = Plan(seed if has_state(loader) else None)
        return loader, "an IterableDataset has no positions" if iterable and not own else other
    if isinstance(sampler, DistributedSampler):
        rank = 0
        world_size = 1
    batches = Batches(loader, seed, rank, world_size)
    loader.__class__ = of_class(ExactInPlaces if own else Exact, type(loader))
    vars(loader)["exactly"] = batches
    vars(loader)["planned"] = Plan(())
    if loader.num_workers and rank_zero_only.rank == 0:
        vars(loader)["planned"].said = torch.zeros(1, dtype=torch.uint8).share_memory_()
    return loader, ""


def _of(loader: Any, library: str) -> bool:
    return any(kind.__module__.startswith(f"{library}.") for kind in type(loader).__mro__)


def divided(loader: Any) -> "PartitionedLoader | Batches | None":
    """Return what knows how the ranks divide the batches of a loader, if anything does."""
    return loader if isinstance(loader, PartitionedLoader) else getattr(loader, "exactly", None)


def reached(trainer: Trainer) -> int | None:
    """Return the position in the epoch that training has reached, None where it is not the same on all nodes."""
    loader = divided(trainer.train_dataloader)
    return (
        loader.course.reached(*position(trainer)) if loader is not None and loader.course else None
    )


def order_of(loader: Any, stateful: bool) -> dict[str, Any]:
    """Return the objects that decide the order of an epoch, of a loader that does not save their state itself."""
    if isinstance(loader, PartitionedLoader) or stateful:
        return {}
    if not isinstance(loader, DataLoader):
        return {"loader": loader}
    return {name: getattr(loader, name, None) for name in ("sampler", "batch_sampler")}


def data_of(loader: Any, stateful: bool) -> dict[str, Any]:
    """Return the objects that draw samples as they were when an iteration began: those that workers have copies of, or
    that are drawn from again."""
    if not isinstance(loader, DataLoader) or (stateful and not _of(loader, "torchdata")):
        return {}  # of a library's loader, that may be part of its state
    if divided(loader) is not None and not loader.num_workers:
        return {}
    return {"dataset": loader.dataset, "collate_fn": loader.collate_fn}


def draws_again(loader: Any) -> bool:
    """Return whether a loader can only get to a position by drawing all that was before it again.

    So can litdata's of a CombinedStreamingDataset or ParallelStreamingDataset, whose state is right between epochs
    only: within one, it takes each dataset's samples for shared out evenly among the workers.
    """
    several = _of(loader, "litdata") and of_several_datasets(loader.dataset)
    return divided(loader) is None and (several or not has_state(loader))


def counts_only(loader: Any) -> bool:
    """Return whether the state of a loader, whose iteration has begun, is but a number of batches to be drawn again.

    That is so of torchdata's where neither the dataset nor its iterator has a state; 0.11 miscounts if it goes there.
    """
    if not _of(loader, "torchdata") or not isinstance(loader.dataset, IterableDataset):
        return False
    return f"'{DrawnWithState.NUMBER}'" not in repr(loader.state_dict())


def knows_its_end(loader: Any) -> bool:
    """Return whether a loader that was at its end, and goes there, begins anew by itself."""
    return _of(loader, "torchdata")


def keeps_workers(loader: Any) -> bool:
    """Return whether workers stay from one iteration to the next: those of a loader without positions would go on with
    what they hold, which only a loader of torchdata's knows."""
    stays = getattr(loader, "persistent_workers", False)
    return stays and (divided(loader) is not None or _of(loader, "torchdata"))


def plan(loader: Any, turn: int, done: int) -> None:
    """Say which iteration of a loader begins, and after how many batches, to what draws its samples."""
    if (planned := getattr(loader, "planned", None)) is None:
        return
    planned.turn = turn
    planned.first = ()
    if not _of(loader, "litdata"):
        return
    loader.restore = (
        loader.restore and done > 0
    )  # else it would go on with an epoch that was left before its end
    if done:  # it goes where it was, and its workers, which take turns, begin to count anew
        workers = max(1, loader.num_workers)
        size = loader.batch_size or 1
        planned.first = tuple(
            (done - worker + workers - 1) // workers * size for worker in range(workers)
        )


class Exact(GivenIndices):
    """What an exact DataLoader's own class has before its class. See `exact`."""

    exactly: Batches
    planned: Plan

    def indices(self) -> Batches:
        """Return the batches of keys."""
        return self.exactly

    def make_iterator(self, make: Callable[[], Any]) -> Any:
        """Return an iterator whose samples are drawn as planned."""
        with drawing(self, self.planned):
            return make()


class ExactInPlaces(Exact):
    """A DataLoader whose class would go through it in a way of its own only to save its state."""

    __iter__ = DataLoader.__iter__
    state_dict = load_state_dict = None


class Streamed(MadeIterators):
    """What a DataLoader without positions has before its class: what it draws is seeded. See `exact`."""

    planned: Plan

    def make_iterator(self, make: Callable[[], Any]) -> Any:
        """Return an iterator whose samples are drawn as planned."""
        with drawing(self, self.planned):
            iterator = make()
        self.planned.turn += 1
        return iterator


@functools.cache
def of_class(mixin: type, kind: type) -> type:
    """Return the class `kind` with what `mixin` does otherwise, by the same name."""
    if mixin.__base__ is kind:
        return type(
            kind.__name__, (mixin,), {"__module__": kind.__module__, "__doc__": kind.__doc__}
        )
    return type(
        kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )
