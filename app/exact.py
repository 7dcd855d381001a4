"""Nothing left to chance: what is random in a step is a function of (seed, epoch, position), for any DataLoader.

So there is nothing to save of workers and random number generators, and a run that was interrupted draws what it would
have drawn. torch's DataLoader draws the order of an epoch, and each worker's seed, from the generators of its process,
which a new process has in another state. The DataLoader stays what it is, with the dataset and the sampler that it was
given: it is the row of indices which goes to its workers that seeds, sample by sample, as it is gone through.
"""

import copy
import functools
import hashlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning import Trainer
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.combined_loader import (
    _SUPPORTED_MODES,
    _MaxSizeCycle,
    _shutdown_workers_and_reset_iterator,
)
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from pytorch_lightning.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from app import graph
from app.plain import decoded, encoded
from app.resident import Course, Division, ResidentLoader
from app.stop import SIGNALS


def number_of(*key: object) -> int:
    """Return the number that `key` stands for."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(*key: object) -> int:
    """Seed the generators of random, numpy and torch, on the CPU and the GPU, with the whole of `key`: 15 us."""
    number = number_of(*key)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 0.4 ms where there is no GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
    return number


def position(trainer: Trainer) -> tuple[int, int]:
    """Return the epoch that training is in, and how many of its batches are done."""
    loop = trainer.fit_loop
    return loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.processed


# Samples --------------------------------------------------------------------------------------------------------------


class Found:
    """The generators that samples are drawn with, besides those of the process: what the user's objects hold.

    Some are made when the first sample is drawn, so the first batches look for them again, and few of the later ones.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots, self.batches, self.generators = roots, 0, {}

    def look(self) -> None:
        """Look for generators, if it is time."""
        if self.batches < 4 or self.batches % 64 == 0:
            self.generators = graph.generators(self.roots)
        self.batches += 1


_of_worker: Found | None = None
"""In a data worker, the generators of its dataset."""


class Keys(list):
    """The indices of a batch. Whoever goes through them draws each sample with a seed of its own.

    Args:
        indices: What the dataset is asked for.
        seed: Decides all, with the place of each sample.
        places: The position of each sample in the epoch.
        found: Generators, in the process that draws.
    """

    def __init__(self, indices: Sequence, seed: tuple, places: Sequence, found: Found | None = None) -> None:
        super().__init__(indices)
        self.seed, self.places, self.found = seed, places, found
        if found:
            found.look()
            self._seed(places[0])  # for a dataset that fetches a whole batch at once

    def __iter__(self) -> Iterator:
        for place, index in zip(self.places, super().__iter__(), strict=True):
            if self.found:
                self._seed(place)
            yield index

    def __reduce__(self) -> tuple:
        return _arrive, (list(super().__iter__()), self.seed, self.places, True)

    def _seed(self, place: object) -> None:
        graph.reseed(self.found.generators, seed_all("sample", *self.seed, place))


class Key:
    """What a DataLoader without batches asks its dataset for; it seeds where it arrives."""

    def __init__(self, index: Any, seed: tuple, place: int) -> None:
        self.index, self.seed, self.place = index, seed, place

    def __reduce__(self) -> tuple:
        return _arrive, ([self.index], self.seed, [self.place], False)


def _arrive(indices: list, seed: tuple, places: list, whole: bool) -> Any:
    """Return the keys of a batch in the worker that draws it."""
    keys = Keys(indices, seed, places, _of_worker or Found({}))
    return keys if whole else indices[0]


# Batches --------------------------------------------------------------------------------------------------------------


class Batches(Sampler):
    """One rank's batches of keys, in the order that a DataLoader's own sampler draws for each epoch.

    Args:
        loader: The DataLoader.
        seed: Decides the order, with the epoch.
        rank: This rank.
        world_size: Number of ranks that share each batch.
    """

    def __init__(self, loader: DataLoader, seed: Sequence, rank: int, world_size: int) -> None:
        made = loader.batch_sampler
        self.alone = made is None  # samples without batches
        self.whole = self.alone or type(made) is not BatchSampler
        if self.whole:  # it makes batches of its own: a rank gets every nth; the last, too few for all, are left out
            self.sampler, size, drop_last = loader.sampler if self.alone else made, 1, True
        else:
            self.sampler, size, drop_last = made.sampler, made.batch_size, made.drop_last
        self.loader, self.seed, self.rank, self.ranks, self.size = loader, tuple(seed), rank, world_size, size
        self.at = (0, 0, 0)  # epoch, turn and batch at which the next iteration starts
        self.begun: list | None = None  # its order
        length = sized_len(self.sampler)
        self.endless = length is None
        if self.endless:
            self.course = None
            return
        self.course = Course(Division(length, size, world_size, drop_last))
        if not len(self):
            raise ValueError(
                f"--data: {length} {'batches' if self.whole else 'samples'} for {world_size} ranks and a "
                f"batch size of {size}; allowed is at least one batch for each rank"
            )

    def __len__(self) -> int:
        if self.endless:
            raise TypeError(f"{type(self.sampler).__name__} has no length")
        return self.course.division.batches

    def sizes(self, epoch: int, batch: int) -> list[int]:
        """Return the number of samples that each rank has in a batch."""
        if self.endless:
            return [1] * self.ranks
        division, first = self.course.of_epoch(epoch)
        return [1] * division.ranks if self.whole else division.sizes(batch - first)

    def begin(self, epoch: int, turn: int, batch: int) -> None:
        """Have the next iteration start at a batch of an epoch; `turn` counts those within an epoch."""
        self.at = epoch, turn, batch
        self.begun = None if self.endless else self._order(epoch, turn)

    def __iter__(self) -> Iterator:
        # When its first batch is asked for: torch makes two iterators, and uses one.
        (epoch, turn, start), order = self.at, self.begun
        self.at, self.begun = (epoch, turn, 0), None
        seed = (*self.seed, epoch, turn) if turn else (*self.seed, epoch)
        roots = {"dataset": self.loader.dataset, "collate_fn": self.loader.collate_fn}
        found = None if self.loader.num_workers else Found(roots)
        for places, indices in self._drawn(epoch, turn, start, order):
            if self.alone and found:
                Keys(indices, seed, places, found)
                yield indices[0]
            else:
                yield Key(indices[0], seed, places[0]) if self.alone else Keys(indices, seed, places, found)

    def _drawn(self, epoch: int, turn: int, start: int, order: list | None) -> Iterator[tuple[list, list]]:
        """Yield the places and the indices of each batch."""
        if self.endless:
            yield from self._endless(epoch, turn, start)
            return
        order = self._order(epoch, turn) if order is None else order
        division, first = self.course.of_epoch(epoch)
        for batch in range(start, len(self)):
            places = division.part(batch - first, self.rank)
            if places and places[-1] >= len(order):
                return  # the sampler has drawn fewer than it said
            if self.alone:
                yield [places[0]], [order[places[0]]]
            elif self.whole:
                for place in places:
                    yield [(place, k) for k in range(len(order[place]))], order[place]
            else:
                yield list(places), [order[place] for place in places]

    def _endless(self, epoch: int, turn: int, start: int) -> Iterator[tuple[list, list]]:
        """Yield the batches of a sampler without a length: what was done before is drawn again, as indices only."""
        drawn, place = None, 0
        for batch in itertools.count():
            with isolate_rng():
                self._seed(epoch, turn, batch)
                drawn = drawn or iter(self.sampler)
                parts = []
                for _ in range(self.ranks):  # of all ranks, of which this one takes its own
                    try:
                        parts.append([next(drawn) for _ in range(self.size)])
                    except (StopIteration, RuntimeError):
                        return
            indices = parts[self.rank][0] if self.whole and not self.alone else parts[self.rank]
            if batch >= start:
                yield [(batch, self.rank, k) for k in range(len(indices))], indices
            place += len(indices)

    def _order(self, epoch: int, turn: int) -> list:
        """Return all that the sampler draws in an epoch."""
        with isolate_rng():
            self._seed(epoch, turn)
            for owner in (self.sampler, getattr(self.sampler, "sampler", None)):
                if hasattr(owner, "set_epoch"):
                    owner.set_epoch(epoch)
            return list(self.sampler)

    def _seed(self, epoch: int, *more: int) -> None:
        key = ("order", *self.seed, epoch, *more) if any(more) else ("order", *self.seed, epoch)
        number = seed_all(*key)
        graph.reseed(graph.generators({"sampler": self.sampler}, skip=(Dataset,)), number)


# Loaders --------------------------------------------------------------------------------------------------------------


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


def _as_for_workers(loader: DataLoader) -> DataLoader:
    """Return the loader as its workers are to see it."""
    if not loader.num_workers:
        return loader
    view = copy.copy(loader)
    vars(view)["worker_init_fn"] = functools.partial(_start_worker, loader.worker_init_fn, loader.collate_fn)
    return view


@functools.cache
def of_class(mixin: type, kind: type) -> type:
    """Return the class `kind` with what `mixin` does otherwise, by the same name."""
    if mixin.__base__ is kind:
        return type(kind.__name__, (mixin,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


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
    started = functools.partial(_start_worker, given, loader.collate_fn)
    if isinstance(given, functools.partial) and given.func is _start_worker:
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


def _start_worker(also: Callable[[int], None] | None, collate: Callable, worker: int) -> None:
    """Begin a data worker: a signal ends it only if it comes from the process whose worker it is.

    torchrun and SageMaker signal whole groups of processes; a worker that goes first takes the last batch with it.
    """
    global _of_worker
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    parent = os.getppid()

    def wait() -> None:
        while signal.sigwaitinfo(SIGNALS).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    if also:
        also(worker)
    _of_worker = Found({"dataset": torch.utils.data.get_worker_info().dataset, "collate_fn": collate, "init": also})


# All loaders of an epoch ----------------------------------------------------------------------------------------------


class Drawn(CombinedLoader):
    """The loaders of a validation: each batch has a seed of its own, also for what is done to it on its way."""

    key: Callable[[], tuple]
    """Returns what decides the draws of this validation."""

    def __iter__(self) -> "Drawn":
        seed_all("loaders", *self.key())
        return super().__iter__()

    def __next__(self) -> Any:
        found = super().__next__()
        seed_all("batch", *self.key(), *found[1:])
        return found


class Placed(CombinedLoader):
    """The training loaders: they begin where training is, and not before that is known.

    Lightning begins its loaders when it sets them up, which may be before a checkpoint is loaded: a module that asks
    for `estimated_stepping_batches` has them set up. Workers would start, and draw, at the beginning of it all.
    """

    seed: tuple = ()
    rank: int = 0
    turns: "list[_Turns]"
    placed = False

    def prepare(self) -> None:
        """Take note of what samplers, and loaders without positions, hold before anything is drawn of them."""
        self.held = [graph.State(functools.partial(_drawn_from, loader), skip=_skipped(loader)) for loader in
                     self.flattened]  # fmt: skip
        for held in self.held:
            held.mark()

    def begin(self, fetcher: Any, epoch: int, done: int, states: Mapping[str, Any] | None = None) -> None:
        """Have an epoch begin, or go on, after so many batches; `states` is what `states` returned."""
        told = states["loaders"] if states else []
        for held, state in zip(self.held, told, strict=False):
            held.restore(state["held"])
        self.before = [held.changed() for held in self.held]
        ahead = decoded(states["ahead"]) if states else []
        self.place, self.placed = (epoch, done + len(ahead), [state["own"] for state in told]), True
        given = getattr(fetcher, "prefetch_batches", 0)
        if ahead:
            fetcher.prefetch_batches = 0
        iter(fetcher)
        if ahead:
            fetcher.prefetch_batches, fetcher.batches, fetcher.fetched = given, ahead, len(ahead)

    def __iter__(self) -> "Placed":
        kind = _SUPPORTED_MODES[self._mode]["iterator"]
        if not self.placed:
            self._iterator = kind(self.flattened, self._limits)  # which has a length
            return self
        epoch, done, states = self.place
        many = len(self.flattened) > 1
        self.turns = [
            _Turns(loader, (*self.seed, number) if number else self.seed, epoch, self._mode, many)
            for number, loader in enumerate(self.flattened)
        ]
        self._iterator = kind(self.turns, self._limits)
        for number, turns in enumerate(self.turns):
            turns.go_to(done, states[number] if number < len(states) else None)
        self._iterator.iterators = [turns.iterator for turns in self.turns]
        self._iterator._idx = self.drawn = done
        if isinstance(self._iterator, _MaxSizeCycle):
            self._iterator._consumed = [turns.turn > 0 for turns in self.turns]
        self.place, self.epoch = (epoch, 0, ()), epoch
        return self

    def __next__(self) -> Any:
        if not self.placed:
            raise StopIteration
        found = super().__next__()
        # What is done to a batch on its way to the device draws, too.
        seed_all("batch", *self.seed, self.epoch, self.drawn, self.rank)
        self.drawn += 1
        return found

    def reset(self) -> None:
        """Forget where it was."""
        super().reset()
        self.placed = False

    def _state_dicts(self) -> list[dict[str, Any]]:
        return []  # Lightning would take the first rank's for all

    def states(self, fetcher: Any, within: bool) -> dict[str, Any]:
        """Return what has to be known to go on: within an epoch, it is drawn again, from what was there before it.

        Of a loader that saves its own state, that is one batch ahead where Lightning has fetched one: it is saved, too.
        """
        held = self.before if within else [held.changed() for held in self.held]
        own = [encoded(loader.state_dict()) if has_state(loader) else None for loader in self.flattened]
        ahead = getattr(fetcher, "batches", []) if within and any(state is not None for state in own) else []
        loaders = [{"held": one, "own": state} for one, state in zip(held, own, strict=True)]
        return {"loaders": loaders, "ahead": encoded(ahead)}


def _drawn_from(loader: Any) -> dict[str, Any]:
    """Return the objects from which an epoch is drawn."""
    if not isinstance(loader, DataLoader):
        return {} if isinstance(loader, ResidentLoader) or has_state(loader) else {"loader": loader}
    names = (
        ("sampler", "batch_sampler")
        if divided(loader) is not None
        else ("sampler", "batch_sampler", "dataset", "collate_fn")
    )
    return {} if has_state(loader) else {name: getattr(loader, name, None) for name in names}


def _skipped(loader: Any) -> tuple:
    return () if divided(loader) is None else (Dataset,)


def has_state(loader: Any) -> bool:
    """Return whether a loader saves and loads its own state, and needs to."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


class _Turns:
    """One of the loaders of an epoch, which may begin again before the longest of them has ended."""

    def __init__(self, loader: Any, seed: tuple, epoch: int, mode: str, many: bool) -> None:
        self.loader, self.seed, self.epoch, self.mode, self.many = loader, seed, epoch, mode, many
        self.turn, self.drawn = -1, 0
        self.iterator: Iterator = iter(())

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        self._begin(self.turn + 1, 0)
        return self.iterator

    def go_to(self, done: int, state: Any) -> None:
        """Begin after so many batches."""
        if state is not None:
            self.loader.load_state_dict(decoded(state))
            self._begin(0, done, skip=False)
            return
        length, turn = sized_len(self.loader), 0
        if length and self.mode == "max_size_cycle" and self.many and done:
            turn, done = divmod(done - 1, length)
            done += 1
        elif length:
            done = min(done, length)
        self._begin(turn, done)

    def _begin(self, turn: int, start: int, skip: bool = True) -> None:
        self.turn = turn
        if isinstance(self.loader, ResidentLoader):
            self.iterator = iter(self.loader)  # it asks itself where training is
            return
        workers = getattr(self.loader, "persistent_workers", False)  # those that stay were seeded in the first epoch
        if (exactly := divided(self.loader)) is not None:
            for earlier in range(self.drawn, turn):  # what counts its epochs counts these
                exactly.begin(self.epoch, earlier, 0)
            self.drawn = turn + 1
            exactly.begin(self.epoch, turn, start)
            self._seed("workers", 0 if workers else self.epoch, 0 if workers else turn)
            self.iterator = iter(self.loader)
            return
        if isinstance(self.loader, DataLoader) and not has_state(self.loader):
            _shutdown_workers_and_reset_iterator(self.loader)
        self._seed("order", self.epoch, turn)
        self.iterator = self._others(0 if skip else start)
        began = time.monotonic()
        for _ in range(start if skip else 0):
            if next(self.iterator, self) is self and self.mode == "max_size_cycle" and self.many:
                self._begin(self.turn + 1, 0)
                next(self.iterator, None)
        if start and skip and rank_zero_only.rank == 0:
            print(
                f"the training data has no positions ({type(getattr(self.loader, 'dataset', self.loader)).__name__}): "
                f"the {start} batches before this one were drawn again, in {time.monotonic() - began:.1f} s",
                flush=True,
            )

    def _others(self, first: int) -> Iterator:
        """Go through a loader that knows no positions."""
        found = graph.generators({"loader": self._inside()})
        graph.reseed(found, number_of("order", *self.seed, self.epoch, self.turn))
        batches, key = iter(self.loader), (self.epoch, self.turn)

        def drawn() -> Iterator:
            for number in itertools.count(first):
                graph.reseed(found, seed_all("draw", *self.seed, *key, number))
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                yield batch

        return drawn()

    def _inside(self) -> Any:
        names = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator")
        if isinstance(self.loader, DataLoader):
            return [getattr(self.loader, name, None) for name in names]
        return self.loader

    def _seed(self, what: str, epoch: int, turn: int) -> None:
        number = seed_all(what, *self.seed, epoch, turn)
        if isinstance(generator := getattr(self.loader, "generator", None), torch.Generator):
            generator.manual_seed(number)
