"""The application's own training with a clock, on images that need no download."""

import contextlib
import io
import logging
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

from benchmarks.turns import Clock
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.contract.environment import SageMakerEnvironment

from app.data import CIFAR10DataModule
from app.train import APPLICATION

BATCH_SIZE = 32  # the application's default, and the original's


def accelerator() -> str:
    """Return the device to train on.

    Where there is a GPU, a process that has asked for it cannot be forked any more.
    """
    return "cuda" if torch.cuda.is_available() else "cpu"


class RandomDataModule(CIFAR10DataModule):
    """Random images of CIFAR-10's shape: as much work as real ones.

    Args:
        images: How many; CIFAR-10 has 50,000.
    """

    def __init__(self, images: int = 50_000, **kwargs) -> None:
        super().__init__(**kwargs)
        self.images = images

    @property
    def num_train_images(self) -> int:
        """Number of images, those for validation included."""
        return self.images

    def load(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return images, uint8 [N, 3, 32, 32], and labels, int64 [N]."""
        draw = np.random.default_rng(0)
        size = self.num_train_images
        return draw.integers(256, size=(size, 3, 32, 32), dtype=np.uint8), draw.integers(
            10, size=size
        )


def train(clock: Clock, data: list[str], batch_size: int | None = BATCH_SIZE) -> None:
    """Train as in a container, with the flags `data`.

    There is no validation, as one epoch is enough. A batch size of None is that of the flags.
    """
    with quiet(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        environment = SageMakerEnvironment(
            model_dir=path / "model", output_data_dir=path, checkpoint_dir=path / "checkpoints"
        )
        flags = [f"--trainer.accelerator={accelerator()}", "--trainer.devices=1"]
        flags += [f"--data.batch_size={batch_size}"] if batch_size else []
        cli = CommandLine(
            environment, [*data, *flags, f"--trainer.max_steps={clock.total_steps}"], APPLICATION
        )
        cli.trainer.callbacks.append(clock)
        batches = cli.datamodule.num_samples // cli.datamodule.batch_size
        if clock.total_steps >= batches:
            raise ValueError(
                f"--steps: {clock.total_steps} steps in all turns, but an epoch has {batches}"
            )
        cli.trainer.fit(cli.model, cli.datamodule)


@contextlib.contextmanager
def quiet():
    """Keep the training's output out of the table.

    Inside the block, stdout is not a terminal: the application then logs lines, as in a container,
    and draws no progress bar.
    """
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        yield
