"""What a checkpoint of ExactResume costs a training, against Lightning's own.

    python -m benchmarks.checkpoint_cost [--n 10]

Both save at the same steps, in turns. The stall is the time from the end of a step that is saved to
the beginning of the next one, less the median of that time at other steps. The size is that of the
file.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torchvision.models import resnet18

from benchmarks import report
from benchmarks.small_steps import Case, Transformer, fit, images, mlp, tokens, vectors
from sagemaker_lightning import ExactResume

PAIRS = 10  # default of --n
EVERY = 8  # steps between two checkpoints: what is written in the background is done by then
SAVES = 3  # checkpoints of a training; the first one is left out
CASES = {
    "ResNet-18": Case(partial(resnet18, num_classes=2), images, 8),
    "a small transformer": Case(Transformer, tokens, 16),
    "MLP 20-1024-2": Case(partial(mlp, 1024), vectors, 256),
}


class Gaps(Callback):
    """Measures the seconds between two steps; it comes before what saves."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        """By the number of optimizer steps done."""
        self.ended = 0.0

    def on_train_batch_end(self, *_: object) -> None:
        """Note that a step ends."""
        self.ended = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        """Note the time since the step before."""
        if trainer.global_step:
            self.seconds[trainer.global_step] = time.perf_counter() - self.ended

    def stall(self) -> float:
        """Return the median seconds that a save takes."""
        saved = range(2 * EVERY, SAVES * EVERY + 1, EVERY)
        usual = median(
            seconds for step, seconds in self.seconds.items() if step > EVERY and step % EVERY
        )
        return median(self.seconds[step] for step in saved) - usual


def measure(case: Case, exact: bool) -> tuple[float, int]:
    """Return the seconds that a checkpoint stalls, and its size in bytes."""
    gaps = Gaps()
    with tempfile.TemporaryDirectory() as folder:
        saves = (
            ExactResume(folder, seed=1, every_n_steps=EVERY, every_n_minutes=0)
            if exact
            else ModelCheckpoint(folder, every_n_train_steps=EVERY, save_top_k=-1)
        )
        loader = case.loader(2 * SAVES * EVERY)
        fit(case, False, loader, gaps, saves, max_steps=SAVES * EVERY + 1)
        size = max(path.stat().st_size for path in Path(folder).rglob("*.ckpt"))
    return gaps.stall(), size


def run(n: int) -> list[report.Comparison]:
    """Measure all cases."""
    comparisons = []
    for name, case in CASES.items():
        pairs = [(measure(case, True), measure(case, False)) for _ in range(n)]
        stalls = [exact[0] / plain[0] for exact, plain in pairs]
        sizes = [exact[1] / plain[1] for exact, plain in pairs]
        print(f"{name}: {median(stalls):.2f}, {median(sizes):.3f}", flush=True)
        comparisons += [
            report.Comparison(f"{name}: stall", "seconds, ExactResume / Lightning", stalls),
            report.Comparison(f"{name}: size", "bytes, ExactResume / Lightning", sizes),
        ]
    return comparisons


def arguments() -> argparse.Namespace:
    """Return the flags."""
    parser = report.parser(__doc__)
    parser.set_defaults(n=PAIRS)
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    report.publish(run(args.n))
