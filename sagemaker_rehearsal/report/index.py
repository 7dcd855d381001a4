"""The index of a folder of reports: one HTML page that links them."""

import json
from pathlib import Path
from urllib.parse import quote

from sagemaker_lightning.contract.atomic_files import atomic_write
from sagemaker_rehearsal.locks import locked
from sagemaker_rehearsal.report import goodput_data
from sagemaker_rehearsal.report.markup import clock, document, make_table, node, utc
from sagemaker_rehearsal.report.page import STYLE

FILE_NAME = "index.html"
# Jobs that are listed: the newest.
MAX_JOBS = 500
COLUMNS = ["job", "created", "status", "time", "goodput", "steps", "interruptions", "verdict"]


def write(folder: Path) -> None:
    """Write the index of the jobs whose goodput is in `folder`, those of earlier rehearsals too."""
    # Jobs, also those of two rehearsals, end at the same time, and each writes it.
    with locked(folder):
        found = [(path.parent.name, data) for path, data in _read_all(folder)]
        found.sort(key=lambda each: each[1]["created"], reverse=True)
        rows = [_row(name, data) for name, data in found[:MAX_JOBS]]
        words = ["job", "created", "status", "verdict"]
        content = make_table("Jobs, the newest first.", COLUMNS, rows, words=words)
        if len(found) > MAX_JOBS:
            content.append(node("p", f"{len(found) - MAX_JOBS} older jobs are left out."))
        body = node("body", node("h1", "Rehearsals"), *content)
        with atomic_write(folder / FILE_NAME, sync=False) as file:
            file.write(document("Rehearsals", body, STYLE.read_text()).encode())


def _read_all(folder: Path) -> list[tuple[Path, dict]]:
    """Return the goodput of each job, without those of another version or that cannot be read."""
    found = []
    for path in folder.glob(f"*/{goodput_data.FILE_NAME}"):
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(data, dict) and data.get("version") == goodput_data.VERSION:
            found.append((path, data))
    return found


def _row(name: str, data: dict) -> list:
    comparison = data["comparison"]
    return [
        node("a", name, href=f"{quote(name)}/report.html"),
        utc(data["created"]),
        data["status"],
        clock(data["seconds"]),
        "–" if data["goodput"] is None else f"{data['goodput']:.1%}",
        "–" if data["steps"] is None else f"{data['steps']:,}",
        str(data["interruptions"]),
        (comparison and comparison["verdict"]) or data["verdict"] or "–",
    ]
