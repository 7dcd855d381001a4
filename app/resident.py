"""The data path: a set that stays in memory, batches cut from it by index, and nothing left to chance.

Which sample comes when, and how it is augmented, is a pure function of (seed, epoch, position in the epoch). No
worker, process or clock enters it, so that a resumed run sees what an uninterrupted one would have seen, and so does
a run with another number of workers. Whole batches are augmented and normalised at once, on the device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.augmentation import Augmentation, Normalize, generator
from app.errors import UserError


@dataclass(frozen=True)
class ResidentSet:
    """Images, uint8 [N, C, H, W], and their labels, int64 [N], on one device."""

    images: Tensor
    labels: Tensor

    def subset(self, index: Tensor) -> "ResidentSet":
        """Return the samples of `index`, int64 [n], copied."""
        return ResidentSet(self.images[index], self.labels[index])

    def to(self, device: torch.device) -> "ResidentSet":
        """Return the set on `device`; the same tensors if they are there."""
        return ResidentSet(self.images.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


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


class ResidentLoader:
    """Batches of a resident set for one rank: (float32 [n, C, H, W], int64 [n]) on the set's device.

    `rank` of `world_size` ranks takes its slice of each global batch of `data` (see Division). Where the nodes have
    different data, these are the ranks of this node, there is no `course`, and `shards` has (samples, ranks) of every
    node in the order of their ranks: all nodes make as many batches as the one that has the fewest.
    `position` tells at which epoch and batch an iteration starts; it defaults to the first of both. Once `begin` has
    told that, it tells the epoch alone: an iteration of somebody else's starts at its first batch.
    """

    def __init__(
        self,
        data: ResidentSet,
        *,
        batch_size: int,
        normalize: Normalize,
        seed: int | str = 0,
        shuffle: bool = False,
        augment: bool = False,
        flip: bool = False,
        cutout: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        shards: Sequence[tuple[int, int]] = (),
        position: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self.data, self.normalize, self.seed, self.batch_size = data, normalize, seed, batch_size
        self.shuffle, self.augment, self.flip, self.cutout, self.rank = shuffle, augment, flip, cutout, rank
        self.division = Division(len(data), batch_size, world_size, drop_last)
        self.divisions = [Division(size, batch_size, ranks, drop_last) for size, ranks in shards] or [self.division]
        self.batches = min(division.batches for division in self.divisions)
        if not self.batches:
            least = min(self.divisions, key=lambda division: division.batches)
            raise UserError(
                f"--data.batch_size: {batch_size} on {least.ranks} ranks is more than the {least.size} samples there "
                f"are{' on a host' if shards else ''}"
            )
        self.course, self.position = None if shards else Course(self.division), position
        self.at: tuple[int, int] | None = None  # epoch and batch at which the next iteration starts
        self.told = False

    def __len__(self) -> int:
        return self.batches

    def sizes(self, epoch: int, batch: int) -> list[int]:
        """Return the number of samples that each rank of the job has in batch `batch` of epoch `epoch`."""
        if not self.course:
            return [size for division in self.divisions for size in division.sizes(batch)]
        division, first = self.course.of_epoch(epoch)
        return division.sizes(batch - first)

    def begin(self, epoch: int, batch: int) -> None:
        """Have the next iteration start at a batch of an epoch."""
        self.at, self.told = (epoch, batch), True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        at, self.at = self.at, None
        return self._batches(at)

    def _batches(self, at: tuple[int, int] | None) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, start = at or self.position()
        if self.told and not at:
            start = 0
        size, device = len(self.data), self.data.images.device
        order = torch.arange(size)
        if self.shuffle:
            order = torch.randperm(size, generator=generator("order", self.seed, epoch))
        order = order.to(device)  # of the whole epoch, at once: nothing is left to send to a GPU while it trains
        choices = None
        if self.augment:
            choices = Augmentation.of_epoch(self.seed, epoch, size, self.flip).to(device)
        division, first = self.course.of_epoch(epoch) if self.course else (self.division, 0)
        for batch in range(start, self.batches):
            part = division.part(batch - first, self.rank)
            part = slice(part.start, part.stop)
            samples = self.data.subset(order[part])
            images = self.normalize(choices[part].crop(samples.images) if choices else samples.images)
            yield choices[part].cut(images, self.cutout) if choices and self.cutout else images, samples.labels
