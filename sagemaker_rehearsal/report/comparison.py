"""Compares a job with an uninterrupted run of the same request: the bits of the model, the time."""

from sagemaker_rehearsal.jobs.record import (
    MAX_MODEL_FILES,
    Comparison,
    Record,
    Status,
    Verdict,
)
from sagemaker_rehearsal.report.goodput import moment, seconds_by_type

# The endings of files that hold weights. What else is beside them, for example a configuration with
# the job's name, may differ.
WEIGHTS = (
    ".bin",
    ".ckpt",
    ".h5",
    ".keras",
    ".msgpack",
    ".npy",
    ".npz",
    ".onnx",
    ".pkl",
    ".pt",
    ".pt2",
    ".pth",
    ".safetensors",
)
# Files that are named, at most.
MAX_NAMES = 5


def compare(record: Record, other: Record) -> Comparison:
    """Return how a job that has ended compares with an uninterrupted run of its request.

    Args:
        record: The job.
        other: The run that was to be left alone, which has ended, too.
    """
    verdict, explanation = _judge(record, other)
    by_type = seconds_by_type(other, moment(other))
    return Comparison(
        other=other.name,
        verdict=verdict,
        explanation=explanation,
        seconds=moment(other) - other.created,
        instance_seconds=sum(by_type.values()),
        seconds_by_type=by_type,
    )


def _judge(record: Record, other: Record) -> tuple[Verdict, str]:
    for each in (record, other):
        if each.status != Status.COMPLETED:
            why = f": {each.failure}" if each.failure else ""
            return Verdict.NONE, f"{each.name} ended as {each.status}{why}"
    if other.disturbed:
        return Verdict.NONE, f"{other.name} was interrupted or had a fault, too"
    names = {*record.model_files, *other.model_files}
    if not names:
        return Verdict.NONE, "there is no file in either model artifact"
    if max(len(record.model_files), len(other.model_files)) >= MAX_MODEL_FILES:
        return Verdict.NONE, f"a model artifact has {MAX_MODEL_FILES:,} files or more"
    weights = {name for name in names if name.lower().endswith(WEIGHTS)} or names
    different = sorted(
        name for name in names if record.model_files.get(name) != other.model_files.get(name)
    )
    if in_weights := [name for name in different if name in weights]:
        return Verdict.OTHER_BITS, _describe_differences(in_weights, record, other)
    words = f"of {_listed(sorted(weights))}"
    if different:
        words += f"; without weights, and different: {_listed(different)}"
    return Verdict.SAME_BITS, words


def _describe_differences(names: list[str], record: Record, other: Record) -> str:
    """Return which files with weights differ, or are in one of the artifacts alone."""
    missing = {
        name: each.name
        for each in (record, other)
        for name in names
        if name not in each.model_files
    }
    differ = [name for name in names if name not in missing]
    parts = [f"{_listed(differ)} differ{'s' * (len(differ) == 1)}"] if differ else []
    parts += [f"{name} is not in that of {job}" for name, job in list(missing.items())[:MAX_NAMES]]
    return "; ".join(parts)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
