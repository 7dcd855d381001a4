"""Says from which checkpoint each attempt continued, and why not from the newest one."""

from sagemaker_rehearsal.jobs.record import Attempt, Record


def describe_resume(record: Record, place: int) -> str:
    """Return from where an attempt continued, and why not from the newest checkpoint.

    It is "" for a first attempt that had no checkpoint, and for one whose checkpoints are not yet
    restored.

    Args:
        record: The job.
        place: The number of the attempt, from 0.
    """
    attempt = record.attempts[place]
    if not any(each.training for each in attempt.instances):
        return ""
    origin = _describe_origin(record, attempt, is_first=place == 0)
    with_checkpoints = [each for each in record.attempts[:place] if _newest_step(each) is not None]
    if not with_checkpoints:
        return origin
    newest = _newest_step(with_checkpoints[-1])
    if attempt.resumed is not None and attempt.resumed >= newest:
        return origin
    why = _describe_loss(with_checkpoints[-1], newest) or "; ".join(attempt.skipped)
    if not why and attempt.resumed is None:
        return origin
    return f"{origin}; not from step {newest:,}: {why or 'it was in S3, the log does not say why'}"


def _describe_origin(record: Record, attempt: Attempt, *, is_first: bool) -> str:
    if attempt.resumed is not None:
        name = f", {attempt.resumed_from}" if attempt.resumed_from else ""
        return f"step {attempt.resumed:,}{name}"
    if any(instance.restored_files for instance in attempt.instances):
        return "its log does not say"
    if is_first:
        return ""
    if not record.request.get("CheckpointConfig"):
        return "the beginning: the job has no CheckpointConfig"
    return "the beginning: S3 had no checkpoint"


def _newest_step(attempt: Attempt) -> int | None:
    """Return the step of the newest checkpoint that any host had at its end."""
    return max((each.saved.step for each in attempt.instances if each.saved), default=None)


def _describe_loss(attempt: Attempt, step: int) -> str:
    """Return which file of a checkpoint no host had in S3 at its end, and why; "" if none."""
    files: dict[str, dict[str, str]] = {}
    for each in attempt.instances:
        if each.saved and each.saved.step == step:
            for name, why in each.saved.missing.items():
                files.setdefault(name, {})[each.host] = why
    missing = {name: hosts for name, hosts in files.items() if all(hosts.values())}
    if not missing:
        return ""
    name, hosts = next(iter(missing.items()))
    more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
    whys: dict[str, list[str]] = {}
    for host, why in hosts.items():
        whys.setdefault(why, []).append(host)
    reasons = "; ".join(f"{why} ({', '.join(names)})" for why, names in whys.items())
    return f"{name}{more} was not in S3: {reasons}"
