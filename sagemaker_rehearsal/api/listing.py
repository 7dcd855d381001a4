"""ListTrainingJobs: filters, order and pages."""

import base64
import time
from collections.abc import Mapping

from sagemaker_rehearsal.api.errors import invalid
from sagemaker_rehearsal.jobs import warm_pools
from sagemaker_rehearsal.jobs.record import Record

# Jobs on a page without MaxResults.
PAGE_JOBS = 10


def page(jobs: Mapping[str, Record], request: dict) -> dict:
    """Return the page that a request asks for; `jobs` has a region's jobs by ARN."""
    if request.get("TrainingPlanArnEquals"):
        raise invalid("The rehearsal does not emulate TrainingPlanArnEquals of ListTrainingJobs")
    now = time.time()
    matching = [(arn, record) for arn, record in jobs.items() if passes(record, request, now)]
    keys = {"Name": lambda pair: pair[1].name, "Status": lambda pair: pair[1].status}
    matching.sort(key=lambda pair: pair[1].created, reverse=True)
    matching.sort(
        key=keys.get(request.get("SortBy"), lambda pair: pair[1].created),
        reverse=request.get("SortOrder", "Descending") == "Descending",
    )
    start = place_in_list(request.get("NextToken"))
    size = request.get("MaxResults", PAGE_JOBS)
    next_page = {"NextToken": token(start + size)} if start + size < len(matching) else {}
    return {
        "TrainingJobSummaries": [summary(*pair, now) for pair in matching[start : start + size]]
    } | next_page


def passes(record: Record, request: dict, now: float) -> bool:
    """Return whether a job passes the filters of ListTrainingJobs."""
    return (
        request.get("NameContains", "") in record.name
        and request.get("StatusEquals", record.status) == record.status
        and within(record.created, request, "CreationTime")
        and within(record.modified, request, "LastModifiedTime")
        and request.get("WarmPoolStatusEquals") in (None, warm_pools.status(record, now))
    )


def within(moment: float, request: dict, name: str) -> bool:
    """Return whether a moment lies between a filter's bounds."""
    return request.get(f"{name}After", 0) <= moment <= request.get(f"{name}Before", float("inf"))


def summary(arn: str, record: Record, now: float) -> dict:
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
            "WarmPoolStatus": warm_pools.describe(record, now),
        }
    )


def token(start: int) -> str:
    """Return the NextToken of a page that starts at job number `start`."""
    return base64.b64encode(str(start).encode()).decode()


def place_in_list(next_token: str | None) -> int:
    """Return the number in a NextToken, 0 without one; Refused if it is invalid."""
    try:
        start = int(base64.b64decode(next_token, validate=True)) if next_token else 0
    except ValueError:
        start = -1
    if start < 0:
        raise invalid("Invalid NextToken")
    return start


def without_none(content):
    """Return JSON content without nulls, which a client would take for values."""
    if isinstance(content, dict):
        return {key: without_none(value) for key, value in content.items() if value is not None}
    return [without_none(value) for value in content] if isinstance(content, list) else content
