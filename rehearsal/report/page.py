"""The report of one job: an HTML page that needs nothing but itself, no script and no network."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from rehearsal.jobs.record import Record
from rehearsal.report.charts import Chart, Line, figure
from rehearsal.report.goodput import PHASES, Goodput, measure, moment
from rehearsal.report.markup import clock, node, utc
from rehearsal.report.timeline import Timeline

STYLE = Path(__file__).with_name("report.css")
COLOURS = 6  # names in a chart, and charts of names that are neither a loss nor an accuracy
WORDS = "words"  # the class of a column with text; the others have numbers


def write(
    record: Record, path: Path, *, price: float | None = None, spot_price: float | None = None
) -> None:
    """Write the report of a job that ended, or runs; the prices are those of an hour of one instance."""
    record = record.masked()
    now = moment(record)
    goodput = measure(record, now=now, price=price, spot_price=spot_price)
    timeline = Timeline(record, goodput, now=now).figure()
    body = node("body", _head(record, goodput, now), _figures(record, goodput, now))
    body.extend(
        _section("Timeline", [timeline] if timeline is not None else [], "No instance was started.")
    )
    body.extend(
        _section(
            "Curves",
            _curves(record, goodput),
            "No line of progress (“step=…”) with a value was seen.",
        )
    )
    body.extend(_section("Attempts", _attempts(record, goodput), "No attempt was made."))
    body.extend(_section("Interruptions", _interruptions(record), "None."))
    body.extend(_section("Status", _transitions(record), "No change of status was recorded."))
    notes = [node("ul", *(node("li", note) for note in record.notes))] if record.notes else []
    body.extend(_section("Notes", notes, "None."))
    request = json.dumps(record.request, indent=2, ensure_ascii=False, default=str)
    body.append(node("details", node("summary", "The request"), node("pre", node("code", request))))
    head = node("head", node("meta", charset="utf-8"), node("title", record.name))
    head.append(node("meta", name="viewport", content="width=device-width, initial-scale=1"))
    head.append(node("style", STYLE.read_text()))
    page = tostring(node("html", head, body, lang="en"), encoding="unicode", method="html")
    path.write_text(f"<!doctype html>\n{page}\n", encoding="utf-8", errors="backslashreplace")


def _section(title: str, content: Sequence[Element], otherwise: str) -> list[Element]:
    return [node("h2", title), *(content or [node("p", otherwise, class_="soft")])]


def _head(record: Record, goodput: Goodput, now: float) -> Element:
    """Return the name of the job, how it stands, and on what it ran."""
    secondary = (
        f" · {record.secondary}" if record.transitions and record.secondary != record.status else ""
    )
    hosts = {
        (one.host, one.instance_type) for attempt in record.attempts for one in attempt.instances
    }
    types = sorted({kind for _, kind in hosts})
    about = [f"{len({host for host, _ in hosts})} × {', '.join(types)}"] if hosts else []
    about += ["managed spot" if record.spot else "on demand", f"created {utc(record.created)}"]
    status = node("p", node("span", record.status, class_=f"status {record.status}"), secondary)
    made = node(
        "header", node("h1", record.name), status, node("p", " · ".join(about), class_="about")
    )
    if record.failure:
        made.append(node("p", record.failure, class_="failure"))
    if goodput.caveat:
        made.append(node("p", goodput.caveat, class_="caveat"))
    return made


def _figures(record: Record, goodput: Goodput, now: float) -> Element:
    """Return the figures one looks at first."""
    share = "–" if goodput.share is None else f"{goodput.share:.1%}"
    main = "goodput: instance time that became kept training"
    if goodput.status == "Failed":
        share, main = (
            "failed",
            f"{goodput.share or 0:.0%} of the instance time was training to go on from",
        )
    found = [
        (share, main),
        (
            clock(now - record.created),
            "from creation to " + ("end" if goodput.status != "InProgress" else "now"),
        ),
        (clock(goodput.instance_seconds), "instance time, all hosts"),
        ("–" if goodput.steps is None else f"{goodput.steps:,}", "steps reached"),
        (f"{goodput.steps_lost:,}", f"steps lost; {goodput.steps_redone:,} done again"),
        (f"{len(record.interruptions)}", "interruptions"),
    ]
    if cost := goodput.cost:
        found.append((f"{cost.on_demand:,.2f}", "cost on demand, without interruptions"))
    if cost and cost.spot is not None:
        saving = "" if cost.saving is None else f", which saves {cost.saving:.0f} %"
        found.append((f"{cost.spot:,.2f}", f"cost on spot, as it went{saving}"))
    cells = [node("div", node("dt", words), node("dd", figure)) for figure, words in found]
    cells[0].set("class", "main")
    cells[0][1].set("class", goodput.status)
    return node("dl", *cells, class_="figures")


def _curves(record: Record, goodput: Goodput) -> list[Element]:
    """Return the charts: losses, accuracies, up to COLOURS other names each on its own, rates over time."""
    names = sorted(
        {name for attempt in record.attempts for point in attempt.points for name in point.values}
    )
    rates = [name for name in names if name.endswith("/s")]
    names = [name for name in names if name not in ("step", "epoch", *rates)]
    losses = [name for name in names if "loss" in name.lower()]
    accuracies = [name for name in names if "acc" in name.lower() and name not in losses]
    others = [name for name in names if name not in losses + accuracies]
    left_out = losses[COLOURS:] + accuracies[COLOURS:] + (others if len(others) > COLOURS else [])
    groups = [("Loss", losses[:COLOURS]), ("Accuracy", accuracies[:COLOURS])]
    groups += [(name, [name]) for name in (others if len(others) <= COLOURS else [])]
    restarts = [float(row.first_step) for row in goodput.rows[1:] if row.first_step is not None]
    charts = [Chart(title, _lines(record, goodput, group), restarts) for title, group in groups]
    times = [
        attempt.points[0].time - record.created for attempt in record.attempts[1:] if attempt.points
    ]
    charts += [
        Chart(
            name,
            _lines(record, goodput, [name], over_time=True),
            times,
            over="time since creation",
            as_time=True,
        )
        for name in rates[:COLOURS]
    ]
    drawn = [found for found in map(figure, charts) if found is not None]
    said = [node("p", f"Not drawn: {', '.join(left_out)}.", class_="soft")] if left_out else []
    return [node("div", *drawn, class_="charts"), *said] if drawn else said


def _lines(
    record: Record, goodput: Goodput, names: Sequence[str], *, over_time: bool = False
) -> dict[str, list[Line]]:
    """Return the lines of the names: one for each attempt."""
    made: dict[str, list[Line]] = {name: [] for name in names}
    for attempt, row in zip(record.attempts, goodput.rows, strict=True):
        for name in names:
            points = [
                (point.time - record.created if over_time else point.step, point.values[name])
                for point in attempt.points
                if name in point.values
            ]
            kept = row.bounds[1] - record.created if over_time and row.bounds else row.kept_step
            made[name].append(Line(points) if kept is None else Line(points, kept))
    return made


def _attempts(record: Record, goodput: Goodput) -> list[Element]:
    """Return the table of attempts."""
    columns = [
        "attempt",
        "hosts",
        "from step",
        "to step",
        "kept to",
        *PHASES,
        "restored",
        "exit status",
    ]
    told = any(attempt.proved for attempt in record.attempts)
    rows = []
    for attempt, row in zip(record.attempts, goodput.rows, strict=True):
        steps = [
            "–" if step is None else f"{step:,}"
            for step in (row.first_step, row.last_step, row.kept_step)
        ]
        seconds = [clock(row.seconds[name]) for name in PHASES]
        restored = sum(one.restored_bytes for one in attempt.instances)
        exits = Counter(_exit(one.exit_status, one.reclaimed) for one in attempt.instances)
        words = ", ".join(
            f"{words} × {count}" if count > 1 else words for words, count in exits.items()
        )
        megabytes = f"{restored / 1e6:,.1f} MB" if restored else "–"
        rows.append(
            [
                str(row.number),
                str(len(attempt.instances)),
                *steps,
                *seconds,
                megabytes,
                words,
                *([attempt.proved] if told else []),
            ]
        )
    caption = "Phases are instance time, summed over hosts: two hosts for 10 s are 20 s."
    return _table(
        caption, [*columns, "went on"] if told else columns, rows, words=["exit status", "went on"]
    )


def _exit(status: int | None, reclaimed: bool) -> str:
    return ("–" if status is None else str(status)) + (" (reclaimed)" if reclaimed else "")


def _interruptions(record: Record) -> list[Element]:
    """Return the table of interruptions."""
    rows = [
        [
            str(number),
            f"+{clock(one.time - record.created)}",
            ", ".join(one.hosts),
            "SIGTERM" if one.warned else "none",
        ]
        + ["–" if one.step is None else f"{one.step:,}", clock(one.gap), one.why]
        for number, one in enumerate(record.interruptions, start=1)
    ]
    columns = ["no.", "time", "hosts", "warning", "last step", "no capacity for", "why"]
    caption = "Spot instances taken away; times since the job was created."
    return _table(caption, columns, rows, words=["hosts", "warning", "why"])


def _transitions(record: Record) -> list[Element]:
    """Return the table of secondary statuses."""
    rows = [
        [utc(one.start), f"+{clock(one.start - record.created)}"]
        + ["–" if one.end is None else clock(one.end - one.start), one.status, one.message]
        for one in record.transitions
    ]
    columns = ["from", "since creation", "for", "status", "message"]
    return _table(
        "The secondary statuses, as the service tells them.",
        columns,
        rows,
        words=["from", "status", "message"],
    )


def _table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: Iterable[str]
) -> list[Element]:
    """Return a table that scrolls if it is too large; nothing without rows."""
    if not rows:
        return []
    classes = [WORDS if name in words else "number" for name in columns]
    head = node(
        "tr",
        *(
            node("th", name, scope="col", class_=kind)
            for name, kind in zip(columns, classes, strict=True)
        ),
    )
    body = [
        node(
            "tr", *(node("td", text, class_=kind) for text, kind in zip(row, classes, strict=True))
        )
        for row in rows
    ]
    table = node(
        "table", node("caption", node("span", caption)), node("thead", head), node("tbody", *body)
    )
    return [node("div", table, class_="table", tabindex=0, role="region", aria_label=caption)]
