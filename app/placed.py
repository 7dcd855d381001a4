"""All loaders of an epoch together: they begin where training is, whatever they are."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.combined_loader import (
    _SUPPORTED_MODES,
    _MaxSizeCycle,
    _shutdown_workers_and_reset_iterator,
)
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, Dataset

from app import generators
from app.exact import divided, drawn_from, has_state
from app.keys import number_of, seed_all
from app.plain import decoded, encoded
from app.resident import ResidentLoader
from app.state import State


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
        skipped = [() if divided(loader) is None else (Dataset,) for loader in self.flattened]
        both = zip(self.flattened, skipped, strict=True)
        self.held = [State(functools.partial(drawn_from, loader), skip) for loader, skip in both]
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
        found = generators.find({"loader": self._inside()})
        generators.reseed(found, number_of("order", *self.seed, self.epoch, self.turn))
        batches, key = iter(self.loader), (self.epoch, self.turn)

        def drawn() -> Iterator:
            for number in itertools.count(first):
                generators.reseed(found, seed_all("draw", *self.seed, *key, number))
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
