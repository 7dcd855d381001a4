"""The drill says which runs are identical, and where others differ first.

It leaves nothing behind.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aws_services
import nightly
import psutil
import pytest
import warm
from containers import ROOT

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/drill.md").read_text()
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# test_container.py runs the other command.
COMMANDS = re.findall(r"^```sh\n(\.venv.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
OUTPUT = re.search(r"^```\n(drill: .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
FLAGS = [
    "--trainer.accelerator=cpu",
    "--progress.every_n_seconds=100",
    "--trainer.enable_model_summary=false",
]


class Desk:
    """A user's folder, and one for temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "desk"
        self.temporary = folder / "tmp"
        self.folder.mkdir()
        self.temporary.mkdir()
        python_path = f"{ROOT}:{ROOT / 'tests/support'}"
        self.environment = os.environ | {"PYTHONPATH": python_path, "TMPDIR": str(self.temporary)}

    def drill(self, *arguments: str, **variables: str):
        """Drill, and return `warm.run`'s result.

        Nothing may be left in the folder for temporary files.
        """
        completed = warm.run(
            [sys.executable, "-m", "sagemaker_lightning.drill", *arguments],
            self.folder,
            self.environment | variables,
        )
        assert not list(self.temporary.glob("drill-*")), completed.stdout
        return completed

    def train(self, model: str, data: str, *drill_flags: str, flags: Sequence[str] = ()):
        """Drill app/train.py with a model and data of inexact.py."""
        program_flags = [f"--model=inexact.{model}", f"--data=inexact.{data}", *FLAGS, *flags]
        return self.drill(*drill_flags, "--", "python", str(ROOT / "app/train.py"), *program_flags)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


INEXACT = {
    "the system's random numbers": (
        "Model",
        "FromTheSystem",
        "kill-in-epoch",
        "DIFFERENT, first in the batch of step 1 (epoch 0, batch 0)",
        "two runs left alone differ, too",
    ),
    "a variable of a module, in a batch": (
        "Model",
        "Joined",
        "stop-in-epoch",
        "DIFFERENT, first in the batch of step 7 (epoch 1, batch 2)",
        "inexact.CALLS, which changes while the run trains, and which no checkpoint has; "
        "make a sample a function",
    ),
    "a variable of a module": (
        "Counting",
        "Data",
        "kill-at-epoch-end",
        "DIFFERENT, first in the loss of step 3 (epoch 0, batch 2): ",
        "inexact.CALLS, which changes while the run trains, and which no checkpoint has; "
        "keep it in buffers",
    ),
    "a rate that counts": (
        "Rate",
        "Data",
        "stop-at-epoch-end",
        "DIFFERENT, first in the learning rate of step 6 (epoch 1, batch 1): 0.001666",
        "calls, which changes while the run trains, and which no checkpoint has; "
        "return it from configure_optimizers",
    ),
    "a metric": (
        "Metric",
        "Data",
        "stop-in-validation",
        "metrics.epochs_seen in model.json: 3.0 left alone, 2.0 interrupted",
        "inexact.CALLS, which changes",
    ),
    "a file that is read": (
        "ReadsItsFile",
        "Data",
        "kill-in-epoch",
        "DIFFERENT, first in the loss of step 7 (epoch 1, batch 2): ",
        "something that the step depends on",
    ),
    "a file of its own": (
        "Rows",
        "Data",
        "kill-in-epoch",
        "DIFFERENT, first in work/losses.csv, row 8: ",
        "does not return to the checkpoint with the run",
    ),
}


@pytest.mark.parametrize(
    "kind", nightly.all_but(["a variable of a module, in a batch", "a metric"], INEXACT)
)
def test_what_is_not_exact_is_named(desk: Desk, kind):
    model, data, only, first_difference, cause = INEXACT[kind]
    completed = desk.train(model, data, f"--only={only}")
    assert completed.returncode == 1, completed.stdout
    assert (
        first_difference in completed.stdout
        and cause in completed.stdout.partition("likely cause: ")[2]
    ), completed.stdout
    assert completed.stdout.endswith(f"NOT identical: {only}\n")


OWN_TRAINER = """
import sys
from queue import Queue

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning import ExactResume, report_failures

calls = Queue()  # no checkpoint has a library's object


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if "counts" in sys.argv:
            calls.put(0)
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[0] + calls.qsize())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


with report_failures():
    resume = ExactResume("/home/me/checkpoints", seed=1)
    model = Model()
    data = TensorDataset(torch.linspace(0, 1, 40)[:, None])
    for _ in range(1 + ("twice" in sys.argv)):
        trainer = L.Trainer(max_epochs=9, callbacks=[resume], accelerator="cpu")
        trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
"""
OWN_TRAINERS = {
    "identical": ([], 0, "identical: 1 interruption; weights, optimizers, metrics, curves, "),
    "a variable of the script": (["counts"], 1, "likely cause: __main__.calls, which changes"),
    "two trainings": (["twice"], 1, "a drill compares one training: found a second one"),
}


@pytest.mark.parametrize(
    ("arguments", "status", "message"), OWN_TRAINERS.values(), ids=OWN_TRAINERS
)
def test_a_script_with_a_trainer_of_its_own(desk: Desk, arguments, status, message):
    (desk.folder / "mine.py").write_text(OWN_TRAINER)
    completed = desk.drill("--only=kill-in-epoch", "--", "python", "mine.py", *arguments)
    assert completed.returncode == status and message in completed.stdout, completed.stdout


@pytest.mark.thorough
def test_the_page_drills_a_program_of_a_users_own(desk: Desk):
    """docs/drill.md: its program, its command, and its output, except the seconds."""
    (desk.folder / "my_train.py").write_text(PROGRAM)
    command = shlex.split(COMMANDS[0])
    assert command.pop(0) == ".venv/bin/python"
    completed = warm.run([sys.executable, *command], desk.folder, desk.environment)
    output = re.sub(r"epochs, \d+ s", "epochs, 6 s", completed.stdout)
    assert completed.returncode == 0 and output == OUTPUT, completed.stdout


def test_nothing_of_the_users_is_touched(desk: Desk, tmp_path: Path):
    """A user has a model, checkpoints and logs already.

    The environment or the flags say where they are.
    """
    job = {name: tmp_path / "ml" / name for name in ("model", "checkpoints", "logs")}
    for folder in (*job.values(), desk.folder / "logs"):
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("mine")
    flags = [
        "--model=inexact.Rows",
        "--data=inexact.Data",
        *FLAGS,
        f"--logger.save_dir={job['logs']}",
        f"--checkpoint.dirpath={job['checkpoints']}",
        f"--resume.dirpath={job['checkpoints']}",
        "--trainer.logger=CSVLogger",
        "--trainer.logger.save_dir=logs",
        "--trainer.callbacks=ModelCheckpoint",
        "--trainer.callbacks.dirpath=logs",
    ]
    files_before = files(tmp_path)
    variables = {"SM_MODEL_DIR": str(job["model"]), "SM_CHECKPOINT_DIR": str(job["checkpoints"])}
    program = str(ROOT / "app/train.py")
    completed = desk.drill(
        "--only=stop-in-epoch", "--only=workers", "--", "python", program, *flags, **variables
    )
    assert (
        completed.returncode == 0
        and "continue with 2 data workers in place of 0: identical" in completed.stdout
    ), completed.stdout
    assert files(tmp_path) == files_before


def files(folder: Path) -> dict[Path, int]:
    """Return the files and folders below a folder, with the time of their last change in ns.

    The folder for temporary files is left out.
    """
    return {
        path: path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if "tmp" not in path.relative_to(folder).parts
    }


def test_the_page_drills_before_it_launches(tmp_path: Path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$@" >>record\n')
    (tmp_path / "docker").chmod(0o755)
    command = COMMANDS[1].replace(".venv/bin/python scripts", f"{sys.executable} {ROOT}/scripts")
    variables = aws_services.variables(
        None, AWS_REGION="us-east-1", DOCKER=str(tmp_path / "docker")
    )
    completed = subprocess.run(
        ["bash", "-ec", command], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["HyperParameters"] == {"trainer.max_epochs": "20"}
    assert "python -m sagemaker_lightning.drill -- train" in completed.stderr


SLEEPER = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
child = subprocess.Popen(sleep, start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}\\n")
time.sleep(1000)
"""


def runs(pid: int) -> bool:
    """Return whether a process runs, and has not only left its exit status."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_by_hand_it_leaves_nothing(desk: Desk, tmp_path: Path, number):
    (desk.folder / "sleeper.py").write_text(SLEEPER)
    pids_file = tmp_path / "pids"
    command = [
        sys.executable,
        "-m",
        "sagemaker_lightning.drill",
        "--",
        "python",
        "sleeper.py",
        str(pids_file),
    ]
    process = warm.start(command, desk.folder, desk.environment)
    while not pids_file.is_file() or not pids_file.read_text().endswith("\n"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not any(runs(int(pid)) for pid in pids_file.read_text().split())
    assert not list(desk.temporary.iterdir())


@pytest.mark.thorough  # one rank is above
@pytest.mark.parametrize(
    "launcher",
    [
        ["python", str(ROOT / "app/train_torchrun.py"), "--trainer.devices=2"],
        pytest.param(
            [
                str(Path(sys.executable).with_name("torchrun")),
                "--nproc-per-node=2",
                str(ROOT / "app/train.py"),
            ],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["ours", "torch's"],
)
def test_two_ranks_by_torchrun(desk: Desk, launcher):
    flags = ["--model=inexact.Model", "--data=inexact.Data", *FLAGS]
    completed = desk.drill(
        "--only=kill-in-epoch", "--only=stop-in-validation", "--", *launcher, *flags
    )
    assert completed.returncode == 0, completed.stdout
    assert "identical: 2 interruptions; " in completed.stdout
