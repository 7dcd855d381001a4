"""ResNet-18 on images in shards, or in a folder for each class; docs/shards.md is its page.

    python examples/image_shards.py --data.data_dir=FOLDER --trainer.max_epochs=10

FOLDER, a channel or s3://BUCKET/PREFIX, has `train` and, for validation, `val`: without it, no
epoch is validated.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.models import resnet18
from torchvision.transforms import v2

from sagemaker_lightning import SageMakerCLI, ShardBatches, ShardedDataset
from sagemaker_lightning.data.gather import gather
from sagemaker_lightning.process.threads import usable_cpus
from sagemaker_lightning.shards.sources import source

FIELDS = "jpg", "jpeg", "JPG", "JPEG", "png", "webp", "gif"
"""The fields that may have a sample's image; those that torchvision decodes."""


class Decoded:
    """Makes an image, float32 [3, size, size], and its class of a sample of a shard.

    Args:
        transform: Makes it of a decoded image, uint8 [3, height, width].
    """

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        self.transform = transform

    def __call__(self, sample: dict[str, bytes]) -> tuple[Tensor, int]:
        content = next(sample[field] for field in FIELDS if field in sample)
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return self.transform(decode_image(data, ImageReadMode.RGB)), int(sample["cls"])


def read_image(path: str) -> Tensor:
    """Return an image file as uint8 [3, height, width]."""
    return decode_image(path, ImageReadMode.RGB)


class Images(pl.LightningDataModule):
    """Images with classes, in shards or in a folder for each class.

    Args:
        data_dir: SageMaker's channel with `train` and, for validation, `val`; or s3://BUCKET/PREFIX.
        batch_size: Images of a batch of each rank.
        size: Height and width of the images, in pixels.
        window: Images that are shuffled together; as ShardBatches'.
        num_workers: Data workers of each rank; by default, as many as the CPUs that it has.
        cache_gib: GiB of the disk, at most, for shards from S3; as ShardedDataset's.
        sharded: Whether each host has other shards (ShardedByS3Key).
    """

    def __init__(
        self,
        data_dir: str | None = None,
        batch_size: int = 64,
        size: int = 224,
        window: int = 16384,
        num_workers: int | None = None,
        cache_gib: float = 32,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Open the images: for shards of hosts, once the ranks know each other."""
        size = self.hparams.size
        values = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
        self.train = self._images(
            "train", [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *values]
        )
        self.val = self._images("val", [v2.Resize(size), v2.CenterCrop(size), *values])

    def _images(self, split: str, steps: list[nn.Module]) -> Dataset | None:
        """Return the images of a split; None if there is none of them for validation."""
        options = self.hparams
        place = f"{options.data_dir}/{split}"
        transform = v2.Compose(steps)
        is_local = "://" not in place
        if split == "val":
            exists = Path(place).exists() if is_local else bool(source(place).sizes())
            if not any(gather(exists)):  # hosts may have different files
                rank_zero_info(f"{place}: nothing is there, and no epoch is validated")
                return None
        if is_local and not options.sharded and not Path(place, "shards.index").exists():
            return ImageFolder(place, transform, loader=read_image)
        return ShardedDataset(
            place,
            Decoded(transform),
            cache_bytes=int(options.cache_gib * 2**30),
            divided=options.sharded,
        )

    def _loader(self, images: Dataset, shuffle: bool) -> DataLoader:
        options = self.hparams
        workers = options.num_workers
        if workers is None:
            workers = max(1, int(usable_cpus()) // self.trainer.num_devices)
        batches: dict[str, Any] = {"batch_size": options.batch_size, "shuffle": shuffle}
        if isinstance(images, ShardedDataset):
            sampler = ShardBatches(images, window=options.window, **batches)
            batches = {"batch_sampler": sampler}
        stays = {"persistent_workers": workers > 0, "num_workers": workers}
        return DataLoader(images, **batches, **stays, pin_memory=torch.cuda.is_available())

    def train_dataloader(self) -> DataLoader:
        """Return the loader for training."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader | list:
        """Return the loader for validation, [] if there are no images for it."""
        return self._loader(self.val, shuffle=False) if self.val else []


class Classifier(pl.LightningModule):
    """torchvision's ResNet-18.

    Args:
        num_classes: Number of classes.
        lr: Learning rate of AdamW.
    """

    def __init__(self, num_classes: int = 1000, lr: float = 0.001) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = resnet18(num_classes=num_classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, classes = batch
        loss = nn.functional.cross_entropy(self.network(images), classes)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        images, classes = batch
        hits = self.network(images).argmax(1) == classes
        self.log("val_accuracy", hits.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


if __name__ == "__main__":
    SageMakerCLI(Classifier, Images)
