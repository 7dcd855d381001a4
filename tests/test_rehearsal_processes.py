"""Where no Docker engine answers, jobs run as processes: the same folders, files, signals and interruptions."""

import json
import os
import sys

import pytest
from botocore.exceptions import ClientError
from conftest import write_cifar
from rehearsal import Rehearsal
from test_rehearsal_clients import FAST, same, weights

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A rehearsal by processes, which takes a spot job's instance away once."""
    folder = tmp_path_factory.mktemp("rehearsal")
    os.environ["REHEARSAL_PYTHON"] = sys.executable
    try:
        with Rehearsal(folder, "--engine=processes", "--interrupt=at step 10 unwarned", "--sync-every=0.2") as server:
            assert "no Docker engine" in server.said
            for path in write_cifar(folder / "data").iterdir():
                server.s3.upload_file(str(path), "rehearsal", f"cifar10/cifar-10-batches-py/{path.name}")
            yield server
    finally:
        del os.environ["REHEARSAL_PYTHON"]


def test_an_interrupted_job_has_the_same_weights(rehearsal):
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://rehearsal/cifar10/"}
    fields = {
        "HyperParameters": FAST | {"trainer.max_epochs": "3", "data.val_split": "0.2", "data": "CIFAR10DataModule"},
        "InputDataConfig": [
            {"ChannelName": "training", "InputMode": "FastFile", "DataSource": {"S3DataSource": source}}
        ],
    }
    checkpoints = {"CheckpointConfig": {"S3Uri": "s3://rehearsal/checkpoints/run"}}
    names = [rehearsal.create("none", **fields), rehearsal.create("none", spot=True, **fields, **checkpoints)]
    whole, interrupted = map(rehearsal.ended, names)
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
    [({"hosts": 2}, "found 2 instances, allowed is 1"), ({"script": "true"}, "ContainerEntrypoint")],
)
def test_what_needs_containers_is_refused(rehearsal, fields, refused):
    with pytest.raises(ClientError, match=refused):
        rehearsal.create("none", **fields)
