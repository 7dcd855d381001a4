"""The data path: a set that stays in memory, batches cut from it by index, and nothing left to chance.

Which sample comes when, and how it is augmented, is a pure function of (seed, epoch, position in the epoch). No
worker, process or clock enters it, so that a resumed run sees what an uninterrupted one would have seen, and so does
a run with another number of workers. Whole batches are augmented and normalised at once, on the device.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    def of_epoch(cls, seed: int, epoch: int, size: int, flip: bool) -> "Augmentation":
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


class ResidentLoader:
    """Batches of a resident set for one rank: (float32 [n, C, H, W], int64 [n]) on the set's device.

    Global batch b of an epoch is the positions [b * batch_size * world_size, (b + 1) * batch_size * world_size) of
    that epoch's order, and each rank takes its slice of it; with `drop_last`, the remainder is left out.
    `batches_done`, the training batches finished over all epochs, tells where an iteration starts; it defaults to 0.
    """

    def __init__(
        self,
        data: ResidentSet,
        *,
        batch_size: int,
        normalize: Normalize,
        seed: int = 0,
        shuffle: bool = False,
        augment: bool = False,
        flip: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        limit: Callable[[int], int] = lambda batches: batches,
        batches_done: Callable[[], int] = lambda: 0,
    ) -> None:
        self.data, self.normalize, self.seed = data, normalize, seed
        self.shuffle, self.augment, self.flip = shuffle, augment, flip
        self.rank, self.world_size, self.global_batch = rank, world_size, batch_size * world_size
        whole, rest = divmod(len(data), self.global_batch)
        # The remainder is a smaller batch of its own; if it has fewer samples than there are ranks, which would leave
        # a rank without any, the last whole batch takes it in.
        self.batches = whole + (rest >= world_size and not drop_last)
        self.end = self.batches * self.global_batch if drop_last else len(data)
        if not self.batches:
            raise ValueError(
                f"--data.batch_size: {batch_size} on {world_size} ranks is more than the {len(data)} samples there are"
            )
        self.limit, self.batches_done = limit, batches_done

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, first = divmod(self.batches_done(), max(1, self.limit(self.batches)))
        size, device = len(self.data), self.data.images.device
        draw = generator("order", self.seed, epoch)
        order = torch.randperm(size, generator=draw) if self.shuffle else torch.arange(size)
        choices = Augmentation.of_epoch(self.seed, epoch, size, self.flip) if self.augment else None
        for batch in range(first, self.batches):
            last = batch == self.batches - 1
            whole = torch.arange(batch * self.global_batch, self.end if last else (batch + 1) * self.global_batch)
            positions = whole.tensor_split(self.world_size)[self.rank]
            samples = self.data.subset(order[positions].to(device))
            images = choices.apply(samples.images, positions) if choices else samples.images
            yield self.normalize(images), samples.labels
