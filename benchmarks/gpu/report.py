"""The table of a file of results, computed from the file alone."""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.results import Results, files

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "results/gpu.md"
FOLDER = ROOT / "results"
BEGIN = "<!-- made by `python -m benchmarks.gpu report --write`: begin -->"
END = "<!-- end -->"
MAX_COLUMNS = 120  # of a line of the pages
NOTHING = "Nothing of this was measured on a GPU yet."


def text(results: Results) -> str:
    """Return all of it as Markdown."""
    about = results.about
    hosts = "; ".join(
        f"{host['cpu']}, {host['cores']} cores, {host['memory']} GiB" for host in about["hosts"]
    )
    gpu = (
        f"{about['gpu']}, {about['gpu_memory']} GiB, driver {about['driver']}"
        if about["gpu"]
        else "no GPU"
    )
    lines = (
        ["A rehearsal in miniature: no figure in it means anything.", ""]
        if about["miniature"]
        else []
    )
    lines += [
        f"{gpu}; {hosts}.",
        ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    ]
    lines[-1] += (
        f". Commit {about['commit']}, {about['date']}. Figures are medians [range]; "
        "n is the number of values."
    )
    for name, part in PARTS.items():
        measured = results.parts.get(name)
        lines += ["", f"**{name}**: {part.what}."]
        if measured is None:
            lines[-1] += " Not measured."
            continue
        if measured["status"] != "complete":
            lines[-1] += (
                f" {measured['status'].capitalize()}: {measured['line'] or 'not done yet'}."
            )
        if measured["records"]:
            lines += [
                "",
                *filter(
                    None, (table(part, measured["records"]), part.details(measured["records"]))
                ),
            ]
    return "\n".join(map(wrapped, "\n".join(lines).split("\n"))) + "\n"


def wrapped(line: str) -> str:
    """Return a line in lines that are not wider than those of the pages; a table's row as it is."""
    if line.startswith("|"):
        return line
    return textwrap.fill(
        line,
        MAX_COLUMNS,
        subsequent_indent="  " * line.startswith("- "),
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(part: Part, records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a part: a row for each setting."""
    if not part.columns:
        return ""
    settings: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        settings.setdefault(record["setting"], []).append(record)
    columns = {
        name: value
        for name, value in part.columns.items()
        if not all(math.isnan(value(record)) for record in records)
    }
    rows = [f"| setting | {' | '.join(columns)} | n |", "| --- " * (len(columns) + 2) + "|"]
    for setting, setting_records in settings.items():
        cells = [cell([value(record) for record in setting_records]) for value in columns.values()]
        rows.append(f"| {setting} | {' | '.join(cells)} | {len(setting_records)} |")
    return "\n".join(rows) + "\n"


def cell(values: Sequence[float]) -> str:
    """Return the median, with the range if there are several values; "" if there are none."""
    if any(map(math.isnan, values)):
        return ""
    middle = f"{statistics.median(values):.4g}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.4g}..{max(values):.4g}]"


def newest() -> Results | None:
    """Return the repository's newest results that are not a rehearsal's."""
    all_results = [Results.read(path) for path in files(FOLDER)]
    return next(
        (results for results in reversed(all_results) if not results.about["miniature"]), None
    )


def written(page: str, results: Results | None) -> str:
    """Return the page of the docs with these results in it."""
    page_start, rest_of_page = page.split(BEGIN)
    page_end = rest_of_page.split(END)[1]
    return f"{page_start}{BEGIN}\n{text(results) if results else NOTHING + chr(10)}{END}{page_end}"
