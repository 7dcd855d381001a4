"""What is done to a batch of images on its way to the network: cropped, flipped, normalised, cut out; all at once.

Each choice is a pure function of (seed, epoch, position in the epoch).
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = 4  # pixels around the image that a random crop may reach into, as in the ResNet paper (arXiv:1512.03385, 4.2)


def generator(*key: int | str) -> torch.Generator:
    """Return a CPU generator seeded by the whole of `key`; alike on every machine and in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Augmentation:
    """The choices for N images: a crop out of the padded image, a horizontal flip, and where Cutout's square is."""

    top: Tensor  # int64 [N], 0 to 2 * PADDING
    left: Tensor  # int64 [N], 0 to 2 * PADDING
    flip: Tensor  # bool [N]
    centre: Tensor  # float32 [N, 2], 0 to 1: row and column of the square's centre

    @classmethod
    def of_epoch(cls, seed: int | str, epoch: int, size: int, flip: bool) -> "Augmentation":
        """Draw the choices of an epoch of `size` samples, by position, on the CPU; without `flip`, none is flipped."""
        draw = generator("augment", seed, epoch)
        top, left = torch.randint(2 * PADDING + 1, (2, size), generator=draw)
        flipped = torch.rand(size, generator=draw) < (0.5 if flip else 0.0)
        return cls(top, left, flipped, torch.rand(size, 2, generator=draw))

    def __getitem__(self, part: slice) -> "Augmentation":
        """Return the choices of some positions."""
        return Augmentation(*(choice[part] for choice in self._choices))

    def to(self, device: torch.device) -> "Augmentation":
        """Return the choices on `device`."""
        return Augmentation(*(choice.to(device) for choice in self._choices))

    def crop(self, images: Tensor) -> Tensor:
        """Return images, uint8 [N, C, H, W], cropped and flipped."""
        height, width = images.shape[-2:]
        padded = torch.nn.functional.pad(images, [PADDING] * 4)
        # A view of every crop that there is, [N, C, 2 * PADDING + 1, 2 * PADDING + 1, H, W].
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        cropped = windows[torch.arange(len(images), device=images.device), :, self.top, self.left]
        return torch.where(self.flip[:, None, None, None], cropped.flip(-1), cropped)

    def cut(self, images: Tensor, side: int) -> Tensor:
        """Return normalised images, float32 [N, C, H, W], with a square of `side` pixels at 0, the mean colour.

        Cutout (arXiv:1708.04552, 3.2): the centre may be anywhere, so that some of the square may be outside.
        """
        inside = []
        for size, centre in zip(images.shape[-2:], self.centre.unbind(1), strict=True):
            first = (centre * size).long() - side // 2
            place = torch.arange(size, device=images.device) - first[:, None]
            inside.append((place >= 0) & (place < side))
        return images.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)

    @property
    def _choices(self) -> tuple[Tensor, ...]:
        return self.top, self.left, self.flip, self.centre


class Normalize:
    """uint8 [n, C, H, W] to float32: divided by 255, then (x - mean) / std per channel if these are given."""

    def __init__(
        self, mean: tuple[float, ...] | None = None, std: tuple[float, ...] | None = None
    ) -> None:
        self.mean, self.std = (
            torch.tensor(value)[:, None, None] if value else None for value in (mean, std)
        )

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images as the network wants them, on their device; bit for bit what torchvision computes."""
        images = images.float().div_(255)
        if self.mean is None:
            return images
        self.mean = self.mean.to(images.device)
        self.std = self.std.to(images.device)
        return images.sub_(self.mean).div_(self.std)
