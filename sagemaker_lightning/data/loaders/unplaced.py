"""A loader without positions: each of its batches is drawn with a seed of its own."""

import itertools
from collections.abc import Collection, Iterator
from typing import Any

from lightning_fabric.utilities.data import sized_len
from torch.utils.data import DataLoader

from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.data.deterministic import knows_its_end, plan
from sagemaker_lightning.data.loaders import strange
from sagemaker_lightning.data.loaders.resumable import NO_BATCH, ResumableLoader
from sagemaker_lightning.data.seeded_indices import number_of, seed_all
from sagemaker_lightning.state import generators


class UnplacedLoader(ResumableLoader):
    """A loader that begins at its first batch, or where its own state leads."""

    seeds = True
    """Whether what it draws is seeded."""
    of_rank: tuple[int, Collection[str]] = 0, ()
    """This rank, and the paths of generators that had each rank's own state at the start."""

    def _iterate_seeded(self, first: int = 0, ended: bool = False) -> Iterator[Any]:
        """Return an iterator that seeds each batch.

        Args:
            first: Number of the first batch.
            ended: Whether the loader was given the state of an end, and may have to be begun twice.
        """
        self._seed("order", self.epoch, self.turn)
        seeded = self._generators_to_seed()
        generators.reseed(seeded, number_of("order", *self.seed, self.epoch, self.turn))
        threads = strange.users_threads(self.loader)
        batches = iter(self.loader)
        if strange.users_threads(self.loader) - threads:
            self.seeds = False  # a thread draws already
        key = self._key()
        # Lightning asks a loader with a length for no batch after its last one.
        length = None if knows_its_end(self.loader) else sized_len(self.loader)

        def draw() -> Iterator[Any]:
            nonlocal batches
            for number in itertools.count(first):
                if self.seeds:
                    generators.reseed(seeded, seed_all("draw", *self.seed, *key, number))
                batch = next(batches, NO_BATCH)
                if batch is NO_BATCH and ended and number == first:
                    plan(self.loader, self.begun - 1, 0)
                    batches = iter(self.loader)
                    batch = next(batches, NO_BATCH)
                if batch is NO_BATCH:
                    self.over = True
                    return
                self._batch_is_given()
                self.over = number + 1 == length
                yield batch

        return draw()

    def other_workers(self, has: str, before: Any) -> UserError:
        """Return the error for another number of data workers than before the interruption.

        Args:
            has: What the loader has done with the number of before.
            before: That number, as a checkpoint has it.
        """
        number = printable(str(before))[:20]
        return UserError(
            f"{self.name} {has} with {number} data workers, now there are {self.workers}; "
            f"continue with num_workers={number}"
        )

    def _key(self) -> tuple[Any, ...]:
        """Return what decides the draws of a batch, with its number."""
        return self.epoch, self.turn

    def _batch_is_given(self) -> None:
        """Note that a batch was drawn."""

    def _generators_to_seed(self) -> dict[str, Any]:
        """Return the generators that the loader draws from, by what decides their seeds.

        Generators that were alike on all ranks, by which these share samples out, stay so.
        """
        rank, paths = self.of_rank
        return {
            f"{path} of rank {rank}" if path in paths else path: generator
            for path, generator in self.generators().items()
        }

    def generators(self) -> dict[str, Any]:
        """Return the generators that the loader draws from, by path.

        There are none to seed if it is a DataLoader that saves its own state.
        """
        if not isinstance(self.loader, DataLoader):
            return generators.find({"loader": self.loader})
        names = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator")
        parts = [getattr(self.loader, name, None) for name in names]
        return {} if self.own else generators.find({"loader": parts})
