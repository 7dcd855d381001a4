"""Interrupts jobs at random moments, many times, and compares their results.

    python -m benchmarks.interruptions soak KIND --rounds=20 --seed=1
                                               KIND: process, train, ranks, torchrun, nodes
    python -m benchmarks.interruptions cost

`cost` measures what being interruptible costs. A round of `soak` interrupts a job until it has come
to its end, which takes up to six tries. All of the job, or one process of it, gets SIGKILL or
SIGTERM, at a moment drawn evenly from the job's whole time, start-up included. A round is right if
its weights are those of an uninterrupted job to the last bit, and no step was done in two ways.

`process` is one process forked from a server that has imported everything. `train`, `ranks` (two,
by Lightning) and `torchrun` (two) go through the toolkit. `nodes` are two containers of the tests'
image.
"""

import argparse
import random
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from benchmarks.interrupted_jobs import KINDS

HANG_SECONDS = 120  # seconds from an interruption to the end of all; what takes longer hangs


def soak(kind: str, rounds: int, seed: int) -> None:
    """Interrupt `rounds` jobs, and print the results."""
    draw = random.Random(seed)
    counts = dict.fromkeys(("kills", "stops", "wrong", "hung"), 0)
    stop_seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "whole"):  # the first one finds nothing in any cache
            uninterrupted = KINDS[kind](Path(folder, name))
            began = time.monotonic()
            uninterrupted.start()
            assert uninterrupted.wait(300) == 0, "the job fails without an interruption, too"
            seconds = time.monotonic() - began
            expected = uninterrupted.result()
        for number in range(rounds):
            job = KINDS[kind](Path(folder, str(number)))
            is_right = interrupted(job, seconds, expected, draw, counts, stop_seconds)
            if not is_right:
                shutil.copytree(
                    job.folder, Path(tempfile.mkdtemp(prefix=f"wrong-{kind}-{number}-"), "job")
                )
            shutil.rmtree(job.folder)
            print(
                f"{kind} seed={seed} round={number} {'right' if is_right else 'WRONG'} {counts}",
                flush=True,
            )
    print(
        f"{kind}: {rounds} jobs of {seconds:.0f} s, seed {seed}: {counts}; "
        f"from a stop to the end of all {median(stop_seconds or [0]):.1f} s, "
        f"{max(stop_seconds or [0]):.1f} s at most",
        flush=True,
    )


def interrupted(
    job,
    seconds: float,
    expected: object,
    draw: random.Random,
    counts: dict[str, int],
    stop_seconds: list[float],
    tries=6,
) -> bool:
    """Interrupt a job `tries` times within `seconds` each, let it end, and check its result.

    Return whether the result is `expected`. The job adds to `counts`, and to `leaving`, the seconds
    from a stop to the end of all processes.
    """
    for _ in range(tries):
        job.start()
        if job.wait(draw.uniform(0, seconds)) is None:
            stop_seconds.append(interrupt(job, draw, counts))
    job.start()
    status = job.wait(300)
    try:
        is_right = status == 0 and job.result() == expected
    except AssertionError as error:  # a step that was done in two ways
        print(error)
        is_right = False
    counts["wrong"] += not is_right
    return is_right


def interrupt(job, draw: random.Random, counts: dict[str, int]) -> float:
    """Interrupt a running job; return the seconds until all of it has ended.

    They are 0 for a job that was killed as a whole.
    """
    processes = job.processes()
    targets = processes if draw.random() < 0.4 else [draw.choice(processes)] if processes else []
    targets = processes[:1] if draw.random() < 0.3 else targets
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    if number == signal.SIGKILL and processes[:1] == targets[:1]:
        targets = (
            processes  # outside of a container, nothing ends with the process that SageMaker knows
        )
    counts["kills" if number == signal.SIGKILL else "stops"] += 1
    began = time.monotonic()
    for process in targets:
        with suppress(psutil.Error):
            process.send_signal(number)
    if job.wait(HANG_SECONDS) is None:
        counts["hung"] += 1
        for process in job.processes():
            process.send_signal(signal.SIGKILL)
        job.wait(HANG_SECONDS)
    seconds = time.monotonic() - began
    for process in processes:  # what a kill has left
        with suppress(psutil.Error, AttributeError):
            process.wait(10) if number == signal.SIGTERM else process.kill()
    return 0.0 if number == signal.SIGKILL else seconds


def cost() -> None:
    """Print the cost of checkpoints, agreement and a restart.

    The job is our example on its default data.
    """
    from benchmarks.interruption_cost import main

    main()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interruptions")
    parser.add_argument("what", choices=["soak", "cost"])
    parser.add_argument("kind", choices=KINDS, nargs="?", default="process")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    soak(args.kind, args.rounds, args.seed) if args.what == "soak" else cost()
