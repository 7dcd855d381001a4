"""Data that stays in memory: batches are cut from it by index, and nothing is left to chance.

Which sample comes when, and how it is augmented, is a pure function of (seed, epoch, position in the epoch). No
worker, process or clock enters it, so that a resumed run sees what an uninterrupted one would have seen, and so does
a run with another number of workers. Whole batches are augmented and normalised at once, on the device.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor

from sagemaker_lightning import UserError
from sagemaker_lightning.data import host_shards
from sagemaker_lightning.data.deterministic import position
from sagemaker_lightning.data.host_shards import Shard
from sagemaker_lightning.data.partition import Course, Division, PartitionedLoader
from sagemaker_lightning.process.allocator import give_back

from app.augmentation import Augmentation, Normalize, generator


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


class ResidentLoader(PartitionedLoader):
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
        self.data = data
        self.normalize = normalize
        self.seed = seed
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.augment = augment
        self.flip = flip
        self.cutout = cutout
        self.rank = rank
        self.division = Division(len(data), batch_size, world_size, drop_last)
        self.divisions = [
            Division(size, batch_size, ranks, drop_last) for size, ranks in shards
        ] or [self.division]
        self.batches = min(division.batches for division in self.divisions)
        if not self.batches:
            least = min(self.divisions, key=lambda division: division.batches)
            raise UserError(
                f"--data.batch_size: {batch_size} on {least.ranks} ranks is more than the "
                f"{least.size} samples there are{' on a host' if shards else ''}"
            )
        self.course = None if shards else Course(self.division)
        self.position = position
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
        self.at = (epoch, batch)
        self.told = True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        at = self.at
        self.at = None
        return self._batches(at)

    def _batches(self, at: tuple[int, int] | None) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, start = at or self.position()
        if self.told and not at:
            start = 0
        size = len(self.data)
        device = self.data.images.device
        order = torch.arange(size)
        if self.shuffle:
            order = torch.randperm(size, generator=generator("order", self.seed, epoch))
        # Of the whole epoch, at once: nothing is left to send to a GPU while it trains.
        order = order.to(device)
        choices = None
        if self.augment:
            choices = Augmentation.of_epoch(self.seed, epoch, size, self.flip).to(device)
        division, first = self.course.of_epoch(epoch) if self.course else (self.division, 0)
        for batch in range(start, self.batches):
            part = division.part(batch - first, self.rank)
            part = slice(part.start, part.stop)
            samples = self.data.subset(order[part])
            images = self.normalize(
                choices[part].crop(samples.images) if choices else samples.images
            )
            yield (
                choices[part].cut(images, self.cutout) if choices and self.cutout else images,
                samples.labels,
            )


class ResidentDataModule(LightningDataModule, ABC):
    """A data module whose images stay in memory; a subclass says where they come from.

    Parameter names, defaults and split are those of Lightning Bolts' class.

    Args:
        val_split: Images kept for validation: a number of them, or a fraction of the training set. Where the nodes
            have different images, each of them keeps its part of the number, or the fraction of its own images.
        num_workers: Accepted for compatibility; batches are cut in the training process itself, which is faster.
        normalize: Whether to subtract the mean and divide by the standard deviation of each channel.
        batch_size: Images per batch and rank.
        seed: Decides the train/validation split, the order of the images and their augmentation.
        shuffle: Whether each epoch has an order of its own.
        pin_memory: Accepted for compatibility; the images are on the device already.
        drop_last: Whether to leave out the remainder that does not fill a batch.
        cutout: Side, in pixels, of the square that is cut out of each training image (arXiv:1708.04552); 0 for none.
    """

    name: str
    classes: tuple[str, ...]
    dims = (3, 32, 32)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip = True
    """Whether a mirrored image still shows the same class."""
    sharded = False
    """Whether each node has images of its own, and not all nodes the same ones."""

    def __init__(
        self,
        val_split: int | float = 10000,
        num_workers: int = 1,
        normalize: bool = True,
        batch_size: int = 32,
        seed: int = 42,
        shuffle: bool = True,
        pin_memory: bool = True,
        drop_last: bool = False,
        cutout: int = 0,
    ) -> None:
        super().__init__()
        for flag, value, least in (
            ("batch_size", batch_size, 1), ("num_workers", num_workers, 0), ("seed", seed, 0), ("cutout", cutout, 0)
        ):  # fmt: skip
            if value < least:
                raise UserError(f"--data.{flag}: found {value}, allowed is {least} or more")
        self.val_split = val_split
        self.num_workers = num_workers
        self.normalize = normalize
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.pin_memory = pin_memory
        self.drop_last = drop_last
        self.cutout = cutout
        self.sets: dict[str, ResidentSet] = {}
        self.shards: list[Shard] = []

    @abstractmethod
    def load(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return images, uint8 [N, C, H, W], and labels, int64 [N], of the training or the test images.

        Where a node may lack them, FileNotFoundError says that they are not there.
        """

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def num_samples(self) -> int:
        """Number of training images, those for validation left out."""
        return self._splits(self.num_train_images)[0]

    @property
    def num_train_images(self) -> int:
        """Number of training images, those for validation included."""
        return len(self.load(train=True)[1])

    @property
    def fingerprint(self) -> str:
        """What this rank trains and validates on, as 16 hexadecimal digits; alike where the images and labels are."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.sets["train"], self.sets["val"]):
            for tensor in (part.images, part.labels):
                digest.update(tensor.cpu().numpy())
        return digest.hexdigest()

    def setup(self, stage: str | None = None) -> None:
        """Read the images that `stage` ("fit", "validate", "test", "predict" or None for all) needs, once.

        Where the nodes have different images, all ranks agree here on what each has, and raise the same errors.
        """
        divided = self.sharded and self._nodes[1] > 1
        if stage in ("fit", "validate", None) and "train" not in self.sets:
            if divided:
                self.shards = host_shards.agree(self._read, self._nodes[0])
                if self.trainer.is_global_zero:
                    print(
                        host_shards.line(self.shards, self.batch_size, self.drop_last), flush=True
                    )
            else:
                self._read()
        if stage in ("test", "predict", None) and "test" not in self.sets:
            read = partial(self.load, train=False)
            self.sets["test"] = ResidentSet(
                *map(torch.from_numpy, host_shards.share(read) if divided else read())
            )

    def _read(self) -> tuple[int, int]:
        """Read and split the training images; return the numbers of images for training and for validation."""
        images, labels = (torch.from_numpy(array) for array in self.load(train=True))
        length, held_out = self._splits(len(labels))
        # Exactly what torch.utils.data.random_split does in Bolts' class, for the same split from
        # the same seed.
        index = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        whole = ResidentSet(images, labels)
        give_back()
        self.sets |= {"train": whole.subset(index[:length]), "val": whole.subset(index[length:])}
        del whole, images, labels
        give_back()
        return length, held_out

    def train_dataloader(self) -> ResidentLoader:
        """Return the loader of the training images, augmented."""
        augmented = {"augment": True, "flip": self.flip, "cutout": self.cutout}
        return self._loader("train", shuffle=self.shuffle, drop_last=self.drop_last, **augmented)

    def val_dataloader(self) -> ResidentLoader:
        """Return the loader of the validation images."""
        return self._loader("val")

    def test_dataloader(self) -> ResidentLoader:
        """Return the loader of the test images."""
        return self._loader("test")

    predict_dataloader = test_dataloader

    def _loader(self, split: str, **options) -> ResidentLoader:
        """Return a loader of `split` on the trainer's device, for its rank; without a trainer, one on the CPU."""
        trainer = self.trainer
        if trainer:
            self.sets[split] = self.sets[split].to(trainer.strategy.root_device)
            options |= {"rank": trainer.global_rank, "world_size": trainer.world_size}
            if split != "test":
                options |= host_shards.ranks(self.shards, split, trainer.global_rank, self.seed)
        if trainer and split == "train":
            options["position"] = partial(position, trainer)
        normalize = Normalize(self.mean, self.std) if self.normalize else Normalize()
        options = {"seed": self.seed} | options
        return ResidentLoader(
            self.sets[split], batch_size=self.batch_size, normalize=normalize, **options
        )

    def _splits(self, size: int) -> tuple[int, int]:
        """Return the numbers of images for training and for validation out of `size`."""
        node, nodes = self._nodes if self.sharded else (0, 1)
        fraction = isinstance(self.val_split, float)
        part = self.val_split // nodes + (node < self.val_split % nodes)
        # Neither nan nor infinite.
        share = self.val_split if fraction and 0 < self.val_split < 1 else 0
        held_out = math.floor(share * size) if fraction else part
        if not 0 < held_out < size:
            found = f"{self.val_split}{f' ({part} of them on this host)' if nodes > 1 and not fraction else ''}"
            raise UserError(
                f"--data.val_split: found {found}, allowed are 1 to {size - 1} of the {size} "
                "images, or a fraction between 0 and 1"
            )
        return size - held_out, held_out

    @property
    def _nodes(self) -> tuple[int, int]:
        """This node's rank, and the number of nodes."""
        return (self.trainer.node_rank, self.trainer.num_nodes) if self.trainer else (0, 1)
