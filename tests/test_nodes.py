"""Several nodes, each a container that the real toolkit starts: they find each other, and none hangs."""

from pathlib import Path

import pytest
from conftest import ROOT
from local_mode import needs_an_engine
from nodes import Nodes

pytestmark = needs_an_engine
CODE = {"probe.py": (ROOT / "tests/probe.py").read_text()}
PROBE = {
    "model": "probe.Probe",
    "data": "probe.Counted",
    "data.batch_size": 4,
    "trainer.accelerator": "cpu",
    "trainer.devices": 1,
    "checkpoint.monitor": "null",
    "checkpoint.filename": "null",
}
LONG = PROBE | {"trainer.max_epochs": 1000, "model.sleep": 0.05, "progress.every_n_seconds": 1}
SOON = {"SAGEMAKER_LIGHTNING_PEER_TIMEOUT": "12", "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT": "40"}
LAUNCHERS = ["app/train_multi_node.py", "app/train_torchrun.py"]


def job(image: str, folder: Path, hosts: int, hyperparameters: dict, **more) -> Nodes:
    """Return the nodes algo-1, algo-2, ... of a job."""
    return Nodes(image, folder, [f"algo-{k}" for k in range(1, hosts + 1)], hyperparameters, code=CODE, **SOON | more)


@pytest.mark.parametrize("lost", ["algo-1", "algo-2"])
def test_a_node_is_killed(image: str, tmp_path: Path, lost: str):
    with job(image, tmp_path, 2, LONG) as nodes:
        nodes.start()
        nodes.wait_for("TRAINING", "algo-1")
        nodes.kill(lost)
        ended = nodes.end()
        other = "algo-2" if lost == "algo-1" else "algo-1"
        assert ended == {lost: 137, other: 1}
        assert nodes.failure(other).startswith(f"error: lost {lost}: its connection broke off; last heard ")


@pytest.mark.parametrize("program", LAUNCHERS)
def test_a_local_rank_is_killed(image: str, tmp_path: Path, program: str):
    with job(image, tmp_path, 2, LONG | {"trainer.devices": 2}, SAGEMAKER_PROGRAM=program) as nodes:
        nodes.start()
        nodes.wait_for("TRAINING", "algo-2")
        nodes.kill_last_rank("algo-2")
        assert nodes.end() == {"algo-1": 1, "algo-2": 1}
        for host in nodes.hosts:
            assert "killed" in nodes.failure(host) and "rank" in nodes.failure(host)
        assert "algo-2" in nodes.failure("algo-1")


@pytest.mark.parametrize("how", ["disconnected", "its packets dropped"])
def test_a_nodes_network_is_cut(image: str, tmp_path: Path, how: str):
    with job(image, tmp_path, 3, LONG) as nodes:
        nodes.start()
        nodes.wait_for("step=", "algo-1", times=3)  # seconds: the others have heard of the first
        nodes.cut("algo-3") if how == "disconnected" else nodes.drop_packets("algo-3", 1.0)
        assert nodes.end() == {"algo-1": 1, "algo-2": 1, "algo-3": 1}
        for host in ("algo-1", "algo-2"):
            assert nodes.failure(host).startswith("error: lost algo-3: nothing was heard of it any more; last heard ")
            assert "epoch" in nodes.failure(host)
        assert "the network of this one (algo-3) is most likely cut" in nodes.failure("algo-3")


def test_a_node_never_appears(image: str, tmp_path: Path):
    with job(image, tmp_path, 3, PROBE, SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT="8") as nodes:
        nodes.start("algo-1", "algo-3")
        assert nodes.end() == {"algo-1": 1, "algo-3": 1}
        for host in ("algo-1", "algo-3"):
            said = nodes.failure(host)
            assert said.startswith("error: host algo-2 did not appear within 8 s: its name does not resolve"), said
            assert "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT" in said


@pytest.mark.parametrize("program", LAUNCHERS)
def test_a_rank_that_raises_tells_the_others_why(image: str, tmp_path: Path, program: str):
    given = LONG | {"model.fail_at": 3, "model.fail_rank": 1}
    with job(image, tmp_path, 2, given, SAGEMAKER_PROGRAM=program) as nodes:
        nodes.start()
        assert nodes.end() == {"algo-1": 1, "algo-2": 1}
        for host in nodes.hosts:
            assert "RuntimeError: the probe fails, as it was asked to" in nodes.failure(host)
        assert "algo-2" in nodes.failure("algo-1")


def test_contradicting_hyperparameters(image: str, tmp_path: Path):
    given = {"algo-1": PROBE | {"api_token": "a"}, "algo-2": PROBE | {"data.batch_size": 8, "api_token": "b"}}
    with job(image, tmp_path, 2, given) as nodes:
        nodes.start()
        assert nodes.end() == {"algo-1": 1, "algo-2": 1}
        for host in nodes.hosts:
            assert nodes.failure(host).startswith(
                "error: hosts algo-1 and algo-2 were told different things: hyperparameter data.batch_size is 4 and 8;"
            )
            assert "api_token" not in nodes.failure(host)


def test_a_node_is_told_to_stop(image: str, tmp_path: Path):
    with job(image, tmp_path, 2, LONG) as nodes:
        nodes.start()
        nodes.wait_for("TRAINING", "algo-1")
        nodes.stop("algo-2")
        assert nodes.end() == {"algo-1": 1, "algo-2": 1}
        for host in nodes.hosts:
            assert "after SIGTERM: the job was told to stop before the training was done" in nodes.failure(host)
