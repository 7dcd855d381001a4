"""scripts/launch.py: hyperparameters are checked, and a job is drilled, before it starts."""

import json
import re

import aws_services
import pytest
import warm
from containers import DOCKER, ROOT, docker
from launches import (
    DATA_FLAG,
    IMAGE,
    NEEDED_FLAGS,
    UNCHECKED_FLAG,
    launch_script,  # noqa: F401  the fixture launch
    request_of,
)

pytestmark = pytest.mark.slow


def test_hyperparameters_are_checked_by_the_applications_parser(launch):
    right = launch(
        *NEEDED_FLAGS,
        "--dry-run",
        DATA_FLAG,
        "trainer.max_epochs=2",
        "optimizer=Adam",
        "optimizer.lr=1e-3",
    )
    assert request_of(right)["HyperParameters"]["optimizer.lr"] == "1e-3"
    assert "hyperparameters" not in right.stderr
    wrong = launch(*NEEDED_FLAGS, "--dry-run", "trainer.max_epoch=2")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (1, "", 1)
    assert wrong.stderr.startswith(
        "error: the application refuses a hyperparameter: --trainer.max_epoch"
    )


def test_a_model_in_a_source_archive_is_not_checked_if_a_flag_says_so(launch):
    """docs/clients.md has these hyperparameters: the check has no module of the archive."""
    source = (
        "sagemaker_submit_directory=s3://my-bucket/sourcedir.tar.gz",
        "model=mine.Model",
    )
    checked = launch(*NEEDED_FLAGS, "--dry-run", *source)
    assert checked.returncode == 1 and "No module named 'mine'" in checked.stderr
    unchecked = launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", *source)
    assert request_of(unchecked)["HyperParameters"] == dict(pair.split("=") for pair in source)


def test_the_data_module_that_is_asked_is_that_of_the_channels(launch):
    """CIFAR10DataModule, the default of a channel, has a flag that DigitsDataModule lacks."""
    with_channel = launch(*NEEDED_FLAGS, "--dry-run", DATA_FLAG, "data.download=false")
    assert with_channel.returncode == 0, with_channel.stderr
    without = launch(*NEEDED_FLAGS, "--dry-run", "data.download=false")
    assert without.returncode == 1 and "--data.download" in without.stderr


def test_hyperparameters_that_cannot_be_checked_are_said_to_be_so(launch, tmp_path):
    absent = launch(
        *NEEDED_FLAGS,
        "--dry-run",
        "--check-hyperparameters=image",
        "anything=1",
        DOCKER="no-docker-here",
    )
    assert absent.returncode == 0
    assert "not checked: the hyperparameters: " in absent.stderr
    assert "no-docker-here" in absent.stderr


@pytest.mark.docker
def test_an_image_that_cannot_be_had_is_said_to_be_so(launch):
    port = aws_services.free_port()
    image = f"--image=127.0.0.1:{port}/app:1"
    network = ("--subnet=subnet-1", "--security-group=sg-1")
    completed = launch(
        image,
        *NEEDED_FLAGS[1:],
        *network,
        "--dry-run",
        "--check-hyperparameters=image",
        DOCKER=DOCKER,
    )
    assert completed.returncode == 0
    line = completed.stderr.splitlines()[0]
    assert line.startswith("not checked: the hyperparameters: docker: "), completed.stderr
    assert f"127.0.0.1:{port}" in line, completed.stderr


@pytest.mark.thorough  # by this checkout's, above
@pytest.mark.docker
def test_hyperparameters_are_checked_by_the_images_parser(launch, image):
    assert docker("tag", image, IMAGE).returncode == 0
    try:
        arguments = (*NEEDED_FLAGS, "--dry-run", "--check-hyperparameters=image")
        right = launch(*arguments, DATA_FLAG, "data.batch_size=64", DOCKER=DOCKER)
        assert request_of(right) and "hyperparameters" not in right.stderr
        wrong = launch(*arguments, DATA_FLAG, "data.batch_size=many", DOCKER=DOCKER)
        assert wrong.returncode == 1
        assert wrong.stderr.startswith(
            "error: the application refuses a hyperparameter: --data.batch_size"
        )
    finally:
        docker("rmi", IMAGE)


DOCKER_STAND_IN = """#!/bin/sh
echo "$@" >>"$RECORD"
for word in "$@"; do
    case "$word" in
        *:/opt/ml/input/config:ro) cat "${word%%:*}/hyperparameters.json" >>"$RECORD"; echo >>"$RECORD" ;;
        --env-file=*) cat "${word#*=}" >>"$RECORD" ;;
    esac
done
case "$*" in *sagemaker_lightning.drill*) exit "$DRILLED";; esac
"""  # noqa: E501


@pytest.mark.parametrize("drilled", [0, 1])
def test_a_job_is_drilled_before_it_is_started(launch, tmp_path, drilled):
    """The drill runs in the image, with what is sent to the job and stand-ins for its data."""
    stub = tmp_path / "docker"
    stub.write_text(DOCKER_STAND_IN)
    stub.chmod(0o755)
    (tmp_path / "some").mkdir()
    variables = {"DOCKER": str(stub), "RECORD": str(tmp_path / "record"), "DRILLED": str(drilled)}
    flags = [
        "--check-hyperparameters=image",
        "--env=TOKEN=secret value",
        DATA_FLAG,
        "--drill",
        "--drill-data=training=some",
    ]
    completed = launch(*NEEDED_FLAGS, *flags, "--dry-run", "trainer.max_epochs=3", **variables)
    line, sent, sent_variables = (tmp_path / "record").read_text().splitlines()[-3:]
    assert f"--volume {tmp_path}/some:/opt/ml/input/data/training:ro --env-file=" in line
    assert line.endswith(f" {IMAGE} python -m sagemaker_lightning.drill -- train")
    assert line.startswith("run --rm ") and json.loads(sent) == {"trainer.max_epochs": "3"}
    # Others can read a command line, and a log is kept.
    assert sent_variables == "TOKEN=secret value"
    assert "secret" not in line + completed.stderr
    if drilled:
        assert completed.returncode == 1
        assert "the job is not exact, or cannot be drilled" in completed.stderr
        assert not completed.stdout
    else:
        assert request_of(completed)["HyperParameters"] == {"trainer.max_epochs": "3"}


def test_a_drill_needs_the_data_here(launch):
    completed = launch(
        *NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", DATA_FLAG, "--drill", "--drill-data=other=."
    )
    assert completed.returncode == 1
    assert (
        "--drill-data: found none for the channel training, which is at s3://" in completed.stderr
    )
    completed = launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run", "--drill-data=training=.")
    assert completed.returncode == 1 and "--drill-data: found without --drill" in completed.stderr


def test_a_job_that_fails_is_drilled_in_this_checkout(launch):
    """The toolkit starts the drill, as it would start the job."""
    completed = launch(
        *NEEDED_FLAGS,
        UNCHECKED_FLAG,
        "--dry-run",
        "--drill",
        "trainer.max_steps=0",
        "trainer.accelerator=cpu",
    )
    assert completed.returncode == 1 and not completed.stdout
    assert (
        "the command, left alone, fails with exit status 1: error: --trainer" in completed.stderr
    ), completed.stderr


def test_each_metric_is_found_in_the_log_of_a_real_training(launch, tmp_path):
    flags = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=3"]
    flags += ["--trainer.limit_val_batches=1", "--trainer.limit_test_batches=1"]
    flags += ["--trainer.accelerator=cpu", "--progress.every_n_seconds=0"]
    training = warm.run(["python", ROOT / "app/train.py", *flags], tmp_path)
    assert training.returncode == 0, training.stdout
    request = request_of(launch(*NEEDED_FLAGS, UNCHECKED_FLAG, "--dry-run"))
    values = {
        metric["Name"]: [float(value) for value in re.findall(metric["Regex"], training.stdout)]
        for metric in request["AlgorithmSpecification"]["MetricDefinitions"]
    }
    assert all(values.values()), values
    assert [len(values[name]) for name in ("val_loss", "val_acc", "test_loss", "test_acc")] == [
        1,
        1,
        1,
        1,
    ]
    assert values["epoch"] == [1.0] * len(values["epoch"]) and values["step"][:2] == [1.0, 2.0]
    assert 0 <= min(values["train_acc"]) <= max(values["train_acc"]) <= 1
    assert min(values["images_per_second"]) > 0
