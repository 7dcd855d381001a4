"""The order of an epoch: a function of (seed, epoch), split over the ranks."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from pytorch_lightning.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from sagemaker_lightning.compat.random_generators import PROCESS_GENERATORS
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.partition import BatchDivision, EpochPlan
from sagemaker_lightning.data.seeded_indices import (
    MAX_OBJECTS,
    SeededIndex,
    SeededIndices,
    number_of,
    seed_all,
    unseeded,
)
from sagemaker_lightning.state import generators
from sagemaker_lightning.state.graph.state import GraphState
from sagemaker_lightning.state.object_graph import is_library_class

PROCESS = (torch.default_generator, *PROCESS_GENERATORS)


class PlacedOrder(Sequence[Any], ABC):
    """An order of batches that is known for any batch, without those before it."""

    @abstractmethod
    def reach(self, batch: int) -> None:
        """Prepare what a batch needs that is about to be asked for."""


class PlacedSampler(Sampler[Any], ABC):
    """A batch sampler whose order needs no draws of those before: it is a function of a number."""

    @abstractmethod
    def placed(self, number: int) -> PlacedOrder:
        """Return the order of an epoch, which a number from 0 to 2**63 - 1 decides."""

    @abstractmethod
    def check_same(self, marks: Mapping[str, int], within: bool) -> None:
        """Raise UserError if a run that is resumed had another order.

        Args:
            marks: The `marks` of its sampler.
            within: Whether it is resumed within an epoch; else the order may be another one from
                here on, but not the data.
        """

    @property
    @abstractmethod
    def marks(self) -> dict[str, int]:
        """Numbers that tell the order, and the data, from others, by name."""


class DrawnAsAsked(list[Any]):
    """An order that a user's sampler is asked for batch by batch, as by a DataLoader.

    Training may change what the sampler draws, such as by its losses. If it does not, the order is
    the one that is drawn at once: the process's generators continue where they were in it.

    Args:
        sampler: The sampler.
        length: Number of elements, at most.
        seed: Seeds what the sampler draws.
        on_change: Called, once, when the sampler was changed between two draws; it is looked at
            before the first batches and before every 64th.
    """

    def __init__(
        self,
        sampler: Sampler[Any],
        length: int,
        seed: Callable[[], None],
        on_change: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self.sampler = sampler
        self.length = length
        self.seed = seed
        self.on_change = on_change
        self.samples: Iterator[Any] | None = None
        # The states of the process's generators between two draws.
        self.drawing: tuple[Any, ...] = ()
        self.state = GraphState(lambda: {"sampler": sampler}, (Dataset,))
        self.marked = -1  # number of the batch before which the state is compared

    def reach(self, batch: int, length: int) -> None:
        """Draw until there are `length` elements, those of a batch and before it."""
        if self.on_change and self.marked == batch and self.state.changes():
            self.on_change()
            self.on_change = None
        with self._continued_rng():
            self.samples = self.samples or iter(self.sampler)
            more = max(0, min(length, self.length) - len(self))
            self.extend(itertools.islice(self.samples, more))
            if len(self) == self.length:
                next(self.samples, None)  # it may come to its end
        following = batch + 1
        if self.on_change and (following <= 4 or not following % 64):
            self.state.mark()
            self.marked = following

    @contextmanager
    def _continued_rng(self) -> Iterator[None]:
        """Let the process's generators continue where this order has left them."""
        outside = unseeded.number, unseeded.count
        with isolate_rng():
            if self.drawing:
                *states, (unseeded.number, unseeded.count) = self.drawing
                for generator, state in zip(PROCESS, states, strict=True):
                    generators.restore(generator, state)
            else:
                self.seed()
            yield
            inside = unseeded.number, unseeded.count
            self.drawing = (*map(generators.state_of, PROCESS), inside)
        unseeded.number, unseeded.count = outside


def shares_unequally(loader: Any, ranks: int) -> bool:
    """Return whether ranks that share a loader's batches have last batches of different sizes."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.batch_sampler
    if (length := sized_len(sampler.sampler)) is None:
        return False
    division = BatchDivision(length, sampler.batch_size, ranks, sampler.drop_last)
    return len({*division.sizes(division.batches - 1)}) > 1


class Batches(Sampler[Any]):
    """One rank's batches of keys, in the order that a DataLoader's own sampler draws.

    Args:
        loader: The DataLoader.
        seed: Decides the order, with the epoch.
        rank: This rank.
        world_size: Number of ranks that share each batch.

    Raises UserError if a rank would have no batch.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: Sequence[Any], rank: int, world_size: int
    ) -> None:
        batch_sampler: Any = loader.batch_sampler  # torch's types have only what all of them have
        self.alone = batch_sampler is None  # single samples, no batches
        self.whole = self.alone or type(batch_sampler) is not BatchSampler
        if self.whole:
            # The sampler makes its own batches: of n ranks, each gets every nth batch. The last
            # batches are left out if there are too few for all ranks.
            self.sampler: Any = loader.sampler if self.alone else batch_sampler
            size = 1
            drop_last = True
        else:
            self.sampler = batch_sampler.sampler
            size = batch_sampler.batch_size
            drop_last = batch_sampler.drop_last
        self.loader = loader
        self.seed = tuple(seed)
        self.rank = rank
        self.ranks = world_size
        self.size = size
        self.at = (0, 0, 0)  # epoch, turn and batch at which the next iteration starts
        self.follows = False
        """Whether the sampler was changed, by others than itself, within an epoch."""
        # The order of that iteration, if it is drawn already.
        self.begun: Sequence[Any] | None = None
        self.of_rank: tuple[int, ...] = ()
        """This rank, if each draws samples of its own, by positions that nobody else has."""
        self.order_rank = 0
        """This rank, if the sampler's generators are its own."""
        self.drawn = 0
        """A hash of what the sampler has drawn first; equal on all ranks that share its batches."""
        length = sized_len(self.sampler)
        self.length = length
        self.endless = length is None
        self.epoch_plan: EpochPlan | None = None
        if length is None:
            return
        self.epoch_plan = EpochPlan(BatchDivision(length, size, world_size, drop_last))
        if not len(self):
            raise UserError(
                f"the training data: {length} {'batches' if self.whole else 'samples'} for "
                f"{world_size} ranks and a batch size of {size}; expected at least one batch for "
                "each rank"
            )

    def __len__(self) -> int:
        if self.epoch_plan is None:
            raise TypeError(f"{type(self.sampler).__name__} has no length")
        return self.epoch_plan.division.batches

    def has_other_length(self) -> bool:
        """Return whether the sampler has another length now than at the start."""
        return self.length is not None and sized_len(self.sampler) != self.length

    def sizes(self, epoch: int, batch: int) -> list[int]:
        """Return the number of samples that each rank has in a batch."""
        if self.epoch_plan is None:
            return [1] * self.ranks
        division, first = self.epoch_plan.of_epoch(epoch)
        return division.sizes(batch - first)

    def begin(self, epoch: int, turn: int, batch: int = 0) -> None:
        """Have the next iteration start at a batch of an epoch.

        `turn` counts the iterations within an epoch.
        """
        self.at = epoch, turn, batch
        self.begun = None if self.endless else self._order(epoch, turn)
        if isinstance(self.begun, DrawnAsAsked):
            self._reach(self.begun, epoch, range(batch))
        if self.begun and self.ranks > 1:
            self.drawn = number_of(list(itertools.islice(self.begun, MAX_OBJECTS)))

    def rewind(self, epoch: int) -> None:
        """Have iterations start at the first batch of an epoch that nobody has begun."""
        self.at = (epoch, 0, 0)
        self.begun = None

    def __iter__(self) -> Iterator[Any]:
        # This runs when the first batch is asked for: torch makes two iterators, and uses one.
        (epoch, turn, start) = self.at
        order = self.begun
        self.at = (epoch, turn, 0)
        self.begun = None
        at = (epoch, turn) if turn else (epoch,)
        seed = (*self.seed, *self.of_rank, *at)
        for places, indices in self._places_and_indices(epoch, turn, start, order):
            yield (
                SeededIndex(indices[0], seed, places[0])
                if self.alone
                else SeededIndices(indices, seed, places)
            )

    def _places_and_indices(
        self, epoch: int, turn: int, start: int, order: Sequence[Any] | None
    ) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
        """Yield the places and the indices of each batch."""
        if self.epoch_plan is None:
            yield from self._places_and_indices_of_endless(epoch, turn, start)
            return
        order = self._order(epoch, turn) if order is None else order
        division, first = self.epoch_plan.of_epoch(epoch)
        for batch in range(start, len(self)):
            if isinstance(order, DrawnAsAsked):
                self._reach(order, epoch, [batch])
            places = division.part(batch - first, self.rank)
            if isinstance(order, PlacedOrder):
                order.reach(places[0])
            if places and places[-1] >= len(order):
                return  # the sampler has drawn fewer than its length
            if self.alone:
                yield [places[0]], [order[places[0]]]
            elif self.whole:
                for place in places:
                    indices = order[place]
                    yield [(place, k) for k in range(len(indices))], indices
            else:
                yield places, order[places.start : places.stop]

    def _places_and_indices_of_endless(
        self, epoch: int, turn: int, start: int
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield the places and the indices of each batch, for a sampler without a length.

        The indices before the start are drawn again; their samples are not.
        """
        samples = None
        for batch in itertools.count():
            with isolate_rng():
                self._seed(epoch, turn, batch)
                samples = samples or iter(self.sampler)
                slices = []
                for _ in range(self.ranks):  # draw for all ranks; this one uses its own slice
                    try:
                        slices.append([next(samples) for _ in range(self.size)])
                    except (StopIteration, RuntimeError):
                        return
            indices = slices[self.rank][0] if self.whole and not self.alone else slices[self.rank]
            if batch >= start:
                yield [(batch, self.rank, k) for k in range(len(indices))], indices

    def _order(self, epoch: int, turn: int) -> Sequence[Any]:
        """Return what the sampler draws in an epoch, up to its length.

        A sampler of the user's is drawn from as its indices are asked for. Ranks that share its
        batches draw all at once: training gives each of them other values.
        """
        assert self.length is not None  # an endless sampler has no such order
        if isinstance(self.sampler, PlacedSampler):
            return self.sampler.placed(number_of("order", *self._key(epoch, turn)))
        if self.ranks == 1 and not is_library_class(type(self.sampler)):
            self._begin_epoch(epoch)
            note = None if self.follows else self._note_that_it_follows
            return DrawnAsAsked(self.sampler, self.length, lambda: self._seed(epoch, turn), note)
        with isolate_rng():
            self._seed(epoch, turn)
            self._begin_epoch(epoch)
            # Some samplers have a length and no end. The one draw more lets others come to theirs.
            return list(itertools.islice(self.sampler, self.length + 1))[: self.length]

    def _begin_epoch(self, epoch: int) -> None:
        """Tell those samplers the epoch that Lightning tells it.

        They are a loader's and that of its sampler of batches, and not the latter
        (`_set_sampler_epoch` in lightning_fabric/utilities/data.py, 2.6).
        """
        samplers: list[Any] = [self.loader.sampler]
        if (within := getattr(self.loader.batch_sampler, "sampler", None)) is not samplers[0]:
            samplers.append(within)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def _reach(self, order: DrawnAsAsked, epoch: int, batches: Iterable[int]) -> None:
        """Draw the elements of some batches, and of those before them."""
        assert self.epoch_plan is not None and self.length is not None  # as in `_order`
        division, first = self.epoch_plan.of_epoch(epoch)
        for batch in batches:
            is_last = batch + 1 == len(self)  # samples that are in no batch are drawn with it
            order.reach(batch, self.length if is_last else division.positions(batch - first).stop)

    def _note_that_it_follows(self) -> None:
        """Note that training changes the sampler; say so if a resumed run cannot follow it."""
        self.follows = True
        is_first = rank_zero_only.rank == 0  # type: ignore[attr-defined]  # Lightning sets it
        if self.loader.num_workers and is_first:
            log.warning(
                f"{type(self.sampler).__name__} changes while an epoch is trained, and data "
                "workers get its indices ahead: a run that is resumed within an epoch has other "
                "batches; with num_workers=0 it has the same"
            )

    def _seed(self, epoch: int, *more: int) -> None:
        number = seed_all("order", *self._key(epoch, *more))
        if self.order_rank:
            number = number_of("order", number, self.order_rank)
        generators.reseed(self.generators(), number)

    def generators(self) -> dict[str, Any]:
        """Return the sampler's generators by their paths."""
        return generators.find({"sampler": self.sampler}, skip=(Dataset,))

    def _key(self, epoch: int, *more: int) -> tuple[Any, ...]:
        """Return what decides the order of an iteration."""
        return (*self.seed, epoch, *more) if any(more) else (*self.seed, epoch)
