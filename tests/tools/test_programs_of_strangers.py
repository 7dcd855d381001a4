"""Programs with a Trainer of their own, interrupted at random (tests/tools/strangers.py)."""

import json
import subprocess
import sys

import pytest
from containers import ROOT

PROGRAM = """
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel
from sagemaker_lightning import ExactResume

resume = ExactResume("checkpoints", seed=42, every_n_steps=2)
model = BoringModel()
options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
trainer = pl.Trainer(max_epochs=3, callbacks=[resume], **options)
trainer.fit(model, BoringDataModule())
torch.save({KEPT}, "weights.pt")
"""


@pytest.mark.thorough  # a tool for results/figures.md
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "outcomes"),
    [
        ("model.state_dict()", ["identical", "identical"]),
        ("__import__('time').time()", ["wrong", "wrong"]),
        ("model.no_such_name", ["invalid"]),
    ],
)
def test_a_program_is_interrupted_and_compared(tmp_path, kept, outcomes):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("{KEPT}", kept))
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "tests.tools.strangers", program, "--rounds=2", "--jobs=1"]
    subprocess.run([*command, f"--results={results}"], cwd=ROOT, check=True)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["outcome"] for row in rows] == outcomes, rows
