"""benchmarks/scaling.py: two cores as nodes, the model of a step, and the table.

The model of a step is compared with a computation by hand; the table is that of real launches.
"""

import math
import re
import subprocess
import sys

import aws_services
import pytest
from aws_services import REGION, SageMakerStandIn, served_forbidden_buckets, served_here
from containers import ROOT
from launches import COMPLETED_STATE, FAILED_STATE, ROLE, UNCHECKED_FLAG

from benchmarks import prediction, report
from benchmarks.prediction import Instance, Job

pytestmark = pytest.mark.slow

IMAGE = "registry.example:5000/app:1"  # its registry does not exist
FLAGS = (f"--image={IMAGE}", f"--role={ROLE}", "--output=s3://my-bucket/jobs", "--subnet=subnet-1")
FLAGS += (
    "--security-group=sg-1",
    "--instance-type=ml.g4dn.12xlarge",
    "--poll=1",
    UNCHECKED_FLAG,
    "a.b=c d",
)
SECONDS_OF_INSTANCES = {1: 1000, 2: 560, 4: 280}


def scaling(*arguments: str, environment: dict[str, str] | None = None, timeout: float = 300):
    """Run the benchmark."""
    command = [sys.executable, "-m", "benchmarks.scaling", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.soak
def test_two_cores_are_compared_as_nodes():
    completed = scaling(
        "local",
        "--n",
        "1",
        "--steps",
        "1",
        "--batch_size",
        "4",
        "--",
        "--trainer.log_every_n_steps=1",
    )
    assert completed.returncode == 0, completed.stderr
    rows = re.findall(
        r"^\| (.+) \| (\S+) \[\S+\.\.\S+\] \| 1 \| .+ / .+ \|$", completed.stdout, re.MULTILINE
    )
    ratios = {name: float(ratio) for name, ratio in rows}
    assert list(ratios) == [
        "ours",
        "plain",
        "efficiency",
        "two nodes",
        "cores",
        "communication",
        "plain communication",
        "waiting",
        "plain waiting",
    ]
    assert all(
        0 < ratios[name] < math.inf
        for name in ("ours", "plain", "efficiency", "two nodes", "cores")
    )
    assert 0 < ratios["waiting"] < 1 and 0 < ratios["plain waiting"] < 1
    assert re.search(r"^hardware: .+, 1 threads", completed.stdout, re.MULTILINE)
    # With two nodes each sends the gradients once in any case: half for the sum, and half of the
    # sum.
    assert 44.7 < float(re.search(r"sent by a node in a step: (\S+) MB", completed.stdout)[1]) < 60
    prediction_flags = re.search(r"^to predict: (.+)$", completed.stdout, re.MULTILINE)[1]
    assert scaling("predict", *prediction_flags.split()).returncode == 0


def test_a_step_by_hand():
    """A step computed by hand: 100 MB over 10 Gbps.

    80 % of it arrive, 10^9 B/s, in 5 buckets (1 + 25 + 25 + 25 + 20 MiB).
    """
    job = Job(
        step=0.2,
        megabytes=100,
        overlap=0.25,
        batch_size=10,
        images=1000,
        efficiency=0.8,
        latency=0.001,
    )
    instance = Instance(devices=1, gbps=10)
    four = Instance(devices=4, gbps=10)
    assert job.buckets == 5
    assert (
        prediction.exchange(job, instance, nodes=1) == prediction.exchange(job, four, nodes=1) == 0
    )
    assert prediction.exchange(job, instance, nodes=2) == pytest.approx(0.1 + 2 * 0.001 * 5)
    assert prediction.exchange(job, instance, nodes=4) == pytest.approx(0.15 + 6 * 0.001 * 5)
    # 7/8 of 200 MB
    assert prediction.exchange(job, four, nodes=2) == pytest.approx(0.175 + 2 * 0.001 * 5)
    # 100 steps of 0.2 s on one node. On two nodes 50 steps; of the 0.11 s of each exchange, 0.05 s
    # run beside the step.
    assert prediction.epoch(job, instance, nodes=1) == pytest.approx(20)
    assert prediction.epoch(job, instance, nodes=2) == pytest.approx(50 * (0.2 + 0.11 - 0.05))
    assert prediction.epoch(job, four, nodes=1) == pytest.approx(5)


def test_an_exchange_that_fits_beside_the_step_is_free():
    job = Job(step=1.0, megabytes=1, overlap=0.5)
    assert job.buckets == 1
    times = [prediction.epoch(job, Instance(devices=1, gbps=100), nodes) for nodes in (1, 64)]
    assert times[0] / times[1] == pytest.approx(64)


def test_a_prediction_says_what_it_assumes_before_its_tables():
    completed = scaling("predict", "--step=0.01", "--overlap=0.25")
    assert completed.returncode == 0, completed.stderr
    assumptions, *tables = re.split(r"^(?=ml\.)", completed.stdout, flags=re.MULTILINE)
    assert "not measured" in assumptions
    assert "0.01 s" in assumptions
    assert "25%" in assumptions
    assert "44.73 MB" in assumptions
    assert [table.split(":")[0] for table in tables] == list(prediction.INSTANCES)
    for table in tables:
        counts = [int(count) for count in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
        assert counts == [1, 2, 4, 8, 16, 32, 64]


def test_a_users_own_bandwidth():
    slow, fast = (
        scaling("predict", "--step=0.01", "--instance_type=ml.p5.48xlarge", f"--gbps={gbps}").stdout
        for gbps in (1, 99)
    )
    assert "1 Gbps" in slow and "99 Gbps" in fast
    rows = [re.search(r"^\| 2 \| (\S+) s \|", text, re.MULTILINE)[1] for text in (slow, fast)]
    assert float(rows[0]) > float(rows[1])


def test_the_table_of_the_article():
    assert report.improvements({2: 500.0, 1: 900.0, 16: 90.0}).splitlines() == [
        "| instances | time | improvement | the article's |",
        "| --- | --- | --- | --- |",
        "| 1 | 900.00 s | 1.00x |  |",
        "| 2 | 500.00 s | 1.80x | 1.8x |",
        "| 16 | 90.00 s | 10.00x |  |",
    ]


class Jobs(SageMakerStandIn):
    """Jobs that are faster on more instances; jobs with `broken` instances fail."""

    def __init__(self, broken: int = 0) -> None:
        super().__init__([COMPLETED_STATE], {"algo-1": ["a line"]})
        self.broken = broken

    def CreateTrainingJob(self, request: dict) -> dict:  # noqa: N802 (the API's names)
        self.count = request["ResourceConfig"]["InstanceCount"]
        return super().CreateTrainingJob(request)

    def DescribeTrainingJob(self, request: dict) -> dict:  # noqa: N802
        ended = FAILED_STATE if self.count == self.broken else {}
        return (
            super().DescribeTrainingJob(request)
            | ended
            | {"TrainingTimeInSeconds": SECONDS_OF_INSTANCES[self.count]}
        )


def on_sagemaker(stand_in: Jobs, *arguments: str):
    """Run `sagemaker` with `stand_in` for SageMaker and CloudWatch Logs.

    S3 refuses to show its buckets.
    """
    with served_here(stand_in.answer) as address, served_forbidden_buckets() as s3:
        return scaling(
            *("sagemaker", *arguments, "--", *FLAGS),
            environment=aws_services.variables(address, AWS_ENDPOINT_URL_S3=s3, AWS_REGION=REGION),
        )


def test_the_jobs_of_a_table():
    stand_in = Jobs()
    completed = on_sagemaker(stand_in, "--instances", "4", "1", "2")
    assert completed.returncode == 0, completed.stderr
    requests = [request for name, request in stand_in.calls if name == "CreateTrainingJob"]
    assert [request["ResourceConfig"]["InstanceCount"] for request in requests] == [1, 2, 4]
    assert len({request["TrainingJobName"] for request in requests}) == 3
    assert all(request["HyperParameters"] == {"a.b": "c d"} for request in requests)
    assert all(
        request["ResourceConfig"]["InstanceType"] == "ml.g4dn.12xlarge" for request in requests
    )
    assert "algo-1: a line" in completed.stdout
    assert completed.stdout.splitlines()[-3:] == [
        "| 1 | 1000.00 s | 1.00x |  |",
        "| 2 | 560.00 s | 1.79x | 1.8x |",
        "| 4 | 280.00 s | 3.57x | 3.7x |",
    ]


def test_a_job_that_fails_ends_the_table():
    stand_in = Jobs(broken=2)
    completed = on_sagemaker(stand_in, "--instances", "1", "2", "4")
    assert completed.returncode == 1
    assert stand_in.names().count("CreateTrainingJob") == 2
    assert completed.stdout.splitlines()[-1] == "| 1 | 1000.00 s | 1.00x |  |"
    assert (
        completed.stderr.splitlines()[-1]
        == "error: the job on 2 instances did not complete, see above"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--instances", "2", "4"), "error: --instances: found [2, 4], expected 1 among them"),
        (("--", "--checkpoints=s3://my-bucket/c"), "error: --checkpoints: not allowed here"),
        (("--", "--instance-count", "3"), "error: --instance-count: not allowed here"),
        (("--", "--imag=x"), "error: the job on 1 instances did not complete"),
    ],
)
def test_what_gives_no_table_starts_no_job(arguments, says):
    completed = scaling("sagemaker", *arguments, environment=aws_services.variables())
    assert completed.returncode == 1
    assert completed.stderr.splitlines()[-1].startswith(says)
