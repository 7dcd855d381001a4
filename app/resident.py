"""The data path: a set that stays in memory, batches cut from it by index, and nothing left to chance.

Which sample comes when, and how it is augmented, is a pure function of (seed, epoch, position in the epoch). No
worker, process or clock enters it, so that a resumed run sees what an uninterrupted one would have seen, and so does
a run with another number of workers. Whole batches are augmented and normalised at once, on the device.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PADDING = 4  # pixels around the image that a random crop may reach into, as in the ResNet paper (arXiv:1512.03385, 4.2)


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


def generator(*key: int | str) -> torch.Generator:
    """Return a CPU generator seeded by the whole of `key`; alike on every machine and in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Augmentation:
    """Random crop with padding, then a horizontal flip; the choices of one epoch, by position in the epoch."""

    top: Tensor  # int64 [N], 0 to 2 * PADDING
    left: Tensor  # int64 [N], 0 to 2 * PADDING
    flip: Tensor  # bool [N]

    @classmethod
    def of_epoch(cls, seed: int | str, epoch: int, size: int, flip: bool) -> "Augmentation":
        """Draw the choices of an epoch of `size` samples; without `flip`, none is flipped."""
        draw = generator("augment", seed, epoch)
        top, left = torch.randint(2 * PADDING + 1, (2, size), generator=draw)
        return cls(top, left, torch.rand(size, generator=draw) < (0.5 if flip else 0.0))

    def apply(self, images: Tensor, positions: Tensor) -> Tensor:
        """Return uint8 `images` [n, C, H, W] cropped and flipped with the choices of `positions`, int64 [n]."""
        height, width = images.shape[-2:]
        padded = torch.nn.functional.pad(images, [PADDING] * 4)
        # A view of every crop that there is, [n, C, 2 * PADDING + 1, 2 * PADDING + 1, H, W].
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        top, left, flip = (choice[positions].to(images.device) for choice in (self.top, self.left, self.flip))
        cropped = windows[torch.arange(len(images), device=images.device), :, top, left]
        return torch.where(flip[:, None, None, None], cropped.flip(-1), cropped)


class Normalize:
    """uint8 [n, C, H, W] to float32: divided by 255, then (x - mean) / std per channel if these are given."""

    def __init__(self, mean: tuple[float, ...] | None = None, std: tuple[float, ...] | None = None) -> None:
        self.mean, self.std = (torch.tensor(value)[:, None, None] if value else None for value in (mean, std))

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images as the network wants them, on their device; bit for bit what torchvision computes."""
        images = images.float().div_(255)
        if self.mean is None:
            return images
        return images.sub_(self.mean.to(images.device)).div_(self.std.to(images.device))


@dataclass(frozen=True)
class Division:
    """How the positions 0 to `size` - 1 of an epoch are cut into global batches, and these into a slice for each rank.

    Global batch b is the positions [b * batch_size * ranks, (b + 1) * batch_size * ranks). The remainder is a smaller
    batch of its own; if it has fewer samples than there are ranks, which would leave a rank without any, the last whole
    batch takes it in; with `drop_last`, it is left out. Global batch 0 begins at position `start`.
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
        return whole + (rest >= self.ranks and not self.drop_last)

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

    def slice(self, batch: int, rank: int) -> Tensor:
        """Return the positions of a rank's slice, int64 [n]."""
        positions = self.positions(batch)
        return torch.arange(positions.start, positions.stop).tensor_split(self.ranks)[rank]


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
    `position` tells at which epoch and batch an iteration starts; it defaults to the first of both.
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
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        shards: Sequence[tuple[int, int]] = (),
        position: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self.data, self.normalize, self.seed, self.batch_size = data, normalize, seed, batch_size
        self.shuffle, self.augment, self.flip, self.rank = shuffle, augment, flip, rank
        self.division = Division(len(data), batch_size, world_size, drop_last)
        self.divisions = [Division(size, batch_size, ranks, drop_last) for size, ranks in shards] or [self.division]
        self.batches = min(division.batches for division in self.divisions)
        if not self.batches:
            least = min(self.divisions, key=lambda division: division.batches)
            raise ValueError(
                f"--data.batch_size: {batch_size} on {least.ranks} ranks is more than the {least.size} samples there "
                f"are{' on a host' if shards else ''}"
            )
        self.course, self.position = None if shards else Course(self.division), position

    def __len__(self) -> int:
        return self.batches

    def sizes(self, epoch: int, batch: int) -> list[int]:
        """Return the number of samples that each rank of the job has in batch `batch` of epoch `epoch`."""
        if not self.course:
            return [size for division in self.divisions for size in division.sizes(batch)]
        division, first = self.course.of_epoch(epoch)
        return division.sizes(batch - first)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, start = self.position()
        size, device = len(self.data), self.data.images.device
        draw = generator("order", self.seed, epoch)
        order = torch.randperm(size, generator=draw) if self.shuffle else torch.arange(size)
        choices = Augmentation.of_epoch(self.seed, epoch, size, self.flip) if self.augment else None
        division, first = self.course.of_epoch(epoch) if self.course else (self.division, 0)
        for batch in range(start, self.batches):
            positions = division.slice(batch - first, self.rank)
            samples = self.data.subset(order[positions].to(device))
            images = choices.apply(samples.images, positions) if choices else samples.images
            yield self.normalize(images), samples.labels
