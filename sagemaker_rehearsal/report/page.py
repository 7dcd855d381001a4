"""The report of one job: an HTML page that needs no other file, script or network."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from sagemaker_rehearsal.faults.rules import LASTING
from sagemaker_rehearsal.jobs.record import Fault, Record, Status
from sagemaker_rehearsal.report.charts import Chart, Line, figure
from sagemaker_rehearsal.report.fault_verdict import judge
from sagemaker_rehearsal.report.goodput import (
    PHASES,
    Goodput,
    Rate,
    cost_of,
    measure,
    moment,
    seconds_by_type,
)
from sagemaker_rehearsal.report.markup import clock, document, make_table, node, utc
from sagemaker_rehearsal.report.resumes import describe_resume
from sagemaker_rehearsal.report.timeline import Timeline

STYLE = Path(__file__).with_name("report.css")
# The number of names in a chart, and of charts for names that are neither loss nor accuracy.
COLOUR_COUNT = 6
# The number of names that are listed as not drawn.
MAX_NAMES = 50
RESTARTS = "restarts in the container"


def write(
    record: Record,
    path: Path,
    *,
    price: Rate | None = None,
    spot_price: Rate | None = None,
    currency: str = "",
) -> None:
    """Write the report of a job that ended, or still runs.

    Args:
        record: The job.
        path: The file to write.
        price: The price of an instance hour on demand, in any currency; None without costs.
        spot_price: The price of an instance hour on spot, in the same currency.
        currency: The currency; "" where it is not known.
    """
    record = record.masked()
    sections = make_sections(record, price=price, spot_price=spot_price, currency=currency)
    body = node("body", *sections.values())
    path.write_text(document(record.name, body, STYLE.read_text()), encoding="utf-8")


def make_sections(
    record: Record,
    *,
    price: Rate | None = None,
    spot_price: Rate | None = None,
    currency: str = "",
) -> dict[str, Element]:
    """Return the sections of a job's report, in their order, by their ids.

    Args:
        record: The job, without its secrets.
        price: The price of an instance hour on demand; None without costs.
        spot_price: The price of an instance hour on spot.
        currency: The currency; "" where it is not known.
    """
    now = moment(record)
    goodput = measure(record, now=now, price=price, spot_price=spot_price)
    timeline = Timeline(record, goodput, now=now).figure()
    request = json.dumps(record.request, indent=2, ensure_ascii=False, default=str)
    notes = [node("li", line) for line in (*record.never_due, *record.notes)]
    contents = {
        "about": [_make_header(record, goodput, now)],
        "figures": [_make_figures(record, goodput, now, currency)],
        "log-end": _make_log_end(record),
        "results": _make_results(record),
        "comparison": _make_comparison(
            record, now, {"on demand": price, "on spot": spot_price}, currency
        ),
        "faults": _make_faults(record),
        "timeline": _titled(
            "Timeline", [timeline] if timeline is not None else [], "No instance was started."
        ),
        "curves": _titled(
            "Curves",
            _make_charts(record, goodput),
            "No line of progress (“step=…”) with a value was seen.",
        ),
        "attempts": _titled("Attempts", _attempts_table(record, goodput), "No attempt was made."),
        "interruptions": _titled("Interruptions", _interruptions_table(record), "None."),
        "status": _titled(
            "Status", _transitions_table(record), "No change of status was recorded."
        ),
        "notes": _titled("Notes", [node("ul", *notes)] if notes else [], "None."),
        "request": [
            node("details", node("summary", "The request"), node("pre", node("code", request)))
        ],
    }
    return {name: node("section", *content, id=name) for name, content in contents.items()}


def _titled(title: str, content: Sequence[Element], otherwise: str) -> list[Element]:
    return [node("h2", title), *(content or [node("p", otherwise, class_="soft")])]


def _make_header(record: Record, goodput: Goodput, now: float) -> Element:
    """Return the header: the job's name, its status, and what it ran on."""
    secondary = (
        f" · {record.secondary}" if record.transitions and record.secondary != record.status else ""
    )
    hosts = {
        (instance.host, instance.instance_type)
        for attempt in record.attempts
        for instance in attempt.instances
    }
    types = sorted({instance_type for _, instance_type in hosts})
    details = [f"{len({host for host, _ in hosts})} × {', '.join(types)}"] if hosts else []
    details += ["managed spot" if record.spot else "on demand", f"created {utc(record.created)}"]
    status = node("p", node("span", record.status, class_=f"status {record.status}"), secondary)
    header = node(
        "header", node("h1", record.name), status, node("p", " · ".join(details), class_="about")
    )
    if record.failure:
        header.append(node("p", record.failure, class_="failure"))
    if goodput.caveat:
        header.append(node("p", goodput.caveat, class_="caveat"))
    return header


def _make_figures(record: Record, goodput: Goodput, now: float, currency: str) -> Element:
    """Return the most important figures."""
    share = "–" if goodput.share is None else f"{goodput.share:.1%}"
    description = "goodput: instance time that became kept training"
    if goodput.status == Status.FAILED:
        share = "failed"
        description = f"{goodput.share or 0:.0%} of the instance time was training to continue from"
    figures = [
        (share, description),
        (
            clock(now - record.created),
            "from creation to " + ("end" if goodput.status != Status.IN_PROGRESS else "now"),
        ),
        (clock(goodput.instance_seconds), "instance time, all hosts"),
        ("–" if goodput.steps is None else f"{goodput.steps:,}", "steps reached"),
        (f"{goodput.steps_lost:,}", f"steps lost; {goodput.steps_redone:,} done again"),
        (f"{len(record.interruptions)}", "interruptions"),
    ]
    accuracies = [name for name in sorted(record.results) if "acc" in name.lower()]
    figures += [(f"{record.results[name]:.4g}", name) for name in accuracies[:1]]
    if cost := goodput.cost:
        figures.append((_money(cost.on_demand, currency), "cost on demand, without interruptions"))
    if cost and cost.spot is not None:
        saving = "" if cost.saving is None else f", which saves {cost.saving:.0f} %"
        figures.append((_money(cost.spot, currency), f"cost on spot, as it went{saving}"))
    cells = [node("div", node("dt", words), node("dd", figure)) for figure, words in figures]
    cells[0].set("class", "main")
    cells[0][1].set("class", goodput.status)
    return node("dl", *cells, class_="figures")


def _money(amount: float, currency: str) -> str:
    return f"{amount:,.2f} {currency}".rstrip()


def _make_log_end(record: Record) -> list[Element]:
    """Return the end of the log of the host that failed; nothing if the job did not fail."""
    if not record.log_end:
        return []
    title = f"End of the log of {record.failed_host}, which failed first"
    lines = node("pre", "\n".join(record.log_end), tabindex=0, role="region", aria_label=title)
    return [node("h2", title), lines]


def _make_results(record: Record) -> list[Element]:
    """Return what the test has found, and where in S3 the job's files are; nothing without both."""
    rows = [[name, f"{value:.6g}"] for name, value in sorted(record.results.items())]
    rows += [[name, address] for name, address in _addresses(record).items()]
    caption = "Values of the test, as the log has them, and addresses in S3."
    table = make_table(caption, ["what", "result"], rows, words=["what", "result"])
    return [node("h2", "Results"), *table] if rows else []


def _addresses(record: Record) -> dict[str, str]:
    """Return the addresses of what a job has left."""
    addresses = {}
    if record.artifacts:
        folder, _, model = record.artifacts.rpartition("/model")
        addresses = {"model": record.artifacts, "output": f"{folder}/output{model}"}
    if config := record.request.get("CheckpointConfig"):
        addresses["checkpoints"] = str(config.get("S3Uri"))
    return addresses


def _make_comparison(
    record: Record,
    now: float,
    all_prices: dict[str, Rate | None],
    currency: str,
) -> list[Element]:
    """Return the verdict on the bits, and the table of time and cost; nothing without a run."""
    comparison = record.comparison
    if comparison is None:
        return []
    runs = [
        (record.name, now - record.created, seconds_by_type(record, now)),
        (comparison.other, comparison.seconds, comparison.seconds_by_type),
    ]
    prices = [(f"cost {words}", each) for words, each in all_prices.items() if each is not None]
    rows = [
        [name, clock(seconds), clock(sum(by_type.values()))]
        + [_money(cost_of(by_type, each), currency) for _, each in prices]
        for name, seconds, by_type in runs
    ]
    columns = ["job", "from creation to end", "instance time", *(words for words, _ in prices)]
    caption = "The job, and the same request without interruptions."
    return [
        node("h2", "Comparison with an uninterrupted run"),
        node("p", node("strong", comparison.verdict), f": {comparison.explanation}"),
        *make_table(caption, columns, rows, words=["job"]),
    ]


def _make_faults(record: Record) -> list[Element]:
    """Return the verdict on a job that had faults, and their table; nothing without faults."""
    if not record.faults:
        return []
    rows = [
        [
            f"+{clock(fault.time - record.created)}",
            fault.kind,
            fault.host,
            fault.target or "–",
            "–" if fault.step is None else f"{fault.step:,}",
            fault.failed and f"did not happen: {fault.failed}" or _describe_length(fault),
            fault.why,
        ]
        for fault in record.faults
    ]
    columns = ["time", "fault", "host", "hit", "last step", "for", "why"]
    caption = "Faults; times since the job was created."
    verdict = judge(record)
    return [
        node("h2", "Faults"),
        *([node("p", "After them: ", node("strong", verdict))] if verdict else []),
        *make_table(caption, columns, rows, words=["fault", "host", "hit", "for", "why"]),
    ]


def _describe_length(fault: Fault) -> str:
    if fault.kind not in LASTING:
        return "–"
    return "its host's life" if fault.ended is None else clock(fault.ended - fault.time)


def _make_charts(record: Record, goodput: Goodput) -> list[Element]:
    """Return the charts: losses, accuracies, then other names, then rates over time.

    Up to COLOUR_COUNT other names have a chart each.
    """
    names = sorted(
        {name for attempt in record.attempts for point in attempt.points for name in point.values}
    )
    rates = [name for name in names if name.endswith("/s")]
    names = [name for name in names if name not in ("step", "epoch", *rates)]
    losses = [name for name in names if "loss" in name.lower()]
    accuracies = [name for name in names if "acc" in name.lower() and name not in losses]
    others = [name for name in names if name not in losses + accuracies]
    left_out = (
        losses[COLOUR_COUNT:]
        + accuracies[COLOUR_COUNT:]
        + (others if len(others) > COLOUR_COUNT else [])
    )
    groups = [("Loss", losses[:COLOUR_COUNT]), ("Accuracy", accuracies[:COLOUR_COUNT])]
    groups += [(name, [name]) for name in (others if len(others) <= COLOUR_COUNT else [])]
    restarts = [float(row.first_step) for row in goodput.rows[1:] if row.first_step is not None]
    charts = [
        Chart(title, _lines_of_names(record, goodput, group), restarts) for title, group in groups
    ]
    times = [
        attempt.points[0].time - record.created for attempt in record.attempts[1:] if attempt.points
    ]
    charts += [
        Chart(
            name,
            _lines_of_names(record, goodput, [name], over_time=True),
            times,
            over="time since creation",
            as_time=True,
        )
        for name in rates[:COLOUR_COUNT]
    ]
    drawn = [chart_figure for chart_figure in map(figure, charts) if chart_figure is not None]
    more = f" and {len(left_out) - MAX_NAMES} more" if len(left_out) > MAX_NAMES else ""
    words = f"Not drawn: {', '.join(left_out[:MAX_NAMES])}{more}."
    note = [node("p", words, class_="soft")] if left_out else []
    return [node("div", *drawn, class_="charts"), *note] if drawn else note


def _lines_of_names(
    record: Record, goodput: Goodput, names: Sequence[str], *, over_time: bool = False
) -> dict[str, list[Line]]:
    """Return the lines for some names, one line for each attempt."""
    lines: dict[str, list[Line]] = {name: [] for name in names}
    for attempt, row in zip(record.attempts, goodput.rows, strict=True):
        for name in names:
            points = [
                (point.time - record.created if over_time else point.step, point.values[name])
                for point in attempt.points
                if name in point.values
            ]
            kept = row.bounds[1] - record.created if over_time and row.bounds else row.kept_step
            lines[name].append(Line(points) if kept is None else Line(points, kept))
    return lines


def _attempts_table(record: Record, goodput: Goodput) -> list[Element]:
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
        "from checkpoint",
    ]
    has_proof = any(attempt.proved for attempt in record.attempts)
    has_restarts = any(attempt.restarts for attempt in record.attempts)
    columns += [RESTARTS] * has_restarts + ["continued"] * has_proof
    rows = []
    for place, (attempt, row) in enumerate(zip(record.attempts, goodput.rows, strict=True)):
        steps = [
            "–" if step is None else f"{step:,}"
            for step in (row.first_step, row.last_step, row.kept_step)
        ]
        seconds = [clock(row.seconds[name]) for name in PHASES]
        restored = sum(instance.restored_bytes for instance in attempt.instances)
        exits = Counter(
            _describe_exit(instance.exit_status, instance.reclaimed)
            for instance in attempt.instances
        )
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
                describe_resume(record, place) or "–",
                *(
                    ["; ".join(each.words for each in attempt.restarts) or "–"]
                    if has_restarts
                    else []
                ),
                *([attempt.proved] if has_proof else []),
            ]
        )
    caption = "Phases are instance time, summed over hosts: two hosts for 10 s are 20 s."
    return make_table(
        caption,
        columns,
        rows,
        words=["exit status", "from checkpoint", RESTARTS, "continued"],
    )


def _describe_exit(status: int | None, reclaimed: bool) -> str:
    return ("–" if status is None else str(status)) + (" (reclaimed)" if reclaimed else "")


def _interruptions_table(record: Record) -> list[Element]:
    """Return the table of interruptions."""
    rows = [
        [
            str(number),
            f"+{clock(interruption.time - record.created)}",
            ", ".join(interruption.hosts),
            "SIGTERM" if interruption.warned else "none",
        ]
        + [
            "–" if interruption.step is None else f"{interruption.step:,}",
            clock(interruption.gap),
            interruption.why,
        ]
        for number, interruption in enumerate(record.interruptions, start=1)
    ]
    columns = ["no.", "time", "hosts", "warning", "last step", "no capacity for", "why"]
    caption = "Spot instances taken away; times since the job was created."
    return make_table(caption, columns, rows, words=["hosts", "warning", "why"])


def _transitions_table(record: Record) -> list[Element]:
    """Return the table of secondary statuses."""
    rows = [
        [utc(transition.start), f"+{clock(transition.start - record.created)}"]
        + [
            "–" if transition.end is None else clock(transition.end - transition.start),
            transition.status,
            transition.message,
        ]
        for transition in record.transitions
    ]
    columns = ["from", "since creation", "for", "status", "message"]
    return make_table(
        "The secondary statuses, as the service tells them.",
        columns,
        rows,
        words=["from", "status", "message"],
    )
