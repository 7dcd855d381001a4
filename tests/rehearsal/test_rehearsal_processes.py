"""Where no Docker engine answers, jobs run as processes.

They have the same folders, files, names, signals and interruptions.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from conftest import write_cifar
from rehearsals import HANG_SECONDS, Rehearsal, run_command
from test_rehearsal_clients import (
    CPU_HYPERPARAMETERS,
    TUTORIAL_HYPERPARAMETERS,
    same_weights,
    weights,
)

from sagemaker_rehearsal.engines import bridge, processes
from sagemaker_rehearsal.jobs.layout import Layout

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A rehearsal with the engine of processes."""
    folder = tmp_path_factory.mktemp("rehearsal")
    os.environ["REHEARSAL_PYTHON"] = sys.executable
    try:
        with Rehearsal(folder, "--engine=processes", "--sync-every=0.2") as server:
            assert "--engine=processes: jobs run as processes, with this ch" in server.output
            for path in write_cifar(folder / "data", images=10).iterdir():
                server.s3.upload_file(
                    str(path), "rehearsal", f"cifar10/cifar-10-batches-py/{path.name}"
                )
            yield server
    finally:
        del os.environ["REHEARSAL_PYTHON"]


@pytest.mark.thorough  # two ranks of one host: test_interrupted_ranks.py
def test_an_interrupted_job_of_two_hosts_has_the_same_weights(rehearsal):
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://rehearsal/cifar10/"}
    arguments = {
        # SGD: its checkpoints, which are copied all the time, have a third of the default's bytes.
        "HyperParameters": TUTORIAL_HYPERPARAMETERS
        | {"trainer.max_epochs": "2", "optimizer": "SGD"},
        "Environment": {"OMP_NUM_THREADS": "1"},
        "hosts": 2,
        "InputDataConfig": [
            {
                "ChannelName": "training",
                "InputMode": "FastFile",
                "DataSource": {"S3DataSource": source},
            }
        ],
    }
    checkpoints = {"CheckpointConfig": {"S3Uri": "s3://rehearsal/checkpoints/run"}}
    names = [rehearsal.create("none", **arguments)]
    uninterrupted = rehearsal.wait_until_ended(names[0])
    names.append(rehearsal.create("none", spot=True, **arguments, **checkpoints))
    deadline = time.monotonic() + HANG_SECONDS
    while not any(key.endswith(".ckpt") for key in rehearsal.keys("checkpoints/run/")):
        assert time.monotonic() < deadline, rehearsal.lines(names[1])
        time.sleep(0.05)
    assert (
        run_command(rehearsal, "interrupt", names[1], "--host=algo-2", "--unwarned").returncode == 0
    )
    interrupted = rehearsal.wait_until_ended(names[1])
    assert uninterrupted["TrainingJobStatus"] == interrupted["TrainingJobStatus"] == "Completed", (
        uninterrupted,
        interrupted,
    )
    statuses = [transition["Status"] for transition in interrupted["SecondaryStatusTransitions"]]
    assert statuses.count("Interrupted") == 1
    assert any("resuming from step" in line for line in rehearsal.lines(names[1])["algo-1"])
    assert same_weights(*(weights(rehearsal, name) for name in names))
    record = json.loads((rehearsal.folder / names[1] / "job.json").read_text())
    assert record["attempts"][1]["resumed_from"].startswith("step-")
    assert any("the application of this checkout runs" in note for note in record["notes"])


# Counts steps that two hosts make together, and writes each into a checkpoint. A host waits
# for ever once the other one is gone.
COUNTS = """
import os, signal, socket, sys, time
from pathlib import Path
first = os.environ["SM_CURRENT_HOST"] == "algo-1"
if first:
    connection = socket.create_server(("0.0.0.0", 4000)).accept()[0]
while not first:
    try:
        connection = socket.create_connection(("algo-1", 4000))
        break
    except OSError:
        time.sleep(0.05)
for step in range(10**6):
    try:
        connection.sendall(b"x")
        is_there = connection.recv(1)
    except OSError:
        is_there = False
    if not is_there:
        signal.pause()
    if first:
        print(f"step={step}", flush=True)
    else:
        try:
            Path(os.environ["SM_MODEL_DIR"], "../checkpoints/step-1.ckpt").write_text(str(step))
        except OSError as error:
            sys.exit(f"the checkpoint cannot be written: {error.strerror}")
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A rehearsal of jobs that hang after 8 s, with the program that counts in its S3."""
    folder = tmp_path_factory.mktemp("counting")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        program = tarfile.TarInfo("counts.py")
        program.size = len(COUNTS.encode())
        tar.addfile(program, io.BytesIO(COUNTS.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REHEARSAL_PYTHON", sys.executable)
        with Rehearsal(folder, "--engine=processes", "--hang-after=8", "--grace=3") as server:
            key = {"Bucket": "rehearsal", "Key": "sourcedir.tar.gz"}
            server.s3.put_object(**key, Body=archive.getvalue())
            yield server


def count(rehearsal: Rehearsal) -> str:
    """Return the name of a job of two hosts that counts."""
    source = "s3://rehearsal/sourcedir.tar.gz"
    name = rehearsal.create(
        "none",
        hosts=2,
        HyperParameters={"sagemaker_program": "counts.py", "sagemaker_submit_directory": source},
        CheckpointConfig={"S3Uri": "s3://rehearsal/counted"},
    )
    rehearsal.wait_for_line(name, "step=5")
    return name


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("cut network of algo-2", "hung"),
        ("fill disk of algo-2", "failed with a reason"),
        ("kill rank 0 of algo-1", "failed"),
    ],
)
def test_what_a_fault_by_hand_comes_to(counting, fault, verdict):
    name = count(counting)
    said = run_command(counting, "fault", name, fault)
    assert (said.returncode, said.stdout) == (0, f"{fault} in {name}\n")
    job = counting.wait_until_ended(name)
    assert job["TrainingJobStatus"] == "Failed"
    goodput = json.loads((counting.folder / name / "goodput.json").read_text())
    assert [each["failed"] for each in goodput["faults"]] == [""]
    assert goodput["verdict"].startswith(verdict), (goodput, job["FailureReason"])
    assert ("cannot be written: No space left" in job["FailureReason"]) == ("disk" in fault)


def test_a_slow_and_lossy_network_is_mended(counting):
    """The job continues: 0.3 s of each fault hang nobody."""
    name = count(counting)
    for kind in ("slow", "lossy"):
        run_command(counting, "fault", name, f"{kind} network of algo-1 for 0.3s")
    deadline = time.monotonic() + HANG_SECONDS
    while counting.output.count("network of algo-1") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    counting.sagemaker.stop_training_job(TrainingJobName=name)
    assert counting.wait_until_ended(name)["TrainingJobStatus"] == "Stopped"
    faults = json.loads((counting.folder / name / "goodput.json").read_text())["faults"]
    assert [(each["kind"], each["failed"]) for each in faults] == [
        ("slow network", ""),
        ("lossy network", ""),
    ]


# A training that leaves most of the processors to others, and does not end by itself.
LONG_TRAINING = CPU_HYPERPARAMETERS | {
    "model": "tests.support.foreign.Slow",
    "data": "tests.support.foreign.Data",
    "trainer.max_epochs": "1000",
    "progress.every_n_seconds": "1",
}


def test_a_stop_reaches_the_program(rehearsal):
    name = rehearsal.create("none", HyperParameters=LONG_TRAINING)
    rehearsal.wait_for_line(name, "step=")
    rehearsal.sagemaker.stop_training_job(TrainingJobName=name)
    assert rehearsal.wait_until_ended(name)["TrainingJobStatus"] == "Stopped"
    assert any("interrupted, resume from step" in line for line in rehearsal.lines(name)["algo-1"])


@pytest.mark.thorough  # the limit leaves the time for a start on a busy machine
def test_a_job_that_reaches_max_runtime_saves_and_continues(rehearsal):
    """As one that is stopped by hand."""
    fields = {
        "HyperParameters": LONG_TRAINING,
        "CheckpointConfig": {"S3Uri": "s3://rehearsal/checkpoints/runtime"},
        "Environment": {"OMP_NUM_THREADS": "1"},
    }
    limit = {"StoppingCondition": {"MaxRuntimeInSeconds": 90}}
    name = rehearsal.create("none", **fields, **limit)
    stopped = rehearsal.wait_until_ended(name)
    assert stopped["SecondaryStatus"] == "MaxRuntimeExceeded", rehearsal.lines(name)
    lines = "\n".join(rehearsal.lines(name)["algo-1"])
    step = re.search(r"interrupted, resume from step ([1-9]\d*): SIGTERM; \S+ is in S3", lines)
    assert step, lines
    again = rehearsal.create("none", **fields)
    rehearsal.wait_for_line(again, f"resuming from step {step[1]}: ")
    rehearsal.sagemaker.stop_training_job(TrainingJobName=again)
    rehearsal.wait_until_ended(again)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"EnableNetworkIsolation": True}, "EnableNetworkIsolation"),
        ({"script": "true"}, "ContainerEntrypoint"),
    ],
)
def test_what_needs_containers_is_refused(rehearsal, fields, refused):
    with pytest.raises(ClientError, match=refused):
        rehearsal.create("none", **fields)


@pytest.mark.parametrize("ended_by", ["its guard", "its guard without a folder", "the next one"])
def test_a_killed_rehearsal_leaves_nothing(rehearsal, tmp_path, ended_by):
    killed = Rehearsal(tmp_path, "--engine=processes")
    killed.start()
    killed.s3.create_bucket(Bucket="rehearsal")
    # A job's name may be that of one of the rehearsal's own files.
    killed.wait_for_line(killed.create("none", hosts=2, TrainingJobName="lock"), "", "algo-2")
    (owner,) = [path.parent.name for path in killed.cache.glob("*/*/lock")]
    assert f"rh{owner[:8]}-switch" in subprocess.check_output(["ip", "netns", "list"], text=True)
    if ended_by == "its guard without a folder":
        while killed.cache.exists():  # the hosts write while it goes
            shutil.rmtree(killed.cache, ignore_errors=True)
    killed.kill(guard=ended_by == "the next one")
    # Its hosts end with it (test_rehearsal_job.py), but not its networks. The command lines of its
    # jobs and of its guard have its folders in them.
    find_processes = ["pgrep", "--full", str(killed.cache)]
    if ended_by.startswith("its guard"):
        deadline = time.monotonic() + HANG_SECONDS
        while subprocess.run(find_processes, capture_output=True).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert killed.leftovers() == []
        assert [*killed.cache.glob(f"*/{owner}")] == []
    else:
        with Rehearsal(tmp_path, "--engine=processes") as following:
            assert "ended what a killed rehearsal had left" in following.output
            assert not subprocess.run(
                ["pgrep", "--full", f"{killed.cache}.*{owner}"], capture_output=True
            ).stdout
    namespaces = subprocess.check_output(["ip", "netns", "list"], text=True)
    assert owner[:8] not in namespaces


def test_the_jobs_environment_reaches_the_program_alone(tmp_path, monkeypatch):
    """Only the program gets the job's environment.

    A shell, a loader or Python would run code that some variables name; nothing before the program
    does.
    """
    trap_folder = tmp_path / "trap"
    root = tmp_path / "root"
    for folder in (trap_folder, root, tmp_path / "host/input/data/fast"):
        folder.mkdir(parents=True)
    (root / "entrypoint.sh").write_text(
        "[[ $1 == train && -z $(/bin/cat) ]] && exec /usr/bin/env --null\n"
    )
    sprung_file = tmp_path / "sprung"
    (trap_folder / "commands").write_text(f"echo $0 >>{sprung_file}\n")
    for name in ("unshare", "nsenter", "mount", "bash", "python", "python3", "env"):
        (trap_folder / name).write_text(f"#!/bin/sh\necho {name} >>{sprung_file}\n")
        (trap_folder / name).chmod(0o755)
    for name in ("json", "sitecustomize", "os"):
        (trap_folder / f"{name}.py").write_text(
            f"open({str(sprung_file)!r}, 'a').write({name!r})\n"
        )
    hostile = {
        "BASH_ENV": str(trap_folder / "commands"),
        "ENV": str(trap_folder / "commands"),
        "PATH": str(trap_folder),
        "PYTHONPATH": str(trap_folder),
        "PYTHONSTARTUP": str(trap_folder / "os.py"),
        "PYTHONHOME": str(trap_folder),
        "LD_LIBRARY_PATH": str(trap_folder),
        "LD_PRELOAD": "/no/such.so",
        "DOCKER_HOST": "tcp://evil.com",
        "UID": "0",
        "LINES_OF": "a\nb=c",
        "EMPTY": "",
    }
    monkeypatch.setattr(processes, "ENTRYPOINT", root / "entrypoint.sh")
    engine = processes.Processes(Path(sys.executable), "test", lambda number: None)
    network = engine.network("job", 1, False)
    try:
        process = network.start(
            "algo-1", 0, "", {}, Layout(tmp_path / "host", None), ["fast"], hostile
        )
        command_line_file = f"/proc/{process.outer.pid}/cmdline"
        assert "evil.com" not in Path(command_line_file).read_text()  # any user can read it
        output = "\n".join(process.lines())
        assert process.wait() == 0
    finally:
        network.close()
        bridge.remove("test")
    assert not sprung_file.exists()
    assert output.count("cannot be preloaded") == 3  # from the entry point's shell, cat and env
    variables = dict(
        entry.partition("=")[::2] for entry in output.rpartition("ignored.\n")[2].split("\0")
    )
    assert {name: variables[name] for name in hostile} == hostile
    assert variables["SAGEMAKER_BASE_DIR"] == str(tmp_path / "host")
