"""SageMaker's Python SDK 3 in its local mode: what a user's script gets from the image."""

import json
from pathlib import Path

import pytest
import torch
from containers import ROOT
from hyperparameters_sent import KNOWN, SHORT, UNKNOWN, UNKNOWN_FLAGS, known_arrived
from local_mode import Client, hyperparameters_in, unpacked

from sagemaker_lightning.contract import hyperparameters

pytestmark = pytest.mark.docker

SOURCE = str(ROOT / "tests/clients/source")
SHORT_FLAGS = [f"--{name}={value}" for name, value in SHORT.items()]


@pytest.fixture
def client(tmp_path: Path):
    user = Client("sdk3", tmp_path)
    yield user
    user.clean()


@pytest.fixture
def trained(client: Client, image: str):
    """Run a job and return all its output and its folder of artifacts."""

    def run(status: int = 0, **job) -> tuple[str, Path]:
        job |= {"training_image": image, "local_container_root": str(client.home)}
        run = client.run("sdk3_model_trainer.py", job)
        assert run.returncode == status, run.stdout
        return run.stdout, client.home / "compressed_artifacts"

    return run


def state_in(artifacts: Path) -> dict:
    """Return the model in the job's model.tar.gz."""
    return torch.load(unpacked(artifacts / "model.tar.gz") / "model.pt", weights_only=True)


@pytest.mark.thorough  # to an entry script, below; without the client: test_toolkit.py
def test_hyperparameters_of_every_kind(trained):
    """Without source_code, the SDK gives the container no command: the image's own one trains."""
    _, artifacts = trained(hyperparameters=KNOWN)
    known_arrived(unpacked(artifacts / "output.tar.gz"))
    assert state_in(artifacts)


@pytest.mark.soak  # by SDK 2
def test_unknown_hyperparameters(trained):
    """They arrive with their values, the job fails, and the client says so."""
    output, artifacts = trained(1, hyperparameters=UNKNOWN)
    assert "RuntimeError" in output
    assert hyperparameters.flags(hyperparameters_in(output)) == UNKNOWN_FLAGS
    failure = (unpacked(artifacts / "output.tar.gz") / "failure").read_text()
    assert failure.startswith(
        f"error: {', '.join(f'--{name}' for name in UNKNOWN)}: are no flags here"
    )
    assert "\n" not in failure


@pytest.mark.thorough  # without a client: test_nodes.py
def test_two_instances(trained, cifar: Path):
    """The SDK names an interface that no container has, ethwe: our code must not rely on it."""
    hyperparameters = SHORT | {"data.val_split": 40, "trainer.enable_checkpointing": True}
    output, artifacts = trained(
        hyperparameters=hyperparameters, instance_count=2, inputs={"training": str(cifar)}
    )
    assert "MEMBER: 2/2" in output
    assert state_in(artifacts)


@pytest.mark.thorough  # in somebody else's image: test_foreign_image.py
def test_a_users_own_command(trained):
    """With source_code the SDK bypasses the entry point and the toolkit."""
    command = {
        "command": f"python -m app.train {' '.join(SHORT_FLAGS)} --model=slow.Model",
        "source_dir": SOURCE,
    }
    output, artifacts = trained(source_code=command)
    assert "sagemaker-training-toolkit" not in output
    assert "Running Basic Script driver" not in output
    assert state_in(artifacts)
    assert "slow.Model" in (artifacts / "model/model.json").read_text()


def test_an_entry_script_with_hyperparameters(trained):
    hyperparameters = {"x_text": "a b", "x_negative": -3, "x_list": ["a", 1], "x_none": None}
    output, _ = trained(
        source_code={"entry_script": "echo.py", "source_dir": SOURCE},
        hyperparameters=hyperparameters,
    )
    assert (
        "GIVEN ['--x_text', 'a b', '--x_negative', '-3', "
        """'--x_list', '["a", 1]', '--x_none', 'null']"""
    ) in output


@pytest.mark.thorough  # without a client: test_toolkit.py
def test_torchrun_of_a_plain_pytorch_script(trained):
    source = {"entry_script": "ddp.py", "source_dir": SOURCE}
    output, artifacts = trained(
        source_code=source, torchrun={"process_count_per_node": 1}, instance_count=2
    )
    assert "rank 0 of 2: gradient 0.5" in output and "rank 1 of 2: gradient 0.5" in output
    assert list(state_in(artifacts)) == ["weight"]


@pytest.mark.soak  # a plain script, above
def test_torchrun_of_our_own(trained):
    """One host has two processes, and keeps the variables that torchrun sets."""
    source = {"entry_script": "train_two.py", "source_dir": SOURCE}
    output, artifacts = trained(source_code=source, torchrun={"process_count_per_node": 2})
    assert "MEMBER: 2/2" in output
    assert state_in(artifacts)


@pytest.mark.thorough  # without a client: tests/unit/launch/test_shell_job.py
@pytest.mark.parametrize(
    "ranks",
    [
        # A program that torchrun starts again: tests/unit/resume/test_container_restarts.py.
        pytest.param({"torchrun": {"process_count_per_node": 2}}, marks=pytest.mark.soak),
        {},
    ],
)
def test_a_rank_that_dies_is_back_in_the_same_container(trained, ranks):
    """Its ranks alone start again, without their imports: not the SDK's script and driver."""
    source = {"entry_script": "dies.py", "source_dir": SOURCE}
    output, artifacts = trained(source_code=source, **ranks)
    assert "restart 1 in this container (at most 3 an hour), after step 3: " in output
    assert "restart 1: continued from step 0 after " in output
    assert "warm_start.py" in output.rpartition("STARTED BY")[2].partition("\n")[0]
    assert output.count("echo 'Running ") == 1  # the driver
    assert state_in(artifacts)
    assert len(json.loads((artifacts / "model/model.json").read_text())["restarts"]) == 1
