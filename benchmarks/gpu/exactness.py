"""Interrupted jobs on the GPU, and their results; see benchmarks/interruptions.py."""

import random
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import interruptions
from benchmarks.gpu.runner import FORK
from benchmarks.interrupted_jobs import Process

# The example application on its default data, 41 steps an epoch; a checkpoint each 25 steps.
FLAGS = {
    "trainer.max_epochs": "12",
    "resume.every_n_steps": "25",
    "resume.every_n_minutes": "0",
    "seed_everything": "7",
    "progress.every_n_seconds": "100",
}
TRIES = 2  # interruptions of a job, at most


class Job(Process):
    """A job as one process, forked from this one, which has imported everything."""

    def __init__(self, folder: Path, flags: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.flags = flags
        self.server = FORK

    def result(self) -> str:
        """Return the hash of the weights."""
        import interruptible

        return interruptible.weights(self.model)


def left_alone(flags: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Return the weights of two uninterrupted jobs side by side, and the seconds of both."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        jobs = [Job(Path(work, str(number)), flags) for number in range(2)]
        began = time.monotonic()
        for job in jobs:
            job.start()
        for job in jobs:
            if job.wait(600) != 0:
                raise SystemExit((job.folder / "log").read_text())
        return {
            "weights": [job.result() for job in jobs],
            "seconds": time.monotonic() - began,
        }


def interrupted(
    flags: Mapping[str, str],
    folder: Path,
    setting_records: Callable[[], list[Mapping[str, Any]]],
    jobs: int,
) -> dict[str, Any]:
    """Interrupt jobs, side by side; return a record of each.

    The record says how the job went, and whether its weights are those of an uninterrupted one.
    `setting_records` returns this setting's records; the first is of uninterrupted jobs.
    """
    alone = next((record for record in setting_records() if record["round"] == 0), None)
    if not alone:
        raise SystemExit("there is no job left alone to compare with")
    with tempfile.TemporaryDirectory(dir=folder) as work, ProcessPoolExecutor(jobs, FORK) as pool:
        folders = [Path(work, str(count)) for count in range(jobs)]
        running = [
            pool.submit(_one, flags, job_folder, alone, job_folder.name) for job_folder in folders
        ]
        return {"jobs": [job.result() for job in running]}


def _one(
    flags: Mapping[str, str], folder: Path, alone: Mapping[str, Any], seed: str
) -> dict[str, Any]:
    job = Job(folder, flags)
    draw = random.Random(seed)
    counts = dict.fromkeys(("kills", "stops", "wrong", "hung"), 0)
    stop_seconds = []
    is_right = interruptions.interrupted(
        job, alone["seconds"], alone["weights"][0], draw, counts, stop_seconds, TRIES
    )
    log = (folder / "log").read_text()
    print(log, flush=True)
    resumed = [int(step) for step in re.findall(r"^resuming from step (\d+)", log, re.MULTILINE)]
    return {"right": is_right, "resumed": resumed, **counts}
