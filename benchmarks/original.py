"""images/s of the application's training / images/s of the original tutorial's recipe.

    python -m benchmarks.original [--n 5] [--steps 10] [--data_dir DIR]
    python -m benchmarks.original --accuracy --data_dir DIR [--n 3]

--accuracy prints the accuracy after the same wall time instead. The recipe: torchvision's CIFAR10
read as PIL images, one transform after another on each, a DataLoader with one worker process,
batches of 32, Adam 1e-3, float32, Lightning's Trainer with its defaults. Network and machine are
the same.
"""

import argparse
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split
from torchvision import transforms
from torchvision.models import resnet18

from benchmarks import accuracy, report, training, turns
from benchmarks.training import RandomDataModule
from benchmarks.turns import Clock

from app import cifar10_files
from app.augmentation import Normalize
from app.data import CIFAR10DataModule


class Images(Dataset):
    """PIL images that are made and transformed one by one, as torchvision's CIFAR10 does."""

    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(CIFAR10DataModule.mean, CIFAR10DataModule.std),
        ]
    )

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Take images, uint8 [N, 3, 32, 32], and labels, int64 [N]."""
        self.images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
        self.labels = labels.tolist()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image, float32 [3, 32, 32], and its label."""
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)


class Tutorial(LightningModule):
    """The network, the loss and the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = resnet18(num_classes=10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def recipe(clock: Clock, data_dir: Path | None) -> None:
    """Train by the original's recipe, on the CIFAR-10 in `data_dir` or on random images."""
    pin = training.accelerator() == "cuda"
    images = Images(
        *(
            cifar10_files.read(data_dir, True, "--data_dir")
            if data_dir
            else RandomDataModule().load(train=True)
        )
    )
    loader = DataLoader(
        images, batch_size=training.BATCH_SIZE, shuffle=True, num_workers=1, pin_memory=pin
    )
    with training.quiet(), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator=training.accelerator(),
            devices=1,
            max_steps=clock.total_steps,
            default_root_dir=folder,
            enable_progress_bar=False,
            callbacks=[clock],
        )
        trainer.fit(Tutorial(), loader)


def run(n: int, steps: int, data_dir: Path | None) -> list[report.Comparison]:
    """Compare in n pairs of processes each, on the CIFAR-10 in `data_dir` or on random images.

    Ours trains as the original does, and then by the recipe `cpu`, with its own batch size. See
    `turns.compare`.
    """
    datamodule = CIFAR10DataModule if data_dir else RandomDataModule
    flags = [f"--data={datamodule.__module__}.{datamodule.__name__}"]
    flags += [f"--data.data_dir={data_dir}"] if data_dir else []
    images = "CIFAR-10" if data_dir else "random images"
    comparisons = []
    for name, batch, own_flags in (
        ("original", training.BATCH_SIZE, []),
        ("original, recipe cpu", None, ["--config=cpu"]),
    ):
        quantities = (
            f"turns of {steps} steps, {images}: our training{', recipe cpu' * bool(own_flags)} / "
            "the original's recipe"
        )
        ours = partial(training.train, data=[*own_flags, *flags], batch_size=batch)
        comparisons.append(
            turns.compare(name, quantities, ours, partial(recipe, data_dir=data_dir), n, steps)
        )
    return comparisons


def accuracies(n: int, data_dir: Path) -> None:
    """Print the test accuracy of the recipe `cpu`, and of the original's.

    The original's recipe trains for as many seconds.
    """
    print(
        "| seed | seconds of training | recipe cpu: accuracy | the original's recipe: "
        "images, accuracy |"
    )
    print("| --- | --- | --- | --- |")
    for seed in range(1, n + 1):
        flags = [f"--trainer.accelerator={training.accelerator()}", "--data.val_split=0.2"]
        ours = accuracy.once("cpu", data_dir.resolve(), seed, flags)
        with ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn")
        ) as pool:  # its process may have workers
            images, theirs = pool.submit(_trained, seed, ours.seconds, data_dir).result()
        print(
            f"| {seed} | {ours.seconds:.0f} | {ours.accuracy:.4f} | {images}, {theirs:.4f} |",
            flush=True,
        )


def _trained(seed: int, seconds: float, data_dir: Path) -> tuple[int, float]:
    """Train by the original's recipe for so many seconds.

    Return the number of images that it saw, and the accuracy.
    """
    seed_everything(seed)
    model = Tutorial()
    train_images = Images(*cifar10_files.read(data_dir, True, "--data_dir"))
    train, _ = random_split(train_images, [0.8, 0.2])
    loader = DataLoader(train, batch_size=training.BATCH_SIZE, shuffle=True, num_workers=1)
    with training.quiet(), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator=training.accelerator(),
            devices=1,
            max_time=timedelta(seconds=seconds),
            max_epochs=-1,
            default_root_dir=folder,
            enable_progress_bar=False,
        )
        trainer.fit(model, loader)
    images, labels = cifar10_files.read(data_dir, False, "--data_dir")
    images = Normalize(CIFAR10DataModule.mean, CIFAR10DataModule.std)(torch.from_numpy(images))
    with torch.inference_mode():
        predictions = torch.cat(
            [model.eval().cpu().network(block).argmax(1) for block in images.split(500)]
        )
    accuracy_on_test = (predictions == torch.from_numpy(labels)).float().mean().item()
    return trainer.global_step * training.BATCH_SIZE, accuracy_on_test


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag that this benchmark alone has."""
    parser.add_argument(
        "--data_dir",
        type=Path,
        help="folder with CIFAR-10's python version (default: random images)",
    )


if __name__ == "__main__":
    parser = report.parser(__doc__)
    turns.add_arguments(parser)
    add_arguments(parser)
    parser.add_argument(
        "--accuracy", action="store_true", help="compare accuracies after the same seconds instead"
    )
    args = vars(parser.parse_args())
    if args.pop("accuracy"):
        print(report.machine())
        accuracies(
            args["n"], args["data_dir"] or parser.error("--accuracy: give --data_dir as well")
        )
    else:
        report.publish(run(**args))
