"""Crops, flips, normalises and cuts out a whole batch of images at once.

Each random choice is a pure function of (seed, epoch, position in the epoch).
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

# Pixels around the image that a random crop may include, as in the ResNet paper (arXiv:1512.03385,
# 4.2).
PADDING = 4


def generator(*key: int | str) -> torch.Generator:
    """Return a CPU generator seeded by the whole of `key`.

    It is the same on every machine and in every process.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Augmentation:
    """The random choices for N images.

    They are a crop out of the padded image, a horizontal flip, and the place of Cutout's square.
    """

    top: Tensor  # int64 [N], 0 to 2 * PADDING
    left: Tensor  # int64 [N], 0 to 2 * PADDING
    flip: Tensor  # bool [N]
    centre: Tensor  # float32 [N, 2], 0 to 1: row and column of the square's centre

    @classmethod
    def of_epoch(cls, seed: int | str, epoch: int, size: int, flip: bool) -> "Augmentation":
        """Draw the choices for an epoch of `size` samples, by position, on the CPU.

        Without `flip`, no image is flipped.
        """
        draw = generator("augment", seed, epoch)
        top, left = torch.randint(2 * PADDING + 1, (2, size), generator=draw)
        flipped = torch.rand(size, generator=draw) < (0.5 if flip else 0.0)
        return cls(top, left, flipped, torch.rand(size, 2, generator=draw))

    def __getitem__(self, positions: slice) -> "Augmentation":
        """Return the choices for some positions."""
        return Augmentation(*(choice[positions] for choice in self._choices))

    def to(self, device: torch.device) -> "Augmentation":
        """Return the choices on `device`."""
        return Augmentation(*(choice.to(device) for choice in self._choices))

    def crop(self, images: Tensor) -> Tensor:
        """Return images, uint8 [N, C, H, W], cropped and flipped."""
        height, width = images.shape[-2:]
        padded = torch.nn.functional.pad(images, [PADDING] * 4)
        # A view of every possible crop, [N, C, 2 * PADDING + 1, 2 * PADDING + 1, H, W].
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        cropped = windows[torch.arange(len(images), device=images.device), :, self.top, self.left]
        return torch.where(self.flip[:, None, None, None], cropped.flip(-1), cropped)

    def cut(self, images: Tensor, side: int) -> Tensor:
        """Set a square of `side` pixels in each image to 0, in place; return the images.

        The images are normalised, float32 [N, C, H, W], so that 0 is the mean colour. This is
        Cutout (arXiv:1708.04552, 3.2): the centre may be anywhere, so some of the square may be
        outside.
        """
        inside = []
        for size, centre in zip(images.shape[-2:], self.centre.unbind(1), strict=True):
            first = (centre * size).long() - side // 2
            offset = torch.arange(size, device=images.device) - first[:, None]
            inside.append((offset >= 0) & (offset < side))
        return images.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)

    @property
    def _choices(self) -> tuple[Tensor, ...]:
        return self.top, self.left, self.flip, self.centre


class Normalize:
    """Converts images, uint8 [n, C, H, W], to float32, scaled or normalised.

    The values are divided by 255. If `mean` and `std` are given, the result is (x - mean) / std for
    each channel.
    """

    def __init__(
        self, mean: tuple[float, ...] | None = None, std: tuple[float, ...] | None = None
    ) -> None:
        self.mean, self.std = (
            torch.tensor(value)[:, None, None] if value else None for value in (mean, std)
        )

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images as the network needs them, on their device.

        The result is bit for bit what torchvision computes.
        """
        images = images.float().div_(255)
        if self.mean is None:
            return images
        self.mean = self.mean.to(images.device)
        self.std = self.std.to(images.device)
        return images.sub_(self.mean).div_(self.std)
