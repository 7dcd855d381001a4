"""Outputs that can be watched while a job runs: TensorBoard on S3, intermediate output."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT, Job
from tensorboard.compat.tensorflow_stub.io.gfile import S3FileSystem

from sagemaker_lightning.cli.lightning_cli import Logger
from sagemaker_lightning.contract.rendezvous import free_port

pytestmark = pytest.mark.slow

HANG_SECONDS = 120  # at most, for what should come within a few


@contextmanager
def running(*command: str, **variables: str) -> Iterator[subprocess.Popen]:
    """Run a Python module or file while the block lasts."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(get_value: Callable[[], object], *processes: subprocess.Popen) -> object:
    """Call `get_value` until it returns something, and return that.

    AssertionError: a process has ended, or it takes too long.
    """
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        assert all(process.poll() is None for process in processes)
        if value := get_value():
            return value
        time.sleep(0.5)
    raise AssertionError(f"nothing came in {HANG_SECONDS} seconds")


@pytest.mark.thorough
def test_tensorboard_on_s3_while_the_job_runs(bucket, tmp_path: Path, monkeypatch):
    """A real TensorBoard shows the curve of a job while the job runs.

    It reads the bucket that the job logs to: the curve appears, and then it grows.
    """
    monkeypatch.chdir(tmp_path)
    port = free_port()
    flags = [
        "--logger.save_dir",
        bucket.uri("logs"),
        "--logger.flush_secs=1",
        "--trainer.log_every_n_steps=1",
    ]
    flags += ["--data.batch_size=64", "--trainer.max_epochs=1000", "--trainer.accelerator=cpu"]
    board = ["tensorboard.main", "--load_fast=false", "--reload_interval=1", "--port", str(port)]
    board += ["--logdir", bucket.uri("logs")]

    def points(more_than: int) -> int:
        """Return how many points of train_loss TensorBoard shows.

        Return 0 if they are not more than `more_than`.
        """
        address = (
            f"http://127.0.0.1:{port}/data/plugin/scalars/scalars"
            "?tag=train_loss&run=lightning_logs%2Fversion_0"
        )
        try:
            with urllib.request.urlopen(address) as response:
                points_shown = len(json.load(response))
        except OSError:  # TensorBoard has not started, or has not seen this run yet
            return 0
        return points_shown if points_shown > more_than else 0

    with (
        running(str(ROOT / "app/train.py"), *flags, **bucket.variables) as job,
        running("-m", *board, **bucket.variables) as tensorboard,
    ):
        first_points = wait_for(lambda: points(1), job, tensorboard)
        wait_for(lambda: points(first_points), job, tensorboard)


def test_logging_does_not_put_the_whole_file_at_each_step(bucket, monkeypatch):
    """Each flush on S3 writes a new object with all that was ever logged, and training would wait
    for it.
    """
    for name, value in bucket.variables.items():
        monkeypatch.setenv(name, value)
    puts = []
    write = S3FileSystem.write
    monkeypatch.setattr(
        S3FileSystem, "write", lambda *arguments: puts.append(1) or write(*arguments)
    )
    logger = Logger(bucket.uri("logs"), flush_secs=600)
    for step in range(50):  # as Lightning does
        logger.log_metrics({"train_loss": 1.0}, step)
        logger.save()
    puts_before = len(puts)
    logger.finalize("success")
    assert puts_before <= 4 and len(puts) > puts_before


WRITES_AND_WAITS = f"""
import os, time, boto3
folder = os.environ["SM_OUTPUT_INTERMEDIATE_DIR"] + "/plots"
os.makedirs(folder)
with open(folder + "/curve.txt", "w") as file:
    file.write("half way")
end = time.monotonic() + {HANG_SECONDS}
bucket = os.environ["BUCKET"]
while not boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix="out/").get("Contents"):
    assert time.monotonic() < end
    time.sleep(0.5)
print("SEEN")
"""


def test_intermediate_output(job: Job, bucket):
    """The toolkit uploads intermediate output while the program runs.

    The program sees its own file of output/intermediate in S3 before it ends.
    """
    job.write("code/train.py", WRITES_AND_WAITS)
    hyperparameters = {"sagemaker_program": "train.py", "sagemaker_s3_output": bucket.uri("out")}
    job.write("input/config/hyperparameters.json", json.dumps(hyperparameters))
    run = job.run(TRAINING_JOB_NAME="my-job", BUCKET=bucket.name, **bucket.variables)
    assert run.returncode == 0, run.stdout
    key = "out/my-job/output/intermediate/plots/curve.txt"
    assert bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read() == b"half way"
    assert "SEEN" in run.stdout
