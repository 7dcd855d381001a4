"""User code of many kinds, interrupted at random moments: a handful here, all of it in the soak (docs/zoo.md)."""

import json
import subprocess
import sys

import pytest
from containers import ROOT
from zoo import report, rounds
from zoo.__main__ import RIGHT, launchers
from zoo.table import CONFIGURATIONS

QUICK = [name for name, configuration in CONFIGURATIONS.items() if configuration.quick]
SEED = 1


def check(folder, name: str, launcher: str, seed: int = SEED, tries: int = 3) -> rounds.Round:
    """Do a round, and return it if its outcome is right."""
    reference = rounds.left_alone(folder / "alone", CONFIGURATIONS[name], launcher)
    done = rounds.interrupted(folder / "run", reference, rounds.Round(name, launcher, seed), tries)
    assert done.outcome in RIGHT, (done.outcome, done.detail, done.interruptions)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_few(tmp_path, name):
    assert check(tmp_path, name, "process", tries=2).outcome == "identical"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "launcher"), [(name, way) for name, one in CONFIGURATIONS.items() for way in launchers(one)]
)
def test_all(tmp_path, name, launcher):
    check(tmp_path, name, launcher)


@pytest.mark.slow
def test_other_weights_are_found(tmp_path):
    """The zoo itself: a job that is compared with one of another configuration is wrong, in all that differs."""
    reference = rounds.left_alone(tmp_path / "alone", CONFIGURATIONS["Noam"], "process")
    done = rounds.interrupted(tmp_path / "run", reference, rounds.Round("the control", "process", SEED), 0)
    assert done.outcome == "wrong"
    assert [part.partition(":")[0] for part in done.detail.split("; ")][:1] == ["weights"]


@pytest.mark.slow
def test_the_program_goes_on_and_makes_a_table(tmp_path):
    results, page = tmp_path / "zoo.jsonl", tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    flags = ["--only=the control", "--launcher=process", f"--results={results}", "--jobs=1", "--interruptions=1"]
    line = [sys.executable, "-m", "tests.zoo", "run", *flags]
    for rows in (1, 2):
        done = subprocess.run([*line, f"--rounds={rows}"], cwd=ROOT, text=True, stdout=subprocess.PIPE, timeout=300)
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("identical the control [") == 1, done.stdout
        found = [json.loads(row) for row in results.read_text().splitlines()]
        assert [row["seed"] for row in found if row["configuration"] == "the control"] == [1, 2][:rows]
    line = [sys.executable, "-m", "tests.zoo", "report", str(results), f"--write={page}"]
    subprocess.run(line, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    text = page.read_text()
    assert "| the control | process | 2 | " in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("after\n")
