"""What a job will cost, what a budget allows, and the best interval of checkpoints."""

import argparse
import math
import random
from datetime import UTC, datetime, timedelta

import boto3
import pytest
from botocore.stub import Stubber

from sagemaker_lightning.launcher import command, contradictions, costs, job_request, prices
from sagemaker_lightning.launcher.sites import Site

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/x:1"
ROLE = "arn:aws:iam::123456789012:role/x"
CHECKPOINTS = "--checkpoints=s3://bucket/c"
NOBODY = Site("us-east-1", lambda _: pytest.fail("nobody is asked"), "launch", "")


def parsed(*flags: str) -> argparse.Namespace:
    return command.parser().parse_args(
        [f"--image={IMAGE}", f"--role={ROLE}", "--output=s3://bucket/o", *flags]
    )


def lines(*flags: str, site: Site = NOBODY) -> list[str]:
    """Return what is printed of the cost, as the launcher does it."""
    args = parsed(*flags)
    costs.check_flags(args)
    args.max_run = costs.limit_run(args, job_request.resources(args))
    return costs.describe(args, job_request.build(args), site)


P5 = "--instance-type=ml.p5.48xlarge"


def test_without_a_price_that_is_known_nothing_is_said():
    assert lines(P5) == []


@pytest.mark.parametrize("flag", ["--expect=1h", "--spot-price=1"])
def test_what_needs_a_price_says_which_is_not_known(flag):
    says = "--price: found none, .* the package's list has none of ml.p5.48xlarge; give the price"
    with pytest.raises(ValueError, match=says):
        lines(P5, flag)


def test_the_prices_of_the_package_come_with_their_date_and_a_caution():
    header, row, note, caution, _ = lines("--instance-count=2", "--max-run=10h")
    listed = prices.read(prices.OWN)["ml.g5.xlarge"]
    assert header.split() == ["per", "hour", "hours", "cost", "USD"]
    assert row.split()[2:4] == [f"{2 * listed.on_demand:.2f}", "10.00"]
    assert note == f"ml.g5.xlarge: prices of {listed.origin}" and str(listed.day) in note
    assert caution == "prices change, and regions differ: --prices=FILE has yours"


def test_a_job_costs_at_most_its_longest_run():
    header, row, note = lines("--price=1.5", "--instance-count=2", "--max-run=10h")
    assert header.split() == ["per", "hour", "hours", "cost"]
    assert row.split() == ["on", "demand", "3.00", "10.00", "30.00"]
    assert note.startswith("at most: --expect, ")


def test_instances_of_groups_are_counted():
    group = "--instance-group=a=ml.g5.xlarge:2"
    row = lines("--price=1", group, "--instance-group=b=ml.g5.xlarge:3", "--expect=1h")[1]
    assert row.split()[2:] == ["5.00", "1.00", "5.00"]
    with pytest.raises(ValueError, match="instances of several types: ml.g4dn.xlarge, ml.g5.xla"):
        lines("--price=1", group, "--instance-group=b=ml.g4dn.xlarge:3")


def test_a_job_that_will_not_be_done_in_time_is_reported():
    _, row, note = lines("--price=1", "--expect=20h", "--max-run=10h")
    assert row.split()[2:] == ["1.00", "10.00", "10.00"]
    assert note.startswith("it is expected to take 20.00 h; it is stopped after 10.00 h")


def test_spot_without_a_rate_of_interruptions():
    flags = ["--price=2", "--spot-price=0.5", "--spot", CHECKPOINTS, "--expect=4h"]
    _, on_demand, spot = lines(*flags)
    assert on_demand.split() == ["on", "demand", "2.00", "4.00", "8.00"]
    assert spot.split() == ["on", "spot", "0.50", "4.00", "2.00"]


def test_spot_with_a_rate_of_interruptions():
    flags = ["--price=2", "--spot-price=0.5", "--spot", "--expect=48h", "--interrupted-every=8h"]
    flags += ["--max-run=60h"]
    _, _, spot, note = lines(*flags, CHECKPOINTS, "--save-time=20s")
    expected = costs.on_spot(48 * 3600, 8 * 3600, 20)
    assert spot.split()[3] == f"{expected.seconds / 3600:.2f}"
    assert f"one each {expected.interval / 60:.1f} minutes costs the least time" in note
    assert 48 < expected.seconds / 3600 < 52
    _, _, spot, note, end = lines(*flags, "--yes")
    assert end.startswith("on spot it is stopped after 60.00 h of training (--max-run")
    assert float(spot.split()[3].replace(",", "")) > 3000
    assert note.startswith("on spot without checkpoints") and "makes it start over" in note
    spot = lines(*flags, "--yes", "--interrupted-every=1s")[2]
    assert spot.split() == ["on", "spot", "0.50", "never", "–"]


# Prices from a file

PRICES = """instance_type,on_demand,spot,currency,date,source
ml.g5.xlarge,1.5,0.5,USD,2026-11-26,https://example.com
ml.m5.large,1,,USD,2026-11-26,https://example.com
ml.x.euro,1,,EUR,2026-11-26,elsewhere
"""


@pytest.fixture
def prices_flag(tmp_path) -> str:
    (tmp_path / "prices.csv").write_text(PRICES)
    return f"--prices={tmp_path / 'prices.csv'}"


def test_the_price_is_that_of_the_type_in_the_file(prices_flag):
    flags = [prices_flag, "--instance-count=2", "--expect=10h", "--spot", CHECKPOINTS]
    header, on_demand, spot, note = lines(*flags)
    assert header.split() == ["per", "hour", "hours", "cost", "USD"]
    assert on_demand.split() == ["on", "demand", "3.00", "10.00", "30.00"]
    assert spot.split() == ["on", "spot", "1.00", "10.00", "10.00"]
    assert note == "ml.g5.xlarge: prices of 2026-11-26, https://example.com"


def test_groups_of_several_types_have_a_price_each(prices_flag):
    groups = ["--instance-group=a=ml.g5.xlarge:2", "--instance-group=b=ml.m5.large:3"]
    _, row, *notes = lines(prices_flag, *groups, "--expect=1h", "--spot", CHECKPOINTS)
    assert row.split()[2:] == ["6.00", "1.00", "6.00"]
    assert len(notes) == 3 and notes[-1].startswith("no line for spot: SageMaker does not publish")


def test_the_dearest_of_preferred_types_counts(prices_flag):
    preferences = ["--instance-preference=ml.m5.large:4", "--instance-preference=ml.g5.xlarge:2"]
    _, row, dearest, _ = lines(prices_flag, *preferences, "--expect=1h")
    assert row.split()[2:] == ["4.00", "1.00", "4.00"]
    assert dearest == "of ml.g5.xlarge, ml.m5.large, the dearest"


def test_a_price_by_hand_comes_before_the_file(prices_flag):
    _, row = lines(prices_flag, "--price=7", "--expect=1h")
    assert row.split()[2:] == ["7.00", "1.00", "7.00"]
    spot = lines(prices_flag, "--spot-price=0.25", "--expect=1h", "--spot", CHECKPOINTS)[2]
    assert spot.split()[2:] == ["0.25", "1.00", "0.25"]


def test_a_budget_by_the_prices_of_a_file(prices_flag):
    args = parsed(prices_flag, "--budget=3", CHECKPOINTS)
    costs.check_flags(args)
    assert costs.limit_run(args, job_request.resources(args)) == 7200 - 120
    spot = parsed(prices_flag, "--budget=3", CHECKPOINTS, "--spot")
    assert costs.limit_run(spot, job_request.resources(spot)) == 6 * 3600 - 120


def test_a_type_without_a_price(prices_flag):
    with pytest.raises(ValueError, match="--prices: found no price of ml.p5.48xlarge in .*; add i"):
        lines(prices_flag, "--instance-type=ml.p5.48xlarge")
    groups = ["--instance-group=a=ml.g5.xlarge:1", "--instance-group=b=ml.x.euro:1"]
    with pytest.raises(ValueError, match="--prices: found EUR and USD, expected one currency"):
        lines(prices_flag, *groups)


# Budget


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        (["--price=1", "--budget=2"], 7200 - 120),
        (["--price=1", "--budget=2", "--instance-count=2"], 3600 - 120),
        (["--price=1", "--budget=2", "--max-run=1h"], 3600),
        (["--price=4", "--spot-price=1", "--spot", "--budget=2"], 7200 - 120),
        (["--price=4", "--spot", "--budget=2"], 1800 - 120),
        (
            ["--price=4", "--spot-price=1", "--spot", "--budget=2", "--on-demand-after=1h"],
            1800 - 120,
        ),
        (["--price=0", "--budget=2", "--max-run=9d"], 9 * 86400),
        (["--price=1"], 86400),
        ([], 86400),
    ],
)
def test_a_budget_limits_the_run(flags, seconds):
    args = parsed(CHECKPOINTS, *flags)
    costs.check_flags(args)
    args.max_run = costs.limit_run(args, job_request.resources(args))
    assert args.max_run == seconds
    request = job_request.build(args)
    assert request["StoppingCondition"]["MaxRuntimeInSeconds"] == seconds
    said = costs.describe(args, request, NOBODY)
    is_bound = seconds in (7080, 3480, 1680)
    assert any(line.startswith("--budget=2 ends the training") for line in said) == is_bound


@pytest.mark.parametrize("budget", ["1", "0"])
def test_a_budget_that_pays_for_nothing(budget):
    args = parsed(CHECKPOINTS, "--price=30", f"--budget={budget}")
    says = f"--budget: found {budget}, expected enough for more than t"
    with pytest.raises(ValueError, match=says):
        costs.limit_run(args, job_request.resources(args))


# Flags


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--budget=1", CHECKPOINTS], "--price: found none, but --budget"),
        (["--budget=0", CHECKPOINTS], "--price: found none, but --budget"),
        (["--price=1", "--steps=9"], "--steps, --like: found one of them"),
        (["--price=1", "--like=x"], "--steps, --like: found one of them"),
        (["--price=1", "--steps=9", "--like=x", "--expect=1h"], "--expect: not allowed with"),
        (["--price=1", "--interrupted-every=1h"], "--interrupted-every: found without --spot"),
        (["--price=1", "--budget=1"], "--budget: needs --checkpoints=s3://BUCKET/PREFIX"),
    ],
)
def test_flags_that_need_each_other(flags, line):
    with pytest.raises(ValueError) as caught:
        costs.check_flags(parsed(*flags))
    assert str(caught.value).startswith(line)


def test_what_may_lose_all_is_started_with_yes():
    for flags in (["--spot"], ["--price=1", "--budget=9"]):
        for yes in ([], ["--yes"]):
            args = parsed(*flags, *yes)
            check = contradictions.check_flags if "--spot" in flags else costs.check_flags
            if yes:
                check(args)
                continue
            with pytest.raises(ValueError, match="--yes starts the job all the same"):
                check(args)


def test_an_amount_is_read():
    assert [costs.amount(text) for text in ("0", "1.50", "20")] == [0, 1.5, 20]
    for text in ("-1", "nan", "inf", "1e3", "", "1,5", "٣"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a number, 0 or more"):
            costs.amount(text)


# Steps per second


def described(**fields) -> Site:
    """Return a site with a job that has these fields."""
    sagemaker = boto3.client(
        "sagemaker", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    stubber = Stubber(sagemaker)
    job = {"TrainingJobName": "a", "TrainingJobArn": "arn:aws:x", "TrainingJobStatus": "Completed"}
    needed = {
        "ModelArtifacts": {"S3ModelArtifacts": "s3://b/m"},
        "SecondaryStatus": "Completed",
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        "ResourceConfig": {"VolumeSizeInGB": 1},
        "StoppingCondition": {},
        "CreationTime": 0,
    }
    stubber.add_response("describe_training_job", job | needed | fields)
    stubber.activate()
    return Site("us-east-1", lambda _: sagemaker, "launch", "")


def metric(name: str, value: float) -> dict:
    return {"MetricName": name, "Value": value, "Timestamp": 0}


def test_the_hours_come_from_the_steps_of_another_job():
    metrics = [metric("val_acc", 0.5), metric("step", 400.0)]
    site = described(FinalMetricDataList=metrics, TrainingTimeInSeconds=200)
    _, row = lines("--price=1", "--steps=7200", "--like=a", site=site)
    assert row.split()[2:] == ["1.00", "1.00", "1.00"]  # 2 steps a second


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"TrainingJobStatus": "InProgress"}, "--like: found a, which still runs"),
        ({"TrainingTimeInSeconds": 9}, "--like: found a, which has no steps"),
        ({"FinalMetricDataList": [metric("step", 4.0)]}, "--like: found a, which has no steps"),
        (
            {"FinalMetricDataList": [metric("step", 0.0)], "TrainingTimeInSeconds": 9},
            "--like: found a, which has no steps",
        ),
    ],
)
def test_a_job_that_says_nothing_of_its_steps(fields, line):
    with pytest.raises(ValueError) as caught:
        costs.steps_per_second(described(**fields), "a")
    assert str(caught.value).startswith(line)


# The interval


@pytest.mark.parametrize(("save", "every"), [(20.0, 8 * 3600.0), (300.0, 3600.0), (1.0, 600.0)])
def test_no_other_interval_costs_less(save, every):
    best = costs.on_spot(1e6, every, save)
    restarts = every * math.exp(costs.RESTART_SECONDS / every)

    def seconds(interval: float) -> float:
        return restarts * (math.exp((interval + save) / every) - 1) * 1e6 / interval

    assert best.seconds == pytest.approx(seconds(best.interval))
    others = [best.interval * factor for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert all(seconds(other) > best.seconds for other in others)
    young = math.sqrt(2 * save * every)
    assert best.interval == pytest.approx(young, rel=0.3)


def test_the_time_is_that_of_jobs_that_are_interrupted_at_random():
    """An interruption loses what no checkpoint has; each start, interrupted or not, takes time."""
    every, save, work = 3600.0, 60.0, 8 * 3600.0
    expected = costs.on_spot(work, every, save)
    draw = random.Random(1)
    parts = work / expected.interval
    total = 0.0
    for _ in range(400):
        for _ in range(round(parts)):
            need = expected.interval + save
            while (lost := draw.expovariate(1 / every)) < need:
                total += lost
                need = expected.interval + save + costs.RESTART_SECONDS
            total += need
    assert total / 400 == pytest.approx(expected.seconds * round(parts) / parts, rel=0.05)


def test_a_checkpoint_that_takes_as_long_as_instances_last():
    assert costs.on_spot(1e9, 100.0, 200.0).interval == 100.0
    assert costs.on_spot(1e9, 100.0, 1e-9).interval == 1.0
    assert costs.on_spot(10.0, 1e9, 1000.0).interval == 10.0  # the job is shorter


NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
ENDED_JOB = {
    "TrainingJobName": "job",
    "TrainingJobStatus": "Completed",
    "BillableTimeInSeconds": 5400,
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
}
CHOSEN = {
    "InstancePreferences": [{"InstanceType": "ml.p5.48xlarge"}, {"InstanceType": "ml.g5.xlarge"}],
    "InstanceCount": 3,
    "SelectedInstanceType": "ml.g5.xlarge",
    "SelectedInstanceCount": 3,
}
GROUPS = {
    "InstanceGroups": [
        {"InstanceGroupName": "a", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
        {"InstanceGroupName": "b", "InstanceType": "ml.g4dn.xlarge", "InstanceCount": 2},
    ]
}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "job: Completed, 1.50 h of 2 x ml.g5.xlarge, 6.00 EUR"),
        ({"ResourceConfig": CHOSEN}, "job: Completed, 1.50 h of 3 x ml.g5.xlarge, 9.00 EUR"),
        (
            {"ResourceConfig": GROUPS},
            "job: Completed, 1.50 h of 1 x ml.g5.xlarge + 2 x ml.g4dn.xlarge, 6.00 EUR",
        ),
        (
            {"EnableManagedSpotTraining": True},
            "on spot: the service takes the discount from the billable time",
        ),
        (
            {"WarmPoolStatus": {"ResourceRetainedBillableTimeInSeconds": 1800}},
            "job: Completed, 2.00 h of 2 x ml.g5.xlarge, 8.00 EUR",
        ),
        (
            {
                "TrainingJobStatus": "InProgress",
                "BillableTimeInSeconds": 0,
                "TrainingStartTime": NOW - timedelta(minutes=30),
            },
            "job: InProgress, 0.50 h of 2 x ml.g5.xlarge, 2.00 EUR",
        ),
        (
            {"TrainingJobStatus": "InProgress"},
            "job: InProgress, 0.00 h of 2 x ml.g5.xlarge, 0.00 EUR",
        ),
    ],
)
def test_what_a_job_has_cost(tmp_path, fields, says):
    (tmp_path / "prices.csv").write_text(
        "instance_type,on_demand,spot,currency,date,source\n"
        "ml.g5.xlarge,2,,EUR,2026-11-26,x\nml.g4dn.xlarge,1,,EUR,2026-11-26,x\n"
    )
    words = ["cost", "job", f"--prices={tmp_path}/prices.csv"]
    args = command.command_parser().parse_args(words)
    said = costs.describe_job(args, ENDED_JOB | fields, NOW)
    assert says in said and "ml.g5.xlarge: prices of 2026-11-26, x" in said


def test_what_a_job_has_cost_needs_a_price():
    args = command.command_parser().parse_args(["cost", "job"])
    p5 = {"ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 1}}
    with pytest.raises(ValueError, match="found neither, .* has none of ml.p5.48xlarge; give the"):
        costs.describe_job(args, ENDED_JOB | p5, NOW)
    for resources in ({}, {"VolumeSizeInGB": 0}):
        with pytest.raises(ValueError, match="JOB: found job, which has no instances of its own"):
            costs.describe_job(args, ENDED_JOB | {"ResourceConfig": resources}, NOW)
    said = costs.describe_job(args, ENDED_JOB, NOW)
    assert said[0].endswith("USD") and said[-1] == prices.CAUTION
    args = command.command_parser().parse_args(["cost", "job", "--price=4"])
    assert costs.describe_job(args, ENDED_JOB, NOW) == [
        "job: Completed, 1.50 h of 2 x ml.g5.xlarge, 12.00"
    ]
