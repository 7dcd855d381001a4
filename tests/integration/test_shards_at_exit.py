"""How processes end that read shards: at once, and a mistake in one line."""

import os
import subprocess
import sys
import threading

import nightly
import pytest
import tar_shards

pytestmark = pytest.mark.slow

PROGRAM = """
import multiprocessing, os, pathlib, sys, time
import sagemaker_lightning as sl

data = sl.ShardedDataset("s3://data/train", cache_dir="cache")

def ask():
    data.prefetch([0, 1])
    while not pathlib.Path("asked").exists():
        time.sleep(0.05)

if sys.argv[1] == "worker":
    worker = multiprocessing.get_context("fork").Process(target=ask)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
else:
    ask()
print("the last line")
"""

LOOP = """
import sys
import sagemaker_lightning as sl
from torch.utils.data import DataLoader

data = sl.ShardedDataset(sys.argv[1])
for batch in DataLoader(data, batch_size=None, num_workers=int(sys.argv[2])):
    pass
"""


def run(program, *arguments, folder):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=90
    )


@pytest.mark.parametrize("workers", nightly.all_but([1], [0, 1]))
def test_a_damaged_shard_is_one_line_in_a_loop_without_a_trainer(tmp_path, workers):
    folder = tar_shards.write(tmp_path / "shards")
    path = folder / "shard-2.tar"
    content = bytearray(path.read_bytes())
    content[512] ^= 1
    path.write_bytes(content)
    ended = run(LOOP, folder, workers, folder=tmp_path)
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {path}: found other bytes at") and ended.returncode == 1


@pytest.mark.parametrize("process", nightly.all_but(["worker"], ["main", "worker"]))
def test_shards_that_stall_do_not_hold_the_exit(tmp_path, monkeypatch, process):
    tar_shards.write(tmp_path / tar_shards.BUCKET / "train")
    over = threading.Event()

    def stalls(key, number):
        if key.endswith(".tar"):
            (tmp_path / "asked").touch()
            over.wait()

    with tar_shards.on_s3(tmp_path, monkeypatch, fault=stalls):
        ended = run(PROGRAM, process, folder=tmp_path)
        over.set()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the last line\n", "")
