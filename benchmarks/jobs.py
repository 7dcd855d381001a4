"""The same SageMaker job on 1, 2, 4, ... instances, one after the other.

scripts/launch.py starts the jobs.
"""

import argparse
import re
import subprocess
import sys

from benchmarks import report

# This benchmark sets the number of instances, and follows each job. With the checkpoints of the job
# before, a job would continue where that one ended. A spot job's time includes its interruptions.
REFUSED = (
    "--instance-count",
    "--instance-group",
    "--job-name",
    "--checkpoints",
    "--spot",
    "--no-follow",
    "--dry-run",
)


def run(instances: list[int], flags: list[str]) -> None:
    """Run the jobs and print the table of those that completed."""
    check(instances, flags)
    seconds = {}
    try:
        for count in sorted(instances):
            print(f"\n{count} instance{'s' if count > 1 else ''}", flush=True)
            seconds[count] = measure(count, flags)
    finally:
        if seconds:
            print(f"\n{report.improvements(seconds)}", flush=True)


def check(instances: list[int], flags: list[str]) -> None:
    """Exit with one line if the arguments would not give a table."""
    if 1 not in instances:
        raise SystemExit(
            f"error: --instances: found {instances}, expected 1 among them: "
            "the others are compared to it"
        )
    given_flags = {word.partition("=")[0] for word in flags}
    if refused_flags := [flag for flag in REFUSED if flag in given_flags]:
        raise SystemExit(
            f"error: {refused_flags[0]}: not allowed here; give --instances, "
            "and jobs that start afresh"
        )


def measure(count: int, flags: list[str]) -> float:
    """Run the job on `count` instances and return its seconds as SageMaker reports them.

    They are TrainingTimeInSeconds, which is billed: fetching image and data, training, and storing
    the model. Waiting for instances is not part of it.
    """
    command = [
        sys.executable,
        str(report.ROOT / "scripts/launch.py"),
        *flags,
        f"--instance-count={count}",
    ]
    start_line = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            start_line = start_line or re.fullmatch(r"started (\S+) in (\S+)\n", line)
    if process.returncode or not start_line:
        raise SystemExit(f"error: the job on {count} instances did not complete, see above")
    import boto3  # here, as nothing else needs it

    job = boto3.client("sagemaker", region_name=start_line[2]).describe_training_job(
        TrainingJobName=start_line[1]
    )
    return float(job["TrainingTimeInSeconds"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --instances."""
    counts = {"type": report.positive, "nargs": "+", "default": [1, 2, 4, 8], "metavar": "N"}
    parser.add_argument(
        "--instances", **counts, help="numbers of instances, a job each (default: 1 2 4 8)"
    )
