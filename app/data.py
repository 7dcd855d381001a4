"""The data modules. Parameter names, defaults and the train/validation split are those of Lightning Bolts' class."""

import gzip
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from pytorch_lightning import LightningDataModule

from app import cifar
from app.resident import Normalize, ResidentLoader, ResidentSet


class ResidentDataModule(LightningDataModule):
    """A data module whose images stay in memory (see app/resident.py); a subclass says where they come from.

    Args:
        data_dir: Folder of the images.
        val_split: Images kept for validation: a number of them, or a fraction of the training set.
        num_workers: Accepted for compatibility; batches are cut in the training process itself, which is faster.
        normalize: Whether to subtract the mean and divide by the standard deviation of each channel.
        batch_size: Images per batch and rank.
        seed: Decides the train/validation split, the order of the images and their augmentation.
        shuffle: Whether each epoch has an order of its own.
        pin_memory: Accepted for compatibility; the images are on the device already.
        drop_last: Whether to leave out the remainder that does not fill a batch.
    """

    name: str
    classes: tuple[str, ...]
    dims = (3, 32, 32)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip = True
    """Whether a mirrored image still shows the same class."""

    def __init__(
        self,
        data_dir: str | None = None,
        val_split: int | float = 10000,
        num_workers: int = 1,
        normalize: bool = True,
        batch_size: int = 32,
        seed: int = 42,
        shuffle: bool = True,
        pin_memory: bool = True,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        for flag, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0), ("seed", seed, 0)):
            if value < least:
                raise ValueError(f"--data.{flag}: found {value}, allowed is {least} or more")
        self.data_dir, self.val_split, self.num_workers, self.normalize = data_dir, val_split, num_workers, normalize
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.pin_memory, self.drop_last = pin_memory, drop_last
        self.sets: dict[str, ResidentSet] = {}

    def load(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return images, uint8 [N, C, H, W], and labels, int64 [N], of the training or the test images."""
        raise NotImplementedError

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

    def setup(self, stage: str | None = None) -> None:
        """Read the images that `stage` ("fit", "validate", "test", "predict" or None for all) needs, once."""
        if stage in ("fit", "validate", None) and "train" not in self.sets:
            images, labels = (torch.from_numpy(array) for array in self.load(train=True))
            length, _ = self._splits(len(labels))
            # Exactly what torch.utils.data.random_split does in Bolts' class, for the same split from the same seed.
            index = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
            whole = ResidentSet(images, labels)
            self.sets |= {"train": whole.subset(index[:length]), "val": whole.subset(index[length:])}
        if stage in ("test", "predict", None) and "test" not in self.sets:
            self.sets["test"] = ResidentSet(*(torch.from_numpy(array) for array in self.load(train=False)))

    def train_dataloader(self) -> ResidentLoader:
        """Return the loader of the training images, augmented."""
        return self._loader("train", shuffle=self.shuffle, drop_last=self.drop_last, augment=True, flip=self.flip)

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
        if trainer and split == "train":
            limit = trainer.limit_train_batches
            options["limit"] = lambda batches: min(batches, limit) if type(limit) is int else int(batches * limit)
            options["batches_done"] = lambda: trainer.fit_loop.epoch_loop.batch_progress.total.processed
        normalize = Normalize(self.mean, self.std) if self.normalize else Normalize()
        return ResidentLoader(
            self.sets[split], batch_size=self.batch_size, normalize=normalize, seed=self.seed, **options
        )

    def _splits(self, size: int) -> tuple[int, int]:
        """Return the numbers of images for training and for validation out of `size`."""
        fraction = isinstance(self.val_split, float)
        held_out = math.floor(self.val_split * size) if fraction else self.val_split
        if not 0 < held_out < size:
            raise ValueError(
                f"--data.val_split: found {self.val_split}, allowed are 1 to {size - 1} of the {size} images, or a "
                "fraction between 0 and 1"
            )
        return size - held_out, held_out


class CIFAR10DataModule(ResidentDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images, RGB, 32x32, ten classes.

    Args:
        data_dir: Folder with cifar-10-python.tar.gz, cifar-10-batches-py or the files in it; SageMaker's channel.
        download: Whether to fetch the archive into `data_dir` if it is not there (needs a network).
    """

    name = "CIFAR-10"
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    # Per channel over the training images; the values of Bolts' cifar10_normalization.
    mean = (125.3 / 255, 123.0 / 255, 113.9 / 255)
    std = (63.0 / 255, 62.1 / 255, 66.7 / 255)
    num_train_images = 50_000  # without reading them

    def __init__(self, data_dir: str | None = None, download: bool = False, **kwargs) -> None:
        super().__init__(data_dir=data_dir, **kwargs)
        self.download = download

    def prepare_data(self) -> None:
        """Download, once per node, if that was asked for."""
        if self.download:
            cifar.download(self._folder)

    def load(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return images, uint8 [N, 3, 32, 32], and labels, int64 [N]."""
        return cifar.read(self._folder, train, channel=f"--data.data_dir={self.data_dir}")

    @property
    def _folder(self) -> Path:
        if self.data_dir is None:
            raise ValueError(
                "--data=CIFAR10DataModule: no data; give the channel `training`, or a folder with --data.data_dir"
            )
        return Path(self.data_dir)


class DigitsDataModule(ResidentDataModule):
    """scikit-learn's handwritten digits (UCI optdigits), 8x8, shown as 32x32 RGB: real data that needs no download.

    1,437 training and 360 test images, the same ones for every seed.
    """

    name = "digits"
    classes = tuple("0123456789")
    mean = (0.3053,) * 3
    std = (0.3758,) * 3
    flip = False

    def __init__(self, val_split: int | float = 0.1, **kwargs) -> None:
        super().__init__(val_split=val_split, **kwargs)

    def load(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return images, uint8 [N, 3, 32, 32], and labels, int64 [N]."""
        # The file that sklearn.datasets.load_digits reads; importing scikit-learn would take longer than reading.
        file = Path(find_spec("sklearn").submodule_search_locations[0], "datasets/data/digits.csv.gz")
        with gzip.open(file) as rows:
            table = np.loadtxt(rows, delimiter=",", dtype=np.int64)
        order = np.random.RandomState(0).permutation(len(table))  # the file is sorted by writer
        table = table[order[:1437] if train else order[1437:]]
        pixels = (table[:, :-1].reshape(-1, 1, 8, 8) * 255 // 16).astype(np.uint8)
        return pixels.repeat(3, axis=1).repeat(4, axis=2).repeat(4, axis=3), table[:, -1].copy()
