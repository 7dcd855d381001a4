"""The goodput of a job: how much of the paid time became training that was kept.

An attempt is known by its progress lines only. Between two lines, steps are assumed to come evenly;
before the first and after the last line, at the attempt's mean pace, but never while the container
did not run.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sagemaker_rehearsal.jobs.record import (
    ENDED,
    Attempt,
    Instance,
    Point,
    Record,
    Restart,
    Status,
)

PHASES = ("start-up", "kept", "lost", "ending")
Rate = float | Mapping[str, float]
"""Price of an instance hour: one for all types of instances, or that of each type."""


@dataclass(frozen=True)
class Row:
    """One attempt. Its phases, in instance seconds, add up to the billed time.

    start-up: until training began; in an attempt without a progress line, everything. kept: until
    the attempt reached `kept_step`. lost: until its last line, and what restarts in the containers
    have cost before `kept_step`. ending: the rest, which includes the time to notice an
    interruption.
    """

    number: int
    # The step that it resumed from; None if nothing is known of it.
    first_step: int | None
    # The highest step in its log.
    last_step: int | None
    # The lowest step that a later attempt resumed from; for the last attempt, its own last step.
    kept_step: int | None
    # When training began, was last kept, and was last seen.
    bounds: tuple[float, float, float] | None
    # By PHASES.
    seconds: dict[str, float]
    # The steps that were done without a restart: before the first one, and the last.
    spans: tuple[tuple[int, int], ...] = ()
    # When a restart has cost what was done after a step, and when that step was reached again.
    gaps: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Cost:
    """The cost of the job, and its cost on demand, in the currency of the prices.

    On demand stands for a run without interruptions: all training that was kept, the first start-up
    with training, the last ending, and nothing else.
    """

    on_demand: float
    # None without a spot price.
    spot: float | None
    # In percent of `on_demand`. None unless the job completed; negative if spot cost more.
    saving: float | None


@dataclass(frozen=True)
class Goodput:
    """What became of the steps and the instances' time, in all hosts and attempts."""

    status: str
    # From the start of each instance to its release, or to now.
    instance_seconds: float
    # Instance seconds in which steps were done that were not done again.
    kept_seconds: float
    # The highest step of the last attempt that did any.
    steps: int | None
    # How often a step was done that an earlier attempt had done.
    steps_redone: int
    # Steps in the log that no later attempt resumed from, whether or not they have been done again.
    steps_lost: int
    rows: tuple[Row, ...]
    cost: Cost | None = None

    @property
    def share(self) -> float | None:
        """The share of the instances' time that became kept training, 0 to 1.

        None if nothing is billed, or if a job has completed without a line of progress.
        """
        is_unknown = self.steps is None and self.status == Status.COMPLETED
        if self.instance_seconds <= 0 or is_unknown:
            return None
        return self.kept_seconds / self.instance_seconds

    @property
    def caveat(self) -> str | None:
        """What to know before one quotes the figures; None if the job completed."""
        if self.status == Status.COMPLETED:
            return None
        if self.status == Status.FAILED:
            return (
                "The job failed: it has no result. “Kept” is what a new job could continue from, "
                "at best."
            )
        if self.status == Status.STOPPED:
            return "The job was stopped. “Kept” is all until its last line of progress."
        return "The job still runs: these are the figures so far."


def measure(
    record: Record,
    *,
    now: float | None = None,
    price: Rate | None = None,
    spot_price: Rate | None = None,
) -> Goodput:
    """Return the goodput of a job; the prices are per hour of one instance."""
    now = moment(record) if now is None else now
    origins = _first_steps(record.attempts)
    rows = tuple(
        _make_row(attempt, origin, [step for step in origins[place:] if step is not None], now)
        for place, (attempt, origin) in enumerate(
            zip(record.attempts, origins, strict=True), start=1
        )
    )
    worked = [row for row in rows if row.bounds]
    billed = sum(sum(row.seconds.values()) for row in rows)
    kept = sum(row.seconds["kept"] for row in rows)
    return Goodput(
        status=record.status,
        instance_seconds=billed,
        kept_seconds=kept,
        steps=worked[-1].last_step if worked else None,
        steps_redone=_overlap([span for row in worked for span in row.spans]),
        steps_lost=_lost([span for row in rows for span in row.spans]),
        rows=rows,
        cost=None if price is None else _compute_cost(record, rows, now, price, spot_price),
    )


def seconds_by_type(record: Record, now: float) -> dict[str, float]:
    """Return the instance seconds of a job by the type of the instances."""
    seconds: dict[str, float] = {}
    for attempt in record.attempts:
        for each in attempt.instances:
            lived = max(0.0, (now if each.released is None else each.released) - each.started)
            seconds[each.instance_type] = seconds.get(each.instance_type, 0.0) + lived
    return seconds


def cost_of(seconds: Mapping[str, float], price: Rate) -> float:
    """Return what instance seconds, given by the type of the instances, cost."""
    return sum(
        each / 3600 * (price[name] if isinstance(price, Mapping) else price)
        for name, each in seconds.items()
    )


def moment(record: Record) -> float:
    """Return the time until which to show a job: its last change, or now if it runs."""
    return record.modified if record.status in ENDED and record.modified else time.time()


def phases(row: Row, instance: Instance, now: float) -> list[tuple[str, float, float]]:
    """Return the phases of an instance: name, start and end, in order."""
    end = max(instance.started, now if instance.released is None else instance.released)
    if not row.bounds:
        return [("start-up", instance.started, end)]
    begun, until, last = row.bounds
    spans = [("start-up", instance.started, begun)]
    kept_from = begun
    for lost, again in row.gaps:
        gap = max(lost, begun), min(again, until)
        if gap[0] < gap[1]:
            spans += [("kept", kept_from, gap[0]), ("lost", *gap)]
            kept_from = gap[1]
    spans += [("kept", kept_from, until), ("lost", until, last), ("ending", last, end)]
    clipped = [
        (name, *(min(max(mark, instance.started), end) for mark in span)) for name, *span in spans
    ]
    return [span for span in clipped if span[2] > span[1]]


def _first_steps(attempts: Sequence[Attempt]) -> list[int | None]:
    """Return the step that each attempt resumed from.

    It is the step that the log names. Without one, it is the first step in the log, but none above
    the highest step of the attempts before: what is above that was this attempt's work.
    """
    origins = []
    highest = 0
    for attempt in attempts:
        steps = [point.step for point in attempt.points]
        first = min([*steps, highest]) if steps else None
        origins.append(first if attempt.resumed is None else attempt.resumed)
        highest = max([highest, *steps, attempt.resumed or 0])
    return origins


def _make_row(attempt: Attempt, origin: int | None, later: Sequence[int], now: float) -> Row:
    """Return the row of an attempt, given the steps that later attempts resumed from."""
    last = max((point.step for point in attempt.points), default=None)
    kept = min(later, default=last)
    seconds = dict.fromkeys(PHASES, 0.0)
    if last is None:
        spans = () if origin is None else ((origin, origin),)
        row = Row(attempt.number, origin, None, None, None, seconds, spans)
    else:
        climb = _climb(attempt)
        bounds = _training_bounds(attempt, climb, origin, last, kept)
        gaps = tuple(
            (left.time, right.time) for left, right in pairwise(climb) if _is_gap(left, right)
        )
        spans = tuple(_spans(attempt, origin))
        row = Row(attempt.number, origin, last, kept, bounds, seconds, spans, gaps)
    for instance in attempt.instances:
        for name, start, end in phases(row, instance, now):
            seconds[name] += end - start
    return row


def _spans(attempt: Attempt, origin: int) -> list[tuple[int, int]]:
    """Return the spans of steps that an attempt did without a restart in its containers.

    Each is the step before the first one, and the last one.
    """
    restarts = [each for each in attempt.restarts if each.time is not None]
    begins = [(-math.inf, origin), *((each.time, each.step) for each in restarts)]
    ends = [*((each.time, each.reached) for each in restarts), (math.inf, None)]
    spans = []
    for (begin, first), (end, reached) in zip(begins, ends, strict=True):
        steps = [point.step for point in attempt.points if begin < point.time <= end]
        spans.append((first, max([*steps, first if reached is None else reached])))
    return spans


def _climb(attempt: Attempt) -> list[Point]:
    """Return when an attempt reached which steps for good, in order.

    Where a restart in the containers went back to a step, that step is there twice: as it was
    reached first, and as training continued from it.
    """
    restarts = [each for each in attempt.restarts if each.time is not None]
    climb: list[Point] = []
    for point in sorted([*attempt.points, *restarts], key=lambda each: each.time):
        if isinstance(point, Restart):
            times = [min(_time_of_step(climb, point.step), point.time)] if climb else []
            climb = [each for each in climb if each.step < point.step]
            climb += [Point(time, point.step, {}) for time in (*times, point.time)]
        elif not climb or point.step > climb[-1].step:
            climb.append(point)
    return climb


def _is_gap(left: Point, right: Point) -> bool:
    return left.step == right.step


def _training_bounds(
    attempt: Attempt, climb: Sequence[Point], origin: int, last: int, kept: int
) -> tuple[float, float, float]:
    """Return when an attempt's training began, was last kept, and was last seen."""
    first_line = attempt.points[0].time
    last_line = attempt.points[-1].time
    started = min(
        (instance.training or instance.started for instance in attempt.instances),
        default=first_line,
    )
    ended = max((instance.ended or math.inf for instance in attempt.instances), default=last_line)
    begun = min(max(_time_of_step(climb, origin), started), first_line)
    until = max(_time_of_step(climb, kept), begun)
    # Lines after the last step belong to its validation; steps after the last line, to a
    # checkpoint.
    if kept >= last:
        until = min(max(until, last_line), max(ended, last_line))
    return begun, until, max(until, last_line)


def _time_of_step(climb: Sequence[Point], step: int) -> float:
    """Return the time when an attempt reached a step, given what `_climb` returns."""
    for left, right in pairwise(climb):
        if left.step <= step <= right.step:
            share = 0.0 if _is_gap(left, right) else (step - left.step) / (right.step - left.step)
            return left.time + share * (right.time - left.time)
    first = climb[0]
    last = climb[-1]
    trained = sum(
        right.time - left.time for left, right in pairwise(climb) if not _is_gap(left, right)
    )
    pace = trained / (last.step - first.step) if last.step > first.step else 0.0
    nearest = first if step < first.step else last
    return nearest.time + (step - nearest.step) * pace


def _overlap(spans: Sequence[tuple[int, int]]) -> int:
    """Return how many steps were repeated, each time but the first counted.

    The spans are (step before the first one, last step).
    """
    repeated = 0
    reached = 0
    for first, last in sorted(spans):
        repeated += max(0, min(last, reached) - first)
        reached = max(reached, last)
    return repeated


def _lost(spans: Sequence[tuple[int, int]]) -> int:
    """Return how many steps were done that nothing later continued from.

    The spans are (step before the first one, last step), in the order of time.
    """
    lost = 0
    for place, (first, last) in enumerate(spans, start=1):
        kept = min((later for later, _ in spans[place:]), default=last)
        lost += max(0, last - max(first, kept))
    return lost


def _compute_cost(
    record: Record, rows: Sequence[Row], now: float, price: Rate, spot_price: Rate | None
) -> Cost:
    """Return the cost of what is billed, and of a run without interruptions."""
    worked = [row.number for row in rows if row.bounds]
    uninterrupted: dict[str, float] = {}
    for row, attempt in zip(rows, record.attempts, strict=True):
        counted = {"kept"}
        counted |= {"start-up"} if row.number in worked[:1] else set()
        counted |= {"ending"} if row.number in worked[-1:] else set()
        for instance in attempt.instances:
            seconds = sum(
                end - start for name, start, end in phases(row, instance, now) if name in counted
            )
            before = uninterrupted.get(instance.instance_type, 0.0)
            uninterrupted[instance.instance_type] = before + seconds
    on_demand = cost_of(uninterrupted, price)
    spot = None if spot_price is None else cost_of(seconds_by_type(record, now), spot_price)
    comparable = record.status == Status.COMPLETED and spot is not None and on_demand > 0
    return Cost(on_demand, spot, 100 * (1 - spot / on_demand) if comparable else None)
