"""What a job has cost, by what the service says of it."""

import argparse
from datetime import UTC, datetime, timedelta

import pytest

from sagemaker_lightning.launcher import command, job_cost

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
JOB = {
    "TrainingJobName": "my-job",
    "TrainingJobStatus": "Completed",
    "TrainingTimeInSeconds": 7200,
    "BillableTimeInSeconds": 1800,
    "TrainingStartTime": NOW - timedelta(hours=3),
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
}
RUNNING = {name: value for name, value in JOB.items() if name not in ("BillableTimeInSeconds",)} | {
    "TrainingJobStatus": "InProgress"
}
PRICES = """instance_type,on_demand,spot,currency,date,source
ml.g5.xlarge,1.5,,EUR,2026-11-26,a page
ml.g5.2xlarge,4,,EUR,2026-11-26,a page
"""


def parsed(*flags: str) -> argparse.Namespace:
    return command.command_parser().parse_args(["cost", "my-job", *flags])


def lines(job: dict, *flags: str) -> list[list[str]]:
    """Return the words of each line that is printed of a job's cost."""
    return [line.split() for line in job_cost.describe(parsed(*flags), job, NOW)]


def test_what_is_billed_is_that_of_each_instance():
    assert lines(JOB, "--price=1.5") == [
        ["my-job:", "Completed"],
        ["per", "hour", "hours", "cost"],
        ["billed", "3.00", "0.50", "1.50"],
    ]


def test_a_spot_job_has_its_discount_in_the_seconds():
    name, _, billed, on_demand = lines(JOB | {"EnableManagedSpotTraining": True}, "--price=1.5")
    assert billed == ["billed", "3.00", "0.50", "1.50"]
    assert on_demand == ["on", "demand", "3.00", "2.00", "6.00"]


def test_a_warm_pool_is_billed_besides():
    pool = {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 3600}
    assert lines(JOB | {"WarmPoolStatus": pool}, "--price=1.5")[-1] == [
        *("warm", "pool", "3.00", "1.00", "3.00")
    ]


def test_a_job_that_runs_costs_until_now():
    assert lines(RUNNING, "--price=1")[2:] == [["so", "far", "2.00", "3.00", "6.00"]]
    spot = job_cost.describe(
        parsed("--price=1"), RUNNING | {"EnableManagedSpotTraining": True}, NOW
    )
    assert len(spot) == 4 and spot[-1].startswith("spot's discount is known at the job's end")


@pytest.mark.parametrize("status", ["InProgress", "Failed"])
def test_a_job_without_an_instance_costs_nothing(status):
    job = {"TrainingJobName": "my-job", "TrainingJobStatus": status} | {
        "ResourceConfig": JOB["ResourceConfig"]
    }
    assert job_cost.describe(parsed("--price=1"), job, NOW) == [
        f"my-job: {status}, and no second of it is billed"
    ]


def test_the_price_is_that_of_the_type_that_was_chosen(tmp_path):
    (tmp_path / "prices.csv").write_text(PRICES)
    resources = {
        "InstancePreferences": [{"InstanceType": "ml.g5.xlarge", "InstanceCount": 1}],
        "SelectedInstanceType": "ml.g5.2xlarge",
        "SelectedInstanceCount": 3,
    }
    shown = lines(JOB | {"ResourceConfig": resources}, f"--prices={tmp_path / 'prices.csv'}")
    assert shown[1:] == [
        ["per", "hour", "hours", "cost", "EUR"],
        ["billed", "12.00", "0.50", "6.00"],
        ["ml.g5.2xlarge:", "prices", "of", "2026-11-26,", "a", "page"],
    ]


def test_a_price_is_needed():
    with pytest.raises(ValueError, match="--price: found none; give the price"):
        lines(JOB)
