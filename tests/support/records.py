"""Records of rehearsed jobs, written by hand."""

import math

from sagemaker_rehearsal.jobs.record import (
    Attempt,
    Instance,
    Interruption,
    Point,
    Record,
    Transition,
)


def points(*pairs: tuple[float, int], **values: float) -> list[Point]:
    """Return lines of progress: (time, step)."""
    return [Point(time, step, {"step": float(step), **values}) for time, step in pairs]


def attempt(
    number: int, start: float, end: float | None, lines: list[Point], *, resumed=None, hosts=1
) -> Attempt:
    """Return an attempt of a job.

    Its containers run from 5 s after the instances' start to 2 s before their end.
    """
    ended = None if end is None else end - 2
    instances = [
        Instance(f"algo-{k + 1}", "ml.m5.large", start, start + 5, ended, end) for k in range(hosts)
    ]
    return Attempt(number, instances, lines, resumed)


def job(*attempts: Attempt, status="Completed", **more) -> Record:
    """Return the record of a job that was created at 0 s."""
    return Record(
        "job", {"EnableManagedSpotTraining": True}, 0.0, status, attempts=list(attempts), **more
    )


def interrupted(hosts: int = 1) -> Record:
    """Return a completed job, interrupted at step 40 and resumed from step 30."""
    first = attempt(1, 0, 60, points((20, 10), (30, 20), (50, 40)), resumed=None, hosts=hosts)
    second = attempt(2, 100, 160, points((120, 40), (150, 70)), resumed=30, hosts=hosts)
    cut = Interruption(55.0, ["algo-1"], warned=False, why="by hand", gap=40.0, step=40)
    status = [
        Transition("Training", "in progress", 5.0, 55.0),
        Transition("Interrupted", "taken", 55.0),
    ]
    return job(first, second, interruptions=[cut], transitions=status, modified=160.0)


def many() -> Record:
    """Return a job of 8 hosts with 100 interruptions; not all of its values are numbers."""
    values = [math.nan, math.inf, -math.inf, 1e300, 0.5, 0.25]
    attempts = [
        attempt(
            k + 1,
            50 * k,
            50 * k + 40,
            [Point(50 * k + 10 + n, 5 * k + n, {"loss": values[n]}) for n in range(6)],
            hosts=8,
        )
        for k in range(101)
    ]
    cuts = [
        Interruption(50 * k + 38, [f"algo-{k % 8 + 1}"], bool(k % 2), "by rule", 10.0, None)
        for k in range(100)
    ]
    return job(*attempts, interruptions=cuts, modified=5040.0)
