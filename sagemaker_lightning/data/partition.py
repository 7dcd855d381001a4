"""How an epoch's positions are divided into batches and among ranks.

And how far a rank has come in them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class BatchDivision:
    """How an epoch's positions are cut into batches, and these into ranks' slices.

    The positions are 0 to `size` - 1. Global batch b is the positions [b * batch_size * ranks, (b +
    1) * batch_size * ranks). The remainder is a smaller batch of its own. If that would leave one
    of several ranks with one sample, from which batch norm cannot compute statistics, or with none,
    the last whole batch takes the remainder in. With `drop_last`, the remainder is left out. Global
    batch 0 begins at position `start`.
    """

    size: int
    batch_size: int
    ranks: int
    drop_last: bool = False
    start: int = 0

    @cached_property
    def batches(self) -> int:
        """Number of global batches."""
        whole, rest = divmod(self.size - self.start, self.batch_size * self.ranks)
        least = min(2, self.batch_size) if whole and self.ranks > 1 else 1
        return whole + (rest >= least * self.ranks and not self.drop_last)

    def positions(self, batch: int) -> range:
        """Return the positions of a global batch."""
        length = self.batch_size * self.ranks
        first = self.start + batch * length
        last = batch == self.batches - 1 and not self.drop_last
        return range(first, self.size if last else first + length)

    def sizes(self, batch: int) -> list[int]:
        """Return the number of samples of each rank's slice of a global batch.

        The numbers differ by at most one.
        """
        each, rest = divmod(len(self.positions(batch)), self.ranks)
        return [each + (rank < rest) for rank in range(self.ranks)]

    def part(self, batch: int, rank: int) -> range:
        """Return the positions of a rank's slice of a global batch.

        The first ranks get one more if the positions do not divide evenly.
        """
        positions = self.positions(batch)
        each, rest = divmod(len(positions), self.ranks)
        first = rank * each + min(rank, rest)
        return positions[first : first + each + (rank < rest)]


@dataclass
class EpochPlan:
    """How a rank goes through the epochs of a `BatchDivision`, and where it resumes.

    An epoch may have been begun by another number of ranks. Its remaining batches then have as many
    samples as all others. They are numbered so that the last batch has the number that it has in
    every epoch, and the first of them begins at the position that was reached.
    """

    division: BatchDivision
    begun: tuple[int, int] = (-1, 0)
    """The epoch that another number of ranks began, and the position that it reached."""

    def continue_from(self, epoch: int, position: int) -> None:
        """Continue an epoch that another number of ranks began, at the position it reached."""
        self.begun = epoch, position

    def of_epoch(self, epoch: int) -> tuple[BatchDivision, int]:
        """Return an epoch's division, and the number of the division's first batch."""
        if epoch != self.begun[0]:
            return self.division, 0
        rest = replace(self.division, start=self.begun[1])
        return rest, self.division.batches - rest.batches

    def reached(self, epoch: int, batch: int) -> int:
        """Return the position that is reached after `batch` batches of an epoch."""
        division, first = self.of_epoch(epoch)
        return division.positions(batch - 1 - first).stop if batch > first else division.start


class PartitionedLoader(ABC):
    """A loader that shares its batches among ranks itself, and begins at any batch."""

    epoch_plan: EpochPlan | None
    """How its rank goes through the epochs; None if the nodes have different data."""

    @abstractmethod
    def sizes(self, epoch: int, batch: int) -> list[int]:
        """Return the number of samples of each of the job's ranks in a batch."""

    @abstractmethod
    def begin(self, epoch: int, batch: int) -> None:
        """Have the next iteration start at batch `batch` of epoch `epoch`."""
