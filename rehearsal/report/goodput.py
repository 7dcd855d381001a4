"""How much of what was paid for became training that was kept: the goodput of a job.

An attempt is known by its lines of progress only. Steps are taken to come evenly between two lines, and at the mean
pace of the attempt before its first line and after its last one, but never while its container did not run.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rehearsal.jobs.record import ENDED, Attempt, Instance, Record

PHASES = ("start-up", "kept", "lost", "ending")


@dataclass(frozen=True)
class Row:
    """One attempt. Its phases, in instance seconds, add up to what its instances are billed for.

    start-up: until training began, which is all of an attempt without a line of progress. kept: until it reached
    `kept_step`. lost: until its last line. ending: the rest, which is also the time to notice an interruption.
    """

    number: int
    first_step: int | None  # that it went on from: None if nothing is known of it
    last_step: int | None  # the highest in its log
    # the lowest that a later attempt went on from; of the last attempt, its last one
    kept_step: int | None
    # when training began, was last kept, and was last seen
    bounds: tuple[float, float, float] | None
    seconds: dict[str, float]  # by PHASES


@dataclass(frozen=True)
class Cost:
    """What the job cost, and what it would have cost on demand, in the currency of the prices.

    On demand: all training that was kept, the first start-up with training and the last ending, and nothing else.
    """

    on_demand: float
    spot: float | None  # None without a spot price
    # percent of `on_demand`; None unless the job completed; negative if spot cost more
    saving: float | None


@dataclass(frozen=True)
class Goodput:
    """What became of the instances' time, summed over hosts and attempts, and of the steps."""

    status: str
    instance_seconds: float  # from the start of an instance to its release, or to now
    kept_seconds: float  # instance seconds in which steps were done that were not done again
    steps: int | None  # the highest of the last attempt that did any
    steps_redone: int  # how often a step was done that an earlier attempt had done
    # steps seen in the log that no later attempt went on from, whether or not done again by now
    steps_lost: int
    rows: tuple[Row, ...]
    cost: Cost | None = None

    @property
    def share(self) -> float | None:
        """The part of the instances' time that became kept training, 0 to 1; None if nothing is billed."""
        return self.kept_seconds / self.instance_seconds if self.instance_seconds > 0 else None

    @property
    def caveat(self) -> str | None:
        """What to know before one quotes the figures; None if the job completed."""
        if self.status == "Completed":
            return None
        if self.status == "Failed":
            return (
                "The job failed: nothing came of it. “Kept” is what a new job could go on from, at "
                "best."
            )
        if self.status == "Stopped":
            return "The job was stopped. “Kept” is all until its last line of progress."
        return "The job still runs: these are the figures so far."


def measure(
    record: Record,
    *,
    now: float | None = None,
    price: float | None = None,
    spot_price: float | None = None,
) -> Goodput:
    """Return the goodput of a job; the prices are those of an hour of one instance."""
    now = moment(record) if now is None else now
    origins = _origins(record.attempts)
    rows = tuple(
        _row(attempt, origin, [step for step in origins[place:] if step is not None], now)
        for place, (attempt, origin) in enumerate(
            zip(record.attempts, origins, strict=True), start=1
        )
    )
    worked = [row for row in rows if row.bounds]
    billed = sum(sum(row.seconds.values()) for row in rows)
    kept = sum(row.seconds["kept"] for row in rows)
    whole = kept + (worked[0].seconds["start-up"] + worked[-1].seconds["ending"] if worked else 0.0)
    return Goodput(
        status=record.status,
        instance_seconds=billed,
        kept_seconds=kept,
        steps=worked[-1].last_step if worked else None,
        steps_redone=_overlap([(row.first_step, row.last_step) for row in worked]),
        steps_lost=sum(
            max(0, row.last_step - max(row.first_step, row.kept_step)) for row in worked
        ),
        rows=rows,
        cost=None if price is None else _cost(record, billed, whole, price, spot_price),
    )


def moment(record: Record) -> float:
    """Return the time until which a job is told: its last change if it ended, or now."""
    return record.modified if record.status in ENDED and record.modified else time.time()


def phases(row: Row, instance: Instance, now: float) -> list[tuple[str, float, float]]:
    """Return what an instance of the row's attempt did: phase, start and end, in order."""
    end = max(instance.started, now if instance.released is None else instance.released)
    if not row.bounds:
        return [("start-up", instance.started, end)]
    marks = [instance.started, *(min(max(mark, instance.started), end) for mark in row.bounds), end]
    return [
        (name, *span)
        for name, span in zip(PHASES, pairwise(marks), strict=True)
        if span[1] > span[0]
    ]


def _origins(attempts: Sequence[Attempt]) -> list[int | None]:
    """Return the step that each attempt went on from.

    It is the one its log names. Else it is the first seen, but no higher than any before: what is above was its work.
    """
    found, highest = [], 0
    for attempt in attempts:
        steps = [point.step for point in attempt.points]
        first = min([*steps, highest]) if steps else None
        found.append(first if attempt.resumed is None else attempt.resumed)
        highest = max([highest, *steps, attempt.resumed or 0])
    return found


def _row(attempt: Attempt, origin: int | None, later: Sequence[int], now: float) -> Row:
    """Return what became of an attempt, given the steps that the later ones went on from."""
    last = max((point.step for point in attempt.points), default=None)
    kept = min(later, default=last)
    bounds = None if last is None else _bounds(attempt, origin, last, kept)
    seconds = dict.fromkeys(PHASES, 0.0)
    made = Row(attempt.number, origin, last, None if last is None else kept, bounds, seconds)
    for instance in attempt.instances:
        for name, start, end in phases(made, instance, now):
            seconds[name] += end - start
    return made


def _bounds(attempt: Attempt, origin: int, last: int, kept: int) -> tuple[float, float, float]:
    """Return when the training of an attempt began, was last kept, and was last seen."""
    first_line, last_line = attempt.points[0].time, attempt.points[-1].time
    started = min((one.training or one.started for one in attempt.instances), default=first_line)
    ended = max((one.ended or math.inf for one in attempt.instances), default=last_line)
    begun = min(max(_reached(attempt, origin), started), first_line)
    until = max(_reached(attempt, kept), begun)
    # lines after the last step tell of its validation; steps after the last line, of a checkpoint
    if kept >= last:
        until = min(max(until, last_line), max(ended, last_line))
    return begun, until, max(until, last_line)


def _reached(attempt: Attempt, step: int) -> float:
    """Return when an attempt reached a step."""
    climb = [attempt.points[0]]
    for point in attempt.points:
        if point.step > climb[-1].step:
            climb.append(point)
    for left, right in pairwise(climb):
        if left.step <= step <= right.step:
            return left.time + (right.time - left.time) * (step - left.step) / (
                right.step - left.step
            )
    first, last = climb[0], climb[-1]
    pace = (last.time - first.time) / (last.step - first.step) if len(climb) > 1 else 0.0
    nearest = first if step < first.step else last
    return nearest.time + (step - nearest.step) * pace


def _overlap(spans: Sequence[tuple[int, int]]) -> int:
    """Return how many steps of the spans, (after, to), are in another one, too: each time but the first."""
    again, reached = 0, 0
    for first, last in sorted(spans):
        again, reached = again + max(0, min(last, reached) - first), max(reached, last)
    return again


def _cost(
    record: Record, billed: float, whole: float, price: float, spot_price: float | None
) -> Cost:
    """Return the costs of instance seconds: those billed, and those of the same run without an interruption."""
    on_demand, spot = (
        whole / 3600 * price,
        None if spot_price is None else billed / 3600 * spot_price,
    )
    comparable = record.status == "Completed" and spot is not None and on_demand > 0
    return Cost(on_demand, spot, 100 * (1 - spot / on_demand) if comparable else None)
