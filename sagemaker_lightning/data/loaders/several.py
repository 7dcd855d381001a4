"""All the loaders of an epoch; they begin at the batch that training is at."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, cast

from pytorch_lightning import Trainer
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from sagemaker_lightning.compat.lightning_loaders import PositionedLoader
from sagemaker_lightning.compat.lightning_loops import combined_loader, steps_draw_batches
from sagemaker_lightning.compat.torch_data import end_workers
from sagemaker_lightning.contract.errors import printable, with_article
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.batch_order import Batches
from sagemaker_lightning.data.deterministic import divided, is_strange, plan
from sagemaker_lightning.data.loaders import strange
from sagemaker_lightning.data.loaders.kinds import resumable
from sagemaker_lightning.data.loaders.redrawn import Redrawn
from sagemaker_lightning.data.loaders.resumable import ResumableLoader
from sagemaker_lightning.data.loaders.stateful import Stateful
from sagemaker_lightning.data.sample_seeding import Plan
from sagemaker_lightning.data.seeded_indices import seed_all
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.kinds.base import NotSaved, refusing


class EndingLoaders(PositionedLoader):
    """Several loaders; their data workers end when nobody iterates any more."""

    def leave(self, other: CombinedLoader | None = None) -> None:
        """End the workers of all loaders except those that `other` continues with."""
        self.forget_iterators()
        for loader in self.flattened:
            if other is None or not any(loader is kept for kept in other.flattened):
                end_workers(loader)

    def reset(self) -> None:
        """Forget how far the loaders are, and end their workers."""
        self.leave()


class ValidationLoaders(EndingLoaders):
    """The loaders of a validation: each batch is drawn with a seed of its own.

    The seed also covers what is drawn while the batch is moved to the device.
    """

    key: Callable[[], tuple[Any, ...]]
    """Returns the values that decide what this validation draws."""

    def seed_by(self, key: Callable[[], tuple[Any, ...]]) -> None:
        """Set what returns the values that decide what a validation draws."""
        self.key = key

    def __iter__(self) -> "ValidationLoaders":
        for loader in self.flattened:
            # Every validation draws the same, in new workers.
            if divided(loader) is None and not is_strange(loader):
                end_workers(loader)
                plan(loader, 0, 0)
        seed_all("loaders", *self.key())
        return super().__iter__()

    def __next__(self) -> Any:
        item = super().__next__()
        seed_all("batch", *self.key(), *item[1:])
        return item


class TrainingLoaders(EndingLoaders):
    """The training loaders: they begin at the batch that training is at.

    They begin once that batch is known. Lightning begins its loaders when it sets them up. That may
    be before a checkpoint is loaded: a module that asks for `estimated_stepping_batches` has them
    set up. Data workers would then start, and draw, at the first batch of the first epoch.
    """

    seed: tuple[Any, ...]
    rank: int
    resumables: list[ResumableLoader]
    plans: list[Plan]
    """Those of the loaders whose samples are seeded."""
    is_placed = False
    drawn = 0
    """Number of batches of the epoch that were drawn."""
    why = ""
    """Why no run can be resumed within the epoch; "" if one can."""
    seeds_batches = True
    """Whether something may be drawn between a batch and its step, which has a seed of its own."""

    def prepare(self, seed: tuple[Any, ...], rank: int) -> None:
        """Record what the loaders hold before anything is drawn from them.

        Args:
            seed: Decides what is drawn.
            rank: This rank.
        """
        self.seed = seed
        self.rank = rank
        mode = self.mode if len(self.flattened) > 1 else ""
        self.resumables = [
            resumable(loader, (*self.seed, number) if number else self.seed, mode)
            for number, loader in enumerate(self.flattened)
        ]
        plans = [getattr(loader, "planned", None) for loader in self.flattened]
        self.plans = [each for each in plans if isinstance(each, Plan)]

    def epoch_begins(self, epoch: int) -> None:
        """Seed what a hook draws from the training data when an epoch begins.

        It then draws what belongs to this epoch.
        """
        for each in self.resumables:
            each.epoch_begins(epoch)

    def give_back(self, states: Mapping[str, Any]) -> None:
        """Restore the state that the loaders had at an epoch's end.

        It is called before the hooks that begin the next epoch change that state.
        """
        with refusing(runs_users_code=True):
            self._choose_kinds(states["loaders"])
            for each, saved in zip(self.resumables, states["loaders"], strict=False):
                each.give_back(saved)

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
        with refusing(runs_users_code=True):
            ahead = values.decode(states["ahead"]) if states else []
            is_first = rank_zero_only.rank == 0  # type: ignore[attr-defined]  # Lightning sets it
            if done and states and states["why"] and is_first:
                log.warning(
                    f"{printable(states['why'])[:500]}: the rest of this epoch differs from that "
                    "of an uninterrupted run"
                )
            # A step may draw any number of batches.
            if done and states and steps_draw_batches(fetcher):
                done = states["drawn"]
            self.place = (epoch, done + len(ahead))
            self.is_placed = True
            all_saved = states["loaders"] if states else []
            self._choose_kinds(all_saved)
            for each, saved in self._with_states(all_saved):
                each.prepare(epoch, saved, proves)
        prefetch_batches = getattr(fetcher, "prefetch_batches", 0)
        if ahead:
            fetcher.prefetch_batches = 0
        iter(fetcher)
        if ahead:
            fetcher.prefetch_batches = prefetch_batches
            fetcher.batches = ahead
            fetcher.fetched = len(ahead)
        for each in self.resumables:
            each.settle()
        self.why = next(
            filter(None, (each.why for each in self.resumables)), ""
        ) or self._why_ahead_is_unsavable(fetcher)
        return done

    def _with_states(
        self, all_saved: list[Mapping[str, Any]]
    ) -> list[tuple[ResumableLoader, Mapping[str, Any] | None]]:
        """Return each loader, and what a checkpoint has of it; None if it has nothing."""
        return list(itertools.zip_longest(self.resumables, all_saved[: len(self.resumables)]))

    def _choose_kinds(self, all_saved: list[Mapping[str, Any]]) -> None:
        """Draw again what cannot go to a position by its own state; leave alone what is strange.

        A checkpoint says how its run has chosen.
        """
        for number, (each, saved) in enumerate(self._with_states(all_saved)):
            if isinstance(each, Stateful) and (
                saved["own"] is None if saved else not each.begun and not each.is_proved()
            ):
                each = Redrawn(each.loader, each.seed, each.mode)
            if isinstance(each, Redrawn) and (
                reason := each.strange_because or strange.known_reason(saved)
            ):
                each = strange.Strange(each.loader, each.seed, each.mode, reason)
            self.resumables[number] = each

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
        if any(isinstance(each, Stateful) for each in self.resumables):
            try:
                values.encode(getattr(fetcher, "batches", []))
            except NotSaved as error:
                return f"a batch holds {with_article(error.kind)}, which cannot be saved"
        return ""

    def __iter__(self) -> "TrainingLoaders":
        if not self.is_placed:
            self.combine(self.flattened)
            return self
        epoch, self.drawn = self.place
        self.combine(self.resumables)
        for each in self.resumables:
            each.go_to(self.drawn)
        self.continue_with(
            self.drawn,
            [each.iterator for each in self.resumables],
            [each.turn > 0 for each in self.resumables],
        )
        self.place = (epoch, 0)
        self.epoch = epoch
        return self

    def __next__(self) -> Any:
        if not self.is_placed:
            raise StopIteration
        self._note_seed_to_come(True)  # that of the batch, or else of its step
        try:
            item = super().__next__()
        finally:
            self._note_seed_to_come(False)
        if self.seeds_batches:
            seed_all("batch", *self.seed, self.epoch, self.drawn, self.rank)
        self.drawn += 1
        return item

    def _note_seed_to_come(self, comes: bool) -> None:
        for plan_of_loader in self.plans:
            plan_of_loader.is_followed_by_seed = comes

    def reset(self) -> None:
        """Forget how far the loaders are; they need `begin` before the next epoch."""
        super().reset()
        self.is_placed = False

    def leave(self, other: CombinedLoader | None = None) -> None:
        """End the workers of all loaders except those that `other` continues with."""
        for each in self.resumables:
            each.stop()
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
            if within and any(each.keeps_ahead for each in self.resumables)
            else []
        )
        try:
            ahead = values.encode(ahead)
        except NotSaved:
            ahead = values.encode([])
        return {
            "loaders": [each.states(within) for each in self.resumables],
            "ahead": ahead,
            "drawn": self.drawn,
            "why": self.why,
        }


def training_loaders(trainer: Trainer) -> TrainingLoaders:
    """Return what gives the training batches, once it is set up."""
    return cast(TrainingLoaders, combined_loader(trainer))  # data/seeding.py sets its class
