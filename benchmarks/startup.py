"""Seconds from the start of `python app/train.py` to its first optimizer step / seconds of its imports alone.

    python -m benchmarks.startup [--n 5]

The imports alone are those of a process that imports torch, torchvision and pytorch_lightning and ends.
"""

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from benchmarks import report

PROGRAM = [str(report.ROOT / "app" / "train.py"), f"--trainer.callbacks+={__package__}.startup.FirstStep"]
PAIRS = 5  # default of --n
IMPORTS = ["-c", "import torch, torchvision, pytorch_lightning, time; print(time.time())"]


class FirstStep(Callback):
    """Prints the time, in seconds since 1970, when the first optimizer step is done, and ends the process."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print and leave."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(time.time(), flush=True)
        os._exit(0)


def seconds(arguments: list[str]) -> float:
    """Return the seconds from before Python is started with `arguments` to the time it prints in its last line."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(report.ROOT)},
            capture_output=True,
            text=True,
        )
    if ended.returncode:
        raise SystemExit(f"{ended.stderr}error: {' '.join(arguments)} failed, see above")
    return float(ended.stdout.split()[-1]) - started


def run(n: int) -> report.Comparison:
    """Compare in n pairs, after one that fills the file cache and is not counted."""
    ratios = []
    for pair in range(n + 1):
        ours, imports = seconds(PROGRAM), seconds(IMPORTS)
        if pair:
            ratios.append(ours / imports)
            print(f"startup: {ours:.2f} / {imports:.2f} = {ratios[-1]:.3f}", flush=True)
    what = "seconds: start to first optimizer step of app/train.py / importing torch, torchvision, pytorch_lightning"
    return report.Comparison("startup", what, ratios)


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.set_defaults(n=PAIRS)
    report.publish([run(**vars(parser.parse_args()))])
