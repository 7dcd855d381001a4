"""Processor time of an image, for ours and for the original tutorial's recipe.

    python -m benchmarks.yardstick [--n 3] [--steps 12]

It also shows where the difference comes from. The images/s of `benchmarks.original` depend on the
machine's other work; the processor time of one thread does so much less. It is counted in user
code, in the kernel, which mostly clears memory, and in the original's data worker. The original's
recipe is measured unchanged, and with its freed memory kept as ours is
(sagemaker_lightning/process/allocator.py).
"""

import multiprocessing
import resource
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch

from benchmarks import original, report, training
from benchmarks.training import RandomDataModule
from benchmarks.turns import Clock
from sagemaker_lightning.process import allocator

WARMUP_STEPS = 5  # steps that are not counted
FORK = multiprocessing.get_context("fork")


class Processor(Clock):
    """Counts the processor time of `steps` steps, in seconds by kind.

    Some steps before them do not count.
    """

    def __init__(self, steps: int) -> None:
        self.counted = steps
        self.total_steps = WARMUP_STEPS + steps
        self.done = 0
        self.images = 0
        self.used: dict[str, float] = {}

    def tick(self, images: int) -> None:
        """Count a step that trained on `images`."""
        self.done += 1
        if self.done == WARMUP_STEPS:
            self.before = _used()
        elif self.done > WARMUP_STEPS:
            self.images += images
        if self.done == self.total_steps:
            self.used = {kind: seconds - self.before[kind] for kind, seconds in _used().items()}


def _used() -> dict[str, float]:
    own_usage = resource.getrusage(resource.RUSAGE_SELF)
    worker = sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children())
    return {
        "user": own_usage.ru_utime,
        "kernel": own_usage.ru_stime,
        "worker": worker,
        "pages": float(own_usage.ru_minflt),
    }


def kept(clock: Clock) -> None:
    """Train by the original's recipe with freed memory kept."""
    allocator.keep_freed_memory()
    original.recipe(clock, None)


def sides() -> dict[str, Callable[[Clock], None]]:
    """Return the trainings that are compared, by name."""
    flags = [f"--data={RandomDataModule.__module__}.{RandomDataModule.__name__}"]
    return {
        "the original's recipe": partial(original.recipe, data_dir=None),
        "the same, its freed memory kept": kept,
        "ours, as the original trains": partial(training.train, data=flags),
        "ours, recipe cpu": partial(training.train, data=["--config=cpu", *flags], batch_size=None),
    }


def measure(train: Callable[[Clock], None], steps: int) -> dict[str, Any]:
    """Return the milliseconds of an image by kind, and the pages cleared for it.

    They are those of a new process of one thread.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_measure, args=(train, steps, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit("error: a training failed, see above") from None
    finally:
        process.join()


def _measure(train: Callable[[Clock], None], steps: int, sender) -> None:
    torch.set_num_threads(1)
    clock = Processor(steps)
    train(clock)
    milliseconds = {
        kind: 1000 * clock.used[kind] / clock.images for kind in ("user", "kernel", "worker")
    }
    sender.send(milliseconds | {"pages": clock.used["pages"] / clock.images})


def run(n: int, steps: int) -> None:
    """Measure each training n times, in turns, and print the table."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in sides()}
    for _ in range(n):
        for name, train in sides().items():
            measured[name].append(measure(train, steps))
            print(
                name,
                {kind: round(value, 3) for kind, value in measured[name][-1].items()},
                flush=True,
            )
    print(
        f"\n{report.machine()}\n\n"
        "| ms of an image | user | kernel | data worker | all | pages | n |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, values in measured.items():
        user, kernel, worker, pages = (
            statistics.median(value[kind] for value in values)
            for kind in ("user", "kernel", "worker", "pages")
        )
        all_kinds = [value["user"] + value["kernel"] + value["worker"] for value in values]
        spread = f"{statistics.median(all_kinds):.2f} [{min(all_kinds):.2f}..{max(all_kinds):.2f}]"
        print(
            f"| {name} | {user:.2f} | {kernel:.2f} | {worker:.2f} | {spread} | {pages:.0f} | {n} |"
        )


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.set_defaults(n=3)
    parser.add_argument(
        "--steps", type=report.positive, default=12, help="steps that are counted (default: 12)"
    )
    run(**vars(parser.parse_args()))
