"""The examples that are one short script each: run, killed, and run again to the same end."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from environments import python_of
from rehearsals import ROLE, Rehearsal

SHORT = ("own_trainer", "partial_weights", "spot_two_hosts")


def start(name: str, folder: Path, *arguments: str) -> subprocess.Popen:
    """Start an example in a folder of its own."""
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, ROOT / f"examples/{name}.py", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("own_trainer", ("--epochs=2",)),
        (
            "partial_weights",
            ("--trainer.max_epochs=3", "--trainer.accelerator=cpu", "--resume.every_n_steps=10"),
        ),
    ],
)
def test_a_killed_example_ends_with_the_weights_of_one_left_alone(
    tmp_path: Path, name: str, arguments: tuple[str, ...]
):
    weights = []
    for killed in (False, True):
        folder = tmp_path / str(killed)
        process = start(name, folder, *arguments)
        if killed:
            while not list(folder.glob("output/data/checkpoints/step-*.ckpt")):
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            process = start(name, folder, *arguments)
        log = (folder / "log").read_text() if process.wait(120) else ""
        assert not log
        weights.append(torch.load(folder / "output/model/model.pt", weights_only=True))
    assert re.search(r"^resumed at step \d+: the ", (folder / "log").read_text(), re.MULTILINE)
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert name != "partial_weights" or all("adapter" in key for key in weights[0])


@pytest.mark.thorough
@pytest.mark.slow
def test_the_example_of_a_spot_job_is_interrupted_and_ends(tmp_path: Path):
    rules = "--interrupt=at step 8 gap 1s"
    with Rehearsal(tmp_path, "--engine=processes", rules) as server:
        key, secret = server.key
        run = subprocess.run(
            [
                python_of("rehearsal"),
                ROOT / "examples/spot_two_hosts.py",
                "--image=sagemaker-lightning",
                f"--role={ROLE}",
                "--bucket=rehearsal",
                "--epochs=2",
                "--seconds=0.2",
            ],
            env=os.environ
            | {
                "AWS_ENDPOINT_URL": server.endpoint,
                "AWS_ACCESS_KEY_ID": key,
                "AWS_SECRET_ACCESS_KEY": secret,
                "AWS_DEFAULT_REGION": "us-east-1",
            },
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr + server.output[-3000:]
    said = re.findall(r"^digits-\S+: (\w+)$", run.stdout, re.MULTILINE)
    assert said.count("Training") == 2 and "Interrupted" in said and said[-1] == "Completed"
    assert "val_acc" in run.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", SHORT)
def test_an_example_is_short(name: str):
    assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) < 80
