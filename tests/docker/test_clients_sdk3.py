"""SageMaker's Python SDK 3 in its local mode: what a user's script gets from the image."""

from pathlib import Path

import pytest
import torch
from containers import ROOT
from hyperparameters_sent import KNOWN, SHORT, known_arrived
from local_mode import Client, unpacked

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


@pytest.mark.thorough  # to an entry script, below
def test_hyperparameters_of_every_kind(trained):
    """Without source_code, the SDK gives the container no command: the image's own one trains."""
    _, artifacts = trained(hyperparameters=KNOWN)
    known_arrived(unpacked(artifacts / "output.tar.gz"))
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
