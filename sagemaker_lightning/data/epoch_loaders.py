"""All loaders of an epoch together: they begin where training is, whatever they are."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, Dataset

from sagemaker_lightning.compat.lightning_loaders import PlaceableLoader
from sagemaker_lightning.compat.lightning_loops import is_drawn_by_steps
from sagemaker_lightning.compat.torch_data import end_workers, has_iterator
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.batch_order import Batches
from sagemaker_lightning.data.deterministic import (
    counts_only,
    data_of,
    divided,
    draws_again,
    keeps_workers,
    knows_its_end,
    order_of,
    plan,
)
from sagemaker_lightning.data.partition import PartitionedLoader
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.data.seeded_indices import number_of, seed_all
from sagemaker_lightning.state import batch_digest, generators
from sagemaker_lightning.state.encoding import NotPlain, decoded, encoded
from sagemaker_lightning.state.object_state import State


def digest_of(batch: Any) -> int:
    """Return what tells a batch from another one."""
    return batch_digest.folded(map(int, batch_digest.parts(batch)))


class Together(PlaceableLoader):
    """Loaders whose workers end when nobody goes through them any more."""

    def leave(self, other: CombinedLoader | None = None) -> None:
        """End the workers of all loaders but those that another one goes on with."""
        self.forget_iterators()
        for loader in self.flattened:
            if other is None or not any(loader is one for one in other.flattened):
                end_workers(loader)

    def reset(self) -> None:
        """Forget where it was."""
        self.leave()
        super().reset()


class Drawn(Together):
    """The loaders of a validation: each batch has a seed of its own, also for what is done to it on its way."""

    key: Callable[[], tuple]
    """Returns what decides the draws of this validation."""

    def __iter__(self) -> "Drawn":
        for loader in self.flattened:
            if divided(loader) is None:  # all validations draw alike, in new workers
                end_workers(loader)
                plan(loader, 0, 0)
        seed_all("loaders", *self.key())
        return super().__iter__()

    def __next__(self) -> Any:
        found = super().__next__()
        seed_all("batch", *self.key(), *found[1:])
        return found


class Placed(Together):
    """The training loaders: they begin where training is, and not before that is known.

    Lightning begins its loaders when it sets them up, which may be before a checkpoint is loaded: a module that asks
    for `estimated_stepping_batches` has them set up. Workers would start, and draw, at the beginning of it all.
    """

    seed: tuple = ()
    rank: int = 0
    turns: "list[Turns]"
    placed = False
    drawn = 0
    """Batches of the epoch that were drawn."""
    why = ""
    """Why no run can go on within an epoch, if it cannot."""

    def prepare(self) -> None:
        """Take note of what the loaders hold before anything is drawn of them."""
        mode = self.mode if len(self.flattened) > 1 else ""
        self.turns = [
            Turns(loader, (*self.seed, number) if number else self.seed, mode)
            for number, loader in enumerate(self.flattened)
        ]

    def epoch_begins(self, epoch: int) -> None:
        """Have a hook that goes through the training data as an epoch begins draw what this epoch draws."""
        for turns in self.turns:
            turns.epoch_begins(epoch)

    def give_back(self, states: Mapping[str, Any]) -> None:
        """Give back what was there at an epoch's end, before the hooks that begin the next one change it."""
        for turns, told in zip(self.turns, states["loaders"], strict=False):
            turns.give_back(told)

    def begin(
        self,
        fetcher: Any,
        epoch: int,
        done: int,
        states: Mapping[str, Any] | None = None,
        proves: bool = False,
    ) -> int:
        """Have an epoch begin, or go on, after so many batches, and return their number.

        Args:
            fetcher: Lightning's, which asks for the batches.
            epoch: The epoch.
            done: Batches that steps have had.
            states: What `states` returned.
            proves: Whether it has to be known if what was drawn can be drawn again.
        """
        ahead = decoded(states["ahead"]) if states else []
        if done and states and states["why"] and rank_zero_only.rank == 0:
            print(
                f"{states['why']}: the rest of this epoch is not what it would have been",
                flush=True,
            )
        if done and states and is_drawn_by_steps(fetcher):  # a step may draw any number
            done = states["drawn"]
        self.place = (epoch, done + len(ahead))
        self.placed = True
        told = states["loaders"] if states else []
        for turns, one in itertools.zip_longest(self.turns, told[: len(self.turns)]):
            turns.prepare(epoch, one, proves)
        given = getattr(fetcher, "prefetch_batches", 0)
        if ahead:
            fetcher.prefetch_batches = 0
        iter(fetcher)
        if ahead:
            fetcher.prefetch_batches = given
            fetcher.batches = ahead
            fetcher.fetched = len(ahead)
        for turns in self.turns:
            turns.settle()
        self.why = next(filter(None, (turns.why for turns in self.turns)), "") or self._unsaved(
            fetcher
        )
        return done

    def _unsaved(self, fetcher: Any) -> str:
        """Return why what Lightning has fetched ahead of a loader that saves its state cannot be saved, too."""
        if any(turns.stateful for turns in self.turns):
            try:
                encoded(getattr(fetcher, "batches", []))
            except NotPlain as error:
                return f"a batch holds a {error.kind}, which no checkpoint can hold"
        return ""

    def __iter__(self) -> "Placed":
        if not self.placed:
            self.combine(self.flattened)
            return self
        epoch, self.drawn = self.place
        self.combine(self.turns)
        for turns in self.turns:
            turns.go_to(self.drawn)
        self.go_on(
            self.drawn,
            [turns.iterator for turns in self.turns],
            [turns.turn > 0 for turns in self.turns],
        )
        self.place = (epoch, 0)
        self.epoch = epoch
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

    def leave(self, other: CombinedLoader | None = None) -> None:
        """End the workers of all loaders but those that another one goes on with."""
        for turns in self.turns:
            turns.iterator = iter(())
        super().leave(other)

    def states(self, fetcher: Any, within: bool) -> dict[str, Any]:
        """Return what has to be known to go on: within an epoch, it is drawn again, from what was there before it.

        Of a loader that saves its own state, that is one batch ahead where Lightning has fetched one: it is saved, too,
        and so is one that was drawn from what the training changes, such as a replay buffer.
        """
        ahead = (
            getattr(fetcher, "batches", [])
            if within and any(turns.ahead for turns in self.turns)
            else []
        )
        try:
            ahead = encoded(ahead)
        except NotPlain:
            ahead = []
        return {
            "loaders": [turns.states(within) for turns in self.turns],
            "ahead": ahead,
            "drawn": self.drawn,
            "why": self.why,
        }


class Turns:
    """One of the loaders of an epoch, which may begin again before the longest of them has ended.

    Args:
        loader: The loader.
        seed: Decides what it draws.
        mode: How the loaders are combined, "" if there is one.
    """

    def __init__(self, loader: Any, seed: tuple, mode: str) -> None:
        self.loader = loader
        self.seed = seed
        self.mode = mode
        self.own, self.again = (
            has_state(loader),
            draws_again(loader),
        )  # whether it saves its state; both may be
        self.stateful = self.own and not self.again
        # Of these, a batch may lie ahead that could not be drawn once more.
        self.ahead = self.stateful or (self.again and not getattr(loader, "num_workers", 0))
        skip = (Dataset,) if isinstance(loader, DataLoader) else ()
        self.order = State(lambda: order_of(loader, self.own), skip)
        self.data = State(lambda: data_of(loader, self.own))
        # A generator, which is gone through once, in all epochs.
        self.once = isinstance(loader, Iterator) and type(loader).__module__ in (
            "builtins",
            "itertools",
        )
        self.given = 0  # batches that it gave
        self.order.mark()
        self.data.mark()
        self.first = self.order.kept(), self.data.kept()
        self.kept: dict = {}  # the data's plain state when the iteration began, or the workers that still are
        self.epoch = 0
        self.turn = -1
        self.drawn = 0
        self.begun = 0  # iterations, in this run and in those before it
        self.told: Mapping[str, Any] | None = None
        stay = self.again and not self.own and getattr(loader, "persistent_workers", False)
        if stay and rank_zero_only.rank == 0:
            print(
                f"persistent_workers: those of {self.name} begin anew with each epoch, so that one can be resumed; so "
                "does what it counts in them; both stay in torchdata's StatefulDataLoader, with a state_dict() of the "
                "dataset's",
                flush=True,
            )
        self.over = self.proves = False
        self.now: dict | None = None
        self.why = ""
        self.proved = False
        self.iterator: Iterator = iter(())

    @property
    def name(self) -> str:
        """What it is called."""
        own = type(self.loader).__module__.partition(".")[0] not in ("torch", "torchdata")
        kind = type(self.loader if own else getattr(self.loader, "dataset", self.loader))
        return f"{kind.__module__}.{kind.__qualname__}"

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        self.begin(self.turn + 1, 0)
        return self.iterator

    def epoch_begins(self, epoch: int) -> None:
        """Have an iteration of somebody else's begin as if nobody had gone through the loader before."""
        if isinstance(exactly := divided(self.loader), Batches):
            exactly.rewind(epoch)
        elif not exactly and not self.stateful:
            generators.reseed(self._generators(), number_of("epoch", *self.seed, epoch))

    def give_back(self, told: Mapping[str, Any], data: str = "now") -> None:
        """Give back the order's state, and the data's, as it was at the end (`now`) or when an iteration began."""
        self._has_no_state(self.stateful and told["own"] is None)
        self.order.restore(self.order.all(self.first[0]) | told["order"], touch=False)
        if self.again or getattr(self.loader, "num_workers", 0):
            self.data.restore(self.data.all(self.first[1]) | told[data], touch=False)
        self._set_source(told["source"])
        plan(
            self.loader, told["begun"], 0
        )  # for a hook that goes through it before the next epoch does

    def prepare(self, epoch: int, told: Mapping[str, Any] | None, proves: bool) -> None:
        """Have an epoch begin, or go on from what was `told`: give back what was there when it began."""
        self.epoch = epoch
        self.turn = -1
        self.drawn = 0
        self.told = told
        self.proves = proves
        if told:
            self.begun = told["begun"]
        if told and told["within"]:
            self.give_back(told, "data")
            if self.again or getattr(self.loader, "num_workers", 0):
                self.now = self.data.all(self.first[1]) | told["now"]
        elif (
            told and not self.again and keeps_workers(self.loader)
        ):  # they have copies of what was there once
            self.now = self.data.all()
            self.data.restore(self.data.all(self.first[1]) | told["data"], touch=False)
        self.before = self.order.kept()
        self.source = self._source()
        self.earlier = self.begun
        if self.again or not self._workers_stay:
            self.kept = self.data.kept()

    def _source(self) -> Any:
        """Return the state of a dataset that saves it, whose loader does not; or a loader's, right between epochs."""
        source = self.loader if self.own else getattr(self.loader, "dataset", None)
        with contextlib.suppress(NotPlain):
            return encoded(source.state_dict()) if self.again and has_state(source) else None

    def _set_source(self, state: Any) -> None:
        if state is not None:
            (self.loader if self.own else self.loader.dataset).load_state_dict(decoded(state))
            sized_len(
                self.loader
            )  # litdata's asks its datasets for their lengths without workers, and leaves them so

    def _has_no_state(self, none: bool) -> None:
        if none:
            self.own = False
            self.stateful = False
            self.again = True
            self.ahead = not getattr(self.loader, "num_workers", 0)
            self.first = (
                self.order.kept(),
                self.data.kept(),
            )  # nothing has been drawn since the epoch began
            self.before, self.kept = self.first

    @property
    def _workers_stay(self) -> bool:
        return keeps_workers(self.loader) and has_iterator(self.loader)

    def settle(self) -> None:
        """Have the data be as it is now, once workers have copies of it as it was, or what was drawn is drawn again."""
        if self.now is not None:
            self.data.restore(self.now, touch=False)
            self.now = None

    def states(self, within: bool) -> dict[str, Any]:
        """Return what `prepare` has to be told."""
        return {
            "order": self.order.changed(self.before if within else None),
            "data": self.data.changed(self.kept if within or self._workers_stay else None),
            "own": encoded(self.loader.state_dict()) if self.stateful else None,
            "now": self.data.changed(), "source": self.source if within else self._source(), "given": self.given,
            "begun": self.earlier if self.again and within else self.begun, "over": self.over, "within": within,
            "workers": getattr(self.loader, "num_workers", 0),
        }  # fmt: skip

    def go_to(self, done: int) -> None:
        """Begin after so many batches."""
        if self.stateful and self.told:
            self._load(self.told, done)
            return
        length = sized_len(self.loader)
        turn = 0
        if self.again:
            self._draw_again(done)
            return
        if length and self.mode == "max_size_cycle" and done:
            turn, done = divmod(done - 1, length)
            done += 1
        elif length:
            done = min(done, length)
        self.begin(turn, done)
        if self.stateful and (
            counts_only(self.loader) or (self.begun == 1 and not self._can_be_saved())
        ):
            self._has_no_state(True)
            self.begun = self.earlier
            self._draw_again(0)

    def _can_be_saved(self) -> bool:
        """Return whether a checkpoint can hold the loader's state."""
        try:
            encoded(self.loader.state_dict())
        except NotPlain:
            return False
        return True

    def _load(self, told: Mapping[str, Any], done: int) -> None:
        """Have the loader go where it was."""
        workers = getattr(self.loader, "num_workers", 0)
        if workers != told["workers"]:
            raise UserError(
                f"--data: {self.name} saved its state with {told['workers']} data workers, now there are {workers}; go "
                f"on with num_workers={told['workers']}"
            )
        self.loader.load_state_dict(decoded(told["own"]))
        if told["within"]:
            self.begun -= 1
            self.begin(0, done, loaded=True)
            return
        if not told["over"]:  # the iteration was left, and another one begun
            plan(self.loader, self.begun - 1, 0)
            iter(self.loader)
        self.begin(0, 0, loaded=True, after=told["over"] and knows_its_end(self.loader))

    def _draw_again(self, done: int) -> None:
        """Draw what was drawn, and leave it out."""
        if self.once:
            done = self.told["given"] if self.told else 0
        if self.proves and not self.proved and not self.once:
            self._prove(done)
        else:
            self.begin(0, 0)
        began = time.monotonic()
        for _ in range(done):
            if next(self.iterator, self) is self and self.mode == "max_size_cycle":
                self.begin(self.turn + 1, 0)
                next(self.iterator, None)
        if done and rank_zero_only.rank == 0:
            print(
                f"the training data has no positions ({self.name}): the {done} batches before this one were drawn "
                f"again, in {time.monotonic() - began:.1f} s",
                flush=True,
            )

    def _prove(self, done: int) -> None:
        """Draw the first batch twice, to learn whether it is the same; generators made on the way are seeded then."""
        self.proved = True
        if done and getattr(self.loader, "num_workers", 0):
            self.begin(0, 0)
            return
        order = self.order.all()
        data = self.data.all()
        self.begin(0, 0)
        drawn = digest_of(next(self.iterator, self.name))
        self.order.restore(order, touch=False)
        self.data.restore(data, touch=False)
        self._set_source(self.source)
        self.begun -= 1  # it is the same iteration
        self.begin(0, 0)
        first = next(self.iterator, self.name)
        if first is not self.name:
            self.iterator = itertools.chain([first], self.iterator)
        if drawn != digest_of(first):
            self.why = f"{self.name} draws other batches each time"

    def begin(self, turn: int, start: int, loaded: bool = False, after: bool = False) -> None:
        """Begin an iteration, after `start` batches; `loaded` if the loader knows that, `after` if it knows an end."""
        self.turn = turn
        self.over = False
        self.iterator = iter(())
        self.begun += 1
        if isinstance(self.loader, PartitionedLoader):
            self.loader.begin(self.epoch, start)
            self.iterator = iter(self.loader)
            return
        if (exactly := divided(self.loader)) is not None:
            for earlier in range(self.drawn, turn):  # what counts its epochs counts these
                exactly.begin(self.epoch, earlier, 0)
            self.drawn = turn + 1
            exactly.begin(self.epoch, turn, start)
            stay = keeps_workers(self.loader)  # those were seeded in the first epoch
            self._seed("workers", 0 if stay else self.epoch, 0 if stay else turn)
            self.iterator = iter(self.loader)
            return
        if isinstance(self.loader, DataLoader) and not self.stateful:
            end_workers(self.loader)
        plan(self.loader, self.begun - 1 - after, start if loaded else 0)
        self._seed("order", self.epoch, turn)
        self.iterator = self._others(start if loaded else 0, loaded and not start)

    def _others(self, first: int, ended: bool) -> Iterator:
        """Go through a loader that knows no positions; one that has `ended` has to be begun twice."""
        found = self._generators()
        generators.reseed(found, number_of("order", *self.seed, self.epoch, self.turn))
        batches = iter(self.loader)
        key = (self.epoch, self.turn)
        if self.once:
            first = self.given
            key = ("once",)

        def drawn() -> Iterator:
            nonlocal batches
            for number in itertools.count(first):
                generators.reseed(found, seed_all("draw", *self.seed, *key, number))
                batch = next(batches, self)
                if batch is self and ended and number == first:
                    batches = iter(self.loader)
                    batch = next(batches, self)
                if batch is self:
                    self.over = True
                    return
                self.given += 1
                yield batch

        return drawn()

    def _generators(self) -> dict[str, Any]:
        """Return the generators that what the loader draws comes of, if it saves no state of its own."""
        return (
            {}
            if self.own and isinstance(self.loader, DataLoader)
            else generators.find({"loader": self._inside()})
        )

    def _inside(self) -> Any:
        names = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator")
        if isinstance(self.loader, DataLoader):
            return [getattr(self.loader, name, None) for name in names]
        return self.loader

    def _seed(self, what: str, epoch: int, turn: int) -> None:
        number = seed_all(what, *self.seed, epoch, turn)
        if isinstance(generator := getattr(self.loader, "generator", None), torch.Generator):
            generator.manual_seed(number)
