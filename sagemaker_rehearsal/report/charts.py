"""Charts of the report, as inline SVG without a script.

A chart is as wide as its place. Positions are in percent, so that text keeps its size in a narrow
window. The lines are in an inner picture that is stretched to the plot; their strokes are not
stretched with it.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from sagemaker_rehearsal.report.markup import clock, make_table, node

HEIGHT = 210
TICKS = 6
# The number of restarts that are drawn as full lines; more are marked at the bottom only.
MAX_RESTART_LINES = 25
# Points of a name, all attempts together; if there are more, those of every n-th x are drawn, the
# same in all attempts.
MAX_POINTS = 2000
# Stretches of x whose last values are shown, on hover and in the table.
MAX_STRETCHES = 50
# Seconds between the marks of a time axis.
TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
# Values beyond this are not drawn, like those that are not numbers.
LARGEST_VALUE = 1e15
# Values that are not further apart are drawn as the same one.
SMALLEST_RANGE = 1e-30

Points = list[tuple[float, float]]
"""Pairs of x and value, by x."""


@dataclass
class Line:
    """The values of one name in one attempt.

    `points` are (x, value). `kept` is the x until which the attempt's work was kept.
    """

    points: Points
    kept: float = math.inf


@dataclass
class Pieces:
    """What is drawn of a name."""

    kept: list[Points]
    lost: list[Points]
    # Lost values that have no counterpart: the later attempt has logged other steps.
    hidden: int = 0


@dataclass
class Stretch:
    """The last value of each name within a stretch of x; None if it has none there."""

    start: float
    end: float
    values: dict[str, float | None]


@dataclass
class Chart:
    """Curves over one x-axis.

    For each name there is a line for each attempt; `restarts` are the x of the later attempts.
    """

    title: str
    names: dict[str, list[Line]]
    restarts: list[float] = field(default_factory=list)
    over: str = "step"
    as_time: bool = False


def figure(chart: Chart) -> Element | None:
    """Return the chart with its title and legend; None if no point of it can be drawn."""
    drawn = {name: _drawable_lines(lines) for name, lines in chart.names.items()}
    points = [point for lines in drawn.values() for line in lines for point in line.points]
    if not points:
        return None
    left, right = _value_range([x for x, _ in points] + chart.restarts, pad=0.0)
    left = 0.0 if 0 < left < right / 5 else left
    low, high = _value_range([y for _, y in points], pad=0.06)
    inner = node(
        "svg", width="100%", height=HEIGHT, viewBox="0 0 1000 1000", preserveAspectRatio="none"
    )
    for x in chart.restarts:
        position = f"{1000 * (x - left) / (right - left):.1f}"
        top = 0 if len(chart.restarts) <= MAX_RESTART_LINES else 950
        inner.append(node("line", class_="restart", x1=position, x2=position, y1=top, y2=1000))
    split = _split_by_time if chart.as_time else _split_by_step
    pieces = {name: split(lines) for name, lines in drawn.items()}
    for place, pieces_of_name in enumerate(pieces.values()):
        paths = [("curve", points) for points in pieces_of_name.kept]
        paths += [("curve lost", points) for points in pieces_of_name.lost]
        for kind, points in paths:
            scaled = [
                (1000 * (x - left) / (right - left), 1000 * (high - y) / (high - low))
                for x, y in points
            ]
            inner.append(_draw_path(scaled, f"{kind} c{place}"))
    summary = ", ".join(
        f"{name} ends at {_last_value(lines):.4g}" for name, lines in drawn.items() if lines
    )
    svg = node(
        "svg",
        node("title", chart.title),
        node("desc", f"Over {chart.over}: {summary}."),
        role="img",
    )
    svg.set("height", str(HEIGHT + 40))
    svg.extend([*_draw_rows(low, high), *_draw_columns(left, right, chart), inner])
    stretches = _stretches(drawn)
    svg.extend(_draw_stretches(stretches, left, right, chart))
    return node(
        "figure",
        node("figcaption", chart.title),
        _draw_legend(chart, drawn, pieces),
        node("div", svg, class_="plot"),
        node("details", node("summary", "The values"), *_table(stretches, chart)),
    )


def ticks(low: float, high: float, *, as_time: bool = False, at_least: float = 0.0) -> list[float]:
    """Return about TICKS round numbers from `low` to `high`, `at_least` apart."""
    smallest_step = max((high - low) / TICKS, at_least)
    size = 10.0 ** math.floor(math.log10(smallest_step))
    steps: Iterable[float] = (size * factor for factor in (1, 2, 5, 10))
    if as_time and smallest_step >= 1:
        steps = (*TIME_STEPS, 86400.0 * math.ceil(smallest_step / 86400))
    step = next(candidate for candidate in steps if candidate >= smallest_step * 0.999)
    return [
        place * step for place in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)
    ]


def _drawable_lines(lines: Sequence[Line]) -> list[Line]:
    """Return the lines without what cannot be drawn, and with about MAX_POINTS different x.

    The last of several values at one x counts. Lines that have nothing to draw are left out.
    """
    points = [
        {x: y for x, y in line.points if _is_drawable(x) and _is_drawable(y)} for line in lines
    ]
    all_x = sorted(set().union(*points))
    drawn_x = {*all_x[:: max(1, math.ceil(len(all_x) / MAX_POINTS))], *all_x[-1:]}
    thinned = [
        Line(sorted((x, y) for x, y in points_of_line.items() if x in drawn_x), line.kept)
        for points_of_line, line in zip(points, lines, strict=True)
    ]
    return [line for line in thinned if line.points]


def _split_by_step(lines: Sequence[Line]) -> Pieces:
    """Return the pieces over steps: what was kept is one line, across all attempts.

    What was lost is drawn over what took its place, at the steps that both have logged. In between,
    a line would show values that nobody has measured, and an exact repetition would look inexact.
    """
    kept = [[point for point in line.points if point[0] <= line.kept] for line in lines]
    joined = sorted((point for points in kept for point in points), key=lambda point: point[0])
    kept_x = [x for x, _ in joined]
    comparable_x = set(kept_x)
    end = max(kept_x, default=-math.inf)
    pieces = Pieces([joined], [])
    for line, kept_points in zip(lines, kept, strict=True):
        lost = line.points[len(kept_points) :]
        shown = [point for point in lost if point[0] in comparable_x or point[0] > end]
        pieces.hidden += len(lost) - len(shown)
        # The border belongs to both, so that no gap is seen.
        runs = [kept_points[-1:]]
        for point in shown:
            if runs[-1] and bisect_right(kept_x, runs[-1][-1][0]) < bisect_left(kept_x, point[0]):
                runs.append([])
            runs[-1].append(point)
        pieces.lost += [run for run in runs if run and run[-1][0] > line.kept]
    return pieces


def _split_by_time(lines: Sequence[Line]) -> Pieces:
    """Return the pieces over time, where no attempt takes another one's place."""
    pieces = Pieces([], [])
    for line in lines:
        kept = sum(x <= line.kept for x, _ in line.points)
        pieces.kept.append(line.points[:kept])
        if kept < len(line.points):
            pieces.lost.append(line.points[max(0, kept - 1) :])
    return pieces


def _stretches(drawn: dict[str, list[Line]]) -> list[Stretch]:
    """Return about MAX_STRETCHES stretches; of values at one x, that of the last attempt counts."""
    points = {name: dict(p for line in lines for p in line.points) for name, lines in drawn.items()}
    all_x = sorted(set().union(*points.values()))
    size = math.ceil(len(all_x) / MAX_STRETCHES)
    stretches = []
    start = all_x[0]
    for place in range(0, len(all_x), size):
        stretch = all_x[place : place + size]
        values = {
            name: next((by_x[x] for x in reversed(stretch) if x in by_x), None)
            for name, by_x in points.items()
        }
        stretches.append(Stretch(start, stretch[-1], values))
        start = stretch[-1]
    return stretches


def _draw_stretches(
    stretches: Sequence[Stretch], left: float, right: float, chart: Chart
) -> Iterable[Element]:
    """Yield an area for each stretch that shows its values on hover."""
    for stretch in stretches:
        values = ", ".join(
            f"{name} {value:.6g}" for name, value in stretch.values.items() if value is not None
        )
        yield node(
            "rect",
            node("title", f"{chart.over} {_position(stretch.end, chart)}: {values}"),
            class_="stretch",
            x=f"{100 * (stretch.start - left) / (right - left):.2f}%",
            width=f"{max(0.5, 100 * (stretch.end - stretch.start) / (right - left)):.2f}%",
            y=0,
            height=HEIGHT,
        )


def _table(stretches: Sequence[Stretch], chart: Chart) -> list[Element]:
    rows = [
        [
            _position(stretch.end, chart),
            *("–" if value is None else f"{value:.6g}" for value in stretch.values.values()),
        ]
        for stretch in stretches
    ]
    names = stretches[0].values
    caption = f"{chart.title}: the last values until each {chart.over}."
    return make_table(caption, [chart.over, *names], rows, words=[])


def _position(x: float, chart: Chart) -> str:
    return clock(x) if chart.as_time else f"{x:,.6g}"


def _is_drawable(value: float) -> bool:
    # False for what is not a number.
    return abs(value) < LARGEST_VALUE


def _value_range(values: Sequence[float], *, pad: float) -> tuple[float, float]:
    """Return the smallest and largest value, never equal, with a margin on both sides.

    The margin is the share `pad` of their distance.
    """
    low = min(values)
    high = max(values)
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-9 * largest, SMALLEST_RANGE):
        margin = max(largest / 10, SMALLEST_RANGE) if largest else 1.0
        return low - margin, high + margin
    return low - pad * (high - low), high + pad * (high - low)


def _draw_path(points: Sequence[tuple[float, float]], classes: str) -> Element:
    """Return a line through the points; a single point becomes a dot."""
    if len(points) == 1:
        x, y = points[0]
        return node("path", class_=f"{classes} dot", d=f"M{x:.1f} {y:.1f}h0.01")
    return node(
        "path",
        class_=classes,
        d="".join(f"{'L' if n else 'M'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(points)),
    )


def _last_value(lines: Sequence[Line]) -> float:
    return lines[-1].points[-1][1]


def _draw_rows(low: float, high: float) -> Iterable[Element]:
    """Yield the grid's horizontal lines, with their numbers to the left of the plot."""
    for value in ticks(low, high):
        y = f"{HEIGHT * (high - value) / (high - low):.1f}"
        yield node("line", class_="grid", x1=0, x2="100%", y1=y, y2=y)
        yield node("text", f"{value:.6g}", x=-8, y=y, dy="0.35em", text_anchor="end")


def _draw_columns(left: float, right: float, chart: Chart) -> Iterable[Element]:
    """Yield the numbers below the plot, and the name of what they count."""
    for value in ticks(left, right, as_time=chart.as_time, at_least=0.0 if chart.as_time else 1.0):
        words = clock(value) if chart.as_time else f"{value:.6g}"
        x = f"{100 * (value - left) / (right - left):.2f}%"
        yield node("line", class_="grid", x1=x, x2=x, y1=HEIGHT, y2=HEIGHT + 4)
        yield node("text", words, x=x, y=HEIGHT + 17, text_anchor="middle")
    yield node("text", chart.over, class_="over", x="100%", y=HEIGHT + 34, text_anchor="end")


def _draw_legend(chart: Chart, drawn: dict[str, list[Line]], pieces: dict[str, Pieces]) -> Element:
    """Return the legend: what each line stands for."""
    items = [
        node(
            "li",
            node(
                "svg",
                node("line", class_=f"curve c{place}", x1=0, x2="100%", y1="50%", y2="50%"),
                class_="key",
                aria_hidden="true",
            ),
            f"{name} ",
            node("b", f"{_last_value(lines):.4g}"),
        )
        for place, (name, lines) in enumerate(drawn.items())
        if lines
    ]
    if any(pieces_of_name.lost for pieces_of_name in pieces.values()):
        items.append(node("li", node("i", class_="key lost"), "lost and done again"))
    if hidden := sum(pieces_of_name.hidden for pieces_of_name in pieces.values()):
        items.append(node("li", f"{hidden} lost values not drawn: logged at other steps again"))
    if not_drawable := sum(
        not _is_drawable(y)
        for lines in chart.names.values()
        for line in lines
        for _, y in line.points
    ):
        items.append(node("li", f"{not_drawable} values are not numbers, or too large"))
    if chart.restarts:
        items.append(node("li", node("i", class_="key restart"), "restart"))
    return node("ul", *items, class_="legend")
