"""Make any DataLoader reproducible: it draws by (seed, epoch, position).

What is random in a step is a function of these.

So no state of workers or random number generators has to be saved, and a run that was interrupted
draws what it would have drawn. torch's DataLoader draws the order of an epoch, and each worker's
seed, from the generators of its process; a new process has them in another state. The DataLoader
keeps its dataset and its sampler. What changes is the list of indices that goes to its workers: it
seeds each sample when its index is taken.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from sagemaker_lightning.compat.lightning_loops import (
    batch_counts,
    combined_loader,
    epoch_counts,
    fetcher,
    steps_draw_batches,
)
from sagemaker_lightning.compat.torch_data import (
    CustomIndexLoader,
    CustomIteratorLoader,
    combines_datasets,
    end_workers,
    has_class_of,
    keeps_iterator,
)
from sagemaker_lightning.contract.errors import UserError, with_article
from sagemaker_lightning.data.batch_order import Batches
from sagemaker_lightning.data.partition import PartitionedLoader
from sagemaker_lightning.data.sample_seeding import Plan, SeededSamplesWithState, drawing, has_state
from sagemaker_lightning.state.object_graph import (
    LOADER_ATTRIBUTES,
    added_to,
    is_library_class,
    users_members,
)


def position(trainer: Trainer) -> tuple[int, int]:
    """Return the epoch that training is in, and how many of its batches are done.

    For training steps that draw batches themselves, it is the number of batches drawn.
    """
    done: int
    if steps_draw_batches(fetcher(trainer)):
        # They are TrainingLoaders, whose module imports this one.
        done = combined_loader(trainer).drawn  # type: ignore[union-attr]  # see above
    else:
        done = batch_counts(trainer).processed
    return epoch_counts(trainer).processed, done


def make_resumable(
    loader: Any, *seed: object, rank: int = 0, world_size: int = 1
) -> tuple[Any, str]:
    """Make a loader's order and samples functions of seed, epoch and position.

    Each of `world_size` ranks gets its share of each global batch, each sample once, unless the
    loader has a DistributedSampler already. Data workers survive a signal that is sent to all
    processes: the loader's process ends them.

    Args:
        loader: The loader; the class of a DataLoader is changed in place.
        seed: Decides all draws, with the epoch and the position.
        rank: This rank.
        world_size: Number of ranks.

    Returns the loader, and why it has no positions; "" if it has. Raises UserError if the
    loader cannot be shared out among several ranks.
    """
    if isinstance(loader, (ReproducibleLoader, Streamed)) and "planned" not in vars(loader):
        # An attribute of the user's held it, and a checkpoint has made it again by its class alone.
        loader.__class__ = type(loader).users_class
    if isinstance(loader, (PartitionedLoader, Streamed)):
        return loader, ""
    if isinstance(loader, ReproducibleLoader):
        # A program may use one loader in several trainings, each with a seed of its own, and its
        # sampler may have got another length when Lightning asks for the loaders again.
        if loader.batch_plan.seed[:1] != seed[:1] or loader.batch_plan.has_other_length():
            _plan_batches(loader, seed, rank, world_size)
        return loader, ""
    iter_method = getattr(type(loader), "__iter__", None)
    has_own_iter = iter_method is not DataLoader.__iter__
    sampler = getattr(loader, "sampler", None)
    other_reason = f"{type(loader).__name__} goes through its samples in a way of its own"
    if not isinstance(loader, DataLoader):
        return loader, other_reason
    with_state = [
        part
        for part in (loader.dataset, sampler, loader.batch_sampler)
        if hasattr(part, "load_state_dict")
    ]
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if is_iterable or (
        has_own_iter and (with_state or not (iter_method.__module__ or "").startswith("torchdata."))
    ):
        if not is_iterable and world_size > 1 and not isinstance(sampler, DistributedSampler):
            raise UserError(
                f"the training data: {with_article(type(loader).__name__)} cannot be shared out "
                f"among {world_size} ranks; expected a torch.utils.data.DataLoader, or one with a "
                "DistributedSampler"
            )
        if keeps_iterator(loader):
            return loader, f"{type(loader).__name__} keeps an iterator from one epoch to the next"
        loader.__class__ = of_class(Streamed, type(loader))  # type: ignore[arg-type]  # has a hash
        vars(loader)["planned"] = Plan(
            seed if has_state(loader) else None, warned=_nothing_said(loader)
        )
        return (
            loader,
            "an IterableDataset has no positions"
            if is_iterable and not has_own_iter
            else other_reason,
        )
    _plan_batches(loader, seed, rank, world_size)
    base = ReproducibleWithoutState if has_own_iter else ReproducibleLoader
    loader.__class__ = of_class(base, type(loader))  # type: ignore[arg-type]  # a class has a hash
    return loader, ""


def is_strange(loader: Any) -> bool:
    """Return whether `make_resumable` has left a DataLoader as Lightning has it."""
    return isinstance(loader, DataLoader) and not isinstance(
        loader, (ReproducibleLoader, Streamed, PartitionedLoader)
    )


def restore_loader(loader: Any) -> None:
    """Make a loader that `make_resumable` has changed what it was before."""
    if isinstance(loader, (ReproducibleLoader, Streamed)):
        end_workers(loader)
        loader.__class__ = type(loader).users_class
        for name in LOADER_ATTRIBUTES:
            vars(loader).pop(name, None)


def make_deterministic(
    loader: DataLoader[Any], seed: int, rank: int = 0, world_size: int = 1
) -> DataLoader[Any]:
    """Make a DataLoader's order and samples functions of seed, epoch and position; no Trainer.

        loader = make_deterministic(DataLoader(data, 32, shuffle=True, num_workers=4), seed=7)
        for epoch in range(5):
            loader.begin_epoch(epoch)
            for batch in loader: ...

    `loader.begin_epoch(epoch, batch)` begins at a batch of an epoch, without drawing those before
    it. What `random`, numpy and torch draw for a sample is the same with any number of workers.

    Args:
        loader: The loader; its class is changed in place.
        seed: Decides all draws, with the epoch and the position.
        rank: Number of this process.
        world_size: Number of processes that share each batch, each sample once.

    Returns the loader. Raises UserError if it has no positions: an IterableDataset, or a loader
    that goes through its samples in a way of its own.
    """
    _, why = make_resumable(loader, seed, rank=rank, world_size=world_size)
    if why or not issubclass(type(loader), ReproducibleLoader):
        raise UserError(
            f"make_deterministic: {why or f'{type(loader).__name__} has an order of its own'}; "
            "expected a torch.utils.data.DataLoader of a dataset with indices"
        )
    return loader


def _plan_batches(
    loader: DataLoader[Any], seed: tuple[object, ...], rank: int, world_size: int
) -> None:
    """Give a loader the attributes that a ReproducibleLoader needs."""
    if isinstance(loader.sampler, DistributedSampler):
        rank = 0
        world_size = 1
    vars(loader)["batch_plan"] = Batches(loader, seed, rank, world_size)
    vars(loader)["planned"] = Plan((), warned=_nothing_said(loader))


def _nothing_said(loader: DataLoader[Any]) -> torch.Tensor | None:
    """Return what notes, for all workers of a loader, what was said; None if nothing is."""
    if rank_zero_only.rank:  # type: ignore[attr-defined]  # Lightning sets it
        return None
    warned = torch.zeros(2, dtype=torch.uint8)
    return warned.share_memory_() if loader.num_workers else warned


def divided(loader: Any) -> "PartitionedLoader | Batches | None":
    """Return what divides a loader's batches among ranks; None if nothing does."""
    return loader if isinstance(loader, PartitionedLoader) else getattr(loader, "batch_plan", None)


def reached(trainer: Trainer) -> int | None:
    """Return the position in the epoch that training has reached.

    It is None if the loader has no positions, or if the nodes have different data.
    """
    loader = divided(trainer.train_dataloader)
    return (
        loader.epoch_plan.reached(*position(trainer))
        if loader is not None and loader.epoch_plan
        else None
    )


def order_of(loader: Any, stateful: bool) -> dict[str, Any]:
    """Return the objects that decide the order of an epoch, by name.

    It is {} for a loader that saves their state itself (`stateful`).
    """
    if isinstance(loader, PartitionedLoader) or stateful:
        return {}
    if not isinstance(loader, DataLoader):
        return {"loader": loader}
    parts = {name: getattr(loader, name, None) for name in ("sampler", "batch_sampler")}
    return parts | {"loader": added_to(loader)}


def data_of(loader: Any, stateful: bool) -> dict[str, Any]:
    """Return the objects that draw samples, by name.

    A resumed iteration needs them as they were when it began: workers have copies of them, samples
    are drawn from them again, and an order may depend on them, such as on their number.
    """
    if not isinstance(loader, DataLoader):
        return {}
    if stateful and not has_class_of(loader, "torchdata"):
        return members_beside(loader)
    return {"dataset": loader.dataset, "collate_fn": loader.collate_fn}


def members_beside(loader: Any) -> dict[str, Any]:
    """Return what a user has given to a library's dataset, such as a transform, by name.

    If a dataset's class is derived from a library's, whose code saves its state, it is what that
    class has added. Another dataset is part of the state that a loader saves. It is {} for other
    loaders.
    """
    dataset = getattr(loader, "dataset", None)
    if is_library_class(type(dataset)):
        return dict(users_members(dataset))
    saves = getattr(type(dataset), "state_dict", None)
    is_librarys = saves is not None and is_library_class(saves)
    return {"dataset": added_to(dataset)} if is_librarys else {}


def saves_between_epochs(loader: Any) -> bool:
    """Return whether a loader's own state is right between epochs only.

    It is so for litdata's loader of a CombinedStreamingDataset or ParallelStreamingDataset: within
    an epoch, it assumes that each dataset's samples are shared out evenly among the workers.
    """
    is_of_several = has_class_of(loader, "litdata") and combines_datasets(loader.dataset)
    return is_of_several and has_state(loader)


def counts_only(loader: Any) -> bool:
    """Return whether a loader's state is only a number of batches to draw again.

    The iteration has begun when this is called. It is so for torchdata's loader if neither the
    dataset nor its iterator has a state; torchdata 0.11 miscounts when it goes to such a state.
    """
    is_torchdatas = isinstance(loader, DataLoader) and has_class_of(loader, "torchdata")
    if not is_torchdatas or not isinstance(loader.dataset, IterableDataset):
        return False
    return f"'{SeededSamplesWithState.NUMBER}'" not in repr(loader.state_dict())


def knows_its_end(loader: Any) -> bool:
    """Return whether a loader, given the state of its end, starts over by itself."""
    return has_class_of(loader, "torchdata")


def leaves_its_rest(loader: Any) -> bool:
    """Return whether a loader drops an iteration that was left once the next one draws a batch.

    streaming's does. Others continue with what was left, or `plan` has them start over.
    """
    return has_class_of(loader, "streaming")


def keeps_workers(loader: Any) -> bool:
    """Return whether workers stay from one iteration to the next.

    Workers of a loader without positions would continue with what they hold; only a loader of
    torchdata's knows what that is.
    """
    stays = getattr(loader, "persistent_workers", False)
    return stays and (divided(loader) is not None or has_class_of(loader, "torchdata"))


def plan(loader: Any, turn: int, done: int) -> None:
    """Tell what draws a loader's samples which iteration begins.

    Args:
        loader: The loader; nothing happens if its samples are not seeded.
        turn: Number of the iteration.
        done: Number of batches after which it begins.
    """
    if (loader_plan := getattr(loader, "planned", None)) is None:
        return
    loader_plan.begin(turn)
    if has_class_of(loader, "litdata"):
        # Otherwise it would resume an epoch that was left before its end.
        loader.restore = loader.restore and done > 0
    if not done or not any(has_class_of(loader, name) for name in ("litdata", "streaming")):
        return
    # The loader goes to its position, but its workers, which take turns, start counting from 0.
    # litdata's continues with the worker whose turn it is, streaming's with the first one.
    workers = max(1, loader.num_workers)
    size = loader.batch_size or 1
    shift = done if has_class_of(loader, "streaming") else 0
    batches = [done + (worker + shift - done) % workers for worker in range(workers)]
    loader_plan.begin(turn, tuple((batch % workers, batch // workers * size) for batch in batches))


def _of_users_class(cls: type, *arguments: Any, **options: Any) -> Any:
    """Return a new loader of the user's class, in place of one of `cls`.

    `make_resumable` gives a loader what a class of ours needs. Lightning makes another loader of
    the same class, with a sampler of its own, if the loader is used for predictions.
    """
    if not arguments and not options:  # it is a copy, which gets all that the first one has
        return DataLoader.__new__(cls)
    return cls.users_class(*arguments, **options)  # type: ignore[attr-defined]  # of_class sets it


class ReproducibleLoader(CustomIndexLoader):
    """The base that an exact DataLoader has before its own class. See `make_resumable`."""

    batch_plan: Batches
    planned: Plan
    __new__ = _of_users_class

    def begin_epoch(self, epoch: int, batch: int = 0) -> None:
        """Have the next iteration start at a batch of an epoch."""
        self.batch_plan.begin(epoch, 0, batch)

    def indices_to_draw(self) -> Batches:
        """Return the batches of keys."""
        return self.batch_plan

    def make_iterator(self, make: Callable[[], Any]) -> Any:
        """Return an iterator whose samples are drawn as planned."""
        with drawing(self, self.planned):
            return make()


class ReproducibleWithoutState(ReproducibleLoader):
    """For a DataLoader whose class has its own `__iter__` only to save its state."""

    __iter__ = DataLoader.__iter__
    state_dict = load_state_dict = None


class Streamed(CustomIteratorLoader):
    """The base that a DataLoader without positions has before its own class.

    What it draws is seeded. See `make_resumable`.
    """

    planned: Plan
    __new__ = _of_users_class

    def make_iterator(self, make: Callable[[], Any]) -> Any:
        """Return an iterator whose samples are drawn as planned."""
        with drawing(self, self.planned):
            iterator = make()
        self.planned.next_turn()
        return iterator


@functools.cache
def of_class(mixin: type, cls: type) -> type:
    """Return a class named as `cls` with the methods of `mixin` before its own."""
    kept = {"__module__": cls.__module__, "__doc__": cls.__doc__, "users_class": cls}
    return type(cls.__name__, (mixin, cls), kept)
