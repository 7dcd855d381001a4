"""The cost of proving each resume: journal, digests, and the search for hidden state.

    python -m benchmarks.proof [--n 20] [--steps 10] [--starts 5]

The search is for generators and plain state. Each ratio is a training's seconds with the proof /
without it, all else being the same. For a step: n pairs of turns of `--steps` steps in one process,
with our own loader and with a user's DataLoader. For a start, from a process's beginning to its
first optimizer step: pairs of processes, with both loaders, with a stream, and from a checkpoint,
with steps to compare. A stream's first batch is drawn twice, which "without" leaves out, too.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from pytorch_lightning import Callback, LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks import report, startup, training
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.data import seeded_indices
from sagemaker_lightning.data.loaders.redrawn import Redrawn
from sagemaker_lightning.resume.callback import ExactResume
from sagemaker_lightning.resume.check.verification import ResumeCheck
from sagemaker_lightning.state import generators, object_graph

from app.train import APPLICATION

# Defaults of --n and --starts.
PAIRS = 20
STARTS = 5
DATA = {
    "our loader": [],
    "a DataLoader": [f"--data={__package__}.proof.Loaded"],
    "a stream": [f"--data={__package__}.proof.Streamed"],
}
WITHOUT_VARIABLE = "BENCHMARK_WITHOUT"


class Images(Dataset):
    """Random images, float32 [3, 32, 32], shifted by a generator, as many datasets do."""

    def __init__(self) -> None:
        self.images = torch.rand(1000, 3, 32, 32)
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return 50_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % 1000].roll(int(self.random.integers(-2, 3)), 2), index % 10


class Stream(IterableDataset):
    """The same images, one after the other."""

    def __init__(self) -> None:
        self.images = Images()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return map(self.images.__getitem__, range(len(self.images)))


class Loaded(LightningDataModule):
    """A DataLoader of the kind that users have."""

    num_classes = 10

    def train_dataloader(self) -> DataLoader:
        """Return the loader."""
        return DataLoader(Images(), training.BATCH_SIZE, shuffle=True)


class Streamed(Loaded):
    """A DataLoader of a stream."""

    def train_dataloader(self) -> DataLoader:
        """Return the loader."""
        return DataLoader(Stream(), training.BATCH_SIZE)


@contextmanager
def without() -> Iterator[None]:
    """Switch recording, comparing, searching and drawing twice off while the block lasts."""

    def nothing(*_: Any, **__: Any) -> tuple:
        return ()

    left_out = [
        (ExactResume, hook)
        for hook in ("on_train_batch_start", "on_before_backward", "on_train_batch_end")
    ]
    left_out += [(ResumeCheck, step) for step in ("start", "check_restored", "checkpoint_saved")]
    left_out += [(module, "walk") for module in (object_graph, generators, seeded_indices)]
    with ExitStack() as patched:
        for owner, name in left_out:
            patched.enter_context(mock.patch.object(owner, name, nothing))
        patched.enter_context(
            mock.patch.object(seeded_indices.UserGenerators, "more", lambda found: False)
        )
        patched.enter_context(
            mock.patch.object(Redrawn, "_prove", lambda redrawn, done: redrawn.begin(0))
        )
        yield


class FirstStep(startup.FirstStep):
    """Prints the time of the first step.

    The process does without the proof if a variable says so.
    """

    def __init__(self) -> None:
        self.left_out = ExitStack()
        if os.environ.get(WITHOUT_VARIABLE):
            self.left_out.enter_context(without())


class Turns(Callback):
    """Times steps in turns with and without the proof.

    Args:
        n: Turns of each kind.
        steps: Steps of a turn, after a first one that does not count.
    """

    def __init__(self, n: int, steps: int) -> None:
        self.n = n
        self.steps = steps
        self.left_out = ExitStack()
        self.seconds: list[list[float]] = [[]]  # of each step, by turns

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count a step, and end a turn.

        The first step of all is a turn of its own, as it includes the setting up.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        step_end = time.perf_counter()
        if trainer.global_step > 1:
            self.seconds[-1].append(step_end - self.ended)
        if trainer.global_step == 1 or len(self.seconds[-1]) > self.steps:
            self.seconds.append([])
            self.left_out.close()
            if len(self.seconds) % 2:
                self.left_out.enter_context(without())
        trainer.should_stop = len(self.seconds) > 2 * self.n + 1
        self.ended = time.perf_counter()

    @property
    def ratios(self) -> list[float]:
        """Return the seconds of a step with / without the proof, for each pair of turns."""
        turns = [median(seconds[1:]) for seconds in self.seconds[1 : 2 * self.n + 1]]
        return [ours / other for ours, other in zip(turns[::2], turns[1::2], strict=True)]


def steps(name: str, n: int, number: int) -> list[float]:
    """Train in this process, and return the ratios of n pairs of turns of `number` steps."""
    turns = Turns(n, number)
    with training.quiet(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        environment = SageMakerEnvironment(
            model_dir=path / "model", output_data_dir=path, checkpoint_dir=path / "checkpoints"
        )
        flags = [
            "--trainer.max_epochs=-1",
            "--trainer.limit_val_batches=0",
            "--checkpoint.monitor=null",
        ]
        cli = CommandLine(
            environment,
            [*DATA[name], *flags, f"--trainer.accelerator={training.accelerator()}"],
            APPLICATION,
        )
        cli.trainer.callbacks.append(turns)
        cli.trainer.fit(cli.model, cli.datamodule)
    return turns.ratios


def starts(name: str, n: int) -> list[float]:
    """Return the ratios of n pairs of starts, after one that fills the file cache."""
    callback = f"--trainer.callbacks+={__package__}.proof.FirstStep"
    command = [
        sys.executable,
        str(report.ROOT / "app/train.py"),
        callback,
        "--checkpoint.monitor=null",
    ]
    with tempfile.TemporaryDirectory() as folder:
        if name in DATA:
            command += DATA[name]
        else:
            command += [f"--resume.dirpath={folder}/checkpoints"]
            first_start = [*command, "--trainer.max_steps=1"]
            subprocess.run(
                first_start,
                cwd=folder,
                env=report.variables(),
                check=True,
                stdout=subprocess.DEVNULL,
            )
        pairs = [
            (startup.seconds(command), startup.seconds(command, **{WITHOUT_VARIABLE: "1"}))
            for _ in range(n + 1)
        ]
    return [ours / other for ours, other in pairs[1:]]


def run(n: int, number: int, pairs: int) -> list[report.Comparison]:
    """Measure steps and starts."""
    measures = {
        f"step, {name}": partial(steps, name, n, number) for name in ("our loader", "a DataLoader")
    }
    measures |= {f"start, {name}": partial(starts, name, pairs) for name in (*DATA, "resumed")}
    quantities = "seconds: journal, digests and search / without"
    comparisons = []
    for name, measure in measures.items():
        comparisons.append(report.Comparison(name, quantities, measure()))
        print(f"{name}: {median(comparisons[-1].ratios):.4f}", flush=True)
    return comparisons


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.set_defaults(n=PAIRS)
    parser.add_argument(
        "--steps", type=report.positive, default=10, help="steps of a turn (default: %(default)s)"
    )
    parser.add_argument(
        "--starts",
        type=report.positive,
        default=STARTS,
        help="pairs of starts (default: %(default)s)",
    )
    args = parser.parse_args()
    report.publish(run(args.n, args.steps, args.starts))
