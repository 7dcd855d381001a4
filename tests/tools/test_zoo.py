"""User code of many kinds, interrupted at random moments: a handful of the zoo.

The soak runs all of it (results/zoo.md).
"""

import json
import os
import re
import subprocess

import pytest
from containers import ROOT
from zoo import report, rounds
from zoo.__main__ import RIGHT_OUTCOMES, launchers
from zoo.table import CONFIGURATIONS

SEED = int(os.environ.get("ZOO_SEED", 1))

# In one process, tests/unit/resume/parts has ModelPruning and the hooks at the start, and
# test_data_that_change.py has an iterator of the user's own.
QUICK_CONFIGURATIONS = {
    "padded sequences": "process",  # an LSTM keeps its weights in a list, too
    "a pool that grows": "process",
    "LoRA: strict_loading=False": "lightning-2",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "launcher"), QUICK_CONFIGURATIONS.items())
def test_a_few_configurations_are_interrupted_at_random(tmp_path, name, launcher):
    """Each is stopped in the second epoch, and killed after a checkpoint later in it."""
    reference = rounds.uninterrupted_run(tmp_path / "alone", CONFIGURATIONS[name], launcher)
    moments = [
        rounds.Interruption("SIGTERM", "self", f"hook 0 {int(reference.hooks * 0.55)} 0"),
        rounds.Interruption("SIGKILL", "all", f"hook 0 {int(reference.hooks * 0.2)} 0"),
    ]
    completed_round = rounds.interrupted(
        tmp_path / "run", reference, rounds.Round(name, launcher, 0, every=3), moments
    )
    assert [interruption.status for interruption in completed_round.interruptions] == [143, -9], (
        completed_round
    )
    assert completed_round.outcome == "identical", completed_round


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        (name, way)
        for name, configuration in CONFIGURATIONS.items()
        for way in launchers(configuration)
    ],
)
def test_all(tmp_path, name, launcher):
    reference = rounds.uninterrupted_run(tmp_path / "alone", CONFIGURATIONS[name], launcher)
    round = rounds.Round(name, launcher, SEED)
    completed_round = rounds.interrupted(
        tmp_path / "run", reference, round, rounds.draws(round, reference, 3)
    )
    assert completed_round.outcome in RIGHT_OUTCOMES, completed_round


@pytest.mark.slow
def test_other_weights_are_found(tmp_path):
    """A job that is compared with one of another configuration is wrong in all that differs."""
    reference = rounds.uninterrupted_run(tmp_path / "alone", CONFIGURATIONS["Noam"], "process")
    completed_round = rounds.interrupted(
        tmp_path / "run", reference, rounds.Round("the control", "process", SEED), []
    )
    assert completed_round.outcome == "wrong"
    assert [difference.partition(":")[0] for difference in completed_round.detail.split("; ")][
        :1
    ] == ["weights"]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_commands_of_the_page(tmp_path):
    """They run a round that is not in the file yet, and make the table."""
    results = tmp_path / "zoo.jsonl"
    page = tmp_path / "page.md"
    (commands,) = re.findall(
        r"^```sh\n(.*?)^```$", (ROOT / "results/zoo.md").read_text(), re.MULTILINE | re.DOTALL
    )
    doing, reporting = commands.replace("output/zoo.jsonl", str(results)).splitlines()
    earlier_round = rounds.Round("the control", "process", 1, outcome="identical")
    results.write_text(json.dumps(earlier_round.row()) + "\n")
    command = doing.replace(
        "--rounds=1", "--rounds=2 --launcher=process --interruptions=1 --jobs=1"
    )
    completed = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, text=True, stdout=subprocess.PIPE, timeout=300
    )
    assert completed.returncode == 0, completed.stdout
    assert completed.stdout.count("identical the control [") == 1, completed.stdout
    recorded_rounds = [json.loads(row) for row in results.read_text().splitlines()]
    assert [row["seed"] for row in recorded_rounds if row["configuration"] == "the control"] == [
        1,
        2,
    ]
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    command = f'{reporting.removesuffix(chr(34))} --write={page}"'
    subprocess.run(["bash", "-c", command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    text = page.read_text()
    assert "| the control | process | 2 | " in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("after\n")
