"""Jobs that split the rows and do not communicate: compared with float64 brute force.

They are interrupted, run with other numbers of hosts, and damaged.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import nightly
import numpy as np
import pytest
import torch
import warm
from conftest import ROOT

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.rows.table import Table

from app import similarity
from app.similarity import Compared, Similarity

MERGE = ROOT / "scripts/merge_parts.py"
PROGRAM = ROOT / "app/similarity.py"
PAGE = (ROOT / "docs/row-jobs.md").read_text()


def rows(count: int = 601, columns: int = 24, seed: int = 0) -> np.ndarray:
    """Return random rows, float32."""
    return np.random.default_rng(seed).standard_normal((count, columns)).astype(np.float32)


def scores(table: np.ndarray) -> np.ndarray:
    """Return all scores by brute force in float64; a row's score with itself is -inf."""
    unit = table.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    products = unit @ unit.T
    np.fill_diagonal(products, -np.inf)
    return products


class Job:
    """A job of some hosts that do not communicate, so that they run one after another."""

    def __init__(self, folder: Path, table: np.ndarray | None = None) -> None:
        self.folder = folder
        (folder / "channel").mkdir(parents=True)
        if table is not None:
            np.save(folder / "channel/rows.npy", table)

    def start(
        self, hosts: int, host: int, *flags: str, program: Path = PROGRAM, **variables: str
    ) -> warm.Started:
        """Start a host's process."""
        names = [f"algo-{number + 1}" for number in range(hosts)]
        environment = {
            "SM_HOSTS": json.dumps(names),
            "SM_CURRENT_HOST": names[host],
            "SM_CHANNELS": '["my-input-data"]',
        }
        environment |= {
            "SM_CHANNEL_MY-INPUT-DATA": str(self.folder / "channel"),
            "SM_MODEL_DIR": str(self.model(host)),
        }
        environment |= {
            "SM_OUTPUT_DATA_DIR": str(self.folder / "data"),
            "SM_OUTPUT_DIR": str(self.folder),
        }
        environment |= {
            "SM_CHECKPOINT_DIR": str(self.folder / "checkpoints"),
            "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
        }
        (self.folder / "failure").unlink(missing_ok=True)
        return warm.start(
            ["python", program, *flags], self.folder, os.environ | environment | variables
        )

    def model(self, host: int) -> Path:
        """Return a host's model directory."""
        return self.folder / f"model-{host}"

    def run(self, hosts: int, *flags: str, **job_flags) -> str:
        """Run all hosts to their end, and return their output."""
        output = ""
        for host in range(hosts):
            process = self.start(hosts, host, *flags, **job_flags)
            output += process.communicate(timeout=300)[0]
            assert process.returncode == 0, output
        return output

    def failed(self, *flags: str, **job_flags) -> str:
        """Run a host that has to fail, and return its one line."""
        process = self.start(1, 0, *flags, **job_flags)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 1 and "Traceback" not in output, output
        assert (self.folder / "failure").read_text() == output.splitlines()[-1]
        return output.splitlines()[-1]

    def archive(self, hosts: int) -> Path:
        """Return all parts as SageMaker uploads them: one model.tar.gz."""
        with tarfile.open(self.folder / "model.tar.gz", "w:gz") as tar:
            for host in range(hosts):
                tar.add(self.model(host), arcname=".")
        return self.folder / "model.tar.gz"


def merge(*models: Path | str, output: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, MERGE, *models, f"--output={output}"],
        capture_output=True,
        text=True,
        timeout=300,
    )


def merged(job: Job, hosts: int) -> dict[str, np.ndarray]:
    output = job.folder / "merged"
    shutil.rmtree(output, ignore_errors=True)
    completed = merge(job.archive(hosts), output=output)
    assert completed.returncode == 0, completed.stderr
    return {path.stem: np.load(path) for path in output.glob("*.npy")}


def nearest(
    neighbours: dict[str, np.ndarray], scores_of_all: np.ndarray, k: int, error: float = 1e-6
) -> bool:
    """Return whether these are the k best of each row."""
    best = np.sort(scores_of_all, axis=1)[:, ::-1][:, :k]
    at = np.take_along_axis(scores_of_all, neighbours["neighbours"], axis=1)
    distinct = all(len(set(row)) == k for row in neighbours["neighbours"].tolist())
    return (
        distinct
        and np.allclose(neighbours["scores"], best, atol=error)
        and np.allclose(at, best, atol=error)
    )


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2, 3, 7])
def test_the_nearest_rows(tmp_path, hosts):
    table = rows()
    job = Job(tmp_path, table)
    output = job.run(hosts, "--top_k=5", "--block_rows=64")
    assert "rows/s=" in output and "left=0s" in output
    neighbours = merged(job, hosts)
    assert neighbours["neighbours"].dtype == np.int64 and neighbours["scores"].dtype == np.float32
    assert nearest(neighbours, scores(table), 5)


def compared(table: np.ndarray, **settings) -> Compared:
    """Return what compares the rows of a table in this process."""
    given = Table(Path("channel"), {"rows.npy": table}, "channel training")
    return Compared(Similarity(**settings), given, torch.device("cpu"))


def test_many_columns_are_looked_through_in_groups():
    """There are more rows than fit a tile, some of them equal."""
    table = rows(40_000, 4)
    table[7::1000] = table[7]
    unit = table.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    expected = unit[:20] @ unit.T
    expected[range(20), range(20)] = -np.inf
    assert nearest(compared(table, top_k=3)(range(20)), expected, 3)


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"threshold": 0.05}, {"dense": True}], ids=str)
def test_rows_that_do_not_stay_on_the_device_are_compared_as_those_that_do(settings):
    """Half of the memory is for the rows; here they take more than half of 0.01 GiB."""
    table = rows(1400, 1000)
    small = compared(table, memory=0.01, **settings)
    large = compared(table, **settings)
    assert small.whole is None and large.whole.shape == (1400, 1000)
    part = range(700, 740)
    actual, expected = small(part), large(part)
    counts = {"counts"} if "threshold" in settings else set()
    neighbours = set() if "dense" in settings else {"neighbours"}
    assert actual.keys() == expected.keys() == {"scores"} | counts | neighbours
    for name, array in expected.items():
        assert np.allclose(actual[name], array, atol=1e-6)
    table[735] = 0
    with pytest.raises(UserError, match="channel training: row 735 is all 0"):
        compared(table, memory=0.01, **settings)(part)


@pytest.mark.parametrize(
    ("count", "columns", "settings", "size"),
    [
        # The memory without the rows, halved, by 4 bytes for 2 scores of each of 2**15 columns and
        # for 4 rows, and by what is returned
        (40_000, 4, {"top_k": 30_000}, (10_737_418 - 640_000) // 2 // (262_208 + 120_000)),
        (40_000, 4, {"dense": True, "memory": 0.1}, (107_374_182 - 640_000) // 2 // 582_208),
        (40_000, 4, {"threshold": 0.5, "memory": 1.0}, (2**30 - 640_000) // 2 // 2_822_208),
        (40_000, 4, {"top_k": 3, "precision": "float16"}, (10_737_418 - 320_000) // 2 // 262_220),
        (1400, 1000, {"top_k": 3}, 10_737_418 // 2 // (27_200 + 12)),
        (1400, 800, {"top_k": 3}, (10_737_418 - 4_480_000) // 2 // (24_000 + 12)),
        (200_000, 1, {"threshold": 0.5}, 1),
        # The rows may take half of the memory, and not a byte more.
        (2048, 1024, {"top_k": 3, "memory": 2**-6}, 2**22 // (8 * 2048 + 16 * 1024 + 12)),
        (2049, 1024, {"top_k": 3, "memory": 2**-6}, 2**23 // (8 * 2049 + 16 * 1024 + 12)),
        (100, 4, {"top_k": 3}, 1024),
    ],
)
def test_a_block_has_as_many_rows_as_the_memory_holds(count, columns, settings, size):
    table = np.ones((count, columns), np.float32)
    assert compared(table, **{"memory": 0.01} | settings).size == size


def test_a_row_is_not_its_own_neighbour_wherever_it_is():
    table = rows(33_000, 4)
    part = range(32_760, 32_780)  # 2**15 columns are compared at a time
    unit = table.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    expected = unit[part] @ unit.T
    expected[range(len(part)), part] = -np.inf
    assert nearest(compared(table, top_k=2)(part), expected, 2)


def test_a_row_is_its_own_neighbour_where_that_is_asked_for():
    table = rows(5)
    assert sorted(compared(table, top_k=4)(range(1, 2))["neighbours"][0]) == [0, 2, 3, 4]
    result = compared(table, top_k=5, itself=True)(range(1, 3))
    assert result["neighbours"][:, 0].tolist() == [1, 2]
    assert result["scores"][:, 0] == pytest.approx([1, 1])
    for itself, most in ((False, 4), (True, 5)):
        with pytest.raises(UserError, match=f"--top_k: found 6, expected 1 to {most}: there are 5"):
            compared(table, top_k=6, itself=itself)


@pytest.mark.parametrize("factor", [1e37, 1e-37])
def test_the_greatest_and_the_least_numbers_have_a_direction(factor):
    table = rows(50)
    actual = compared(table * np.float32(factor), dense=True)(range(50))["scores"]
    assert np.allclose(actual, compared(table, dense=True)(range(50))["scores"], atol=1e-6)


def test_rows_with_equal_scores_come_by_number():
    tiles = [
        (0, torch.tensor([[0.5, 0.75, 0.25, 0.75]])),
        (4, torch.tensor([[0.75, 1.0, 0.125]])),
        (7, torch.tensor([[1.0]])),
    ]
    best = similarity.nearest(iter(tiles), 6)
    assert best["neighbours"].tolist() == [[5, 7, 1, 3, 4, 0]]
    assert best["scores"].tolist() == [[1.0, 1.0, 0.75, 0.75, 0.75, 0.5]]
    best = similarity.nearest(iter([(0, torch.tensor([[0.5, 1.0] * 30]))]), 60)
    assert best["neighbours"].tolist() == [[*range(1, 60, 2), *range(0, 60, 2)]]


def test_pairs_at_the_threshold_count_and_come_row_by_row():
    tiles = [
        (0, torch.tensor([[0.5, 0.25], [0.0, 0.75], [0.0, 0.0]])),
        (2, torch.tensor([[1.0], [0.5], [0.375]])),
    ]
    pairs = similarity.above(iter(tiles), 0.5, 3)
    assert {name: values.tolist() for name, values in pairs.items()} == {
        "counts": [2, 2, 0],
        "neighbours": [0, 2, 1, 2],
        "scores": [0.5, 1.0, 0.75, 0.5],
    }
    pairs = similarity.above(iter([(0, torch.ones(2, 30)), (30, torch.ones(2, 30))]), 1.0, 2)
    assert pairs["neighbours"].tolist() == [*range(60), *range(60)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"memory": 0.009}, "--memory: found 0.009, expected 0.01 or more"),
        ({"memory": float("nan")}, "--memory: found nan, expected"),
        ({"threshold": -1.5}, "--threshold: found -1.5, expected -1 to 1"),
        ({"threshold": 1.5}, "--threshold: found 1.5, expected -1 to 1"),
        ({"threshold": float("nan")}, "--threshold: found nan"),
        ({"top_k": 1, "threshold": 0.0}, "--top_k, --threshold: found both"),
    ],
)
def test_a_wrong_setting_is_refused(settings, says):
    with pytest.raises(UserError, match=says):
        Similarity(**settings)


def test_what_is_asked_for_unless_something_else_is():
    default = Similarity()
    assert (default.top_k, default.memory, default.precision) == (10, 1.0, "float32")
    assert Similarity(top_k=1).top_k == 1
    for others in ({"threshold": -1.0}, {"threshold": 1.0}, {"threshold": 0.0}, {"dense": True}):
        assert Similarity(**others, memory=0.01).top_k is None


def test_the_settings_that_decide_the_result(tmp_path, monkeypatch):
    """Blocks that were computed with another memory are good."""
    np.save(tmp_path / "rows.npy", rows(20))
    asked = []
    monkeypatch.setattr("sagemaker_lightning.rows.job.run", lambda *given: asked.append(given[3:]))

    def settings(*flags: str) -> dict:
        similarity.main([f"--input={tmp_path}/rows.npy", *flags])
        deciding, make = asked.pop()
        in_use = vars(make(torch.device("cpu")).settings)
        del in_use["memory"]
        assert in_use.items() <= deciding.items()
        return deciding

    plain = settings()
    assert plain == settings("--memory=2") == settings("--top_k=10") == settings("--block_rows=3")
    assert plain["numbers"] == ["neighbours"] and settings("--dense=true")["numbers"] == []
    changed = [
        "--top_k=9",
        "--threshold=0.5",
        "--dense=true",
        "--precision=float16",
        "--itself=true",
    ]
    for flag in changed:
        assert settings(flag) != plain


@pytest.mark.slow
def test_all_pairs_above_a_threshold(tmp_path):
    table = rows()
    job = Job(tmp_path, table)
    job.run(3, "--threshold=0.4", "--block_rows=50")
    pairs = merged(job, 3)
    expected = scores(table)
    assert np.array_equal(pairs["counts"], (expected >= 0.4).sum(axis=1))
    assert pairs["counts"].sum() > 100
    row = np.repeat(np.arange(len(table)), pairs["counts"])
    assert np.allclose(expected[row, pairs["neighbours"]], pairs["scores"], atol=1e-6)
    assert all(
        np.all(np.diff(row_neighbours) > 0)
        for row_neighbours in np.split(pairs["neighbours"], np.cumsum(pairs["counts"])[:-1])
    )


@pytest.mark.slow
def test_all_scores_are_written(tmp_path):
    table = rows(150)
    job = Job(tmp_path, table)
    job.run(2, "--dense=true", "--block_rows=40")
    expected = scores(table)
    np.fill_diagonal(expected, 1)
    assert np.allclose(merged(job, 2)["scores"], expected, atol=1e-6)


@pytest.mark.parametrize(("precision", "error"), [("bfloat16", 0.02), ("float16", 0.003)])
def test_a_lower_precision(precision, error):
    table = rows(200)
    expected = scores(table)
    np.fill_diagonal(expected, 1)
    actual = compared(table, dense=True, precision=precision)(range(200))["scores"]
    assert actual.dtype == np.float32 and 1e-5 < np.abs(actual - expected).max() < error


@pytest.mark.slow
@pytest.mark.parametrize("seed", nightly.all_but([0], range(3)))
def test_killed_at_random_and_resumed_with_another_number_of_hosts(tmp_path, seed):
    table = rows(3000, 16)
    draw = random.Random(seed)
    job = Job(tmp_path, table)
    flags = ["--top_k=4", "--block_rows=40"]
    for hosts in (3, 1, 7, 2):
        process = job.start(hosts, draw.randrange(hosts), *flags)
        deadline = time.monotonic() + 120
        blocks_before = len(list(tmp_path.rglob("*.npz")))
        while (
            len(list(tmp_path.rglob("*.npz"))) < blocks_before + draw.randint(1, 6)
            and process.poll() is None
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        number = draw.choice([signal.SIGKILL, signal.SIGTERM])
        process.send_signal(number)
        output = process.communicate(timeout=60)[0]
        assert process.returncode in (0, -signal.SIGKILL, 143), output
        if process.returncode == 143:
            assert "interrupted, resume from step" in output and "rows are left" in output
    damaged = draw.choice(sorted(tmp_path.rglob("*.npz")))
    damaged.write_bytes(damaged.read_bytes()[:-100] + bytes(100))
    hosts = draw.choice([1, 2, 3])
    output = job.run(hosts, *flags)
    assert "are done already" in output and "is damaged" in output
    assert nearest(merged(job, hosts), scores(table), 4)


@pytest.mark.slow
def test_other_settings_find_no_blocks(tmp_path):
    job = Job(tmp_path, rows())
    job.run(1, "--top_k=5")
    assert "done already" not in job.run(1, "--top_k=6")
    np.save(tmp_path / "channel/rows.npy", rows(seed=1))
    assert "done already" not in job.run(1, "--top_k=6")


def sharded(folder: Path, tables: list[dict[str, np.ndarray]], *flags: str) -> list[Job]:
    """Run a job whose hosts have files of their own."""
    jobs = []
    for host, files in enumerate(tables):
        jobs.append(Job(folder / str(host)))
        for name, table in files.items():
            np.save(jobs[-1].folder / "channel" / name, table)
        config = json.dumps({"my-input-data": {"S3DistributionType": "ShardedByS3Key"}})
        process = jobs[-1].start(len(tables), host, *flags, SM_INPUT_DATA_CONFIG=config)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0 and "of its own files" in output, output
    return jobs


@pytest.mark.slow
def test_hosts_with_files_of_their_own_compare_these(tmp_path):
    tables = [{"a.npy": rows(50), "c.npy": rows(30, seed=1)}, {"b.npy": rows(80, seed=2)}]
    jobs = sharded(tmp_path, tables, "--top_k=3")
    models = [job.model(host) for host, job in enumerate(jobs)]
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as tar:  # one, as SageMaker makes it
        for model in models:
            tar.add(model, arcname=".")
    completed = merge(tmp_path / "model.tar.gz", output=tmp_path / "merged")
    assert completed.returncode == 0, completed.stderr
    about = json.loads((tmp_path / "merged/manifest.json").read_text())
    assert about["files"] == {"a.npy": [0, 50], "c.npy": [50, 80], "b.npy": [80, 160]}
    arrays = {path.stem: np.load(path) for path in (tmp_path / "merged").glob("*.npy")}
    expected = np.full((160, 160), -np.inf)
    expected[:80, :80] = scores(np.concatenate(list(tables[0].values())))
    expected[80:, 80:] = scores(tables[1]["b.npy"])
    assert nearest(arrays, expected, 3)
    completed = merge(models[0], output=tmp_path / "half")
    assert completed.returncode == 1 and "the part of algo-2 is missing" in completed.stderr


MISTAKES = {
    "a row of zeros": (
        {"r.npy": np.vstack([rows(5), np.zeros((1, 24), np.float32)])},
        ["--top_k=1"],
        "row 5 is all 0",
    ),
    "not a number": (
        {"r.npy": np.vstack([rows(5), np.full((1, 24), np.nan, np.float32)])},
        ["--top_k=1"],
        "r.npy, row 5 has",
    ),
    "of another kind": (
        {"r.npy": np.zeros((4, 4), np.int32)},
        [],
        "r.npy is int32 [4, 4]; expected [rows, columns]",
    ),
    "objects": (
        {"r.npy": np.array([[{}]], dtype=object)},
        [],
        "r.npy cannot be read: Array can't be memory-mapped: Python objects",
    ),
    "a vector": ({"r.npy": np.zeros(4, np.float32)}, [], "r.npy is float32 [4]"),
    "other widths": (
        {"a.npy": rows(5), "b.npy": rows(5, 3)},
        [],
        "b.npy has 3 columns, a.npy has 24",
    ),
    "nothing": ({}, [], "holds no .npy or .parquet file"),
    "too few rows": (
        {"r.npy": rows(5)},
        ["--rows=6"],
        "--rows: found 6, but channel channel has 5",
    ),
    "no neighbours": ({"r.npy": rows(5)}, ["--top_k=0"], "--top_k: found 0, expected 1 or more"),
    "no flag": (
        {"r.npy": rows(5)},
        ["--topk=1"],
        "--topk: is not a flag here; did you mean --top_k?",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(tmp_path, case):
    files, flags, message = MISTAKES[case]
    job = Job(tmp_path)
    for name, table in files.items():
        np.save(tmp_path / "channel" / name, table, allow_pickle=True)
    assert message in job.failed(*flags)


@pytest.mark.slow
def test_a_users_own_function(tmp_path):
    table = rows(100)
    job = Job(tmp_path, table)
    (function,) = re.findall(r"^```python\n([^`]*def norms[^`]*)^```$", PAGE, re.MULTILINE)
    (tmp_path / "mine.py").write_text(function)
    flags = ["--function=mine.norms", "--block_rows=7", '--settings={"power": 4}']
    job.run(3, *flags, program=ROOT / "app/split.py")
    assert np.allclose(merged(job, 3)["result"], (table**4).sum(axis=1) ** 0.25, rtol=1e-5)
    (tmp_path / "mine.py").write_text("def norms(block, power=2):\n    return block.sum()\n")
    assert "the function returned result: float32 [] for" in job.failed(
        "--function=mine.norms", program=ROOT / "app/split.py"
    )
    assert "--function: found 'mine.other'" in job.failed(
        "--function=mine.other", program=ROOT / "app/split.py"
    )
