"""Two trainings that take turns of about a second, so that other work affects both.

Measured one after another as wholes, on a machine with other work, the same pair gave ratios from
0.6 to 5. Each training has a process of its own, as in real life: threads of one process do not get
memory in the same way. While one has its turn, the other sleeps. A process's luck with its memory
can be worth 10 % for all its life, so every pair has two new processes.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Semaphore
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from benchmarks import report

PAIRS = 5  # default of --n
TURNS = 6  # of each of a pair
# Untimed steps at the start of a turn (at most `steps`): caches, threads, a worker's full queue.
WARMUP_STEPS = 5


class Clock(Callback):
    """Times one of the two trainings.

    In each turn, some steps are untimed and `steps` are timed; then it is the other's turn. The
    first turn includes the setting up; leave it out. `now` returns the seconds that count.
    """

    def __init__(
        self,
        steps: int,
        my_turn: Semaphore,
        other_turn: Semaphore,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.now = now
        self.my_turn = my_turn
        self.other_turn = other_turn
        self.steps = steps
        self.step = 0
        self.images = 0
        self.started = 0.0
        self.warmup = min(WARMUP_STEPS, steps)
        self.total_steps = TURNS * (self.warmup + steps)
        self.rates: list[float] = []  # images/s of each turn

    def tick(self, images: int) -> None:
        """Count a step that trained on `images`; at the end of a turn, wait for the next one."""
        self.step = (self.step + 1) % (self.warmup + self.steps)
        self.images += images
        if self.step not in (0, self.warmup):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.step == 0:
            self.rates.append(self.images / (self.now() - self.started))
            self.other_turn.release()
            self.my_turn.acquire()
        self.images = 0
        self.started = self.now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step."""
        self.tick(len(batch[1]))


def compare(
    name: str,
    what: str,
    ours: Callable[[Clock], None],
    other: Callable[[Clock], None],
    n: int,
    steps: int,
) -> report.Comparison:
    """Return n ratios of images/s, each the median over the turns of two processes.

    Both functions train for `clock.total_steps` steps.
    """
    ratios = []
    for _ in range(n):
        turns = pair(ours, other, steps)
        ratios.append(statistics.median(our_rate / other_rate for our_rate, other_rate in turns))
        our_rate, other_rate = (statistics.median(rates) for rates in zip(*turns, strict=True))
        print(
            f"{name}: {our_rate:.1f} / {other_rate:.1f} images/s, ratio {ratios[-1]:.3f}",
            flush=True,
        )
    return report.Comparison(name, f"images/s, {what}", ratios)


def pair(
    ours: Callable[[Clock], None],
    other: Callable[[Clock], None],
    steps: int,
    start: str = "spawn",
    now: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, float]]:
    """Return the images/s of both trainings in each turn; each has a new process.

    `start` is the method by which processes start: "spawn", or "fork", which saves the imports if
    this process uses no CUDA. `now` returns the seconds that count.
    """
    context = multiprocessing.get_context(start)
    turns = [context.Semaphore(1), context.Semaphore(0)]
    pipes = [context.Pipe(duplex=False) for _ in turns]
    clocks = [Clock(steps, *turns, now), Clock(steps, *reversed(turns), now)]
    processes = [
        context.Process(target=_train, args=(train, clock, sender))
        for train, clock, (_, sender) in zip((ours, other), clocks, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    while running := [process.sentinel for process in processes if process.is_alive()]:
        wait(running)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
            raise SystemExit("error: a training failed, see above")
    return list(zip(*(receiver.recv() for receiver, _ in pipes), strict=True))[1:]


def _train(train: Callable[[Clock], None], clock: Clock, sender: Connection) -> None:
    """Run one of the two processes: wait for the first turn, train, and send the rates.

    At the end, it lets the other one end.
    """
    clock.my_turn.acquire()
    train(clock)
    sender.send(clock.rates)
    clock.other_turn.release()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --steps, and give --n its default here."""
    parser.set_defaults(n=PAIRS)
    parser.add_argument(
        "--steps", type=report.positive, default=10, help="timed steps of a turn (default: 10)"
    )
