"""Runs that are killed at any moment end with the weights of an uninterrupted run."""

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import interruptible
import nightly
import psutil
import pytest
import torch
import warm
from containers import ROOT
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from terminal import Terminal

from sagemaker_lightning.contract.shutdown import handled_signals

pytestmark = pytest.mark.slow

FLAGS = [
    "--model=interruptible.Model",
    "--data=interruptible.Data",
    "--trainer.max_epochs=3",
    "--trainer.accelerator=cpu",
    "--trainer.log_every_n_steps=1",
    "--progress.every_n_seconds=100",
    "--model.sleep=0.02",
    "--model.val_sleep=0.04",
]
PROGRAM = ROOT / "tests/support/interruptible.py"
HANG_SECONDS = 90  # what takes longer hangs


class Run:
    """A job in a folder, started as often as needed."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder = folder
        self.flags = [*FLAGS, *flags]
        self.variables = {}
        folder.mkdir(exist_ok=True)

    def start(self, *flags: str, **variables: str):
        """Start the job, and return the process."""
        self.length_before = len(self.output)
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tests/support")}
        environment |= self.variables | variables
        log = os.open(self.folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            return warm.start(
                ["python", PROGRAM, *self.flags, *flags], self.folder, environment, log
            )
        finally:
            os.close(log)

    def finish(self, *flags: str, **variables: str) -> str:
        """Run the job to its end, which must be a success, and return its output."""
        process = self.start(*flags, **variables)
        process.wait(HANG_SECONDS)
        assert process.returncode == 0, self.output[self.length_before :][-3000:]
        return self.output[self.length_before :]

    def interrupt(self, number: int, is_time: Callable[[], bool]) -> int:
        """Start the job, send a signal when it is time, and return the exit status."""
        process = self.start()
        deadline = time.monotonic() + HANG_SECONDS
        while process.poll() is None and not is_time():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(number)
        process.wait(HANG_SECONDS)
        return process.returncode

    @property
    def output(self) -> str:
        """The output of all runs."""
        log = self.folder / "log"
        return log.read_text() if log.exists() else ""

    @property
    def steps(self) -> int:
        """The number of steps that all runs have recorded."""
        file = self.folder / "events-0.jsonl"
        return file.read_text().count('["step"') if file.exists() else 0

    @property
    def result(self) -> tuple[str, dict]:
        """The weights, and all records, each once."""
        return interruptible.weights(self.folder / "output/model/model.pt"), interruptible.events(
            self.folder
        )


EMA = ["--trainer.callbacks=interruptible.Average"]
# results/zoo.md has more.
CONFIGURATIONS = {
    "a step at a time": [],
    "two workers": ["--data.num_workers=2"],
    "accumulated gradients": ["--trainer.accumulate_grad_batches=2"],
    "a validation every seven batches": [
        "--trainer.val_check_interval=7",
        "--trainer.check_val_every_n_epoch=null",
    ],
}


@pytest.mark.parametrize("name", nightly.all_but(["two workers"], CONFIGURATIONS))
def test_any_moment_and_any_signal(tmp_path: Path, name):
    """Random ones: steps that were done twice have the same results.

    The job ends with the results of an uninterrupted run.
    """
    flags = CONFIGURATIONS[name]
    uninterrupted = Run(tmp_path / "whole", flags)
    run = Run(tmp_path / "run", flags)
    draw = random.Random(name)
    started = time.monotonic()
    uninterrupted.finish()
    seconds = time.monotonic() - started
    for _ in range(3):
        moment = time.monotonic() + draw.uniform(0.3, 0.9) * seconds
        number = draw.choice([signal.SIGKILL, *handled_signals()])
        status = run.interrupt(number, lambda moment=moment: time.monotonic() >= moment)
        assert status in (0, -number, 128 + number)
    run.finish()
    assert run.result == uninterrupted.result


@pytest.mark.skipif(signal.SIGHUP not in handled_signals(), reason="the tests run by nohup")
def test_a_terminal_that_is_closed_stops_the_training(tmp_path: Path, monkeypatch):
    """With a checkpoint, though nothing can be printed any more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests/support'}")
    terminal = Terminal(sys.executable, str(PROGRAM), *FLAGS, "--trainer.max_epochs=100")
    run = Run(tmp_path, [])
    deadline = time.monotonic() + HANG_SECONDS
    while run.steps < 3:
        assert terminal.read() and time.monotonic() < deadline, terminal.unread
    assert terminal.hang_up() == 129
    assert list(tmp_path.glob(f"output/data/checkpoints/step-{run.steps:09d}.ckpt"))


@pytest.mark.parametrize("number", nightly.all_but([signal.SIGTERM], handled_signals()))
def test_a_signal_loses_no_step(tmp_path: Path, number):
    run = Run(tmp_path / "run", ["--resume.every_n_minutes=0"])
    assert run.interrupt(number, lambda: run.steps >= 14) == 128 + number
    steps = run.steps
    line = f"interrupted, resume from step {steps}: {number.name}; "
    assert (
        line in run.output
        and f"checkpoints/step-{steps:09d}.ckpt is complete [host localhost, local rank 0]"
        in run.output
    )
    assert not (tmp_path / "run/output/model/model.pt").exists()
    assert (
        f"resuming from step {steps}: output/data/checkpoints/step-{steps:09d}.ckpt\n"
        in run.finish()
    )
    assert run.steps == 33


@pytest.mark.parametrize("target", ["torchrun", "a rank"])
def test_torchrun_by_hand_ends_as_its_ranks_do(tmp_path: Path, target):
    flags = [*FLAGS, "--trainer.devices=2", "--model.sleep=0.1", "--resume.every_n_minutes=0"]
    run = Run(tmp_path / "run", [])
    with (run.folder / "log").open("w") as log:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tests/support")}
        command = ["python", ROOT / "app/train_torchrun.py", *flags]
        process = warm.start(command, run.folder, environment, log.fileno())
    while run.steps < 3:
        assert process.poll() is None, run.output[-3000:]
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child.pid for child in children if "LOCAL_RANK" in warm.environ(child.pid)]
    launchers = {warm.environ(pid).get("SAGEMAKER_LIGHTNING_LAUNCHER") for pid in ranks}
    assert launchers == {str(process.pid)}  # so the ranks end if torchrun is killed
    os.kill(process.pid if target == "torchrun" else ranks[-1], signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 143, run.output[-3000:]
    assert ("\ntorchrun: " in run.output) == (target == "torchrun")
    assert (
        f"interrupted, resume from step {run.steps}: SIGTERM; " in run.output
        and "Traceback" not in run.output
    )


def test_a_second_signal_does_no_harm(tmp_path: Path):
    run = Run(tmp_path / "run", ["--model.sleep=0.5"])
    process = run.start()
    while run.steps < 2:
        time.sleep(0.01)
    while process.poll() is None:
        process.terminate()
        time.sleep(0.02)
    assert process.returncode == 143 and "interrupted, resume from step" in run.output


@pytest.mark.parametrize(
    ("hook", "flag"),
    [
        ("prepare_data", "--data.slow=prepare_data"),
        ("setup", "--data.slow=setup"),
        ("sanity check", "--model.val_sleep=30"),
    ],
)
def test_before_the_first_step_it_leaves_at_once(tmp_path: Path, hook, flag):
    run = Run(tmp_path / "run", [flag])
    assert run.interrupt(signal.SIGTERM, lambda: f"IN {hook}" in run.output) == 143
    assert (
        "interrupted, resume from step 0: SIGTERM; it came while nothing was being trained"
        in run.output
    )
    assert run.steps == 0


def points(folder: Path) -> list[tuple]:
    """Return the values in TensorBoard's files, however many they are: (tag, step, value).

    The machine's own metrics are left out: they are taken once a minute, whatever the run does.
    """
    values_found = []
    for file in sorted(folder.rglob("events.*")):
        for event in EventFileLoader(str(file)).Load():
            values = [value for value in event.summary.value if not value.tag.startswith("system/")]
            values_found += [(value.tag, event.step, value.tensor.float_val[:]) for value in values]
    return values_found


def test_one_continuous_curve(tmp_path: Path):
    uninterrupted, run = (
        Run(tmp_path / name, ["--logger.flush_secs=1"]) for name in ("whole", "run")
    )
    uninterrupted.finish()
    # What was logged since the epoch's end is logged again.
    run.interrupt(signal.SIGKILL, lambda: run.steps >= 16)
    run.interrupt(signal.SIGTERM, lambda: run.steps >= 24)
    run.finish()
    board = "output/data/tensorboard/localhost/lightning_logs"
    expected, actual = (
        sorted(map(str, points(job.folder / board))) for job in (uninterrupted, run)
    )
    assert actual == expected
    assert [path.name for path in (tmp_path / "run" / board).iterdir()] == ["version_0"]


def test_a_folder_that_has_moved_still_has_the_best_model(tmp_path: Path):
    # The first checkpoint is the best one, as the loss goes down.
    flags = ["--checkpoint.monitor=val_loss", "--checkpoint.mode=max"]
    places = [
        [f"--{section}.dirpath={tmp_path / name}" for section in ("checkpoint", "resume")]
        for name in ("a", "b")
    ]
    uninterrupted = Run(tmp_path / "whole", flags)
    run = Run(tmp_path / "run", [*flags, *places[0]])
    uninterrupted.finish()
    assert list((tmp_path / "whole").rglob("best-epoch=0-*.ckpt"))
    run.interrupt(signal.SIGTERM, lambda: run.steps >= uninterrupted.steps / 2)
    (tmp_path / "a").rename(tmp_path / "b")
    output = run.finish(*places[1])
    assert "resuming from step" in output
    assert not re.search("^warning: (?!events-0.jsonl is appended to)", output, re.MULTILINE)
    assert run.result == uninterrupted.result


def test_a_job_that_is_done_only_writes_its_model_again(tmp_path: Path):
    run = Run(tmp_path / "run", [*EMA, "--checkpoint.monitor=null", "--checkpoint.filename=null"])
    run.finish()
    result = run.result
    steps = run.steps
    described = (tmp_path / "run/output/model/model.json").read_text()
    for path in (tmp_path / "run/output/model").iterdir():
        path.unlink()
    assert "nothing is left to train: step 33 was the last one; to train again" in run.finish()
    assert run.result == result and run.steps == steps
    assert (tmp_path / "run/output/model/model.json").read_text() == described
    later_output = run.finish("--trainer.max_epochs=4")  # and more epochs are welcome
    assert "resuming from step 33" in later_output and run.steps == steps + 11
    five = Run(tmp_path / "four", [*run.flags[len(FLAGS) :], "--trainer.max_epochs=4"])
    five.finish()
    assert five.result == run.result


def test_a_checkpoint_of_another_run_is_an_error_that_names_what_differs(tmp_path: Path):
    run = Run(tmp_path / "run", ["--trainer.max_epochs=1"])
    run.finish()
    checkpoints = {path: path.read_bytes() for path in (tmp_path / "run/output").rglob("*.ckpt")}
    for flag, says in {
        "--model.schedule=none": "--model.schedule was onecycle, is none",
        "--data.batch_size=5": "--data.batch_size was 4, is 5",
        "--model=interruptible.Wider": "the model's network.0.weight was [16, 6], is [20, 6]",
    }.items():
        process = run.start(flag)
        process.wait(HANG_SECONDS)
        output = run.output[run.length_before :]
        assert process.returncode == 1 and "Traceback" not in output
        assert (
            "error: --resume.dirpath=output/data/checkpoints: "
            "step-000000011.ckpt is of another run: "
        ) in output
        assert says in output
    assert checkpoints == {
        path: path.read_bytes() for path in (tmp_path / "run/output").rglob("*.ckpt")
    }
    run.finish(
        "--logger.name=other", "--trainer.max_epochs=2", "--data.num_workers=2", "--resume.keep=1"
    )


def test_a_checkpoint_is_lightnings_too(tmp_path: Path):
    """People who know Lightning find what they expect."""
    run = Run(tmp_path / "run", ["--trainer.max_epochs=1"])
    run.finish()
    (last,) = (tmp_path / "run/output/data/checkpoints").glob("step-*.ckpt")
    state = torch.load(last, weights_only=True)
    assert (
        state["global_step"] == 11 and state["epoch"] == 1 and "pytorch-lightning_version" in state
    )
    from pytorch_lightning import Trainer

    model = interruptible.Model()
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    model.note = lambda *_: None
    trainer = Trainer(
        max_epochs=2, enable_progress_bar=False, enable_model_summary=False, **options
    )
    trainer.fit(model, interruptible.Data(), ckpt_path=last)
    assert trainer.global_step == 22 and trainer.current_epoch == 2
