"""SageMaker's Python SDK 2 in its local mode: what a user's script gets from the image."""

import json
import re
import tarfile
from pathlib import Path

import pytest
import torch
from containers import ROOT
from hyperparameters_sent import KNOWN, SHORT, known_arrived
from local_mode import Client, unpacked
from torchvision.models import resnet18

from sagemaker_lightning.launch import user_program

pytestmark = pytest.mark.docker

SOURCE = str(ROOT / "tests/clients/source")

# The values of the original's run_sagemaker.py, with a CPU in place of its GPU.
ORIGINAL_HYPERPARAMETERS = {
    "data": "CIFAR10DataModule",
    "data.batch_size": 32,
    "optimizer": "Adam",
    "optimizer.lr": 0.001,
    "trainer.accelerator": "cpu",
    "trainer.devices": -1,
    "trainer.max_epochs": 5,
    "logger.name": "tutorial",
}
SMALL_SPLIT = {"data.val_split": 40}  # of the few images of the test's CIFAR-10


@pytest.fixture
def client(tmp_path: Path):
    user = Client("sdk2", tmp_path)
    yield user
    user.clean()


def model_of(archive: Path) -> Path:
    """Return the folder of a model.tar.gz whose model can be loaded."""
    folder = unpacked(archive)
    state = torch.load(folder / "model.pt", weights_only=True)
    resnet18(num_classes=10).load_state_dict(state)
    return folder


@pytest.mark.thorough  # without the client: test_train.py
def test_the_originals_hyperparameters(client: Client, image: str, cifar: Path, tmp_path: Path):
    """A user changes some of them, and mounts folders of this machine.

    environment= chooses the launcher.
    """
    hyperparameters = ORIGINAL_HYPERPARAMETERS | SMALL_SPLIT | {"trainer.max_epochs": 1}
    job = {
        "image_uri": image,
        "instance_count": 1,
        "hyperparameters": hyperparameters,
        "output_path": f"file://{tmp_path}/out",
    }
    job |= {
        "inputs": {"training": f"file://{cifar}"},
        "environment": {"SAGEMAKER_PROGRAM": "app/train_torchrun.py"},
    }
    run = client.run("sdk2_estimator.py", job)
    assert run.returncode == 0, run.stdout
    assert "program: /opt/sagemaker-lightning/app/train_torchrun.py" in run.stdout
    assert "epoch=1/1 " in run.stdout
    model_of(tmp_path / "out/model.tar.gz")
    output = unpacked(tmp_path / "out/output.tar.gz")
    assert (output / "success").exists()
    assert list(output.glob("data/tensorboard/algo-1-*/tutorial/version_0/events.*"))


@pytest.mark.soak  # by SDK 3, without a source: test_clients_sdk3.py
def test_hyperparameters_beside_a_source(client: Client, image: str, bucket, tmp_path: Path):
    """The image's program runs with a source archive of the job in S3.

    SDK 2 lets a user name it in this way.
    """
    client.local_code(False)
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(SOURCE, ".")
    bucket.client.upload_file(str(archive), bucket.name, "source.tar.gz")
    job = {
        "image_uri": image,
        "instance_count": 1,
        "hyperparameters": KNOWN | {"model": "slow.Model"},
    }
    job |= {"entry_point": "app/train_multi_node.py", "source_dir": bucket.uri("source.tar.gz")}
    job |= {"output_path": f"file://{tmp_path}/out", "code_location": bucket.uri("code")}
    run = client.run("sdk2_pytorch.py", job, **bucket.variables)
    assert run.returncode == 0, run.stdout
    known_arrived(unpacked(tmp_path / "out/output.tar.gz"))
    assert "slow.Model" in (unpacked(tmp_path / "out/model.tar.gz") / "model.json").read_text()


@pytest.mark.soak
def test_a_model_that_is_written_slowly(client: Client, image: str, tmp_path: Path):
    """Local mode stops all containers when the first one ends.

    So no host may end before the model is written.
    """
    job = {
        "image_uri": image,
        "instance_count": 2,
        "hyperparameters": SHORT | {"model": "slow.Model"},
    }
    job |= {
        "entry_point": "train.py",
        "source_dir": SOURCE,
        "output_path": f"file://{tmp_path}/out",
    }
    run = client.run("sdk2_pytorch.py", job)
    assert run.returncode == 0, run.stdout
    assert "/opt/ml/code/train.py, the job's own" in run.stdout
    assert torch.load(unpacked(tmp_path / "out/model.tar.gz") / "model.pt", weights_only=True)


ENABLED = {"enabled": True}


@pytest.mark.thorough  # what runs: test_toolkit.py
def test_what_the_client_sends_for_a_distribution(client: Client):
    """The toolkit's process knows each name.

    Local mode cannot stand in for these instances.
    """
    distributions = {
        "sagemaker_torch_distributed_enabled": {"torch_distributed": ENABLED},
        "sagemaker_distributed_dataparallel_enabled": {"smdistributed": {"dataparallel": ENABLED}},
        "sagemaker_mpi_enabled": {"mpi": ENABLED},
        "sagemaker_parameter_server_enabled": {"parameter_server": ENABLED},
    }
    run = client.run("sdk2_distribution.py", [*distributions.values(), {"pytorchddp": ENABLED}])
    sent_hyperparameters = json.loads(re.search(r"SENT (.*)", run.stdout)[1])
    enabled = [
        [
            name
            for name, value in hyperparameters.items()
            if name.endswith("_enabled") and value == "true"
        ]
        for hyperparameters in sent_hyperparameters
    ]
    assert enabled == [[name] for name in distributions] + [
        ["sagemaker_distributed_dataparallel_enabled"]
    ]
    assert set(distributions) <= {*user_program.DISTRIBUTIONS, *user_program.REFUSED_DISTRIBUTIONS}


@pytest.mark.soak
def test_a_plain_pytorch_script_on_two_instances(client: Client, image: str, tmp_path: Path):
    job = {
        "image_uri": image,
        "instance_count": 2,
        "hyperparameters": {"x": 1.5},
        "distribution": {"torch_distributed": ENABLED},
    }
    job |= {"entry_point": "ddp.py", "source_dir": SOURCE, "output_path": f"file://{tmp_path}/out"}
    run = client.run("sdk2_pytorch.py", job)
    assert run.returncode == 0, run.stdout
    for rank in (0, 1):
        assert f"rank {rank} of 2: gradient 0.5, given ['-x', '1.5']" in run.stdout

    assert list(
        torch.load(unpacked(tmp_path / "out/model.tar.gz") / "model.pt", weights_only=True)
    ) == ["weight"]


@pytest.mark.thorough  # without the client: test_toolkit.py
def test_a_script_that_fails(client: Client, image: str, tmp_path: Path):
    job = {"image_uri": image, "instance_count": 1, "entry_point": "fails.py", "source_dir": SOURCE}
    run = client.run("sdk2_pytorch.py", job | {"output_path": f"file://{tmp_path}/out"})
    assert run.returncode == 1 and "RuntimeError: Failed to run" in run.stdout
    failure = (unpacked(tmp_path / "out/output.tar.gz") / "failure").read_text()
    assert failure.startswith(
        "error: fails.py ended with exit status 1: KeyError: 'the cause' [host algo-1-"
    )
