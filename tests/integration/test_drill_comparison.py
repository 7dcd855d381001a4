"""The parts of drill/command.py that need no training.

They are the list of interruptions, the working folder, the processes, the comparison and the words.
"""

import argparse
import contextlib
import fractions
import functools
import importlib.metadata
import itertools
import json
import os
import signal
import sys
import types
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import records
import torch
import torchmetrics
from containers import ROOT
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import MLFlowLogger, WandbLogger
from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from sagemaker_lightning.contract.deadlines import SAGEMAKER_KILLS
from sagemaker_lightning.contract.environment import DRILL_VARIABLE, SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.drill import command, comparison, drilled_run, hook
from sagemaker_lightning.drill.command import Drill, Impossible, Interruption, RunResult
from sagemaker_lightning.resume.callback import ExactResume
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.state import module_variables


def run_of(folder: Path, **changes) -> Path:
    """Write the files of a run, and return their folder.

    `changes` may change a step's batch, learning rate or loss, a weight, a metric, a curve's value,
    a row, and more.
    """
    values = {
        "batch": "aa",
        "rates": [0.1],
        "loss": 0.5,
        "weight": 1.0,
        "metric": 0.25,
        "curve": 2.0,
        "row": "3",
        "moment": 1,
        "steps": 2,
        "place": 8,
        "starts": [0],
        "changed": [],
        "files": 0,
    } | changes
    model = folder / "ml/model"
    logs = folder / "ml/checkpoints/tensorboard"
    model.mkdir(parents=True)
    (folder / "work").mkdir()
    state = {"w": torch.tensor([0.0, values["weight"]])}
    own_state = {
        "number": values["moment"],
        "journal": values["moment"],
        "resumes": [values["moment"]],
        "step": 2,
        "parts": {
            "model_files": [values["moment"]],
            "data_epoch": {"made": values["moment"], "objects_before": None},
        },
        "ranks": [
            {
                "loader_positions": {
                    "loaders": [
                        {
                            "begun": values["moment"],
                            "workers": values["moment"],
                            "place": values["place"],
                        }
                    ]
                }
            }
        ],
    }
    checkpoint = {
        "state_dict": state,
        "callbacks": {"Timer": {"time_elapsed": values["moment"]}},
        checkpoint_file.ENTRIES_KEY: own_state,
    }
    checkpoint_file.write(
        folder / "ml/checkpoints/step-000000002.ckpt", checkpoint, 2, values["moment"]
    )
    torch.save(state, model / "model.pt")
    (model / "model.json").write_text(json.dumps({"metrics": {"val_loss": values["metric"]}}))
    (folder / "work/rows.csv").write_text(f"step,value\n1,{values['row']}\n")
    with SummaryWriter(str(logs / "version_0")) as writer:
        writer.add_scalar("loss", values["curve"], 1)
    with SummaryWriter(str(logs / "version_0/system/localhost")) as writer:
        writer.add_scalar("system/cpu", values["moment"], 1)
    for number in range(values["files"]):
        (model / f"file{number}").touch()
    step = {"batch": "aa", "learning rate": [(0.1).hex()]}
    steps = [
        {"at": ["batch", 0, k], "step": k + 1, **step, "loss": (0.5).hex()}
        for k in range(values["steps"])
    ]
    steps[-1] |= {
        "batch": values["batch"],
        "learning rate": [rate.hex() for rate in values["rates"]],
        "loss": values["loss"] if values["loss"] is None else values["loss"].hex(),
    }
    starts = [{"at": ["start", 0], "step": step, "workers": 0} for step in values["starts"]]
    end = {"at": ["end", 0], "changed": values["changed"]}
    lines = [json.dumps(entry) for entry in (*starts, *steps, end)]
    # The run was killed while it wrote.
    (folder / "steps-0.jsonl").write_text("\n".join(lines) + '\n{"at": ["bat')
    return folder


CHANGES = {
    "batch": ("bb", "batch", "the batch of step 2 (epoch 0, batch 1)"),
    "rates": (
        [0.2, 0.3],
        "learning rate",
        "the learning rate of step 2 (epoch 0, batch 1): 0.1 left alone, 0.2, 0.3 interrupted",
    ),
    "loss": (
        0.75,
        "loss",
        "the loss of step 2 (epoch 0, batch 1): 0.5 left alone, 0.75 interrupted",
    ),
    "steps": (3, "steps", "step 3 (epoch 0, batch 2) was not done by the run left alone"),
    "weight": (3.0, "state", "state_dict.w in the last checkpoint: 1 of 2 values"),
    "place": (
        9,
        "state",
        f"{checkpoint_file.ENTRIES_KEY}.ranks.0.loader_positions.loaders.0.place in the last "
        "checkpoint: 8 left alone, 9 interrupted",
    ),
    "metric": (0.5, "metrics", "metrics.val_loss in model.json: 0.25 left alone, 0.5 interrupted"),
    "curve": (
        4.0,
        "curve",
        "ml/checkpoints/tensorboard/version_0: loss, row 1: (1, 2.0) left alone, "
        "(1, 4.0) interrupted",
    ),
    "row": ("4", "curve", "work/rows.csv, row 2: ['1', '3'] left alone, ['1', '4'] interrupted"),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_each_difference_is_found_first(tmp_path: Path, changed: str):
    value, difference_kind, expected_words = CHANGES[changed]
    alone = run_of(tmp_path / "alone")
    other_run = run_of(tmp_path / "other", **{changed: value})
    assert comparison.differences(alone, other_run)[0] == comparison.Difference(
        difference_kind, expected_words
    )


def test_of_a_step_the_cause_is_named_before_its_effects(tmp_path: Path):
    alone = run_of(tmp_path / "alone", loss=None)
    other_run = run_of(tmp_path / "other", batch="bb", rates=[0.2])
    (difference,) = [
        difference
        for difference in comparison.differences(alone, other_run)
        if "of step" in difference.words
    ]
    assert difference.kind == "batch"
    other_run = run_of(tmp_path / "third")
    assert comparison.differences(alone, other_run)[0].words.endswith(
        ": nothing left alone, 0.5 interrupted"
    )


def test_a_step_that_is_lacking_is_named(tmp_path: Path):
    alone = run_of(tmp_path / "alone")
    assert comparison.differences(alone, run_of(tmp_path / "other", steps=1)) == [
        comparison.Difference("steps", "epoch 0, batch 1 was done by the run left alone only")
    ]


def write_losses(folder: Path, rank: int, *losses: float, again: int = 0) -> None:
    """Write what a rank recorded, with its first steps done `again`, as after a resumption."""
    steps = [
        {
            "at": ["batch", 0, batch],
            "step": batch + 1,
            "batch": "aa",
            "learning rate": [],
            "loss": loss.hex(),
        }
        for batch, loss in enumerate(losses)
    ]
    lines = [json.dumps(step) for step in steps[:again] + steps]
    (folder / f"steps-{rank}.jsonl").write_text("\n".join(lines))


def test_the_first_difference_of_all_ranks_is_named(tmp_path: Path):
    alone, other_run = (run_of(tmp_path / name) for name in ("alone", "other"))
    for rank in range(2):
        write_losses(alone, rank, 0.1, 0.2, 0.3)
        write_losses(other_run, rank, 0.1, 0.2, 0.3, again=2)
    assert comparison.differences(alone, other_run) == []
    write_losses(other_run, 0, 0.1, 0.2, 0.4)
    (difference,) = comparison.differences(alone, other_run)
    assert difference.words.startswith("the loss of step 3 of rank 0 (epoch 0, batch 2): 0.3 left")
    write_losses(other_run, 1, 0.1, 0.4, 0.3)
    (difference,) = comparison.differences(alone, other_run)
    assert difference.words.startswith("the loss of step 2 of rank 1 (epoch 0, batch 1): 0.2 left")
    (other_run / "steps-1.jsonl").unlink()
    (difference,) = comparison.differences(alone, other_run)
    assert difference.words == "epoch 0, batch 0 of rank 1 was done by the run left alone only"
    write_losses(alone, 1)
    write_losses(other_run, 0, 0.1, 0.2, 0.3, 0.4)
    (difference,) = comparison.differences(alone, other_run)
    assert difference.words.startswith("step 4 of rank 0 (epoch 0, batch 3) was not done by")


TREES = {
    "shapes": (
        torch.zeros(2),
        torch.zeros(3),
        "a in x.pt: torch.float32 [2] left alone, torch.float32 [3] interrupted",
    ),
    "types": (
        torch.zeros(2),
        torch.zeros(2, dtype=torch.float64),
        "a in x.pt: torch.float32 [2] left alone, torch.float64 [2] interrupted",
    ),
    "one value": (torch.ones(1), torch.zeros(1), "a in x.pt: 1.0 left alone, 0.0 interrupted"),
    "many values": (torch.ones(3, 2), torch.eye(3, 2), "a in x.pt: 4 of 6 values"),
    "no tensor": (
        torch.zeros(2),
        [],
        "a in x.pt: torch.float32 [2] left alone, [] interrupted",
    ),
    "a list": ([1, 2], [1], "a.1 in x.pt: 2 left alone, nothing interrupted"),
    "keys": ({"b": 1}, {"c": 1}, "a.b in x.pt: 1 left alone, nothing interrupted (and 1 more)"),
    "keys and none": ({"b": 1}, 3, "a in x.pt: {'b': 1} left alone, 3 interrupted"),
    "texts": (
        "x" * 58,
        "x" * 59,
        f"a in x.pt: '{'x' * 58}' left alone, '{'x' * 56}... interrupted",
    ),
    "times": ({"time_elapsed": 1, "retired": 1}, {"time_elapsed": 2, "retired": 2}, None),
}


@pytest.mark.parametrize("case", TREES)
def test_how_the_values_of_two_files_differ(tmp_path: Path, case: str):
    left, right, words = TREES[case]
    runs = [tmp_path / name for name in ("alone", "other")]
    names = ("x.ckpt", "x.pt", "x.pth")
    for run, value in zip(runs, (left, right), strict=True):
        (run / "ml/model").mkdir(parents=True)
        for name in names:
            torch.save({"a": value}, run / "ml/model" / name)
    assert comparison._compare_models(*runs) == [
        comparison.Difference("model", words.replace("x.pt", name)) for name in names if words
    ]


def test_files_without_values_differ_by_their_bytes(tmp_path: Path):
    """Nor are objects made that a file asks for."""
    runs = [tmp_path / name for name in ("alone", "other")]
    for number, (text, run) in enumerate(zip(("1", "{"), runs, strict=True)):
        (run / "ml/model").mkdir(parents=True, exist_ok=True)
        for name in ("broken.json", "broken.pt", "x.bin"):
            (run / "ml/model" / name).write_text(text)
        torch.save({"a": fractions.Fraction(number)}, run / "ml/model/objects.pt")
    assert comparison._compare_models(*runs) == [
        comparison.Difference("file", f"{name} in the model folder: its bytes")
        for name in ("broken.json", "broken.pt", "objects.pt", "x.bin")
    ]


def test_a_row_too_many_is_named_and_a_link_is_not_read(tmp_path: Path):
    alone = run_of(tmp_path / "alone")
    other_run = run_of(tmp_path / "other")
    for run, text in ((alone, "1"), (other_run, "2")):
        (tmp_path / f"data-{text}.csv").write_text(text)
        (run / "work/data.csv").symlink_to(tmp_path / f"data-{text}.csv")
    assert comparison.differences(alone, other_run) == []
    with (other_run / "work/rows.csv").open("a") as file:
        file.write("2,5\n")
    assert comparison.differences(alone, other_run) == [
        comparison.Difference(
            "curve", "work/rows.csv, row 3: nothing left alone, ['2', '5'] interrupted"
        )
    ]


def test_moments_and_the_machines_load_are_no_difference(tmp_path: Path):
    assert not comparison.differences(
        run_of(tmp_path / "alone"), run_of(tmp_path / "other", moment=2)
    )


def test_a_file_too_few_or_too_many_is_named(tmp_path: Path):
    alone = run_of(tmp_path / "alone")
    other_run = run_of(tmp_path / "other")
    (alone / "ml/model/first").write_text("1")
    (other_run / "ml/model/second").write_text("2")
    (alone / "ml/model/third").write_text("3")
    (other_run / "ml/model/third").write_text("4")
    differences_found = [
        difference.words for difference in comparison.differences(alone, other_run)
    ]
    assert differences_found == [
        "first in the model folder: the interrupted run has none",
        "second in the model folder: the run left alone has none",
        "third in the model folder: its bytes",
    ]


def run_positions(epochs: int, batches: int, validations: int, workers: int | None) -> list[dict]:
    """Return the lines that a run writes."""
    positions = [{"at": ["start", 0], "step": 0, "workers": workers}]
    for epoch in range(epochs):
        positions += [{"at": ["batch", epoch, batch]} for batch in range(batches)]
        positions += [{"at": ["validation", epoch, batches, batch]} for batch in range(validations)]
        positions += [{"at": ["epoch", epoch]}]
    return positions


def test_the_moments_lie_in_the_middle_of_the_run():
    interruptions, lacking = command.planned(run_positions(3, 4, 3, workers=0))
    assert {interruption.name: interruption.moment for interruption in interruptions} == {
        "kill-in-epoch": ("batch", 1, 2),
        "stop-in-epoch": ("batch", 1, 1),
        "kill-at-epoch-end": ("epoch", 0),
        "stop-at-epoch-end": ("epoch", 0),
        "kill-in-validation": ("validation", 1, 4, 1),
        "stop-in-validation": ("validation", 1, 4, 0),
        "workers": ("batch", 1, 1),
    }
    assert (
        not lacking
        and [interruption.name for interruption in interruptions] == command.INTERRUPTION_NAMES
    )
    assert [
        interruption.workers for interruption in interruptions if interruption.workers is not None
    ] == [2]


@pytest.mark.parametrize(
    ("epochs", "batches", "kill", "stop"),
    [
        (1, 1, (0, 0), (0, 0)),
        (2, 4, (1, 2), (1, 1)),
        (5, 5, (2, 2), (2, 2)),
        (7, 8, (3, 4), (3, 3)),
    ],
)
def test_a_run_is_interrupted_within_the_epoch_in_its_middle(epochs, batches, kill, stop):
    interruptions, _ = command.planned(run_positions(epochs, batches, 0, workers=None))
    moments = {interruption.name: interruption.moment for interruption in interruptions}
    assert moments["kill-in-epoch"] == ("batch", *kill)
    assert moments["stop-in-epoch"] == ("batch", *stop)
    assert ("kill-at-epoch-end" in moments) == (epochs > 1)


def test_what_a_run_has_no_moment_for_is_said():
    interruptions, lacking = command.planned(run_positions(1, 4, 0, workers=None))
    assert [interruption.name for interruption in interruptions] == [
        "kill-in-epoch",
        "stop-in-epoch",
    ] and len(lacking) == 3


@pytest.mark.parametrize(("workers", "other"), [(0, 2), (1, 2), (2, 1), (3, 2)])
def test_a_run_goes_on_with_another_number_of_workers(workers, other):
    interruptions, _ = command.planned(run_positions(2, 3, 1, workers))
    assert interruptions[-1].workers == other
    assert (
        interruptions[-1].words
        == f"stop within an epoch, continue with {other} data workers in place of {workers}"
    )


def test_a_validation_of_another_epoch_is_one():
    positions = [
        position
        for position in run_positions(3, 2, 3, workers=None)
        if position["at"][:2] != ["validation", 1]
    ]
    moments = {
        interruption.name: interruption.moment
        for interruption in command.planned(positions)[0]
        if "validation" in interruption.name
    }
    assert moments == {
        "kill-in-validation": ("validation", 2, 2, 0),
        "stop-in-validation": ("validation", 0, 2, 0),
    }


def test_what_a_run_says_of_itself():
    output = (
        "resuming from step 4: x\nresumed at step 4: the next step is that of before\nerror: no\n"
        "error: a [host b]\n"
    )
    result = command.RunResult(1, True, f"{output}last\n")
    assert (
        result.verdict == "resumed at step 4: the next step is that of before"
        and result.error == "error: a [host b]"
    )
    result = command.RunResult(
        1,
        True,
        f"warning: {output[24:]}Traceback (most recent call last):\n  File x\nKeyError: 'x'\n",
    )
    assert result.verdict.startswith("warning: resumed at step 4: the next")
    assert (
        command.RunResult(
            1, True, "Traceback (most recent call last):\n  File x\nKeyError: 'x'\n"
        ).error
        == "KeyError: 'x'"
    )
    assert command.RunResult(0, True, "").verdict == ""


def test_the_working_folder_is_mirrored_and_not_written_to(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(command, "MAX_COPIED_BYTES", (10, 12))
    monkeypatch.setattr(command, "MAX_ENTRIES", 12)
    home, data, large_folder, drill_folder = (
        tmp_path / "home" / name for name in ("", "data", "many", "drill-1")
    )
    for folder in (data, large_folder, drill_folder, home / ".git"):
        folder.mkdir(parents=True)
    (data / "small").write_text("small")
    (data / "large").write_text("larger than ten bytes")
    (data / "tenth").write_text("10 letters")
    (home / "data/link").symlink_to("small")
    for number in range(12):
        (large_folder / str(number)).touch()
    command.mirror(home, tmp_path / "copy", drill_folder)
    copy = tmp_path / "copy"
    assert (copy / "data/small").read_text() == "small" and not (copy / "data/small").is_symlink()
    assert (copy / "data/large").is_symlink() and (
        copy / "data/large"
    ).read_text() == "larger than ten bytes"
    assert (copy / "data/tenth").is_symlink(), "all of them together are too large"
    assert (copy / "data/link").read_text() == "small"
    assert (
        (copy / "many").is_symlink()
        and (copy / ".git").is_symlink()
        and not (copy / "drill-1").exists()
    )
    (copy / "data/small").write_text("other")
    (copy / "data/new").touch()
    assert (data / "small").read_text() == "small" and not (data / "new").exists()


def test_how_much_of_the_working_folder_is_copied(tmp_path: Path, monkeypatch):
    """64 MiB of one file, 256 MiB of all."""
    monkeypatch.setattr(command.shutil, "copy2", lambda source, target: target.touch())
    sizes = dict.fromkeys("acd", 2**26) | {"b": 2**26 + 1, "e": 2**26 - 1, "f": 2, "g": 1}
    (tmp_path / "home").mkdir()
    for name, size in sizes.items():
        (tmp_path / "home" / name).touch()
        os.truncate(tmp_path / "home" / name, size)
    command.mirror(tmp_path / "home", tmp_path / "copy", tmp_path)
    copied = [path.name for path in (tmp_path / "copy").iterdir() if not path.is_symlink()]
    assert sorted(copied) == list("acdeg")


def test_folders_are_copied_up_to_a_number_of_entries(tmp_path: Path, monkeypatch):
    for name in ("home/first/deep", "home/second"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x").touch()
    (tmp_path / "home/first/x").touch()
    for limit, linked in (
        (1, ["first", "second"]),
        (4, ["first/deep", "second"]),
        (5, ["first/deep"]),
        (6, []),
    ):
        monkeypatch.setattr(command, "MAX_ENTRIES", limit)
        copy = tmp_path / f"copy{limit}"
        command.mirror(tmp_path / "home", copy, tmp_path)
        assert not copy.is_symlink()
        assert (
            sorted(
                path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_symlink()
            )
            == linked
        )


def test_links_and_what_cannot_be_read_stay_links(tmp_path: Path, monkeypatch):
    home = tmp_path / "home"
    (home / "secret").mkdir(parents=True)
    (home / "key").touch()
    (home / "loop").symlink_to(home)
    (home / "lost").symlink_to("nowhere")
    (tmp_path / "file").touch()
    (home / "file").symlink_to("../file")
    monkeypatch.setattr(os, "access", lambda path, mode: path.name not in ("secret", "key"))
    command.mirror(home, tmp_path / "copy", tmp_path)
    assert {path.name: path.readlink() for path in (tmp_path / "copy").iterdir()} == {
        "secret": home / "secret",
        "key": home / "key",
        "loop": home,
        "lost": home / "nowhere",
        "file": tmp_path / "file",
    }


@pytest.fixture
def bench(tmp_path: Path, monkeypatch):
    """Return a function that makes a bench for a script, in a working folder and a job."""
    desk, base = tmp_path / "desk", tmp_path / "ml"
    for name in ("model", "code", "input/config", "input/data/training", "input/data/validation"):
        (base / name).mkdir(parents=True)
    for folder in (desk, tmp_path / "drill"):
        folder.mkdir()
    monkeypatch.chdir(desk)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(base))

    def make(script: str, timeout: float = 60) -> command.Bench:
        words = ["sh", "-c", script]
        return command.Bench(tmp_path / "drill", words, {"epochs": 3, "steps": 4}, timeout)

    return make


def test_the_folder_of_a_run_is_that_of_the_job(bench, tmp_path: Path):
    (tmp_path / "desk/train.py").touch()
    (tmp_path / "ml/code/mine.py").touch()
    (tmp_path / "ml/input/config/hyperparameters.json").touch()
    (tmp_path / "ml/model/model.pt").touch()
    for _ in range(2):
        this_bench = bench("")
        this_bench.prepare()
        kept = this_bench.keep("first")
        assert {
            path.relative_to(kept).as_posix(): path.is_symlink()
            for path in kept.rglob("*")
            if path.is_symlink() or path.is_file()
        } == {
            "work/train.py": False,
            "ml/code/mine.py": False,
            "ml/input/config/hyperparameters.json": False,
            "ml/input/data/training": True,
            "ml/input/data/validation": True,
        }
        command.shutil.rmtree(kept)


def test_a_job_may_have_channels_and_no_settings(bench, tmp_path: Path):
    command.shutil.rmtree(tmp_path / "ml/input/config")
    command.shutil.rmtree(tmp_path / "ml/code")
    this_bench = bench("")
    this_bench.prepare()
    channels = (this_bench.run / "ml/input/data").iterdir()
    assert sorted(path.name for path in channels) == ["training", "validation"]


def test_a_program_that_is_not_there_is_named(bench):
    this_bench = bench("")
    this_bench.command = ["./nowhere", "x"]
    this_bench.prepare()
    with pytest.raises(Impossible, match=r"^./nowhere: cannot be started \(No such file or dir"):
        this_bench.start()


def test_a_process_is_told_what_it_needs_and_its_output_is_its_own(bench, tmp_path: Path):
    this_bench = bench(
        f"cat; echo error: $(pwd) $(command -v python) $SM_MODEL_DIR; "
        f"printenv {DRILL_VARIABLE} >&2; exit 3"
    )
    this_bench.prepare()
    run = tmp_path / "drill/run"
    python = Path(sys.executable).with_name("python")
    for workers in (2, None):
        result = this_bench.start(workers=workers)
        assert (result.status, result.interrupted) == (3, False)
        assert result.error == f"error: {run}/work {python} {run}/ml/model"
        _, asked = result.output.splitlines()
        assert json.loads(asked) == {
            "epochs": 3,
            "steps": 4,
            "folder": str(run),
            "reached": f"{run}/reached",
            "moment": None,
            "workers": workers,
        }
    assert (run / "log").read_text().count("error: ") == 2


STOP = Interruption("stop-in-epoch", "stop within an epoch", signal.SIGTERM, ("batch", 0, 1))
KILL = Interruption("kill-in-epoch", "kill within an epoch", signal.SIGKILL, ("batch", 0, 1))
WAITING = "exec 2>/dev/null; touch ../reached; while :; do sleep 0.01; done"


@pytest.mark.parametrize(
    ("script", "interruption", "expected"),
    [
        # It takes longer than the drill waits before it looks again.
        (f"trap 'sleep 0.04; echo stopped; exit 7' TERM; {WAITING}", STOP, (7, True, "stopped\n")),
        (f"trap 'echo stopped; exit 7' TERM; {WAITING}", KILL, (-9, True, "")),
        ("echo done", STOP, (0, False, "done\n")),
        ("echo done; ls ..; exit 1", None, (1, False, "done\nlog\nml\nwork\n")),
    ],
)
def test_a_process_is_interrupted_at_its_moment(
    bench, tmp_path: Path, script, interruption, expected
):
    this_bench = bench(script)
    this_bench.prepare()
    (tmp_path / "drill/run/reached").touch()  # by the run before
    assert this_bench.start(interruption) == RunResult(*expected)
    assert not (tmp_path / "drill/run/reached").exists() or interruption == KILL


def test_a_process_that_hangs_is_ended_with_all_that_it_started(bench, tmp_path: Path, monkeypatch):
    this_bench = bench("sleep 100 & echo $!; sleep 100", timeout=0.1)
    this_bench.prepare()
    result = this_bench.start()
    assert (result.status, result.interrupted) == (None, False)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(result.output)).status() == psutil.STATUS_ZOMBIE
    # It is no zombie of this process either.
    assert {child.pid for child in psutil.Process().children()} <= this_bench.others
    # SageMaker does not wait as long after SIGTERM as the drill does for a run.
    monkeypatch.setattr(command, "SAGEMAKER_KILLS", 0.05)
    this_bench = bench("trap '' TERM; touch ../reached; sleep 0.5")
    result = this_bench.start(STOP)
    assert (result.status, result.interrupted) == (None, True)


def test_the_toolkits_program_is_started_by_the_entry_point(tmp_path: Path):
    (program, argument) = command.Bench(tmp_path, ["train"], {}, 1).command
    assert program == str((ROOT / "entrypoint.sh").resolve()) and argument == "train"
    assert command.Bench(tmp_path, ["train", "x"], {}, 1).command == ["train", "x"]


class Stage:
    """A bench whose processes end with these results, in runs that `run_of` writes.

    Each item of `runs` has the changes of a run.
    """

    timeout = 600

    def __init__(self, folder: Path, results: list, *runs: dict) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.results = results
        self.runs = list(runs)

    def prepare(self) -> None:
        run_of(self.run, **self.runs.pop(0))

    def keep(self, name: str) -> Path:
        return self.run.rename(self.folder / name)

    def start(self, interruption=None, workers=None) -> RunResult:
        return self.results.pop(0)


DONE = RunResult(0, False, "")


def test_a_run_that_is_left_alone(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=itertools.count(90, 7).__next__))
    drill = Drill(Stage(tmp_path, [DONE], {}), keeps=False)
    assert drill.left_alone() == comparison.steps(tmp_path / "alone") != []
    assert capsys.readouterr().out == "left alone: 2 steps in 1 epochs, 7 s\n"


@pytest.mark.parametrize(
    ("result", "lacks", "reason"),
    [
        (RunResult(None, False, ""), "", "had not ended after 600 s; give a larger --timeout"),
        (RunResult(3, False, "error: x\n"), "", "fails with exit status 3: error: x$"),
        (DONE, "steps-0.jsonl", "trained nothing with ExactResume"),
        (DONE, "ml/checkpoints/step-000000002.ckpt", "trains without checkpoints to continue from"),
    ],
)
def test_what_cannot_be_drilled(tmp_path: Path, capsys, result, lacks, reason):
    stage = Stage(tmp_path, [result], {})
    stage.prepare()
    stage.prepare = lambda: (stage.run / lacks).unlink() if lacks else None
    with pytest.raises(Impossible, match=reason):
        Drill(stage, keeps=False).left_alone()
    assert capsys.readouterr().out == result.output


def test_a_run_without_a_batch_has_trained_nothing(tmp_path: Path):
    stage = Stage(tmp_path, [DONE], {})
    stage.prepare()
    (start, *_) = (stage.run / "steps-0.jsonl").read_text().splitlines()
    assert json.loads(start)["at"][0] == "start"
    (stage.run / "steps-0.jsonl").write_text(start)
    stage.prepare = lambda: None
    with pytest.raises(Impossible, match="trained nothing with ExactResume"):
        Drill(stage, keeps=False).left_alone()


STOPPED = RunResult(143, True, "")
OUTCOMES = {
    "never interrupted": ([DONE], "NOT REPEATED: .* but it ended with status 0: it said nothing"),
    "hangs before": ([RunResult(None, False, "")], "NOT REPEATED: .* interrupted, but it hung"),
    "hangs": ([RunResult(None, True, "")], f"HUNG: {SAGEMAKER_KILLS:.0f} s after SIGTERM it had"),
    "continues": ([RunResult(0, True, "")], "NOT STOPPED: in spite of SIGTERM"),
    "hangs again": ([STOPPED, RunResult(None, False, "")], "HUNG: started again, .* after 600 s"),
    "fails": ([STOPPED, RunResult(2, False, "error: x")], "FAILS .* exit status 2: error: x"),
    "": ([STOPPED, DONE], "identical, begun anew: it had no checkpoint yet"),
    "alarmed": (
        [STOPPED, RunResult(0, False, "warning: resumed at step 4: x\n")],
        "identical, begun anew: .* yet; but the run itself said: warning: resumed at step 4: x",
    ),
    "calm": (
        [STOPPED, RunResult(0, False, "resumed at step 4: x\n")],
        "identical, begun anew: it had no checkpoint yet",
    ),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_how_an_interrupted_run_ends(tmp_path: Path, case):
    results, words = OUTCOMES[case]
    drill = Drill(Stage(tmp_path, list(results), {}), keeps=False)
    drill.alone = run_of(tmp_path / "alone")
    outcome, is_identical = drill.interrupt(STOP)
    assert command.re.fullmatch(f"{words}.*" if words[0] != "i" else words, outcome)
    assert is_identical == (words[0] == "i") and not drill.bench.results
    assert [path.name for path in tmp_path.iterdir()] == ["alone"]


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path):
    results = [RunResult(-9, True, "warning: resumed at step 1: x"), DONE]
    drill = Drill(Stage(tmp_path, results, {"starts": [0, 2]}), keeps=True)
    drill.alone = run_of(tmp_path / "alone")
    assert drill.interrupt(KILL) == ("identical, continued from step 2", True)
    assert (tmp_path / "kill-in-epoch").is_dir()


def test_a_stop_needs_a_checkpoint_and_a_kill_does_not(tmp_path: Path):
    for interruption, status, words in ((STOP, 1, "NO CHECKPOINT was there"), (KILL, -9, "FAILS")):
        results = [RunResult(status, True, "error: x"), RunResult(1, False, "")]
        stage = Stage(tmp_path, results, {})
        stage.prepare()
        (stage.run / "ml/checkpoints/step-000000002.ckpt").unlink()
        stage.prepare = lambda: None
        outcome, is_identical = Drill(stage, keeps=False).interrupt(interruption)
        assert outcome.startswith(words) and not is_identical


def described(tmp_path: Path, *runs: dict, workers: int | None = None, again: int = 0) -> list[str]:
    """Return the lines about a run that differs, which is the second of `runs`.

    The first is left alone, and so is the third, if there is one, which ends with status `again`.
    """
    results = [STOPPED, RunResult(0, False, "resumed at step 4: x"), RunResult(again, False, "")]
    alone, other, *more = runs
    drill = Drill(Stage(tmp_path, results, other, *(more or [alone])), keeps=True)
    drill.alone = run_of(tmp_path / "alone", **alone)
    interruption = Interruption("workers", "", signal.SIGTERM, ("batch", 0, 1), workers)
    outcome, is_identical = drill.interrupt(interruption)
    assert not is_identical and drill.repeatable == (not more and not again)
    return outcome.split("\n  ")


@pytest.mark.parametrize(
    ("files", "more"), [(6, []), (7, ["and in 1 more"]), (9, ["and in 3 more"])]
)
def test_six_differences_are_named(tmp_path: Path, files, more):
    first, *others, verdict, cause = described(tmp_path, {}, {"files": files})
    names = [
        f"file{number} in the model folder: the run left alone has none" for number in range(6)
    ]
    assert first == f"DIFFERENT, first in {names[0]}"
    assert others == [*(f"and in {name}" for name in names[1:]), *more]
    assert verdict == "the run itself said: resumed at step 4: x"
    assert cause.startswith(
        "likely cause: every step is the same; the code that writes this file depends on"
    )


CAUSES = {
    "the loss": ([{}, {"loss": 0.75}], {}, "the batch is the same, so something that the step"),
    "two variables": (
        [{"changed": ["a", "b"]}, {"loss": 0.75}],
        {},
        "a, b, which changes while the run trains, and which no checkpoint has; keep it in buffers",
    ),
    "three variables": ([{"changed": list("abc")}, {"batch": "b"}], {}, "a, b, c, which changes"),
    "four variables": (
        [{"changed": list("abcd")}, {"loss": 0.75}],
        {},
        "a, b, c (and 1 more), which changes",
    ),
    "five variables": (
        [{"changed": list("abcde")}, {"loss": 0.75}],
        {"workers": 1},
        "a, b, c (and 2 more), which changes",
    ),
    "two runs left alone": (
        [{}, {"loss": 0.75}, {"loss": 1.0}],
        {},
        "two runs left alone differ, too: the step depends on what no seed decides",
    ),
    "two batches left alone": (
        [{}, {"batch": "bb"}, {"loss": 1.0}],
        {},
        "two runs left alone differ, too: the samples or their order depend on what no seed",
    ),
    "one fails left alone": ([{}, {"loss": 0.75}], {"again": 1}, "two runs left alone differ, too"),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_likely_cause_of_a_difference(tmp_path: Path, case):
    runs, settings, words = CAUSES[case]
    cause = described(tmp_path, *runs, **settings)[-1]
    assert cause.startswith(f"likely cause: {words}") and "counted or drawn by" not in cause


def test_with_other_workers_a_worker_may_be_the_cause(tmp_path: Path):
    cause = described(tmp_path, {}, {"loss": 0.75}, workers=2)[-1]
    assert "is not restored" in cause and "; or it is counted or drawn by a data worker" in cause


def test_whether_a_run_repeats_itself_is_asked_once(tmp_path: Path):
    stage = Stage(tmp_path, [STOPPED, DONE, DONE, STOPPED, DONE], {"loss": 0.75}, {}, {"loss": 1.0})
    drill = Drill(stage, keeps=False)
    drill.alone = run_of(tmp_path / "alone")
    for _ in range(2):
        assert drill.interrupt(STOP)[0].startswith("DIFFERENT, first in the loss of step 2")
    assert drill.repeatable and not stage.results


def drill_of(outcomes: dict[str, bool], done: list[dict], repeatable: bool | None = None):
    """Return a drill in which the named interruptions have these outcomes."""
    drill = SimpleNamespace(left_alone=lambda: done, repeatable=None, asked=[])

    def interrupt(interruption):
        drill.asked.append(interruption.name)
        is_identical = outcomes.get(interruption.name, True)
        drill.repeatable = drill.repeatable if is_identical else repeatable
        return "identical" if is_identical else "DIFFERENT", is_identical

    drill.interrupt = interrupt
    return drill


def test_the_interruptions_of_a_drill(capsys):
    names = ["workers", "kill-in-epoch"]
    drill = drill_of({}, run_positions(3, 4, 3, workers=0))
    assert command.run(drill, names) == 0 and drill.asked == names[::-1]
    assert capsys.readouterr().out.splitlines() == [
        "kill within an epoch: identical",
        "stop within an epoch, continue with 2 data workers in place of 0: identical",
        "identical: 2 interruptions; weights, optimizers, metrics, curves, model files",
    ]
    assert command.run(drill_of({}, run_positions(3, 4, 3, workers=0)), ["workers"]) == 0
    assert "\nidentical: 1 interruption; weights" in capsys.readouterr().out


@pytest.mark.parametrize(("repeatable", "asked"), [(True, 4), (False, 2)])
def test_a_drill_that_is_not_identical(capsys, repeatable, asked):
    """If two runs left alone differ, all the others would differ, too."""
    outcomes = {"stop-in-epoch": False, "stop-at-epoch-end": False}
    drill = drill_of(outcomes, run_positions(3, 4, 0, workers=None), repeatable)
    assert command.run(drill, command.INTERRUPTION_NAMES) == 1 and len(drill.asked) == asked
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not drilled: a validation: there is none"
    assert lines[1].startswith("not drilled: another number of data workers: ")
    failed = "stop-in-epoch, stop-at-epoch-end" if repeatable else "stop-in-epoch"
    assert lines[-1] == f"NOT identical: {failed}"


def test_interruptions_that_a_run_has_no_moment_for():
    drill = drill_of({}, run_positions(1, 4, 0, workers=None))
    with pytest.raises(
        Impossible, match="^--only: found workers, kill-at-epoch-end, for which this run has no mom"
    ):
        command.run(drill, ["workers", "kill-at-epoch-end"])


@pytest.fixture
def started(tmp_path: Path, monkeypatch):
    """Have `main` change nothing of this process, and return what it asks for."""
    asked = SimpleNamespace(handlers={}, adopted=0, result=0, removes=False)

    def run(drill, names):
        asked.drill, asked.names, asked.folder = drill, names, drill.bench.folder
        assert asked.folder.is_dir()
        if asked.removes:
            asked.folder.rmdir()
        if isinstance(asked.result, BaseException):
            raise asked.result
        return asked.result

    def adopt() -> None:
        asked.adopted += 1

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "adopt_orphans", adopt)
    monkeypatch.setattr(command.signal, "signal", asked.handlers.__setitem__)
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path))
    return asked


def test_the_flags_of_the_drill(started, capsys, monkeypatch):
    started.result = 5
    flags = ["--steps=10", "--epochs=4", "--timeout=7", "--keep", "--only=workers"]
    assert command.main([*flags, "--only=kill-in-epoch", "--", "python", "a b", "--", "x"]) == 5
    bench = started.drill.bench
    assert bench.command == ["python", "a b", "--", "x"] and bench.timeout == 7
    assert bench.limits == {"epochs": 4, "steps": 3} and started.drill.keeps
    assert started.names == ["workers", "kill-in-epoch"] and started.adopted
    assert started.folder.is_dir()
    assert capsys.readouterr().out.splitlines() == [
        "drill: python 'a b' -- x",
        f"kept: {started.folder}",
    ]
    monkeypatch.setattr(sys, "argv", ["drill", "--steps=1", "--", "x"])
    assert command.main() == 5 and started.drill.bench.limits == {"epochs": 3, "steps": 1}
    assert not started.drill.keeps and started.names == command.INTERRUPTION_NAMES
    assert not started.folder.exists() and "kept" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--steps=0", "--", "x"], "argument --steps: found '0', expected a whole number above"),
        (["--step=3", "--", "x"], "unrecognized arguments: --step=3"),
        (["python", "x.py"], "unrecognized arguments: python x.py"),
        (["--"], "found no command; expected one after --, e.g. -- python app/train.py"),
        ([], "found no command; expected one after --, e.g. -- python app/train.py"),
    ],
)
def test_a_mistake_in_the_flags_of_the_drill_is_one_line(started, capsys, args, line):
    with pytest.raises(SystemExit) as leaving:
        command.main(args)
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}") and error.count("\n") == 1
    assert error.endswith("; python -m sagemaker_lightning.drill --help\n")


def test_the_drill_needs_the_python_of_the_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(SystemExit, match=f"^error: {sys.executable} has no psutil; use the python"):
        importlib.reload(command)


def test_how_a_drill_ends(started, capsys):
    started.result = Impossible("there is no way")
    assert command.main(["--", "x"]) == 1 and not started.folder.exists()
    assert capsys.readouterr().err == "error: there is no way\n"
    started.result = KeyboardInterrupt()
    assert command.main(["--", "x"]) == 130 and not started.folder.exists()
    started.removes = True  # as somebody's cleaning may
    assert command.main(["--", "x"]) == 130
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(SystemExit) as leaving:
            started.handlers[number](number, None)
        assert leaving.value.code == 128 + number


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.5", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT ONE}", ""]
)
def test_numbers_of_the_flags_are_above_0(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number above 0"):
        command.positive(text)
    assert command.positive("1") == 1


def test_the_page_has_the_numbers_of_the_program():
    page = " ".join((ROOT / "docs/drill.md").read_text().split())
    flags = command.parser().parse_args([])
    assert f"`--steps={flags.steps}`, `--epochs={flags.epochs}` |" in page
    assert f"`--timeout={flags.timeout}` |" in page
    assert f"after SIGTERM, {SAGEMAKER_KILLS:.0f} at most" in page
    assert ", ".join(f"`{name}`" for name in command.INTERRUPTION_NAMES) in page
    assert f"the first {command.MAX_ENTRIES:,} files and folders" in page
    one_file, all_files = (size // 2**20 for size in command.MAX_COPIED_BYTES)
    assert (
        f"files above {one_file} MiB, files for which there is no room in {all_files} MiB" in page
    )


SEEN = 0


def counted(samples):
    """Count in a variable of the module."""
    global SEEN
    SEEN += len(samples)
    return samples


def made_of(iterator):
    """Return a function that counts by an iterator."""
    return lambda: next(iterator)


def test_variables_that_change_are_named():
    objects = {
        "collate_fn": counted,
        "count": made_of(itertools.count()),
        "still": made_of(iter([1, 2])),
    }
    objects |= {"endless": made_of(item for item in [1, 2]), "long": made_of(iter(range(10**9)))}
    digests_before = module_variables.variable_digests(objects, objects)
    counted([1, 2])
    for name in ("count", "endless", "long"):
        objects[name]()
    named = [
        "test_drill_comparison.SEEN",
        "test_drill_comparison.made_of.<locals>.<lambda>.iterator",
    ]
    assert (
        module_variables.changed_variables(
            digests_before, module_variables.variable_digests(objects, objects)
        )
        == named
    )


class Meter:
    """A sum of losses, as in PyTorch's ImageNet example; other such sums follow."""

    instances = []

    def __init__(self) -> None:
        self.sum = 0.0
        self.instances.append(self)


METER = Meter()
BANK = torch.zeros(100_000, 2)
SCORES = [0] * 100_000
FRIEND = torch.nn.BatchNorm1d(2)
MODEL = Meter()
MODELS = [MODEL]


@functools.lru_cache
def projection(size):
    return torch.randn(size)


@functools.lru_cache
def squares(size):
    return torch.arange(size) ** 2


def remembers(number):
    """Change all of these."""
    remembers.calls += 1
    METER.sum += number
    BANK[:] = number
    SCORES[0] = number
    FRIEND(torch.ones(2, 2) * number)
    records.limit = number
    MODELS[0].sum += number
    projection(number), squares(number)


remembers.calls = 0


def test_objects_in_variables_that_change_are_named(monkeypatch):
    """What a checkpoint has is not named."""
    monkeypatch.setattr(records, "limit", 0, raising=False)
    digests = lambda: module_variables.variable_digests(  # noqa: E731
        {"collate_fn": remembers, "model": MODEL}, {"model": MODEL}
    )
    before = digests()
    assert digests() == before
    assert not [name for name in before if name.startswith("torch.") or name.endswith("__")]
    remembers(3)
    changed = module_variables.changed_variables(before, digests())
    assert [name for name in changed if "FRIEND.running" not in name] == [
        "records.limit",
        "test_drill_comparison.BANK",
        "test_drill_comparison.FRIEND.num_batches_tracked",
        "test_drill_comparison.METER.sum",
        "test_drill_comparison.SCORES",
        "test_drill_comparison.projection (functools.lru_cache)",
        "test_drill_comparison.remembers.calls",
        "test_drill_comparison.squares (functools.lru_cache)",
    ]
    Meter()
    assert "test_drill_comparison.Meter.instances" in module_variables.changed_variables(
        before, digests()
    )


def test_what_a_function_has_closed_over_is_named_where_no_checkpoint_has_it():
    total = 0

    def add():
        nonlocal total
        total += 1

    digests_before = [
        module_variables.variable_digests({"add": add}, saved) for saved in ({}, {"add": add})
    ]
    add()
    digests_after = [
        module_variables.variable_digests({"add": add}, saved) for saved in ({}, {"add": add})
    ]
    assert module_variables.changed_variables(digests_before[0], digests_after[0]) == [
        f"test_drill_comparison.{add.__qualname__}.total"
    ]
    assert module_variables.changed_variables(digests_before[1], digests_after[1]) == []


class Holder:
    """Has containers, modules and metrics, which a checkpoint does not have."""

    def __init__(self) -> None:
        self.objects = [object()]
        self.waiting = deque([object()])
        self.by_name = {"a": object()}
        self.mean = torchmetrics.MeanMetric()
        self.layer = torch.nn.Linear(1, 1)
        self.counts = [0]
        self.large = torch.nn.Embedding(70_000, 1)
        self.lazy = torch.nn.LazyLinear(1)
        self.numbers = np.zeros(70_000)
        self.rows = torch.zeros(5_000, 20)
        self.sparse = torch.zeros(300, 300).to_sparse()
        self.text = {str(key): key for key in range(70_000)}
        self.position = itertools.count()
        self.limit = 3

    def change(self) -> None:
        self.objects.append(object())
        self.waiting.append(object())
        self.by_name["b"] = object()
        self.counts[0] += 1
        self.mean.update(1.0)
        with torch.no_grad():
            for tensor in (self.layer.bias, self.large.weight, self.rows):
                tensor += 1
        self.numbers[0] = 1
        self.text["a"] = 1
        next(self.position)


HOLDER = Holder()


def holds(samples):
    return HOLDER, samples


def test_what_the_objects_in_variables_hold_is_compared():
    """Of a large module, its weights are not: the model's are in the checkpoint."""
    digests = functools.partial(module_variables.variable_digests, {"collate_fn": holds}, {})
    before = digests()
    assert digests() == before
    HOLDER.change()
    name = "test_drill_comparison.HOLDER"
    assert {
        changed.removeprefix(f"{name}.")
        for changed in module_variables.changed_variables(before, digests())
        if changed.startswith(name)
    } == {
        "objects",
        "waiting",
        "by_name",
        "counts",
        "mean",
        "layer.bias",
        "numbers",
        "rows",
        "text",
        "position",
    }
    saved = module_variables.variable_digests({"collate_fn": holds}, {"holder": HOLDER})
    assert not any(key.startswith(f"{name}.") and "position" not in key for key in saved)


def test_the_position_of_an_iterator_with_up_to_ten_thousand_elements_is_known():
    owner = Meter()
    owner.short, owner.long = itertools.repeat(0, 10_000), itertools.repeat(0, 10_001)
    owner.functions = itertools.repeat(lambda: 0, 1)
    digests = module_variables.variable_digests({"data": owner}, {"data": owner})
    assert {name for name in digests if name.startswith("data.")} == {"data.short"}
    next(owner.short)
    digests_after = module_variables.variable_digests({"data": owner}, {"data": owner})
    assert module_variables.changed_variables(digests, digests_after) == ["data.short"]


HELPERS = types.ModuleType("a_users_helpers")
exec("CALLS = [0]\ndef count():\n    CALLS[0] += 1\n", vars(HELPERS))


def calls_a_helper(samples):
    HELPERS.count()
    return samples


def test_variables_of_other_modules_whose_functions_are_called_are_compared():
    roots = {"collate_fn": calls_a_helper}
    before = module_variables.variable_digests(roots, {})
    calls_a_helper([])
    after = module_variables.variable_digests(roots, {})
    assert module_variables.changed_variables(before, after) == ["a_users_helpers.CALLS"]


def test_modules_whose_functions_call_each_other_are_read_once(monkeypatch):
    modules = {name: types.ModuleType(f"a_users_{name}") for name in ("one", "other")}
    for name, called in (("one", "other"), ("other", "one")):
        vars(modules[name])[called] = modules[called]
        exec(f"def call(calls=[]):\n    {called}.call()", vars(modules[name]))
    walks = []

    def walk(*arguments, **options):
        walks.append(arguments)
        assert len(walks) < 20
        return walk_once(*arguments, **options)

    walk_once = module_variables.object_graph.walk
    monkeypatch.setattr(module_variables.object_graph, "walk", walk)
    digests = module_variables.variable_digests({"collate_fn": modules["one"].call}, {})
    assert {"a_users_one.call.defaults", "a_users_other.call.defaults"} <= digests.keys()


@pytest.mark.parametrize("make", [np.arange, torch.arange, lambda size: list(range(size))])
def test_of_a_large_value_4096_elements_at_equal_distances_are_compared(make, monkeypatch):
    samples = make(65_537)
    monkeypatch.setattr(METER, "samples", samples, raising=False)
    digests = functools.partial(module_variables.variable_digests, {"collate_fn": remembers}, {})
    before = digests()
    for index, is_noticed in ((16, False), (17, True), (18, False), (34, True)):
        samples[index] += 1
        assert (digests() != before) is is_noticed
        samples[index] -= 1
    assert digests() == before


def test_code_of_the_users_own_is_told_from_a_librarys():
    assert module_variables.is_own(counted) and module_variables.is_own(Meter)
    assert module_variables.is_own(functools.partial(functools.partial(counted, 1), 2))
    assert not module_variables.is_own(functools.partial(torch.relu, 1))
    assert not module_variables.is_own(torch.nn.Linear)


@pytest.mark.parametrize(("workers_before", "workers_after"), [(0, 2), (2, 0), (1, 2)])
def test_a_loader_gets_another_number_of_workers(workers_before, workers_after):
    settings = (
        {"persistent_workers": True, "timeout": 5, "prefetch_factor": 3} if workers_before else {}
    )
    loader = DataLoader(TensorDataset(torch.arange(8)), 2, num_workers=workers_before, **settings)
    drilled_run._set_workers(loader, workers_after)
    fresh = DataLoader(
        TensorDataset(torch.arange(8)),
        2,
        num_workers=workers_after,
        **(settings if workers_after and workers_before else {}),
    )
    names = ("num_workers", "prefetch_factor", "persistent_workers", "timeout")
    assert [getattr(loader, name) for name in names] == [getattr(fresh, name) for name in names]
    assert torch.cat([batch[0] for batch in loader]).tolist() == list(range(8))


# What a drilled run adds --------------------------------------------------------------------------


def drilled(folder: Path, **asked) -> drilled_run.Drilled:
    settings = {"folder": folder, "reached": folder / "reached", "epochs": 2, "steps": 3}
    return drilled_run.Drilled(settings | {"moment": None, "workers": None} | asked)


def trainer_of(**values) -> SimpleNamespace:
    """Return what a drilled run asks of a trainer."""
    known = {
        "loggers": [],
        "callbacks": [],
        "optimizers": [],
        "lr_scheduler_configs": [],
        "strategy": None,
        "lightning_module": LightningModule(),
        "datamodule": None,
        "train_dataloader": None,
        "val_dataloaders": None,
        "fit_loop": SimpleNamespace(max_epochs=9, min_epochs=None),
        "accumulate_grad_batches": 1,
        "limit_train_batches": 1.0,
        "limit_val_batches": 1.0,
        "limit_test_batches": 1.0,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
        "log_every_n_steps": 50,
        "global_rank": 0,
        "is_global_zero": True,
        "current_epoch": 1,
        "global_step": 5,
        "sanity_checking": False,
        "state": SimpleNamespace(fn="fit"),
        "_data_connector": SimpleNamespace(_prepare_dataloader=lambda loader, *_: loader),
    }
    return SimpleNamespace(**known | values)


@pytest.fixture
def untrained(monkeypatch):
    """This process has begun no training."""
    monkeypatch.setattr(drilled_run, "_has_trained", [])


@pytest.mark.parametrize(
    ("given", "steps", "expected"),
    [
        ({}, 3, {"limit_train_batches": 3, "limit_val_batches": 3, "limit_test_batches": 3}),
        ({"accumulate_grad_batches": 4}, 3, {"limit_train_batches": 12, "limit_val_batches": 3}),
        (
            {"limit_train_batches": 2, "limit_val_batches": 0, "limit_test_batches": 7},
            3,
            {"limit_train_batches": 2, "limit_val_batches": 0, "limit_test_batches": 3},
        ),
        ({"limit_val_batches": 0.0}, 3, {"limit_val_batches": 0.0}),
        ({"val_check_interval": 0.5}, 6, {"val_check_interval": 0.5}),
        ({"val_check_interval": 10}, 6, {"val_check_interval": 3}),
        ({"val_check_interval": 2}, 6, {"val_check_interval": 2}),
        ({"val_check_interval": 10}, 1, {"val_check_interval": 1}),
        ({"check_val_every_n_epoch": 5}, 3, {"check_val_every_n_epoch": 1}),
        ({"check_val_every_n_epoch": None}, 3, {"check_val_every_n_epoch": None}),
        ({}, 3, {"log_every_n_steps": 1}),
    ],
)
def test_a_drilled_run_is_short(tmp_path: Path, untrained, given, steps, expected):
    trainer = trainer_of(**given)
    drilled(tmp_path, steps=steps).setup(trainer, None, "fit")
    assert {name: getattr(trainer, name) for name in expected} == expected


def test_a_drilled_run_saves_every_other_step_in_the_folder_of_the_drill(tmp_path: Path):
    environment = replace(
        SageMakerEnvironment.read(), drill={"steps": 3}, checkpoint_dir=tmp_path / "a"
    )
    resume = ExactResume("mine", every_n_minutes=5, every_n_steps=50, environment=environment)
    assert resume.folder.path == tmp_path / "a"
    run = drilled(tmp_path)
    trainer = trainer_of(callbacks=[run, resume, other := Callback()])
    run.run_begins(trainer)
    assert trainer.callbacks == [resume, other, run]
    assert (resume.intervals.steps, resume.intervals.minutes) == (2, 0)


def test_a_trainer_without_our_callback_is_not_drilled(tmp_path: Path):
    run = drilled(tmp_path)
    trainer = trainer_of(callbacks=[run, other := Callback()])
    run.run_begins(trainer)
    assert trainer.callbacks == [other]


def test_a_trainer_of_a_drilled_program_gets_the_drills_callback(tmp_path: Path, monkeypatch):
    """By Lightning's entry points; in a program that is not drilled, there is nothing."""

    def added() -> list[Callback]:
        trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
        return [each for each in trainer.callbacks if isinstance(each, drilled_run.Drilled)]

    asked = {"folder": "x", "reached": "y", "epochs": 1, "steps": 2, "moment": None, "workers": 3}
    monkeypatch.setenv(DRILL_VARIABLE, json.dumps(asked))
    assert added() == []
    hook.register(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (callback,) = added()
    assert (callback.folder, callback.workers) == (Path("x"), 3)
    monkeypatch.delenv(DRILL_VARIABLE)
    assert added() == []
    monkeypatch.setenv(DRILL_VARIABLE, json.dumps(asked))
    monkeypatch.delitem(sys.modules, "sagemaker_lightning.resume.callback")
    assert added() == []


def test_both_distributions_of_lightning_find_the_drill(tmp_path: Path):
    hook.register(tmp_path)
    found = importlib.metadata.distributions(path=[str(tmp_path)])
    points = [point for each in found for point in each.entry_points]
    assert [point.group for point in points] == [
        "pytorch_lightning.callbacks_factory",
        "lightning.pytorch.callbacks_factory",
    ]
    assert all(point.load() is hook.callbacks for point in points)


@pytest.mark.parametrize(
    ("max_epochs", "min_epochs", "expected"),
    [
        (9, None, (2, 0)),
        (1, None, (1, 0)),
        (None, 1, (2, 1)),
        (-1, 5, (2, 2)),
        (0, 0, (2, 0)),
    ],
)
def test_a_drilled_run_has_few_epochs(tmp_path, untrained, max_epochs, min_epochs, expected):
    trainer = trainer_of(fit_loop=SimpleNamespace(max_epochs=max_epochs, min_epochs=min_epochs))
    drilled(tmp_path).setup(trainer, None, "fit")
    assert (trainer.fit_loop.max_epochs, trainer.fit_loop.min_epochs) == expected


def test_a_drilled_program_trains_once(tmp_path: Path, untrained):
    for stage in ("validate", "fit", "test"):
        drilled(tmp_path).setup(trainer_of(), None, stage)
    with pytest.raises(UserError, match="a drill compares one training: found a second one"):
        drilled(tmp_path).setup(trainer_of(), None, "fit")


class Writing(Callback):
    """Writes to a folder."""

    def __init__(self, dirpath) -> None:
        self.dirpath = dirpath


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [("{}/logs", False), ("", False), ("logs", False), ("/elsewhere", True), ("s3://x/y", True)],
)
@pytest.mark.parametrize("role", ["callbacks", "loggers"])
def test_a_drilled_run_writes_in_its_folder_alone(
    tmp_path: Path, monkeypatch, untrained, role, path, is_refused
):
    monkeypatch.chdir(tmp_path)
    path = path.format(tmp_path)
    owner = Writing(path) if role == "callbacks" else SimpleNamespace(save_dir=path)
    trainer = trainer_of(**{role: [owner]})
    if not is_refused:
        drilled(tmp_path).setup(trainer, None, "fit")
        return
    says = (
        rf"^{type(owner).__name__}: found {'dirpath' if role == 'callbacks' else 'save_dir'}={path}"
    )
    with pytest.raises(UserError, match=says):
        drilled(tmp_path).setup(trainer, None, "fit")
    assert not drilled_run._has_trained and trainer.limit_train_batches == 1.0


@pytest.mark.parametrize("logger_class", [MLFlowLogger, WandbLogger])
def test_a_drilled_run_logs_to_no_server(tmp_path: Path, untrained, logger_class):
    trainer = trainer_of(loggers=[object.__new__(logger_class)])
    says = f"^{logger_class.__name__}: a drill would log to its server, too"
    with pytest.raises(UserError, match=says):
        drilled(tmp_path).setup(trainer, None, "fit")
    assert not drilled_run._has_trained and trainer.limit_train_batches == 1.0


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Saving(DataLoader):
    """A loader that saves its state itself."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("loader", "mode", "workers", "expected", "found"),
    [
        (DataLoader(range(8)), RunningStage.TRAINING, 2, 2, 2),
        (DataLoader(range(8)), RunningStage.TRAINING, None, 0, 0),
        (DataLoader(range(8), num_workers=1), RunningStage.TRAINING, 0, 0, 0),
        (DataLoader(range(8)), RunningStage.VALIDATING, 2, 2, None),
        (DataLoader(range(8)), RunningStage.TESTING, 2, 0, None),
        (DataLoader(Numbers()), RunningStage.TRAINING, 2, 0, None),
        (Saving(range(8)), RunningStage.TRAINING, 2, 0, None),
    ],
)
def test_loaders_get_the_workers_of_the_drill(
    tmp_path: Path, untrained, loader, mode, workers, expected, found
):
    prepared = []

    def prepare(*arguments):
        prepared.append(arguments)
        return "prepared"

    trainer = trainer_of(_data_connector=SimpleNamespace(_prepare_dataloader=prepare))
    run = drilled(tmp_path, workers=workers)
    run.setup(trainer, None, "fit")
    assert trainer._data_connector._prepare_dataloader(loader, True, mode) == "prepared"
    assert prepared == [(loader, True, mode)] and loader.num_workers == expected
    assert run.found_workers == found


def recorded(folder: Path, rank: int = 0) -> list[dict]:
    return [json.loads(line) for line in drilled_run.records(folder, rank).read_text().splitlines()]


def test_a_drilled_run_records_its_steps(tmp_path: Path):
    run = drilled(tmp_path)
    progress = SimpleNamespace(current=SimpleNamespace(ready=4))
    fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    groups = [[{"lr": 0.5}, {"lr": torch.tensor(0.25)}], [{"lr": 1.0}]]
    optimizers = [SimpleNamespace(param_groups=each) for each in groups]
    trainer = trainer_of(fit_loop=fit_loop, optimizers=optimizers, global_rank=1)
    losses = [torch.tensor(0.5), {"loss": torch.tensor([0.5])}, torch.ones(2), None, {"x": 1}]
    for number, loss in enumerate(losses):
        run.on_train_batch_start(trainer, None, torch.ones(2), number)
        run.on_train_batch_end(trainer, None, loss, None, number)
    run.on_validation_batch_end(trainer, None, None, None, 2)
    run.on_train_epoch_end(trainer, None)
    trainer.sanity_checking = True
    run.on_validation_batch_end(trainer, None, None, None, 2)
    trainer.sanity_checking, trainer.state.fn = False, "validate"
    run.on_validation_batch_end(trainer, None, None, None, 2)
    *steps, validation, epoch = recorded(tmp_path, 1)
    assert [step["at"] for step in steps] == [["batch", 1, number] for number in range(5)]
    assert [step["loss"] for step in steps] == [(0.5).hex()] * 2 + [None] * 3
    rates = [rate.hex() for rate in (0.5, 0.25, 1.0)]
    assert all(step["learning rate"] == rates and step["step"] == 5 for step in steps)
    assert len({step["batch"] for step in steps}) == 1
    assert validation == {"at": ["validation", 1, 4, 2]} and epoch == {"at": ["epoch", 1]}
    run.on_train_batch_start(trainer, None, torch.zeros(2), 5)
    run.on_train_batch_end(trainer, None, None, None, 5)
    assert recorded(tmp_path, 1)[-1]["batch"] != steps[0]["batch"]


STEPS = RATES = WORKERS = SAMPLES = itertools.repeat(0, 2)  # no checkpoint has where it is


class Counts(LightningModule):
    def training_step(self, batch, batch_idx):
        return STEPS


@pytest.mark.parametrize("name", ["STEPS", "RATES", "WORKERS", "SAMPLES"])
def test_variables_that_change_while_training_are_recorded(tmp_path: Path, monkeypatch, name):
    """Those of the model's code, of a schedule and of a loader."""
    schedule = SimpleNamespace(lr_lambdas=[lambda step: RATES])
    loader = DataLoader(
        range(8), worker_init_fn=lambda worker: WORKERS, collate_fn=lambda samples: SAMPLES
    )
    known = vars(
        trainer_of(
            lightning_module=Counts(), lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)]
        )
    )
    del known["train_dataloader"]  # a Trainer has no attribute of its own for it
    trainer = type("Loads", (SimpleNamespace,), {"train_dataloader": loader})(**known)
    run = drilled(tmp_path)
    run.found_workers = 4
    run.on_train_start(trainer, None)
    run.on_train_end(trainer, None)
    run.on_train_start(trainer, None)
    monkeypatch.setattr(sys.modules[__name__], name, itertools.repeat(0, 1))
    run.on_train_end(trainer, None)
    start = {"at": ["start", 1], "step": 5, "workers": 4}
    ends = [{"at": ["end", 1], "changed": changed} for changed in ([], [f"{__name__}.{name}"])]
    assert recorded(tmp_path) == [start, ends[0], start, ends[1]]


class Clock:
    """A clock that moves on while a run sleeps, and calls what is due."""

    def __init__(self, events: dict) -> None:
        self.now = 1000.0
        self.events = {1000.0 + seconds: event for seconds, event in events.items()}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [due for due in self.events if due <= self.now]:
            self.events.pop(due)()


@pytest.mark.parametrize(
    ("sent_at", "heard_at", "seconds"),
    [
        (None, None, 60.0),
        (10.0, 10.5, 10.5),
        (10.0, None, 15.0),
        (58.0, None, 60.0),
    ],
)
def test_a_run_waits_for_its_signal(tmp_path: Path, monkeypatch, sent_at, heard_at, seconds):
    """After all checkpoints are written; and for a handler, once it is sent."""
    reached = tmp_path / "reached"
    stop = SimpleNamespace(signal_number=0)
    written = []
    writer = SimpleNamespace(wait=lambda: written.append(reached.exists()))
    events = {sent_at: reached.unlink} if sent_at else {}
    if heard_at:
        events[heard_at] = functools.partial(setattr, stop, "signal_number", 15)
    clock = Clock(events)
    monkeypatch.setattr(drilled_run, "time", clock)
    resume = SimpleNamespace(run=SimpleNamespace(writer=writer), stop=stop)
    monkeypatch.setattr(drilled_run, "_exact_resume", lambda trainer: resume)
    run = drilled(tmp_path, moment=["epoch", 1])
    trainer = trainer_of(current_epoch=0)
    run.on_train_epoch_end(trainer, None)
    trainer.current_epoch, trainer.is_global_zero = 1, False
    run.on_train_epoch_end(trainer, None)
    assert written == [] and clock.now == 1000.0
    trainer.is_global_zero = True
    run.on_train_epoch_end(trainer, None)
    assert written == [False] and clock.now - 1000.0 == pytest.approx(seconds, abs=0.05)
    assert reached.exists() is (sent_at is None)
    run.on_train_epoch_end(trainer, None)  # once
    assert len(written) == 1
