"""Seconds from the death of a rank to its next step / from a start to the first step.

    python -m benchmarks.restart [--n 5]

A job of two ranks is started by the toolkit's `train`, with the default data. After half a minute,
one rank is killed, and all start again in the container. Both times are those of one run. A new job
would need a new container as well, which takes minutes; the ratio leaves it out.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from benchmarks import report, startup

CALLBACK = f"{__package__}.restart.Dies"
PAIRS = 5  # default of --n
TRAINS_SECONDS = 30.0  # from the first step to the death
STEPS_AFTER = 3  # of the restarted ranks
BACK = re.compile(r"^restart 1: on from step \d+ within ([\d.]+) s", re.MULTILINE)


class Dies(Callback):
    """Prints the time of the first step's end in seconds since 1970; kills the last rank once."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note whether this is the run that is killed."""
        self.mark = Path(os.environ["SAGEMAKER_BASE_DIR"], "killed")
        self.is_first_run = not self.mark.exists()
        self.steps = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print the time, kill this rank, or end the training."""
        self.steps += 1
        if not self.is_first_run:
            trainer.should_stop = self.steps >= STEPS_AFTER
            return
        if self.steps == 1:
            self.began = time.monotonic()
            if trainer.is_global_zero:
                print(time.time(), flush=True)
        is_last = trainer.global_rank == trainer.world_size - 1
        if is_last and time.monotonic() - self.began >= TRAINS_SECONDS:
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def back_and_start() -> tuple[float, float]:
    """Return the seconds from the death to the next step, and those of the start."""
    with tempfile.TemporaryDirectory() as base_dir:
        startup.settings(
            Path(base_dir),
            **{
                "trainer.callbacks+": CALLBACK,
                "trainer.accelerator": "cpu",
                "trainer.devices": "2",
                "trainer.max_epochs": "1000",
            },
        )
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        began = time.time()
        completed = subprocess.run(
            [str(report.ROOT / "entrypoint.sh"), "train"],
            cwd=base_dir,
            env=report.variables(
                PATH=path,
                SAGEMAKER_BASE_DIR=base_dir,
                SAGEMAKER_PROGRAM="app/train_multi_node.py",
                SAGEMAKER_TRAINING_MODULE="sagemaker_lightning.launch.toolkit_hook:main",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    started = re.search(r"^\d{9,}\.\d+$", completed.stdout, re.MULTILINE)
    back = BACK.search(completed.stdout)
    if completed.returncode or not (started and back):
        raise SystemExit(f"{completed.stdout}error: the job was not started again, see above")
    return float(back[1]), float(started[0]) - began


def run(n: int) -> list[report.Comparison]:
    """Compare in n rounds, after one that fills the file cache and does not count."""
    ratios = []
    for number in range(n + 1):
        back, start = back_and_start()
        if number:
            ratios.append(back / start)
            print(f"restart: {back:.1f} / {start:.1f} = {back / start:.3f}", flush=True)
    what = "seconds: a rank's death to the next step / start to the first step"
    return [report.Comparison("restart, two ranks", what, ratios)]


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.set_defaults(n=PAIRS)
    report.publish(run(**vars(parser.parse_args())))
