"""All the loaders of an epoch; they begin at the batch that training is at."""

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

from sagemaker_lightning.compat.lightning_loaders import PositionedLoader
from sagemaker_lightning.compat.lightning_loops import steps_draw_batches
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
from sagemaker_lightning.state.encoding import NotPlain, decode, encode
from sagemaker_lightning.state.object_state import PlainState


def digest_of(batch: Any) -> int:
    """Return a number that tells a batch from another one."""
    return batch_digest.combine(map(int, batch_digest.leaf_digests(batch)))


class Together(PositionedLoader):
    """Several loaders; their data workers end when nobody iterates any more."""

    def leave(self, other: CombinedLoader | None = None) -> None:
        """End the workers of all loaders except those that `other` goes on with."""
        self.forget_iterators()
        for loader in self.flattened:
            if other is None or not any(loader is kept for kept in other.flattened):
                end_workers(loader)

    def reset(self) -> None:
        """Forget how far the loaders are, and end their workers."""
        self.leave()


class Drawn(Together):
    """The loaders of a validation: each batch is drawn with a seed of its own.

    The seed also covers what is drawn while the batch is moved to the device.
    """

    key: Callable[[], tuple]
    """Returns the values that decide what this validation draws."""

    def seed_by(self, key: Callable[[], tuple]) -> None:
        """Set what returns the values that decide what a validation draws."""
        self.key = key

    def __iter__(self) -> "Drawn":
        for loader in self.flattened:
            if divided(loader) is None:  # every validation draws the same, in new workers
                end_workers(loader)
                plan(loader, 0, 0)
        seed_all("loaders", *self.key())
        return super().__iter__()

    def __next__(self) -> Any:
        item = super().__next__()
        seed_all("batch", *self.key(), *item[1:])
        return item


class Placed(Together):
    """The training loaders: they begin at the batch that training is at.

    They begin once that batch is known. Lightning begins its loaders when it sets them up. That may
    be before a checkpoint is loaded: a module that asks for `estimated_stepping_batches` has them
    set up. Data workers would then start, and draw, at the first batch of the first epoch.
    """

    seed: tuple
    rank: int
    turns: "list[Turns]"
    placed = False
    drawn = 0
    """Number of batches of the epoch that were drawn."""
    why = ""
    """Why no run can be resumed within the epoch; "" if one can."""

    def prepare(self, seed: tuple, rank: int) -> None:
        """Record what the loaders hold before anything is drawn from them.

        Args:
            seed: Decides what is drawn.
            rank: This rank.
        """
        self.seed = seed
        self.rank = rank
        mode = self.mode if len(self.flattened) > 1 else ""
        self.turns = [
            Turns(loader, (*self.seed, number) if number else self.seed, mode)
            for number, loader in enumerate(self.flattened)
        ]

    def epoch_begins(self, epoch: int) -> None:
        """Seed what a hook draws from the training data when an epoch begins.

        It then draws what belongs to this epoch.
        """
        for turns in self.turns:
            turns.epoch_begins(epoch)

    def give_back(self, states: Mapping[str, Any]) -> None:
        """Restore the state that the loaders had at an epoch's end.

        It is called before the hooks that begin the next epoch change that state.
        """
        for turns, saved in zip(self.turns, states["loaders"], strict=False):
            turns.give_back(saved)

    def begin(
        self,
        fetcher: Any,
        epoch: int,
        done: int,
        states: Mapping[str, Any] | None = None,
        proves: bool = False,
    ) -> int:
        """Begin or resume an epoch after `done` batches; return that number.

        The number returned differs from `done` where steps draw batches themselves.

        Args:
            fetcher: Lightning's data fetcher, which asks for the batches.
            epoch: The epoch.
            done: Number of batches that steps have had.
            states: What `states` returned; None if there is no checkpoint.
            proves: Whether to find out if the loaders draw the same batches a second time.
        """
        ahead = decode(states["ahead"]) if states else []
        if done and states and states["why"] and rank_zero_only.rank == 0:
            print(
                f"{states['why']}: the rest of this epoch differs from that of an uninterrupted "
                "run",
                flush=True,
            )
        if done and states and steps_draw_batches(fetcher):  # a step may draw any number of batches
            done = states["drawn"]
        self.place = (epoch, done + len(ahead))
        self.placed = True
        all_saved = states["loaders"] if states else []
        for turns, saved in itertools.zip_longest(self.turns, all_saved[: len(self.turns)]):
            turns.prepare(epoch, saved, proves)
        prefetch_batches = getattr(fetcher, "prefetch_batches", 0)
        if ahead:
            fetcher.prefetch_batches = 0
        iter(fetcher)
        if ahead:
            fetcher.prefetch_batches = prefetch_batches
            fetcher.batches = ahead
            fetcher.fetched = len(ahead)
        for turns in self.turns:
            turns.settle()
        self.why = next(
            filter(None, (turns.why for turns in self.turns)), ""
        ) or self._why_ahead_is_unsavable(fetcher)
        return done

    @property
    def shared_orders(self) -> dict[str, int]:
        """What each loader whose batches the ranks share draws first, as a hash, by sampler."""
        batches = [divided(loader) for loader in self.flattened]
        return {
            f"{number} {type(each.sampler).__name__}": each.drawn
            for number, each in enumerate(batches)
            if isinstance(each, Batches) and each.drawn
        }

    def _why_ahead_is_unsavable(self, fetcher: Any) -> str:
        """Return why the batches fetched ahead cannot be saved; "" if they can.

        A loader that saves its state counts the batches that Lightning has fetched ahead as drawn,
        so these have to be saved with it.
        """
        if any(turns.stateful for turns in self.turns):
            try:
                encode(getattr(fetcher, "batches", []))
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
        self.continue_with(
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
        item = super().__next__()
        # Moving a batch to the device (a transfer hook) may draw, too.
        seed_all("batch", *self.seed, self.epoch, self.drawn, self.rank)
        self.drawn += 1
        return item

    def reset(self) -> None:
        """Forget how far the loaders are; they need `begin` before the next epoch."""
        super().reset()
        self.placed = False

    def leave(self, other: CombinedLoader | None = None) -> None:
        """End the workers of all loaders except those that `other` goes on with."""
        for turns in self.turns:
            turns.stop()
        super().leave(other)

    def states(self, fetcher: Any, within: bool) -> dict[str, Any]:
        """Return what a resumed run has to know about the loaders.

        Within an epoch (`within`), it is the state from which the epoch's batches can be drawn
        again. The state of a loader that saves it itself is one batch ahead if Lightning has
        fetched one ahead: that batch is saved, too. So is a batch that was drawn from data that
        training changes, such as a replay buffer.
        """
        ahead = (
            getattr(fetcher, "batches", [])
            if within and any(turns.ahead for turns in self.turns)
            else []
        )
        try:
            ahead = encode(ahead)
        except NotPlain:
            ahead = []
        return {
            "loaders": [turns.states(within) for turns in self.turns],
            "ahead": ahead,
            "drawn": self.drawn,
            "why": self.why,
        }


class Turns:
    """One loader of an epoch; it may begin again before the longest loader has ended.

    Args:
        loader: The loader.
        seed: Decides what it draws.
        mode: How Lightning combines the loaders; "" if there is only one.
    """

    def __init__(self, loader: Any, seed: tuple, mode: str) -> None:
        self.loader = loader
        self.seed = seed
        self.mode = mode
        # Whether it saves its state, and whether only drawing again gets it to a position. Both may
        # be true.
        self.own = has_state(loader)
        self.must_redraw = draws_again(loader)
        self.stateful = self.own and not self.must_redraw
        # Whether Lightning may have fetched a batch ahead that could not be drawn a second time.
        self.workers = getattr(loader, "num_workers", 0)
        self.ahead = self.stateful or (self.must_redraw and not self.workers)
        skip = (Dataset,) if isinstance(loader, DataLoader) else ()
        self.order = PlainState(lambda: order_of(loader, self.own), skip)
        self.data = PlainState(lambda: data_of(loader, self.own))
        # Whether it is a generator: all epochs together iterate over it once.
        self.single_pass = isinstance(loader, Iterator) and type(loader).__module__ in (
            "builtins",
            "itertools",
        )
        self.batches_given = 0  # number of batches that it has given in this process
        self.order.mark()
        self.data.mark()
        self.first = self.order.copies(), self.data.copies()
        # The data's plain state when the iteration began, or when the workers started that still
        # run.
        self.kept: dict = {}
        self.begun = 0  # number of iterations begun, in this run and in the runs that it resumes
        self.saved: Mapping[str, Any] | None = None
        stay = self.must_redraw and not self.own and getattr(loader, "persistent_workers", False)
        if stay and rank_zero_only.rank == 0:
            print(
                f"persistent_workers: the workers of {self.name} start anew with each epoch, so "
                "that an epoch can be resumed, and so does what it counts in them; to keep both, "
                "use torchdata's StatefulDataLoader, and give the dataset a state_dict()",
                flush=True,
            )
        self.data_now: dict | None = None
        self.why = ""
        self.proved = False
        self.iterator: Iterator = iter(())

    @property
    def name(self) -> str:
        """Name of the loader's class; for torch's and torchdata's, the dataset's class."""
        is_own = type(self.loader).__module__.partition(".")[0] not in ("torch", "torchdata")
        kind = type(self.loader if is_own else getattr(self.loader, "dataset", self.loader))
        return f"{kind.__module__}.{kind.__qualname__}"

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        self.begin(self.turn + 1)
        return self.iterator

    def stop(self) -> None:
        """Drop the iterator, and what it holds."""
        self.iterator = iter(())

    def epoch_begins(self, epoch: int) -> None:
        """Seed an iteration by somebody else as if the loader had not been used before."""
        if isinstance(batches := divided(self.loader), Batches):
            batches.rewind(epoch)
        elif not batches and not self.stateful:
            generators.reseed(self._generators_to_seed(), number_of("epoch", *self.seed, epoch))

    def give_back(self, saved: Mapping[str, Any], data: str = "now") -> None:
        """Restore the state of the order and of the data.

        `data` names the state of the data: "now" is the state when the checkpoint was taken, "data"
        is the state when the iteration began.
        """
        self._treat_as_stateless(self.stateful and saved["own"] is None)
        self.order.restore(self.order.encode_all(self.first[0]) | saved["order"])
        if self.must_redraw or self.workers:
            self.data.restore(self.data.encode_all(self.first[1]) | saved[data])
        self._restore_source(saved["source"])
        # For a hook that iterates over the loader before the next epoch does.
        plan(self.loader, saved["begun"], 0)

    def prepare(self, epoch: int, saved: Mapping[str, Any] | None, must_prove: bool) -> None:
        """Prepare for an epoch, or restore the state that the loader had in it.

        Args:
            epoch: The epoch.
            saved: What `states` returned; None if there is no checkpoint.
            must_prove: Whether to find out if the loader draws the same batches a second time.
        """
        self.epoch = epoch
        self.turn = -1
        self.saved = saved
        self.must_prove = must_prove
        if saved:
            self.begun = saved["begun"]
        if saved and saved["within"]:
            self.give_back(saved, "data")
            if self.must_redraw or self.workers:
                self.data_now = self.data.encode_all(self.first[1]) | saved["now"]
        elif saved and not self.must_redraw and keeps_workers(self.loader):
            # The workers hold copies of the data as it was when they started.
            self.data_now = self.data.encode_all()
            self.data.restore(self.data.encode_all(self.first[1]) | saved["data"])
        self.order_at_start = self.order.copies()
        self.source = self._source_state()
        self.earlier = self.begun
        if self.must_redraw or not self._workers_stay:
            self.kept = self.data.copies()

    def _source_state(self) -> Any:
        """Return the state that the loader or its dataset saves; None if neither does.

        The dataset's is used if the loader saves none. A loader's is right between epochs only.
        """
        source = self.loader if self.own else getattr(self.loader, "dataset", None)
        with contextlib.suppress(NotPlain):
            return encode(source.state_dict()) if self.must_redraw and has_state(source) else None

    def _restore_source(self, state: Any) -> None:
        if state is not None:
            (self.loader if self.own else self.loader.dataset).load_state_dict(decode(state))
            # litdata's loader asks its datasets for their lengths as if there were no workers, and
            # leaves them so.
            sized_len(self.loader)

    def _treat_as_stateless(self, stateless: bool) -> None:
        if stateless:
            self.own = False
            self.stateful = False
            self.must_redraw = True
            self.ahead = not self.workers
            # Nothing has been drawn since the epoch began.
            self.first = (self.order.copies(), self.data.copies())
            self.order_at_start, self.kept = self.first

    @property
    def _workers_stay(self) -> bool:
        return keeps_workers(self.loader) and has_iterator(self.loader)

    def settle(self) -> None:
        """Restore the data as it was when the checkpoint was taken.

        It is called once the workers have copies of the data as it was when the iteration began, or
        once the batches before this one have been drawn again.
        """
        if self.data_now is not None:
            self.data.restore(self.data_now)
            self.data_now = None

    def states(self, within: bool) -> dict[str, Any]:
        """Return what `prepare` takes as `saved`."""
        return {
            "order": self.order.encode_changes(self.order_at_start if within else None),
            "data": self.data.encode_changes(self.kept if within or self._workers_stay else None),
            "own": encode(self.loader.state_dict()) if self.stateful else None,
            "now": self.data.encode_changes(),
            "source": self.source if within else self._source_state(),
            # A generator goes on in the next epoch; others begin anew, in another process, too.
            "given": self.batches_given if self.single_pass else 0,
            "begun": self.earlier if self.must_redraw and within else self.begun,
            "over": self.over,
            "within": within,
            "workers": self.workers,
        }

    def go_to(self, done: int) -> None:
        """Begin the iteration after `done` batches."""
        if self.stateful and self.saved:
            self._load_state(self.saved, done)
            return
        length = sized_len(self.loader)
        turn = 0
        if self.must_redraw:
            self._redraw(done)
            return
        if length and self.mode == "max_size_cycle" and done:
            turn, done = divmod(done - 1, length)
            done += 1
        elif length:
            done = min(done, length)
        self.begin(turn, done)
        if self.stateful and (
            counts_only(self.loader) or (self.begun == 1 and not self._can_save_state())
        ):
            self._treat_as_stateless(True)
            self.begun = self.earlier
            self._redraw(0)

    def _can_save_state(self) -> bool:
        """Return whether a checkpoint can hold the loader's state."""
        try:
            encode(self.loader.state_dict())
        except NotPlain:
            return False
        return True

    def _load_state(self, saved: Mapping[str, Any], done: int) -> None:
        """Give the loader its saved state back, and begin after `done` batches.

        UserError if the loader has another number of data workers than the state was saved with.
        """
        if self.workers != saved["workers"]:
            raise UserError(
                f"--data: {self.name} saved its state with {saved['workers']} data workers, now "
                f"there are {self.workers}; go on with num_workers={saved['workers']}"
            )
        self.loader.load_state_dict(decode(saved["own"]))
        if saved["within"]:
            self.begun -= 1
            self.begin(0, done, loaded=True)
            return
        if not saved["over"]:  # the iteration was left before its end; the next is another one
            plan(self.loader, self.begun - 1, 0)
            iter(self.loader)
        self.begin(0, loaded=True, after_end=saved["over"] and knows_its_end(self.loader))

    def _redraw(self, done: int) -> None:
        """Draw the first `done` batches again, and throw them away."""
        if self.single_pass:
            done = self.saved["given"] if self.saved else 0
        if self.must_prove and not self.proved and not self.single_pass:
            self._prove(done)
        else:
            self.begin(0)
        began = time.monotonic()
        for _ in range(done):
            if next(self.iterator, self) is not self:
                continue
            if self.mode != "max_size_cycle":
                break
            self.begin(self.turn + 1)
            if next(self.iterator, self) is self:
                break
        if done and rank_zero_only.rank == 0:
            print(
                f"the training data cannot start at a batch ({self.name}): the {done} batches "
                f"before this one were drawn again, in {time.monotonic() - began:.1f} s",
                flush=True,
            )

    def _prove(self, done: int) -> None:
        """Draw the first batch twice, and set `why` if the two differ.

        Generators that drawing the first one has made are seeded for the second. Where batches have
        to be drawn again by data workers, nothing is compared.
        """
        self.proved = True
        if done and self.workers:
            self.begin(0)
            return
        order = self.order.encode_all()
        data = self.data.encode_all()
        no_batch = "no batch"
        self.begin(0)
        first_digest = digest_of(next(self.iterator, no_batch))
        self.order.restore(order)
        self.data.restore(data)
        self._restore_source(self.source)
        self.begun -= 1  # the second draw counts as the same iteration
        self.begin(0)
        repeated = next(self.iterator, no_batch)
        if repeated is not no_batch:
            self.iterator = itertools.chain([repeated], self.iterator)
        if first_digest != digest_of(repeated):
            self.why = f"{self.name} draws other batches each time"

    def begin(
        self, turn: int, start: int = 0, loaded: bool = False, after_end: bool = False
    ) -> None:
        """Begin an iteration after `start` batches.

        Args:
            turn: Number of the iteration within the epoch.
            start: Number of batches that are left out.
            loaded: Whether the loader has been given its state, and goes to `start` by itself.
            after_end: Whether the loader has been given the state of an end, and begins anew by
                itself.
        """
        skipped = range(self.turn + 1, turn)
        self.turn = turn
        self.over = False
        self.iterator = iter(())
        self.begun += 1
        if isinstance(self.loader, PartitionedLoader):
            self.loader.begin(self.epoch, start)
            self.iterator = iter(self.loader)
            return
        if (batches := divided(self.loader)) is not None:
            for earlier in skipped:  # for a sampler that counts its epochs
                batches.begin(self.epoch, earlier)
            batches.begin(self.epoch, turn, start)
            stay = keeps_workers(self.loader)  # workers that stay were seeded in the first epoch
            self._seed("workers", 0 if stay else self.epoch, 0 if stay else turn)
            self.iterator = iter(self.loader)
            return
        if isinstance(self.loader, DataLoader) and not self.stateful:
            end_workers(self.loader)
        plan(self.loader, self.begun - 1 - after_end, start if loaded else 0)
        self._seed("order", self.epoch, turn)
        ended = loaded and not start and self.saved["over"]
        self.iterator = self._iterate_seeded(start if loaded else 0, ended)

    def _iterate_seeded(self, first: int, ended: bool) -> Iterator:
        """Return an iterator over a loader without positions; each batch is seeded.

        Args:
            first: Number of the first batch.
            ended: Whether the loader was given the state of an end, and may have to be begun twice.
        """
        seeded = self._generators_to_seed()
        generators.reseed(seeded, number_of("order", *self.seed, self.epoch, self.turn))
        batches = iter(self.loader)
        key = (self.epoch, self.turn)
        if self.single_pass:
            first = self.batches_given
            key = ("once",)

        def draw() -> Iterator:
            nonlocal batches
            for number in itertools.count(first):
                generators.reseed(seeded, seed_all("draw", *self.seed, *key, number))
                batch = next(batches, self)
                if batch is self and ended and number == first:
                    batches = iter(self.loader)
                    batch = next(batches, self)
                if batch is self:
                    self.over = True
                    return
                self.batches_given += 1
                yield batch

        return draw()

    def _generators_to_seed(self) -> dict[str, Any]:
        """Return the generators that the loader draws from, by path.

        There are none to seed if it is a DataLoader that saves its own state.
        """
        return (
            {}
            if self.own and isinstance(self.loader, DataLoader)
            else generators.find({"loader": self._parts_that_draw()})
        )

    def _parts_that_draw(self) -> Any:
        names = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator")
        if isinstance(self.loader, DataLoader):
            return [getattr(self.loader, name, None) for name in names]
        return self.loader

    def _seed(self, purpose: str, epoch: int, turn: int) -> None:
        number = seed_all(purpose, *self.seed, epoch, turn)
        if isinstance(generator := getattr(self.loader, "generator", None), torch.Generator):
            generator.manual_seed(number)
