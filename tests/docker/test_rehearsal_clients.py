"""Unmodified clients against the rehearsal: only the endpoint differs from AWS."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_cifar
from containers import ROOT
from local_mode import Client
from rehearsals import HANG_SECONDS, ROLE, Rehearsal

pytestmark = pytest.mark.docker

CPU_HYPERPARAMETERS = {
    "trainer.accelerator": "cpu",
    "trainer.devices": "1",
    "trainer.enable_progress_bar": "false",
}
# The hyperparameters of the tutorial's run_sagemaker.py, on a CPU.
TUTORIAL_HYPERPARAMETERS = {
    "data": "CIFAR10DataModule",
    "data.batch_size": "4",
    "optimizer": "Adam",
    "optimizer.lr": "0.001",
} | CPU_HYPERPARAMETERS
TUTORIAL_HYPERPARAMETERS |= {"logger.name": "tutorial", "data.val_split": "0.2"}


class Person(Client):
    """A user with an SDK, whose AWS is the rehearsal."""

    def __init__(self, sdk: str, folder: Path, rehearsal: Rehearsal) -> None:
        super().__init__(sdk, folder)
        self.rehearsal = rehearsal

    @property
    def variables(self) -> dict[str, str]:
        """The user's environment, and the variables that the rehearsal prints for a client."""
        return super().variables | self.rehearsal.variables | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A rehearsal that takes one of a spot job's two instances away, once, in training."""
    folder = tmp_path_factory.mktemp("rehearsal")
    with Rehearsal(
        folder, "--interrupt=at step 5 of algo-2 unwarned", "--sync-every=0.2", "--grace=30"
    ) as server:
        for path in write_cifar(folder / "data", images=10).iterdir():
            server.s3.upload_file(
                str(path), "rehearsal", f"cifar10/cifar-10-batches-py/{path.name}"
            )
        yield server


def weights(rehearsal: Rehearsal, job: str) -> dict[str, torch.Tensor]:
    """Return the weights of a job's model."""
    return torch.load(io.BytesIO(rehearsal.archive(job)["model.pt"]), weights_only=True)


def model_json(rehearsal: Rehearsal, job: str) -> dict:
    return json.loads(rehearsal.archive(job)["model.json"])


def same_weights(first: dict, second: dict) -> bool:
    """Return whether two models are equal bit by bit."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.soak  # two hosts: test_rehearsal_processes.py
def test_the_tutorials_examples_by_sdk_2(rehearsal, image, tmp_path):
    """The tutorial's two parts run by SDK 2.

    Part 1: two nodes on demand. Part 2: the same on spot, interrupted; then one more epoch from its
    checkpoints.
    """
    common_arguments = {
        "image_uri": image,
        "role": ROLE,
        "instance_type": "ml.g4dn.12xlarge",
        "instance_count": 2,
        "input_path": "s3://rehearsal/cifar10",
        "output_path": "s3://rehearsal/output",
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    spot_arguments = {
        "use_spot_instances": True,
        "max_retry_attempts": 3,
        "max_wait": 14400,
        "max_run": 3600,
        "checkpoint_s3_uri": "s3://rehearsal/output/spot/checkpoints",
    }
    logger_flags = {
        "logger.save_dir": "s3://rehearsal/output/spot/logger-output",
        "logger.flush_secs": "10",
    }
    person = Person("sdk2", tmp_path, rehearsal)
    checkpoints_alone = {"checkpoint_s3_uri": spot_arguments["checkpoint_s3_uri"]}
    jobs = [
        common_arguments
        | {
            "job_name": "on-demand",
            "hyperparameters": TUTORIAL_HYPERPARAMETERS | {"trainer.max_epochs": "3"},
        },
        common_arguments
        | spot_arguments
        | {
            "job_name": "spot",
            "hyperparameters": TUTORIAL_HYPERPARAMETERS
            | logger_flags
            | {"trainer.max_epochs": "2"},
        },
        common_arguments
        | checkpoints_alone
        | {
            "job_name": "more",
            "hyperparameters": TUTORIAL_HYPERPARAMETERS
            | logger_flags
            | {"trainer.max_epochs": "3"},
        },
    ]
    completed = person.run("sdk2_session.py", jobs)
    assert completed.returncode == 0, completed.stdout[-5000:]
    assert "algo-2" in completed.stdout and re.search(r"epoch=2/2 .*val_acc=", completed.stdout)
    assert (
        completed.stdout.count("Training job interrupted") + completed.stdout.count("Interrupted")
        >= 1
    )
    assert "model: s3://rehearsal/output/more/output/model.tar.gz" in completed.stdout
    description = rehearsal.describe("spot")
    statuses = [transition["Status"] for transition in description["SecondaryStatusTransitions"]]
    assert statuses.count("Interrupted") == 1 and description["TrainingJobStatus"] == "Completed"
    log_lines = rehearsal.lines("more")["algo-1"]
    assert any(re.search(r"resuming from step \d+", line) for line in log_lines)
    assert not any("epoch=2/3" in line for line in log_lines)
    assert any("epoch=3/3" in line for line in log_lines)
    assert same_weights(weights(rehearsal, "on-demand"), weights(rehearsal, "more"))
    assert any("tfevents" in key for key in rehearsal.keys("output/spot/logger-output/"))


@pytest.mark.thorough  # without Docker: test_rehearsal_endpoint.py
def test_a_model_trainer_of_sdk_3(rehearsal, image, tmp_path):
    job = {
        "training_image": image,
        "role": ROLE,
        "base_job_name": "model-trainer",
        "compute": {
            "instance_type": "ml.g5.xlarge",
            "instance_count": 1,
            "enable_managed_spot_training": True,
        },
        "stopping": {"max_runtime_in_seconds": 600, "max_wait_time_in_seconds": 900},
        "output": "s3://rehearsal/output",
        "checkpoints": "s3://rehearsal/checkpoints/sdk3",
        "hyperparameters": TUTORIAL_HYPERPARAMETERS | {"trainer.max_epochs": 1},
        "inputs": {"training": "s3://rehearsal/cifar10"},
    }
    completed = Person("sdk3", tmp_path, rehearsal).run("sdk3_session.py", [job])
    assert completed.returncode == 0, completed.stdout[-5000:]
    (name,) = re.findall(
        r"model: s3://rehearsal/output/([^/]+)/output/model.tar.gz", completed.stdout
    )
    assert model_json(rehearsal, name)


@pytest.mark.thorough  # its parts: test_table.py, test_merge.py
def test_the_committed_example_of_a_split_job(rehearsal, image, tmp_path):
    """Three instances instead of ten compare all rows; their parts are merged from S3."""
    request = json.loads((ROOT / "examples/similarity.json").read_text())
    request_text = (
        json.dumps(request)
        .replace("my-bucket", "rehearsal")
        .replace('"sagemaker-lightning"', f'"{image}"')
    )
    assert request_text.count('"InstanceCount": 10') == 1
    request = json.loads(request_text.replace('"InstanceCount": 10', '"InstanceCount": 3'))
    request |= {"StoppingCondition": {"MaxRuntimeInSeconds": 600, "MaxWaitTimeInSeconds": 900}}
    rows = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
    content = io.BytesIO()
    np.save(content, rows)
    rehearsal.s3.put_object(
        Bucket="rehearsal", Key="my-input-data/rows.npy", Body=content.getvalue()
    )
    name = request["TrainingJobName"]
    rehearsal.sagemaker.create_training_job(**request)
    job = rehearsal.wait_until_ended(name)
    assert job["TrainingJobStatus"] == "Completed", (job, rehearsal.lines(name))
    command = [
        sys.executable,
        ROOT / "scripts/merge_parts.py",
        f"s3://rehearsal/jobs/{name}/output/model.tar.gz",
    ]
    completed = subprocess.run(
        [*command, f"--output={tmp_path / 'merged'}"],
        env=Person("aws", tmp_path / "aws", rehearsal).variables,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert completed.returncode == 0, completed.stderr
    unit_rows = rows.astype(np.float64) / np.linalg.norm(
        rows.astype(np.float64), axis=1, keepdims=True
    )
    scores = unit_rows @ unit_rows.T
    np.fill_diagonal(scores, -1)
    assert np.allclose(
        np.load(tmp_path / "merged/scores.npy"), np.sort(scores, axis=1)[:, ::-1][:, :10], atol=1e-6
    )
