"""What became of a job after its faults, in a few words."""

from sagemaker_rehearsal.jobs.record import Fault, Record, Status, Verdict
from sagemaker_rehearsal.report.markup import clock

NO_REASON = "AlgorithmError: , exit code"
"""How FailureReason begins where the program has given no reason (Attempt.watch)."""


def judge(record: Record) -> str | None:
    """Return the verdict on a job that had faults; None if it had none, or still runs.

    It is one of: same bits, other bits, completed (not compared), failed with a reason, failed
    without a reason, hung, stopped.
    """
    if not any(fault.applied for fault in record.faults):
        return None
    if record.hung:
        return "hung"
    if record.status == Status.COMPLETED:
        if record.comparison and record.comparison.verdict != Verdict.NONE:
            return str(record.comparison.verdict)
        return "completed, not compared"
    if record.status == Status.FAILED:
        has_reason = record.failure and not record.failure.startswith(NO_REASON)
        return "failed with a reason" if has_reason else "failed without a reason"
    return "stopped" if record.status == Status.STOPPED else None


def describe_injection(created: float, fault: Fault) -> str:
    """Return a fault of a job in words; `created` is when the job was made."""
    step = "" if fault.step is None else f" at step {fault.step}"
    target = f", {fault.target}" if fault.target else ""
    failed = "" if fault.applied else f"; it did not happen: {fault.failed}"
    return (
        f"fault after {clock(fault.time - created)}{step}: {fault.kind} of {fault.host}{target}, "
        f"{fault.why}{failed}"
    )
