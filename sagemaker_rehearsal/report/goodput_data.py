"""The goodput of a job as data, for programs: JSON by a schema, and CSV."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sagemaker_rehearsal.jobs.record import Record, Status
from sagemaker_rehearsal.report.fault_verdict import judge
from sagemaker_rehearsal.report.goodput import PHASES, Rate, Row, measure, moment

# The JSON Schema of what `describe` returns.
SCHEMA = Path(__file__).with_name("goodput.schema.json")
# The file in a job's folder of reports.
FILE_NAME = "goodput.json"
VERSION = 3
SECONDS = {name: f"{name.replace('-', '_')}_seconds" for name in PHASES}
COLUMNS = [
    "attempt",
    "hosts",
    "first_step",
    "last_step",
    "kept_step",
    *SECONDS.values(),
    "instance_seconds",
    "goodput",
]
# The number of the row of the whole job, in the column `attempt`.
ALL = "all"


def describe(
    record: Record,
    *,
    price: Rate | None = None,
    spot_price: Rate | None = None,
    currency: str = "",
) -> dict:
    """Return what became of a job's steps and time, as SCHEMA describes it.

    Args:
        record: The job, without its secrets.
        price: Price of an instance hour on demand, by type where the job has several; None
            without costs.
        spot_price: Price of an instance hour on spot.
        currency: The currency; "" where it is not known.
    """
    now = moment(record)
    goodput = measure(record, now=now, price=price, spot_price=spot_price)
    cost = goodput.cost
    return {
        "version": VERSION,
        "job": record.name,
        "status": record.status,
        "failure": record.failure,
        "created": record.created,
        "seconds": now - record.created,
        "hosts": max((len(attempt.instances) for attempt in record.attempts), default=0),
        "interruptions": len(record.interruptions),
        "steps": goodput.steps,
        "steps_lost": goodput.steps_lost,
        "steps_redone": goodput.steps_redone,
        "instance_seconds": goodput.instance_seconds,
        "kept_seconds": goodput.kept_seconds,
        "goodput": goodput.share,
        "cost": cost
        and {
            "price": price,
            "spot_price": spot_price,
            "currency": currency,
            "on_demand": cost.on_demand,
            "spot": cost.spot,
            "saving_percent": cost.saving,
        },
        "faults": [asdict(fault) for fault in record.faults],
        "verdict": judge(record),
        "never_due": record.never_due,
        "results": record.results,
        "comparison": record.comparison and asdict(record.comparison),
        "attempts": [
            _describe_row(row, len(attempt.instances))
            for row, attempt in zip(goodput.rows, record.attempts, strict=True)
        ],
    }


def _describe_row(row: Row, hosts: int) -> dict:
    return {
        "attempt": row.number,
        "hosts": hosts,
        "first_step": row.first_step,
        "last_step": row.last_step,
        "kept_step": row.kept_step,
    } | {SECONDS[name]: row.seconds[name] for name in PHASES}


def as_csv(data: dict) -> str:
    """Return what `describe` has returned as CSV: a row for each attempt, and one for the job."""
    rows = [_with_sums(attempt) for attempt in data["attempts"]]
    steps = [data["attempts"][0]["first_step"] if rows else None, data["steps"], data["steps"]]
    whole = dict(zip(COLUMNS, [ALL, data["hosts"], *steps], strict=False))
    whole |= {name: sum(row[name] for row in rows) for name in SECONDS.values()}
    whole |= {"instance_seconds": data["instance_seconds"], "goodput": data["goodput"]}
    return _write_csv([*rows, whole])


def _with_sums(attempt: dict) -> dict:
    """Return an attempt with all its instance seconds, and the share that was kept."""
    seconds = sum(attempt[name] for name in SECONDS.values())
    share = attempt[SECONDS["kept"]] / seconds if seconds > 0 else None
    return attempt | {"instance_seconds": seconds, "goodput": share}


def _write_csv(rows: Sequence[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read(folder: Path, name: str) -> dict:
    """Return the goodput of a job that has ended, from the folder of all reports.

    Raises ValueError if there is none.
    """
    path = folder / name / FILE_NAME
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"JOB: found no goodput of {name} in {folder} ({error}); expected a job that a "
            "rehearsal with this folder has run to its end"
        ) from None


def check(data: dict, least: float) -> None:
    """Raise ValueError unless a job's goodput is `least` or more.

    The goodput of a job that failed is 0.

    Args:
        data: What `describe` has returned.
        least: The smallest share that is allowed, 0 to 1.
    """
    failed = data["status"] == Status.FAILED
    share = 0.0 if failed else data["goodput"]
    if share is None or share < least:
        is_done = data["status"] == Status.COMPLETED
        why = "its log has no line of progress" if is_done else "no instance was started"
        found = f"none, as {why}" if share is None else f"{100 * share:.2f}%"
        raise ValueError(
            f"goodput: found {found}{' (the job failed)' if failed else ''}, expected "
            f"{100 * least:g}% or more (--fail-below); {data['job']} has {data['interruptions']} "
            f"interruptions and lost {data['steps_lost']} steps"
        )
