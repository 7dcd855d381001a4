"""The examination of public packages (results/real-projects.md), on scripts without any.

It sees what differs.
"""

import re
import subprocess

import pytest
import real_projects
import torch
from containers import ROOT

SCRIPT = '''# /// script
# dependencies = ["torch"]
# ///
"""A small one."""
import pytorch_lightning as pl
import time
import torch
from own_trainer import Classifier
from sagemaker_lightning import ExactResume

resume = ExactResume("checkpoints", seed=42, every_n_steps=2)
model = Classifier()
options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
trainer = pl.Trainer(max_epochs=6, callbacks=[resume], **options)
trainer.fit(model)
kept = {KEPT}
torch.save(kept, "weights.pt")
'''


@pytest.mark.thorough  # a tool for results/real-projects.md
@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_expression", "outcome"),
    [
        ("model.state_dict()", "identical"),
        pytest.param(
            "(model.state_dict(), trainer.logged_metrics, time.time())",
            "two runs that nothing interrupts differ",
        ),
    ],
)
def test_a_script_is_interrupted_and_compared(tmp_path, monkeypatch, saved_expression, outcome):
    monkeypatch.setattr(real_projects, "PROJECTS", tmp_path)
    monkeypatch.setattr(real_projects, "EXTRA_PATHS", [str(ROOT), str(ROOT / "tests/support")])
    (tmp_path / "small.py").write_text(SCRIPT.replace("{KEPT}", saved_expression))
    report = real_projects.examine("small", 1, 4, tmp_path / "jobs")
    table = real_projects.table([report])
    assert outcome in table and "| small " in table, report
    assert "crashed" not in table, report


def test_one_bit_is_a_difference():
    original = {"a": [torch.tensor([1.0, 0.0]), 3], "b": {"c": 1.0}}
    changed = {"a": [torch.tensor([1.0, -0.0]), 3], "b": {"c": 1.0}}
    original_leaves = real_projects.flat(original)
    changed_leaves = real_projects.flat(changed)
    assert not real_projects.differences(original_leaves, real_projects.flat(original))
    assert (
        real_projects.differences(original_leaves, changed_leaves) == "1 of 3 differ, such as .a.0"
    )


def test_each_script_names_its_package_and_what_it_trains():
    scripts = sorted(real_projects.PROJECTS.glob("*.py"))
    assert len(scripts) >= 8
    for path in scripts:
        (requirement,) = real_projects.requirements(path)
        assert re.match(rf"{path.stem}(\[\w+\])?==[\d.]+$", requirement)
        assert "ExactResume(" in path.read_text() and '\n"""' in path.read_text()


def test_the_command_of_the_page():
    """The program accepts the command, which installs packages; no test runs it."""
    (command,) = re.findall(
        r"^```sh\n(.*?)^```$",
        (ROOT / "results/real-projects.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    completed = subprocess.run(
        ["bash", "-c", f"{command.strip()} --dry-run"], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    program = "tests.tools.real_projects"
    (line,) = [line for line in completed.stdout.splitlines() if program in line]
    arguments = line.split(program)[1].split()
    assert real_projects.parser().parse_args(arguments).names == ["lightly"]


def test_the_table_is_replaced_and_nothing_else():
    page = f"before\n{real_projects.BEGIN}\n{real_projects.END}\nafter\n"
    once = real_projects.with_table(page, "| a |")
    assert once == f"before\n{real_projects.BEGIN}\n\n| a |\n\n{real_projects.END}\nafter\n"
    assert real_projects.with_table(once, "| b |") == once.replace("| a |", "| b |")
