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
from containers import ROOT, docker
from environments import python_of
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


@pytest.mark.soak  # two hosts: test_rehearsal_processes.py, test_clients_sdk3.py
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


SOURCE = str(ROOT / "tests/clients/source")
TUNED = {
    "objective_metric_name": "gradient",
    "objective_type": "Maximize",
    "metric_definitions": [{"Name": "gradient", "Regex": "gradient ([0-9.]+)"}],
    "max_jobs": 2,
    "max_parallel_jobs": 1,
    "ranges": {"x": ["a", "b"]},
    "strategy": "Grid",
    "inputs": [],
}


def tuned_jobs(rehearsal: Rehearsal, output: str) -> list[dict]:
    """Return the descriptions of the training jobs of the tuner whose best job was printed."""
    (best,) = re.findall(r"best: (\S+)-\d{3}-", output)
    summaries = rehearsal.sagemaker.list_training_jobs_for_hyper_parameter_tuning_job(
        HyperParameterTuningJobName=best
    )["TrainingJobSummaries"]
    values = [summary["TunedHyperParameters"]["x"].strip('"') for summary in summaries]
    assert values == ["a", "b"]
    return [rehearsal.describe(summary["TrainingJobName"]) for summary in summaries]


@pytest.mark.thorough  # without an SDK: test_rehearsal_tuning.py
def test_a_tuner_of_sdk_3_keeps_environment_channels_and_drivers(rehearsal, image, tmp_path):
    """Its jobs cannot replace the entry point: `train` starts torchrun, as `distributed` says."""
    trainer = {
        "training_image": image,
        "role": ROLE,
        "base_job_name": "tuned",
        "compute": {"instance_type": "ml.m5.xlarge", "instance_count": 1},
        "stopping": {"max_runtime_in_seconds": 600},
        "output": "s3://rehearsal/output",
        "checkpoints": "s3://rehearsal/checkpoints/tuned",
        "hyperparameters": {"x": "a", "fixed": 3},
        "environment": {"OMP_NUM_THREADS": "1"},
        "source_code": {"entry_script": "ddp.py", "source_dir": SOURCE},
        "torchrun": {"process_count_per_node": 2},
    }
    job = TUNED | {"trainer": trainer, "inputs": [["training", "s3://rehearsal/cifar10"]]}
    completed = Person("sdk3", tmp_path, rehearsal).run("sdk3_tuner.py", job)
    assert completed.returncode == 0, completed.stdout[-5000:]
    for description in tuned_jobs(rehearsal, completed.stdout):
        assert description["TrainingJobStatus"] == "Completed"
        assert description["Environment"]["OMP_NUM_THREADS"] == "1"
        channels = {channel["ChannelName"] for channel in description["InputDataConfig"]}
        assert channels == {"training", "sm_drivers"}
        name = description["TrainingJobName"]
        assert description["CheckpointConfig"]["S3Uri"].endswith(f"/tuned/{name}")
        lines = "\n".join(rehearsal.lines(name)["algo-1"])
        assert "rank 1 of 2: gradient 0.5, given ['--fixed', '3', '-x', " in lines
        assert "hyperparameter x: " in lines and "program: /opt/ml/code/ddp.py, torchrun" in lines


@pytest.mark.soak  # beside that of SDK 3
def test_a_tuner_of_sdk_2_keeps_environment_and_channels(rehearsal, image, tmp_path):
    estimator = {
        "image_uri": image,
        "role": ROLE,
        "entry_point": "ddp.py",
        "source_dir": SOURCE,
        "instance_type": "ml.m5.xlarge",
        "instance_count": 1,
        "output_path": "s3://rehearsal/output",
        "hyperparameters": {"fixed": 3},
        "environment": {"OMP_NUM_THREADS": "1"},
        "distribution": {"torch_distributed": {"enabled": True}},
        "py_version": "py311",
        "framework_version": "2.0",
    }
    job = TUNED | {"estimator": estimator, "inputs": {"training": "s3://rehearsal/cifar10"}}
    completed = Person("sdk2", tmp_path, rehearsal).run("sdk2_tuner.py", job)
    assert completed.returncode == 0, completed.stdout[-5000:]
    for description in tuned_jobs(rehearsal, completed.stdout):
        assert description["TrainingJobStatus"] == "Completed"
        assert description["Environment"]["OMP_NUM_THREADS"] == "1"
        assert [each["ChannelName"] for each in description["InputDataConfig"]] == ["training"]
        lines = "\n".join(rehearsal.lines(description["TrainingJobName"])["algo-1"])
        assert "rank 0 of 1: gradient 0.0, given ['--fixed', '3', '-x', " in lines


@pytest.mark.thorough  # without Docker: test_rehearsal_endpoint.py
def test_launch(rehearsal, image, tmp_path):
    registry = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
    command = [
        sys.executable,
        ROOT / "scripts/launch.py",
        f"--image={registry}/{image}:latest",
        f"--role={ROLE}",
        "--poll=1",
    ]
    command += [
        "--output=s3://rehearsal/output",
        "--channel=training=s3://rehearsal/cifar10/,mode=FastFile",
    ]
    command += [
        "--spot",
        "--checkpoints=s3://rehearsal/checkpoints/launch",
        "--max-run=600",
        "--max-wait=900",
    ]
    hyperparameters = [
        f"{name}={value}"
        for name, value in (TUTORIAL_HYPERPARAMETERS | {"trainer.max_epochs": 1}).items()
    ]
    completed = subprocess.run(
        [*map(str, command), *hyperparameters],
        env=Person("launch", tmp_path, rehearsal).variables | {"PYTHONPATH": ""},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANG_SECONDS,
    )
    assert completed.returncode == 0, completed.stdout[-5000:]
    assert "Uploading: Uploading generated training model" in completed.stdout
    assert "algo-1: epoch=1/1" in completed.stdout
    assert ": Completed" in completed.stdout


@pytest.mark.thorough  # without Docker: test_rehearsal_endpoint.py
def test_the_do_it_yourself_articles_request_by_the_aws_cli(rehearsal, image, tmp_path):
    """The do-it-yourself article's request, as its JSON, sent by the AWS CLI.

    Ten instances of an image with a `train` of its own split the rows.
    """
    (tmp_path / "train").write_text(
        "#!/bin/bash\nset -e\n"
        "file=/opt/ml/input/config/resourceconfig.json\n"
        "host=$(grep -o '\"current_host\": \"algo-[0-9]*' $file | grep -o '[0-9]*$')\n"
        'hosts=$(grep -o \'"hosts": \\[[^]]*\' $file | head -1 | grep -o "algo-" | wc -l)\n'
        "awk -v n=$hosts -v i=$host 'NR % n == i % n' /opt/ml/input/data/my-input-data/rows "
        ">/opt/ml/model/part-$host\n"
    )
    (tmp_path / "Dockerfile").write_text(
        f"FROM {image}\nENTRYPOINT []\n"
        "COPY train /own/train\n"
        "RUN chmod +x /own/train\n"
        "ENV PATH=/own:$PATH\n"
    )
    build = docker("build", "--quiet", "--tag=rehearsal-diy", str(tmp_path))
    assert build.returncode == 0, build.stdout
    request = {
        "TrainingJobName": "do-it-yourself",
        "AlgorithmSpecification": {"TrainingImage": "rehearsal-diy", "TrainingInputMode": "File"},
        "RoleArn": ROLE,
        "InputDataConfig": [
            {
                "ChannelName": "my-input-data",
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": "s3://rehearsal/my-input-data",
                        "S3DataDistributionType": "FullyReplicated",
                    }
                },
            }
        ],
        "OutputDataConfig": {"S3OutputPath": "s3://rehearsal/output/"},
        "ResourceConfig": {
            "InstanceType": "ml.m5.xlarge",
            "InstanceCount": 10,
            "VolumeSizeInGB": 50,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    rows = [str(row) for row in range(100)]
    rehearsal.s3.put_object(
        Bucket="rehearsal", Key="my-input-data/rows", Body="\n".join([*rows, ""]).encode()
    )
    aws = python_of("cli").with_name("aws")
    environment = Person("aws", tmp_path / "aws", rehearsal).variables
    try:
        command = [
            aws,
            "sagemaker",
            "create-training-job",
            "--cli-input-json",
            f"file://{tmp_path}/request.json",
        ]
        completed = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
        )
        assert completed.returncode == 0, completed.stderr
        rehearsal.wait_until_ended("do-it-yourself")
        assert rehearsal.describe("do-it-yourself")["TrainingJobStatus"] == "Completed"
        parts = rehearsal.archive("do-it-yourself")
        assert len(parts) == 10
        assert sorted(b"".join(parts.values()).split(), key=int) == [row.encode() for row in rows]
    finally:
        docker("image", "rm", "rehearsal-diy")


@pytest.mark.thorough  # its parts: test_row_tables.py, test_merge.py
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
