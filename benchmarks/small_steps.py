"""What ExactResume costs in user code of small steps, and before the first step.

    python -m benchmarks.small_steps [--n 5] [--steps 100] [--starts 5]

Each step's ratio is the processor seconds of a step with ExactResume / with plain Lightning, of one
thread and its data workers. Two processes take turns of `--steps` steps, or of a tenth where a step
takes long, so that other work affects both; each ratio is the median of their turns. A start's
figures are the processor seconds that ExactResume adds, from `fit` to the first step; an epoch's of
20 steps are those with ExactResume and its checkpoint / with Lightning's own checkpoint. Python's
garbage collector has looked at all that the imports have made before `fit` begins: that takes a
quarter of a second, and one side or the other would get it by chance. glibc's malloc keeps its
memory in both: by default, it gives some back to the kernel and takes it again, 80 to 900 pages a
step by luck (measured for the net 1,024 wide), and two processes of the same code had ratios from
0.74 to 1.42; with this, from 0.92 to 1.06 (n = 8 each).
"""

import argparse
import gc
import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from benchmarks import report, turns
from sagemaker_lightning import ExactResume

PAIRS = 5  # default of --n and of --starts
STEPS = 100  # default of --steps
MODULES = 1000  # of the model with many parameters, with two each
EPOCH = 20  # steps of the epoch that ends with a checkpoint


class Classifier(LightningModule):
    """Trains a net on pairs of inputs and classes, with AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        inputs, classes = batch
        return nn.functional.cross_entropy(self.net(inputs), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Transformer(nn.Module):
    """Two encoder layers, 128 wide, on 128 tokens; classes int64 [batch] of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the classes' scores, float32 [batch, 2], of tokens, int64 [batch, 128]."""
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


@dataclass(frozen=True)
class Case:
    """A net, and the data that it is trained on."""

    net: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    """Returns the inputs of a number of samples."""
    batch_size: int
    workers: int = 0
    slow: bool = False
    """Whether a turn has a tenth of the steps."""

    def loader(self, steps: int) -> DataLoader:
        """Return a loader of a number of batches."""
        size = steps * self.batch_size
        data = TensorDataset(self.inputs(size), torch.randint(2, (size,)))
        options = {"num_workers": self.workers, "persistent_workers": self.workers > 0}
        return DataLoader(data, self.batch_size, shuffle=True, **options)


def mlp(width: int) -> nn.Module:
    """Return a net of one hidden layer."""
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 2))


def many_parameters() -> nn.Module:
    """Return a net with thousands of parameters, of 8 numbers or fewer each."""
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(MODULES - 1)), nn.Linear(1, 2))


def vectors(size: int) -> Tensor:
    """Return float32 [size, 20]."""
    return torch.randn(size, 20)


def numbers(size: int) -> Tensor:
    """Return float32 [size, 1]."""
    return torch.randn(size, 1)


def tokens(size: int) -> Tensor:
    """Return int64 [size, 128]."""
    return torch.randint(1000, (size, 128))


def images(size: int) -> Tensor:
    """Return float32 [size, 3, 32, 32]."""
    return torch.randn(32, 3, 32, 32).repeat(-(-size // 32), 1, 1, 1)[:size]


CASES = {
    "MLP 20-64-2, batch 32": Case(partial(mlp, 64), vectors, 32),
    "MLP 20-1024-2, batch 256": Case(partial(mlp, 1024), vectors, 256),
    "the same, 2 data workers": Case(partial(mlp, 1024), vectors, 256, workers=2),
    "transformer, batch 16 x 128": Case(Transformer, tokens, 16, slow=True),
    "ResNet-18, batch 32": Case(partial(resnet18, num_classes=2), images, 32, slow=True),
}
STARTS = {
    "a small model": Case(partial(mlp, 64), vectors, 32),
    f"{2 * MODULES} parameters": Case(many_parameters, numbers, 8),
}


def cpu_seconds() -> float:
    """Return the processor seconds of this process and of its children."""
    nanoseconds = 0
    children = Path("/proc/self/task").glob("*/children")
    for child in " ".join(file.read_text() for file in children).split():
        with suppress(OSError):  # it has just ended
            nanoseconds += int(Path(f"/proc/{child}/schedstat").read_text().split()[0])
    return time.process_time() + nanoseconds / 1e9


def fit(case: Case, exact: bool, loader: DataLoader, *callbacks: Callback, **options: int) -> float:
    """Train, with ExactResume or without; return the processor seconds before that."""
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(1)
        first = [ExactResume(folder, seed=1)] if exact else []
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        quiet |= {"default_root_dir": folder, "accelerator": "cpu", "num_sanity_val_steps": 0}
        quiet["enable_checkpointing"] = any(isinstance(each, ModelCheckpoint) for each in callbacks)
        trainer = Trainer(callbacks=[*first, *callbacks], **quiet, **options)
        model = Classifier(case.net())
        gc.collect()
        began = cpu_seconds()
        trainer.fit(model, loader)
        return began


def take_turns(case: Case, exact: bool, clock: turns.Clock) -> None:
    """Train as many steps as a clock asks for."""
    # A step more: nothing that ends an epoch is part of a turn.
    steps = clock.total_steps + 1
    fit(case, exact, case.loader(steps), clock, max_steps=clock.total_steps, max_epochs=1)


def step_ratios(case: Case, n: int, steps: int) -> list[float]:
    """Return n ratios of a step's processor seconds."""
    ratios = []
    for _ in range(n):
        sides = [partial(take_turns, case, exact) for exact in (True, False)]
        # Processes that are forked from one have its addresses: each pair would have the same luck.
        rates = turns.pair(*sides, steps, now=cpu_seconds)
        ratios.append(median(plain / exact for exact, plain in rates))
    return ratios


class FirstStep(Callback):
    """Notes when the first step begins, in processor seconds."""

    at = 0.0

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        """Note it."""
        self.at = self.at or cpu_seconds()


def seconds_to_first_step(case: Case, exact: bool) -> float:
    """Return the processor seconds from `fit` to the first step, in this process."""
    loader = case.loader(EPOCH)
    first_step = FirstStep()
    began = fit(case, exact, loader, first_step, max_steps=1)
    return first_step.at - began


def seconds_of_epoch(case: Case, exact: bool) -> float:
    """Return the processor seconds of an epoch with its checkpoint, in this process."""
    loader = case.loader(EPOCH)
    with tempfile.TemporaryDirectory() as folder:
        began = fit(
            case, exact, loader, *([] if exact else [ModelCheckpoint(folder)]), max_epochs=1
        )
        return cpu_seconds() - began


def pairs(measure: Callable[[Case, bool], float], case: Case, n: int) -> list[tuple[float, float]]:
    """Return n pairs of what `measure` returns, exact and plain, each of a new process."""
    context = multiprocessing.get_context("fork")

    def measured(exact: bool) -> float:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=lambda: sender.send(measure(case, exact)))
        process.start()
        sender.close()  # so that a process that fails is no reason to wait
        seconds = receiver.recv()
        process.join()
        return seconds

    return [(measured(True), measured(False)) for _ in range(n)]


def run(n: int, steps: int, starts: int) -> list[report.Comparison]:
    """Measure all cases."""
    os.environ.update(report.KEEPS_MEMORY)  # a process reads it when it starts
    comparisons = []
    for name, case in CASES.items():
        ratios = step_ratios(case, n, max(1, steps // 10) if case.slow else steps)
        comparisons.append(
            report.Comparison(name, "CPU seconds of a step, ExactResume / plain", ratios)
        )
        print(f"{name}: {median(ratios):.3f}", flush=True)
    for name, case in STARTS.items():
        added = [exact - plain for exact, plain in pairs(seconds_to_first_step, case, starts)]
        comparisons.append(
            report.Comparison(f"start, {name}", "CPU seconds, ExactResume - plain", added)
        )
    ratios = [exact / plain for exact, plain in pairs(seconds_of_epoch, case, starts)]
    comparisons.append(
        report.Comparison(
            f"an epoch of {EPOCH} steps, {name}", "CPU seconds, ExactResume / plain", ratios
        )
    )
    return comparisons


def arguments() -> argparse.Namespace:
    """Return the flags."""
    parser = report.parser(__doc__)
    parser.set_defaults(n=PAIRS)
    parser.add_argument(
        "--steps",
        type=report.positive,
        default=STEPS,
        help="steps of a turn (default: %(default)s)",
    )
    parser.add_argument(
        "--starts",
        type=report.positive,
        default=PAIRS,
        help="pairs of starts (default: %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    report.publish(run(args.n, args.steps, args.starts))
