"""Runs that are killed at any moment end with the weights of an uninterrupted run."""

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import interruptible
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
EARLY_STOPPING = [
    "--trainer.callbacks=EarlyStopping",
    "--trainer.callbacks.monitor=val_loss",
    "--trainer.callbacks.patience=1",
]
CONFIGURATIONS = {
    "a step at a time": [],
    "two workers": ["--data.num_workers=2"],
    "a worker that stays": [
        "--data.num_workers=1",
        "--data.persistent=true",
        "--model.schedule=step",
    ],
    "accumulated gradients": ["--trainer.accumulate_grad_batches=2"],
    "two validations an epoch": ["--trainer.val_check_interval=0.5"],
    "a validation every seven batches": [
        "--trainer.val_check_interval=7",
        "--trainer.check_val_every_n_epoch=null",
    ],
    "a plateau": ["--model.schedule=plateau", "--trainer.max_epochs=4"],
    "an average of the weights": EMA,
    "mixed precision": ["--trainer.precision=bf16-mixed", "--trainer.deterministic=true"],
    "a rate for each step": [
        "--optimizer=SGD",
        "--optimizer.lr=0.1",
        "--lr_scheduler=sagemaker_lightning.Triangle",
    ],
    "early stopping": [*EARLY_STOPPING, "--trainer.max_epochs=12", "--resume.every_n_steps=3"],
}


# Each of the others is one of the zoo's configurations, too (results/zoo.md).
ALWAYS_RUN = (
    "a step at a time",
    "two workers",
    "accumulated gradients",
    "a validation every seven batches",
)


@pytest.mark.parametrize(
    ("seed", "flags"),
    [
        pytest.param(
            seed,
            CONFIGURATIONS[name],
            marks=() if name in ALWAYS_RUN else pytest.mark.soak,
            id=name,
        )
        for seed, name in enumerate(CONFIGURATIONS)
    ],
)
def test_any_moment_and_any_signal(tmp_path: Path, seed: int, flags):
    """Random ones: steps that were done twice have the same results.

    The job ends with the results of an uninterrupted run.
    """
    uninterrupted = Run(tmp_path / "whole", flags)
    run = Run(tmp_path / "run", flags)
    draw = random.Random(seed)
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


@pytest.mark.parametrize("number", handled_signals())
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


def test_within_a_validation_the_whole_of_it_is_run_again(tmp_path: Path):
    flags = [*EMA, "--model.val_sleep=0.4", "--trainer.max_epochs=2"]
    flags.append("--trainer.num_sanity_val_steps=0")
    uninterrupted = Run(tmp_path / "whole", flags)
    run = Run(tmp_path / "run", flags)
    uninterrupted.finish()
    validation_started = []

    def in_validation() -> bool:
        if run.steps >= 11 and not validation_started:
            validation_started.append(time.monotonic())
        return (
            bool(validation_started) and time.monotonic() > validation_started[0] + 0.9
        )  # of its 2 seconds

    assert run.interrupt(signal.SIGTERM, in_validation) == 143
    assert "interrupted, resume from step 11: SIGTERM" in run.output
    assert '"val", 0' not in (tmp_path / "run/events-0.jsonl").read_text()
    run.finish()
    assert run.result == uninterrupted.result


def test_the_number_of_workers_changes_nothing(tmp_path: Path):
    runs = [Run(tmp_path / str(number), [f"--data.num_workers={number}"]) for number in (0, 2)]
    for run in runs:
        run.finish()
    assert runs[0].result == runs[1].result


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


@pytest.mark.thorough  # in a folder, above; live on S3: test_live_outputs.py
def test_one_continuous_curve_on_s3(bucket, tmp_path: Path):
    """A server that speaks S3's protocol: moto's."""
    flags = ["--logger.flush_secs=1"]
    runs = []
    for name in ("whole", "run"):
        runs.append(Run(tmp_path / name, [*flags, f"--logger.save_dir={bucket.uri(name)}"]))
        runs[-1].variables = bucket.variables
    runs[0].finish()
    runs[1].interrupt(signal.SIGKILL, lambda: runs[1].steps >= 16)
    runs[1].interrupt(signal.SIGTERM, lambda: runs[1].steps >= 24)
    runs[1].finish()
    curves = []
    for name in ("whole", "run"):
        for key in filter(lambda key: "tfevents" in key, bucket.keys(name)):
            bucket.download(key, tmp_path / "downloaded" / key)
        curves.append(sorted(map(str, points(tmp_path / "downloaded" / name / "lightning_logs"))))
        assert len(list((tmp_path / "downloaded" / name / "lightning_logs").iterdir())) == 1
    assert curves[0] and curves[0] == curves[1]


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


def flip(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("mode", "lose", "problem"),
    [
        ("max", Path.unlink, "is missing"),  # of the first epoch
        ("min", flip, "is damaged: its checksum does not match"),  # of the last
    ],
)
def test_a_best_model_that_was_not_copied_yet_or_is_damaged(tmp_path: Path, mode, lose, problem):
    """It continues from a checkpoint that does not tell of it, and makes it again."""
    flags = [
        "--checkpoint.monitor=val_loss",
        f"--checkpoint.mode={mode}",
        "--resume.every_n_steps=4",
        "--resume.keep=50",
    ]
    uninterrupted = Run(tmp_path / "whole", flags)
    run = Run(tmp_path / "run", flags)
    uninterrupted.finish()
    run.interrupt(signal.SIGKILL, lambda: run.steps >= uninterrupted.steps * 0.9)
    copies = {path.name: path for path in (tmp_path / "run").rglob("best-*.ckpt")}
    newest = max(copies)  # best-epoch=N-...
    lose(copies[newest])
    assert newest.startswith("best-epoch=0" if mode == "max" else "best-epoch=1")
    output = run.finish()
    assert (
        f"refers to {newest}, the best model, which {problem}; it is skipped" in output
        and "resuming from" in output
    )
    assert run.result == uninterrupted.result
    assert len(list((tmp_path / "run").rglob("best-*.ckpt"))) == 1


def test_a_damaged_best_model_that_cannot_be_made_again_is_not_used(tmp_path: Path):
    """The last one is written, which the log and model.json say."""
    run = Run(
        tmp_path / "run",
        ["--checkpoint.monitor=val_loss", "--checkpoint.mode=max", "--resume.keep=1"],
    )
    run.finish()
    described = json.loads((tmp_path / "run/output/model/model.json").read_text())
    (best,) = (tmp_path / "run").rglob("best-*.ckpt")
    assert described["best_model"] == best.name and best.name.startswith("best-epoch=0")
    flip(best)
    output = run.finish()
    assert (
        f"warning: {best}, the best model, is damaged: its checksum does not match; "
        "the last one is written"
    ) in output
    assert json.loads((tmp_path / "run/output/model/model.json").read_text())["best_model"] is None
    last = max((tmp_path / "run/output/data/checkpoints").glob("step-*.ckpt"))
    last_weights = torch.load(last, weights_only=True)["state_dict"]
    model = torch.load(tmp_path / "run/output/model/model.pt", weights_only=True)
    assert all(torch.equal(model[name], last_weights[f"network.{name}"]) for name in model)


def test_a_job_that_is_done_only_writes_its_model_again(tmp_path: Path):
    run = Run(tmp_path / "run", [*EMA, "--checkpoint.monitor=null", "--checkpoint.filename=null"])
    run.finish()
    result = run.result
    steps = run.steps
    described = (tmp_path / "run/output/model/model.json").read_text()
    for path in (tmp_path / "run/output/model").iterdir():
        path.unlink()
    assert "nothing is left to train: step 33 was the last one; to train anew, move" in run.finish()
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


def test_damaged_checkpoints_are_skipped_or_an_error(tmp_path: Path):
    uninterrupted = Run(tmp_path / "whole", [])
    run = Run(tmp_path / "run", ["--resume.every_n_steps=5"])
    uninterrupted.finish()
    run.interrupt(signal.SIGTERM, lambda: run.steps >= 18)
    files = sorted((tmp_path / "run/output/data/checkpoints").glob("step-*.ckpt"))
    assert len(files) == 3
    flip(files[-1])
    output = run.finish()
    assert f"{files[-1].name} is damaged: its checksum does not match; it is skipped" in output
    assert f"resuming from step {int(files[-2].name[5:14])}" in output
    assert run.result == uninterrupted.result
    for path in (tmp_path / "run/output/data/checkpoints").glob("*.ckpt"):
        path.write_bytes(b"nothing")
    process = run.start()
    process.wait(HANG_SECONDS)
    assert process.returncode == 1
    assert (
        "error: --resume.dirpath=output/data/checkpoints: found checkpoints, but none that every "
        "host has intact" in run.output
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


def test_what_could_not_be_read_again_is_said_at_the_first_checkpoint(tmp_path: Path):
    run = Run(tmp_path / "run", ["--model=interruptible.Unreadable"])
    process = run.start()
    process.wait(HANG_SECONDS)
    assert process.returncode == 1 and run.steps == 11  # an epoch, with which it is saved
    assert (
        "error: a checkpoint of this run could not be read again: "
        "thing is a builtins.object (on_save"
    ) in run.output


def test_a_full_disk_costs_no_training(tmp_path: Path):
    """A limit on files' sizes stands for the full disk; the best model's file fails, too."""
    uninterrupted = Run(tmp_path / "whole", ["--checkpoint.monitor=val_loss"])
    uninterrupted.finish()
    run = Run(tmp_path / "run", ["--checkpoint.monitor=val_loss"])
    assert run.interrupt(signal.SIGTERM, lambda: run.steps >= 14) == 143
    output = run.finish(LIMIT_FILES="7000")
    assert "warning: training continues, but no checkpoint could be written" in output
    assert "warning: the training is done, and no checkpoint could be written" in output
    assert run.result[1] == uninterrupted.result[1]
    assert (
        "best-epoch=1-step=22.ckpt could not be written (File too large); the best model is still "
        in output
    )
    best = torch.load(
        tmp_path / "run/output/data/checkpoints/best-epoch=0-step=11.ckpt", weights_only=True
    )
    model = torch.load(tmp_path / "run/output/model/model.pt", weights_only=True)
    assert all(torch.equal(model[name], best["state_dict"][f"network.{name}"]) for name in model)
