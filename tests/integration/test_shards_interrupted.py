"""Trainings on shards, interrupted at random: the same samples at each step, and the same bits."""

import random
import re
import shutil
from pathlib import Path

import pytest
import ranks
import shards_training
import tar_shards
from containers import ROOT

from tests.foreign_loaders.__main__ import Trial

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "tests/support/shards_training.py"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tar_shards.write(tmp_path / tar_shards.BUCKET / "train")
    monkeypatch.setenv("SHARDS", str(path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return path


def check(name, workers, stays, changes, seed, folder):
    trial = Trial(SCRIPT, name, workers, stays, folder)
    assert not trial.alone()
    ended = trial.round("round", changes, random.Random(seed))
    assert ended["outcome"] == "identical", ended


@pytest.mark.parametrize(
    ("name", "workers", "stays", "changes"),
    [
        pytest.param("shuffled", 0, False, False, marks=pytest.mark.thorough),
        pytest.param("shuffled", 2, True, False, marks=pytest.mark.thorough),
        ("three streams", 2, False, True),
        pytest.param("in order", 2, False, True, marks=pytest.mark.thorough),
    ],
)
def test_a_folder(folder, tmp_path, name, workers, stays, changes):
    check(name, workers, stays, changes, 1, tmp_path / "jobs")


@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.soak)])
def test_s3_by_a_cache_that_is_smaller(folder, tmp_path, monkeypatch, workers):
    monkeypatch.setenv("SHARDS", f"s3://{tar_shards.BUCKET}/train")
    with tar_shards.on_s3(tmp_path, monkeypatch, latency=0.005) as server:
        check("shuffled", workers, False, False, 2, tmp_path / "jobs")
        assert server.requests["get"] > 40


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_random_rounds(folder, tmp_path, seed):
    draws = random.Random(seed)
    name = draws.choice(list(shards_training.LOADERS))
    workers = draws.choice([0, 1, 2])
    check(name, workers, draws.random() < 0.5, draws.random() < 0.5, seed, tmp_path / "jobs")


def trained(folder: Path, *arguments, nodes=(2,)):
    return ranks.run(
        shards_training.ranks_trained,
        str(folder / "checkpoints"),
        *arguments,
        nodes=nodes,
        folder=folder,
    )


def seen(folder: Path) -> dict[int, list[int]]:
    """Return the numbers that all ranks were trained on, by step; the last attempt's."""
    steps: dict[int, dict[str, list[int]]] = {}
    for path in folder.glob("node-*/seen-*"):
        for line in path.read_text().splitlines():
            step, *numbers = map(int, line.split())
            steps.setdefault(step, {})[path.name] = numbers
    return {step: sorted(sum(numbers.values(), [])) for step, numbers in sorted(steps.items())}


def test_two_ranks_have_the_same_bits(folder, tmp_path):
    whole = trained(tmp_path / "whole")
    assert not any(each.error for each in whole), whole[0].output
    with pytest.raises(EOFError):
        trained(tmp_path / "resumed", "0:2:SIGKILL")
    ended = trained(tmp_path / "resumed", "1:1:SIGTERM")
    assert {each.error for each in ended} == {"Interrupted: 143"}, ended[0].output
    ended = trained(tmp_path / "resumed")
    assert [each.value for each in ended] == [each.value for each in whole], ended[0].output
    assert seen(tmp_path / "resumed") == seen(tmp_path / "whole")
    epoch = sum(list(seen(tmp_path / "whole").values())[:5], [])
    assert sorted(epoch) == list(range(40))


def test_another_number_of_ranks_continues_with_the_samples_that_are_left(folder, tmp_path):
    ended = trained(tmp_path / "run", "0:1:SIGTERM", 2)
    assert {each.error for each in ended} == {"Interrupted: 143"}, ended[0].output
    first = seen(tmp_path / "run")
    for path in (tmp_path / "run").glob("node-*/seen-*"):
        path.unlink()
    (ended,) = trained(tmp_path / "run", "", 2, nodes=(1,))
    assert not ended.error, ended.output
    rest = list(seen(tmp_path / "run").values())
    epoch = [*sum(first.values(), []), *sum(rest[: 10 - 2 * len(first)], [])]
    assert sorted(epoch) == list(range(40)), ended.output


def test_another_order_by_another_number_of_ranks_is_refused(folder, tmp_path):
    ended = trained(tmp_path / "run", "0:1:SIGTERM")
    assert {each.error for each in ended} == {"Interrupted: 143"}, ended[0].output
    (ended,) = trained(tmp_path / "run", nodes=(1,))
    assert re.search(r"UserError: ShardBatches: found streams=1, expected streams=2", ended.error)


def test_a_channel_that_changed_is_refused(folder, tmp_path):
    ended = trained(tmp_path / "run", "0:1:SIGTERM")
    assert {each.error for each in ended} == {"Interrupted: 143"}, ended[0].output
    shutil.copy(folder / "shard-2.tar", folder / "shard-3.tar")
    tar_shards.command.index(folder)
    for each in trained(tmp_path / "run"):
        assert f"UserError: {folder}: found other shards than the interrupted" in each.error
