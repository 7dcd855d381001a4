"""A user's `docker run`: SageMaker's three folders are mounted, without the toolkit."""

import json
from pathlib import Path

import pytest
import torch
from conftest import write_cifar
from containers import docker
from hyperparameters_sent import SHORT

pytestmark = pytest.mark.docker

SMALL_SPLIT = {"data.val_split": "40"}  # of the few images of the test's CIFAR-10


def test_three_folders_mounted_whole(image: str, tmp_path: Path):
    """All of /opt/ml/input is the host's, so that what the image has there is hidden."""
    write_cifar(tmp_path / "input/data/training")
    hyperparameters = {name: str(value) for name, value in SHORT.items()} | SMALL_SPLIT
    (tmp_path / "input/config").mkdir()
    (tmp_path / "input/config/hyperparameters.json").write_text(json.dumps(hyperparameters))
    mounts = []
    for name in ("input", "model", "output"):
        (tmp_path / name).mkdir(exist_ok=True)
        mounts += ["--volume", f"{tmp_path / name}:/opt/ml/{name}"]
    run = docker("run", "--rm", *mounts, image, "train")
    assert run.returncode == 0, run.stdout
    assert torch.load(tmp_path / "model/model.pt", weights_only=True)
    assert (
        json.loads((tmp_path / "model/model.json").read_text())["data_class_path"]
        == "app.data.CIFAR10DataModule"
    )
    assert (tmp_path / "output/success").exists()
    assert list(tmp_path.glob("output/data/tensorboard/**/events.*"))
