"""The table of the documentation, made of the lines of JSON that rounds write."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zoo.table import CONFIGURATIONS

BEGIN = "<!-- begin: python -m tests.zoo report -->"
END = "<!-- end -->"
OUTCOMES = ("identical", "said", "wrong", "lost", "hung", "crashed")


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return totals and a table of configurations below each subject."""
    rows = list(rows)
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["configuration"], []).append(row)
    lines = [textwrap.fill(totals(rows), 105), ""]
    subject = ""
    for configuration in CONFIGURATIONS.values():
        if configuration.name not in by_name:
            continue
        if configuration.subject != subject:
            subject = configuration.subject
            lines += [
                "",
                f"**{subject}**",
                "",
                "| configuration | launched as | rounds | interruptions | outcome |",
            ]
            lines += ["| --- | --- | --- | --- | --- |"]
        lines.append(line(configuration.name, by_name[configuration.name]))
    return "\n".join(lines)


def line(name: str, rows: list[Mapping[str, Any]]) -> str:
    """Return the row of a configuration."""
    counts = Counter(row["outcome"] for row in rows)
    if set(counts) == {"identical"}:
        outcome = "identical"
    else:
        outcome = ", ".join(
            f"{counts[outcome_name]} {outcome_name}"
            for outcome_name in OUTCOMES
            if counts[outcome_name]
        )
        limitations = sorted({row["detail"].strip() for row in rows if row["outcome"] == "said"})
        outcome += "".join(f": `{outcome_name}`" for outcome_name in limitations)
    launched = ", ".join(sorted({row["launcher"] for row in rows}))
    return (
        f"| {name} | {launched} | {len(rows)} | "
        f"{sum(len(row['interruptions']) for row in rows)} | {outcome} |"
    )


def totals(rows: list[Mapping[str, Any]]) -> str:
    """Return the totals of all rounds, in a sentence."""
    signals = Counter(
        interruption["signal"] for row in rows for interruption in row["interruptions"]
    )
    counts = Counter(row["outcome"] for row in rows)
    several = sum(len(row["interruptions"]) for row in rows if row["launcher"] != "process")
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return (
        f"{len({row['configuration'] for row in rows})} configurations, {len(rows)} jobs, "
        f"{sum(signals.values())} interruptions ({signals['SIGTERM']} stops, "
        f"{signals['SIGKILL']} kills; {several} of jobs of two or three ranks), on {commits}: "
        f"{', '.join(f'{counts[outcome]} {outcome}' for outcome in OUTCOMES)}."
    )


def write(page: Path, text: str) -> None:
    """Put the table into a page, between its marks."""
    text_before, _, text_rest = page.read_text().partition(BEGIN)
    _, _, text_after = text_rest.partition(END)
    page.write_text(f"{text_before}{BEGIN}\n\n{text}\n\n{END}{text_after}")
