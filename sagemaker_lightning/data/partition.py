"""How the positions of an epoch are divided into batches and among ranks, and how far a rank has come in them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Division:
    """How the positions 0 to `size` - 1 of an epoch are cut into global batches, and these into a slice for each rank.

    Global batch b is the positions [b * batch_size * ranks, (b + 1) * batch_size * ranks). The remainder is a smaller
    batch of its own; if that would leave one of several ranks with one sample, of which batch norm has no statistics,
    or with none, the last whole batch takes it in; with `drop_last`, it is left out. Global batch 0 begins at position
    `start`.
    """

    size: int
    batch_size: int
    ranks: int
    drop_last: bool = False
    start: int = 0

    @property
    def batches(self) -> int:
        """Number of global batches."""
        whole, rest = divmod(self.size - self.start, self.batch_size * self.ranks)
        each = min(2, self.batch_size) if whole and self.ranks > 1 else 1
        return whole + (rest >= each * self.ranks and not self.drop_last)

    def positions(self, batch: int) -> range:
        """Return the positions of a global batch."""
        length = self.batch_size * self.ranks
        first = self.start + batch * length
        last = batch == self.batches - 1 and not self.drop_last
        return range(first, self.size if last else first + length)

    def sizes(self, batch: int) -> list[int]:
        """Return the number of samples of each rank's slice of a global batch; they differ by one at most."""
        each, rest = divmod(len(self.positions(batch)), self.ranks)
        return [each + (rank < rest) for rank in range(self.ranks)]

    def part(self, batch: int, rank: int) -> range:
        """Return the positions of a rank's slice; the first ranks have those that do not divide evenly."""
        positions = self.positions(batch)
        each, rest = divmod(len(positions), self.ranks)
        first = rank * each + min(rank, rest)
        return positions[first : first + each + (rank < rest)]


@dataclass
class Course:
    """How a rank goes through the epochs of a `Division`, and from where it goes on after an interruption.

    An epoch that was begun by another number of ranks ends with batches of as many samples as all others have: its
    last ones are numbered as in every epoch, the first of them begins at the position that was reached.
    """

    division: Division
    begun: tuple[int, int] = (-1, 0)
    """The epoch that was begun so, and the position that was reached in it."""

    def of_epoch(self, epoch: int) -> tuple[Division, int]:
        """Return how an epoch's positions are divided, and the number of the batch that is the division's first."""
        if epoch != self.begun[0]:
            return self.division, 0
        rest = replace(self.division, start=self.begun[1])
        return rest, self.division.batches - rest.batches

    def reached(self, epoch: int, batch: int) -> int:
        """Return the position that is reached when so many batches of an epoch are done."""
        division, first = self.of_epoch(epoch)
        return division.positions(batch - 1 - first).stop if batch > first else division.start


class PartitionedLoader(ABC):
    """A loader that shares its batches out among the ranks by itself, and begins where it is told to."""

    course: Course | None
    """How its rank goes through the epochs; None where the nodes have different data."""

    @abstractmethod
    def sizes(self, epoch: int, batch: int) -> list[int]:
        """Return the number of samples that each rank of the job has in batch `batch` of epoch `epoch`."""

    @abstractmethod
    def begin(self, epoch: int, batch: int) -> None:
        """Have the next iteration start at a batch of an epoch."""
