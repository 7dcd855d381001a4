"""images/s of trainings side by side on one machine: ours / with threads that spin for long.

    python -m benchmarks.side_by_side [--n 5] [--jobs 1 2 4] [--seconds 3]

Each job is a process of its own, `python app/train.py` on random images in batches of 32. The two
kinds take turns. In a turn, as many jobs as are asked for train at the same time, for so many
seconds after one that does not count; all others sleep. The waiting threads of the second kind
spin for milliseconds: its GOMP_SPINCOUNT is libgomp's own default. The runtime leaves the variable
alone, like every variable that a user sets (sagemaker_lightning/process/threads.py). The last rows
compare all jobs together with one job alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from benchmarks import report
from benchmarks.training import BATCH_SIZE, RandomDataModule, accelerator

# The count is from libgomp's manual, GOMP_SPINCOUNT.
KINDS = {"ours": {}, "spinning": {"GOMP_SPINCOUNT": "300000"}}
# Variables with these beginnings are not handed on: both kinds start without them.
LEFT_OUT_PREFIXES = ("OMP_", "GOMP_", "MKL_")
UNTIMED_SECONDS = 1.0  # at the start of a turn, in which the jobs wake up
TURNS = 2  # of each number of jobs, for each kind of a pair
OUTPUT_MARK = "side by side:"


class Job(Callback):
    """Trains when stdin says so, for as many seconds as it says, and prints the images/s."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the first turn."""
        self._wait("ready")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the images; at the end of a turn, return when the next one starts."""
        step_end = time.perf_counter()
        if self.started is None:
            if step_end >= self.begin:
                self.started = step_end
            return
        self.images += len(batch[1])
        if step_end >= self.started + self.seconds:
            self._wait(self.images / (step_end - self.started))

    def _wait(self, message: object) -> None:
        print(OUTPUT_MARK, message, flush=True)
        order = sys.stdin.readline()
        if not order:
            os._exit(0)  # a model is of no use to anybody here
        self.seconds = float(order)
        self.images = 0
        self.started = None
        self.begin = time.perf_counter() + UNTIMED_SECONDS


class Started:
    """A started job; it sleeps outside its turns."""

    def __init__(self, folder: str, kind_variables: dict[str, str]) -> None:
        data_class = f"{RandomDataModule.__module__}.{RandomDataModule.__name__}"
        flags = [
            f"--data={data_class}",
            f"--data.batch_size={BATCH_SIZE}",
            f"--trainer.callbacks+={__package__}.side_by_side.Job",
        ]
        flags += [
            f"--trainer.accelerator={accelerator()}",
            "--trainer.devices=1",
            "--trainer.enable_checkpointing=false",
        ]
        variables = {
            name: value
            for name, value in report.variables().items()
            if not name.startswith(LEFT_OUT_PREFIXES)
        }
        self.process = subprocess.Popen(
            [sys.executable, str(report.ROOT / "app/train.py"), *flags],
            cwd=folder,
            env=variables | kind_variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, seconds: float) -> None:
        """Let the job train."""
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """Return the job's next message."""
        for line in self.process.stdout:
            if line.startswith(OUTPUT_MARK):
                return line.removeprefix(OUTPUT_MARK).strip()
        raise SystemExit("error: a training failed, see above")

    def end(self) -> None:
        """End the job."""
        self.process.stdin.close()
        self.process.wait()


def run(n: int, jobs: list[int], seconds: float) -> list[report.Comparison]:
    """Compare in n pairs, each of new processes."""
    ratios: dict[int, list[float]] = {count: [] for count in jobs}
    together: dict[int, list[float]] = {count: [] for count in jobs if count > 1 and 1 in jobs}
    for _ in range(n):
        rates = _pair(jobs, seconds)
        for count in jobs:
            ours, spinning = (rates[kind, count] for kind in KINDS)
            ratios[count].append(ours / spinning)
            print(
                f"{_name(count)}: {ours:.1f} / {spinning:.1f} images/s = {ratios[count][-1]:.3f}",
                flush=True,
            )
        for count, speedups in together.items():
            speedups.append(rates["ours", count] / rates["ours", 1])
    quantities = "images/s of all jobs: as they come / with waiting threads that spin for long"
    comparisons = [
        report.Comparison(_name(count), quantities, values) for count, values in ratios.items()
    ]
    quantities = "images/s: of all jobs side by side / of one alone"
    return comparisons + [
        report.Comparison(f"{_name(count)} to one", quantities, values)
        for count, values in together.items()
    ]


def _pair(jobs: list[int], seconds: float) -> dict[tuple[str, int], float]:
    """Return the images/s of all jobs together, by kind and number of jobs."""
    rates: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        started_jobs = {
            kind: [Started(folder, kind_variables) for _ in range(max(jobs))]
            for kind, kind_variables in KINDS.items()
        }
        try:
            for job in (job for jobs_of_kind in started_jobs.values() for job in jobs_of_kind):
                job.hear()
            for turn in range(TURNS):
                for count in jobs:
                    for kind in sorted(KINDS, reverse=bool(turn % 2)):
                        for job in started_jobs[kind][:count]:
                            job.tell(seconds)
                        rate = sum(float(job.hear()) for job in started_jobs[kind][:count])
                        rates[kind, count] = rates.get((kind, count), 0.0) + rate / TURNS
        finally:
            for job in (job for jobs_of_kind in started_jobs.values() for job in jobs_of_kind):
                job.end()
    return rates


def _name(count: int) -> str:
    return f"{count} job{'s' if count > 1 else ''}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --jobs and --seconds, and give --n its default here."""
    parser.set_defaults(n=5)
    parser.add_argument(
        "--jobs", type=report.positive, nargs="+", default=[1, 2, 4], help="(default: 1 2 4)"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="timed seconds of a turn (default: 3)"
    )


if __name__ == "__main__":
    parser = report.parser(__doc__)
    add_arguments(parser)
    report.publish(run(**vars(parser.parse_args())))
