"""The benchmarks run, each in miniature, and say what was measured, where and how often; no time is judged."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("name", "flags"), [("step", ["--steps", "1"]), ("original", ["--steps", "1"]), ("startup", [])]
)
def test_a_benchmark_prints_ratios_and_where_they_were_measured(name, flags):
    line = [sys.executable, "-m", f"benchmarks.{name}", "--n", "1", *flags]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    row = re.search(rf"^\| {name} \| (\S+) \[(\S+)\.\.(\S+)\] \| 1 \| .+ / .+ \|$", done.stdout, re.MULTILINE)
    assert row, done.stdout
    low, middle, high = (float(row[group]) for group in (2, 1, 3))
    assert 0 < low <= middle <= high
    assert math.isfinite(high)
    assert re.search(r"^hardware: .+ \d+ cores.*; GPU: .+", done.stdout, re.MULTILINE)
    assert re.search(r"^versions: python .+ torch .+ torchvision .+ pytorch-lightning ", done.stdout, re.MULTILINE)
    assert re.search(r"^commit: \w+", done.stdout, re.MULTILINE)


def test_an_interrupted_job_is_compared():
    line = [sys.executable, "-m", "benchmarks.interruptions", "soak", "process", "--rounds=1", "--seed=1"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^process seed=1 round=0 right .*'wrong': 0, 'hung': 0", done.stdout, re.MULTILINE), done.stdout


def test_a_wrong_flag_is_named():
    line = [sys.executable, "-m", "benchmarks", "--n", "0"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "--n" in done.stderr
