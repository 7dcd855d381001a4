"""The benchmarks run, each in miniature; no time is judged.

Each says what was measured, where and how often.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from environments import python_of

from benchmarks import checkpoint_cost, side_by_side, small_steps, yardstick

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


ROWS = {
    "step": ["step"],
    "original": ["original", "original, recipe cpu"],
    "startup": ["startup, app/train.py", "startup, train"],
    "restart": ["restart, two ranks"],
    "data": ["data", "memory", "memory of torchvision"],
    "similarity": ["similarity"] * 3,
    "side_by_side": ["1 job"],
    "proof": [
        "step, our loader",
        "step, a DataLoader",
        "start, our loader",
        "start, a DataLoader",
        "start, a stream",
        "start, resumed",
    ],
}
ROWS["data_shards"] = [
    "decoding alone",
    "decoding, with batches",
    "litdata",  # and webdataset where it is installed
    "S3, cached",
    "start, a folder",
    "start, S3",
    "memory",
    "requests",
]
ROWS["small_steps"] = [
    *small_steps.CASES,
    *(f"start, {name}" for name in small_steps.STARTS),
    "an epoch of 20 steps, 2000 parameters",
]
ROWS["malloc"] = ["ResNet-18, batch 32"]
ROWS["checkpoint_cost"] = [
    f"{name}: {what}" for name in checkpoint_cost.CASES for what in ("stall", "size")
]
FLAGS = {
    "step": ["--steps=1"],
    "original": ["--steps=1"],
    "similarity": ["--rows=300", "--columns=8"],
}
FLAGS["data_shards"] = ["--steps=1", "--images=128", "--shard-bytes=1M", "--latency=0.001"]
FLAGS["proof"] = ["--steps=1", "--starts=1"]
FLAGS["small_steps"] = ["--steps=1", "--starts=1"]
FLAGS["malloc"] = ["--steps=1"]
FLAGS["side_by_side"] = ["--jobs=1", "--seconds=0.2"]


def cold(command: list[str]) -> subprocess.CompletedProcess:
    """Run a benchmark of starts, which must not be warm."""
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )


# One each night; the others are part of the soak.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name == "step" else pytest.mark.soak)
        for name in ROWS
    ],
)
def test_a_benchmark_prints_ratios_and_where_they_were_measured(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--n=1", *FLAGS.get(name, [])]
    completed = cold(command) if name in ("startup", "restart") else warm.run(command, ROOT)
    assert completed.returncode == 0, completed.stdout
    rows = re.findall(
        r"^\| (.+?) \| (\S+) \[(\S+)\.\.(\S+)\] \| 1 \| .+ [/-] .+ \|$",
        completed.stdout,
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ROWS[name], completed.stdout
    for row in rows:
        middle, low, high = map(float, row[1:])
        assert low <= middle <= high and math.isfinite(high)
        assert low > 0 or row[0].startswith("start, ")  # what is added may be below what varies
    assert re.search(r"^hardware: .+ \d+ cores.*; GPU: .+", completed.stdout, re.MULTILINE)
    assert re.search(
        r"^versions: python .+ torch .+ torchvision .+ pytorch-lightning ",
        completed.stdout,
        re.MULTILINE,
    )
    assert re.search(r"^commit: \w+", completed.stdout, re.MULTILINE)


@pytest.mark.soak
def test_a_sharded_model_is_measured():
    flags = ["--n=1", "--sizes=1", "--steps=1"]
    completed = cold([sys.executable, "-m", "benchmarks.sharded", *flags])
    assert completed.returncode == 0, completed.stdout
    rows = re.findall(r"^\| (\w+), 1 M, (\d) ranks \| \d", completed.stdout, re.MULTILINE)
    of_two = [(name, "2") for name in ("step", "processor", "stall", "save", "load")]
    assert rows == [*of_two, ("load", "4"), *(("memory", ranks) for ranks in "124")]


@pytest.mark.soak
def test_hangs_are_seen_and_long_steps_are_not_hangs():
    flags = "--steps=2", "--jobs=1", "--limit=4"
    completed = warm.run([sys.executable, "-m", "benchmarks.hangs", *flags], ROOT)
    assert completed.returncode == 0, completed.stdout
    assert "2 long steps, 0 false alarms; 1 of 1 hangs seen" in completed.stdout


def test_jobs_side_by_side_are_compared_with_one_alone(monkeypatch):
    rates = {("ours", 1): 100.0, ("spinning", 1): 100.0, ("ours", 2): 90.0, ("spinning", 2): 30.0}
    monkeypatch.setattr(side_by_side, "_pair", lambda jobs, seconds: rates)
    ratios = [(row.name, row.ratios) for row in side_by_side.run(2, [1, 2], 0.1)]
    assert ratios == [("1 job", [1, 1]), ("2 jobs", [3, 3]), ("2 jobs to one", [0.9, 0.9])]


def trains(clock) -> None:
    for _ in range(yardstick.WARMUP_STEPS + 1):
        clock.tick(images=4)


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_processor_time_is_counted(real, monkeypatch, capsys):
    if real:
        completed = warm.run(
            [sys.executable, "-m", "benchmarks.yardstick", "--n=1", "--steps=1"], ROOT
        )
        assert completed.returncode == 0, completed.stdout
        output = completed.stdout
    else:
        monkeypatch.setattr(yardstick, "sides", lambda: {"nothing": trains})
        yardstick.run(n=1, steps=1)
        output = capsys.readouterr().out
    rows = re.findall(
        r"^\| (.+?) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \[.+\] \| (\d+) \| 1 \|$",
        output,
        re.MULTILINE,
    )
    assert len(rows) == (4 if real else 1), output
    for name, user, kernel, worker, total, _ in rows:
        assert float(user) + float(kernel) + float(worker) == pytest.approx(float(total), abs=0.02)
        assert not real or (
            float(user) > 0 and (float(worker) > 0) == (name in list(yardstick.sides())[:2])
        )


@pytest.mark.soak
@pytest.mark.root
def test_a_spot_job_ends_with_the_bits_of_one_left_alone(tmp_path):
    flags = ["--interruptions=1", "--epochs=2", "--engine=processes"]
    completed = subprocess.run(
        [python_of("rehearsal"), "-m", "benchmarks.spot", *flags],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    assert re.search(
        r"^seed 1, of any warned: [01] interruptions, weights the same$",
        completed.stdout,
        re.MULTILINE,
    )


@pytest.mark.soak
def test_the_image_and_a_change_of_it_are_measured(image):
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks.image", image], cwd=ROOT, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    sizes = {
        name: float(size)
        for name, size in re.findall(r"^\| (.+) \| (\d\S*) \|$", completed.stdout, re.MULTILINE)
    }
    assert (
        sizes["the whole image"]
        > sizes["all Python packages"]
        > sizes["torch"]
        > sizes["application"]
        > 0
    )
    assert re.search(
        r"^a changed line in app/: \S+ s to rebuild, [1-9]\d* kB in new layers$",
        completed.stdout,
        re.MULTILINE,
    )


@pytest.mark.thorough  # recipes themselves: test_recipes.py
def test_a_recipe_is_measured(cifar):
    flags = ["--trainer.max_steps=3", "--trainer.accelerator=cpu", "--data.val_split=20"]
    command = [
        sys.executable,
        "-m",
        "benchmarks.accuracy",
        "cpu",
        f"--data_dir={cifar}",
        "--n=2",
        "--",
        *flags,
    ]
    completed = warm.run(command, ROOT)
    assert completed.returncode == 0, completed.stdout
    results = re.findall(
        r"^\| cpu \| (.+?) \| (\S+) \[\S+\.\.\S+\] \| \S+ \| 2 \|$", completed.stdout, re.MULTILINE
    )
    names = [
        "seconds of training",
        "after its first two steps",
        "seconds of the process",
        "test accuracy",
    ]
    assert [name for name, _ in results] == names
    seconds, steady, whole_seconds, accuracy = (float(value) for _, value in results)
    assert 0 < steady < seconds < whole_seconds and 0 <= accuracy <= 1


@pytest.mark.soak
def test_accuracy_after_the_same_time_is_compared_with_the_original(cifar):
    command = [
        sys.executable,
        "-m",
        "benchmarks.original",
        "--accuracy",
        "--n=1",
        f"--data_dir={cifar}",
    ]
    completed = warm.run(command, ROOT)
    assert completed.returncode == 0, completed.stdout
    (row,) = re.findall(
        r"^\| 1 \| (\d+) \| (\S+) \| (\d+), (\S+) \|$", completed.stdout, re.MULTILINE
    )
    _, own_accuracy, images, original_accuracy = map(float, row)
    assert 0 <= own_accuracy <= 1 and 0 <= original_accuracy <= 1 and images >= 32


@pytest.mark.soak  # as the zoo's rounds are, of which `make test` has some
def test_an_interrupted_job_is_compared():
    command = [
        sys.executable,
        "-m",
        "benchmarks.interruptions",
        "soak",
        "process",
        "--rounds=1",
        "--seed=1",
    ]
    completed = warm.run(command, ROOT)
    assert completed.returncode == 0, completed.stdout
    assert re.search(
        r"^process seed=1 round=0 right .*'wrong': 0, 'hung': 0", completed.stdout, re.MULTILINE
    ), completed.stdout


def test_a_wrong_flag_is_named():
    command = [sys.executable, "-m", "benchmarks", "--n", "0"]
    completed = warm.run(command, ROOT)
    assert completed.returncode == 2
    assert "--n" in completed.stdout
