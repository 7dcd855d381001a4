"""The drill says that what is exact is, and of what is not where it differs first; it leaves nothing behind."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import warm
from containers import ROOT

pytestmark = pytest.mark.slow

FLAGS = ["--trainer.accelerator=cpu", "--progress.every_n_seconds=100", "--trainer.enable_model_summary=false"]


class Desk:
    """A folder of a user's, and one for temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder / "desk", folder / "tmp"
        self.folder.mkdir()
        self.temporary.mkdir()
        found = f"{ROOT}:{ROOT / 'tests'}"
        self.environment = os.environ | {"PYTHONPATH": found, "TMPDIR": str(self.temporary)}

    def drill(self, *words: str, **variables: str):
        """Drill, and return what `warm.run` does, when nothing is left in the folder for temporary files."""
        done = warm.run([sys.executable, "-m", "app.drill", *words], self.folder, self.environment | variables)
        assert not list(self.temporary.glob("drill-*")), done.stdout
        return done

    def train(self, model: str, data: str, *words: str, flags: Sequence[str] = ()):
        """Drill app/train.py with a model and data of tests/inexact.py."""
        given = [f"--model=inexact.{model}", f"--data=inexact.{data}", *FLAGS, *flags]
        return self.drill(*words, "--", "python", str(ROOT / "app/train.py"), *given)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


INEXACT = {
    "the system's random numbers": (
        "Model", "FromTheSystem", "kill-in-epoch",
        "DIFFERENT, first in the batch of step 1 (epoch 0, batch 0)", "two runs left alone differ, too",
    ),
    "a closure": (
        "Model", "Closure", "stop-in-epoch",
        "DIFFERENT, first in the batch of step 7 (epoch 1, batch 2)", "the samples or their order depend",
    ),
    "a variable of a module": (
        "Counting", "Data", "kill-at-epoch-end",
        "DIFFERENT, first in the loss of step 3 (epoch 0, batch 2): ", "something that the step depends on",
    ),
    "a rate that counts": (
        "Rate", "Data", "stop-at-epoch-end",
        "DIFFERENT, first in the learning rate of step 6 (epoch 1, batch 1): 0.001666", "the rate counts by itself",
    ),
    "a metric": (
        "Metric", "Data", "stop-in-validation",
        "metrics.epochs_seen in model.json: 3.0 left alone, 2.0 interrupted", "every step is the same",
    ),
    "a file of its own": (
        "Rows", "Data", "kill-in-epoch",
        "DIFFERENT, first in work/losses.csv, row 8: ", "does not go back to the checkpoint with the run",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "data", "only", "first", "cause"), INEXACT.values(), ids=INEXACT)
def test_what_is_not_exact_is_named(desk: Desk, model, data, only, first, cause):
    done = desk.train(model, data, f"--only={only}")
    assert done.returncode == 1, done.stdout
    assert first in done.stdout and cause in done.stdout.partition("likely cause: ")[2], done.stdout
    assert done.stdout.endswith(f"NOT identical: {only}\n")


WRONG = {
    "fails": ("Failing", [], "fails with exit status 1: error: RuntimeError: the third moon is in the wrong house"),
    "without checkpoints": (
        "Model", ["--trainer.enable_checkpointing=false"], "trains without checkpoints to go on from; leave out",
    ),
    "another folder": (
        "Model", ["--trainer.callbacks=inexact.Elsewhere", "--trainer.callbacks.dirpath=/home/me/checkpoints"],
        "Elsewhere: found dirpath=/home/me/checkpoints, to which a drill would write, too",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "flags", "why"), WRONG.values(), ids=WRONG)
def test_why_it_cannot_be_drilled_is_one_line(desk: Desk, model, flags, why):
    done = desk.train(model, "Data", flags=flags)
    *_, last = done.stdout.splitlines()
    assert done.returncode == 1 and last.startswith("error: the command") and why in last, done.stdout


def test_a_program_that_does_not_train_with_us(desk: Desk):
    (desk.folder / "hello.py").write_text("print('hello')\n")
    done = desk.drill("--", "python", "hello.py")
    assert done.returncode == 1 and "trained nothing by app/train.py" in done.stdout
    done = desk.drill("--", "./nowhere")
    assert done.returncode == 1 and "error: ./nowhere: cannot be started (No such file or directory)" in done.stdout


SIGNALS = {
    "hangs": ("Hanging", "stop-in-epoch", "HUNG: 30 s after SIGTERM it had not ended"),
    "goes on": ("Deaf", "stop-in-validation", "NOT STOPPED: in spite of SIGTERM it went on to its end"),
    "fails on resume": ("FailsOnResume", "kill-in-validation", "FAILS when it is started again, with exit status 1"),
}


@pytest.mark.parametrize(("model", "only", "verdict"), SIGNALS.values(), ids=SIGNALS)
def test_what_does_not_come_back_is_said(desk: Desk, model, only, verdict):
    done = desk.train(model, "Data", f"--only={only}", "--timeout=30")
    assert done.returncode == 1 and verdict in done.stdout, done.stdout
    assert done.stdout.endswith(f"NOT identical: {only}\n")


def test_what_is_exact_is_identical_and_nothing_of_the_users_is_touched(desk: Desk, tmp_path: Path):
    """A program of a user's own, who has a model and checkpoints already, and writes curves where he is."""
    job = {name: tmp_path / "ml" / name for name in ("model", "checkpoints", "logs")}
    for folder in job.values():
        folder.mkdir(parents=True)
        (folder / "mine").write_text("mine")
    (desk.folder / "logs").mkdir()
    (desk.folder / "logs/metrics.csv").write_text("mine")
    flags = ["--model=inexact.Model", "--data=inexact.Data", "--trainer.max_epochs=20", *FLAGS,
             "--logger.save_dir=logs", f"--checkpoint.dirpath={job['checkpoints']}",
             f"--resume.dirpath={job['checkpoints']}"]  # fmt: skip
    (desk.folder / "mine.py").write_text(f"from app import train\ntrain.main({flags!r})\n")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if desk.temporary not in path.parents}
    variables = {"SM_MODEL_DIR": str(job["model"]), "SM_CHECKPOINT_DIR": str(job["checkpoints"])}
    done = desk.drill("--", "python", "mine.py", **variables)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": identical, gone on with from step ") == 7
    assert done.stdout.splitlines()[-1].startswith("identical: 7 interruptions; ")
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if desk.temporary not in path.parents}
    assert {path for path in after if before.get(path) != after[path]} <= {
        desk.temporary
    } and after.keys() == before.keys()


SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}\\n")
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_by_hand_it_leaves_nothing(desk: Desk, tmp_path: Path, number):
    (desk.folder / "sleeper.py").write_text(SLEEPER)
    told = tmp_path / "told"
    line = [sys.executable, "-m", "app.drill", "--", "python", "sleeper.py", str(told)]
    process = warm.start(line, desk.folder, desk.environment)
    while not told.is_file() or not told.read_text().endswith("\n"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not any(psutil.pid_exists(int(pid)) for pid in told.read_text().split())
    assert not list(desk.temporary.iterdir())


def test_a_process_that_hangs_left_alone_is_ended(desk: Desk):
    (desk.folder / "sleeper.py").write_text(SLEEPER)
    done = desk.drill("--timeout=3", "--", "python", "sleeper.py", "told")
    assert done.returncode == 1 and "error: the command, left alone, had not ended after 3 s" in done.stdout


def test_a_mistake_in_the_flags_is_one_line(desk: Desk):
    done = desk.drill("--steps=0", "--", "python", "x.py")
    assert done.returncode == 2 and done.stdout.startswith("error: argument --steps: found '0', allowed is")
    done = desk.drill("python", "x.py")
    assert done.returncode == 2 and done.stdout.count("\n") == 1


def test_two_ranks_by_torchrun(desk: Desk):
    flags = ["--trainer.devices=2", "--model=inexact.Model", "--data=inexact.Data", *FLAGS]
    program = str(ROOT / "app/train_torchrun.py")
    done = desk.drill("--only=kill-in-epoch", "--only=stop-in-validation", "--", "python", program, *flags)
    assert done.returncode == 0, done.stdout
    assert "identical: 2 interruptions; " in done.stdout
