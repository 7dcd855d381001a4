"""A loader whose batches are a function of (seed, epoch, position): it begins at any batch."""

import operator
from collections.abc import Mapping
from typing import Any

from lightning_fabric.utilities.data import sized_len

from sagemaker_lightning.data.batch_order import Batches, PlacedSampler
from sagemaker_lightning.data.deterministic import divided, keeps_workers
from sagemaker_lightning.data.loaders.resumable import ResumableLoader
from sagemaker_lightning.data.partition import PartitionedLoader
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.state.graph import values


class Positioned(ResumableLoader):
    """A DataLoader whose batch order is ours, or a loader that shares its batches by itself.

    If the user's class saves a state, too, that is saved beside the position.
    """

    def __init__(self, loader: Any, seed: tuple[Any, ...], mode: str) -> None:
        super().__init__(loader, seed, mode, has_state(loader))

    @property
    def keeps_ahead(self) -> bool:
        """Whether training changes the order: what was drawn before cannot be drawn again."""
        batches = divided(self.loader)
        return self.own or (isinstance(batches, Batches) and batches.follows and not self.workers)

    def epoch_begins(self, epoch: int) -> None:
        """Have the order begin as if the loader had not been used before."""
        if isinstance(batches := divided(self.loader), Batches):
            batches.rewind(epoch)

    def give_back(self, saved: Mapping[str, Any], data: str = "now") -> None:
        """Restore the state of the order, of the data, and of the loader."""
        super().give_back(saved, data)
        if isinstance(batches := divided(self.loader), Batches):
            epoch, turn, batch = map(operator.index, saved["at"])
            batches.at = epoch, turn, batch  # for a hook that iterates over it after training
        if self.own and saved["own"] is not None:
            self.loader.load_state_dict(values.decode(saved["own"]))

    def prepare(self, epoch: int, saved: Mapping[str, Any] | None, must_prove: bool) -> None:
        """Prepare for an epoch; UserError if the run that is resumed had another order in it."""
        sampler = self._placed_sampler
        if saved and saved.get("marks") and isinstance(sampler, PlacedSampler):
            numbers = {name: operator.index(number) for name, number in saved["marks"].items()}
            sampler.check_same(numbers, bool(saved["within"]))
        super().prepare(epoch, saved, must_prove)

    def states(self, within: bool) -> dict[str, Any]:
        """Return what `prepare` takes as `saved`."""
        own = values.encode(self.loader.state_dict()) if self.own else None
        sampler = self._placed_sampler
        marks = sampler.marks if isinstance(sampler, PlacedSampler) else None
        batches = divided(self.loader)
        at = batches.at if isinstance(batches, Batches) else (0, 0, 0)
        return super().states(within) | {"own": own, "marks": marks, "at": list(at)}

    @property
    def _placed_sampler(self) -> Any:
        return getattr(divided(self.loader), "sampler", None)

    def go_to(self, done: int) -> None:
        """Begin the iteration after `done` batches; in "max_size_cycle", it may be a later one."""
        length = sized_len(self.loader)
        turn = 0
        if length and self.mode == "max_size_cycle" and done:
            turn, done = divmod(done - 1, length)
            done += 1
        elif length:
            done = min(done, length)
        self.begin(turn, done)

    def begin(self, turn: int, start: int = 0) -> None:
        """Begin an iteration after `start` batches."""
        skipped = range(self.turn + 1, turn)
        self._begin_turn(turn)
        batches = divided(self.loader)
        if isinstance(batches, PartitionedLoader):
            batches.begin(self.epoch, start)
        else:
            assert batches is not None  # this class is for loaders whose order is ours
            for earlier in skipped:  # for a sampler that counts its epochs
                batches.begin(self.epoch, earlier, len(batches))
            batches.begin(self.epoch, turn, start)
            if not self.workers:
                self.settle()  # the order is drawn, and samples come from the data as they are now
            stay = keeps_workers(self.loader)  # workers that stay were seeded in the first epoch
            self._seed("workers", 0 if stay else self.epoch, 0 if stay else turn)
        self.iterator = iter(self.loader)
