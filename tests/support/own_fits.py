"""Small trainings with ExactResume in the tests' own process."""

import os
import re
import signal
from pathlib import Path

import pytorch_lightning as pl
import warm
from containers import ROOT
from own_trainer import Classifier

from sagemaker_lightning import (
    ExactResume,
)
from sagemaker_lightning.resume.parts.roots import user_objects
from sagemaker_lightning.state import object_graph

PROGRAM = ROOT / "tests/support/own_trainer.py"
HANG_SECONDS = 90  # what takes longer hangs


def run(folder: Path, case: str, program: Path = PROGRAM, **variables: str) -> tuple[int, str]:
    """Run a case in a folder; return its exit status and its output."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"} | variables
    completed = warm.run(["python", program, case], folder, environment, HANG_SECONDS)
    return completed.returncode, completed.stdout


def results(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if re.match("(WEIGHTS|BEST|LR|SIZE) ", line)]
    assert lines, output[-3000:]
    return lines


def check(
    folder: Path, case: str, *interruptions: dict[str, str], program: Path = PROGRAM
) -> list[str]:
    """Compare a run left alone with an interrupted one.

    It returns the output of each run of the interrupted one.
    """
    status, expected = run(folder / "alone", case, program)
    assert status == 0, expected[-3000:]
    outputs = []
    for variables in interruptions:
        status, output = run(folder / "run", case, program, **variables)
        assert status == (143 if "STOP_AT" in variables else -9), output[-3000:]
        outputs.append(output)
    status, output = run(folder / "run", case, program)
    assert status == 0, output[-3000:]
    assert results(output) == results(expected)
    assert "warning: resumed" not in output
    return [*outputs, output]


def short_trainer(folder: Path, *callbacks, **options) -> pl.Trainer:
    settings = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
    }
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "devices": 1}
    resume = ExactResume(folder, seed=1, every_n_minutes=0)
    return pl.Trainer(**settings | {"callbacks": [*callbacks, resume]} | options)


class PressCtrlC(pl.Callback):
    """Presses Ctrl-C at a batch, so many times."""

    def __init__(self, times: int, batch: int = 3) -> None:
        self.times = times
        self.batch = batch
        self.ran = -1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.ran = batch_idx
        if batch_idx == self.batch and trainer.current_epoch == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


class Untested(Classifier):
    """Without a validation: its sanity check would make the progress bar."""

    val_dataloader = validation_step = None


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.ckpt"))


class StopsAt(pl.Callback):
    """Presses Ctrl-C at a batch of an epoch."""

    def __init__(self, epoch: int, batch: int) -> None:
        self.at = epoch, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            os.kill(os.getpid(), signal.SIGINT)


class Sees(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        objects = user_objects(trainer)
        self.added = {
            name: object_graph.attributes(object_)
            for name, object_ in objects.items()
            if isinstance(object_, object_graph.Added)
        }


class Stops(pl.Callback):
    """Presses Ctrl-C at an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


BLOCKS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/your-own-trainer.md").read_text(), re.DOTALL
)
