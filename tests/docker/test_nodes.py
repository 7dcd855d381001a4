"""Several nodes, each a container that the real toolkit starts.

They find each other, and none hangs. test_mesh.py tests what the nodes say to one another;
here is what it does to real programs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from nodes import Nodes

pytestmark = pytest.mark.docker

CODE = {"probe.py": (ROOT / "tests/support/probe.py").read_text()}
PROBE_HYPERPARAMETERS = {
    "model": "probe.Probe",
    "data": "probe.Counted",
    "data.batch_size": 4,
    "trainer.accelerator": "cpu",
    "trainer.devices": 1,
    "checkpoint.monitor": "null",
    "checkpoint.filename": "null",
}
LONG_JOB = PROBE_HYPERPARAMETERS | {
    "trainer.max_epochs": 1000,
    "data.samples": 4003,
    "model.sleep": 0.05,
    "progress.every_n_seconds": 1,
}
SHORT_TIMEOUTS = {
    "SAGEMAKER_LIGHTNING_PEER_TIMEOUT": "12",
    "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT": "40",
}
LAUNCHERS = ["app/train_multi_node.py", "app/train_torchrun.py"]


def job_nodes(image: str, folder: Path, hosts: int, hyperparameters: dict, **variables) -> Nodes:
    """Return the nodes algo-1, algo-2, ... of a job."""
    return Nodes(
        image,
        folder,
        [f"algo-{number}" for number in range(1, hosts + 1)],
        hyperparameters,
        code=CODE,
        **SHORT_TIMEOUTS | variables,
    )


def steps_of(hosts: list[Path], ranks_a_host: int) -> list[tuple[list[int], float]]:
    """Return for each step the samples of all ranks, and the loss over all of them."""
    rank_records = [
        json.loads((hosts[rank // ranks_a_host] / f"output/data/probe-{rank}.json").read_text())
        for rank in range(ranks_a_host * len(hosts))
    ]
    steps = []
    for rank_steps in zip(*rank_records, strict=True):
        samples = [sample for numbers, _ in rank_steps for sample in numbers]
        steps.append(
            (
                sorted(samples),
                sum(len(numbers) * loss for numbers, loss in rank_steps) / len(samples),
            )
        )
    return steps


def train_in_one_process(folder: Path, batch_size: int) -> list[tuple[list[int], float]]:
    """Train in one process with this batch size, and return its steps.

    The model is in `folder`/model.
    """
    (folder / "output/data").mkdir(parents=True)
    (folder / "probe.py").write_text(CODE["probe.py"])
    flags = TWO_EPOCHS | {"data.batch_size": batch_size}
    folders = {"SM_OUTPUT_DATA_DIR": folder / "output/data", "SM_MODEL_DIR": folder / "model"}
    completed = subprocess.run(
        [
            sys.executable,
            ROOT / "app/train.py",
            *(f"--{name}={value}" for name, value in flags.items()),
        ],
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}:{folder}"}
        | {name: str(path) for name, path in folders.items()},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout
    return steps_of([folder], 1)


# Float32 sums in another order, over 24 to 32 steps: relative to values of about 1.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
TWO_EPOCHS = PROBE_HYPERPARAMETERS | {"trainer.max_epochs": 2, "data.samples": 205}
DATA_GROUP = {
    "current_group_name": "train",
    "instance_groups": [
        {"instance_group_name": "data", "instance_type": "ml.c5.xlarge", "hosts": ["algo-1"]},
        {
            "instance_group_name": "train",
            "instance_type": "ml.g5.xlarge",
            "hosts": ["algo-2", "algo-3"],
        },
    ],
}
DISTRIBUTION = {
    "sagemaker_torch_distributed_enabled": "true",
    "sagemaker_distribution_instance_groups": '["train"]',
}


@pytest.mark.parametrize(
    ("hosts", "ranks", "program", "distribution"),
    [
        pytest.param(["algo-1", "algo-2"], 2, LAUNCHERS[0], {}, marks=pytest.mark.soak),
        pytest.param(
            ["algo-1", "algo-10", "algo-2", "algo-3"], 1, LAUNCHERS[1], {}, marks=pytest.mark.soak
        ),
        # The ranks alone: test_rank_consistency.py. Groups: test_rendezvous.py. Two
        # hosts, as processes: test_rehearsal_processes.py.
        pytest.param(
            ["algo-1", "algo-2", "algo-3"],
            2,
            LAUNCHERS[0],
            DISTRIBUTION,
            marks=pytest.mark.soak,
        ),
    ],
    ids=[
        "2 nodes of 2 ranks, Lightning",
        "4 nodes, torchrun",
        "a group of 2 nodes of 2 ranks, torchrun",
    ],
)
def test_n_ranks_compute_what_one_does(
    image: str, tmp_path: Path, hosts: list[str], ranks: int, program: str, distribution
):
    """N ranks have the samples, the losses and the weights of one process.

    They are compared at each step, the weights after two epochs of 185 samples, which no batch
    divides.
    """
    hyperparameters = TWO_EPOCHS | {"trainer.devices": ranks} | distribution
    resources = DATA_GROUP if distribution else {}
    with Nodes(
        image,
        tmp_path,
        hosts,
        hyperparameters,
        resources=resources,
        code=CODE,
        SAGEMAKER_PROGRAM=program,
    ) as nodes:
        nodes.start()
        assert nodes.end() == dict.fromkeys(hosts, 0)
        if distribution:
            assert (
                "algo-1 takes no part in the training, which is for algo-2, algo-3"
                in nodes.output("algo-1")
            )
    training_hosts = hosts[1:] if distribution else hosts
    steps = steps_of([tmp_path / host for host in training_hosts], ranks)
    expected = train_in_one_process(tmp_path / "one", batch_size=4 * ranks * len(training_hosts))
    steps_an_epoch = len(steps) // 2
    for epoch in (steps[:steps_an_epoch], steps[steps_an_epoch:]):
        assert sorted(sample for samples, _ in epoch for sample in samples) == sorted(
            sample for samples, _ in expected[:steps_an_epoch] for sample in samples
        )
    assert [samples for samples, _ in steps] == [samples for samples, _ in expected]
    torch.testing.assert_close(
        torch.tensor([loss for _, loss in steps]),
        torch.tensor([loss for _, loss in expected]),
        **TOLERANCE,
    )
    weights = torch.load(tmp_path / training_hosts[0] / "model/model.pt", weights_only=True)
    torch.testing.assert_close(
        weights, torch.load(tmp_path / "one/model/model.pt", weights_only=True), **TOLERANCE
    )

    for host in training_hosts:
        files = {path.name for path in (tmp_path / host).rglob("*") if path.is_file()}
        # A finished run needs no checkpoints.
        assert ("model.pt" in files) == (host == training_hosts[0])
        assert not any(name.endswith(".ckpt") for name in files)
        # Prepared once, however many ranks there are.
        assert (tmp_path / host / "output/data/prepared").read_text() == "prepared\n"


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(LAUNCHERS[0], marks=pytest.mark.thorough),
        pytest.param(LAUNCHERS[1], marks=pytest.mark.soak),
    ],
)
def test_a_local_rank_is_killed(image: str, tmp_path: Path, program: str):
    with job_nodes(
        image,
        tmp_path,
        2,
        LONG_JOB | {"trainer.devices": 2, "max_restarts": 0},
        SAGEMAKER_PROGRAM=program,
    ) as nodes:
        nodes.start()
        nodes.wait_for("TRAINING", "algo-2")
        nodes.kill_last_rank("algo-2")
        assert nodes.end() == {"algo-1": 1, "algo-2": 1}
        killed = (
            "host algo-2, (local rank 1|rank 3) ended without giving a reason: it was killed by "
            "SIGKILL|rank 3 was killed|"
            r"the rank with PID \d+ was killed by SIGKILL.* \[host algo-2\]"  # Lightning's
        )
        for host in nodes.hosts:
            assert re.search(killed, nodes.failure(host)), nodes.failure(host)


@pytest.mark.parametrize(
    "program", [pytest.param(LAUNCHERS[0], marks=pytest.mark.soak), LAUNCHERS[1]]
)
def test_a_node_is_asked_to_stop(image: str, tmp_path: Path, program: str):
    with job_nodes(image, tmp_path, 2, LONG_JOB, SAGEMAKER_PROGRAM=program) as nodes:
        nodes.start()
        nodes.wait_for("TRAINING", "algo-1")
        nodes.stop("algo-2")
        assert nodes.end() == {"algo-1": 143, "algo-2": 143}
        for host in nodes.hosts:
            assert nodes.failure(host).startswith("interrupted, resume from step ")
