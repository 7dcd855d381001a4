"""One job in short, as text: for the live view and the page."""

from sagemaker_lightning.contract.errors import plain
from sagemaker_rehearsal.jobs.masking import Mask
from sagemaker_rehearsal.jobs.record import ENDED, Instance, Interruption, Record, Status
from sagemaker_rehearsal.report.fault_verdict import judge
from sagemaker_rehearsal.report.goodput import measure, moment
from sagemaker_rehearsal.report.markup import clock


def describe_interruption(created: float, interruption: Interruption) -> str:
    """Return an interruption of a job in words; `created` is when the job was made."""
    warned = "warned" if interruption.warned else "not warned"
    step = "" if interruption.step is None else f" at step {interruption.step}"
    return (
        f"interruption after {clock(interruption.time - created)}{step}: "
        f"{', '.join(interruption.hosts)}, {warned}, {interruption.why}"
    )


def describe_end(record: Record) -> str:
    """Return the end of a job in words."""
    reason = f": {record.failure}" if record.failure else ""
    return f"{record.status} after {clock(moment(record) - record.created)}{reason}"


def describe_outcome(record: Record) -> list[str]:
    """Return the goodput of a job that has ended, and the verdict on its bits or after faults."""
    try:
        share = measure(record, now=moment(record)).share
    # The other jobs are still shown.
    except Exception as error:
        return [describe_fault(error), ""]
    verdict = record.comparison.verdict if record.comparison else judge(record)
    return ["–" if share is None else f"{share:.1%}", verdict or "–"]


def describe_fault(error: Exception) -> str:
    """Return a fault of ours that a job has found, in words."""
    return f"cannot be shown: {type(error).__name__}"


def cells_of(record: Record) -> list[str]:
    """Return a job's row: name, status, hosts, progress, number of interruptions, time.

    The progress of a job that cannot be shown says why.
    """
    try:
        cells = _cells(record)
    # The other jobs are still shown.
    except Exception as error:
        cells = [record.name, record.status, "", describe_fault(error), "", ""]
    return [plain(cell) for cell in cells]


def _cells(record: Record) -> list[str]:
    """Return a job's row, as the job's texts have it."""
    status = (
        record.secondary
        if record.status == Status.IN_PROGRESS and record.transitions
        else record.status
    )
    message = (
        Mask(record.request).text(record.failure) if record.failure else _describe_progress(record)
    )
    return [
        record.name,
        status,
        _describe_hosts(record),
        message,
        str(len(record.interruptions) or ""),
        clock(moment(record) - record.created),
    ]


def _describe_hosts(record: Record) -> str:
    """Return what the hosts of the last attempt do, with their number or name."""
    groups: dict[str, list[str]] = {}
    for instance in record.attempts[-1].instances if record.attempts else []:
        groups.setdefault(_describe_instance(instance), []).append(instance.host)
    return ", ".join(
        f"{names[0] if len(names) == 1 else len(names)} {state}" for state, names in groups.items()
    )


def _describe_instance(instance: Instance) -> str:
    """Return what an instance does, or how its container ended."""
    status = "" if instance.exit_status is None else f"exit {instance.exit_status}"
    if instance.reclaimed:
        return f"reclaimed {status}".rstrip()
    return status or (
        "released" if instance.released else "training" if instance.training else "starting"
    )


def _describe_progress(record: Record) -> str:
    """Return the last progress line in short; at the end, that a rule never came due."""
    if record.status in ENDED and record.never_due:
        return "; ".join(record.never_due)
    points = [point for attempt in record.attempts[-1:] for point in attempt.points[-1:]]
    if not points:
        return ""
    values = points[0].values
    shown = [name for name in values if "loss" in name][:1] + [
        name for name in values if name.endswith("/s")
    ][:1]
    parts = [f"epoch {values['epoch']:g}"] if "epoch" in values else []
    return " ".join(
        [f"step {points[0].step}", *parts, *(f"{name} {values[name]:.4g}" for name in shown)]
    )
