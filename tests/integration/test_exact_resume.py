"""ExactResume in programs of one's own, which are stopped and killed, and the page about it."""

import os
import re
import time
from pathlib import Path

import nightly
import psutil
import pytest
import warm
from containers import ROOT
from own_fits import BLOCKS, HANG_SECONDS, PROGRAM, check, results, run

TUTORIALS = ROOT / "tests/support/tutorials.py"


@pytest.mark.slow
def test_five_lines_are_enough(tmp_path: Path):
    _, stopped, ended = check(tmp_path, "plain", {"KILL_AT": "0:3"}, {"STOP_AT": "1:4"})
    assert re.search(
        r"^interrupted, resume from step 16: SIGTERM; .* is complete \[host localhost",
        stopped,
        re.MULTILINE,
    )
    assert "Traceback" not in stopped and "\nresuming from step 16: " in ended
    assert "\nresumed at step 16: " in ended


CASES = {
    "adversarial": [{"STOP_AT": "1:4"}, {"KILL_AT": "2:3"}],
    "loaders": [{"KILL_AT": "1:4"}, {"STOP_AT": "2:1"}],
    "folds": [{"STOP_AT": "0/1:2"}, {"STOP_AT": "1/1:4"}, {"KILL_AT": "1/2:1"}],
    "around": [{"STOP_AT": "1:4"}],
    "longer": [{"STOP_AT": "1:4"}, {"STOP_AT": "2:4"}],
    "tuned": [{"STOP_AT": "2:1"}],
    "overfit": [{"STOP_AT": "1:2"}],
    "by_hand": [{"STOP_AT": "0:1"}, {"STOP_AT": "1:4"}, {"KILL_AT": "2:3"}],
    "two_ranks": [{"STOP_AT": "1:2"}, {"KILL_AT": "2:1"}],
    "three_ranks": [{"STOP_AT": "1:2"}],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", nightly.all_but(["loaders", "two_ranks"], CASES))
def test_a_users_own_program(tmp_path: Path, case: str):
    *_, ended = check(tmp_path, case, *CASES[case])
    if case == "three_ranks":  # none is ended by the end of rank 0, which is done first
        assert len(results(ended)) == 3
    if case == "loaders":
        expected, resumed = (
            (tmp_path / name / "curves/lightning_logs") for name in ("alone", "run")
        )
        for file in ("version_0/metrics.csv", "version_0/hparams.yaml"):
            assert (expected / file).read_text() == (resumed / file).read_text()
        assert [path.name for path in resumed.iterdir()] == ["version_0"]


TUTORIAL_CASES = {
    "anchored": [{"STOP_AT": "0:4"}, {"KILL_AT": "2:1"}],
    "counts": [{"STOP_AT": "0:4"}, {"KILL_AT": "3:2"}],
    "drawn": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "seeded": [{"STOP_AT": "0:4"}, {"KILL_AT": "3:2"}],
    "mining": [{"STOP_AT": "0:3"}, {"STOP_AT": "2:4"}, {"KILL_AT": "3:2"}],
    "labels": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "thaws": [{"STOP_AT": "2:9"}, {"STOP_AT": "3:2"}, {"KILL_AT": "3:5"}],
    "clipped": [{"STOP_AT": "0:4"}, {"KILL_AT": "2:1"}],
    "in_turns": [{"STOP_AT": "1:0"}],
    "inner": [{"STOP_AT": "0:4"}, {"KILL_AT": "2:1"}],
    "stages": [{"KILL_AT": "0:7"}, {"STOP_AT": "1:3"}],
    "centered": [{"STOP_AT": "0:4"}, {"KILL_AT": "2:1"}],
    "tracked": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}],
    "skips": [{"STOP_AT": "0:3"}, {"STOP_AT": "1:6"}, {"KILL_AT": "2:5"}],
    "recipe": [{"STOP_AT": "0:3"}, {"STOP_AT": "1:6"}, {"KILL_AT": "2:5"}],
    "swaps": [{"STOP_AT": "1:4"}, {"STOP_AT": "2:9"}],
}
"""Where each of tutorials.py is interrupted."""
IN_EACH_TEST = "mining", "thaws", "tracked"


@pytest.mark.slow
@pytest.mark.parametrize("case", nightly.all_but(IN_EACH_TEST, TUTORIAL_CASES))
def test_a_tutorial(tmp_path: Path, case: str):
    """As Lightning's documentation has it; no line says that something would not be exact.

    But that a set from which elements were removed may come in another order is said.
    """
    *_, ended = check(tmp_path, case, *TUTORIAL_CASES[case], program=TUTORIALS)
    of_sets = "the elements of (this set|a set in it) may "
    assert not re.search(rf"^warning: (?!.* {of_sets})", ended, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("unseeded", "the numbers in model.directions differ; likely because of data that were"),
        pytest.param(
            "slowed",
            "the class or the hooks of model.backbone.0 differ",
            marks=pytest.mark.thorough,
        ),
        ("hooked", "the class or the hooks of model.backbone differ"),
        ("pending", "warning: model.pending was calculated before the interruption"),
    ],
)
def test_what_no_checkpoint_has_is_said(tmp_path: Path, case: str, says: str):
    """A stopped run would be silent about them."""
    status, _ = run(tmp_path, case, TUTORIALS, STOP_AT="2:9")
    assert status == 143
    status, ended = run(tmp_path, case, TUTORIALS)
    assert status == 0 and says in ended


@pytest.mark.slow
def test_a_rank_does_not_outlive_the_process_that_started_it(tmp_path: Path):
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    process = warm.start(["python", PROGRAM, "two_ranks"], tmp_path, variables)
    while not list(tmp_path.rglob("step-*.ckpt")):
        assert process.poll() is None
        time.sleep(0.01)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert any("LOCAL_RANK" in warm.environ(rank.pid) for rank in ranks)
    process.kill()
    assert psutil.wait_procs(ranks, timeout=HANG_SECONDS)[1] == []


THEIRS = """
import sys
import types
import torch

sys.modules.setdefault("pyro", types.ModuleType("pyro"))  # test_given_parts.py uses it
from own_trainer import Classifier as Model, Noisy
from torch.utils.data import DataLoader
from pytorch_lightning import LightningDataModule

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Noisy(), 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Noisy(), 8)

loader = DataLoader(Noisy(), 8, shuffle=True)
"""
MORE = dict.fromkeys((1, 3, 4), "trainer.fit(Model(), Data())\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_what_the_page_shows_runs(tmp_path: Path, number: int):
    (tmp_path / "train.py").write_text(THEIRS + BLOCKS[number] + MORE.get(number, ""))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    flags = (
        ["--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
        if "SageMakerCLI" in BLOCKS[number]
        else []
    )
    completed = warm.run(["python", "train.py", *flags], tmp_path, environment, HANG_SECONDS)
    assert completed.returncode == 0, completed.stdout[-3000:]
    made_files = {
        0: "output/data/checkpoints/step-000000030.ckpt",
        1: "checkpoints/step-000000030.ckpt",
        3: "lightning_logs",
        6: "output/model/model.pt",
    }
    assert number not in made_files or (tmp_path / made_files[number]).exists(), completed.stdout[
        -3000:
    ]
