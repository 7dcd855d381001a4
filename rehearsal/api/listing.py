"""ListTrainingJobs: which jobs, in which order, a page at a time."""

import base64
from collections.abc import Mapping

from rehearsal.api.errors import invalid
from rehearsal.jobs.record import Record

PAGE = 10  # jobs, unless MaxResults says otherwise


def page(jobs: Mapping[str, Record], request: dict) -> dict:
    """Return the page that a request asks for of a region's jobs, which are given by their ARN."""
    for name in ("WarmPoolStatusEquals", "TrainingPlanArnEquals"):
        if request.get(name):
            raise invalid(f"The rehearsal does not emulate {name} of ListTrainingJobs")
    found = [(arn, record) for arn, record in jobs.items() if passes(record, request)]
    keys = {"Name": lambda one: one[1].name, "Status": lambda one: one[1].status}
    found.sort(key=lambda one: one[1].created, reverse=True)
    found.sort(
        key=keys.get(request.get("SortBy"), lambda one: one[1].created),
        reverse=request.get("SortOrder", "Descending") == "Descending",
    )
    start, size = place_in_list(request.get("NextToken")), request.get("MaxResults", PAGE)
    more = {"NextToken": token(start + size)} if start + size < len(found) else {}
    return {"TrainingJobSummaries": [summary(*one) for one in found[start : start + size]]} | more


def passes(record: Record, request: dict) -> bool:
    """Return whether a job passes the filters of ListTrainingJobs."""
    return (
        request.get("NameContains", "") in record.name
        and request.get("StatusEquals", record.status) == record.status
        and within(record.created, request, "CreationTime")
        and within(record.modified, request, "LastModifiedTime")
    )


def within(moment: float, request: dict, name: str) -> bool:
    """Return whether a moment lies between a filter's bounds."""
    return request.get(f"{name}After", 0) <= moment <= request.get(f"{name}Before", float("inf"))


def summary(arn: str, record: Record) -> dict:
    """Return a job's entry in ListTrainingJobs."""
    return without_none(
        {
            "TrainingJobName": record.name,
            "TrainingJobArn": arn,
            "CreationTime": record.created,
            "TrainingEndTime": record.training_end,
            "LastModifiedTime": record.modified,
            "TrainingJobStatus": record.status,
            "SecondaryStatus": record.secondary,
        }
    )


def token(start: int) -> str:
    """Return a NextToken."""
    return base64.b64encode(str(start).encode()).decode()


def place_in_list(found: str | None) -> int:
    """Return what a NextToken says."""
    try:
        start = int(base64.b64decode(found, validate=True)) if found else 0
    except ValueError:
        start = -1
    if start < 0:
        raise invalid("Invalid NextToken")
    return start


def without_none(found):
    """Return JSON without what is null: a client takes null for a value."""
    if isinstance(found, dict):
        return {key: without_none(value) for key, value in found.items() if value is not None}
    return [without_none(value) for value in found] if isinstance(found, list) else found
