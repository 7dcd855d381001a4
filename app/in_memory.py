"""Data that stays in memory: batches are cut from it by index.

Which sample comes when, and how it is augmented, is a pure function of (seed, epoch, position in
the epoch). It does not depend on workers, processes or time. So a resumed run gets the samples that
an uninterrupted run would have got, and so does a run with another number of workers. Whole batches
are augmented and normalised at once, on the device.
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
from sagemaker_lightning.data.partition import BatchDivision, EpochPlan, PartitionedLoader
from sagemaker_lightning.process.allocator import return_freed_memory

from app.augmentation import Augmentation, Normalize, generator


@dataclass(frozen=True)
class ResidentSet:
    """Images, uint8 [N, C, H, W], and their labels, int64 [N], on one device."""

    images: Tensor
    labels: Tensor

    def subset(self, index: Tensor) -> "ResidentSet":
        """Return a copy of the samples of `index`, int64 [n]."""
        return ResidentSet(self.images[index], self.labels[index])

    def to(self, device: torch.device) -> "ResidentSet":
        """Return the set on `device`; the same tensors if they are there already."""
        return ResidentSet(self.images.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


class ResidentLoader(PartitionedLoader):
    """Batches of a resident set for one rank, on the set's device.

    A batch is (images, float32 [n, C, H, W]; labels, int64 [n]). Raises UserError if there is no
    batch for each rank.

    Args:
        data: The images and labels.
        batch_size: Images per batch and rank.
        normalize: Converts the images of a batch to float32.
        seed: Decides the order and the augmentation.
        shuffle: Whether each epoch has its own order.
        augment: Whether images are cropped, flipped and cut.
        flip: Whether images may be flipped.
        cutout: Side of Cutout's square in pixels; 0 for none.
        drop_last: Whether to leave out the remainder that does not fill a batch.
        rank: Takes its slice of each global batch of `data` (see BatchDivision).
        world_size: Number of ranks that share `data`. If the nodes have different data, these are
            the ranks of this node, and `epoch_plan` is None.
        shards: If the nodes have different data, (samples, ranks) of every node in the order of
            their ranks. All nodes make as many batches as the one that has the fewest.
        position: Returns the epoch and the batch at which an iteration starts; by default, the
            first of both. Once `begin` has been called, only its epoch counts: an iteration of
            somebody else's starts at its first batch.
    """

    def __init__(
        self,
        data: ResidentSet,
        *,
        batch_size: int,
        normalize: Normalize,
        seed: int | str,
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
        self.division = BatchDivision(len(data), batch_size, world_size, drop_last)
        self.divisions = [
            BatchDivision(size, batch_size, ranks, drop_last) for size, ranks in shards
        ] or [self.division]
        self.batches = min(division.batches for division in self.divisions)
        if not self.batches:
            least = min(self.divisions, key=lambda division: division.batches)
            raise UserError(
                f"--data.batch_size: {batch_size} on {least.ranks} ranks is more than the "
                f"{least.size} samples there are{' on a host' if shards else ''}"
            )
        self.epoch_plan = None if shards else EpochPlan(self.division)
        self.position = position
        self.at: tuple[int, int] | None = None  # epoch and batch at which the next iteration starts
        self.begin_was_called = False

    def __len__(self) -> int:
        return self.batches

    def sizes(self, epoch: int, batch: int) -> list[int]:
        """Return the number of samples of each of the job's ranks in a batch."""
        if not self.epoch_plan:
            return [size for division in self.divisions for size in division.sizes(batch)]
        division, first = self.epoch_plan.of_epoch(epoch)
        return division.sizes(batch - first)

    def begin(self, epoch: int, batch: int) -> None:
        """Have the next iteration start at batch `batch` of epoch `epoch`."""
        self.at = (epoch, batch)
        self.begin_was_called = True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begin_at = self.at
        self.at = None
        return self._iterate(begin_at)

    def _iterate(self, begin_at: tuple[int, int] | None) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, start = begin_at or self.position()
        if self.begin_was_called and not begin_at:
            start = 0
        size = len(self.data)
        device = self.data.images.device
        order = torch.arange(size)
        if self.shuffle:
            order = torch.randperm(size, generator=generator("order", self.seed, epoch))
        # The whole epoch's order, at once: nothing has to be sent to a GPU while it trains.
        order = order.to(device)
        choices = None
        if self.augment:
            choices = Augmentation.of_epoch(self.seed, epoch, size, self.flip).to(device)
        division, first = self.epoch_plan.of_epoch(epoch) if self.epoch_plan else (self.division, 0)
        for batch in range(start, self.batches):
            positions = division.part(batch - first, self.rank)
            positions = slice(positions.start, positions.stop)
            samples = self.data.subset(order[positions])
            images = self.normalize(
                choices[positions].crop(samples.images) if choices else samples.images
            )
            yield (
                choices[positions].cut(images, self.cutout) if choices and self.cutout else images,
                samples.labels,
            )


class ResidentDataModule(LightningDataModule, ABC):
    """A data module whose images stay in memory; a subclass says how to read them.

    Parameter names and the split are those of Lightning Bolts' class.

    Args:
        val_split: Images kept for validation: a number of them, or a fraction of the training set.
            If the nodes have different images, each node keeps its part of the number, or the
            fraction of its own images.
        num_workers: Ignored, with a warning: batches are cut in the training process itself,
            which is faster.
        normalize: Whether to subtract the mean and divide by the standard deviation of each
            channel.
        batch_size: Images per batch and rank.
        seed: Decides the train/validation split, the order of the images and their augmentation.
        shuffle: Whether each epoch has its own order.
        pin_memory: Ignored, with a warning: the images are on the device already.
        drop_last: Whether to leave out the remainder that does not fill a batch.
        cutout: Side, in pixels, of the square that is cut out of each training image
            (arXiv:1708.04552); 0 for none.
    """

    name: str
    classes: tuple[str, ...]
    dims = (3, 32, 32)
    input_range = (0.0, 1.0)
    """The range of the images before `mean` and `std` normalize them."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip = True
    """Whether a mirrored image still shows the same class."""
    sharded = False
    """Whether each node has its own images, instead of all nodes the same ones."""

    def __init__(
        self,
        val_split: int | float = 10000,
        num_workers: int | None = None,
        normalize: bool = True,
        batch_size: int = 32,
        seed: int = 42,
        shuffle: bool = True,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        cutout: int = 0,
    ) -> None:
        super().__init__()
        for flag, value, least in (
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("cutout", cutout, 0),
        ):
            if value < least:
                raise UserError(f"--data.{flag}: found {value}, expected {least} or more")
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
        """Return the training or the test images, and their labels.

        They are uint8 [N, C, H, W] and int64 [N]. If a node may lack them, FileNotFoundError says
        that they are not there.
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
        """A hash of what this rank trains and validates on, as 16 hexadecimal digits.

        Ranks with the same images and labels have the same.
        """
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.sets["train"], self.sets["val"]):
            for tensor in (part.images, part.labels):
                digest.update(tensor.cpu().numpy())
        return digest.hexdigest()

    def setup(self, stage: str | None = None) -> None:
        """Read the images that `stage` needs, once.

        `stage` is "fit", "validate", "test", "predict" or None for all. If the nodes have different
        images, all ranks agree here on what each node has, and raise the same errors.
        """
        is_divided = self.sharded and self._node_and_nodes[1] > 1
        if stage in ("fit", "validate", None) and "train" not in self.sets:
            self._warn_of_settings_without_effect()
            if is_divided:
                self.shards = host_shards.agree(self._read_and_split, self._node_and_nodes[0])
                if self.trainer.is_global_zero:
                    print(
                        host_shards.line(self.shards, self.batch_size, self.drop_last), flush=True
                    )
            else:
                self._read_and_split()
        if stage in ("test", "predict", None) and "test" not in self.sets:
            read = partial(self.load, train=False)
            self.sets["test"] = ResidentSet(
                *map(torch.from_numpy, host_shards.share(read) if is_divided else read())
            )

    def _warn_of_settings_without_effect(self) -> None:
        for name, value in (("num_workers", self.num_workers), ("pin_memory", self.pin_memory)):
            if value is not None and not (self.trainer and not self.trainer.is_global_zero):
                print(
                    f"warning: --data.{name}={str(value).lower()} is ignored: the images are in "
                    "memory, so that no worker reads them and nothing is copied to be sent; leave "
                    "it out",
                    flush=True,
                )

    def _read_and_split(self) -> tuple[int, int]:
        """Read and split the training images.

        Returns the numbers of images for training and for validation.
        """
        images, labels = (torch.from_numpy(array) for array in self.load(train=True))
        length, held_out = self._splits(len(labels))
        # torch.utils.data.random_split does exactly this in Bolts' class: the same seed gives the
        # same split.
        index = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        all_images = ResidentSet(images, labels)
        return_freed_memory()
        self.sets |= {
            "train": all_images.subset(index[:length]),
            "val": all_images.subset(index[length:]),
        }
        del all_images, images, labels
        return_freed_memory()
        return length, held_out

    def train_dataloader(self) -> ResidentLoader:
        """Return the loader of the training images, augmented."""
        augmented = {"augment": True, "flip": self.flip, "cutout": self.cutout}
        return self._make_loader(
            "train", shuffle=self.shuffle, drop_last=self.drop_last, **augmented
        )

    def val_dataloader(self) -> ResidentLoader:
        """Return the loader of the validation images."""
        return self._make_loader("val")

    def test_dataloader(self) -> ResidentLoader:
        """Return the loader of the test images."""
        return self._make_loader("test")

    predict_dataloader = test_dataloader

    def _make_loader(self, split: str, **options) -> ResidentLoader:
        """Return a loader of `split` on the trainer's device, for its rank.

        Without a trainer, the loader is on the CPU.
        """
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
        """Return the numbers of images for training and for validation out of `size`.

        UserError if `val_split` leaves none for one of them.
        """
        node, nodes = self._node_and_nodes if self.sharded else (0, 1)
        is_share = isinstance(self.val_split, float)
        count_here = self.val_split // nodes + (node < self.val_split % nodes)
        if is_share:  # nan and infinity have no floor
            held_out = math.floor(self.val_split * size) if math.isfinite(self.val_split) else 0
        else:
            held_out = count_here
        if not 0 < held_out < size:
            shown_value = (
                f"{self.val_split}"
                f"{f' ({count_here} of them on this host)' if nodes > 1 and not is_share else ''}"
            )
            raise UserError(
                f"--data.val_split: found {shown_value}, expected 1 to {size - 1} of the {size} "
                "images, or a fraction between 0 and 1"
            )
        return size - held_out, held_out

    @property
    def _node_and_nodes(self) -> tuple[int, int]:
        """This node's rank, and the number of nodes."""
        return (self.trainer.node_rank, self.trainer.num_nodes) if self.trainer else (0, 1)
