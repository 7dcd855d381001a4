"""Seconds of training to an accuracy, by a recipe: n runs with n seeds.

    python -m benchmarks.accuracy RECIPE --data_dir DIR [--n 5] [-- FLAGS]
    python -m benchmarks.accuracy fast --data_dir cifar10 --n 25

Each run goes through the ordinary `app/train.py`. The benchmark prints for each run: the seconds of
training on the device, from the first step's start to the last step's end; these seconds without
the first two steps, in which a recipe that compiles does so; the seconds of the whole process; and
the accuracy on the test set, which is evaluated once.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from benchmarks import report

CALLBACK = f"{__package__}.accuracy.Watch"


class Watch(Callback):
    """Prints the seconds from the start of training to its second step's end, and to its end."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.began = self._now()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Print the seconds of the first two steps."""
        if trainer.global_step == 2:
            print(f"first two steps in {self._now() - self.began:.3f} s", flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the seconds of all steps."""
        print(f"trained in {self._now() - self.began:.3f} s", flush=True)

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


class Run(NamedTuple):
    """The seconds and the accuracy of a training."""

    seconds: float
    """Those of training."""
    steady: float
    """Those of training, after its first two steps."""
    process: float
    """Seconds of the whole process."""
    accuracy: float
    """On the test set."""


def arguments(recipe: str, data_dir: Path, seed: int) -> list[str]:
    """Return the flags with which a recipe is measured."""
    recipe_flags = [f"--config={recipe}", f"--data.data_dir={data_dir}", "--data=CIFAR10DataModule"]
    return [
        *recipe_flags,
        f"--trainer.callbacks+={CALLBACK}",
        f"--seed_everything={seed}",
        f"--data.seed={seed}",
    ]


def printed(log: str, process: float) -> Run:
    """Return the values that a training has logged."""
    patterns = (r"trained in (\S+) s", r"first two steps in (\S+) s", r"test_acc=(\S+)")
    seconds, first_steps, accuracy = (float(re.search(pattern, log)[1]) for pattern in patterns)
    return Run(seconds, seconds - first_steps, process, accuracy)


def once(recipe: str, data_dir: Path, seed: int, flags: list[str]) -> Run:
    """Train once."""
    command = [
        sys.executable,
        str(report.ROOT / "app/train.py"),
        *arguments(recipe, data_dir, seed),
        *flags,
    ]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        completed = subprocess.run(
            command, cwd=folder, env=report.variables(), capture_output=True, text=True
        )
        process_seconds = time.perf_counter() - began
    if completed.returncode:
        raise SystemExit(
            f"{completed.stdout}{completed.stderr}error: the training failed, see above"
        )
    return printed(completed.stdout, process_seconds)


def run(recipe: str, data_dir: Path, n: int, flags: list[str]) -> None:
    """Train n times, and print the table."""
    runs = []
    for seed in range(1, n + 1):
        runs.append(once(recipe, data_dir.resolve(), seed, flags))
        print(
            f"{recipe} seed={seed}: {runs[-1].seconds:.2f} s of training, "
            f"test_acc={runs[-1].accuracy:.4f}",
            flush=True,
        )
    print(
        f"\n{report.machine()}\n\n| recipe | what | median [range] | mean | n |\n"
        "| --- | --- | --- | --- | --- |"
    )
    names = (
        "seconds of training",
        "after its first two steps",
        "seconds of the process",
        "test accuracy",
    )
    for name, values in zip(names, zip(*runs, strict=True), strict=True):
        middle = statistics.median(values)
        mean = statistics.fmean(values)
        print(
            f"| {recipe} | {name} | {middle:.4g} [{min(values):.4g}..{max(values):.4g}] | "
            f"{mean:.4g} | {n} |"
        )


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.set_defaults(n=5)
    parser.add_argument("recipe", help="a name in app/recipes, or a file")
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with CIFAR-10")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    run(**vars(parser.parse_args(sys.argv[1:end])), flags=sys.argv[end + 1 :])
