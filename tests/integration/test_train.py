"""The main job for real: the toolkit's `train` on an /opt/ml of its own.

Both launchers, and the files that are left.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
import warm
from conftest import ROOT, Job
from torchvision.models import resnet18

from app.data import DigitsDataModule

pytestmark = pytest.mark.slow

FEW_BATCHES = {
    "trainer.limit_train_batches": "4",
    "trainer.limit_val_batches": "1",
    "trainer.limit_test_batches": "1",
}
SHORT_TRAINING = FEW_BATCHES | {"trainer.max_epochs": "2", "data.batch_size": "32"}


def with_one_layer(job: Job, **hyperparameters) -> None:
    """Give a job one_layer.py, and hyperparameters: what is shown needs no ResNet-18."""
    job.write("code/one_layer.py", (ROOT / "tests/support/one_layer.py").read_text())
    hyperparameters = {"model": "one_layer.OneLayer"} | hyperparameters
    job.write("input/config/hyperparameters.json", json.dumps(hyperparameters))


@pytest.mark.parametrize(
    ("epochs", "least"),
    [
        pytest.param("2", 0.5, marks=pytest.mark.thorough),  # README's `make train` does
        pytest.param("20", 0.95, marks=pytest.mark.soak),
    ],
)
def test_nothing_given_trains_on_the_default_data(job: Job, epochs: str, least: float):
    """A job without any input trains on the default data.

    `train` makes all that it needs in a bare base folder, and the model works.
    """
    job.write("input/config/hyperparameters.json", json.dumps({"trainer.max_epochs": epochs}))
    run = job.run(SAGEMAKER_LIGHTNING_REVISION="abc123")
    assert run.returncode == 0, run.stdout
    assert (job.base / "output/success").is_file() and not (job.base / "output/failure").exists()

    described = json.loads((job.base / "model/model.json").read_text())
    assert described["class_path"] == "torchvision.models.resnet.ResNet"
    assert (
        described["module_class_path"] == "app.model.ResNet18" and described["revision"] == "abc123"
    )
    assert described["num_classes"] == 10 and described["input_shape"] == [3, 32, 32]
    assert described["input_range"] == [0.0, 1.0]
    assert described["versions"]["torch"] == torch.__version__

    # What a user does with the model: only torchvision and the two files are needed.
    model = resnet18(num_classes=described["num_classes"])
    model.load_state_dict(torch.load(job.base / "model/model.pt", weights_only=True))
    model.eval()
    data = DigitsDataModule()
    data.setup("test")
    mean, std = (
        torch.tensor(described["normalization"][key])[:, None, None] for key in ("mean", "std")
    )
    with torch.no_grad():
        predictions = model((data.sets["test"].images / 255 - mean) / std).argmax(1)
    accuracy = (predictions == data.sets["test"].labels).float().mean().item()
    assert accuracy == pytest.approx(described["metrics"]["test_acc"], abs=0.004)
    assert accuracy > least
    assert f"test_acc={described['metrics']['test_acc']:.6g}" in run.stdout
    assert f"model: {job.base}/model/model.pt" in run.stdout

    assert not (job.base / "output/data/checkpoints").exists()  # SageMaker would upload them
    assert sorted(path.name for path in (job.base / "model").iterdir()) == [
        "config.yaml",
        "model.json",
        "model.pt",
    ]


def test_the_originals_job(job: Job, cifar: Path):
    """A job with the hyperparameters of the original's run_sagemaker.py.

    It runs on the channel `training`; the GPU is left out.
    """
    hyperparameters = {
        "data": "CIFAR10DataModule",
        "data.batch_size": "32",
        "optimizer": "Adam",
        "optimizer.lr": "0.001",
        "trainer.accelerator": "cpu",
        "trainer.devices": "-1",
        "trainer.max_epochs": "5",
        "logger.name": "tutorial",
        "data.val_split": "40",
    }
    job.write("input/config/hyperparameters.json", json.dumps(hyperparameters))
    (job.base / "input/data").mkdir(parents=True)
    (job.base / "checkpoints").mkdir()
    cifar.rename(job.base / "input/data/training")
    run = job.run()
    assert run.returncode == 0, run.stdout
    assert "test_acc=" in run.stdout
    assert list(job.base.glob("checkpoints/tensorboard/localhost/tutorial/version_0/events.*"))
    # The best model by validation loss, not the last one.
    losses = [float(loss) for loss in re.findall(r"val_loss=([\d.]+)", run.stdout)]
    assert len(losses) == 5
    best = losses.index(min(losses))
    assert [path.name.split("-")[1] for path in job.base.glob("checkpoints/best-*")] == [
        f"epoch={best}"
    ]
    assert json.loads((job.base / "model/model.json").read_text())["classes"][0] == "airplane"


def test_the_same_seed_gives_the_same_weights(job: Job, tmp_path: Path):
    weights = []
    workers = {"data.num_workers": "0"}
    for name, own in (
        ("a", workers),
        ("b", {"data.num_workers": "3"}),
        ("c", workers | {"seed_everything": 7}),
    ):
        seeded_job = Job(tmp_path / name)
        with_one_layer(seeded_job, **SHORT_TRAINING | {"trainer.max_epochs": "1"} | own)
        assert seeded_job.run().returncode == 0
        weights.append((seeded_job.base / "model/model.pt").read_bytes())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(("value", "status"), [("true", 1), ("warn", 0), ("false", 0)])
def test_an_operation_that_is_not_deterministic(job: Job, value, status):
    """`put_` is one, also on a CPU, in the list of torch.use_deterministic_algorithms."""
    job.write(
        "code/own.py",
        "import torch\nfrom one_layer import OneLayer\n\n\nclass Model(OneLayer):\n"
        "    def training_step(self, batch, index):\n"
        "        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))\n"
        "        return super().training_step(batch, index)\n",
    )
    with_one_layer(job, **SHORT_TRAINING, model="own.Model", **{"trainer.deterministic": value})
    run = job.run()
    assert run.returncode == status, run.stdout
    assert ("put_ does not have a deterministic implementation" in run.stdout) == (value != "false")
    if status:
        assert "put_ does not have a deterministic implementation" in job.failure.splitlines()[0]


@pytest.mark.parametrize("program", ["app/train_torchrun.py", "app/train_multi_node.py"])
def test_two_processes_on_one_node(job: Job, program):
    ranks = {"trainer.devices": "2", "trainer.accelerator": "cpu"}
    with_one_layer(job, **SHORT_TRAINING | ranks)
    run = job.run(SAGEMAKER_PROGRAM=program)
    assert run.returncode == 0, run.stdout
    assert "MEMBER: 2/2" in run.stdout
    assert run.stdout.count("\nmodel: ") == 1  # one rank writes the model, and one reports it
    assert (job.base / "model/model.pt").is_file()


def run_train(*flags: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run app/train.py without the toolkit."""
    return warm.run(
        ["python", ROOT / "app/train.py", *flags],
        cwd,
        os.environ | {"PYTHONPATH": str(ROOT)} | variables,
    )


def test_on_a_desk_everything_goes_below_output(tmp_path):
    flags = [f"--{name}={value}" for name, value in FEW_BATCHES.items()]
    run = run_train("--trainer.max_epochs=1", *flags, cwd=tmp_path)
    assert run.returncode == 0, run.stdout
    assert (tmp_path / "output/model/model.pt").is_file() and list(tmp_path.iterdir()) == [
        tmp_path / "output"
    ]


def test_other_peoples_model_and_data(tmp_path):
    path = f"{ROOT}:{ROOT / 'tests/support'}"
    run = run_train(
        "--model=foreign.Model",
        "--data=foreign.Data",
        "--trainer.max_epochs=2",
        cwd=tmp_path,
        PYTHONPATH=path,
    )
    assert run.returncode == 0, run.stdout
    state = torch.load(tmp_path / "output/model/model.pt", weights_only=True)
    assert state["layers.0.weight"].shape == (3, 4)
    described = json.loads((tmp_path / "output/model/model.json").read_text())
    assert described["module_class_path"] == "foreign.Model"
    # The module does not say what its input looks like: a text, for example, has no range.
    assert {described[key] for key in ("input_range", "input_shape", "normalization")} == {None}


MISTAKES = {
    "an unknown flag": ({"trainer.max_epoch": "5"}, {}, "--trainer.max_epoch: is not a flag"),
    "a wrong value": ({"trainer.max_epochs": "five"}, {}, "--trainer.max_epochs: found 'five'"),
    "no channel": ({"data": "CIFAR10DataModule"}, {}, "channel `training`"),
    "an empty channel": (
        {"data": "CIFAR10DataModule"},
        {"input/data/training": None},
        "found: nothing",
    ),
    "a foreign file": (
        {},
        {"input/data/training/data_batch_1": "<html>"},
        "data_batch_1 is not a CIFAR-10 batch",
    ),
    "two channels": ({}, {"input/data/a": None, "input/data/b": None}, "found the channels a, b"),
    "another number of classes": ({"model.num_classes": "5"}, {}, "--model.num_classes: found 5"),
    "a GPU": (
        {"trainer.accelerator": "gpu"},
        {},
        "--trainer.accelerator=gpu: this machine has no GPU",
    ),
    "nothing to train": (
        {"trainer.limit_train_batches": "0"},
        {},
        "--trainer: no step was trained",
    ),
    "checkpoints": (
        {"checkpoint.dirpath": "/proc/nope"},
        {},
        "/proc/nope: checkpoints cannot be written there",
    ),
    "a metric that is not there": (
        {"checkpoint.monitor": "nope", **SHORT_TRAINING},
        {},
        "monitor='nope'",
    ),
}


@pytest.mark.parametrize(
    ("hyperparameters", "files", "says"), MISTAKES.values(), ids=MISTAKES.keys()
)
def test_a_mistake_is_one_line_in_the_log_and_the_failure_file(
    job: Job, hyperparameters, files, says
):
    if torch.cuda.is_available() and "trainer.accelerator" in hyperparameters:
        pytest.skip("this machine has a GPU")
    job.write("input/config/hyperparameters.json", json.dumps(hyperparameters))
    job.write("model/model.pt", "an earlier model")
    for name, text in files.items():
        if text is None:
            (job.base / name).mkdir(parents=True)
        else:
            job.write(name, text)
    run = job.run()
    assert run.returncode != 0
    assert says in job.failure.splitlines()[0] and job.failure.startswith("error: ")
    assert len(job.failure.splitlines()) == 1
    assert sum(says in line for line in run.stdout.splitlines() if line.startswith("error: ")) == 1
    assert "Traceback" not in run.stdout.partition("error: ")[0]
    assert (job.base / "model/model.pt").read_text() == "an earlier model"
    assert not (job.base / "output/success").exists()


def test_a_model_directory_that_is_a_file(job: Job):
    job.write("elsewhere", "a file")
    run = run_train(
        cwd=job.base, SM_MODEL_DIR=str(job.base / "elsewhere"), SM_OUTPUT_DIR=str(job.base)
    )
    assert run.returncode == 1
    assert (
        f"error: {job.base}/elsewhere: the model cannot be written there"
        in (job.base / "failure").read_text()
    )


@pytest.mark.parametrize(
    "program",
    [pytest.param("app/train_torchrun.py", marks=pytest.mark.thorough), "app/train_multi_node.py"],
)
def test_a_rank_that_is_killed_is_the_reason(job: Job, program):
    """The kernel kills one that lacks memory; the others say only that they lost a peer."""
    hyperparameters = {
        "trainer.devices": "2",
        "trainer.accelerator": "cpu",
        "progress.every_n_seconds": "0",
        "max_restarts": "0",
    }
    job.write("input/config/hyperparameters.json", json.dumps(hyperparameters))
    process = job.start(SAGEMAKER_PROGRAM=program)
    for line in process.stdout:
        if "step=3" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    (rank_1,) = (child for child in children if warm.environ(child.pid).get("LOCAL_RANK") == "1")
    rank_1.kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert re.match("error: .*was killed by SIGKILL: most likely out of host memory", job.failure)
    if "torchrun" in program:
        assert "rank 1 was killed by SIGKILL" in job.failure
