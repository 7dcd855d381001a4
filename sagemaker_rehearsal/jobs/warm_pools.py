"""Warm pools: a job's instances, kept after its end for a job that matches it.

Nothing starts sooner here for it, but for what a job has left in the cache folder. What the service
says of it, and which job gets the instances, is as on AWS: "SageMaker AI Managed Warm Pools" in the
developer guide, and WarmPoolStatus in the API reference.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from sagemaker_rehearsal.jobs import folders
from sagemaker_rehearsal.jobs.record import ENDED, Record

# What both jobs must have alike, besides these fields of ResourceConfig.
ALIKE = (
    "RoleArn",
    "VpcConfig",
    "EnableInterContainerTrafficEncryption",
    "EnableNetworkIsolation",
)
ALIKE_RESOURCES = ("InstanceType", "InstanceCount", "VolumeSizeInGB", "VolumeKmsKeyId")
# How a failure begins after which the instances may be ill: they are not kept.
ILL = "InternalServerError"
KEEP_ALIVE = "KeepAlivePeriodInSeconds"
# The folder that a pool's jobs share, and the variable that names it.
CACHE = "/opt/ml/sagemaker/warmpoolcache"
CACHE_VARIABLE = "SAGEMAKER_MANAGED_WARMPOOL_CACHE_DIRECTORY"


class PoolStatus(StrEnum):
    """WarmPoolStatus.Status."""

    IN_USE = "InUse"
    AVAILABLE = "Available"
    REUSED = "Reused"
    TERMINATED = "Terminated"


def seconds_kept(record: Record) -> int:
    """Return how long a job's instances are kept after its end."""
    return (record.request.get("ResourceConfig") or {}).get(KEEP_ALIVE) or 0


def status(record: Record, now: float) -> PoolStatus | None:
    """Return what has become of a job's warm pool; None if it has none."""
    pool = record.warm_pool
    if record.status not in ENDED:
        return PoolStatus.IN_USE if seconds_kept(record) or pool.inherited_from else None
    if pool.reused_by:
        return PoolStatus.REUSED
    if pool.over is not None:
        return PoolStatus.TERMINATED
    if not leaves_instances(record) or not seconds_kept(record):
        return PoolStatus.TERMINATED if pool.inherited_from else None
    is_over = now >= _end(record) + seconds_kept(record)
    return PoolStatus.TERMINATED if is_over else PoolStatus.AVAILABLE


def has_cache(record: Record) -> bool:
    """Return whether a job's hosts have the cache folder of a pool."""
    return bool(seconds_kept(record) or record.warm_pool.inherited_from)


def cache_of(name: str, work: Path) -> Path:
    """Return where a job's cache is, in the folder of all jobs: no job has such a name."""
    return work / f"{name}.cache"


def make_cache(record: Record, work: Path, is_first: bool) -> None:
    """Make the folder of a job's caches: that of the pool, or an empty one.

    Args:
        record: The job's.
        work: The folder of all jobs.
        is_first: Whether the job starts for the first time. Later, its instances are new ones.
    """
    own = cache_of(record.name, work)
    folders.remove(own)
    inherited = cache_of(record.warm_pool.inherited_from, work)
    if is_first and record.warm_pool.inherited_from and inherited.exists():
        inherited.rename(own)
    own.mkdir(parents=True, exist_ok=True)


def leaves_instances(record: Record) -> bool:
    """Return whether a job that has ended had instances, and they may be well."""
    return bool(record.attempts) and not (record.failure or "").startswith(ILL)


def describe(record: Record, now: float) -> dict[str, Any] | None:
    """Return WarmPoolStatus, with the seconds for which the pool is billed."""
    pool = record.warm_pool
    found = status(record, now)
    if found is None:
        return None
    described: dict[str, Any] = {"Status": found}
    if record.status in ENDED and leaves_instances(record):
        over = min(now, _end(record) + seconds_kept(record)) if pool.over is None else pool.over
        described["ResourceRetainedBillableTimeInSeconds"] = round(over - _end(record))
    return described | ({"ReusedByJob": pool.reused_by} if pool.reused_by else {})


def take_over(record: Record, others: Iterable[Record]) -> list[str]:
    """Give a new job the instances of one that matches, if there is one; return lines to note.

    Args:
        record: The new job's.
        others: Those of the same account and region.
    """
    notes = []
    if seconds := seconds_kept(record):
        notes.append(
            f"the service bills the {seconds} s for which the instances are kept after the job "
            f"({KEEP_ALIVE}), or what another job leaves of them: they are in no cost here"
        )
    now = time.time()
    for other in others:
        is_free = status(other, now) == PoolStatus.AVAILABLE
        if is_free and matching_fields(other) == matching_fields(record):
            other.warm_pool = replace(other.warm_pool, reused_by=record.name, over=now)
            record.warm_pool.inherited_from = other.name
            return [*notes, f"the job has the instances of {other.name}, from its warm pool"]
    return notes


def keep_for(record: Record, seconds: int) -> bool:
    """Change how long a job's instances are kept (UpdateTrainingJob); 0 gives them back now.

    Returns whether that is possible: the job runs, or its pool is Available.
    """
    now = time.time()
    is_available = status(record, now) == PoolStatus.AVAILABLE
    if record.status in ENDED and not is_available:
        return False
    if is_available and now >= _end(record) + seconds:
        record.warm_pool.over = now
    resources = record.request["ResourceConfig"] | {KEEP_ALIVE: seconds}
    record.request = record.request | {"ResourceConfig": resources}
    return True


def _end(record: Record) -> float:
    """Return when a job has ended."""
    return record.transitions[-1].start


def matching_fields(record: Record) -> list[Any]:
    """Return what a job must have in common with another to take over its instances."""
    request = record.request
    resources = request.get("ResourceConfig") or {}
    spot_or_groups = request.get("EnableManagedSpotTraining"), resources.get("InstanceGroups")
    return [
        [request.get(name) or None for name in ALIKE],
        [resources.get(name) for name in ALIKE_RESOURCES],
        [value or None for value in spot_or_groups],
    ]
