"""From a CIFAR-10 folder to the first batch: our data module / torchvision's CIFAR10.

    python -m benchmarks.data [--n 5] [--data_dir DIR]

torchvision's CIFAR10 is behind a DataLoader. The values are the seconds after all imports, and the
memory that is added at peak, in sizes of the training set (154 MB). Without --data_dir, the
benchmark writes random images in CIFAR-10's format.
"""

import argparse
import hashlib
import multiprocessing
import pickle
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, random_split
from torchvision.datasets import CIFAR10

from benchmarks import report, training
from benchmarks.original import Images
from sagemaker_lightning.process.allocator import return_freed_memory

from app import cifar10_files
from app.data import CIFAR10DataModule

DATA_BYTES = 50_000 * 3 * 32 * 32  # bytes
PAIRS = 5  # default of --n


def ours(folder: Path) -> float:
    """Make the first batch with our data module, and return the seconds."""
    began = time.perf_counter()
    data = CIFAR10DataModule(str(folder), batch_size=training.BATCH_SIZE)
    data.setup("fit")
    next(iter(data.train_dataloader()))
    return time.perf_counter() - began


def theirs(folder: Path) -> float:
    """Make the first batch as torchvision's documentation does, and return the seconds.

    Transforms, split and batch size are the same.
    """

    class Known(CIFAR10):
        """Has the checksums of the files at hand, and still checks them."""

        train_list, test_list = (
            [
                [name, hashlib.md5((folder / cifar10_files.FOLDER / name).read_bytes()).hexdigest()]
                for name in names
            ]
            for names in (cifar10_files.TRAIN_FILES, cifar10_files.TEST_FILES)
        )
        meta = CIFAR10.meta | {"md5": None}

    began = time.perf_counter()
    train, _ = random_split(Known(folder, transform=Images.transform), [40_000, 10_000])
    next(iter(DataLoader(train, batch_size=training.BATCH_SIZE, shuffle=True)))
    return time.perf_counter() - began


def measure(read, folder: Path) -> tuple[float, float]:
    """Return the seconds that `read` takes in a new process, and the memory it adds at peak.

    The memory is in sizes of the training set.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (read, folder))


def _measured(read, folder: Path) -> tuple[float, float]:
    # A virtual machine has memory at hand that was just in use, else it asks its host.
    np.ones(4 * DATA_BYTES, dtype=np.uint8)
    return_freed_memory()
    seconds, added = report.peak(partial(read, folder))
    return seconds, added / DATA_BYTES


def write(folder: Path) -> None:
    """Write random images in the format and of the size of CIFAR-10."""
    (folder / cifar10_files.FOLDER).mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in cifar10_files.TRAIN_FILES + cifar10_files.TEST_FILES:
        images = draw.integers(256, size=(10_000, 3072), dtype=np.uint8)
        batch = {"data": images, "labels": draw.integers(10, size=10_000).tolist()}
        (folder / cifar10_files.FOLDER / name).write_bytes(pickle.dumps(batch, protocol=2))
    (folder / cifar10_files.FOLDER / CIFAR10.meta["filename"]).write_bytes(
        pickle.dumps({"label_names": list("0123456789")})
    )


def run(n: int, data_dir: Path | None) -> list[report.Comparison]:
    """Compare in n pairs, after one that does not count."""
    times = []
    ours_peak = []
    theirs_peak = []
    with tempfile.TemporaryDirectory() as folder:
        if not data_dir:
            write(data_dir := Path(folder))
        for pair in range(n + 1):
            (our_seconds, our_peak), (seconds, peak) = (
                measure(read, data_dir) for read in (ours, theirs)
            )
            if pair:
                times.append(our_seconds / seconds)
                ours_peak.append(our_peak)
                theirs_peak.append(peak)
                print(
                    f"data: {our_seconds:.2f} / {seconds:.2f} s = {times[-1]:.3f}; "
                    f"memory {our_peak:.2f}, {peak:.2f}"
                )
    return [
        report.Comparison(
            "data", "seconds: folder to first batch, ours / torchvision's CIFAR10", times
        ),
        report.Comparison("memory", "peak added by ours / size of the training set", ours_peak),
        report.Comparison(
            "memory of torchvision",
            "peak added by torchvision's / size of the training set",
            theirs_peak,
        ),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give --n its default here."""
    parser.set_defaults(n=PAIRS)
    parser.add_argument(
        "--data_dir", type=Path, help="folder with cifar-10-batches-py (default: random images)"
    )


if __name__ == "__main__":
    parser = report.parser(__doc__)
    add_arguments(parser)
    report.publish(run(**vars(parser.parse_args())))
