"""Where no Docker engine answers, jobs run as processes: the same folders, files, names, signals, interruptions."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from botocore.exceptions import ClientError
from conftest import write_cifar
from rehearsal import LIMIT, Rehearsal, run_command
from test_rehearsal_clients import FAST, same, weights

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A rehearsal by processes."""
    folder = tmp_path_factory.mktemp("rehearsal")
    os.environ["REHEARSAL_PYTHON"] = sys.executable
    try:
        with Rehearsal(folder, "--engine=processes", "--sync-every=0.2") as server:
            assert "no Docker engine" in server.said
            for path in write_cifar(folder / "data").iterdir():
                server.s3.upload_file(str(path), "rehearsal", f"cifar10/cifar-10-batches-py/{path.name}")
            yield server
    finally:
        del os.environ["REHEARSAL_PYTHON"]


def test_an_interrupted_job_of_two_hosts_has_the_same_weights(rehearsal):
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://rehearsal/cifar10/"}
    fields = {
        "HyperParameters": FAST | {"trainer.max_epochs": "8", "data.val_split": "0.2", "data": "CIFAR10DataModule"},
        "Environment": {"OMP_NUM_THREADS": "1"},
        "hosts": 2,
        "InputDataConfig": [
            {"ChannelName": "training", "InputMode": "FastFile", "DataSource": {"S3DataSource": source}}
        ],
    }
    checkpoints = {"CheckpointConfig": {"S3Uri": "s3://rehearsal/checkpoints/run"}}
    names = [rehearsal.create("none", **fields)]
    whole = rehearsal.ended(names[0])
    names.append(rehearsal.create("none", spot=True, **fields, **checkpoints))
    end = time.monotonic() + LIMIT
    while not any(key.endswith(".ckpt") for key in rehearsal.keys("checkpoints/run/")):
        assert time.monotonic() < end, rehearsal.lines(names[1])
        time.sleep(0.05)
    assert run_command(rehearsal, "interrupt", names[1], "--host=algo-2", "--unwarned").returncode == 0
    interrupted = rehearsal.ended(names[1])
    assert whole["TrainingJobStatus"] == interrupted["TrainingJobStatus"] == "Completed", (whole, interrupted)
    statuses = [one["Status"] for one in interrupted["SecondaryStatusTransitions"]]
    assert statuses.count("Interrupted") == 1
    assert any("resuming from step" in line for line in rehearsal.lines(names[1])["algo-1"])
    assert same(*(weights(rehearsal, name) for name in names))
    record = json.loads((rehearsal.folder / names[1] / "job.json").read_text())
    assert any("the application of this checkout runs" in note for note in record["notes"])


def test_a_stop_reaches_the_program(rehearsal):
    name = rehearsal.create("none", HyperParameters=FAST | {"trainer.max_epochs": "1000"})
    rehearsal.wait_for_line(name, "step=")
    rehearsal.sagemaker.stop_training_job(TrainingJobName=name)
    assert rehearsal.ended(name)["TrainingJobStatus"] == "Stopped"
    assert any("interrupted, resume from step" in line for line in rehearsal.lines(name)["algo-1"])


@pytest.mark.parametrize(
    ("fields", "refused"),
    [({"EnableNetworkIsolation": True}, "EnableNetworkIsolation"), ({"script": "true"}, "ContainerEntrypoint")],
)
def test_what_needs_containers_is_refused(rehearsal, fields, refused):
    with pytest.raises(ClientError, match=refused):
        rehearsal.create("none", **fields)


def test_the_orphans_of_a_killed_rehearsal_are_ended(rehearsal, tmp_path):
    first = Rehearsal(tmp_path, "--engine=processes")
    first.start()
    first.s3.create_bucket(Bucket="rehearsal")
    first.wait_for_line(first.create("none", hosts=2), "", "algo-2")
    (owner,) = [path.parent.name for path in first.cache.rglob("lock")]
    assert f"rh{owner[:8]}-switch" in subprocess.check_output(["ip", "netns", "list"], text=True)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    mine = ["pgrep", "--full", str(first.cache)]  # the folders of its jobs are in their command lines
    assert subprocess.run(mine, capture_output=True).stdout
    next_one = Rehearsal(tmp_path, "--engine=processes")
    with next_one:
        assert "ended what a killed rehearsal had left" in next_one.said
        assert not subprocess.run(mine, capture_output=True).stdout
    spaces = subprocess.check_output(["ip", "netns", "list"], text=True)
    assert owner[:8] not in spaces
