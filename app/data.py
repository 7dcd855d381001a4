"""The data modules: CIFAR-10, and digits that need no download."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from sagemaker_lightning import UserError

from app import cifar10_files
from app.in_memory import ResidentDataModule


class CIFAR10DataModule(ResidentDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images, RGB, 32x32, ten classes.

    Args:
        data_dir: Folder with cifar-10-python.tar.gz, cifar-10-batches-py or the files in it;
            SageMaker's channel.
        download: Whether to fetch the archive into `data_dir` if it is not there (needs a network).
        sharded: Whether `data_dir` has only some of the training files, different ones on each node
            (ShardedByS3Key).
    """

    name = "CIFAR-10"
    classes = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )
    # Per channel over the training images; the values of Bolts' cifar10_normalization.
    mean = (125.3 / 255, 123.0 / 255, 113.9 / 255)
    std = (63.0 / 255, 62.1 / 255, 66.7 / 255)

    def __init__(
        self, data_dir: str | None = None, download: bool = False, sharded: bool = False, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.data_dir = data_dir
        self.download = download
        self.sharded = sharded

    @property
    def num_train_images(self) -> int:
        """Number of training images, those for validation included.

        For a complete CIFAR-10, no file is read.
        """
        return super().num_train_images if self.sharded else 50_000

    def prepare_data(self) -> None:
        """Download the archive, once per node, if `download` is set."""
        if self.download:
            cifar10_files.download(self._folder)

    def load(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return images, uint8 [N, 3, 32, 32], and labels, int64 [N]."""
        return cifar10_files.read(
            self._folder, train, channel=f"--data.data_dir={self.data_dir}", part=self.sharded
        )

    @property
    def _folder(self) -> Path:
        if self.data_dir is None:
            raise UserError(
                "--data=CIFAR10DataModule: no data; give the channel `training`, or a folder with "
                "--data.data_dir"
            )
        return Path(self.data_dir).absolute()  # messages then show where a relative path leads


class DigitsDataModule(ResidentDataModule):
    """scikit-learn's handwritten digits (UCI optdigits), which need no download.

    They are real data. Images of 8x8 are shown as 32x32 RGB. There are 1,437 training and 360 test
    images, the same ones for every seed.
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
        # The file that sklearn.datasets.load_digits reads; importing scikit-learn would take longer
        # than reading.
        file = Path(
            find_spec("sklearn").submodule_search_locations[0], "datasets/data/digits.csv.gz"
        )
        with gzip.open(file) as rows:
            table = np.loadtxt(rows, delimiter=",", dtype=np.int64)
        order = np.random.RandomState(0).permutation(len(table))  # the file is sorted by writer
        table = table[order[:1437] if train else order[1437:]]
        pixels = (table[:, :-1].reshape(-1, 1, 8, 8) * 255 // 16).astype(np.uint8)
        return pixels.repeat(3, axis=1).repeat(4, axis=2).repeat(4, axis=3), table[:, -1].copy()
