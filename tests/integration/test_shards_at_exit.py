"""Processes that end while S3 does not answer: at once, and without a word."""

import os
import subprocess
import sys
import threading

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


@pytest.mark.parametrize("process", ["main", "worker"])
def test_shards_that_stall_do_not_hold_the_exit(tmp_path, monkeypatch, process):
    tar_shards.write(tmp_path / tar_shards.BUCKET / "train")
    over = threading.Event()

    def stalls(key, number):
        if key.endswith(".tar"):
            (tmp_path / "asked").touch()
            over.wait()

    with tar_shards.on_s3(tmp_path, monkeypatch, fault=stalls):
        command = [sys.executable, "-c", PROGRAM, process]
        ended = subprocess.run(
            command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=90
        )
        over.set()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the last line\n", "")
